"""The form of a results file: what every reader of one takes for granted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

NUMBER = (int, float)
NUMBER_OR_NONE = (int, float, type(None))
WORD_OR_NONE = (str, type(None))

FILE: dict[str, Any] = {
    "cells": list,
    "commit": {"hash": WORD_OR_NONE, "dirty": (bool, type(None))},
    "conditions": {"timing": str},
    "date": str,
    "machine": {"name": str},
    "versions": {"torch": str},
}
CELL: dict[str, Any] = {
    "name": str,
    "direction": str,
    "problem": {"Tk": int},
    "providers": dict,
    "ours": WORD_OR_NONE,
    "fastest_peer": WORD_OR_NONE,
    "ratio": NUMBER_OR_NONE,
    "bar": NUMBER_OR_NONE,
}
ENTRIES: dict[str, dict[str, Any]] = {
    "median_ms": {"median_ms": NUMBER, "tflops": NUMBER},
    "unavailable": {"unavailable": str},
    "failed": {"failed": str},
    "error": {"error": NUMBER_OR_NONE, "allowed": NUMBER_OR_NONE},
}
"""What a provider's entry holds, by the first of these keys that it has; one with none of them was wrong."""
EAGER: dict[str, dict[str, Any]] = {
    "cell": {"ours": WORD_OR_NONE, "fastest_peer": WORD_OR_NONE, "ratio": NUMBER_OR_NONE},
    "entry": {"median_ms": NUMBER},
}
"""What a cell and an entry hold as "eager", where there was a second clock."""


def lacking(found: Any) -> list[str]:
    """Where something that was read from JSON has not what a results file has, such as "cells[0].providers"."""
    missing = list(_missing(found, FILE, ""))
    cells = found["cells"] if "cells" not in missing and isinstance(found, dict) else []
    for number, cell in enumerate(cells):
        at = f"cells[{number}]."
        its = list(_missing(cell, CELL, at))
        missing += its
        if not its:
            missing += _missing_eager(cell, "cell", at)
            for name, one in cell["providers"].items():
                kind = next((key for key in ENTRIES if isinstance(one, dict) and key in one), "error")
                missing += _missing(one, ENTRIES[kind], f"{at}providers[{name!r}].")
                missing += _missing_eager(one, "entry", f"{at}providers[{name!r}].")
    return missing


def _missing_eager(found: Any, of: str, at: str) -> Iterator[str]:
    if isinstance(found, dict) and "eager" in found:
        yield from _missing(found["eager"], EAGER[of], f"{at}eager.")


def _missing(found: Any, form: dict[str, Any], at: str) -> Iterator[str]:
    for key, kind in form.items():
        one = found.get(key, _ABSENT) if isinstance(found, dict) else _ABSENT
        if isinstance(kind, dict) and isinstance(one, dict):
            yield from _missing(one, kind, f"{at}{key}.")
        elif not isinstance(one, dict if isinstance(kind, dict) else kind):
            yield f"{at}{key}"


_ABSENT = object()  # an instance of nothing that is asked for
