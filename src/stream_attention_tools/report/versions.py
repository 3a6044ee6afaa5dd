"""The table of versions that were tested together, from what the runs of the tests have left."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from ..bench.summary import markdown_table

HEADINGS = ["torch", "Triton", "Python", "transformers", "ran on", "tests passed", "latest"]
GATES = "tests/backends/gates_passed.json"


def markdown(results: Path) -> str:
    """The table for a page: clean clones on a CPU, GPU tests by machine, then the compile gates, which need neither.

    `results` is the folder of results files, two levels below the root of the repository.
    """
    found: dict[tuple[str, ...], tuple[int, str]] = {}
    for run in json.loads((results / "cpu" / "fresh.json").read_text(encoding="utf-8")).values():
        passed = sum(int(count) for count in re.findall(r"(\d+) passed", json.dumps(run["steps"])))
        if not any(step["exit"] for step in run["steps"]):
            found[_key(run, "CPU")] = passed, run["date"]
    for path in sorted(results.rglob("gpu_tests_*.json")):
        run = json.loads(path.read_text(encoding="utf-8"))
        before, date = found.get(key := _key(run, run["gpu"]), (0, ""))
        found[key] = before + run["passed"], max(date, run["date"])
    rows = [[*versions, f"{passed:,}", date] for versions, (passed, date) in sorted(found.items(), reverse=True)]
    gates = json.loads((results.parents[1] / GATES).read_text(encoding="utf-8"))["releases"].values()
    rows += [["", run["triton"], "", "", "no device", "the compile gates", ""] for run in gates]
    return "\n".join(markdown_table([HEADINGS, *rows]))


def _key(run: dict[str, Any], place: str) -> tuple[str, ...]:
    return *(str(run["versions"].get(name, "")) for name in ("torch", "triton", "python", "transformers")), place
