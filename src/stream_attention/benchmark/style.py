"""The report's style sheet: light and dark by what the reader's screen asks for, black on white in print."""

from __future__ import annotations

from .figures import DARK, LIGHT, RULES

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
    return "\n".join(
        [
            f":root {{ {variables(LIGHT)} }}",
            f"@media screen and (prefers-color-scheme: dark) {{ :root {{ {variables(DARK)} }} }}",
            _PAGE,
            RULES,
            heated,
            _PRINT,
        ]
    )


_PAGE = """\
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; text-size-adjust: 100%; }
body { margin: 0; background: var(--paper); color: var(--ink); overflow-wrap: break-word;
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 20px 16px 48px; }
h1 { font-size: 26px; line-height: 1.2; margin: 0 0 8px; }
h2 { font-size: 21px; line-height: 1.25; margin: 44px 0 14px; padding-top: 18px; border-top: 2px solid var(--grid); }
h3 { font-size: 17px; margin: 28px 0 10px; }
header p { margin: 0; color: var(--quiet); font-size: 14px; }
p, dd { max-width: 76ch; }
a { color: var(--s0); }
small { color: var(--quiet); font-size: 12px; }
figure { margin: 0 0 20px; }
figcaption { color: var(--quiet); font-size: 13px; line-height: 1.4; margin-top: 8px; max-width: 84ch; }
.panels { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 330px), 1fr)); gap: 22px 26px;
  align-items: start; }
.panels svg { display: block; width: 100%; max-width: 440px; height: auto; overflow: visible; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 16px; margin: 0 0 12px; padding: 0; list-style: none;
  font-size: 14px; }
.sign { width: 14px; height: 14px; vertical-align: -2px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(104px, 1fr)); gap: 10px; margin: 0 0 14px;
  max-width: 720px; }
.tiles div { border: 1px solid var(--grid); border-radius: 8px; padding: 8px 10px; }
.tiles dt { color: var(--quiet); font-size: 13px; }
.tiles dd { margin: 0; }
.tiles b { display: block; font-size: 26px; line-height: 1.2; font-variant-numeric: tabular-nums; }
.tiles span { display: block; color: var(--quiet); font-size: 12px; line-height: 1.35; }
.conditions { margin: 0; font-size: 14px; }
.conditions div { display: grid; grid-template-columns: 96px 1fr; gap: 8px; padding: 3px 0; }
.conditions dt { color: var(--quiet); }
.conditions dd { margin: 0; min-width: 0; }
.scroll { overflow-x: auto; max-width: 100%; }
table { border-collapse: collapse; font-size: 14px; font-variant-numeric: tabular-nums; }
th, td { padding: 4px 10px 4px 0; text-align: left; vertical-align: top; border-bottom: 1px solid var(--grid);
  white-space: nowrap; }
td small { display: block; white-space: normal; min-width: 12em; max-width: 30em; }
th { color: var(--quiet); font-weight: 500; }
thead th { white-space: normal; vertical-align: bottom; line-height: 1.3; }
nav { margin-top: 16px; }
.all td, .all th[scope=col]:not(:first-child) { text-align: right; padding: 4px 0 4px 14px; }
.all th[scope=row] { color: inherit; font-weight: 400; }
.all .ours td, .all .ours th { font-weight: 700; }
.all th[scope=rowgroup] { color: var(--ink); font-weight: 600; padding-top: 14px; white-space: normal; }
.all th[scope=rowgroup] span { position: sticky; left: 0; display: inline-block; max-width: calc(100vw - 32px); }
.heat td, .heat th { padding: 5px 7px; border: 1px solid var(--paper); text-align: center; font-size: 13px; }
.heat th[scope=row] { text-align: left; padding-left: 0; }
"""

_PRINT = """\
@media print {
  @page { margin: 14mm; }
  body { font-size: 11pt; background: #fff; color: #000; }
  main { max-width: none; padding: 0; }
  h2 { break-before: page; border-top: 0; margin-top: 0; }
  header + section h2, header + nav + section h2 { break-before: avoid; }
  h2, h3 { break-after: avoid; }
  svg, tr, .all tbody, .tiles, .heat { break-inside: avoid; }
  thead { display: table-header-group; }
  .panels { grid-template-columns: repeat(2, 1fr); }
  .scroll { overflow: visible; }
  .all th[scope=rowgroup] span { max-width: none; }
  table { font-size: 8.5pt; }
  th, td { padding: 2px 7px 2px 0; }
  td, .legend, .tiles { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
  a { color: inherit; text-decoration: none; }
}
"""
