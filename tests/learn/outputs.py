"""What the texts of the learning path show, for their tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def shown(text: str, command: str) -> str:
    """The output that a page shows below a command."""
    _, found, rest = text.partition(f"```bash\n{command}\n```\n")
    assert found, f"the page has no block with {command}"
    return rest.partition("```text\n")[2].partition("```\n")[0]


def results(name: str) -> dict[str, Any]:
    """A results file of the H200."""
    return json.loads((ROOT / "benchmarks" / "results" / "h200" / f"{name}.json").read_text())
