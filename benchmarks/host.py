"""Host time of a call: how long the CPU is busy until a call is queued, beside peers taken in turn.

    python -m benchmarks.host --fa3 DIR --out benchmarks/results/h200/host.json

Each repeat starts with an idle device, queues calls in a row without waiting for the device, and divides by their
number. Calls are so short, and so few in a row, that the device's queue never fills. Medians and quartiles over the
repeats; a ratio is the median over repeats of peer time by ours, so above 1.00 ours is faster.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from stream_attention import ContiguousKV, PagedKV, attention, decode_attention, varlen_attention
from stream_attention_tools.bench.providers.flash_attention import FlashAttention3, _FlashAttention3
from stream_attention_tools.bench.results import conditions, save

Call = Callable[[], Any]
SIZES = {"1x128x8x64": (1, 128, 8, 64), "4x512x16x128": (4, 512, 16, 128)}


class Row(NamedTuple):
    """One call, the peer's of the same meaning, and the most that ours may take as a multiple of it."""

    name: str
    ours: Call
    peer: str
    theirs: Call
    bar: float


def rows(size: str, fa3: Any) -> Iterator[Row]:
    batch, length, heads, dim = SIZES[size]

    def tensor(*shape: int, grad: bool = False) -> Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16, requires_grad=grad)

    shape = batch, length, heads, dim
    q, k, v = (tensor(*shape) for _ in range(3))
    grad_out = tensor(*shape)
    qg, kg, vg = (tensor(*shape, grad=True) for _ in range(3))

    def with_backward(forward: Callable[[], Tensor], *leaves: Tensor, gradient: Tensor = grad_out) -> Call:
        def call() -> None:
            torch.autograd.grad(forward(), leaves, gradient)

        return call

    def ours() -> Tensor:
        return attention(qg, kg, vg, causal=True)

    def sdpa(mask: Tensor | None = None, query: Tensor = q, key: Tensor = k, value: Tensor = v) -> Tensor:
        heads_first = (t.transpose(1, 2) for t in (query, key, value))
        return F.scaled_dot_product_attention(*heads_first, attn_mask=mask, is_causal=mask is None)

    if fa3 is not None:
        fa3_op, fa3_function = fa3.fwd.default, _FlashAttention3.apply

        def theirs() -> Tensor:
            return fa3_function(qg, kg, vg, True, {}, fa3)

        def plain() -> Tensor:
            return fa3_function(q, k, v, True, {}, fa3)

        yield Row("forward", lambda: attention(q, k, v, causal=True), "fa3", plain, 0.46)
        op = "fa3's op"
        yield Row("forward", lambda: attention(q, k, v, causal=True), op, lambda: fa3_op(q, k, v, is_causal=True), 1.0)
        yield Row("forward with gradients", ours, "fa3", theirs, 1.0)
        yield Row("forward + backward", with_backward(ours, qg, kg, vg), "fa3", with_backward(theirs, qg, kg, vg), 1.0)
        yield from _packed(batch, length, heads, dim, fa3, tensor, with_backward)
        yield from _decoding(batch, heads, dim, fa3, tensor)
    mask = torch.rand(batch, 1, length, length, device="cuda") < 0.9
    bias = tensor(1, heads, length, length)
    yield Row("boolean mask", lambda: attention(q, k, v, mask=mask), "sdpa", lambda: sdpa(mask), 1.0)
    yield Row("bias", lambda: attention(q, k, v, bias=bias), "sdpa", lambda: sdpa(bias), 1.0)
    yield Row(
        "forward + backward beside SDPA",
        with_backward(ours, qg, kg, vg),
        "sdpa",
        with_backward(lambda: sdpa(None, qg, kg, vg).transpose(1, 2), qg, kg, vg),
        1.0,
    )
    yield Row(
        'precision="fp8"',
        lambda: attention(q, k, v, precision="fp8"),
        "our bf16 call",
        lambda: attention(q, k, v),
        2.0,
    )
    compiled, compiled_sdpa = torch.compile(ours, fullgraph=True), torch.compile(sdpa, fullgraph=True)
    yield Row(
        "compiled, forward + backward",
        with_backward(compiled, qg, kg, vg),
        "compiled sdpa",
        with_backward(lambda: compiled_sdpa(None, qg, kg, vg).transpose(1, 2), qg, kg, vg),
        1.0,
    )
    lengths = ((m, n) for n in range(length, length // 2, -1) for m in range(n, n // 2, -1))

    def new_length() -> Tensor:
        m, n = next(lengths)
        return attention(q[:, :m], k[:, :n], v[:, :n], causal=True)

    def seen_length() -> Tensor:
        return attention(q[:, :9], k[:, :99], v[:, :99], causal=True)

    yield Row("forward, a length never seen", new_length, "a length seen", seen_length, 0.0)


def _packed(
    batch: int, length: int, heads: int, dim: int, fa3: Any, tensor: Callable[..., Tensor], with_backward: Any
) -> Iterator[Row]:
    """Packs of other lengths, and of another longest one, in every call."""
    generator = torch.Generator().manual_seed(0)
    packs = []
    for n in range(800):
        most = length - n % (length // 2)
        sizes = torch.randint(1, most, (2 * batch,), generator=generator)
        sizes[0] = most
        ends = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)]).int()
        packs.append((ends.cuda(), int(ends[-1]), most))
    room = [tensor(2 * batch * length, heads, dim) for _ in range(4)]
    count = {"ours": 0, "theirs": 0}

    def taken(who: str) -> tuple[Any, ...]:
        count[who] = (count[who] + 1) % len(packs)
        return packs[count[who]]

    def our(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, most: int) -> Tensor:
        ends = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": most, "max_seqlen_k": most}
        return varlen_attention(q, k, v, **ends, causal=True)

    def their(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, most: int) -> Tensor:
        ends = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": most, "max_seqlen_k": most}
        return _FlashAttention3.apply(q, k, v, True, ends, fa3)

    def forward(who: str, function: Callable[..., Tensor]) -> Call:
        def call() -> Tensor:
            cu, total, most = taken(who)
            return function(*(t[:total] for t in room[:3]), cu, most)

        return call

    def both(who: str, function: Callable[..., Tensor]) -> Call:
        def call() -> None:
            cu, total, most = taken(who)
            leaves = [t[:total].requires_grad_() for t in room[:3]]
            torch.autograd.grad(function(*leaves, cu, most), leaves, room[3][:total])

        return call

    yield Row("packed forward, new lengths", forward("ours", our), "fa3", forward("theirs", their), 1.0)
    yield Row("packed forward + backward, new lengths", both("ours", our), "fa3", both("theirs", their), 1.0)


