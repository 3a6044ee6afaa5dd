"""write_kv(): new tokens to the slots of a paged cache that a serving engine has chosen."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..backends.installed import makes_fp8_codes, runs_triton
from ..base.errors import refuse
from ..base.fp8_layout import E4M3
from ..base.kv_layouts import checks
from ..base.kv_layouts.write import as_e4m3, put, slot_places
from ..dispatch import call_key, launch_cache, validate_paged
from ..dispatch.call_key import NO_LAYOUT, PLAIN_TYPES, Key, layout_of


def write_kv(
    key: Tensor,
    value: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    slots: Tensor,
    *,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
    validate: bool | None = None,
) -> None:
    """Write new tokens to slots of a paged cache, in place: slot s is token `s % page` of page `s // page`.

    Which slots, a serving engine decides: they are vLLM's `slot_mapping`, SGLang's `out_cache_loc` and the
    `write_index` of transformers. A negative slot skips its token. Where two tokens have one slot, it is undefined
    which of them is written. One Triton kernel does it on GPUs that support it (with pages in e4m3 from compute
    capability 8.9 on), with the same bits as the torch operations that do it elsewhere; a CUDA graph may replay it. It
    is not differentiable: with gradients enabled, tensors that require one are refused.

    Args:
        key: `[N', Hkv, D]`, fp16, bf16, fp32 or fp64, N' at least N: rows behind the last slot are not read.
        value: `[N', Hkv, Dv]`, in the key's dtype.
        key_pages: `[P, page, Hkv, D]`, or `[slots, Hkv, D]` with pages of one token, in the key's dtype or e4m3
            (`torch.float8_e4m3fn`). Any strides with a contiguous last dim: keys and values may lie side by side in one
            tensor.
        value_pages: `[P, page, Hkv, Dv]`, likewise.
        slots: int32 or int64 `[N]`.
        k_scale, v_scale: for pages in e4m3: key / k_scale is rounded, in fp32, and saturated at 448; NaN stays NaN. A
            number, or fp32 `[]` or `[Hkv]`, which the host never reads; None: 1.
        validate: True: refuse slots beyond the pages first. None: on a CPU only, since the check synchronises with a
            GPU. Unchecked, their tokens are skipped.

    Raises:
        ValueError, TypeError: a bad argument, before any work; the message names it with expected and actual.

    >>> import torch
    >>> from stream_attention import write_kv
    >>> pages = torch.zeros(8, 16, 2, 128).split(64, -1)  # 8 pages of 16 tokens, keys and values of 2 heads of 64
    >>> write_kv(*torch.ones(2, 3, 2, 64), *pages, torch.tensor([17, -1, 40]))  # the second token is skipped
    >>> [int(page.count_nonzero()) for page in pages[0]]
    [0, 128, 128, 0, 0, 0, 0, 0]
    """
    if k_scale is not None:
        k_scale = validate_paged.scale("k_scale", k_scale, key_pages)
    if v_scale is not None:
        v_scale = validate_paged.scale("v_scale", v_scale, value_pages)
    tensors = key, value, key_pages, value_pages, slots, k_scale, v_scale
    is_watched, cache_key, call = call_key.is_watched(), None, None
    if not is_watched:
        cache_key, call = _find(tensors)
    if call is None or checks.overlap(tensors, call.extents):
        validate_paged.writing(*tensors)
        if not is_watched:
            _refuse_overlap(tensors)
    if checks.should_validate(validate, slots):
        validate_paged.slots(slots, key_pages)
    if is_watched:
        scales = [key.new_full((), t, dtype=torch.float32) if isinstance(t, float) else t for t in tensors[5:]]
        torch.ops.stream_attention.write_kv(*tensors[:5], *scales)
    else:
        _write(tensors, cache_key, call)


Tensors = tuple[Any, ...]
"""Key, value, the pages of both, slots, and two scales, each a tensor, a number or None."""


def _find(tensors: Tensors) -> tuple[Key | None, Any]:
    """The key of a call, and the call if it is in the launch cache."""
    cache_key = _key_of(tensors) if launch_cache.ENABLED else None
    return cache_key, None if cache_key is None else launch_cache.find(cache_key, tensors)


def _key_of(tensors: Tensors) -> Key | None:
    """The key of a call; None where a tensor is more than its memory, has none, wants a gradient or may not be written
    to."""
    key, value, *stores, slots, k_scale, v_scale = tensors
    new, written = [layout_of(key), layout_of(value), layout_of(slots)], [layout_of(store) for store in stores]
    scales = [layout_of(t) if isinstance(t, Tensor) else None for t in (k_scale, v_scale)]
    if NO_LAYOUT in new or NO_LAYOUT in written or NO_LAYOUT in scales:
        return None
    if torch.is_grad_enabled() and torch._C._any_requires_grad(*tensors):
        return None
    if not torch.is_inference_mode_enabled() and (stores[0].is_inference() or stores[1].is_inference()):
        return None
    return Key((write_kv, *written, *scales), (*new,))


def _refuse_overlap(tensors: Tensors) -> None:
    """Refuse new tokens, of a call that was checked, that lie in the pages, and values that lie in those of keys."""
    written = tensors[:4]
    if not tensors[4].numel() or any(type(t) not in PLAIN_TYPES or t.is_meta or not t.numel() for t in written):
        return
    found = checks.overlap(tensors, checks.extents(tensors))
    if found is not None:
        name, pages = found
        refuse(name, f"memory apart from {pages}", "overlapping memory", checks.HINT_TO_COPY)


def _write(tensors: Tensors, cache_key: Key | None, call: Any) -> None:
    """Write tokens that were checked: by a kernel, `call` or one that is prepared now, or by torch operations."""
    _, _, key_pages, _, slots, *_ = tensors
    if call is None:
        if not slots.numel() or not key_pages.numel():
            return
        if not _has_kernel(tensors):
            return _operate(tensors)
        from ..gpu.write_kv import WriteKV

        call = WriteKV.prepare(tensors)
        if cache_key is not None:
            launch_cache.keep(cache_key, call, template=call)
    launch_cache.write("write_kv", call, tensors, (2, 3))


def _has_kernel(tensors: Tensors) -> bool:
    """Whether the Triton kernel supports the tensors of a call that was validate_paged."""
    if any(isinstance(t, Tensor) and (type(t) not in PLAIN_TYPES or t.is_neg()) for t in tensors):
        return False  # fake tensors, and views that differ from memory
    key, _, key_pages, *_ = tensors
    makes_codes = key_pages.dtype is not E4M3 or key.is_cpu or makes_fp8_codes(key.device)
    return makes_codes and key.dtype is not torch.float64 and runs_triton(key.device)


@torch.no_grad()
def _operate(tensors: Tensors) -> None:
    """Write tokens by torch operations."""
    key, value, *stores, slots, k_scale, v_scale = tensors
    for store, new, scale in zip(stores, (key, value), (k_scale, v_scale), strict=True):
        new = new[: slots.shape[0]]
        if store.dtype is E4M3:
            new = as_e4m3(new, 1.0 if scale is None else scale)
        pages = store if store.dim() == 4 else store.unsqueeze(1)
        put(pages, slot_places(slots, pages), new.unsqueeze(0))


def _write_outside(*tensors: Any) -> None:
    """The op of a compiled graph, which was checked when it was traced."""
    _write(tensors, *_find(tensors))


_library = torch.library.Library("stream_attention", "FRAGMENT")
_library.define(
    "write_kv(Tensor key, Tensor value, Tensor(a!) key_pages, Tensor(b!) value_pages, Tensor slots, Tensor? k_scale, "
    "Tensor? v_scale) -> ()"
)
_library.impl("write_kv", _write_outside, "CompositeExplicitAutograd")
torch.library.register_fake("stream_attention::write_kv", lambda *_: None, lib=_library)
