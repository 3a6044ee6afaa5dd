"""A picture of memory over time. Needs matplotlib, which nothing else here does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from stream_attention_tools.files import save_figure

from ..testing.allocator import Reading


def draw(
    path: str | Path,
    device: str,
    points: Sequence[tuple[float, Reading]],
    snapshots: Sequence[tuple[str, float]],
    regions: Sequence[tuple[str, int, float, float]],
) -> None:
    """Draw readings, with the peak between each two, labels of snapshots, and regions (name, depth, from, to) below."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plot: expected matplotlib; got none. pip install matplotlib") from error

    start = points[0][0]
    times = [at - start for at, _ in points]
    mib = 1 << 20
    rows = max((depth for _, depth, _, _ in regions), default=-1) + 1
    figure = Figure(figsize=(10, 4.5 + 0.25 * rows), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(8, max(1, rows)))

    # Between two readings the peak is known but not its moment, so it is drawn for the whole time.
    upper.stairs([one.peak / mib for _, one in points[1:]], times, fill=True, alpha=0.25, label="peak in between")
    upper.plot(times, [one.allocated / mib for _, one in points], marker=".", label="allocated")
    if device != "cpu":  # where it is the whole process and counts from another zero
        upper.plot(times, [(one.reserved or 0) / mib for _, one in points], linestyle="--", label="reserved")
    for label, at in snapshots:
        upper.axvline(at - start, color="grey", linewidth=0.5)
        place = (at - start, 1.0)
        upper.annotate(label, place, xycoords=("data", "axes fraction"), rotation=90, fontsize=7, va="top", ha="right")
    upper.set_ylabel("MiB")
    upper.set_title(f"Memory on {device}")
    upper.legend(loc="lower right", fontsize=8)

    for name, depth, began, ended in regions:
        lower.broken_barh([(began - start, max(ended - began, 1e-6))], (depth, 0.9), alpha=0.5, edgecolor="black")
        middle = (began + ended) / 2 - start
        lower.text(middle, depth + 0.45, name.rpartition("/")[2], fontsize=7, ha="center", va="center")
    lower.set_yticks([])
    lower.set_ylim(max(1, rows), 0)
    lower.set_xlabel("seconds")
    save_figure(figure, path, dpi=120)
