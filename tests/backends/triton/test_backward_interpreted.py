"""The Triton backward in Triton's interpreter, on the CPU: what it computes.

Tiles are 32 queries by 16 keys for dQ and 16 by 32 for the other gradients, so that small shapes cross their edges.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import cache
from itertools import combinations, product
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip(
        "set TRITON_INTERPRET=1; make test does, in a process of its own, since triton.jit chooses at decoration",
        allow_module_level=True,
    )
pytest.importorskip("triton")

import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from random_cases import random_case, why_not
from test_forward_interpreted import (
    BF16,
    CASES,
    EVERYTHING,
    F16,
    F32,
    INF,
    NAN,
    PACKED,
    PACKED_CASES,
    SHAPE,
    TILES,
    normal,
    offsets,
    qkv,
    stated,
)

from stream_attention import attention, explain, varlen_attention
from stream_attention.backends import BY_NAME
from stream_attention.backends.reference import attention as reference
from stream_attention.backends.triton.tuning import INTERPRETER, INTERPRETER_BACKWARD, BackwardConfig, Tile
from stream_attention.base.problem import Inputs, Positions, Problem, Wanted
from stream_attention.gpu.rows import Rows, padded_row
from stream_attention.ops.shards import backward_step
from stream_attention_tools.testing import Case, check_case, make, poisoned_memory
from stream_attention_tools.testing.inputs import LAYOUTS, Layout
from stream_attention_tools.testing.inputs import stated as stated_by

forward, backward = BY_NAME["triton"].forward, BY_NAME["triton"].backward

# Infinities and what nobody has written meet in products, on the way to a result that does not hold them.
pytestmark = pytest.mark.filterwarnings(
    "ignore:divide by zero encountered in log2:RuntimeWarning", "ignore:invalid value encountered:RuntimeWarning"
)

Named = dict[str, Tensor]
Size = tuple[int, int]

EACH = replace(SHAPE, **EVERYTHING | {"B": 1, "Hq": 1, "mask": (20, 40), "bias": (20, 40)})
"""Every modifier at once, small."""


def check(case: Case) -> None:
    """The output, the LSE and every gradient agree with the fp64 reference."""
    assert case.backward
    report = check_case(case, "triton")
    assert report.worst <= 1, report


def drawn(case: Case) -> tuple[Named, dict[str, Any]]:
    """The inputs of a case: those that have a gradient, and the rest."""
    query, key, value, options = make(case)
    tensors = {"query": query, "key": key, "value": value}
    return tensors | {name: options.pop(name) for name in ("bias", "alibi_slopes", "sink") if name in options}, options


def arriving(tensors: Named) -> tuple[Tensor, Tensor]:
    """Random gradients of the output and of the LSE."""
    *lead, rows, heads, _ = tensors["query"].shape
    grad_out = normal(*lead, rows, heads, tensors["value"].shape[-1], seed=8, dtype=tensors["query"].dtype)
    return grad_out, normal(*lead, heads, rows, seed=9)


def gradients(
    tensors: Named, grad_out: Tensor | None, grad_lse: Tensor | None = None, backend: str = "triton", **options: Any
) -> Named:
    """The gradients of all tensors, by autograd; "reference" computes them in fp64 and rounds once."""
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in tensors.items()}
    op: Any = varlen_attention if "cu_seqlens_q" in options else attention
    with poisoned_memory():
        outputs = op(**leaves, **{"deterministic": False, **options}, return_lse=True, backend=backend)
        ends = [(end, grad) for end, grad in zip(outputs, (grad_out, grad_lse), strict=True) if grad is not None]
        found = torch.autograd.grad(
            [end for end, _ in ends], list(leaves.values()), [grad for _, grad in ends], materialize_grads=True
        )
    return dict(zip(leaves, found, strict=True))


@cache
def forwarded(case: Case) -> tuple[Problem, Inputs, tuple[Tensor, ...]]:
    """What a backward starts from: the problem, its inputs, what the forward saved, and gradients that arrive."""
    tensors, options = drawn(case)
    problem, inputs = stated_by(case, tensors, options)
    saved = forward(problem, inputs, INTERPRETER)
    return problem.replace(backward=True, lse_grad=True), inputs, (*saved, *arriving(tensors))


def computed(case: Case, config: BackwardConfig = INTERPRETER_BACKWARD, names: Collection[str] | None = None) -> Named:
    """What the kernels, so configured, return if gradients of these inputs are wanted; None: of all there are."""
    problem, inputs, saved = forwarded(case)
    if names is None:
        names = [name for name in Wanted._fields if getattr(inputs, name) is not None]
    with poisoned_memory():
        grads = backward(problem, inputs, config, *saved, wanted=Wanted(*(name in names for name in Wanted._fields)))
    return {name: grad for name, grad in grads._asdict().items() if grad is not None}


@cache
def expected(case: Case) -> Named:
    """The reference's gradients, in the shapes that kernels read."""
    tensors, options = drawn(case)
    inputs = forwarded(case)[1]
    grads = gradients(tensors, *arriving(tensors), "reference", **options)
    return {name: grad.view(getattr(inputs, name).shape) for name, grad in grads.items()}


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def equal(found: Named, expected: Named) -> None:
    """Bit for bit, and NaN nowhere."""
    different = [name for name in expected if not torch.equal(found[name], expected[name])]
    assert not different and found.keys() == expected.keys()
    assert all(grad.isfinite().all() for grad in found.values())


# Where it runs


def test_a_backward_is_planned_with_tiles_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    explain(*(t.requires_grad_() for t in qkv()), backend="triton")
    assert f"backend   triton: {INTERPRETER_BACKWARD._replace(bias=None)}" in capsys.readouterr().out


# What it means


