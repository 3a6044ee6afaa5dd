"""Head dims that our tiles do not fit, and calls without Triton, on a GPU: padded, or run by torch's own kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from stream_attention import attention, explain
from stream_attention.backends.eager import torch_cuda
from stream_attention.backends.eager.tuning import configure, why_not_cuda_flash
from stream_attention_tools.testing import Case, check_case
from stream_attention_tools.testing.inputs import make, stated

pytestmark = pytest.mark.gpu

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
BASE = Case(B=2, Tq=200, Tk=300, Hq=4, Hkv=4, D=320, Dv=320, dtype=BF16, device="cuda")
CAUSAL, GQA = {"causal": True}, {"Hkv": 2}

PADDED: dict[str, dict[str, Any]] = {
    "d84": {"D": 84, "Dv": 84},
    "d84 causal gqa": {"D": 84, "Dv": 84} | CAUSAL | GQA,
    "d100 fp32": {"D": 100, "Dv": 100, "dtype": F32},
    "d1": {"D": 1, "Dv": 1, "dtype": F16},
    "d84 of dv 100": {"D": 84, "Dv": 100},
    "d100 everything": {"D": 100, "Dv": 100, "window": (64, 0), "alibi": "H", "sink": True, "softcap": 20.0} | CAUSAL,
    "d100 packed": {"D": 100, "Dv": 100, "lengths_q": (70, 1, 129), "lengths_k": (70, 40, 129)} | CAUSAL,
    "d252 for Hopper": {"D": 252, "Dv": 252, "B": 4, "Tq": 2048, "Tk": 2048, "backward": False} | CAUSAL,
    "d84 for Hopper": {"D": 84, "Dv": 84, "Tq": 3000, "Tk": 3000, "Hq": 8} | CAUSAL,
}
BY_TORCH: dict[str, dict[str, Any]] = {
    "d320": {},
    "d320 causal": CAUSAL,
    "d320 gqa causal": CAUSAL | GQA,
    "d512 fp16": {"D": 512, "Dv": 512, "dtype": F16},
    "d512 causal fp32": {"D": 512, "Dv": 512, "dtype": F32} | CAUSAL,
    "d322": {"D": 322, "Dv": 322},
    "d258 of dv 64": {"D": 258, "Dv": 64} | CAUSAL,
    "d320 packed": {"lengths_q": (70, 1, 129), "lengths_k": (70, 40, 129)} | CAUSAL,
    "d320 one query": {"Tq": 1} | CAUSAL,
    "d320 off 16 bytes": {"layout": "offset"},
    "d320 expanded": {"layout": "expanded"} | CAUSAL,
}
BLOCKED: dict[str, dict[str, Any]] = {
    "d320 more queries than keys": {"Tq": 300, "Tk": 200} | CAUSAL,
    "d320 mask": {"mask": (2, 1, 200, 300)},
    "d320 window sink": {"window": (64, 0), "sink": True} | CAUSAL,
    "fp64": {"D": 64, "Dv": 64, "dtype": torch.float64},
}
FLASH: dict[str, dict[str, Any]] = {
    "d64": {"D": 64, "Dv": 64},
    "d128 causal gqa": {"D": 128, "Dv": 128} | CAUSAL | GQA,
    "d84 causal fp16": {"D": 84, "Dv": 84, "dtype": F16} | CAUSAL,
    "d256": {"D": 256, "Dv": 256},
    "d64 off 16 bytes": {"D": 64, "Dv": 64, "layout": "offset"},
    "d128 strided": {"D": 128, "Dv": 128, "layout": "strided"} | GQA,
}
FLASH_PACKED: dict[str, Any] = {"D": 64, "Dv": 64, "lengths_q": (70, 1, 129), "lengths_k": (70, 40, 129)} | CAUSAL


@pytest.mark.parametrize("name", PADDED)
def test_a_head_dim_that_is_no_multiple_of_8_is_padded(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    case = replace(BASE, **PADDED[name])
    query, key, value, options = make(case)
    assert explain(query, key, value, **options).backend in ("triton", "gluon")
    assert "padded with zeros" in capsys.readouterr().out
    assert check_case(case).worst <= 1


def test_padded_heads_reach_the_hopper_kernels() -> None:
    query, key, value, options = make(replace(BASE, **PADDED["d84 for Hopper"]))
    assert explain(query, key, value, **options).backend == "gluon"


@pytest.mark.parametrize("name", BY_TORCH)
def test_wider_heads_are_computed_by_torchs_kernels(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    case = replace(BASE, **BY_TORCH[name])
    query, key, value, options = make(case)
    assert explain(query, key, value, **options).backend == "eager"
    assert ("one sequence at a time" if case.packed else "memory-efficient") in capsys.readouterr().out
    assert check_case(case).worst <= 1


@pytest.mark.parametrize("name", BLOCKED)
def test_what_torchs_kernels_lack_is_blocked(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    case = replace(BASE, **BLOCKED[name])
    query, key, value, options = make(case)
    explain(query, key, value, **options)
    assert "because torch's CUDA kernels" in capsys.readouterr().out
    assert check_case(case).worst <= 1


@pytest.mark.parametrize("name", FLASH)
def test_without_triton_flash_attention_2_computes(name: str) -> None:
    """`backend="eager"` is what a GPU without Triton gets."""
    case = replace(BASE, **FLASH[name])
    query, key, value, options = make(case)
    assert explain(query, key, value, **options, backend="eager").config.path == "cuda_flash"
    assert check_case(case, "eager").worst <= 1


def test_packs_without_triton() -> None:
    """One after another, each with rows of the pack's LSE."""
    assert check_case(replace(BASE, **FLASH_PACKED), "eager").worst <= 1


def test_the_memory_efficient_kernel_does_what_flash_does() -> None:
    """Older GPUs get it at every head dim; here it is called by hand."""
    case = replace(BASE, D=64, Dv=64, Hkv=2, causal=True, backward=False)
    query, key, value, options = make(case)
    flash = attention(query, key, value, **options, backend="eager", return_lse=True)
    problem, inputs = stated(case, {"query": query, "key": key, "value": value}, options)
    assert configure(problem).path == "cuda_flash" and not why_not_cuda_flash(problem)
    other = torch_cuda.forward(problem, inputs, "cuda_efficient")
    torch.testing.assert_close(other[0], flash[0], atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(other[1], flash[1], atol=1e-3, rtol=1e-3)


def test_memory_stays_linear() -> None:
    query, key, value = (torch.randn(1, 16384, 2, 320, device="cuda", dtype=BF16) for _ in range(3))
    attention(query, key, value, causal=True)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    attention(query, key, value, causal=True)
    assert torch.cuda.max_memory_allocated() - before <= 4 * query.nbytes
