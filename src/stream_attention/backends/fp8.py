"""What no backend supports in FP8."""

from __future__ import annotations

import torch

from ..problem import Problem
from ..tuning import fp8 as tuning
from .base import Reasons, dims_of, far_positions, name_of

FP8_HEAD_DIMS = tuple(tuning.TRITON)


def fp8_reasons(problem: Problem) -> Reasons:
    """What no backend supports in FP8, each with whether it applies."""
    features = {
        "masks": problem.mask,
        "biases": problem.bias is not None,
        "ALiBi": problem.alibi,
        "sinks": problem.sink,
        "softcap": problem.softcap,
        "dropout": problem.dropout_p,
    }
    asked = [name for name, used in features.items() if used]
    dims = (problem.head_dim, problem.value_dim)
    return (
        (problem.backward, "FP8 supports inference only; it has no backward"),
        (problem.partial, "FP8 does not support partial results"),
        (
            problem.dtype not in (torch.float16, torch.bfloat16),
            f"FP8 supports only float16 and bfloat16 inputs; got {name_of(problem.dtype)}",
        ),
        (
            dims[0] != dims[1] or dims[0] not in FP8_HEAD_DIMS,
            f"FP8 supports only D = Dv of 64, 128 or 256; got {dims_of(problem)}",
        ),
        (bool(asked), f"FP8 does not support {', '.join(asked)}"),
        (problem.q_stride != 1 or problem.k_stride != 1, "FP8 supports only consecutive positions"),
        far_positions(problem),
    )
