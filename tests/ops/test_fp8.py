"""Attention in FP8 by its specification: what it means, what it loses, and who refuses what.

The kernels are held against the specification in tests/backends; under Triton's interpreter the ops run on them in
test_fp8_interpreted.py.
"""

from __future__ import annotations

import math
import re
from io import BytesIO
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from stream_attention import (
    Fp8KV,
    UnsupportedProblem,
    attention,
    attention_fp8,
    decode_attention,
    explain,
    explain_decode,
    explain_fp8,
    force_backend,
    merge_states,
    quantize_fp8,
    varlen_attention,
)
from stream_attention.base.fp8_layout import BLOCK, alloc_key_codes, blocks_of

BF16, INF = torch.bfloat16, float("inf")
HALF_AN_ULP = 2.0**-4
"""Of an e4m3 number, relative, at most: what rounding costs attention over normal inputs stays below it."""


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def qkv(
    q_len: int = 70, k_len: int = 150, heads: tuple[int, int] = (4, 2), dim: int = 64, dtype: torch.dtype = BF16
) -> tuple[Tensor, Tensor, Tensor]:
    query, kv = normal(2, q_len, heads[0], dim, dtype=dtype), normal(2, 2, k_len, heads[1], dim, seed=1, dtype=dtype)
    return query, kv[0], kv[1]


def in_fp8(*tensors: Tensor, **options: Any) -> Any:
    op = varlen_attention if "cu_seqlens_q" in options else attention
    return op(*tensors, precision="fp8", backend="reference", **options)


def lost(actual: Tensor, exact: Tensor) -> float:
    """Relative rms error."""
    return float((actual.double() - exact.double()).norm() / exact.double().norm())


# Semantics


def test_one_key_gives_its_value_and_its_score() -> None:
    """Powers of two are codes, and so is its weight, as the score is 16 ln 2: nothing is lost."""
    query, key = torch.full((1, 3, 1, 64), 0.5, dtype=BF16), torch.full((1, 1, 1, 64), 2.0, dtype=BF16)
    value = 2.0 ** torch.arange(-4, 4).repeat(8).view(1, 1, 1, 64).to(BF16)
    out, lse = in_fp8(query, key, value, scale=math.log(2) / 4, return_lse=True)
    assert torch.equal(out, value.expand(1, 3, 1, 64)) and out.dtype is BF16
    torch.testing.assert_close(lse, torch.full((1, 1, 3), 16 * math.log(2)))


def test_a_row_that_sees_no_key_is_empty() -> None:
    query, key, value = qkv(q_len=5, k_len=2)
    out, lse = in_fp8(query, key, value, causal=True, return_lse=True)
    assert not out[:, :3].any() and bool((lse[..., :3] == -INF).all())
    assert lse[..., 3:].isfinite().all() and out[:, 3:].any()


@pytest.mark.parametrize("lengths", [(0, 70, 150), (2, 0, 150), (2, 70, 0)], ids=str)
def test_nothing_to_compute(lengths: tuple[int, int, int]) -> None:
    batch, q_len, k_len = lengths
    query, key, value = (t[:batch, :n] for t, n in zip(qkv(), (q_len, k_len, k_len), strict=True))
    out, lse = in_fp8(query, key, value, return_lse=True)
    assert out.shape == query.shape and lse.shape == (batch, 4, q_len)
    assert not out.any() and bool((lse == -INF).all())
    again = attention_fp8(query, quantize_fp8(key, value), return_lse=True, backend="reference")
    assert torch.equal(again[0], out) and torch.equal(again[1], lse)


def test_what_no_query_sees_has_no_say() -> None:
    """Not by NaN, and not by its size in the scale of its block."""
    query, key, value = qkv(q_len=20, k_len=150)
    options: dict[str, Any] = {"causal": True, "window": (30, 0), "return_lse": True}
    expected = in_fp8(query, key[:, -50:].contiguous(), value[:, -50:].contiguous(), **options)
    far = key.clone(), value.clone()
    for tensor in far:
        tensor[:, :100] = torch.nan
        tensor[:, 3] = 1e30
    out, lse = in_fp8(query, *far, **options)
    assert out.isfinite().all()
    assert lost(out, expected[0]) < HALF_AN_ULP and (lse - expected[1]).abs().max() < 0.2
    assert torch.equal(out, in_fp8(query, *(t.nan_to_num(nan=7.0) for t in far), **options)[0])


