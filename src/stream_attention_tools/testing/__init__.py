"""What tests, benchmarks and the accuracy command share: random inputs, the tolerance, poison, memory peaks."""

from .inputs import Case, make
from .memory import peak_bytes, poisoned_memory
from .tolerance import Report, check_case

__all__ = ["Case", "Report", "check_case", "make", "peak_bytes", "poisoned_memory"]
