"""The eager backend from inside: its two paths, its tiles, its shards, its dropout, its memory and its speed."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from itertools import pairwise, product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from shard_state import forward_state
from torch import Tensor

from cpu_time import least_cpu_time
from dropout_vectors import DROPOUT_VECTORS
from stream_attention import attention
from stream_attention.backends.eager import blocked as eager
from stream_attention.backends.eager.dropout import dropout_words, keep
from stream_attention.backends.eager.tuning import EagerConfig, configure
from stream_attention.backends.reference import attention as reference
from stream_attention.base.problem import UNBOUNDED, Gradients, Inputs, Positions, Problem, Wanted, state_problem
from stream_attention.base.state import add_sink, merge
from stream_attention.dispatch.plan import plan
from stream_attention.ops.shards import backward_step
from stream_attention_tools.testing import Case, check_case, make, peak_bytes, poisoned_memory

F64 = torch.float64
NAN = math.nan


def stated(inputs: Inputs, **options: Any) -> Problem:
    """The problem that inputs pose, with `attention`'s defaults."""
    defaults: dict[str, Any] = {
        "q_len": 0,
        "k_len": 0,
        "causal": False,
        "window": (UNBOUNDED, UNBOUNDED),
        "softcap": 0.0,
    }
    defaults |= {"scale": inputs.query.shape[-1] ** -0.5, "dropout_p": 0.0, "deterministic": False}
    return state_problem(inputs, **(defaults | options))


def random_inputs(case: Case) -> tuple[Inputs, dict[str, Any]]:
    """The inputs of a case as kernels read them, and the options of `state_problem` beside them."""
    query, key, value, options = make(case)
    slopes = options.get("alibi_slopes")
    inputs = Inputs(
        query,
        key,
        value,
        mask=options.get("mask"),
        bias=options.get("bias"),
        alibi_slopes=None if slopes is None else slopes.view(-1, case.Hq),
        sink=options.get("sink"),
        seed=torch.tensor([case.seed, 0]) if case.dropout_p else None,
    )
    window = case.window or (UNBOUNDED, UNBOUNDED)
    scale = case.D**-0.5 if case.scale is None else case.scale
    return inputs, {"causal": case.causal, "window": window, "softcap": case.softcap, "scale": scale} | {
        "dropout_p": case.dropout_p
    }


def both_ways(
    problem: Problem, inputs: Inputs, config: EagerConfig, grads: tuple[Tensor, Tensor | None]
) -> tuple[tuple[Tensor, Tensor], Gradients]:
    """Forward and backward of one configuration, in memory that is NaN until it is written."""
    present = (t is not None for t in (inputs.bias, inputs.alibi_slopes, inputs.sink))
    wanted = Wanted(True, True, True, *present)
    with poisoned_memory():
        out, lse = eager.forward(problem, inputs, config)
        backward = problem.replace(backward=True, lse_grad=grads[1] is not None)
        return (out, lse), eager.backward(backward, inputs, config, eager.Saved(out, lse, *grads), wanted)


def output_gradients(inputs: Inputs) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(99)
    batch, rows, heads, _ = inputs.query.shape
    grad_out = torch.randn(batch, rows, heads, inputs.value.shape[-1], generator=generator)
    grad_lse = torch.randn(batch, heads, rows, generator=generator)
    return grad_out.to(inputs.query.dtype), grad_lse.to(torch.promote_types(inputs.query.dtype, torch.float32))


# The two paths


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (3, 1)], ids=["mha", "gqa", "mqa"])
def test_both_paths_agree_where_both_apply(causal: bool, heads: tuple[int, int]) -> None:
    inputs, _ = random_inputs(Case(B=2, Tq=37, Tk=37, Hq=heads[0], Hkv=heads[1], D=16, Dv=16, dtype=F64))
    problem = stated(inputs, causal=causal)
    assert configure(problem).path == "flash"
    grads = output_gradients(inputs)[0], None
    flash = both_ways(problem, inputs, configure(problem), grads)
    blocked = both_ways(problem, inputs, EagerConfig("blocked", 1, 16, 8), grads)
    torch.testing.assert_close(flash, blocked)


