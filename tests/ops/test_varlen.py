"""varlen_attention(): packed sequences are the rows of a batch, without the padding."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("hypothesis")

from hypothesis import given, settings
from hypothesis import strategies as st
from random_cases import random_case, why_not

from stream_attention import attention, merge_states, varlen_attention
from stream_attention.backends.reference import attention as reference
from stream_attention_tools.testing import Case, Report, check_case

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
DTYPES = (F16, BF16, F32, F64)
NAN, INF = math.nan, math.inf


def check(case: Case, backend: str) -> Report:
    reasons = why_not(case, backend)
    if reasons:
        pytest.skip(f"{backend}: {' '.join(reasons)}")
    return check_case(case, backend)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = F32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


def qkv(Nq: int, Nk: int, Hq: int = 4, Hkv: int = 2, D: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    return normal(Nq, Hq, D), normal(Nk, Hkv, D, seed=1), normal(Nk, Hkv, D, seed=2)


def offsets(*lengths: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(dtype)


def leaves(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(tensor.detach().clone().requires_grad_() for tensor in tensors)


# What it means


def test_a_sequence_sees_its_own_keys_alone(backend: str) -> None:
    query, key = torch.zeros(3, 1, 8), torch.zeros(5, 1, 8)
    value = torch.eye(5).view(5, 1, 5)
    found = varlen_attention(
        query, key, value, cu_seqlens_q=offsets(1, 2), cu_seqlens_k=offsets(2, 3), backend=backend
    )[:, 0]
    third = 1 / 3
    torch.testing.assert_close(
        found, torch.tensor([[0.5, 0.5, 0, 0, 0], [0, 0, third, third, third], [0, 0, third, third, third]])
    )


def test_causal_is_aligned_to_the_end_of_each_sequence(backend: str) -> None:
    query, key = torch.zeros(5, 1, 8), torch.zeros(5, 1, 8)
    value = torch.eye(5).view(5, 1, 5)
    found = varlen_attention(
        query, key, value, cu_seqlens_q=offsets(2, 3), cu_seqlens_k=offsets(3, 2), causal=True, backend=backend
    )[:, 0]
    seen = torch.tensor([[1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [0, 0, 0, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 1, 1]]).float()
    torch.testing.assert_close(found, seen / seen.sum(-1, keepdim=True).clamp_min(1))


@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"window": (3, 1), "softcap": 2.0}, {"dropout_p": 0.4}], ids=str
)
def test_it_is_attention_on_each_row_of_the_batch(backend: str, options: dict[str, Any]) -> None:
    q_lengths, k_lengths = (3, 7, 0, 4), (6, 2, 5, 4)
    query, key, value = qkv(14, 17)
    slopes, sink = normal(4, 4).abs(), normal(4)
    seed: dict[str, Any] = {"seed": 3} if "dropout_p" in options else {}
    out, lse = varlen_attention(
        query, key, value, cu_seqlens_q=offsets(*q_lengths), cu_seqlens_k=offsets(*k_lengths), alibi_slopes=slopes,
        sink=sink, return_lse=True, backend=backend, **options, **seed,
    )  # fmt: skip
    assert out.shape == (14, 4, 8) and lse.shape == (4, 14)
    rows, columns = query.split(q_lengths), list(zip(key.split(k_lengths), value.split(k_lengths), strict=True))
    for b, (its_out, its_lse) in enumerate(zip(out.split(q_lengths), lse.split(q_lengths, dim=1), strict=True)):
        expected = reference.attention(
            rows[b][None], *(t[None] for t in columns[b]), alibi_slopes=slopes[b], sink=sink, batch_start=b, **options,
            **seed,
        )  # fmt: skip
        torch.testing.assert_close((its_out, its_lse), (expected[0][0].float(), expected[1][0].float()))


def test_rows_past_the_last_sequence_are_empty_whatever_they_hold(backend: str) -> None:
    query, key, value = qkv(9, 9)
    for tensor in (query, key, value):
        tensor[6:] = NAN
    query, key, value, sink = leaves(query, key, value, normal(4))
    for its_sink in (None, sink):
        out, lse = varlen_attention(
            query, key, value, cu_seqlens_q=offsets(2, 4), cu_seqlens_k=offsets(2, 4), sink=its_sink, return_lse=True,
            causal=True, backend=backend,
        )  # fmt: skip
        assert not out[6:].any() and torch.equal(lse[:, 6:], torch.full((4, 3), -INF))
        assert out[:6].isfinite().all() and lse[:, :6].isfinite().all()
        grads = torch.autograd.grad((out, lse), (query, key, value), (normal(*out.shape), normal(*lse.shape)))
        for grad in grads:
            assert grad.isfinite().all() and not grad[6:].any() and grad[:6].any()


def test_a_sequence_does_not_see_poison_in_another(backend: str) -> None:
    query, key, value = qkv(6, 6)
    expected = varlen_attention(
        query, key, value, cu_seqlens_q=offsets(3, 3), cu_seqlens_k=offsets(3, 3), backend=backend
    )
    query[3:], key[3:], value[3:] = NAN, NAN, INF
    found = varlen_attention(query, key, value, cu_seqlens_q=offsets(3, 3), cu_seqlens_k=offsets(3, 3), backend=backend)
    assert torch.equal(found[:3], expected[:3])


@pytest.mark.parametrize("lengths", [((0,), (3,)), ((3,), (0,)), ((0, 2, 0), (4, 0, 0)), ((), ())], ids=str)
@pytest.mark.parametrize("with_sink", [False, True])
def test_empty_sequences(backend: str, lengths: tuple[tuple[int, ...], tuple[int, ...]], with_sink: bool) -> None:
    for tail in (0, 2):
        case = Case(Hq=4, Hkv=2, D=8, Dv=8, lengths_q=lengths[0], lengths_k=lengths[1], tail=tail, sink=with_sink)
        for max_lengths in (False, True):
            check(replace(case, lse_grad=True, causal=True, max_lengths=max_lengths), backend)


@pytest.mark.parametrize("named", ["auto", "eager", "reference"])
@pytest.mark.parametrize("sizes", [(0, 0, 8, 8), (0, 2, 8, 8), (4, 2, 0, 8), (4, 2, 8, 0), (0, 0, 0, 0)], ids=str)
def test_no_heads_and_head_dims_of_zero(named: str, sizes: tuple[int, int, int, int]) -> None:
    shape = dict(zip(("Hq", "Hkv", "D", "Dv"), sizes, strict=True))
    for options in ({"causal": True, "sink": True, "tail": 2}, {"alibi": "BH", "lse_grad": True, "dropout_p": 0.3}):
        check_case(Case(lengths_q=(3, 0, 5), lengths_k=(4, 2, 5), **shape, **options), named)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_offsets_of_either_dtype_and_lengths_that_are_told(backend: str, dtype: torch.dtype) -> None:
    query, key, value = qkv(9, 9)
    expected = varlen_attention(
        query, key, value, cu_seqlens_q=offsets(2, 7), cu_seqlens_k=offsets(5, 4), causal=True, backend=backend
    )
    for longest in ({}, {"max_seqlen_q": 7, "max_seqlen_k": 5}, {"max_seqlen_q": 100}, {"max_seqlen_k": 64}):
        its = {"cu_seqlens_q": offsets(2, 7, dtype=dtype), "cu_seqlens_k": offsets(5, 4, dtype=dtype)}
        assert torch.equal(
            varlen_attention(query, key, value, **its, causal=True, backend=backend, **longest), expected
        )


# Agreement with the reference: forward and every gradient, within what is earned

SHAPE = Case(Hq=4, Hkv=2, D=16, Dv=16, lengths_q=(5, 17, 1, 9), lengths_k=(8, 17, 30, 3), seed=3)
SQUARE = replace(SHAPE, lengths_k=SHAPE.lengths_q)
CASES: dict[str, Case] = {
    "plain": SHAPE,
    "square causal, where torch's flash op serves each": replace(SQUARE, causal=True),
    "causal, some with more queries than keys": replace(SHAPE, causal=True),
    "window": replace(SHAPE, window=(4, 2)),
    "alibi for all": replace(SHAPE, alibi="H", causal=True),
    "alibi per sequence": replace(SHAPE, alibi="BH"),
    "sink": replace(SHAPE, sink=True, causal=True),
    "softcap": replace(SHAPE, softcap=2.0),
    "dropout": replace(SHAPE, dropout_p=0.3),
    "tail": replace(SQUARE, tail=6, causal=True),
    "values narrower than keys": replace(SHAPE, Dv=8),
    "mqa": replace(SHAPE, Hkv=1),
    "lengths told": replace(SHAPE, max_lengths=True),
    "one sequence": replace(SHAPE, lengths_q=(40,), lengths_k=(50,), alibi="BH"),
    "longer than a tile": replace(SHAPE, lengths_q=(3, 300), lengths_k=(3, 600), causal=True, sink=True, D=4, Dv=4),
    "negative scale": replace(SQUARE, causal=True, scale=-0.2),
    "deterministic": replace(SQUARE, deterministic=True, causal=True),
    "everything": replace(
        SHAPE, causal=True, window=(9, 0), alibi="BH", sink=True, softcap=3.0, dropout_p=0.2, tail=2, lse_grad=True,
        aux_dtype=F32, Dv=8,
    ),
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp16", "bf16", "fp32", "fp64"])
@pytest.mark.parametrize("name", CASES)
def test_agrees_with_the_reference(backend: str, name: str, dtype: torch.dtype) -> None:
    aux_dtype = None if dtype is F64 else CASES[name].aux_dtype
    check(replace(CASES[name], dtype=dtype, aux_dtype=aux_dtype), backend)


@pytest.mark.parametrize("name", CASES)
def test_the_reference_can_be_named_as_a_backend(name: str) -> None:
    check_case(CASES[name], "reference")


@settings(max_examples=40)
@given(rng=st.randoms(use_true_random=False))
def test_agrees_with_the_reference_on_random_problems(backend: str, rng: random.Random) -> None:
    case = random_case(rng, dtypes=DTYPES, head_dims=(4, 16), max_length=24, packed=True)
    if not why_not(case, backend):
        check_case(case, backend)


def test_gradcheck_of_everything_with_the_lse() -> None:
    shapes = ((5, 4, 3), (6, 2, 3), (6, 2, 2), (2, 4), (4,))
    tensors = leaves(*(normal(*shape, seed=n, dtype=F64) for n, shape in enumerate(shapes)))

    def function(query: Tensor, key: Tensor, value: Tensor, slopes: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
        return varlen_attention(
            query, key, value, cu_seqlens_q=offsets(2, 2), cu_seqlens_k=offsets(3, 2), causal=True, window=(2, 0),
            alibi_slopes=slopes, sink=sink, softcap=2.0, dropout_p=0.3, seed=3, return_lse=True, backend="eager",
        )  # fmt: skip

    def finite(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = function(*tensors)
        return out, lse[:, :4]  # the tail's LSE is -inf, of which there are no differences

    assert torch.autograd.gradcheck(finite, tensors)


# Properties


@settings(max_examples=25)
@given(lengths=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=5), causal=st.booleans())
def test_packing_is_padding_without_the_padding(backend: str, lengths: list[tuple[int, int]], causal: bool) -> None:
    q_lengths, k_lengths = [q for q, _ in lengths], [k for _, k in lengths]
    query, key, value = qkv(sum(q_lengths), sum(k_lengths))
    packed = varlen_attention(
        query, key, value, cu_seqlens_q=offsets(*q_lengths), cu_seqlens_k=offsets(*k_lengths), causal=causal,
        backend=backend,
    )  # fmt: skip
    # Padded on the left, so that the last query still stands beside the last key.
    q_len, k_len, batch = max(q_lengths, default=0), max(k_lengths, default=0), len(lengths)
    padded = (
        torch.zeros(batch, q_len, 4, 8),
        torch.full((batch, k_len, 2, 8), NAN),
        torch.full((batch, k_len, 2, 8), NAN),
    )
    mask = torch.zeros(batch, 1, 1, k_len, dtype=torch.bool)
    for b, (q_rows, k_rows, v_rows) in enumerate(
        zip(query.split(q_lengths), key.split(k_lengths), value.split(k_lengths), strict=True)
    ):
        for whole, rows in zip(padded, (q_rows, k_rows, v_rows), strict=True):
            whole[b, whole.shape[1] - rows.shape[0] :] = rows
        mask[b, ..., k_len - k_rows.shape[0] :] = True
    out = attention(*padded, mask=mask, causal=causal, backend=backend)
    unpadded = [out[b, q_len - length :] for b, length in enumerate(q_lengths)]
    torch.testing.assert_close(packed, torch.cat(unpadded) if unpadded else packed.new_zeros(0, 4, 8))


def test_keys_split_within_each_sequence_and_merged_are_the_whole(backend: str) -> None:
    query, key, value = qkv(7, 10)
    whole = varlen_attention(
        query, key, value, cu_seqlens_q=offsets(3, 4), cu_seqlens_k=offsets(6, 4), return_lse=True, backend=backend
    )
    states = []
    for rows, lengths in (([0, 1, 6], (2, 1)), ([2, 3, 4, 5, 7, 8, 9], (4, 3))):
        its = {"cu_seqlens_q": offsets(3, 4), "cu_seqlens_k": offsets(*lengths)}
        states.append(varlen_attention(query, key[rows], value[rows], **its, return_lse=True, backend=backend))
    torch.testing.assert_close(merge_states(*zip(*states, strict=True)), whole)


def test_permuting_the_sequences_permutes_the_output(backend: str) -> None:
    query, key, value = qkv(9, 9)
    lengths = (2, 4, 3)
    straight = varlen_attention(
        query, key, value, cu_seqlens_q=offsets(*lengths), cu_seqlens_k=offsets(*lengths), causal=True, backend=backend
    )
    order = [2, 0, 1]
    moved = (torch.cat([t.split(lengths)[n] for n in order]) for t in (query, key, value))
    its = offsets(*(lengths[n] for n in order))
    permuted = varlen_attention(*moved, cu_seqlens_q=its, cu_seqlens_k=its, causal=True, backend=backend)
    torch.testing.assert_close(permuted, torch.cat([straight.split(lengths)[n] for n in order]))


# Dropout


def test_dropout_counts_within_a_sequence_and_by_sequence(backend: str) -> None:
    q_lengths, k_lengths = (3, 2), (4, 6)
    query, key = torch.zeros(5, 4, 8), torch.zeros(10, 2, 8)
    value = torch.cat([torch.eye(n, 6) for n in k_lengths]).view(10, 1, 6).expand(10, 2, 6)
    out = varlen_attention(
        query, key, value, cu_seqlens_q=offsets(*q_lengths), cu_seqlens_k=offsets(*k_lengths), dropout_p=0.5, seed=8,
        backend=backend,
    )  # fmt: skip
    for b, its in enumerate(out.split(q_lengths)):
        kept = reference.dropout_keep(8, 0, 1, 4, q_lengths[b], k_lengths[b], 0.5, batch_start=b)[0]
        assert torch.equal(its.transpose(0, 1)[..., : k_lengths[b]] != 0, kept)


def test_no_seed_draws_one_that_manual_seed_reproduces(backend: str) -> None:
    def run() -> Tensor:
        its = offsets(3, 4)
        return varlen_attention(*qkv(7, 7), cu_seqlens_q=its, cu_seqlens_k=its, dropout_p=0.5, backend=backend)

    torch.manual_seed(1)
    first, second = run(), run()
    torch.manual_seed(1)
    assert torch.equal(run(), first) and not torch.equal(first, second)


# Layouts


@pytest.mark.parametrize("layout", ["heads_first", "qkv_packed", "strided", "offset", "expanded"])
@pytest.mark.parametrize(
    "options",
    [{"lengths_k": SHAPE.lengths_q, "causal": True}, {"window": (5, 5), "sink": True}],
    ids=["flash", "blocked"],
)
def test_layouts(backend: str, layout: Any, options: dict[str, Any]) -> None:
    check(replace(SHAPE, layout=layout, **options), backend)


# Autocast


def test_autocast_computes_in_its_dtype(backend: str) -> None:
    query, key, value = leaves(*qkv(6, 6))
    its = offsets(2, 4)
    with torch.autocast("cpu", dtype=BF16):
        out = varlen_attention(query, key, value, cu_seqlens_q=its, cu_seqlens_k=its, backend=backend)
    assert out.dtype is BF16
    out.square().sum().backward()
    assert all(t.grad.dtype is F32 and t.grad.any() for t in (query, key, value))


# Refusals

Q, K, V = torch.zeros(6, 4, 8), torch.zeros(7, 2, 8), torch.zeros(7, 2, 8)
REFUSALS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"query": Q[None]}, ValueError, r"query: expected shape \[Nq, Hq, D\]; got \[1, 6, 4, 8\]"),
    ({"key": K[0]}, ValueError, r"key: expected shape \[Nk, Hkv, D\]"),
    ({"value": V[:6]}, ValueError, "value: expected the key's length and heads"),
    ({"query": Q[:, :3]}, ValueError, r"query: .* multiple of the 2 KV heads as Hq; got \[.*, 3, .*\] with key"),
    ({"key": K.half()}, TypeError, "key: expected the query's dtype"),
    ({"query": Q.mT.contiguous().mT}, ValueError, "query: expected a contiguous last dim"),
    ({"mask": torch.ones(1, dtype=torch.bool)}, ValueError, r"mask: expected None for packed sequences.*attention\(\)"),
    ({"bias": torch.zeros(1)}, ValueError, "bias: expected None for packed sequences"),
    ({"cu_seqlens_q": offsets(2, 5)}, ValueError, "cu_seqlens_q: expected a last value of at most the 6 packed"),
    ({"cu_seqlens_k": offsets(2, 6)}, ValueError, "cu_seqlens_k: expected a last value of at most the 7"),
    ({"cu_seqlens_q": torch.tensor([0, 4, 2])}, ValueError, r"cu_seqlens_q: expected non-decreasing .*\[4, 2\] at 1"),
    ({"cu_seqlens_k": torch.tensor([1, 4, 6])}, ValueError, "cu_seqlens_k: expected 0 as the first value"),
    ({"cu_seqlens_k": torch.tensor([0, -1, 6])}, ValueError, "cu_seqlens_k: expected non-decreasing values"),
    ({"cu_seqlens_q": offsets(2, 4).float()}, TypeError, "cu_seqlens_q: expected dtype torch.int32 or torch.int64"),
    ({"cu_seqlens_q": offsets(2, 4).short()}, TypeError, "cu_seqlens_q: expected dtype torch.int32 or torch.int64"),
    ({"cu_seqlens_q": [0, 2, 6]}, TypeError, "cu_seqlens_q: expected a torch.Tensor; got list"),
    ({"cu_seqlens_q": None}, TypeError, "cu_seqlens_q: expected a torch.Tensor; got NoneType"),
    ({"cu_seqlens_q": offsets(2, 4)[None]}, ValueError, r"cu_seqlens_q: expected shape \[sequences \+ 1\]"),
    ({"cu_seqlens_q": offsets()[:0]}, ValueError, r"cu_seqlens_q: expected shape \[sequences \+ 1\]"),
    ({"cu_seqlens_k": offsets(2, 2, 2)}, ValueError, "cu_seqlens_k: expected as many sequences as cu_seqlens_q"),
    ({"cu_seqlens_k": offsets(2, 4).to("meta")}, ValueError, "cu_seqlens_k: expected the query's device"),
    ({"max_seqlen_q": 3}, ValueError, "max_seqlen_q: expected at least the longest sequence, 4; got 3"),
    ({"max_seqlen_k": 4}, ValueError, "max_seqlen_k: expected at least the longest sequence, 5; got 4"),
    ({"max_seqlen_q": -1}, ValueError, "max_seqlen_q: expected at least 0"),
    ({"max_seqlen_q": 4.0}, TypeError, "max_seqlen_q: expected an int or None"),
    ({"max_seqlen_k": True}, TypeError, "max_seqlen_k: expected an int or None"),
    ({"alibi_slopes": torch.zeros(3, 4)}, ValueError, r"alibi_slopes: expected shape \[Hq=4\] or \[B=2, Hq=4\]"),
    ({"sink": torch.zeros(2)}, ValueError, "sink: expected shape"),
    ({"dropout_p": 1.0}, ValueError, "dropout_p: expected a probability"),
    ({"softcap": -2.0}, ValueError, "softcap: expected"),
    ({"window": (0, -2)}, ValueError, "window: expected sides"),
    ({"scale": NAN}, ValueError, "scale: expected a finite number"),
    ({"seed": 0.5}, TypeError, "seed: expected an int"),
    ({"causal": 1}, TypeError, "causal: expected a bool"),
    ({"backend": "fastest"}, ValueError, "backend: expected one of"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("bad", "error", "words"), REFUSALS, ids=[f"{n} {next(iter(r[0]))}" for n, r in enumerate(REFUSALS)]
)
def test_refuses(bad: dict[str, Any], error: type[Exception], words: str) -> None:
    good = {"query": Q, "key": K, "value": V, "cu_seqlens_q": offsets(2, 4), "cu_seqlens_k": offsets(5, 2)}
    inputs = good | bad
    before = {name: t.clone() for name, t in inputs.items() if isinstance(t, Tensor) and t.device.type == "cpu"}
    with pytest.raises(error, match=words) as caught:
        varlen_attention(**inputs)
    assert caught.type is error
    assert all(torch.equal(inputs[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize(
    ("keyword", "words"),
    [
        ("softmax_scale", r"varlen_attention\(\): `softmax_scale` is called `scale` here"),
        ("attn_mask", r"varlen_attention\(\) got an unexpected keyword argument 'attn_mask'"),  # nothing takes a mask
    ],
)
def test_keywords_of_others_are_refused_with_their_name_here(keyword: str, words: str) -> None:
    packed = {"cu_seqlens_q": offsets(2, 4), "cu_seqlens_k": offsets(2, 4)}
    with pytest.raises(TypeError, match=words):
        varlen_attention(Q, K, V, **packed, **{keyword: 1.0})
    with pytest.raises(TypeError, match=r"takes 3 positional arguments, query, key, value; got 4"):
        varlen_attention(Q, K, V, True, **packed)  # type: ignore[call-overload]


def test_offsets_are_required() -> None:
    with pytest.raises(TypeError, match="cu_seqlens_k"):
        varlen_attention(Q, K, V, cu_seqlens_q=offsets(2, 4))  # type: ignore[call-arg]


# Regressions


def test_offsets_that_a_compiled_call_cannot_check_are_checked_by_the_kernel() -> None:
    """Under torch.compile values are not read; a negative length once reached torch's flash op, which divides by it."""
    query = torch.randn(9, 2, 8)

    def unsorted_offsets(cu_seqlens: torch.Tensor) -> torch.Tensor:
        return varlen_attention(
            query, query, query, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, max_seqlen_q=7, max_seqlen_k=7
        )

    compiled = torch.compile(unsorted_offsets, fullgraph=True, backend="aot_eager")
    for offsets in ([0, 5, 3], [0, 5, 30]):
        with pytest.raises(ValueError, match="cu_seqlens: expected to rise"):
            compiled(torch.tensor(offsets))


def test_gradients_summed_over_many_sequences_are_not_rounded_one_by_one() -> None:
    """With 400 sequences a bf16 sum of sink gradients was 7 % off."""
    torch.manual_seed(0)
    sequences, heads = 400, 2
    query = torch.randn(2 * sequences, heads, 8, dtype=torch.bfloat16)
    offsets = torch.arange(0, 2 * sequences + 1, 2)
    grads = {}
    for backend in ("eager", "reference"):
        sink = torch.full((heads,), 1.0, dtype=torch.bfloat16, requires_grad=True)
        options = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "sink": sink, "backend": backend}
        out = varlen_attention(query, query, query, **options)
        (grads[backend],) = torch.autograd.grad(out.float().square().sum(), sink)
    wide = torch.full((heads,), 1.0, dtype=torch.float64, requires_grad=True)
    exact = varlen_attention(
        *(query.double(),) * 3, cu_seqlens_q=offsets, cu_seqlens_k=offsets, sink=wide, backend="reference"
    )
    (expected,) = torch.autograd.grad(exact.square().sum(), wide)
    for backend, grad in grads.items():
        torch.testing.assert_close(grad.double(), expected, rtol=1e-2, atol=0, msg=backend)
