"""What the GPU tests share: inputs, graphs, a watch on synchronisation, and where their summaries are kept."""

from __future__ import annotations

import gc
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = BF16, device: str = "cuda") -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device, dtype=F32).to(dtype)


def qkv(
    B: int = 2, Tq: int = 200, Tk: int = 300, Hq: int = 4, Hkv: int = 2, D: int = 64, dtype: torch.dtype = BF16
) -> tuple[Tensor, Tensor, Tensor]:
    shapes = ((B, Tq, Hq, D), (B, Tk, Hkv, D), (B, Tk, Hkv, D))
    query, key, value = (normal(*shape, seed=n, dtype=dtype) for n, shape in enumerate(shapes))
    return query, key, value


def with_gradients(call: Callable[..., Tensor], *tensors: Tensor) -> list[Tensor]:
    """What a call returns, and the gradients of its tensors if the same random gradient arrives at it every time."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    out = call(*leaves)
    arriving = normal(*out.shape, seed=9, dtype=F16, device=out.device.type).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, arriving)]


def assert_earned(got: Sequence[Tensor], plain: Callable[..., Sequence[Tensor]], *tensors: Tensor) -> None:
    """An output, and gradients after it, are as near to fp64 as DESIGN.md (Numerics) asks.

    `plain(*tensors)` computes all of them in the tensors' dtype: in fp64 that is the truth, and in the dtype of the
    call its error is the measure. Beside it stand the rounding of the result and that of the fp32 log-sum-exp.
    """
    keys = max(tensor.shape[-3] if tensor.dim() > 2 else tensor.shape[0] for tensor in tensors)
    exact, rough = plain(*(tensor.double() for tensor in tensors)), plain(*tensors)
    for n, (result, own, truth) in enumerate(zip(got, rough, exact, strict=True)):
        assert result.dtype is own.dtype and result.device == own.device and result.shape == truth.shape
        error, earned = ((one.double() - truth).abs().max().item() for one in (result, own))
        noise = torch.finfo(result.dtype).eps + torch.finfo(F32).eps * (1 + math.log(keys))
        allowed = (3 if n else 2) * earned + noise * truth.abs().max().item()
        assert error <= allowed, f"{'gradient' if n else 'output'} {n}: off by {error:.3e}; allowed {allowed:.3e}"


def workers(most: int) -> int:
    """How many processes work at once: `most`, or fewer where the cores, or `WORKERS` in the environment, are."""
    return min(most, int(os.environ.get("WORKERS", "0")) or os.cpu_count() or 1)


def compile_ahead(compile_one: Callable[..., str], *arguments: Iterable[Any]) -> None:
    """Call it on each of the arguments, as `map` does, in many processes; it returns what went wrong, or nothing."""
    # Fresh processes: a fork of one that has used CUDA may hang.
    with ProcessPoolExecutor(workers(15), mp_context=get_context("spawn")) as pool:
        errors = [said for said in pool.map(compile_one, *arguments) if said]
    assert not errors, "\n".join(errors)


def captured(function: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A CUDA graph of a call, and the tensors that its replays write."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()
        function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = function()
    return graph, result


@contextmanager
def without_synchronising() -> Iterator[None]:
    """A call in this block that makes the host wait for the device is an error."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def keep(summary: dict[str, Any], name: str, of: str) -> None:
    """Print a summary, and keep it for the results file of `test_{of}_gpu.py` if `GPU_RESULTS` says where.

    tests/conftest.py writes that file.
    """
    print(json.dumps({name: summary}, indent=2))
    if folder := os.environ.get("GPU_RESULTS"):
        file = Path(folder, f"kept_{of}.json")
        file.parent.mkdir(parents=True, exist_ok=True)
        kept = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps(kept | {name: summary}, indent=1) + "\n")


@pytest.fixture
def give_memory_back() -> Iterator[None]:
    yield
    gc.collect()
    torch.cuda.empty_cache()
