"""Kernels compiled ahead: which, that they are compiled once, and that a launch finds them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from stream_attention_tools.cli import warmup as cli
from stream_attention_tools.testing.inputs import Case
from stream_attention_tools.warmup import Call, Gpu, kernels_of

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.skipif(cli.interpreting(), reason="interpreted kernels are not compiled"),
    pytest.mark.xdist_group("warmup"),
]

H200 = Gpu(90, 132)
SMALL = "--arch 90 --dim 64 --causal --seq 128 --batch 1 --no-decode --workers 2 --json --no-first-call".split()
"""Three kernels: a forward, dQ, and dK with dV."""


def calls(*argv: str) -> list[Call]:
    return list(cli._calls(options("--arch", "90", *argv)))


def options(*argv: str) -> Namespace:
    parser = ArgumentParser()
    cli._flags(parser)
    return parser.parse_args(argv)


def keys(some: list[Call], gpu: Gpu = H200) -> set[str]:
    return {kernel.key for kernel in kernels_of(some, gpu)[0]}


@pytest.fixture
def _nothing_is_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


# Which kernels


@pytest.mark.usefixtures("_nothing_is_cached")
def test_each_kernel_is_named_once_and_forward_and_backward_are_there() -> None:
    kernels, without = kernels_of(calls(), H200)
    assert len({kernel.key for kernel in kernels}) == len(kernels) and not without
    names = {kernel.name for kernel in kernels}
    parts = {"triton.forward", "triton.decode", "gpu.decode_tiles", "triton.backward_query", "triton.backward_key"}
    assert parts <= names
    assert not any(kernel.cached for kernel in kernels)


@pytest.mark.usefixtures("_nothing_is_cached")
def test_calls_of_any_length_and_batch_find_their_kernels() -> None:
    rng = Random(0)
    drawn = []
    for _ in range(150):
        length, batch, dim = int(2 ** rng.uniform(5, 14.5)), int(2 ** rng.uniform(0, 6)), rng.choice((64, 128))
        rest = (8, 8, dim, dim, torch.bfloat16)
        modes = {"causal": rng.random() < 0.5, "backward": rng.random() < 0.5}
        drawn.append(Call(Case(batch, length, length, *rest, **modes)))
        drawn.append(Call(Case(batch, 1, length, *rest, backward=False)))
    warmed = keys(calls())
    assert [str(call) for call in drawn if keys([call]) - warmed] == []


@pytest.mark.usefixtures("_nothing_is_cached")
@pytest.mark.parametrize(
    "flags",
    [
        "--kv-heads 2",
        "--dtype fp16",
        "--packed",
        "--window 64,0",
        "--mask",
        "--bias",
        "--alibi",
        "--sink",
        "--softcap 20",
        "--dropout 0.1",
        "--value-dim 32",
        "--no-causal",
        "--decode",
    ],
)
def test_what_a_flag_says_is_another_kernel(flags: str) -> None:
    common = ["--dim", "64", "--seq", "512", "--batch", "1", "--causal", "--no-decode"]
    assert keys(calls(*common, *flags.split())) - keys(calls(*common))


@pytest.mark.usefixtures("_nothing_is_cached")
def test_a_scale_of_the_batch_or_the_heads_is_the_same_kernel() -> None:
    one = Call(Case(64, 1024, 1024, 8, 8, 64, 64, torch.bfloat16, causal=True), "triton")
    other = Call(Case(96, 900, 900, 12, 12, 64, 64, torch.bfloat16, causal=True), "triton")
    assert keys([one]) == keys([other])
    assert keys([one]).isdisjoint(keys([one], Gpu(80, 108)))  # of another GPU


# Compiled once, and found


@pytest.fixture(scope="module")
def warmed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder that the command filled."""
    folder = tmp_path_factory.mktemp("cache")
    found = warmup(folder)
    assert found["compiled"] == 3 and found["already_there"] == found["failed"] == 0
    assert found["cache"] == str(folder)
    assert all(one["seconds"] > 0 for one in found["kernels"])
    return folder