def test_two_keys_and_a_sink_by_hand() -> None:
    """Odds of 1 : 3 : 4 for the keys and the sink, values 0 and 8: out = 3 = delta, and ds = p (dp - 3)."""
    one, k_odds, v_odds = torch.ones(8), torch.tensor([0.0, math.log(3.0)]), torch.tensor([0.0, 8.0])
    grad_out = torch.tensor([1.0, *[0.0] * 7]).view(1, 1, 1, 8)
    tensors = {
        "query": one.view(1, 1, 1, 8),
        "key": torch.outer(k_odds, one).view(1, 2, 1, 8),
        "value": torch.outer(v_odds, one).view(1, 2, 1, 8),
        "bias": torch.zeros(1, 2),
        "alibi_slopes": torch.zeros(1),
        "sink": torch.tensor([math.log(4.0)]),
    }
    d_scores = torch.tensor([1 / 8 * (0 - 3), 3 / 8 * (8 - 3)])
    by_hand = {
        "query": torch.full((1, 1, 1, 8), 0.125 * d_scores[1].item() * math.log(3.0)),
        "key": torch.outer(0.125 * d_scores, one).view(1, 2, 1, 8),
        "value": torch.tensor([1 / 8, 3 / 8]).view(1, 2, 1, 1) * grad_out,
        "bias": d_scores.view(1, 2),
        "alibi_slopes": -d_scores[:1],  # the first key is one position away, the second none
        "sink": torch.tensor([-4 / 8 * 3]),
    }
    close(gradients(tensors, grad_out, scale=0.125), by_hand)


# Agreement with the reference, within what is earned

MORE_CASES: dict[str, Case] = {
    "more queries than a block of padded rows": replace(SHAPE, Tq=130, Tk=20, Hq=1, causal=True),
    "a block of padded rows exactly": replace(SHAPE, Tq=128, Tk=8, Hq=1, D=8, Dv=8),
    "one query against many keys": replace(SHAPE, Tq=1, Tk=300, Hq=4, causal=True),
    "gqa, causal, mask of each head": replace(SHAPE, Hq=4, Hkv=2, Tk=24, causal=True, mask=(1, 4, 20, 24)),
    "bias in bf16 of one row": replace(SHAPE, bias=(40,), aux_dtype=BF16),
    "every modifier, one key": replace(SHAPE, **EVERYTHING | {"Tk": 1, "mask": (1, 2, 20, 1), "bias": (2, 1, 20, 1)}),
    "bias of no queries": replace(SHAPE, Tq=0, bias=(2, 1, 40)),
    "bias of no keys": replace(SHAPE, Tk=0, bias=(20, 1), sink=True),
}


@pytest.mark.parametrize("name", [*CASES, *MORE_CASES])
def test_agreement(name: str) -> None:
    check((CASES | MORE_CASES)[name])


