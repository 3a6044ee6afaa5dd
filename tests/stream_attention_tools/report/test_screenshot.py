"""The report as a browser lays it out: no sideways scrolling on a phone, something to see, dark where asked for.

Runs where a Chromium is installed and is skipped elsewhere. Headless windows are at least 500 pixels wide, so the page
stands in frames of the widths that are tested.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import subprocess
import zlib
from collections.abc import Callable
from html import escape, unescape
from pathlib import Path

import pytest

from stream_attention_tools.report.page import page

ROOT = Path(__file__).resolve().parents[3]
WIDTHS = (360, 390, 1280)

FRAMES = """<!DOCTYPE html><body style="margin: 0">{frames}<script>
addEventListener("load", () => {{
  const seen = [...document.querySelectorAll("iframe")].map(frame => {{
    const root = frame.contentDocument.documentElement;
    return {{width: root.clientWidth, content: root.scrollWidth, height: root.scrollHeight,
      paper: getComputedStyle(frame.contentDocument.body).backgroundColor}};
  }});
  document.title = JSON.stringify(seen);
}});
</script></body>"""

Run = Callable[..., str]


def browser() -> str | None:
    """An installed Chromium: on the path, or in the cache of playwright."""
    named = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
    cache = Path(os.environ.get("PLAYWRIGHT_BROWSERS_PATH", Path.home() / ".cache" / "ms-playwright"))
    cached = sorted(cache.glob("chromium*/chrome-*/*chrome*"))
    return next(filter(None, map(shutil.which, [*named, *map(str, cached)])), None)


pytestmark = [
    pytest.mark.skipif(browser() is None, reason="no Chromium is installed here"),
    pytest.mark.xdist_group("chromium"),
]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Opens a page in Chromium with some flags; returns what it prints."""

    def opened(text: str, *flags: str) -> str:
        source = tmp_path / "page.html"
        source.write_text(text, encoding="utf-8")
        fixed = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=4000")
        own = f"--user-data-dir={tmp_path / 'profile'}"
        command = [str(browser()), *fixed, own, *flags, source.as_uri()]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout

    return opened


@pytest.fixture(scope="module")
def report() -> str:
    names = ("h200/forward", "h200/decode", "cpu/cpu")
    return page([json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text()) for name in names])


def framed(text: str, *widths: int, height: int = 844) -> str:
    style = f"display: block; border: 0; height: {height}px"
    frames = "".join(f'<iframe srcdoc="{escape(text)}" style="{style}; width: {width}px"></iframe>' for width in widths)
    return FRAMES.format(frames=frames)


def measured(run: Run, text: str, *flags: str) -> list[dict[str, int | str]]:
    """By width of WIDTHS: how wide the page and its content are, how tall it is, and the colour of its paper."""
    dumped = run(framed(text, *WIDTHS), "--dump-dom", *flags)
    found = re.search(r"<title>(.*?)</title>", dumped, re.DOTALL)
    assert found, dumped[:2000]
    return json.loads(unescape(found[1]))


def rows(path: Path) -> tuple[int, int, list[bytes]]:
    """Width, height and pixel rows, as they are packed, of a PNG."""
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height, depth, colours = struct.unpack(">IIBB", data[16:26])
    packed, place = b"", 8
    while place < len(data):
        size, kind = struct.unpack(">I4s", data[place : place + 8])
        packed += data[place + 8 : place + 8 + size] if kind == b"IDAT" else b""
        place += 12 + size
    pixels = zlib.decompress(packed)
    step = 1 + width * depth // 8 * {0: 1, 2: 3, 6: 4}[colours]
    return width, height, [pixels[n : n + step] for n in range(0, len(pixels), step)]


def test_the_page_never_scrolls_sideways(run: Run, report: str) -> None:
    found = measured(run, report)
    assert [one["width"] for one in found] == list(WIDTHS)
    assert [one["content"] for one in found] == list(WIDTHS)
    assert all(int(one["height"]) > 2000 for one in found)


def test_a_wide_page_would_be_noticed(run: Run) -> None:
    wide = '<!DOCTYPE html><body style="margin: 0"><div style="width: 700px">wide</div></body>'
    assert [one["content"] for one in measured(run, wide)] == [700, 700, 1280]


def test_paper_is_white_and_dark_where_the_screen_asks_for_it(run: Run, report: str) -> None:
    light = {one["paper"] for one in measured(run, report, "--blink-settings=preferredColorScheme=1")}
    dark = {one["paper"] for one in measured(run, report, "--blink-settings=preferredColorScheme=0")}
    assert (light, dark) == ({"rgb(255, 255, 255)"}, {"rgb(20, 23, 26)"})


@pytest.mark.parametrize(("width", "height"), [(390, 844), (1280, 900)])
def test_there_is_something_to_see(run: Run, report: str, tmp_path: Path, width: int, height: int) -> None:
    shown = {}
    for name, text in (("report", report), ("blank", "<!DOCTYPE html>")):
        shot = tmp_path / f"{name}.png"
        window = max(width, 500)
        run(framed(text, width, height=height), f"--window-size={window},{height}", f"--screenshot={shot}")
        shown[name] = rows(shot)
        assert shown[name][:2] == (window, height)
    assert len(set(shown["blank"][2])) <= 3 and len(set(shown["report"][2])) > height // 3
