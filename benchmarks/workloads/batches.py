"""Which batches are measured, and what the formulas give for them: FLOPs, bytes, and the least time at two speeds."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from stream_attention_tools.bench.providers.decode import FEW

TB_PER_S = 4.51
"""At which an H200 reads a large buffer: `read_bandwidth` of benchmarks/results/h200/decode.json, 2026-11."""
TFLOP_PER_S = 730.0
"""Of our Hopper forward in bf16, d128, on the same H200: 729 full at 4096, 729 causal at 16384 (h200/forward.json)."""

TABLE_TOKENS = 128 << 10
"""A request's row of the page table has room for as many: engines allocate it for a model's longest context."""


class Heads(NamedTuple):
    """Heads of queries and of keys, and their dim."""

    query: int
    kv: int
    dim: int

    def __str__(self) -> str:
        return f"{self.query}/{self.kv} d{self.dim}"


SHAPES = {str(shape): shape for shape in (Heads(32, 8, 128), Heads(64, 8, 128), Heads(64, 8, 64))}


class Request(NamedTuple):
    """New tokens of a step, and all keys, theirs counted."""

    queries: int
    keys: int


class Workload(NamedTuple):
    """A step of an engine, in bf16."""

    number: int
    name: str
    requests: list[Request]
    page: int
    heads: str = "32/8 d128"  # the one it is measured at; --heads names others
    window: int | None = None  # how many keys a query sees, its own counted
    sink: bool = False
    tree: bool = False  # new tokens see their ancestors among the new tokens: `tree_mask`
    shared: int = 0  # first keys that are the same pages in all requests
    dtype: torch.dtype = torch.bfloat16

    @property
    def queries(self) -> int:
        return sum(one.queries for one in self.requests)

    @property
    def keys(self) -> int:
        return sum(one.keys for one in self.requests)


def decodes(count: int, first: int, last: int | None = None, queries: int = 1) -> list[Request]:
    """Requests of a few new tokens, whose numbers of keys are evenly spaced."""
    step = 0.0 if last is None or count == 1 else (last - first) / (count - 1)
    return [Request(queries, round(first + n * step)) for n in range(count)]


def prompts(count: int, first: int, last: int) -> list[Request]:
    """Requests without a past."""
    return [Request(one.keys, one.keys) for one in decodes(count, first, last)]


WORKLOADS = [
    Workload(1, "a prompt of 8k, 127 decodes of 2k-16k", prompts(1, 8192, 8192) + decodes(127, 2048, 16384), 16),
    Workload(2, "2k tokens behind 14k, 64 decodes of 4k", [Request(2048, 16384), *decodes(64, 4096)], 16),
    Workload(3, "64 decodes of 1k-32k", decodes(64, 1024, 32768), 16),
    Workload(4, "16 prompts of 500-4000", prompts(16, 500, 4000), 64),
    Workload(5, "64 x 5 tokens to verify, 8k", decodes(64, 8192, queries=5), 16),
    Workload(6, "64 decodes, 4k shared + 256", decodes(64, 4096 + 256), 16, shared=4096),
    Workload(7, "256 decodes of 1k", decodes(256, 1024), 16),
    Workload(8, "1 decode of 128k", decodes(1, 131072), 256),
    Workload(9, "8 decodes of 32k-128k", decodes(8, 32768, 131072), 64),
    Workload(10, "16 trees of 16 tokens, 4k", decodes(16, 4096, queries=16), 1, tree=True),
    Workload(11, "128 decodes of 16k, window 1k, sink", decodes(128, 16384), 16, "64/8 d64", window=1024, sink=True),
    Workload(12, "32 x 128 tokens behind 6k", decodes(32, 6144 + 128, queries=128), 1),
]


def scaled(workload: Workload, scale: int) -> Workload:
    """With lengths divided, up to a whole number; a few new tokens stay as they are."""

    def fewer(length: int) -> int:
        return length if length <= FEW else -(-length // scale)

    requests = [Request(fewer(one.queries), max(fewer(one.queries), fewer(one.keys))) for one in workload.requests]
    window = None if workload.window is None else fewer(workload.window)
    shared = workload.shared // scale // workload.page * workload.page
    return workload._replace(requests=requests, window=window, shared=shared)


def ancestors(tokens: int) -> Tensor:
    """bool `[tokens, tokens]`: what each node of a binary tree sees, itself and the nodes above it."""
    mask = torch.eye(tokens, dtype=torch.bool)
    for node in range(1, tokens):
        mask[node] |= mask[(node - 1) // 2]
    return mask


def visible(workload: Workload) -> int:
    """Pairs of a query and a key that it sees."""
    if workload.tree:
        seen = ((one.queries * (one.keys - one.queries), one.queries) for one in workload.requests)
        return sum(older + int(ancestors(new).sum()) for older, new in seen)
    most = workload.window or workload.keys
    return sum(min(most, one.keys - n) for one in workload.requests for n in range(one.queries))


def flops(workload: Workload, heads: Heads) -> int:
    return 4 * heads.query * heads.dim * visible(workload)


def traffic(workload: Workload, heads: Heads, shared_once: bool = False) -> int:
    """Bytes: keys and values that some query sees, request by request, queries and output; `shared_once` counts pages
    that requests share once."""
    most = workload.window or workload.keys
    keys = sum(min(one.keys, most + one.queries - 1) for one in workload.requests)
    if shared_once:
        keys -= workload.shared * (len(workload.requests) - 1)
    return 2 * workload.dtype.itemsize * heads.dim * (heads.kv * keys + heads.query * workload.queries)


def floor_us(workload: Workload, heads: Heads, tb_per_s: float, tflop_per_s: float) -> tuple[float, str]:
    """Microseconds at these speeds, and which of the two bounds it. Only pages that are shared may be read faster, from
    the L2 cache."""
    memory, compute = traffic(workload, heads) / tb_per_s / 1e6, flops(workload, heads) / tflop_per_s / 1e6
    return (compute, "compute") if compute > memory else (memory, "memory")


def described(workload: Workload, heads: Heads, limits: tuple[float, float]) -> dict[str, Any]:
    """A workload as JSON, with what the formulas give."""
    floor, bound = floor_us(workload, heads, *limits)
    return {
        "number": workload.number,
        "name": workload.name,
        "requests": len(workload.requests),
        "queries": workload.queries,
        "keys": workload.keys,
        "page": workload.page,
        "heads": str(heads),
        "dtype": str(workload.dtype).removeprefix("torch."),
        "window": workload.window,
        "sink": workload.sink,
        "tree": workload.tree,
        "shared": workload.shared,
        "gflop": round(flops(workload, heads) / 1e9, 3),
        "mb": round(traffic(workload, heads) / 1e6, 3),
        "mb_shared_once": round(traffic(workload, heads, shared_once=True) / 1e6, 3),
        "floor_us": round(floor, 2),
        "bound": bound,
    }
