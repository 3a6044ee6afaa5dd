"""A cached call on a cache launches what one prepared anew does: the same kernels, grids and parameters.

No GPU is needed: `pretend_gpu` takes the road of a Hopper GPU up to the driver, and keeps the parameters of launches.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter has no driver; run without TRITON_INTERPRET=1", allow_module_level=True)
pytest.importorskip("triton")

from pretend_gpu import Launched, pretend_gpu
from stream_attention import ContiguousKV, PagedKV, decode_attention, decode_workspace, quantize_kv
from stream_attention.base.kv_layouts import KVCache
from stream_attention.dispatch import launch_cache
from stream_attention.ops import decode

BATCH, HEADS, KV_HEADS, DIM = 2, 8, 2, 64


def empty(*shape: int, by_head: bool = False) -> Tensor:
    """bf16 `[..., T, H, D]`; `by_head`: heads lie before tokens."""
    *lead, tokens, heads, dim = shape
    if by_head:
        return torch.zeros(*lead, heads, tokens, dim, dtype=torch.bfloat16).transpose(-2, -3)
    return torch.zeros(shape, dtype=torch.bfloat16)


def lengths_of(tokens: int, batch: int = BATCH) -> Tensor:
    return torch.full((batch,), tokens, dtype=torch.int32)


def rows(tokens: int = 1024, batch: int = BATCH, dim: int = DIM, by_head: bool = False) -> ContiguousKV:
    key, value = (empty(batch, tokens, KV_HEADS, dim, by_head=by_head) for _ in range(2))
    return ContiguousKV(key, value, lengths_of(tokens - 5, batch))


def pages(page: int = 64, tokens: int = 1024, strided: bool = False) -> PagedKV:
    key, value = (empty(BATCH * tokens // page, page, KV_HEADS, DIM) for _ in range(2))
    table = torch.zeros(tokens // page, BATCH, dtype=torch.int32).t()
    return PagedKV(key, value, table if strided else table.contiguous(), lengths_of(tokens - 5))


def quantized(format: str, cache: Callable[[], Any] = rows, **options: Any) -> KVCache:
    with torch.no_grad():
        return quantize_kv(cache(), format, **{"group": 64, "residual": 64, **options})


CACHES: dict[str, Callable[[], KVCache]] = {
    "rows": rows,
    "rows, long": lambda: rows(8192),
    "rows, one": lambda: rows(batch=1),
    "rows, D 128": lambda: rows(dim=128),
    "rows, heads before tokens": lambda: rows(by_head=True),
    "rows, no lengths": lambda: ContiguousKV(empty(BATCH, 512, KV_HEADS, DIM), empty(BATCH, 512, KV_HEADS, DIM)),
    "rows, a key that is the value": lambda: ContiguousKV(*[empty(BATCH, 512, KV_HEADS, DIM)] * 2),
    "rows, lengths apart": lambda: ContiguousKV(
        *(empty(BATCH, 512, KV_HEADS, DIM) for _ in range(2)), lengths_of(9, 2 * BATCH)[::2]
    ),
    "pages of 16": lambda: pages(16),
    "pages of 64": pages,
    "pages, a table by columns": lambda: pages(strided=True),
    "int4": lambda: quantized("int4"),
    "int8": lambda: quantized("int8"),
    "fp8": lambda: quantized("fp8"),
    "int4 in pages": lambda: quantized("int4", pages),
    "int4, groups of 16, by Triton": lambda: quantized("int4", group=16),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "with the LSE": {"return_lse": True},
    "a window": {"window": (100, 0)},
    "not causal": {"causal": False, "window": (30, 2)},
    "softcap and scale": {"softcap": 9.0, "scale": 0.3},
    "one split": {"num_splits": 1, "backend": "triton"},
    "batch-invariant": {"batch_invariant": True},
    "slopes and a sink": {"alibi_slopes": torch.ones(HEADS), "sink": torch.ones(HEADS)},
    "slopes of each row": {"alibi_slopes": torch.ones(BATCH, HEADS)},
    "a sink of every other number": {"sink": torch.ones(2 * HEADS)[::2]},
    "a tree": {"tree_mask": torch.ones(BATCH, 3, 3, dtype=torch.bool), "q_len": 3},
    "five queries": {"q_len": 5},
    "a query by heads": {"q_len": 3, "by_head": True},
    "a query of every other number": {"apart": True},
}


def call(cache: KVCache, q_len: int = 1, by_head: bool = False, apart: bool = False, **options: Any) -> Any:
    query = empty(cache.batch, q_len, HEADS, cache.head_dim * (2 if apart else 1), by_head=by_head)
    for name, t in options.items():
        if isinstance(t, Tensor) and t.dim() > 1:
            options[name] = t[: cache.batch]
    return decode_attention(query[..., ::2] if apart else query, cache, **options)


@pytest.mark.parametrize("asked", OPTIONS)
@pytest.mark.parametrize("name", CACHES)
def test_a_cached_call_launches_what_a_fresh_one_does(name: str, asked: str) -> None:
    options = OPTIONS[asked]
    with pretend_gpu() as launches:

        def launched(cache: KVCache) -> list[Launched]:
            launches.clear()
            call(cache, **options)
            tensors = [t for t in cache.tensors if t is not None]
            read = [t.data_ptr() for t in tensors if t.shape[-1] == 1 or t.stride(-1) == 1 or t.dim() == 4]
            addresses = launches[0].addresses[1 : len(tensors) + 1]  # behind the query's
            assert [at for at in addresses if at in read] == read and len(read) >= len(tensors) - 1
            return launches[:]

        caches = [CACHES[name]() for _ in range(2)]
        first, again, other = launched(caches[0]), launched(caches[0]), launched(caches[1])
        assert launch_cache.size() == 1, "a cache that lies as one before adds no entry"
        launch_cache.clear()
        assert first == again == other == launched(caches[1]) != []


GROWING: dict[str, Callable[[int], KVCache]] = {
    "rows": rows,
    "rows, D 128": lambda tokens: rows(tokens, dim=128),
    "rows, heads before tokens": lambda tokens: rows(tokens, by_head=True),
    "rows, one": lambda tokens: rows(tokens, batch=1),
    "rows, no lengths": lambda tokens: ContiguousKV(*(empty(BATCH, tokens, KV_HEADS, DIM) for _ in range(2))),
    "pages": lambda tokens: pages(16, -(-tokens // 16) * 16),
}


@pytest.mark.parametrize(
    "asked", ["plain", "with the LSE", "a window", "softcap and scale", "batch-invariant", "one split"]
)
@pytest.mark.parametrize("name", GROWING)
def test_other_capacities_and_numbers_of_queries_launch_what_fresh_calls_do(name: str, asked: str) -> None:
    draw = random.Random(name + asked)
    drawn = [(draw.randint(1, 9000) if n % 2 else 1900 + n, draw.choice((1, 1, 2, 5, 17, 40))) for n in range(40)]
    with pretend_gpu() as launches:

        def launched(tokens: int, q_len: int) -> list[Launched]:
            launches.clear()
            call(GROWING[name](tokens), q_len, **OPTIONS[asked])
            return launches[:]

        made = [launched(*one) for one in drawn]
        for one, found in zip(drawn, made, strict=True):
            launch_cache.clear()
            assert launched(*one) == found != []


def test_a_cache_that_grows_is_prepared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where draft tokens come in between. What never comes back leaves nothing behind."""
    with pretend_gpu():
        for tokens in (1900, 1901):
            for q_len in (1, 5):
                call(rows(tokens), q_len)
        monkeypatch.setattr(decode, "_planned", None)
        for tokens in range(1902, 1990):
            for q_len in (1, 5):
                call(rows(tokens), q_len)
        assert launch_cache.size() == 2


