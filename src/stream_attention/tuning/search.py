"""Sweep launch configurations of the Triton forward on this GPU and propose rows for the table.

    python -m stream_attention.tuning.search --head-dims 64 128 --lengths 512 2048 8192 --out sweep.json

Every configuration is compiled first, in parallel and without the GPU, into Triton's cache; then each is checked
against SDPA (with a modifier: against each other) and timed beside it in one run, batch * length = 16384, hidden size
2048. A proposed row carries GPU, date, versions and its gain; nothing is tuned at run time.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib.metadata import version
from itertools import product
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..problem import Inputs, Problem, state_problem
from .triton import TritonConfig

TOKENS, HIDDEN = 16384, 2048


MODIFIERS = ("", "window", "mask", "key mask", "bias", "alibi", "softcap", "sink", "dropout")


class Cell(NamedTuple):
    """One problem of the sweep, plain or with one modifier."""

    head_dim: int
    length: int
    causal: bool
    dtype: torch.dtype = torch.bfloat16
    modifier: str = ""

    @property
    def variant(self) -> tuple[Any, ...]:
        """What a compiled kernel depends on."""
        return self.head_dim, self.causal, self.dtype, self.modifier

    def inputs(self, device: str, batch: int | None = None) -> Inputs:
        heads = HIDDEN // self.head_dim
        batch, length, extra = batch or TOKENS // self.length, self.length, {}
        if self.modifier == "mask":
            extra["mask"] = torch.rand(1, 1, length, length, device=device) > 0.1
        elif self.modifier == "key mask":
            extra["mask"] = torch.rand(batch, 1, 1, length, device=device) > 0.1
        elif self.modifier == "bias":
            extra["bias"] = torch.randn(1, 1, length, length, device=device, dtype=self.dtype)
        elif self.modifier == "alibi":
            extra["alibi_slopes"] = torch.rand(1, heads, device=device)
        elif self.modifier == "sink":
            extra["sink"] = torch.randn(heads, device=device)
        elif self.modifier == "dropout":
            extra["seed"] = torch.tensor([1, 2], device=device)
        shape = (batch, length, heads, self.head_dim)
        return Inputs(*(torch.randn(shape, device=device, dtype=self.dtype) for _ in range(3)), **extra)

    def problem(self, inputs: Inputs) -> Problem:
        return state_problem(
            inputs,
            q_len=0,
            k_len=0,
            causal=self.causal,
            window=(self.length // 4, -1) if self.modifier == "window" else (-1, -1),
            softcap=20.0 if self.modifier == "softcap" else 0.0,
            scale=self.head_dim**-0.5,
            dropout_p=0.1 if self.modifier == "dropout" else 0.0,
            deterministic=False,
        )

    @property
    def flops(self) -> float:
        return 4 * TOKENS * self.length * HIDDEN * (0.5 if self.causal else 1.0)

    def described(self) -> dict[str, Any]:
        return {**self._asdict(), "dtype": str(self.dtype)}


def candidates(head_dim: int, dtype: torch.dtype = torch.bfloat16) -> list[TritonConfig]:
    """Configurations worth trying: what exceeds shared memory or makes no sense is left out."""
    found = []
    narrow = dtype.itemsize == 2
    blocks_m, blocks_n = ((64, 128), (32, 64, 128)) if narrow else ((16, 32, 64, 128), (16, 32, 64))
    for block_m, block_n, warps, stages in product(blocks_m, blocks_n, (4, 8), (2, 3, 4) if narrow else (1, 2)):
        shared = head_dim * dtype.itemsize * (block_m + 2 * stages * block_n)
        rows_per_warp = block_m // warps
        few_rows = 16 if narrow else 4
        if shared <= 227 * 1024 and few_rows <= rows_per_warp <= 32 and block_m * block_n * head_dim <= 128 * 128 * 128:
            found.append(TritonConfig(block_m, block_n, warps, stages))
    return found


def _compile_one(job: tuple[Cell, TritonConfig, int]) -> str:
    """Compile in a worker process, filling Triton's cache. Returns what went wrong, if anything."""
    from ..kernels.triton.forward import launch_forward
    from ..testing.offline import compiling_for

    cell, config, arch = job
    inputs = cell._replace(length=1024).inputs("cpu", batch=2)
    out = torch.zeros_like(inputs.query)
    lse = torch.zeros(2, out.shape[2], 1024)
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


def sdpa(inputs: Inputs, causal: bool) -> torch.Tensor:
    """The peer: SDPA's flash kernel, or its memory-efficient one for fp32."""
    query, key, value = (t.transpose(1, 2) for t in inputs[:3])
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION], set_priority=True):
        return F.scaled_dot_product_attention(query, key, value, is_causal=causal)


