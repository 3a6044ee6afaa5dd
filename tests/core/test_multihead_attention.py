"""StreamMultiheadAttention: torch.nn.MultiheadAttention in all but the kernel."""

from __future__ import annotations

import copy
import io
import math
import random
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stream_attention import attention
from stream_attention.core.multihead_attention import StreamMultiheadAttention
from stream_attention_tools.testing import peak_bytes

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
NAN, INF = math.nan, math.inf
causal_mask = nn.Transformer.generate_square_subsequent_mask


@dataclass(frozen=True)
class Case:
    """One call: the constructor's options, who attends to whom, which masks, and what is asked back."""

    B: int = 2
    Tq: int = 5
    Tk: int = 7
    H: int = 4
    D: int = 8
    attends: str = "apart"  # "self": one tensor; "cross": key is value; "apart": three tensors
    layout: str = "batch first"  # or "time first", or "unbatched" (B is 1 then)
    bias: bool = True
    add_bias_kv: bool = False
    add_zero_attn: bool = False
    kdim: int | None = None
    vdim: int | None = None
    padding: str | None = None  # "bool" or "float"
    mask: str | None = None  # "bool", "float", "bool by head", "float by head", "causal bool", "causal float"
    is_causal: bool = False
    need_weights: bool = False
    average: bool = True
    training: bool = True
    dtype: torch.dtype = F32
    autocast: bool = False  # to bf16, of fp32 inputs
    seed: int = 0


def build(case: Case) -> nn.MultiheadAttention:
    """torch's module of a case, in fp32, no parameter of which is 0."""
    torch.manual_seed(case.seed)
    module = nn.MultiheadAttention(
        case.H * case.D,
        case.H,
        bias=case.bias,
        add_bias_kv=case.add_bias_kv,
        add_zero_attn=case.add_zero_attn,
        kdim=case.kdim,
        vdim=case.vdim,
        batch_first=case.layout == "batch first",
    )
    for parameter in module.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter)
    return module.train(case.training)


def call_of(case: Case) -> tuple[nn.MultiheadAttention, dict[str, Tensor], dict[str, Any]]:
    """torch's module, the tensors that may want a gradient, and the other arguments. Every query sees the first key."""
    module = build(case).to(case.dtype)
    E, B = case.H * case.D, 1 if case.layout == "unbatched" else case.B
    Tk = case.Tq if case.attends == "self" else case.Tk
    widths = {"query": (case.Tq, E), "key": (Tk, case.kdim or E), "value": (Tk, case.vdim or E)}
    names = {"self": ["query"], "cross": ["query", "key"], "apart": ["query", "key", "value"]}[case.attends]
    tensors = {}
    for name in names:
        length, width = widths[name]
        shape = {"batch first": (B, length, width), "time first": (length, B, width), "unbatched": (length, width)}
        tensors[name] = torch.randn(shape[case.layout])
    options: dict[str, Any] = {"need_weights": case.need_weights, "average_attn_weights": case.average}
    options["is_causal"] = case.is_causal

    def put(name: str, hidden: Tensor, kind: str) -> None:
        if "bool" in kind:
            options[name] = hidden
        else:
            tensors[name] = torch.randn(hidden.shape).masked_fill(hidden, -INF)

    if case.padding:
        hidden = torch.rand(B, Tk) < 0.4
        hidden[:, :1] = False
        put("key_padding_mask", hidden[0] if case.layout == "unbatched" else hidden, case.padding)
    if case.mask and "causal" in case.mask:
        hidden = torch.ones(case.Tq, Tk, dtype=torch.bool).triu(1)
        if "bool" in case.mask:
            options["attn_mask"] = hidden
        else:
            options["attn_mask"] = torch.zeros(case.Tq, Tk).masked_fill(hidden, -INF)
    elif case.mask:
        hidden = torch.rand(*((B * case.H,) if "by head" in case.mask else ()), case.Tq, Tk) < 0.4
        hidden[..., :1] = False
        put("attn_mask", hidden, case.mask)
    return module, {name: tensor.to(case.dtype) for name, tensor in tensors.items()}, options


def autocast_of(case: Case) -> torch.autocast:
    return torch.autocast("cpu", BF16, enabled=case.autocast)


def ulp(case: Case) -> float:
    return torch.finfo(BF16 if case.autocast else case.dtype).eps


def output_gradient(out: Tensor) -> Tensor:
    """A random gradient that every dtype holds exactly."""
    return torch.randn(out.shape, generator=torch.Generator().manual_seed(5)).bfloat16().to(F16).to(out.dtype)


def results(module: nn.Module, tensors: dict[str, Tensor], options: dict[str, Any]) -> dict[str, Tensor | None]:
    """Output, weights, and the gradients of every tensor and parameter for random gradients of both."""
    dtype = next(module.parameters()).dtype
    leaves = {name: tensor.detach().to(dtype).requires_grad_() for name, tensor in tensors.items()}
    options = {k: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in options.items()}
    masks = {name: leaf for name, leaf in leaves.items() if "mask" in name}
    key = leaves.get("key", leaves["query"])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Support for mismatched")  # torch's word on bool beside float
        out, weights = module(leaves["query"], key, leaves.get("value", key), **options, **masks)
    wanted = leaves | dict(module.named_parameters())
    ends = [x for x in (out, weights) if x is not None]
    grads = torch.autograd.grad(ends, list(wanted.values()), [output_gradient(x) for x in ends], allow_unused=True)
    return {"out": out, "weights": weights} | {f"d_{name}": g for name, g in zip(wanted, grads, strict=True)}


def largest(x: Tensor) -> float:
    return x.abs().max().item() if x.numel() else 0.0


