"""The Gluon decode kernel for a GPU that is not here: what is planned, and what the compiler makes of it."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing; run without TRITON_INTERPRET=1", allow_module_level=True)
pytest.importorskip("triton")

from compile_gate import FULL, RELEASE, beyond, with_tables
from gates import GATED_TRITON
from sass_gate import SHARED_BYTES, as_file, fingerprint, ran, warn_if_not_run

from stream_attention import ContiguousKV, PagedKV, QuantizedKV, quantize_kv
from stream_attention.backends import BY_NAME
from stream_attention.backends.hopper.decode_quantized import prepare_decode
from stream_attention.base.problem import DecodeInputs, Problem, Request
from stream_attention.gpu.decode_tuning import INVARIANT_KEYS, batch_heads, configure_gluon, workspace_numbers
from stream_attention.ops.decode import decode_problem
from stream_attention_tools.testing.offline import compiling_for, disassemble, report

BF16, F16 = torch.bfloat16, torch.float16


def cache_of(
    format: str,
    *,
    batch: int = 2,
    tokens: int = 1024,
    kv_heads: int = 8,
    dim: int = 128,
    page: int = 0,
    dtype: torch.dtype = BF16,
    **how: Any,
) -> QuantizedKV:
    lengths = torch.full((batch,), tokens - 24, dtype=torch.int32)
    plain: ContiguousKV | PagedKV = ContiguousKV(*torch.zeros(2, batch, tokens, kv_heads, dim, dtype=dtype), lengths)
    if page:
        pages = torch.zeros(2, batch * tokens // page, page, kv_heads, dim, dtype=dtype)
        plain = PagedKV(*pages, torch.zeros(batch, tokens // page, dtype=torch.int32), lengths)
    return quantize_kv(plain, format, **how)


def stated(cache: QuantizedKV, q_heads: int = 32, q_len: int = 1, **facts: Any) -> Problem:
    query = torch.zeros(cache.batch, q_len, q_heads, cache.head_dim, dtype=cache.dtype)
    problem = decode_problem(query, cache)
    return problem.replace(device=torch.device("cuda"), arch=90, num_sms=132, **facts)


# Plans


@pytest.mark.parametrize("format", ["int4", "int8", "fp8"])
def test_all_programs_of_a_large_batch_run_at_once(format: str) -> None:
    """8 rows of 8 heads: as many splits as a processor holds 8 of, and not a power of two."""
    problem = stated(cache_of(format), batch=8, k_len=32768)
    config = configure_gluon(problem, None, False)
    assert (config.num_splits, config.window_splits, config.num_stages) == (16, 1, 2)
    assert batch_heads(problem) * config.num_splits <= 8 * 132


def test_a_small_batch_has_more_splits_for_the_latest_tokens() -> None:
    config = configure_gluon(stated(cache_of("int8"), batch=1, k_len=8192), None, False)
    assert config.window_splits == 3 and config.num_splits > 20


def test_a_batch_invariant_plan_does_not_know_the_batch() -> None:
    cache = cache_of("int4")
    plans = {configure_gluon(stated(cache, batch=batch, k_len=32768), None, True) for batch in (1, 7, 300)}
    (plan,) = plans
    assert plan.num_splits - plan.window_splits == 32768 // INVARIANT_KEYS


def test_a_workspace_has_room_for_any_window() -> None:
    for batch in (1, 2, 3, 9):
        for keys in (700, 8192, 100_000):
            for format in ("int4", "fp8"):
                whole = stated(cache_of(format), batch=batch, k_len=keys)
                room = workspace_numbers(whole, configure_gluon(whole, None, False))
                for span in (1, 300, keys // 2, keys - 1):
                    part = whole.replace(left=span - 1)
                    assert workspace_numbers(part, configure_gluon(part, None, False)) <= room, (whole, span)


@pytest.mark.usefixtures("hopper_triton")
@pytest.mark.parametrize(
    ("how", "facts", "word"),
    [
        ({}, {"q_len": 4}, "at most 8"),
        ({"keys": "token"}, {}, 'keys="channel" with values="token"'),
        ({"values": "channel"}, {}, 'keys="channel" with values="token"'),
        ({"scale_dtype": torch.float32}, {}, "only float16 scales"),
        ({"group": 16}, {}, "groups of 32, 64 or 128"),
        ({"dim": 256}, {}, "head dims of 64 and 128"),
        ({"dtype": torch.float32}, {}, "only float16 and bfloat16 caches; got float32"),
        ({}, {"arch": 80}, "requires Hopper"),
    ],
    ids=lambda x: str(x),
)
def test_what_it_cannot_do_it_says(how: dict[str, Any], facts: dict[str, Any], word: str) -> None:
    problem = stated(cache_of("int4", **how)).replace(**facts)
    assert any(word in reason for reason in BY_NAME["gluon"].why_not(problem))
    assert not BY_NAME["gluon"].why_not(stated(cache_of("int4")))


@pytest.mark.usefixtures("hopper_triton")
def test_codes_that_lie_otherwise_are_left_to_triton() -> None:
    cache = cache_of("int4")
    by_tokens = replace(cache, key=replace(cache.key, codes=cache.key.codes.contiguous()))
    assert cache.coding.aligned and not by_tokens.coding.aligned
    (reason,) = BY_NAME["gluon"].why_not(stated(by_tokens))
    assert "as quantize_kv returns them" in reason
    (reason,) = BY_NAME["gluon"].why_not(stated(cache), Request(num_splits=1))
    assert "num_splits >= 2" in reason


# What the compiler makes of it


def compiled(cache: QuantizedKV, q_heads: int = 32, q_len: int = 1, everything: bool = False) -> Any:
    """The kernel that computes a call as planned."""
    problem = stated(cache, q_heads, q_len)
    config = configure_gluon(problem, None, False)
    query = torch.zeros(cache.batch, q_len, q_heads, cache.head_dim, dtype=cache.dtype)
    slopes = torch.zeros(1, q_heads) if everything else None
    tree = torch.ones(cache.batch, q_len, q_len, dtype=torch.bool) if everything else None
    left, softcap = (100, 5.0) if everything else (-1, 0.0)
    problem = problem.replace(left=left, right=0, scale=0.1, softcap=softcap)
    room = torch.zeros(workspace_numbers(problem, config))
    with compiling_for(90) as kernels:
        inputs = DecodeInputs(query, cache, tree, slopes, None, None, True, room)
        prepare_decode(problem, inputs, config)(inputs)
    return kernels[0]


FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "int4": ({"format": "int4", "batch": 8, "tokens": 32768 // 8}, {}),
    "int4 of fp16": ({"format": "int4", "dtype": F16, "batch": 8, "tokens": 32768 // 8}, {}),
    "int8": ({"format": "int8", "batch": 8, "tokens": 32768 // 8}, {}),
    "fp8 of fp16": ({"format": "fp8", "dtype": F16}, {}),
    "fp8": ({"format": "fp8", "batch": 8, "tokens": 32768 // 8}, {}),
    "int4 in pages": ({"format": "int4", "page": 64}, {}),
    "int4 d64": ({"format": "int4", "dim": 64, "kv_heads": 2}, {"q_heads": 16}),
    "int8, groups of 128": ({"format": "int8", "group": 128}, {}),
    "int4, groups of 32": ({"format": "int4", "group": 32}, {}),
    "int4, everything": ({"format": "int4", "residual": 0}, {"q_heads": 16, "q_len": 4, "everything": True}),
}


SPILLS: dict[str, dict[str, int]] = {"3.6": {}, "3.7": {}, "3.8": {}, "3.9": {}}
"""Bytes that are known to be spilled, by Triton's release."""


