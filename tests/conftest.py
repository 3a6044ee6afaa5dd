"""What every test runs under."""

from __future__ import annotations

import gc
import json
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

sys.path.insert(0, str(Path(__file__).parent / "backends"))

from gates import unchanged
from tests.interpreter import quicken

from stream_attention.backends import installed
from stream_attention.base import device
from stream_attention.dispatch.plan import forget_plans

try:
    from hypothesis import HealthCheck, settings
except ImportError:  # a GPU machine of which `make test-gpu` asks torch and pytest alone
    pass
else:
    # A failure prints the line that reproduces it; how long an example takes says nothing about whether it is right.
    settings.register_profile(
        "stream_attention", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("stream_attention")

# Shapes are tiny, and on shared cores threads that wait for each other cost a hundredfold. Times are compared with
# those of torch in the same process, so one thread is as fair as many.
torch.set_num_threads(1)

if os.environ.get("TRITON_INTERPRET") == "1":
    quicken()

BACKENDS = ("eager",)
"""Backends that the tests of the ops run on; `--backend NAME` (repeatable) names others."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--backend", action="append", help="run the tests of the ops on this backend; repeatable")
    parser.addoption("--serving-out", type=Path, help="write what serving engines did into this results file")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "backend" in metafunc.fixturenames:
        metafunc.parametrize("backend", metafunc.config.getoption("--backend") or BACKENDS)


PLAIN = re.compile(r"\[sm_90 bfloat16 d(64|128|256) (full|causal) 4096\]$")
"""Gates that every run of the tests passes, whatever is recorded: the plain Hopper kernels, a minute on two cores."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get("GATES") != "all" and unchanged():
        passed = pytest.mark.skip(reason="passed with these very sources and this Triton; GATES=all runs it")
        for item in items:
            if item.path.name.endswith("_compiled.py") and not PLAIN.search(item.name):
                item.add_marker(passed)
    # `make test` looks for tests to run alone in files that have the word.
    hidden = {
        item.path
        for item in items
        if item.get_closest_marker("serial") and not re.search(r"\bserial\b", item.path.read_text())
    }
    assert not hidden, f"these would be run by no pass: {hidden}"
    # What takes long comes first, so that no worker is left with it at the end.
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a GPU, and torch.cuda.is_available() is False")
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(skip)


_file = ""  # of the last test


def pytest_runtest_logstart(location: tuple[str, int | None, str]) -> None:
    """Before each file the collector is told to leave alone what is there, most of which stays to the end.

    Otherwise `gc.collect()`, by which memory is measured, walks over every module and test that was ever imported.
    """
    global _file
    if location[0] != _file:
        _file = location[0]
        gc.collect()
        gc.freeze()


@pytest.fixture
def planned_with() -> Iterator[Callable[[str | None], None]]:
    """Sets the Triton release for which calls are planned, such as "3.6"; None: none is installed."""

    with pytest.MonkeyPatch.context() as patch:

        def with_release(release: str | None) -> None:
            patch.setattr(installed, "triton_release", lambda: release)
            patch.setattr(installed, "HAS_TRITON", release is not None)
            forget_plans()

        yield with_release
    forget_plans()


@pytest.fixture
def hopper_triton(planned_with: Callable[[str | None], None]) -> None:
    """Calls are planned for a Triton release that the Hopper kernels are enabled for, whatever is installed."""
    planned_with(installed.HOPPER_TRITON[0])


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch, hopper_triton: None) -> Iterator[None]:
    """Tensors in this block may be on a GPU that is not there: they have no data."""
    properties = SimpleNamespace(major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    device._facts.cache_clear()
    with FakeTensorMode():
        yield
    device._facts.cache_clear()


FOLDERS = ("tests/stream_attention_tools/cli/", "tests/core/", "tests/flash_attention/", "tests/learn/")
"""Folders whose GPU tests stand beside the others: one results file each."""


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """`GPU_RESULTS=folder` keeps the summary of every file of GPU tests there: CI has no GPU, so they are committed.

    `test_forward_gpu.py` becomes `gpu_tests_forward.json`, that of gluon/ `gpu_tests_gluon_forward.json`, with what
    its tests kept (gpu_tools.py). The files of a folder whose GPU tests stand beside the others (`FOLDERS`) become one,
    as `gpu_tests_learn.json`.
    """
    folder = os.environ.get("GPU_RESULTS")
    if not folder or not torch.cuda.is_available():
        return
    outcomes = ("passed", "failed", "error", "skipped")
    reports = {name: terminalreporter.stats.get(name, []) for name in outcomes}
    paths = {report.nodeid.split("::")[0] for its in reports.values() for report in its}
    files = {path for path in paths if path.endswith("_gpu.py")}
    files |= {name for name in FOLDERS if any(path.startswith(name) for path in paths)}
    for path in files:
        name = Path(path).stem.removeprefix("test_").removesuffix("_gpu")
        name = f"gluon_{name}" if "hopper" in Path(path).parts else name
        its = {outcome: [one for one in reports[outcome] if one.nodeid.startswith(path)] for outcome in outcomes}
        kept = Path(folder, f"kept_{name}.json")
        summary = {
            **{outcome: len(its[outcome]) for outcome in outcomes},
            "commit": os.environ.get("STREAM_ATTENTION_COMMIT"),
            "date": time.strftime("%Y-%m-%d"),
            "gpu": torch.cuda.get_device_name(),
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "triton": version("triton"),
                "cuda": torch.version.cuda,
            },
            "skips": [str(report.longrepr[2]) for report in its["skipped"]],
            **(json.loads(kept.read_text()) if kept.exists() else {}),
        }
        Path(folder, f"gpu_tests_{name}.json").write_text(json.dumps(summary, indent=1) + "\n")
