"""flash-attn's `bert_padding`: padded batches `[B, T, ...]` as packs `[N, ...]`, and back. All is differentiable."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

__all__ = [
    "index_first_axis",
    "index_first_axis_residual",
    "index_put_first_axis",
    "pad_input",
    "unpad_input",
    "unpad_input_for_concatenated_sequences",
]

Unpadded = tuple[Tensor, Tensor, Tensor, int]


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """The rows of `input` `[R, ...]` at `indices` `[N]`."""
    return input.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Rows `values` `[N, ...]` at `indices` `[N]` of a tensor `[first_axis_dim, ...]`, which is 0 elsewhere."""
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy(0, indices.long(), values)


def index_first_axis_residual(input: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """`index_first_axis`, and `input` itself for a residual branch: its gradients are added up."""
    return index_first_axis(input, indices), input.view_as(input)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """The rows of a padded batch that are tokens, as a pack. On a GPU the host waits for their number.

    Args:
        hidden_states: `[B, T, ...]`.
        attention_mask: bool or int `[B, T]`: what is not 0 is a token.
        unused_mask: bool or int `[B, T]`: rows that are in the pack, but no tokens.

    Returns:
        The pack `[N, ...]`, its rows' indices int64 `[N]` in `[B * T]`, `cu_seqlens` int32 `[B + 1]`, the longest
        sequence, and the tokens of each, int32 `[B]`.

    >>> import torch
    >>> from stream_attention.compat.bert_padding import pad_input, unpad_input
    >>> hidden, mask = torch.randn(2, 3, 4), torch.tensor([[1, 1, 0], [1, 1, 1]])
    >>> rows, indices, cu_seqlens, longest, used = unpad_input(hidden, mask)
    >>> rows.shape, cu_seqlens.tolist(), longest
    (torch.Size([5, 4]), [0, 2, 5], 3)
    >>> torch.equal(pad_input(rows, indices, 2, 3), hidden * mask[..., None])
    True
    """
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    used = attention_mask.sum(-1, dtype=torch.int32)
    lengths = used if unused_mask is None else kept.sum(-1, dtype=torch.int32)
    return *_packed(hidden_states, kept, lengths), used


def unpad_input_for_concatenated_sequences(hidden_states: Tensor, attention_mask_in_length: Tensor) -> Unpadded:
    """`unpad_input` of rows that hold several sequences each.

    Args:
        hidden_states: `[B, T, ...]`.
        attention_mask_in_length: int `[B, T]`: row b begins with sequences of these lengths, where they are not 0.

    Returns:
        The pack, indices, `cu_seqlens` and the longest sequence, as of `unpad_input`.

    >>> import torch
    >>> from stream_attention.compat.bert_padding import unpad_input_for_concatenated_sequences
    >>> lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [4, 0, 0, 0, 0, 0]])
    >>> unpad_input_for_concatenated_sequences(torch.randn(2, 6, 8), lengths)[2].tolist()
    [0, 2, 5, 9]
    """
    total, width = attention_mask_in_length.sum(-1, keepdim=True), attention_mask_in_length.shape[-1]
    kept = torch.arange(width, device=total.device) < total
    lengths = attention_mask_in_length[attention_mask_in_length != 0]
    return _packed(hidden_states, kept, lengths)


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """A pack `[N, ...]` as a padded batch `[batch, seqlen, ...]`, which is 0 where `indices` `[N]` have no row."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))


def _packed(hidden_states: Tensor, kept: Tensor, lengths: Tensor) -> Unpadded:
    indices = kept.flatten().nonzero().flatten()
    cu_seqlens = pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(lengths.max()) if lengths.numel() else 0
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, cu_seqlens, longest
