"""What tests of the FP8 kernels share: problems whose names say why they exist, and their codes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch
from torch import Tensor

from stream_attention.kernels import reference_fp8
from stream_attention.kernels.fp8_layout import KeyCodes, QueryCodes
from stream_attention.kernels.offline import launching_for
from stream_attention.problem import Inputs, Positions, Problem, state_problem
from stream_attention.testing import poisoned_memory
from stream_attention.testing.fp8 import Fp8Report, check_fp8
from stream_attention.tuning.fp8 import TritonFp8Config, configure_triton

F16, BF16 = torch.float16, torch.bfloat16

Codes = tuple[Problem, QueryCodes, KeyCodes, Tensor | None, Tensor | None]
"""What a kernel and `check_fp8` take, in their order."""

SHORT = (1, 2, 3, 7, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 160)
"""Lengths around the edges of tiles, blocks and their scales."""


@dataclass(frozen=True)
class Fp8Case:
    """A call; `packed` are the lengths of sequences, (queries, keys) of each."""

    D: int = 64
    B: int = 1
    Tq: int = 100
    Tk: int = 100
    Hq: int = 2
    Hkv: int = 1
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    packed: tuple[tuple[int, int], ...] = ()
    tail: int = 0  # rows of a pack behind its last sequence
    starts: tuple[int, int] | None = None  # positions of the first query and of the first key; packs have none
    kind: str = "normal"
    scale: float | None = None  # None: D ** -0.5
    dtype: torch.dtype = BF16
    cu_dtype: torch.dtype = torch.int32
    seed: int = 0

    def inputs(self, device: str = "cpu") -> Inputs:
        lead = (self.B,) if not self.packed else ()
        q_rows, k_rows = self.Tq, self.Tk
        if self.packed:
            q_rows, k_rows = (sum(lengths) + self.tail for lengths in zip(*self.packed, strict=True))
        generator = torch.Generator().manual_seed(self.seed)
        shapes = (q_rows, self.Hq), (k_rows, self.Hkv), (k_rows, self.Hkv)
        numbers = [torch.randn(*lead, *shape, self.D, generator=generator) for shape in shapes]
        q, k, v = (x.to(device, self.dtype) for x in KINDS[self.kind](*numbers))
        if not self.packed:
            return Inputs(q, k, v)
        ends = (
            torch.tensor([0, *lengths]).cumsum(0).to(device, self.cu_dtype)
            for lengths in zip(*self.packed, strict=True)
        )
        return Inputs(q, k, v, None, None, None, None, None, *ends)

    def problem(self, inputs: Inputs) -> Problem:
        q_len, k_len = (max(lengths) for lengths in zip(*self.packed, strict=True)) if self.packed else (0, 0)
        positions = None
        if self.starts is not None:
            positions = Positions(self.starts[0], 1, self.starts[1], 1, q_base=self.starts[0])
        return state_problem(
            inputs,
            q_len=q_len,
            k_len=k_len,
            causal=self.causal,
            window=self.window,
            softcap=0.0,
            scale=self.D**-0.5 if self.scale is None else self.scale,
            dropout_p=0.0,
            deterministic=False,
            positions=positions,
        )._replace(fp8=True, addressable=True)

    def codes(self, device: str = "cpu") -> Codes:
        inputs = self.inputs(device)
        cu_q, cu_k = inputs.cu_seqlens_q, inputs.cu_seqlens_k
        queries = reference_fp8.quantize_queries(inputs.query, cu_q)
        return self.problem(inputs), queries, reference_fp8.quantize_keys(inputs.key, inputs.value, cu_k), cu_q, cu_k


def _outlier(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q[..., 3] *= 20
    k[..., 3] *= 20
    return q, k, v


def _blocks(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Every block has another scale, by factors of thousands."""

    def steps(x: Tensor, rows: int, base: float) -> Tensor:
        return torch.pow(base, (torch.arange(x.shape[-3]) // rows % 3).float())[:, None, None]

    return q * steps(q, 64, 0.02), k * steps(k, 128, 0.02), v * steps(v, 128, 30.0)


KINDS = {
    "normal": lambda q, k, v: (q, k, v),
    "small scores": lambda q, k, v: (q * 0.1, k, v),
    "large scores": lambda q, k, v: (q * 4, k, v),
    "scores of 10,000": lambda q, k, v: (q * 300, k * 8, v),
    "outliers in a channel": _outlier,
    "heavy tails": lambda q, k, v: (q**3, k**3, v**3),
    "values all the same": lambda q, k, v: (q, k, torch.full_like(v, 1.37)),
    "zeros": lambda q, k, v: (q * 0, k * 0, v * 0),
    "queries and keys of 0": lambda q, k, v: (q * 0, k * 0, v),
    "numbers of 1e-17": lambda q, k, v: (q * 1e-17, k * 1e-17, v * 1e-17),
    "scales of every block its own": _blocks,
}

BASE = Fp8Case()
EDGES = tuple((n, m) for n, m in zip((0, 1, 127, 128, 129, 5, 0), (3, 1, 129, 128, 127, 0, 0), strict=True))
CASES: dict[str, Fp8Case] = {
    "plain": BASE,
    "D 128": replace(BASE, D=128, Tq=70, Tk=200),
    "D 256": replace(BASE, D=256, Tq=70, Tk=140),
    "two batch entries, which begin with a block of their own": replace(BASE, B=2, Tq=130, Tk=140, Hq=1),
    "gqa": replace(BASE, Hq=6, Hkv=2, Tq=33),
    "causal, square": replace(BASE, Tq=200, Tk=200, Hq=1, causal=True),
    "causal, with a longer cache": replace(BASE, Tq=70, Tk=300, causal=True),
    "causal, rows that see nothing": replace(BASE, Tq=200, Tk=70, causal=True),
    "causal, D 128": replace(BASE, D=128, Tq=150, Tk=150, Hq=1, causal=True),
    "window to the left": replace(BASE, Tq=200, Tk=260, Hq=1, window=(70, -1)),
    "window to the right": replace(BASE, Tq=140, Tk=200, Hq=1, window=(-1, 40)),
    "window of both sides, with blocks seen whole": replace(BASE, Tq=70, Tk=400, Hq=1, window=(150, 130)),
    "window that skips whole blocks": replace(BASE, Tq=300, Tk=300, Hq=1, window=(3, 0)),
    "window that only sees itself": replace(BASE, window=(0, 0)),
    "window before the first key": replace(BASE, Tq=100, Tk=10, window=(2, 1)),
    "positions of a shard behind the keys": replace(BASE, starts=(150, 30), window=(100, 0)),
    "positions of a shard before the keys": replace(BASE, starts=(30, 64), causal=True),
    "one query": replace(BASE, Tq=1, Tk=300),
    "one key": replace(BASE, Tk=1),
    "one of everything": replace(BASE, Tq=1, Tk=1, Hq=1),
    "whole blocks": replace(BASE, Tq=128, Tk=256, Hq=1, causal=True),
    "one row and one key more than blocks": replace(BASE, Tq=129, Tk=257, Hq=1),
    "no keys": replace(BASE, Tk=0),
    "no queries": replace(BASE, Tq=0),
    "packed, around the edges of blocks": replace(BASE, packed=EDGES, Hq=1),
    "packed, causal": replace(BASE, packed=EDGES, causal=True, Hq=1),
    "packed, window": replace(BASE, packed=((150, 200), (30, 140)), window=(20, 3)),
    "packed, rows behind the last sequence": replace(BASE, packed=((40, 50), (0, 9)), tail=3, cu_dtype=torch.int64),
    "packed, D 128": replace(BASE, D=128, packed=((3, 130), (70, 70)), causal=True),
    "scales of every block its own": replace(BASE, Tq=200, Tk=400, Hq=1, kind="scales of every block its own"),
    "scores of 10,000": replace(BASE, kind="scores of 10,000", causal=True),
    "outliers in a channel": replace(BASE, kind="outliers in a channel"),
    "heavy tails": replace(BASE, kind="heavy tails", Tk=200),
    "values all the same": replace(BASE, kind="values all the same"),
    "zeros": replace(BASE, kind="zeros", causal=True),
    "queries and keys of 0": replace(BASE, kind="queries and keys of 0", causal=True),
    "scales whose product fp32 cannot hold": replace(BASE, kind="numbers of 1e-17", scale=1e-9, causal=True),
    "scale of zero": replace(BASE, scale=0.0, causal=True),
    "negative scale": replace(BASE, scale=-0.3, causal=True),
    "fp16": replace(BASE, dtype=F16, causal=True),
    "fp16, small scores": replace(BASE, dtype=F16, kind="small scores", Tk=300),
}


def random_case(rng: Random) -> Fp8Case:
    def pair() -> tuple[int, int]:
        return rng.choice((0, *SHORT)), rng.choice((0, *SHORT))

    kv_heads = rng.choice((1, 1, 2))
    return Fp8Case(
        D=rng.choice((64, 64, 128, 256)),
        B=rng.choice((1, 1, 2)),
        Tq=rng.choice(SHORT),
        Tk=rng.choice(SHORT),
        Hq=kv_heads * rng.choice((1, 2)),
        Hkv=kv_heads,
        causal=rng.random() < 0.4,
        window=(rng.choice((-1, -1, 0, 5, 64, 130)), rng.choice((-1, -1, 0, 7, 70))),
        packed=tuple(pair() for _ in range(rng.choice((1, 2, 3)))) if rng.random() < 0.3 else (),
        kind=rng.choice(tuple(KINDS)),
        dtype=rng.choice((F16, BF16)),
        seed=rng.getrandbits(32),
    )


def check(case: Fp8Case, kernel: Any, config: Any = None, device: str = "cpu") -> Fp8Report:
    """Run a case on a kernel, whose results are poisoned before; what is configured as the tables say without one."""
    arguments = case.codes(device)
    with poisoned_memory():
        out, lse = kernel(*arguments, config or configure_triton(arguments[0]))
    return check_fp8(out, lse, *arguments)


def compile_case(case: Fp8Case, arch: int = 90, config: TritonFp8Config | None = None) -> str:
    """Compile what a case launches on the Triton kernel, without a GPU; what went wrong, or nothing.

    For `gpu_tools.compile_ahead`, which calls it in many processes.
    """
    from stream_attention.kernels.triton.forward_fp8 import forward_fp8

    try:
        arguments = case.codes()
        with launching_for(arch, lambda form: form.compile()):
            forward_fp8(*arguments, config or configure_triton(arguments[0]))
    except Exception as error:
        return f"{case!r}: {type(error).__name__}: {error}"
    return ""
