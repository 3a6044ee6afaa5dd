"""vLLM, or what stands in for it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import pytest
import vllm_stand_in

HAS_VLLM = find_spec("vllm") is not None
OURS = "stream_attention.serving.vllm"


@pytest.fixture(scope="module")
def serving() -> Iterator[ModuleType]:
    """`stream_attention.serving.vllm`, on vLLM if it is installed, else on a stand-in that is removed again."""
    with pytest.MonkeyPatch.context() as patch:
        if HAS_VLLM:
            os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
        else:
            for name, module in vllm_stand_in.modules().items():
                patch.setitem(sys.modules, name, module)
        yield import_module(OURS)
    if not HAS_VLLM:
        del sys.modules[OURS]
