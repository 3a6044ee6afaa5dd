"""Random decode problems: what is cached and how, which queries see what of it, and what a result may be wrong by.

Whatever nobody sees is NaN: slots behind a row's length or outside its window, pages of no row, queries that stand
before the first position, scales of blocks that hold nothing. A page table names pages that do not exist there.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Hashable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, fields, replace
from itertools import repeat
from multiprocessing import get_context
from random import Random
from typing import Any, Literal, NamedTuple

import torch
from gpu_tools import workers
from random_problems import perhaps_fewer
from torch import Tensor

from stream_attention import ContiguousKV, PagedKV, QuantizedKV, decode_attention, decode_workspace, quantize_kv
from stream_attention.backends import BY_NAME
from stream_attention.backends.reference import attention as reference
from stream_attention.base.kv_layouts import KVCache
from stream_attention.base.kv_layouts.quantized import FORMATS, quantized_lengths, window_slots
from stream_attention.base.problem import Request
from stream_attention.ops.decode import decode_problem
from stream_attention_tools.offline import Form, launching_for
from stream_attention_tools.testing import Case, poisoned_memory
from stream_attention_tools.testing.inputs import Layout, _laid_out, _tile_laid_out
from stream_attention_tools.testing.tolerance import (
    DRAWS,
    FORWARD_FACTOR,
    _eager_in_order,
    _full_precision_products,
    _noise,
)

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


class Codes(NamedTuple):
    """How a cache is quantised: the arguments of `quantize_kv`."""

    format: str
    group: int = 64
    residual: int = 128
    keys: str = "channel"
    values: str = "token"
    scale_dtype: torch.dtype | None = None


@dataclass(frozen=True)
class DecodeCase:
    """One random call of `decode_attention`. Two equal cases have equal inputs, on any device."""

    lengths: tuple[int, ...] = (37, 0, 70)
    capacity: int = 70  # slots of a row; in pages, rounded up to those
    Tq: int = 1
    Hq: int = 2
    Hkv: int = 1
    D: int = 32
    Dv: int = 32
    dtype: torch.dtype = F32
    device: str = "cpu"
    seed: int = 0
    page: int | None = None  # None: contiguous
    codes: Codes | None = None
    counted: bool = True  # False: no lengths, every row is full
    layout: Layout = "contiguous"
    causal: bool = True
    window: tuple[int, int] | None = None
    tree: bool = False
    alibi: Literal["H", "BH"] | None = None
    sink: bool = False
    aux_dtype: torch.dtype | None = None  # of slopes and sink; None: that of the query
    softcap: float = 0.0
    scale: float | None = None
    num_splits: int | None = None
    batch_invariant: bool = False
    workspace: bool = False  # pass out= and workspace=, twice
    key_mean: float = 0.0  # how far from 0 the means of the keys' channels are

    def __repr__(self) -> str:
        """The line that reproduces it, without what is left at its default (shapes are always said)."""
        shapes = ("lengths", "capacity", "Tq", "Hq", "Hkv", "D", "Dv")
        said = (
            f"{field.name}={getattr(self, field.name)!r}"
            for field in fields(self)
            if field.name in shapes or getattr(self, field.name) != field.default
        )
        return f"DecodeCase({', '.join(said)})"

    @property
    def slots(self) -> int:
        """Positions that a row has room for."""
        return self.capacity if self.page is None else -(-self.capacity // self.page) * self.page


class Made(NamedTuple):
    query: Tensor
    cache: KVCache
    options: dict[str, Any]  # keywords of decode_attention that say what is computed


# Inputs


def make(case: DecodeCase) -> Made:
    """Fresh inputs of a case."""
    generator = torch.Generator().manual_seed(case.seed)
    batch, aux_dtype = len(case.lengths), case.aux_dtype or case.dtype
    # A large cache is drawn, and quantised, where it is used; others have the same values on every device.
    where = case.device if case.slots > 10_000 else "cpu"
    of_cache = generator if where == "cpu" else torch.Generator(where).manual_seed(case.seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    query = normal(batch, case.Tq, case.Hq, case.D).to(case.dtype)
    key, value = (
        torch.randn(batch, case.slots, case.Hkv, dim, generator=of_cache, device=where).to(case.dtype)
        for dim in (case.D, case.Dv)
    )
    if case.key_mean:
        key += (case.key_mean * normal(case.Hkv, case.D)).to(key)
    tree = torch.rand(batch, case.Tq, case.Tq, generator=generator) < 0.6 if case.tree else None
    options: dict[str, Any] = {"causal": case.causal, "window": case.window, "softcap": case.softcap}
    options["scale"] = case.scale
    if tree is not None:
        options["tree_mask"] = _tile_laid_out(case.layout, tree.to(case.device))
    if case.alibi is not None:
        slopes = normal(*((case.Hq,) if case.alibi == "H" else (batch, case.Hq))).abs() * 0.2
        options["alibi_slopes"] = slopes.to(case.device, aux_dtype)
    if case.sink:
        options["sink"] = normal(case.Hq).to(case.device, aux_dtype)

    seen = visible(case, tree)
    query[~seen.any(-1)] = torch.nan
    held = must_hold(case, seen.any(1))
    key[~held], value[~held] = torch.nan, torch.nan
    lengths = torch.tensor(case.lengths, dtype=torch.int32, device=where)
    cache: KVCache
    if case.page is None:
        cache = ContiguousKV(key, value, lengths if case.counted else None)
    else:
        cache = in_pages(case, key, value, held, lengths)
    if case.codes is not None:
        cache = in_codes(case, cache, held)
    [query] = _laid_out(case.layout, [query.to(case.device)])
    return Made(query, moved(cache, case), options)


def there(case: DecodeCase, tree: Tensor | None) -> Tensor:
    """Which positions each query may look at, whatever causal and window leave of them: bool `[B, Tq, slots]`."""
    lengths, at = torch.tensor(case.lengths, dtype=torch.int64).view(-1, 1, 1), torch.arange(case.slots)
    found = (at < lengths).expand(-1, case.Tq, -1)
    if tree is not None:
        stands = lengths - case.Tq + torch.arange(case.Tq)[:, None]
        new = at - (lengths - case.Tq)  # which of the new tokens a position is
        picked = tree.gather(2, new.clamp(0, case.Tq - 1).expand(-1, case.Tq, -1))
        found = found & (stands >= 0) & (picked | (new < 0))
    return found


def visible(case: DecodeCase, tree: Tensor | None) -> Tensor:
    """Which positions each query sees: bool `[B, Tq, slots]`."""
    stands = torch.tensor(case.lengths, dtype=torch.int64).view(-1, 1, 1) - case.Tq + torch.arange(case.Tq)[:, None]
    ahead = stands - torch.arange(case.slots)
    left, right = case.window or (-1, -1)
    found = there(case, tree).clone()
    if left >= 0:
        found &= ahead <= left
    if right >= 0:
        found &= ahead >= -right
    return found & (ahead >= 0) if case.causal and tree is None else found


def must_hold(case: DecodeCase, seen: Tensor) -> Tensor:
    """Slots that may not be NaN: those that are seen, and all of a block of codes of which one is."""
    if case.codes is None:
        return seen
    group = case.codes.group
    blocks = torch.nn.functional.pad(seen, (0, -case.slots % group)).unflatten(1, (-1, group)).any(-1)
    of_block = blocks.repeat_interleave(group, 1)[:, : case.slots]
    return torch.where(is_coded(case), of_block, seen)


def is_coded(case: DecodeCase) -> Tensor:
    """Which positions are codes and not in the window: bool `[B, slots]`."""
    assert case.codes is not None
    coded = quantized_lengths(torch.tensor(case.lengths, dtype=torch.int32), case.codes.residual, case.codes.group)
    return torch.arange(case.slots) < coded[:, None]


def in_pages(case: DecodeCase, key: Tensor, value: Tensor, held: Tensor, lengths: Tensor) -> PagedKV:
    """Pages in a random order, with NaN pages among them and on either side. A page that need not be there is not."""
    assert case.page is not None
    rng = Random(case.seed)
    needed = held.unflatten(1, (-1, case.page)).any(-1)
    table = torch.empty(needed.shape, dtype=torch.int32)
    order = list(range(int(needed.sum()) + 2))
    rng.shuffle(order)
    absent = (-1, len(order), *order[:2])
    free = order[2:]
    buffers = [x.new_full((len(order) + 2, case.page, *x.shape[2:]), torch.nan) for x in (key, value)]
    stores = [buffer[1:-1] for buffer in buffers]
    for b in range(len(case.lengths)):
        for n in range(needed.shape[1]):
            table[b, n] = free.pop() if needed[b, n] else rng.choice(absent)
            if needed[b, n]:
                for store, x in zip(stores, (key, value), strict=True):
                    store[table[b, n]] = x[b, n * case.page : (n + 1) * case.page]
    return PagedKV(*stores, table.to(lengths.device), lengths)


def in_codes(case: DecodeCase, cache: ContiguousKV | PagedKV, held: Tensor) -> QuantizedKV:
    """The cache in few bits, NaN in the slots of its window that hold nothing, no pages for what is in the window."""
    assert case.codes is not None
    small = quantize_kv(cache, **case.codes._asdict(), validate=False)  # pages that a window hides may be gone
    slots = window_slots(case.codes.residual, case.codes.group)
    coded = is_coded(case)
    for b, live in enumerate(held & ~coded):
        unused = torch.ones(slots, dtype=torch.bool)
        unused[live.nonzero() % slots] = False
        small.key_window[b, unused], small.value_window[b, unused] = torch.nan, torch.nan
    if small.page_table is None or case.page is None:
        return small
    table = small.page_table.clone()
    table[~(held & coded).unflatten(1, (-1, case.page)).any(-1)] = -1
    return replace(small, page_table=table)


def moved(cache: KVCache, case: DecodeCase) -> KVCache:
    """The cache on the case's device, in its layout."""

    def there(x: Tensor | None) -> Any:
        return None if x is None else x.to(case.device)

    def here(*tensors: Tensor) -> list[Tensor]:
        return _laid_out(case.layout, [there(x) for x in tensors])

    if isinstance(cache, ContiguousKV):
        return ContiguousKV(*here(cache.key, cache.value), there(cache.lengths))
    if isinstance(cache, PagedKV):
        if case.layout == "contiguous" and case.device == "cpu":
            return cache  # between its pages of NaN
        return PagedKV(*here(cache.key_pages, cache.value_pages), there(cache.page_table), there(cache.lengths))
    sides = (
        replace(
            side,
            codes=here(side.codes.view(torch.uint8))[0].view(side.codes.dtype),
            scale=there(side.scale),
            zero=there(side.zero),
        )
        for side in (cache.key, cache.value)
    )
    windows = here(cache.key_window, cache.value_window)
    return QuantizedKV(*sides, *windows, there(cache.lengths), cache.residual, there(cache.page_table))