def test_blocks_have_scales_of_their_own() -> None:
    """Keys and values that are 2^20 smaller in one block than in another are as precise there."""
    query, key, value = qkv(q_len=BLOCK, k_len=2 * BLOCK, heads=(1, 1))
    small = value.clone()
    small[:, :BLOCK] *= 2.0**-20
    first = in_fp8(query, key[:, :BLOCK], value[:, :BLOCK])
    scaled = in_fp8(query, key[:, :BLOCK], small[:, :BLOCK])
    assert torch.equal(scaled, first * 2.0**-20)
    codes = quantize_fp8(key, small).codes
    assert torch.equal(codes.value, quantize_fp8(key, value).codes.value)
    assert torch.equal(codes.scales[:, 0, 1], quantize_fp8(key, value).codes.scales[:, 0, 1] * 2.0**-20)


# Agreement with attention in full precision

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal, fewer queries than keys": {"causal": True},
    "a window on both sides": {"window": (40, 9)},
    "causal with a window": {"causal": True, "window": (33, 0)},
    "a scale of its own": {"scale": 0.3},
    "a head of its own for every query head": {"heads": (3, 3)},
    "all query heads share one": {"heads": (4, 1)},
    "one query": {"q_len": 1, "causal": True},
    "one key more than a block": {"q_len": 65, "k_len": 129, "causal": True},
    "more queries than keys": {"q_len": 150, "k_len": 70},
    "D 128": {"dim": 128, "causal": True},
    "D 256": {"dim": 256, "causal": True},
    "fp16": {"dtype": torch.float16, "causal": True},
}


@pytest.mark.parametrize("rotate", [False, True], ids=["as it is", "rotated"])
@pytest.mark.parametrize("name", CASES)
def test_it_is_attention_within_the_rounding_of_codes(name: str, rotate: bool) -> None:
    case = dict(CASES[name])
    tensors = qkv(**{key: case.pop(key) for key in ("q_len", "k_len", "heads", "dim", "dtype") if key in case})
    out, lse = in_fp8(*tensors, rotate=rotate, return_lse=True, **case)
    exact, exact_lse = attention(*tensors, return_lse=True, **case)
    assert out.dtype is exact.dtype and out.shape == exact.shape and lse.shape == exact_lse.shape
    assert 0.01 < lost(out, exact) < HALF_AN_ULP * (2.0 if case.get("scale") else 1.0)
    assert (lse - exact_lse).abs().max() < (0.6 if case.get("scale") else 0.2)


