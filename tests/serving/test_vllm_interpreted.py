"""The backend for vLLM on the Triton kernels, under Triton's interpreter: one list of work for the layers of a step."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import pytest
from test_vllm import FEATURES, Case, run

from stream_attention import force_backend
from stream_attention.backends.installed import interpreting

pytestmark = pytest.mark.skipif(not interpreting(), reason="TRITON_INTERPRET=1 is not set: `make test` runs these")

STEPS = ((9, 0, 0), (12, 5, 0), (1, 3, 7), (1, 1, 1))
CASES = {"plain": Case(), "heads before layers": Case(layout="BHLNC")} | {
    name: FEATURES[name]
    for name in ("sinks and window", "not causal, window", "causal by request", "e4m3, window, sinks", "ALiBi")
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_steps(serving: ModuleType, case: Case) -> None:
    with force_backend("triton"):
        run(serving, replace(case, steps=STEPS))
