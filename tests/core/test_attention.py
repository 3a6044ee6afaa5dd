"""StreamAttention: hidden states, explicit queries, keys and values, cache, dtypes, and what it refuses."""

from __future__ import annotations

import copy
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stream_attention import (
    FlashAttentionV3,
    StreamAttention,
    StreamAttentionConfig,
    StreamMultiheadAttention,
    UnsupportedProblem,
    attention,
    create_stream_attention,
    force_backend,
)
from stream_attention.core import attention as attention_module
from stream_attention.core import build_stream_attention
from stream_attention_tools import module_tools

HEADS, DIM = 4, 8
FEATURES = HEADS * DIM
SRC = Path(__file__).resolve().parents[2] / "src"


def module(**fields: Any) -> StreamAttention:
    torch.manual_seed(0)
    return StreamAttention(StreamAttentionConfig(**{"num_heads": HEADS, "head_dim": DIM, **fields}))


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def hidden(batch: int = 2, length: int = 6, dtype: torch.dtype = torch.float32) -> Tensor:
    return normal(batch, length, FEATURES, dtype=dtype)


def qkv(q_len: int = 6, k_len: int = 6, kv_heads: int = HEADS) -> list[Tensor]:
    return [normal(2, n, h, DIM, seed=n) for n, h in ((q_len, HEADS), (k_len, kv_heads), (k_len, kv_heads))]


def by_hand(attend: StreamAttention, x: Tensor, **options: Any) -> Tensor:
    x = x if attend.layer_norm is None else attend.layer_norm(x)
    layers = (attend.q_proj, attend.k_proj, attend.v_proj)
    heads = [(x if one is None else one(x)).unflatten(-1, (HEADS, DIM)) for one in layers]
    out = attention(*heads, **{"causal": True, **options}).flatten(-2)
    return out if attend.out_proj is None else attend.out_proj(out)


