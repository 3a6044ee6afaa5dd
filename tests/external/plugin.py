"""A pytest plugin that runs one suite of `suites.py`: `-p tests.external.plugin --suite NAME --report FILE`."""

from __future__ import annotations

import json
import re
from collections import Counter
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.external.helpers import prepare
from tests.external.sample import Axis, sample
from tests.external.suites import SUITES, Suite

_NAME = re.compile(r"def (test_\w+)")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--suite", choices=list(SUITES))
    parser.addoption("--folder", type=Path)
    parser.addoption("--report", type=Path)


def pytest_configure(config: pytest.Config) -> None:
    suite = SUITES[config.getoption("--suite")]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    prepare(suite, config.getoption("--folder"), device)
    config.pluginmanager.register(_Run(suite, config.getoption("--report"), device))


class _Run:
    """Thins what is collected, deselects by the suite's list, and counts what happens."""

    def __init__(self, suite: Suite, report: Path, device: str) -> None:
        self.suite, self.report, self.device = suite, report, device
        self.of, self.pairs = 0, [0, 0]
        self.deselected: Counter[str] = Counter()
        self.not_sampled = 0
        self.outcomes: dict[str, Counter[str]] = {}
        self.features: dict[str, Counter[str]] = {}
        self.skipped: Counter[str] = Counter()
        self.failures: dict[str, str] = {}
        self.functions: dict[str, str] = {}  # the function of a test that torch's `parametrize` made of it

    def why_not(self, test: str, parameters: dict[str, Any]) -> str | None:
        """The reason of the first entry of the list that holds for a test."""
        for entry in self.suite.deselected:
            if (
                (self.device == "cpu" or not entry.cpu_only)
                and any(fnmatchcase(test, pattern) for pattern in entry.tests.split())
                and all(name in parameters and value(parameters[name]) for name, value in entry.where.items())
            ):
                return entry.reason
        return None

    @pytest.hookimpl(tryfirst=True)
    def pytest_pycollect_makeitem(self, collector: Any, name: str, obj: Any) -> None:
        marks = [mark for mark in getattr(obj, "pytestmark", []) if mark.name == "parametrize"]
        if not name.startswith("test") or not marks or hasattr(obj, "sampled"):
            return
        found = sample([_axis(mark) for mark in marks], lambda row: self.why_not(name, row), self.suite.most)
        self.of += found.of
        self.deselected.update(found.dropped)
        self.not_sampled += found.of - sum(found.dropped.values()) - len(found.rows)
        self.pairs = [sum(both) for both in zip(self.pairs, found.pairs, strict=True)]
        obj.pytestmark = [mark for mark in obj.pytestmark if mark.name != "parametrize"]
        obj.sampled = True
        if found.rows:
            names = list(found.rows[0])
            rows = [pytest.param(*row.values(), id="-".join(map(_word, row.values()))) for row in found.rows]
            pytest.mark.parametrize(names, rows)(obj)
        else:
            pytest.mark.all_deselected(obj)

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        kept, groups, dropped = [], Counter[str](), []
        self.functions = {item.name: _function(item) for item in items if not hasattr(item, "callspec")}
        for item in items:
            parameters = dict(item.callspec.params) if hasattr(item, "callspec") else {}
            if item.get_closest_marker("all_deselected"):
                dropped.append(item)
                continue
            name = item.name if item.cls is None else f"{item.cls.__name__}.{item.name}"
            reason = None
            if not parameters:
                self.of += 1
                reason = self.why_not(name, {})
                if reason is not None:
                    self.deselected[reason] += 1
            if reason is None:
                kept.append(item)
                item.user_properties.append(("features", _features(parameters)))
                groups[_function(item)] += 1
            else:
                dropped.append(item)
        thinned, seen = [], Counter[str]()
        for item in kept:  # what torch's own `parametrize` made has one function for each: every n-th is run
            group = _function(item)
            at, count = seen[group], groups[group]
            seen[group] += 1
            if hasattr(item, "callspec") or at * self.suite.most // count != (at - 1) * self.suite.most // count:
                thinned.append(item)
            else:
                self.not_sampled += 1
                dropped.append(item)
        config.hook.pytest_deselected(items=dropped)
        items[:] = thinned

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.outcome == "passed":
            return
        test = report.nodeid.partition("::")[2].partition("[")[0].rpartition("::")[2]
        test = self.functions.get(test, test)
        self.outcomes.setdefault(test, Counter())[report.outcome] += 1
        for feature in dict(report.user_properties).get("features", []):
            self.features.setdefault(feature, Counter())[report.outcome] += 1
        if report.outcome == "skipped":
            self.skipped[_skip_reason(report)] += 1
        if report.outcome == "failed":
            message = getattr(getattr(report.longrepr, "reprcrash", None), "message", str(report.longrepr))
            self.failures[report.nodeid.partition("::")[2]] = message.splitlines()[0][:300] if message else ""

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.outcome == "failed":
            self.failures[report.nodeid or "collection"] = str(report.longrepr).splitlines()[-1][:300]

    def pytest_sessionfinish(self) -> None:
        outcomes: Counter[str] = sum(self.outcomes.values(), Counter())
        self.report.write_text(
            json.dumps(
                {
                    "parametrisations": self.of,
                    "passed": outcomes["passed"],
                    "failed": len(self.failures),
                    "skipped": dict(sorted(self.skipped.items())),
                    "deselected": dict(self.deselected),
                    "not sampled": self.not_sampled,
                    "pairs of values": self.pairs,
                    "tests": {test: dict(counts) for test, counts in sorted(self.outcomes.items())},
                    "features": {name: dict(counts) for name, counts in sorted(self.features.items())},
                    "failures": self.failures,
                }
            )
        )


def _axis(mark: Any) -> Axis:
    names, values = (*mark.args, *(mark.kwargs[key] for key in ("argnames", "argvalues") if key in mark.kwargs))
    names = tuple(name.strip() for name in names.split(",")) if isinstance(names, str) else tuple(names)
    rows = []
    for value in values:
        value = value.values if hasattr(value, "marks") else (value if len(names) > 1 else (value,))
        rows.append(tuple(value))
    return Axis(names, tuple(rows))


def _function(item: Any) -> str:
    """The name in the file of what torch's `parametrize` and device types made tests of."""
    return max((name for name in _names(item.path) if item.name.startswith(name)), key=len)


@lru_cache
def _names(file: Path) -> list[str]:
    return _NAME.findall(file.read_text())


def _word(value: Any) -> str:
    if isinstance(value, tuple):
        return "-".join(map(_word, value))
    return getattr(value, "__name__", str(value)).replace("torch.", "")


def _features(parameters: dict[str, Any]) -> list[str]:
    """What a call uses: the parameters that switch something on, and words."""
    found = []
    for name, value in parameters.items():
        if isinstance(value, str):
            found.append(f"{name}={value}")
        elif isinstance(value, torch.dtype):
            found.append(str(value).removeprefix("torch."))
        elif isinstance(value, (bool, float)) or "page" in name or name == "num_splits":
            found += [name] if value else []
        elif isinstance(value, tuple):
            found += [_word(part) for part in value if isinstance(part, (type, torch.dtype))]
    return found


def _skip_reason(report: pytest.TestReport) -> str:
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return reason.removeprefix("Skipped: ") or "no reason given by the test"
