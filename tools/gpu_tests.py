"""Run the GPU tests side by side on one GPU, and keep a results file for each of their files.

    python3 tools/gpu_tests.py [--out DIR] [--only WORD]... [--skip WORD]... [--jobs N] [--workers N] [--limit SECONDS]
                               [-- PYTEST ARGUMENTS]

Most of their time goes to compiling kernels on the CPU. So `--jobs` processes run at once, each on one file of tests,
and compile in `--workers` more; a GPU is shared by all. What is not done after `--limit` seconds is interrupted, and
its results tell how far it came. `RANDOM_PROBLEMS=300` in the environment draws fewer random problems. Only the Python
standard library is needed here: pytest, torch and triton are those of the Python that runs this.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

LONGEST = (
    "hopper/test_backward",
    "launch_cache",
    "triton/test_decode",
    "triton/test_backward",
    "fp8",
    "triton",
    "hopper",
)
"""Words of the files that start first, so that no process is left with them at the end."""

PARTS = {
    "tests/ops/test_launch_cache_gpu.py": (
        "packed or packs or rows_off or tf32",
        "(of_a_cache or decode or public or capture) and not (packed or packs or rows_off or tf32)",
    ),
}
"""Files that several processes share: each takes the tests of an expression, one more takes the rest."""


@dataclass
class Job:
    """The GPU tests of one file, or a part of them, and the process that runs them."""

    name: str
    path: str
    expression: str = ""
    process: subprocess.Popen[bytes] | None = None
    began: float = 0.0
    seconds: float = 0.0


def jobs(only: list[str]) -> list[Job]:
    """One for every file with GPU tests, and one for every part of a file in `PARTS`."""
    found = []
    for file in sorted(ROOT.glob("tests/**/test_*.py")):
        if "mark.gpu" not in file.read_text():
            continue
        path = file.relative_to(ROOT).as_posix()
        name = re.sub(r"\W+", "-", path.removeprefix("tests/").removesuffix(".py"))
        parts = PARTS.get(path, ())
        rest = " and ".join(f"not ({part})" for part in parts)
        found += (
            [Job(f"{name}-{n}", path, part) for n, part in enumerate((*parts, rest))] if parts else [Job(name, path)]
        )
    wanted = [job for job in found if not only or any(word in job.path or word in job.name for word in only)]

    def rank(job: Job) -> int:
        return next((n for n, word in enumerate(LONGEST) if word in job.path), len(LONGEST))

    return sorted(wanted, key=rank)


def start(job: Job, out: Path, workers: int, also: list[str]) -> None:
    folder = out / job.name
    folder.mkdir(parents=True)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-m",
        "gpu",
        "-q",
        "-rfE",
        "--tb=short",
        "--durations=5",
        "-p",
        "no:cacheprovider",
    ]
    command += [*(["-k", job.expression] if job.expression else []), job.path, *also]
    environment = {**os.environ, "GPU_RESULTS": str(folder), "WORKERS": str(workers)}
    environment.setdefault("OMP_NUM_THREADS", "2")
    environment.setdefault("PYTHONPATH", str(ROOT / "src"))
    with (folder / "log").open("wb") as log:
        # A session of its own: an interrupt and a kill reach the processes that it started too.
        job.process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    job.began = time.monotonic()


def stop(job: Job, how: signal.Signals) -> None:
    assert job.process
    with suppress(ProcessLookupError):
        os.killpg(job.process.pid, how)


def run(waiting: list[Job], out: Path, at_once: int, workers: int, limit: float, also: list[str]) -> list[Job]:
    """Run the jobs; returns when every started one has ended, or was stopped. The list has those not started too."""
    everything, running = list(waiting), []
    end = time.monotonic() + limit
    interrupted = False
    while waiting or running:
        now = time.monotonic()
        while waiting and len(running) < at_once and now < end:
            start(waiting[0], out, workers, also)
            running.append(waiting.pop(0))
        if now >= end:
            waiting.clear()
            for job in running:
                if not interrupted:
                    stop(job, signal.SIGINT)
                elif now >= end + 20:  # a kernel that hangs hears no interrupt
                    stop(job, signal.SIGKILL)
            interrupted = True
        for job in [job for job in running if job.process and job.process.poll() is not None]:
            job.seconds = time.monotonic() - job.began
            stop(job, signal.SIGKILL)  # what it may have left behind
            running.remove(job)
            print(f"{job.seconds:5.0f} s  {job.name:44} {said(job, out)}", flush=True)
        time.sleep(0.2)
    return everything


def said(job: Job, out: Path) -> str:
    """pytest's last line, or that there is none."""
    lines = (out / job.name / "log").read_text(errors="replace").splitlines()
    found = [
        line
        for line in lines
        if re.search(r"\b(passed|failed|error|errors|skipped|deselected|no tests ran)\b.* in [\d.]+s", line)
    ]
    return found[-1].strip("= ") if found else f"no summary; its last line: {lines[-1] if lines else 'none'}"


