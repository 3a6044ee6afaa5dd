"""Models of transformers with our attention give what they give with attention in fp64, as closely as eager does."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from stream_attention.integration.hf import NAME, register
from tiny_models import SIZES, VOCABULARY

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.xdist_group("transformers")  # models are imported and built once

OLD = transformers.__version__ < "5"
WINDOW, LENGTH = 6, 14
DECODERS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {"sliding_window": WINDOW},
    "Qwen3": {"head_dim": 16},
    "Gemma2": {"head_dim": 8, "sliding_window": WINDOW, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 4},
    "GptOss": {"head_dim": 8, "sliding_window": WINDOW, "num_local_experts": 2, "num_experts_per_tok": 1},
    "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256},
}


def exact_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention in fp64 under the masks of eager attention."""
    assert dropout == 0.0
    groups = query.shape[1] // key.shape[1]
    key, value = (x.double().repeat_interleave(groups, 1) for x in (key, value))
    scores = query.double() @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    for added in (position_bias, attention_mask):
        if added is not None:
            scores = scores + added[..., : key.shape[2]]
    if s_aux is not None:
        scores = torch.cat([scores, s_aux.double().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    weights = scores.softmax(-1)[..., : key.shape[2]]
    return (weights @ value).transpose(1, 2).to(query.dtype), None


def build(name: str, cls: str, **sizes: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**sizes)
    config._attn_implementation = "eager"
    model = getattr(transformers, cls)(config).eval()
    for parameter in model.parameters():  # under the tiny weights of an initialisation attention does not matter
        torch.nn.init.uniform_(parameter, -0.3, 0.3) if parameter.dim() > 1 else None
    return model


@pytest.fixture(scope="module")
def models() -> Iterator[dict[str, Any]]:
    register()
    transformers.AttentionInterface.register("exact", exact_attention)
    transformers.AttentionMaskInterface.register("exact", transformers.masking_utils.eager_mask)
    heads = {"GPT2": "GPT2LMHeadModel"}
    yield {
        name: build(name, heads.get(name, f"{name}ForCausalLM"), **SIZES | sizes) for name, sizes in DECODERS.items()
    }
    for interface in (transformers.AttentionInterface, transformers.AttentionMaskInterface):
        del interface._global_mapping["exact"]


@pytest.fixture(params=DECODERS)
def model(request: pytest.FixtureRequest, models: dict[str, Any]) -> Any:
    return models[request.param]


@pytest.fixture
def llama(models: dict[str, Any]) -> Any:
    return models["Llama"]


def tokens(rows: int = 2, length: int = LENGTH) -> Tensor:
    return torch.randint(1, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(1))


def padding(side: str, length: int = LENGTH) -> Tensor:
    """Of two rows, five tokens of the first."""
    mask = torch.ones(2, length, dtype=torch.long)
    mask[0, :5] = 0
    return mask if side == "left" else mask.flip(1)


def by(model: Any, implementation: str, call: Callable[[], Any]) -> Any:
    """What a call gives with an attention; the model has its own again afterwards."""
    configs = {id(one.config): one.config for one in model.modules() if hasattr(one, "config")}.values()
    before = [one._attn_implementation for one in configs]
    for one in configs:  # set_attn_implementation passes by stacks like those of T5
        one._attn_implementation = implementation
    try:
        return call()
    finally:
        for one, implementation in zip(configs, before, strict=True):
            one._attn_implementation = implementation


def check(model: Any, call: Callable[[], Tensor], where: Tensor | None = None, factor: float = 2.0) -> Tensor:
    """Ours is as close to attention in fp64 as eager attention is, times 2 (3 for gradients), and a rounding."""
    with torch.set_grad_enabled(factor > 2):
        exact, eager, ours = (by(model, name, call) for name in ("exact", "eager", NAME))
    assert ours.isfinite().all()
    read = torch.ones((), dtype=torch.bool) if where is None else where.bool()
    earned = (eager - exact)[read].abs().max()
    rounded = torch.finfo(ours.dtype).eps * exact[read].abs().max()
    assert (ours - exact)[read].abs().max() <= factor * earned + rounded
    return ours


# Logits


def test_attention_matters_in_these_models(model: Any) -> None:
    """What is tested below could not be seen in a model that ignores its attention."""
    ids, other = tokens(), tokens()
    other[:, 0] += 1
    with torch.no_grad():
        changed = (model(ids).logits - model(other % VOCABULARY).logits)[:, WINDOW - 1].abs().max()
    assert changed > 1e-2


@pytest.mark.parametrize("side", ["none", "all ones", "left", "right"])
def test_logits(model: Any, side: str) -> None:
    ids = tokens()
    mask = None if side == "none" else torch.ones_like(ids) if side == "all ones" else padding(side)
    position_ids = None if mask is None else (mask.cumsum(1) - 1).clamp(min=0)
    check(model, lambda: model(ids, attention_mask=mask, position_ids=position_ids).logits, mask)


def test_padding_changes_nothing(model: Any) -> None:
    ids, mask = tokens(), padding("left")
    whole = {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    with torch.no_grad():
        padded = by(model, NAME, lambda: model(ids, **whole).logits)
        alone = by(model, NAME, lambda: model(ids[:1, 5:]).logits)
    torch.testing.assert_close(padded[:1, 5:], alone, atol=1e-5, rtol=1e-5)


def test_holes_in_a_mask(model: Any) -> None:
    ids, mask = tokens(), padding("left")
    mask[1, 4:7] = 0
    check(model, lambda: model(ids, attention_mask=mask).logits, mask)


def test_packed_position_ids(model: Any) -> None:
    ids = tokens()
    positions = torch.tensor([[*range(9), *range(5)], [*range(1), *range(13)]])
    packed = check(model, lambda: model(ids, position_ids=positions, use_cache=False).logits)
    if model.config.model_type == "gpt_oss":
        return  # in transformers its masks are not told of positions
    with torch.no_grad():
        alone = by(model, NAME, lambda: model(ids[:1, 9:]).logits)
    torch.testing.assert_close(packed[:1, 9:], alone, atol=1e-5, rtol=1e-5)


def test_packed_by_cu_seqlens(llama: Any) -> None:
    """As a collator says it that flattens a batch."""
    ids = tokens(1)
    positions = torch.tensor([[*range(9), *range(5)]])
    cu = torch.tensor([0, 9, 14], dtype=torch.int32)
    said = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 9, "max_length_k": 9}
    with torch.no_grad():
        whole = by(llama, NAME, lambda: llama(ids, position_ids=positions, use_cache=False, **said).logits)
        alone = by(llama, NAME, lambda: llama(ids[:, 9:]).logits)
    torch.testing.assert_close(whole[:, 9:], alone, atol=1e-5, rtol=1e-5)


def test_a_mask_of_four_dims_is_all_there_is_to_know(llama: Any) -> None:
    ids = tokens()
    own = torch.rand(2, 1, LENGTH, LENGTH, generator=torch.Generator().manual_seed(2)) < 0.6
    own |= torch.eye(LENGTH, dtype=torch.bool)
    added = torch.zeros(own.shape).masked_fill(~own, torch.finfo(torch.float32).min)
    by_bias = check(llama, lambda: llama(ids, attention_mask=added).logits)
    with torch.no_grad():
        by_mask = by(llama, NAME, lambda: llama(ids, attention_mask=own).logits)
    torch.testing.assert_close(by_mask, by_bias, atol=1e-5, rtol=1e-5)


# Caches


def cache(model: Any, kind: str) -> Any:
    if kind == "static":
        return transformers.StaticCache(config=model.config, max_cache_len=24)
    return transformers.DynamicCache(config=model.config)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("side", ["none", "left"])
def test_a_prompt_in_chunks(model: Any, kind: str, side: str) -> None:
    if OLD and kind == "static" and getattr(model.config, "sliding_window", None) is not None:
        pytest.skip("before transformers 5 a static cache of a window takes one token after the prompt, not more")
    ids = tokens()
    mask = None if side == "none" else padding(side)
    positions = torch.arange(LENGTH).expand(2, -1) if mask is None else (mask.cumsum(1) - 1).clamp(min=0)

    def in_chunks() -> Tensor:
        past, parts = cache(model, kind), []
        for start, stop in ((0, 7), (7, 12), (12, 13), (13, 14)):
            said = {"attention_mask": None if mask is None else mask[:, :stop], "past_key_values": past}
            if OLD:
                said["cache_position"] = torch.arange(start, stop)
            parts.append(model(ids[:, start:stop], position_ids=positions[:, start:stop], **said).logits)
        return torch.cat(parts, 1)

    chunked = check(model, in_chunks, mask)
    with torch.no_grad():
        whole = by(model, NAME, lambda: model(ids, attention_mask=mask, position_ids=positions).logits)
    where = torch.ones_like(ids) if mask is None else mask
    torch.testing.assert_close(chunked[where.bool()], whole[where.bool()], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("kind", "side"), [(None, "left"), ("static", "left"), ("static", "none")])
def test_greedy_generation_is_the_same_over_64_tokens(model: Any, kind: str | None, side: str) -> None:
    mask = torch.ones_like(tokens()) if side == "none" else padding(side)
    said = {"attention_mask": mask, "max_new_tokens": 64, "do_sample": False}
    eager, ours = (
        by(model, name, lambda: model.generate(tokens(), cache_implementation=kind, **said)) for name in ("eager", NAME)
    )
    assert ours.shape == (2, LENGTH + 64) and torch.equal(eager, ours)
    assert len(ours[1, LENGTH:].unique()) > 3  # it did not end in one token for ever


def test_a_layer_that_has_other_keys_than_it_said_is_refused(models: dict[str, Any]) -> None:
    """As assisted decoding leaves a cache of sliding windows. transformers' own attention fails there too."""
    model, ids = models["Mistral"], tokens(1, 30)

    def second_turn() -> None:
        past = transformers.DynamicCache(config=model.config)
        model(ids[:, :20], past_key_values=past)
        for layer in past.layers:  # it keeps more than its window, and counts as if it did not
            layer.keys, layer.values = (torch.cat([x, x[:, :, -3:]], 2) for x in (layer.keys, layer.values))
        model(ids[:, 20:24], past_key_values=past)

    with torch.no_grad(), pytest.raises(ValueError, match=r"past_key_values: expected a layer with the \d+ keys"):
        by(model, NAME, second_turn)


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Gemma2"])
def test_sequences_that_are_said_do_not_see_each_other_in_windows_either(models: dict[str, Any], name: str) -> None:
    model, ids, cuts = models[name], tokens(1, 24), torch.tensor([0, 9, 24], dtype=torch.int32)
    said = {"cu_seq_lens_q": cuts, "cu_seq_lens_k": cuts, "max_length_q": 15, "max_length_k": 15}
    positions = torch.cat([torch.arange(9), torch.arange(15)])[None]

    def together() -> Tensor:
        return model(ids, position_ids=positions, attention_mask=torch.ones_like(ids), **said).logits

    def apart() -> Tensor:
        return torch.cat([model(one).logits for one in (ids[:, :9], ids[:, 9:])], 1)

    with torch.no_grad():
        torch.testing.assert_close(by(model, NAME, together), by(model, NAME, apart), rtol=1e-4, atol=1e-4)


def test_keys_and_values_may_lie_as_they_like(llama: Any) -> None:
    from stream_attention.integration.forward import stream_attention_forward

    module = llama.model.layers[0].self_attn
    query, key, value = torch.randn(3, 2, 4, 10, 16)
    strided = (x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in (query, key, value))
    out = stream_attention_forward(module, *strided, None)[0]
    assert torch.equal(out, stream_attention_forward(module, query, key, value, None)[0])


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (torch.ones(1, 8), "attention_mask: expected a row for each of the 2 of the batch"),
        (torch.ones(2, 8, 8), "attention_mask: expected a row for each of the 2 of the batch"),
        (torch.ones(2, 1, 8, 8, dtype=torch.int32), "attention_mask: expected a mask of bool or of floats"),
        (torch.ones(2, 1, 8, 8, dtype=torch.uint8), "attention_mask: expected a mask of the 8 keys"),
    ],
    ids=["one row", "three dims", "int32", "uint8"],
)
def test_masks_that_mean_nothing_are_refused(llama: Any, mask: Tensor, words: str) -> None:
    with torch.no_grad(), pytest.raises((ValueError, TypeError), match=words):
        by(llama, NAME, lambda: llama(tokens(2, 8), attention_mask=mask))


