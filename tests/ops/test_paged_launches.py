"""A cached call of ragged queries on paged keys launches what one prepared anew does.

No GPU is needed: `pretend_gpu` takes the road of a Hopper GPU up to the driver, and keeps the parameters of launches.
"""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
import torch
from torch import Tensor

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter has no driver; run without TRITON_INTERPRET=1", allow_module_level=True)
pytest.importorskip("triton")

from pretend_gpu import pretend_gpu
from stream_attention import paged_attention, paged_plan
from stream_attention.dispatch import launch_cache
from stream_attention.gpu import paged_call

Call = tuple[tuple[Tensor, ...], dict[str, Any]]


def call(
    rows: int = 40,
    requests: int = 3,
    page: int = 16,
    heads: int = 8,
    kv_heads: int = 2,
    dim: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    width: int = 12,
    by_head: bool = False,
    shifted: bool = False,
    gap: int = 0,
    listed: bool = False,
    entries: int = 30,
    e4m3: bool = False,
    **options: Any,
) -> Call:
    shift, width_of_row = 1 if shifted else 0, heads * dim + gap
    memory = torch.zeros((rows + 1) * width_of_row + shift, dtype=dtype)[shift:]
    query = memory.as_strided((rows, heads, dim), (width_of_row, dim, 1), shift)
    stored = torch.float8_e4m3fn if e4m3 else dtype
    pages = [torch.zeros(50, page, kv_heads, dim, dtype=stored) for _ in "kv"]
    if by_head:
        pages = [torch.zeros(50, kv_heads, page, dim, dtype=stored).transpose(1, 2) for _ in "kv"]
    offsets, keys = (torch.zeros(count, dtype=torch.int32) for count in (requests + 1, requests))
    table = {"page_table": torch.zeros(requests, width, dtype=torch.int32)}
    if listed:
        table = {"kv_indptr": offsets.clone(), "kv_indices": torch.zeros(entries, dtype=torch.int32)}
    return (query, *pages, offsets, keys), {"max_seqlen_q": 40, **table, **options}


CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "more queries": {"rows": 41},
    "tokens": {"max_seqlen_q": 1},
    "more requests": {"requests": 4},
    "pages of 64": {"page": 64},
    "other heads": {"heads": 4},
    "every head its keys": {"kv_heads": 8},
    "D 128": {"dim": 128},
    "fp16": {"dtype": torch.float16},
    "a wider table": {"width": 13},
    "heads before tokens": {"by_head": True},
    "off 16 bytes": {"shifted": True},
    "a list of pages": {"listed": True},
    "a list of more pages": {"listed": True, "entries": 31},
    "not causal": {"causal": False},
    "window": {"window": (7, 0)},
    "another window": {"window": (8, 0)},
    "softcap": {"softcap": 3.0},
    "scale": {"scale": 0.3},
    "sink": {"sink": torch.zeros(8)},
    "sink in bf16": {"sink": torch.zeros(8, dtype=torch.bfloat16)},
    "slopes": {"alibi_slopes": torch.zeros(8)},
    "slopes of requests": {"alibi_slopes": torch.zeros(3, 8)},
    "one request": {"requests": 1},
    "slopes of one request": {"requests": 1, "alibi_slopes": torch.zeros(3, 8)[:1]},
    "one query": {"rows": 1},
    "queries off 16 bytes of the next": {"gap": 1},
    "with the LSE": {"return_lse": True},
    "causal by requests": {"causal": torch.zeros(3, dtype=torch.bool)},
    "causal by requests, int32": {"causal": torch.zeros(3, dtype=torch.int32)},
    "causal by requests, window": {"causal": torch.zeros(3, dtype=torch.bool), "window": (-1, 5)},
    "a tree": {"tree_mask": torch.zeros(9) > 0, "tree_offsets": torch.zeros(4, dtype=torch.int32)},
    "a tree of more": {"tree_mask": torch.zeros(10) > 0, "tree_offsets": torch.zeros(4, dtype=torch.int32)},
    "a tree by int64": {"tree_mask": torch.zeros(9) > 0, "tree_offsets": torch.zeros(4, dtype=torch.int64)},
    "a tree, not causal": {
        "tree_mask": torch.zeros(9) > 0,
        "tree_offsets": torch.zeros(4, dtype=torch.int32),
        "causal": False,
    },
    "in e4m3": {"e4m3": True},
    "scaled": {"e4m3": True, "k_scale": torch.ones(()), "v_scale": torch.ones(())},
    "keys scaled": {"e4m3": True, "k_scale": torch.ones(())},
    "scaled by a number": {"e4m3": True, "k_scale": 2.0, "v_scale": 3.0},
    "scaled by another number": {"e4m3": True, "k_scale": 2.0, "v_scale": 4.0},
    "scaled by heads": {"e4m3": True, "k_scale": torch.ones(2), "v_scale": torch.ones(2)},
    "scaled by requests": {"e4m3": True, "k_scale": torch.ones(3, 1), "v_scale": torch.ones(3, 1)},
    "scaled by requests and heads": {"e4m3": True, "k_scale": torch.ones(3, 2), "v_scale": torch.ones(3, 2)},
    "batch-invariant": {"batch_invariant": True},
    "into an out": {"out": torch.zeros(40, 8, 64, dtype=torch.bfloat16)},
    "into an out with gaps": {"out": torch.zeros(40, 9, 64, dtype=torch.bfloat16)[:, :8]},
}


