"""Exercise: the weights and the log-sum-exp of every row, for any scores. Fill the gap, then run

python learn/03_softmax/check.py
"""

from __future__ import annotations

from torch import Tensor


def softmax_and_lse(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Weights `[..., n]`, softmax over the last dim, and lse `[...]`, the log of the sum of the exponentials.

    Scores are fp32 and may be as large as 1e30, in either sign. -inf hides a key: its weight is 0. A row in which every
    key is hidden has weights 0 and lse -inf. No result is ever NaN.
    """
    raise NotImplementedError("Shift each row by its own maximum. What is the maximum of a row that is all -inf?")
