"""Mask: which keys each query sees, as data that kernels can read and skip by."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from ..base.errors import check_int, refuse
from . import algebra, drawing, evaluate
from .bounds import keys_per_query

_LETTERS = {"batch": "B", "heads": "Hq", "q_len": "Tq", "k_len": "Tk"}
"""How the sizes are called in shapes."""

_DIMS = {
    **dict.fromkeys(("key_start", "key_end", "query_label"), ("batch", "heads", "q_len")),
    **dict.fromkeys(("query_start", "query_end"), ("batch", "heads", "k_len")),
    "dense": ("batch", "heads", "q_len", "k_len"),
}
"""The dims of each tensor but the table of blocks. Any of them may be 1: the same for all."""


class Sizes(NamedTuple):
    """The sizes of the calls that a mask fits; None where any size does."""

    batch: int | None
    heads: int | None
    q_len: int | None
    k_len: int | None


class Blocks(NamedTuple):
    """Query i sees key j where `table[b, h, i // rows, j // cols]` holds."""

    table: Tensor  # bool [B or 1, Hq or 1, ceil(Tq / rows), ceil(Tk / cols)]
    rows: int
    cols: int


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False, repr=False)
class Mask:
    """Which keys each query sees: all of its parts must allow a key, and a part that is None allows every key.

    Query i stands at position Tk - Tq + i and key j at j, as in `attention`. Every dim of a tensor may also be 1: the
    same for all batch entries, query heads, queries or keys. A tensor with a dim of Tq fits calls of exactly that many
    queries, and so for Tk; `q_len` and `k_len` say it where no tensor does.

    - Band: the keys from `left` positions before the query to `right` after it; causal is `right=0`. None is unbounded
      and every int is meant as it is: `right=-1` is strictly before the query.
    - Keys per query: query i sees `key_start[b, h, i] <= j < key_end[b, h, i]`.
    - Queries per key: key j is seen where `query_start[b, h, j] <= x < query_end[b, h, j]`, x the label of the query:
      `query_label[b, h, i]`, or i where there are no labels. `by_id` vouches that `query_end` is `query_start + 1`, so
      that labels are ids and a key is seen by the queries of its own id; it needs labels.
    - `dense`: query i sees key j where `dense[b, h, i, j]`.
    - `blocks`: a table of whole blocks, never expanded.

    `a & b` is what both allow, `a | b` what either allows and `~a` the rest, where the result has this form; elsewhere
    they refuse and name the way. Masks are equal, and hash alike, if their numbers are equal and their tensors are the
    same objects: one mask for all layers is a cheap key of a cache. Contents are not compared; do not write into them.

    Raises:
        ValueError, TypeError: tensors of a wrong dtype or shape, of sizes that differ, or on several devices.

    >>> mask = Mask(left=2, right=0)
    >>> mask
    Mask(window(2, 0))
    >>> mask.as_dense(q_len=4, k_len=4).int()[0, 0].tolist()
    [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 1]]
    """

    left: int | None = None
    right: int | None = None
    key_start: Tensor | None = None  # int32 [B or 1, Hq or 1, Tq or 1]
    key_end: Tensor | None = None
    query_start: Tensor | None = None  # int32 [B or 1, Hq or 1, Tk or 1]
    query_end: Tensor | None = None
    query_label: Tensor | None = None  # int32 [B or 1, Hq or 1, Tq or 1]
    by_id: bool = False
    dense: Tensor | None = None  # bool [B or 1, Hq or 1, Tq or 1, Tk or 1]
    blocks: Blocks | None = None
    q_len: int | None = None  # of the calls that it fits; None: as the tensors say, else any
    k_len: int | None = None
    words: str = ""  # what repr says; "": its parts

    def __post_init__(self) -> None:
        for name, least in (("left", None), ("right", None), ("q_len", 0), ("k_len", 0)):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), least)
        for name, tensor in self.tensors():
            _check_tensor(name, tensor)
        devices = {tensor.device: name for name, tensor in self.tensors()}
        if len(devices) > 1:
            refuse("tensors", "one device", ", ".join(f"{name} on {device}" for device, name in devices.items()))
        if self.blocks is not None:
            check_int("rows", self.blocks.rows, least=1)
            check_int("cols", self.blocks.cols, least=1)
        bounds = self.query_start, self.query_end
        if self.query_label is not None and all(one is None for one in bounds):
            refuse("query_label", "query_start or query_end beside it", "neither")
        if self.by_id and any(one is None for one in (*bounds, self.query_label)):
            refuse("by_id", "query_start, query_end and query_label beside it", "not all of them")
        found = self.sizes
        for name, dim, size in self._dims():
            known = getattr(found, dim)
            if size not in (1, known):
                refuse(name, f"{_LETTERS[dim]}={known} or 1, as other parts of the mask have", size)
        self._check_table(found.q_len, found.k_len)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors that there are, by the names of their fields; the table of blocks is "blocks"."""
        for name in _DIMS:
            tensor = getattr(self, name)
            if tensor is not None:
                yield name, tensor
        if self.blocks is not None:
            yield "blocks", self.blocks.table

    def _dims(self) -> Iterator[tuple[str, str, int]]:
        """(field, dim, size) of all dims of all tensors but for rows and columns of blocks."""
        for name, tensor in self.tensors():
            for dim, size in zip(_DIMS.get(name, ("batch", "heads")), tensor.shape, strict=False):
                yield name, dim, size

    @property
    def sizes(self) -> Sizes:
        """(batch, heads, q_len, k_len) as far as the mask determines them, None where any size fits.

        >>> Mask(key_end=torch.ones(4, 1, 128, dtype=torch.int32)).sizes
        Sizes(batch=4, heads=None, q_len=128, k_len=None)
        """
        found = {"batch": None, "heads": None, "q_len": self.q_len, "k_len": self.k_len}
        for _, dim, size in self._dims():
            if found[dim] is None and size != 1:
                found[dim] = size
        return Sizes(**found)

    @property
    def device(self) -> torch.device | None:
        """Where the tensors are; None where there are none."""
        return next((tensor.device for _, tensor in self.tensors()), None)

    def check(
        self, q_len: int | None = None, k_len: int | None = None, batch: int | None = None, heads: int | None = None
    ) -> None:
        """Refuse a call of other sizes than the tensors have; what is None is not checked.

        Raises:
            ValueError: a size differs; the message names the tensor, what the call has and what the tensor has.

        >>> Mask(key_end=torch.ones(1, 1, 100, dtype=torch.int32)).check(q_len=128)
        Traceback (most recent call last):
        ValueError: mask: key_end: expected Tq=128, as the call has; got 100. Mask(keys per query of [1, 1, 100]) is for
        calls of that size alone
        """
        asked = {"batch": batch, "heads": heads, "q_len": q_len, "k_len": k_len}
        pinned = [(name, name, getattr(self, name)) for name in ("q_len", "k_len") if getattr(self, name) is not None]
        for name, dim, size in (*self._dims(), *pinned):
            expected = asked[dim]
            if expected is not None and size != expected and (size != 1 or name == dim):
                hint = f"{self!r} is for calls of that size alone"
                refuse(f"mask: {name}", f"{_LETTERS[dim]}={expected}, as the call has", size, hint)
        self._check_table(q_len, k_len)

    def _check_table(self, q_len: int | None, k_len: int | None) -> None:
        if self.blocks is None:
            return
        table, *block = self.blocks
        for letter, length, size, there in zip(("Tq", "Tk"), (q_len, k_len), block, table.shape[2:], strict=True):
            if length is not None and there != -(-length // size):
                expected = f"{-(-length // size)} blocks of {size} for {letter}={length}"
                refuse("blocks", expected, f"{there} (table {list(table.shape)})")

    def to(self, device: torch.device | str) -> Mask:
        """The mask with its tensors on a device; the same mask where they are there already.

        >>> Mask(right=0).to("cpu")
        Mask(causal)
        """
        moved: dict[str, Any] = {name: tensor.to(device) for name, tensor in self.tensors()}
        if all(moved[name] is tensor for name, tensor in self.tensors()):
            return self
        if self.blocks is not None:
            moved["blocks"] = self.blocks._replace(table=moved["blocks"])
        return replace(self, **moved)

    def visible(
        self, b: int | Tensor, h: int | Tensor, i: int | Tensor, j: int | Tensor, q_len: int, k_len: int
    ) -> Tensor:
        """Whether query i of a call of q_len x k_len sees key j, for indices that broadcast: bool of their shape.

        >>> Mask(right=0).visible(0, 0, torch.arange(3), 1, q_len=3, k_len=3).tolist()
        [False, True, True]
        """
        return evaluate.visible(self, b, h, i, j, q_len, k_len)

    def as_dense(
        self, *, batch: int | None = None, heads: int | None = None, q_len: int | None = None, k_len: int | None = None
    ) -> Tensor:
        """The mask as bool `[batch, heads, q_len, k_len]`. Sizes that tensors determine may be left out, and without
        `batch` and `heads` those dims are 1 where nothing depends on them.

        Raises:
            ValueError: a length that is neither given nor known, or sizes that `check` refuses.

        >>> Mask(right=-1).as_dense(q_len=2, k_len=3)
        tensor([[[[ True, False, False],
                  [ True,  True, False]]]])
        """
        return evaluate.as_dense(self, batch, heads, q_len, k_len)

    def as_intervals(self, q_len: int | None = None, k_len: int | None = None) -> Mask:
        """The same mask for these sizes, its band written as keys per query: then `|` can join it with other such.

        Raises:
            ValueError: a length that is neither given nor known, or sizes that `check` refuses.

        >>> Mask(right=0).as_intervals(q_len=3, k_len=4).key_end.tolist()
        [[[2, 3, 4]]]
        """
        q_len, k_len = evaluate.lengths(self, q_len, k_len)
        start, end = keys_per_query(self, q_len, k_len)
        low = None if self.left is None and self.key_start is None else start
        high = None if self.right is None and self.key_end is None else end
        band: dict[str, Any] = {"left": None, "right": None, "key_start": low, "key_end": high}
        return replace(self, **band, q_len=q_len, k_len=k_len, words=str(self))

    def density(
        self, *, batch: int | None = None, heads: int | None = None, q_len: int | None = None, k_len: int | None = None
    ) -> float:
        """The share of scores that are visible. Bands and intervals take O(Tq + Tk); labels, dense masks and several
        kinds of parts at once are counted in strips of rows. Waits for the device.

        Raises:
            ValueError: as `as_dense`.

        >>> Mask(right=0).density(q_len=4, k_len=4)
        0.625
        """
        return evaluate.density(self, batch, heads, q_len, k_len)

    def plot(
        self,
        path: str | PathLike[str] | None = None,
        *,
        q_len: int | None = None,
        k_len: int | None = None,
        batch: int = 0,
        head: int = 0,
        tile: int | tuple[int, int] | None = None,
    ) -> str:
        """Draw the mask of one batch entry and head as text, a line per query: `#` is visible, `.` is masked.

        Args:
            path: also write a picture (.png, .svg, .pdf). Needs matplotlib.
            q_len, k_len: sizes of the call, where tensors do not determine them.
            batch, head: of which batch entry and query head.
            tile: rows and columns of a tile: a character per tile then, `+` where a part of it is visible. None: single
                scores, or tiles that fit 64 x 64 characters where there are more keys or queries.

        Raises:
            ValueError: a length that is neither given nor known.
            ImportError: a path, and no matplotlib.

        >>> print(Mask(left=1, right=0).plot(q_len=4, k_len=6))
        .##...
        ..##..
        ...##.
        ....##
        """
        return drawing.plot(self, path, q_len, k_len, batch, head, tile)

    def __and__(self, other: Mask) -> Mask:
        return algebra.both(self, _mask("&", other))

    def __or__(self, other: Mask) -> Mask:
        return algebra.either(self, _mask("|", other))

    def __invert__(self) -> Mask:
        return algebra.negated(self)

    def __rand__(self, other: object) -> NoReturn:
        _no_mask("&", other)

    def __ror__(self, other: object) -> NoReturn:
        _no_mask("|", other)

    def __bool__(self) -> NoReturn:
        refuse("mask", "&, | or ~ between masks", "and, or, not or if, which ask for one bool", error=TypeError)

    def _key(self) -> tuple[object, ...]:
        numbers = (
            self.left,
            self.right,
            self.by_id,
            self.q_len,
            self.k_len,
            *(() if self.blocks is None else self.blocks[1:]),
        )
        return *numbers, *((name, id(tensor)) for name, tensor in self.tensors())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mask) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        return f"Mask({self})"

    def __str__(self) -> str:
        return self.words or " & ".join(_parts_in_words(self)) or "everything visible"


