"""A picture's pieces as SVG text, in the style of the benchmark's plots: 360 wide, colours by class, light and dark."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from stream_attention_tools.report import figures
from stream_attention_tools.report.figures import DARK, LIGHT, WIDTH

THEMES = {"": LIGHT, "_dark": DARK}  # by what the file name ends in


def n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    told = (f' class="{kind}"' if kind else "") + (f' text-anchor="{anchor}"' if anchor != "start" else "")
    return f'<text x="{n(x)}" y="{n(y)}"{told}>{escape(words)}</text>'


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


def told(words: str, mark: str) -> str:
    """A mark that says its figures to who points at it."""
    return f"<g><title>{escape(words)}</title>{mark}</g>"


def picture(title: str, height: float, body: Sequence[str]) -> str:
    title = escape(title)
    opening = f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{title}"><title>{title}</title>'
    return "\n".join([opening, *body, "</svg>"])


def files(stem: str, svg: str) -> dict[str, str]:
    """The picture by file name, for light pages and for dark ones."""
    return {f"{stem}{suffix}.svg": figures.standalone(svg, theme) for suffix, theme in THEMES.items()}
