"""Random calls in FP8, and how a call is launched without its tensors."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from stream_attention.backends import BY_NAME
from stream_attention.kernels.fp8_layout import blocks_of, room_for_keys, room_for_queries
from stream_attention.kernels.offline import launching_for
from stream_attention.problem import UNBOUNDED, Inputs, Problem, state_problem
from stream_attention.tuning.gluon import many_cuts

BF16, F16 = torch.bfloat16, torch.float16


@dataclass(frozen=True)
class Fp8Call:
    """One call; `lengths` of queries and keys for each sequence where they are packed."""

    D: int = 128
    B: int = 2
    Tq: int = 200
    Tk: int = 300
    Hq: int = 4
    Hkv: int = 2
    window: tuple[int, int] = (UNBOUNDED, UNBOUNDED)
    lengths: tuple[tuple[int, int], ...] = ()
    dtype: torch.dtype = BF16
    scale: float | None = None
    rotate: bool = False
    kind: str = "normal"

    @property
    def causal(self) -> bool:
        return self.window[1] == 0

    def tensors(self, device: str = "cuda", seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Any, Any]:
        """query, key, value and the offsets of a pack."""
        generator = torch.Generator(device).manual_seed(seed)
        q_rows, k_rows, cu = (self.B, self.Tq), (self.B, self.Tk), (None, None)
        if self.lengths:
            ends = [torch.tensor([0, *(one[side] for one in self.lengths)]).cumsum(0).int() for side in (0, 1)]
            q_rows, k_rows = (int(ends[0][-1]),), (int(ends[1][-1]),)  # type: ignore[assignment]
            cu = ends[0].to(device), ends[1].to(device)  # type: ignore[assignment]
        shapes = ((*q_rows, self.Hq, self.D), (*k_rows, self.Hkv, self.D), (*k_rows, self.Hkv, self.D))
        query, key, value = (torch.randn(shape, generator=generator, device=device) for shape in shapes)
        if self.kind == "outliers":
            key[..., 3] *= 30.0
            value[..., 5] += 10.0
        if self.kind == "small scores":
            query *= 0.05
        if self.kind == "large scores":
            query *= 12.0
        return (*(t.to(self.dtype) for t in (query, key, value)), *cu)

    def stated(self, query: Tensor, key: Tensor, value: Tensor, cu_q: Tensor | None, cu_k: Tensor | None) -> Problem:
        q_len, k_len = (max((one[side] for one in self.lengths), default=0) for side in (0, 1))
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
        )
        return problem._replace(fp8=True, addressable=True)


def draw_call(seed: int) -> Fp8Call:
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
        window=draw.choice([(UNBOUNDED, UNBOUNDED), (UNBOUNDED, 0), (side(), side())]),
        lengths=tuple(
            (draw.choice([0, length()]), draw.choice([0, length(), length()])) for _ in range(draw.randint(1, 5))
        )
        if draw.random() < 0.35
        else (),
        dtype=F16 if D == 128 and draw.random() < 0.5 else BF16,  # every other kernel has to be compiled
        scale=draw.choice([None, None, 0.02, 0.5]),
        rotate=draw.random() < 0.25,
        kind=draw.choice(["normal", "normal", "outliers", "small scores", "large scores"]),
    )


def launch_offline(call: Fp8Call, backend: str) -> None:
    """What a call launches, of codes that are not there."""
    query, key, value, *cu = call.tensors("cpu")
    problem = call.stated(query, key, value, *cu)._replace(device=torch.device("cuda", 0), arch=90, processors=132)
    if problem.empty:
        return
    batch, packed = problem.batch, problem.packed
    queries = room_for_queries(query, blocks_of(query.shape[-3], batch, packed))
    keys = room_for_keys(key, blocks_of(key.shape[-3], batch, packed))
    row = BY_NAME[backend]
    row.load_fp8().forward_fp8(problem, queries, keys, *cu, row.configure(problem))


def kernel_of(call: Fp8Call) -> tuple[Any, ...]:
    """What calls that launch the same kernels have in common."""
    problem = call.stated(*call.tensors("cpu"))
    sides = problem.left == UNBOUNDED, problem.right == UNBOUNDED, many_cuts(problem, 128)
    return call.D, call.dtype, problem.packed, *sides


def compile_call(call: Fp8Call, backend: str) -> str:
    """Compile what a call launches into Triton's cache; what went wrong, or nothing."""
    try:
        with launching_for(90, lambda form: form.compile()):
            launch_offline(replace(call, kind="normal"), backend)
    except Exception as error:
        return f"{call!r} on {backend}: {type(error).__name__}: {error}"
    return ""
