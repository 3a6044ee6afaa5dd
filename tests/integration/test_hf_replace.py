"""Registering, replacing, giving back; what is refused, what falls back, and who reads which config."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from stream_attention import StreamAttentionConfig, UnsupportedProblem
from stream_attention.integration.hf import (
    NAME,
    register,
    replace_attention_generic,
    replace_gpt2_attention,
    replace_llama_attention,
    unregister,
)

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.xdist_group("transformers")

CONFIG = StreamAttentionConfig(num_heads=4, head_dim=8)
TABLES = (transformers.AttentionInterface, transformers.AttentionMaskInterface)


def llama(**others: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes | others)).eval()


def gpt2() -> Any:
    config = transformers.GPT2Config(vocab_size=32, n_embd=32, n_layer=2, n_head=4, n_positions=32)
    return transformers.GPT2LMHeadModel(config).eval()


def whisper() -> Any:
    sizes = {"vocab_size": 32, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "num_mel_bins": 8}
    sizes |= {f"{side}_attention_heads": 4 for side in ("encoder", "decoder")}
    sizes |= {"max_source_positions": 10, "max_target_positions": 16, "pad_token_id": 0, "decoder_start_token_id": 1}
    return transformers.WhisperModel(transformers.WhisperConfig(**sizes)).eval()


def t5() -> Any:
    sizes = {"vocab_size": 32, "d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 4}
    return transformers.T5Model(transformers.T5Config(**sizes)).eval()


def count_calls(call: Any) -> int:
    """How often our op runs in a call."""
    with torch.profiler.profile() as profile, torch.no_grad():
        call()
    return sum(event.count for event in profile.key_averages() if event.key == "stream_attention::forward")


IDS = torch.arange(1, 9).unsqueeze(0)


# Registering


def test_register_puts_both_functions_under_one_name_and_unregister_takes_both() -> None:
    for _ in range(2):
        register()
        assert all(NAME in table._global_mapping for table in TABLES)
    for _ in range(2):
        unregister()
        assert not any(NAME in table._global_mapping for table in TABLES)
    with pytest.raises((ValueError, KeyError, ImportError)):
        transformers.AutoModelForCausalLM.from_config(llama().config, attn_implementation=NAME)
    register()


def test_an_older_transformers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama()
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "4.55.4")
    for call in (register, unregister, lambda: replace_llama_attention(model, CONFIG)):
        with pytest.raises(
            ImportError, match=r"transformers: expected 4\.56 or newer; got 4\.55\.4\. Older ones pass caches"
        ) as it:
            call()
        assert str(it.value).endswith("Type: pip install --upgrade transformers")


def test_no_transformers_at_all_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match="needs transformers: pip install transformers"):
        register()


# Replacing


def test_it_returns_how_many_and_takes_effect() -> None:
    model = llama()
    before = model.config._attn_implementation
    assert count_calls(lambda: model(IDS)) == 0
    replaced = replace_llama_attention(model, CONFIG)
    assert isinstance(replaced, int) and replaced == 2 and f"Replaced {replaced} modules" == "Replaced 2 modules"
    assert count_calls(lambda: model(IDS)) == 2
    replaced.undo()
    assert model.config._attn_implementation == before and count_calls(lambda: model(IDS)) == 0
    replaced.undo()
    assert model.config._attn_implementation == before


def test_the_weights_and_the_forward_of_a_model_stay() -> None:
    model = llama()
    attention = model.model.layers[0].self_attn
    weights = {name: parameter.clone() for name, parameter in model.named_parameters()}
    expected = model(IDS).logits
    replace_llama_attention(model, CONFIG)
    assert model.model.layers[0].self_attn is attention and "forward" not in vars(attention)
    assert all(torch.equal(parameter, weights[name]) for name, parameter in model.named_parameters())
    torch.testing.assert_close(model(IDS).logits, expected, atol=1e-5, rtol=1e-5)


def test_again_changes_the_config_alone_and_each_undo_goes_one_step_back() -> None:
    model = llama()
    first = replace_llama_attention(model, CONFIG)
    second = replace_llama_attention(model, StreamAttentionConfig(num_heads=4, head_dim=8, max_sequence_length=4))
    assert first == second == 2
    with pytest.raises(ValueError, match="at most max_sequence_length=4 tokens; got 8"):
        model(IDS)
    second.undo()
    assert count_calls(lambda: model(IDS)) == 2
    first.undo()
    assert count_calls(lambda: model(IDS)) == 0


def test_replacements_are_undone_in_any_order() -> None:
    model = llama()
    before = model.config._attn_implementation
    short = StreamAttentionConfig(num_heads=4, head_dim=8, max_sequence_length=4)
    first, second, third = (replace_llama_attention(model, config) for config in (CONFIG, short, CONFIG))
    second.undo()
    second.undo()
    assert count_calls(lambda: model(IDS)) == 2
    first.undo()
    assert count_calls(lambda: model(IDS)) == 2
    third.undo()
    assert model.config._attn_implementation == before and count_calls(lambda: model(IDS)) == 0
    assert not hasattr(model.model.layers[0].self_attn, "stream_attention")


def test_a_config_is_of_one_model() -> None:
    """Tiles force the Triton kernel, which runs on no CPU."""
    plain, tiled, dense = llama(), llama(), llama()
    replace_llama_attention(plain, CONFIG)
    replace_llama_attention(tiled, StreamAttentionConfig(num_heads=4, head_dim=8, tile_size_q=64))
    replace_llama_attention(dense, StreamAttentionConfig(num_heads=4, head_dim=8, enable_flash_attention=False))
    with pytest.raises(UnsupportedProblem, match="triton"):
        tiled(IDS)
    assert count_calls(lambda: plain(IDS)) == 2
    assert count_calls(lambda: dense(IDS)) == 0  # the reference is no op
    torch.testing.assert_close(dense(IDS).logits, plain(IDS).logits, atol=1e-5, rtol=1e-5)


def test_gpt2_calls_its_modules_attn() -> None:
    model = gpt2()
    with pytest.raises(ValueError, match=r"modules module_name 'self_attn' that use .*; got attn"):
        replace_llama_attention(model, CONFIG)
    expected = model(IDS).logits
    assert replace_gpt2_attention(model, CONFIG) == 2
    assert count_calls(lambda: model(IDS)) == 2
    torch.testing.assert_close(model(IDS).logits, expected, atol=1e-5, rtol=1e-5)


def test_a_generic_pattern_covers_all_that_share_a_config() -> None:
    model = whisper()
    with pytest.raises(ValueError, match=r"name_pattern: expected all attention of the model; got .*encoder\.layers"):
        replace_attention_generic(model, CONFIG, "decoder")
    assert model.config._attn_implementation != NAME
    assert replace_attention_generic(model, CONFIG) == 3  # encoder, decoder, decoder to encoder
    said = {"input_features": torch.rand(1, 8, 20), "decoder_input_ids": IDS}
    assert count_calls(lambda: model(**said)) == 3


def test_stacks_with_configs_of_their_own_are_reached() -> None:
    """`set_attn_implementation` of transformers passes by them, as they have the class of the model's."""
    model = t5()
    if not hasattr(transformers.models.t5.modeling_t5, "ALL_ATTENTION_FUNCTIONS"):
        pytest.skip("T5 has its own attention in older versions")
    of_decoder = replace_attention_generic(model, CONFIG, "decoder")
    assert of_decoder == 2 and count_calls(lambda: model(IDS, decoder_input_ids=IDS)) == 2
    of_decoder.undo()
    replaced = replace_attention_generic(model, CONFIG, "Attention")
    assert replaced == 3 and count_calls(lambda: model(IDS, decoder_input_ids=IDS)) == 3
    replaced.undo()
    assert count_calls(lambda: model(IDS, decoder_input_ids=IDS)) == 0


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_heads": 8}, "num_heads: expected the model's 4; got 8"),
        ({"head_dim": 16}, "head_dim: expected the model's 8; got 16"),
        ({"dropout": 0.1}, "dropout: expected 0.0 for a model of transformers; got 0.1. The model has its own"),
        ({"gradient_checkpointing": True}, "gradient_checkpointing: expected False"),
        ({"use_qkv_projections": False}, "use_qkv_projections: expected True"),
    ],
)
def test_what_a_config_says_in_vain_is_refused(fields: dict[str, Any], words: str) -> None:
    model = llama()
    before = model.config._attn_implementation
    with pytest.raises(ValueError, match=words):
        replace_llama_attention(model, StreamAttentionConfig(**{"num_heads": 4, "head_dim": 8} | fields))
    assert model.config._attn_implementation == before


