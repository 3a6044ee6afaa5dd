"""A picture's pieces as SVG text, in the style of the benchmark's plots: 360 wide, colours by class, light and dark."""

from __future__ import annotations

from stream_attention_tools.report import figures
from stream_attention_tools.report.figures import number as n
from stream_attention_tools.report.figures import picture, text, with_tip
from stream_attention_tools.report.readme_report import THEMES

__all__ = ["box", "files", "hollow", "path", "picture", "text", "with_tip"]


def path(d: str, kind: str) -> str:
    return f'<path class="{kind}" d="{d}"/>'


def box(x: float, y: float, width: float, height: float, colour: str, strength: float = 1) -> str:
    """A box with an edge; `strength` is how much of its colour fills it."""
    place = f'x="{n(x)}" y="{n(y)}" width="{n(width)}" height="{n(height)}" rx="1.5"'
    return f'<rect class="{colour}" {place} fill="currentColor" fill-opacity="{strength:g}" stroke="currentColor"/>'


def hollow(x: float, y: float, width: float, height: float, dashes: str = "") -> str:
    place = f'x="{n(x)}" y="{n(y)}" width="{n(width)}" height="{n(height)}" rx="3"'
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    return f'<rect class="axis" {place} fill="none"{dashed}/>'


def files(stem: str, svg: str) -> dict[str, str]:
    """The picture by file name, for light pages and for dark ones."""
    return {f"{stem}{suffix}.svg": figures.standalone(svg, theme) for suffix, theme in THEMES.items()}
