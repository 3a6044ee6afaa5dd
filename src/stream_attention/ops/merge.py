"""merge_states(): the public face of state.py."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .. import validate
from ..state import merge


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