@pytest.mark.parametrize("lengths", [((70, 0, 129, 5), (150, 3, 129, 0)), ((1,), (300,))], ids=str)
def test_packed_sequences_are_sequences(lengths: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    q_ends, k_ends = (torch.tensor([0, *its]).cumsum(0) for its in lengths)
    query, key, value = (normal(int(ends[-1]) + 3, h, 64) for ends, h in ((q_ends, 4), (k_ends, 2), (k_ends, 2)))
    options: dict[str, Any] = {"causal": True, "window": (100, 0), "return_lse": True}
    out, lse = in_fp8(query, key, value, cu_seqlens_q=q_ends, cu_seqlens_k=k_ends, **options)
    for place in range(len(lengths[0])):
        rows, columns = slice(*q_ends[place : place + 2].tolist()), slice(*k_ends[place : place + 2].tolist())
        alone, alone_lse = in_fp8(query[None, rows], key[None, columns], value[None, columns], **options)
        assert torch.equal(out[rows], alone[0]) and torch.equal(lse[:, rows], alone_lse[0])
    assert not out[-3:].any() and bool((lse[:, -3:] == -INF).all())


def test_autocast_decides_the_dtype() -> None:
    tensors = qkv()
    with torch.autocast("cpu", dtype=BF16):
        out = in_fp8(*(t.float() for t in tensors), rotate=True)
        kv = quantize_fp8(*(t.float() for t in tensors[1:]), rotate=True)
        again = attention_fp8(tensors[0].float(), kv, backend="reference")
    assert out.dtype is kv.dtype is BF16
    assert torch.equal(out, in_fp8(*tensors, rotate=True)) and torch.equal(again, out)


# Rotation


def test_rotation_spreads_an_outlier_channel() -> None:
    query, key, value = qkv(q_len=256, k_len=256, dim=128)
    for tensor in (query, key):
        tensor[..., 5] *= 8
    exact = attention(query, key, value)
    plain, rotated = (lost(in_fp8(query, key, value, rotate=rotate), exact) for rotate in (False, True))
    assert rotated < HALF_AN_ULP and plain > 2.5 * rotated


def test_rotation_changes_no_score() -> None:
    """Where nothing is lost: a key of one channel becomes ones, a query of ones one channel."""
    value = qkv()[2]
    query, key = torch.ones(2, 1, 4, 64, dtype=BF16), torch.zeros_like(value)
    key[..., 0] = 2.0 ** torch.arange(150).remainder(3)[:, None]
    plain, rotated = (in_fp8(query, key, value, rotate=rotate, return_lse=True) for rotate in (False, True))
    assert torch.equal(rotated[0], plain[0]) and torch.equal(rotated[1], plain[1])


# The form that takes codes


@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (60, 10), "scale": 0.2}], ids=str)
def test_from_codes_it_is_the_same_bit_for_bit(options: dict[str, Any], rotate: bool) -> None:
    query, key, value = qkv(q_len=150)  # every key is seen by some query
    direct = in_fp8(query, key, value, rotate=rotate, return_lse=True, **options)
    kv = quantize_fp8(key, value, rotate=rotate)
    assert kv.rotate is rotate
    coded = attention_fp8(query, kv, return_lse=True, backend="reference", **options)
    assert torch.equal(coded[0], direct[0]) and torch.equal(coded[1], direct[1])


def test_from_packed_codes_it_is_the_same_bit_for_bit() -> None:
    ends = torch.tensor([0, 70, 70, 199])
    query, key, value = normal(200, 4, 64), normal(200, 2, 64, seed=1), normal(200, 2, 64, seed=2)
    direct = in_fp8(query, key, value, cu_seqlens_q=ends, cu_seqlens_k=ends, causal=True, return_lse=True)
    for longest in (None, 129, 200):
        kv = quantize_fp8(key, value, cu_seqlens=ends, max_seqlen=longest)
        packing = {"cu_seqlens_q": ends, "max_seqlen_q": longest}
        coded = attention_fp8(query, kv, causal=True, return_lse=True, backend="reference", **packing)
        assert torch.equal(coded[0], direct[0]) and torch.equal(coded[1], direct[1])
    assert torch.equal(kv.lengths, torch.tensor([70, 0, 129])) and kv.batch == 3


