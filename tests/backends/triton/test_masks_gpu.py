"""Masks given as intervals on a GPU: against fp64, in graphs, without synchronisation, in little memory."""

from __future__ import annotations

import os
from random import Random
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from gpu_tools import captured, give_memory_back, without_synchronising

from stream_attention import attention, masks
from stream_attention.masks import Mask
from stream_attention_tools.testing import Case, check_case, peak_bytes
from stream_attention_tools.testing.inputs import INTERVALS

__all__ = ["give_memory_back"]

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
PROBLEMS = int(os.environ.get("RANDOM_PROBLEMS", "60"))


@pytest.mark.parametrize("seed", range(PROBLEMS))
def test_random_problems(seed: int) -> None:
    rng = Random(seed)
    heads = rng.choice((1, 2))
    case = Case(
        B=rng.choice((1, 2)), Tq=rng.choice((1, 100, 128, 129, 700)), Tk=rng.choice((1, 128, 300, 1025)),
        Hq=heads * rng.choice((1, 4)), Hkv=heads, D=rng.choice((40, 64, 128, 256)),
        dtype=rng.choice((torch.float16, BF16)),
        device="cuda", seed=seed, intervals=rng.choice(INTERVALS), causal=rng.random() < 0.4,
        window=rng.choice((None, (200, 3), (-1, 90))), sink=rng.random() < 0.3, softcap=rng.choice((0.0, 20.0)),
        alibi=rng.choice((None, "H")), dropout_p=rng.choice((0.0, 0.3)), lse_grad=rng.random() < 0.5,
    )  # fmt: skip
    case = Case(**case.given("B", "Tq", "Tk", "Hq", "Hkv", "D") | {"Dv": case.D})
    if rng.random() < 0.2:
        case = Case(**case.given() | {"mask": (1, 1, case.Tq, case.Tk), "bias": (1, 1, case.Tq, case.Tk)})
    check_case(case, "triton")


def qkv(length: int, heads: int = 4, dim: int = 128) -> list[Any]:
    return [torch.randn(1, length, heads, dim, device="cuda", dtype=BF16) for _ in "qkv"]


def made(length: int) -> dict[str, Mask]:
    trunk = length // 2
    return {
        "documents": masks.causal() & masks.documents(lengths=[length // 4 + 7, length // 2, length // 4 - 7]),
        "tree": masks.prefix_tree([-1, 0, 0, 0, 0], [trunk, *[trunk // 4] * 4]),
        "padding": masks.padding([length - 100]),
    }


@pytest.mark.parametrize("kind", ["documents", "tree", "padding"])
def test_a_mask_gives_what_its_dense_form_gives(kind: str) -> None:
    mask = made(4096)[kind].to("cuda")
    leaves = [t.requires_grad_() for t in qkv(4096)]
    outs = [attention(*leaves, mask=one) for one in (mask, mask.as_dense(q_len=4096, k_len=4096))]
    weights = torch.randn_like(outs[0])
    grads = [torch.autograd.grad(out, leaves, weights) for out in outs]
    torch.testing.assert_close(*outs, atol=2e-2, rtol=2e-2)
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, atol=4e-2, rtol=4e-2)


def test_a_graph_computes_what_a_call_does() -> None:
    mask, inputs = made(1024)["documents"].to("cuda"), qkv(1024)
    held = [torch.zeros_like(t) for t in inputs]
    graph, out = captured(lambda: attention(*held, mask=mask))
    for t, new in zip(held, inputs, strict=True):
        t.copy_(new)
    graph.replay()
    assert torch.equal(out, attention(*inputs, mask=mask))


def test_nothing_synchronises() -> None:
    mask = made(1024)["documents"].to("cuda")
    leaves = [t.requires_grad_() for t in qkv(1024)]
    attention(*leaves, mask=mask).sum().backward()  # compiles
    with without_synchronising():
        attention(*leaves, mask=mask).sum().backward()


def test_memory_is_that_of_the_lengths() -> None:
    """A dense mask would be 1 GB."""
    mask, leaves = made(32768)["documents"].to("cuda"), [t.requires_grad_() for t in qkv(32768, heads=1)]

    def step() -> None:
        attention(*leaves, mask=mask).sum().backward()

    step()
    assert peak_bytes(step, "cuda") < 160 << 20


def test_two_calls_give_the_same_bits() -> None:
    mask, leaves = made(2048)["tree"].to("cuda"), [t.requires_grad_() for t in qkv(2048)]
    runs = [torch.autograd.grad(attention(*leaves, mask=mask).sum(), leaves) for _ in range(2)]
    for one, other in zip(*runs, strict=True):
        assert torch.equal(one, other)