def sweep(cells: list[Cell], repeats: int, configs: dict[int, list[TritonConfig]]) -> list[dict[str, Any]]:
    """Time every configuration of every cell beside SDPA's flash kernel."""
    from ..kernels.triton.forward import launch_forward

    major, minor = torch.cuda.get_device_capability()
    jobs = [(cell, config, major * 10 + minor) for cell in cells for config in configs[cell.head_dim]]
    unique = {(*cell.variant, config): (cell, config, arch) for cell, config, arch in jobs}
    started = time.time()
    with ProcessPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        errors = dict(zip(unique, pool.map(_compile_one, unique.values()), strict=True))
    print(f"compiled {len(unique)} variants in {time.time() - started:.0f} s", flush=True)

    rows = []
    for cell in cells:
        inputs = cell.inputs("cuda")
        problem = cell.problem(inputs)
        peer = time_ms(partial(sdpa, inputs, cell.causal), repeats)
        out = torch.empty_like(inputs.query)
        lse = torch.empty(problem.batch, problem.q_heads, problem.q_len, device="cuda")
        expected = None if cell.modifier else sdpa(inputs, cell.causal).transpose(1, 2)
        for config in configs[cell.head_dim]:
            key = (*cell.variant, config)
            row = {**cell.described(), "config": list(config), "error": errors[key]}
            rows.append(row)
            if row["error"]:
                continue
            try:
                out.fill_(float("nan"))
                launch_forward(problem, inputs, config, out, lse)
                expected = out.clone() if expected is None else expected
                distance = (out - expected).abs().max().item()
                if not distance < 0.05:
                    row["error"] = f"wrong by {distance}"
                    continue
                ms = time_ms(partial(launch_forward, problem, inputs, config, out, lse), repeats)
                row.update(ms=ms, tflops=cell.flops / ms / 1e9, sdpa_tflops=cell.flops / peer / 1e9)
            except Exception as failure:
                row["error"] = f"{type(failure).__name__}: {str(failure)[:120]}"
    return rows


def propose(rows: list[dict[str, Any]], where: str) -> list[str]:
    """The three best configurations per variant, by the geometric mean of speed over the lengths, as table rows."""
    lines = []
    variants = sorted({(row["head_dim"], row["causal"], row["modifier"]) for row in rows})
    for head_dim, causal, modifier in variants:
        ratios: dict[tuple[int, ...], dict[int, float]] = {}
        for row in rows:
            if (row["head_dim"], row["causal"], row["modifier"]) == (head_dim, causal, modifier) and "ms" in row:
                ratios.setdefault(tuple(row["config"]), {})[row["length"]] = row["tflops"] / row["sdpa_tflops"]
        lengths = sorted({length for found in ratios.values() for length in found})
        complete = {config: found for config, found in ratios.items() if len(found) == len(lengths)}
        for config, found in sorted(complete.items(), key=lambda item: -_geometric_mean(list(item[1].values())))[:3]:
            shown = " ".join(f"{found[length]:.2f}" for length in lengths)
            lines.append(
                f"D={head_dim} {'causal' if causal else 'full'} {modifier or 'plain'}: TritonConfig{config[:4]}  "
                f"# x{_geometric_mean(list(found.values())):.2f} of plain SDPA ({shown} at {lengths}); {where}"
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
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--causal", choices=["both", "yes", "no"], default="both")
    parser.add_argument("--modifiers", nargs="+", choices=MODIFIERS, default=[""])
    parser.add_argument("--out", default="sweep.json")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("tuning needs a CUDA device; there is none here", file=sys.stderr)
        return 1
    dtype = getattr(torch, options.dtype)
    cells = [
        Cell(head_dim, length, causal, dtype, modifier)
        for head_dim in options.head_dims
        for modifier in options.modifiers
        for causal in {"both": (False, True), "yes": (True,), "no": (False,)}[options.causal]
        for length in options.lengths
    ]
    rows = sweep(cells, options.repeats, {dim: candidates(dim, dtype) for dim in options.head_dims})
    conditions = {
        "gpu": torch.cuda.get_device_name(),
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": version("triton"),
    }
    with open(options.out, "w") as file:
        json.dump({**conditions, "rows": rows}, file)
    failed = [row for row in rows if row["error"]]
    for row in failed[:10]:
        print("failed", row)
    print("\n".join(propose(rows, "{gpu}, {date}, torch {torch}, Triton {triton}".format_map(conditions))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
