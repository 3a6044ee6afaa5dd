"""`python -m tests.external --folder DIR --out FILE`: run the suites of `suites.py` and write what came of them.

With `--page` it also writes the tables of README.md anew.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from tests.external.helpers import for_device
from tests.external.suites import SUITES, Suite

from stream_attention_tools.files import write_file

ROOT = Path(__file__).resolve().parents[2]
PAGE = Path(__file__).with_name("README.md")
MARKS = "<!-- results -->", "<!-- /results -->"


def run(name: str, folder: Path, pytest_arguments: list[str] | None = None) -> dict[str, Any]:
    """Run one suite in a process of its own and return what `plugin.py` counted."""
    suite = SUITES[name]
    with tempfile.TemporaryDirectory() as temporary:
        test = _copy(suite, folder, Path(temporary) / f"of_{name}")
        report, settings = Path(temporary) / "report.json", Path(temporary) / "pytest.ini"
        settings.write_text("[pytest]\nmarkers = all_deselected\n")
        command = [sys.executable, "-m", "pytest", "-p", "tests.external.plugin", "-p", "no:cacheprovider"]
        command += ["-c", str(settings), "--suite", name, "--folder", str(folder), "--report", str(report)]
        command += ["-q", "--tb=short", str(test), *(pytest_arguments or [])]
        path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
        started = time.monotonic()
        subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"})
        found: dict[str, Any] = json.loads(report.read_text())
    said = {"repository": suite.repository, "commit": suite.commit, "file": suite.file}
    changed = [reason for _, _, reason in suite.changed]
    return said | {"changed": changed} | found | {"seconds": round(time.monotonic() - started)}


def _copy(suite: Suite, folder: Path, to: Path) -> Path:
    """A suite's files, for this machine's device, and without what is not supported here."""
    to.mkdir(parents=True)
    for file in (*suite.also, suite.file):
        text = (folder / suite.folder / file).read_text()
        if not torch.cuda.is_available() and suite.cuda_is_cpu:
            text = for_device(text, "cpu")
        if file == suite.file:
            for pattern, replacement, _ in suite.changed:
                text, count = re.subn(pattern, replacement, text)
                if not count:
                    raise SystemExit(f"{file}: nothing matches {pattern!r}: it is not that of commit {suite.commit}.")
        (to / Path(file).name).write_text(text)
    return to / Path(suite.file).name


def tables(results: dict[str, Any]) -> str:
    """What passes, by suite and by feature, and the reason for everything that was not run."""
    lines = ["| tests | commit | there are | run | passed | failed | skipped | pairs of values that meet |"]
    lines += ["|---|---|---|---|---|---|---|---|"]
    suites = results["suites"]
    for of in suites.values():
        skipped, (met, pairs) = sum(of["skipped"].values()), of["pairs of values"]
        counts = of["parametrisations"], of["passed"] + of["failed"] + skipped, of["passed"], of["failed"], skipped
        cells = [f"{of['repository']}: `{of['file']}`", f"`{of['commit'][:10]}`", *(f"{count:,}" for count in counts)]
        lines.append("| " + " | ".join([*cells, f"{met:,} of {pairs:,}" if pairs else "chosen evenly"]) + " |")
    lines += ["", "| tests of | what was used, and how many passed with it |", "|---|---|"]
    for name, of in suites.items():
        used = of["features"] or of["tests"]
        counts = (f"{feature} {count['passed']}" for feature, count in used.items() if count.get("passed"))
        lines.append(f"| `{name}` | {', '.join(counts)} |")
    lines += ["", "| tests of | not run | how many | reason |", "|---|---|---|---|"]
    for name, of in suites.items():
        lines += [f"| `{name}` | deselected | {count:,} | {reason} |" for reason, count in of["deselected"].items()]
        lines += [f"| `{name}` | taken out of each test | | {reason} |" for reason in of["changed"]]
        lines += [f"| `{name}` | skipped by itself | {count} | {reason} |" for reason, count in of["skipped"].items()]
        lines.append(f"| `{name}` | not in the sample | {of['not sampled']:,} | the sample has others |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.external", description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="where the tests of README.md are")
    parser.add_argument("--out", type=Path, help="the file of results; without it they are printed")
    parser.add_argument("--suite", choices=list(SUITES), action="append", help="only this one; may be repeated")
    parser.add_argument("--jobs", type=int, default=1, help="suites at the same time")
    parser.add_argument("--page", action="store_true", help="write the tables of README.md")
    parser.add_argument("pytest", nargs="*", help="behind --: arguments of pytest")
    given = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    results: dict[str, Any] = {
        "command": "python -m tests.external",
        "commit": commit,
        "date": date.today().isoformat(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "versions": {"python": platform.python_version()} | {name: version(name) for name in ("torch", "pytest")},
    }
    names = given.suite or list(SUITES)
    with ThreadPoolExecutor(given.jobs) as jobs:
        runs = jobs.map(lambda name: run(name, given.folder.resolve(), given.pytest), names)
        results["suites"] = dict(zip(names, runs, strict=True))
    text = json.dumps(results, indent=1) + "\n"
    if given.out is None:
        print(text)
    else:
        write_file(given.out, text)
    if given.page:
        before, rest = PAGE.read_text().split(MARKS[0])
        write_file(PAGE, f"{before}{MARKS[0]}\n{tables(results)}\n{rest[rest.index(MARKS[1]) :]}")
    raise SystemExit(any(of["failed"] for of in results["suites"].values()))


if __name__ == "__main__":
    main()
