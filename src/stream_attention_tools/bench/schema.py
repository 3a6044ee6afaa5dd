"""The schema of a results file: what every reader of one takes for granted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

LARGEST = 1e300  # of a number: readers square and divide


class May(NamedTuple):
    """What a key holds where it is there."""

    hold: Any


def number(found: Any) -> bool:
    return isinstance(found, (int, float)) and not isinstance(found, bool) and abs(found) < LARGEST


def positive(found: Any) -> bool:
    """Of times and ratios, which are divided by and whose logarithm is taken."""
    return number(found) and found > 1 / LARGEST


def or_none(kind: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda found: found is None or kind(found)


def size(found: Any) -> bool:
    return number(found) and found >= 0


def length(found: Any) -> bool:
    return isinstance(found, int) and positive(found)


def word(found: Any) -> bool:
    return isinstance(found, str)


def flag(found: Any) -> bool:
    return isinstance(found, bool)


FILE: dict[str, Any] = {
    "cells": lambda found: isinstance(found, list),
    "commit": {"hash": or_none(word), "dirty": or_none(flag)},
    "conditions": {"timing": word, "eager": May(word)},
    "date": word,
    "machine": {"name": word, "device": May(word)},
    "versions": {"torch": word},
    "read_bandwidth": May({"tb_per_s": positive, "way": word}),
    "suite": May(word),
}
CELL: dict[str, Any] = {
    "name": word,
    "direction": word,
    "problem": {"Tk": length, "D": May(length)},
    "providers": lambda found: isinstance(found, dict),
    "ours": or_none(word),
    "fastest_peer": or_none(lambda found: word(found) and found),
    "ratio": or_none(positive),
    "bar": or_none(positive),
    "met": May(flag),
    "eager": May({"ours": or_none(word), "fastest_peer": or_none(word), "ratio": or_none(positive)}),
}
VERDICT: dict[str, Any] = {"error": or_none(size), "allowed": or_none(size)}
FIGURES: dict[str, Any] = {
    **{key: May(positive) for key in ("p20_ms", "p80_ms", "best_ms", "tb_per_s", "share_of_read_bandwidth")},
    **{key: May(positive) for key in ("vs_ours", "vs_plain", "tokens_per_s")},
    **{key: May(or_none(size)) for key in ("gb_per_s", "peak_bytes", "rms_error", "error", "allowed")},
    "right": May(flag),
    "ran": May(word),
    "eager": May({"median_ms": positive, "vs_ours": May(positive)}),
}
ENTRIES: dict[str, dict[str, Any]] = {
    "median_ms": {"median_ms": positive, "tflops": size} | FIGURES,
    "unavailable": {"unavailable": word} | FIGURES,
    "failed": {"failed": word} | FIGURES,
    "error": {key: one for key, one in FIGURES.items() if key not in VERDICT} | VERDICT,
}
"""What a provider's entry holds, by the first of these keys that it has; one with none of them was wrong."""
TOGETHER = (("error", "allowed"), ("p20_ms", "p80_ms"))
"""Of an entry: one is never there without the other."""
MODELS: dict[str, Any] = {
    "conditions": {"model": word, "training": word, "rounds": number},
    "versions": {"transformers": word},
}
"""What a file of the suite "models" holds too, and in an entry that was timed `tokens_per_s`."""


def lacking(found: Any) -> list[str]:
    """Where something that was read from JSON has not what a results file has, such as "cells[0].providers"."""
    missing = list(_missing(found, FILE, ""))
    of_models = not missing and found.get("suite") == "models"
    if of_models:
        missing += _missing(found, MODELS, "")
    cells = found["cells"] if isinstance(found, dict) and isinstance(found.get("cells"), list) else []
    for place, cell in enumerate(cells):
        missing += _missing(cell, CELL, f"cells[{place}].")
        if isinstance(cell, dict) and isinstance(cell.get("providers"), dict):
            missing += _missing_entries(cell, of_models, f"cells[{place}].")
    if not missing and any("eager" in cell for cell in cells) and "eager" not in found["conditions"]:
        missing.append("conditions.eager")
    return missing


def _missing_entries(cell: dict[str, Any], of_models: bool, at: str) -> list[str]:
    entries: dict[str, Any] = cell["providers"]
    missing: list[str] = []
    for name, one in entries.items():
        kind = next((key for key in ENTRIES if isinstance(one, dict) and key in one), "error")
        schema = ENTRIES[kind] | ({"tokens_per_s": positive} if of_models and kind == "median_ms" else {})
        missing += _missing(one, schema, f"{at}providers[{name!r}].")
        for pair in TOGETHER if isinstance(one, dict) else ():
            there = [key for key in pair if key in one]
            missing += [f"{at}providers[{name!r}].{key}" for key in pair if len(there) == 1 and key not in there]
    ours = cell.get("ours")
    if isinstance(ours, str) and not (isinstance(entries.get(ours), dict) and "median_ms" in entries[ours]):
        missing.append(f"{at}providers[{ours!r}].median_ms")
    return missing


def _missing(found: Any, schema: dict[str, Any], at: str) -> Iterator[str]:
    for key, kind in schema.items():
        there = isinstance(found, dict) and key in found
        optional, kind = (True, kind.hold) if isinstance(kind, May) else (False, kind)
        if not there:
            yield from () if optional else (f"{at}{key}",)
        elif isinstance(kind, dict) and isinstance(found[key], dict):
            yield from _missing(found[key], kind, f"{at}{key}.")
        elif isinstance(kind, dict) or not kind(found[key]):
            yield f"{at}{key}"
