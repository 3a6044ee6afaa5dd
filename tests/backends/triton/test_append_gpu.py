"""Appending to caches on a GPU: the bits that torch writes on the CPU, in graphs, without synchronisation."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from append_cases import BF16, F16, F32, F64, Case, angles, caches, check, draw_case, int32, moved, normal, on
from gpu_tools import captured, give_memory_back, keep, without_synchronising

from stream_attention.base.kv_layouts import ContiguousKV, PagedKV, Rotary

__all__ = ["give_memory_back"]

pytestmark = pytest.mark.gpu

SHAPE: dict[str, Any] = {"capacity": 300, "heads": 8, "dim": 128, "page": 16}


def new(batch: int, n: int, seed: int = 0, dtype: torch.dtype = BF16) -> tuple[Tensor, Tensor]:
    return normal(batch, n, 8, 128, seed=seed, dtype=dtype), normal(batch, n, 8, 128, seed=seed + 1, dtype=dtype)


class Operations(TorchDispatchMode):
    """Notes the operations of torch that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[str] = []

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.called.append(str(operation))
        return operation(*args, **(kwargs or {}))


@contextmanager
def launches() -> Iterator[list[str]]:
    """The kernels of Triton that are launched."""
    import triton

    names: list[str] = []

    def hook(metadata: Any) -> None:
        names.append(metadata.get()["name"])

    triton.knobs.runtime.launch_enter_hook.add(hook)
    try:
        yield names
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(hook)


# Agreement with torch on the CPU


def test_random_appends() -> None:
    count = 80  # each is another kernel to compile
    for seed in range(count):
        check(draw_case(random.Random(seed)), "cuda")
    keep({"appends": count}, "random appends", of="append")


@pytest.mark.parametrize("n", [1, 4, 40], ids="{} new".format)
@pytest.mark.parametrize("pairs", [0, 64, 40], ids=["plain", "rotary", "partial rotary"])
@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=str)
def test_the_shapes_of_models(dtype: torch.dtype, pairs: int, n: int) -> None:
    tables = angles(256, pairs) if pairs else None
    for rotary in (None,) if tables is None else (Rotary(*tables), Rotary(*tables, interleaved=True)):
        for cache in caches(0, 17, 299, 300, **SHAPE, dtype=dtype):
            check(Case(cache, *new(4, n, dtype=dtype), rotary), "cuda")


@pytest.mark.parametrize("table_dtype", [F16, BF16, F64], ids=str)
def test_tables_of_another_dtype(table_dtype: torch.dtype) -> None:
    for cache in caches(0, 17, 299, 300, **SHAPE, dtype=BF16):
        check(Case(cache, *new(4, 3), Rotary(*angles(256, 64, table_dtype))), "cuda")


def test_a_batch_in_which_every_row_is_written_by_its_own_program() -> None:
    """Many programs of several warps each: one that advanced a length before all its warps had read it would show."""
    lengths = [7 * row % 299 for row in range(256)]
    for cache in caches(*lengths, **SHAPE, dtype=BF16):
        on_gpu = moved(cache, "cuda")
        assert on_gpu.lengths is not None
        key, value = (t.cuda() for t in new(256, 1))
        for _ in range(20):
            on_gpu.lengths.copy_(torch.tensor(lengths))
            on_gpu.append(key, value)
        after = check(Case(cache, key.cpu(), value.cpu()), "cuda")
        for got, want in zip(on_gpu.tile(0, 300), after.tile(0, 300), strict=True):
            assert torch.equal(got, want)
        assert on_gpu.lengths.tolist() == [length + 1 for length in lengths]


# Graphs and streams


