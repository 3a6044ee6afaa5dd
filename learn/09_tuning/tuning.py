"""Why one tile is faster than another: what the compiler makes of each, beside what was measured on an H200."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

from stream_attention.backends import BY_NAME
from stream_attention.backends.triton.tuning import TritonConfig
from stream_attention_tools.testing.inputs import Case, make, stated
from stream_attention_tools.testing.offline import Report, compiling_for, report

sys.path.insert(0, str(Path(__file__).parents[1]))
import checking
import measured

DIM = 128
TILES = {
    "64 x 64, 4 warps, 3 stages": "two programs per SM, but K and V are read twice as often as with 128 rows",
    "128 x 64, 4 warps, 2 stages": "some registers spill, but two programs fit, and one computes while the other waits",
    "128 x 64, 4 warps, 3 stages": "one stage more, and only one program fits: nothing computes while it waits",
    "128 x 64, 8 warps, 3 stages": "also one program, but its 8 warps are two groups that cover for each other",
    "128 x 128, 4 warps, 2 stages": "128 x 128 scores and 128 x 128 sums in 128 threads: they do not fit, and spill",
    "128 x 128, 8 warps, 3 stages": "fewest loads per product, just enough registers",
}


def config_of(name: str) -> TritonConfig:
    """From words such as "128 x 64, 4 warps, 3 stages"."""
    block_m, block_n, num_warps, num_stages = (int(word) for word in name.replace(",", " ").split() if word.isdigit())
    return TritonConfig(block_m, block_n, num_warps, num_stages)


def compiled(config: TritonConfig) -> Report:
    """What the compiler says of the production forward with this tile, for Hopper; no GPU is needed."""
    case = Case(B=1, Tq=128, Tk=4096, Hq=1, Hkv=1, D=DIM, Dv=DIM, dtype=torch.bfloat16)
    query, key, value, options = make(case)
    problem, inputs = stated(case, {"query": query, "key": key, "value": value}, options)
    problem = problem.replace(device=torch.device("cuda"), arch=90, num_sms=132)
    with compiling_for(90) as kernels:
        BY_NAME["triton"].forward(problem, inputs, config)
    return report(kernels[0])


def shared_bytes(config: TritonConfig) -> int:
    """By arithmetic: Q stays, K and V have a tile in every stage, two bytes a number."""
    return 2 * DIM * (config.block_m + config.num_stages * 2 * config.block_n)


def sweep(length: int) -> dict[tuple[Any, ...], float]:
    """TFLOP/s by tile, warps and stages, as the sweep on the H200 found them."""
    rows = measured.results("sweeps/2-wide-stores")["rows"]
    return {
        tuple(row["config"][:4]): row["tflops"]
        for row in rows
        if (row["head_dim"], row["length"], row["causal"]) == (DIM, length, False)
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=4096, choices=(512, 1024, 2048, 4096, 8192))
    flags = parser.parse_args(argv)
    # The exercise of this step: do not look into solution.py first.
    programs_per_processor = checking.load(Path(__file__).with_name("solution.py"), "programs_per_processor")
    speeds = sweep(flags.length)
    print(f"The Triton forward, head dim {DIM}, bf16, {flags.length} tokens. Compiled here for an H200, timed there.\n")
    print(f"{'tile, warps, stages':30}{'registers':>10}{'spilled':>9}{'shared':>9}{'programs':>10}{'TFLOP/s':>9}")
    for name in TILES:
        config = config_of(name)
        made = compiled(config)
        programs = programs_per_processor(made.registers, made.warps, made.shared_bytes)
        print(
            f"{name:30}{made.registers:10}{made.spill_bytes:9}{made.shared_bytes / 1024:5.0f} KiB{programs:8}"
            f"{speeds[tuple(config[:4])]:11.0f}"
        )
    best = max(speeds, key=lambda tile: speeds[tile])
    print(f"\nAll {len(speeds)} that were tried: {min(speeds.values()):.0f} to {speeds[best]:.0f} TFLOP/s, ", end="")
    print(f"the best {best[0]} x {best[1]}, {best[2]} warps, {best[3]} stages.")
    for name, reason in TILES.items():
        print(f"- {name}: {reason}")


if __name__ == "__main__":
    main()
