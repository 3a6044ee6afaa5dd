"""How the modules time themselves (by the benchmark's clocks and formulas), and the tiles of a config.

Times are rough figures. Use `stream-attention-benchmark` for results to publish: it rotates its inputs, interleaves the
providers and checks the outputs first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from stream_attention.base.errors import UnsupportedProblem, check_int, refuse
from stream_attention.base.problem import KV, Operands, Problem, Scores, Shape, Window, hardware_of
from stream_attention.core import StreamAttention, StreamAttentionConfig
from stream_attention.core._checks import check_counts
from stream_attention.dispatch.plan import plan

from .bench.suites import Cell, flops, tensor_bytes
from .bench.timing import Call, Latency, interleaved
from .testing.inputs import Case, draw


def _case(seq_len: int, batch_size: int, heads: int, dim: int, device: torch.device, dtype: torch.dtype) -> Case:
    return Case(batch_size, seq_len, seq_len, heads, heads, dim, dim, dtype, str(device), causal=True)


@torch.no_grad()
def _median_ms(calls: Mapping[str, Callable[[], object]], device: torch.device, **rounds: Any) -> dict[str, float]:
    """Median milliseconds of each call, by CUDA events on a CUDA device, else wall time."""

    def finished(call: Callable[[], object], n: int) -> None:
        call()
        if device.type not in ("cpu", "cuda"):
            torch.accelerator.synchronize(device)

    on_gpu = device.type == "cuda"
    with torch.cuda.device(device) if on_gpu else nullcontext():
        timed: dict[str, Call] = {name: partial(finished, call) for name, call in calls.items()}
        samples = interleaved(timed, "events" if on_gpu else "wall", **rounds)
    return {name: Latency.of(taken).median for name, taken in samples.items()}


def _rates(case: Case, time_ms: float) -> dict[str, float]:
    """`bandwidth_gb_s` counts query, key, value and output once each."""
    moved = tensor_bytes(Cell("", case, "forward", (), ()), case)
    return {"tflops": flops(case) / time_ms / 1e9, "bandwidth_gb_s": moved / time_ms / 1e6}


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
    case = _case(seq_len, batch_size, num_heads, head_dim, device, dtype)
    call = partial(attend, *draw(case).tensors.values())
    time_ms = _median_ms({"this": call}, device, repeats=iterations, warmup=warmup)["this"]
    about = {"seq_len": seq_len, "batch_size": batch_size, "dtype": str(dtype).removeprefix("torch.")}
    return {"time_ms": time_ms, **_rates(case, time_ms), **about, "device": str(device)}


def speedups(module: StreamAttention, seq_lengths: Any, batch_size: int) -> dict[int, dict[str, float]]:
    """What `StreamAttention.benchmark_speedup` returns."""
    lengths = _checked_lengths(seq_lengths)
    check_counts(batch_size=batch_size)
    device, heads, dim = module.attention.device, module.config.num_heads, module.config.head_dim
    dtype = torch.float32 if device.type == "cpu" or not module.config.use_fp16 else torch.float16
    results = {}
    for length in lengths:
        case = _case(length, batch_size, heads, dim, device, dtype)
        tensors = draw(case).tensors.values()
        stream = partial(module.attention, *tensors, causal=True, dropout_p=0.0)
        calls = {"stream": stream, "standard": partial(_standard_attention, *tensors)}
        times = _median_ms(calls, device, repeats=50, warmup=2, budget_s=2.0)
        results[length] = {
            "stream_time_ms": times["stream"],
            "standard_time_ms": times["standard"],
            "speedup": times["standard"] / times["stream"],
            **_rates(case, times["stream"]),
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
        forced = "auto" if config.backend == "reference" else config.backend
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