@pytest.mark.parametrize("n", [1, 40], ids=["one launch", "two launches"])
def test_a_graph_that_is_replayed_advances_the_lengths(n: int) -> None:
    rotary = Rotary(*angles(300, 64))
    for cache in caches(0, 17, 250, 300, **SHAPE, dtype=BF16):
        on_gpu, on_cpu = moved(cache, "cuda"), moved(cache, "cpu")
        static, turned = [t.cuda() for t in new(4, n)], on("cuda", rotary)
        graph, _ = captured(lambda cache=on_gpu, tokens=static, by=turned: cache.append(*tokens, rotary=by))
        for t, was in zip((*on_gpu._plain(), on_gpu.lengths), (*on_cpu._plain(), on_cpu.lengths), strict=True):
            t.copy_(was)  # as before the calls that were captured
        for step in range(6):
            fresh = new(4, n, seed=10 + step)
            for t, tokens in zip(static, fresh, strict=True):
                t.copy_(tokens)
            graph.replay()
            on_cpu.append(*fresh, rotary=rotary, validate=False)  # a full row drops the token, as on a GPU
        assert on_cpu.lengths.tolist() == [min(start + 6 * n, cache.capacity) for start in (0, 17, 250, 300)]
        assert on_gpu.lengths.tolist() == on_cpu.lengths.tolist()
        for got, want in zip(on_gpu._plain(), on_cpu._plain(), strict=True):
            assert torch.equal(got.cpu(), want)


@pytest.mark.parametrize("n", [1, 40])
def test_the_host_never_waits(n: int) -> None:
    rotary = on("cuda", Rotary(*angles(300, 64)))
    tokens = [t.cuda() for t in new(4, n)]
    for cache in caches(0, 17, 299, 300, **SHAPE, dtype=BF16):
        on_gpu = moved(cache, "cuda")
        on_gpu.append(*tokens, rotary=rotary)  # compiles
        with without_synchronising():
            on_gpu.append(*tokens, rotary=rotary)


def test_a_step_of_decoding_is_one_launch_and_no_operation_of_torch() -> None:
    rotary = on("cuda", Rotary(*angles(300, 64)))
    tokens = [t.cuda() for t in new(64, 1)]
    for cache in caches(*range(64), **SHAPE, dtype=BF16):
        on_gpu = moved(cache, "cuda")
        on_gpu.append(*tokens, rotary=rotary)
        with launches() as kernels, Operations() as operations:
            on_gpu.append(*tokens, rotary=rotary)
        assert kernels == ["_append_kernel"] and operations.called == []


# Room


def test_a_row_that_is_full_or_has_no_page_harms_no_other() -> None:
    dense, paged = caches(300, 299, 5, 0, **SHAPE, dtype=BF16)
    paged.page_table[2, 0] = -1
    paged.page_table[3, 0] = paged.key_pages.shape[0]
    for n in (1, 3, 40):
        for cache in (dense, paged):
            after = check(Case(cache, *new(4, n)), "cuda")
            assert after.lengths is not None
            assert after.lengths.tolist() == [min(length + n, cache.capacity) for length in (300, 299, 5, 0)]


# Layouts


@pytest.mark.usefixtures("give_memory_back")
@pytest.mark.parametrize("paged", [False, True], ids=["rows", "pages"])
def test_a_store_of_more_than_2_to_the_31_elements(paged: bool) -> None:
    """bf16 keys and values of 4.3 GB each, of which the last tokens lie behind 2**31."""
    length, key = 2**21 + 64, torch.zeros(1, 2**21 + 64, 8, 128, dtype=BF16, device="cuda")
    value, tokens = torch.zeros_like(key), [t.cuda() for t in new(1, 2)]
    lengths = int32(length - 2).cuda()
    if paged:
        table = torch.arange(length // 64, dtype=torch.int32, device="cuda")[None]
        pages = (t.view(length // 64, 64, 8, 128) for t in (key, value))
        cache: ContiguousKV | PagedKV = PagedKV(*pages, table, lengths)
    else:
        cache = ContiguousKV(key, value, lengths)
    cache.append(*tokens)
    assert lengths.tolist() == [length]
    for store, want in zip((key, value), tokens, strict=True):
        assert torch.equal(store[0, -2:], want[0]) and int(torch.count_nonzero(store[0, :-2])) == 0
