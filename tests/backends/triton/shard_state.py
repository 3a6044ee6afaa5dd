"""A shard's state in tensors of its own, which the library only writes into those that are there."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from stream_attention.base.problem import AUTO, Inputs
from stream_attention.dispatch.plan import plan, requested
from stream_attention.dispatch.prepare import run_forward
from stream_attention.ops import shards


def forward_state(inputs: Inputs, *, backend: str = AUTO, **options: Any) -> tuple[Tensor, Tensor]:
    """One shard's state `(fp32 out, lse)`."""
    return run_forward(plan(shards._problem(inputs, **options), requested(backend)), inputs)