# Results


def places(case: DecodeCase, made: Made, backend: str) -> dict[str, Tensor]:
    """An out full of NaN and a workspace, if the case says so."""
    if not case.workspace:
        return {}
    how: dict[str, Any] = {"num_splits": case.num_splits, "batch_invariant": case.batch_invariant}
    workspace = decode_workspace(made.query, made.cache, **how, backend=backend)
    return {"out": made.query.new_full((*made.query.shape[:3], case.Dv), torch.nan), "workspace": workspace}


def call(case: DecodeCase, made: Made, backend: str, **into: Tensor) -> tuple[Tensor, Tensor]:
    """Out and LSE of a case; `into` is what `places` made."""
    return decode_attention(
        made.query,
        made.cache,
        **made.options,
        **into,
        num_splits=case.num_splits,
        batch_invariant=case.batch_invariant,
        return_lse=True,
        backend=backend,
    )


def check(case: DecodeCase, backend: str = "triton") -> float:
    """Run a case on a backend; its largest error as a share of what is allowed.

    With a workspace it runs twice, and has to give the same bits in the same places.

    Raises:
        AssertionError: something is wrong; the message begins with the line that reproduces it.
    """
    repro = f"check({case!r}, {backend!r})"
    made = make(case)
    tensors = [made.query, *tensors_of(made.cache), *(x for x in made.options.values() if isinstance(x, Tensor))]
    before = [x.clone() for x in tensors]
    try:
        with poisoned_memory():
            into = places(case, made, backend)
            out, lse = call(case, made, backend, **into)
            if case.workspace:
                assert out is into["out"], "the result is not the out that was given"
                once, once_lse = out.clone(), lse
                into["out"].fill_(torch.nan)
                out, lse = call(case, made, backend, **into)
                assert same_bits(out, once) and same_bits(lse, once_lse), (
                    "the workspace gave other bits the second time"
                )
        assert all(same_bits(x, y) for x, y in zip(tensors, before, strict=True)), "an input was written to"
        return compare(case, made, out, lse)
    except AssertionError as error:
        raise AssertionError(f"{repro}\n{error}") from None
    except Exception as error:
        raise AssertionError(f"{repro}\nraised {type(error).__name__}: {error}") from error


