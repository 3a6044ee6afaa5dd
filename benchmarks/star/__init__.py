"""Star attention by phase, on virtual ranks: `python -m benchmarks.star`."""
