"""Our caches under a model on a GPU: codes are read as what they stand for, and a token costs few kernels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

pytest.importorskip("transformers")

from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from stream_attention.integration.caches import StreamBoundedCache, StreamQuantizedCache
from stream_attention.integration.hf import register
from stream_attention.integration.quantized_layer import QuantisedLayer, QuantizeOptions

pytestmark = pytest.mark.gpu

PROMPT, NEW = 700, 140


@pytest.fixture(scope="module")
def model() -> Any:
    register()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=512, intermediate_size=512, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=2, head_dim=128, max_position_embeddings=4096, initializer_range=0.05,
    )  # fmt: skip
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).eval().bfloat16()
    model.set_attn_implementation("stream_attention")
    return model


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def text(batch: int = 2) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(0)
    return torch.randint(1, 512, (batch, PROMPT + NEW), device="cuda", generator=generator)


def logits(model: Any, ids: Tensor, cache: Any, step: int = 1) -> Tensor:
    """Of what follows the prompt, `step` tokens at a time."""
    model(ids[:, :PROMPT], past_key_values=cache)
    parts = [model(part, past_key_values=cache).logits for part in ids[:, PROMPT:].split(step, 1)]
    return torch.cat(parts, 1).float()


@pytest.fixture(scope="module")
def exact(model: Any) -> Tensor:
    with torch.no_grad():
        return logits(model.float(), text(), DynamicCache(config=model.config))


@pytest.fixture(scope="module")
def noise(model: Any, exact: Tensor) -> float:
    """The mean error of bf16 itself."""
    with torch.no_grad():
        plain = logits(model.bfloat16(), text(), DynamicCache(config=model.config))
    return float((plain - exact).abs().mean())


@pytest.mark.parametrize("step", [1, 3, 50])
def test_a_bounded_cache_that_drops_nothing_is_as_good_as_any(
    model: Any, exact: Tensor, noise: float, step: int
) -> None:
    out = logits(model.bfloat16(), text(), StreamBoundedCache(model, 4096), step)
    assert float((out - exact).abs().mean()) < 1.5 * noise


@pytest.mark.parametrize("step", [1, 3, 50])
def test_int8_costs_little_and_int4_more(model: Any, exact: Tensor, noise: float, step: int) -> None:
    errors = [
        float((logits(model.bfloat16(), text(), StreamQuantizedCache(model, format), step) - exact).abs().mean())
        for format in ("int8", "fp8", "int4")
    ]
    assert errors == sorted(errors) and errors[0] < 1.5 * noise
    assert errors[2] < float(exact.abs().mean())


@pytest.mark.parametrize("heavy", ["attention", "key_norm", None])
def test_a_bounded_cache_stays_bounded(model: Any, heavy: str | None) -> None:
    cache = StreamBoundedCache(model, 256, heavy=heavy, every=32)
    out = logits(model.bfloat16(), text(), cache)
    assert out.isfinite().all() and cache.tokens <= 288 and cache.get_seq_length() == PROMPT + NEW
    before = cache.nbytes
    logits(model, text(), cache)
    assert cache.nbytes == before


def test_padding(model: Any) -> None:
    ids, mask = text()[:, :PROMPT], torch.ones(2, PROMPT, dtype=torch.long, device="cuda")
    mask[1, :300] = 0
    how: dict[str, Any] = {"do_sample": False, "max_new_tokens": 16, "pad_token_id": 0, "eos_token_id": 512}
    model.float()
    expected = model.generate(ids, attention_mask=mask, **how)
    for cache in (
        StreamBoundedCache(model, 2048, attention_mask=mask),
        StreamQuantizedCache(model, "int8", attention_mask=mask, residual=1024),
    ):
        assert torch.equal(model.generate(ids, attention_mask=mask, past_key_values=cache, **how), expected)


@pytest.mark.parametrize(("pad", "kernels"), [(0, 3), (5, 1)])
def test_a_token_is_few_kernels(pad: int, kernels: int) -> None:
    """Keys, values and a length; one for all of them where rows have different lengths. The codes of a block that it
    completes come on top, once in 64 tokens."""
    mask = torch.arange(400, device="cuda") >= torch.tensor([[0], [pad]], device="cuda")
    layer = QuantisedLayer(mask, QuantizeOptions("int4", 64, 128, "channel", "token"))
    tokens = torch.randn(2, 2, 2, 400, 128, device="cuda", dtype=torch.bfloat16)
    layer.update(*tokens)
    one = [x[:, :, :1].contiguous() for x in tokens]
    layer.update(*one)  # compiles
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(10):
            layer.update(*one)
        torch.cuda.synchronize()
    names = [event.name for event in profiled.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    launched = [name for name in names if not name.startswith(("Activity", "Memcpy", "Memset"))]
    copied = [name for name in names if name.startswith("Memcpy")]
    assert len(launched) + len(copied) == 10 * kernels, names
