"""What every test runs under."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, settings

# A failure prints the line that reproduces it; how long an example takes says nothing about whether it is right.
settings.register_profile(
    "stream_attention", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("stream_attention")

# Shapes are tiny, and on shared cores threads that wait for each other cost a hundredfold. Times are compared with
# those of torch in the same process, so one thread is as fair as many.
torch.set_num_threads(1)

BACKENDS = ("eager",)
"""Backends that the tests of the ops run on; `--backend NAME` (repeatable) names others."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--backend", action="append", help="run the tests of the ops on this backend; repeatable")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "backend" in metafunc.fixturenames:
        metafunc.parametrize("backend", metafunc.config.getoption("--backend") or BACKENDS)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a GPU, and torch.cuda.is_available() is False")
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(skip)
