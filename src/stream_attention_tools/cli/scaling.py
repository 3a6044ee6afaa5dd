"""Pictures of predicted scaling: speed-up and efficiency over GPUs, a line for each exact scheme."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from stream_attention_tools.files import write_file

from ..bench.summary import figure, short
from ..cluster.planner import Cluster, Prediction, one_gpu_s, predict_all, recommend
from ..cluster.speed import Speed
from ..cluster.traffic import Workload
from ..report import figures
from ..report.figures import Plot, Point, Series

GPUS = tuple(2**n for n in range(13))  # to 4,096
IDEAL = "ideal"
ORDER = ("ring zigzag", "ring contiguous", "all-gather", "ulysses", "ulysses x ring", "query sharding", IDEAL)
"""Signs and colours, the same in all pictures."""
STEMS = ("strong_scaling", "weak_scaling")
FILES = tuple(f"{stem}{suffix}.svg" for stem in STEMS for suffix in figures.THEMES)


def write(work: Workload, cluster: Cluster, speed: Speed, folder: Path) -> None:
    """Draw both pictures, light and dark."""
    for stem, plot in zip(STEMS, (strong(work, cluster, speed), weak(work, cluster, speed)), strict=True):
        for name, svg in figures.files(stem, plot).items():
            write_file(folder / name, svg)


def strong(work: Workload, cluster: Cluster, speed: Speed) -> Plot:
    """One sequence on ever more GPUs: how many times as fast as one GPU."""
    alone = one_gpu_s(work, speed)
    series, best = _series(work, cluster, speed, lambda ranks: work, lambda ranks, one: alone / one.seconds)
    ideal = Series(IDEAL, [Point.exact(ranks, ranks) for ranks in GPUS])
    title = f"{short(work.length)} tokens on ever more GPUs"
    top = float(GPUS[-1])
    return figures.lines(title, "x one GPU", [*series, ideal], ORDER, best, figure, top, log=True, axis="GPUs")


def weak(work: Workload, cluster: Cluster, speed: Speed) -> Plot:
    """A sequence that grows with the GPUs: what share of their speed alone they keep."""
    rows = -(-work.length // cluster.ranks)

    def grown(ranks: int) -> Workload:
        return replace(work, length=rows * ranks)

    def kept(ranks: int, one: Prediction) -> float:
        return 100 * one_gpu_s(grown(ranks), speed) / ranks / one.seconds

    series, best = _series(work, cluster, speed, grown, kept)
    title = f"{short(rows)} tokens for each GPU"
    return figures.lines(title, "% of one GPU's speed", series, ORDER, best, figure, 100.0, axis="GPUs")


def _series(
    work: Workload,
    cluster: Cluster,
    speed: Speed,
    at: Callable[[int], Workload],
    value: Callable[[int, Prediction], float],
) -> tuple[list[Series], set[str]]:
    """A line for each exact scheme, and the name of the one that is recommended for the GPUs that were asked for."""
    points: dict[str, list[Point]] = {}
    for ranks in GPUS:
        found = predict_all(at(ranks), replace(cluster, ranks=ranks), speed)
        for one in found:
            name = _name(one)
            its = points.setdefault(name, [])
            if one.exact and not (its and its[-1].x == ranks):  # of two layouts, the faster
                its.append(Point.exact(ranks, value(ranks, one)))
    asked = predict_all(work, cluster, speed)
    series = [Series(name, points[name]) for name in ORDER if points.get(name)]
    return series, {_name(recommend(asked, speed).chosen)}


def _name(one: Prediction) -> str:
    if one.scheme.name == "allgather":
        return "all-gather"
    return "ulysses x ring" if one.scheme.ring_size > 1 else str(one.scheme)
