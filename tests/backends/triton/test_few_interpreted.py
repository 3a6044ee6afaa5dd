"""Few queries against many keys by the decode kernel, in Triton's interpreter."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip(
        "set TRITON_INTERPRET=1; make test does, in a process of its own, since triton.jit chooses at decoration",
        allow_module_level=True,
    )
pytest.importorskip("triton")

from few_cases import NAMED, OTHERS

from stream_attention import attention, explain
from stream_attention.gpu.decode_tuning import DecodeConfig
from stream_attention_tools.testing import check_case
from stream_attention_tools.testing.inputs import make


@pytest.mark.parametrize("name", NAMED)
def test_agreement(name: str) -> None:
    case = replace(NAMED[name], Tk=min(NAMED[name].Tk, 300), backward=False)
    query, key, value, options = make(case)
    assert isinstance(explain(query, key, value, **options, backend="triton").config, DecodeConfig)
    assert check_case(case, "triton").worst <= 1


@pytest.mark.parametrize("name", OTHERS)
def test_what_a_cache_knows_nothing_of_is_computed_by_tiles(name: str) -> None:
    query, key, value, options = make(replace(OTHERS[name], backward=False))
    assert not isinstance(explain(query, key, value, **options, backend="triton").config, DecodeConfig)


def test_gradients_are_those_of_the_call() -> None:
    assert check_case(replace(NAMED["causal"], Tk=300, backward=True), "triton").worst <= 1


def test_a_forced_tile_is_one_of_queries() -> None:
    query, key, value, _ = make(replace(NAMED["one query"], Tk=300))
    assert explain(query, key, value, backend="triton(block_n=16)").config.block_n == 16
    by_tiles = attention(query, key, value, backend="triton(block_n=16)")
    torch.testing.assert_close(attention(query, key, value, backend="triton"), by_tiles, rtol=2e-2, atol=1e-2)
