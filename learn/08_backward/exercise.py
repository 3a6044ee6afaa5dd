"""Exercise of step 08: what one pair of tiles adds to the gradients, in PyTorch.

    s = scale * q k^T      p = exp(s - lse)      out = sum of p v over all tiles of keys

You are given the rows of a tile of queries (q, dout, lse, delta) and of a tile of keys (k, v). The LSE is that of the
whole row, over all keys, and delta = sum(dout * out) of the whole row.
"""

from torch import Tensor


def tile_gradients(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, lse: Tensor, delta: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`(dq, dk, dv)`: what this pair of tiles adds to the gradients of its queries, keys and values.

    q and dout are [M, D], k and v are [N, D], lse and delta are [M].
    """
    raise NotImplementedError("Five products: s, dv, dp, and from ds = p * (dp - delta) the gradients dq and dk.")