@pytest.mark.parametrize(
    ("options", "path"),
    [
        ({}, "flash"),
        ({"causal": True}, "flash"),
        ({"causal": True, "Tq": 8}, "blocked"),
        ({"causal": True, "Tq": 1}, "flash"),
        ({"Tq": 8}, "flash"),
        ({"Dv": 8}, "blocked"),
        ({"window": (3, 3)}, "blocked"),
        ({"window": (99, 99)}, "flash"),
        ({"mask": (16, 16)}, "flash"),
        ({"mask": (16, 16), "causal": True}, "flash"),
        ({"mask": (16, 16), "window": (3, 3)}, "blocked"),
        ({"bias": (16, 16)}, "flash"),
        ({"bias": (16, 16), "dtype": torch.bfloat16}, "flash"),
        ({"alibi": "H"}, "blocked"),
        ({"sink": True}, "flash"),
        ({"sink": True, "dtype": torch.bfloat16}, "blocked"),
        ({"scale": 1.0}, "flash"),
        ({"softcap": 1.0}, "blocked"),
        ({"dropout_p": 0.5}, "blocked"),
        ({"Tk": 0}, "blocked"),
        ({"causal": True, "scale": 0.0}, "blocked"),
        ({"causal": True, "scale": -1.0}, "blocked"),
    ],
    ids=str,
)
def test_which_path_serves(options: dict[str, Any], path: str) -> None:
    inputs, its = random_inputs(Case(**options))
    config = plan(stated(inputs, **its), "eager").config
    assert config.path == path
    assert (config.because == ()) == (path == "flash")


# Tiles

EVERYTHING = Case(
    B=3, Tq=19, Tk=26, Hq=4, Hkv=2, D=8, Dv=6, dtype=F64, causal=True, window=(15, 3), mask=(3, 1, 19, 26),
    bias=(1, 4, 19, 26), bias_hides=True, alibi="BH", sink=True, softcap=3.0, dropout_p=0.3,
)  # fmt: skip
TALL = Case(B=2, Tq=26, Tk=11, Hq=2, Hkv=1, D=8, Dv=8, dtype=F64, causal=True, alibi="H", bias=(2, 1, 26, 1))
BANDED = Case(B=2, Tq=30, Tk=30, Hq=2, Hkv=2, D=8, Dv=8, dtype=F64, window=(4, 2), dropout_p=0.2)


@pytest.mark.parametrize("case", [EVERYTHING, TALL, BANDED], ids=["everything", "tall causal", "banded"])
@pytest.mark.parametrize("tile", [(1, 1), (7, 7), (1, 64), (64, 1), (7, 64), (64, 64)], ids=str)
def test_every_tile_gives_the_same_answer(case: Case, tile: tuple[int, int]) -> None:
    inputs, options = random_inputs(case)
    problem, grads = stated(inputs, **options), output_gradients(inputs)
    whole = both_ways(problem, inputs, EagerConfig("blocked", 100, 100, 100), grads)
    for block_b in (1, 2):
        torch.testing.assert_close(both_ways(problem, inputs, EagerConfig("blocked", block_b, *tile), grads), whole)


@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("tile", [3, 5, 64])
def test_poison_is_hidden_wherever_tiles_end(tile: int, softcap: float) -> None:
    """Hidden keys and queries in tiles of their own, and beside seen ones."""
    inputs, _ = random_inputs(Case(B=2, Tq=9, Tk=14, Hq=4, Hkv=2, D=8, Dv=8))
    mask = torch.arange(14) < torch.tensor([[8], [14]])
    mask = mask[:, None, None].repeat(1, 1, 9, 1)
    mask[:, :, 4:7] = False
    results = []
    for filler in (0.0, NAN):
        query, key, value = (t.clone() for t in inputs[:3])
        query[:, 4:7] = key[0, 8:] = value[0, 8:] = filler
        its = Inputs(query, key, value, mask=mask)
        results.append(
            both_ways(stated(its, softcap=softcap), its, EagerConfig("blocked", 1, tile, tile), output_gradients(its))
        )
    (clean, clean_grads), (poisoned, poisoned_grads) = results
    torch.testing.assert_close(poisoned, clean)
    torch.testing.assert_close(poisoned_grads[:3], clean_grads[:3])


