"""Models of transformers on a GPU: our kernels compute their attention, as closely as eager attention in bf16."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

transformers = pytest.importorskip("transformers")

from stream_attention.integration.hf import NAME, register  # noqa: E402

pytestmark = pytest.mark.gpu

LAYERS, LENGTH, SLOTS = 2, 320, 512


@pytest.fixture(scope="module")
def model() -> Any:
    register()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=512,
        intermediate_size=512,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=128,
        max_position_embeddings=1024,
        initializer_range=0.1,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.device("cuda"):
        return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture(autouse=True)
def _as_it_was(model: Any) -> Iterator[None]:
    yield
    model.float().eval()


def by(model: Any, implementation: str, dtype: torch.dtype, call: Callable[[], Any]) -> Any:
    """What a call gives; the weights are those that bf16 holds, in every dtype."""
    model.to(torch.bfloat16).to(dtype)
    model.set_attn_implementation(implementation)
    return call()


def check(model: Any, call: Callable[[], Tensor], where: Tensor | None = None, factor: float = 2.0) -> None:
    """Ours in bf16 is as close to eager attention in fp32 as that in bf16 is, times 2 (3 for gradients)."""
    with torch.set_grad_enabled(factor > 2):
        exact = by(model, "eager", torch.float32, call)
        eager, ours = (by(model, name, torch.bfloat16, call).float() for name in ("eager", NAME))
    assert ours.isfinite().all()
    read = torch.ones((), dtype=torch.bool, device="cuda") if where is None else where.bool()
    earned = (eager - exact)[read].abs().max()
    assert (ours - exact)[read].abs().max() <= factor * earned + torch.finfo(torch.bfloat16).eps * exact.abs().max()


def kernels(call: Callable[[], Any]) -> list[str]:
    """The kernels of ours that run in a call, once it has run before."""
    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        call()
        torch.cuda.synchronize()
    ours = ("_forward_kernel", "_decode_kernel", "_backward_kernel", "_key_kernel")
    return [event.name for event in profiled.events() if event.name.startswith(ours)]


def tokens(rows: int = 2, length: int = LENGTH) -> Tensor:
    return torch.randint(1, 256, (rows, length), device="cuda", generator=torch.Generator("cuda").manual_seed(1))


def padding(side: str) -> Tensor:
    mask = torch.ones(2, LENGTH, dtype=torch.long, device="cuda")
    mask[0, :70] = 0
    return mask if side == "left" else mask.flip(1)


# A prompt


@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_a_prompt(model: Any, side: str) -> None:
    mask = None if side == "none" else padding(side)

    def call() -> Tensor:
        return model(tokens(), attention_mask=mask, use_cache=False).logits

    check(model, call, mask if side == "left" else None)
    with torch.no_grad():
        ran = by(model, NAME, torch.bfloat16, lambda: kernels(call))
    calls = 2 if side == "right" else 1  # of the tokens, and of the padding that sees them
    assert len(ran) == calls * LAYERS and all(name.startswith("_forward_kernel") for name in ran)


# A step


def cache(model: Any, kind: str) -> Any:
    if kind == "static":
        return transformers.StaticCache(config=model.config, max_cache_len=SLOTS)
    return transformers.DynamicCache(config=model.config)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("side", ["none", "left"])
def test_steps_after_a_prompt(model: Any, kind: str, side: str) -> None:
    ids, mask = tokens(), None if side == "none" else padding(side)

    def call() -> Tensor:
        past, parts = cache(model, kind), []
        for start, stop in ((0, LENGTH - 3), (LENGTH - 3, LENGTH - 2), (LENGTH - 2, LENGTH - 1), (LENGTH - 1, LENGTH)):
            said = {"attention_mask": None if mask is None else mask[:, :stop], "past_key_values": past}
            parts.append(model(ids[:, start:stop], **said).logits)
        return torch.cat(parts, 1)

    check(model, call, mask)
    with torch.no_grad():
        ran = by(model, NAME, torch.bfloat16, lambda: kernels(call))
    decoded = 3 * LAYERS if side == "none" else 0
    assert len(ran) == 4 * LAYERS and sum(name.startswith("_decode_kernel") for name in ran) == decoded


def test_a_step_does_not_synchronise(model: Any) -> None:
    from stream_attention.integration.forward import stream_attention_forward
    from stream_attention.integration.masks import decoded

    query = torch.randn(2, 8, 1, 128, device="cuda", dtype=torch.bfloat16)
    key, value = torch.randn(2, 2, 2, SLOTS, 128, device="cuda", dtype=torch.bfloat16)
    lengths = torch.full((2, 1, 1, 1), 300, dtype=torch.int32, device="cuda")
    seen = torch.arange(SLOTS, device="cuda")[None, None, None] < 300
    module = model.model.layers[0].self_attn
    outs = []
    for mask in (lengths, seen.expand(2, 1, 1, -1), seen.expand(2, 1, 1, -1).contiguous().view(torch.uint8)):
        stream_attention_forward(module, query, key, value, mask)  # compiles
        torch.cuda.set_sync_debug_mode("error")
        try:
            outs.append(stream_attention_forward(module, query, key, value, mask)[0])
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert decoded(lengths)[0].tolist() == [300, 300]
    for out in outs[1:]:
        assert (out - outs[0]).abs().max() <= 4 * torch.finfo(out.dtype).eps * outs[0].abs().max()


def test_generation_compiles_with_a_static_cache(model: Any) -> None:
    """As transformers does by itself on a GPU: in one graph, replayed."""
    ids = tokens(1, 64)
    said = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 12, "do_sample": False}
    said |= {"output_scores": True, "return_dict_in_generate": True}
    eager, plain, compiled = (
        by(model, name, torch.bfloat16, lambda kind=kind: model.generate(ids, cache_implementation=kind, **said))
        for name, kind in (("eager", None), (NAME, None), (NAME, "static"))
    )
    agreed = (plain.sequences == eager.sequences) & (plain.sequences == compiled.sequences)
    steps = 1 + min(int(agreed[0, ids.shape[1] :].long().cumprod(0).sum()), 11)  # until they say something else
    eager, plain, compiled = (torch.stack(one.scores[:steps]).float() for one in (eager, plain, compiled))
    rounded = torch.finfo(torch.bfloat16).eps * plain.abs().max()
    assert (compiled - plain).abs().max() <= 2 * (eager - plain).abs().max() + rounded


# Training


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_training_step(model: Any, checkpointed: bool) -> None:
    ids, mask = tokens(), padding("right")

    def call() -> Tensor:
        model.train()
        model.zero_grad()
        if checkpointed:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        try:
            model(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss.backward()
        finally:
            model.gradient_checkpointing_disable()
        return model.model.layers[0].self_attn.q_proj.weight.grad.float()

    check(model, call, factor=3.0)
    ran = by(model, NAME, torch.bfloat16, lambda: kernels(call))
    forwards = sum(name.startswith("_forward_kernel") for name in ran)
    calls = 2  # of the tokens, and of the padding on the right that sees them
    assert forwards == (2 if checkpointed else 1) * calls * LAYERS and len(ran) - forwards >= calls * LAYERS
