"""How the modules time themselves (one clock, one flop formula, medians), and the tiles of a config.

Times are rough figures. Use `stream-attention-benchmark` for results to publish: it rotates its inputs, interleaves the
providers and checks the outputs first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from stream_attention.base.errors import UnsupportedProblem, check_int, refuse
from stream_attention.base.problem import KV, Operands, Problem, Scores, Shape, Window, hardware_of
from stream_attention.core import StreamAttention, StreamAttentionConfig
from stream_attention.core._checks import check_counts
from stream_attention.core.config import tiled_backend
from stream_attention.dispatch.plan import plan


def median_ms(
    calls: Mapping[str, Callable[[], object]],
    device: torch.device,
    warmup: int,
    iterations: int,
    budget_s: float = float("inf"),
) -> dict[str, float]:
    """Median milliseconds of each call, all in turn round by round: `iterations` rounds, or fewer (at least three)
    after `budget_s` seconds. CUDA events on a CUDA device, wall time elsewhere."""
    for _ in range(warmup):
        for call in calls.values():
            call()
    samples: dict[str, list[float]] = {name: [] for name in calls}
    clock = _cuda_ms if device.type == "cuda" else _wall_ms
    began = time.perf_counter()
    for done in range(iterations):
        for name, call in calls.items():
            samples[name].append(clock(call, device))
        if done >= 2 and time.perf_counter() - began > budget_s:
            break
    return {name: median(taken) for name, taken in samples.items()}


def _cuda_ms(call: Callable[[], object], device: torch.device) -> float:
    with torch.cuda.device(device):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        call()
        ended.record()
        ended.synchronize()
        return began.elapsed_time(ended)


def _wall_ms(call: Callable[[], object], device: torch.device) -> float:
    began = time.perf_counter()
    call()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return (time.perf_counter() - began) * 1e3


def random_qkv(
    batch_size: int, seq_len: int, num_heads: int, head_dim: int, device: torch.device, dtype: torch.dtype
) -> list[Tensor]:
    """Query, key and value of a self-attention. The caller's random generators are not used."""
    generator = torch.Generator(device).manual_seed(0)
    shape = (batch_size, seq_len, num_heads, head_dim)
    return [torch.randn(shape, generator=generator, device=device, dtype=dtype) for _ in range(3)]


def rates(qkv: list[Tensor], causal: bool, time_ms: float) -> dict[str, float]:
    """`tflops`, counting 2 Tq Tk (D + Dv) per head, half of it where causal, and `bandwidth_gb_s`, counting query,
    key, value and output once each."""
    query, key, value = qkv
    batch, q_len, heads, dim = query.shape
    flops = 2 * batch * heads * q_len * key.shape[1] * (dim + value.shape[-1]) * (0.5 if causal else 1.0)
    out_elements = query.numel() // dim * value.shape[-1]
    moved = (query.numel() + key.numel() + value.numel() + out_elements) * query.element_size()
    seconds = time_ms * 1e-3
    return {"tflops": flops / seconds / 1e12, "bandwidth_gb_s": moved / seconds / 1e9}


def self_attention_figures(
    attend: Callable[[Tensor, Tensor, Tensor], object],
    seq_len: int,
    batch_size: int,
    num_heads: int,
    head_dim: int,
    device: torch.device,
    dtype: torch.dtype,
    warmup: int,
    iterations: int,
) -> dict[str, Any]:
    """What `benchmark` of a module returns for causal self-attention, forward only.

    Inputs are drawn in `dtype` on a GPU and in fp32 on a CPU, which has no fast arithmetic for half types.
    """
    check_counts(seq_len=seq_len, batch_size=batch_size, iterations=iterations)
    check_int("warmup", warmup, 0)
    if device.type == "cpu":
        dtype = torch.float32
    tensors = random_qkv(batch_size, seq_len, num_heads, head_dim, device, dtype)
    with torch.no_grad():
        time_ms = median_ms({"this": lambda: attend(*tensors)}, device, warmup, iterations)["this"]
    return {
        "time_ms": time_ms,
        **rates(tensors, True, time_ms),
        "seq_len": seq_len,
        "batch_size": batch_size,
        "dtype": str(dtype).removeprefix("torch."),
        "device": str(device),
    }


def speedups(module: StreamAttention, seq_lengths: Any, batch_size: int) -> dict[int, dict[str, float]]:
    """What `StreamAttention.benchmark_speedup` returns."""
    lengths = _checked_lengths(seq_lengths)
    check_counts(batch_size=batch_size)
    device, heads, dim = module.attention.device, module.config.num_heads, module.config.head_dim
    dtype = torch.float32 if device.type == "cpu" or not module.config.use_fp16 else torch.float16
    results = {}
    for length in lengths:
        tensors = random_qkv(batch_size, length, heads, dim, device, dtype)
        stream = partial(module.attention, *tensors, causal=True, dropout_p=0.0)
        with torch.no_grad():
            calls = {"stream": stream, "standard": partial(_standard_attention, *tensors)}
            times = median_ms(calls, device, warmup=2, iterations=50, budget_s=2.0)
        results[length] = {
            "stream_time_ms": times["stream"],
            "standard_time_ms": times["standard"],
            "speedup": times["standard"] / times["stream"],
            **rates(tensors, causal=True, time_ms=times["stream"]),
        }
    return results


def _checked_lengths(given: Any) -> list[int]:
    if isinstance(given, str) or not isinstance(given, Iterable):
        found = f"{given!r} ({type(given).__name__})"
        refuse("seq_lengths", "a sequence of ints, such as [64]", found, error=TypeError)
    lengths = list(given)
    if not lengths:
        refuse("seq_lengths", "at least one length", lengths)
    check_counts(**{f"seq_lengths[{index}]": length for index, length in enumerate(lengths)})
    return lengths


def _standard_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal self-attention as one writes it without a library: Tq x Tk scores, softmax, product."""
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    masked = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(masked, -torch.inf)
    return (torch.softmax(scores, -1) @ v).transpose(1, 2)


def optimal_tile_sizes(config: StreamAttentionConfig, seq_len: int) -> tuple[int, int]:
    """What the method of `StreamAttentionConfig` returns."""
    check_int("seq_len", seq_len, 1)
    if torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
        forced = tiled_backend(**config._tiles())
        try:
            planned = plan(causal_problem(config, seq_len, device), "triton" if forced == "auto" else forced).config
        except UnsupportedProblem:
            pass
        else:
            return planned.block_m, planned.block_n
    for longest, tiles in ((1024, (64, 64)), (4096, (128, 64)), (16384, (128, 128))):
        if seq_len <= longest:
            return tiles
    return 256, 128


def causal_problem(config: StreamAttentionConfig, seq_len: int, device: torch.device) -> Problem:
    """Causal self-attention over `seq_len` tokens."""
    return Problem(
        Shape(1, seq_len, config.num_heads, config.num_heads, config.head_dim, config.head_dim),
        KV("dense", seq_len),
        Operands(torch.float16 if config.use_fp16 else torch.float32),
        hardware_of(device),
        Window(right=0),
        scores=Scores(config.head_dim**-0.5),
    )
