"""Estimates: of caches to the byte, of calls against what torch's allocator counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stream_attention import ContiguousKV, PagedKV, attention, quantize_kv
from stream_attention.utils.memory import (
    AttentionMemory,
    MemoryProfiler,
    estimate_attention_memory,
    estimate_kv_cache_bytes,
)

F32, BF16 = torch.float32, torch.bfloat16
MIB = 1 << 20
H200 = (90, 132)

# Caches

CODINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "fp8": {"format": "fp8"},
    "int8": {"format": "int8", "group": 32, "residual": 64},
    "int4": {"format": "int4"},
    "int4 per token, fp32 scales": {
        "format": "int4", "group": 16, "keys": "token", "residual": 0, "scale_dtype": torch.float32,
    },
}  # fmt: skip


def made(batch: int, tokens: int, page: int | None, dtype: torch.dtype, coding: dict[str, Any]) -> Any:
    """A cache of 2 heads, keys of 64 and values of 32, as its user makes it."""
    lengths = torch.zeros(batch, dtype=torch.int32)
    cache: ContiguousKV | PagedKV
    if page is None:
        key, value = (torch.zeros(batch, tokens, 2, dim, dtype=dtype) for dim in (64, 32))
        cache = ContiguousKV(key, value, lengths)
    else:
        pages = -(-tokens // page)
        key, value = (torch.zeros(batch * pages, page, 2, dim, dtype=dtype) for dim in (64, 32))
        cache = PagedKV(key, value, torch.arange(batch * pages, dtype=torch.int32).view(batch, pages), lengths)
    return (
        cache if not coding else quantize_kv(cache, coding["format"], **{k: coding[k] for k in coding if k != "format"})
    )


@pytest.mark.parametrize("page", [None, 64])
@pytest.mark.parametrize("name", CODINGS)
def test_a_cache_takes_the_bytes_that_were_estimated(name: str, page: int | None) -> None:
    for dtype, tokens in ((BF16, 1000), (F32, 300)):
        with MemoryProfiler("cpu") as profiler, profiler.region("made"):
            cache = made(3, tokens, page, dtype, CODINGS[name])
        retained = profiler.report()["regions"][0]["retained_mb"] * MIB
        estimate = estimate_kv_cache_bytes(3, tokens, 2, 64, value_dim=32, dtype=dtype, page=page, **CODINGS[name])
        assert estimate == cache.nbytes == retained
        del cache


def test_layers_multiply_and_a_llama_is_as_large_as_its_formula() -> None:
    one = estimate_kv_cache_bytes(4, 8192, 8, 128)
    assert one == 4 * 8192 * 8 * (128 + 128) * 2 + 4 * 4  # and the lengths
    assert estimate_kv_cache_bytes(4, 8192, 8, 128, layers=32) == 32 * one
    assert estimate_kv_cache_bytes(1, 100, 8, 128, page=64) > estimate_kv_cache_bytes(1, 128, 8, 128)  # whole pages
    assert 3.3 < one / estimate_kv_cache_bytes(4, 8192, 8, 128, format="int4") < 3.6


def test_caches_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="group: expected with a format; got none"):
        estimate_kv_cache_bytes(1, 64, 1, 64, group=32)
    with pytest.raises(ValueError, match="format: expected one of fp8, int8, int4; got 'int3'"):
        estimate_kv_cache_bytes(1, 64, 1, 64, format="int3")
    with pytest.raises(ValueError, match="group: expected a divisor of the page size 16"):
        estimate_kv_cache_bytes(1, 64, 1, 64, format="int4", page=16)
    with pytest.raises(TypeError, match=r"tokens: expected an int; got 64.0 \(float\)"):
        estimate_kv_cache_bytes(1, 64.0, 1, 64)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="dtype: expected float16, bfloat16, float32 or float64; got torch"):
        estimate_kv_cache_bytes(1, 64, 1, 64, dtype=torch.int8)


# Calls on this CPU

CALLS: dict[str, dict[str, Any]] = {
    "torch's flash op": {"causal": True, "dtype": BF16},
    "tiles of fp32": {"softcap": 5.0, "dtype": F32},
    "a window": {"causal": True, "window": (200, 0), "dtype": BF16},
    "dropout": {"dropout_p": 0.1, "dtype": F32},
    "few queries": {"causal": True, "q_len": 300, "value_dim": 32, "dtype": BF16},
}


def measured(options: dict[str, Any]) -> tuple[int, int]:
    """Bytes beyond the inputs of a forward, and of a step with its backward: 1024 keys in 2 heads, 8 of queries."""
    options = dict(options)
    dtype, rows, width = options.pop("dtype"), options.pop("q_len", 1024), options.pop("value_dim", 64)
    if "dropout_p" in options:
        options["seed"] = 1
    query, key, value = (
        torch.randn(1, length, heads, dim, dtype=dtype, requires_grad=True)
        for length, heads, dim in ((rows, 8, 64), (1024, 2, 64), (1024, 2, width))
    )
    with MemoryProfiler("cpu") as profiler, profiler.region("step"):
        with profiler.region("forward"):
            out = attention(query, key, value, **options)
        torch.autograd.grad(out, (query, key, value), torch.empty_like(out))
    step, forward = (round(one["peak_beyond_mb"] * MIB) for one in profiler.report()["regions"])
    return forward, step


@pytest.mark.parametrize("name", CALLS)
def test_a_call_takes_what_was_estimated_but_for_a_tile(name: str) -> None:
    options = {"q_len": 1024} | CALLS[name]
    estimate = estimate_attention_memory(1, heads=8, head_dim=64, k_len=1024, kv_heads=2, device="cpu", **options)
    forward, backward = measured(CALLS[name])
    assert estimate.backend == "eager" and estimate.backward is not None
    tile = 8 * 128 * 512 * 4
    assert abs(estimate.forward - forward) <= tile and abs(estimate.backward - backward) <= tile
    assert estimate.saved <= estimate.forward < estimate.backward


def test_memory_grows_with_the_length_and_the_matrix_with_its_square() -> None:
    short, long = (
        estimate_attention_memory(1, length, 4, 32, softcap=2.0, dtype=F32, device="cpu") for length in (2048, 8192)
    )
    assert long.matrix == 16 * short.matrix == 4 * 8192 * 8192 * 4
    assert long.peak < 4 * short.peak and long.peak < long.matrix / 10


# Calls on a GPU that is not here


def on_h200(**options: Any) -> AttentionMemory:
    pytest.importorskip("triton")
    return estimate_attention_memory(1, 8192, 32, 128, kv_heads=8, gpu=H200, **options)


@pytest.mark.usefixtures("hopper_triton")
def test_a_gpu_holds_nothing_but_the_results_in_a_forward() -> None:
    plain = on_h200(causal=True)
    query, keys = 8192 * 32 * 128 * 2, 8192 * 8 * 128 * 2
    assert plain.inputs == query + 2 * keys and plain.saved == query + 8192 * 32 * 4
    assert plain.forward == plain.saved + 512  # and a block with the counter of tiles
    assert plain.backward is not None
    at_least = plain.saved + query + query + 2 * keys  # and the gradient that arrives, and those that leave
    scratch = 2 * query + 5 * 8192 * 32 * 4  # an fp32 dQ, in which the Hopper backward adds up, and numbers of rows
    assert plain.backend == "gluon" and at_least < plain.backward < at_least + scratch
    assert plain.matrix == 32 * 8192 * 8192 * 2 and plain.peak == plain.inputs + plain.backward
    assert str(plain).startswith("gluon: inputs 96.00 MiB; beyond them forward 65.00 MiB, backward ")


def test_options_of_a_call_count() -> None:
    plain = on_h200(causal=True)
    masked, dropped = on_h200(causal=True, mask=True), on_h200(causal=True, dropout_p=0.1)
    assert masked.backend == "triton" and masked.inputs == plain.inputs + 8192 * 8192
    assert dropped.forward > plain.forward
    alone = on_h200(causal=True, backward=False)
    assert alone.backward is None and alone.peak == alone.inputs + alone.forward == plain.inputs + plain.forward
    double = on_h200(dtype=torch.float64)
    assert double.backend == "eager" and double.saved == 2 * (2 * 8192 * 32 * 128 * 2 + 8192 * 32 * 4)


def test_bad_calls_are_refused() -> None:
    with pytest.raises(ValueError, match="device: expected cpu or cuda; got meta"):
        estimate_attention_memory(1, 8, 1, 8, device="meta")
    with pytest.raises(ValueError, match=r"gpu: expected None for device cpu; got \(90, 132\)"):
        estimate_attention_memory(1, 8, 1, 8, device="cpu", gpu=H200)
    with pytest.raises(ValueError, match="backend: expected one that streams; got 'reference'"):
        estimate_attention_memory(1, 8, 1, 8, device="cpu", backend="reference")
    with pytest.raises(ValueError, match="heads: expected at least 1; got 0"):
        estimate_attention_memory(1, 8, 0, 8, device="cpu")
    with pytest.raises(ValueError, match="head"):
        estimate_attention_memory(1, 8, 4, 8, kv_heads=3, device="cpu")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match=r"gpu: expected .* as torch finds no GPU"):
            estimate_attention_memory(1, 8, 1, 8, device="cuda")


def test_head_dims_that_torchs_kernel_computes() -> None:
    """Output, its gradient and those of the inputs: the kernel keeps no matrix."""
    estimate = estimate_attention_memory(1, 4096, 8, 320, device="cuda", gpu=(90, 132), dtype=torch.bfloat16)
    one = 4096 * 8 * 320 * 2
    assert estimate.backend == "eager" and estimate.backward is not None
    assert 5 * one <= estimate.backward <= 5.1 * one
