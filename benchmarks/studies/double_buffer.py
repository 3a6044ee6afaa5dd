"""What cp.async double buffering is worth in the kernels of cuda/: a build with it beside one without it.

    python -m benchmarks.studies.double_buffer --out benchmarks/results/h200/cp_async.json

Without it every copy of a tile ends before the arithmetic beside it begins (FLASH_ATTN_DOUBLE_BUFFER=0 in
cuda/src/step.h); shared memory, registers and results are the same. Both builds are compared with fp64 first. Then they
take turns, `--rounds` times, a process of dist_flash_attn each; a time is the median of the rounds, each a median of
its calls. nvcc compiles both before that; `--compile FOLDER` does nothing else and needs no GPU, and `--build FOLDER`
measures what it made.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stream_attention_tools.bench.results import conditions, save

ROOT = Path(__file__).resolve().parents[2]
BUILDS = {"on": 1, "off": 0}
ROWS = {
    "bf16 d128 8k": "--dtype bf16 --dim 128 --seq 8192",
    "bf16 d128 8k causal": "--dtype bf16 --dim 128 --seq 8192 --causal",
    "bf16 d64 8k": "--dtype bf16 --dim 64 --seq 8192",
    "bf16 d32 8k": "--dtype bf16 --dim 32 --seq 8192",
    "fp32 d128 4k": "--dtype fp32 --dim 128 --seq 4096",
    "fp32 d64 4k": "--dtype fp32 --dim 64 --seq 4096",
    "fp32 d64 4k causal": "--dtype fp32 --dim 64 --seq 4096 --causal",
    "fp32 d32 4k": "--dtype fp32 --dim 32 --seq 4096",
}
CHECKED = ("--dtype bf16 --dim 128", "--dtype bf16 --dim 64 --causal", "--dtype fp32 --dim 64")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.studies.double_buffer",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="where the results go")
    parser.add_argument("--compile", type=Path, metavar="FOLDER", help="compile both builds there, and end")
    parser.add_argument("--build", type=Path, metavar="FOLDER", help="measure these builds; default: compile them")
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    options = parser.parse_args(argv)
    if options.compile is not None:
        return build(options.compile)
    if options.out is None:
        parser.error("say where the results go: --out FILE")
    folder = options.build or Path("out/double-buffer")
    if options.build is None and build(folder):
        return 1
    result = conditions("cuda") | measure(folder, options.rounds)
    print(table(result))
    save(result, options.out)
    return 0


def program(folder: Path, name: str) -> Path:
    return folder / name / "dist_flash_attn"


def build(folder: Path) -> int:
    """Compile both for sm_90, side by side; returns the exit code."""
    nvcc = shutil.which("nvcc", path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/cuda/bin"]))
    if nvcc is None:
        print("nvcc: expected on the PATH or in /usr/local/cuda/bin; got none. Say --build FOLDER", file=sys.stderr)
        return 1
    sources = sorted(str(path) for path in (ROOT / "cuda" / "src").iterdir() if path.suffix in (".cu", ".cpp"))
    running = []
    for name, value in BUILDS.items():
        program(folder, name).parent.mkdir(parents=True, exist_ok=True)
        words = [nvcc, "-std=c++17", "-O3", "-arch=sm_90", "-Xcompiler=-pthread", f"-I{ROOT / 'cuda' / 'include'}"]
        words += [f"-DFLASH_ATTN_DOUBLE_BUFFER={value}", *sources, "-o", str(program(folder, name))]
        running.append(subprocess.Popen(words))
    return max(abs(one.wait()) for one in running)


def run(folder: Path, name: str, flags: str) -> dict[str, Any]:
    """What one process of a build prints."""
    words = [str(program(folder, name)), *flags.split(), *"--gpus 1 --transport copy --json".split()]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}: {done.stderr}")
    return json.loads(done.stdout)


def measure(folder: Path, rounds: int, rows: dict[str, str] = ROWS, heads: int = 16) -> dict[str, Any]:
    """Both builds beside fp64, and then in turn."""
    errors = {
        name: {flags: run(folder, name, f"{flags} --seq 512 --check --iters 1") for flags in CHECKED} for name in BUILDS
    }
    found: dict[str, dict[str, list[float]]] = {row: {name: [] for name in BUILDS} for row in rows}
    said: dict[str, dict[str, Any]] = {}
    for number in range(rounds):
        for row, flags in rows.items():
            for name in (*BUILDS,)[:: -1 if number % 2 else 1]:
                said[row] = run(folder, name, f"{flags} --heads {heads}")
                found[row][name].append(said[row]["single_ms"])
    return {
        "how": f"{rounds} rounds in turn, a process each, medians of {said[row]['iters']} calls by CUDA events; "
        f"batch 1, {heads} heads",
        "largest_error": {
            name: {flags: {"error": one["check"]["single_error"], "limit": one["limit"]} for flags, one in its.items()}
            for name, its in errors.items()
        },
        "rows": [_row(row, found[row], said[row]) for row in rows],
    }


def _row(name: str, ms: dict[str, list[float]], said: dict[str, Any]) -> dict[str, Any]:
    median = {build: statistics.median(its) for build, its in ms.items()}
    flop = said["single_tflops"] * said["single_ms"]  # of the last run: TFLOP/s times ms
    return {
        "name": name,
        **{key: said[key] for key in ("dtype", "dim", "seq", "heads", "causal")},
        "ms": ms,
        "median_ms": median,
        "tflops": {build: flop / its for build, its in median.items()},
        "off_over_on": median["off"] / median["on"],
    }


def table(result: dict[str, Any]) -> str:
    """As cuda/README.md has it."""
    lines = ["| | with, ms | TFLOP/s | without, ms | TFLOP/s | time without / with |", "|---|---|---|---|---|---|"]
    for row in result["rows"]:
        ms, tflops = row["median_ms"], row["tflops"]
        figures = [f"{ms['on']:.2f}", f"{tflops['on']:.0f}", f"{ms['off']:.2f}", f"{tflops['off']:.0f}"]
        lines.append(f"| {row['name']} | {' | '.join(figures)} | {row['off_over_on']:.2f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
