"""Run `make demo` and `make test` as strangers have them, and write down what happened.

    python3 tools/fresh.py [public local newest oldest] [--keep]

Each case is a clean clone of HEAD in a temporary folder, with an empty HOME and no variable of this shell. What stands
in /etc/pip.conf still holds.

  public   Debian's own /usr/bin/python3 and the package index alone
  local    the same, with a CPU wheel of torch that PIP_FIND_LINKS offers (--wheels, default: this shell's own)
  newest   TORCH=2.15.0, the newest release, with the Triton it brings
  oldest   TORCH=2.11.0, the oldest one supported

The figures go into benchmarks/results/cpu/fresh.json, a row a case; a row that was not run stays as it was.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import runpy
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
write_file = runpy.run_path(str(ROOT / "src" / "stream_attention_tools" / "files.py"))["write_file"]  # without torch
RESULTS = ROOT / "benchmarks" / "results" / "cpu" / "fresh.json"
SYSTEM_PYTHON = "/usr/bin/python3"
CASES = {"public": {}, "local": {}, "newest": {"TORCH": "2.15.0"}, "oldest": {"TORCH": "2.11.0"}}
"""Case -> what stands on the command line of make."""

VERSIONS = """
import json, platform
from importlib.metadata import version
def its(name):
    try: return version(name)
    except Exception: return None
names = ("torch", "triton", "numpy", "transformers", "pip")
print(json.dumps({"python": platform.python_version(), **{name: its(name) for name in names}}))
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"some of {' '.join(CASES)}; default: all")
    parser.add_argument("--python", default=SYSTEM_PYTHON, help="default: %(default)s")
    parser.add_argument("--wheels", default=os.environ.get("PIP_FIND_LINKS", ""), metavar="DIR", help="for local")
    parser.add_argument("--keep", action="store_true", help="leave the clones where they are, and say where")
    options = parser.parse_args()
    if unknown := set(options.cases) - set(CASES):
        parser.error(f"no such case: {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    if changed := _git("status", "--porcelain", "--", ".", f":!{RESULTS.relative_to(ROOT)}"):
        print(f"A clone has what is committed. Commit these first:\n{changed}", file=sys.stderr)
        return 2
    cases = options.cases or list(CASES)
    if "local" in cases and not options.wheels:
        print("local: say where a CPU wheel of torch is: --wheels DIR, or PIP_FIND_LINKS", file=sys.stderr)
        return 2
    failed = False
    for case in cases:
        row = run(case, options)
        failed |= any(step["exit"] for step in row["steps"])
        found = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
        found[case] = row
        write_file(RESULTS, json.dumps(dict(sorted(found.items())), indent=1) + "\n")
    print(f"written to {RESULTS.relative_to(ROOT)}")
    return int(failed)


def run(case: str, options: argparse.Namespace) -> dict[str, Any]:
    """One case: its steps with their seconds, and what was installed."""
    folder = Path(tempfile.mkdtemp(prefix=f"fresh-{case}-"))
    clone, home = folder / "clone", folder / "home"
    home.mkdir()
    env = {"HOME": str(home), "PATH": "/usr/bin:/bin"}
    if case == "local":
        env["PIP_FIND_LINKS"] = options.wheels
    subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
    words = [f"PYTHON={options.python}", *(f"{name}={value}" for name, value in CASES[case].items())]
    steps = []
    for target in ("demo", "test"):
        command = ["make", target, *words]
        print(f"\n{case}: {' '.join(command)}", flush=True)
        began = time.monotonic()
        log = folder / f"{target}.log"
        with log.open("w", encoding="utf-8") as file:
            done = subprocess.run(command, cwd=clone, env=env, stdout=file, stderr=subprocess.STDOUT)
        text = log.read_text(encoding="utf-8", errors="replace")
        step = {"command": " ".join(command), "exit": done.returncode, "seconds": round(time.monotonic() - began)}
        step |= {"environment_seconds": ready(text)} if ready(text) else {}
        step |= {"tests": closing_lines(text)} if target == "test" else {}
        steps.append(step)
        print(f"{case}: make {target} ended with {done.returncode} after {step['seconds']} s", flush=True)
        if done.returncode:
            print("\n".join(text.splitlines()[-40:]))
            break
    python = clone / ".venv" / "bin" / "python"
    versions = ""
    if python.exists():
        versions = subprocess.run([str(python), "-c", VERSIONS], capture_output=True, text=True).stdout
    row = {
        "commit": _git("rev-parse", "HEAD"),
        "date": time.strftime("%Y-%m-%d"),
        "machine": {"os": platform.platform(), "cores": os.cpu_count()},
        "versions": json.loads(versions or "{}"),
        "steps": steps,
    }
    if options.keep or any(step["exit"] for step in steps):
        print(f"{case}: left in {folder}")
    else:
        subprocess.run(["rm", "-rf", str(folder)], check=True)
    return row


def ready(log: str) -> int:
    """Seconds that building the environment took."""
    return sum(map(int, re.findall(r"is ready for \w+, after (\d+) s", log)))


def closing_lines(log: str) -> dict[str, str]:
    """The closing line of each pass of the tests."""
    return dict(re.findall(r"^(parallel|interpreted|serial): (.*)$", log, re.MULTILINE))


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