@pytest.mark.parametrize("rotate", [False, True])
def test_codes_say_what_they_are_made_of(rotate: bool) -> None:
    _, key, value = qkv(k_len=150)
    kv = quantize_fp8(key, value, rotate=rotate)
    back = kv.dequantize()
    for actual, exact in zip(back, (key, value), strict=True):
        assert actual.shape == exact.shape and actual.dtype is BF16 and 0.01 < lost(actual, exact) < HALF_AN_ULP
    assert torch.equal(quantize_fp8(key, back[1]).dequantize()[1], back[1])  # codes are codes of themselves
    rows, scales = 2 * 2 * 256, 2 * 2 * 2 * 2
    assert kv.nbytes == 2 * rows * 64 + 4 * scales and kv.nbytes < 0.9 * (key.nbytes + value.nbytes)
    assert repr(kv) == f"<Fp8KV: 2 rows of 150 keys{', rotated' if rotate else ''}, 2 heads of 64, of bfloat16 on cpu>"
    assert kv.lengths.tolist() == [150, 150] and not kv.packed and kv.kv_heads == 2 and kv.head_dim == 64
    file = BytesIO()
    torch.save(kv, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert torch.equal(loaded.codes.key.view(torch.uint8), kv.codes.key.view(torch.uint8)) and loaded.shape == kv.shape
    with pytest.raises(AttributeError):
        kv.rotate = True  # type: ignore[misc]


def test_packed_codes_give_their_rows_back() -> None:
    key, value = normal(140, 2, 64), normal(140, 2, 64, seed=1)
    kv = quantize_fp8(key, value, cu_seqlens=torch.tensor([0, 7, 7, 135]))
    assert repr(kv) == "<Fp8KV: 140 keys in 3 packed sequences, 2 heads of 64, of bfloat16 on cpu>"
    for actual, exact in zip(kv.dequantize(), (key, value), strict=True):
        assert lost(actual[:135], exact[:135]) < HALF_AN_ULP and not actual[135:].any()


# Properties: split anywhere and merge


def test_a_quantised_prefix_and_fresh_keys_merge_into_the_whole() -> None:
    """A cache that grows: codes of what is old, keys as they are of what is new; causal among those alone."""
    query, key, value = qkv(q_len=40, k_len=340)
    prefix = [quantize_fp8(key[:, part], value[:, part]) for part in (slice(0, 128), slice(128, 300))]
    states = [attention_fp8(query, kv, return_lse=True, backend="reference") for kv in prefix]
    states.append(attention(query, key[:, 300:], value[:, 300:], causal=True, return_lse=True))
    out, lse = merge_states(*zip(*states, strict=True))
    exact, exact_lse = attention(query, key, value, causal=True, return_lse=True)
    assert lost(out, exact) < HALF_AN_ULP and (lse - exact_lse).abs().max() < 0.2
    whole = in_fp8(query, key, value, causal=True)
    assert lost(out, exact) < lost(whole, exact)  # fresh keys lose nothing


def test_split_between_blocks_the_parts_have_the_scales_of_the_whole() -> None:
    query, key, value = qkv(q_len=40, k_len=384)
    whole, whole_lse = attention_fp8(query, quantize_fp8(key, value), return_lse=True, backend="reference")
    parts = [quantize_fp8(key[:, part], value[:, part]) for part in (slice(0, 128), slice(128, 384))]
    states = [attention_fp8(query, kv, return_lse=True, backend="reference") for kv in parts]
    out, lse = merge_states(*zip(*states, strict=True))
    torch.testing.assert_close(lse, whole_lse)
    assert lost(out, whole) < torch.finfo(BF16).eps


# Layouts


def test_it_reads_tensors_where_they_lie() -> None:
    query, key, value = qkv()
    expected = in_fp8(query, key, value)
    heads_first = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (query, key, value)]
    every_second = [t.repeat_interleave(2, 1)[:, ::2] for t in (query, key, value)]
    for tensors in (heads_first, every_second):
        assert torch.equal(in_fp8(*tensors), expected)
        kv = quantize_fp8(*tensors[1:])
        assert torch.equal(attention_fp8(tensors[0], kv, backend="reference"), expected)


# With the rest of torch


def test_no_gradient_and_no_trace_of_one() -> None:
    query, key, value = (t.requires_grad_() for t in qkv())
    with torch.no_grad():
        out = in_fp8(query, key, value)
    assert not out.requires_grad
    for call in (lambda: in_fp8(query, key, value), lambda: quantize_fp8(key, value)):
        with pytest.raises(ValueError, match=r"supports inference only: use torch.no_grad\(\), or"):
            call()
    kv = quantize_fp8(key.detach(), value.detach())
    with pytest.raises(
        ValueError, match=r"query: expected a tensor that does not require a gradient.*call attention\(\)"
    ):
        attention_fp8(query, kv, backend="reference")
    assert torch.equal(attention_fp8(query.detach(), kv, backend="reference"), out)


def test_forward_mode_and_torch_func_are_refused() -> None:
    query, key, value = qkv()
    with forward_ad.dual_level(), pytest.raises(ValueError, match="FP8 supports inference only"):
        in_fp8(forward_ad.make_dual(query, torch.ones_like(query)), key, value)
    with pytest.raises(ValueError, match=r"outside torch.func transforms"):
        torch.vmap(lambda q: in_fp8(q, key, value))(query[None])


