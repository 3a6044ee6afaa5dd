"""attention() with a `Mask`: what it computes, on every path, and what it reads and keeps."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from random import Random
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

sys.path.insert(0, str(Path(__file__).parents[1] / "masks"))

from named_masks import CASES, HEADS, Call, dense_of
from random_masks import BATCH, random_mask, whole
from random_masks import HEADS as RANDOM_HEADS

from stream_attention import attention, explain, masks
from stream_attention.base.problem import Window
from stream_attention.masks import Mask, lowering
from stream_attention_tools.testing import Case, check_case, peak_bytes
from stream_attention_tools.testing.inputs import INTERVALS

LENGTHS = [Call(1, 1), Call(100, 129), Call(129, 100), Call(300, 300)]


def qkv(batch: int, q_len: int, k_len: int, heads: int = HEADS, dim: int = 16) -> list[Tensor]:
    generator = torch.Generator().manual_seed(q_len)
    shapes = (batch, q_len, heads, dim), (batch, k_len, heads // 2, dim), (batch, k_len, heads // 2, dim)
    return [torch.randn(shape, generator=generator) for shape in shapes]


@pytest.mark.parametrize("call", LENGTHS, ids=str)
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.built is not None])
def test_a_named_mask_computes_what_its_dense_form_does(name: str, call: Call) -> None:
    case = CASES[name]
    if case.square and call.q_len != call.k_len:
        pytest.skip("means something for Tq = Tk alone")
    assert case.built is not None
    mask, dense = case.built(call), dense_of(case, call)
    inputs = qkv(case.batch or 2, *call)
    out, lse = attention(*inputs, mask=mask, return_lse=True)
    exact, exact_lse = attention(*(t.double() for t in inputs), mask=dense, return_lse=True, backend="reference")
    torch.testing.assert_close(out.double(), exact, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse, exact_lse.float(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("intervals", INTERVALS)
@pytest.mark.parametrize("seed", range(8))
def test_intervals_with_every_modifier_and_gradient(intervals: Any, seed: int) -> None:
    rng = Random(seed)
    heads = rng.choice((1, 2))
    case = Case(
        B=rng.choice((1, 2)), Tq=rng.choice((1, 33, 130)), Tk=rng.choice((1, 50, 150)), Hq=heads * rng.choice((1, 3)),
        Hkv=heads, seed=seed, intervals=intervals, causal=rng.random() < 0.4,
        window=rng.choice((None, (20, 3), (-1, 9))), sink=rng.random() < 0.3, softcap=rng.choice((0.0, 2.0)),
        alibi=rng.choice((None, "H")), dropout_p=rng.choice((0.0, 0.3)), lse_grad=rng.random() < 0.5,
    )  # fmt: skip
    if rng.random() < 0.3:
        case = Case(**case.given() | {"mask": (1, 1, case.Tq, case.Tk), "bias": (1, 1, case.Tq, case.Tk)})
    check_case(case, "eager")


@pytest.mark.parametrize("seed", range(60))
def test_random_masks_of_all_parts(seed: int) -> None:
    rng = Random(seed)
    q_len, k_len = rng.choice((1, 9, 40)), rng.choice((1, 12, 33))
    mask = random_mask(rng, q_len, k_len)
    inputs = qkv(BATCH, q_len, k_len, 2 * RANDOM_HEADS // 2 * 2)[:3]
    inputs = [t[:, :, :RANDOM_HEADS] for t in inputs]
    causal = rng.random() < 0.3
    out = attention(*inputs, mask=mask, causal=causal)
    dense = attention(*inputs, mask=whole(mask, q_len, k_len), causal=causal, backend="reference")
    torch.testing.assert_close(out, dense, atol=1e-5, rtol=1e-5)
    same = attention(*inputs, mask=mask, causal=causal, backend="reference")
    torch.testing.assert_close(same, dense, atol=0.0, rtol=0.0)


def test_causal_and_windows_stay_windows() -> None:
    """So that any backend takes them, and the fastest is as fast as without a mask."""
    inputs = qkv(1, 64, 64)
    plain = attention(*inputs, causal=True, window=(7, 0))
    for mask, options in (
        (masks.causal() & masks.window(7, 0), {}),
        (masks.causal(), {"window": (7, 5)}),
        (masks.window(7, 3), {"causal": True}),
    ):
        assert torch.equal(attention(*inputs, mask=mask, **options), plain)
        assert not explain(*inputs, mask=mask, **options).problem.mask


def test_what_nobody_sees_may_be_nan() -> None:
    mask = masks.documents(torch.tensor([0] * 20 + [1] * 10 + [2] * 10), torch.tensor([0] * 15 + [3] * 20 + [2] * 9))
    inputs = qkv(1, 40, 44)
    clean = [t.clone().requires_grad_() for t in inputs]
    dirty = [t.clone() for t in inputs]
    dirty[0][:, 20:30], dirty[1][:, 15:35], dirty[2][:, 15:35] = torch.nan, torch.nan, torch.inf
    dirty = [t.requires_grad_() for t in dirty]
    outs = [attention(*its, mask=mask) for its in (clean, dirty)]
    assert torch.equal(*outs) and not outs[0][:, 20:30].any()
    grads = [torch.autograd.grad(out, its, torch.ones_like(out)) for out, its in zip(outs, (clean, dirty), strict=True)]
    for one, other in zip(*grads, strict=True):
        assert torch.equal(one, other)


def test_layers_share_what_is_made_of_a_mask_and_it_goes_with_the_mask() -> None:
    inputs = qkv(1, 64, 64)
    mask = masks.documents(lengths=[10, 54])
    lowering._kept.clear()
    attention(*inputs, mask=mask)
    (made,) = lowering._kept[mask].values()
    attention(*inputs, mask=mask)
    assert [*lowering._kept[mask].values()] == [made]
    attention(*inputs, mask=mask, causal=True)
    assert len(lowering._kept[mask]) == 2
    gone = ref(mask)
    del mask, made
    gc.collect()
    assert gone() is None and not lowering._kept


def test_masks_made_in_inference_mode_train_later() -> None:
    inputs = [t.requires_grad_() for t in qkv(1, 30, 30)]
    mask = masks.documents(lengths=[10, 20])
    with torch.inference_mode():
        attention(*(t.detach() for t in inputs), mask=mask)
    attention(*inputs, mask=mask).sum().backward()
    assert inputs[0].grad is not None


def test_memory_is_that_of_the_lengths() -> None:
    """A dense mask of 8k x 8k would be 64 MB; scores more."""
    inputs = qkv(1, 8192, 8192, heads=2)
    mask = masks.causal() & masks.documents(lengths=[700] * 11 + [492])
    lowering._kept.clear()
    assert peak_bytes(lambda: attention(*inputs, mask=mask)) < 24 << 20


@pytest.mark.parametrize("kind", ["documents", "tree", "padding"])
def test_it_compiles_whole_and_trains(kind: str) -> None:
    made = {
        "documents": masks.causal() & masks.documents(lengths=[20, 30, 14]),
        "tree": masks.prefix_tree([-1, 0, 0, 1], [16, 16, 16, 16]),
        "padding": masks.padding([10, 64]),
    }[kind]
    inputs = [t.requires_grad_() for t in qkv(2, 64, 64)]
    step = torch.compile(lambda q, k, v: attention(q, k, v, mask=made), backend="aot_eager", fullgraph=True)
    out, compiled = attention(*inputs, mask=made), step(*inputs)
    torch.testing.assert_close(compiled, out)
    grads = [torch.autograd.grad(one.sum(), inputs) for one in (out, compiled)]
    torch.testing.assert_close(*grads)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another length": (
        {"mask": masks.documents(lengths=[10, 20])},
        "key_start: expected Tq=64, as the call has; got 30",
    ),
    "another batch": ({"mask": masks.padding([3, 4, 5])}, "key_end: expected B=2"),
    "a huge table of blocks": (
        {"mask": Mask(blocks=masks.Blocks(torch.ones(1, 1, 8, 8, dtype=torch.bool), 1 << 14, 1 << 14))},
        "blocks: expected",
    ),
    "a constructor that was not called": (
        {"mask": masks.causal},
        "mask: expected a torch.Tensor; got function. A function",
    ),
    "in fp8": ({"mask": masks.documents(lengths=[64]), "precision": "fp8"}, "FP8"),
    "a window that is no window": ({"mask": masks.causal(), "window": 3}, "window: expected a tuple of two ints"),
    "causal that is no bool": ({"mask": masks.causal(), "causal": 1}, "causal: expected a bool"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_refused_in_words(name: str) -> None:
    options, words = REFUSED[name]
    inputs = qkv(2, 64, 64, dim=64) if "precision" in options else qkv(2, 64, 64)
    with pytest.raises((ValueError, TypeError), match=words):
        attention(*(t.half() if "precision" in options else t for t in inputs), **options)


def test_where_a_mask_is_not_taken_its_dense_form_is_named() -> None:
    from stream_attention import attention_mass, varlen_attention

    query, key, _ = qkv(1, 8, 8)
    with pytest.raises(TypeError, match=r"mask: expected a torch.Tensor; got Mask\. .*mask\.as_dense"):
        attention_mass(query, key, mask=masks.causal())  # type: ignore[arg-type]
    offsets = torch.tensor([0, 8])
    packed: Any = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "mask": masks.causal()}
    with pytest.raises((TypeError, ValueError), match="mask"):
        varlen_attention(query[0], key[0], key[0], **packed)


def test_a_buffer_that_changes_is_read_again() -> None:
    """As a static buffer of lengths does, of which the mask is a view."""
    inputs, lengths = qkv(1, 20, 20), torch.tensor([10], dtype=torch.int32)
    mask = masks.padding(lengths)
    attention(*inputs, mask=mask)
    lengths.fill_(5)
    expected = attention(*inputs, mask=mask.as_dense(q_len=20, k_len=20))
    torch.testing.assert_close(attention(*inputs, mask=mask), expected)


def test_what_fake_tensors_make_of_a_mask_is_not_kept() -> None:
    inputs, mask = qkv(1, 20, 20), Mask(right=-1)
    with FakeTensorMode() as mode:
        attention(*map(mode.from_tensor, inputs), mask=mask)
    assert type(attention(*inputs, mask=mask)) is Tensor


def test_what_is_kept_of_a_mask_is_bounded() -> None:
    mask = masks.padding([7])
    for length in range(1, 30):
        attention(*qkv(1, length, length), mask=mask)
    assert len(lowering._kept[mask]) == lowering._MOST_KEPT
    table = masks.blocks(torch.ones(1, 1, 2, 2, dtype=torch.bool), 8)
    attention(*qkv(1, 16, 16), mask=table)
    assert table not in lowering._kept, "a table is expanded, which may be large"


def test_labels_that_intervals_cannot_tell_are_refused() -> None:
    most = 2**31 - 1
    labels, start = torch.tensor([most, 3], dtype=torch.int32), torch.zeros(1, 1, 2, dtype=torch.int32)
    with pytest.raises(ValueError, match="query_label: expected labels below"):
        attention(*qkv(1, 2, 2), mask=masks.intervals(query_start=start, query_label=labels))
    ids = torch.tensor([2**40, 2**41])
    with pytest.raises(TypeError, match=r"query_label: expected labels of dtype torch.int32; .*documents\(ids\)"):
        masks.intervals(query_start=ids, query_end=ids + 1, query_label=ids)


@pytest.mark.parametrize("seed", range(20))
def test_explain_counts_the_tiles_that_kernels_walk(seed: int) -> None:
    rng = Random(seed)
    q_len, k_len = rng.choice((1, 20, 65)), rng.choice((1, 33, 100))
    mask = random_mask(rng, q_len, k_len, rng.choice((("keys",), ("queries",), ("labels", "keys"), ("band", "labels"))))
    made = lowering.lowered(mask, q_len, k_len, torch.device("cpu"), Window())
    if made.query_bounds is None:
        return
    some, is_whole = lowering.walked(made, k_len, 16, 32)
    dense = mask.as_dense(q_len=q_len, k_len=k_len).expand(*some.shape[:2], -1, -1)
    for m in range(some.shape[2]):
        for n in range(some.shape[3]):
            tile = dense[:, :, m * 16 : m * 16 + 16, n * 32 : n * 32 + 32].flatten(2)
            assert not (tile.any(2) & ~some[:, :, m, n]).any()
            assert not (~tile.all(2) & is_whole[:, :, m, n]).any()