def compare(case: DecodeCase, made: Made, out: Tensor, lse: Tensor) -> float:
    """The largest error of any row of the batch, as a share of what that row is allowed, which is at most 1.

    The truth is fp64 attention over what the cache holds, for codes what they say in fp64. The measure is eager
    attention in the cache's dtype over what `cache.tile` reads; see `testing.tolerance` for the rest of the rule. That
    tile is rounded to the dtype, which is one draw of noise and the same in all of eager's, so other draws of it count.
    """
    state_dtype = torch.promote_types(case.dtype, F32)
    for name, result, shape, dtype in (
        ("out", out, (*made.query.shape[:3], case.Dv), case.dtype),
        ("lse", lse, (len(case.lengths), case.Hq, case.Tq), state_dtype),
    ):
        assert result.shape == shape, f"{name} has shape {list(result.shape)}, not {list(shape)}"
        assert result.dtype is dtype, f"{name} has dtype {result.dtype}, not {dtype}"
    arguments = right_aligned(case, made, made.cache)
    like = Case(D=case.D, Dv=case.Dv, dtype=case.dtype, device=case.device, backward=False)
    wide = right_aligned(case, made, in_fp64(made.cache))
    exact = dict(zip(("out", "lse"), reference.attention(**wide), strict=True))
    with _full_precision_products():
        draws = [_eager_in_order(like, arguments, draw) for draw in range(DRAWS)]
    if case.codes is not None:
        draws += [reference.attention(**rounded_otherwise(wide, arguments, draw)) for draw in range(2 * DRAWS)]
    noise = _noise(like, exact, {}, (exact["out"], None), {})

    sees = visible(case, made.options["tree_mask"].cpu() if case.tree else None).any(-1).to(case.device)
    assert not out[~sees].any(), "a query that sees nothing has an out that is not 0"
    some = exact["lse"] != -torch.inf
    assert torch.equal(lse != -torch.inf, some), "lse is -inf for other rows than it should be"
    earned = {"out": [draw[0] for draw in draws], "lse": [torch.where(some, draw[1], 0.0) for draw in draws]}
    found = {"out": out, "lse": torch.where(some, lse, 0.0)}
    exact["lse"] = torch.where(some, exact["lse"], 0.0)
    worst = 0.0
    for name, truth in exact.items():
        result, carried = found[name], by_row(noise[name])
        rounded = by_row(truth.to(result.dtype).double() - truth)
        rounded += torch.finfo(result.dtype).eps * (by_row(truth) + carried)
        largest = torch.stack([by_row(draw.double() - truth) for draw in earned[name]]).amax(0)
        bounds = FORWARD_FACTOR * largest + carried + rounded
        errors = by_row(result.double() - truth)
        for b, (error, bound) in enumerate(zip(errors.tolist(), bounds.tolist(), strict=True)):
            said = f"{name} of row {b}: {error:.3e} of {bound:.3e} allowed"
            assert error <= bound < float("inf"), said
            worst = max(worst, error / bound if bound else 0.0)
    return worst


