"""A picture of memory over time. Needs matplotlib, which nothing else here does."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from stream_attention_tools.files import save_figure

if TYPE_CHECKING:
    from .profiler import Run


def draw(path: str | Path, device: str, run: Run) -> None:
    """Draw readings, with the peak between each two, labels of snapshots, and regions below."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plot: expected matplotlib; got none. pip install matplotlib") from error

    points, start = run.points, run.points[0][0]
    times = [at - start for at, _ in points]
    mib = 1 << 20
    rows = max((region.depth for region in run.regions), default=-1) + 1
    figure = Figure(figsize=(10, 4.5 + 0.25 * rows), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(8, max(1, rows)))

    # Between two readings the peak is known but not its moment, so it is drawn for the whole time.
    upper.stairs([one.peak / mib for _, one in points[1:]], times, fill=True, alpha=0.25, label="peak in between")
    upper.plot(times, [one.allocated / mib for _, one in points], marker=".", label="allocated")
    if device != "cpu":  # where it is the whole process and counts from another zero
        upper.plot(times, [(one.reserved or 0) / mib for _, one in points], linestyle="--", label="reserved")
    for one in run.snapshots:
        label, at = one["label"], one["timestamp"] - start
        upper.axvline(at, color="grey", linewidth=0.5)
        words = {"xycoords": ("data", "axes fraction"), "rotation": 90, "fontsize": 7}
        upper.annotate(label, (at, 1.0), va="top", ha="right", **words)
    upper.set_ylabel("MiB")
    upper.set_title(f"Memory on {device}")
    upper.legend(loc="lower right", fontsize=8)

    for region in run.regions:
        depth, began, ended = region.depth, times[region.first], times[-1 if region.last is None else region.last]
        lower.broken_barh([(began, max(ended - began, 1e-6))], (depth, 0.9), alpha=0.5, edgecolor="black")
        name = region.name.rpartition("/")[2]
        lower.text((began + ended) / 2, depth + 0.45, name, fontsize=7, ha="center", va="center")
    lower.set_yticks([])
    lower.set_ylim(max(1, rows), 0)
    lower.set_xlabel("seconds")
    save_figure(figure, path, dpi=120)
