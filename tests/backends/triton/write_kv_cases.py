"""What the tests of `write_kv` share: calls, some drawn at random, and what memory holds after them, token by token."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import torch
from append_cases import BF16, F16, F32, copied, memory, normal
from torch import Tensor

from stream_attention.base.fp8_layout import E4M3
from stream_attention.ops.write_kv import _has_kernel, _write, write_kv

ORDERS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
"""vLLM's layouts: how layers, blocks, heads, tokens and channels, of which a key's come before its value's, lie."""


class Case(NamedTuple):
    """A call, on the CPU; a scale is a tensor, a number or None."""

    key: Tensor
    value: Tensor
    key_pages: Tensor
    value_pages: Tensor
    slots: Tensor
    k_scale: Any = None
    v_scale: Any = None

    def on(self, device: str) -> Case:
        """A copy of it. Pages that are views of one tensor stay such."""
        moved = [copied(t, device) if isinstance(t, Tensor) else t for t in self]
        stores = self.key_pages, self.value_pages
        if len({t.untyped_storage().data_ptr() for t in stores}) == 1:
            pool = memory(moved[2])
            moved[2:4] = [pool.as_strided(t.shape, t.stride(), t.storage_offset()) for t in stores]
        return Case(*moved)

    def write(self, **options: Any) -> None:
        write_kv(*self[:5], k_scale=self.k_scale, v_scale=self.v_scale, **options)


def check(case: Case, device: str = "cpu", by_torch: bool = False) -> Case:
    """The call as it was made on `device`, by the kernel or by torch, after comparing all memory behind its pages with
    that of `expected`: bit for bit, but for what kind of NaN a NaN is."""
    made, wanted = case.on(device), expected(case)
    if by_torch or device == "cuda":
        made.write(validate=False)
    else:
        assert _has_kernel(tuple(made)), "the kernel is not for these tensors"
        _write(tuple(made), None, None)
    for got, want in zip(made[2:4], wanted[2:4], strict=True):
        one, other = memory(got).cpu(), memory(want)
        same = bits(one) == bits(other)
        assert (same | (one.isnan() & other.isnan())).all(), str(case)
    return made


def expected(case: Case) -> Case:
    """A copy of a call after it, token by token, in fp64."""
    after = case.on("cpu")
    _, _, *stores, slots, _, _ = after
    page = stores[0].shape[1] if stores[0].dim() == 4 else 1
    for token, slot in enumerate(slots.tolist()):
        if not 0 <= slot < page * len(stores[0]):
            continue
        for store, new, scale in zip(stores, case[:2], case[5:], strict=True):
            place = store[slot // page, slot % page] if store.dim() == 4 else store[slot]
            written = new[token]
            if store.dtype is E4M3:
                divisor = torch.as_tensor(1.0 if scale is None else scale).float().double().reshape(-1, 1)
                written = (written.float().double() / divisor).clamp(-448, 448).to(E4M3)
            bits(place).copy_(bits(written))
    return after


def bits(t: Tensor) -> Tensor:
    return t.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()])


def in_one(order: str, sizes: dict[str, int], dims: tuple[int, int], dtype: torch.dtype = BF16) -> tuple[Tensor, ...]:
    """Pages of keys and values that lie in one tensor of `sizes` L, B, H and N, in this order: those of layer 0."""
    sizes = sizes | {"C": sum(dims)}
    pool = filled([sizes[name] for name in order], dtype)
    layer = pool.permute([order.index(name) for name in "LBHNC"])[0]
    return layer.transpose(1, 2).split(dims, -1)