def delta_noise(case: Case, module: nn.MultiheadAttention, tensors: dict[str, Tensor], options: dict[str, Any]) -> Any:
    """By gradient, what no fused backward avoids: sum_j p_ij dp_ij is known as dO_i · O_i, from an O that was rounded.

    Its error acts as a gradient of the LSE does (stream_attention_tools.testing.tolerance), so the reference says what
    that does to the rest. `module` is fp64, and the roundings are drawn a few times.
    """
    ours = StreamMultiheadAttention.from_torch(module)
    leaves = {name: tensor.double().requires_grad_() for name, tensor in tensors.items()}
    key = leaves.get("key", leaves["query"])
    q, k, v = (ours._split_heads(x) for x in ours._project(leaves["query"], key, leaves.get("value", key)))
    k, v = ours._with_extra_keys(k, v)
    given = options | leaves
    mask, bias = ours._masks(q, given.get("key_padding_mask"), given.get("attn_mask"))
    if case.is_causal and not case.padding:
        mask, bias = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(), None
    heads, lse = attention(q, k, v, mask=mask, bias=bias, return_lse=True, backend="reference")
    grad_heads = ours._split_heads(output_gradient(leaves["query"]) @ module.out_proj.weight)
    wanted = leaves | dict(module.named_parameters())
    sum_eps = torch.finfo(torch.promote_types(case.dtype, F32)).eps
    found = dict.fromkeys((f"d_{name}" for name in wanted), 0.0)
    for _ in range(4):
        terms, signs = grad_heads * heads, torch.randint(2, lse.shape) * 2 - 1
        of_delta = (terms * ulp(case) * (torch.rand_like(heads) - 0.5)).sum(-1).mT  # of O
        of_delta = of_delta + signs * 2 * sum_eps * terms.abs().sum(-1).mT  # of the sum itself, and of dp
        grads = torch.autograd.grad(lse, list(wanted.values()), of_delta, allow_unused=True, retain_graph=True)
        for name, grad in zip(found, grads, strict=True):
            found[name] = max(found[name], 0.0 if grad is None else largest(grad))
    return found


def torchs_errors(case: Case) -> dict[str, float]:
    """By result, what torch's own module errs against itself in fp64, as a share of the largest element.

    One draw of rounding noise may be a lucky one: of three seeds the largest counts.
    """
    found: dict[str, float] = {}
    for seed in range(case.seed, case.seed + 3):
        drawn = replace(case, seed=seed)
        module, tensors, options = call_of(drawn)
        with autocast_of(case):
            peers = results(module, tensors, options)
        for name, truth in results(copy.deepcopy(module).double(), tensors, options).items():
            if truth is not None:
                error = largest(peers[name].double() - truth)
                found[name] = max(found.get(name, 0.0), error / largest(truth) if error else 0.0)
    return found


def shares(case: Case) -> dict[str, float]:
    """By result, our error as a share of what is allowed: twice torch's own, thrice for gradients, and rounding noise.

    For fp64 torch's error is what fp32 errs, times the ratio of their ulps, and once more than elsewhere: there the
    truth itself is off by as much.
    """
    module, tensors, options = call_of(case)
    wide = copy.deepcopy(module).double()
    exact = results(wide, tensors, options)
    with autocast_of(case):
        peers = results(module, tensors, options)
        ours = results(StreamMultiheadAttention.from_torch(module), tensors, options)
    noise = {} if case.need_weights else delta_noise(case, wide, tensors, options)
    earned = torchs_errors(replace(case, dtype=F32) if case.dtype is F64 else case)
    eps, shrink = ulp(case), 2.0**-29 if case.dtype is F64 else 1.0
    found = {}
    for name, truth in exact.items():
        actual = ours[name]
        assert (actual is None) == (truth is None), name
        if truth is not None:
            assert actual.shape == truth.shape and actual.dtype is peers[name].dtype, name
            factor = (3 if name.startswith("d_") else 2) + (case.dtype is F64)
            allowed = (factor * earned[name] * shrink + eps) * largest(truth) + noise.get(name, 0.0)
            error = largest(actual.double() - truth)
            found[name] = error / allowed if error else 0.0
    return found


def check(case: Case) -> None:
    wrong = {name: share for name, share in shares(case).items() if not share <= 1}
    assert not wrong, f"{case}: error as a share of what is allowed: {wrong}"


def pair(*, training: bool = False, **options: Any) -> tuple[nn.MultiheadAttention, StreamMultiheadAttention]:
    """torch's module of width 32 with 4 heads, batch first, and ours on the same parameters."""
    torch.manual_seed(0)
    module = nn.MultiheadAttention(32, 4, batch_first=True, **options).train(training)
    nn.init.normal_(module.out_proj.bias) if module.out_proj.bias is not None else None
    return module, StreamMultiheadAttention.from_torch(module)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# What it means


def transparent(T: int, dropout: float = 0.0) -> StreamMultiheadAttention:
    """One head whose queries weigh all keys alike and whose projections pass values through: `out` is the weights."""
    module = StreamMultiheadAttention(T, 1, dropout=dropout, bias=False, batch_first=True)
    with torch.no_grad():
        module.in_proj_weight.copy_(torch.cat((torch.zeros(2 * T, T), torch.eye(T))))
        module.out_proj.weight.copy_(torch.eye(T))
    return module