def compare_plain(query: Tensor, cache: KVCache, out: Tensor, lse: Tensor) -> float:
    """`compare` for a call without options on a cache that no case made."""
    lengths = [cache.capacity] * cache.batch if cache.lengths is None else cache.lengths.tolist()
    case = DecodeCase(
        tuple(lengths),
        cache.capacity,
        *query.shape[1:3],
        cache.kv_heads,
        cache.head_dim,
        cache.value_dim,
        query.dtype,
        query.device.type,
        codes=Codes(cache.format, cache.group, cache.residual) if isinstance(cache, QuantizedKV) else None,
    )
    return compare(case, Made(query, cache, {"causal": True, "window": None, "softcap": 0.0, "scale": None}), out, lse)


def right_aligned(case: DecodeCase, made: Made, cache: KVCache) -> dict[str, Any]:
    """The arguments of the reference: all rows end with the last key, as queries of one call stand at one place."""
    longest = max(case.lengths, default=0)
    lengths = torch.tensor(case.lengths, dtype=torch.int64, device=case.device)[:, None]
    position = torch.arange(longest, device=case.device) - (longest - lengths)  # [B, longest]
    row = torch.arange(len(case.lengths), device=case.device)[:, None]
    key, value = (x[row, position.clamp_min(0)] for x in cache.tile(0, longest))
    tree = made.options.get("tree_mask")
    found = there(case, None if tree is None else tree.cpu()).to(case.device)  # [B, Tq, slots]
    index = position.clamp_min(0)[:, None].expand(-1, case.Tq, -1)
    mask = (found.gather(2, index) & (position >= 0)[:, None])[:, None]
    options = {name: option for name, option in made.options.items() if name != "tree_mask"}
    options["causal"] = case.causal and tree is None
    return {"query": made.query, "key": key, "value": value, "mask": mask, **options}


