"""Keys may be split anywhere: the states of the pieces merge into the state of the whole."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

pytest.importorskip("hypothesis")

from hypothesis import given, settings
from hypothesis import strategies as st
from shard_state import forward_state

from stream_attention import attention, merge_states, varlen_attention
from stream_attention.backends.reference import attention as reference
from stream_attention.base.problem import Inputs, Positions

SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=torch.float64)


def qkv(
    batch: int = 2, q_len: int = 5, k_len: int = 11, kv_heads: int = 2, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(batch + 10 * q_len + 100 * k_len)
    shapes = (batch, q_len, 4, 8), (batch, k_len, kv_heads, 8), (batch, k_len, kv_heads, 6)
    query, key, value = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
    return query, key, value


def piece(inputs: Inputs, keys: slice, q_start: int, **options: Any) -> tuple[Tensor, Tensor]:
    """The state over some keys of a call, each standing where it stands in the whole."""
    start, _, stride = keys.indices(inputs.key.shape[1])
    part = inputs._replace(
        key=inputs.key[:, keys],
        value=inputs.value[:, keys],
        mask=None if inputs.mask is None else inputs.mask[..., keys],
        bias=None if inputs.bias is None else inputs.bias[..., keys],
    )
    positions = Positions(q_start, 1, start, stride, q_base=q_start)
    defaults = {"causal": False, "window": (-1, -1), "softcap": 0.0, "scale": 0.3, "dropout_p": 0.0}
    return forward_state(part, positions=positions, q_len=0, k_len=0, deterministic=False, **{**defaults, **options})


def assert_same(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-12, equal_nan=False)


# Semantics


def test_it_takes_sequences_or_stacked_tensors() -> None:
    query, key, value = qkv()
    parts = [attention(query, key[:, s], value[:, s], return_lse=True) for s in (slice(0, 4), slice(4, 11))]
    outs, lses = zip(*parts, strict=True)
    assert_same(merge_states(torch.stack(outs), torch.stack(lses)), merge_states(list(outs), lses))


def test_the_inputs_are_left_alone() -> None:
    query, key, value = qkv()
    states = [attention(query, key[:, s], value[:, s], return_lse=True) for s in (slice(0, 4), slice(4, 11))]
    copies = [(out.clone(), lse.clone()) for out, lse in states]
    merge_states(*zip(*states, strict=True))
    assert all(
        torch.equal(a, b) for one, copy in zip(states, copies, strict=True) for a, b in zip(one, copy, strict=True)
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_result_has_the_dtypes_of_attention(dtype: torch.dtype) -> None:
    query, key, value = qkv(dtype=dtype)
    whole = attention(query, key, value, return_lse=True)
    parts = [attention(query, key[:, s], value[:, s], return_lse=True) for s in (slice(0, 4), slice(4, 11))]
    for merged, expected in zip(merge_states(*zip(*parts, strict=True)), whole, strict=True):
        assert merged.dtype is expected.dtype and merged.shape == expected.shape


# Agreement with the reference


@given(
    cuts=st.lists(st.integers(0, 11), max_size=4),
    q_len=st.integers(1, 13),
    kv_heads=st.sampled_from([1, 2, 4]),
    causal=st.booleans(),
    left=st.sampled_from([-1, 0, 3]),
    dropout_p=st.sampled_from([0.0, 0.4]),
    with_slopes=st.booleans(),
    with_mask=st.booleans(),
    with_bias=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_keys_split_anywhere_merge_into_the_whole(
    cuts: list[int],
    q_len: int,
    kv_heads: int,
    causal: bool,
    left: int,
    dropout_p: float,
    with_slopes: bool,
    with_mask: bool,
    with_bias: bool,
) -> None:
    query, key, value = qkv(q_len=q_len, kv_heads=kv_heads)
    generator = torch.Generator().manual_seed(q_len)
    mask = torch.rand(2, 1, q_len, 11, generator=generator) > 0.3 if with_mask else None
    bias = torch.randn(1, 4, q_len, 11, generator=generator, dtype=torch.float64) if with_bias else None
    slopes = SLOPES if with_slopes else None
    seed = torch.tensor([5, 6]) if dropout_p else None
    expected = reference.attention(
        query,
        key,
        value,
        causal=causal,
        window=(left, -1),
        mask=mask,
        bias=bias,
        alibi_slopes=slopes,
        softcap=4.0,
        scale=0.3,
        dropout_p=dropout_p,
        seed=seed,
    )
    inputs = Inputs(query, key, value, mask, bias, None if slopes is None else slopes[None], seed=seed)
    edges = [0, *sorted(cuts), 11]
    states = [
        piece(
            inputs,
            slice(start, stop),
            11 - q_len,
            causal=causal,
            window=(left, -1),
            softcap=4.0,
            dropout_p=dropout_p,
        )
        for start, stop in pairwise(edges)
    ]
    assert_same(merge_states(*zip(*states, strict=True)), expected)


@pytest.mark.parametrize("ways", [2, 3])
def test_striped_keys_merge_into_the_whole(ways: int) -> None:
    query, key, value = qkv(q_len=7)
    inputs = Inputs(query, key, value, alibi_slopes=SLOPES[None])
    states = [piece(inputs, slice(first, None, ways), 4, causal=True) for first in range(ways)]
    expected = reference.attention(query, key, value, causal=True, alibi_slopes=SLOPES, scale=0.3)
    assert_same(merge_states(*zip(*states, strict=True)), expected)


def test_packed_sequences_split_and_merge() -> None:
    query, key, value = (t.flatten(0, 1) for t in qkv())
    cu_q, cu_k = torch.tensor([0, 3, 3, 10]), torch.tensor([0, 4, 9, 22])
    heads = torch.tensor([2, 1, 7])  # how many keys of each sequence go into the first piece
    first = torch.cat([torch.arange(s, s + n) for s, n in zip(cu_k[:-1].tolist(), heads.tolist(), strict=True)])
    second = torch.tensor([row for row in range(22) if row not in first.tolist()])
    states = []
    for rows, lengths in ((first, heads), (second, cu_k.diff() - heads)):
        cu_part = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        states.append(
            varlen_attention(query, key[rows], value[rows], cu_seqlens_q=cu_q, cu_seqlens_k=cu_part, return_lse=True)
        )
    expected = reference.varlen_attention(query, key, value, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    assert_same(merge_states(*zip(*states, strict=True)), expected)


def test_partial_states_of_bf16_inputs_are_fp32_and_merge_with_the_error_of_one_rounding() -> None:
    query, key, value = qkv(q_len=16, k_len=11, dtype=torch.bfloat16)
    inputs = Inputs(query, key, value)
    states = [piece(inputs, slice(j, j + 1), 0) for j in range(11)]
    assert all(out.dtype is torch.float32 and lse.dtype is torch.float32 for out, lse in states)
    out, lse = merge_states(*zip(*states, strict=True))
    exact, exact_lse = reference.attention(query, key, value, scale=0.3)
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)  # bf16 partials would be off by 4e-3
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-5)


# Gradients


def test_gradients_flow_through_merged_attention() -> None:
    query, key, value = (t.requires_grad_() for t in qkv(batch=1, q_len=3, k_len=5))

    def split(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        parts = [attention(query, key[:, s], value[:, s], return_lse=True) for s in (slice(0, 2), slice(2, 5))]
        return merge_states(*zip(*parts, strict=True))

    weight = torch.randn(1, 3, 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    grads = []
    for compute in (split, reference.attention):
        out, lse = compute(query, key, value)
        grads.append(torch.autograd.grad((out * weight).sum() + lse.square().sum(), (query, key, value)))
    assert_same(*grads)


def test_gradcheck() -> None:
    query, key, value = qkv(batch=1, q_len=2, k_len=4)
    states = [attention(query, key[:, s], value[:, s], return_lse=True) for s in (slice(0, 2), slice(2, 4))]
    leaves = [t.requires_grad_() for one in states for t in one]
    assert gradcheck(lambda *ts: merge_states(ts[::2], ts[1::2]), leaves)


# Refusals

OUT, LSE = torch.zeros(2, 3, 4, 5), torch.zeros(2, 4, 3)


@pytest.mark.parametrize(
    ("outs", "lses", "error", "words"),
    [
        pytest.param([], [], ValueError, "at least one; got 0 and 0", id="nothing"),
        pytest.param([OUT, OUT], [LSE], ValueError, "as many outs as lses, at least one; got 2 and 1", id="counts"),
        pytest.param([OUT, OUT[:, :2]], [LSE, LSE[..., :2]], ValueError, r"outs\[1\].*the same for all", id="lengths"),
        pytest.param([OUT], [LSE.mT], ValueError, r"lses\[0\]: expected shape \[2, 4, 3\]", id="lse transposed"),
        pytest.param([OUT[0, 0]], [LSE[0, 0]], ValueError, r"outs\[0\]: expected \[B, Tq, Hq, Dv\]", id="rank"),
        pytest.param([OUT.long()], [LSE], TypeError, r"outs\[0\]: expected a floating dtype", id="integer out"),
        pytest.param([OUT], [LSE.bool()], TypeError, r"lses\[0\]: expected a floating dtype", id="boolean lse"),
        pytest.param([OUT, 1.0], [LSE, LSE], TypeError, r"outs\[1\]: expected a torch.Tensor; got float", id="a float"),
        pytest.param([OUT, OUT.to("meta")], [LSE, LSE], ValueError, r"outs\[1\].*device cpu; got meta", id="device"),
    ],
)
def test_refusals(outs: Any, lses: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        merge_states(outs, lses)
