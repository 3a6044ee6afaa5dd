"""The kernels, the ring and the program of cuda/ on a GPU, against the fp64 reference."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch
from tests.cuda.cuda_library import CudaLibrary, Strategy, _pointer
from tests.cuda.cuda_tools import BF16, F32, case, expect_within_bounds, inputs

from stream_attention_tools.testing import Case

pytestmark = pytest.mark.gpu

DTYPES = pytest.mark.parametrize("dtype", [F32, BF16], ids=["fp32", "bf16"])


@pytest.fixture(scope="module")
def library(built_folder: Path) -> CudaLibrary:
    return CudaLibrary(built_folder / "libflash_attn.so")


def on_gpu(one: Case, dtype: torch.dtype) -> Case:
    return case(one.Tq, one.Tk, one.D, dtype, B=one.B, H=one.Hq, causal=one.causal, scale=one.scale, device="cuda")


CASES = {
    "one key": case(1, 1, 32),
    "whole tiles": case(256, 512, 64),
    "ragged, heads, batch": case(333, 777, 64, B=2, H=3),
    "d32": case(200, 1000, 32, H=2),
    "d128": case(200, 1000, 128, H=2),
    "head dims between the tiles'": case(150, 300, 80, H=2),
    "the smallest head dim": case(150, 300, 8, H=2),
    "causal": case(700, 700, 128, H=2, causal=True),
    "causal, more keys": case(100, 900, 64, causal=True),
    "causal, more queries: the first rows see nothing": case(900, 100, 64, causal=True),
    "a scale": case(200, 300, 64, scale=0.5),
}


@DTYPES
@pytest.mark.parametrize("one", CASES.values(), ids=CASES)
def test_forward_agrees(library: CudaLibrary, one: Case, dtype: torch.dtype) -> None:
    one = on_gpu(one, dtype)
    tensors, options = inputs(one)
    out, lse = library.forward(*tensors, **options)
    expect_within_bounds(one, out, lse)
    again = library.forward(*tensors, **options)
    assert torch.equal(out, again[0]) and torch.equal(lse, again[1])


RINGS = {
    "two ranks": (case(512, 512, 64, H=2), 2),
    "lengths that do not divide": (case(1001, 1001, 128, B=2, H=2), 4),
    "causal": (case(1001, 1001, 64, H=3, causal=True), 4),
    "causal, more keys": (case(100, 901, 64, causal=True), 5),
    "causal, more queries": (case(901, 100, 32, causal=True), 5),
    "fewer rows than ranks": (case(3, 3, 64, causal=True), 5),
    "one rank": (case(300, 300, 64), 1),
}


@DTYPES
@pytest.mark.parametrize("strategy", ["ring", "queries"])
@pytest.mark.parametrize(("one", "ranks"), RINGS.values(), ids=RINGS)
def test_virtual_ranks_agree(
    library: CudaLibrary, one: Case, ranks: int, strategy: Strategy, dtype: torch.dtype
) -> None:
    one = on_gpu(one, dtype)
    tensors, options = inputs(one)
    with library.group(*tensors, ranks=ranks, strategy=strategy, **options) as group:
        results = [group.forward()[0] for _ in range(5)]
    expect_within_bounds(one, results[0])
    assert all(torch.equal(result, results[0]) for result in results)


def test_the_ring_hides_no_race(library: CudaLibrary) -> None:
    """Many forwards of short steps, where copies and kernels of different ranks overlap most: all alike."""
    tensors, options = inputs(on_gpu(case(640, 640, 64), BF16))
    with library.group(*tensors, ranks=8, **options) as group:
        first = group.forward()[0]
        assert all(torch.equal(group.forward()[0], first) for _ in range(200))


@DTYPES
def test_offsets_beyond_32_bits(library: CudaLibrary, dtype: torch.dtype) -> None:
    H, Tk = 128, 131_072 + 64  # the last keys of the last head lie more than 2**31 elements in
    if torch.cuda.mem_get_info()[0] < 3 * 4 * H * Tk * 128:
        pytest.skip("needs 26 GB of free memory")
    query = torch.randn(1, 40, H, 128, device="cuda", dtype=dtype)
    key = torch.randn(1, Tk, H, 128, device="cuda", dtype=dtype)
    out, lse = library.forward(query, key, key)
    last = [x[:, :, -1:].contiguous() for x in (query, key, key)]
    out_last, lse_last = library.forward(*last)
    assert torch.equal(out[:, :, -1:], out_last) and torch.equal(lse[:, -1:], lse_last)


def test_runs_on_the_current_stream(library: CudaLibrary) -> None:
    (query, key, value), options = inputs(on_gpu(case(200, 300, 64), F32))
    expected = library.forward(query, key, value, **options)[0]
    later = torch.zeros_like(query)
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(50_000_000)  # the copy is not there before it ends
        later.copy_(query)
        out = library.forward(later, key, value, **options)[0]
    torch.cuda.synchronize()
    assert torch.equal(out, expected)


@DTYPES
def test_nan_shows_in_lse_too(library: CudaLibrary, dtype: torch.dtype) -> None:
    query, key = (torch.ones(1, T, 1, 64, device="cuda", dtype=dtype) for T in (3, 200))
    query[:, 1] = torch.nan
    out, lse = library.forward(query, key, key)
    assert out[0, :, 0, 0].isnan().tolist() == lse[0, 0].isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("strategy", ["ring", "queries"])
def test_a_group_waits_for_what_it_loads_and_stores(library: CudaLibrary, strategy: Strategy) -> None:
    """Both copy behind what sleeps in the default stream, for which neither the ranks' streams nor a reader's wait."""
    tensors, options = inputs(on_gpu(case(4000, 4000, 64, H=16), BF16))
    with library.group(*tensors, ranks=3, strategy=strategy, **options) as group:
        expected = group.forward()[0]
    later, out = [torch.zeros_like(x) for x in tensors], torch.full_like(tensors[0], torch.nan)
    with library.group(*later, ranks=3, strategy=strategy, **options) as group:
        torch.cuda.synchronize()
        torch.cuda._sleep(50_000_000)
        for to, x in zip(later, tensors, strict=True):
            to.copy_(x)
        library._call("flash_attn_group_load", group._handle, *(_pointer(x) for x in later))
        library._call("flash_attn_group_forward", group._handle, None)
        torch.cuda._sleep(50_000_000)
        library._call("flash_attn_group_store", group._handle, _pointer(out))
        with torch.cuda.stream(torch.cuda.Stream()):
            seen = out.clone()
    torch.cuda.synchronize()
    assert torch.equal(seen, expected)


def test_a_group_waits_for_the_current_stream(library: CudaLibrary) -> None:
    tensors, options = inputs(on_gpu(case(1000, 1000, 64), BF16))
    with library.group(*tensors, ranks=3, **options) as group:
        expected = group.forward()[0]
    later = [torch.zeros_like(x) for x in tensors]
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(50_000_000)
        for to, x in zip(later, tensors, strict=True):
            to.copy_(x)
        with library.group(*later, ranks=3, **options) as group:
            torch.cuda._sleep(50_000_000)  # before `forward` makes the tensor that it stores into
            out = group.forward()[0]
    torch.cuda.synchronize()
    assert torch.equal(out, expected)


def test_runs_on_the_tensors_gpu(library: CudaLibrary) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    tensors, options = inputs(on_gpu(case(200, 300, 64), F32))
    expected = library.forward(*tensors, **options)[0]
    moved = [x.to("cuda:1") for x in tensors]
    assert torch.equal(library.forward(*moved, **options)[0].to("cuda:0"), expected)
    with pytest.raises(ValueError, match="key: expected a tensor on a GPU, the same for all; got one on cuda:1"):
        library.forward(tensors[0], *moved[1:], **options)


@pytest.mark.parametrize(
    "flags", ["--gpus 1", "--gpus 4 --transport copy", "--gpus 3 --transport copy --causal --dim 128"]
)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_program(built_folder: Path, flags: str, dtype: str) -> None:
    command = [built_folder / "dist_flash_attn", *f"{flags} --heads 2 --check --json --iters 3 --dtype {dtype}".split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["seq"] == 1024 and found["check"]["multi_error"] <= found["limit"]


def test_more_gpus_than_there_are_is_said(built_folder: Path) -> None:
    present = torch.cuda.device_count()
    command = [built_folder / "dist_flash_attn", "--gpus", str(present + 1)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert f"--gpus: expected at most the {present} here; got {present + 1}. --transport copy" in done.stderr
