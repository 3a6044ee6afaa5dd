"""The kernel that appends to caches, in Triton's interpreter: bit for bit what torch operations do.

tests/kvcache/test_append.py says what that is; it too runs on the kernel under `TRITON_INTERPRET=1`.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip(
        "set TRITON_INTERPRET=1; make test does, in a process of its own, since triton.jit chooses at decoration",
        allow_module_level=True,
    )
pytest.importorskip("triton")

from append_cases import BF16, F16, F32, F64, Case, angles, caches, check, draw_case, int32, launched, normal

from stream_attention.base.kv_layouts import ContiguousKV, PagedKV, Rotary
from stream_attention.dispatch import launch_cache
from stream_attention.gpu import append as module
from stream_attention.kvcache import quantize_kv


@pytest.fixture(params=[(module.TILE, module.ALONE), (256, 1)], ids=["as it is", "small tiles"])
def cut(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """How a row is cut: as it is, or so that several programs share one of a small shape."""
    for name, number in zip(("TILE", "ALONE"), request.param, strict=True):
        monkeypatch.setattr(module, name, number)
    launch_cache.clear()
    yield str(request.param)
    launch_cache.clear()


# What it means


def test_new_tokens_stand_behind_those_of_their_row() -> None:
    key = torch.zeros(2, 4, 1, 1)
    cache = ContiguousKV(key, torch.zeros(2, 4, 1, 1), int32(0, 2))
    new = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).view(2, 2, 1, 1)
    assert launched(cache, new, -new, None)
    assert key[..., 0, 0].tolist() == [[1, 2, 0, 0], [0, 0, 3, 4]] and torch.equal(cache.value, -key)
    assert cache.lengths is not None and cache.lengths.tolist() == [2, 4]


@pytest.mark.parametrize(("interleaved", "turned"), [(False, [-3, 2, 1, 4, 5]), (True, [-2, 1, 3, 4, 5])])
def test_a_quarter_turn_of_the_first_pair(interleaved: bool, turned: list[float]) -> None:
    new = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]).view(1, 1, 1, 5)
    cache = ContiguousKV(torch.zeros(1, 3, 1, 5), torch.zeros(1, 3, 1, 5), int32(2))
    rotary = Rotary(torch.tensor([[9.0, 9.0], [0.0, 1.0]]), torch.tensor([[9.0, 9.0], [1.0, 0.0]]), interleaved)
    assert launched(cache, new, new, rotary)  # at position 2, behind the table: its last row
    assert cache.key[0, 2, 0].tolist() == turned and torch.equal(cache.value[0, 2, 0], new.flatten())


def test_append_takes_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stream_attention.base.kv_layouts.base.Cache._operate", None)  # calling it would raise
    new = normal(2, 1, 2, 8)
    for cache in caches(0, 3):
        assert cache.append(new, new) is cache and cache.lengths is not None
        assert cache.lengths.tolist() == [1, 4] and torch.equal(cache.tile(0, 4)[0][1, 3], new[1, 0])


# Agreement with torch operations


@pytest.mark.parametrize("seed", range(16))
def test_random_appends(seed: int, cut: str) -> None:
    draw = random.Random(f"{seed} {cut}")
    for _ in range(5):
        check(draw_case(draw))


@pytest.mark.parametrize("table_dtype", [F32, BF16, F64], ids=str)
@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=str)
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
def test_keys_are_rounded_once(interleaved: bool, dtype: torch.dtype, table_dtype: torch.dtype) -> None:
    rotary = Rotary(*angles(40, 8, table_dtype), interleaved)
    for cache in caches(0, 3, 31, dim=24, dtype=dtype):
        check(Case(cache, normal(3, 5, 2, 24, dtype=dtype), normal(3, 5, 2, 24, seed=1, dtype=dtype), rotary))


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_what_is_no_number_is_written_too() -> None:
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-40, 6e4, -1e-8])
    for dtype in (F16, BF16, F32):
        new = special.to(dtype).expand(2, 3, 2, 8).contiguous()
        for rotary in (None, Rotary(*angles(40, 2)), Rotary(*angles(40, 4), interleaved=True)):
            for cache in caches(0, 3, dtype=dtype):
                check(Case(cache, new, new, rotary))


# Rows without room


@pytest.mark.parametrize("lengths", [(16, 16), (15, 16), (20, 3), (-2, 5)], ids=str)
def test_what_has_no_slot_is_dropped(lengths: tuple[int, int], cut: str) -> None:
    for cache in caches(*lengths, capacity=16):
        for n in (0, 1, 7, 30):
            after = check(Case(cache, normal(2, n, 2, 8), normal(2, n, 2, 8, seed=1)))
            assert after.lengths is not None and after.lengths.tolist() == [min(16, length + n) for length in lengths]


@pytest.mark.parametrize("entry", [-1, 5, -(2**31), 2**31 - 1])
def test_what_has_no_page_is_dropped_and_counted(entry: int, cut: str) -> None:
    table = int32(0, entry, 2, 1, entry, 3).view(2, 3)
    cache = PagedKV(normal(5, 4, 2, 8), normal(5, 4, 2, 8), table, int32(2, 7))
    after = check(Case(cache, normal(2, 6, 2, 8, seed=1), normal(2, 6, 2, 8, seed=2)))
    assert isinstance(after, PagedKV) and after.lengths.tolist() == [8, 12]
    written = [not torch.equal(*pages) for pages in zip(after.key_pages, cache.key_pages, strict=True)]
    assert written == [True, False, False, True, False]


def test_nothing_to_write_and_nowhere_to_write_it() -> None:
    none = normal(0, 3, 2, 8)
    assert launched(ContiguousKV(none, none, int32()), none, none, None)
    for n in (0, 3):
        cache = ContiguousKV(normal(2, 0, 2, 8), normal(2, 0, 2, 8), int32(0, 4))
        check(Case(cache, normal(2, n, 2, 8), normal(2, n, 2, 8)))


# Who is left to torch


def test_what_the_kernel_is_not_for() -> None:
    new = normal(2, 1, 2, 8)
    cache, _ = caches(0, 3)
    tables = angles(40, 4)
    was, shared = cache.key.clone(), ContiguousKV(cache.key, cache.value, int32(3).expand(2))
    with pytest.raises(ValueError, match="lengths: expected no overlapping elements"):
        shared.append(new, new)
    assert torch.equal(cache.key, was)
    double = ContiguousKV(cache.key.double(), cache.value.double(), cache.lengths)
    for other, key, rotary in (
        (quantize_kv(cache, "int8", group=8), new, None),
        (double, new.double(), None),
        (cache, torch._neg_view(new), None),
        (cache, new, Rotary(tables[0], torch._neg_view(tables[1]))),
        (cache, new, Rotary(*(table.to(torch.float8_e5m2) for table in tables))),
        (cache, torch.nn.Parameter(new), None),
    ):
        assert not launched(other, key, key, rotary)
    assert launched(cache, new, new, Rotary(*tables))


def test_an_append_is_an_operation_in_place() -> None:
    """Autograd knows that what it saved of a cache has been written to since."""
    for cache in caches(0, 3):
        held = *cache._plain(), cache.lengths
        versions = [t._version for t in held if t is not None]
        assert launched(cache, normal(2, 1, 2, 8), normal(2, 1, 2, 8), None)
        assert [t._version for t in held if t is not None] == [version + 1 for version in versions]
