"""The report's style sheet: colours, light and dark by what the reader's screen asks for, and `page.css`."""

from __future__ import annotations

from pathlib import Path

from .figures import DARK, LIGHT, RULES

PAGE = Path(__file__).with_name("page.css")
"""All that has no colour of its own; black on white in print."""

HEAT_STEPS = (1.02, 1.1, 1.25, 1.5, 2.0)
"""Where the heat map's colour deepens: a speed, or one by it, up to the first of these is neither faster nor slower."""


def heat(speed: float) -> str:
    """The class of the colour of a speed as a multiple of another: h0 about even, f1-f5 faster, w1-w5 slower."""
    depth = sum(max(speed, 1 / speed) > step for step in HEAT_STEPS)
    return "h0" if depth == 0 else f"{'f' if speed > 1 else 'w'}{depth}"


def heat_colours(theme: dict[str, str]) -> dict[str, str]:
    """The colours of `heat`'s classes: from the paper towards blue or orange."""
    dark = theme is DARK
    ends = {"f": "#1f6aa8" if dark else "#6fb1e4", "w": "#a3500f" if dark else "#f3a05a"}
    return {
        f"{kind}{depth}": _mixed(theme["paper"], end, depth / len(HEAT_STEPS))
        for kind, end in ends.items()
        for depth in range(1, len(HEAT_STEPS) + 1)
    }


def _mixed(start: str, end: str, share: float) -> str:
    pairs = zip(*([int(colour[n : n + 2], 16) for n in (1, 3, 5)] for colour in (start, end)), strict=True)
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in pairs)


def sheet() -> str:
    def variables(theme: dict[str, str]) -> str:
        return " ".join(f"--{name}: {colour};" for name, colour in (theme | heat_colours(theme)).items())

    heated = "\n".join(f".{name} {{ background: var(--{name}); }}" for name in heat_colours(LIGHT))
    light = f":root {{ {variables(LIGHT)} }}"
    dark = f"@media screen and (prefers-color-scheme: dark) {{ :root {{ {variables(DARK)} }} }}"
    return "\n".join([light, dark, RULES, heated, PAGE.read_text(encoding="utf-8")])
