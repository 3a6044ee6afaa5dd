"""Planning as data: problems in, plans out. No kernel runs, and a problem may name a device this machine lacks."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import plan_corpus
from stream_attention import (
    ContiguousKV,
    Plan,
    UnsupportedProblem,
    attention,
    explain,
    force_backend,
    quantize_kv,
)
from stream_attention.backends import BACKENDS, BY_NAME
from stream_attention.backends.eager.tuning import EagerConfig
from stream_attention.backends.hopper import fp8_tuning as hopper_fp8_tuning
from stream_attention.backends.installed import HOPPER_TRITON, triton_release
from stream_attention.backends.triton import fp8_tuning as triton_fp8_tuning
from stream_attention.base.problem import (
    AUTO,
    KV,
    UNBOUNDED,
    Hardware,
    Inputs,
    Operands,
    Positions,
    Problem,
    Request,
    Scores,
    Shape,
    state_problem,
)
from stream_attention.dispatch.plan import parse, plan, requested, spell
from stream_attention.gpu.decode_tuning import DecodeConfig, on_a_cache
from stream_attention.ops.decode import decode_problem

PlannedWith = Callable[[str | None], None]

pytestmark = pytest.mark.usefixtures("hopper_triton")


def problem(**facts: Any) -> Problem:
    """A plain self-attention in fp32 on the CPU, except for `facts`."""
    shape, place = Shape(2, 64, 4, 4, 32, 32), Hardware(torch.device("cpu"))
    plain = Problem(shape, KV("dense", 64), Operands(torch.float32), place, scores=Scores(32**-0.5))
    return plain.replace(**facts)


def on_h200(**facts: Any) -> Problem:
    there = {"device": torch.device("cuda"), "arch": 90, "num_sms": 132, "dtype": torch.float16}
    return problem(**{"q_len": 4096, "k_len": 4096, **there, **facts})


def qkv(q_len: int = 8, k_len: int = 8, **options: Any) -> list[Tensor]:
    return [torch.zeros(1, length, 2, 4, **options) for length in (q_len, k_len, k_len)]


# Which backend


@pytest.mark.parametrize(
    "facts",
    [{}, {"dtype": torch.float64}, {"backward": True}, {"layout": "packed"}, {"partial": True}, {"dropout_p": 0.1}],
    ids=str,
)
def test_on_the_cpu_auto_is_eager_and_says_why_not_the_others(facts: dict[str, Any]) -> None:
    planned = plan(problem(**facts))
    names = [backend.name for backend in BACKENDS]
    assert planned.backend == "eager"
    assert [name for name, _ in planned.passed_over] == names[: names.index("eager")]
    assert all(reasons and not any(r.endswith(".") for r in reasons) for _, reasons in planned.passed_over)


@pytest.mark.parametrize("facts", [{}, {"dtype": torch.float64}, {"backward": True}, {"head_dim": 7}], ids=str)
def test_auto_is_the_first_backend_with_nothing_against_it(facts: dict[str, Any]) -> None:
    on_gpu = problem(device=torch.device("cuda"), **facts)  # planned without one
    against = [(b.name, b.why_not(on_gpu) or b.why_named_only(on_gpu)) for b in BACKENDS]
    first = next(index for index, (_, reasons) in enumerate(against) if not reasons)
    planned = plan(on_gpu)
    assert planned.backend == against[first][0]
    assert list(planned.passed_over) == against[:first]


@pytest.mark.parametrize(
    "facts",
    [{}, {"lse_grad": True}, {"layout": "packed"}, {"partial": True}, {"dropout_p": 0.1}, {"mask": True}, {"arch": 80}],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_on_a_gpu_auto_is_triton_forward_and_backward_where_gluon_cannot(
    dtype: torch.dtype, facts: dict[str, Any]
) -> None:
    pytest.importorskip("triton")
    there: dict[str, Any] = {"device": torch.device("cuda"), "arch": 90, "num_sms": 132, "dtype": dtype}
    for backward in (False, True):
        planned = plan(problem(**there | facts, backward=backward))  # head dims of 32
        assert planned.backend == "triton" and [name for name, _ in planned.passed_over] == ["gluon"]
        assert planned.config == BY_NAME["triton"].configure(planned.problem)


def test_the_reference_is_the_last_resort() -> None:
    assert BACKENDS[-1].name == "reference"
    assert "eager" in BY_NAME and not BY_NAME["eager"].why_not(problem())


def test_a_named_backend_is_planned_alone() -> None:
    planned = plan(problem(), "reference")
    assert planned.backend == "reference" and planned.passed_over == ()


def test_a_named_backend_that_cannot_raises_its_reasons() -> None:
    with pytest.raises(UnsupportedProblem, match=r"'reference' cannot .*Tq=64.*: does not support partial results"):
        plan(problem(partial=True), "reference")
    assert issubclass(UnsupportedProblem, ValueError)


# Gluon, on Hopper


def large(**facts: Any) -> Problem:
    """What Gluon is preferred for: many queries in bf16 on an H200."""
    dims = {"head_dim": 128, "value_dim": 128, "q_heads": 16, "kv_heads": 16}
    return on_h200(**{"dtype": torch.bfloat16, **dims, **facts})


@pytest.mark.parametrize(
    "facts",
    [
        pytest.param({}, id="plain"),
        pytest.param({"dtype": torch.float16, "right": 0}, id="fp16, causal"),
        pytest.param({"head_dim": 64, "value_dim": 64}, id="D=64"),
        pytest.param({"head_dim": 40, "value_dim": 40}, id="D=40, the least"),
        pytest.param({"head_dim": 256, "value_dim": 256}, id="D=256"),
        pytest.param({"head_dim": 192, "value_dim": 128}, id="values narrower than keys"),
        pytest.param({"kv_heads": 2}, id="grouped heads"),
        pytest.param({"layout": "packed"}, id="packed"),
        pytest.param({"partial": True}, id="a shard"),
        pytest.param({"dropout_p": 0.1, "left": 100, "alibi": True, "sink": True, "softcap": 20.0}, id="features"),
        pytest.param({"backward": True}, id="backward"),
        pytest.param({"backward": True, "right": 0, "lse_grad": True}, id="backward, causal, through the LSE"),
        pytest.param({"backward": True, "head_dim": 192, "value_dim": 136}, id="backward, D=192 and 136"),
        pytest.param({"backward": True, "deterministic": True}, id="backward in one order"),
        pytest.param({"backward": True, "layout": "packed", "kv_heads": 2}, id="backward, packed"),
        pytest.param({"backward": True, "partial": True}, id="backward of a shard"),
        pytest.param({"backward": True, "left": 100, "right": 0, "alibi": True, "sink": True}, id="backward, features"),
        pytest.param({"backward": True, "softcap": 20.0, "dropout_p": 0.1}, id="backward, softcap and dropout"),
    ],
)
def test_a_large_problem_on_hopper_goes_to_gluon(facts: dict[str, Any]) -> None:
    pytest.importorskip("triton")
    planned = plan(large(**facts))
    assert planned.backend == "gluon" and planned.passed_over == ()
    assert planned.config == BY_NAME["gluon"].configure(planned.problem)


@pytest.mark.parametrize(
    "facts",
    [
        {"alibi": True, "row_grad": True},
        {"softcap": 20.0, "head_dim": 64, "value_dim": 64},
        {"dropout_p": 0.1, "head_dim": 64, "value_dim": 64},
        {"head_dim": 192, "value_dim": 128},
        {"head_dim": 256, "value_dim": 256, "deterministic": True},
    ],
    ids=str,
)
def test_what_gluon_computes_forward_alone_goes_back_by_triton(facts: dict[str, Any]) -> None:
    pytest.importorskip("triton")
    assert plan(large(**facts)).backend == "gluon"
    assert plan(large(**facts, backward=True)).backend == "triton"


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"arch": 80}, "requires Hopper (compute capability 9.0); got 8.0"),
        ({"arch": 100}, "requires Hopper (compute capability 9.0); got 10.0"),
        ({"device": torch.device("cpu")}, "requires a CUDA device; got cpu"),
        ({"backward": True, "alibi": True, "row_grad": True}, "does not compute gradients of ALiBi slopes or sinks"),
        (
            {"backward": True, "head_dim": 192, "value_dim": 128},
            "equal tile widths for D and Dv",
        ),
        (
            {"backward": True, "head_dim": 136, "value_dim": 136, "deterministic": True},
            "deterministic backward supports D up to 128; got 136",
        ),
        ({"dtype": torch.float32}, "supports only float16 and bfloat16; got float32"),
        ({"q_start": 1 << 30}, "supports positions below 2**30; got 1073745919"),
        ({"head_dim": 32, "value_dim": 32}, "D from 129 to 256 with Dv from 65 to 128; got D=32, Dv=32"),
        ({"head_dim": 264, "value_dim": 264}, "head dims from 33 to 256"),
        ({"value_dim": 64}, "head dims from 33 to 256"),
        ({"mask": True}, "does not support masks or biases"),
        ({"bias": torch.float32}, "does not support masks or biases"),
        ({"q_stride": 2}, "supports only consecutive positions"),
        ({"k_stride": 2}, "supports only consecutive positions"),
        ({"tma_compatible": False}, "TMA requires 16-byte aligned rows"),
        ({"batch": 0}, "does not support empty inputs"),
    ],
    ids=str,
)
def test_why_gluon_cannot(facts: dict[str, Any], reason: str) -> None:
    pytest.importorskip("triton")
    reasons = BY_NAME["gluon"].why_not(large(**facts))
    assert len(reasons) == 1 and reason in reasons[0]
    with pytest.raises(UnsupportedProblem, match=re.escape(reason)):
        plan(large(**facts), "gluon")


# FP8


@pytest.mark.parametrize(
    ("arch", "chosen"), [(90, "gluon"), (89, "triton"), (100, "triton"), (103, "triton"), (120, "triton")]
)
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize(
    "facts", [{}, {"right": 0}, {"left": 100, "kv_heads": 2}, {"q_len": 1}, {"layout": "packed"}], ids=str
)
def test_in_fp8_it_goes_to_the_kernel_of_its_gpu(arch: int, chosen: str, dim: int, facts: dict[str, Any]) -> None:
    pytest.importorskip("triton")
    planned = plan(large(fp8=True, arch=arch, head_dim=dim, value_dim=dim, **facts))
    assert planned.backend == chosen and planned.config == BY_NAME[chosen].configure(planned.problem)
    table = hopper_fp8_tuning.GLUON if chosen == "gluon" else triton_fp8_tuning.TRITON
    assert planned.config == table[dim] or (dim == 64 and "left" in facts and chosen == "gluon")
    assert [name for name, _ in planned.passed_over] == ([] if chosen == "gluon" else ["gluon"])
    assert " in fp8" in str(planned)


@pytest.mark.parametrize("facts", [{"scale": 0.0}, {"scale": -1.0}], ids=str)
def test_in_fp8_the_portable_kernel_has_every_scale(facts: dict[str, Any]) -> None:
    pytest.importorskip("triton")
    assert plan(large(fp8=True, arch=90, **facts)).backend == "triton"


@pytest.mark.parametrize("facts", [{"arch": 80}, {"arch": 86}, {"arch": 75}, {"device": torch.device("cpu")}], ids=str)
def test_in_fp8_nobody_falls_back(facts: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedProblem) as caught:
        plan(large(fp8=True, **facts))
    listed = [line.split(":")[0].strip() for line in str(caught.value).splitlines()[1:]]
    assert listed == ["gluon", "triton", "eager", "reference"]
    assert "eager: does not support FP8; FP8 requires" in str(caught.value)
    assert plan(large(fp8=True, **facts), "reference").backend == "reference"


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"backward": True}, "FP8 supports inference only; it has no backward"),
        ({"partial": True}, "FP8 does not support partial results"),
        ({"dtype": torch.float32}, "FP8 supports only float16 and bfloat16 inputs; got float32"),
        ({"head_dim": 96, "value_dim": 96}, "FP8 supports only D = Dv of 64, 128 or 256; got D=96, Dv=96"),
        ({"value_dim": 64}, "FP8 supports only D = Dv of 64, 128 or 256; got D=128, Dv=64"),
        ({"mask": True}, "FP8 does not support masks"),
        ({"bias": torch.float32, "sink": True}, "FP8 does not support biases, sinks"),
        ({"alibi": True}, "FP8 does not support ALiBi"),
        ({"softcap": 20.0, "dropout_p": 0.1}, "FP8 does not support softcap, dropout"),
        ({"k_stride": 2}, "FP8 supports only consecutive positions"),
        ({"q_start": 1 << 30}, "supports positions below 2**30; got 1073745919"),
    ],
    ids=str,
)
def test_what_nobody_computes_in_fp8(facts: dict[str, Any], reason: str) -> None:
    pytest.importorskip("triton")
    for name in ("gluon", "triton", "reference"):
        assert BY_NAME[name].why_not(large(fp8=True, **facts)) == (reason,), name
    assert len(BY_NAME["eager"].why_not(large(fp8=True, **facts))) == 1


@pytest.mark.parametrize("field", ["block_m", "block_n"])
def test_a_tile_in_fp8_has_at_most_the_rows_of_a_scale(field: str) -> None:
    pytest.importorskip("triton")
    with pytest.raises(UnsupportedProblem, match="FP8 supports block_m and block_n up to 128; got 256"):
        plan(large(fp8=True), f"triton({field}=256)")


def test_a_tile_is_forced_on_the_kernel_of_fp8_too() -> None:
    pytest.importorskip("triton")
    planned = plan(large(fp8=True), "triton(block_m=64)")
    assert planned.config == triton_fp8_tuning.TRITON[128]._replace(block_m=64) and planned.forced == (("block_m", 64),)


RELEASES = [
    *((release, ()) for release in HOPPER_TRITON),
    ("3.5", ("enabled only for Triton 3.6-3.9; found 3.5; run `stream-attention info`",)),
    ("4.0", ("enabled only for Triton 3.6-3.9; found 4.0; run `stream-attention info`",)),
    (None, ("Triton is not installed",)),
]
"""Triton releases, each with what Gluon has against it."""


@pytest.mark.parametrize(("release", "reasons"), RELEASES)
@pytest.mark.parametrize("facts", [{}, {"backward": True}, {"fp8": True}], ids=str)
def test_gluon_is_for_releases_that_it_was_run_with(
    planned_with: PlannedWith, facts: dict[str, Any], release: str | None, reasons: tuple[str, ...]
) -> None:
    planned_with(release)
    assert BY_NAME["gluon"].why_not(large(**facts)) == reasons
    if release is not None:  # without Triton nobody computes in FP8, and eager does the rest
        assert plan(large(**facts)).backend == ("triton" if reasons else "gluon")
        assert plan(large(**facts)).passed_over == ((("gluon", reasons),) if reasons else ())


@pytest.mark.parametrize(("release", "reasons"), RELEASES)
def test_so_it_is_for_caches(planned_with: PlannedWith, release: str | None, reasons: tuple[str, ...]) -> None:
    planned_with(release)
    cache = quantize_kv(ContiguousKV(*torch.zeros(2, 2, 1024, 8, 128, dtype=torch.float16)), "int4")
    stated = decode_problem(torch.zeros(2, 1, 32, 128, dtype=torch.float16), cache)
    stated = stated.replace(device=torch.device("cuda"), arch=90, num_sms=132)
    planned = plan(stated)
    assert BY_NAME["gluon"].why_not(stated) == reasons
    assert planned.backend == ("eager" if release is None else "triton" if reasons else "gluon")
    assert planned.passed_over[:1] == ((("gluon", reasons),) if reasons else ())


def test_without_triton_eager_computes_on_a_gpu(planned_with: PlannedWith) -> None:
    planned_with(None)
    planned = plan(large())
    assert planned.backend == "eager"
    assert planned.passed_over == (("gluon", ("Triton is not installed",)), ("triton", ("Triton is not installed",)))
    with pytest.raises(UnsupportedProblem, match="Triton is not installed"):
        plan(large(), "gluon")


def test_the_installed_release_is_read_once_and_shortened() -> None:
    triton = pytest.importorskip("triton")
    assert triton_release() == ".".join(triton.__version__.split(".")[:2])


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"q_len": 1, "k_len": 65536}, "few queries and many keys use the split-KV kernel of Triton"),
        ({"q_len": 512, "k_len": 512, "batch": 1}, "the call is short: CPU overhead dominates"),
    ],
    ids=str,
)
def test_what_gluon_computes_only_when_it_is_named(facts: dict[str, Any], reason: str) -> None:
    pytest.importorskip("triton")
    by_itself = plan(large(**facts))
    ((passed_over, reasons),) = by_itself.passed_over
    assert by_itself.backend == "triton" and passed_over == "gluon"
    assert len(reasons) == 1 and reason in reasons[0]
    assert plan(large(**facts), "gluon").backend == "gluon"


# How eager computes it


def eager_config(**facts: Any) -> EagerConfig:
    return plan(problem(**facts), "eager").config


@pytest.mark.parametrize(
    "facts",
    [
        pytest.param({}, id="plain"),
        pytest.param({"right": 0}, id="causal self-attention"),
        pytest.param({"right": 0, "backward": True}, id="its backward"),
        pytest.param({"q_heads": 8}, id="grouped heads"),
        pytest.param({"k_len": 100}, id="cross-attention"),
        pytest.param({"dtype": torch.bfloat16}, id="bf16"),
        pytest.param({"partial": True}, id="an fp32 shard"),
        pytest.param({"scale": 1.0}, id="a large scale"),
        pytest.param({"sink": True}, id="a sink"),
    ],
)
def test_torchs_flash_op_computes_what_it_can(facts: dict[str, Any]) -> None:
    assert eager_config(**facts) == EagerConfig("flash")


@pytest.mark.parametrize(
    "facts",
    [
        {"mask": True},
        {"mask": True, "right": 0},
        {"mask": True, "sink": True},
        {"mask": True, "dtype": torch.bfloat16},
        {"bias": torch.float32},
        {"bias": torch.float32, "backward": True},
        {"bias": torch.bfloat16, "mask": True, "right": 0},
    ],
    ids=str,
)
def test_torchs_flash_op_computes_masks_and_has_tiles_for_what_it_cannot_take(facts: dict[str, Any]) -> None:
    config = eager_config(**facts)
    assert config.path == "flash" and not config.because and config.block_q == 64
    assert str(config).startswith("torch's CPU flash op; fallback for gradients of the LSE or a bias")


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"batch": 0}, "empty inputs"),
        ({"q_len": 0}, "empty inputs"),
        ({"k_len": 0}, "empty inputs"),
        ({"q_heads": 0, "kv_heads": 0}, "empty inputs"),
        ({"head_dim": 0, "value_dim": 0}, "empty inputs"),
        ({"value_dim": 16}, "requires D = Dv"),
        ({"left": 3}, "does not support a window"),
        ({"right": 3}, "aligns causal masks top-left"),
        ({"right": 0, "q_start": 4}, "aligns causal masks top-left"),
        ({"right": 0, "k_stride": 2}, "aligns causal masks top-left"),
        ({"mask": True, "left": 3}, "does not support a window"),
        ({"mask": True, "right": 0, "q_start": 4}, "aligns causal masks top-left"),
        ({"alibi": True}, "does not support ALiBi"),
        ({"sink": True, "dtype": torch.bfloat16}, "rounds the output before the sink rescales it"),
        ({"softcap": 2.0}, "does not support softcap"),
        ({"dropout_p": 0.1}, "generates its own dropout mask"),
        ({"partial": True, "dtype": torch.bfloat16}, "rounds partial results"),
    ],
    ids=str,
)
def test_each_feature_that_needs_the_blocked_pass_is_named(facts: dict[str, Any], reason: str) -> None:
    config = eager_config(**facts)
    assert config.path == "blocked"
    assert len(config.because) == 1 and reason in config.because[0]


def test_a_gradient_of_the_lse_keeps_the_flash_op_and_has_tiles_for_what_it_cannot_take() -> None:
    config = eager_config(backward=True, lse_grad=True)
    assert config.path == "flash" and not config.because
    assert config[1:4] == eager_config(backward=True, alibi=True)[1:4]
    assert "fallback for gradients of the LSE" in str(config) and "NaN under a mask: blocked pass, tiles of" in str(
        config
    )
    assert str(eager_config(backward=True)) == "torch's CPU flash op"


def test_an_accelerator_runs_the_blocked_pass_and_hears_nothing_of_a_cpu() -> None:
    config = eager_config(device=torch.device("mps"))
    assert config.path == "blocked" and not config.because and "CPU" not in str(config)


@pytest.mark.parametrize(
    ("facts", "path"),
    [
        ({}, "cuda_flash"),
        ({"head_dim": 84, "value_dim": 84}, "cuda_flash"),
        ({"right": 0}, "cuda_flash"),
        ({"backward": True}, "cuda_flash"),
        ({"head_dim": 320, "value_dim": 320}, "cuda_efficient"),
        ({"value_dim": 64}, "cuda_efficient"),
        ({"dtype": torch.float32}, "cuda_efficient"),
        ({"dtype": torch.float16, "arch": 75}, "cuda_efficient"),
    ],
    ids=str,
)
def test_plain_torch_on_a_gpu_is_one_of_sdpas_kernels(facts: dict[str, Any], path: str) -> None:
    config = plan(on_h200(**facts), "eager").config
    assert config.path == path and "as SDPA runs it" in str(config)


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"dtype": torch.float64}, "do not support float64"),
        ({"arch": 75, "dtype": torch.bfloat16}, "require compute capability 8.0 for bfloat16"),
        ({"batch": 65536}, "support at most 65535 batch entries and heads"),
        ({"left": 3}, "propagate NaN from keys outside a window"),
        ({"right": 0, "q_start": 1}, "align causal masks bottom-right"),
        ({"right": 0, "q_len": 4097, "q_start": -1}, "with another LSE for empty rows"),
        ({"scale": 0.0}, "require a positive scale"),
        ({"mask": True}, "return NaN for fully masked rows"),
        ({"bias": torch.float32}, "return NaN for fully masked rows"),
        ({"alibi": True}, "do not support ALiBi"),
        ({"sink": True}, "do not support sinks"),
        ({"softcap": 2.0}, "do not support softcap"),
        ({"dropout_p": 0.1}, "generate their own dropout mask"),
        ({"partial": True}, "round partial results"),
        ({"backward": True, "lse_grad": True}, "do not support a gradient through the LSE"),
        ({"backward": True, "deterministic": True}, "accumulate gradients in no fixed order"),
    ],
    ids=str,
)
def test_what_sdpas_kernels_lack_is_blocked_and_named(facts: dict[str, Any], reason: str) -> None:
    config = plan(on_h200(**facts), "eager").config
    assert config.path == "blocked"
    assert len(config.because) == 1 and reason in config.because[0]
    assert "because torch's CUDA kernels" in str(config)


@pytest.mark.parametrize("dims", [(84, 84), (7, 7), (255, 255), (84, 88), (100, 33)], ids=str)
def test_head_dims_that_are_no_multiple_of_8_are_padded_for_our_kernels(dims: tuple[int, int]) -> None:
    pytest.importorskip("triton")
    planned = plan(on_h200(head_dim=dims[0], value_dim=dims[1], tma_compatible=False))
    assert planned.backend in ("gluon", "triton") and planned.padded_from == dims
    assert (planned.problem.head_dim, planned.problem.value_dim) == tuple(-(-dim // 8) * 8 for dim in dims)
    assert f"D={dims[0]} Dv={dims[1]}" in str(planned) and "head dims padded with zeros to" in str(planned)


def test_padded_tensors_are_copies_that_tma_can_read(hopper_triton: None) -> None:
    for dims, backend in (((84, 84), "gluon"), ((88, 88), "triton"), ((88, 84), "triton")):  # a dim of 88 is not copied
        assert plan(on_h200(head_dim=dims[0], value_dim=dims[1], tma_compatible=False)).backend == backend


def test_packed_sequences_are_planned_one_by_one() -> None:
    config = eager_config(layout="packed")
    assert config.path == "sequences" and "one sequence at a time" in str(config)


@pytest.mark.parametrize(
    "facts",
    [{"q_heads": 0, "kv_heads": 0}, {"q_heads": 0}, {"head_dim": 0}, {"value_dim": 0}, {"head_dim": 0, "value_dim": 0}],
    ids=str,
)
@pytest.mark.parametrize(
    "more", [{}, {"backward": True}, {"layout": "packed"}, {"q_len": 1}, {"q_heads": 0, "k_len": 0}], ids=str
)
def test_no_heads_and_no_dims_are_left_to_eager_on_a_gpu(facts: dict[str, Any], more: dict[str, Any]) -> None:
    for head_dim in (64, 128):
        sizes = {"head_dim": head_dim, "value_dim": head_dim, "kv_heads": 4, "q_heads": 8}
        planned = plan(on_h200(**{**sizes, **more, **facts}))
        assert planned.backend == "eager"
        assert [name for name, _ in planned.passed_over] == ["gluon", "triton"]


@pytest.mark.parametrize("empty", ["batch", "q_len", "k_len"])
def test_an_empty_problem_has_a_plan(empty: str) -> None:
    facts = {"device": torch.device("cuda"), "arch": 90, "num_sms": 132, "q_len": 1, "k_len": 8192, empty: 0}
    for backend in ("auto", "triton", "eager", "reference"):
        assert plan(problem(**facts), backend).config


def test_all_reasons_are_given() -> None:
    assert len(eager_config(alibi=True, softcap=1.0, left=3).because) == 3


@pytest.mark.parametrize("heads", [1, 8, 128])
@pytest.mark.parametrize("length", [1, 100, 1 << 20])
@pytest.mark.parametrize("batch", [1, 4096])
def test_tiles_do_not_grow_with_the_problem(heads: int, length: int, batch: int) -> None:
    config = eager_config(q_heads=heads, kv_heads=1, q_len=length, k_len=length, batch=batch, mask=True)
    assert 1 <= config.block_q <= length and 1 <= config.block_k <= length and 1 <= config.block_b <= batch
    assert config.block_b * heads * config.block_q * config.block_k <= 1 << 20


# Plans are values


def test_equal_problems_share_one_plan() -> None:
    assert problem() == problem() and problem() is not problem()
    assert plan(problem()) is plan(problem())
    assert plan(problem(q_len=65)) is not plan(problem())


def test_plans_are_hashable() -> None:
    assert len({plan(problem()), plan(problem()), plan(problem(mask=True))}) == 2


def test_a_plan_prints_the_problem_the_kernel_and_what_was_passed_over() -> None:
    text = str(plan(problem(mask=True, left=3, softcap=2.0, bias=torch.bfloat16, dropout_p=0.25, sink=True)))
    assert "dense B=2 Tq=64 Tk=64 Hq=4 Hkv=4 D=32 Dv=32 float32 on cpu" in text
    assert "window=(3, -1) mask bias=bfloat16 sink softcap=2 dropout=0.25" in text
    assert "backend   eager: blocked pass, tiles of 2 x 64 x 64" in text
    assert "does not support softcap" in text
    passed_over = Plan(problem(), "eager", "anyhow", (("gluon", ("it is Tuesday", "it rains")),))
    assert str(passed_over).splitlines()[1:] == ["backend   eager: anyhow", "not       gluon: it is Tuesday; it rains"]
    assert repr(passed_over) == "<Plan eager: anyhow>"
    assert str(plan(problem(backward=True))).startswith("backward ") and " causal" in str(problem(right=0))


# The problem that inputs pose


def stated(inputs: list[Tensor], **options: Any) -> Problem:
    plain: dict[str, Any] = {
        "q_len": 0,
        "k_len": 0,
        "causal": False,
        "window": (UNBOUNDED, UNBOUNDED),
        "softcap": 0.0,
        "scale": 1.0,
        "dropout_p": 0.0,
        "deterministic": False,
    }
    return state_problem(Inputs(*inputs), **{**plain, **options})


@pytest.mark.parametrize(
    ("lengths", "options", "sides"),
    [
        pytest.param((8, 8), {"causal": True}, (-1, 0), id="causal"),
        pytest.param((1, 8), {"causal": True}, (-1, -1), id="one query sees its whole cache"),
        pytest.param((2, 8), {"causal": True}, (-1, 0), id="the first of two queries does not see the last key"),
        pytest.param((8, 1), {"causal": True}, (-1, 0), id="early queries do not see the one key"),
        pytest.param((8, 8), {"causal": True, "window": (3, 5)}, (3, 0), id="causal narrows the right side"),
        pytest.param((8, 8), {"window": (3, 5)}, (3, 5), id="a window"),
        pytest.param((8, 8), {"window": (7, 7)}, (-1, -1), id="a window that hides nothing"),
        pytest.param((8, 8), {"window": (6, 7)}, (6, -1), id="a left side that hides one key from one query"),
        pytest.param((1, 8), {"window": (3, 0)}, (3, -1), id="one query with a window"),
        pytest.param((0, 8), {"causal": True}, (-1, 0), id="no queries: left as asked"),
    ],
)
def test_a_side_that_hides_nothing_is_no_side(
    lengths: tuple[int, int], options: dict[str, Any], sides: tuple[int, int]
) -> None:
    one = stated(qkv(*lengths), **options)
    assert (one.left, one.right) == sides


def test_positions_default_to_the_last_query_at_the_last_key() -> None:
    one = stated(qkv(3, 8))
    assert (one.q_start, one.q_stride, one.k_start, one.k_stride, one.q_base) == (5, 1, 0, 1, 5)


@pytest.mark.parametrize(
    ("positions", "right"),
    [
        pytest.param(Positions(8, 1, 0, 1, 0), UNBOUNDED, id="keys of an earlier shard"),
        pytest.param(Positions(0, 1, 8, 1, 0), 0, id="keys of a later shard"),
        pytest.param(Positions(0, 2, 1, 2, 0), 0, id="stripes"),
        pytest.param(Positions(7, 1, 0, 1, 0), UNBOUNDED, id="the last key is the first query's own"),
        pytest.param(Positions(6, 1, 0, 1, 0), 0, id="one key too far"),
    ],
)
def test_causal_on_a_shard_is_a_matter_of_positions(positions: Positions, right: int) -> None:
    assert stated(qkv(), causal=True, positions=positions).right == right


def test_packed_lengths_are_those_passed() -> None:
    offsets = torch.tensor([0, 3, 8])
    packed = [t[0] for t in qkv()]
    inputs = Inputs(*packed, cu_seqlens_q=offsets, cu_seqlens_k=offsets)
    one = state_problem(
        inputs,
        q_len=5,
        k_len=5,
        causal=True,
        window=(UNBOUNDED, UNBOUNDED),
        softcap=0.0,
        scale=1.0,
        dropout_p=0.0,
        deterministic=False,
    )
    assert (one.batch, one.q_len, one.k_len, one.packed, one.right) == (2, 5, 5, True, 0)


# Forcing


def test_force_backend_nests_and_restores() -> None:
    assert requested(AUTO) == AUTO
    with force_backend("eager"):
        with force_backend("reference"):
            assert requested(AUTO) == "reference"
        assert requested(AUTO) == "eager"
        with force_backend(AUTO):
            assert requested(AUTO) == AUTO
    assert requested(AUTO) == AUTO


def test_force_backend_restores_after_an_exception() -> None:
    with pytest.raises(KeyError), force_backend("reference"):
        raise KeyError
    assert requested(AUTO) == AUTO


def test_a_backend_named_in_the_call_wins() -> None:
    with force_backend("reference"):
        assert requested("eager") == "eager"
        assert explain(*qkv(), backend="eager").backend == "eager"
        assert explain(*qkv()).backend == "reference"


@pytest.mark.parametrize("use", [lambda: attention(*qkv(), backend="fast"), lambda: force_backend("fast").__enter__()])
def test_an_unknown_backend_is_refused_with_the_names_there_are(use: Any) -> None:
    with pytest.raises(ValueError, match=r"backend: expected one of 'auto', .*'eager', 'reference'; got 'fast'"):
        use()
    assert requested(AUTO) == AUTO


def test_calls_on_a_cache_are_planned_by_the_same_list() -> None:
    pytest.importorskip("triton")
    stated = on_h200(layout="cache", q_len=1, k_len=8192)
    planned = plan(stated)
    assert planned.backend == "triton" and isinstance(planned.config, DecodeConfig)
    assert planned.passed_over == (("gluon", ("supports only quantised caches",)),)
    assert plan(stated, Request("triton", num_splits=5)).config.num_splits == 5
    assert plan(stated, Request(batch_invariant=True)).config.split_keys > 0
    assert plan(stated, "eager").config == plan(stated, Request("eager")).config


@pytest.mark.parametrize("asked", ["reference", "triton(block_m=64)"])
def test_what_does_not_decode_says_who_does(asked: str) -> None:
    pytest.importorskip("triton")
    words = (
        f"backend {asked!r} does not support decoding from a KV cache; pass one of 'auto', 'gluon', 'triton', 'eager'"
    )
    with pytest.raises(UnsupportedProblem, match=re.escape(words)):
        plan(on_h200(layout="cache", q_len=1), asked)


# Forcing a configuration


def test_what_is_forced_is_taken_and_the_rest_stays_planned() -> None:
    pytest.importorskip("triton")
    by_table = plan(on_h200(), "triton").config
    planned = plan(on_h200(), "triton(block_m=32, num_stages=1)")
    assert planned.backend == "triton"
    assert planned.config == by_table._replace(block_m=32, num_stages=1) != by_table
    text = str(planned).splitlines()[1]
    assert text == f"backend   triton: {planned.config} (forced: block_m=32, num_stages=1)"


def test_splits_and_packed_heads_survive_a_forced_tile() -> None:
    pytest.importorskip("triton")
    decode = on_h200(q_len=1, q_heads=8, kv_heads=2, k_len=8192)
    by_table, forced = (plan(decode, backend).config for backend in ("triton", "triton(block_n=16)"))
    assert by_table.num_splits > 1 and by_table.pack_heads
    assert forced == by_table._replace(block_n=16)


def test_a_backward_is_planned_whatever_is_forced() -> None:
    pytest.importorskip("triton")
    backward = on_h200(backward=True)
    assert plan(backward, "triton(block_m=16)") == plan(backward, "triton")


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter computes it on the CPU")
def test_a_forced_tile_that_cannot_run_raises_the_reasons_of_its_backend() -> None:
    with pytest.raises(UnsupportedProblem, match=r"'triton\(block_m=64\)' cannot .*(CUDA device|not installed)"):
        attention(*qkv(), backend="triton(block_m=64)")


def test_the_old_keyword_of_plan_warns() -> None:
    with pytest.warns(DeprecationWarning, match="use plan"):
        assert plan(problem(batch=3), backend="eager") == plan(problem(batch=3), Request("eager"))


def test_spelling_and_reading_are_inverse() -> None:
    assert spell("eager") == "eager"
    spelt = spell("triton", block_m=64, block_n=32, num_warps=8, num_stages=3)
    assert spelt == "triton(block_m=64, block_n=32, num_warps=8, num_stages=3)"
    forced = (("block_m", 64), ("block_n", 32), ("num_warps", 8), ("num_stages", 3))
    assert parse(spelt) == Request("triton", forced) and parse("auto") == Request()
    with force_backend(spelt):
        assert requested(AUTO) == spelt


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ("triton(block_q=64)", "name=value once for any of 'block_m', 'block_n', 'num_warps', 'num_stages'"),
        ("triton(block_m=64, block_m=32)", "name=value once"),
        ("triton(64)", "name=value once"),
        ("triton()", "name=value once"),
        ("triton(block_m=48)", "one of 16, 32, 64, 128, 256 for block_m; got '48'"),
        ("triton(block_m=064)", "one of 16, 32, 64, 128, 256 for block_m; got '064'"),
        ("triton(block_m=\uff16\uff14)", "one of 16, 32, 64, 128, 256 for block_m; got"),  # full-width digits
        ("triton(num_warps=x)", "one of 1, 2, 4, 8, 16 for num_warps; got 'x'"),
        ("triton(block_m=64", "a closing bracket"),
        ("eager(block_m=64)", "'eager', which accepts no configuration"),
        ("gluon(warpgroups=3)", "'gluon', which accepts no configuration"),
        ("cuda(block_m=64)", "one of 'auto', 'gluon', 'triton'"),
        ("auto(block_m=64)", "one of 'auto', 'gluon', 'triton'"),
    ],
)
def test_a_configuration_that_is_none_is_refused(asked: str, words: str) -> None:
    with pytest.raises(ValueError, match="backend: expected " + re.escape(words)):
        attention(*qkv(), backend=asked)


# The corpus


def test_every_call_of_the_corpus_is_planned_as_recorded() -> None:
    """A change of plans is made on purpose: `python tests/plan_corpus.py`, and a look at the diff."""
    pytest.importorskip("triton")
    recorded = {call: plan for plan, calls in json.loads(plan_corpus.FILE.read_text()).items() for call in calls}
    found = {call: plan for plan, calls in plan_corpus.plans().items() for call in calls}
    assert len(found) > 900 and found.keys() == recorded.keys()
    assert {call: (recorded[call], now) for call, now in found.items() if now != recorded[call]} == {}


@pytest.mark.parametrize("queries", [1, 2, 3, 5])
def test_a_call_planned_by_a_rounded_length_is_one_that_the_kernel_of_few_queries_takes(queries: int) -> None:
    planned = 0
    for keys in range(queries, 700, 3):
        facts = {"q_len": queries, "k_len": keys, "q_start": keys - queries, "q_base": keys - queries}
        found = plan(
            on_h200(batch=1, q_heads=32, kv_heads=8, head_dim=128, value_dim=128, dtype=torch.bfloat16, **facts)
        )
        if isinstance(found.config, DecodeConfig):
            planned += 1
            assert on_a_cache(found.problem, fewest_keys=0) is not None and found.problem.k_len == keys
    assert planned > 100


@pytest.mark.parametrize(("arch", "got"), [(0, "0.0"), (80, "8.0")])
def test_fp8_is_refused_on_gpus_of_other_makers_and_on_older_ones(arch: int, got: str, hopper_triton: None) -> None:
    """`arch` is 0 where a GPU is not NVIDIA's: the quantising kernel has PTX."""
    problem = on_h200(head_dim=128, value_dim=128).replace(fp8=True, arch=arch)
    assert f"FP8 requires compute capability 8.9 or newer; got {got}" in BY_NAME["triton"].why_not(problem)