@pytest.mark.parametrize("need_weights", [True, False])
def test_true_hides_and_floats_are_added(need_weights: bool) -> None:
    module, x = transparent(4), torch.eye(4)[None]
    hidden = torch.tensor([[False, True, True, True], [False, False, True, True]] * 2)
    out, _ = module(x, x, x, attn_mask=hidden, need_weights=need_weights)
    expected = torch.tensor([[1.0, 0, 0, 0], [0.5, 0.5, 0, 0]] * 2)
    torch.testing.assert_close(out[0], expected)
    out, _ = module(x, x, x, key_padding_mask=torch.tensor([[0.0, math.log(3), -INF, -INF]]), need_weights=need_weights)
    torch.testing.assert_close(out[0], torch.tensor([[0.25, 0.75, 0, 0]]).expand(4, 4))


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("kind", ["padding bool", "padding float", "mask bool", "mask float", "both bool", "by head"])
def test_a_query_that_sees_no_key_gets_the_bias_of_the_output(kind: str, need_weights: bool) -> None:
    torchs, ours = pair()
    x = normal(2, 5, 32).requires_grad_()
    rows, columns = torch.zeros(5, 5, dtype=torch.bool), torch.zeros(2, 5, dtype=torch.bool)
    options: dict[str, Any] = {"need_weights": need_weights}
    blind = torch.zeros(2, 5, dtype=torch.bool)
    if "padding" in kind:
        columns[1] = blind[1] = True
    elif kind == "both bool":  # only together do they hide everything
        columns[1, :2], rows[3, 2:], blind[1, 3] = True, True, True
    else:
        rows[3] = blind[:, 3] = True
    if "padding" in kind or kind == "both bool":
        options["key_padding_mask"] = torch.zeros(2, 5).masked_fill(columns, -INF) if "float" in kind else columns
    if kind == "by head":
        options["attn_mask"] = rows.expand(8, 5, 5)
    elif "padding" not in kind:
        options["attn_mask"] = torch.zeros(5, 5).masked_fill(rows, -INF) if "float" in kind else rows
    expected = torchs(x, x, x, **options)[0]
    assert not need_weights or expected[blind].isnan().all()  # what not to do
    out, weights = ours(x, x, x, **options)
    assert torch.equal(out[blind], ours.out_proj.bias.expand_as(out[blind]))
    torch.testing.assert_close(out[~blind], expected[~blind])
    if weights is not None:
        assert not weights[blind].any()
        torch.testing.assert_close(weights[~blind].sum(-1), torch.ones(int((~blind).sum())))
    grads = torch.autograd.grad(out.square().sum(), (x, *ours.parameters()))
    assert all(grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize("need_weights", [True, False])
def test_padding_may_hold_anything(need_weights: bool) -> None:
    _, ours = pair()
    query, key = normal(2, 3, 32), normal(2, 6, 32, seed=1)
    padding = torch.arange(6) >= torch.tensor([[4], [6]])
    expected = ours(query, key, key, key_padding_mask=padding, need_weights=need_weights)
    key[padding] = NAN
    found = ours(query, key, key, key_padding_mask=padding, need_weights=need_weights)
    assert torch.equal(found[0], expected[0])
    assert not need_weights or torch.equal(found[1], expected[1])


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("name", ["attn_mask", "key_padding_mask"])
def test_a_nan_in_a_float_mask_is_added_as_in_torch(name: str, need_weights: bool) -> None:
    torchs, ours = pair()
    x, shape = normal(2, 5, 32), (5, 5) if name == "attn_mask" else (2, 5)
    mask = torch.zeros(shape)
    mask[1, 3] = NAN
    options: dict[str, Any] = {name: mask, "need_weights": need_weights}
    expected, out = torchs(x, x, x, **options)[0], ours(x, x, x, **options)[0]
    assert expected.isnan().any() and expected.isfinite().any()
    torch.testing.assert_close(out, expected, equal_nan=True)


def test_dropout_of_the_fused_call_drops_weights_and_scales_the_rest() -> None:
    module, x = transparent(64, dropout=0.25).train(), torch.eye(64).expand(3, -1, -1)
    torch.manual_seed(1)
    out = module(x, x, x, need_weights=False)[0]
    kept = out != 0
    torch.testing.assert_close(out, kept / 64 / 0.75)
    assert abs(kept.float().mean().item() - 0.75) < 5 * math.sqrt(0.25 * 0.75 / kept.numel())
    assert not torch.equal(kept, (module(x, x, x, need_weights=False)[0] != 0))  # drawn anew
    torch.manual_seed(1)
    assert torch.equal(out, module(x, x, x, need_weights=False)[0])
    torch.testing.assert_close(module.eval()(x, x, x, need_weights=False)[0], torch.full((3, 64, 64), 1 / 64))


@pytest.mark.parametrize("average", [True, False])
def test_output_and_weights_are_of_one_draw_of_dropout(average: bool) -> None:
    module, x = transparent(32, dropout=0.5).train(), torch.eye(32).expand(2, -1, -1)
    out, weights = module(x, x, x, average_attn_weights=average)
    assert torch.equal(out, weights if average else weights[:, 0])  # values are the identity
    torch.testing.assert_close(weights.unique(), torch.tensor([0, 1 / 16]))


@pytest.mark.parametrize("need_weights", [True, False])
def test_dropout_of_everything_leaves_the_bias_as_in_torch(need_weights: bool) -> None:
    x = normal(2, 5, 32)
    for module in pair(dropout=1.0, training=True):
        out, _ = module(x, x, x, need_weights=need_weights)
        assert torch.equal(out, module.out_proj.bias.expand(2, 5, 32))
        grads = torch.autograd.grad(out.sum(), (module.in_proj_weight, module.in_proj_bias))
        assert not any(grad.any() for grad in grads)


def test_the_fused_call_expands_no_mask() -> None:
    """Beyond tiles of 2 MiB, a few at a time, it holds `~attn_mask`: 4 MiB, which for each batch entry would be 16."""
    module, T = StreamMultiheadAttention(16, 1, batch_first=True), 2048
    x, padding, mask = torch.randn(4, T, 16), torch.rand(4, T) < 0.1, torch.rand(T, T) < 0.1

    def step() -> None:
        module(x, x, x, key_padding_mask=padding, attn_mask=mask, need_weights=False)[0].sum().backward()

    assert peak_bytes(step) < 20 << 20


# Agreement with torch


CASES = {
    "one tensor": Case(attends="self"),
    "one tensor, time first": Case(attends="self", layout="time first"),
    "one tensor, unbatched": Case(attends="self", layout="unbatched"),
    "key is value": Case(attends="cross"),
    "three tensors, time first": Case(layout="time first"),
    "three tensors, unbatched": Case(layout="unbatched"),
    "kdim and vdim": Case(kdim=6, vdim=10),
    "vdim alone, unbatched": Case(vdim=12, layout="unbatched"),
    "no bias": Case(attends="self", bias=False),
    "kdim without bias": Case(kdim=6, bias=False, layout="time first"),
    "add_bias_kv": Case(add_bias_kv=True),
    "add_zero_attn": Case(add_zero_attn=True),
    "both extra keys, under masks": Case(add_bias_kv=True, add_zero_attn=True, padding="bool", mask="bool by head"),
    "both extra keys, float masks": Case(add_bias_kv=True, add_zero_attn=True, padding="float", mask="float"),
    "padding, bool": Case(padding="bool"),
    "padding, float": Case(padding="float"),
    "padding, unbatched": Case(padding="bool", layout="unbatched"),
    "mask, bool": Case(mask="bool"),
    "mask, float": Case(mask="float"),
    "mask by head, bool": Case(mask="bool by head"),
    "mask by head, float": Case(mask="float by head"),
    "mask by head, unbatched": Case(mask="float by head", layout="unbatched"),
    "padding and mask, bool": Case(padding="bool", mask="bool"),
    "padding and mask, float": Case(padding="float", mask="float"),
    "padding bool, mask float": Case(padding="bool", mask="float"),
    "padding float, mask bool": Case(padding="float", mask="bool by head"),
    "hint, square": Case(attends="self", mask="causal float", is_causal=True),
    "hint, more keys": Case(Tq=4, Tk=9, mask="causal bool", is_causal=True),
    "hint, more queries": Case(Tq=9, Tk=4, mask="causal bool", is_causal=True),
    "hint hides the extra keys": Case(Tk=5, add_bias_kv=True, add_zero_attn=True, mask="causal bool", is_causal=True),
    "hint beside padding: the mask": Case(attends="self", mask="causal bool", is_causal=True, padding="bool"),
    "hint about another mask": Case(attends="self", mask="bool", is_causal=True),
    "one query": Case(Tq=1, mask="float"),
    "one head": Case(H=1, D=32),
    "head dim 1": Case(H=8, D=1),
    "longer than a tile": Case(B=1, Tq=300, Tk=530, H=2, padding="bool"),
    "autocast": Case(autocast=True, padding="bool", mask="float"),
    "autocast, extra keys": Case(autocast=True, attends="self", add_bias_kv=True, add_zero_attn=True),
    "fp16": Case(dtype=F16, padding="bool"),
    "bf16": Case(dtype=BF16, mask="float"),
    "fp64": Case(dtype=F64, padding="float", mask="bool"),
}


@pytest.mark.parametrize("need_weights", [False, True], ids=["fused", "weights"])
@pytest.mark.parametrize("name", CASES)
def test_it_errs_no_more_than_torch(name: str, need_weights: bool) -> None:
    check(replace(CASES[name], need_weights=need_weights))


@pytest.mark.parametrize("layout", ["batch first", "unbatched"])
def test_weights_by_head_err_no_more_than_torch(layout: str) -> None:
    check(Case(need_weights=True, average=False, padding="bool", layout=layout))


def random_case(seed: int) -> Case:
    draw = random.Random(seed)
    attends = draw.choice(["self", "cross", "apart"])
    widths = draw.choice([(None, None), (6, 10), (None, 12)]) if attends == "apart" else (None, None)
    mask = draw.choice([None, "bool", "float", "bool by head", "float by head", "causal bool", "causal float"])
    dtype = draw.choice([F16, BF16, F32, F32, F64])
    return Case(
        B=draw.randint(1, 3),
        Tq=draw.randint(4, 17),
        Tk=draw.randint(3, 17),
        H=draw.randint(1, 4),
        D=draw.choice([4, 8, 16]),
        attends=attends,
        layout=draw.choice(["batch first", "time first", "unbatched"]),
        bias=draw.random() < 0.7,
        add_bias_kv=draw.random() < 0.3,
        add_zero_attn=draw.random() < 0.3,
        kdim=widths[0],
        vdim=widths[1],
        padding=draw.choice([None, "bool", "float"]),
        mask=mask,
        is_causal=mask is not None and "causal" in mask and draw.random() < 0.6,
        need_weights=draw.random() < 0.5,
        average=draw.random() < 0.5,
        training=draw.random() < 0.5,
        dtype=dtype,
        autocast=dtype is F32 and draw.random() < 0.3,
        seed=seed,
    )


@pytest.mark.parametrize("first", range(0, 120, 20))
def test_random_combinations_err_no_more_than_torch(first: int) -> None:
    for seed in range(first, first + 20):
        check(random_case(seed))


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("masks", ["", "padding", "mask", "padding mask"])
def test_it_agrees_with_torchs_inference_fast_path(masks: str, need_weights: bool) -> None:
    torchs, ours = pair()
    x = normal(2, 6, 32)
    options: dict[str, Any] = {"need_weights": need_weights}
    if "padding" in masks:
        options["key_padding_mask"] = torch.arange(6) >= torch.tensor([[4], [6]])
    if "mask" in masks:
        options["attn_mask"] = torch.ones(6, 6, dtype=torch.bool).triu(1)
    with torch.no_grad():
        torch.testing.assert_close(ours(x, x, x, **options), torchs(x, x, x, **options))


def test_a_gradient_through_the_weights_alone_reaches_the_projections() -> None:
    grads = []
    for module in pair():
        x = normal(2, 5, 32).requires_grad_()
        weights = module(x, x, x)[1]
        grads.append(torch.autograd.grad(weights.square().sum(), (x, module.in_proj_weight)))
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize(("B", "Tq", "Tk"), [(0, 3, 4), (2, 0, 4), (2, 3, 0), (0, 0, 0)])
def test_nothing_in_gives_nothing_out(B: int, Tq: int, Tk: int, need_weights: bool) -> None:
    _, ours = pair()
    query, key = torch.zeros(B, Tq, 32, requires_grad=True), torch.zeros(B, Tk, 32, requires_grad=True)
    hidden = {"key_padding_mask": torch.zeros(B, Tk, dtype=torch.bool), "attn_mask": torch.zeros(B * 4, Tq, Tk)}
    for masks in ({}, hidden):
        out, weights = ours(query, key, key, need_weights=need_weights, **masks)
        assert torch.equal(out, ours.out_proj.bias.expand(B, Tq, 32))
        assert weights is None or weights.shape == (B, Tq, Tk)
        grads = torch.autograd.grad(out.sum(), (query, key, ours.in_proj_weight), allow_unused=True)
        assert not any(grad is not None and grad.any() for grad in grads)


def test_one_key_is_the_whole_answer() -> None:
    """Every weight is 1 and has no gradient; an error of the backward's delta would be all there is."""
    torchs, ours = pair()
    query, key = normal(2, 5, 32).requires_grad_(), normal(2, 1, 32, seed=1)
    out = ours(query, key, key, need_weights=False)[0]
    torch.testing.assert_close(out, torchs(query, key, key)[0])
    torch.testing.assert_close(torch.autograd.grad(out.sum(), query)[0], torch.zeros(2, 5, 32))


# The hint


def test_the_hint_replaces_a_mask_of_any_length_as_in_torch() -> None:
    torchs, ours = pair()
    x = normal(2, 5, 32)
    options = {"attn_mask": causal_mask(9), "is_causal": True, "need_weights": False}
    torch.testing.assert_close(ours(x, x, x, **options)[0], torchs(x, x, x, **options)[0])
    with pytest.raises(RuntimeError, match=r"attn_mask: expected shape \[5, 5\] or \[8, 5, 5\]; got \[9, 9\]"):
        ours(x, x, x, attn_mask=causal_mask(9), is_causal=True)


def test_masks_of_another_dtype_than_the_query_are_added_exactly_where_fused() -> None:
    _, ours = pair()
    x, mask = normal(2, 5, 32).bfloat16(), 1000 + normal(5, 5)  # bf16 has steps of 4 there
    ours.bfloat16()
    out = ours(x, x, x, attn_mask=mask, need_weights=False)[0]
    assert torch.equal(out, ours(x, x, x, attn_mask=mask.double(), need_weights=False)[0])
    expected = copy.deepcopy(ours).double()(x.double(), x.double(), x.double(), attn_mask=mask.double())[0]
    torch.testing.assert_close(out.double(), expected, rtol=0.02, atol=0.02)
    assert ours(x, x, x, attn_mask=mask)[1].dtype is BF16


# Inside torch's own layers


@pytest.fixture
def no_fast_path() -> Iterator[None]:
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(True)


def with_ours(layer: nn.Module) -> nn.Module:
    """A copy with every nn.MultiheadAttention replaced."""
    layer = copy.deepcopy(layer)
    for parent in list(layer.modules()):
        for name, child in parent.named_children():
            if type(child) is nn.MultiheadAttention:
                setattr(parent, name, StreamMultiheadAttention.from_torch(child))
    return layer


def assert_errs_as_torchs(layer: nn.Module, *tensors: Tensor, **options: Any) -> None:
    """Against the layer in fp64, ours inside it errs at most twice what the layer does, and an ulp."""

    def run(layer: nn.Module) -> Tensor:
        dtype = next(layer.parameters()).dtype
        its = {k: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in options.items()}
        return layer(*(tensor.to(dtype) for tensor in tensors), **its).detach().double()

    exact, torchs, ours = run(copy.deepcopy(layer).double()), run(layer), run(with_ours(layer))
    earned = 2 * largest(torchs - exact) + torch.finfo(F32).eps * largest(exact)
    assert largest(ours - exact) <= earned


def encoder_layer(**options: Any) -> nn.TransformerEncoderLayer:
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, **options)


