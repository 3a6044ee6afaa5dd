"""What the tests of appending share: caches and new tokens, some drawn at random, and the comparison with torch."""

from __future__ import annotations

import random
from dataclasses import fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stream_attention.base.kv_layouts import ContiguousKV, PagedKV, Rotary

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
Plain = ContiguousKV | PagedKV


class Case(NamedTuple):
    """An append, on the CPU."""

    cache: Plain
    key: Tensor
    value: Tensor
    rotary: Rotary | None = None


def check(case: Case, device: str = "cpu") -> Plain:
    """The cache to which the kernel has appended on `device`, after comparing all memory behind it with that of a
    cache to which torch has on the CPU: bit for bit, but for what kind of NaN a NaN is."""
    by_kernel, by_torch = moved(case.cache, device), moved(case.cache, "cpu")
    key, value = copied(case.key, device), copied(case.value, device)
    rotary = None if case.rotary is None else on(device, case.rotary)
    assert launched(by_kernel, key, value, rotary), "the kernel is not for these tensors"
    assert by_torch.lengths is not None
    by_torch._operate(case.key, case.value, case.rotary, by_torch.lengths)
    for field in fields(by_torch):
        got, want = (memory(getattr(cache, field.name)).cpu() for cache in (by_kernel, by_torch))
        same = bits(got) == bits(want)
        assert (same | (got.isnan() & want.isnan())).all(), f"{field.name} of {case}"
    return by_kernel


def memory(t: Tensor) -> Tensor:
    """All numbers of the storage that a tensor is a view of."""
    return torch.empty(0, dtype=t.dtype, device=t.device).set_(t.untyped_storage())


def bits(t: Tensor) -> Tensor:
    return t.view(torch.int16 if t.dtype.itemsize == 2 else torch.int32)


def copied(t: Tensor, device: str) -> Tensor:
    """The same view of a copy of the whole storage."""
    return memory(t).to(device, copy=True).as_strided(t.shape, t.stride(), t.storage_offset())


def moved(cache: Plain, device: str) -> Plain:
    return replace(cache, **{field.name: copied(getattr(cache, field.name), device) for field in fields(cache)})


def on(device: str, rotary: Rotary) -> Rotary:
    return Rotary(copied(rotary.cos, device), copied(rotary.sin, device), rotary.interleaved)


def int32(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = F32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def angles(positions: int, pairs: int, dtype: torch.dtype = F32) -> tuple[Tensor, Tensor]:
    angle = torch.arange(positions, dtype=F64)[:, None] * 100.0 ** -(torch.arange(pairs, dtype=F64) / pairs)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def caches(
    *lengths: int, capacity: int = 40, heads: int = 2, dim: int = 8, page: int = 4, dtype: torch.dtype = F32
) -> tuple[ContiguousKV, PagedKV]:
    """A cache of each kind, with numbers in every slot."""
    batch, columns = len(lengths), -(-capacity // page)
    rows = normal(batch, capacity, heads, dim, seed=1, dtype=dtype), normal(batch, capacity, heads, dim, dtype=dtype)
    pages = (normal(batch * columns + 3, page, heads, dim, seed=seed, dtype=dtype) for seed in (2, 3))
    table = torch.randperm(batch * columns + 3, generator=torch.Generator().manual_seed(0))[: batch * columns]
    return ContiguousKV(*rows, int32(*lengths)), PagedKV(*pages, table.int().view(batch, columns), int32(*lengths))


# At random


def draw_case(draw: random.Random) -> Case:
    """Any append that a caller may make: ragged and full rows, missing pages, layouts of every kind."""
    batch, heads = draw.randint(1, 4), draw.choice((1, 2, 3, 8))
    dim, value_dim = (draw.choice((1, 2, 7, 8, 16, 24, 40, 64)) for _ in range(2))
    dtype = draw.choice((F16, BF16, F32))
    n = draw.choice((0, 1, 1, 1, draw.randint(2, 8), draw.randint(2, 70)))
    page = draw.choice((0, 1, 2, 5, 16, draw.randint(1, 64)))
    columns = draw.randint(1, max(1, -(-100 // page))) if page else 0
    capacity = columns * page if page else draw.randint(1, 100)
    lengths = [draw.choice((0, capacity, max(0, capacity - n), draw.randint(0, capacity))) for _ in range(batch)]
    count = batch * columns + draw.randint(0, 3)
    lead = (count, page) if page else (batch, capacity)
    stores = _laid(draw, dtype, *lead, heads, dim), _laid(draw, dtype, *lead, heads, value_dim)
    new = _laid(draw, dtype, batch, n, heads, dim), _laid(draw, dtype, batch, n, heads, value_dim)
    taken = _spread(draw, int32(*lengths))
    if not page:
        return Case(ContiguousKV(*stores, taken), *new, _rotary(draw, dim))
    order = draw.sample(range(count), batch * columns)
    missing = [draw.choice((-1, count, -(2**31), 2**31 - 1)) if draw.random() < 0.1 else entry for entry in order]
    table = _spread(draw, int32(*missing).view(batch, columns))
    return Case(PagedKV(*stores, table, taken), *new, _rotary(draw, dim))


def _laid(draw: random.Random, dtype: torch.dtype, a: int, b: int, heads: int, dim: int) -> Tensor:
    """Numbers `[a, b, heads, dim]`: as they come, heads first, beside others, with gaps, or off 16 bytes."""
    how = draw.choice(("plain", "plain", "heads first", "packed", "gaps", "offset"))
    seed = draw.randrange(2**31)
    if how == "heads first":
        return normal(a, heads, b, dim, seed=seed, dtype=dtype).transpose(1, 2)
    if how == "packed":
        return normal(a, b, 3 * heads, dim, seed=seed, dtype=dtype)[:, :, heads : 2 * heads]
    if how == "gaps":
        return normal(2 * a, b + 1, heads, dim + 8, seed=seed, dtype=dtype)[::2, 1:, :, :dim]
    if how == "offset":
        return normal(a * b * heads * dim + 1, seed=seed, dtype=dtype)[1:].view(a, b, heads, dim)
    return normal(a, b, heads, dim, seed=seed, dtype=dtype)


def _spread(draw: random.Random, t: Tensor) -> Tensor:
    """The same numbers, now and then every other one of a larger tensor."""
    return t if draw.random() < 0.6 else torch.stack([t, t + 1], -1)[..., 0]


def _rotary(draw: random.Random, dim: int) -> Rotary | None:
    if dim < 2 or draw.random() < 0.3:
        return None
    pairs, positions = draw.choice((dim // 2, draw.randint(1, dim // 2))), draw.choice((1, 50, 200))
    cos, sin = angles(positions, pairs, draw.choice((F32, F32, F16, BF16, F64)))
    interleaved = draw.random() < 0.5
    how: Any = draw.choice(("plain", "plain", "complex", "repeated"))
    if how == "complex":
        turn = torch.complex(cos.float(), sin.float())
        return Rotary(turn.real, turn.imag, interleaved)
    if how == "repeated":
        return Rotary(torch.cat([cos, cos], 1)[:, :pairs], torch.cat([sin, sin], 1)[:, pairs:], interleaved)
    return Rotary(cos, sin, interleaved)


def launched(cache, key, value, rotary):
    call = type(cache).prepared_append(cache, key, value, rotary, True)
    if call is not None:
        call()
    return call is not None
