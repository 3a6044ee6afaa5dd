"""MemoryProfiler: memory at labelled moments and the peaks between them, by regions, as JSON or a plot."""

from __future__ import annotations

import json
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from stream_attention.base.errors import refuse
from stream_attention_tools.files import save_figure, write_file

from ..testing.allocator import Reading, allocator_of

if TYPE_CHECKING:
    from typing import Self

MIB = 1 << 20

SIZES = ("allocated", "reserved", "device", "process")
"""What a snapshot has of a reading."""


@dataclass
class Region:
    name: str  # with the names of those around it: "step/forward"
    depth: int
    first: int  # number of the reading at its beginning, and at its end
    last: int | None = None


@dataclass
class Run:
    """What was recorded from a start to a stop."""

    points: list[tuple[float, Reading]] = field(default_factory=list)  # every reading
    snapshots: list[dict[str, Any]] = field(default_factory=list)
    regions: list[Region] = field(default_factory=list)
    open: list[Region] = field(default_factory=list)
    latest: int = 0  # number of the reading of the latest snapshot

    def peak(self, first: int, last: int | None = None) -> int:
        """The most allocated from one reading to another, or to the last."""
        before, *rest = (reading for _, reading in self.points[first : None if last is None else last + 1])
        return max([before.allocated, *(max(one.peak, one.allocated) for one in rest)])

    def described(self, region: Region) -> dict[str, Any]:
        began, first = self.points[region.first]
        ended, last = (None, None) if region.last is None else self.points[region.last]
        before, after, peak = first.allocated, last and last.allocated, self.peak(region.first, region.last)
        retained = None if after is None else after - before
        sizes = {"before": before, "after": after, "peak": peak, "retained": retained, "peak_beyond": peak - before}
        return {
            "name": region.name,
            "depth": region.depth,
            **{f"{name}_mb": _mib(size) for name, size in sizes.items()},
            "timestamp": began,
            "time_s": None if ended is None else ended - began,
        }