ENCODER_MASKS: dict[str, dict[str, Any]] = {
    "no mask": {},
    "padding": {"src_key_padding_mask": torch.arange(6) >= torch.tensor([[4], [6]])},
    "causal": {"src_mask": causal_mask(6), "is_causal": True},
    "padding and causal": {
        "src_key_padding_mask": torch.arange(6) >= torch.tensor([[4], [6]]),
        "src_mask": torch.ones(6, 6, dtype=torch.bool).triu(1),
        "is_causal": True,
    },
}


@pytest.mark.parametrize("masks", ENCODER_MASKS)
@pytest.mark.parametrize("mode", ["train", "eval", "inference"])
@pytest.mark.parametrize("batch_first", [True, False])
def test_an_encoder_layer_gives_the_same(batch_first: bool, mode: str, masks: str) -> None:
    layer = encoder_layer(batch_first=batch_first).train(mode == "train")
    x = normal(2, 6, 32) if batch_first else normal(6, 2, 32)
    with torch.set_grad_enabled(mode != "inference"):
        assert_errs_as_torchs(layer, x, **ENCODER_MASKS[masks])


@pytest.mark.usefixtures("no_fast_path")
@pytest.mark.parametrize("masks", ENCODER_MASKS)
def test_an_encoder_layer_gives_the_same_without_torchs_fast_path(masks: str) -> None:
    layer = encoder_layer(batch_first=True).eval()
    with torch.no_grad():
        assert_errs_as_torchs(layer, normal(2, 6, 32), **ENCODER_MASKS[masks])