def test_what_is_no_model_or_no_config_is_refused() -> None:
    with pytest.raises(TypeError, match="model: expected a model of transformers; got Linear"):
        replace_llama_attention(torch.nn.Linear(2, 2), CONFIG)
    with pytest.raises(TypeError, match="config: expected a StreamAttentionConfig; got dict"):
        replace_llama_attention(llama(), {})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="name_pattern: expected a name; got ''"):
        replace_attention_generic(llama(), CONFIG, "")
    with pytest.raises(ValueError, match=r"expected attention modules module_name 'other' .* got self_attn"):
        replace_llama_attention(llama(), CONFIG, module_name="other")


def test_a_model_with_attention_of_its_own_is_refused() -> None:
    sizes = {"vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    bloom = transformers.BloomModel(transformers.BloomConfig(**sizes))
    with pytest.raises(ValueError, match="use transformers' attention interface; got none in this model"):
        replace_attention_generic(bloom, CONFIG)
    if not hasattr(transformers.models.bloom.modeling_bloom, "create_causal_mask"):
        return  # its masks are its own too
    register()
    bloom.config._attn_implementation = NAME  # as from_pretrained(attn_implementation=...) sets it without a word
    with pytest.raises(ValueError, match=r'got "stream_attention"\. BloomAttention computes its own attention'):
        bloom(IDS)


# The function itself


@pytest.fixture
def forward() -> Iterator[Any]:
    from stream_attention.integration import forward

    forward._warned.clear()
    yield forward.stream_attention_forward
    forward._warned.clear()


class Module(torch.nn.Module):
    is_causal = True
    num_key_value_groups = 2


def tensors() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, heads, 6, 8, generator=generator) for heads in (4, 2, 2)]