# What it computes


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"qkv_bias": True},
        {"use_layer_norm": True},
        {"use_qkv_projections": False},
        {"use_qkv_projections": False, "use_layer_norm": True},
        {"gradient_checkpointing": True},
        {"dropout": 0.0, "use_fp16": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("causal", [True, False])
def test_hidden_states_are_projected_attended_and_projected_back(fields: dict[str, Any], causal: bool) -> None:
    attend = module(**fields)
    expected = by_hand(attend, hidden(), causal=causal)
    assert torch.equal(attend(hidden(), causal=causal), expected)
    assert torch.equal(attend(hidden_states=hidden(), causal=causal), expected)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("q_len", [1, 6, 9])
def test_explicit_queries_keys_and_values_are_attended_only(kv_heads: int, q_len: int) -> None:
    tensors = qkv(q_len, kv_heads=kv_heads)
    attend, expected = module(use_layer_norm=True), attention(*tensors, causal=True)
    assert torch.equal(attend(*tensors), expected)
    assert torch.equal(attend(**dict(zip(("query", "key", "value"), tensors, strict=True))), expected)
    assert torch.equal(attend(*tensors, causal=False), attention(*tensors))


@pytest.mark.parametrize("causal", [True, False])
def test_a_fourth_argument_is_causal(causal: bool) -> None:
    assert torch.equal(module()(*qkv(), causal), attention(*qkv(), causal=causal))


def test_parameters_are_those_the_config_asks_for() -> None:
    linear = {"q_proj.weight", "k_proj.weight", "v_proj.weight", "out_proj.weight", "out_proj.bias"}
    assert set(module().state_dict()) == linear
    biased = {"q_proj.bias", "k_proj.bias", "v_proj.bias"}
    assert set(module(qkv_bias=True).state_dict()) == linear | biased
    assert set(module(use_layer_norm=True).state_dict()) == linear | {"layer_norm.weight", "layer_norm.bias"}
    assert set(module(use_qkv_projections=False).state_dict()) == set()
    assert module().layer_norm is None and module(use_qkv_projections=False).out_proj is None


def test_a_mask_reaches_both_paths() -> None:
    shown = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
    options = {"mask": shown[:, None, None]}
    assert torch.equal(module()(hidden(), attention_mask=shown.long()), by_hand(module(), hidden(), **options))
    assert torch.equal(module()(*qkv(), attention_mask=shown), attention(*qkv(), causal=True, **options))


def test_an_empty_batch_and_no_tokens() -> None:
    assert module()(hidden(batch=0)).shape == (0, 6, FEATURES)
    assert module()(hidden(length=0)).shape == (2, 0, FEATURES)


def test_dense_attention_for_debugging() -> None:
    attend = module(enable_flash_attention=False)
    torch.testing.assert_close(attend(hidden()), module()(hidden()))
    assert attend.last_method_used == "reference"


def test_dense_attention_has_second_derivatives_and_streaming_says_who_has() -> None:
    x = hidden(1, 3, torch.float64).requires_grad_()
    dense = module(enable_flash_attention=False).double()
    assert torch.autograd.gradgradcheck(dense, x)
    (grad,) = torch.autograd.grad(module().double()(x).square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"no second derivative .*enable_flash_attention=False"):
        grad.sum().backward()


# The cache


@pytest.mark.parametrize("chunks", [[6], [1] * 6, [4, 1, 1], [2, 3, 1]], ids=str)
@pytest.mark.parametrize("path", ["hidden", "explicit"])
def test_chunks_with_a_cache_are_the_whole(chunks: list[int], path: str) -> None:
    attend = module().double()
    x = [hidden(dtype=torch.float64)] if path == "hidden" else [t.double() for t in qkv(kv_heads=2)]
    whole, (keys, values) = attend(*x, use_cache=True)
    past, outs = None, []
    for pieces in zip(*(t.split(chunks, 1) for t in x), strict=True):  # slices of a larger tensor, not contiguous
        out, past = attend(*pieces, past_key_value=past, use_cache=True)
        outs.append(out)
    torch.testing.assert_close(torch.cat(outs, 1), whole)
    assert past is not None
    torch.testing.assert_close(past[0], keys)
    torch.testing.assert_close(past[1], values)
    assert keys.shape == values.shape == (2, 6, HEADS if path == "hidden" else 2, DIM)


def test_without_use_cache_only_the_output_comes() -> None:
    attend = module()
    _, past = attend(hidden(), use_cache=True)
    out = attend(hidden(length=1), past_key_value=past)
    assert isinstance(out, Tensor) and out.shape == (2, 1, FEATURES)


def test_a_padding_mask_covers_the_cache() -> None:
    attend = module()
    _, past = attend(hidden(), use_cache=True)
    shown = torch.ones(2, 7, dtype=torch.bool)
    shown[1, :3] = False
    out, (keys, values) = attend(hidden(length=1), past_key_value=past, attention_mask=shown, use_cache=True)
    query = attend.q_proj(hidden(length=1)).unflatten(-1, (HEADS, DIM))  # type: ignore[misc]
    expected = attention(query, keys, values, causal=True, mask=shown[:, None, None])
    assert torch.equal(out, attend.out_proj(expected.flatten(-2)))  # type: ignore[misc]


# Dtypes


@pytest.mark.parametrize("parameters", [torch.float32, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_calls_compute_in_the_dtype_of_their_input(parameters: torch.dtype, dtype: torch.dtype) -> None:
    attend = module(use_layer_norm=True, qkv_bias=True).to(parameters)
    out, (keys, _) = attend(hidden(dtype=dtype), use_cache=True)
    assert out.dtype is keys.dtype is dtype
    expected = by_hand(copy.deepcopy(attend).to(dtype), hidden(dtype=dtype))
    assert torch.equal(out, expected)


def test_gradients_arrive_in_the_dtype_of_the_parameters() -> None:
    attend = module(qkv_bias=True)
    attend(hidden(dtype=torch.bfloat16)).sum().backward()
    assert all(p.grad is not None and p.grad.dtype is torch.float32 for p in attend.parameters())


def test_under_autocast_autocast_wins() -> None:
    attend = module(use_layer_norm=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = attend(hidden())
        expected = by_hand(attend, hidden())
    assert out.dtype is torch.bfloat16 and torch.equal(out, expected)


def test_hooks_and_replaced_projections_are_respected() -> None:
    attend, seen = module(), []
    assert attend.q_proj is not None
    attend.q_proj.register_forward_hook(lambda *_: seen.append(1))
    attend(hidden())
    attend(hidden(dtype=torch.bfloat16))
    assert len(seen) == 2
    attend.v_proj = nn.Sequential(nn.Linear(FEATURES, 3), nn.Linear(3, FEATURES))  # type: ignore[assignment]
    assert torch.equal(attend(hidden()), by_hand(attend, hidden()))


@pytest.fixture
def meta_as_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_module, "GPUS", ("meta",))


def dtypes(attend: StreamAttention) -> set[torch.dtype]:
    return {parameter.dtype for parameter in attend.parameters()}


@pytest.mark.usefixtures("meta_as_gpu")
@pytest.mark.parametrize(
    ("move", "expected"),
    [
        (lambda m: m.to("meta"), torch.float16),
        (lambda m: nn.Sequential(m).to("meta")[0], torch.float16),
        (lambda m: m.to("meta").float(), torch.float32),
        (lambda m: m.to("meta").bfloat16().to("meta"), torch.bfloat16),
        (lambda m: m.to("meta", torch.bfloat16), torch.bfloat16),
        (lambda m: m.to("meta", torch.float32), torch.float32),
        (lambda m: m.to(dtype=torch.float32, device="meta"), torch.float32),
        (lambda m: m.to(torch.empty(0, device="meta")), torch.float32),
        (lambda m: nn.Sequential(m).to("meta", torch.float32)[0], torch.float32),
        (lambda m: m.to_empty(device="meta"), torch.float16),
        (lambda m: m.bfloat16().to("meta"), torch.bfloat16),
        (lambda m: m.double().to("meta"), torch.float64),
        (lambda m: m.float(), torch.float32),
    ],
)
def test_use_fp16_chooses_the_dtype_of_parameters_that_come_to_a_gpu(
    move: Callable[[Any], StreamAttention], expected: torch.dtype
) -> None:
    assert dtypes(move(module(use_layer_norm=True))) == {expected}


@pytest.mark.usefixtures("meta_as_gpu")
def test_use_fp16_acts_on_parameters_made_on_a_gpu_and_false_on_none() -> None:
    with torch.device("meta"):
        assert dtypes(module()) == {torch.float16}
        assert dtypes(module(use_fp16=False)) == {torch.float32}
    assert dtypes(module(use_fp16=False).to("meta")) == {torch.float32}


def test_off_a_gpu_parameters_are_fp32() -> None:
    assert dtypes(module()) == dtypes(module().to("meta")) == {torch.float32}
    assert module().attention.device.type == "cpu" and module().to("meta").attention.device.type == "meta"


# Training


def test_dropout_acts_while_training_alone() -> None:
    attend = module(dropout=0.5, use_qkv_projections=False)
    assert not torch.equal(attend(hidden()), attend(hidden()))
    attend.eval()
    assert torch.equal(attend(hidden()), by_hand(attend, hidden()))


@pytest.mark.parametrize("stream", [False, True])
def test_checkpointing_replays_the_same_dropout(stream: bool) -> None:
    gradients = []
    for fields in ({}, {"gradient_checkpointing": True}):
        attend = module(dropout=0.5, **fields)
        if stream:
            attend.attention.set_deterministic(True, 3)
        torch.manual_seed(1)
        x = hidden().requires_grad_()
        out, (keys, _) = attend(x, use_cache=True)
        (out.square().sum() + keys.sum()).backward()
        gradients.append([x.grad, *(p.grad for p in attend.parameters())])
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


def test_checkpointing_keeps_less_and_recomputes_only_in_training() -> None:
    def saved(**fields: Any) -> int:
        attend, count = module(**fields), []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: count.append(t.numel()) or t, lambda t: t):
            attend(hidden().requires_grad_())
        return sum(count)

    calls: list[int] = []
    attend = module(gradient_checkpointing=True)
    assert attend.q_proj is not None
    attend.q_proj.register_forward_hook(lambda *_: calls.append(1))
    attend(hidden().requires_grad_()).sum().backward()
    assert len(calls) == 2
    attend.eval()
    attend(hidden().requires_grad_()).sum().backward()
    assert len(calls) == 3
    assert saved(gradient_checkpointing=True) < saved()


def test_one_step_lowers_the_loss() -> None:
    attend = module(qkv_bias=True, use_layer_norm=True)
    optimiser = torch.optim.SGD(attend.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        loss = (attend(hidden()) - 1).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[0] > losses[1] > losses[2]


# As a module


def test_state_dict_and_deepcopy() -> None:
    attend, other = module(qkv_bias=True), module(qkv_bias=True)
    with torch.no_grad():
        for parameter in attend.parameters():
            parameter.add_(1.0)
    assert not torch.equal(attend(hidden()), other(hidden()))
    other.load_state_dict(attend.state_dict())
    assert torch.equal(attend(hidden()), other(hidden()))
    assert torch.equal(attend(hidden()), copy.deepcopy(attend)(hidden()))


def test_the_module_keeps_a_copy_of_its_config() -> None:
    config = StreamAttentionConfig(num_heads=HEADS, head_dim=DIM)
    attend = StreamAttention(config)
    config.max_sequence_length = 1
    attend(hidden())
    with pytest.raises(ValueError, match="at most max_sequence_length=1 keys"):
        StreamAttention(config)(hidden())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_compiles_in_one_graph(dtype: torch.dtype) -> None:
    attend = module(use_layer_norm=True)
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    x = hidden(dtype=dtype)
    assert torch.equal(compiled(x), attend(x))
    assert attend.last_method_used == "eager"
    compiled(x)
    _, past = compiled(x, use_cache=True)
    again = compiled(x[:, :1], past_key_value=past)
    assert torch.equal(again, attend(x[:, :1], past_key_value=past))


@pytest.mark.parametrize("stream", [False, True])
def test_checkpointing_compiles_in_one_graph_after_an_eager_call(stream: bool) -> None:
    attend = module(gradient_checkpointing=True, dropout=0.5 if stream else 0.0)
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    results = []
    for call in (attend, compiled):
        if stream:
            attend.attention.set_deterministic(True, 3)
        x = hidden().requires_grad_()
        outs = [call(x), call(x)]
        assert attend.last_method_used == ("eager" if call is attend else None)
        results.append([*outs, *torch.autograd.grad(outs[0].square().sum() + outs[1].sum(), x)])
    for got, wanted in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted)
    assert stream is not torch.equal(results[0][0], results[0][1])


def test_recomputing_a_call_does_not_make_it_the_last_one() -> None:
    attend = module(gradient_checkpointing=True)
    out = attend(hidden().requires_grad_())
    with force_backend("reference"):
        attend(*qkv())
    out.sum().backward()
    assert attend.last_method_used == "reference"


def test_it_says_what_computed() -> None:
    attend = module()
    assert attend.last_method_used is None and attend.last_speedup_achieved is None
    attend(*qkv())
    assert attend.last_method_used == "eager"


# Tiles

INTERPRETED = """
import torch
from stream_attention import StreamAttention, StreamAttentionConfig
x, out = torch.randn(1, 40, 32), []
for fields in ({}, {"tile_size_q": 32, "tile_size_k": 16}):
    torch.manual_seed(0)
    attend = StreamAttention(StreamAttentionConfig(num_heads=2, head_dim=16, **fields))
    y = attend(x)
    y.square().sum().backward()
    out.append((y, attend.q_proj.weight.grad))
    print(attend.last_method_used, attend.attention.backend)
torch.testing.assert_close(*out)
"""


def test_forced_tiles_run_under_the_interpreter_forward_and_backward() -> None:
    pytest.importorskip("triton")
    env = {**os.environ, "PYTHONPATH": str(SRC), "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", INTERPRETED], env=env, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["eager auto", "triton triton(block_m=32, block_n=16)"], done.stderr
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter computes it on the CPU")
def test_forced_tiles_on_a_cpu_are_refused_with_the_reason() -> None:
    with pytest.raises(UnsupportedProblem, match=r"'triton\(block_m=64\)' cannot .*(CUDA device|not installed)"):
        module(tile_size_q=64)(hidden())


@pytest.mark.gpu
def test_forced_tiles_run_on_a_gpu() -> None:
    planned, forced = (module(**fields).cuda() for fields in ({}, {"tile_size_q": 32, "num_stages": 1}))
    x = normal(2, 100, FEATURES, dtype=torch.float16).cuda()
    assert planned.attention.device.type == "cuda" and dtypes(planned) == {torch.float16}
    torch.testing.assert_close(forced(x), planned(x))
    assert forced.last_method_used == "triton"


# Replacing attention in a model


def test_multihead_attention_is_replaced_with_its_weights() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(FEATURES, HEADS, batch_first=True)
    model = nn.Sequential(layer, nn.TransformerEncoderLayer(FEATURES, HEADS, batch_first=True), layer).train()
    for one in model.modules():
        if isinstance(one, nn.Dropout):
            one.p = 0.0
    for one in model:
        one.self_attn.dropout = 0.0  # type: ignore[union-attr]
    before, names = model(hidden()), list(model.state_dict())
    parameters = list(model.parameters())
    assert module().replace_attention_in_model(model) == 2  # the first and the last are one
    assert type(layer.self_attn) is StreamMultiheadAttention and model[2].self_attn is layer.self_attn
    assert list(model.state_dict()) == names
    assert all(new is old for new, old in zip(model.parameters(), parameters, strict=True))
    torch.testing.assert_close(model(hidden()), before)


def test_only_what_matches_the_pattern_is_replaced() -> None:
    model = nn.TransformerDecoderLayer(FEATURES, HEADS)
    assert module().replace_attention_in_model(model, "multihead_attn") == 1
    assert type(model.self_attn) is nn.MultiheadAttention and type(model.multihead_attn) is StreamMultiheadAttention


def test_other_attention_is_left_and_named() -> None:
    model = nn.ModuleDict({"self_attn": nn.Linear(2, 2)})
    with pytest.raises(ValueError, match=r"model: expected an nn.MultiheadAttention .*; got self_attn \(Linear\)"):
        module().replace_attention_in_model(model)
    with pytest.raises(ValueError, match="'attention' in its name; got nothing of that name"):
        module().replace_attention_in_model(model, "attention")


# benchmark_speedup


def test_benchmark_speedup_has_the_documented_keys_and_one_flop_formula() -> None:
    attend = module()
    results = attend.benchmark_speedup([8, 16], batch_size=2)
    assert list(results) == [8, 16] and attend.last_speedup_achieved == results[16]["speedup"]
    for length, one in results.items():
        assert set(one) == {"stream_time_ms", "standard_time_ms", "speedup", "tflops", "bandwidth_gb_s"}
        assert one["speedup"] == one["standard_time_ms"] / one["stream_time_ms"]
        flops = 2 * 2 * HEADS * length**2 * (DIM + DIM) / 2
        assert one["tflops"] * one["stream_time_ms"] == pytest.approx(flops * 1e-9)
        moved = 4 * 4 * 2 * length * FEATURES
        assert one["bandwidth_gb_s"] * one["stream_time_ms"] == pytest.approx(moved * 1e-6)


def test_what_it_compares_with_is_attention() -> None:
    torch.testing.assert_close(module_tools._standard_attention(*qkv()), attention(*qkv(), causal=True))


# Factories


def test_both_historical_signatures_of_create_stream_attention() -> None:
    config = StreamAttentionConfig(num_heads=HEADS, head_dim=DIM)
    for built in (
        create_stream_attention(config),
        create_stream_attention(config=config),
        build_stream_attention(config),
    ):
        assert type(built) is StreamAttention and built.config == config
    one = create_stream_attention(FEATURES, HEADS, 0.1, False, True, "cpu", torch.float64)
    assert type(one) is StreamMultiheadAttention
    assert (one.dropout, one.in_proj_bias, one.batch_first, one.out_proj.weight.dtype) == (
        0.1,
        None,
        True,
        torch.float64,
    )
    other = create_stream_attention(embed_dim=FEATURES, num_heads=HEADS)
    assert (other.dropout, other.batch_first) == (0.0, False) and other.in_proj_bias is not None


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        ((StreamAttentionConfig(), 4), {}, "expected a config alone; got StreamAttentionConfig, int"),
        ((StreamAttentionConfig(),), {"dropout": 0.0}, "expected a config alone; got StreamAttentionConfig, dropout"),
        ((32, 4), {"config": StreamAttentionConfig()}, "expected a config alone; got int, int, config"),
        ((), {}, "expected a config, or embed_dim and num_heads; got neither"),
        ((), {"num_heads": 4}, "expected a config, or embed_dim and num_heads; got neither"),
        ((32, 4), {"kdim": 3}, r"expected arguments among .*; got \['kdim'\]"),
        ((32,), {}, r"expected a config, or embed_dim and num_heads; got 32 \(int\)"),
        (("a",), {"bias": True}, r"expected a config, or embed_dim and num_heads; got 'a' \(str\), bias"),
        (("a", 4), {}, r"embed_dim: expected an int; got 'a' \(str\)"),
    ],
)
def test_mixed_signatures_are_refused(arguments: tuple[Any, ...], options: dict[str, Any], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        create_stream_attention(*arguments, **options)


# Refusals

X = hidden()


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        ((), {}, "inputs: expected hidden states [B, T, H * D], or query, key and value [B, T, H, D]; got []"),
        ((X, X), {}, "inputs: expected hidden states"),
        ((X, X, X), {}, "StreamMultiheadAttention takes query, key and value of three dims"),
        ((qkv()[0],), {}, "inputs: expected hidden states [B, T, H * D], or query, key and value"),
        ((X[0],), {}, "inputs: expected hidden states [B, T, H * D]"),
        ((X,), {"hidden_states": X}, "inputs: expected hidden states"),
        ((X,), {"query": X, "key": X, "value": X}, "inputs: expected hidden states"),
        ((), {"query": X}, "inputs: expected hidden states"),
        (([1.0],), {}, "got ['list']"),
        ((X[..., :5],), {}, "hidden_states: expected [B, T, num_heads * head_dim = 32]; got [2, 6, 5]"),
        ((X,), {"position_ids": torch.arange(6)}, "position_ids: expected None"),
        ((X,), {"output_attentions": True}, "output_attentions: expected False"),
        ((X,), {"past_key_value": X}, "past_key_value: expected (key, value)"),
        ((X,), {"past_key_value": (X, X)}, "past_key_value (key): expected [2, T, 4, 8] in torch.float32 on cpu; got"),
        ((X,), {"past_key_value": (qkv()[1], qkv()[2].half())}, "past_key_value (value): expected [2, T, 4, 8]"),
        ((X.long(),), {}, "hidden_states: expected dtype float16, bfloat16, float32 or float64; got torch.int64"),
        ((), {"hidden_states": X.cfloat()}, "hidden_states: expected dtype float16"),
        ((X,), {"attention_mask": torch.ones(2, 7)}, "attention_mask: expected [B, Tk] = [2, 6]"),
        ((qkv()[0][..., :2, :], *qkv()[1:]), {}, "query: expected [B, Tq, num_heads=4, head_dim=8]"),
        (qkv(kv_heads=3), {}, "key: expected heads that divide num_heads=4"),
        ((X,), {"causal": 1}, "causal: expected a bool; got 1 (int)"),
        ((*qkv(), True), {"causal": True}, "causal: expected it once; got the fourth argument and a keyword"),
        ((*qkv(), X), {}, "causal: expected a bool; got torch.float32 tensor of shape [2, 6, 32]"),
        ((*qkv(), True, False), {}, "inputs: expected hidden states"),
        ((X, True), {}, "inputs: expected hidden states"),
        ((X,), {"use_cache": "no"}, "use_cache: expected a bool; got 'no' (str)"),
        ((X,), {"output_attentions": 0}, "output_attentions: expected a bool; got 0 (int)"),
    ],
)
def test_bad_calls_are_refused(arguments: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(words)):
        module()(*arguments, **options)