def test_an_encoder_gives_the_same_with_nested_tensors_inside() -> None:
    encoder = nn.TransformerEncoder(encoder_layer(batch_first=True), 2).eval()
    assert encoder.use_nested_tensor
    with torch.no_grad():
        assert_errs_as_torchs(
            encoder, normal(2, 6, 32), src_key_padding_mask=ENCODER_MASKS["padding"]["src_key_padding_mask"]
        )


@pytest.mark.parametrize("mode", ["train", "eval", "inference"])
def test_a_decoder_layer_gives_the_same(mode: str) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerDecoderLayer(32, 4, 64, dropout=0.0, batch_first=True).train(mode == "train")
    options = {
        "tgt_mask": causal_mask(6),
        "tgt_is_causal": True,
        "memory_key_padding_mask": torch.arange(9) >= torch.tensor([[5], [9]]),
    }
    with torch.set_grad_enabled(mode != "inference"):
        assert_errs_as_torchs(layer, normal(2, 6, 32), normal(2, 9, 32, seed=1), **options)


def test_a_transformer_trains_alike() -> None:
    torch.manual_seed(0)
    torchs = nn.Transformer(32, 4, 1, 1, 64, dropout=0.0, batch_first=True)
    ours = with_ours(torchs)
    assert sum(isinstance(module, StreamMultiheadAttention) for module in ours.modules()) == 3
    losses = []
    for model in (torchs, ours):
        optimiser = torch.optim.SGD(model.parameters(), 0.1)
        losses.append([])
        for step in range(4):
            optimiser.zero_grad()
            out = model(normal(2, 5, 32, seed=step), normal(2, 6, 32, seed=-1 - step), tgt_mask=causal_mask(6))
            loss = (out - normal(2, 6, 32, seed=9)).square().mean()
            loss.backward()
            optimiser.step()
            losses[-1].append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-5) and losses[0][-1] != losses[0][0]