@pytest.mark.parametrize("tile", [2, 5, 64])
@pytest.mark.parametrize("options", [{"causal": True}, {"window": (3, 2)}, {"mask": (2, 1, 9, 9)}], ids=str)
def test_a_nan_in_a_bias_reaches_what_its_row_sees_as_in_the_reference(options: dict[str, Any], tile: int) -> None:
    case = Case(B=2, Tq=9, Tk=9, Hq=4, Hkv=2, D=8, Dv=8, dtype=F64, bias=(2, 1, 9, 9), sink=True, **options)
    query, key, value, named = make(case)
    named["bias"][1, 0, 4, 3:6] = named["bias"][0, 0, 6] = NAN
    named.pop("deterministic")
    tensors = [t.requires_grad_() for t in (query, key, value, named["bias"])]
    outputs = reference.attention(query, key, value, **named)
    inputs, its = random_inputs(case)
    inputs = inputs._replace(bias=named["bias"].detach())
    grads = output_gradients(inputs)
    expected = (*outputs, *torch.autograd.grad(outputs, tensors, grads))
    found, found_grads = both_ways(stated(inputs, **its), inputs, EagerConfig("blocked", 1, tile, tile), grads)
    torch.testing.assert_close((*found, *found_grads[:4]), expected, equal_nan=True)
    assert all(x.isnan().any() and x.isfinite().any() for x in expected)


@pytest.mark.parametrize("dtype", [torch.float32, F64], ids=str)
def test_tanh_is_exact_to_rounding_whatever_its_argument(dtype: torch.dtype) -> None:
    exponents = torch.linspace(-20, 0, 50_000, dtype=F64)  # more than are computed at a time
    small = torch.cat((-(2.0**exponents), 2.0**exponents)) * eager.TANH[0]
    for x in (small, small * 1.01, small * 40, torch.tensor([0.1, NAN, math.inf, -math.inf, 0.0])):
        found = eager._tanh_(x.to(dtype, copy=True))
        exact = x.to(dtype).double().tanh()
        torch.testing.assert_close(found.double(), exact, rtol=torch.finfo(dtype).eps, atol=0, equal_nan=True)


@pytest.mark.parametrize("magnitude", [0.1, 1.0, 10.0])
def test_softcapped_scores_small_and_large_are_within_the_tolerance(magnitude: float) -> None:
    for seed in range(4):
        scale = magnitude * 64**-0.5
        check_case(Case(B=2, Tq=70, Tk=90, Hq=4, D=64, Dv=64, softcap=10.0, scale=scale, seed=seed), "eager")


# Shards: positions are explicit, so any shard of a call means what it means in the whole


