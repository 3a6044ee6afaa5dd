"""FusedOnlineAttention: `attention` as a module, its dropout stream and its benchmark."""

from __future__ import annotations

import copy
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import is_available
from torch.utils.checkpoint import checkpoint

from stream_attention import (
    FusedOnlineAttention,
    StreamAttentionConfig,
    UnsupportedProblem,
    attention,
    create_fused_online_attention,
    explain,
    force_backend,
)
from stream_attention.core import fused_online_attention

HEADS, DIM = 4, 8
SRC = Path(__file__).resolve().parents[2] / "src"


def qkv(q_len: int = 6, k_len: int = 6, kv_heads: int = HEADS, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = ((q_len, HEADS), (k_len, kv_heads), (k_len, kv_heads))
    return [torch.randn(2, *size, DIM, generator=generator, dtype=torch.float64).to(dtype) for size in sizes]


def module(**options: Any) -> FusedOnlineAttention:
    return FusedOnlineAttention(HEADS, DIM, **options)


def dropped(attend: FusedOnlineAttention, **options: Any) -> Tensor:
    """Which weights a call drops, read off from values that are unit vectors."""
    query, key = torch.zeros(1, DIM, HEADS, DIM), torch.zeros(1, DIM, HEADS, DIM)
    value = torch.eye(DIM)[None, :, None].expand(1, DIM, HEADS, DIM).contiguous()
    return attend(query, key, value, causal=False, **options) == 0


# What it computes


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("options", [{}, {"causal": False}, {"q": 1}, {"q": 9}], ids=str)
def test_it_is_the_op_and_causal_by_default(kv_heads: int, options: dict[str, Any]) -> None:
    options = dict(options)
    tensors = qkv(options.pop("q", 6), kv_heads=kv_heads)
    expected = attention(*tensors, **{"causal": True, **options})
    assert torch.equal(module()(*tensors, **options), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_it_computes_in_the_dtype_of_its_inputs(dtype: torch.dtype) -> None:
    out = module()(*qkv(dtype=dtype))
    assert out.dtype is dtype
    assert torch.equal(out, attention(*qkv(dtype=dtype), causal=True))


@pytest.mark.parametrize("scale", [None, 0.0, 0.3])
def test_the_scale_is_honoured(scale: float | None) -> None:
    tensors = qkv()
    out = module(scale=scale)(*tensors, causal=False)
    assert torch.equal(out, attention(*tensors, scale=scale))
    if scale == 0.0:  # all keys alike
        torch.testing.assert_close(out, tensors[2].mean(1, keepdim=True).expand_as(out))


def test_alibi_is_passed_on_and_has_a_gradient() -> None:
    slopes = torch.rand(HEADS, requires_grad=True)
    out = module()(*qkv(), alibi_slopes=slopes)
    assert torch.equal(out, attention(*qkv(), causal=True, alibi_slopes=slopes))
    out.sum().backward()
    assert slopes.grad is not None and slopes.grad.abs().sum() > 0


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_the_lse_comes_on_every_path(grad: bool, masked: bool) -> None:
    tensors = [t.requires_grad_(grad) for t in qkv(dtype=torch.bfloat16)]
    mask = torch.ones(2, 6, dtype=torch.bool) if masked else None
    out, lse = module()(*tensors, return_lse=True, attention_mask=mask)
    assert lse.dtype is torch.float32 and lse.shape == (2, HEADS, 6) and out.dtype is torch.bfloat16
    scores = torch.einsum("bqhd,bkhd->bhqk", *(t.detach().double() for t in tensors[:2])) * DIM**-0.5
    scores = scores.masked_fill(torch.ones(6, 6, dtype=torch.bool).triu(1), -torch.inf)
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=1e-5, atol=1e-5)


# Masks


def test_masks_of_every_rank_mean_attend_where_true() -> None:
    tensors = qkv()
    shown = torch.rand(2, HEADS, 6, 6, generator=torch.Generator().manual_seed(1)) < 0.7
    for mask, wide in (
        (shown[:, 0, 0], shown[:, :1, :1]),
        (shown[:, 0], shown[:, :1]),
        (shown, shown),
        (shown[:1, :, :1], shown[:1, :, :1]),
    ):
        expected = attention(*tensors, causal=True, mask=wide)
        assert torch.equal(module()(*tensors, attention_mask=mask), expected)
        assert torch.equal(module()(*tensors, attention_mask=mask.long()), expected)
        added = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
        torch.testing.assert_close(module()(*tensors, attention_mask=added), expected)


def test_a_float_mask_is_added_whatever_its_sign_and_has_a_gradient() -> None:
    tensors = qkv()
    added = torch.randn(2, 6, 6, generator=torch.Generator().manual_seed(1), requires_grad=True)
    out = module()(*tensors, attention_mask=added)
    assert torch.equal(out, attention(*tensors, causal=True, bias=added[:, None]))
    out.sum().backward()
    assert added.grad is not None and added.grad.abs().sum() > 0


@pytest.mark.parametrize("width", [6, 1])
def test_a_mask_of_two_dims_that_could_be_either_is_refused_with_both_spellings(width: int) -> None:
    query, key, value = qkv(2)  # B = Tq = 2
    mask = torch.tensor([[True] * 5 + [False], [False] + [True] * 5])[:, -width:]
    attend, options = module(), {"causal": False}
    for_all = attend(query, key, value, attention_mask=mask[None], **options)
    assert torch.equal(for_all, attention(query, key, value, mask=mask))
    padding = attend(query, key, value, attention_mask=mask[:, None, None], **options)
    assert torch.equal(padding, attention(query, key, value, mask=mask[:, None, None]))
    assert not torch.equal(for_all, padding)
    words = rf"B = Tq = 2; got \[2, {width}\], .*attention_mask\[:, None, None\]; .*: attention_mask\[None\]"
    for ambiguous in (mask, mask.int(), torch.where(mask, 0.0, -torch.inf)):
        with pytest.raises(ValueError, match=words):
            attend(query, key, value, attention_mask=ambiguous, **options)
    one_query = attend(query[:, :1], key, value, attention_mask=mask, **options)  # [2, 6] is no [Tq, Tk] here
    torch.testing.assert_close(one_query, padding[:, :1])
    one_row = attend(query, key, value, attention_mask=mask[:1], **options)  # the same either way
    assert torch.equal(one_row, attention(query, key, value, mask=mask[:1]))


KEEP = torch.tensor([[1.0] * 6, [1.0] * 3 + [0.0] * 3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64], ids=str)
def test_floats_that_look_like_a_mask_of_what_to_keep_are_refused(dtype: torch.dtype) -> None:
    words = r"attention_mask: expected floats .*; got 0.0 and 1.0 alone.*Pass attention_mask.bool\(\).*-inf for a"
    with pytest.raises(ValueError, match=words):
        module()(*qkv(), attention_mask=KEEP.to(dtype))


def test_floats_that_do_not_look_so_are_added() -> None:
    constant = module()(*qkv())  # what all keys have in common, softmax does not see
    for same in (torch.zeros(2, 6), torch.ones(2, 6)):
        torch.testing.assert_close(module()(*qkv(), attention_mask=same), constant)
    for added in (KEEP * 2, KEEP - 1, KEEP.clone().requires_grad_()):
        expected = attention(*qkv(), causal=True, bias=added[:, None, None])
        assert torch.equal(module()(*qkv(), attention_mask=added), expected)


@pytest.mark.parametrize("mask", [KEEP, KEEP.int() * 2], ids=["0.0 and 1.0", "2"])
def test_values_are_looked_at_only_where_they_are_there(mask: Tensor) -> None:
    tensors, attend = qkv(), module()
    compiled = torch.compile(attend, backend="eager", fullgraph=True)
    assert compiled(*tensors, attention_mask=mask).shape == (2, 6, HEADS, DIM)
    stacked = torch.vmap(lambda one: attend(*tensors, attention_mask=one))(torch.stack([mask, mask]))
    assert torch.equal(stacked[0], stacked[1])
    with FakeTensorMode() as fake:
        *fakes, fake_mask = (fake.from_tensor(t) for t in (*tensors, mask))
        assert attend(*fakes, attention_mask=fake_mask).shape == (2, 6, HEADS, DIM)
    with pytest.raises(ValueError, match="attention_mask: expected"):
        attend(*tensors, attention_mask=mask)


# Dropout


def test_dropout_is_that_of_the_module_while_training_unless_a_call_says() -> None:
    attend = module(dropout=0.5)
    assert 0 < dropped(attend).float().mean() < 1
    assert not dropped(attend, dropout_p=0.0).any()
    attend.eval()
    assert not dropped(attend).any()
    assert 0 < dropped(attend, dropout_p=0.5).float().mean() < 1


def test_the_stream_repeats_after_the_same_seed_and_moves_from_call_to_call() -> None:
    attend = module(dropout=0.5)
    draws = []
    for seed in (7, 7, 8):
        attend.set_deterministic(True, seed)
        draws.append([dropped(attend) for _ in range(3)])
    assert all(torch.equal(*pair) for pair in zip(draws[0], draws[1], strict=True))
    assert not any(torch.equal(*pair) for pair in zip(draws[0], draws[2], strict=True))
    assert not torch.equal(draws[0][0], draws[0][1]) and not torch.equal(draws[0][1], draws[0][2])


def test_the_stream_is_not_torchs_generator_and_does_not_move_without_dropout() -> None:
    attend = module(dropout=0.5)
    state = torch.get_rng_state()
    attend.set_deterministic(True, 7)
    first = dropped(attend)
    attend.set_deterministic(True, 7)
    attend(*qkv(), dropout_p=0.0)
    assert torch.equal(dropped(attend), first)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_default_seed_is_torchs_and_off_is_off() -> None:
    attend = module(dropout=0.5)
    torch.manual_seed((5 << 32) + 3)
    attend.set_deterministic(True)
    by_default = dropped(attend)
    attend.set_deterministic(True, 3)
    assert torch.equal(dropped(attend), by_default)
    attend.set_deterministic(False)
    assert attend.deterministic is None
    torch.manual_seed(1)
    first = dropped(attend)
    torch.manual_seed(1)
    assert torch.equal(dropped(attend), first)


def test_the_stream_works_in_and_out_of_inference_mode() -> None:
    attend = module(dropout=0.5)
    with torch.inference_mode():
        attend.set_deterministic(True, 7)
        first = dropped(attend)
    second = dropped(attend)
    attend.set_deterministic(True, 7)
    assert torch.equal(dropped(attend), first) and torch.equal(dropped(attend), second)


@pytest.mark.parametrize(
    "options",
    [{"dropout_p": 1.0}, {"dropout_p": "x"}, {"attention_mask": torch.ones(7, 7)}, {"causal": 1}],
    ids=["dropout_p", "no number", "mask", "causal"],
)
def test_a_refused_call_leaves_the_stream(options: dict[str, Any]) -> None:
    attend = module(dropout=0.5)
    attend.set_deterministic(True, 7)
    first = dropped(attend)
    attend.set_deterministic(True, 7)
    with pytest.raises((TypeError, ValueError), match="expected"):
        attend(*qkv(), **options)
    assert torch.equal(dropped(attend), first)


TWO_PROCESSES = """
import os, sys, torch
import torch._dynamo  # DistributedDataParallel imports it; once here, for both
from datetime import timedelta
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel
from stream_attention import StreamAttention, StreamAttentionConfig

child = os.fork()
rank, met = int(child == 0), "file://" + sys.argv[1]
init_process_group("gloo", init_method=met, rank=rank, world_size=2, timeout=timedelta(seconds=60))
block = StreamAttention(StreamAttentionConfig(num_heads=2, head_dim=8, dropout=0.5))
block.attention.set_deterministic(True, 100 + rank)
DistributedDataParallel(block)(torch.ones(1, 4, 16))
destroy_process_group()
if rank == 0:
    os.waitpid(child, 0)
print(block.attention.next_seed(0.5).tolist(), flush=True)
"""


@pytest.mark.skipif(not hasattr(os, "fork") or not is_available(), reason="needs os.fork and torch.distributed")
def test_under_ddp_each_process_keeps_its_stream(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", TWO_PROCESSES, str(tmp_path / "met")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.splitlines() == ["[101, 1]", "[100, 1]"], done.stderr


def test_deterministic_reaches_the_plan() -> None:
    attend = module()
    attend.set_deterministic(True)
    attend(*qkv())
    assert attend._last is not None and attend._last.planned().problem.deterministic
    attend(*qkv(), deterministic=False)
    assert not attend._last.planned().problem.deterministic


def test_a_checkpoint_around_the_stream_is_refused_and_around_torchs_generator_replayed() -> None:
    attend = module(dropout=0.5)
    query, key, value = (t.requires_grad_() for t in qkv())
    attend.set_deterministic(True, 7)
    with pytest.raises(RuntimeError, match=r"checkpoint.*gradient_checkpointing=True"):
        checkpoint(attend, query, key, value, use_reentrant=False).sum().backward()
    attend.set_deterministic(False)
    gradients = []
    for wrapped in (False, True):
        torch.manual_seed(3)
        out = checkpoint(attend, query, key, value, use_reentrant=False) if wrapped else attend(query, key, value)
        gradients.append(torch.autograd.grad(out.square().sum(), (query, key, value)))
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


# As a module


def test_device_and_dtype_follow_and_the_state_dict_is_empty() -> None:
    attend = module()
    assert (attend.device.type, attend.dtype) == ("cpu", torch.float16)
    attend.set_deterministic(True, 7)
    assert dict(attend.state_dict()) == {} and list(attend.parameters()) == []
    assert [name for name, _ in attend.named_buffers()] == ["_place"]  # what DDP sends from one process to all
    attend.to("meta")
    assert attend.device.type == "meta" and attend._stream is not None and attend._stream.device.type == "meta"
    assert module(device="meta").device.type == "meta"
    assert module().to(torch.bfloat16).dtype is torch.bfloat16


@pytest.mark.parametrize(
    "move",
    [
        lambda m: m.type(torch.bfloat16),
        lambda m: nn.Sequential(m).half()[0],
        lambda m: m.to("cpu", torch.float64),
        lambda m: m.to_empty(device="cpu"),
    ],
    ids=["type", "half", "to", "to_empty"],
)
def test_the_stream_goes_on_after_a_move(move: Callable[[FusedOnlineAttention], FusedOnlineAttention]) -> None:
    attend = module(dropout=0.5)
    attend.set_deterministic(True, 7)
    _, second = dropped(attend), dropped(attend)
    attend.set_deterministic(True, 7)
    dropped(attend)
    with torch.inference_mode():
        move(attend)
    assert torch.equal(dropped(attend), second)


def test_the_stream_starts_when_the_module_leaves_meta() -> None:
    attend, moved = module(dropout=0.5), module(dropout=0.5, device="meta")
    for one in (attend, moved):
        one.set_deterministic(True, 7)
    moved.to_empty(device="cpu")
    assert torch.equal(dropped(moved), dropped(attend))


def test_a_copy_has_a_stream_of_its_own() -> None:
    attend = module(dropout=0.5)
    attend.set_deterministic(True, 7)
    attend(*qkv())
    twin, thawed = copy.deepcopy(attend), pickle.loads(pickle.dumps(attend))
    draws = [dropped(one) for one in (attend, twin, thawed)]
    assert torch.equal(draws[0], draws[1]) and torch.equal(draws[0], draws[2])


def test_it_compiles_in_one_graph_with_its_stream() -> None:
    attend = module(dropout=0.5)
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    outs = []
    for call in (attend, compiled):
        attend.set_deterministic(True, 7)
        outs.append([call(*qkv()) for _ in range(2)])
    assert torch.equal(outs[0][0], outs[1][0]) and torch.equal(outs[0][1], outs[1][1])
    assert attend.last_method_used is None


def test_it_says_what_computed() -> None:
    attend = module()
    assert attend.last_method_used is None
    attend(*qkv())
    assert attend.last_method_used == "eager"
    dense = module(backend="reference")
    dense(*qkv())
    assert dense.last_method_used == "reference"
    with force_backend("reference"):
        attend(*qkv())
    assert attend.last_method_used == "reference"
    with torch.autocast("cpu", torch.bfloat16):
        attend(*qkv())
    assert attend._last is not None and attend._last.planned().problem.dtype is torch.bfloat16


@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize(("width", "kernel"), [(128, "gluon"), (136, "gluon"), (132, "triton")])
def test_on_hopper_it_knows_whether_tma_could_read_the_rows(width: int, kernel: str) -> None:
    pytest.importorskip("triton")
    attend = FusedOnlineAttention(16, 128)
    shape, strides = (1, 4096, 16, 128), (4096 * 16 * width, 16 * width, width, 1)
    attend(*(torch.empty_strided(shape, strides, dtype=torch.bfloat16, device="cuda") for _ in range(3)))
    assert attend.last_method_used == kernel


def test_triton_available_is_what_python_finds() -> None:
    try:
        import triton  # noqa: F401
    except ImportError:
        assert not fused_online_attention.TRITON_AVAILABLE
    else:
        assert fused_online_attention.TRITON_AVAILABLE


def test_the_factory_passes_everything_on() -> None:
    attend = create_fused_online_attention(HEADS, DIM, dropout=0.25, scale=2.0)
    assert (attend.num_heads, attend.head_dim, attend.dropout, attend.scale) == (HEADS, DIM, 0.25, 2.0)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": False, "dropout_p": 0.5},
        {"attention_mask": torch.ones(2, 6, dtype=torch.bool)},
        {"attention_mask": torch.ones(2, 3, 6, dtype=torch.float16), "alibi_slopes": torch.ones(HEADS)},
    ],
    ids=["plain", "dropout", "mask", "bias and ALiBi"],
)
def test_the_plan_behind_it_is_that_of_the_call(options: dict[str, Any], grad: bool) -> None:
    attend, tensors = module(scale=2.0), [t.requires_grad_(grad) for t in qkv(3, kv_heads=2, dtype=torch.bfloat16)]
    attend(*tensors, **options)
    options = dict(options)
    mask = options.pop("attention_mask", None)
    if mask is not None:
        options |= {"bias": mask[:, None]} if mask.is_floating_point() else {"mask": mask[:, None, None]}
    assert attend._last is not None
    assert attend._last.planned() == explain(*tensors, scale=2.0, **{"causal": True, **options})


