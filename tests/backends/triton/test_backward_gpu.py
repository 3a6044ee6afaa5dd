"""The Triton backward on a GPU: random problems within what is earned, and what only a device can show."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from gpu_tools import BF16, F16, F32, captured, give_memory_back, keep, normal, qkv, without_synchronising
from random_problems import Drawn, draw, run_all

from stream_attention import attention, explain, varlen_attention
from stream_attention.backends.reference import attention as reference
from stream_attention.backends.triton.tuning import BackwardConfig
from stream_attention.dispatch.plan import plan
from stream_attention_tools.testing import Case, check_case
from stream_attention_tools.testing.inputs import make, stated

__all__ = ["give_memory_back"]

pytestmark = pytest.mark.gpu

BASE = Case(B=2, Tq=200, Tk=300, Hq=4, Hkv=2, D=64, Dv=64, dtype=BF16, device="cuda", causal=True, lse_grad=True)
MODIFIED = replace(
    BASE, mask=(2, 1, 200, 300), bias=(1, 4, 200, 300), alibi="H", sink=True, softcap=20.0, dropout_p=0.2, aux_dtype=F32
)
PACKED = replace(BASE, lengths_q=(100, 0, 200), lengths_k=(100, 30, 200), tail=50, max_lengths=True)
DIM_CASES = [
    replace(BASE, D=dim, Dv=dim, dtype=dtype, B=1)
    for dim in (8, 16, 96, 192, 256)
    for dtype in (F16, BF16, F32)
    if (dim, dtype) != (192, F32)  # compiles for minutes, and differs from 256 by a mask
]
LONG_CASES = {
    "bf16": replace(BASE, B=1, Tq=4096, Tk=4096, Hq=1, Hkv=1, D=128, Dv=128),
    "fp32": replace(BASE, B=1, Tq=4096, Tk=4096, Hq=1, Hkv=1, D=128, Dv=128, dtype=F32),
    "few queries": replace(BASE, B=1, Tq=5, Tk=20_000, Hq=8, Hkv=1, D=128, Dv=128),
    "few keys": replace(BASE, B=1, Tq=20_000, Tk=40, Hq=2, Hkv=1, D=128, Dv=128, causal=False),
    "eight heads on one": replace(BASE, B=1, Tq=1500, Tk=1500, Hq=8, Hkv=1, D=128, Dv=128),
}
USED = (
    *(BASE, replace(BASE, lse_grad=False), MODIFIED, replace(MODIFIED, dropout_p=0.0), PACKED),
    replace(PACKED, alibi="BH", sink=True, dropout_p=0.2),
    replace(BASE, layout="offset"),
)


@pytest.fixture(scope="module", autouse=True)
def drawn() -> Drawn:
    fixed = [*USED, *DIM_CASES, *LONG_CASES.values()]
    return draw(problems=400, templates=30, variants=60, also=fixed, backward=True, seed=1)


def gradients(case: Case, **changed: Any) -> dict[str, Tensor]:
    """Every gradient of a case on Triton, by name of the input; `changed` replaces inputs."""
    query, key, value, options = make(case)
    tensors = {"query": query, "key": key, "value": value} | options | changed
    for name in ("query", "key", "value", "bias", "alibi_slopes", "sink"):
        if tensors.get(name) is not None:
            tensors[name] = tensors[name].detach().requires_grad_()
    op: Any = varlen_attention if case.packed else attention
    out, lse = op(**tensors, return_lse=True, backend="triton")
    grad_out, grad_lse = normal(*out.shape, seed=7, dtype=out.dtype), normal(*lse.shape, seed=8, dtype=F32)
    wanted = {name: t for name, t in tensors.items() if isinstance(t, Tensor) and t.requires_grad}
    found = torch.autograd.grad((out, lse), list(wanted.values()), (grad_out, grad_lse))
    return dict(zip(wanted, found, strict=True))


# Agreement with the reference


def test_random_problems_agree_within_what_is_earned(drawn: Drawn) -> None:
    summary = run_all(drawn)
    keep(summary, "random problems", of="backward")
    assert not summary["failed"], "\n\n".join(summary["failures"])


@pytest.mark.parametrize("case", DIM_CASES, ids=lambda case: f"d{case.D} {str(case.dtype)[6:]}")
def test_head_dims_at_the_ends_of_the_range(case: Case) -> None:
    check_case(case, "triton")


@pytest.mark.parametrize("name", LONG_CASES)
def test_long_sums(name: str) -> None:
    check_case(LONG_CASES[name], "triton")


@pytest.mark.parametrize(
    ("name", "kernel"), [("few queries", "query"), ("few keys", "key"), ("eight heads on one", "key")]
)
def test_what_would_leave_the_gpu_idle_is_split(name: str, kernel: str) -> None:
    assert getattr(planned_backward(LONG_CASES[name]), kernel).num_splits > 1


def test_auto_takes_triton_for_gradients() -> None:
    check_case(BASE, "auto")
    query, key, value = (t.requires_grad_() for t in qkv())
    assert "triton" in str(explain(query, key, value, causal=True))


# Determinism

EVERY_GRADIENT = [
    replace(MODIFIED, deterministic=True),
    replace(BASE, deterministic=True, D=128, Dv=128, Hq=8, Hkv=2, Tq=700, Tk=700),
    replace(BASE, deterministic=True, D=256, Dv=256),
    replace(BASE, deterministic=True, dtype=F32),
    replace(PACKED, deterministic=True, alibi="BH", sink=True, dropout_p=0.2),
    replace(LONG_CASES["eight heads on one"], deterministic=True),
]


@pytest.mark.parametrize("case", EVERY_GRADIENT, ids=["modified", "gqa", "d256", "fp32", "packed", "split"])
def test_a_hundred_runs_are_bit_equal(case: Case) -> None:
    first = gradients(case)
    for _ in range(100):
        for name, grad in gradients(case).items():
            assert torch.equal(grad, first[name]), name
    if case.sink and not case.packed:
        assert set(first) == {"query", "key", "value", "bias", "alibi_slopes", "sink"}


@pytest.mark.parametrize("shape", [{}, {"D": 128, "Dv": 128}, {"mask": (5, 1, 1, 300)}], ids=["d64", "d128", "mask"])
def test_another_order_of_the_batch_is_bit_equal(shape: dict[str, Any]) -> None:
    case = replace(BASE, B=5, deterministic=True, **shape)
    query, key, value, options = make(case)
    order = torch.tensor([3, 0, 4, 1, 2], device="cuda")
    moved = {"query": query[order], "key": key[order], "value": value[order]}
    if options.get("mask") is not None:
        moved["mask"] = options["mask"][order]
    grad_out = normal(5, 200, 4, case.Dv)

    def its_gradients(tensors: dict[str, Any], grad: Tensor) -> tuple[Tensor, ...]:
        leaves = [tensors[name].detach().requires_grad_() for name in ("query", "key", "value")]
        out = attention(*leaves, causal=True, mask=tensors.get("mask"), deterministic=True, backend="triton")
        return torch.autograd.grad(out, leaves, grad)

    plain = {"query": query, "key": key, "value": value, "mask": options.get("mask")}
    for straight, permuted in zip(its_gradients(plain, grad_out), its_gradients(moved, grad_out[order]), strict=True):
        assert torch.equal(straight[order], permuted)


def test_deterministic_runs_the_same_kernels() -> None:
    """So it costs nothing; the results file has the times."""
    cases = [MODIFIED, replace(MODIFIED, deterministic=True)]
    assert planned_backward(cases[0]) == planned_backward(cases[1])
    plain, asked = (gradients(case) for case in cases)
    assert all(torch.equal(plain[name], asked[name]) for name in plain)


def planned_backward(case: Case) -> BackwardConfig:
    query, key, value, options = make(case)
    problem, _ = stated(case, {"query": query, "key": key, "value": value}, options)
    return plan(problem.replace(backward=True)).config


# The host, and CUDA graphs


@pytest.mark.parametrize("kind", ["plain", "modified", "packed", "packed, modified"])
def test_a_training_step_does_not_synchronise(kind: str) -> None:
    cases = {
        "plain": BASE,
        "modified": MODIFIED,
        "packed": PACKED,
        "packed, modified": replace(PACKED, alibi="BH", sink=True, dropout_p=0.2),
    }
    case = cases[kind]
    query, key, value, options = make(case)
    leaves = [t.detach().requires_grad_() for t in (query, key, value)]
    for name in ("bias", "alibi_slopes", "sink"):
        if options.get(name) is not None:
            options[name] = options[name].detach().requires_grad_()
            leaves.append(options[name])
    op: Any = varlen_attention if case.packed else attention

    def step() -> tuple[Tensor, ...]:
        out, lse = op(*leaves[:3], **options, return_lse=True, backend="triton")
        return torch.autograd.grad((out, lse), leaves, (torch.ones_like(out), torch.zeros_like(lse)))

    step()  # compiles
    with without_synchronising():
        grads = step()
    assert all(grad.isfinite().all() for grad in grads)


def test_a_training_step_on_packs_of_any_lengths_replays() -> None:
    """One graph of the capacity of its buffers, as many sequences and tokens as its offsets say."""
    query, key, value = (t[0].requires_grad_() for t in qkv(B=1, Tq=400, Tk=400))
    grad_out = normal(400, 4, 64)
    offsets = torch.tensor([0, 50, 50, 180, 180], dtype=torch.int32, device="cuda")

    def step() -> tuple[Tensor, ...]:
        out = varlen_attention(
            query, key, value, cu_seqlens_q=offsets, cu_seqlens_k=offsets, max_seqlen_q=400, max_seqlen_k=400,
            causal=True, backend="triton",
        )  # fmt: skip
        return torch.autograd.grad(out, (query, key, value), grad_out)

    graph, result = captured(step)
    for ends in ([0, 50, 50, 180, 180], [0, 1, 200, 300, 400], [0, 0, 0, 0, 130]):
        offsets.copy_(torch.tensor(ends, dtype=torch.int32))
        graph.replay()
        for replayed, again in zip(result, step(), strict=True):
            assert torch.equal(replayed, again)
            assert not replayed[ends[-1] :].any(), "rows of no sequence"
        rows = slice(ends[-2], ends[-1])
        if rows.stop > rows.start:
            its = [t.detach()[None, rows].double().requires_grad_() for t in (query, key, value)]
            out, _ = reference.attention(*its, causal=True)
            expected = torch.autograd.grad(out, its, grad_out[None, rows].double())
            for replayed, exact in zip(result, expected, strict=True):
                torch.testing.assert_close(replayed[rows].double(), exact[0], rtol=0.03, atol=0.03)


def test_gradients_in_a_compiled_graph() -> None:
    query, key, value = (t.requires_grad_() for t in qkv())
    compiled = torch.compile(lambda q, k, v: attention(q, k, v, causal=True).square().sum(), fullgraph=True)
    found = torch.autograd.grad(compiled(query, key, value), (query, key, value))
    expected = torch.autograd.grad(attention(query, key, value, causal=True).square().sum(), (query, key, value))
    torch.testing.assert_close(found, expected)


# Sizes


def test_gradients_of_more_elements_than_32_bits(give_memory_back: None) -> None:
    """2**31 elements and more in the query and its gradient, 4.4 GB each."""
    length, heads, dim = 2**18 + 2**12, 64, 128
    query = torch.empty(1, length, heads, dim, dtype=BF16, device="cuda").normal_().requires_grad_()
    key, value = (normal(1, length, 1, dim, seed=n).requires_grad_() for n in range(2))
    assert query.numel() > 2**31
    out = attention(query, key, value, window=(15, 0), causal=True, backend="triton")
    grad_out = torch.ones_like(out)
    dq, dk, dv = torch.autograd.grad(out, (query, key, value), grad_out)
    for begin in (0, length // 2, length - 64):
        # Queries of these rows see 15 keys before; their gradients need no others.
        rows, seen = slice(begin, begin + 64), slice(max(0, begin - 15), begin + 64)
        its = [t.detach()[:, part].double().requires_grad_() for t, part in ((query, rows), (key, seen), (value, seen))]
        exact, _ = reference.attention(*its, window=(15, 0))
        expected = torch.autograd.grad(exact, its, torch.ones_like(exact))
        torch.testing.assert_close(dq[:, rows].double(), expected[0], rtol=0.05, atol=0.05)
    # The last keys are seen by the last rows alone.
    torch.testing.assert_close(dv[:, -8:].double(), expected[2][:, -8:], rtol=0.02, atol=0.2)
    assert dk.isfinite().all()


def test_a_training_step_holds_little_more_than_what_it_returns(give_memory_back: None) -> None:
    """65,536 tokens, 16 heads of 128. The scores of one head alone would be 8.6 GB."""
    tokens, heads, dim = 65_536, 16, 128
    for deterministic in (False, True):
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        query, key, value = (t.requires_grad_() for t in qkv(1, tokens, tokens, heads, heads, dim)[:3])
        torch.cuda.reset_peak_memory_stats()
        out, lse = attention(
            query, key, value, causal=True, return_lse=True, deterministic=deterministic, backend="triton"
        )
        out.backward(torch.ones_like(out))
        peak = torch.cuda.max_memory_allocated() - before
        tensor, row = tokens * heads * dim * 2, tokens * heads * 4
        # Query, key, value; output; their three gradients; LSE and delta. That of the output is not even counted.
        counted = 3 * tensor + tensor + 3 * tensor + 2 * row
        figures = {"bytes": peak, "counted": counted, "ratio": round(peak / counted, 4)}
        keep(figures, "memory of a training step at 64k", of="backward")
        assert peak <= 1.15 * counted, peak / counted
        del query, key, value, out, lse