def _parts_in_words(mask: Mask) -> Iterator[str]:
    left, right = mask.left, mask.right
    if (left, right) == (None, 0):
        yield "causal"
    elif left is not None or right is not None:
        sides = [-1 if side is None else side for side in (left, right)]
        plain = all(side is None or side >= 0 for side in (left, right))
        yield f"window({sides[0]}, {sides[1]})" if plain else f"band(left={left}, right={right})"
    for names, said in (
        (("key_start", "key_end"), "keys per query"),
        (("query_start", "query_end"), "queries per key"),
        (("dense",), "dense"),
    ):
        shapes = [tensor.shape for name, tensor in mask.tensors() if name in names]
        if shapes:
            yield f"{said} of {[max(sizes) for sizes in zip(*shapes, strict=True)]}"
    if mask.blocks is not None:
        table, rows, cols = mask.blocks
        yield f"blocks of {list(table.shape)}, {rows} x {cols} each"


def _check_tensor(name: str, tensor: Any) -> None:
    if not isinstance(tensor, Tensor):
        refuse(name, "a torch.Tensor", type(tensor).__name__, error=TypeError)
    dtype = torch.bool if name in ("dense", "blocks") else torch.int32
    if tensor.dtype is not dtype:
        hint = "from_dense, blocks, intervals and documents convert what they are given" if dtype != torch.bool else ""
        refuse(name, f"dtype {dtype}", tensor.dtype, hint, TypeError)
    letters = [_LETTERS[dim] for dim in _DIMS[name]] if name in _DIMS else ["B", "Hq", "rows", "cols of blocks"]
    if tensor.dim() != len(letters):
        refuse(name, f"shape [{', '.join(letters)}], where any dim may be 1", list(tensor.shape))


def _mask(operator: str, other: object) -> Mask:
    if not isinstance(other, Mask):
        _no_mask(operator, other)
    return other


def _no_mask(operator: str, other: object) -> NoReturn:
    hint = "A bool tensor becomes a Mask by from_dense" if isinstance(other, Tensor) else ""
    refuse(operator, "a Mask on both sides", type(other).__name__, hint, TypeError)