# The same module


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no bias": {"bias": False},
    "extra keys": {"add_bias_kv": True, "add_zero_attn": True},
    "kdim and vdim": {"kdim": 6, "vdim": 10, "dropout": 0.1},
    "fp64": {"dtype": F64, "batch_first": True},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_it_is_built_and_initialised_as_torchs(name: str) -> None:
    torch.manual_seed(3)
    torchs = nn.MultiheadAttention(32, 4, **OPTIONS[name])
    torch.manual_seed(3)
    ours = StreamMultiheadAttention(32, 4, **OPTIONS[name])
    assert isinstance(ours, nn.MultiheadAttention)
    state, its = torchs.state_dict(), ours.state_dict()
    assert list(state) == list(its) and all(torch.equal(state[key], its[key]) for key in state)


@pytest.mark.parametrize("name", OPTIONS)
def test_state_dicts_load_both_ways(name: str) -> None:
    torchs, ours = nn.MultiheadAttention(32, 4, **OPTIONS[name]), StreamMultiheadAttention(32, 4, **OPTIONS[name])
    for source, target in ((torchs, ours), (ours, torchs)):
        nn.init.normal_(source.out_proj.weight)
        target.load_state_dict(source.state_dict(), strict=True)
        assert torch.equal(source.out_proj.weight, target.out_proj.weight)


def test_copies_and_pickles_are_its_own() -> None:
    _, ours = pair()
    x = normal(2, 5, 32)
    buffer = io.BytesIO()
    torch.save(ours, buffer)
    buffer.seek(0)
    for twin in (copy.deepcopy(ours), torch.load(buffer, weights_only=False)):
        assert type(twin) is StreamMultiheadAttention
        assert torch.equal(twin(x, x, x)[0], ours(x, x, x)[0])
        with torch.no_grad():
            twin.in_proj_weight.zero_()
        assert ours.in_proj_weight.any()


@pytest.mark.parametrize("name", OPTIONS)
def test_from_torch_shares_parameters_and_nothing_else(name: str) -> None:
    torchs = nn.MultiheadAttention(32, 4, **OPTIONS[name]).eval()
    torchs.out_proj.weight.requires_grad_(False)
    calls: list[str] = []
    torchs.register_forward_hook(lambda *_: calls.append("hook"))
    ours = StreamMultiheadAttention.from_torch(torchs)
    assert not ours.training and not ours.out_proj.weight.requires_grad
    mine, its = dict(ours.named_parameters()), dict(torchs.named_parameters())
    assert mine.keys() == its.keys() and all(mine[key] is its[key] for key in its)
    assert (ours.dropout, ours.batch_first, ours.kdim) == (torchs.dropout, torchs.batch_first, torchs.kdim)
    ours.train()
    ours.in_proj_bias = None
    assert not torchs.training and (torchs.in_proj_bias is None) == (name == "no bias")
    x = torch.zeros(2, 5, 32, dtype=ours.out_proj.weight.dtype)
    ours(x, x[..., : ours.kdim], x[..., : ours.vdim])
    assert calls == ["hook"]


def test_from_torch_uncompiles() -> None:
    torchs, _ = pair()
    torchs.compile(backend="aot_eager")
    ours = StreamMultiheadAttention.from_torch(torchs)
    x = normal(1, 3, 32)
    assert ours(x, x, x, key_padding_mask=torch.ones(1, 3, dtype=torch.bool))[0].isfinite().all()  # not torch's forward


# Inside PyTorch


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


PADDED = {"key_padding_mask": torch.arange(5) >= torch.tensor([[5], [3]])}


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        PADDED,
        {"need_weights": False},
        {"need_weights": False, **PADDED, "attn_mask": torch.ones(5, 5).triu(1).bool()},
        {"need_weights": False, "attn_mask": causal_mask(5), "is_causal": True},
    ],
    ids=["weights", "weights, padding", "fused", "fused, padding and mask", "fused, hint"],
)
def test_compiled_in_one_graph_it_computes_the_same(options: dict[str, Any], dynamic: bool) -> None:
    _, ours = pair()
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    found = []
    for module in (compiled, ours):
        x = normal(2, 5, 32).requires_grad_()
        out = module(x, x, x, **options)[0]
        found.append((out, torch.autograd.grad(out.square().sum(), (x, ours.in_proj_weight))))
    torch.testing.assert_close(*found)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("need_weights", [True, False])
def test_a_trace_is_torchs_own_and_holds_for_other_shapes(need_weights: bool) -> None:
    torchs, ours = (module.requires_grad_(False) for module in pair())
    x, y = normal(2, 5, 32), normal(3, 7, 32)
    traced = torch.jit.trace(lambda x: ours(x, x, x, need_weights=need_weights)[0], x)
    assert "stream_attention" not in str(traced.graph)  # which a file of TorchScript could not find again
    torch.testing.assert_close(traced(y), torchs(y, y, y)[0])


def test_a_script_is_refused_by_its_compiler() -> None:
    with pytest.raises(RuntimeError):
        torch.jit.script(pair()[1])


@pytest.mark.parametrize("need_weights", [True, False])
def test_exported_it_computes_the_same(need_weights: bool) -> None:
    _, ours = pair()
    x = normal(2, 5, 32)
    exported = torch.export.export(ours, (x, x, x), {"need_weights": need_weights}).module()
    torch.testing.assert_close(exported(x, x, x, need_weights=need_weights), ours(x, x, x, need_weights=need_weights))


def test_nested_tensors_are_torchs_own_affair() -> None:
    torchs, ours = pair()
    nested = torch.nested.nested_tensor([normal(3, 32), normal(5, 32, seed=1)])
    with torch.no_grad():
        expected, found = (module(nested, nested, nested, need_weights=False)[0] for module in (torchs, ours))
    assert found.is_nested
    torch.testing.assert_close(found.to_padded_tensor(0.0), expected.to_padded_tensor(0.0))
    with pytest.raises(AssertionError, match="does not support NestedTensor outside of its fast path"):
        ours.train()(nested, nested, nested)


