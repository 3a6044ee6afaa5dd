"""Ours on caches: `decode_attention` on every kind of cache that a cell's keys and values can lie in, and `append`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from stream_attention.base.kv_layouts import ContiguousKV, KVCache, PagedKV, Rotary
from stream_attention.kvcache.quantize import quantize_kv
from stream_attention.ops.decode import decode_attention, decode_workspace, explain_decode

from ...testing.inputs import Case, Tensors, sequences
from ..suites import Cell
from .base import Provider, without_modifiers

FEW = 16
"""Queries of a row that decoding is made for."""


class Decode(Provider):
    """`decode_attention` on one kind of cache; cache, output and workspace are made once, outside the timing."""

    ours = True

    def __init__(self, name: str, kind: str, **options: Any) -> None:
        self.name = self.label = name
        self.options = options
        given = "".join(f", {option}={value}" for option, value in options.items())
        self.about = f"decode_attention() on a cache of {kind}{given}"

    def why_not(self, cell: Cell) -> str | None:
        case = cell.case
        if cell.direction != "forward":
            return "no gradient flows through decode_attention"
        queries = {q_len for q_len, _ in sequences(case)}
        if len(queries) > 1 or max(queries) > FEW:
            return f"it requires as many queries of every row, {FEW} at most"
        return without_modifiers(case, "window", "alibi", "sink", "softcap", "scale", "lengths_q")

    def cache(self, x: Tensors) -> KVCache:
        """The cache that holds the keys and values of `x`."""
        return _rows(x)

    def bare(self, x: Tensors) -> Callable[[], Tensor]:
        """Its result is `[B, Tq, Hq, Dv]`, of packed sequences too."""
        attend: Any = decode_attention
        query, cache, options = self._arguments(x)
        out = query.new_empty(*query.shape[:3], cache.value_dim)
        options |= {"out": out, "workspace": decode_workspace(query, cache, **self.options)}
        return lambda: attend(query, cache, **options)

    def attend(self, x: Tensors) -> Tensor:
        out = self.bare(x)()
        return out.flatten(0, 1) if x.packed else out

    def ran(self, x: Tensors, backward: bool = False) -> str:
        query, cache, options = self._arguments(x)
        with redirect_stdout(StringIO()):
            plan = explain_decode(query, cache, **options)
        return f"{plan.backend}: {plan.config}"

    def _arguments(self, x: Tensors) -> tuple[Tensor, KVCache, dict[str, Any]]:
        query = x.query.unflatten(0, (-1, x.options["max_seqlen_q"])) if x.packed else x.query
        options = {name: value for name, value in x.options.items() if name not in x.packing}
        return query, self.cache(x), options | self.options


class Paged(Decode):
    """On pages that lie in shuffled order."""

    def __init__(self, page: int) -> None:
        super().__init__(f"paged {page}", f"shuffled pages of {page} tokens")
        self.page = page

    def cache(self, x: Tensors) -> PagedKV:
        return paged(_rows(x), self.page)


class Quantized(Decode):
    """On what `quantize_kv` makes of them by its defaults; the reference gets the dequantised values."""

    def __init__(self, format: str) -> None:
        super().__init__(format, f"{format} values")
        self.format = format

    def cache(self, x: Tensors) -> KVCache:
        return quantize_kv(_rows(x), self.format)

    def kv_bytes(self, case: Case, x: Tensors) -> float:
        return float(self.cache(x).nbytes)

    def reference_inputs(self, x: Tensors) -> Tensors:
        lengths = x.key_lengths
        tiles = self.cache(x).tile(0, max(lengths))
        key, value = (
            torch.cat([row[:length] for row, length in zip(tile, lengths, strict=True)]) if x.packed else tile
            for tile in tiles
        )
        return x._replace(key=key, value=value)


class Append(Provider):
    """`cache.append` of a token to every row, in place: a cell's keys and values are the tokens that arrive.

    Its answer is attention over the token as the cache has it, which is refused unless it is the token that arrived.
    """

    ours = True
    tokens_before = 1000  # of a row when the first arrives
    capacity = 8192  # for those that arrive, call after call

    def __init__(self, name: str, rotary: bool = False) -> None:
        self.name = self.label = name
        self.rotary = rotary
        self.about = f"append() of a token to every row{', its key turned' if rotary else ''}"

    def why_not(self, cell: Cell) -> str | None:
        if cell.direction != "forward" or cell.case.packed or (cell.case.Tq, cell.case.Tk) != (1, 1):
            return "it requires one token for every row"
        return without_modifiers(cell.case)

    def bare(self, x: Tensors) -> Callable[[], None]:
        cache, rotary = self._cache(x, self._lengths(x)), self._rotary(x)

        def append() -> None:
            cache.append(x.key, x.value, rotary=rotary)

        return append

    def attend(self, x: Tensors) -> Tensor:
        at, lengths = self.tokens_before, self._lengths(x)
        key, value = self._cache(x, lengths).append(x.key, x.value, rotary=self._rotary(x)).tile(at, at + 1)
        expected = self._turned(x.key)
        off = float((key - expected).abs().max() / expected.abs().max())
        allowed = 4 * torch.finfo(key.dtype).eps  # a rounding of the result, those of cosine, sine and arithmetic
        if not (off <= allowed and torch.equal(value, x.value) and lengths.eq(at + 1).all()):
            raise ValueError(f"append: expected the token that arrived; got a key off by {off:.2e}.")
        attend: Any = decode_attention
        return attend(x.query, ContiguousKV(key, value))

    def _lengths(self, x: Tensors) -> Tensor:
        return _full(x.key.shape[0], self.tokens_before, x.key.device)

    def _cache(self, x: Tensors, lengths: Tensor) -> ContiguousKV:
        slots = self.tokens_before + self.capacity
        key, value = (t.new_zeros(t.shape[0], slots, *t.shape[2:]) for t in (x.key, x.value))
        return ContiguousKV(key, value, lengths)

    def _rotary(self, x: Tensors) -> Rotary | None:
        if not self.rotary:
            return None
        angles = self._angles(x.key, torch.arange(self.tokens_before + self.capacity, device=x.key.device))
        return Rotary(angles.cos().float(), angles.sin().float())

    def _turned(self, key: Tensor) -> Tensor:
        """The keys as complex numbers, each pair of channels times that of its angle; fp64."""
        if not self.rotary:
            return key.double()
        x, y = key.double().chunk(2, -1)
        angle = self._angles(key, torch.tensor(self.tokens_before, device=key.device))
        turned = torch.complex(x, y) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat([turned.real, turned.imag], -1)

    @staticmethod
    def _angles(key: Tensor, positions: Tensor) -> Tensor:
        dim = key.shape[-1]
        pairs = torch.arange(dim // 2, device=key.device, dtype=torch.float64)
        return positions[..., None] * 10000.0 ** (-2 * pairs / dim)


def _full(batch: int, length: int, device: torch.device) -> Tensor:
    return torch.full((batch,), length, dtype=torch.int32, device=device)


def _rows(x: Tensors) -> ContiguousKV:
    """Keys and values by row; those of packed sequences are padded to the longest."""
    if not x.packed:
        return ContiguousKV(x.key, x.value)
    lengths = x.key_lengths
    key, value = (torch.nn.utils.rnn.pad_sequence(t.split(lengths), batch_first=True) for t in (x.key, x.value))
    return ContiguousKV(key, value, torch.tensor(lengths, dtype=torch.int32, device=key.device))


def paged(cache: ContiguousKV, page: int) -> PagedKV:
    """A copy of the cache in pages that lie in shuffled order."""
    columns = -(-cache.capacity // page)
    order = torch.randperm(cache.batch * columns, generator=torch.Generator().manual_seed(0)).to(cache.device)

    def laid_out(rows: Tensor) -> Tensor:
        pages = F.pad(rows, (0, 0, 0, 0, 0, columns * page - cache.capacity)).reshape(-1, page, *rows.shape[2:])
        return torch.empty_like(pages).index_copy_(0, order, pages)

    lengths = cache.lengths
    if lengths is None:
        lengths = _full(cache.batch, cache.capacity, cache.device)
    return PagedKV(laid_out(cache.key), laid_out(cache.value), order.view(cache.batch, columns).int(), lengths)
