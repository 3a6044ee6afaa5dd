"""`decode_attention` over the slots of a static cache as one op, without a graph break under torch.compile."""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops.decode import decode_contiguous

_library = torch.library.Library("stream_attention", "FRAGMENT")
_library.define(
    "decode_static(Tensor query, Tensor key, Tensor value, Tensor lengths, Tensor? sink, int window, float softcap, "
    "float scale) -> Tensor"
)


def decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Tensor,
    sink: Tensor | None,
    window: int,
    softcap: float,
    scale: float,
) -> Tensor:
    """Attention of the newest queries `[B, Tq, Hq, D]` over the first `lengths[b]` keys `[B, T, Hkv, D]` of each row.

    `window` includes the query's own key; 0: no window. It is not differentiable. A compiled graph calls it as an op.
    """
    if torch.compiler.is_compiling():
        return torch.ops.stream_attention.decode_static(query, key, value, lengths, sink, window, softcap, scale)
    sides = (window - 1, 0) if window else None
    return decode_contiguous(query, key, value, lengths, sink, sides, softcap, scale)


def _fake(query: Tensor, key: Tensor, value: Tensor, *_: object) -> Tensor:
    return query.new_empty(*query.shape[:3], value.shape[3])


_library.impl("decode_static", decode, "CompositeExplicitAutograd")
torch.library.register_fake("stream_attention::decode_static", _fake, lib=_library)
