"""Random calls of the public ops, and why a backend cannot do one."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import torch

from stream_attention.backends import BY_NAME
from stream_attention_tools.testing.inputs import INTERVALS, LAYOUTS, Case, make, stated


def why_not(case: Case, backend: str) -> tuple[str, ...]:
    """Why a backend cannot do a case, in its own sentences; empty if it can."""
    query, key, value, options = make(case)
    problem = stated(case, {"query": query, "key": key, "value": value}, options)[0]
    problems = [problem]
    if case.backward:
        row_grad = case.row_grad and (case.alibi is not None or case.sink)
        problems.append(problem.replace(backward=True, lse_grad=case.lse_grad, row_grad=row_grad))
    return tuple(dict.fromkeys(reason for one in problems for reason in BY_NAME[backend].why_not(one)))


def random_case(
    rng: Random,
    *,
    device: str = "cpu",
    dtypes: Sequence[torch.dtype] = (torch.float16, torch.bfloat16, torch.float32),
    head_dims: Sequence[int] = (16, 64, 128),
    max_length: int = 300,
    packed: bool | None = None,
) -> Case:
    """A random combination of everything. `packed` None draws dense and packed calls.

    Head dims come from a short list and Dv != D is one pair of it, so that kernels which compile per head dim compile a
    bounded number of variants however many cases are drawn.
    """

    def perhaps(value: Any, probability: float = 0.25, otherwise: Any = None) -> Any:
        return value if rng.random() < probability else otherwise

    def length() -> int:
        # Small lengths hold the corners; lengths beside powers of two hold the partial tiles.
        near_a_power = max(0, 2 ** rng.randrange(max(1, max_length.bit_length())) + rng.choice((-1, 0, 1)))
        return min(
            max_length, rng.choice((rng.randint(0, min(8, max_length)), near_a_power, rng.randint(1, max_length)))
        )

    def broadcast(*full: int) -> tuple[int, ...]:
        shape = tuple(1 if rng.random() < 0.35 else size for size in full)
        return shape[rng.choice((0, 0, 2)) :]  # also the 2-D form [Tq, Tk]

    packed = rng.random() < 0.25 if packed is None else packed
    sequences = rng.randint(0, 4) if packed else rng.choice((0, 1, 1, 2, 2, 3))
    q_len, k_len = length(), length()
    if rng.random() < 0.4:
        k_len = q_len
    kv_heads = rng.randint(1, 3)
    q_heads = kv_heads * rng.choice((1, 1, 2, 3))
    head_dim = rng.choice(tuple(head_dims))
    full = (sequences, q_heads, q_len, k_len)
    dtype = rng.choice(tuple(dtypes))
    bias = None if packed else perhaps(broadcast(*full))
    lengths_q = tuple(rng.randint(0, q_len) for _ in range(sequences))
    lengths_k = tuple(rng.randint(0, k_len) for _ in range(sequences))
    dense: dict[str, Any] = {"B": sequences, "Tq": q_len, "Tk": k_len, "mask": perhaps(broadcast(*full)), "bias": bias}
    varlen: dict[str, Any] = {"lengths_q": lengths_q, "lengths_k": lengths_q if q_len == k_len else lengths_k}
    varlen |= {"tail": perhaps(rng.randint(1, 5), otherwise=0), "max_lengths": rng.random() < 0.5}
    return Case(
        Hq=q_heads,
        Hkv=kv_heads,
        D=head_dim,
        Dv=perhaps(min(head_dims), 0.15, head_dim) if head_dim == max(head_dims) else head_dim,
        dtype=dtype,
        device=device,
        seed=rng.randrange(2**31),
        causal=rng.random() < 0.4,
        window=perhaps((rng.randint(-1, 40), rng.randint(-1, 40))),
        bias_hides=bias is not None and rng.random() < 0.5,
        alibi=perhaps(rng.choice(("H", "BH"))),
        sink=rng.random() < 0.25,
        aux_dtype=perhaps(torch.float32) if dtype is not torch.float64 else None,
        softcap=perhaps(rng.choice((1.5, 20.0)), otherwise=0.0),
        scale=perhaps(rng.choice((0.0, 0.3, -0.2))),
        dropout_p=perhaps(rng.choice((0.1, 0.5, 0.9)), otherwise=0.0),
        deterministic=rng.random() < 0.3,
        layout=rng.choice(LAYOUTS),
        lse_grad=rng.random() < 0.3,
        intervals=None if packed else perhaps(rng.choice(INTERVALS)),
        **(varlen if packed else dense),
    )