def rounded_otherwise(wide: dict[str, Any], narrow: dict[str, Any], draw: int) -> dict[str, Any]:
    """Keys and values as far from the truth as those that were rounded, to other sides."""
    generator = torch.Generator(wide["key"].device).manual_seed(draw)
    sides = {}
    for name in ("key", "value"):
        off = narrow[name].double() - wide[name]
        signs = torch.randint(0, 2, off.shape, generator=generator, device=off.device, dtype=torch.int8) * 2 - 1
        sides[name] = wide[name] + off * signs
    return wide | sides


def in_fp64(cache: KVCache) -> KVCache:
    """The same cache, read in fp64."""
    if not isinstance(cache, QuantizedKV):
        return cache  # the reference widens it
    key, value = (replace(side, dtype=torch.float64) for side in (cache.key, cache.value))
    windows = {"key_window": cache.key_window.double(), "value_window": cache.value_window.double()}
    return replace(cache, key=key, value=value, **windows)


def rows_of(cache: KVCache, rows: list[int]) -> KVCache:
    """A cache of some rows in some order."""
    assert cache.lengths is not None
    lengths = cache.lengths[rows]
    if isinstance(cache, ContiguousKV):
        return ContiguousKV(cache.key[rows], cache.value[rows], lengths)
    if isinstance(cache, PagedKV):
        return PagedKV(cache.key_pages, cache.value_pages, cache.page_table[rows], lengths)
    windows = {"key_window": cache.key_window[rows], "value_window": cache.value_window[rows]}
    if cache.page_table is not None:
        return replace(cache, **windows, lengths=lengths, page_table=cache.page_table[rows])

    def pick(x: Tensor) -> Tensor:
        return more_of(x, len(rows)).copy_(x[rows])

    key, value = (
        replace(
            side,
            codes=pick(side.codes.view(torch.uint8)).view(side.codes.dtype),  # fp8 cannot be indexed
            scale=pick(side.scale),
            zero=None if side.zero is None else pick(side.zero),
        )
        for side in (cache.key, cache.value)
    )
    return replace(cache, key=key, value=value, **windows, lengths=lengths)