def test_torch_compile_breaks_its_graph_there() -> None:
    query, key, value = qkv()

    def model(q: Tensor) -> Tensor:
        kv = quantize_fp8(key, value)
        return in_fp8(q * 2, key, value) + attention_fp8(q * 2, kv, backend="reference") + 1

    with torch.no_grad():
        assert torch.equal(torch.compile(model, backend="eager")(query), model(query))


# Plans


def test_explain_shows_the_plan_and_computes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    query, key, value = (t.to("meta") for t in qkv())
    planned = explain(query, key, value, causal=True, precision="fp8", backend="reference")
    shown = capsys.readouterr().out
    assert "bfloat16 on meta scale=0.125 causal in fp8\n" in shown and planned.problem.fp8
    assert shown.endswith("backend   reference: dense, quantised values in fp64\n")
    ends = torch.tensor([0, 70])
    packed = explain(*(t[0] for t in qkv()), cu_seqlens_q=ends, cu_seqlens_k=ends, precision="fp8", backend="reference")
    assert packed.problem.packed and packed.problem.fp8


def test_on_codes_it_explains_what_it_explains_of_their_keys(capsys: pytest.CaptureFixture[str]) -> None:
    query, key, value = qkv()
    kv = quantize_fp8(key, value, rotate=True)
    options: dict[str, Any] = {"window": (40, 0), "scale": 0.3, "return_lse": True, "backend": "reference"}
    planned = explain_fp8(query.to("meta"), kv.to("meta"), **options)
    shown = capsys.readouterr().out
    assert planned == explain(*(t.to("meta") for t in (query, key, value)), precision="fp8", **options)
    assert shown == capsys.readouterr().out == f"{planned}\n"
    ends = torch.tensor([0, 40, 70])
    packed = explain_fp8(query[0], quantize_fp8(key[0], value[0], cu_seqlens=ends), cu_seqlens_q=ends, **options)
    assert packed.problem.packed and (packed.problem.q_len, packed.problem.k_len) == (40, 40)


@pytest.mark.usefixtures("h200")
def test_on_codes_it_explains_which_kernel_runs_on_a_gpu() -> None:
    pytest.importorskip("triton")
    query, key = (torch.empty(shape, dtype=BF16, device="cuda") for shape in ((2, 70, 4, 64), (2, 150, 2, 64)))
    kv = Fp8KV(alloc_key_codes(key, blocks_of(150, 2, packed=False)), (2, 150, 2, 64), BF16)
    assert explain_fp8(query, kv, causal=True).backend == "gluon"
    assert explain_fp8(query, kv, scale=-1.0).passed_over[0][0] == "gluon"


def test_nowhere_does_it_fall_back() -> None:
    with pytest.raises(UnsupportedProblem) as caught:
        attention(*qkv(), precision="fp8")
    lines = str(caught.value).splitlines()
    assert [line.split(":")[0].strip() for line in lines[1:]] == ["gluon", "triton", "eager", "reference"]
    assert "FP8 requires Triton and a GPU with compute capability 8.9 or newer" in lines[3]
    with pytest.raises(UnsupportedProblem, match=r"'eager' cannot .*does not support FP8"):
        attention(*qkv(), precision="fp8", backend="eager")
    for asked in (attention_fp8, explain_fp8):
        with pytest.raises(UnsupportedProblem, match="no backend can"):
            asked(qkv()[0], quantize_fp8(*qkv()[1:]))


def test_a_forced_backend_is_asked() -> None:
    with force_backend("reference"):
        assert torch.equal(attention(*qkv(), precision="fp8"), in_fp8(*qkv()))
        assert attention_fp8(qkv()[0], quantize_fp8(*qkv()[1:])).shape == (2, 70, 4, 64)


# Refusals: a bad call, the exception, and words of the message

