"""What tests that count bytes run under."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def no_garbage_of_others() -> Iterator[None]:
    """Tensors that earlier tests left in cycles are not freed while this one counts."""
    gc.disable()
    yield
    gc.enable()