def more_of(x: Tensor, rows: int) -> Tensor:
    """A tensor of so many rows with nothing in it, whose dims lie in memory in the order of those of x."""
    order = sorted(range(x.dim()), key=x.stride, reverse=True)
    shape = [rows if dim == 0 else x.shape[dim] for dim in order]
    return x.new_empty(shape).permute([order.index(dim) for dim in range(x.dim())])


def tensors_of(cache: Any) -> list[Tensor]:
    """All tensors that a cache is made of."""
    held = [getattr(cache, field.name) for field in fields(cache)]
    inner = [tensors_of(one) for one in held if hasattr(one, "codes")]
    return [one for one in held if isinstance(one, Tensor)] + [tensor for part in inner for tensor in part]


def same_bits(x: Tensor, y: Tensor) -> bool:
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return torch.equal(*(t.contiguous().view(kinds[t.dtype.itemsize]) for t in (x, y)))


def by_row(x: Tensor) -> Tensor:
    """max |x| of each row of the batch; NaN if one is."""
    flat = x.abs().flatten(1)
    return flat.amax(1) if flat.shape[1] else flat.sum(1)


# Drawing

DIMS = (32, 40, 64, 80, 96, 128, 192, 256)
PAGES = (1, 2, 3, 5, 8, 16, 16, 32, 48, 64, 64, 100, 128, 256)
LAYOUTS: tuple[Layout, ...] = ("contiguous", "contiguous", "heads_first", "qkv_packed", "strided", "offset")
SPLITS = (None, None, None, 1, 2, 7, 64)


def template_for(backend: str, rng: Random, device: str = "cpu", **limits: Any) -> DecodeCase:
    """A random template that the backend can do, by its own word."""
    for _ in range(1000):
        template = random_template(rng, device, **limits)
        if backend == "gluon":
            template = with_plain_codes(template, rng)
        if not why_not(template, backend):
            return template
    raise AssertionError(f"{backend} can do none of 1000 templates; of the last: {why_not(template, backend)}")