@pytest.mark.parametrize("need_weights", [True, False])
def test_on_the_meta_device_it_has_shapes(need_weights: bool) -> None:
    ours = StreamMultiheadAttention(32, 4, kdim=6, vdim=10, device="meta")
    inputs = (torch.empty(5, 2, 32), torch.empty(7, 2, 6), torch.empty(7, 2, 10))
    out, weights = ours(*(x.to("meta") for x in inputs), need_weights=need_weights)
    assert out.shape == (5, 2, 32) and (weights is None or weights.shape == (2, 5, 7))


@pytest.mark.parametrize("need_weights", [True, False])
def test_an_ensemble_under_vmap(need_weights: bool) -> None:
    modules = [StreamMultiheadAttention(32, 4) for _ in range(3)]
    x = normal(5, 2, 32)

    def run(parameters: Any, buffers: Any) -> Tensor:
        call = (parameters, buffers), (x, x, x), {"need_weights": need_weights}
        return torch.func.functional_call(modules[0], *call)[0]

    found = torch.func.vmap(run)(*torch.func.stack_module_state(modules))
    torch.testing.assert_close(found, torch.stack([module(x, x, x)[0] for module in modules]))


# Refusals


ZEROS = torch.zeros
UNBATCHED = {"query": ZEROS(5, 32), "key": ZEROS(7, 32), "value": ZEROS(7, 32)}
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "query of four dims": ({"query": ZEROS(1, 2, 5, 32)}, r"query: expected 2 dims, or 3 .*; got \[1, 2, 5"),
    "query of one dim": ({"query": ZEROS(32)}, r"query: expected 2 dims, or 3 .*; got \[32\]"),
    "key unbatched": ({"key": ZEROS(7, 32)}, r"key: expected 3 dims as in the query, .*; got \[7, 32\]"),
    "value unbatched": ({"value": ZEROS(7, 32)}, r"value: expected 3 dims as in the query, .*; got \[7, 32\]"),
    "key batched": (
        UNBATCHED | {"key": ZEROS(2, 7, 32)},
        r"key: expected 2 dims as in the query.*; got \[2, 7",
    ),
    "value batched": (UNBATCHED | {"value": ZEROS(2, 7, 32)}, "value: expected 2 dims as in the query"),
    "query too wide": ({"query": ZEROS(2, 5, 33)}, r"query: .* the last of size 32; got \[2, 5, 33\]"),
    "key too wide": ({"key": ZEROS(2, 7, 33)}, r"key: .* the last of size 32; got \[2, 7, 33\]"),
    "value too narrow": ({"value": ZEROS(2, 7, 31)}, r"value: .* the last of size 32; got \[2, 7, 31\]"),
    "both too narrow": ({"key": ZEROS(2, 7, 31), "value": ZEROS(2, 7, 31)}, "key: .* the last of size 32"),
    "value too short": ({"value": ZEROS(2, 6, 32)}, r"value: expected .* \[2, 7\]; got \[2, 6\]"),
    "other batch": (
        {"key": ZEROS(3, 7, 32), "value": ZEROS(3, 7, 32)},
        r"key: expected the query's batch size 2; got \[3, 7, 32\]. The layout is \[B, T, E\]",
    ),
    "half query": (
        {"query": ZEROS(2, 5, 32, dtype=torch.float16)},
        r"query: expected the parameters' dtype torch.float32; got torch.float16. Convert it, or .*\.to\(torch.float16",
    ),
    "double value": (
        {"value": ZEROS(2, 7, 32, dtype=torch.float64)},
        "value: expected the parameters' dtype torch.float32; got torch.float64",
    ),
    "integer key": (
        {"key": ZEROS(2, 7, 32, dtype=torch.int64)},
        "key: expected the parameters' dtype torch.float32; got torch.int64$",
    ),
    "integer padding": (
        {"key_padding_mask": ZEROS(2, 7, dtype=torch.uint8)},
        "key_padding_mask: expected a bool .True = masked. or floating dtype; got torch.uint8",
    ),
    "integer mask": ({"attn_mask": ZEROS(5, 7, dtype=torch.int64)}, "attn_mask: expected a bool .*int64"),
    "padding too long": ({"key_padding_mask": ZEROS(2, 8)}, r"key_padding_mask: expected shape \[2, 7\]"),
    "padding of other batch": ({"key_padding_mask": ZEROS(3, 7)}, r"key_padding_mask: expected shape \[2, 7\]"),
    "padding unbatched": ({"key_padding_mask": ZEROS(7)}, r"key_padding_mask: expected shape \[2, 7\]"),
    "padding batched": (UNBATCHED | {"key_padding_mask": ZEROS(1, 7)}, r"key_padding_mask: expected shape \[7\]"),
    "mask of one dim": ({"attn_mask": ZEROS(7)}, r"attn_mask: expected shape \[5, 7\] or \[8, 5, 7\]; got \[7\]"),
    "mask broadcast": ({"attn_mask": ZEROS(1, 7)}, r"attn_mask: expected shape \[5, 7\] or \[8, 5, 7\]"),
    "mask by batch": ({"attn_mask": ZEROS(2, 5, 7)}, r"attn_mask: expected .*; got \[2, 5, 7\]"),
    "mask of four dims": ({"attn_mask": ZEROS(2, 4, 5, 7)}, r"attn_mask: expected .*; got \[2, 4, 5, 7\]"),
    "unbatched mask of one dim": (UNBATCHED | {"attn_mask": ZEROS(7)}, r"attn_mask: expected .*; got \[7\]"),
    "unbatched mask too short": (UNBATCHED | {"attn_mask": ZEROS(4, 7)}, r"attn_mask: expected .*; got \[4, 7\]"),
    "unbatched mask by batch": (UNBATCHED | {"attn_mask": ZEROS(5, 5, 7)}, r"attn_mask: expected .*; got \[5, 5, 7\]"),
    "hint and mask of one dim": ({"is_causal": True, "attn_mask": ZEROS(7)}, "attn_mask: expected shape"),
    "hint alone": ({"is_causal": True}, "is_causal: expected an attn_mask beside it; got None"),
}


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", WRONG)
def test_what_torch_refuses_is_refused_by_name_with_its_exception(
    name: str, training: bool, need_weights: bool
) -> None:
    wrong, words = WRONG[name]
    torchs, ours = pair(training=training)
    call = {"query": ZEROS(2, 5, 32), "key": ZEROS(2, 7, 32), "value": ZEROS(2, 7, 32), "need_weights": need_weights}
    with torch.set_grad_enabled(training):
        with pytest.raises((AssertionError, RuntimeError)) as refused:
            torchs(**call | wrong)
        with pytest.raises(refused.type, match=words) as caught:
            ours(**call | wrong)
    assert caught.type is refused.type