def _decoding(batch: int, heads: int, dim: int, fa3: Any, tensor: Callable[..., Tensor]) -> Iterator[Row]:
    keys, page = 4096, 64
    query = tensor(batch, 1, heads, dim)
    cache_k, cache_v = tensor(batch, keys, heads, dim), tensor(batch, keys, heads, dim)
    lengths = torch.full((batch,), keys, dtype=torch.int32, device="cuda")
    rows = ContiguousKV(cache_k, cache_v, lengths)
    yield Row(
        "decode",
        lambda: decode_attention(query, rows),
        "fa3",
        lambda: fa3.fwd.default(query, cache_k, cache_v, seqused_k=lengths, is_causal=True),
        0.71,
    )
    pages_k, pages_v = (t.view(batch * keys // page, page, heads, dim) for t in (cache_k, cache_v))
    table = torch.arange(batch * keys // page, dtype=torch.int32, device="cuda").view(batch, -1)
    paged = PagedKV(pages_k, pages_v, table, lengths)
    yield Row(
        "paged decode",
        lambda: decode_attention(query, paged),
        "fa3",
        lambda: fa3.fwd.default(query, pages_k, pages_v, page_table=table, seqused_k=lengths, is_causal=True),
        0.46,
    )


def host_time(call: Call, calls: int) -> float:
    """Microseconds until a call is queued."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(calls):
        call()
    taken = time.perf_counter() - began
    torch.cuda.synchronize()
    return taken / calls * 1e6


def measure(row: Row, repeats: int, calls: int) -> dict[str, Any]:
    for call in (row.ours, row.theirs):
        for _ in range(3):
            call()
    ours, theirs = [], []
    for n in range(repeats):
        both = [(ours, row.ours), (theirs, row.theirs)]
        for times, call in both if n % 2 else reversed(both):
            times.append(host_time(call, calls))
    ratios = [their / our for our, their in zip(ours, theirs, strict=True)]
    return {
        "call": row.name,
        "ours_us": _quartiles(ours),
        "peer": row.peer,
        "peer_us": _quartiles(theirs),
        "ratio": round(statistics.median(ratios), 3),
        "at_most": row.bar,
    }


def _quartiles(values: list[float]) -> list[float]:
    """First quartile, median and third."""
    return [round(value, 1) for value in statistics.quantiles(values, n=4)]


def markdown(results: dict[str, Any]) -> str:
    """The figures as a table: microseconds, medians with quartiles."""
    lines = ["| size | call | ours | peer | peer's | speed, ours / peer |", "|---|---|---|---|---|---|"]
    for row in results["rows"]:
        ours, theirs = (
            f"{median:.0f} ({low:.0f}-{high:.0f})" for low, median, high in (row["ours_us"], row["peer_us"])
        )
        speed = row["peer_us"][1] / row["ours_us"][1]
        lines.append(f"| {row['size']} | {row['call']} | {ours} | {row['peer']} | {theirs} | {speed:.2f} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host", description=__doc__.split("\n")[0])
    parser.add_argument("--fa3", type=Path, help="a folder with fa3.so.xz and libcudart.so.12")
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file")
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--calls", type=int, default=30, help="calls in a row")
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument(
        "--markdown", type=Path, metavar="FILE", help="print the table of a results file; measure nothing"
    )
    arguments = parser.parse_args()
    if arguments.markdown is not None:
        print(markdown(json.loads(arguments.markdown.read_text())))
        return 0
    if not torch.cuda.is_available():
        print("this measures calls on a GPU, and there is none", file=sys.stderr)
        return 2
    fa3 = None
    if arguments.fa3 is not None:
        peer = FlashAttention3(arguments.fa3)
        peer._load()
        fa3 = peer._ops
    found = []
    for size in SIZES:
        for row in rows(size, fa3):
            if arguments.only in row.name:
                found.append({"size": size, **measure(row, arguments.repeats, arguments.calls)})
                one = found[-1]
                print(
                    f"{size:14} {one['call']:40} {one['ours_us'][1]:8.1f} us   {one['peer']:14} "
                    f"{one['peer_us'][1]:8.1f} us   ratio {one['ratio']:.2f}",
                    flush=True,
                )
    if arguments.out is not None:
        save({"conditions": conditions("cuda"), "repeats": arguments.repeats, "rows": found}, arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
