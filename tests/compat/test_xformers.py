"""xformers' memory_efficient_attention, by its materialised biases, and these by the pictures of its documentation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.compat.eager import attend, randn
from torch import Tensor
from torch.testing import assert_close

from stream_attention.compat import attn_bias as biases
from stream_attention.compat.xformers import (
    memory_efficient_attention,
    memory_efficient_attention_forward,
    memory_efficient_attention_forward_requires_grad,
    memory_efficient_attention_partial,
    merge_attentions,
)

TABLE = torch.tensor([[2, 0], [1, 3]], dtype=torch.int32)


def made(name: str, *arguments: Any, by: str = "from_seqlens", **more: Any) -> Any:
    return getattr(getattr(biases, name), by)(*arguments, **more)


PACKS: dict[str, tuple[Any, int, int]] = {
    # bias, rows of queries and of keys
    "blocks": (made("BlockDiagonalMask", [3, 4], [5, 6]), 7, 11),
    "causal blocks": (made("BlockDiagonalMask", [3, 4]).make_causal(), 7, 7),
    "causal blocks, bottom-right": (made("BlockDiagonalMask", [3, 4], [5, 6]).make_causal_from_bottomright(), 7, 11),
    "local blocks": (made("BlockDiagonalMask", [3, 4]).make_local_attention(2), 7, 7),
    "local blocks, bottom-right": (
        made("BlockDiagonalMask", [3, 4], [5, 6]).make_local_attention_from_bottomright(2),
        7,
        11,
    ),
    "padded keys": (made("BlockDiagonalPaddedKeysMask", [3, 4], 6, [5, 2]), 7, 12),
    "causal padded keys": (made("BlockDiagonalCausalWithOffsetPaddedKeysMask", [1, 2], 6, [5, 2]), 3, 12),
    "local padded keys": (made("BlockDiagonalPaddedKeysMask", [3, 4], 6, [5, 6]).make_local_attention(2, 1), 7, 12),
    "local causal padded keys": (
        made("BlockDiagonalCausalLocalAttentionPaddedKeysMask", [3, 4], 6, [5, 6], 2, by="from_seqlens_local"),
        7,
        12,
    ),
    "padding that is no multiple of a page": (made("BlockDiagonalPaddedKeysMask", [1, 1], 300, [299, 7]), 2, 600),
    "gaps between keys": (made("BlockDiagonalGappyKeysMask", [3, 4], [1, 7, 12], [4, 5]), 7, 12),
    "causal, gaps": (made("BlockDiagonalCausalWithOffsetGappyKeysMask", [3, 4], [1, 7, 12], [4, 5]), 7, 12),
    "gaps between keys, in pages": (
        made("BlockDiagonalGappyKeysMask", [3, 4], [2, 9, 16], [5, 6]).make_paged(
            TABLE, 4, 8, biases.PagedBlockDiagonalGappyKeysMask
        ),
        7,
        16,
    ),
    "pages": (made("PagedBlockDiagonalPaddedKeysMask", [3, 4], [5, 8], TABLE, 4), 7, 16),
    "causal pages": (made("PagedBlockDiagonalCausalWithOffsetPaddedKeysMask", [3, 4], [5, 8], TABLE, 4), 7, 16),
    "pages with gaps": (made("PagedBlockDiagonalGappyKeysMask", [3, 4], [2, 1], [5, 6], TABLE, 4), 7, 16),
    "causal pages with gaps": (
        made("PagedBlockDiagonalCausalWithOffsetGappyKeysMask", [3, 4], [2, 1], [5, 6], TABLE, 4),
        7,
        16,
    ),
}
DENSE = {
    "none": None,
    "causal": biases.LowerTriangularMask(),
    "causal, bottom-right": biases.LowerTriangularFromBottomRightMask(),
    "local causal": biases.LowerTriangularFromBottomRightMask().make_local_attention(3),
    "local": biases.LocalAttentionFromBottomRightMask(2, 1),
}


# What a bias is: by hand


def shown(bias: Any, q_len: int, k_len: int) -> list[str]:
    return ["".join("#" if seen else "." for seen in row) for row in bias.materialize((q_len, k_len)) == 0]


def test_masks_as_the_documentation_draws_them() -> None:
    assert shown(biases.LowerTriangularMask(), 2, 3) == ["#..", "##."]
    assert shown(biases.LowerTriangularFromBottomRightMask(), 2, 3) == ["##.", "###"]
    assert shown(DENSE["local causal"], 3, 5) == ["###..", ".###.", "..###"]
    assert shown(biases.LocalAttentionFromBottomRightMask(1, 2), 4, 4) == ["###.", "####", ".###", "..##"]
    assert shown(biases.LocalAttentionFromBottomRightMask(1, 2), 4, 5) == ["####.", ".####", "..###", "...##"]
    assert shown(made("BlockDiagonalMask", [1, 2], [2, 1]), 3, 3) == ["##.", "..#", "..#"]
    assert shown(made("BlockDiagonalMask", [2], [3]).make_causal(), 2, 3) == ["#..", "##."]
    assert shown(PACKS["causal padded keys"][0], 3, 12) == ["#####.......", "......#.....", "......##...."]
    assert shown(PACKS["gaps between keys"][0], 7, 12)[2:4] == [".####.......", ".......#####"]
    assert shown(made("PagedBlockDiagonalPaddedKeysMask", [1], [3], TABLE[:1], 2), 1, 6) == ["#...##"]


def test_a_bias_is_expanded_to_the_shape_that_is_asked_for() -> None:
    bias = biases.LowerTriangularMask().materialize((2, 3, 4, 5), torch.float16)
    assert bias.shape == (2, 3, 4, 5) and bias.dtype is torch.float16 and bias[1, 2, 0, 1] == -torch.inf
    added = biases.LowerTriangularMask().add_bias(torch.ones(4, 5)).materialize((4, 5))
    assert added[0, 0] == 1 and added[0, 1] == -torch.inf


def test_tensors_are_packed_and_split() -> None:
    parts = [randn(1, 3, 2, 4), randn(2, 4, 2, 4)]
    mask, pack = biases.BlockDiagonalMask.from_tensor_list(parts)
    assert pack.shape == (1, 11, 2, 4) and mask.q_seqinfo.seqstart.tolist() == [0, 3, 7, 11]
    assert all(torch.equal(a, b) for a, b in zip(mask.split(pack), parts, strict=True))
    keys = [randn(1, 5, 2, 4), randn(2, 6, 2, 4)]
    mask, *packs = biases.BlockDiagonalMask.from_tensor_lists_qkv(parts, keys, keys)
    assert [x.shape[1] for x in packs] == [11, 17, 17]
    assert all(torch.equal(a, b) for a, b in zip(mask.split_kv(packs[1]), keys, strict=True))
    assert mask.to("meta").k_seqinfo.seqstart.is_meta


# The call


@pytest.mark.parametrize("lengths", [(9, 9), (5, 9), (9, 5)], ids=str)
@pytest.mark.parametrize("name", DENSE)
def test_a_dense_call_and_its_gradients(name: str, lengths: tuple[int, int]) -> None:
    bias, (q_len, k_len) = DENSE[name], lengths
    tensors = [randn(2, q_len, 4, 8), randn(2, k_len, 4, 8, seed=1), randn(2, k_len, 4, 16, seed=2)]
    ours, truth = ([x.clone().requires_grad_() for x in tensors] for _ in range(2))
    added = None if bias is None else bias.materialize((q_len, k_len), torch.float64)
    out, wanted = memory_efficient_attention(*ours, bias, scale=0.3), attend(*truth, scale=0.3, bias=added)[0]
    assert_close(out, wanted)
    out.square().sum().backward()
    wanted.square().sum().backward()
    for one, other in zip(ours, truth, strict=True):
        assert_close(one.grad, other.grad)


@pytest.mark.parametrize("k_len", [9, 5, 12])
def test_a_tensor_is_added_alone_and_to_a_causal_mask(k_len: int) -> None:
    q, k, v = randn(2, 9, 4, 8), randn(2, k_len, 4, 8, seed=1), randn(2, k_len, 4, 8, seed=2)
    bias = randn(2, 4, 9, k_len, seed=3).requires_grad_()
    assert_close(memory_efficient_attention(q, k, v, bias), attend(q, k, v, bias=bias)[0])
    causal = biases.LowerTriangularMask().add_bias(bias)
    wanted = attend(q, k, v, bias=causal.materialize((2, 4, 9, k_len), torch.float64))[0]
    out = memory_efficient_attention(q, k, v, causal)
    assert_close(out, wanted)
    assert_close(*(torch.autograd.grad(x.square().sum(), bias)[0] for x in (out, wanted)))


@pytest.mark.parametrize("name", PACKS)
def test_a_pack(name: str) -> None:
    bias, q_len, k_len = PACKS[name]
    q, k, v = randn(1, q_len, 4, 8), randn(1, k_len, 4, 8, seed=1), randn(1, k_len, 4, 8, seed=2)
    wanted, lse = attend(q, k, v, bias=bias.materialize((q_len, k_len), torch.float64))
    assert_close(memory_efficient_attention(q, k, v, bias), wanted)
    out, found = memory_efficient_attention_forward_requires_grad(q, k, v, bias)
    assert_close(out, wanted)
    assert_close(found.double(), lse)


def test_a_pack_has_gradients() -> None:
    bias, q_len, k_len = PACKS["causal blocks, bottom-right"]
    tensors = [randn(1, q_len, 4, 8), randn(1, k_len, 4, 8, seed=1), randn(1, k_len, 4, 8, seed=2)]
    ours, truth = ([x.clone().requires_grad_() for x in tensors] for _ in range(2))
    memory_efficient_attention(*ours, bias).square().sum().backward()
    attend(*truth, bias=bias.materialize((q_len, k_len), torch.float64))[0].square().sum().backward()
    for one, other in zip(ours, truth, strict=True):
        assert_close(one.grad, other.grad)


@pytest.mark.parametrize("expanded", [True, False])
def test_groups_of_heads(expanded: bool) -> None:
    q, k = randn(2, 5, 2, 3, 8), randn(2, 9, 2, 1, 8, seed=1).expand(-1, -1, -1, 3, -1)
    k = k if expanded else k.contiguous()
    out, lse = memory_efficient_attention_forward_requires_grad(q, k, k)
    wanted, its_lse = attend(q.flatten(2, 3), *(x.flatten(2, 3) for x in (k, k)))
    assert_close(out, wanted.unflatten(2, (2, 3)))
    assert_close(lse.double(), its_lse.unflatten(1, (2, 3)))
    bias = randn(2, 2, 3, 5, 9)
    wanted, _ = attend(q.flatten(2, 3), *(x.flatten(2, 3) for x in (k, k)), bias=bias.flatten(1, 2))
    assert_close(memory_efficient_attention(q, k, k, bias), wanted.unflatten(2, (2, 3)))


def test_tensors_without_heads() -> None:
    q, k, bias = randn(6, 5, 8), randn(6, 9, 8, seed=1), randn(6, 5, 9)
    wanted = attend(*(x.unsqueeze(2) for x in (q, k, k)), bias=bias.unsqueeze(1))[0].squeeze(2)
    assert_close(memory_efficient_attention(q, k, k, bias), wanted)
    causal = biases.LowerTriangularMask()
    wanted = attend(*(x.unsqueeze(2) for x in (q, k, k)), bias=causal.materialize((5, 9), torch.float64))[0].squeeze(2)
    assert_close(memory_efficient_attention(q, k, k, causal), wanted)


@pytest.mark.parametrize("shape", [(2, 5, 4, 8), (2, 5, 2, 2, 8)], ids=str)
@pytest.mark.parametrize("stacked", [True, False])
def test_parts_are_merged(shape: tuple[int, ...], stacked: bool) -> None:
    q, k = randn(*shape), randn(2, 12, *shape[2:], seed=1)
    parts = [memory_efficient_attention_partial(q, x, x) for x in k.split(4, 1)]
    outs, lses = ([part[n] for part in parts] for n in (0, 1))
    out, lse = merge_attentions(*((torch.stack(outs), torch.stack(lses)) if stacked else (outs, lses)))
    wanted, its_lse = memory_efficient_attention_forward_requires_grad(q, k, k)
    assert_close(out, wanted)
    assert_close(lse, its_lse)
    assert merge_attentions(outs, lses, write_lse=False, output_dtype=torch.float16)[1] is None
    half = [x.half() for x in (q, k)]
    assert memory_efficient_attention_partial(half[0], half[1], half[1])[0].dtype is torch.float32


def test_the_forward_has_no_gradient() -> None:
    q = randn(2, 5, 4, 8).requires_grad_()
    assert not memory_efficient_attention_forward(q, q, q).requires_grad


# Refusals

Q = torch.zeros(2, 5, 4, 8)
PACK: Tensor = torch.zeros(1, 7, 4, 8)
BLOCKS = PACKS["causal blocks"][0]
REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "dims": (lambda: memory_efficient_attention(Q, Q[0], Q), ValueError, r"expected \[B, T, H, D\], \[B, T, D\] or"),
    "heads": (lambda: memory_efficient_attention(Q, Q[:, :, :2], Q[:, :, :2]), ValueError, "as many heads in each"),
    "dtypes": (lambda: memory_efficient_attention(Q, Q.half(), Q), ValueError, "^key: expected the query's dtype"),
    "lengths": (lambda: memory_efficient_attention(Q, Q, Q[:, :2]), ValueError, "^value: expected the key's length"),
    "p": (lambda: memory_efficient_attention(Q, Q, Q, None, 2.0), ValueError, "^dropout_p: expected a probability"),
    "bias's shape": (
        lambda: memory_efficient_attention(Q, Q, Q, torch.zeros(5, 5)),
        ValueError,
        r"^attn_bias: expected shape \[B, H, Tq, Tk\] = \[2, 4, 5, 5\]; got \[5, 5\]",
    ),
    "bias's type": (lambda: memory_efficient_attention(Q, Q, Q, "causal"), ValueError, "^attn_bias: expected a tensor"),
    "bias without heads": (
        lambda: memory_efficient_attention(Q[0], Q[0], Q[0], biases.LowerTriangularFromBottomRightMask()),
        ValueError,
        "^attn_bias: expected None, a tensor or a LowerTriangularMask",
    ),
    "batch": (lambda: memory_efficient_attention(Q, Q, Q, BLOCKS), ValueError, "expected B = 1 with a BlockDiagonal"),
    "rows": (
        lambda: memory_efficient_attention(PACK[:, :6], PACK, PACK, BLOCKS),
        ValueError,
        "^query: expected 7 rows",
    ),
    "keys": (lambda: memory_efficient_attention(PACK, PACK[:, :6], PACK, BLOCKS), ValueError, "^key: expected 7 rows"),
    "pages": (
        lambda: memory_efficient_attention(PACK, PACK, PACK, PACKS["pages"][0]),
        ValueError,
        "^key: expected a multiple of 4 rows",
    ),
    "op": (lambda: memory_efficient_attention(Q, Q, Q, op="flash"), NotImplementedError, "^op: expected None"),
    "output_dtype": (
        lambda: memory_efficient_attention(Q.half(), Q.half(), Q.half(), output_dtype=torch.float32),
        NotImplementedError,
        "^output_dtype: expected None or the query's torch.float16",
    ),
    "top-left of other lengths": (
        lambda: memory_efficient_attention(
            PACK, torch.zeros(1, 11, 4, 8), torch.zeros(1, 11, 4, 8), PACKS["blocks"][0].make_causal()
        ),
        NotImplementedError,
        "^attn_bias: expected as many keys as queries in every sequence",
    ),
    "dropout of pages": (
        lambda: memory_efficient_attention(PACK, *[torch.zeros(1, 16, 4, 8)] * 2, PACKS["pages"][0], 0.1),
        NotImplementedError,
        "^p: expected 0 with a PagedBlockDiagonalPaddedKeysMask",
    ),
    "gradients of pages": (
        lambda: memory_efficient_attention(
            PACK.clone().requires_grad_(), *[torch.zeros(1, 16, 4, 8)] * 2, PACKS["pages"][0]
        ),
        ValueError,
        "^query: expected requires_grad=False",
    ),
    "partial dropout": (
        lambda: memory_efficient_attention_partial(Q, Q, Q, p=0.1),
        NotImplementedError,
        "^p: expected 0",
    ),
    "window": (
        lambda: biases.LowerTriangularFromBottomRightLocalAttentionMask(0),
        ValueError,
        "^window_size: expected",
    ),
    "side": (lambda: biases.LocalAttentionFromBottomRightMask(-1, 0), ValueError, "^window_left: expected at least 0"),
    "few keys": (
        lambda: made("BlockDiagonalCausalFromBottomRightMask", [3, 4], [5, 3]),
        ValueError,
        "^kv_seqlen: expected as many keys as queries at least; got 3 and 4 queries in block 1",
    ),
    "counts": (lambda: made("BlockDiagonalMask", [3], [5, 3]), AssertionError, "^kv_seqlen: expected 1 lengths"),
    "padding": (lambda: made("BlockDiagonalPaddedKeysMask", [3], 4, [5]), ValueError, "^kv_seqlen: expected at most"),
    "starts": (lambda: made("BlockDiagonalGappyKeysMask", [3], [0], [5]), ValueError, "^kv_seqstarts: expected 2"),
    "padding and pages": (
        lambda: PACKS["gaps between keys"][0].make_paged(TABLE, 4, 7, biases.PagedBlockDiagonalGappyKeysMask),
        ValueError,
        "^notional_padding: expected a number divisible by the page size, 4; got 7",
    ),
    "places of pages": (
        lambda: PACKS["gaps between keys"][0].make_paged(TABLE, 4, 8, biases.PagedBlockDiagonalGappyKeysMask),
        AssertionError,
        "^block_tables: expected pages for each sequence's keys, here of 8 places",
    ),
    "shape": (lambda: BLOCKS.materialize((7, 8)), ValueError, "^shape: expected Tk = 7"),
    "split": (lambda: PACKS["blocks"][0].split(PACK), AssertionError, "as many queries as keys"),
    "split of another": (lambda: BLOCKS.split(PACK[:, :6]), ValueError, r"^x: expected shape \[1, 7, ...\]"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_bad_call_is_refused(name: str) -> None:
    call, error, words = REFUSED[name]
    with pytest.raises(error, match=words):
        call()
