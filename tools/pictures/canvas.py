"""A diagram's pieces as SVG text, in the style of the benchmark's plots: 360 wide, colours by class, light and dark."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path

from stream_attention_tools.report.figures import COLOURS, THEMES, WIDTH

RULES = Path(__file__).with_suffix(".css").read_text(encoding="utf-8").strip()
"""The style of every diagram, with the colours as variables."""

SHAPES = (
    "M4.5 0A4.5 4.5 0 1 1-4.5 0A4.5 4.5 0 1 1 4.5 0Z",  # disc
    "M-4-4H4V4H-4Z",  # square
    "M0-5.6L5.6 0L0 5.6L-5.6 0Z",  # diamond
    "M0-5L5 4H-5Z",  # triangle up
)


def marker(index: int, x: float, y: float) -> str:
    """A sign by its index: its shape and its colour."""
    place = f"translate({_number(x)} {_number(y)})"
    return f'<path class="mark s{index % COLOURS}" transform="{place}" d="{SHAPES[index]}"/>'


def path(d: str, kind: str) -> str:
    return f'<path class="{kind}" d="{d}"/>'


def box(x: float, y: float, width: float, height: float, colour: str, strength: float = 1) -> str:
    """A box with an edge; `strength` is how much of its colour fills it."""
    place = _place(x, y, width, height, 1.5)
    return f'<rect class="{colour}" {place} fill="currentColor" fill-opacity="{strength:g}" stroke="currentColor"/>'


def hollow(x: float, y: float, width: float, height: float, dashes: str = "") -> str:
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    return f'<rect class="axis" {_place(x, y, width, height, 3)} fill="none"{dashed}/>'


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    where = f'x="{_number(x)}" y="{_number(y)}"' + (f' class="{kind}"' if kind else "")
    aligned = f' text-anchor="{anchor}"' if anchor != "start" else ""
    return f"<text {where}{aligned}>{escape(words)}</text>"


def with_tip(words: str, mark: str) -> str:
    """A mark that shows this text to a pointer."""
    return f"<g><title>{escape(words)}</title>{mark}</g>"


def picture(title: str, height: float, body: Sequence[str]) -> str:
    title, size = escape(title), f'width="{WIDTH}" height="{math.ceil(height)}"'
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {WIDTH} {math.ceil(height)}" role="img"'
    style = f"<style>{RULES}</style><title>{title}</title>"
    return "\n".join([f'{opening} aria-label="{title}">{style}', *body, "</svg>\n"])


def files(stem: str, svg: str) -> dict[str, str]:
    """The picture by file name, for light pages and for dark ones."""
    return {
        f"{stem}{suffix}.svg": re.sub(r"var\(--(\w+)\)", lambda found, theme=theme: theme[found[1]], svg)
        for suffix, theme in THEMES.items()
    }


def _place(x: float, y: float, width: float, height: float, radius: float) -> str:
    sides = {"x": x, "y": y, "width": width, "height": height}
    return " ".join([*(f'{name}="{_number(value)}"' for name, value in sides.items()), f'rx="{radius:g}"'])


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