class MemoryProfiler:
    """Snapshots of memory, with the true peaks between them, which a snapshot alone would miss.

    `start()`, `snapshot(label)` where one likes, `region(name)` around what one likes, nested or not, then `report()`.
    Nothing waits for the device. On CUDA, `allocated` is what tensors hold, `reserved` what torch's allocator holds for
    them, `device` all that is in use on the GPU (contexts, NCCL and other processes included), `process` the process's
    memory on the host. On the CPU, `allocated` counts what torch allocated since `start()`, `reserved` is the
    process's resident memory, and `device` what is in use of the machine's; there, torch's own profiler cannot run at
    the same time. Figures are in MiB, under the names with `_mb` that reports of this kind have.

    While it runs it resets the peaks of `torch.cuda.max_memory_allocated()`; who resets them too makes it miss some.

    Args:
        device: cpu or cuda; None: the current CUDA device if there is one, else the CPU.

    >>> import torch
    >>> profiler = MemoryProfiler("cpu")
    >>> profiler.start()
    >>> with profiler.region("make"):
    ...     x = (torch.ones(1 << 18) + 1).clone()  # three of 1 MiB, of which at most two at a time
    >>> report = profiler.report()
    >>> profiler.stop()
    >>> round(report["regions"][0]["peak_beyond_mb"], 3), report["regions"][0]["retained_mb"]
    (2.0, 1.0)
    """

    def __init__(self, device: torch.device | str | int | None = None) -> None:
        self._allocator = allocator_of(device)
        weakref.finalize(self, self._allocator.close)  # who forgets to stop leaves no profiler of torch behind
        self._run: Run | None = None
        self._running = False

    @property
    def device(self) -> torch.device:
        return self._allocator.device

    def start(self) -> None:
        """Discard what was recorded and begin, with a snapshot "start"."""
        self.stop()
        self._allocator.open()
        self._running, self._run = True, Run()
        self.snapshot("start")

    def stop(self) -> None:
        """End, if it runs. What was recorded stays to be reported."""
        if self._running:
            self._mark()
            self._running = False
            self._allocator.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def snapshot(self, label: str) -> dict[str, Any]:
        """Record what is allocated now, and the peak since the snapshot before."""
        run = self._started("snapshot")
        reading, at = self._mark()
        sizes = {f"{name}_mb": _mib(getattr(reading, name)) for name in SIZES}
        taken = {"label": label, **sizes, "peak_allocated_mb": run.peak(run.latest) / MIB, "timestamp": at}
        run.latest = len(run.points) - 1
        run.snapshots.append(taken)
        return dict(taken)

    @contextmanager
    def region(self, name: str) -> Iterator[None]:
        """Within this block, or function that it decorates: the peak, and how much more is allocated after it."""
        run = self._started("region")
        self._mark()
        path = f"{run.open[-1].name}/{name}" if run.open else name
        mine = Region(path, len(run.open), len(run.points) - 1)
        run.regions.append(mine)
        run.open.append(mine)
        try:
            yield
        finally:
            if self._running and self._run is run:  # else it was stopped within, and the region stays open
                self._mark()
                mine.last = len(run.points) - 1
                run.open.remove(mine)

    def report(self) -> dict[str, Any]:
        """All that was recorded, ready for JSON: `snapshots`, the `deltas` between neighbours, `regions` and peaks.

        A region that is still open has None for what is known at its end.
        """
        run = self._recorded("report")
        if self._running:
            self._mark()
        reserved = [one.reserved_peak for _, one in run.points if one.reserved_peak is not None]
        return {
            "device": str(self.device),
            "snapshots": list(map(dict, run.snapshots)),
            "deltas": [self.diff(at, at + 1) for at in range(len(run.snapshots) - 1)],
            "regions": list(map(run.described, run.regions)),
            "peak_allocated_mb": run.peak(0) / MIB,
            "peak_reserved_mb": _mib(max(reserved, default=None)),
        }

    def diff(self, first: str | int, second: str | int) -> dict[str, Any]:
        """What changed from one snapshot to a later one, and the peak between them. Each by its label or its number."""
        begin, end = self._place(first), self._place(second)
        run = self._recorded("diff")
        if begin >= end:
            refuse("second", f"a snapshot after {first!r}", repr(second))
        before, after = run.snapshots[begin], run.snapshots[end]
        pairs = {name: (before[f"{name}_mb"], after[f"{name}_mb"]) for name in SIZES}
        changes = {f"{name}_delta_mb": None if None in pair else pair[1] - pair[0] for name, pair in pairs.items()}
        return {
            "from": before["label"],
            "to": after["label"],
            **changes,
            "peak_allocated_mb": max(one["peak_allocated_mb"] for one in run.snapshots[begin + 1 : end + 1]),
            "time_delta_s": after["timestamp"] - before["timestamp"],
        }

    def to_json(self, path: str | Path | None = None) -> str:
        """The report as JSON, also written to `path` where one is given."""
        text = json.dumps(self.report(), indent=1)
        if path is not None:
            write_file(path, text + "\n")
        return text

    def plot(self, path: str | Path) -> None:
        """Draw memory over time into a file (.png, .svg, .pdf). Needs matplotlib."""
        run = self._recorded("plot")
        if self._running:
            self._mark()
        draw(path, str(self.device), run)

    def __str__(self) -> str:
        """Regions and snapshots as a table, in MiB."""
        report = self.report()
        lines = [f"{self.device}: at most {report['peak_allocated_mb']:.1f} MiB allocated"]
        if report["peak_reserved_mb"] is not None:
            lines[0] += f", {report['peak_reserved_mb']:.1f} reserved"
        lines.append(f"{'snapshot':24} {'allocated':>10} {'peak':>10} {'reserved':>10} {'device':>10}")
        for one in report["snapshots"]:
            figures = [one[f"{name}_mb"] for name in ("allocated", "peak_allocated", "reserved", "device")]
            lines.append(f"{one['label']:24} {' '.join(_figure(x) for x in figures)}")
        if report["regions"]:
            lines.append(f"{'region':24} {'before':>10} {'peak':>10} {'retained':>10} {'seconds':>10}")
        for one in report["regions"]:
            name = "  " * one["depth"] + one["name"].rpartition("/")[2]
            figures = [one["before_mb"], one["peak_mb"], one["retained_mb"]]
            seconds = f"{'':>10}" if one["time_s"] is None else f"{one['time_s']:10.4f}"
            lines.append(f"{name:24} {' '.join(_figure(x) for x in figures)} {seconds}")
        return "\n".join(lines)

    def _mark(self) -> tuple[Reading, float]:
        """Read the allocator, whose own peak begins anew."""
        reading, at = self._allocator.read(), time.time()
        self._recorded("mark").points.append((at, reading))
        return reading, at

    def _started(self, what: str) -> Run:
        if not self._running:
            raise RuntimeError(f"{what}: expected a profiler that runs; got one that does not. Call start() first")
        return self._recorded(what)

    def _recorded(self, what: str) -> Run:
        if self._run is None:
            raise RuntimeError(f"{what}: expected a profiler that was started; got one that was not. Call start()")
        return self._run

    def _place(self, which: str | int) -> int:
        snapshots = self._recorded("diff").snapshots
        if isinstance(which, int) and not isinstance(which, bool):
            if not -len(snapshots) <= which < len(snapshots):
                refuse("snapshot", f"a number below {len(snapshots)}", which)
            return which % len(snapshots)
        places = [at for at, one in enumerate(snapshots) if one["label"] == which]
        if len(places) != 1:
            hint = "Name it by its number." if places else ""
            refuse("snapshot", "the label of one snapshot", f"{which!r}, that of {len(places)}", hint)
        return places[0]


def draw(path: str | Path, device: str, run: Run) -> None:
    """Draw readings, with the peak between each two, labels of snapshots, and regions below. Needs matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plot: expected matplotlib; got none. pip install matplotlib") from error

    points, start = run.points, run.points[0][0]
    times = [at - start for at, _ in points]
    rows = max((region.depth for region in run.regions), default=-1) + 1
    figure = Figure(figsize=(10, 4.5 + 0.25 * rows), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(8, max(1, rows)))

    # Between two readings the peak is known but not its moment, so it is drawn for the whole time.
    upper.stairs([one.peak / MIB for _, one in points[1:]], times, fill=True, alpha=0.25, label="peak in between")
    upper.plot(times, [one.allocated / MIB for _, one in points], marker=".", label="allocated")
    if device != "cpu":  # where it is the whole process and counts from another zero
        upper.plot(times, [(one.reserved or 0) / MIB for _, one in points], linestyle="--", label="reserved")
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


def _mib(size: int | None) -> float | None:
    return None if size is None else size / MIB


def _figure(x: float | None) -> str:
    return f"{'':>10}" if x is None else f"{x:10.1f}"
