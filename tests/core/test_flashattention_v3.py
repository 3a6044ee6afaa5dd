"""FlashAttentionV3: other people's attention, with our meaning of masks and causal, and the name of what ran."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from stream_attention import FlashAttentionV3, FusedOnlineAttention, StreamAttentionConfig, attention
from stream_attention.backends.reference import attention as reference
from stream_attention.base import device

HEADS, DIM = 4, 8


def qkv(q_len: int = 6, k_len: int = 6, kv_heads: int = HEADS, **options: Any) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = ((q_len, HEADS), (k_len, kv_heads), (k_len, kv_heads))
    tensors = [torch.randn(2, *size, DIM, generator=generator, dtype=torch.float64) for size in sizes]
    return [t.to(**options) for t in tensors]


def shown(q_len: int, k_len: int) -> Tensor:
    """A mask with a row that sees nothing and a key that nobody sees."""
    mask = torch.rand(2, HEADS, q_len, k_len, generator=torch.Generator().manual_seed(1)) < 0.6
    mask[0, :, 0], mask[1, :, :, -1] = False, False
    return mask


def config(**fields: Any) -> StreamAttentionConfig:
    return StreamAttentionConfig(**{"num_heads": HEADS, "head_dim": DIM, **fields})


# What it computes


@pytest.mark.parametrize("lengths", [(6, 6), (1, 6), (3, 6), (9, 6), (2, 0)], ids=str)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("masked", ["no mask", "bool", "integer", "float"])
def test_it_is_attention_as_this_library_means_it(
    lengths: tuple[int, int], causal: bool, kv_heads: int, masked: str
) -> None:
    tensors, mask, options = [t.requires_grad_() for t in qkv(*lengths, kv_heads=kv_heads)], None, {}
    if masked != "no mask":
        mask = options["mask"] = shown(*lengths) if lengths[1] else torch.ones(2, 1, 1, 0, dtype=torch.bool)
        mask = mask.long() if masked == "integer" else mask
    if masked == "float":
        mask = torch.randn(options["mask"].shape, dtype=torch.float64).masked_fill(~options.pop("mask"), -torch.inf)
        options["bias"] = mask
    out = FlashAttentionV3()(*tensors, attention_mask=mask, causal=causal)
    expected = attention(*tensors, causal=causal, backend="reference", **options)
    torch.testing.assert_close(out, expected)
    weights = torch.randn_like(expected)
    pairs = (torch.autograd.grad((o * weights).sum(), tensors, allow_unused=True) for o in (out, expected))
    for got, wanted in zip(*pairs, strict=True):
        torch.testing.assert_close(torch.zeros_like(wanted) if got is None else got, wanted)


@pytest.mark.parametrize("causal", [True, False])
def test_a_fourth_argument_is_causal(causal: bool) -> None:
    torch.testing.assert_close(FlashAttentionV3()(*qkv(), causal), attention(*qkv(), causal=causal))


@pytest.mark.parametrize("rank", [2, 3])
def test_masks_of_lower_rank(rank: int) -> None:
    mask = shown(9, 6)[:, 0, 1] if rank == 2 else shown(9, 6)[:, 0]
    wide = mask[:, None, None] if rank == 2 else mask[:, None]
    out = FlashAttentionV3()(*qkv(9), attention_mask=mask)
    torch.testing.assert_close(out, attention(*qkv(9), causal=True, mask=wide))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_it_computes_in_the_dtype_of_its_inputs(dtype: torch.dtype) -> None:
    bias = torch.zeros(2, 6, dtype=torch.float32)
    assert FlashAttentionV3()(*qkv(dtype=dtype), attention_mask=bias).dtype is dtype


@pytest.mark.parametrize("q_len", [6, 9])
def test_under_autocast_it_computes_in_its_dtype(q_len: int) -> None:
    query, key, value = qkv(q_len, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = FlashAttentionV3()(query, key.bfloat16(), value)
    assert torch.equal(out, FlashAttentionV3()(*(t.bfloat16() for t in (query, key, value))))


def test_dropout_of_the_config_acts_while_training() -> None:
    baseline = FlashAttentionV3(config(dropout=0.5))
    assert not torch.equal(baseline(*qkv()), baseline(*qkv()))
    baseline.eval()
    assert torch.equal(baseline(*qkv()), FlashAttentionV3()(*qkv()))


# What ran


def test_it_says_what_ran_and_why_not_the_others() -> None:
    baseline = FlashAttentionV3()
    assert baseline.kernel is None and baseline.explain() == "no call yet"
    baseline(*qkv())
    assert baseline.kernel == "SDPA CPU"
    assert list(baseline.why_not) == ["FlashAttention-3", "SDPA cuDNN", "SDPA flash", "SDPA efficient", "SDPA math"]
    assert baseline.why_not["SDPA flash"] == "it runs on CUDA devices, not on cpu"
    first, *rest = baseline.explain().splitlines()
    assert first == "kernel  SDPA CPU"
    assert rest == [f"not     {name}: {why}" for name, why in baseline.why_not.items()]


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[SimpleNamespace]:
    """FlashAttention-3 is installed, and tensors may be on a GPU that is not there: nothing computes."""
    properties = SimpleNamespace(major=9, minor=0, multi_processor_count=132)
    (tmp_path / "flash_attn_interface.py").write_text(
        "calls = []\n"
        "def flash_attn_func(q, k, v, causal=False):\n"
        "    calls.append(causal)\n"
        "    return q.new_empty(q.shape), None\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    device._facts.cache_clear()
    with FakeTensorMode():
        yield properties
    device._facts.cache_clear()
    sys.modules.pop("flash_attn_interface", None)


def on_gpu(**facts: Any) -> list[Tensor]:
    options = {"dtype": torch.bfloat16, "device": "cuda", **facts}
    dim = options.pop("dim", 64)
    return [torch.empty(1, length, 4, dim, **options) for length in (3, 6, 6)]


@pytest.mark.usefixtures("hopper")
def test_flash_attention_3_runs_where_it_is_installed_and_can() -> None:
    baseline = FlashAttentionV3()
    assert baseline(*on_gpu()).shape == (1, 3, 4, 64)
    assert baseline(*on_gpu(), causal=False).shape == (1, 3, 4, 64)
    assert baseline.kernel == "FlashAttention-3" and baseline.why_not == {}
    assert sys.modules["flash_attn_interface"].calls == [True, False]


@pytest.mark.parametrize(
    ("facts", "options", "words"),
    [
        ({"dtype": torch.float32}, {}, "it takes float16 and bfloat16, not torch.float32"),
        ({"dim": 20}, {}, "it takes head dims that are multiples of 8 up to 256, not 20"),
        ({}, {"mask": True}, "it takes no mask"),
        ({}, {"dropout_p": 0.1}, "it has no dropout"),
        ({"device": "cpu"}, {}, "it runs on Hopper GPUs (sm_90)"),
    ],
    ids=str,
)
@pytest.mark.usefixtures("hopper")
def test_why_flash_attention_3_does_not_run(facts: dict[str, Any], options: dict[str, Any], words: str) -> None:
    from stream_attention.core.flashattention_v3 import KERNELS, Call

    call = Call(*on_gpu(**facts), mask=None, causal=True, dropout_p=0.0)
    if options.pop("mask", False):
        options["mask"] = torch.empty(1, 1, 3, 6, dtype=torch.bool)
    assert KERNELS[0].why_not(call._replace(**options)) == words


def test_flash_attention_3_that_is_not_there_is_said_to_be_missing() -> None:
    if "flash_attn_interface" in sys.modules:
        pytest.skip("it is there")
    baseline = FlashAttentionV3()
    baseline(*qkv())
    assert baseline.why_not["FlashAttention-3"] == "it is not installed (module flash_attn_interface)"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("lengths", [(6, 6), (3, 6), (9, 6)], ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_on_a_gpu_a_cuda_kernel_runs_and_is_right(lengths: tuple[int, int], masked: bool, dtype: torch.dtype) -> None:
    tensors = qkv(*lengths, kv_heads=2, dtype=dtype, device="cuda")
    mask = shown(*lengths).cuda() if masked else None
    baseline = FlashAttentionV3()
    out = baseline(*tensors, attention_mask=mask)
    expected = attention(*tensors, causal=True, mask=mask, backend="reference")
    torch.testing.assert_close(out, expected, rtol=2e-3, atol=2e-3)
    assert baseline.kernel is not None and "CPU" not in baseline.kernel


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("lengths", [(512, 512), (200, 512), (512, 200)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_on_a_gpu_it_is_as_exact_as_plain_torch(
    dtype: torch.dtype, lengths: tuple[int, int], causal: bool, masked: bool
) -> None:
    pytest.importorskip("triton")
    from gpu_tools import assert_earned, with_gradients
    from gpu_tools import qkv as drawn

    tensors = drawn(2, *lengths, D=64, dtype=dtype)
    mask = shown(*lengths).cuda() if masked else None
    baseline = FlashAttentionV3()

    def plain(*tensors: Tensor) -> Tensor:
        return reference.attention(*tensors, causal=causal, mask=mask, compute_dtype=tensors[0].dtype)[0]

    got = with_gradients(partial(baseline, attention_mask=mask, causal=causal), *tensors)
    assert_earned(got, partial(with_gradients, plain), *tensors)
    assert baseline.kernel is not None and "CPU" not in baseline.kernel


# benchmark


def test_benchmark_has_the_keys_of_ours_and_the_kernel() -> None:
    figures = FlashAttentionV3(config()).benchmark(16, batch_size=2, warmup=1, iterations=3)
    assert (figures["seq_len"], figures["batch_size"], figures["dtype"]) == (16, 2, "float32")
    assert figures["kernel"] == "SDPA CPU" and figures["device"] == "cpu"
    flops = 2 * 2 * HEADS * 16 * 16 * (DIM + DIM) / 2
    assert figures["tflops"] * figures["time_ms"] == pytest.approx(flops * 1e-9)


def test_the_device_follows_and_the_state_dict_is_empty() -> None:
    baseline = FlashAttentionV3()
    assert baseline.device.type == "cpu" and baseline.to("meta").device.type == "meta"
    assert dict(baseline.state_dict()) == {}


# Refusals


@pytest.mark.parametrize(
    ("fields", "tensors", "words"),
    [
        ({}, [t[0] for t in qkv()], "query: expected four dims [B, T, H, D]; got [6, 4, 8]"),
        ({}, qkv(kv_heads=3), "key: expected heads that divide num_heads=4"),
        (
            {},
            [qkv()[0], *(t[:1] for t in qkv()[1:])],
            "key and value: expected the query's batch size B=2",
        ),
        (
            {},
            [*qkv(kv_heads=2)[:2], qkv(kv_heads=1)[2]],
            "value: expected the key's length and heads, [2, 6, 2]",
        ),
        ({}, [*qkv()[:2], qkv(dtype=torch.float32)[2]], "value: expected the query's dtype torch.float64"),
        ({"num_heads": 8}, qkv(), "query: expected [B, Tq, num_heads=8, head_dim=8]; got [2, 6, 4, 8]"),
        ({"max_sequence_length": 5}, qkv(), "key: expected at most max_sequence_length=5 keys; got 6. Raise it"),
        ({}, [None, *qkv()[1:]], "query: expected a torch.Tensor; got NoneType"),
    ],
)
def test_bad_calls_are_refused(fields: dict[str, Any], tensors: list[Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(words)):
        FlashAttentionV3(config(**fields))(*tensors)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"causal": "no"}, "causal: expected a bool; got 'no' (str)"),
        (
            {"attention_mask": torch.ones(2, 6, 6, dtype=torch.bool)},
            "[B, Tq, Tk] = [2, 9, 6]",
        ),
        ({"causal": torch.ones(2, 6)}, "causal: expected a bool; got torch.float32 tensor of shape [2, 6]"),
        ({"attention_mask": [True]}, "attention_mask: expected a torch.Tensor or None; got list"),
        ({"attention_mask": torch.ones(2, 9, 7)}, "[B, Tq, Tk] = [2, 9, 6]"),
    ],
    ids=["causal", "a square mask", "a mask as causal", "a list", "too many keys"],
)
def test_bad_options_are_refused_in_the_words_of_the_other_modules(options: dict[str, Any], words: str) -> None:
    for attend in (FlashAttentionV3(), FusedOnlineAttention(HEADS, DIM)):
        with pytest.raises((TypeError, ValueError), match=re.escape(words)):
            attend(*qkv(9), **options)


def test_a_config_without_flash_attention_is_refused() -> None:
    with pytest.raises(ValueError, match="config: expected enable_flash_attention=True"):
        FlashAttentionV3(config(enable_flash_attention=False))
    with pytest.raises(TypeError, match="config: expected a StreamAttentionConfig or None; got int"):
        FlashAttentionV3(4)  # type: ignore[arg-type]