def test_models_that_sdpa_is_not_for_are_told_that_they_are_causal() -> None:
    from stream_attention.integration.masks import _knows_causal

    transformers.BigBirdPegasusForCausalLM  # noqa: B018  loads its code
    assert _knows_causal(transformers.LlamaConfig) and not _knows_causal(transformers.BigBirdPegasusConfig)


def test_beam_search_is_the_same(llama: Any) -> None:
    said = {"max_new_tokens": 12, "num_beams": 3, "num_return_sequences": 3, "do_sample": False}
    said |= {"attention_mask": padding("left"), "output_scores": True, "return_dict_in_generate": True}
    eager, ours = (by(llama, name, lambda: llama.generate(tokens(), **said)) for name in ("eager", NAME))
    assert torch.equal(eager.sequences, ours.sequences)
    torch.testing.assert_close(eager.sequences_scores, ours.sequences_scores, atol=1e-4, rtol=1e-4)


# Training


def gradients(model: Any, checkpointed: bool) -> Tensor:
    ids, mask = tokens(), padding("right")
    model.train()
    if checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    try:
        model.zero_grad()
        model(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss.backward()
        flat = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    finally:
        model.gradient_checkpointing_disable()
        if hasattr(model, "_require_grads_hook"):  # which that leaves behind, and torch 2.11 does not compile
            model.disable_input_require_grads()
        model.eval()
    return torch.cat(flat)


def test_gradients_with_and_without_checkpointing(model: Any) -> None:
    if model.config.model_type == "gpt2":  # whose dropout would draw
        model.config.attn_pdrop = 0.0
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
    plain = check(model, lambda: gradients(model, False), factor=3.0)
    torch.testing.assert_close(by(model, NAME, lambda: gradients(model, True)), plain, atol=0, rtol=0)


def test_dropout_is_drawn_anew_and_replayed_by_checkpointing(llama: Any) -> None:
    def drawn(seed: int, checkpointed: bool) -> Tensor:
        torch.manual_seed(seed)
        return by(llama, NAME, lambda: gradients(llama, checkpointed))

    modules = [module for module in llama.modules() if hasattr(module, "attention_dropout")]
    for module in modules:
        module.attention_dropout = 0.3
    try:
        first, again, other = drawn(0, False), drawn(0, True), drawn(1, False)
    finally:
        for module in modules:
            module.attention_dropout = 0.0
    assert torch.equal(first, again) and not torch.allclose(first, other, atol=1e-3)


# Compiled


def test_it_compiles_whole(models: dict[str, Any]) -> None:
    """A step after a prompt in a static cache, padded or not, and a batch without a cache."""
    name = "Llama" if OLD else "Gemma2"  # whose windows an older static cache looks for in tensors
    model, ids, mask = models[name], tokens(), padding("left")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")

    def steps(run: Any, mask: Tensor | None) -> Tensor:
        past = transformers.StaticCache(config=model.config, max_cache_len=24)
        model(ids[:, :13], past_key_values=past, attention_mask=None if mask is None else mask[:, :13])
        said: dict[str, Any] = {"past_key_values": past, "attention_mask": mask}
        said |= {"position_ids": torch.tensor([[13]]), **({"cache_position": torch.tensor([13])} if OLD else {})}
        return run(ids[:, 13:], **said).logits

    with torch.no_grad():
        for given in (mask, None):
            plain, whole = (
                by(model, NAME, lambda run=run, given=given: steps(run, given)) for run in (model, compiled)
            )
            torch.testing.assert_close(whole, plain, atol=1e-5, rtol=1e-5)
        plain, whole = (
            by(model, NAME, lambda run=run: run(ids, attention_mask=mask, use_cache=False).logits)
            for run in (model, compiled)
        )
    torch.testing.assert_close(whole, plain, atol=1e-5, rtol=1e-5)


# Encoders, and decoders that attend to an encoder


def test_bert_sees_both_ways_but_no_padding(models: dict[str, Any]) -> None:
    bert, ids, mask = build("Bert", "BertModel", **SIZES), tokens(), padding("right")
    check(bert, lambda: bert(ids, attention_mask=mask).last_hidden_state, mask)
    check(bert, lambda: bert(ids).last_hidden_state)


def test_vit_sees_all(models: dict[str, Any]) -> None:
    vit = build("ViT", "ViTModel", image_size=12, patch_size=4, **{k: v for k, v in SIZES.items() if "token" not in k})
    pixels = torch.rand(2, 3, 12, 12, generator=torch.Generator().manual_seed(3))
    check(vit, lambda: vit(pixels).last_hidden_state)


def test_t5_adds_its_bias_and_attends_to_its_encoder(models: dict[str, Any]) -> None:
    sizes = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 4}
    t5 = build(
        "T5", "T5ForConditionalGeneration", **sizes, decoder_start_token_id=0, dropout_rate=0.0, eos_token_id=None
    )
    if not hasattr(transformers.models.t5.modeling_t5, "ALL_ATTENTION_FUNCTIONS"):
        pytest.skip("T5 has its own attention in older versions")
    ids, mask, seen = tokens(), padding("right"), padding("left", 9)
    said = {"attention_mask": mask, "decoder_input_ids": tokens(2, 9)}
    check(t5, lambda: t5(ids, **said).logits)
    check(t5, lambda: t5(ids, **said, decoder_attention_mask=seen).logits, seen)
    eager, ours = (
        by(t5, name, lambda: t5.generate(ids, attention_mask=mask, max_new_tokens=20)) for name in ("eager", NAME)
    )
    assert torch.equal(eager, ours)


def test_whisper_attends_to_its_encoder(models: dict[str, Any]) -> None:
    sizes = {"vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "num_mel_bins": 8}
    sizes |= {f"{side}_attention_heads": 4 for side in ("encoder", "decoder")}
    sizes |= {f"{side}_ffn_dim": 32 for side in ("encoder", "decoder")}
    sizes |= {"max_source_positions": 10, "max_target_positions": 32, "pad_token_id": 0, "decoder_start_token_id": 1}
    whisper = build("Whisper", "WhisperForConditionalGeneration", **sizes, bos_token_id=1, eos_token_id=None)
    heard = torch.rand(2, 8, 20, generator=torch.Generator().manual_seed(4))
    check(whisper, lambda: whisper(heard, decoder_input_ids=tokens(2, 9)).logits)


# What was loaded


def test_a_model_is_loaded_with_it(llama: Any, tmp_path: Path) -> None:
    llama.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=NAME).eval()
    assert loaded.config._attn_implementation == NAME
    with torch.no_grad():
        torch.testing.assert_close(loaded(tokens()).logits, by(llama, NAME, lambda: llama(tokens()).logits))
    made = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(llama.config), attn_implementation=NAME)
    assert made.config._attn_implementation == NAME
