"""The built site: every link leads to a file that is there and to a place on it, and nothing is fetched."""

from __future__ import annotations

import os
import re
from html import unescape
from pathlib import Path
from urllib.parse import unquote

_TAG = re.compile(r"<(\w+)\b([^>]*)>")
_VALUE = re.compile(r'\b(href|src|srcset|id|name)="?([^"\s>]+)')
_FETCHED = {"script", "img", "source", "iframe"}


def broken(site: Path) -> list[str]:
    """Links without an end, and what a reader without a network would miss; one sentence each."""
    anchors: dict[str, set[str]] = {}
    wanted: dict[str, set[tuple[str, str]]] = {}
    for file in sorted(site.rglob("*.html")):
        page = file.relative_to(site).as_posix()
        if page == "404.html":  # its links start at the site's root, wherever that is
            continue
        anchors[page], wanted[page] = {""}, set()
        for tag, rest in _TAG.findall(file.read_text()):
            for name, value in _VALUE.findall(rest):
                if name in ("id", "name"):
                    anchors[page].add(unescape(value))
                else:
                    wanted[page].add((tag, unescape(value)))
    found = []
    for page, targets in wanted.items():
        for tag, target in sorted(targets):
            if re.match(r"(https?:)?//", target):
                if tag in _FETCHED or tag == "link":
                    found.append(f"{page} fetches {target}")
                continue
            if target.startswith(("data:", "mailto:")):
                continue
            path, _, anchor = target.partition("#")
            there = os.path.normpath(f"{os.path.dirname(page)}/{unquote(path)}") if path else page
            there = there.lstrip("/")
            if not (site / there).is_file():
                found.append(f"{page} links to {target}, which is not there")
            elif there in anchors and unquote(anchor) not in anchors[there]:
                found.append(f"{page} links to {target}, but {there} has no such place")
    return found
