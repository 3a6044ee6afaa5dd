"""Checks of calls on pages: of ragged queries, and of new tokens."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..base.errors import refuse
from ..base.fp8_layout import E4M3
from ..base.kv_layouts import checks
from ..base.problem import UNBOUNDED, PagedInputs
from . import validate

MOST_TOKENS = 1024
"""Of a page."""


def tensors(inputs: PagedInputs, max_seqlen_q: Any, max_seqlen_k: Any) -> None:
    """Check all but values."""
    query, key, value, cu_seqlens_q, seqused_k, table, indptr, *_, out, _ = inputs
    validate.tensor_beside("query", query, query)
    validate.floating("query", query, query)
    checks.stores(("key_pages", "value_pages"), key, value, "P, page", (E4M3,))
    if query.dim() != 3 or query.shape[2] != key.shape[3]:
        hint = "Pack the queries of all requests: query.flatten(0, 1)." if query.dim() == 4 else ""
        refuse("query", f"[Nq, Hq, D={key.shape[3]}] to match key_pages", list(query.shape), hint)
    if key.dtype not in (query.dtype, E4M3):
        refuse("query", f"the dtype of key_pages, {key.dtype}", query.dtype, error=TypeError)
    if query.device != key.device:
        refuse("query", f"the device of key_pages, {key.device}", query.device)
    if query.stride(-1) != 1 and query.shape[-1] > 1 and query.numel() > 0:
        refuse("query", "a contiguous last dim", f"strides {query.stride()}", "Call .contiguous() on it first.")
    hint = "key_pages is read as [P, page, Hkv, D]; where heads lie before tokens pass key_pages.transpose(1, 2)."
    validate.grouped(query, key.shape[2], hint)
    if key.shape[0] < 1 or not 1 <= key.shape[1] <= MOST_TOKENS:
        expected = f"at least one page, of 1 to {MOST_TOKENS} tokens"
        refuse("key_pages", expected, list(key.shape), "The layout is [P, page, Hkv, D].")
    _int32("seqused_k", seqused_k, query, (None,), "[B]")
    batch = seqused_k.shape[0]
    validate.is_tensor("cu_seqlens_q", cu_seqlens_q)
    swapped = "Are the two swapped?" if cu_seqlens_q.shape == (batch - 1,) else ""
    _int32("cu_seqlens_q", cu_seqlens_q, query, (batch + 1,), "[B + 1 = {}], one more than seqused_k", swapped)
    if indptr is None:
        hint = "For a list of pages behind each other pass kv_indptr and kv_indices."
        _int32("page_table", table, query, (batch, None), "[B={}, pages of a request]", hint)
        if table.shape[1] < 1:
            refuse("page_table", "at least one page for each request", list(table.shape))
    else:
        _int32("kv_indptr", indptr, query, (batch + 1,), "[B + 1 = {}]")
        legend = "[pages of all requests]"
        _integers("kv_indices", table, query, (None,), legend, "", torch.int32, torch.int64)
    validate.whole_int("max_seqlen_q", max_seqlen_q, 0)
    if max_seqlen_k is not None:
        validate.whole_int("max_seqlen_k", max_seqlen_k, 0)
    validate.per_head(inputs.alibi_slopes, inputs.sink, query, batch, query.shape[1])
    _scales(inputs)
    if inputs.causal is not None:
        _integers("causal", inputs.causal, query, (batch,), "[B={}]", "", torch.bool, torch.int32)
    _tree(inputs)
    if out is not None:
        validate.tensor_beside("out", out, query)
        shape = (*query.shape[:2], value.shape[3])
        if out.shape != shape or out.dtype is not query.dtype:
            refuse("out", f"{query.dtype} of shape {list(shape)}", f"{out.dtype} of shape {list(out.shape)}")
        if out.stride(-1) != 1 and out.shape[-1] > 1 and out.numel() > 0:
            refuse("out", "a contiguous last dim", f"strides {out.stride()}")
        checks.writable("out", out)


def _scales(inputs: PagedInputs) -> None:
    """Check the scales of pages."""
    query, batch, heads = inputs.query, inputs.seqused_k.shape[0], inputs.key_pages.shape[2]
    for name in ("k_scale", "v_scale"):
        scale = getattr(inputs, name)
        if scale is None:
            continue
        validate.tensor_beside(name, scale, query)
        if scale.dtype is not torch.float32:
            refuse(name, "dtype torch.float32", scale.dtype, f"Call {name}.float().", TypeError)
        if scale.shape not in ((), (1,), (heads,), (batch, heads), (batch, 1), (1, heads), (1, 1)):
            refuse(name, f"shape [], [Hkv={heads}] or [B={batch}, Hkv={heads}]", list(scale.shape))


def _tree(inputs: PagedInputs) -> None:
    """Check the masks of draft tokens."""
    tree, offsets, batch = inputs.tree_mask, inputs.tree_offsets, inputs.seqused_k.shape[0]
    if (tree is None) != (offsets is None):
        name, here = ("tree_mask", "tree_offsets")[:: 1 if tree is None else -1]
        hint = "tree_mask has [q_b, q_b] of every request that has a tree, one behind the other, from tree_offsets[b]."
        refuse(name, f"a tensor beside {here}", "None", hint)
    if tree is not None:
        _integers("tree_offsets", offsets, inputs.query, (batch + 1,), "[B + 1 = {}]", "", torch.int32, torch.int64)
        hint = "Pack the masks of all requests: torch.cat([mask.flatten() for mask in masks])."
        _integers("tree_mask", tree, inputs.query, (None,), "[elements of all trees]", hint, torch.bool)


def values(inputs: PagedInputs, max_seqlen_q: int, max_seqlen_k: int | None, left: int) -> None:
    """Check offsets, lengths and pages. Synchronises."""
    key, offsets, lengths = inputs.key_pages, inputs.cu_seqlens_q.tolist(), inputs.seqused_k.tolist()
    validate.cu_seqlens_values("cu_seqlens_q", offsets, inputs.query.shape[0], max_seqlen_q)
    pages, page = key.shape[:2]
    if inputs.kv_indptr is not None:
        validate.cu_seqlens_values("kv_indptr", inputs.kv_indptr.tolist(), inputs.page_table.shape[0], None)
    if inputs.tree_offsets is not None and inputs.tree_mask is not None:
        _tree_values(inputs.tree_offsets.tolist(), inputs.tree_mask.shape[0], offsets)
    room = inputs.page_table.shape[-1] * page
    most = room if max_seqlen_k is None else min(max_seqlen_k, room)
    for request, length in enumerate(lengths):
        if not 0 <= length <= most:
            refuse("seqused_k", f"from 0 to the {most} keys that a request may have", f"{length} of request {request}")
        queries = offsets[request + 1] - offsets[request]
        if not queries:
            continue
        first = 0 if left == UNBOUNDED else max(0, length - queries - left)
        its = row_of(inputs, request)[first // page : -(-length // page)]
        name = "page_table" if inputs.kv_indptr is None else "kv_indices"
        if its.numel() < -(-length // page) - first // page:
            refuse(name, f"a page for each of the {length} keys of request {request}", f"{its.numel()} pages")
        missing = (its < 0) | (its >= pages)
        if missing.any():
            wrong = int(its[missing][0])
            refuse(name, f"pages from 0 to {pages - 1} for the {length} keys of request {request}", wrong)


def _tree_values(begins: list[int], elements: int, offsets: list[int]) -> None:
    """Check where the masks of trees begin."""
    if begins[0] < 0 or begins[-1] > elements:
        refuse("tree_offsets", f"from 0 to the {elements} elements of tree_mask", [begins[0], begins[-1]])
    for request, (begin, end) in enumerate(pairwise(begins)):
        queries = offsets[request + 1] - offsets[request]
        if end - begin not in (0, queries**2):
            expected = f"the {queries} x {queries} elements of request {request}, or none"
            refuse("tree_offsets", expected, f"{end - begin}, from {begin} to {end}")


def row_of(inputs: PagedInputs, request: int) -> Tensor:
    """The pages of a request."""
    table, indptr = inputs.page_table, inputs.kv_indptr
    if indptr is None:
        return table[request]
    first, last = (max(0, int(indptr[request + n])) for n in (0, 1))
    return table[first:last]


def writing(
    key: Tensor,
    value: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    slots: Tensor,
    k_scale: Tensor | float | None,
    v_scale: Tensor | float | None,
) -> None:
    """Check the tensors of `write_kv`, but not the values of its slots."""
    for name, new, dim in (("key", key, "D"), ("value", value, "Dv")):
        validate.tensor_beside(name, new, key, "key")
        validate.floating(name, new, key)
        _lines(name, new, f"[N, Hkv, {dim}]")
        if min(new.shape[1:]) < 1:
            refuse(name, "at least one head and one head dim", list(new.shape))
    if value.dtype is not key.dtype:
        refuse("value", f"the key's dtype {key.dtype}", value.dtype, error=TypeError)
    if value.shape[1] != key.shape[1]:
        refuse("value", f"the key's heads, [N, {key.shape[1]}, Dv]", list(value.shape))
    for name, store, new in (("key_pages", key_pages, key), ("value_pages", value_pages, value)):
        validate.tensor_beside(name, store, key, "key")
        lead, (heads, width) = "slots" if store.dim() == 3 else "P, page", new.shape[1:]
        _lines(name, store, f"[{lead}, {heads}, {width}]")
        if store.dtype not in (key.dtype, E4M3):
            hint = "To write e4m3, pass pages.view(torch.float8_e4m3fn)." if store.dtype is torch.uint8 else ""
            refuse(name, f"the key's dtype {key.dtype}, or {E4M3}", store.dtype, hint, TypeError)
        if store.shape[-2:] != new.shape[1:] or store.shape[-3] < 1 <= store.shape[0]:
            refuse(name, f"shape [{lead}, {heads}, {width}]", list(store.shape))
        checks.writable(name, store)
    if value_pages.dtype is not key_pages.dtype:
        refuse("value_pages", f"the dtype of key_pages, {key_pages.dtype}", value_pages.dtype, error=TypeError)
    if value_pages.shape[:-1] != key_pages.shape[:-1]:
        refuse("value_pages", f"shape {list(key_pages.shape[:-1])} + [Dv], as key_pages", list(value_pages.shape))
    validate.tensor_beside("slots", slots, key, "key")
    if slots.dtype not in (torch.int32, torch.int64):
        refuse("slots", "dtype torch.int32 or torch.int64", slots.dtype, error=TypeError)
    if slots.dim() != 1:
        refuse("slots", "shape [N]", list(slots.shape))
    for name, new in (("key", key), ("value", value)):
        if new.shape[0] < slots.shape[0]:
            refuse(name, f"a token for each of the {slots.shape[0]} slots", list(new.shape))
    tensors = {"key": key, "value": value, "key_pages": key_pages, "value_pages": value_pages}
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if isinstance(scale, Tensor):
            tensors[name] = scale
            validate.tensor_beside(name, scale, key, "key")
            if scale.dtype is not torch.float32:
                refuse(name, "dtype torch.float32", scale.dtype, f"Call {name}.float().", TypeError)
            if scale.shape not in ((), (1,), (key.shape[1],)):
                refuse(name, f"shape [] or [Hkv={key.shape[1]}]", list(scale.shape))
    validate.without_gradient("write_kv", "detached tensors", **tensors)


def scale(name: str, scale: Any, pages: Any) -> Tensor | float:
    """Check a scale of pages: of one that is a tensor only that the pages are e4m3. A number is returned as a float."""
    if isinstance(pages, Tensor) and pages.dtype is not E4M3:
        hint = "To use e4m3, pass pages.view(torch.float8_e4m3fn)." if pages.dtype is torch.uint8 else ""
        refuse(name, f"None for pages in {pages.dtype}, which are not scaled", "a scale", hint)
    if isinstance(scale, Tensor):
        return scale
    validate.real(name, scale)
    if not validate.SMALLEST <= scale <= validate.LARGEST:
        refuse(name, f"from {validate.SMALLEST:g} to {validate.LARGEST:g}, so that fp32 can represent it", scale)
    return float(scale)


def slots(given: Tensor, key_pages: Tensor) -> None:
    """Synchronises. Refuse slots beyond the pages."""
    capacity = key_pages.shape[0] * (key_pages.shape[1] if key_pages.dim() == 4 else 1)
    beyond = (given.long() >= capacity).nonzero()
    if beyond.numel():
        token = int(beyond[0])
        refuse("slots", f"below {capacity}, or negative to skip a token", f"{int(given[token])} at [{token}]")


def _lines(name: str, given: Tensor, shape: str) -> None:
    """Refuse another number of dims, and a last one with gaps."""
    if given.dim() != 1 + shape.count(","):
        refuse(name, f"shape {shape}", list(given.shape))
    if given.stride(-1) != 1 and given.shape[-1] > 1 and given.numel() > 0:
        refuse(name, "a contiguous last dim", f"strides {given.stride()}", "Call .contiguous() on it first.")


def _int32(name: str, given: Any, query: Tensor, shape: tuple[int | None, ...], legend: str, hint: str = "") -> None:
    _integers(name, given, query, shape, legend, hint, torch.int32)


def _integers(
    name: str,
    given: Any,
    query: Tensor,
    shape: tuple[int | None, ...],
    legend: str,
    hint: str,
    *dtypes: torch.dtype,
) -> None:
    """Integers, or what one of `dtypes` is, of a shape; None is any size. `legend` has a place for the first: a string
    with the sizes of a compiled graph in it would fix them."""
    validate.tensor_beside(name, given, query)
    if given.dtype not in dtypes:
        cast = {torch.bool: "bool", torch.int32: "int"}[dtypes[0]]
        expected = f"dtype {' or '.join(map(str, dtypes))}"
        refuse(name, expected, given.dtype, f"Call {name}.{cast}().", TypeError)
    if given.dim() != len(shape) or any(n is not None and n != m for n, m in zip(shape, given.shape, strict=True)):
        refuse(name, f"shape {legend.format(*shape)}", list(given.shape), hint)
    if given.shape[-1] > 1 and given.stride(-1) != 1:
        refuse(name, "a contiguous last dim", f"strides {given.stride()}", "Call .contiguous() on it first.")
