"""Loss curves of a results file as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stream_attention_tools.files import save_figure
from stream_attention_tools.report.figures import LIGHT

from .verdict import AFTER, smoothed, spread

DASHES = ("-", "--", ":", "-.")


def draw(results: dict[str, Any], path: Path) -> None:
    """The curves, and below them how far each is from SDPA with its seed, beside the spread of the two SDPA seeds."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("a picture needs matplotlib: pip install matplotlib") from error
    losses = {run["name"]: run["losses"] for run in results["runs"]}
    peer, other = losses["sdpa, seed 0"], losses["sdpa, seed 1"]
    steps = range(1, len(peer) + 1)
    figure = Figure(figsize=(7, 6), layout="constrained")
    curves, gaps = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    for n, (name, its) in enumerate(losses.items()):
        curves.plot(steps, smoothed(its), DASHES[n % len(DASHES)], color=LIGHT[f"s{n}"], label=name)
        if name.startswith("ours"):
            apart = (smoothed(its) - smoothed(peer)).abs()
            gaps.plot(steps, apart, DASHES[n % len(DASHES)], color=LIGHT[f"s{n}"], label=f"{name}, from sdpa, seed 0")
    gaps.plot(steps, spread(peer, other), color=LIGHT["s5"], label="allowed: spread of the two SDPA seeds")
    gaps.axvline(AFTER, color=LIGHT["grid"])
    gaps.set_yscale("log")
    curves.set_ylabel("loss, nats, smoothed")
    gaps.set_ylabel("difference, nats")
    gaps.set_xlabel("step")
    for axes in (curves, gaps):
        axes.legend(frameon=False, fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
    machine, told = results["machine"], results["conditions"]
    curves.set_title(f"{told['model']}; {machine['name']}, {results['date'][:10]}", fontsize=9)
    save_figure(figure, path, dpi=120)
