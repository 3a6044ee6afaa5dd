"""What tests of the FP8 kernels share: calls whose names say why they exist, random ones, their codes and kernels."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import torch
from fp8_tolerance import Fp8Report, check_fp8
from torch import Tensor

from stream_attention.backends import BY_NAME
from stream_attention.backends.hopper.tuning import masks_beyond_first_block
from stream_attention.backends.reference import fp8 as reference_fp8
from stream_attention.backends.triton.fp8_tuning import configure
from stream_attention.base.fp8_layout import KeyCodes, QueryCodes, alloc_key_codes, alloc_query_codes, blocks_of
from stream_attention.base.problem import UNBOUNDED, Inputs, Positions, Problem, state_problem
from stream_attention_tools.offline import launching_for
from stream_attention_tools.testing import poisoned_memory
from stream_attention_tools.testing.fp8 import attend_to_codes

F16, BF16 = torch.float16, torch.bfloat16
CAUSAL, FULL = (UNBOUNDED, 0), (UNBOUNDED, UNBOUNDED)

Tensors = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]
"""query, key, value and the offsets of a pack."""

Codes = tuple[Problem, QueryCodes, KeyCodes, Tensor | None, Tensor | None]
"""What a kernel and `check_fp8` take, in their order."""

SHORT = (1, 2, 3, 7, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 160)
"""Lengths around the edges of tiles, blocks and their scales."""


@dataclass(frozen=True)
class Fp8Call:
    """One call; `lengths` of queries and keys for each sequence where they are packed."""

    D: int = 128
    B: int = 2
    Tq: int = 200
    Tk: int = 300
    Hq: int = 4
    Hkv: int = 2
    window: tuple[int, int] = FULL
    lengths: tuple[tuple[int, int], ...] = ()
    tail: int = 0  # rows of a pack behind its last sequence
    starts: tuple[int, int] | None = None  # positions of the first query and of the first key; packs have none
    dtype: torch.dtype = BF16
    cu_dtype: torch.dtype = torch.int32
    scale: float | None = None  # None: D ** -0.5
    rotate: bool = False
    kind: str = "normal"
    seed: int = 0

    def tensors(self, device: str = "cuda") -> Tensors:
        generator = torch.Generator(device).manual_seed(self.seed)
        lead, (q_rows, k_rows), cu = (self.B,), (self.Tq, self.Tk), (None, None)
        if self.lengths:
            ends = [torch.tensor([0, *lengths]).cumsum(0) for lengths in zip(*self.lengths, strict=True)]
            lead, (q_rows, k_rows) = (), (int(its[-1]) + self.tail for its in ends)
            cu = tuple(its.to(device, self.cu_dtype) for its in ends)
        shapes = (q_rows, self.Hq), (k_rows, self.Hkv), (k_rows, self.Hkv)
        numbers = [torch.randn(*lead, *shape, self.D, generator=generator, device=device) for shape in shapes]
        return (*(t.to(self.dtype) for t in KINDS[self.kind](*numbers)), *cu)

    def stated(self, query: Tensor, key: Tensor, value: Tensor, cu_q: Tensor | None, cu_k: Tensor | None) -> Problem:
        q_len, k_len = (max((one[side] for one in self.lengths), default=0) for side in (0, 1))
        positions = None
        if self.starts is not None:
            positions = Positions(self.starts[0], 1, self.starts[1], 1, q_base=self.starts[0])
        problem = state_problem(
            Inputs(query, key, value, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k),
            q_len=q_len,
            k_len=k_len,
            causal=False,
            window=self.window,
            softcap=0.0,
            scale=self.D**-0.5 if self.scale is None else self.scale,
            dropout_p=0.0,
            deterministic=False,
            positions=positions,
        )
        return problem.replace(fp8=True, tma_compatible=True)

    def codes(self) -> Codes:
        """On the CPU, by the specification."""
        query, key, value, cu_q, cu_k = self.tensors("cpu")
        queries = reference_fp8.quantize_queries(query, cu_q, self.rotate)
        keys = reference_fp8.quantize_keys(key, value, cu_k, self.rotate)
        return self.stated(query, key, value, cu_q, cu_k), queries, keys, cu_q, cu_k


def _in_keys_and_values(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    k[..., 3] *= 30.0
    v[..., 5] += 10.0
    return q, k, v


def _in_queries_and_keys(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q[..., 3] *= 20
    k[..., 3] *= 20
    return q, k, v


def _blocks(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Every block has another scale, by factors of thousands."""

    def steps(x: Tensor, rows: int, base: float) -> Tensor:
        return torch.pow(base, (torch.arange(x.shape[-3], device=x.device) // rows % 3).float())[:, None, None]

    return q * steps(q, 64, 0.02), k * steps(k, 128, 0.02), v * steps(v, 128, 30.0)


def _rising(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Scores are larger from block to block, in the order in which a kernel sees them."""
    return q * 2.0, k * torch.linspace(6.0, 0.1, k.shape[-3], device=k.device)[:, None, None], v


def _jumping(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Beside the keys that a kernel sees first, weights of the first quarter are too large for fp32: for 64 queries of
    192, so that of those who compute a tile some see it and some do not."""
    loud = torch.arange(q.shape[-3], device=q.device) // 64 % 3 == 0
    first = torch.arange(k.shape[-3], device=k.device) < k.shape[-3] // 4
    return q * torch.where(loud, 2.0, 0.02)[:, None, None], k * torch.where(first, 60.0, 0.1)[:, None, None], v


SHORT_KINDS = {
    "normal": lambda q, k, v: (q, k, v),
    "scores of 0.1": lambda q, k, v: (q * 0.1, k, v),
    "scores of 4": lambda q, k, v: (q * 4, k, v),
    "scores of 10,000": lambda q, k, v: (q * 300, k * 8, v),
    "outliers in a channel": _in_queries_and_keys,
    "heavy tails": lambda q, k, v: (q**3, k**3, v**3),
    "values all the same": lambda q, k, v: (q, k, torch.full_like(v, 1.37)),
    "zeros": lambda q, k, v: (q * 0, k * 0, v * 0),
    "queries and keys of 0": lambda q, k, v: (q * 0, k * 0, v),
    "numbers of 1e-17": lambda q, k, v: (q * 1e-17, k * 1e-17, v * 1e-17),
    "scales of every block its own": _blocks,
}
"""What is made of normal numbers; `random_case` draws of these."""

KINDS = SHORT_KINDS | {
    "outliers": _in_keys_and_values,
    "small scores": lambda q, k, v: (q * 0.05, k, v),
    "large scores": lambda q, k, v: (q * 12.0, k, v),
    "rising scores": _rising,
    "jumping scores": _jumping,
}

BASE = Fp8Call(D=64, B=1, Tq=100, Tk=100, Hq=2, Hkv=1)
EDGES = tuple((n, m) for n, m in zip((0, 1, 127, 128, 129, 5, 0), (3, 1, 129, 128, 127, 0, 0), strict=True))
CASES: dict[str, Fp8Call] = {
    "plain": BASE,
    "D 128": replace(BASE, D=128, Tq=70, Tk=200),
    "D 256": replace(BASE, D=256, Tq=70, Tk=140),
    "two batch entries, which begin with a block of their own": replace(BASE, B=2, Tq=130, Tk=140, Hq=1),
    "gqa": replace(BASE, Hq=6, Hkv=2, Tq=33),
    "causal, square": replace(BASE, Tq=200, Tk=200, Hq=1, window=CAUSAL),
    "causal, with a longer cache": replace(BASE, Tq=70, Tk=300, window=CAUSAL),
    "causal, rows that see nothing": replace(BASE, Tq=200, Tk=70, window=CAUSAL),
    "causal, D 128": replace(BASE, D=128, Tq=150, Tk=150, Hq=1, window=CAUSAL),
    "window to the left": replace(BASE, Tq=200, Tk=260, Hq=1, window=(70, -1)),
    "window to the right": replace(BASE, Tq=140, Tk=200, Hq=1, window=(-1, 40)),
    "window of both sides, with blocks seen whole": replace(BASE, Tq=70, Tk=400, Hq=1, window=(150, 130)),
    "window that skips whole blocks": replace(BASE, Tq=300, Tk=300, Hq=1, window=(3, 0)),
    "window that only sees itself": replace(BASE, window=(0, 0)),
    "window before the first key": replace(BASE, Tq=100, Tk=10, window=(2, 1)),
    "positions of a shard behind the keys": replace(BASE, starts=(150, 30), window=(100, 0)),
    "positions of a shard before the keys": replace(BASE, starts=(30, 64), window=CAUSAL),
    "one query": replace(BASE, Tq=1, Tk=300),
    "one key": replace(BASE, Tk=1),
    "one of everything": replace(BASE, Tq=1, Tk=1, Hq=1),
    "whole blocks": replace(BASE, Tq=128, Tk=256, Hq=1, window=CAUSAL),
    "one row and one key more than blocks": replace(BASE, Tq=129, Tk=257, Hq=1),
    "no keys": replace(BASE, Tk=0),
    "no queries": replace(BASE, Tq=0),
    "packed, around the edges of blocks": replace(BASE, lengths=EDGES, Hq=1),
    "packed, causal": replace(BASE, lengths=EDGES, window=CAUSAL, Hq=1),
    "packed, window": replace(BASE, lengths=((150, 200), (30, 140)), window=(20, 3)),
    "packed, rows behind the last sequence": replace(BASE, lengths=((40, 50), (0, 9)), tail=3, cu_dtype=torch.int64),
    "packed, D 128": replace(BASE, D=128, lengths=((3, 130), (70, 70)), window=CAUSAL),
    "scales of every block its own": replace(BASE, Tq=200, Tk=400, Hq=1, kind="scales of every block its own"),
    "scores of 10,000": replace(BASE, kind="scores of 10,000", window=CAUSAL),
    "outliers in a channel": replace(BASE, kind="outliers in a channel"),
    "heavy tails": replace(BASE, kind="heavy tails", Tk=200),
    "values all the same": replace(BASE, kind="values all the same"),
    "zeros": replace(BASE, kind="zeros", window=CAUSAL),
    "queries and keys of 0": replace(BASE, kind="queries and keys of 0", window=CAUSAL),
    "scales whose product fp32 cannot hold": replace(BASE, kind="numbers of 1e-17", scale=1e-9, window=CAUSAL),
    "scale of zero": replace(BASE, scale=0.0, window=CAUSAL),
    "negative scale": replace(BASE, scale=-0.3, window=CAUSAL),
    "fp16": replace(BASE, dtype=F16, window=CAUSAL),
    "fp16, small scores": replace(BASE, dtype=F16, kind="scores of 0.1", Tk=300),
}


def random_case(rng: random.Random) -> Fp8Call:
    """A call that the interpreter computes in moments."""

    def pair() -> tuple[int, int]:
        return rng.choice((0, *SHORT)), rng.choice((0, *SHORT))

    def window() -> tuple[int, int]:
        causal = rng.random() < 0.4
        left, right = rng.choice((-1, -1, 0, 5, 64, 130)), rng.choice((-1, -1, 0, 7, 70))
        return left, 0 if causal else right

    kv_heads = rng.choice((1, 1, 2))
    return Fp8Call(
        D=rng.choice((64, 64, 128, 256)),
        B=rng.choice((1, 1, 2)),
        Tq=rng.choice(SHORT),
        Tk=rng.choice(SHORT),
        Hq=kv_heads * rng.choice((1, 2)),
        Hkv=kv_heads,
        window=window(),
        lengths=tuple(pair() for _ in range(rng.choice((1, 2, 3)))) if rng.random() < 0.3 else (),
        kind=rng.choice(tuple(SHORT_KINDS)),
        dtype=rng.choice((F16, BF16)),
        seed=rng.getrandbits(32),
    )


def draw_call(seed: int) -> Fp8Call:
    """One for a GPU; few kernels have to be compiled for many of them."""
    draw = random.Random(seed)

    def length() -> int:
        return draw.choice([draw.randint(1, 40), draw.randint(1, 500), 128, 192, 256, draw.randint(500, 1500)])

    def side() -> int:
        return draw.choice([UNBOUNDED, UNBOUNDED, 0, draw.randint(0, 20), draw.randint(20, 700)])

    D, Hkv = draw.choice([64, 128, 128, 256]), draw.choice([1, 1, 2, 3])
    return Fp8Call(
        D=D,
        B=draw.randint(1, 3),
        Tq=length(),
        Tk=length(),
        Hq=Hkv * draw.choice([1, 1, 2, 5]),
        Hkv=Hkv,
        window=draw.choice([FULL, CAUSAL, (side(), side())]),
        lengths=tuple(
            (draw.choice([0, length()]), draw.choice([0, length(), length()])) for _ in range(draw.randint(1, 5))
        )
        if draw.random() < 0.35
        else (),
        dtype=F16 if D == 128 and draw.random() < 0.5 else BF16,  # every other kernel has to be compiled
        scale=draw.choice([None, None, 0.02, 0.5]),
        rotate=draw.random() < 0.25,
        kind=draw.choice(["normal", "normal", "outliers", "small scores", "large scores"]),
        seed=seed,
    )


def check(call: Fp8Call, kernel: Any, config: Any = None) -> Fp8Report:
    """Run a call on a kernel, whose results are poisoned before; what is configured as the tables say without one."""
    arguments = call.codes()
    with poisoned_memory():
        out, lse = kernel(*arguments, config or configure(arguments[0]))
    return check_fp8(out, lse, *arguments)


def launch_offline(call: Fp8Call, backend: str) -> None:
    """What a call launches, of codes that are not there."""
    query, key, value, *cu = call.tensors("cpu")
    problem = call.stated(query, key, value, *cu).replace(device=torch.device("cuda", 0), arch=90, num_sms=132)
    if problem.empty:
        return
    batch, packed = problem.batch, problem.packed
    queries = alloc_query_codes(query, blocks_of(query.shape[-3], batch, packed))
    keys = alloc_key_codes(key, blocks_of(key.shape[-3], batch, packed))
    row = BY_NAME[backend]
    attend_to_codes(row, problem, queries, keys, *cu, row.configure(problem))


def kernel_of(call: Fp8Call) -> tuple[Any, ...]:
    """What calls that launch the same kernels have in common."""
    problem = call.stated(*call.tensors("cpu"))
    sides = problem.left == UNBOUNDED, problem.right == UNBOUNDED, masks_beyond_first_block(problem, 128)
    return call.D, call.dtype, problem.packed, *sides


def compile_call(call: Fp8Call, backend: str) -> str:
    """Compile what a call launches into Triton's cache; what went wrong, or nothing.

    For `gpu_tools.compile_ahead`, which calls it in many processes.
    """
    try:
        with launching_for(90, lambda form: form.compile()):
            launch_offline(replace(call, kind="normal"), backend)
    except Exception as error:
        return f"{call!r} on {backend}: {type(error).__name__}: {error}"
    return ""
