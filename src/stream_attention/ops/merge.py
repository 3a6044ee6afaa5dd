"""merge_states(): the public face of base/state.py; and, for distributed/, merging one state into another in place."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..backends.installed import runs_triton
from ..base.state import merge
from ..dispatch import validate


def merge_states(outs: Sequence[Tensor] | Tensor, lses: Sequence[Tensor] | Tensor) -> tuple[Tensor, Tensor]:
    """Merge attention over disjoint sets of keys into attention over their union.

    Associative and commutative; the empty state (0, -inf) changes nothing. Differentiable.

    Args:
        outs: states' outputs, each `[B, Tq, Hq, Dv]` (packed: `[Nq, Hq, Dv]`), a sequence or stacked in dim 0.
        lses: their LSEs, each `[B, Hq, Tq]` (packed: `[Hq, Nq]`), natural log.

    Returns:
        `(out, lse)`, computed in the LSEs' dtype; `out` in the dtype of the first.

    Raises:
        ValueError, TypeError: no state, counts that differ, shapes that do not belong together.

    >>> import torch
    >>> from stream_attention import attention, merge_states
    >>> query, key, value = torch.randn(3, 1, 16, 2, 8)
    >>> left = attention(query, key[:, :5], value[:, :5], return_lse=True)
    >>> right = attention(query, key[:, 5:], value[:, 5:], return_lse=True)
    >>> out, lse = merge_states(*zip(left, right))
    >>> torch.allclose(out, attention(query, key, value), atol=1e-6)
    True
    """
    outs, lses = validate.sequence("outs", outs), validate.sequence("lses", lses)
    validate.states(outs, lses)
    return merge(outs, lses)


def fold_state(out: Tensor, lse: Tensor, more_out: Tensor, more_lse: Tensor) -> None:
    """Merge a state into another where that lies: `[B, T, H, Dv]` and `[B, H, T]`, rows of larger tensors. Without
    gradients. On a GPU one kernel, which reads and writes each number once."""
    readable = out.dtype is torch.float32 and out.numel() > 0 and out[0].is_contiguous() and lse.stride(-1) == 1
    if readable and runs_triton(out.device):
        from ..gpu.merge import launch_fold

        launch_fold(out, lse, more_out.contiguous(), more_lse.contiguous())
        return
    merged_out, merged_lse = merge((out, more_out), (lse, more_lse))
    out.copy_(merged_out)
    lse.copy_(merged_lse)
