"""Markdown as code hosts read it, for a parser that reads lists more strictly; and the links of a text."""

from __future__ import annotations

import re
from collections.abc import Callable

_ITEM = re.compile(r"(?:[-*+]|\d+[.)]) +")
_FENCE = re.compile(r"(```+|~~~+)")
_LINK = re.compile(r"(\]\(|(?:src|srcset|href)=\")([^)\"\s]+)")


def lists_apart(text: str) -> str:
    """Lists begin after an empty line, and what belongs to an item is indented by four spaces."""
    lines: list[str] = []
    columns: list[int] = []  # where the text of each open item begins
    fence = ""
    for line in text.split("\n"):
        bare = line.lstrip(" ")
        column = len(line) - len(bare)
        before = lines[-1].strip() if lines else ""
        if not fence and bare:
            item = _ITEM.match(bare)
            while (
                columns and column < columns[-1] and (item or not before or _FENCE.match(bare) or _FENCE.match(before))
            ):
                columns.pop()
            if item and before and not columns and not _ITEM.match(before) and not _in_list(lines):
                lines.append("")
        taken = min(column, columns[-1]) if columns else 0
        lines.append(" " * (4 * len(columns)) + line[taken:] if bare else "")
        marker = _FENCE.match(bare)
        if marker and not fence:
            fence = marker[1]
        elif fence and bare.startswith(fence):
            fence = ""
        elif not fence and bare and (item := _ITEM.match(bare)):
            columns.append(column + item.end())
    return "\n".join(lines)


def _in_list(lines: list[str]) -> bool:
    """Whether the paragraph that these lines end with is one of a list."""
    for line in reversed(lines):
        if not line.strip():
            return False
        if _ITEM.match(line.lstrip(" ")):
            return True
    return False


def links(text: str) -> list[str]:
    """What a page links to or shows, in markdown and in HTML, in the order of the page."""
    return [target for part in _prose(text) for _, target in _LINK.findall(part)]


def relinked(text: str, new: Callable[[str], str]) -> str:
    """The page with other targets."""
    parts = re.split(_BLOCK, text)
    parts[::2] = [_LINK.sub(lambda found: found[1] + new(found[2]), part) for part in parts[::2]]
    return "".join(parts)


_BLOCK = re.compile(r"(^ *```.*?^ *```$)", re.DOTALL | re.MULTILINE)


def _prose(text: str) -> list[str]:
    return re.split(_BLOCK, text)[::2]
