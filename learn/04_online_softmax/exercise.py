"""Exercise: merge two attention states. Fill the gap, then run

python learn/04_online_softmax/check.py
"""

from __future__ import annotations

from torch import Tensor


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """The state of the keys of both: out `[rows, dim]` and lse `[rows]`, natural logarithms.

    The `out` of a state is its weighted mean, already divided by its own sum, and lse is the log of that sum. A row
    that has seen no key has lse -inf, and its out is not to be looked at: it may hold anything, NaN too. Where both
    have seen nothing the result is out 0 and lse -inf.
    """
    raise NotImplementedError("The sum of each state is exp(lse). Which share of the whole sum is it? Mind overflow.")