Q, K, V = torch.zeros(2, 5, 4, 64, dtype=BF16), torch.zeros(2, 7, 2, 64, dtype=BF16), torch.zeros(2, 7, 2, 64).to(BF16)
CALLS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"precision": "bf16"}, ValueError, r"precision: expected \"fp8\", or None .*; got 'bf16'"),
    ({"precision": torch.float8_e4m3fn}, TypeError, "precision: expected \"fp8\", or None"),
    ({"precision": 8}, TypeError, "precision: .*; got 8"),
    ({"precision": None, "rotate": True}, ValueError, "rotate: expected False without precision=\"fp8\"; got True"),
    ({"precision": None, "rotate": 1}, TypeError, "rotate: expected a bool; got 1"),
    ({"rotate": None}, TypeError, "rotate: expected a bool; got None"),
    ({"mask": torch.ones(5, 7, dtype=torch.bool)}, ValueError, "mask: expected None with .*; got a tensor"),
    ({"bias": torch.zeros(5, 7)}, ValueError, "bias: expected None with precision=\"fp8\""),
    ({"alibi_slopes": torch.zeros(4)}, ValueError, "alibi_slopes: expected None with precision=\"fp8\""),
    ({"sink": torch.zeros(4)}, ValueError, "sink: expected None with precision=\"fp8\""),
    ({"softcap": 20.0}, ValueError, "softcap: expected 0 with precision=\"fp8\"; got 20.0"),
    ({"dropout_p": 0.1}, ValueError, "dropout_p: expected 0 with precision=\"fp8\"; got 0.1"),
    ({"query": Q.float(), "key": K.float(), "value": V.float()}, TypeError, "query: expected dtype float16 or bf"),
    ({"query": Q.to(torch.float8_e4m3fn)}, TypeError, 'float8_e4m3fn. Pass float16 or bfloat16 with precision="fp8"'),
    ({"query": Q[..., :32], "key": K[..., :32]}, ValueError, r"query: expected D = Dv of 64, 128 or 256 .*, 32\]"),
    ({"value": torch.zeros(2, 7, 2, 128, dtype=BF16)}, ValueError, r"value: expected D = Dv .*\[2, 7, 2, 128\]"),
    ({"query": Q[:, :, :3]}, ValueError, "query: expected a multiple of the 2 KV heads"),
    ({"causal": 1}, TypeError, "causal: expected a bool"),
    ({"backend": "cuda"}, ValueError, "backend: expected one of"),
    ({"backend": "reference(block_m=64)"}, ValueError, "accepts no configuration"),
]  # fmt: skip


@pytest.mark.parametrize(("bad", "error", "words"), CALLS, ids=[" ".join(bad) for bad, _, _ in CALLS])
def test_refuses(bad: dict[str, Any], error: type[Exception], words: str) -> None:
    call = {"query": Q, "key": K, "value": V, "precision": "fp8", "backend": "reference"} | bad
    with pytest.raises(error, match=words) as caught:
        attention(**call)
    assert caught.type is error
    if not {"mask", "bias"} & bad.keys() and call["query"].shape[0] == 2:
        flat = {name: call[name][0] for name in ("query", "key", "value")}
        ends = {"cu_seqlens_q": torch.tensor([0, 5]), "cu_seqlens_k": torch.tensor([0, 7])}
        with pytest.raises(error, match=words.partition(".*")[0]):
            varlen_attention(**{**call, **flat}, **ends)