# Tiles


def test_tiles_mean_what_they_mean_in_the_config() -> None:
    assert module(tile_size_q=128, tile_size_k=64).backend == "auto"
    tiles = {"tile_size_q": 32, "num_warps": 8}
    assert module(**tiles).backend == StreamAttentionConfig(**tiles).backend == "triton(block_m=32, num_warps=8)"


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter computes it on the CPU")
def test_a_forced_tile_needs_triton() -> None:
    with pytest.raises(UnsupportedProblem, match=r"'triton\(block_m=32\)' cannot .*(CUDA device|not installed)"):
        module(tile_size_q=32)(*qkv())


# benchmark


def test_benchmark_measures_what_it_says() -> None:
    figures = module().benchmark(16, batch_size=2, warmup=1, iterations=3)
    assert (figures["seq_len"], figures["batch_size"]) == (16, 2)
    assert (figures["dtype"], figures["device"], figures["backend"]) == ("float32", "cpu", "eager")
    flops = 2 * 2 * HEADS * 16 * 16 * (DIM + DIM) / 2  # causal
    moved = 4 * (2 * 16 * HEADS * DIM) * 4  # query, key, value, output in fp32
    assert figures["tflops"] * figures["time_ms"] == pytest.approx(flops * 1e3 / 1e12)
    assert figures["bandwidth_gb_s"] * figures["time_ms"] == pytest.approx(moved * 1e3 / 1e9)