@pytest.mark.parametrize("attend", [module(), module().attention, FlashAttentionV3()], ids=lambda x: type(x).__name__)
@pytest.mark.parametrize(
    ("keyword", "words"),
    [
        ("is_causal", "(): `is_causal` is called `causal` here (aligned bottom-right)"),
        ("attn_mask", "(): `attn_mask` is called `attention_mask` here (boolean, True = attend; floating: added"),
        ("mask", "(): `mask` is called `attention_mask` here"),
        ("softmax_scale", "() got an unexpected keyword argument 'softmax_scale'"),
    ],
)
def test_keywords_of_others_are_refused_with_their_name_here(attend: nn.Module, keyword: str, words: str) -> None:
    with pytest.raises(TypeError, match=re.escape(type(attend).__name__ + words)):
        attend(*qkv(), **{keyword: True})


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_refused_call_leaves_the_dropout_stream(checkpointing: bool) -> None:
    attend = module(dropout=0.5, gradient_checkpointing=checkpointing)
    attend.attention.set_deterministic(True, 3)
    first = attend(hidden())
    attend.attention.set_deterministic(True, 3)
    for options in ({"attention_mask": torch.ones(7, 7)}, {"causal": 1}, {"past_key_value": (X, X)}):
        with pytest.raises((TypeError, ValueError), match="expected"):
            attend(hidden(), **options)
    assert torch.equal(attend(hidden()), first)


def test_more_keys_than_the_config_allows_are_refused() -> None:
    attend = module(max_sequence_length=6)
    _, past = attend(X, use_cache=True)
    words = r"key: expected at most max_sequence_length=6 keys, the cache included; got 7. Raise it"
    with pytest.raises(ValueError, match=words):
        attend(X[:, :1], past_key_value=past)


def test_a_module_needs_a_config() -> None:
    with pytest.raises(TypeError, match="config: expected a StreamAttentionConfig; got dict"):
        StreamAttention({})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("lengths", "error", "words"),
    [
        ([], ValueError, "seq_lengths: expected at least one"),
        ([64, 0], ValueError, "seq_lengths[1]: expected at least 1; got 0"),
        ([64.0], TypeError, "seq_lengths[0]: expected an int; got 64.0"),
        (64, TypeError, "seq_lengths: expected a sequence of ints, such as [64]; got 64 (int)"),
        ("64", TypeError, "seq_lengths: expected a sequence of ints, such as [64]; got '64' (str)"),
    ],
)
def test_bad_benchmarks_are_refused(lengths: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=re.escape(words)):
        module().benchmark_speedup(lengths)
