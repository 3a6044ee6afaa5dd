"""The pictures of docs/pictures, drawn anew from the results files: `python -m tools.pictures`.

--check writes nothing and fails where a picture is not what would be drawn. --measure first measures the memory of
attention on this machine's CPU, some seconds, and keeps it in benchmarks/results/cpu/memory.json.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stream_attention_tools.files import write_file
from stream_attention_tools.report import figures, readme_report

from . import canvas, memory, roofline, running, tiles

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "pictures"
RESULTS = ROOT / "benchmarks" / "results"
MEMORY = RESULTS / "cpu" / "memory.json"


def results(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def drawn() -> dict[str, str]:
    """Every picture by its file name."""
    h200 = {name: results(f"h200/{name}") for name in ("forward", "backward", "decode")}
    held = results("cpu/memory")
    pictures = {
        "tiles": tiles.draw(),
        "running_max_and_sum": running.draw(),
        "roofline_h200": roofline.draw(h200),
    }
    found = {name: text for stem, svg in pictures.items() for name, text in canvas.files(stem, svg).items()}
    for what in ("forward", "training"):
        found |= figures.files(f"memory_{what}", memory.draw(held, what))
    return found | readme_report.files({"h200/forward": h200["forward"], "h200/backward": h200["backward"]}, "d64 full")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.pictures", description="Draw the pictures of docs/pictures.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a picture is stale")
    parser.add_argument("--measure", action="store_true", help=f"measure the memory first, into {MEMORY.name}")
    arguments = parser.parse_args(argv)
    if arguments.measure:
        memory.write(MEMORY)
    found = drawn()
    there = {path.name: path.read_text() for path in FOLDER.glob("*.svg")}
    stale = sorted(name for name in found.keys() | there.keys() if found.get(name) != there.get(name))
    if arguments.check:
        for name in stale:
            print(f"docs/pictures/{name} is stale: python -m tools.pictures draws it anew", file=sys.stderr)
        return 1 if stale else 0
    for name in stale:
        if name in found:
            write_file(FOLDER / name, found[name])
        else:
            (FOLDER / name).unlink()
        print(f"docs/pictures/{name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