def gather(everything: list[Job], out: Path) -> None:
    """One results file for each file of tests: the parts of a file are added up."""
    gathered: dict[str, dict[str, object]] = {}
    for job in everything:
        for file in sorted((out / job.name).glob("gpu_tests_*.json")):
            its = json.loads(file.read_text())
            into = gathered.setdefault(file.name, {})
            for key, value in its.items():
                before = into.get(key)
                into[key] = before + value if isinstance(before, (int, list)) and type(before) is type(value) else value
    for name, its in gathered.items():
        (out / name).write_text(json.dumps(its, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, default=ROOT / "out" / "gpu-tests", metavar="DIR", help="default: %(default)s"
    )
    parser.add_argument("--only", action="append", default=[], metavar="WORD", help="files with this word; repeatable")
    parser.add_argument(
        "--skip", action="append", default=[], metavar="WORD", help="no file with this word; repeatable"
    )
    parser.add_argument(
        "--jobs", type=int, default=max(1, (os.cpu_count() or 1) * 3 // 4), metavar="N", help="files at once"
    )
    parser.add_argument("--workers", type=int, default=4, metavar="N", help="processes in which each compiles")
    parser.add_argument("--limit", type=float, default=24 * 3600, metavar="SECONDS", help="default: a day")
    parser.add_argument("--list", action="store_true", help="print the files, and end")
    parser.add_argument("pytest", nargs="*", metavar="ARGUMENT", help="after --: arguments of every pytest")
    options = parser.parse_args()
    chosen = [job for job in jobs(options.only) if not any(word in job.path for word in options.skip)]
    if not chosen:
        parser.error(f"no file with GPU tests is left by --only {options.only} --skip {options.skip}")
    if options.list:
        print(*(f"{job.path}  -k '{job.expression}'" if job.expression else job.path for job in chosen), sep="\n")
        return 0
    out = options.out.resolve()
    for job in chosen:  # what an earlier run found is not gathered with this one's
        shutil.rmtree(out / job.name, ignore_errors=True)
    everything: list[Job] = []
    try:
        everything = run(list(chosen), out, options.jobs, options.workers, options.limit, options.pytest)
    except KeyboardInterrupt:
        for job in chosen:
            if job.process is not None:
                stop(job, signal.SIGKILL)  # each is in a session of its own, and hears no interrupt
        raise
    gather(everything, out)
    failed = False
    for job in everything:
        code = job.process.returncode if job.process else None
        if code in (0, 5):  # 5: no test of that file was asked for
            continue
        failed = True
        if code is None:
            print(f"\n{job.name}: not begun within {options.limit:.0f} s")
            continue
        lines = (out / job.name / "log").read_text(errors="replace").splitlines()
        print(f"\n{job.name}: {said(job, out)}")
        print(*[line[:200] for line in lines if line.startswith(("FAILED", "ERROR"))][:12], sep="\n")
    print(f"\n{'some failed' if failed else 'none failed'}; logs and results are in {out}")
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
