"""What was measured on an H200, read from the files that the benchmark wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

H200 = Path(__file__).resolve().parents[1] / "benchmarks" / "results" / "h200"


def results(name: str) -> dict[str, Any]:
    """A results file, such as "forward" or "sweeps/2-wide-stores"."""
    found: dict[str, Any] = json.loads((H200 / f"{name}.json").read_text())
    return found


def milliseconds(name: str, cell: str, provider: str) -> float:
    """The median time of a provider in a cell, such as "d128 causal 4096"."""
    cells = {one["name"]: one for one in results(name)["cells"]}
    return float(cells[cell]["providers"][provider]["median_ms"])