def test_what_has_lengths_of_its_own_is_prepared_anew() -> None:
    query, cache = empty(BATCH, 3, HEADS, DIM), rows(8192)
    with pretend_gpu() as launches:
        for q_len in (3, 2):
            out, tree = empty(BATCH, q_len, HEADS, DIM), torch.ones(BATCH, q_len, q_len, dtype=torch.bool)
            workspace = decode_workspace(query[:, :q_len], cache)
            for given in ({"out": out}, {"tree_mask": tree}, {"workspace": workspace}):
                launches.clear()
                decode_attention(query[:, :q_len], cache, **given)
                found = launches[:]
                with pytest.raises((ValueError, TypeError)) if "workspace" not in given else nullcontext():
                    decode_attention(query[:, :1], cache, **given)
                launches.clear()
                decode_attention(query[:, :q_len], cache, **given)
                assert launches == found


def test_keys_and_values_of_unequal_lengths_are_refused_beside_caches_of_others() -> None:
    query, cache = empty(BATCH, 1, HEADS, DIM), rows(1000)
    with pretend_gpu():
        for _ in range(2):
            decode.decode_contiguous(query, cache.key, cache.value, cache.lengths, None, 0, 0.0, 0.125)
        with pytest.raises(ValueError, match="value: expected"):
            decode.decode_contiguous(query, cache.key, cache.value[:, :999], cache.lengths, None, 0, 0.0, 0.125)


