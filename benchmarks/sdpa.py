"""Masks, biases, modifiers and decoding on a CPU beside SDPA: one thread, CPU time, calls taken in turn.

    python -m benchmarks.sdpa --out benchmarks/results/cpu/sdpa.json

SDPA gets the same mask or bias; where it has no such argument (sink, ALiBi, softcap) the peer is its causal call. Every
call of ours is first compared with SDPA, or with the reference, in fp64. A ratio is the median over the repeats of our
time by the peer's, so below 1.00 ours is faster.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from stream_attention import ContiguousKV, attention, decode_attention
from stream_attention.backends.reference import attention as reference
from stream_attention_tools.bench.results import conditions, save

HEADS, DIM = 8, 64
SIZES = (1, 512), (4, 512), (1, 2048)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
CACHES = (1, 8, 8, 2048), (1, 8, 8, 8192), (4, 8, 8, 2048), (1, 32, 8, 2048), (1, 32, 8, 8192)
"""Batch, query heads, KV heads, keys."""


class Row(NamedTuple):
    name: str
    bar: float
    ours: Callable[[], Any]
    theirs: Callable[[], Any]
    exact: Callable[[], Tensor]  # in fp64, of the forward


def heads_first(*tensors: Tensor) -> list[Tensor]:
    return [t.transpose(1, 2) for t in tensors]


def rows() -> Iterator[Row]:
    for dtype in DTYPES:
        for batch, length in SIZES:
            yield from masked(dtype, batch, length)
        yield from modified(dtype, 2048)
        for cache in CACHES:
            yield decoded(dtype, *cache)


def masked(dtype: str, batch: int, length: int) -> Iterator[Row]:
    shape = batch, length, HEADS, DIM
    qkv = [torch.randn(shape).to(DTYPES[dtype]) for _ in range(3)]
    leaves, grad_out = [t.clone().requires_grad_() for t in qkv], torch.randn(shape).to(DTYPES[dtype])
    kinds: dict[str, dict[str, Tensor]] = {
        "boolean mask": {"mask": torch.rand(batch, 1, length, length) < 0.7},
        "key padding": {"mask": (torch.arange(length) < length * 3 // 4).expand(batch, 1, 1, length)},
        "bias": {"bias": torch.randn(1, HEADS, length, length).to(DTYPES[dtype])},
    }
    for kind, given in kinds.items():
        (added,) = given.values()

        def sdpa(*tensors: Tensor, added: Tensor = added) -> Tensor:
            return F.scaled_dot_product_attention(*heads_first(*tensors), attn_mask=added).transpose(1, 2)

        def exact(sdpa: Callable[..., Tensor] = sdpa, added: Tensor = added) -> Tensor:
            return sdpa(*(t.double() for t in qkv), added=added if added.dtype is torch.bool else added.double())

        name = f"{kind}, B={batch} T={length} {dtype}"
        yield Row(f"{name}, forward", 1.15, lambda g=given: attention(*qkv, **g), lambda f=sdpa: f(*qkv), exact)
        yield Row(
            f"{name}, forward + backward",
            1.15,
            lambda g=given: torch.autograd.grad(attention(*leaves, **g), leaves, grad_out),
            lambda f=sdpa: torch.autograd.grad(f(*leaves), leaves, grad_out),
            exact,
        )


def modified(dtype: str, length: int) -> Iterator[Row]:
    qkv = [torch.randn(1, length, HEADS, DIM).to(DTYPES[dtype]) for _ in range(3)]
    kinds: dict[str, tuple[float, dict[str, Any]]] = {
        "sink": (1.6, {"sink": torch.randn(HEADS)}),
        "ALiBi": (1.6, {"alibi_slopes": 2.0 ** -torch.arange(1.0, HEADS + 1)}),
        "softcap": (2.0, {"softcap": 30.0}),
    }
    for kind, (bar, given) in kinds.items():
        yield Row(
            f"{kind} over a causal call, B=1 T={length} {dtype}, forward",
            bar,
            lambda g=given: attention(*qkv, causal=True, **g),
            lambda: F.scaled_dot_product_attention(*heads_first(*qkv), is_causal=True),
            lambda g=given: reference.attention(*(t.double() for t in qkv), causal=True, **g)[0],
        )


def decoded(dtype: str, batch: int, q_heads: int, kv_heads: int, keys: int) -> Row:
    query = torch.randn(batch, 1, q_heads, DIM).to(DTYPES[dtype])
    key, value = torch.randn(2, batch, keys, kv_heads, DIM).to(DTYPES[dtype])
    cache = ContiguousKV(key, value, torch.full((batch,), keys, dtype=torch.int32))

    def sdpa(*tensors: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*heads_first(*tensors), enable_gqa=q_heads != kv_heads).transpose(1, 2)

    return Row(
        f"decode, B={batch} heads {q_heads}/{kv_heads}, {keys} keys {dtype}",
        1.5,
        lambda: decode_attention(query, cache),
        lambda: sdpa(query, key, value),
        lambda: sdpa(query.double(), key.double(), value.double()),
    )


def measure(row: Row, repeats: int) -> dict[str, Any]:
    result = row.ours()
    if isinstance(result, Tensor):  # a backward is checked by the forward's row, and by the tests
        eps = torch.finfo(result.dtype).eps
        torch.testing.assert_close(result.double(), row.exact(), atol=8 * eps, rtol=8 * eps)
    for _ in range(3):
        row.ours(), row.theirs()
    times: tuple[list[float], list[float]] = ([], [])
    for n in range(repeats):
        for which in (0, 1) if n % 2 else (1, 0):
            start = time.process_time()
            (row.ours, row.theirs)[which]()
            times[which].append((time.process_time() - start) * 1e3)
    ratio = statistics.median(ours / theirs for ours, theirs in zip(*times, strict=True))
    ours, theirs = ([round(t, 3) for t in statistics.quantiles(one, n=4)] for one in times)
    return {"call": row.name, "ours_ms": ours, "sdpa_ms": theirs, "ratio": round(ratio, 3), "bar": row.bar}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sdpa", description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file")
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--only", default="", help="rows whose name contains this")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    found = []
    for row in rows():
        if arguments.only in row.name:
            found.append(measure(row, arguments.repeats))
            one = found[-1]
            print(
                f"{one['call']:52} {one['ours_ms'][1]:8.2f} ms   SDPA {one['sdpa_ms'][1]:8.2f} ms   "
                f"ratio {one['ratio']:.2f} of {one['bar']}{'' if one['ratio'] <= one['bar'] else '  MISSED'}",
                flush=True,
            )
    if arguments.out is not None:
        how = "one thread, process_time, in turn; quartiles, and the median of the ratios repeat by repeat"
        result = {"conditions": conditions("cpu") | {"how": how}, "repeats": arguments.repeats, "rows": found}
        save(result, arguments.out)
    return 1 if any(one["ratio"] > one["bar"] for one in found) else 0


if __name__ == "__main__":
    sys.exit(main())
