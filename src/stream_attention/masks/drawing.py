"""Drawings of masks: text, and pictures where matplotlib is installed."""

from __future__ import annotations

from os import PathLike
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..base.errors import check_int, refuse
from .evaluate import lengths
from .tile_states import FULL, tiles

if TYPE_CHECKING:
    from .mask import Mask

WIDEST = 64
"""Characters of a line, and lines, where no tile was asked for."""

CHARACTERS = ".+#"
"""Of a tile that is masked, partly visible, and visible."""

COLOURS = {"skip": "#f2f2f2", "partial": "#9ecae1", "full": "#08519c"}
"""The same in a picture."""


def plot(
    mask: Mask,
    path: str | PathLike[str] | None,
    q_len: int | None,
    k_len: int | None,
    batch: int,
    head: int,
    tile: int | tuple[int, int] | None,
) -> str:
    """The drawing of one batch entry and head as text, written as a picture where there is a path."""
    q_len, k_len = lengths(mask, q_len, k_len)
    if tile is None:
        side = max(1, -(-max(q_len, k_len) // WIDEST))
        tile = side, side
    rows, cols = tile if isinstance(tile, tuple) else (tile, tile)
    states = tiles(mask, q_len, k_len, rows, cols)
    picked = _of("batch", _of("head", states, 1, head), 0, batch)
    if path is not None:
        _draw(path, picked, f"{mask}\n{q_len} queries, {k_len} keys, tiles of {rows} x {cols}")
    return "\n".join("".join(CHARACTERS[state] for state in line) for line in picked.tolist())


def _of(name: str, states: Tensor, dim: int, index: int) -> Tensor:
    """One entry of a dim, which is 1 where all are alike."""
    size = states.shape[dim]
    if check_int(name, index, least=0) >= size > 1:
        refuse(name, f"a number below {size}", index)
    return states.select(dim, index if size > 1 else 0)


def _draw(path: str | PathLike[str], states: Tensor, title: str) -> None:
    try:
        from matplotlib.colors import ListedColormap
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ImportError("plot: expected matplotlib; got none. pip install matplotlib") from error
    figure: Any = Figure(figsize=(6, 6), layout="constrained")
    axes = figure.subplots()
    axes.imshow(
        states.tolist(), cmap=ListedColormap(list(COLOURS.values())), vmin=0, vmax=FULL, interpolation="nearest"
    )
    axes.set_title(title, fontsize=8)
    axes.set_xlabel("keys")
    axes.set_ylabel("queries")
    marks = [Patch(color=colour, label=state) for state, colour in COLOURS.items()]
    axes.legend(handles=marks, loc="upper left", bbox_to_anchor=(1, 1), fontsize=8)
    figure.savefig(path, dpi=120)
