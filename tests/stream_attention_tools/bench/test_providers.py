"""Peers that are not installed here: that they say so, and that they are called as their libraries document.

A stand-in module has the documented signature and computes with the reference; what reaches it is what a provider says.
"""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from stream_attention.backends.reference import attention as reference
from stream_attention_tools.bench.accuracy import check
from stream_attention_tools.bench.providers import by_name
from stream_attention_tools.bench.providers.base import installed, tried, without_modifiers
from stream_attention_tools.bench.providers.flash_attention import FlashAttention3
from stream_attention_tools.bench.providers.torch_attention import Flex
from stream_attention_tools.bench.suites import Cell
from stream_attention_tools.testing.inputs import Case, draw, packed

PROVIDERS = by_name()
CASE = Case(B=2, Tq=24, Tk=40, Hq=4, Hkv=2, D=16, Dv=16, causal=True)
CASES = {
    "bottom-right, grouped": CASE,
    "full": replace(CASE, causal=False, Hkv=4),
    "one query": replace(CASE, Tq=1),
    "scaled": replace(CASE, scale=0.3),
}


def cell_of(case: Case, **changes: Any) -> Cell:
    return Cell("cell", case, "forward", (), ())._replace(**changes)


def exact(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float | None) -> Tensor:
    return reference.attention(query, key, value, causal=causal, scale=scale, compute_dtype=torch.float32)[0]


# What FlashAttention's three libraries document


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None, causal: bool = False
) -> Tensor:
    return exact(q, k, v, causal, softmax_scale)