def test_what_it_cannot_do_is_done_by_sdpa_with_one_warning(forward: Any) -> None:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    from stream_attention.integration.masks import matrix

    query, key, value = tensors()
    mask = torch.tensor([0, 2, 6, 12]).expand(1, 1, 6, -1)
    with pytest.warns(UserWarning, match="Module runs transformers' SDPA: it uses transformers' paged cache"):
        out, weights = forward(Module(), query, key, value, mask, cache=object())
    expected, _ = sdpa_attention_forward(Module(), query, key, value, matrix(mask, 2, 6, 6))
    assert torch.equal(out, expected) and weights is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        forward(Module(), query, key, value, mask, cache=object())
    with pytest.raises(ValueError, match="eager for a layer with softcap or sinks where it uses transformers' paged"):
        forward(Module(), query, key, value, None, softcap=2.0, cache=object())


def test_weights_are_not_returned_and_that_is_said_once(forward: Any) -> None:
    with pytest.warns(UserWarning, match="output_attentions: weights are not materialised"):
        out, weights = forward(Module(), *tensors(), None, output_attentions=True)
    assert weights is None and out.shape == (2, 6, 4, 8)


def test_heads_are_weighed(forward: Any) -> None:
    whole, _ = forward(Module(), *tensors(), None)
    weighed, _ = forward(Module(), *tensors(), None, head_mask=torch.tensor([1.0, 0.0, 0.5, 1.0]).view(1, 4, 1, 1))
    assert torch.equal(weighed[:, :, 0], whole[:, :, 0]) and not weighed[:, :, 1].any()
    assert torch.equal(weighed[:, :, 2], 0.5 * whole[:, :, 2])
    with pytest.raises(ValueError, match=r"head_mask: expected a weight per head"):
        forward(Module(), *tensors(), None, head_mask=torch.ones(1, 4, 6, 6))


def test_two_dims_are_padding_and_may_end_before_the_keys(forward: Any) -> None:
    query, key, value = tensors()
    padding = torch.tensor([[0, 1, 1, 1, 1, 1], [1] * 6])
    out, _ = forward(Module(), query, key, value, padding)
    longer = [torch.cat([x, torch.full_like(x, torch.nan)], 2) for x in (key, value)]
    cut, _ = forward(Module(), query, *longer, padding)
    assert torch.equal(out, cut)
    alone, _ = forward(Module(), query[:1, :, 1:], key[:1, :, 1:], value[:1, :, 1:], None)
    torch.testing.assert_close(out[:1, 1:], alone)


def test_a_mask_of_integers_is_refused(forward: Any) -> None:
    with pytest.raises(TypeError, match=r"attention_mask: expected a mask of bool or of floats; got torch\.int16"):
        forward(Module(), *tensors(), torch.ones(2, 1, 6, 6, dtype=torch.int16))


def test_what_a_cache_of_ours_has_no_place_for_is_refused(forward: Any) -> None:
    from stream_attention import ContiguousKV, decode_attention
    from stream_attention.integration.placeholder import Cached

    query, key, value = tensors()
    held = ContiguousKV(key.transpose(1, 2), value.transpose(1, 2))
    key.stream_cached = Cached(held, lambda *_: None, padding_known=True)  # type: ignore[attr-defined]
    out, _ = forward(Module(), query[:, :, -1:], key, value, None, sliding_window=6)
    assert torch.equal(out, decode_attention(query[:, :, -1:].transpose(1, 2), held))
    for said in ({"sliding_window": 5}, {"dropout": 0.1}, {"is_causal": False}, {"position_bias": torch.zeros(1)}):
        with pytest.raises(ValueError, match=r"past_key_values: expected a plain cache .*; got one of ours"):
            forward(Module(), query, key, value, None, **said)
    windowed = torch.empty(0, 4, 1, 6, dtype=torch.uint8)
    with pytest.raises(ValueError, match="expected a plain cache for a layer with a sliding window"):
        forward(Module(), query, key, value, windowed)
