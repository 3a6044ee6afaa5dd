"""What the compile gates depend on, as one number: the same sources, compiled by the same Triton, give the same code.

`make test` compiles every kernel that a gate looks at. CI does where a source has changed since they were last compiled
and looked at; else the tests of `*_compiled.py` are skipped, and say so. After `make gates`, which runs them all, the
number is written anew.
"""

from __future__ import annotations

import hashlib
import json
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[2]
RECORD = Path(__file__).with_name("gates_passed.json")
PACKAGE = ROOT / "src" / "stream_attention"
SOURCES = (
    *(PACKAGE / name for name in ("backends.py", "device.py", "plan.py", "problem.py", "cache_views", "kernels")),
    *(PACKAGE / name for name in ("testing/inputs.py", "testing/offline.py", "tuning")),
    ROOT / "tests" / "kernels",
    ROOT / "benchmarks" / "results" / "h200",
)


def digest() -> dict[str, str]:
    """Of the sources, of the machine code that is recorded, and which compiler reads them."""
    found = hashlib.sha256()
    for source in SOURCES:
        files = (
            [source] if source.is_file() else sorted(source.rglob("*.py")) + sorted(source.glob("machine_code_*.json"))
        )
        for file in files:
            found.update(str(file.relative_to(ROOT)).encode() + file.read_bytes())
    return {"sources": found.hexdigest(), "triton": version("triton")}


def unchanged() -> bool:
    """Whether the gates were passed by exactly this."""
    return RECORD.exists() and json.loads(RECORD.read_text()) == digest()


def record() -> None:
    RECORD.write_text(json.dumps(digest(), indent=1) + "\n")


if __name__ == "__main__":
    record()
