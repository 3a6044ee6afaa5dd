"""vLLM's engine on a CPU: the tokens that it generates with our attention, with its own, and with a wrong one."""

from __future__ import annotations

import json
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from benchmarks.serving import vllm_engine, vllm_suite
from test_vllm import LAYOUTS

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "cpu" / "serving_vllm.json"
SUITE = RESULTS.with_name("serving_vllm_suite.json")

with_vllm = pytest.mark.skipif(
    find_spec("vllm") is None, reason="needs vLLM, which pins its torch; run: make test-serving"
)


def check_record(record: dict[str, Any]) -> None:
    """The bars that a run is held to."""
    ours, wrong = (record["against_own"][name] for name in ("stream_attention", "wrong"))
    assert ours["outputs_equal"] == ours["outputs"] == len(vllm_engine.LENGTHS)
    assert ours["tokens_equal"] == ours["tokens"] == len(vllm_engine.LENGTHS) * vllm_engine.NEW_TOKENS
    assert wrong["outputs_equal"] == 0 and wrong["tokens_equal"] < wrong["tokens"] / 2, (
        "the model does not need attention"
    )
    assert ours["calls"] > 0 and ours["mixed"] > 0 and ours["most_requests"] > 1, "no step had prompts beside tokens"
    assert record["conditions"]["prompts"]["cached_tokens"] > 0, "no prompt began as another did"


@pytest.fixture(scope="module")
def record(pytestconfig: pytest.Config) -> dict[str, Any]:
    found = vllm_engine.measure()
    if out := pytestconfig.getoption("--serving-out"):
        from stream_attention_tools.bench.results import save

        save(found, out)
    return found


@with_vllm
@pytest.mark.slow
def test_the_engine_says_the_same_tokens_with_our_attention_and_others_with_a_wrong_one(record: dict[str, Any]) -> None:
    check_record(record)


def test_the_committed_run_met_the_same_bars() -> None:
    check_record(json.loads(RESULTS.read_text()))


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("stream_attention", {"tokens_equal": 255}),
        ("stream_attention", {"mixed": 0}),
        ("wrong", {"outputs_equal": 1}),
        ("wrong", {"tokens_equal": 200}),
    ],
)
def test_a_run_that_misses_a_bar_fails(name: str, changed: dict[str, int]) -> None:
    found = json.loads(RESULTS.read_text())
    found["against_own"][name] |= changed
    with pytest.raises(AssertionError):
        check_record(found)


def test_vllms_own_test_passed_in_every_cell_and_in_none_with_a_wrong_backend() -> None:
    found = json.loads(SUITE.read_text())
    assert found["stream_attention"] == dict.fromkeys(vllm_suite.CELLS, "passed")
    assert found["wrong"].keys() == vllm_suite.CELLS.keys()
    assert all(failure.startswith("AssertionError") and "differs" in failure for failure in found["wrong"].values())


def test_the_page_says_what_was_run() -> None:
    page = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    for its in json.loads(RESULTS.read_text())["against_own"].values():
        assert f"| {its['tokens_equal']} of {its['tokens']} |" in page
    cells = len(vllm_suite.CELLS)
    assert f"| {cells} of {cells} | 0 of {cells} |" in page


def test_what_backends_have_in_common_is_counted() -> None:
    own = {"tokens": [[1, 2, 3], [4, 5, 6]], "logprobs": [[-1.0, -2.0, -3.0], [-1.0, -1.0, -1.0]]}
    other = {"tokens": [[1, 2, 3], [4, 7, 6]], "logprobs": [[-1.0, -2.5, -3.0], [-1.25, -9.0, -9.0]]}
    found = vllm_engine.compare(own, other)
    assert found == {
        "outputs_equal": 1, "outputs": 2, "tokens_equal": 5, "tokens": 6, "largest_logprob_gap": 0.5
    }  # fmt: skip


@with_vllm
def test_vllm_finds_the_plugin_and_registers_its_name() -> None:
    from vllm.plugins import load_general_plugins
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    names = {one.name: one.value for one in entry_points(group="vllm.general_plugins")}
    assert names["stream_attention"] == "stream_attention.serving.vllm_plugin:register"
    load_general_plugins()
    backend = AttentionBackendEnum["STREAM_ATTENTION"]
    assert backend.get_path() == "stream_attention.serving.vllm.StreamAttentionBackend"
    assert backend.get_class().get_name() == backend.name


@with_vllm
def test_the_layouts_are_those_that_vllm_makes() -> None:
    from vllm.v1.kv_cache_interface import FullAttentionSpec, compute_layout_strides
    from vllm.v1.kv_cache_layout import KVCacheLayout

    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
    found = {name: compute_layout_strides(spec, 64, 2, KVCacheLayout[name]) for name in KVCacheLayout.__members__}
    assert {name: (*(size // 2 for size in strides[1:4]), 1) for name, strides in found.items()} == LAYOUTS


ASKED: dict[str, Any] = {
    "head_size": 64,
    "dtype": torch.bfloat16,
    "kv_cache_dtype": "auto",
    "block_size": 32,
    "use_mla": False,
    "has_sink": False,
    "use_sparse": False,
    "use_mm_prefix": False,
    "use_per_head_quant_scales": False,
    "device_capability": None,
    "attn_type": "decoder",
}


@with_vllm
@pytest.mark.parametrize(
    ("asked", "reasons"),
    [
        ({}, []),
        ({"has_sink": True, "has_sliding_window": True, "use_batch_invariant": True, "use_non_causal": True}, []),
        ({"kv_cache_dtype": "fp8", "use_per_head_quant_scales": True}, []),
        ({"use_kv_connector": True, "use_adaptive_verification": True}, []),
        ({"use_mla": True}, ["MLA not supported"]),
        ({"use_sparse": True}, ["sparse not supported"]),
        ({"use_mm_prefix": True}, ["partial multimodal token full attention not supported"]),
        ({"attn_type": "encoder_only"}, ["attention type encoder_only not supported"]),
        ({"use_rswa": True}, ["R-SWA not supported"]),
        ({"use_dcp": True}, ["DCP not supported"]),
        ({"use_pcp": True}, ["PCP not supported"]),
        ({"dtype": torch.float64}, ["dtype not supported"]),
        ({"block_size": 8}, ["block_size not supported"]),
        (
            {"kv_cache_dtype": "fp8_e5m2"},
            [
                "kv_cache_dtype not supported",
                "supports kv_cache_dtype auto, float16, bfloat16, fp8, fp8_e4m3; got fp8_e5m2",
            ],
        ),
        (
            {"kv_cache_dtype": "float16"},
            ["requires pages in the dtype of queries, bfloat16, or in float8_e4m3fn; got float16"],
        ),
    ],
)
def test_vllm_declines_what_we_do_not_support_with_the_reason(
    serving: ModuleType, asked: dict[str, Any], reasons: list[str]
) -> None:
    assert serving.StreamAttentionBackend.validate_configuration(**ASKED | asked) == reasons