def filled(shape: Any, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Any numbers, NaN among those of e4m3."""
    if dtype is not E4M3:
        return normal(*shape, seed=seed, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, tuple(shape), generator=generator, dtype=torch.uint8).view(E4M3)


# At random


def draw_case(draw: random.Random, beyond: bool = True) -> Case:
    """Any call that a caller may make; `beyond`: some slots are behind the pages."""
    heads, dtype = draw.choice((1, 2, 3, 8, 20)), draw.choice((F16, BF16, F32))
    dim, value_dim = (draw.choice((1, 7, 8, 16, 24, 64, 128)) for _ in range(2))
    page, stored = draw.choice((0, 1, 2, 16, 48, 256)), draw.choice((dtype, dtype, E4M3))
    pages = draw.randint(1, 4 if page > 16 else 20)
    capacity, n = pages * max(page, 1), draw.choice((0, 1, 1, 2, draw.randint(3, 40)))
    slots = draw.sample(range(capacity), min(n, capacity))
    slots = [draw.choice((-1, -(2**31), -7)) if draw.random() < 0.2 else slot for slot in slots]
    if beyond:
        slots = [draw.choice((capacity, 2**31 - 1)) if draw.random() < 0.1 else slot for slot in slots]
    of_slots = torch.tensor(slots, dtype=draw.choice((torch.int32, torch.int64)))
    if draw.random() < 0.3:
        of_slots = torch.stack([of_slots, of_slots + 1], -1)[:, 0]
    rows = len(slots) + draw.choice((0, 0, 3))
    new = [_laid(draw, dtype, rows, heads, one) for one in (dim, value_dim)]
    for t in new:
        t[len(slots) :] = torch.nan
    kinds: Any = [draw.choice(("none", "number", "one", "heads", "apart")) if stored is E4M3 else "none" for _ in "kv"]
    scales = [_scale(draw, kind, heads) for kind in kinds]
    return Case(*new, *_pages(draw, stored, pages, page, heads, (dim, value_dim)), of_slots, *scales)


def _laid(draw: random.Random, dtype: torch.dtype, rows: int, heads: int, dim: int) -> Tensor:
    """Numbers `[rows, heads, dim]`, up to some thousands: as they come, heads first, beside others, or off 16 bytes."""
    how, seed = draw.choice(("plain", "plain", "heads first", "packed", "offset")), draw.randrange(2**31)
    large = draw.choice((1, 1, 300))
    if how == "heads first":
        return large * normal(heads, rows, dim, seed=seed, dtype=dtype).transpose(0, 1)
    if how == "packed":
        return (large * normal(rows, 3 * heads, dim, seed=seed, dtype=dtype))[:, heads : 2 * heads]
    if how == "offset":
        return (large * normal(rows * heads * dim + 1, seed=seed, dtype=dtype))[1:].view(rows, heads, dim)
    return large * normal(rows, heads, dim, seed=seed, dtype=dtype)


def _scale(draw: random.Random, kind: str, heads: int) -> Any:
    if kind in ("none", "number"):
        return None if kind == "none" else draw.choice((0.5, 0.1, 3.7, 1e-30))
    made = torch.rand(2 * heads, generator=torch.Generator().manual_seed(draw.randrange(2**31))) + 0.01
    if kind == "one":
        return made[0] if draw.random() < 0.5 else made[:1]
    return made[::2] if kind == "apart" else made[:heads]


def _pages(
    draw: random.Random, dtype: torch.dtype, pages: int, page: int, heads: int, dims: tuple[int, int]
) -> tuple[Tensor, ...]:
    """Pages of keys and values: of one tensor, as of vLLM or FlashInfer, or of two."""
    seed = draw.randrange(2**31)
    if not page:
        pools = [filled((pages, heads, dim), dtype, seed) for dim in dims]
        return pools[0], draw.choice((pools[1], filled((pages, heads, dims[1] + 8), dtype, seed)[..., : dims[1]]))
    how = draw.choice((*ORDERS, "two", "heads first", "offset", "side by side"))
    if how in ORDERS:
        return in_one(how, {"L": 2, "B": pages, "H": heads, "N": page}, dims, dtype)
    if how == "side by side" and dims[0] == dims[1]:
        return filled((pages, 2, page, heads, dims[0]), dtype, seed).unbind(1)
    if how == "heads first":
        return tuple(filled((pages, heads, page, dim), dtype, seed).transpose(1, 2) for dim in dims)
    shapes = [(pages, page, heads, dim) for dim in dims]
    if how == "offset":
        flat = [filled((torch.Size(shape).numel() + 1,), dtype, seed) for shape in shapes]
        return tuple(t[1:].view(shape) for t, shape in zip(flat, shapes, strict=True))
    return tuple(filled(shape, dtype, seed) for shape in shapes)