def test_benchmark_leaves_the_random_numbers_alone() -> None:
    state = torch.get_rng_state()
    module().benchmark(4, warmup=0, iterations=1)
    assert torch.equal(torch.get_rng_state(), state)


# Refusals


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_heads": 0}, "num_heads: expected at least 1; got 0"),
        ({"head_dim": 2.0}, "head_dim: expected an int; got 2.0 (float)"),
        ({"dropout": 1.0}, "dropout: expected a probability in [0, 1); got 1.0"),
        ({"scale": float("nan")}, "scale: expected a finite number; got nan"),
        ({"dtype": torch.int32}, "dtype: expected float16, bfloat16, float32 or float64; got torch.int32"),
        ({"tile_size_q": 100}, "tile_size_q: expected one of 16"),
        ({"tile_size_q": 32, "backend": "eager"}, "backend: expected 'auto' where tiles are forced; got 'eager'"),
        ({"backend": "fast"}, "backend: expected one of 'auto'"),
    ],
    ids=str,
)
def test_bad_modules_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(words)):
        FusedOnlineAttention(**{"num_heads": HEADS, "head_dim": DIM, **options})


@pytest.mark.parametrize(
    ("tensors", "options", "words"),
    [
        (qkv()[:2], {"value": None}, "value: expected a torch.Tensor"),
        ([t[..., :2, :] for t in qkv()], {}, "query: expected [B, Tq, num_heads=4, head_dim=8]; got [2, 6, 2, 8]"),
        ([t[..., :4] for t in qkv()], {}, "query: expected [B, Tq, num_heads=4, head_dim=8]"),
        (qkv(kv_heads=3), {}, "key: expected heads that divide num_heads=4; got [2, 6, 3, 8]"),
        ([t[0] for t in qkv()], {}, "query: expected four dims [B, T, H, D]; got [6, 4, 8]"),
        (qkv(), {"attention_mask": [True]}, "attention_mask: expected a torch.Tensor or None; got list"),
        (qkv(), {"attention_mask": torch.ones(6, 6)}, "One mask for the whole batch is attention_mask[None]"),
        (qkv(), {"attention_mask": torch.ones(2, 5)}, "attention_mask: expected [B, Tk] = [2, 6]"),
        (qkv(), {"attention_mask": torch.ones(6)}, "attention_mask: expected [B, Tk] = [2, 6]"),
        (qkv(), {"attention_mask": torch.full((2, 6), -10000)}, "attention_mask: expected integers 0 and 1"),
        (qkv(), {"attention_mask": torch.ones(2, 6, dtype=torch.complex64)}, "attention_mask: expected bool, integer"),
        (qkv(), {"attention_mask": torch.ones(2, 6, device="meta")}, "attention_mask: expected the query's device cpu"),
        (qkv(), {"dropout_p": 1.0}, "dropout_p: expected a probability in [0, 1); got 1.0"),
        (qkv(), {"alibi_slopes": torch.ones(3)}, "alibi_slopes: expected shape [Hq=4]"),
    ],
)
def test_bad_calls_are_refused(tensors: list[Tensor], options: dict[str, Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(words)):
        module()(*tensors, **options)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((1,), "enabled: expected a bool; got 1"),
        ((True, 1.5), "seed: expected an int or None; got 1.5"),
        ((True, 1 << 63), "seed: expected a 64-bit int"),
        ((False, 3), "seed: expected None with enabled=False; got 3"),
    ],
    ids=str,
)
def test_bad_streams_are_refused(arguments: tuple[Any, ...], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        module().set_deterministic(*arguments)


@pytest.mark.parametrize("options", [{"seq_len": 0}, {"iterations": 0}, {"warmup": -1}, {"batch_size": 1.5}], ids=str)
def test_bad_benchmarks_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError), match=f"{next(iter(options))}: expected"):
        module().benchmark(**{"seq_len": 8, **options})


# Over several ranks (tests/distributed/test_query_shard.py has processes)


def test_without_other_processes_a_distributed_module_computes_as_it_does_alone() -> None:
    attend = FusedOnlineAttention(num_heads=2, head_dim=8)
    query, key, value = torch.randn(3, 2, 5, 2, 8)
    alone = attend(query, key, value)
    attend.set_distributed(True)
    assert attend.distributed and torch.equal(attend(query, key, value), alone) and attend.last_method_used is None
    attend.set_distributed(False)
    assert not attend.distributed and attend.process_group is None


def test_bad_ways_to_distribute_are_refused() -> None:
    attend = FusedOnlineAttention(num_heads=2, head_dim=8)
    with pytest.raises(TypeError, match="enabled: expected a bool; got 1"):
        attend.set_distributed(1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="process_group: expected None with enabled=False; got str"):
        attend.set_distributed(False, "world")
    attend.set_distributed(True)
    compiled = torch.compile(attend, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=r"set_distributed: expected calls outside torch\.compile"):
        compiled(*torch.randn(3, 1, 5, 2, 8))