ENDS = torch.tensor([0, 3, 7])
PACK: dict[str, Any] = {"key": K[0], "value": V[0], "cu_seqlens": ENDS}
QUANTIZATIONS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"key": None}, TypeError, "key: expected a torch.Tensor; got NoneType"),
    ({"key": K[0]}, ValueError, r"key: expected shape \[B, Tk, Hkv, D\]; got \[7, 2, 64\]"),
    ({"value": V[:, :6]}, ValueError, r"value: expected the key's shape \[2, 7, 2, 64\]; got \[2, 6, 2, 64\]"),
    ({"value": V.half()}, TypeError, "value: expected the key's dtype torch.bfloat16; got torch.float16"),
    ({"value": V.to("meta")}, ValueError, "value: expected the key's device cpu; got meta"),
    ({"key": K.float(), "value": V.float()}, TypeError, "key: expected dtype float16 or bfloat16 for FP8 quantisation"),
    ({"key": K[..., :32], "value": V[..., :32]}, ValueError, "key: expected D = Dv of 64, 128 or 256 for FP8"),
    ({"key": K[:, :, :0], "value": V[:, :, :0]}, ValueError, "key: expected at least one head"),
    ({"key": K.mT.contiguous().mT}, ValueError, "key: expected a contiguous last dim"),
    ({"rotate": "yes"}, TypeError, "rotate: expected a bool; got 'yes'"),
    ({"cu_seqlens": ENDS}, ValueError, r"key: expected shape \[Nk, Hkv, D\]; got \[2, 7, 2, 64\]"),
    ({"max_seqlen": 7}, ValueError, "max_seqlen: expected None without cu_seqlens; got 7"),
    (PACK | {"cu_seqlens": ENDS.float()}, TypeError, "cu_seqlens: expected dtype torch.int32"),
    (PACK | {"cu_seqlens": ENDS[None]}, ValueError, r"cu_seqlens: expected shape \[sequences"),
    (PACK | {"cu_seqlens": ENDS + 1}, ValueError, "cu_seqlens: expected 0 as the first value; got 1"),
    (PACK | {"max_seqlen": 3}, ValueError, "max_seqlen: expected at least the longest sequence, 4; got 3"),
    (PACK | {"max_seqlen": 4.0}, TypeError, "max_seqlen: expected an int or None"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("bad", "error", "words"), QUANTIZATIONS, ids=[f"{n} {' '.join(row[0])}" for n, row in enumerate(QUANTIZATIONS)]
)
def test_codes_of_what_is_refused(bad: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words) as caught:
        quantize_fp8(**({"key": K, "value": V} | bad))
    assert caught.type is error


@pytest.mark.parametrize("by", [attention, explain], ids=lambda by: by.__name__)
def test_codes_where_tensors_belong_are_refused_with_who_takes_them(by: Any) -> None:
    kv = quantize_fp8(K, V)
    with pytest.raises(
        TypeError, match=r"key: expected a torch.Tensor; got Fp8KV. Pass it to attention_fp8\(query, kv\)"
    ):
        by(Q, kv, kv)


@pytest.mark.parametrize("by", [decode_attention, explain_decode], ids=lambda by: by.__name__)
def test_nor_are_they_a_cache_to_decode_from(by: Any) -> None:
    with pytest.raises(
        TypeError, match=r"cache: expected a ContiguousKV, .*; got Fp8KV. Pass it to attention_fp8\(query, kv\)"
    ):
        by(Q[:, :1], quantize_fp8(K, V))


ON_CODES: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"kv": (K, V)}, TypeError, r"kv: expected an Fp8KV; got tuple. To make one, call quantize_fp8"),
    ({"query": Q[0]}, ValueError, r"query: expected shape \[B, Tq, Hq, D\]; got \[5, 4, 64\]"),
    ({"query": Q[:1]}, ValueError, r"query: expected B=2, D=64 to match kv; got \[1, 5, 4, 64\]"),
    ({"query": torch.zeros(2, 5, 4, 128, dtype=BF16)}, ValueError, "query: expected B=2, D=64 to match kv"),
    ({"query": Q[:, :, :3]}, ValueError, "query: expected a multiple of the 2 KV heads as Hq"),
    ({"query": Q.float()}, TypeError, "query: expected dtype float16 or bfloat16 with an Fp8KV"),
    ({"query": Q.to("meta")}, ValueError, "query: expected the device of kv, cpu; got meta"),
    ({"query": Q.mT.contiguous().mT}, ValueError, "query: expected a contiguous last dim"),
    ({"cu_seqlens_q": ENDS}, ValueError, "cu_seqlens_q: expected None for kv that is not packed; got a tensor"),
    ({"max_seqlen_q": 5}, ValueError, "max_seqlen_q: expected None without cu_seqlens_q; got 5"),
    ({"window": (1, -2)}, ValueError, "window: expected sides of at least -1"),
    ({"scale": float("nan")}, ValueError, "scale: expected a finite number"),
    ({"softcap": 1.0}, TypeError, "softcap"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("bad", "error", "words"), ON_CODES, ids=[f"{n} {' '.join(row[0])}" for n, row in enumerate(ON_CODES)]
)
def test_a_call_on_codes_that_is_refused(bad: dict[str, Any], error: type[Exception], words: str) -> None:
    call = {"query": Q, "kv": quantize_fp8(K, V), "backend": "reference"} | bad
    for asked in (attention_fp8, explain_fp8):
        with pytest.raises(error, match=words) as caught:
            asked(**call)
        assert caught.type is error


