"""What the modules take as `attention_mask`, turned into the op's `mask` and `bias`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def split_mask(attention_mask: Tensor | None, query: Tensor, key: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """`(mask, bias)`, at most one of them not None, four dims each.

    A bool mask is True where a query attends, an integer one 1; a floating one is added to the scores. Two dims are
    `[B, Tk]`, three `[B, Tq, Tk]`, four are broadcastable to `[B, Hq, Tq, Tk]`. Two dims are refused where B = Tq > 1:
    they could be `[Tq, Tk]` as well. Values are looked at where that waits for nothing, on the CPU and outside
    torch.compile: integers are 0 and 1, and floats are not 0 and 1 alone, which is how others write a mask of what to
    keep.
    """
    if attention_mask is None:
        return None, None
    if not isinstance(attention_mask, Tensor):
        raise TypeError(f"attention_mask: expected a torch.Tensor or None; got {type(attention_mask).__name__}")
    if attention_mask.device != query.device:
        raise ValueError(f"attention_mask: expected the query's device {query.device}; got {attention_mask.device}")
    wide = _four_dims(attention_mask, query, key)
    if wide.is_floating_point():
        if not wide.requires_grad and _is_readable(wide) and _keeps(wide):
            raise ValueError(
                "attention_mask: expected floats to be added to the scores; got 0.0 and 1.0 alone, which looks like a "
                "mask of the keys to keep. Pass attention_mask.bool(); an additive mask is 0 for a key that is seen "
                "and -inf for one that is hidden"
            )
        return None, wide
    if wide.dtype is torch.bool:
        return wide, None
    if wide.dtype not in INTEGERS:
        raise TypeError(f"attention_mask: expected bool, integer or floating values; got {wide.dtype}")
    if _is_readable(wide) and ((wide != 0) & (wide != 1)).any():
        raise ValueError(
            "attention_mask: expected integers 0 and 1 (1 = attend); got others. "
            "A mask that is added to the scores has a floating dtype"
        )
    return wide != 0, None


def _is_readable(mask: Tensor) -> bool:
    """Whether the values are there to look at, without waiting for a device and without a graph that would be cut."""
    return (
        mask.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and not isinstance(mask, FakeTensor)
        and not torch._C._functorch.is_functorch_wrapped_tensor(mask)
    )


def _keeps(mask: Tensor) -> bool:
    """Whether a floating mask holds 0.0 and 1.0, both, and nothing else."""
    ones = mask == 1  # rarely any: a mask that is added holds 0 and -inf
    return bool(ones.any()) and bool((mask == 0).any()) and bool((ones | (mask == 0)).all())


def _four_dims(attention_mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    full = (query.shape[0], query.shape[2], query.shape[1], key.shape[1])
    views = {2: (slice(None), None, None), 3: (slice(None), None), 4: ()}
    shape = list(attention_mask.shape)
    if len(shape) == 2 and shape[0] == full[0] == full[2] > 1 and shape[1] in (1, full[3]):
        raise ValueError(
            f"attention_mask: expected more than two dims where B = Tq = {full[0]}; got {shape}, which is [B, Tk] and "
            "[Tq, Tk] alike. Keys of each sequence: attention_mask[:, None, None]; one mask for the whole batch: "
            "attention_mask[None]"
        )
    if attention_mask.dim() in views:
        wide = attention_mask[views[attention_mask.dim()]]
        if all(size in (1, whole) for size, whole in zip(wide.shape, full, strict=True)):
            return wide
    batch, _, q_len, k_len = full
    hint = ". One mask for the whole batch is attention_mask[None]" if shape == [q_len, k_len] else ""
    raise ValueError(
        f"attention_mask: expected [B, Tk] = {[batch, k_len]}, [B, Tq, Tk] = {[batch, q_len, k_len]}, or four dims "
        f"broadcastable to [B, Hq, Tq, Tk] = {list(full)}; got {shape}{hint}"
    )
