"""Sweep launch configurations of the Triton forward on this GPU and propose rows for the table.

    python -m stream_attention.tuning.search --head-dims 64 128 --lengths 512 2048 8192 --out sweep.json

Every configuration is compiled first, in parallel and without the GPU, into Triton's cache; then each is checked against
SDPA and timed beside it in one run (bf16, batch * length = 16384, hidden size 2048). A proposed row carries GPU, date,
versions and its gain; nothing is tuned at run time.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..problem import Inputs, Problem, state_problem
from .triton import TritonConfig

TOKENS, HIDDEN = 16384, 2048


class Cell(NamedTuple):
    """One problem of the sweep."""

    head_dim: int
    length: int
    causal: bool
    dtype: torch.dtype = torch.bfloat16

    def inputs(self, device: str) -> Inputs:
        shape = (TOKENS // self.length, self.length, HIDDEN // self.head_dim, self.head_dim)
        return Inputs(*(torch.randn(shape, device=device, dtype=self.dtype) for _ in range(3)))

    def problem(self, inputs: Inputs) -> Problem:
        return state_problem(
            inputs,
            q_len=0,
            k_len=0,
            causal=self.causal,
            window=(-1, -1),
            softcap=0.0,
            scale=self.head_dim**-0.5,
            dropout_p=0.0,
            deterministic=False,
        )

    @property
    def flops(self) -> float:
        return 4 * TOKENS * self.length * HIDDEN * (0.5 if self.causal else 1.0)


def candidates(head_dim: int) -> list[TritonConfig]:
    """Configurations worth trying: what exceeds shared memory or makes no sense is left out."""
    found = []
    for block_m, block_n, warps, stages in product((64, 128), (32, 64, 128), (4, 8), (2, 3, 4)):
        shared = head_dim * 2 * (block_m + 2 * stages * block_n)
        rows_per_warp = block_m // warps
        if shared <= 227 * 1024 and 16 <= rows_per_warp <= 32 and block_m * block_n * head_dim <= 128 * 128 * 128:
            found.append(TritonConfig(block_m, block_n, warps, stages))
    return found


def _compile_one(job: tuple[Cell, TritonConfig, int]) -> str:
    """Compile in a worker process, filling Triton's cache. Returns what went wrong, if anything."""
    from ..kernels.triton.forward import launch_forward
    from ..testing.offline import compiling_for

    cell, config, arch = job
    shape = (1, 1024, 2, cell.head_dim)
    inputs = Inputs(*(torch.zeros(shape, dtype=cell.dtype) for _ in range(3)))
    out, lse = torch.zeros(shape, dtype=cell.dtype), torch.zeros(1, 2, 1024)
    try:
        with compiling_for(arch):
            launch_forward(cell.problem(inputs), inputs, config, out, lse)
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    return ""


def time_ms(function: Any, repeats: int) -> float:
    """Median milliseconds by CUDA events, after a warm-up."""
    for _ in range(3):
        function()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, stop in events:
        start.record()
        function()
        stop.record()
    torch.cuda.synchronize()
    return median(start.elapsed_time(stop) for start, stop in events)


