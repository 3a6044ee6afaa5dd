"""Packs of mixed lengths beside FlashAttention-3, causal, in bf16: the kernels alone, and as called.

    python -m benchmarks.packs --fa3 DIR --out benchmarks/results/h200/packs.json

Five packs, three shapes of heads, forward and backward. Each call is first checked against SDPA in fp32, on two heads
of the longest sequence, the first and the last. `kernels` are replays of a CUDA graph, L2 cleared before each;
`called` is from Python, on an idle device. Who is measured takes turns with the other, `--rounds` times; times are
medians, and a ratio is the median over rounds of their time by ours: above 1.00 ours is faster.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from stream_attention import varlen_attention
from stream_attention_tools.bench.providers.flash_attention import FlashAttention3, _FlashAttention3
from stream_attention_tools.bench.results import conditions, save

Call = Callable[[], Any]


def lognormal(total: int) -> list[int]:
    """Lengths with a median of 400, and a tail: every sixth is three times as long, the longest thousands."""
    draw, lengths = random.Random(total), []
    while sum(lengths) < total:
        lengths.append(min(max(16, round(draw.lognormvariate(6.0, 1.1))), total - sum(lengths)))
    return lengths


PACKS = {
    "16 x 1k": [1024] * 16,
    "lognormal 16k": lognormal(16384),
    "one 12k, 128 x 32": [12288] + [32] * 128,
    "256 x 64": [64] * 256,
    "lognormal 32k": lognormal(32768),
}
SHAPES = {"16/16 d128": (16, 16, 128), "32/32 d64": (32, 32, 64), "32/8 d128": (32, 8, 128)}
"""Heads of queries and of keys, and their dim."""


class Pack(NamedTuple):
    """Tensors of a call."""

    query: Tensor
    key: Tensor
    value: Tensor
    grad: Tensor
    ends: Tensor
    lengths: list[int]

    @classmethod
    def random(cls, lengths: list[int], heads: int, kv_heads: int, dim: int) -> Pack:
        def rows(count: int) -> Tensor:
            return torch.randn(sum(lengths), count, dim, device="cuda", dtype=torch.bfloat16)

        ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device="cuda")
        return cls(rows(heads), rows(kv_heads), rows(kv_heads), rows(heads), ends, lengths)

    def packing(self) -> dict[str, Any]:
        longest = max(self.lengths)
        return {
            "cu_seqlens_q": self.ends,
            "cu_seqlens_k": self.ends,
            "max_seqlen_q": longest,
            "max_seqlen_k": longest,
        }

    def leaves(self) -> list[Tensor]:
        return [t.detach().requires_grad_() for t in self[:3]]


def calls(pack: Pack, fa3: Any, direction: str) -> tuple[Call, Call]:
    """Ours, and FlashAttention-3's through its autograd function, both on the current stream."""

    def ours(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return varlen_attention(query, key, value, **pack.packing(), causal=True)

    def theirs(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return _FlashAttention3.apply(query, key, value, True, pack.packing(), fa3)

    found = []
    for function in (ours, theirs):
        if direction == "forward":
            found.append(lambda function=function: function(*pack[:3]))
        else:
            leaves = pack.leaves()
            out = function(*leaves)
            found.append(lambda out=out, leaves=leaves: torch.autograd.grad(out, leaves, pack.grad, retain_graph=True))
    return found[0], found[1]


def check(pack: Pack) -> None:
    """Our results against SDPA's in fp32; the error may be twice that of SDPA in bf16, of gradients three times."""
    leaves = pack.leaves()
    out = varlen_attention(*leaves, **pack.packing(), causal=True)
    grads = torch.autograd.grad(out, leaves, pack.grad)
    group = pack.query.shape[1] // pack.key.shape[1]
    longest = max(range(len(pack.lengths)), key=pack.lengths.__getitem__)
    for sequence in {0, longest, len(pack.lengths) - 1}:
        rows = slice(int(pack.ends[sequence]), int(pack.ends[sequence + 1]))
        heads = slice(0, 2 * group)  # of queries; two of keys
        results = []
        for dtype in (torch.float32, torch.bfloat16):
            parts = [t[rows, heads if n == 0 else slice(0, 2)].to(dtype) for n, t in enumerate(pack[:3])]
            parts = [t.transpose(0, 1)[None].detach().requires_grad_() for t in parts]
            repeated = [parts[0], *(t.repeat_interleave(group, 1) for t in parts[1:])]
            exact = F.scaled_dot_product_attention(*repeated, is_causal=True)
            grad = pack.grad[rows, heads].to(dtype).transpose(0, 1)[None]
            results.append([exact, *torch.autograd.grad(exact, parts, grad)])
        own = [out[rows, heads], grads[0][rows, heads], *(grad[rows, :2] for grad in grads[1:])]
        for factor, mine, exact, rounded in zip((2, 3, 3, 3), own, *results, strict=True):
            error = (mine.transpose(0, 1)[None].float() - exact).norm() / exact.norm()
            allowed = factor * (rounded.float() - exact).norm() / exact.norm()
            assert error <= allowed, f"sequence {sequence}: error {error:.2e}, allowed {allowed:.2e}"


def replayed(call: Call) -> Call:
    """The same as the replay of a graph."""
    for _ in range(3):
        call()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        kept = call()
    return lambda: (graph.replay(), kept)


def microseconds(call: Call, flush: Tensor, on_idle_device: bool) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    flush.zero_()
    if on_idle_device:
        torch.cuda.synchronize()
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3


def measure(pack: Pack, fa3: Any, direction: str, rounds: int, flush: Tensor) -> dict[str, Any]:
    both = calls(pack, fa3, direction)
    found: dict[str, Any] = {}
    for kind in ("kernels", "called"):
        measured = [replayed(call) for call in both] if kind == "kernels" else both
        for call in measured:
            for _ in range(3):
                call()
        times: list[list[float]] = [[], []]
        for number in range(rounds):
            for who in (0, 1) if number % 2 else (1, 0):
                times[who].append(microseconds(measured[who], flush, kind == "called"))
        ratios = [theirs / ours for ours, theirs in zip(*times, strict=True)]
        quartiles = [round(ratio, 3) for ratio in statistics.quantiles(ratios, n=4)]
        ours, theirs = (round(statistics.median(them), 1) for them in times)
        found[kind] = {"ours_us": ours, "fa3_us": theirs, "ratio": quartiles[1], "quartiles": quartiles[::2]}
    return found


def markdown(results: dict[str, Any]) -> str:
    """Ratios of the kernels as a table, those of calls in brackets."""
    columns = [f"{direction} {shape}" for direction in ("forward", "backward") for shape in SHAPES]
    lines = [f"| pack | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]
    for pack in PACKS:
        cells = [results["cells"].get(f"{pack}, {column}") for column in columns]
        told = [f"{cell['kernels']['ratio']:.2f} ({cell['called']['ratio']:.2f})" if cell else "" for cell in cells]
        lines.append(f"| {pack} | {' | '.join(told)} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.packs", description=__doc__.split("\n")[0])
    parser.add_argument("--fa3", type=Path, help="a folder with fa3.so.xz and libcudart.so.12")
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--only", default="", help="cells whose name contains this")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="print the table of a results file, and end")
    options = parser.parse_args()
    if options.markdown is not None:
        print(markdown(json.loads(options.markdown.read_text())))
        return 0
    if not torch.cuda.is_available() or options.fa3 is None:
        print("this measures calls on a GPU beside FlashAttention-3: say where that is by --fa3 DIR", file=sys.stderr)
        return 2
    peer = FlashAttention3(options.fa3)
    peer._load()
    flush = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
    found: dict[str, Any] = {}
    results = conditions("cuda") | {"rounds": options.rounds, "packs": PACKS, "cells": found}
    with torch.cuda.stream(torch.cuda.Stream()):
        for pack_name, lengths in PACKS.items():
            for shape_name, shape in SHAPES.items():
                names = {way: f"{pack_name}, {way} {shape_name}" for way in ("forward", "backward")}
                if not any(options.only in name for name in names.values()):
                    continue
                pack = Pack.random(lengths, *shape)
                check(pack)
                for direction, name in names.items():
                    found[name] = measure(pack, peer._ops, direction, options.rounds, flush)
                    told = [f"{kind} {one['ratio']:.2f} ({one['ours_us']:.0f} us)" for kind, one in found[name].items()]
                    print(f"{name:40} {'   '.join(told)}", flush=True)
    if options.out is not None:
        save(results, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