def test_an_argument_that_it_does_not_have_is_not_explained() -> None:
    with pytest.raises(TypeError, match=r"attention_fp8\(\) .*unexpected keyword argument 'softcap'"):
        explain_fp8(Q, quantize_fp8(K, V), softcap=2.0)


def test_packed_codes_want_offsets_of_as_many_sequences() -> None:
    kv = quantize_fp8(K[0], V[0], cu_seqlens=ENDS)
    with pytest.raises(ValueError, match="cu_seqlens_q: expected offsets for packed kv; got None"):
        attention_fp8(Q[0], kv, backend="reference")
    with pytest.raises(ValueError, match=r"cu_seqlens_q: expected as many sequences as kv, shape \[3\]; got \[2\]"):
        attention_fp8(Q[0], kv, cu_seqlens_q=torch.tensor([0, 5]), backend="reference")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"shape": (7, 2, 64)}, r"shape: expected \[B, Tk, Hkv, D\]"),
        ({"shape": (2, 300, 2, 64)}, r"codes.key: expected contiguous .* of shape \[2, 768, 64\]"),
        ({"shape": (2, 8, 2, 64)}, "codes.rows: expected 8, as in shape; got 7"),
        ({"codes": {"scales": torch.ones(2, 2, 2).half()}}, "codes.scales: expected contiguous torch.float32"),
        ({"codes": {"value": torch.zeros(2, 256, 64).to(torch.float8_e4m3fn).mT}}, "codes.value: .*strides"),
    ],
    ids=lambda one: re.sub(r"\W+", " ", str(one))[:30],
)
def test_codes_that_are_none_are_refused(changed: dict[str, Any], words: str) -> None:
    kv = quantize_fp8(K, V)
    codes = kv.codes._replace(**changed.get("codes", {}))
    with pytest.raises(ValueError, match=words):
        Fp8KV(codes, changed.get("shape", kv.shape), kv.dtype)


def test_codes_of_a_pack_outlive_the_offsets_that_they_were_made_with() -> None:
    query, key, value = (x[0] for x in qkv(q_len=130, k_len=130))
    offsets = torch.tensor([0, 50, 130])
    kv = quantize_fp8(key, value, cu_seqlens=offsets)
    options = {"cu_seqlens_q": offsets.clone(), "backend": "reference"}
    before = attention_fp8(query, kv, **options)
    offsets[1] = 60
    assert torch.equal(attention_fp8(query, kv, **options), before)


def test_a_pack_of_codes_says_how_long_it_is_and_lies_on_one_device() -> None:
    _, key, value = (x[0] for x in qkv())
    kv = quantize_fp8(key, value, cu_seqlens=torch.tensor([0, 150]))
    with pytest.raises(ValueError, match=r"max_seqlen: expected the longest of the sequences, from 1 to 150; got 0"):
        Fp8KV(kv.codes, kv.shape, kv.dtype, kv.rotate, kv.cu_seqlens)
    with pytest.raises(ValueError, match=r"codes\.value: expected a tensor on cpu, as the keys; got one on meta"):
        Fp8KV(kv.codes._replace(value=kv.codes.value.to("meta")), kv.shape, kv.dtype, False, kv.cu_seqlens, 150)
    moved = kv.to("meta")
    assert moved.device.type == moved.cu_seqlens.device.type == "meta" and moved.max_seqlen == kv.max_seqlen
    assert kv.to("cpu").codes.key.data_ptr() == kv.codes.key.data_ptr()


def test_a_view_that_is_negative_when_read_is_read_so() -> None:
    query, key, value = qkv()
    negative = torch._neg_view(query)
    assert negative.is_neg() and torch.equal(in_fp8(negative, key, value), in_fp8(-query, key, value))
