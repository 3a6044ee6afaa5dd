"""FlopCounterMode counts the ops as it counts SDPA."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from stream_attention import attention, varlen_attention

SRC = Path(__file__).resolve().parents[2] / "src"
SHAPES = {
    "square": ((2, 16, 4, 8), (2, 16, 4, 8), (2, 16, 4, 8)),
    "a cache": ((2, 3, 4, 8), (2, 16, 4, 8), (2, 16, 4, 8)),
    "grouped": ((2, 16, 4, 8), (2, 24, 2, 8), (2, 24, 2, 8)),
    "one KV head": ((2, 16, 4, 8), (2, 24, 1, 8), (2, 24, 1, 8)),
    "other value dim": ((2, 16, 4, 8), (2, 24, 4, 8), (2, 24, 4, 12)),
}


def counted(run: Callable[[], Any], **options: Any) -> int:
    with FlopCounterMode(display=False, **options) as counter:
        run()
    return counter.get_total_flops()


def of_sdpa(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...]) -> tuple[int, int]:
    """What torch counts for SDPA, forward and backward, where each query head has keys of its own."""
    (batch, q_len, heads, dim), k_len, value_dim = q, k[1], v[-1]
    shapes = (batch, heads, q_len, dim), (batch, heads, k_len, dim), (batch, heads, k_len, value_dim)
    grad_out = (batch, heads, q_len, value_dim)
    return sdpa_flop_count(*shapes), sdpa_backward_flop_count(grad_out, *shapes)


def tensors(name: str, **options: Any) -> list[Tensor]:
    return [torch.ones(shape, requires_grad=True, **options) for shape in SHAPES[name]]


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_dense_calls_count_as_sdpa(name: str, causal: bool, device: str) -> None:
    forward, backward = of_sdpa(*SHAPES[name])
    qkv = tensors(name, device=device)
    assert counted(lambda: attention(*qkv, causal=causal)) == forward
    assert counted(lambda: attention(*qkv, causal=causal).sum().backward()) == forward + backward
    out = attention(*qkv, causal=causal)
    assert counted(lambda: out.sum().backward()) == backward


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_every_call_is_counted(guard: Callable[[], Any]) -> None:
    with guard():
        qkv = [torch.ones(shape, dtype=torch.float16) for shape in SHAPES["grouped"]]
        attention(*qkv)  # which could be repeated from memory
        assert counted(lambda: [attention(*qkv) for _ in range(3)]) == 3 * of_sdpa(*SHAPES["grouped"])[0]


def test_fake_tensors_are_counted() -> None:
    with FakeTensorMode():
        qkv = tensors("grouped")
        assert counted(lambda: attention(*qkv)) == of_sdpa(*SHAPES["grouped"])[0]


def test_packed_calls_count_the_pairs_of_each_sequence() -> None:
    lengths = [(3, 5), (0, 4), (6, 1)]
    query, key, value = (torch.ones(n, 4, 8, requires_grad=True) for n in (9, 10, 10))
    offsets = [torch.tensor([0, *column]).cumsum(0) for column in zip(*lengths, strict=True)]
    packed = {"cu_seqlens_q": offsets[0], "cu_seqlens_k": offsets[1], "max_seqlen_q": 6, "max_seqlen_k": 5}
    parts = [of_sdpa((1, q_len, 4, 8), (1, k_len, 4, 8), (1, k_len, 4, 8)) for q_len, k_len in lengths]
    expected = sum(sum(part) for part in parts)
    assert counted(lambda: varlen_attention(query, key, value, **packed).sum().backward()) == expected
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:  # no values: as many of the longest
        packed |= {name: mode.from_tensor(packed[name]) for name in ("cu_seqlens_q", "cu_seqlens_k")}
        found = counted(lambda: varlen_attention(*(mode.from_tensor(t) for t in (query, key, value)), **packed))
    assert found == of_sdpa((3, 6, 4, 8), (3, 5, 4, 8), (3, 5, 4, 8))[0]


def test_a_formula_of_the_users_own_is_kept() -> None:
    own = {torch.ops.stream_attention.forward: lambda *shapes, out_shape=None, **options: 7}
    assert counted(lambda: attention(*tensors("square")), custom_mapping=own) == 7


def test_a_counter_that_is_imported_and_made_later_counts_and_the_import_brings_none() -> None:
    code = """if True:
        import sys, torch
        from stream_attention import attention
        assert "torch.utils.flop_counter" not in sys.modules
        x = torch.ones(1, 4, 2, 8, requires_grad=True)
        out = attention(x, x, x)
        from torch.utils.flop_counter import FlopCounterMode, flop_registry
        first, second = FlopCounterMode(display=False), FlopCounterMode(display=False)
        with first:
            out.sum().backward()
        with second:
            attention(x, x, x)
        assert (first.get_total_flops(), second.get_total_flops()) == (2560, 1024), first.get_flop_counts()
        assert torch.ops.stream_attention.forward in flop_registry
    """
    environment = os.environ | {"PYTHONPATH": str(SRC)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