def test_every_kind_of_cache_shares_one_store(monkeypatch: pytest.MonkeyPatch) -> None:
    with pretend_gpu():
        caches = [make() for make in CACHES.values()]
        for cache in caches:
            for _ in range(2):  # one that is made from another is kept from its second use on
                call(cache)
        assert launch_cache.size() == len(caches) - 1  # "rows, no lengths" lies as the one whose key is its value
        monkeypatch.setattr(launch_cache, "LIMIT", 4)
        for _ in range(2):
            call(rows(768))
        assert launch_cache.size() == 4
        monkeypatch.setattr(decode, "_planned", None)
        for cache in caches[-3:]:
            call(cache)  # the newest are still there


def test_results_and_workspace_are_written_where_they_are_given() -> None:
    cache, query = rows(8192), empty(BATCH, 1, HEADS, DIM)
    apart = torch.zeros(BATCH, 1, HEADS, 2 * DIM, dtype=torch.bfloat16)
    with pretend_gpu() as launches:
        workspace = decode_workspace(query, cache)
        assert workspace.numel()
        for out in (torch.zeros_like(query), apart[..., :DIM], apart[..., ::2]):
            for _ in range(2):
                version = out._version
                assert decode_attention(query, cache, out=out, workspace=workspace) is out and out._version > version
            *_, first, _, again, _ = launches  # of each call the kernel and the merge
            assert first == again
        assert launch_cache.size() == 3


def test_static_caches_of_transformers_are_found_by_layout(monkeypatch: pytest.MonkeyPatch) -> None:

    query, sink = empty(BATCH, 1, HEADS, DIM), torch.ones(HEADS)
    with pretend_gpu() as launches:
        for given in (None, sink):
            for _ in range(3):
                cache = rows(by_head=True)
                decode.decode_contiguous(query, cache.key, cache.value, cache.lengths, given, 100, 0.0, 0.125)
        assert launch_cache.size() == 2 and launches[:2] == launches[1:3] and launches[3:5] == launches[4:]
        decode_attention(query, cache, window=(99, 0), scale=0.125)
        assert launch_cache.size() == 2
        monkeypatch.delattr(ContiguousKV, "__post_init__")  # nothing is checked anew
        monkeypatch.setattr(decode, "_planned", None)
        decode.decode_contiguous(query, cache.key, cache.value, cache.lengths, None, 100, 0.0, 0.125)
        monkeypatch.undo()
        with pytest.raises(ValueError, match="value: expected"):
            decode.decode_contiguous(query, cache.key, cache.value[:, :9], cache.lengths, None, 100, 0.0, 0.125)


def test_what_the_switches_say_holds_for_caches_too(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = ContiguousKV(*torch.randn(2, 2, 20, 2, 16), lengths_of(9))
    query, out = torch.randn(2, 1, 4, 16), torch.zeros(2, 1, 4, 32)[..., ::2]
    launch_cache.clear()
    monkeypatch.setattr(launch_cache, "COMPARE", True)
    for _ in range(2):
        decode_attention(query, cache, return_lse=True)
        decode_attention(query, cache, out=out)
    monkeypatch.setattr(decode, "_prepare", lambda plan, inputs: lambda inputs: (torch.zeros_like(query), None))
    with pytest.raises(RuntimeError, match="a cached call and one that was prepared anew differ"):
        decode_attention(query, cache, out=out)
    monkeypatch.undo()
    launch_cache.clear()
    monkeypatch.setattr(launch_cache, "ENABLED", False)
    decode_attention(query, cache)
    assert launch_cache.size() == 0


def test_a_profiler_sees_a_label() -> None:
    cache, query = ContiguousKV(*torch.randn(2, 2, 20, 2, 16)), torch.randn(2, 1, 4, 16)
    decode_attention(query, cache)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        decode_attention(query, cache)
    assert any(event.key == "stream_attention::decode" for event in profile.key_averages())


def test_a_workspace_without_elements_is_no_reason_to_prepare_anew() -> None:
    """`decode_workspace` returns one where keys are in one split."""
    cache = rows(batch=1)
    query = empty(1, 1, HEADS, DIM)
    with pretend_gpu():
        for _ in range(2):
            decode_attention(query, cache, num_splits=1, backend="triton", workspace=torch.empty(0))
        assert launch_cache.size() == 1
