"""torch's CPU flash op with masks, biases and sinks: contracts that are not the op's own, blocks, memory and speed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cpu_time import least_cpu_time
from stream_attention import attention, explain
from stream_attention.backends.eager import blocked as eager
from stream_attention.backends.eager import torch_cpu
from stream_attention.backends.eager.tuning import EagerConfig, configure, mask_blocks
from stream_attention.backends.reference import attention as reference
from stream_attention.base.problem import UNBOUNDED, Gradients, Inputs, Problem, Wanted, state_problem
from stream_attention_tools.testing import Case, check_case, make, peak_bytes, poisoned_memory

F64 = torch.float64
NAN, INF = math.nan, math.inf


def stated(inputs: Inputs, causal: bool = False) -> Problem:
    scale = inputs.query.shape[-1] ** -0.5
    window = (UNBOUNDED, UNBOUNDED)
    return state_problem(
        inputs, q_len=0, k_len=0, causal=causal, window=window, softcap=0.0, scale=scale, dropout_p=0.0,
        deterministic=False,
    )  # fmt: skip


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


def qkv(q_len: int, k_len: int, heads: tuple[int, int] = (4, 2), dtype: torch.dtype = torch.float32) -> Inputs:
    q_heads, kv_heads = heads
    sizes = (q_len, q_heads), (k_len, kv_heads), (k_len, kv_heads)
    return Inputs(*(drawn(2, *size, 16, seed=n, dtype=dtype) for n, size in enumerate(sizes)))


def both_ways(
    problem: Problem, inputs: Inputs, config: EagerConfig, grad_out: Tensor | None = None
) -> tuple[Tensor, Tensor, Gradients]:
    """Forward and backward of one configuration, in memory that is NaN until it is written."""
    if grad_out is None:
        grad_out = drawn(*inputs.query.shape, seed=9, dtype=inputs.query.dtype)
    wanted = Wanted(sink=inputs.sink is not None)
    with poisoned_memory():
        out, lse = eager.forward(problem, inputs, config)
        its = problem.replace(backward=True)
        return out, lse, eager.backward(its, inputs, config, eager.Saved(out, lse, grad_out, None), wanted)


def tiles(problem: Problem) -> EagerConfig:
    """The blocked pass where the flash op is planned."""
    config = configure(problem)
    assert config.path == "flash"
    return config._replace(path="blocked") if config.block_b else EagerConfig("blocked", 1, 64, 64)


# Agreement of both paths

MASKS: dict[str, Callable[[Tensor], Tensor]] = {
    "keys of each row of the batch": lambda mask: mask[:, :1, :1],
    "queries and keys": lambda mask: mask[:1, :1],
    "heads": lambda mask: mask[:1],
    "everything": lambda mask: mask,
    "queries alone": lambda mask: mask[:, :1, :, :1],
    "nothing but the batch": lambda mask: mask[:, :1, :1, :1],
    "expanded": lambda mask: mask[:, :1, :1].expand(-1, 4, mask.shape[2], -1),
    "keys strided": lambda mask: mask.repeat_interleave(2, -1)[..., ::2],
    "transposed": lambda mask: mask.transpose(2, 3).contiguous().transpose(2, 3),
}


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("kind", ["mask", "bias", "both"])
@pytest.mark.parametrize("shape", MASKS)
def test_masks_and_biases_of_every_shape_agree_with_the_blocked_pass(shape: str, kind: str, causal: bool) -> None:
    inputs = qkv(33, 33 if causal else 70, dtype=F64)
    full = 2, 4, 33, inputs.key.shape[1]
    mask = torch.rand(full, generator=torch.Generator().manual_seed(4)) < 0.6
    mask[:, :, 5:9] = False
    mask[..., :2] = False
    bias = drawn(*full, seed=5, dtype=F64).masked_fill(mask.roll(1, -1), -INF)
    its = inputs._replace(
        mask=MASKS[shape](mask) if kind != "bias" else None, bias=MASKS[shape](bias) if kind != "mask" else None
    )
    problem = stated(its, causal)
    flash, blocked = (both_ways(problem, its, config) for config in (configure(problem), tiles(problem)))
    torch.testing.assert_close(flash, blocked)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, F64], ids=str)
@pytest.mark.parametrize("aux", [torch.float16, torch.bfloat16, torch.float32, F64], ids=str)
def test_a_bias_of_any_dtype_is_added_as_it_is(dtype: torch.dtype, aux: torch.dtype) -> None:
    inputs = qkv(20, 30, dtype=dtype)
    bias = drawn(1, 4, 20, 30, seed=5, dtype=aux)
    bias[..., 7] = -INF
    bias[:, :, 3] = torch.finfo(aux).min  # huge is not -inf: the row sees every key
    its = inputs._replace(bias=bias)
    out, lse, _ = both_ways(stated(its), its, configure(stated(its)))
    exact, exact_lse = reference.attention(*(t.double() for t in inputs[:3]), bias=bias.double())
    tolerance = 4 * torch.finfo(dtype).eps
    others = [row for row in range(20) if row != 3]
    torch.testing.assert_close(out[:, others].double(), exact[:, others], atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse[:, :, others].double(), exact_lse[:, :, others], atol=1e-4, rtol=1e-5)
    assert lse[:, :, 3].isfinite().all() and out[:, 3].any()


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("kind", ["mask", "bias", "both"])
def test_blocks_of_a_converted_mask_are_the_whole(kind: str, causal: bool) -> None:
    length = 1500
    inputs = qkv(length, length, dtype=F64)
    mask = torch.rand(2, 1, length, length, generator=torch.Generator().manual_seed(4)) < 0.6
    mask[1, :, 1200:1210] = False
    assert mask_blocks(2, length, (2, 1, length, length)) == (1, 1280)
    bias = drawn(1, 1, length, length, seed=5, dtype=torch.float32)
    its = inputs._replace(mask=None if kind == "bias" else mask, bias=None if kind == "mask" else bias)
    problem = stated(its, causal)
    flash, blocked = (both_ways(problem, its, config) for config in (configure(problem), tiles(problem)))
    torch.testing.assert_close(flash, blocked)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, F64], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {"mask": (2, 1, 1, 48)},
        {"mask": (48, 48), "causal": True, "lse_grad": True},
        {"mask": (1, 4, 48, 48), "sink": True, "scale": 0.7},
        {"bias": (1, 4, 48, 48)},
        {"bias": (2, 1, 1, 48), "bias_hides": True, "mask": (48, 1), "causal": True},
        {"sink": True, "causal": True, "lse_grad": True},
    ],
    ids=str,
)
def test_results_and_gradients_are_within_the_tolerance(options: dict[str, Any], dtype: torch.dtype) -> None:
    for seed in range(4):
        case = Case(B=2, Tq=48, Tk=48, Hq=4, Hkv=2, D=40, Dv=40, dtype=dtype, seed=seed, **options)
        check_case(case, "eager")


# What is masked does not exist


@pytest.mark.parametrize("filler", [NAN, INF, -INF, 3e38], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_masked_keys_values_queries_and_gradients_may_hold_anything(
    causal: bool, dtype: torch.dtype, filler: float
) -> None:
    clean = qkv(40, 40, dtype=dtype)
    mask = torch.ones(2, 1, 40, 40, dtype=torch.bool)
    mask[0, :, :, 30:] = False
    mask[:, :, 11:14] = False
    grad_out = drawn(*clean.query.shape, seed=9, dtype=dtype)
    results = []
    for content in (0.0, filler):
        query, key, value, grad = (t.clone() for t in (*clean[:3], grad_out))
        key[0, 30:] = value[0, 30:] = content
        query[:, 11:14] = grad[:, 11:14] = content
        its = Inputs(query, key, value, mask=mask)
        problem = stated(its, causal)
        assert configure(problem).path == "flash"
        results.append(both_ways(problem, its, configure(problem), grad))
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)
    assert all(result.isfinite().all() for result in (results[1][0], *results[1][2][:3]))


def test_a_nan_that_some_query_sees_reaches_it_and_the_blocked_pass_computes_the_rest() -> None:
    inputs = qkv(16, 16)
    inputs.key[0, 3] = NAN
    visible = torch.ones(2, 1, 16, 16, dtype=torch.bool)
    visible[0, :, 1:, 3] = False
    its = inputs._replace(mask=visible)
    problem = stated(its)
    assert torch_cpu.forward(problem, its) is None
    out, lse, _ = both_ways(problem, its, configure(problem))
    assert out[0, 0].isnan().all() and lse[0, :, 0].isnan().all()
    assert out[0, 1:].isfinite().all() and out[1].isfinite().all() and lse[0, :, 1:].isfinite().all()


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("hides", ["mask", "bias"])
def test_rows_that_see_no_key_are_empty_and_an_lse_of_0_is_none_of_them(hides: str, causal: bool) -> None:
    inputs = qkv(12, 12)
    visible = torch.ones(2, 1, 12, 12, dtype=torch.bool)
    visible[0, :, :, :3] = False  # in a causal call rows 0 to 2 see nothing
    visible[1, :, 5] = False
    visible[1, :, 7, 1:] = False
    inputs.query[1, 7] = inputs.value[1, 0] = 0.0  # one key, score 0, value 0: an output of 0 with LSE 0
    its = inputs._replace(mask=visible) if hides == "mask" else inputs._replace(bias=torch.where(visible, 0.0, -INF))
    problem = stated(its, causal)
    out, lse, grads = both_ways(problem, its, configure(problem))
    empty = torch.zeros(2, 4, 12, dtype=torch.bool)
    empty[0, :, :3] = causal
    empty[1, :, 5] = True
    assert torch.equal(lse == -INF, empty)
    assert not lse[1, :, 7].any() and not out[1, 7].any()
    for rows in (out, grads.query):
        assert rows is not None and not rows.transpose(1, 2)[empty].any() and rows.isfinite().all()


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_a_nan_in_a_bias_reaches_what_its_row_sees(causal: bool) -> None:
    inputs = qkv(10, 10, dtype=F64)
    bias = drawn(2, 1, 10, 10, seed=5, dtype=F64)
    bias[0, 0, 4, 2] = NAN
    bias[1, 0, 3, 6] = NAN  # behind the query: in a causal call nothing sees it
    its = inputs._replace(bias=bias)
    tensors = [t.clone().requires_grad_() for t in inputs[:3]]
    outputs = reference.attention(*tensors, bias=bias, causal=causal)
    grad_out = drawn(*inputs.query.shape, seed=9, dtype=F64)
    expected = torch.autograd.grad(outputs[0], tensors, grad_out)
    problem = stated(its, causal)
    out, lse, grads = both_ways(problem, its, configure(problem), grad_out)
    torch.testing.assert_close((out, lse), tuple(t.detach() for t in outputs), equal_nan=True)
    torch.testing.assert_close(tuple(grads[:3]), expected, equal_nan=True)


# Gradients


def test_a_bias_that_wants_a_gradient_gets_it_and_one_that_does_not_keeps_the_op() -> None:
    inputs, grad_out = qkv(24, 24), drawn(2, 24, 4, 16, seed=9)
    bias = drawn(1, 4, 24, 24, seed=5)
    results = []
    for wants in (False, True):
        tensors = [t.clone().requires_grad_() for t in inputs[:3]]
        its_bias = bias.clone().requires_grad_(wants)
        out = attention(*tensors, bias=its_bias)
        results.append(torch.autograd.grad(out, [*tensors, its_bias][: 4 if wants else 3], grad_out))
    torch.testing.assert_close(results[0], results[1][:3])
    exact = [t.double().requires_grad_() for t in (*inputs[:3], bias)]
    out, _ = reference.attention(*exact[:3], bias=exact[3])
    d_bias = torch.autograd.grad(out, exact[3], grad_out.double())[0]
    torch.testing.assert_close(results[1][3].double(), d_bias, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("options", [{"mask": True}, {"sink": True}], ids=str)
def test_dv_has_the_same_bits_with_a_gradient_of_the_lse(options: dict[str, Any]) -> None:
    inputs, grad_out, grad_lse = qkv(40, 40), drawn(2, 40, 4, 16, seed=9), drawn(2, 4, 40, seed=8)
    given = {"mask": torch.arange(40).view(1, 1, 1, 40) < 30} if "mask" in options else {"sink": drawn(4, seed=7)}
    found = []
    for weight in (0.0, 1.0):
        tensors = [t.clone().requires_grad_() for t in inputs[:3]]
        outputs = attention(*tensors, **given, return_lse=True)
        found.append(torch.autograd.grad(outputs, tensors, (grad_out, weight * grad_lse)))
    assert torch.equal(found[0][2], found[1][2])
    assert not torch.equal(found[0][0], found[1][0])


@pytest.mark.parametrize("dim", [64, 80, 128])
@pytest.mark.parametrize("dtype", [torch.float32, F64], ids=str)
def test_the_backward_recomputes_the_scores_of_the_forward(dtype: torch.dtype, dim: int) -> None:
    """A query that sees one key: its probability is 1, to the last bit, whatever the scale."""
    query, key = (drawn(1, 60, 2, dim, seed=n, dtype=dtype) for n in range(2))
    value = torch.ones_like(key).requires_grad_()
    mask = torch.eye(60, dtype=torch.bool)
    for scale in (None, 1.7, 0.3):
        out = attention(query, key, value, mask=mask, scale=scale)
        assert torch.equal(torch.autograd.grad(out.sum(), value)[0], torch.ones_like(value))
        one_key = value[:, :1].detach().requires_grad_()
        out = attention(query, key[:, :1], one_key, scale=scale)
        assert torch.equal(torch.autograd.grad(out.sum(), one_key)[0], torch.full_like(one_key, 60.0))


# What is said of it


def test_explain_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    query, key, value, _ = make(Case(B=1, Tq=64, Tk=64))
    explain(query, key, value, mask=torch.ones(64, 64, dtype=torch.bool))
    assert "backend   eager: torch's CPU flash op; fallback for gradients of the LSE" in capsys.readouterr().out


# Memory


@pytest.mark.parametrize(("shape", "rows"), [((1, 1, 6000, 6000), 256), ((3, 8, 6000, 6000), 64)], ids=str)
def test_blocks_of_a_mask_are_small(shape: tuple[int, int, int, int], rows: int) -> None:
    block_b, block_q = mask_blocks(3, 6000, shape)
    assert block_q == rows and block_b == (3 if shape[0] == 1 else 1)
    assert mask_blocks(3, 200, (3, 1, 200, 200)) == (3, 200)
    assert mask_blocks(3, 1 << 20, (3, 1, 1, 1 << 20)) == (2, 1 << 20)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_mask_is_not_copied_whole(direction: str) -> None:
    length = 6000
    tensors = [torch.randn(1, length, 1, 16).requires_grad_(direction == "backward") for _ in range(3)]
    mask = torch.ones(length, length, dtype=torch.bool)
    mask[:, -7:] = False
    attention(*(t[:, :64] for t in tensors), mask=mask[:64, :64])
    if direction == "forward":
        peak = peak_bytes(lambda: attention(*tensors, mask=mask))
    else:
        out = attention(*tensors, mask=mask)
        peak = peak_bytes(lambda: torch.autograd.grad(out, tensors, torch.ones_like(out)))
    assert peak < length**2 / 2, f"{peak} bytes; the mask has {length**2}, converted at once 4 times that"


# Speed


@pytest.mark.serial
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "forward and backward"])
@pytest.mark.parametrize("kind", ["mask", "key padding", "bias"])
def test_masks_cost_what_they_cost_in_sdpa(kind: str, backward: bool, dtype: torch.dtype) -> None:
    length, heads = 512, 4
    tensors = [torch.randn(1, length, heads, 64).to(dtype).requires_grad_(backward) for _ in range(3)]
    given: Tensor = {
        "mask": torch.rand(1, 1, length, length) < 0.7,
        "key padding": (torch.arange(length) < 400).view(1, 1, 1, length),
        "bias": torch.randn(1, heads, length, length).to(dtype),
    }[kind]
    grad = torch.randn(1, length, heads, 64).to(dtype)

    def ours() -> Any:
        out = attention(*tensors, **{"bias" if kind == "bias" else "mask": given})
        return torch.autograd.grad(out, tensors, grad) if backward else out

    def theirs() -> Any:
        out = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in tensors), attn_mask=given).transpose(1, 2)
        return torch.autograd.grad(out, tensors, grad) if backward else out

    our_time, their_time = least_cpu_time(12, ours, theirs)
    assert our_time < 1.35 * their_time, f"{our_time * 1e3:.2f} ms, SDPA {their_time * 1e3:.2f} ms"