def flash_attn_func_with_lse(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    return flash_attn_func(q, k, v, **options), q.new_zeros(())


@pytest.mark.parametrize("function", [flash_attn_func, flash_attn_func_with_lse])
@pytest.mark.parametrize(
    ("name", "module"), [("fa2", "flash_attn"), ("fa3", "flash_attn_interface"), ("fa4", "flash_attn.cute")]
)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_flash_attention_is_called_as_documented(
    name: str, module: str, function: Any, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in = ModuleType(module)
    stand_in.flash_attn_func = function
    monkeypatch.setitem(sys.modules, module, stand_in)
    assert check(PROVIDERS[name], cell_of(case), draw(case)).right


PACKED = {
    "as many keys": packed(replace(CASE, causal=True), (5, 24, 1, 40)),
    "more keys": packed(replace(CASE, causal=True), (5, 24, 1), (9, 24, 30)),
    "full": packed(replace(CASE, causal=False), (5, 24, 1)),
}


def exact_packed(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    assert cu_seqlens_q.dtype is cu_seqlens_k.dtype is torch.int32
    offsets = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    return reference.varlen_attention(q, k, v, **offsets, causal=causal, scale=scale, compute_dtype=torch.float32)


def longest(offsets: Tensor) -> int:
    return int(offsets.diff().max())


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> Tensor:
    assert (max_seqlen_q, max_seqlen_k) == (longest(cu_seqlens_q), longest(cu_seqlens_k))
    return exact_packed(q, k, v, cu_seqlens_q, cu_seqlens_k, causal, softmax_scale)[0]


@pytest.mark.parametrize(("name", "module"), [("fa2", "flash_attn"), ("fa3", "flash_attn_interface")])
@pytest.mark.parametrize("case", PACKED.values(), ids=PACKED)
def test_flash_attention_is_called_as_documented_on_packed_sequences(
    name: str, module: str, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in = ModuleType(module)
    stand_in.flash_attn_varlen_func = flash_attn_varlen_func
    monkeypatch.setitem(sys.modules, module, stand_in)
    assert check(PROVIDERS[name], cell_of(case), draw(case)).right


@pytest.fixture
def fa3() -> Iterator[FlashAttention3]:
    """FlashAttention-3 from a folder, its ops replaced by ours with the same names and types of what is passed."""
    packing = "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, int? max_seqlen_q=None, int? max_seqlen_k=None"
    library = torch.library.Library("fa3_stand_in", "DEF")
    library.define(
        f"fwd(Tensor q, Tensor k, Tensor v, *, {packing}, bool is_causal=False, int num_splits=0)"
        " -> (Tensor, Tensor, Tensor, Tensor)"
    )
    library.define(
        "bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor(a!)? dq=None, "
        f"Tensor(b!)? dk=None, Tensor(c!)? dv=None, *, {packing}, bool is_causal=False, bool deterministic=False) -> ()"
    )

    def forward(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, num_splits: int, **packing: Any) -> Any:
        if packing["cu_seqlens_q"] is None:
            assert num_splits == 0
            out, lse = reference.attention(q, k, v, causal=is_causal, compute_dtype=torch.float32)
        else:
            assert num_splits == 1 and packing["max_seqlen_q"] == longest(packing["cu_seqlens_q"])
            assert packing["max_seqlen_k"] == longest(packing["cu_seqlens_k"])
            offsets = packing["cu_seqlens_q"], packing["cu_seqlens_k"]
            out, lse = exact_packed(q, k, v, *offsets, is_causal, None)
        return out, lse, q.new_empty(0), q.new_empty(0)

    def fwd(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        defaults = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"))
        return forward(q, k, v, **({"is_causal": False, "num_splits": 0} | defaults | options))

    def bwd(dout: Tensor, *rest: Tensor, deterministic: bool = False, **options: Any) -> None:
        leaves = [t.detach().requires_grad_() for t in rest[:3]]
        options |= {"num_splits": 1} if options.get("cu_seqlens_q") is not None else {}
        with torch.enable_grad():
            out = fwd(*leaves, **options)[0]
        for result, gradient in zip(rest[5:], torch.autograd.grad(out, leaves, dout), strict=True):
            result.copy_(gradient)

    library.impl("fwd", fwd, "CPU")
    library.impl("bwd", bwd, "CPU")
    provider = FlashAttention3(Path())
    provider._ops = torch.ops.fa3_stand_in
    yield provider
    library._destroy()


@pytest.mark.parametrize("direction", ["forward", "forward+backward"])
@pytest.mark.parametrize("case", [replace(CASE, Tq=40), *PACKED.values()], ids=["dense", *PACKED])
def test_the_ops_of_flash_attention_3_are_called_by_their_names(
    case: Case, direction: str, fa3: FlashAttention3
) -> None:
    x = draw(case)
    verdict = check(fa3, cell_of(case, direction=direction), x)
    assert verdict.right, verdict
    bare: Any = fa3.bare(x)()
    assert torch.equal(bare[0], fa3.attend(x))


# What xformers documents


class LowerTriangularFromBottomRightMask:
    pass


def memory_efficient_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_bias: Any = None, scale: float | None = None
) -> Tensor:
    """Four dims, or five with groups: [B, T, groups, heads of a group, D], no broadcasting."""
    assert query.shape[0:1] + query.shape[2:] == key.shape[0:1] + key.shape[2:], "every query head has its key head"
    assert attn_bias is None or type(attn_bias) is LowerTriangularFromBottomRightMask
    flat = [t.flatten(2, 3) if t.dim() == 5 else t for t in (query, key, value)]
    out = exact(*flat, attn_bias is not None, scale)
    return out.unflatten(2, query.shape[2:4]) if query.dim() == 5 else out


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_xformers_is_called_as_documented(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    ops, biases = ModuleType("xformers.ops"), ModuleType("xformers.ops.fmha.attn_bias")
    ops.memory_efficient_attention = memory_efficient_attention
    biases.LowerTriangularFromBottomRightMask = LowerTriangularFromBottomRightMask
    monkeypatch.setitem(sys.modules, "xformers.ops", ops)
    monkeypatch.setitem(sys.modules, "xformers.ops.fmha.attn_bias", biases)
    assert check(PROVIDERS["xformers"], cell_of(case), draw(case)).right


# FlexAttention, here without the compiler


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_flex_is_right_without_being_compiled(case: Case) -> None:
    flex = Flex(flex_attention)
    x = draw(case)
    assert check(flex, cell_of(case), x).right
    assert check(flex, cell_of(case), x).right  # a shape that was seen


def test_flex_says_what_it_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    flex = PROVIDERS["flex"]
    assert "backward" in (flex.why_not(cell_of(CASE, direction="backward")) or "")
    assert "number of keys" in (flex.why_not(cell_of(CASE, chunk=8)) or "")
    assert "sink" in (flex.why_not(cell_of(replace(CASE, sink=True))) or "")
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    assert "C++ compiler" in (flex.why_not(cell_of(CASE)) or "")


# Who is not here says why


@pytest.mark.parametrize(
    ("name", "module"),
    [("fa2", "flash_attn"), ("fa3", "flash_attn_interface"), ("fa4", "flash_attn.cute"), ("xformers", "xformers.ops")],
)
def test_a_library_that_is_not_here_says_so(name: str, module: str) -> None:
    expected = "alone" if installed(module) else f"{module} is not installed"
    assert expected in (PROVIDERS[name].why_not(cell_of(CASE)) or "")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("sdpa", "it has no packed sequences"),
        ("sdpa flash", "it has no packed sequences"),
        ("sdpa cudnn", "it has no packed sequences"),
        ("flex", "it is called here without packed sequences"),
        ("dense", "packed sequences are not written out here"),
        ("blocked", "dense calls alone"),
    ],
)
def test_who_has_no_packed_sequences_says_so(name: str, words: str) -> None:
    assert words in (PROVIDERS[name].why_not(cell_of(PACKED["full"])) or "")


def test_modifiers_a_peer_is_called_without_are_named() -> None:
    case = replace(CASE, window=(3, 0), dropout_p=0.1, scale=0.0)
    assert without_modifiers(case) == "it is called here without window, scale, dropout (its mask would be another one)"
    assert without_modifiers(case, "window", "dropout_p", "scale") is None


def test_a_module_inside_one_that_is_missing_is_not_installed() -> None:
    assert not installed("no_such_library.part") and installed("torch.nn")


def test_an_attempt_that_fails_gives_its_reason() -> None:
    assert tried(lambda: 1 / 0) == "ZeroDivisionError: division by zero"
    assert tried(lambda: 1) is None


def test_every_provider_introduces_itself() -> None:
    assert all(provider.about and provider.label and provider.name == name for name, provider in PROVIDERS.items())
    assert len({provider.label for provider in PROVIDERS.values()}) == len(PROVIDERS)


@pytest.mark.parametrize("name", ["eager", "reference"])
def test_ours_say_which_backend_computed(name: str) -> None:
    assert (PROVIDERS[name].ran(draw(CASE)) or "").startswith(f"{name}: ")


# Without a wrapper


@pytest.mark.parametrize("name", ["stream", "sdpa", "eager"])
def test_a_bare_call_computes_what_attend_does(name: str) -> None:
    case = Case(B=2, Tq=32, Tk=32, Hq=4, Hkv=4, D=16, Dv=16, dtype=torch.float32, causal=True)
    x, provider = draw(case), PROVIDERS[name]
    out = provider.bare(x)()
    assert torch.equal(out.transpose(1, 2) if name == "sdpa" else out, provider.attend(x))
