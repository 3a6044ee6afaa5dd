"""Models that generate with our caches: what they say, how much they hold, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from transformers import DynamicCache, Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM, T5Config
from transformers.cache_utils import Cache, DynamicLayer

from stream_attention import ContiguousKV, quantize_kv
from stream_attention.integration.caches import StreamBoundedCache, StreamQuantizedCache
from stream_attention.integration.forward import stream_attention_forward
from stream_attention.integration.hf import register
from stream_attention.integration.placeholder import check_new, checked_once

PROMPT, NEW, VOCABULARY = 40, 30, 96
SHAPE = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 1024,
    "initializer_range": 0.15,
}  # fmt: skip


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return made(LlamaForCausalLM, LlamaConfig(**SHAPE))


def made(kind: Any, config: Any) -> Any:
    register()
    torch.manual_seed(0)
    model = kind(config).eval()
    model.set_attn_implementation("stream_attention")
    return model


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def prompt(batch: int = 2, length: int = PROMPT) -> Tensor:
    return torch.randint(1, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(length))


def padded() -> tuple[Tensor, Tensor]:
    """A prompt of two rows, of which the second has padding in front, and its mask."""
    ids = prompt()
    mask = (torch.arange(PROMPT) >= torch.tensor([[0], [13]])).long()
    return ids * mask, mask


def generated(model: Any, ids: Tensor, cache: Any, mask: Tensor | None = None, new: int = NEW, **how: Any) -> Tensor:
    options = {"do_sample": False, "max_new_tokens": new, "pad_token_id": 0, "eos_token_id": VOCABULARY} | how
    mask = torch.ones_like(ids) if mask is None else mask
    return model.generate(ids, attention_mask=mask, past_key_values=cache, **options)


def logits(
    model: Any, ids: Tensor, cache: Any, mask: Tensor | None = None, sizes: tuple[int, ...] = (PROMPT,)
) -> Tensor:
    """Of all tokens, of which the first come in parts of these sizes and the others one by one."""
    outs, start = [], 0
    for size in (*sizes, *[1] * (ids.shape[1] - sum(sizes))):
        stop = start + size
        said = {} if mask is None else {"attention_mask": torch.nn.functional.pad(mask, (0, stop - PROMPT), value=1)}
        if mask is not None:
            said["position_ids"] = (said["attention_mask"].cumsum(1) - 1).clamp_min(0)[:, start:stop]
        outs.append(model(ids[:, start:stop], past_key_values=cache, use_cache=True, **said).logits)
        start = stop
    return torch.cat(outs, 1)


class RoundedLayer(DynamicLayer):
    """Every token in full precision, which later tokens read as codes would have it."""

    how: dict[str, Any]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        if keys.shape[2] == key_states.shape[2]:
            return keys, values
        coded = quantize_kv(ContiguousKV(keys.transpose(1, 2), values.transpose(1, 2)), **self.how)
        key, value = (x.transpose(1, 2) for x in coded.tile(0, keys.shape[2]))
        return key, value


# What a model says


@pytest.mark.parametrize("format", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("residual", [0, 16])
def test_codes_are_read_as_what_they_stand_for(model: Any, format: str, residual: int) -> None:
    """The same logits as those of an ordinary attention over keys and values that went through codes and back.

    In fp64: in fp32 a value between two codes may be rounded to one here and to the other there.
    """
    model = deepcopy(model).double()
    ids, how = prompt(length=PROMPT + NEW), {"format": format, "group": 8, "residual": residual}

    class Layer(RoundedLayer):
        pass

    Layer.how = how
    rounded = Cache(layer_class_to_replicate=Layer)
    out = logits(model, ids, StreamQuantizedCache(model, **how))
    expected = logits(model, ids, rounded)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    exact = logits(model, ids, DynamicCache(config=model.config))
    torch.testing.assert_close(
        out[:, :PROMPT], exact[:, :PROMPT], rtol=1e-4, atol=1e-4
    )  # the prompt sees itself exactly
    assert not torch.allclose(out[:, PROMPT:], exact[:, PROMPT:], rtol=1e-4, atol=1e-4)


def test_eight_bits_generate_what_full_precision_generates(model: Any) -> None:
    ids = prompt()
    expected = generated(model, ids, DynamicCache(config=model.config))
    assert torch.equal(generated(model, ids, StreamQuantizedCache(model, "int8", group=8, residual=16)), expected)


def test_more_bits_are_closer(model: Any) -> None:
    ids = prompt(length=PROMPT + NEW)
    exact = logits(model, ids, DynamicCache(config=model.config))
    errors = [
        float((logits(model, ids, StreamQuantizedCache(model, format, group=8, residual=0)) - exact).abs().mean())
        for format in ("int8", "fp8", "int4")
    ]
    assert errors == sorted(errors) and errors[0] < 0.02 * float(exact.abs().mean())


CACHES = {
    "bounded": lambda model, **said: StreamBoundedCache(model, 1000, **said),
    "bounded, by norm": lambda model, **said: StreamBoundedCache(model, 1000, heavy="key_norm", **said),
    "quantised, all in the window": lambda model, **said: StreamQuantizedCache(model, "int4", residual=1000, **said),
}
"""Caches that lose nothing over a short text."""


@pytest.fixture(params=CACHES.values(), ids=CACHES)
def whole(request: pytest.FixtureRequest) -> Any:
    return request.param


def test_a_cache_that_loses_nothing_changes_nothing(model: Any, whole: Any) -> None:
    ids = prompt()
    cache = whole(model)
    assert torch.equal(generated(model, ids, cache), generated(model, ids, DynamicCache(config=model.config)))
    assert cache.get_seq_length() == cache.tokens == PROMPT + NEW - 1
    text = prompt(length=PROMPT + NEW)
    torch.testing.assert_close(
        logits(model, text, whole(model)), logits(model, text, DynamicCache(config=model.config)), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("sizes", [(PROMPT, 4, 20), (10, 10, 40)], ids=str)
def test_a_prompt_may_come_in_parts(model: Any, whole: Any, sizes: tuple[int, ...]) -> None:
    text = prompt(length=PROMPT + NEW)
    expected = logits(model, text, DynamicCache(config=model.config))
    torch.testing.assert_close(logits(model, text, whole(model), sizes=sizes), expected, rtol=1e-4, atol=1e-4)


def test_rows_with_padding_say_what_they_would_say_alone(model: Any, whole: Any) -> None:
    ids, mask = padded()
    both = generated(model, ids, whole(model, attention_mask=mask), mask)
    for row, pad in enumerate((0, 13)):
        alone = generated(model, ids[row : row + 1, pad:], DynamicCache(config=model.config))
        assert torch.equal(both[row, pad:], alone[0])


def test_padding_and_parts_go_together(model: Any, whole: Any) -> None:
    _, mask = padded()
    text = prompt(length=PROMPT + NEW)
    expected = logits(model, text, DynamicCache(config=model.config), mask)
    out = logits(model, text, whole(model, attention_mask=mask), mask, (PROMPT, 4, 20))
    torch.testing.assert_close(out[0], expected[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(out[1, 13:], expected[1, 13:], rtol=1e-4, atol=1e-4)


def test_beams(model: Any, whole: Any) -> None:
    ids, mask = padded()
    expected = generated(model, ids, DynamicCache(config=model.config), mask, 12, num_beams=3)
    assert torch.equal(generated(model, ids, whole(model, attention_mask=mask), mask, 12, num_beams=3), expected)


def test_guessed_tokens_are_taken_back(model: Any, whole: Any) -> None:
    ids = torch.cat([prompt(1, 10)] * 3, 1)  # repeats itself, so that guesses are made from it
    expected = generated(model, ids, DynamicCache(config=model.config))
    assert torch.equal(generated(model, ids, whole(model), prompt_lookup_num_tokens=4), expected)


def test_a_second_turn_goes_on_where_the_first_ended(model: Any, whole: Any) -> None:
    cache, plain = whole(model), DynamicCache(config=model.config)
    ids, more = prompt(1), prompt(1, 25)
    for held in (cache, plain):
        first = generated(model, ids, held, new=10)
    text = torch.cat([first, more], 1)
    assert torch.equal(generated(model, text, cache, new=10), generated(model, text, plain, new=10))


def test_layers_with_a_window_keep_their_own_cache() -> None:
    config = Gemma2Config(**SHAPE | {"num_hidden_layers": 4}, sliding_window=16, query_pre_attn_scalar=16)
    model = made(Gemma2ForCausalLM, config)
    ids = prompt()
    cache = StreamQuantizedCache(model, "int8", residual=1000)
    assert cache.is_sliding == [True, False, True, False]
    assert torch.equal(generated(model, ids, cache), generated(model, ids, DynamicCache(config=model.config)))
    assert torch.equal(generated(model, ids, StreamBoundedCache(model, 1000)), generated(model, ids, None))


# How much is held


def test_a_bounded_cache_stays_as_small_as_it_is(model: Any) -> None:
    cache = StreamBoundedCache(model, 32, sinks=2, recent=16, every=8)
    sizes, ids = [], prompt()
    for _ in range(4):
        ids = generated(model, ids, cache, new=60)
        sizes.append(cache.nbytes)
        assert cache.get_seq_length() == ids.shape[1] - 1 and 32 <= cache.tokens <= 40
    tokens = 2 * 2 * 2 * 2 * 16 * 40 * 4  # layers, keys and values, rows, heads, dims, tokens, bytes
    voters = 2 * 2 * 16 * 4 * 16 * 4  # layers, rows, queries, heads, dims, bytes
    assert {*sizes} == {tokens + voters + 2 * 2 * 4}  # and a length of 4 bytes per layer and row


def test_a_quantised_cache_holds_fewer_bytes(model: Any) -> None:
    ids = prompt(1, 900)
    plain, small, smaller = (
        DynamicCache(config=model.config),
        StreamQuantizedCache(model, "int8", group=64, residual=0),
        StreamQuantizedCache(model, "int4", group=64, residual=0),
    )
    for cache in (plain, small, smaller):
        model(ids, past_key_values=cache)
    bytes_of_plain = sum(layer.keys.nbytes + layer.values.nbytes for layer in plain.layers)
    assert small.tokens == 900 and smaller.nbytes < small.nbytes < bytes_of_plain  # with room for more


def test_the_names_of_what_is_held() -> None:
    model = LlamaConfig(**SHAPE)
    model._attn_implementation = "stream_attention"
    cache = StreamBoundedCache(model, 64)
    assert len(cache) == 2 and cache.nbytes == cache.tokens == cache.get_seq_length() == 0
    assert not cache.is_compileable and cache.layers[0].get_max_length() == -1
    assert (
        cache.budget == (64, 4, 32, "attention", 64) and StreamBoundedCache(model, 64, heavy=None).budget.recent == 60
    )


def test_a_reset_cache_serves_another_batch(model: Any, whole: Any) -> None:
    ids, mask = padded()
    cache = whole(model, attention_mask=mask)
    generated(model, ids, cache, mask, 5)
    cache.reset()
    assert cache.get_seq_length() == 0
    again = prompt(3, 20)
    assert torch.equal(generated(model, again, cache), generated(model, again, None))


def test_autocast(model: Any, whole: Any) -> None:
    ids = prompt(1, 20)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        cache = whole(model)
        model(ids, past_key_values=cache)
        assert model(ids[:, :1], past_key_values=cache).logits.isfinite().all()


@pytest.mark.parametrize("trained", ["q_proj", "k_proj"])
def test_a_gradient_that_would_not_come_is_refused(whole: Any, trained: str) -> None:
    """Also of queries alone, as with an adapter on their projection in the first layer."""
    model = made(LlamaForCausalLM, LlamaConfig(**SHAPE)).requires_grad_(False)
    ids, cache = prompt(1, 20), whole(model)
    model(ids, past_key_values=cache)
    getattr(model.model.layers[0].self_attn, trained).weight.requires_grad_()
    with torch.enable_grad(), pytest.raises(ValueError, match=r"gradient.* under torch.no_grad\(\)"):
        model(ids[:, :1], past_key_values=cache)


def test_a_step_of_a_static_cache_gives_a_sink_its_gradient() -> None:
    """Where every tensor but the sink is frozen."""
    query, key, value = torch.randn(2, 4, 1, 16), torch.randn(2, 2, 30, 16), torch.randn(2, 2, 30, 16)
    mask = torch.full((2, 1, 1, 1), 20, dtype=torch.int32)  # keys that are filled
    sink = torch.randn(4)
    expected, _ = stream_attention_forward(torch.nn.Module(), query, key, value, mask, s_aux=sink)
    with torch.enable_grad():
        out, _ = stream_attention_forward(torch.nn.Module(), query, key, value, mask, s_aux=sink.requires_grad_())
        out.sum().backward()
    torch.testing.assert_close(out, expected)
    assert sink.grad is not None and sink.grad.any()


def test_a_mask_that_the_model_is_not_told_is_asked_for(model: Any, whole: Any) -> None:
    ids, mask = padded()
    cache = whole(model, attention_mask=mask)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        with pytest.raises(ValueError, match="attention_mask: expected the padding mask of the cache"):
            model(ids[:, :1], past_key_values=cache)


@pytest.mark.parametrize("new", [8, 24], ids=["few", "many"])
def test_padding_behind_the_prompt_is_refused(model: Any, whole: Any, new: int) -> None:
    ids, mask = padded()
    cache, more = whole(model, attention_mask=mask), torch.ones(len(ids), new, dtype=mask.dtype)
    more[0, :3] = 0
    with torch.no_grad():
        model(ids, attention_mask=mask, past_key_values=cache)
        with pytest.raises(ValueError, match="attention_mask: expected padding at the beginning of the prompt only"):
            model(prompt(len(ids), new), attention_mask=torch.cat([mask, more], 1), past_key_values=cache)


def test_a_mask_of_ours_is_looked_at_once_for_all_layers() -> None:
    ours, given = checked_once(torch.ones(2, 9, dtype=torch.bool)), torch.ones(2, 9, dtype=torch.bool)
    for mask in (ours, given):
        check_new(mask, 3)
        mask[1, -1] = False
    check_new(ours, 3)
    for mask, new in ((ours, 2), (given, 3)):
        with pytest.raises(ValueError, match="attention_mask: expected padding at the beginning of the prompt only"):
            check_new(mask, new)


def test_a_reset_forgets_windows_too(whole: Any) -> None:
    config = Gemma2Config(**SHAPE | {"num_hidden_layers": 2}, sliding_window=16, query_pre_attn_scalar=16)
    model = made(Gemma2ForCausalLM, config)
    cache = whole(model)
    generated(model, prompt(1, 20), cache)
    cache.reset()
    again = prompt(3, 12)
    assert torch.equal(generated(model, again, cache), generated(model, again, None))


# Refusals


def test_another_attention_is_refused(model: Any) -> None:
    other = LlamaForCausalLM(LlamaConfig(**SHAPE, attn_implementation="sdpa"))
    for made_of in (other, other.config):
        with pytest.raises(
            ValueError, match=r'attn_implementation "stream_attention".*; got \'sdpa\'. Call .*register'
        ):
            StreamQuantizedCache(made_of)
    with pytest.raises(TypeError, match="a transformers model or its config; got str"):
        StreamBoundedCache("llama", 64)


def test_models_without_such_a_cache_are_refused() -> None:
    t5 = T5Config()
    t5._attn_implementation = "stream_attention"
    with pytest.raises(ValueError, match="a decoder; got an encoder and a decoder"):
        StreamQuantizedCache(t5)
    windows = LlamaConfig(**SHAPE)
    windows._attn_implementation, windows.sliding_window = "stream_attention", 8
    with pytest.raises(ValueError, match="got one with sliding windows alone"):
        StreamQuantizedCache(windows)


@pytest.mark.parametrize(
    ("kind", "said", "words"),
    [
        (StreamQuantizedCache, {"format": "int2"}, "format: expected one of fp8, int8, int4"),
        (StreamQuantizedCache, {"group": 0}, "group: expected at least 1"),
        (StreamQuantizedCache, {"group": 512}, "group: expected at most 256; got 512"),
        (StreamQuantizedCache, {"keys": "row"}, "keys: expected"),
        (StreamBoundedCache, {"budget": 0}, "budget: expected at least 1"),
        (StreamBoundedCache, {"budget": 8, "recent": 6}, r"budget: expected at least sinks \+ recent = 10; got 8"),
        (StreamBoundedCache, {"budget": 8, "heavy": "luck"}, "heavy: expected"),
        (StreamBoundedCache, {"budget": 8, "heavy": None, "recent": 2}, "recent: expected budget - sinks = 4"),
        (StreamBoundedCache, {"budget": 8, "every": 0}, "every: expected at least 1"),
        (StreamBoundedCache, {"budget": 8, "attention_mask": torch.tensor([[1, 1, 0]])}, "padding on the left"),
        (StreamBoundedCache, {"budget": 8, "attention_mask": torch.tensor([[0, 0, 0]])}, "a token in every row"),
        (StreamBoundedCache, {"budget": 8, "attention_mask": torch.ones(3)}, r"a tensor \[B, T\] of the prompt"),
    ],
)
def test_bad_arguments_are_refused(model: Any, kind: Any, said: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        kind(model, **said)


def test_padding_that_the_cache_was_not_told_of_is_refused(model: Any, whole: Any) -> None:
    ids, mask = padded()
    with pytest.raises(
        ValueError, match=r'attention_mask: .*constructed with the prompt\'s padding.*attention_mask=inputs\["atte'
    ):
        generated(model, ids, whole(model), mask)