@pytest.mark.parametrize("dtype", [F16, BF16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("name", ["gqa", "causal with a longer cache", "softcap", "values narrower than keys", "all"])
def test_agreement_in_narrow_dtypes(name: str, dtype: torch.dtype) -> None:
    check(replace(EACH if name == "all" else CASES[name], dtype=dtype))


@pytest.mark.parametrize("shape", [tuple(min(size, 24) for size in shape) for shape in TILES], ids=str)
def test_bias_of_every_broadcast_shape(shape: tuple[int, ...]) -> None:
    check(replace(SHAPE, B=2 if len(shape) == 4 else 1, Tk=24, causal=True, bias=shape, bias_hides=True))


@pytest.mark.parametrize("shape", [(2, 1, 1, 1), (1, 1, 20, 1), (1, 2, 1, 24), (2, 2, 20, 24), (24,), ()], ids=str)
def test_mask_of_any_broadcast_shape(shape: tuple[int, ...]) -> None:
    check(replace(SHAPE, B=2 if len(shape) == 4 else 1, Tk=24, causal=True, mask=shape))


@pytest.mark.parametrize("dim", [8, 24, 40, 64, 72])
@pytest.mark.parametrize("dtype", [BF16, F32], ids=["bf16", "fp32"])
def test_head_dims(dim: int, dtype: torch.dtype) -> None:
    check(replace(SHAPE, D=dim, Dv=dim, dtype=dtype, causal=True))


MORE_PACKED_CASES: dict[str, Case] = {
    "capacity beyond the last sequence": replace(PACKED, lengths_q=(9, 20, 0, 0), lengths_k=(5, 33, 0, 0), tail=7),
    "sequences beside blocks of padded rows": Case(
        Hq=1, Hkv=1, D=8, Dv=8, lengths_q=(127, 2, 128, 1), lengths_k=(5, 9, 3, 9), causal=True, tail=1
    ),
}


@pytest.mark.parametrize("dims", [(20, 20), (7, 7), (16, 5), (9, 16)], ids=str)
@pytest.mark.parametrize("of", [EACH, PACKED], ids=["dense", "packed"])
def test_head_dims_that_are_padded(of: Case, dims: tuple[int, int]) -> None:
    """With every modifier and gradient: what is padded shows in none of them."""
    check(replace(of, D=dims[0], Dv=dims[1]))


@pytest.mark.parametrize("name", [*PACKED_CASES, *MORE_PACKED_CASES])
def test_packed_sequences(name: str) -> None:
    check((PACKED_CASES | MORE_PACKED_CASES)[name])


@settings(max_examples=12)
@given(seed=st.integers(0, 2**32))
def test_random_cases(seed: int) -> None:
    case = random_case(Random(seed), head_dims=(8, 24), max_length=36)
    if case.sequences * case.Hq <= 6:  # a program takes 10 ms
        assert not why_not(case, "triton")
        check(case)


# The gradient of the LSE


@pytest.mark.parametrize(
    "case",
    [
        SHAPE,
        CASES["causal with more queries than keys"],
        CASES["sink in bf16, with empty rows"],
        CASES["no keys"],
        EACH,
        PACKED_CASES["everything"],
    ],
    ids=["plain", "rows without keys", "sink and rows without keys", "no keys", "everything", "packed"],
)
def test_gradients_through_output_and_lse(case: Case) -> None:
    check(replace(case, lse_grad=True))


def test_the_lse_alone_moves_scores_by_their_weights_and_no_value() -> None:
    """d lse_i / d s_ij = p_ij: whatever comes in at the LSE of a row leaves through its scores and its sink."""
    tensors, options = drawn(replace(SHAPE, B=2, bias=(2, 2, 20, 40), alibi="BH", sink=True, causal=True))
    grad_lse = arriving(tensors)[1]
    found = gradients(tensors, None, grad_lse, **options)
    close(found, gradients(tensors, None, grad_lse, "reference", **options))
    assert torch.equal(found["value"], torch.zeros_like(found["value"]))
    torch.testing.assert_close(found["bias"].sum((0, 2, 3)) + found["sink"], grad_lse.sum((0, 2)))


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("with_out", [False, True], ids=["lse alone", "with out"])
def test_without_keys_the_lse_is_the_sink(with_out: bool, packed: bool) -> None:
    query, key, value = normal(2, 5, 3, 8), torch.empty(2, 0, 3, 8), torch.empty(2, 0, 3, 16)
    options: dict[str, Any] = {}
    if packed:
        query, key, value = (t.flatten(0, 1) for t in (query, key, value))
        options = {"cu_seqlens_q": offsets(4, 6), "cu_seqlens_k": offsets(0, 0)}
    tensors = {"query": query, "key": key, "value": value, "sink": normal(3)}
    grad_out, grad_lse = arriving(tensors)
    found = gradients(tensors, grad_out if with_out else None, torch.ones_like(grad_lse), **options)
    assert torch.equal(found["sink"], torch.full((3,), 10.0))
    assert not any(found[name].any() for name in ("query", "key", "value"))


# Rows and keys that take no part: their gradients are 0, and what they hold reaches nobody


def without(rows: list[int], keys: list[int]) -> Tensor:
    """A mask of 20 queries by 24 keys that hides whole rows and columns."""
    mask = torch.ones(20, 24, dtype=torch.bool)
    mask[rows], mask[:, keys] = False, False
    return mask


def as_bias(mask: Tensor) -> Tensor:
    return normal(*mask.shape, seed=4).masked_fill(~mask, -INF)


FIRST, LAST, ROW_6 = torch.arange(24) < 15, torch.arange(24) >= 15, torch.arange(20)[:, None] == 6
LEFT_PADDED = (torch.arange(24) >= torch.tensor([[3], [15]])).view(2, 1, 1, 24)
OF_EACH_HEAD = torch.stack([without([3, 17], [8, 9]), without([4], [9])])
LONGER: dict[str, Any] = {"Tq": 36, "Tk": 12, "causal": True}
CACHE: dict[str, Any] = {"Tq": 5, "Tk": 40, "window": (4, 0)}
HIDING: dict[str, dict[str, Any]] = {
    "more queries than keys, causal": LONGER,
    "more queries than keys, causal, bias of one row": LONGER | {"bias": normal(12)},
    "more queries than keys, window": LONGER | {"causal": False, "window": (9, 3)},
    "mask": {"mask": without([0, 7, 19], [0, 16, 23])},
    "mask, softcap and dropout": {"mask": without([4], [9]), "softcap": 1.5, "dropout_p": 0.3, "seed": 5},
    "bias": {"bias": as_bias(without([0, 7, 19], [0, 16, 23]))},
    "mask and bias that only together hide a row": {
        "mask": without([], [20]) & ~(ROW_6 & FIRST),
        "bias": as_bias(without([], [21]) & ~(ROW_6 & LAST)),
    },
    "mask of each head": {"mask": OF_EACH_HEAD, "Hq": 2},
    "bias of each head": {"bias": as_bias(OF_EACH_HEAD), "Hq": 2, "Hkv": 2},
    "left padding": {"B": 2, "causal": True, "mask": LEFT_PADDED},
    "left padding by a bias": {"B": 2, "causal": True, "bias": as_bias(LEFT_PADDED)},
    "right padding": {"B": 2, "causal": True, "mask": LEFT_PADDED.flip(-1)},
    "window over a longer cache": CACHE,
    "window over a longer cache, mask of one row": CACHE | {"mask": torch.arange(40) != 36},
    "window over a longer cache, bias of all": CACHE | {"bias": normal(5, 40)},
    "window over a longer cache, bias of one column": CACHE | {"bias": normal(5, 1)},
    "window over a longer cache, bias of one row": CACHE | {"bias": normal(40)},
    "window over a longer cache, bias of one number": CACHE | {"bias": normal()},
}


def visible(
    q_len: int,
    k_len: int,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    **others: Any,
) -> Tensor:
    """Which of the scores exist, broadcastable to [B, Hq, Tq, Tk]."""
    ahead = torch.arange(k_len - q_len, k_len)[:, None] - torch.arange(k_len)
    seen = ahead >= (0 if causal else -INF)
    for side, distance in zip(window, (ahead, -ahead), strict=True):
        seen = seen & (distance <= (side if side >= 0 else INF))
    seen = seen if mask is None else seen & mask
    return seen if bias is None else seen & (bias != -INF)


def reach_nobody(tensors: Named, rows: Tensor, keys: Tensor, **options: Any) -> None:
    """Gradients of hidden `rows` and `keys` are 0, and NaN in them changes no gradient by a bit."""
    grads = arriving(tensors)
    clean = gradients(tensors, *grads, **options)
    close(clean, gradients(tensors, *grads, "reference", **options))
    assert rows.any() or keys.any()
    assert not clean["query"][rows].any() and not clean["key"][keys].any() and not clean["value"][keys].any()

    poisoned = {name: tensor.clone() for name, tensor in tensors.items()}
    grad_out, grad_lse = grads[0].clone(), grads[1].clone()
    poisoned["query"][rows], poisoned["key"][keys], poisoned["value"][keys], grad_out[rows] = NAN, NAN, NAN, NAN
    if "sink" not in tensors:  # without one such a row has no LSE, and so nothing to differentiate
        grad_lse[rows.mT] = NAN
    equal(gradients(poisoned, grad_out, grad_lse, **options), clean)


SUNK = ("more queries than keys, causal", "mask", "bias", "mask of each head", "left padding")


@pytest.mark.parametrize(("name", "with_sink"), [*((name, False) for name in HIDING), *((name, True) for name in SUNK)])
def test_what_nobody_sees(name: str, with_sink: bool) -> None:
    options = {"B": 1, "Tq": 20, "Tk": 24, "Hq": 1, "Hkv": 1} | HIDING[name]
    B, Tq, Tk, Hq, Hkv = (options.pop(dim) for dim in ("B", "Tq", "Tk", "Hq", "Hkv"))
    seen = visible(Tq, Tk, **options).expand(B, Hq, Tq, Tk)
    rows, keys = ~seen.any(-1).mT, ~seen.unflatten(1, (Hkv, Hq // Hkv)).any(2).any(2).mT
    tensors = dict(zip(("query", "key", "value"), qkv(B, Tq, Tk, Hq, Hkv), strict=True))
    tensors |= {"bias": options.pop("bias")} if "bias" in options else {}
    tensors |= {"sink": normal(Hq, seed=3)} if with_sink else {}
    reach_nobody(tensors, rows, keys, **options)


PACKED_HIDING: dict[str, dict[str, Any]] = {
    "tail": {"lengths": ((20,), (33,))},
    "capacity, and a sequence without queries": {"lengths": ((5, 0, 9, 0, 0), (9, 4, 3, 0, 0))},
    "causal, more queries than keys": {"lengths": ((20, 5), (4, 9)), "causal": True},
    "window over longer caches": {"lengths": ((5, 3), (40, 20)), "window": (2, 0)},
    "a sequence without keys": {"lengths": ((5, 4, 3), (9, 0, 3))},
    "a sequence without keys, window": {"lengths": ((5, 4, 3), (9, 0, 3)), "window": (3, 3)},
}
PACKED_SUNK = ("tail", "causal, more queries than keys", "a sequence without keys", "a sequence without keys, window")


@pytest.mark.parametrize(
    ("name", "with_sink"), [*((name, False) for name in PACKED_HIDING), *((name, True) for name in PACKED_SUNK)]
)
def test_what_nobody_sees_in_a_pack(name: str, with_sink: bool) -> None:
    options = dict(PACKED_HIDING[name])
    lengths = options.pop("lengths")
    seen = torch.block_diag(*(visible(*pair, **options).float() for pair in zip(*lengths, strict=True)))
    seen = torch.nn.functional.pad(seen, (0, 3, 0, 3)).bool()  # the tail
    rows, keys = ~seen.any(1)[:, None], ~seen.any(0)[:, None]
    packs = (pack[0] for pack in qkv(1, *seen.shape, 1, 1))
    tensors = dict(zip(("query", "key", "value"), packs, strict=True)) | ({"sink": normal(1)} if with_sink else {})
    cu_seqlens = {"cu_seqlens_q": offsets(*lengths[0]), "cu_seqlens_k": offsets(*lengths[1])}
    reach_nobody(tensors, rows, keys, **options, **cu_seqlens)


@pytest.mark.parametrize(
    ("q_start", "options", "rows", "keys"),
    [(3, {"causal": True}, [], range(23, 40)), (30, {"window": (4, 2)}, range(14, 20), range(26))],
    ids=["keys after the last query", "queries far past the last key"],
)
def test_what_nobody_sees_from_where_it_stands(
    q_start: int, options: dict[str, Any], rows: Collection[int], keys: Collection[int]
) -> None:
    """20 queries from `q_start` on, against keys from 0 on: shards and caches stand anywhere."""
    query, key, value = qkv()
    grad_out = arriving({"query": query, "value": value})[0]
    found = []
    for _ in ("clean", "poisoned"):
        inputs = Inputs(query, key, value)
        problem = stated(inputs, positions=Positions(q_start, 1, 0, 1, q_start), **options)
        with poisoned_memory():
            saved = forward(problem, inputs, INTERPRETER)
            grads = backward(problem, inputs, INTERPRETER_BACKWARD, *saved, grad_out, None, wanted=Wanted())
        found.append(dict(zip(("query", "key", "value"), grads, strict=False)))
        for tensor, hidden in ((query, rows), (grad_out, rows), (key, keys), (value, keys)):
            tensor[:, list(hidden)] = NAN
    assert not found[0]["query"][:, list(rows)].any()
    assert not found[0]["key"][:, list(keys)].any() and not found[0]["value"][:, list(keys)].any()
    equal(found[1], found[0])


def test_no_key_at_all_and_a_sink() -> None:
    query, key, value = qkv(Tq=5, Tk=0)
    tensors = {"query": query, "key": key, "value": value, "sink": normal(2, seed=3)}
    reach_nobody(tensors, torch.ones(1, 5, 2, dtype=torch.bool), torch.ones(1, 0, 1, dtype=torch.bool))


@pytest.mark.parametrize("extreme", [torch.finfo(F32).min, -1e9, 2.4e38], ids=str)
def test_a_row_of_huge_bias_leaves_other_rows_alone(extreme: float) -> None:
    """The lowest float is how others hide padding. No digit of its LSE is left, so no loss may come from that row."""
    query, key, value = qkv(Hq=1)
    bias = normal(20, 40, seed=3)
    bias[3] = extreme
    tensors = {"query": query, "key": key, "value": value, "bias": bias}
    grad_out, _ = arriving(tensors)
    grad_out[:, 3] = 0.0
    close(gradients(tensors, grad_out), gradients(tensors, grad_out, backend="reference"))


# Dropout: what the forward dropped, bit for bit


def dropped_by_sign(seed: int, offset: int) -> Named:
    """Gradients in which every score stands alone.

    Queries, keys and dO are unit vectors and every dp_ij = 1, so ds_ij = p_ij (keep_ij / (1 - p) - delta_i) is positive
    where an element was kept and negative where it was dropped, and dv is the weight itself.
    """
    units, ones = torch.eye(24)[None, :, None].expand(1, 24, 2, 24), torch.ones(1, 24, 2, 24)
    tensors = {"query": units, "key": units, "value": ones, "bias": torch.zeros(1, 2, 24, 24)}
    return gradients(tensors, units, dropout_p=0.4, seed=torch.tensor([seed, offset]))


def test_every_gradient_drops_what_the_forward_dropped() -> None:
    found = dropped_by_sign(9, 8)
    keep = reference.dropout_keep(9, 8, 1, 2, 24, 24, 0.4)  # [B, H, Tq, Tk]
    assert torch.equal(found["value"].permute(0, 2, 3, 1) != 0, keep)
    assert torch.equal(found["bias"] > 0, keep)
    assert torch.equal(found["query"].transpose(1, 2) > 0, keep)
    assert torch.equal(found["key"].permute(0, 2, 3, 1) > 0, keep)
    assert all((grad != 0).all() for name, grad in found.items() if name != "value")


def test_the_seed_decides_the_gradients() -> None:
    first = dropped_by_sign(1, 2)
    equal(dropped_by_sign(1, 2), first)
    assert all(not torch.equal(grad, first[name]) for name, grad in dropped_by_sign(1, 3).items())


# Only what is wanted


@cache
def every_gradient(names: tuple[str, ...] = Wanted._fields) -> Named:
    """Of those a call has that wants these. dK and dV see the exact delta if one of slopes, sink and bias is wanted."""
    return computed(EACH) if {*names} - {"query", "key", "value"} else computed(EACH, names=("query", "key", "value"))


def test_each_gradient_agrees_with_the_reference() -> None:
    found = every_gradient()
    assert [*found] == [*Wanted._fields] and all(grad.any() for grad in found.values())
    close(found, expected(EACH))


@pytest.mark.parametrize("names", [c for n in (1, 2) for c in combinations(Wanted._fields, n)], ids="-".join)
def test_only_what_is_wanted_is_computed_and_is_the_same(names: tuple[str, ...]) -> None:
    full = every_gradient(names)
    equal(computed(EACH, names=names), {name: full[name] for name in names})


@pytest.mark.parametrize("name", Wanted._fields)
def test_autograd_wants_what_requires_a_gradient(name: str) -> None:
    tensors, options = drawn(EACH)
    grads = arriving(tensors)
    tensors[name].requires_grad_()
    with poisoned_memory():
        torch.autograd.backward(attention(**tensors, **options, return_lse=True, backend="triton"), grads)
    assert [other for other, tensor in tensors.items() if tensor.grad is not None] == [name]
    assert torch.equal(tensors[name].grad, every_gradient((name,))[name].view(tensors[name].shape))


# Configurations: any gives the answer


def tiles(query: Size, key: Size, bias: Size, value: Size | None = None, splits: int = 1) -> BackwardConfig:
    return BackwardConfig(
        Tile(*query, 4, 1, splits), Tile(*key, 4, 1, splits), value and Tile(*value, 4, 1, splits), Tile(*bias, 4, 1)
    )


CONFIGS: dict[str, BackwardConfig] = {
    "equal": tiles((16, 16), (16, 16), (16, 16)),
    "tall for queries": tiles((64, 16), (16, 16), (32, 16)),
    "wide": tiles((16, 64), (16, 64), (16, 64)),
    "all in one": tiles((128, 128), (128, 128), (128, 128)),
    "values apart": tiles((32, 32), (32, 16), (32, 32), value=(16, 64)),
}
SPLIT: dict[str, BackwardConfig] = {
    "two splits": tiles((16, 16), (16, 16), (16, 16), splits=2),
    "more splits than tiles": tiles((32, 32), (32, 32), (32, 32), value=(16, 64), splits=3),
}
CONFIGURED: dict[str, Case] = {
    "causal window": replace(SHAPE, Hq=1, Tq=36, causal=True, window=(20, 0), dropout_p=0.3, sink=True),
    "window on both sides": replace(SHAPE, Hq=1, Tq=36, Tk=44, window=(20, 9), alibi="H", softcap=1.5),
    "mask and bias": replace(SHAPE, Hq=1, Tq=36, mask=(36, 40), bias=(36, 40), bias_hides=True, causal=True),
    "bias of one row": replace(SHAPE, Hq=1, Tq=36, bias=(40,), sink=True),
    "packed": Case(Hq=2, Hkv=1, lengths_q=(37, 0, 5), lengths_k=(33, 4, 20), alibi="BH", causal=True, tail=2),
}


@pytest.mark.parametrize(
    ("name", "config"),
    [*product(CONFIGURED, CONFIGS), *product(list(CONFIGURED)[:3], SPLIT)],  # dense problems only
)
def test_every_configuration_gives_the_answer(name: str, config: str) -> None:
    close(computed(CONFIGURED[name], (CONFIGS | SPLIT)[config]), expected(CONFIGURED[name]))


# Bit for bit, in any run and any batch


@pytest.mark.parametrize("case", [EACH, CONFIGURED["packed"]], ids=["dense", "packed"])
def test_deterministic_has_nothing_to_add(case: Case) -> None:
    assert forwarded(replace(case, deterministic=True))[0].deterministic
    equal(computed(replace(case, deterministic=True)), computed(case))


def test_gradients_of_a_batch_entry_do_not_depend_on_the_others() -> None:
    """Permuted, and alone. Bias and slopes are the entries' own here, so they too."""
    case = Case(B=3, Tq=20, Tk=20, Hq=1, Hkv=1, dtype=BF16, causal=True, bias=(3, 1, 20, 20), alibi="BH")
    tensors, options = drawn(case)
    grads = arriving(tensors)
    found = gradients(tensors, *grads, **options)
    for picked in ([2, 0, 1], [1]):
        its = gradients({name: t[picked] for name, t in tensors.items()}, *(t[picked] for t in grads), **options)
        equal(its, {name: t[picked] for name, t in found.items()})


# Explicit positions: gradients of shards sum to those of the whole


def shards(length: int, count: int, striped: bool) -> list[tuple[Tensor, int, int]]:
    """Rows of each shard, and the start and stride at which they stand."""
    rows = torch.arange(length)
    parts = [rows[n::count] for n in range(count)] if striped else list(rows.chunk(count))
    return [(part, int(part[0]), count if striped else 1) for part in parts]


SHARDED: dict[str, Case] = {
    "causal": replace(SHAPE, Tq=36, causal=True),
    "causal with more queries than keys": replace(SHAPE, Hq=1, Tq=40, Tk=24, causal=True),
    "window": replace(SHAPE, Hq=1, Tq=36, window=(11, 4), alibi="H"),
    "everything": replace(EACH, mask=(1, 1, 20, 40), bias=(1, 1, 20, 40), sink=False),
}


@pytest.mark.parametrize("striped", [(False, False), (True, True), (True, False)], ids=str)
@pytest.mark.parametrize("name", SHARDED)
def test_gradients_of_shards_sum_to_those_of_the_whole(name: str, striped: tuple[bool, bool]) -> None:
    case = SHARDED[name]
    tensors, options = drawn(case)
    problem, inputs = stated_by(case, tensors, options)
    out, lse = attention(**tensors, **options, return_lse=True, backend="reference")
    grad_out, grad_lse = arriving(tensors)
    whole = gradients(tensors, grad_out, grad_lse, "reference", **options)
    total = {kind: torch.zeros_like(grad) for kind, grad in whole.items()}
    wanted = Wanted(bias="bias" in tensors, alibi_slopes="alibi_slopes" in tensors)
    told = {"q_len": 0, "k_len": 0, "deterministic": False, "causal": case.causal, "window": case.window or (-1, -1)}
    told |= {"softcap": case.softcap, "scale": problem.scale, "dropout_p": case.dropout_p}
    for (rows, q_start, q_stride), (keys, k_start, k_stride) in product(
        shards(case.Tq, 2, striped[0]), shards(case.Tk, 2, striped[1])
    ):
        positions = Positions(problem.q_base + q_start, q_stride, k_start, k_stride, problem.q_base)
        tile = (slice(None), slice(None), rows[:, None], keys)
        its = inputs._replace(query=inputs.query[:, rows], key=inputs.key[:, keys], value=inputs.value[:, keys])
        its = its._replace(**{kind: t[tile] for kind in ("mask", "bias") if (t := getattr(inputs, kind)) is not None})
        saved = out[:, rows], lse[..., rows], grad_out[:, rows], grad_lse[..., rows]
        with poisoned_memory():
            grads = backward_step(its, *saved, positions=positions, wanted=wanted, backend="triton", **told)
        total["query"][:, rows] += grads.query
        total["key"][:, keys] += grads.key
        total["value"][:, keys] += grads.value
        if "bias" in total:
            total["bias"][tile] += grads.bias
        if "alibi_slopes" in total:
            total["alibi_slopes"] += grads.alibi_slopes.view(total["alibi_slopes"].shape)
    close(total, whole)


def test_batch_start_moves_dropout_to_that_entry_of_the_batch() -> None:
    case = replace(SHAPE, B=2, dropout_p=0.5)
    problem, inputs, saved = forwarded(case)
    its = inputs._replace(query=inputs.query[1:], key=inputs.key[1:], value=inputs.value[1:])
    problem = problem.replace(batch=1, batch_start=1)
    grads = backward(problem, its, INTERPRETER_BACKWARD, *(t[1:] for t in saved), wanted=Wanted())
    close(grads[:3], tuple(grad[1:] for grad in expected(case).values()))


@pytest.mark.parametrize("dtype", [BF16, F16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(
    ("q_start", "q_len", "k_len"), [(0, 9, 9), (-30, 9, 9), (0, 0, 9), (0, 9, 0)],
    ids=["seen", "before every key", "no queries", "no keys"],
)  # fmt: skip
def test_gradients_of_a_shard_are_fp32_whatever_the_inputs(
    q_start: int, q_len: int, k_len: int, dtype: torch.dtype
) -> None:
    query, key, value = (t.to(dtype) for t in qkv(Tq=q_len, Tk=k_len))
    bias, slopes = normal(1, 2, q_len, k_len, dtype=dtype), normal(1, 2, dtype=dtype)
    inputs = Inputs(query, key, value, bias=bias, alibi_slopes=slopes)
    options: dict[str, Any] = {"positions": Positions(q_start, 1, 0, 1, q_start), "causal": True, "scale": 0.25}
    told = {"q_len": 0, "k_len": 0, "deterministic": False, "window": (-1, -1), "softcap": 0.0, "dropout_p": 0.0}
    saved = forward(stated(inputs, **options, partial=True), inputs, INTERPRETER)
    grad_out = normal(1, q_len, 2, 16, seed=4)  # fp32, as an output merged from shards has it
    with poisoned_memory():
        grads = backward_step(
            inputs, *saved, grad_out, None, wanted=Wanted(bias=True, alibi_slopes=True), backend="triton", **options,
            **told,
        )  # fmt: skip
    for grad, tensor in ((getattr(grads, name), getattr(inputs, name)) for name in Wanted._fields[:5]):
        assert grad.dtype is F32 and grad.shape == tensor.shape
        assert bool(grad.any()) == (q_start == 0 and q_len > 0 and k_len > 0)


# Layouts


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: Layout) -> None:
    check(replace(SHAPE, B=2, Tq=9, Tk=20, layout=layout, causal=True, mask=(2, 1, 9, 20), bias=(2, 9, 20)))
    check(Case(Hq=2, Hkv=1, lengths_q=(5, 12), lengths_k=(7, 12), layout=layout, dtype=BF16, tail=1))


ARRIVING: dict[str, Callable[[Tensor], Tensor]] = {
    "one number everywhere": lambda grad: grad.flatten()[0].expand(grad.shape),
    "one for the batch": lambda grad: grad[:1].expand(grad.shape),
    "one for a row": lambda grad: grad[..., :1].expand(grad.shape),
    "transposed": lambda grad: grad.transpose(1, 2).contiguous().transpose(1, 2),
    "misaligned": lambda grad: torch.cat([grad.new_zeros(1), grad.flatten()])[1:].view(grad.shape),
    "odd strides": lambda grad: torch.cat([grad, grad[..., :3]], -1)[..., :-3],
}


@pytest.mark.parametrize("name", ARRIVING)
def test_gradients_that_arrive_in_any_layout(name: str) -> None:
    tensors, options = drawn(replace(SHAPE, B=2, Tq=9, Tk=9, bias=(9, 9), causal=True))
    grads = [ARRIVING[name](grad) for grad in arriving(tensors)]
    assert not all(grad.is_contiguous() and grad.data_ptr() % 16 == 0 for grad in grads)
    found = gradients(tensors, *grads, **options)
    equal(found, gradients(tensors, *(grad.clone(memory_format=torch.contiguous_format) for grad in grads), **options))


def test_one_tensor_misaligned_among_aligned_ones() -> None:
    tensors, options = drawn(replace(SHAPE, Hq=1, Tq=9, Tk=20, bias=(9, 20), mask=(9, 20), causal=True))
    grads = arriving(tensors)
    aligned = gradients(tensors, *grads, **options)
    for moved in tensors:
        buffer = torch.full((tensors[moved].numel() + 1,), NAN)
        shifted = buffer[1:].view(tensors[moved].shape).copy_(tensors[moved])
        equal(gradients(tensors | {moved: shifted}, *grads, **options), aligned)


def test_mask_and_bias_rows_that_cannot_be_read_in_wide_words() -> None:
    mask, bias = normal(20, 41) > -0.5, normal(20, 41)
    for its_mask, its_bias in (
        (mask[:, :40], bias[:, :40]),
        (mask[:, 1:], bias[:, 1:]),
        (mask.mT[:40].mT, bias.mT.contiguous()[1:].mT),
    ):
        tensors = dict(zip(("query", "key", "value"), qkv(Hq=1), strict=True)) | {"bias": its_bias}
        grads = arriving(tensors)
        close(gradients(tensors, *grads, mask=its_mask), gradients(tensors, *grads, "reference", mask=its_mask))


@pytest.mark.parametrize("strided", ["sink", "alibi_slopes", "expanded slopes"])
def test_small_tensors_may_be_strided(strided: str) -> None:
    query, key, value = qkv(B=2, Tq=5, Tk=9)
    name, small = {
        "sink": ("sink", normal(2, 3)[:, 1]),
        "alibi_slopes": ("alibi_slopes", normal(2, 2).abs().t()),
        "expanded slopes": ("alibi_slopes", normal(2).abs().expand(2, 2)),
    }[strided]
    tensors = {"query": query, "key": key, "value": value, name: small}
    grads = arriving(tensors)
    close(gradients(tensors, *grads), gradients(tensors, *grads, "reference"))


# Regressions


@pytest.mark.parametrize(
    "case",
    [
        Case(B=2, Tq=2, Tk=6, Hq=1, Hkv=1, D=8, Dv=8, dtype=BF16, seed=1212229510, bias=(1, 6), alibi="H"),
        Case(B=1, Tq=5, Tk=2, Hq=2, Hkv=1, D=24, Dv=24, dtype=BF16, seed=580069146, bias=(1, 2, 1, 1), bias_hides=True,
             alibi="BH", aux_dtype=F32),
        Case(B=2, Tq=2, Tk=5, Hq=2, Hkv=1, D=8, Dv=8, dtype=F16, seed=1133758144, bias=(1, 2, 1, 1), bias_hides=True,
             alibi="H", layout="expanded"),
        Case(B=1, Tq=5, Tk=4, Hq=6, Hkv=2, D=8, Dv=8, dtype=BF16, seed=2123762139, causal=True, window=(36, 14),
             bias=(1, 1, 5, 1), bias_hides=True, alibi="H", softcap=20.0),
    ],
    ids=["bf16 slopes", "fp32 slopes", "bias of one number", "bias without columns"],
)  # fmt: skip
def test_sums_over_a_row_where_the_output_carries_the_rounding_of_its_weights(case: Case) -> None:
    """The forward rounds weights to bf16 before they meet V, and delta is dO . O with all of that error."""
    check(case)


def test_a_shard_takes_an_expanded_gradient() -> None:
    """Kernels read rows as they lie; a gradient such as that of sum() has no rows."""
    query, key, value = qkv()
    inputs = Inputs(query, key, value)
    told = {"q_len": 0, "k_len": 0, "deterministic": False, "window": (-1, -1), "softcap": 0.0, "dropout_p": 0.0}
    told |= {"causal": False, "scale": 1}
    saved = forward(stated(inputs, scale=1.0), inputs, INTERPRETER)
    options: dict[str, Any] = {"positions": Positions(20, 1, 0, 1, 20), "wanted": Wanted(), "backend": "triton"}
    expanded = torch.ones(()).expand(1, 20, 2, 16)
    grads = [backward_step(inputs, *saved, grad, None, **options, **told) for grad in (expanded, expanded.contiguous())]
    equal(*(dict(zip("qkv", grad[:3], strict=True)) for grad in grads))


def test_numbers_are_floats_whatever_the_caller_wrote() -> None:
    """An int 1 would be compiled into the kernel, and found again for another scale."""
    problem = stated(Inputs(*qkv()), scale=1, softcap=2, dropout_p=0)
    assert [type(x) for x in (problem.scale, problem.softcap, problem.dropout_p)] == [float, float, float]


def test_rows_beyond_the_longest_take_no_part() -> None:
    """Where a caller says less than the truth: the forward leaves them 0, and they are not read from anywhere."""
    query, key, value = (t[0] for t in qkv(Tq=40, Tk=40))
    cu = torch.tensor([0, 40])
    inputs = Inputs(query, key, value, cu_seqlens_q=cu, cu_seqlens_k=cu)
    problem = stated(inputs, q_len=32, k_len=40)
    saved = forward(problem, inputs, INTERPRETER)
    with poisoned_memory():
        grads = backward(
            problem, inputs, INTERPRETER_BACKWARD, *saved, normal(40, 2, 16, seed=4), None, wanted=Wanted()
        )
    assert all(grad.isfinite().all() for grad in grads[:3])
    assert not grads.query[32:].any() and grads.key.any()


@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
def test_a_bias_below_the_range_of_fp32_is_finite_all_the_same() -> None:
    query, key, value = qkv()
    bias = torch.full((20, 40), -1e39, dtype=torch.float64)
    out = attention(query, key, value, bias=bias, backend="triton")
    torch.testing.assert_close(out, attention(query, key, value, bias=bias, backend="reference"))


def test_tiles_that_read_rows_nobody_wrote_are_refused() -> None:
    problem, inputs, saved = forwarded(SHAPE)
    config = BackwardConfig(Tile(16, 16, 4, 1), Tile(32, 16, 4, 1))
    with pytest.raises(AssertionError, match="whole tiles"):
        backward(problem, inputs, config, *saved, wanted=Wanted())


def test_offsets_beyond_the_pack_touch_nothing_outside_it() -> None:
    """What a compiled call cannot check is held within the pack by the kernels."""
    query, key, value = (t[0] for t in qkv(Tq=10, Tk=10))
    grad_out = normal(10, 2, 16, seed=4)
    found = []
    for end in (10, 99):
        cu = torch.tensor([0, 4, end])
        inputs = Inputs(query, key, value, sink=normal(2), cu_seqlens_q=cu, cu_seqlens_k=cu)
        problem = stated(inputs, q_len=6, k_len=6, causal=True)
        saved = forward(problem, inputs, INTERPRETER)
        with poisoned_memory():
            grads = backward(problem, inputs, INTERPRETER_BACKWARD, *saved, grad_out, None, wanted=Wanted(sink=True))
        found.append({name: grad for name, grad in grads._asdict().items() if grad is not None})
    equal(found[1], found[0])


@triton.jit
def _padded_rows_kernel(cu_ptr, out_ptr):
    sequence = tl.program_id(0)
    tl.store(out_ptr + sequence, padded_row(tl.load(cu_ptr + sequence), sequence))


@pytest.mark.parametrize("lengths", [(5, 0, 128, 1), (127, 129, 256, 3), (1, 1, 1)], ids=str)
def test_sequences_share_no_block_of_padded_rows(lengths: tuple[int, ...]) -> None:
    """On a GPU sequences run side by side, and what a tile writes past the end of one must not land in another."""
    query, starts = torch.zeros(sum(lengths), 1, 8), torch.zeros(len(lengths), dtype=torch.int64)
    cu = offsets(*lengths, dtype=torch.int64)
    problem = stated(Inputs(query, query, query, cu_seqlens_q=cu, cu_seqlens_k=cu), q_len=max(lengths), k_len=1)
    _padded_rows_kernel[(len(lengths),)](cu, starts)
    ends = starts + (torch.tensor(lengths) + 127) // 128 * 128
    assert not (starts % 128).any() and (ends[:-1] <= starts[1:]).all()
    assert ends[-1] <= Rows.samples(problem, query).lse.shape[-1]


# The repairs of the interpreter, without which the tests above would say nothing


@triton.jit
def _sum_below_kernel(n_ptr, out_ptr):
    total = tl.load(n_ptr) * 0
    for i in range(tl.load(n_ptr)):
        total += i
    tl.store(out_ptr, total)


@triton.jit
def _dot_kernel(a_ptr, b_ptr, out_ptr):
    offs = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(out_ptr + offs, tl.dot(tl.load(a_ptr + offs), tl.load(b_ptr + offs)))


@triton.jit
def _cast_kernel(x_ptr, out_ptr, N: tl.constexpr):
    offs = tl.arange(0, N)
    tl.store(out_ptr + offs, tl.load(x_ptr + offs).to(tl.bfloat16))


def test_the_interpreter_counts_up_to_a_tensor() -> None:
    """NumPy 2.4 refuses what Triton does there; earlier ones warn."""
    found = torch.zeros(1, dtype=torch.int32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _sum_below_kernel[(1,)](torch.tensor([5], dtype=torch.int32), found)
    assert found.item() == 0 + 1 + 2 + 3 + 4


@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=["bf16", "fp16", "fp32"])
def test_the_interpreter_multiplies_numbers(dtype: torch.dtype) -> None:
    a, b, found = normal(16, 16, dtype=dtype), normal(16, 16, seed=1, dtype=dtype), torch.zeros(16, 16)
    _dot_kernel[(1,)](a, b, found)
    torch.testing.assert_close(found, a.float() @ b.float())


def test_the_interpreter_rounds_to_bf16_as_torch_does() -> None:
    bits = torch.randint(-(2**31), 2**31, (917,), generator=torch.Generator().manual_seed(0))
    ties = (torch.randint(0, 2**15, (32,), generator=torch.Generator().manual_seed(1)) << 16) + 0x8000
    nans = torch.tensor([0x7F800001, 0x7FFFFFFF, -1])  # in the first only bits that are cut off say so
    patterns = torch.cat([bits, ties, ties - 1, ties + 1, nans]).to(torch.int32)
    special = torch.tensor([0.0, -0.0, INF, -INF, NAN, torch.finfo(F32).max, torch.finfo(F32).min, 2.0**-149])
    x = torch.cat([patterns.view(F32), special])
    found = torch.zeros(1024, dtype=BF16)
    _cast_kernel[(1,)](x, found, 1024)
    expected, numbers = x.to(BF16), ~x.isnan()
    assert torch.equal(found.isnan(), x.isnan())
    assert torch.equal(found[numbers].view(torch.int16), expected[numbers].view(torch.int16))
