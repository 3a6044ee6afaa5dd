"""A roofline of an H200: what arithmetic and memory allow, and where our kernels are, from the results files."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from .canvas import marker, path, picture, text, with_tip

# Per multiprocessor and clock the matrix units do 4096 bf16 FLOP. 1.755 GHz is the clock that bounds here are computed
# with; the power limit holds it lower on real numbers.
FLOPS_PER_CLOCK = 4096
CLOCK_GHZ = 1.755
LEFT, RIGHT, UPPER, LOWER = 40.0, 350.0, 46.0, 262.0
X, Y = (0.5, 16384.0), (2.0, 1500.0)


PROBLEM = "d128 full"  # of the forward and the backward, at each length; of decode every cell


class Dot(NamedTuple):
    kind: str
    name: str
    intensity: float  # FLOP per byte of query, key, value and output, each moved once
    tflops: float


KINDS = {
    "forward, Gluon": ("forward", "gluon"),
    "backward, Gluon": ("backward", "gluon"),
    "forward, Triton": ("forward", "triton"),
    "decode, Triton": ("decode", "decode"),
}


def dots(results: dict[str, dict[str, Any]]) -> list[Dot]:
    """The cells of the files by its FLOPs and its bytes, as the benchmark counted them."""
    found = []
    for kind, (name, provider) in KINDS.items():
        for cell in results[name]["cells"]:
            if name != "decode" and not cell["name"].startswith(PROBLEM):
                continue
            its = cell["providers"][provider]
            found.append(Dot(kind, cell["name"], its["tflops"] * 1e3 / its["gb_per_s"], its["tflops"]))
    return found


def roofs(results: dict[str, dict[str, Any]]) -> tuple[float, float]:
    """TFLOP/s of the matrix units, by arithmetic; TB/s of the memory, as a plain sum read it in the run of `decode`."""
    units = results["forward"]["machine"]["multiprocessors"]
    return units * FLOPS_PER_CLOCK * CLOCK_GHZ / 1e3, results["decode"]["read_bandwidth"]["tb_per_s"]


def draw(results: dict[str, dict[str, Any]]) -> str:
    most, bandwidth = roofs(results)
    body = [
        text(0, 14, f"Roofline of an H200: bf16, {PROBLEM}; decode", "title"),
        text(0, 32, "TFLOP/s over FLOP per byte moved", "quiet"),
    ]
    for tick in (4, 16, 64, 256, 1024):
        body.append(path(f"M{LEFT} {_y(tick):.1f}H{RIGHT}", "grid"))
        body.append(text(LEFT - 6, _y(tick) + 4, f"{tick}", "quiet", "end"))
    for tick in (1, 8, 64, 512, 4096):
        body.append(path(f"M{_x(tick):.1f} {UPPER}V{LOWER}", "grid"))
        body.append(text(_x(tick), LOWER + 17, f"{tick}", "quiet", "middle"))
    ridge = most / bandwidth
    roof = f"M{_x(X[0]):.1f} {_y(X[0] * bandwidth):.1f}L{_x(ridge):.1f} {_y(most):.1f}H{RIGHT}"
    body.append(f'<g class="s5">{path(roof, "line")}</g>')
    body.append(text(_x(14), _y(24), f"memory: {bandwidth:.2f} TB/s, measured", "quiet"))
    body.append(text(RIGHT, _y(most) - 7, f"matrix units: {most:.0f} at {CLOCK_GHZ} GHz", "quiet", "end"))
    found = dots(results)
    for place, kind in reversed(list(enumerate(KINDS))):
        for dot in (one for one in found if one.kind == kind):
            mark = marker(place, _x(dot.intensity), _y(dot.tflops))
            body.append(
                with_tip(f"{kind}, {dot.name}: {dot.tflops:.0f} TFLOP/s at {dot.intensity:.0f} FLOP/byte", mark)
            )
    for place, kind in enumerate(KINDS):
        y = LOWER + 40 + 17 * place
        its = [dot.tflops for dot in found if dot.kind == kind]
        body += [marker(place, LEFT + 6, y - 4), text(LEFT + 18, y, f"{kind}: {min(its):.0f}-{max(its):.0f} TFLOP/s")]
    return picture("Roofline of an H200 with the kernels of this library", LOWER + 98, body)


def _x(value: float) -> float:
    return LEFT + (RIGHT - LEFT) * math.log(value / X[0]) / math.log(X[1] / X[0])


def _y(value: float) -> float:
    return LOWER - (LOWER - UPPER) * math.log(value / Y[0]) / math.log(Y[1] / Y[0])
