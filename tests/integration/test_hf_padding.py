"""Padded positions give what they give with transformers' eager and SDPA attention, wherever a query sees a key.

A padded query behind the tokens of its row attends to these tokens. A query that sees no key attends to nothing: eager
attention averages all values there, SDPA and ours give 0.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tiny_models import SIZES, VOCABULARY

transformers = pytest.importorskip("transformers")
from stream_attention.integration.hf import NAME, register  # noqa: E402

pytestmark = pytest.mark.xdist_group("transformers")

OLD = transformers.__version__ < "5"
TIMES = 10
"""How often each token of the patterns below is repeated, so that rows are not short: those have a mask."""
WINDOW, LENGTH = 6 * TIMES, 14 * TIMES
CLOSE = {"atol": 1e-4, "rtol": 1e-4}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {"sliding_window": WINDOW},
    "Qwen3": {"head_dim": 16},
    "Phi3": {},
    "Gemma2": {"head_dim": 8, "sliding_window": WINDOW, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 4},
    "GptOss": {"head_dim": 8, "sliding_window": WINDOW, "num_local_experts": 2, "num_experts_per_tok": 1},
}
SDPA = [name for name in FAMILIES if name not in ("Gemma2", "GptOss")]
"""SDPA has no softcap and no sinks."""


def build(name: str, head: str = "ForCausalLM", **more: Any) -> Any:
    register()
    torch.manual_seed(0)
    model = getattr(transformers, name + head)(getattr(transformers, f"{name}Config")(**more)).eval()
    for parameter in model.parameters():  # under the tiny weights of an initialisation attention does not matter
        torch.nn.init.uniform_(parameter, -0.3, 0.3) if parameter.dim() > 1 else None
    return model


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    return {name: build(name, **SIZES | more) for name, more in FAMILIES.items()}


def rows(*pieces: str) -> Tensor:
    return torch.tensor([[int(one) for one in row] for row in pieces]).repeat_interleave(TIMES, 1)


PADDING = {
    "right": rows("11111111100000", "11111111111111", "10000000000000", "11111100000000"),
    "left": rows("00000111111111", "11111111111111", "00000000000001", "00111111111111"),
    "both ends": rows("00011111100000", "00000000000000", "00100000000000", "11111111111100"),
    "holes": rows("11110111000000", "01111111111111", "11111111110101", "00110010011000"),
    "tril": torch.ones(8, LENGTH, dtype=torch.long).tril(),  # as transformers' own tests pad
    "tril, short": torch.ones(8, 14, dtype=torch.long).tril(),
    "short": rows("11111111100000", "11111111111111", "00011000000000", "11111100000000")[:, ::TIMES],
}


def tokens(batch: int, length: int = LENGTH, seed: int = 1) -> Tensor:
    """None of them the padding's id, at padding either."""
    return torch.randint(1, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def sees_some(model: Any, mask: Tensor) -> Tensor:
    """Which positions see a key in every layer, bool [B, T]."""
    window = getattr(model.config, "sliding_window", None) or mask.shape[1]
    counted = torch.nn.functional.pad(mask.cumsum(1), (window, 0))
    return counted[:, window:] > counted[:, :-window]


def cache(model: Any, kind: str) -> dict[str, Any]:
    if kind == "none":
        return {"use_cache": False}
    if kind == "dynamic":
        return {"past_key_values": transformers.DynamicCache(config=model.config)}
    return {"past_key_values": transformers.StaticCache(config=model.config, max_cache_len=LENGTH + 6)}


def logits(model: Any, implementation: str, mask: Tensor, kind: str = "none", run: Any = None) -> Tensor:
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        return (model if run is None else run)(tokens(*mask.shape), attention_mask=mask, **cache(model, kind)).logits


# Every position that sees a key, in every way that a model is run


@pytest.mark.parametrize("kind", ["none", "dynamic", "static"])
@pytest.mark.parametrize("side", PADDING)
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_at_padding_are_those_of_eager_and_sdpa(models: dict[str, Any], name: str, side: str, kind: str) -> None:
    model, mask = models[name], PADDING[side]
    read = sees_some(model, mask)
    assert (read & (mask == 0)).any() or side == "left"
    ours = logits(model, NAME, mask, kind)
    assert ours.isfinite().all()
    for other in ["eager", "sdpa"] if name in SDPA else ["eager"]:
        torch.testing.assert_close(ours[read], logits(model, other, mask)[read], **CLOSE)


@pytest.mark.parametrize("side", PADDING)
@pytest.mark.parametrize("name", SDPA)
def test_positions_that_see_nothing_are_sdpas_too(models: dict[str, Any], name: str, side: str) -> None:
    model, mask = models[name], PADDING[side]
    torch.testing.assert_close(logits(model, NAME, mask), logits(model, "sdpa", mask), **CLOSE)


@pytest.mark.parametrize("name", ["Llama", "Mistral"] if OLD else ["Llama", "Mistral", "Gemma2", "GptOss"])
def test_compiled_logits_are_the_same_everywhere(models: dict[str, Any], name: str) -> None:
    model = models[name]
    compiled = torch.compile(model, backend="aot_eager")
    for side in ("right", "left", "short"):
        whole = logits(model, NAME, PADDING[side], run=compiled)
        torch.testing.assert_close(logits(model, NAME, PADDING[side]), whole, **CLOSE)


@pytest.mark.skipif(OLD, reason="an older transformers exports otherwise")
@pytest.mark.parametrize("name", ["Llama", "Gemma2", "Mistral", "Qwen3", "Phi3"])
def test_exported_logits_are_the_same_everywhere(models: dict[str, Any], name: str) -> None:
    """As `test_torch_export_static` of transformers compares them: all outputs, of a batch that is padded like tril."""
    model = models[name]
    model.set_attn_implementation(NAME)
    mask = PADDING["tril"]
    said = {"input_ids": tokens(*mask.shape), "attention_mask": mask, "use_cache": False}
    exported = torch.export.export(model, (), said, strict=False).module()
    with torch.no_grad():
        torch.testing.assert_close(model(**said).logits, exported(**said).logits, **CLOSE)


@pytest.mark.skipif(OLD, reason="an older transformers exports otherwise")
@pytest.mark.parametrize("name", ["Llama", "Qwen3"])
def test_an_exported_static_cache_gives_the_same(models: dict[str, Any], name: str) -> None:
    from transformers.integrations.executorch import TorchExportableModuleWithStaticCache

    model = models[name]
    model.set_attn_implementation(NAME)
    options = {"use_cache": True, "cache_implementation": "static", "max_length": LENGTH + 6}
    options["cache_config"] = {"batch_size": 1, "max_cache_len": LENGTH + 6, "device": "cpu"}
    before, model.generation_config = model.generation_config, transformers.GenerationConfig(**options)
    try:
        wrapped = TorchExportableModuleWithStaticCache(model, batch_size=1, max_cache_len=LENGTH + 6)
        ids, at = tokens(1, 1), torch.tensor([0])
        steps = tokens(1, 5)
        with torch.no_grad():
            exported = torch.export.export(wrapped, (), {"input_ids": ids, "cache_position": at}, strict=False).module()
            parts = [
                exported(input_ids=steps[:, i : i + 1], cache_position=torch.tensor([i])) for i in range(steps.shape[1])
            ]
            torch.testing.assert_close(torch.cat(parts, 1), model(steps, use_cache=False).logits, **CLOSE)
    finally:
        model.generation_config = before


def test_tokens_behind_a_cache_may_be_padding(models: dict[str, Any]) -> None:
    model, mask = models["Llama"], PADDING["right"]
    model.set_attn_implementation(NAME)
    ids = tokens(*mask.shape)
    for kind in ("dynamic", "static"):
        past = cache(model, kind)
        with torch.no_grad():
            parts = [
                model(ids[:, start:stop], attention_mask=mask[:, :stop], **past).logits
                for start, stop in ((0, 130), (130, 133), (133, 134), (134, 140))
            ]
        torch.testing.assert_close(torch.cat(parts, 1), logits(model, NAME, mask), **CLOSE)


# Heads that read a padded position


def test_a_classifier_reads_a_padded_position() -> None:
    """It takes the last id that is not `pad_token_id`, whatever the mask says."""
    model = build("Llama", "ForSequenceClassification", **SIZES, num_labels=3)
    mask = PADDING["right"]
    scores = {name: logits(model, name, mask) for name in ("eager", "sdpa", NAME)}
    for other in ("eager", "sdpa"):
        torch.testing.assert_close(scores[NAME], scores[other], **CLOSE)


@pytest.mark.parametrize("past", [7, 137])
@pytest.mark.parametrize("seed", range(12))
def test_a_decoder_with_a_past_gives_what_it_gives_without(seed: int, past: int) -> None:
    """As `test_decoder_model_past_with_large_inputs` of transformers' whisper, whose new tokens may be padding."""
    sizes = {"vocab_size": VOCABULARY, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "num_mel_bins": 8}
    sizes |= {f"{side}_{what}": 4 for side in ("encoder", "decoder") for what in ("attention_heads", "ffn_dim")}
    sizes |= {"max_source_positions": 20, "max_target_positions": 150, "pad_token_id": 0, "decoder_start_token_id": 1}
    model = build("Whisper", "Model", **sizes, bos_token_id=1, eos_token_id=None).get_decoder()
    model.config._attn_implementation = NAME
    draw = torch.Generator().manual_seed(seed)
    ids, new = (torch.randint(2, VOCABULARY, (3, n), generator=draw) for n in (past, 3))
    mask = torch.cat([torch.ones(3, past, dtype=torch.long), torch.randint(0, 2, (3, 3), generator=draw)], 1)
    heard = torch.randn(3, 20, 16, generator=draw)
    with torch.no_grad():
        first = model(ids, encoder_hidden_states=heard, attention_mask=mask[:, :past], use_cache=True)
        said = {"encoder_hidden_states": heard, "attention_mask": mask}
        late = model(new, past_key_values=first.past_key_values, **said).last_hidden_state
        whole = model(torch.cat([ids, new], 1), use_cache=False, **said).last_hidden_state
        model.config._attn_implementation = "eager"
        eager = model(torch.cat([ids, new], 1), use_cache=False, **said).last_hidden_state
    torch.testing.assert_close(late, whole[:, -3:], **CLOSE)
    torch.testing.assert_close(whole, eager, **CLOSE)


# Encoders, and decoders that attend to one


def test_an_encoder_is_eagers_at_padding_too() -> None:
    model = build("Bert", "Model", **SIZES)
    for side in ("right", "left", "holes"):
        outs = {}
        for name in ("eager", NAME):
            model.set_attn_implementation(name)
            with torch.no_grad():
                outs[name] = model(tokens(4), attention_mask=PADDING[side]).last_hidden_state
        torch.testing.assert_close(outs[NAME], outs["eager"], **CLOSE)


def test_padding_of_an_encoder_and_of_its_decoder() -> None:
    sizes = {"vocab_size": VOCABULARY, "d_model": 32, "max_position_embeddings": 256, "pad_token_id": 0}
    sizes |= {f"{side}_{what}": 2 for side in ("encoder", "decoder") for what in ("layers", "attention_heads")}
    sizes |= {"encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "bos_token_id": 1, "eos_token_id": 2}
    model = build("Bart", "Model", **sizes, decoder_start_token_id=2)
    heard, own = PADDING["holes"], PADDING["right"]
    outs = {}
    for name in ("eager", "sdpa", NAME):
        model.set_attn_implementation(name)
        said = {"attention_mask": heard, "decoder_input_ids": tokens(4, seed=2), "decoder_attention_mask": own}
        with torch.no_grad():
            outs[name] = model(tokens(4), **said, use_cache=False).last_hidden_state
    for other in ("eager", "sdpa"):
        torch.testing.assert_close(outs[NAME], outs[other], **CLOSE)


# Gradients


@pytest.mark.parametrize("side", PADDING)
@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_through_padded_positions(models: dict[str, Any], name: str, side: str) -> None:
    """Of a loss that reads every position that sees a key."""
    model, mask = models[name], PADDING[side]
    read = sees_some(model, mask)
    weights = torch.randn(*mask.shape, VOCABULARY, generator=torch.Generator().manual_seed(3))
    found = {}
    for implementation in ("eager", NAME):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        out = model(tokens(*mask.shape), attention_mask=mask, use_cache=False).logits
        (out * weights)[read].mean().backward()
        grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        found[implementation] = torch.cat([grads[n].flatten() for n in sorted(grads)])
    model.zero_grad()
    assert found[NAME].isfinite().all()
    torch.testing.assert_close(found[NAME], found["eager"], **CLOSE)
