"""Masks by position alone, for calls of any size: causal, window."""

from __future__ import annotations

from ..base.errors import check_int, refuse
from .mask import Mask


def causal() -> Mask:
    """Query i sees keys j <= i + Tk - Tq (bottom-right), as `attention` with `causal=True`.

    >>> causal().as_dense(q_len=2, k_len=3)[0, 0].int().tolist()
    [[1, 1, 0], [1, 1, 1]]
    """
    return Mask(right=0)


def window(left: int | None = None, right: int | None = None) -> Mask:
    """Query i sees keys j in [i + Tk - Tq - left, i + Tk - Tq + right]; -1 or None is unbounded on that side.

    As the argument `window` of `attention`. The fields of `Mask` also take sides below 0: `Mask(right=-1)` is strictly
    before the query.

    Raises:
        ValueError, TypeError: a side below -1, or no int.

    >>> window(1, 0).as_dense(q_len=3, k_len=3)[0, 0].int().tolist()
    [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    """
    for name, side in (("left", left), ("right", right)):
        if side is not None and check_int(name, side) < -1:
            refuse(name, "at least -1 (-1 = unbounded)", side, f"A side of {side} positions is Mask({name}={side})")
    return Mask(None if left == -1 else left, None if right == -1 else right)