def launched(made: list[Any], one: Call) -> list[Any]:
    del made[:]
    tensors, options = one
    paged_attention(*tensors, **options, backend="triton")
    return list(made)


def test_a_cached_call_launches_what_a_fresh_one_does() -> None:
    rng = random.Random(0)
    with pretend_gpu() as made:
        launch_cache.clear()
        fresh = {}
        for name, given in CALLS.items():
            launch_cache.clear()
            fresh[name] = launched(made, call(**given))
            assert len(fresh[name]) == 3
        launch_cache.clear()
        names = [*CALLS] * 3
        rng.shuffle(names)
        for name in names:
            assert launched(made, call(**CALLS[name])) == fresh[name], name
        for name, its in fresh.items():
            twins = [other for other in fresh if other != name and fresh[other] == its]
            assert not twins, f"{name} launches what {twins} do"


def test_a_repeated_call_is_found() -> None:
    with pretend_gpu():
        launch_cache.clear()
        for rows, requests, longest in ((40, 3, 40), (41, 3, 50), (40, 7, 60)):
            tensors, options = call(rows=rows, requests=requests)
            paged_attention(*tensors, **options | {"max_seqlen_q": longest}, max_seqlen_k=longest, backend="triton")
        assert launch_cache.size() == 1, "how many queries and requests there are is no part of the key"


def test_layers_share_a_plan() -> None:
    tensors, options = call()
    with pretend_gpu() as made:
        launch_cache.clear()
        plan = paged_plan(*tensors, **options, backend="triton")
        assert [one.kernel for one in made] == ["_list_kernel"]
        for more in ({}, {"sink": torch.zeros(8)}, {"causal": False}):
            del made[:]
            paged_attention(*tensors, **options, **more, plan=plan, backend="triton")
            assert [one.kernel for one in made] == ["_paged_kernel", "_merge_splits_kernel"]
        again = paged_plan(*tensors, **options, out=plan, backend="triton")
        assert again.work is plan.work
        with pytest.raises(ValueError, match="plan: expected one made for tiles and sizes"):
            paged_attention(*tensors, **options, window=(3, 0), plan=plan, backend="triton")
        more_rows, options = call(rows=400)
        with pytest.raises(ValueError, match="plan: expected one made for tiles and sizes"):
            paged_attention(*more_rows, **options, plan=plan, backend="triton")
        with pytest.raises(ValueError, match="out: expected a contiguous int32 tensor of at least"):
            paged_plan(*more_rows, **options, out=plan, backend="triton")


def test_what_a_first_call_would_refuse_a_later_one_does_too() -> None:
    """Of dims of size 1 strides are not looked at, and how many requests there are is no part of the key."""
    tensors, options = call(requests=1, width=1)
    apart = torch.zeros(3, 2, dtype=torch.int32)
    with pretend_gpu():
        launch_cache.clear()
        paged_attention(*tensors[:4], apart[:1, 0], **options | {"page_table": apart[:1, :1]}, backend="triton")
        tensors, options = call()
        with pytest.raises(ValueError, match="seqused_k: expected a contiguous last dim"):
            paged_attention(*tensors[:4], apart[:, 0], **options, backend="triton")
        table = torch.zeros(3, 24, dtype=torch.int32)[:, ::2]
        with pytest.raises(ValueError, match="page_table: expected a contiguous last dim"):
            paged_attention(*tensors, **options | {"page_table": table}, backend="triton")


def test_calls_are_compared_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels write nothing here, so results are what memory held: 1 in an out that was given, 0 in a new one."""

    def zeros(like: Tensor, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype)

    monkeypatch.setattr(launch_cache, "COMPARE", True)
    tensors, options = call(out=torch.ones(40, 8, 64, dtype=torch.bfloat16))
    tensors[3][-1] = 40
    with pretend_gpu() as made:
        monkeypatch.setattr(paged_call, "empty", zeros)
        launch_cache.clear()
        with pytest.raises(RuntimeError, match="a cached call and one that was prepared anew differ"):
            paged_attention(*tensors, **options, backend="triton")
        assert [one.kernel for one in made] == ["_list_kernel", "_paged_kernel", "_merge_splits_kernel"] * 2


def test_what_is_no_tensor_is_refused_all_the_same() -> None:
    tensors, options = call()
    with pretend_gpu():
        launch_cache.clear()
        for place in range(5):
            wrong: Any = [*tensors]
            wrong[place] = None
            with pytest.raises((TypeError, ValueError)):
                paged_attention(*wrong, **options, backend="triton")
        paged_attention(*tensors, **options, backend="triton")
        with pytest.raises(TypeError, match="causal"):
            paged_attention(*tensors, **options | {"causal": 1}, backend="triton")
        with pytest.raises(ValueError, match="requires_grad"):
            paged_attention(tensors[0].clone().requires_grad_(), *tensors[1:], **options, backend="triton")