@pytest.mark.parametrize(("name", "size"), [("key", 6), ("value", 10)])
def test_other_sizes_of_key_and_value_are_refused_as_in_torch(name: str, size: int) -> None:
    call = {"query": ZEROS(2, 5, 32), "key": ZEROS(2, 7, 6), "value": ZEROS(2, 7, 10)} | {name: ZEROS(2, 7, 5)}
    torchs, ours = pair(kdim=6, vdim=10)
    with pytest.raises(AssertionError):
        torchs(**call)
    with pytest.raises(AssertionError, match=rf"{name}: .* the last of size {size}; got \[2, 7, 5\]"):
        ours(**call)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"embed_dim": 30}, AssertionError, "embed_dim: expected a multiple of num_heads=4; got 30"),
        ({"embed_dim": 0}, ValueError, "embed_dim: expected at least 1; got 0"),
        ({"num_heads": -4}, ValueError, "num_heads: expected at least 1; got -4"),
        ({"embed_dim": "a"}, TypeError, r"embed_dim: expected an int; got 'a' \(str\)"),
        ({"num_heads": 4.0}, TypeError, r"num_heads: expected an int; got 4.0 \(float\)"),
        ({"kdim": 6.0}, TypeError, "kdim: expected an int; got 6.0"),
        ({"vdim": 0}, ValueError, "vdim: expected at least 1; got 0"),
        ({"dropout": 1.5}, ValueError, r"dropout: expected a probability in \[0, 1\]; got 1.5"),
        ({"dropout": "a"}, TypeError, "dropout: expected a number; got 'a'"),
    ],
    ids=str,
)
def test_bad_modules_are_refused_by_name(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        StreamMultiheadAttention(**{"embed_dim": 32, "num_heads": 4, **options})


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_what_is_no_tensor_is_refused_by_name(name: str) -> None:
    call = {"query": ZEROS(2, 5, 32), "key": ZEROS(2, 7, 32), "value": ZEROS(2, 7, 32), name: [1.0]}
    with pytest.raises(TypeError, match=f"{name}: expected a torch.Tensor; got list"):
        pair()[1](**call)


def test_under_autocast_dtypes_may_differ_as_in_torch() -> None:
    torchs, ours = pair()
    query, key, value = normal(2, 5, 32).half(), normal(2, 7, 32).bfloat16(), normal(2, 7, 32)
    with torch.autocast("cpu", torch.bfloat16):
        expected, found = (one(query, key, value)[0] for one in (torchs, ours))
        assert found.dtype is torch.bfloat16
        torch.testing.assert_close(found, expected)
        with pytest.raises(
            RuntimeError, match=r"query: expected the parameters' dtype torch.float32; got torch.float64"
        ):
            ours(query.double(), key, value)


@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=str)
@pytest.mark.parametrize("training", [True, False])
def test_the_bias_of_the_projections_may_have_another_dtype(training: bool, dtype: torch.dtype) -> None:
    """As in torch's test_multihead_attn_fast_path_query_and_bias_have_different_dtypes: self-attention, batch first."""
    torchs = nn.MultiheadAttention(4, 4, batch_first=True, dtype=F64).train(training)
    torchs.in_proj_bias = nn.Parameter(nn.init.normal_(torchs.in_proj_bias).to(dtype))
    ours, x = StreamMultiheadAttention.from_torch(torchs), normal(4, 4, 4).double()
    with torch.set_grad_enabled(training):
        torch.testing.assert_close(ours(x, x, x), torchs(x, x, x))
        torch.testing.assert_close(ours(x, x, x, need_weights=False)[0], torchs(x, x, x)[0])
        other = normal(4, 5, 4, seed=1).double()  # torch's addmm refuses these
        as_one = copy.deepcopy(ours).double()
        torch.testing.assert_close(ours(x, other, other), as_one(x, other, other))
    if training:
        ours(x, x, x, need_weights=False)[0].sum().backward()
        assert ours.in_proj_bias.grad is not None and ours.in_proj_bias.grad.dtype is dtype


def test_the_call_with_weights_has_second_derivatives_and_the_fused_one_says_so() -> None:
    ours = StreamMultiheadAttention(8, 2, dtype=torch.float64)
    x = normal(3, 1, 8).double().requires_grad_()
    assert torch.autograd.gradgradcheck(lambda x: ours(x, x, x)[0], x)
    (grad,) = torch.autograd.grad(ours(x, x, x, need_weights=False)[0].square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"no second derivative .*need_weights=True"):
        grad.sum().backward()


def test_from_torch_refuses_what_it_would_lose() -> None:
    class Other(nn.MultiheadAttention):
        pass

    parametrised, _ = pair()
    torch.nn.utils.parametrizations.weight_norm(parametrised, "in_proj_weight")
    for module in (Other(32, 4), parametrised, nn.Linear(3, 4)):
        with pytest.raises(TypeError, match=r"module: expected a torch.nn.MultiheadAttention itself, no subclass; got"):
            StreamMultiheadAttention.from_torch(module)  # type: ignore[arg-type]
    patched, _ = pair()
    patched.forward = lambda *args: args
    with pytest.raises(TypeError, match="module: expected the forward of its class; got one that was replaced"):
        StreamMultiheadAttention.from_torch(patched)


def test_parametrised_it_still_computes_with_its_weights() -> None:
    torchs, ours = (copy.deepcopy(module) for module in pair())
    for module in (torchs, ours):
        torch.nn.utils.parametrizations.weight_norm(module, "in_proj_weight")
    x = normal(2, 5, 32)
    torch.testing.assert_close(ours(x, x, x, need_weights=False)[0], torchs(x, x, x)[0])
