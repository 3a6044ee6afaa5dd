"""How long the first call of a process takes, with `import torch` and the creation of a CUDA context before it.

    python -m tools.prebuild --only "bf16 d128 causal 1x4096" --out CODE
    python -m benchmarks.first_call --machine-code CODE --out benchmarks/results/h200/first_call.json

Fresh processes, in turn: with machine code as a wheel carries it, an empty kernel cache and no compiler in reach; with
what an earlier process compiled into Triton's cache; and with neither. Seconds include importing Triton and this
library; torch's own first backward, which imports sympy (1-4 s), is made before the clock starts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from stream_attention_tools.bench.results import conditions, save

SHAPE = 1, 4096, 16, 128
WAYS = ("machine code", "warm cache", "empty cache")

PROCESS = """
import json, sys, time
import torch
leaf = torch.zeros(1, device="cuda", requires_grad=True)
torch.autograd.grad(leaf * 2, leaf, torch.ones_like(leaf))
query, key, value = (
    torch.randn({shape}, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3)
)
grad = torch.ones_like(query)
torch.cuda.synchronize()
seconds = []
begun = time.perf_counter()
import triton
seconds.append(time.perf_counter() - begun)
from stream_attention import attention
if len(sys.argv) > 1:
    from pathlib import Path
    from stream_attention.gpu import prebuilt
    prebuilt.FOLDER = Path(sys.argv[1])
out = attention(query, key, value, causal=True)
torch.cuda.synchronize()
seconds.append(time.perf_counter() - begun)
torch.autograd.grad(out, (query, key, value), grad)
torch.cuda.synchronize()
seconds.append(time.perf_counter() - begun)
print(json.dumps(dict(zip(("import triton", "forward", "forward + backward"), seconds))))
"""


def first_call(way: str, machine_code: Path, cache: Path) -> dict[str, float]:
    """Seconds since the clock started, of one fresh process."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache)}
    environment["STREAM_ATTENTION_PREBUILT"] = str(int(way == "machine code"))
    command = [sys.executable, "-c", PROCESS.format(shape=SHAPE)]
    if way == "machine code":
        command.append(str(machine_code))
        environment |= {"PATH": "", "CC": "/nonexistent"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{way}: {done.stderr.strip().splitlines()[-1]}")
    if way == "machine code" and list(cache.rglob("*.cubin")):
        raise SystemExit(f"{way}: something was compiled; is {machine_code} of these sources and this Triton?")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(machine_code: Path, repeats: int) -> dict[str, Any]:
    """Every way's seconds: medians, and each repeat."""
    runs: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        warm = Path(folder, "warm")
        first_call("warm cache", machine_code, warm)  # compiles
        for n in range(repeats):
            for way in WAYS:
                if way == "empty cache" and n:
                    continue  # it takes long, and is no claim
                cache = warm if way == "warm cache" else Path(folder, f"{way} {n}")
                runs[way].append(first_call(way, machine_code, cache))
                print(way, {stage: round(seconds, 2) for stage, seconds in runs[way][-1].items()}, flush=True)
    return {way: {stage: summary([one[stage] for one in its]) for stage in its[0]} for way, its in runs.items()}


def summary(seconds: list[float]) -> dict[str, Any]:
    return {"median": round(statistics.median(seconds), 3), "all": [round(one, 3) for one in seconds]}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.first_call",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--machine-code", type=Path, required=True, metavar="FOLDER", help="what prebuild wrote")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="default: %(default)s")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where the results go")
    options = parser.parse_args()
    if not (options.machine_code / "index.json").is_file():
        parser.error(f"--machine-code: expected a folder written by prebuild; got {options.machine_code}")
    found = conditions("cuda") | {"call": f"bf16 causal {list(SHAPE)}", "repeats": options.repeats}
    found["seconds"] = measure(options.machine_code.resolve(), options.repeats)
    if options.out is not None:
        save(found, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
