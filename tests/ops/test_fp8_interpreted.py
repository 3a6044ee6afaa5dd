"""The ops of FP8 on the portable kernels, under Triton's interpreter: what is passed to them, and how."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from stream_attention import UnsupportedProblem, attention, attention_fp8, quantize_fp8, varlen_attention
from stream_attention.backends.installed import interpreting
from stream_attention.dispatch import launch_cache

pytestmark = pytest.mark.skipif(not interpreting(), reason="TRITON_INTERPRET=1 is not set: `make test` runs these")


def qkv(*lead: int, heads: tuple[int, int] = (2, 1), dim: int = 64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(sum(lead))
    return [torch.randn(*lead, h, dim, generator=generator).bfloat16() for h in (heads[0], heads[1], heads[1])]


def both(op: Any, *tensors: Any, **options: Any) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    return tuple(op(*tensors, return_lse=True, backend=name, **options) for name in ("triton", "reference"))  # type: ignore[return-value]


def assert_same(ours: tuple[Tensor, Tensor], theirs: tuple[Tensor, Tensor]) -> None:
    """Up to the rounding of results: where the interpreter sums, it sums in fp32."""
    assert ours[0].dtype is theirs[0].dtype is torch.bfloat16
    scale = theirs[0].double().square().mean().sqrt()
    assert (ours[0].double() - theirs[0].double()).abs().max() <= 2.0**-6 * theirs[0].abs().max() + 2.0**-6 * scale
    torch.testing.assert_close(ours[1], theirs[1], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    "options", [{"causal": True}, {"window": (50, 3), "scale": 0.2, "rotate": True}, {"dim": 128}], ids=str
)
def test_a_dense_call(options: dict[str, Any]) -> None:
    query, key, value = qkv(1, 140, dim=options.get("dim", 64))
    given = {name: option for name, option in options.items() if name != "dim"}
    assert_same(*both(attention, query[:, :70], key, value, precision="fp8", **given))


def test_a_packed_call() -> None:
    ends = torch.tensor([0, 60, 60, 195], dtype=torch.int32)
    packing = {"cu_seqlens_q": ends, "cu_seqlens_k": ends}
    query, key, value = qkv(200)
    ours, theirs = both(varlen_attention, query, key, value, precision="fp8", causal=True, **packing)
    assert_same((ours[0][:195], ours[1][:, :195]), (theirs[0][:195], theirs[1][:, :195]))
    assert not ours[0][195:].any() and bool((ours[1][:, 195:] == -torch.inf).all())
    kv = quantize_fp8(key, value, cu_seqlens=ends, max_seqlen=135)
    coded = attention_fp8(query, kv, causal=True, return_lse=True, cu_seqlens_q=ends, backend="triton")
    assert torch.equal(coded[0], ours[0]) and torch.equal(coded[1], ours[1])


@pytest.mark.parametrize("rotate", [False, True])
def test_from_codes(rotate: bool) -> None:
    query, key, value = qkv(1, 140)
    kv = quantize_fp8(key, value, rotate=rotate)
    ours, theirs = both(attention_fp8, query, kv, causal=True)
    assert_same(ours, theirs)
    if not rotate:  # rotated numbers are sums, which the specification has in another order
        direct = attention(query, key, value, precision="fp8", causal=True, return_lse=True, backend="triton")
        assert torch.equal(direct[0], ours[0]) and torch.equal(direct[1], ours[1])


def test_what_no_query_sees_has_no_say() -> None:
    query, key, value = qkv(1, 200)
    for tensor in (key, value):
        tensor[:, :60] = torch.nan
        tensor[:, 3] = 1e30
    assert_same(*both(attention, query[:, -20:], key, value, precision="fp8", causal=True, window=(30, 0)))


def test_a_call_in_full_precision_before_is_no_call_like_it() -> None:
    query, key, value = qkv(1, 40)
    with torch.no_grad():
        plain = attention(query, key, value, backend="triton")
        assert launch_cache.size(), "it was not kept"
        coded = attention(query, key, value, backend="triton", precision="fp8")
        again = attention(query, key, value, backend="triton")
    assert torch.equal(again, plain) and not torch.equal(coded, plain)
    with pytest.raises(ValueError, match="rotate: expected False"):
        attention(query, key, value, backend="triton", rotate=True)


def test_comparing_a_cached_call_compares_it_with_one_in_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value = qkv(1, 40)
    monkeypatch.setattr(launch_cache, "COMPARE", True)
    first = attention(query, key, value, backend="triton", precision="fp8")
    assert torch.equal(attention(query, key, value, backend="triton", precision="fp8"), first)


def test_a_tile_that_is_forced() -> None:
    query, key, value = qkv(1, 140)
    expected = attention(query, key, value, precision="fp8", backend="triton")
    forced = attention(query, key, value, precision="fp8", backend="triton(block_m=64, block_n=32)")
    torch.testing.assert_close(forced, expected, rtol=2.0**-7, atol=2.0**-8)


def test_keys_behind_the_longest_that_was_told_are_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU nobody reads the offsets to check it: there are no codes of such keys."""
    from stream_attention.ops import varlen

    query, key, value = qkv(200)
    ends = torch.tensor([0, 200], dtype=torch.int32)
    monkeypatch.setattr(varlen, "longest", lambda name, cu, rows, told: told)
    packing = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": 200, "max_seqlen_k": 100}
    out = varlen_attention(query, key, value, precision="fp8", backend="triton", **packing)
    theirs = attention(query[None], key[None, :100], value[None, :100], precision="fp8", backend="reference")[0]
    assert (out - theirs).abs().max() < 0.02


def test_a_tile_has_at_most_the_rows_of_a_scale() -> None:
    with pytest.raises(UnsupportedProblem, match="up to 128"):
        attention(*qkv(1, 300), precision="fp8", backend="triton(block_n=256)")