def gated(release: str) -> list[str]:
    """Forms that are compiled with a release of Triton: all, or a few."""
    return list(FORMS) if release == FULL else ["int4", "int8", "fp8", "int4, everything"]


@with_tables
@pytest.mark.parametrize("name", gated(RELEASE))
def test_the_machine_code_is_as_it_should_be(name: str) -> None:
    how, asked = FORMS[name]
    kernel = compiled(cache_of(**how), **asked)
    found = report(kernel)
    warn_if_not_run(disassemble(kernel), name, ran("decode"))
    assert not beyond(found.spill_bytes, SPILLS[RELEASE].get(name, 0)) and found.warps == 1, found
    assert 8 * found.shared_bytes <= SHARED_BYTES or "tokens" not in how, "eight programs of a processor"
    ops = found.instructions
    assert ops["HMMA"] and ops["LDSM"] and ops["LDGSTS"] and ops["ACQBULK"]
    assert ops["HADD2"] + ops["HFMA2"] <= (104 if "fp16" in name else 40), "no code is shifted or scaled on its own"


def test_what_is_known_of_kernels_is_of_kernels_that_there_are() -> None:
    assert SPILLS.keys() == set(GATED_TRITON)
    assert all(spills.keys() <= set(gated(release)) for release, spills in SPILLS.items())
    assert ran("decode")["kernels"].keys() == set(FORMS)


def test_a_batch_of_one_is_no_other_kernel() -> None:
    """What is compiled once serves every size: sizes, strides and counts are not compiled in."""
    codes = {
        fingerprint(disassemble(compiled(cache_of("int8", batch=batch, kv_heads=heads), 4 * heads)))
        for batch, heads in ((1, 1), (2, 8))
    }
    assert len(codes) == 1


if __name__ == "__main__":
    forms = {name: compiled(cache_of(**how), **asked) for name, (how, asked) in FORMS.items()}
    print(as_file(sys.argv[1], {name: fingerprint(disassemble(kernel)) for name, kernel in forms.items()}))