def with_plain_codes(template: DecodeCase, rng: Random) -> DecodeCase:
    """Nearer to what the Gluon kernel reads: waiting for it to be drawn would take minutes."""
    codes = Codes(rng.choice(FORMATS), rng.choice((32, 64, 64, 128)), rng.choice((0, 8, 128)))
    page = None if template.page is None else codes.group * rng.randint(1, 256 // codes.group)
    heads = min(template.Hq, 8)
    return replace(
        template,
        codes=codes,
        page=page,
        counted=True,
        layout="contiguous",
        dtype=rng.choice((BF16, F16)),
        Hq=heads,
        Tq=min(template.Tq, 8 // heads),
    )


def why_not(case: DecodeCase, backend: str) -> tuple[str, ...]:
    """Why a backend cannot do a case, in its own sentences; empty if it can."""
    query, cache, _ = make(case)
    return BY_NAME[backend].why_not(decode_problem(query, cache), Request(num_splits=case.num_splits))


def random_template(rng: Random, device: str = "cpu", dims: tuple[int, ...] = DIMS, max_rows: int = 16) -> DecodeCase:
    """What a compiled kernel may depend on, at random; `in_some_size` gives it lengths."""

    def perhaps(value: Any, probability: float = 0.25, otherwise: Any = None) -> Any:
        return value if rng.random() < probability else otherwise

    codes, page, layout = None, perhaps(rng.choice(PAGES), 0.5), rng.choice(LAYOUTS)
    if rng.random() < 0.6:
        per = ("channel", "token")
        codes = Codes(
            rng.choice(FORMATS),
            rng.choice((16, 32, 64, 128)),
            rng.choice((0, 8, 128)),
            perhaps(rng.choice(per), otherwise="channel"),
            perhaps(rng.choice(per), otherwise="token"),
            perhaps(F32),
        )
        if page is not None and "channel" in codes:
            page = codes.group * rng.randint(1, 256 // codes.group)
        layout = perhaps("heads_first", otherwise="contiguous")
    dim = rng.choice(dims)
    dtype = rng.choice((BF16, BF16, F16, F32))
    return DecodeCase(
        Tq=rng.choice((1, 1, 1, 2, rng.randint(1, max_rows))),
        Hq=rng.choice([n for n in (1, 2, 3, 4, 5, 8, 16) if n <= max_rows]),
        Hkv=1,
        D=dim,
        Dv=perhaps(rng.choice(dims), 0.2, dim),
        dtype=dtype,
        device=device,
        page=page,
        codes=codes,
        counted=page is not None or codes is not None or rng.random() < 0.8,
        layout=layout,
        causal=rng.random() < 0.75,
        window=perhaps((rng.randint(-1, 40), rng.randint(-1, 40))),
        tree=rng.random() < 0.2,
        alibi=perhaps(rng.choice(("H", "BH"))),
        sink=rng.random() < 0.25,
        aux_dtype=perhaps(F32),
        softcap=perhaps(rng.choice((1.5, 20.0)), otherwise=0.0),
        scale=perhaps(rng.choice((0.3, -0.2, 0.0)), 0.2),
    )


def in_some_size(
    like: DecodeCase,
    rng: Random,
    longest: int,
    max_batch: int = 9,
    max_heads: int = 4,
    splits: tuple[int | None, ...] = SPLITS,
) -> DecodeCase:
    """The same kernel features with other lengths, heads and splits."""
    if like.codes is not None:  # some of it is to be coded
        longest += like.codes.residual + like.codes.group
    capacity = rng.randint(1, longest)
    batch = rng.randint(1, max_batch)

    def length() -> int:
        return rng.choice((0, capacity, rng.randint(1, capacity), rng.randint(0, capacity), rng.randint(0, like.Tq)))

    lengths = tuple(min(length(), capacity) if like.counted else capacity for _ in range(batch))
    kv_heads, num_splits = rng.randint(1, max_heads), rng.choice(splits)
    return replace(
        like,
        lengths=lengths,
        capacity=capacity,
        Tq=like.Tq if rng.random() < 0.8 else rng.randint(1, like.Tq),
        Hq=like.Hq // like.Hkv * kv_heads,
        Hkv=kv_heads,
        window=like.window and tuple(-1 if side < 0 else rng.randint(0, 1 + longest // 4) for side in like.window),
        num_splits=num_splits,
        batch_invariant=num_splits is None and rng.random() < 0.3,
        workspace=rng.random() < 0.4,
        seed=rng.randrange(2**31),
    )


# Many of them on a GPU, with a bounded number of compiled kernels


class Drawn(NamedTuple):
    """Random problems, one of every set of kernels that they need, and how long those and others took to compile."""

    backend: str
    cases: list[DecodeCase]
    variants: list[DecodeCase]
    seconds: float


def draw(
    problems: int,
    templates: int,
    variants: int,
    *,
    backend: str = "triton",
    device: str = "cuda",
    arch: int | None = None,
    **limits: Any,
) -> Drawn:
    """Templates for a backend in random sizes. A problem that would need one more than `variants` sets of kernels is
    drawn again.

    Those are compiled here, in parallel. `arch` is that of the GPU unless told. RANDOM_PROBLEMS=300 in the environment
    draws fewer.
    """
    problems, templates, variants = perhaps_fewer(problems, templates, variants)
    arch = arch or arch_of_gpu()
    rng = Random(0)
    like = [template_for(backend, rng, device, **limits) for _ in range(templates)]
    cases: list[DecodeCase] = []
    found: dict[Hashable, DecodeCase] = {}
    started = time.perf_counter()
    # In this process: others would wait for each other's turn on the GPU, and that took longer.
    while len(cases) < problems:
        case = in_some_size(rng.choice(like), rng, 5000 if rng.random() < 0.05 else 600)
        needs = kernels_of(case, arch, backend)
        if needs is not None and (needs in found or len(found) < max(variants, templates)):
            found.setdefault(needs, case)
            cases.append(case)
    report(f"{problems} problems drawn for {backend}, {len(found)} sets of kernels", started)
    # Fresh processes: a fork of one that has used CUDA may hang.
    with ProcessPoolExecutor(workers(16), mp_context=get_context("spawn")) as pool:
        compile_all(pool, list(found.values()), arch, backend)
    report("compiled", started)
    return Drawn(backend, cases, list(found.values()), time.perf_counter() - started)


def report(what: str, started: float) -> None:
    """Where a run that is cut off was."""
    sys.__stderr__.write(f"{what}, {time.perf_counter() - started:.0f} s\n")


def arch_of_gpu() -> int:
    facts = torch.cuda.get_device_properties(0)
    return 10 * facts.major + facts.minor


def compile_all(pool: ProcessPoolExecutor, cases: list[DecodeCase], arch: int, backend: str) -> None:
    """Compile the kernels of cases into Triton's cache."""
    errors = [error for error in pool.map(compile_case, cases, repeat(arch), repeat(backend)) if error]
    assert not errors, "\n".join(errors)


def kernels_of(case: DecodeCase, arch: int, backend: str) -> Hashable:
    """The compiled forms that a case's call would launch, None if the backend cannot; nothing is compiled or
    launched."""
    if why_not(case, backend):
        return None
    keys: set[Hashable] = set()
    launch(case, arch, backend, lambda form: keys.add(form.key))
    return frozenset(keys)


def compile_case(case: DecodeCase, arch: int, backend: str) -> str:
    """Compile a case's kernels into Triton's cache; what went wrong, or nothing."""
    try:
        launch(case, arch, backend, lambda form: form.compile())
    except Exception as error:
        return f"{case!r} for sm_{arch}: {type(error).__name__}: {error}"
    return ""


def launch(case: DecodeCase, arch: int, backend: str, take: Callable[[Form], Any]) -> None:
    """Hand every form that a case's call would launch to `take` instead."""
    made = make(case)
    into = places(case, made, backend)
    with launching_for(arch, take):
        call(case, made, backend, **into)


def run_all(drawn: Drawn) -> dict[str, Any]:
    """Check every problem, in several processes on one GPU; what to keep of it."""
    started = time.perf_counter()
    parts = [drawn.cases[i : i + 50] for i in range(0, len(drawn.cases), 50)]
    failures: list[str] = []
    worst, worst_case, done = 0.0, None, 0
    with ProcessPoolExecutor(workers(6), mp_context=get_context("spawn")) as pool:
        for part, (failed, share, case) in zip(parts, pool.map(check_part, parts, repeat(drawn.backend)), strict=True):
            failures += failed
            done += len(part)
            if share > worst:
                worst, worst_case = share, case
            report(f"problem {done} of {len(drawn.cases)}", started)
    cases = drawn.cases
    return {
        "problems": len(cases),
        "failed": len(failures),
        "failures": failures[:10],
        "variants": len(drawn.variants),
        "paged": sum(case.page is not None for case in cases),
        "formats": {name: sum(c.codes is not None and c.codes.format == name for c in cases) for name in FORMATS},
        "dtypes": {str(dtype): sum(case.dtype is dtype for case in cases) for dtype in (F16, BF16, F32)},
        "largest share of what is allowed": worst,
        "its case": repr(worst_case),
        "seconds to compile": round(drawn.seconds, 1),
        "seconds to run": round(time.perf_counter() - started, 1),
        "processes": workers(6),
    }


def check_part(cases: list[DecodeCase], backend: str) -> tuple[list[str], float, DecodeCase | None]:
    """What is said of those that fail, and of the others the largest share of what is allowed, and whose it is."""
    failures: list[str] = []
    worst, worst_case = 0.0, None
    for case in cases:
        try:
            share = check(case, backend)
        except AssertionError as error:
            failures.append(str(error))
        else:
            if share > worst:
                worst, worst_case = share, case
    return failures, worst, worst_case