def shards(length: int, count: int, striped: bool) -> list[tuple[Tensor, int, int]]:
    """Rows of each shard, with the start and the stride of their positions."""
    if striped:
        return [(torch.arange(r, length, count), r, count) for r in range(count)]
    edges = [length * r // count for r in range(count + 1)]
    return [(torch.arange(a, b), a, 1) for a, b in pairwise(edges)]


def shard_of(inputs: Inputs, rows: Tensor, columns: Tensor) -> Inputs:
    def tile(x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        x = x[:, :, rows] if x.shape[2] > 1 else x
        return x[..., columns] if x.shape[3] > 1 else x

    return inputs._replace(
        query=inputs.query[:, rows],
        key=inputs.key[:, columns],
        value=inputs.value[:, columns],
        mask=tile(inputs.mask),
        bias=tile(inputs.bias),
        sink=None,
    )


SHARDED = {
    "causal": Case(B=2, Tq=21, Tk=21, Hq=2, Hkv=1, D=8, Dv=8, dtype=F64, causal=True),
    "causal with a cache": Case(B=1, Tq=12, Tk=25, Hq=2, Hkv=1, D=8, Dv=8, dtype=F64, causal=True),
    "causal with more queries than keys": Case(B=1, Tq=25, Tk=12, Hq=2, Hkv=1, D=8, Dv=8, dtype=F64, causal=True),
    "window": Case(B=2, Tq=21, Tk=24, Hq=2, Hkv=2, D=8, Dv=8, dtype=F64, window=(5, 3)),
    "alibi": Case(B=2, Tq=21, Tk=24, Hq=4, Hkv=2, D=8, Dv=8, dtype=F64, alibi="BH"),
    "dropout": Case(B=2, Tq=21, Tk=24, Hq=4, Hkv=2, D=8, Dv=8, dtype=F64, dropout_p=0.4),
    "everything": EVERYTHING,
}


@pytest.mark.parametrize("config", [None, EagerConfig("blocked", 1, 4, 5)], ids=["planned", "small tiles"])
@pytest.mark.parametrize("striped", [(False, False), (True, True), (True, False), (False, True)], ids=str)
@pytest.mark.parametrize("name", SHARDED)
def test_shards_merged_are_the_whole(name: str, striped: tuple[bool, bool], config: EagerConfig | None) -> None:
    case = SHARDED[name]
    inputs, options = random_inputs(case)
    base = case.Tk - case.Tq
    expected = eager.forward(stated(inputs, **options), inputs, EagerConfig("blocked", 9, 99, 99))
    for rows, q_start, q_stride in shards(case.Tq, 3, striped[0]):
        states = []
        for columns, k_start, k_stride in shards(case.Tk, 4, striped[1]):
            its = shard_of(inputs, rows, columns)
            positions = Positions(base + q_start, q_stride, k_start, k_stride, q_base=base)
            problem = stated(its, **options, positions=positions, partial=True)
            states.append(eager.forward(problem, its, config or configure(problem)))
        out, lse = merge(*zip(*states, strict=True))
        if inputs.sink is not None:
            out, lse = add_sink(out, lse, inputs.sink)
        torch.testing.assert_close((out, lse), (expected[0][:, rows], expected[1][:, :, rows]))


@pytest.mark.parametrize("striped", [(False, False), (True, True), (True, False)], ids=str)
@pytest.mark.parametrize("name", SHARDED)
def test_gradients_of_shards_sum_to_those_of_the_whole(name: str, striped: tuple[bool, bool]) -> None:
    case = SHARDED[name]
    inputs, options = random_inputs(case)
    inputs = inputs._replace(sink=None)  # a sink is merged once, outside
    base, config = case.Tk - case.Tq, EagerConfig("blocked", 9, 99, 99)
    grad_out, grad_lse = output_gradients(inputs)
    (out, lse), expected = both_ways(stated(inputs, **options), inputs, config, (grad_out, grad_lse))
    total = Gradients(*(None if grad is None else torch.zeros_like(grad) for grad in expected))
    wanted = Wanted(True, True, True, inputs.bias is not None, inputs.alibi_slopes is not None, False)
    sizes = {"q_len": 0, "k_len": 0, "deterministic": False}
    for (rows, q_start, q_stride), (columns, k_start, k_stride) in product(
        shards(case.Tq, 3, striped[0]), shards(case.Tk, 4, striped[1])
    ):
        positions = Positions(base + q_start, q_stride, k_start, k_stride, q_base=base)
        saved = out[:, rows], lse[:, :, rows], grad_out[:, rows], grad_lse[:, :, rows]
        its = shard_of(inputs, rows, columns)
        grads = backward_step(its, *saved, positions=positions, wanted=wanted, backend="eager", **options, **sizes)
        total.query[:, rows] += grads.query
        total.key[:, columns] += grads.key
        total.value[:, columns] += grads.value
        if total.bias is not None:
            total.bias[:, :, rows.view(-1, 1), columns] += grads.bias
        if total.alibi_slopes is not None:
            total.alibi_slopes.add_(grads.alibi_slopes)
    torch.testing.assert_close(total, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_partial_state_is_fp32_and_not_rounded_on_the_way(dtype: torch.dtype) -> None:
    inputs, options = random_inputs(Case(B=1, Tq=9, Tk=9, dtype=dtype))
    positions = Positions(0, 1, 0, 1, q_base=0)
    sizes = {"q_len": 0, "k_len": 0, "deterministic": False}
    out, lse = forward_state(inputs, positions=positions, backend="eager", **options, **sizes)
    assert out.dtype is lse.dtype is torch.float32
    exact = reference.attention(*inputs[:3])[0]
    assert (out - exact).abs().max() < torch.finfo(dtype).eps * exact.abs().max() / 50


def test_batch_start_moves_dropout_to_that_row_of_the_batch() -> None:
    inputs, options = random_inputs(Case(B=3, Tq=9, Tk=9, dtype=F64, dropout_p=0.5))
    whole, _ = eager.forward(stated(inputs, **options), inputs, EagerConfig("blocked", 1, 4, 4))
    last = Inputs(*(t[2:] for t in inputs[:3]), seed=inputs.seed)
    problem = stated(last, **options, batch_start=2)
    torch.testing.assert_close(eager.forward(problem, last, configure(problem))[0], whole[2:])


# Dropout


@pytest.mark.parametrize(("where", "word"), DROPOUT_VECTORS)
def test_dropout_words_are_those_of_the_vectors(where: tuple[int, int, int, int, int], word: int) -> None:
    """A threshold of exactly the word keeps the element, and one more drops it: so the word is this one."""
    seed, offset, head, i, j = where
    pair = torch.tensor([seed, offset])
    row = dropout_words(pair, head, 1, torch.tensor([i]), columns=False)
    column = dropout_words(pair, head, 1, torch.tensor([j]), columns=True)
    assert keep(row, column, word / 2**32).item()
    if word < 2**32 - 1:
        assert not keep(row, column, (word + 1) / 2**32).item()


@pytest.mark.parametrize("dropout_p", [2.0**-32, 0.1, 0.5, 0.9, 1 - 2.0**-32])
@pytest.mark.parametrize("seed", [(0, 0), (-1, 7), (2**62 + 12345, 2**61)], ids=str)
def test_dropout_is_the_rule_bit_for_bit(seed: tuple[int, int], dropout_p: float) -> None:
    pair = torch.tensor(seed)
    rows = dropout_words(pair, 3 * 4, 2 * 4, 5 + torch.arange(33), columns=False)
    columns = dropout_words(pair, 3 * 4, 2 * 4, 2**31 + torch.arange(41), columns=True)
    found = keep(rows[:, :, None], columns[:, None], dropout_p).view(2, 4, 33, 41)
    index = {"q_index": 5 + torch.arange(33), "k_index": 2**31 + torch.arange(41)}
    assert torch.equal(found, reference.dropout_keep(*seed, 2, 4, 33, 41, dropout_p, batch_start=3, **index))


# Memory

LONG = 4096


def _long(length: int, path: str) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    tensors = tuple(torch.randn(1, length, 1, 16).requires_grad_() for _ in range(3))
    options: dict[str, dict[str, Any]] = {
        "flash": {},
        "flash causal": {"causal": True},
        "alibi": {"causal": True, "alibi_slopes": torch.full((1,), 0.1).requires_grad_()},
        "dropout and padding": {
            "causal": True,
            "dropout_p": 0.1,
            "seed": 0,
            "mask": torch.ones(1, 1, 1, length, dtype=torch.bool),
        },
    }
    return tensors, options[path]


@pytest.mark.parametrize("path", ["flash", "flash causal", "alibi", "dropout and padding"])
def test_memory_grows_with_the_length_and_not_with_its_square(path: str) -> None:
    forward, backward = [], []
    for length in (512, LONG, 2 * LONG):  # the first one warms up
        tensors, options = _long(length, path)
        held: list[Tensor] = []
        forward.append(peak_bytes(lambda: held.append(attention(*tensors, **options, backend="eager"))))  # noqa: B023
        grad = torch.randn_like(held[0])
        backward.append(peak_bytes(lambda: held[0].backward(grad)))  # noqa: B023
    for peaks in (forward, backward):
        _, short, long = peaks
        assert short > 0 and long < 2.6 * short, f"{short} bytes at {LONG}, {long} at twice that: quadratic would be 4x"
        assert long < (2 * LONG) ** 2 / 8, f"{long} bytes; one byte per score would be {(2 * LONG) ** 2}"


ENDLESS = 1 << 33
"""Keys of one number each in memory: whoever allocates anything of this length wants 8 GiB or more."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("heads", [(1, 1), (4, 2)], ids=["one head", "gqa"])
@pytest.mark.parametrize("options", [{}, {"alibi": True}, {"dropout_p": 0.5, "seed": 3}, {"mask": True}], ids=str)
def test_a_window_costs_what_it_sees_however_long_the_keys(
    heads: tuple[int, int], dtype: torch.dtype, options: dict[str, Any]
) -> None:
    query = torch.randn(2, 2, heads[0], 16).to(dtype).requires_grad_()
    key = torch.randn(2, 1, heads[1], 16).to(dtype).expand(-1, ENDLESS, -1, -1)
    given = {"window": (3, 0), **options}
    if given.pop("alibi", False):
        given["alibi_slopes"] = torch.ones(heads[0])
    if given.pop("mask", False):
        given["mask"] = torch.ones(2, 1, 2, 1, dtype=torch.bool)

    def call() -> tuple[Tensor, Tensor]:
        out = attention(query, key, key, **given)
        return out, torch.autograd.grad(out, query, torch.ones_like(out))[0]

    peak = peak_bytes(call)
    assert peak < 1 << 20, f"{peak} bytes to see four keys a query"
    assert best_of(3, call)[0] < 1.0
    if "seed" not in given:  # dropout counts keys from the first
        few = query.detach().requires_grad_()
        expected = attention(few, key[:, :5], key[:, :5], **given)
        torch.testing.assert_close(call()[0], expected)
        torch.testing.assert_close(call()[1], torch.autograd.grad(expected.sum(), few)[0])


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_the_backward_of_a_window_holds_the_gradients_and_little_else(bias: bool) -> None:
    length = 1 << 16
    query, key, value = (torch.randn(1, n, 2, 32).requires_grad_() for n in (1, length, length))
    tensors, options = [query, key, value], {}
    if bias:
        options["bias"] = torch.randn(1, 1, 1, length).requires_grad_()
        tensors.append(options["bias"])
    out = attention(query, key, value, window=(700, 0), **options, backend="eager")
    grads: list[Tensor] = []
    peak = peak_bytes(lambda: grads.extend(torch.autograd.grad(out, tensors, torch.ones_like(out))))
    held = sum(grad.numel() * grad.element_size() for grad in grads)
    assert peak < 1.1 * held, f"{peak} bytes, of which {held} are gradients"
    for grad in grads[1:3]:
        assert not grad[:, :-701].any() and grad[:, -701:].any()
    assert not bias or (not grads[3][..., :-701].any() and grads[3][..., -701:].all())


# Speed


def best_of(runs: int, *functions: Callable[[], Any]) -> list[float]:
    """The shortest time of each, taken in turns, so that a busy machine disturbs all of them alike."""
    best = [math.inf] * len(functions)
    for _ in range(runs):
        for n, function in enumerate(functions):
            start = time.perf_counter()
            function()
            best[n] = min(best[n], time.perf_counter() - start)
    return best


def with_backward(function: Callable[..., Tensor], *tensors: Tensor) -> Callable[[], Any]:
    grad = torch.randn_like(function(*tensors))
    return lambda: torch.autograd.grad(function(*tensors), tensors, grad)


@pytest.mark.serial
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "forward and backward"])
def test_the_flash_path_is_as_fast_as_torch(causal: bool, backward: bool) -> None:
    tensors = [torch.randn(1, 1024, 4, 64).requires_grad_(backward) for _ in range(3)]

    def theirs(*qkv: Tensor) -> Tensor:
        heads_first = (t.transpose(1, 2) for t in qkv)
        return F.scaled_dot_product_attention(*heads_first, is_causal=causal).transpose(1, 2)

    def ours(*qkv: Tensor) -> Tensor:
        return attention(*qkv, causal=causal, backend="eager")

    run: Callable[..., Callable[[], Any]] = with_backward if backward else lambda f, *t: lambda: f(*t)
    our_time, their_time = best_of(8, run(ours, *tensors), run(theirs, *tensors))
    assert our_time < 1.5 * their_time, f"{our_time * 1e3:.2f} ms, torch {their_time * 1e3:.2f} ms"


@pytest.mark.serial
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "forward and backward"])
def test_the_blocked_pass_is_within_twice_of_dense_torch(backward: bool) -> None:
    length, heads = 2048, 2
    tensors = [torch.randn(1, length, heads, 64).requires_grad_(backward) for _ in range(3)]
    slopes = torch.full((heads,), 0.05)
    ahead = torch.arange(length)[:, None] - torch.arange(length)
    penalty = slopes[:, None, None] * ahead.abs()

    def dense(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scores = torch.einsum("bihd,bjhd->bhij", query, key) * 64**-0.5 - penalty
        return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), value)

    def ours(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attention(query, key, value, alibi_slopes=slopes, backend="eager")

    run: Callable[..., Callable[[], Any]] = with_backward if backward else lambda f, *t: lambda: f(*t)
    our_time, dense_time = best_of(6, run(ours, *tensors), run(dense, *tensors))
    assert our_time < 2 * dense_time, f"{our_time * 1e3:.1f} ms, dense {dense_time * 1e3:.1f} ms"


@pytest.mark.serial
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("name", "most"), [("sink", 1.6), ("alibi", 1.6), ("softcap", 1.85)])
def test_modifiers_cost_little_beside_a_causal_call_of_sdpa(name: str, most: float, dtype: torch.dtype) -> None:
    query, key, value = (torch.randn(1, 1024, 8, 64).to(dtype) for _ in range(3))
    options: dict[str, dict[str, Any]] = {
        "sink": {"sink": torch.randn(8)},
        "alibi": {"alibi_slopes": 2.0 ** -torch.arange(1.0, 9.0)},
        "softcap": {"softcap": 30.0},
    }
    heads_first = [t.transpose(1, 2) for t in (query, key, value)]
    ours, theirs = least_cpu_time(
        8,
        lambda: attention(query, key, value, causal=True, **options[name]),
        lambda: F.scaled_dot_product_attention(*heads_first, is_causal=True),
    )
    assert ours < most * theirs, f"{ours * 1e3:.2f} ms, SDPA {theirs * 1e3:.2f} ms"


# Regressions


@pytest.mark.parametrize("seed", [1609920709, *range(8)])
@pytest.mark.parametrize("scale", [0.3, 0.6])
def test_gradients_at_a_large_scale_are_within_what_is_earned(scale: float, seed: int) -> None:
    """From the LSE of torch's flash op dV misses its bound here for up to a third of the seeds; fuzzing found one."""
    case = Case(B=1, Tq=63, Tk=63, Hq=9, Hkv=3, D=128, Dv=128, seed=seed, causal=True, scale=scale)
    check_case(case, "eager")
