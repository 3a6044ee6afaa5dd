"""The Gluon backward on a Hopper GPU: random problems against fp64, and what only a GPU shows.

Dropout needs no test of its own: `check_case` compares with a reference that drops what the forward dropped.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from gpu_tools import BF16, F16, captured, give_memory_back, keep, normal, qkv, without_synchronising
from random_problems import Drawn, draw, run_all

from stream_attention import attention, explain, varlen_attention
from stream_attention.backends import BY_NAME
from stream_attention.backends.reference import attention as reference
from stream_attention.ops.explain import problems_of_call
from stream_attention_tools.testing import Case, check_case
from stream_attention_tools.testing.inputs import make

__all__ = ["give_memory_back"]

pytestmark = pytest.mark.gpu

BASE = Case(
    B=2, Tq=300, Tk=500, Hq=4, Hkv=2, D=128, Dv=128, dtype=BF16, device="cuda", causal=True, lse_grad=True,
    row_grad=False,
)  # fmt: skip
PACKED = replace(BASE, lengths_q=(130, 64, 0, 257, 1, 500), lengths_k=(100, 300, 50, 257, 0, 700), tail=5)
ORDERED = replace(BASE, deterministic=True)
OF_EVERY_WIDTH: dict[str, Case] = {
    "causal": BASE,
    "full": replace(BASE, causal=False),
    "aligned": replace(BASE, Tq=512, Tk=512),
    "aligned, full": replace(BASE, Tq=512, Tk=512, causal=False),
    "one row": replace(BASE, Tq=1, Tk=1),
    "more queries than keys": replace(BASE, Tq=500, Tk=100),
    "window": replace(BASE, causal=False, window=(70, 33)),
    "left edge": replace(BASE, causal=False, window=(70, -1)),
    "a window behind which keys are unseen": replace(BASE, Tq=100, Tk=900, window=(50, 0)),
    "a window before all keys": replace(BASE, Tq=400, Tk=10, causal=False, window=(0, 0)),
    "softcap": replace(BASE, softcap=5.0),
    "a cap so low that what is hidden would show": replace(BASE, softcap=0.5),
    "a negative scale": replace(BASE, scale=-0.3),
    "a negative scale in a window": replace(BASE, scale=-0.3, window=(60, 0)),
    "alibi": replace(BASE, alibi="H"),
    "sink": replace(BASE, sink=True),
    "dropout": replace(BASE, dropout_p=0.3),
    "everything": replace(BASE, window=(200, 0), softcap=5.0, alibi="BH", sink=True, dropout_p=0.3),
    "packed": PACKED,
    "packed, full": replace(PACKED, causal=False),
    "in one order": replace(ORDERED, Tq=700, Tk=700),
    "in one order, full": replace(ORDERED, causal=False),
    "in one order, packed": replace(PACKED, deterministic=True),
}
NAMED: dict[str, Case] = {
    f"d{dim} {name}": replace(case, D=dim, Dv=dim)
    for name, case in OF_EVERY_WIDTH.items()
    for dim in (64, 128, 256)
    if dim <= 128 or not case.deterministic
} | {
    "d40": replace(BASE, D=40, Dv=40),
    "d96": replace(BASE, D=96, Dv=96),
    "d192": replace(BASE, D=192, Dv=192),
    "d128 and 96": replace(BASE, Dv=96),
    "d96 and 128": replace(BASE, D=96),
    "packed, d128 and 96": replace(PACKED, Dv=96),
    "packed, d96 and 128": replace(PACKED, D=96),
    "fp16": replace(BASE, dtype=F16),
    "no gradient through the LSE": replace(BASE, lse_grad=False),
    "heads first": replace(BASE, layout="heads_first"),
    "eight heads on one": replace(BASE, B=1, Tq=1500, Tk=1500, Hq=8, Hkv=1),
    "few queries": replace(BASE, B=1, Tq=5, Tk=20_000, Hq=8, Hkv=1),
    "few keys": replace(BASE, B=1, Tq=20_000, Tk=40, Hq=2, Hkv=1, causal=False),
}


@pytest.fixture(scope="module", autouse=True)
def drawn() -> Drawn:
    tensors = (t.requires_grad_() for t in qkv(D=128))
    if reasons := BY_NAME["gluon"].why_not(problems_of_call(*tensors, causal=True)[0][1]):
        pytest.skip("; ".join(reasons))
    return draw(problems=1200, templates=30, variants=48, also=list(NAMED.values()), backward=True, backend="gluon")


def gradients(case: Case, **changed: Any) -> dict[str, Tensor]:
    """The gradients of query, key and value of a case; `changed` replaces inputs."""
    query, key, value, options = make(case)
    tensors = {"query": query, "key": key, "value": value} | options | changed
    grad_out = tensors.pop("grad_out", None)
    for name in ("query", "key", "value"):
        tensors[name] = tensors[name].detach().requires_grad_()
    op: Any = varlen_attention if case.packed else attention
    out = op(**tensors, backend="gluon")
    wanted = {name: t for name, t in tensors.items() if isinstance(t, Tensor) and t.requires_grad}
    grad_out = normal(*out.shape, seed=7, dtype=out.dtype) if grad_out is None else grad_out
    return dict(zip(wanted, torch.autograd.grad(out, list(wanted.values()), grad_out), strict=True))


def step(query: Tensor, key: Tensor, value: Tensor, grad_out: Tensor, **options: Any) -> tuple[Tensor, ...]:
    """Gradients of one call."""
    out = attention(query, key, value, **options, backend="gluon")
    return torch.autograd.grad(out, (query, key, value), grad_out)


def trained(**shape: Any) -> tuple[list[Tensor], Tensor]:
    """Queries, keys and values that want gradients, and one that arrives."""
    leaves = [t.requires_grad_() for t in qkv(**shape)]
    return leaves, normal(*leaves[0].shape, seed=7)


# Agreement with the reference


def test_random_problems_agree_within_what_is_earned(drawn: Drawn) -> None:
    summary = run_all(drawn)
    keep(summary, "random problems", of="gluon_backward")
    assert not summary["failed"], "\n\n".join(summary["failures"])


@pytest.mark.parametrize("name", NAMED)
def test_named_problems(name: str) -> None:
    check_case(NAMED[name], "gluon")


def test_gradients_that_are_not_wanted_change_nothing() -> None:
    case = replace(ORDERED, sink=True)
    query, key, value, options = make(case)
    everything = gradients(case)
    tensors = {"query": query, "key": key, "value": value}
    grad_out = normal(*query.shape, seed=7)
    for wanted in (("query",), ("key",), ("value",), ("query", "value"), ("key", "value")):
        leaves = {name: t.detach().requires_grad_(name in wanted) for name, t in tensors.items()}
        out = attention(**leaves, **options, backend="gluon")
        found = torch.autograd.grad(out, [leaves[name] for name in wanted], grad_out)
        for name, grad in zip(wanted, found, strict=True):
            assert torch.equal(grad, everything[name]), (wanted, name)


# What takes it


def planned(capsys: pytest.CaptureFixture[str], *tensors: Tensor, **options: Any) -> list[str]:
    """The backends of forward and backward, as `explain` prints them."""
    explain(*tensors, **options)
    printed = capsys.readouterr().out.splitlines()
    return [line.split()[1].rstrip(":") for line in printed if line.startswith("backend")]


def test_auto_takes_it_for_long_calls_and_triton_for_what_it_lacks(capsys: pytest.CaptureFixture[str]) -> None:
    leaves, _ = trained(B=4, Tq=2048, Tk=2048, Hq=16, Hkv=16, D=128)
    slopes = torch.full((16,), 0.1, device="cuda")
    assert planned(capsys, *leaves, causal=True) == ["gluon", "gluon"]
    assert planned(capsys, *leaves, alibi_slopes=slopes) == ["gluon", "gluon"]
    assert planned(capsys, *leaves, alibi_slopes=slopes.requires_grad_()) == ["gluon", "triton"]
    assert planned(capsys, *leaves, mask=torch.ones(2048, 2048, dtype=torch.bool, device="cuda")) == ["triton"] * 2
    assert planned(capsys, *trained(D=128)[0], causal=True) == ["triton"] * 2


def test_auto_computes_what_the_name_computes() -> None:
    leaves, grad_out = trained(B=4, Tq=2048, Tk=2048, Hq=16, Hkv=16, D=128)
    out = attention(*leaves, causal=True, deterministic=True)
    by_itself = torch.autograd.grad(out, leaves, grad_out)
    by_name = step(*leaves, grad_out, causal=True, deterministic=True)
    assert all(torch.equal(one, other) for one, other in zip(by_itself, by_name, strict=True))


def test_tritons_backward_takes_the_lse_of_the_gluon_forward() -> None:
    leaves, grad_out = trained(B=4, Tq=2048, Tk=2048, Hq=16, Hkv=16, D=128)
    leaves.append(torch.full((16,), 0.1, device="cuda", requires_grad=True))
    calls = (attention(*leaves[:3], alibi_slopes=leaves[3], causal=True, backend=name) for name in ("auto", "triton"))
    both = (torch.autograd.grad(out, leaves, grad_out) for out in calls)
    for mixed, by_triton in zip(*both, strict=True):
        assert (mixed - by_triton).norm() <= 0.01 * by_triton.norm()


def test_what_it_lacks_is_refused_by_name_before_the_forward() -> None:
    leaves, _ = trained(D=128)
    with pytest.raises(ValueError, match="gradients of ALiBi slopes"):
        attention(*leaves, alibi_slopes=torch.ones(4, device="cuda", requires_grad=True), backend="gluon")
    with pytest.raises(ValueError, match="deterministic backward supports D up to 128"):
        attention(*trained(D=256)[0], deterministic=True, backend="gluon")


# Determinism

BIT_EQUAL = {
    f"d{dim} {name}": replace(case, D=dim, Dv=dim, deterministic=True)
    for dim in (64, 128)
    for name, case in {
        "causal": replace(BASE, Tq=1500, Tk=1500, Hq=8, Hkv=2),
        "full": replace(BASE, Tq=1500, Tk=1500, Hq=8, Hkv=2, causal=False),
        "packed": PACKED,
        "everything": OF_EVERY_WIDTH["everything"],
    }.items()
}


@pytest.mark.parametrize("name", BIT_EQUAL)
def test_a_hundred_runs_are_bit_equal(name: str) -> None:
    first = gradients(BIT_EQUAL[name])
    for _ in range(100):
        for of, grad in gradients(BIT_EQUAL[name]).items():
            assert torch.equal(grad, first[of]), of


def test_without_it_keys_and_values_are_bit_equal_too() -> None:
    """Programs share the sums of queries alone."""
    case = replace(BASE, Tq=1500, Tk=1500, Hq=8, Hkv=2, D=256, Dv=256)
    first = gradients(case)
    for _ in range(20):
        again = gradients(case)
        assert torch.equal(again["key"], first["key"]) and torch.equal(again["value"], first["value"])


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("causal", [True, False])
def test_another_order_of_the_batch_is_bit_equal(dim: int, causal: bool) -> None:
    leaves, grad_out = trained(B=5, Tq=700, Tk=900, D=dim)
    order = torch.tensor([3, 0, 4, 1, 2], device="cuda")
    moved = [t.detach()[order].requires_grad_() for t in leaves]
    straight = step(*leaves, grad_out, causal=causal, deterministic=True)
    permuted = step(*moved, grad_out[order], causal=causal, deterministic=True)
    assert all(torch.equal(one[order], other) for one, other in zip(straight, permuted, strict=True))


# The host, streams and CUDA graphs


@pytest.mark.parametrize("name", ["d64 causal", "d128 everything", "d128 packed", "d256 everything", "d256 packed"])
def test_a_training_step_does_not_synchronise(name: str) -> None:
    case = replace(NAMED[name], max_lengths=True)
    query, key, value, options = make(case)
    leaves = [t.detach().requires_grad_() for t in (query, key, value)]
    op: Any = varlen_attention if case.packed else attention

    def one_step() -> tuple[Tensor, ...]:
        out, lse = op(*leaves, **options, return_lse=True, backend="gluon")
        return torch.autograd.grad((out, lse), leaves, (torch.ones_like(out), torch.zeros_like(lse)))

    one_step()  # compiles
    with without_synchronising():
        grads = one_step()
    assert all(grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_a_training_step_replays_with_other_data(dim: int) -> None:
    leaves, grad_out = trained(Tq=700, Tk=900, D=dim)
    options = {"causal": True, "deterministic": dim <= 128}
    graph, result = captured(lambda: step(*leaves, grad_out, **options))
    with torch.no_grad():
        for seed, tensor in enumerate((*leaves, grad_out), start=20):
            tensor.copy_(normal(*tensor.shape, seed=seed))
    for _ in range(3):
        graph.replay()
    again = step(*leaves, grad_out, **options)
    assert torch.equal(result[1], again[1]) and torch.equal(result[2], again[2])
    if dim <= 128:
        assert torch.equal(result[0], again[0])
    assert (result[0] - again[0]).norm() <= 0.01 * again[0].norm()


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_a_training_step_on_packs_of_any_lengths_replays(dim: int) -> None:
    """One graph of the capacity of its buffers, as many sequences and tokens as its offsets say."""
    leaves = [t[0].detach().requires_grad_() for t in qkv(B=1, Tq=900, Tk=900, D=dim)]
    grad_out = normal(900, 4, dim, seed=7)
    offsets = torch.tensor([0, 50, 50, 180, 180], dtype=torch.int32, device="cuda")

    def one_step() -> tuple[Tensor, ...]:
        out = varlen_attention(
            *leaves, cu_seqlens_q=offsets, cu_seqlens_k=offsets, max_seqlen_q=900, max_seqlen_k=900, causal=True,
            backend="gluon",
        )  # fmt: skip
        return torch.autograd.grad(out, leaves, grad_out)

    graph, result = captured(one_step)
    for ends in ([0, 50, 50, 180, 180], [0, 1, 400, 700, 900], [0, 0, 0, 0, 330], [0, 0, 0, 0, 0]):
        offsets.copy_(torch.tensor(ends, dtype=torch.int32))
        graph.replay()
        for replayed in result:
            assert replayed.isfinite().all() and not replayed[ends[-1] :].any(), "rows of no sequence"
        for begin, end in pairwise(ends):
            if begin < end:
                its = [t.detach()[None, begin:end].double().requires_grad_() for t in leaves]
                out, _ = reference.attention(*its, causal=True)
                expected = torch.autograd.grad(out, its, grad_out[None, begin:end].double())
                for replayed, exact in zip(result, expected, strict=True):
                    torch.testing.assert_close(replayed[begin:end].double(), exact[0], rtol=0.03, atol=0.03)


def test_two_streams_at_once() -> None:
    """Programs of one wait for each other while those of the other run between them."""
    problems = [trained(B=2, Tq=1500, Tk=1500, Hq=8, Hkv=8, D=dim) for dim in (128, 64)]
    expected = [step(*leaves, grad_out, causal=True, deterministic=True) for leaves, grad_out in problems]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in problems]
    found: list[list[tuple[Tensor, ...]]] = [[], []]
    for _ in range(20):
        for (leaves, grad_out), stream, its in zip(problems, streams, found, strict=True):
            with torch.cuda.stream(stream):
                its.append(step(*leaves, grad_out, causal=True, deterministic=True))
    torch.cuda.synchronize()
    for its, right in zip(found, expected, strict=True):
        for grads in its:
            assert all(torch.equal(grad, other) for grad, other in zip(grads, right, strict=True))


# What nobody sees


def is_same(found: dict[str, Tensor], clean: dict[str, Tensor], dim: int) -> bool:
    """Bit-equal, and close where sums over keys have no order."""
    ordered = ("query", "key", "value") if dim <= 128 else ("key", "value")
    differs = (found["query"] - clean["query"]).norm()
    return all(torch.equal(found[name], clean[name]) for name in ordered) and bool(
        differs <= 0.01 * clean["query"].norm()
    )


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_nan_in_keys_that_nobody_sees_stays_there(dim: int) -> None:
    case = replace(BASE, Tq=100, Tk=900, window=(50, 0), D=dim, Dv=dim, deterministic=dim <= 128)
    _, key, value, _ = make(case)
    hidden = slice(0, 900 - 100 - 50)
    key[:, hidden], value[:, hidden] = float("nan"), float("nan")
    clean = gradients(case)
    assert not clean["key"][:, hidden].any() and not clean["value"][:, hidden].any()
    assert is_same(gradients(case, key=key, value=value), clean, dim)


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_nan_in_queries_that_see_nothing_and_in_their_gradients_stays_there(dim: int) -> None:
    case = replace(BASE, Tq=500, Tk=100, D=dim, Dv=dim, deterministic=dim <= 128)
    query, *_ = make(case)
    grad_out = normal(*query.shape, seed=7)
    idle = slice(0, 400)
    clean = gradients(case, grad_out=grad_out.clone())
    query[:, idle], grad_out[:, idle] = float("nan"), float("nan")
    assert not clean["query"][:, idle].any()
    assert is_same(gradients(case, query=query, grad_out=grad_out), clean, dim)


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_nan_in_one_sequence_and_behind_the_last_stays_there(dim: int) -> None:
    """Tiles of a sequence reach into the next one, and those of the last into what belongs to none."""
    lengths = (130, 64, 257, 1, 100)
    case = replace(PACKED, lengths_q=lengths, lengths_k=lengths, D=dim, Dv=dim, deterministic=dim <= 128)
    query, key, value, _ = make(case)
    grad_out = normal(*query.shape, seed=7)
    clean = gradients(case, grad_out=grad_out.clone())
    nan = [slice(130, 194), slice(sum(lengths), None)]
    for tensor in (query, key, value, grad_out):
        for rows in nan:
            tensor[rows] = float("nan")
    found = gradients(case, query=query, key=key, value=value, grad_out=grad_out)
    for name, grad in found.items():
        assert grad[nan[0]].isnan().all(), name
        assert not clean[name][nan[1]].any() and not grad[nan[1]].any(), name
        grad[nan[0]] = clean[name][nan[0]]
    assert is_same(found, clean, dim)


# Sizes


@pytest.mark.parametrize("name", ["d64 causal", "d128 everything", "d256 causal"])
def test_heads_that_are_computed_one_after_the_other_are_as_all_at_once(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = replace(NAMED[name], deterministic=NAMED[name].D <= 128)
    at_once = gradients(case)
    monkeypatch.setattr("stream_attention.backends.hopper.backward_rows.SCRATCH_BYTES", 1)
    one_by_one = gradients(case)
    assert is_same(one_by_one, at_once, case.D)


def test_gradients_of_more_elements_than_32_bits(give_memory_back: None) -> None:
    """2**31 elements and more in the query, its gradient and the sums of it: 4.4 and 8.7 GB."""
    length, heads, dim = 2**18 + 2**12, 64, 128
    query = torch.empty(1, length, heads, dim, dtype=BF16, device="cuda").normal_().requires_grad_()
    key, value = (normal(1, length, 1, dim, seed=n).requires_grad_() for n in range(2))
    assert query.numel() > 2**31
    dq, dk, dv = step(query, key, value, torch.ones_like(query), window=(15, 0), causal=True)
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
    before = torch.cuda.memory_allocated()
    leaves = [t.requires_grad_() for t in qkv(1, tokens, tokens, heads, heads, dim)]
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    out = attention(*leaves, causal=True, backend="gluon")
    out.backward(torch.ones_like(out))
    peak = torch.cuda.max_memory_allocated() - before
    tensor, row = tokens * heads * dim * 2, tokens * heads * 4
    # Query, key, value; output; their three gradients; LSE and delta.
    counted = 3 * tensor + tensor + 3 * tensor + 2 * row
    figures = {"bytes": peak, "counted": counted, "ratio": round(peak / counted, 4)}
    keep(figures, "memory of a training step at 64k", of="gluon_backward")
    # Not counted: the gradient of the output, and the fp32 sums of the queries' for as many heads as there is room for.
    assert peak <= 1.35 * counted, peak / counted