def sweep(cells: list[Cell], repeats: int, configs: dict[int, list[TritonConfig]]) -> list[dict[str, Any]]:
    """Time every configuration of every cell beside SDPA's flash kernel."""
    from ..kernels.triton.forward import launch_forward

    major, minor = torch.cuda.get_device_capability()
    jobs = [(cell, config, major * 10 + minor) for cell in cells for config in configs[cell.head_dim]]
    unique = {(cell.head_dim, cell.causal, cell.dtype, config): (cell, config, arch) for cell, config, arch in jobs}
    started = time.time()
    with ProcessPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        errors = dict(zip(unique, pool.map(_compile_one, unique.values()), strict=True))
    print(f"compiled {len(unique)} variants in {time.time() - started:.0f} s", flush=True)

    rows = []
    for cell in cells:
        inputs = cell.inputs("cuda")
        problem = cell.problem(inputs)
        heads_first = [t.transpose(1, 2) for t in inputs[:3]]

        def sdpa(heads_first: list[torch.Tensor] = heads_first, cell: Cell = cell) -> torch.Tensor:
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                return F.scaled_dot_product_attention(*heads_first, is_causal=cell.causal)

        expected = sdpa().transpose(1, 2)
        peer = time_ms(sdpa, repeats)
        out = torch.empty_like(inputs.query)
        lse = torch.empty(problem.batch, problem.q_heads, problem.q_len, device="cuda")
        for config in configs[cell.head_dim]:
            error = errors[cell.head_dim, cell.causal, cell.dtype, config]
            if not error:
                try:
                    out.fill_(float("nan"))
                    launch_forward(problem, inputs, config, out, lse)
                    distance = (out - expected).abs().max().item()
                    error = "" if distance < 0.05 else f"wrong by {distance}"
                except Exception as failure:
                    error = f"{type(failure).__name__}: {str(failure)[:120]}"
            if error:
                rows.append({**cell._asdict(), "dtype": str(cell.dtype), "config": list(config), "error": error})
                continue
            ms = time_ms(lambda c=config: launch_forward(problem, inputs, c, out, lse), repeats)
            rows.append(
                {
                    **cell._asdict(),
                    "dtype": str(cell.dtype),
                    "config": list(config),
                    "ms": ms,
                    "tflops": cell.flops / ms / 1e9,
                    "sdpa_flash_tflops": cell.flops / peer / 1e9,
                }
            )
    return rows


def propose(rows: list[dict[str, Any]]) -> list[str]:
    """The best configuration per (head dim, causal), by the geometric mean of speed over the lengths, as table rows."""
    where = f"{torch.cuda.get_device_name()}, {time.strftime('%Y-%m-%d')}, torch {torch.__version__}"
    lines = []
    for head_dim, causal in sorted({(row["head_dim"], row["causal"]) for row in rows}):
        speeds: dict[tuple[int, ...], list[float]] = {}
        peers: dict[int, float] = {}
        for row in rows:
            if (row["head_dim"], row["causal"]) == (head_dim, causal) and "tflops" in row:
                speeds.setdefault(tuple(row["config"]), []).append(row["tflops"] / row["sdpa_flash_tflops"])
                peers[row["length"]] = row["sdpa_flash_tflops"]
        complete = {config: ratios for config, ratios in speeds.items() if len(ratios) == len(peers)}
        ranked = sorted(complete.items(), key=lambda item: -_geometric_mean(item[1]))
        for config, ratios in ranked[:3]:
            shown = " ".join(f"{ratio:.2f}" for ratio in ratios)
            lines.append(
                f"D={head_dim} {'causal' if causal else 'full'}: TritonConfig{config}  "
                f"# x{_geometric_mean(ratios):.2f} of SDPA flash ({shown} at {sorted(peers)}); {where}"
            )
    return lines


def _geometric_mean(numbers: list[float]) -> float:
    product_ = 1.0
    for number in numbers:
        product_ *= number
    return product_ ** (1 / len(numbers))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m stream_attention.tuning.search", description=__doc__)
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16")
    parser.add_argument("--out", default="sweep.json")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("tuning needs a CUDA device; there is none here", file=sys.stderr)
        return 1
    dtype = getattr(torch, options.dtype)
    cells = [
        Cell(head_dim, length, causal, dtype)
        for head_dim in options.head_dims
        for causal in (False, True)
        for length in options.lengths
    ]
    rows = sweep(cells, options.repeats, {head_dim: candidates(head_dim) for head_dim in options.head_dims})
    with open(options.out, "w") as file:
        json.dump({"gpu": torch.cuda.get_device_name(), "python": platform.python_version(), "rows": rows}, file)
    failed = [row for row in rows if "error" in row]
    for row in failed[:10]:
        print("failed", row)
    print("\n".join(propose(rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