def warmup(folder: Path, *flags: str) -> Any:
    command = [sys.executable, "-m", "stream_attention.cli.warmup", *SMALL, *flags]
    environment = {**os.environ, "TRITON_CACHE_DIR": str(folder), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_second_warmup_compiles_nothing(warmed: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in warmed.rglob("*") if path.is_file()}
    found = warmup(warmed)
    assert found["compiled"] == 0 and found["already_there"] == 3
    assert {path: path.stat().st_mtime_ns for path in warmed.rglob("*") if path.is_file()} == before


LAUNCH = """
import ctypes, sys
ctypes.CDLL(sys.argv[1] + "/libcuda.so.1", ctypes.RTLD_GLOBAL)
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaDriver
from stream_attention.dispatch.prepare import run_backward, run_forward
from stream_attention_tools.testing.inputs import Case, draw, stated
from stream_attention.dispatch.plan import plan
from stream_attention.base.problem import Wanted

def build(*how):
    raise AssertionError("Triton built a module")

triton.knobs.build.impl = build
compiled = []
triton.knobs.compilation.listener = lambda src, cache_hit, **rest: compiled.append((src.name, cache_hit))
driver = CudaDriver()
driver.get_current_device = lambda: 0
driver.get_current_stream = lambda device: 0
driver.get_current_target = lambda: GPUTarget("cuda", 90, 32)
triton.runtime.driver.set_active(driver)

x = draw(Case(2, 100, 100, 4, 4, 64, 64, torch.bfloat16, causal=True))
problem, inputs = stated(x, x.tensors, x.options)
problem = problem.replace(device=torch.device("cuda"), arch=90, num_sms=132)
out, lse = run_forward(plan(problem), inputs)
run_backward(plan(problem.replace(backward=True)), inputs, out, lse, out, None, Wanted())
assert [hit for _, hit in compiled] == [True] * 3, compiled
"""

DRIVER = """
#include <stdio.h>
int cuDeviceGetAttribute(int *value, int attribute, int device) { *value = 1 << 20; return 0; }
int cuFuncGetAttribute(int *value, int attribute, void *function) { *value = 1 << 20; return 0; }
int cuLaunchKernelEx(void *config, void *function, void **arguments, void **extra) { puts("launched"); return 0; }
"""


def test_triton_launches_what_was_warmed_without_compiling_or_building(warmed: Path, tmp_path: Path) -> None:
    """Triton's own launch path, to the last call of a CUDA driver, of which there is none: one that does nothing."""
    from stream_attention_tools import launchers

    if (reason := launchers.why_not()) is not None:
        pytest.skip(reason)
    modules = list(map(str, warmed.rglob("*.so")))
    listing = subprocess.run(["nm", "-D", "-u", *modules], capture_output=True, text=True, check=True).stdout
    wanted = {word for word in listing.split() if word.startswith("cu") and f"{word}(" not in DRIVER}
    source = tmp_path / "driver.c"
    source.write_text(DRIVER + "".join(f"int {name}() {{ return 0; }}\n" for name in wanted))
    library = ["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(tmp_path / "libcuda.so.1")]
    subprocess.run(["gcc", "-w", str(source), *library], check=True)
    environment = {**os.environ, "TRITON_CACHE_DIR": str(warmed), "TRITON_LIBCUDA_PATH": str(tmp_path)}
    command = [sys.executable, "-c", LAUNCH, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("launched") == 3


def test_a_cache_that_was_moved_is_not_found(warmed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's cache holds whole paths. Whoever mounts it elsewhere compiles once more; the command's text says so."""
    moved = warmed.rename(tmp_path / "moved")
    try:
        monkeypatch.setenv("TRITON_CACHE_DIR", str(moved))
        assert [kernel.cached for kernel in kernels_of(cli._calls(options(*SMALL)), H200)[0]] == [False] * 3
    finally:
        moved.rename(warmed)


@pytest.mark.gpu
def test_on_a_gpu_a_first_call_compiles_nothing_that_was_warmed(tmp_path: Path) -> None:
    shape = "--dim 64 --causal --seq 128 --batch 1 --no-decode --json --first-call".split()
    command = [sys.executable, "-m", "stream_attention.cli.warmup", *shape]
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["compiled"] == len(found["kernels"]) > 0 and found["failed"] == 0
    assert all(call["compiled"] == 0 for call in found["first_calls"]["cached"])
    assert found["first_calls"]["empty"]["compiled"] > 0


# Refusals


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--arch 95", "--processors: expected the multiprocessors of a GPU of --arch 95"),
        ("--arch 77", "triton: requires compute capability 8.0 or newer; got 7.7"),
        ("--arch 75 --processors 40", "requires compute capability 8.0 or newer; got 7.5"),
        ("--arch 90 --dim 320", "nothing to compile: bfloat16 D=320"),
        ("--arch 90 --heads 8 --kv-heads 3", "--kv-heads: expected a divisor of --heads 8; got 3"),
        ("--arch 90 --packed --mask", "--packed: expected without --mask and --bias"),
        ("--arch 90 --backend gluon --dtype fp32", "supports only float16 and bfloat16; got float32"),
    ],
)
def test_what_cannot_be_compiled_is_refused(flags: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(flags.split()) == 2
    assert words in capsys.readouterr().err


def test_a_cache_that_cannot_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert cli.main(SMALL) == 2
    assert "TRITON_CACHE_DIR: expected a folder that can be written; got" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_first_calls_are_not_timed_where_there_is_no_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*SMALL, "--first-call"]) == 2
    assert (
        "--first-call: expected on a machine with such a GPU; got a GPU of compute capability"
        in capsys.readouterr().err
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_the_arch_must_be_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "--arch: expected where torch finds no GPU; got none. Say --arch 90" in capsys.readouterr().err
