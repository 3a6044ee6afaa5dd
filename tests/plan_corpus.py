"""A corpus of calls and how they are planned, to see what a change of the planner changes.

    PYTHONPATH=src python tests/plan_corpus.py   # writes tests/plans.json anew: read its diff

Calls are stated by their arguments on tensors without memory, so the corpus outlives the planner's own types. A plan is
the backend and its configuration as `explain` prints them; the reasons may be reworded. The file lists the calls of
every plan.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from stream_attention import ContiguousKV, PagedKV
from stream_attention.backends import installed
from stream_attention.base.problem import Request
from stream_attention.dispatch.plan import Plan, forget_plans, plan
from stream_attention.ops.decode import decode_problem
from stream_attention.ops.explain import problems_of_call

FILE = Path(__file__).with_name("plans.json")
RELEASE = "3.6"
DEVICES = {"cpu": (0, 0), "sm_75": (75, 40), "sm_80": (80, 108), "sm_89": (89, 142), "sm_90": (90, 132)}
"""By name: compute capability and multiprocessors."""
F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64

SHAPES: dict[str, tuple[int, int, int, int, int]] = {
    # batch, queries, keys, query heads, KV heads
    "training": (4, 4096, 4096, 16, 16),
    "grouped": (1, 8192, 8192, 32, 8),
    "short": (2, 128, 128, 8, 8),
    "few queries": (1, 1, 16384, 32, 8),
    "chunk": (1, 512, 16384, 32, 8),
    "more queries than keys": (1, 300, 200, 4, 4),
    "empty": (1, 0, 128, 4, 4),
}
DIMS: tuple[tuple[int, int, torch.dtype], ...] = (
    (64, 64, BF16), (128, 128, BF16), (256, 256, F16), (84, 84, BF16), (192, 128, BF16), (32, 32, F16),
    (320, 320, BF16), (128, 128, F32), (64, 64, F64),
)  # fmt: skip
MODIFIERS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": (1024, 0)},
    "mask": {"mask": True},
    "bias": {"bias": True},
    "alibi": {"causal": True, "alibi_slopes": True},
    "sink": {"causal": True, "sink": True},
    "softcap": {"causal": True, "softcap": 20.0},
    "dropout": {"causal": True, "dropout_p": 0.1, "seed": 0},
    "deterministic": {"causal": True, "deterministic": True},
}


def _tensor(*shape: int, dtype: torch.dtype = F32, grad: bool = False) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=grad)


def _shown(planned: Plan) -> str:
    """The second line of what `explain` prints, without reasons."""
    return str(planned).splitlines()[1].removeprefix("backend").strip().partition(", because")[0]


def attention_plans() -> Iterator[tuple[str, str]]:
    everywhere = product(SHAPES.items(), DIMS, MODIFIERS.items())
    for number, ((shape, sizes), (dim, value_dim, dtype), (name, modifier)) in enumerate(everywhere):
        if number % 7 and (shape, name) not in (("training", "full"), ("training", "causal")):
            continue  # every seventh of the product, and all plain calls
        batch, q_len, k_len, heads, kv_heads = sizes
        shapes = ((q_len, heads, dim), (k_len, kv_heads, dim), (k_len, kv_heads, value_dim))
        query, key, value = (_tensor(batch, *one, dtype=dtype, grad=True) for one in shapes)
        options = dict(modifier)
        if "mask" in options:
            options["mask"] = torch.empty(1, 1, q_len, k_len, dtype=torch.bool, device="meta")
        if "bias" in options:
            options["bias"] = _tensor(1, 1, q_len, k_len, dtype=dtype)
        for per_head in ("alibi_slopes", "sink"):
            if per_head in options:
                options[per_head] = _tensor(heads)
        problems, _ = problems_of_call(query, key, value, **options)
        for device, (arch, num_sms) in DEVICES.items():
            where = torch.device("cpu" if device == "cpu" else "cuda")
            for direction, problem in zip(("forward", "backward"), problems, strict=True):
                call = f"{device} {direction} {shape} d{dim}/{value_dim} {str(dtype)[6:]} {name}"
                yield call, _shown(plan(problem.replace(device=where, arch=arch, num_sms=num_sms)))


def decode_plans() -> Iterator[tuple[str, str]]:
    for batch, q_len, keys, heads, kv_heads, dim in (
        (1, 1, 8192, 32, 8, 128), (64, 1, 1024, 32, 8, 128), (8, 4, 32768, 16, 2, 64), (1, 1, 16384, 8, 1, 256),
        (2, 1, 4096, 8, 8, 84),
    ):  # fmt: skip
        query = _tensor(batch, q_len, heads, dim, dtype=BF16)
        rows = ContiguousKV(*(_tensor(batch, keys, kv_heads, dim, dtype=BF16) for _ in range(2)))
        pages = (_tensor(batch * keys // 16, 16, kv_heads, dim, dtype=BF16) for _ in range(2))
        table = torch.empty(batch, keys // 16, dtype=torch.int32, device="meta")
        lengths = torch.empty(batch, dtype=torch.int32, device="meta")
        for kind, cache in (("rows", rows), ("pages", PagedKV(*pages, table, lengths))):
            stated = decode_problem(query, cache)
            for device, (arch, num_sms) in DEVICES.items():
                where = torch.device("cpu" if device == "cpu" else "cuda")
                problem = stated.replace(device=where, arch=arch, num_sms=num_sms)
                for invariant in (False, True):
                    call = f"{device} decode b{batch} q{q_len} k{keys} h{heads}/{kv_heads} d{dim} {kind}"
                    call += " invariant" if invariant else ""
                    yield call, _shown(plan(problem, Request(batch_invariant=invariant)))


def plans() -> dict[str, list[str]]:
    """The calls of every plan, as if Triton `RELEASE` were installed."""
    with patch.object(installed, "triton_release", lambda: RELEASE), patch.object(installed, "HAS_TRITON", True):
        forget_plans()
        try:
            found: dict[str, list[str]] = {}
            for call, planned in (*attention_plans(), *decode_plans()):
                found.setdefault(planned, []).append(call)
            return dict(sorted(found.items()))
        finally:
            forget_plans()


if __name__ == "__main__":
    FILE.write_text(json.dumps(plans(), indent=0) + "\n", encoding="utf-8")
