"""The modules' `attention_mask` as the op's `mask` and `bias`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ..base.errors import refuse
from ..dispatch.validate import hint_about

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def split_mask(attention_mask: Tensor | None, query: Tensor, key: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """`(mask, bias)`, at most one of them not None, four dims each.

    A bool mask is True where a query attends, an integer one 1; a floating one is added to the scores. Two dims are
    `[B, Tk]`, three `[B, Tq, Tk]`, four are broadcastable to `[B, Hq, Tq, Tk]`. Two dims are refused where B = Tq > 1:
    they could be `[Tq, Tk]` as well. Values are checked where that needs no synchronisation, on the CPU and outside
    torch.compile: integers must be 0 and 1, and floats not 0 and 1 alone, which is how other libraries mark keys to
    keep.
    """
    name = "attention_mask"
    if attention_mask is None:
        return None, None
    if not isinstance(attention_mask, Tensor):
        refuse(name, "a torch.Tensor or None", type(attention_mask).__name__, hint_about(attention_mask), TypeError)
    if attention_mask.device != query.device:
        refuse(name, f"the query's device {query.device}", attention_mask.device)
    mask = _four_dims(attention_mask, query, key)
    if mask.is_floating_point():
        if not mask.requires_grad and _is_readable(mask) and _keeps(mask):
            hint = "Pass attention_mask.bool(); an additive mask is 0 for a visible key and -inf for a masked one"
            found = "0.0 and 1.0 alone, which looks like a mask of the keys to keep"
            refuse(name, "floats to be added to the scores", found, hint)
        return None, mask
    if mask.dtype is torch.bool:
        return mask, None
    if mask.dtype not in INTEGERS:
        refuse(name, "bool, integer or floating values", mask.dtype, error=TypeError)
    if _is_readable(mask) and ((mask != 0) & (mask != 1)).any():
        hint = "A mask that is added to the scores has a floating dtype"
        refuse(name, "integers 0 and 1 (1 = attend)", "others", hint)
    return mask != 0, None


def _is_readable(mask: Tensor) -> bool:
    """Whether the host can read the values without a synchronisation and without a graph break."""
    return (
        mask.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and not isinstance(mask, FakeTensor)
        and not torch._C._functorch.is_functorch_wrapped_tensor(mask)
    )


def _keeps(mask: Tensor) -> bool:
    """Whether a floating mask has the values 0.0 and 1.0, both, and no others."""
    ones = mask == 1  # rarely any: an additive mask has 0 and -inf
    return bool(ones.any()) and bool((mask == 0).any()) and bool((ones | (mask == 0)).all())


def _four_dims(attention_mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    full = (query.shape[0], query.shape[2], query.shape[1], key.shape[1])
    views = {2: (slice(None), None, None), 3: (slice(None), None), 4: ()}
    shape = list(attention_mask.shape)
    if len(shape) == 2 and shape[0] == full[0] == full[2] > 1 and shape[1] in (1, full[3]):
        hint = "Per sequence: attention_mask[:, None, None]; one mask for the whole batch: attention_mask[None]"
        expected = f"more than two dims where B = Tq = {full[0]}"
        refuse("attention_mask", expected, f"{shape}, which is [B, Tk] and [Tq, Tk] alike", hint)
    if attention_mask.dim() in views:
        wide = attention_mask[views[attention_mask.dim()]]
        if all(size in (1, whole) for size, whole in zip(wide.shape, full, strict=True)):
            return wide
    batch, _, q_len, k_len = full
    hint = "One mask for the whole batch is attention_mask[None]" if shape == [q_len, k_len] else ""
    shapes = f"[B, Tk] = {[batch, k_len]}, [B, Tq, Tk] = {[batch, q_len, k_len]}"
    refuse("attention_mask", f"{shapes}, or four dims broadcastable to [B, Hq, Tq, Tk] = {list(full)}", shape, hint)
