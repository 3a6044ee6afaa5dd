"""cuda/src/flash_fp32.cu and flash_bf16.cu, run on the CPU by the emulator: their arithmetic, indices and barriers."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from tests.cuda.cuda_library import CudaLibrary, _Problem
from tests.cuda.cuda_tools import BF16, F32, case, expect_within_bounds, inputs

from stream_attention.backends.reference import attention as reference
from stream_attention_tools.testing import Case

Emulated = Callable[..., CudaLibrary]

CASES = {
    "one key": case(1, 1, 32),
    "ragged tiles, two blocks of queries, heads, batch": case(130, 70, 64, B=2, H=2),
    "many tiles of 32 keys": case(20, 130, 128),
    "head dims between the tiles'": case(30, 65, 72),
    "the smallest head dim": case(33, 70, 8),
    "causal, as many queries as keys": case(135, 135, 32, causal=True),
    "causal, more keys: the last query meets the last key": case(70, 200, 64, causal=True),
    "causal, more queries: the first rows see nothing": case(140, 66, 128, causal=True),
    "a scale": case(40, 70, 64, scale=0.5),
}


# Semantics


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_equal_keys_average_the_values(emulated: Emulated, dtype: torch.dtype) -> None:
    key = torch.ones(1, 4, 1, 32, dtype=dtype)
    value = torch.tensor([1.0, 2.0, 3.0, 6.0], dtype=dtype).view(1, 4, 1, 1).expand(1, 4, 1, 32).contiguous()
    out, lse = emulated().forward(key, key, value, causal=True)
    assert out[0, :, 0, 0].tolist() == [1.0, 1.5, 2.0, 3.0]
    assert lse[0, 0, 0].item() == pytest.approx(32**0.5)  # one key, whose score it is


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_rows_that_see_nothing_are_zero(emulated: Emulated, dtype: torch.dtype) -> None:
    x = torch.ones(1, 3, 1, 32, dtype=dtype)
    out, lse = emulated().forward(x, x[:, :1].contiguous(), x[:, :1].contiguous(), causal=True)
    assert out[0, :, 0, 0].tolist() == [0.0, 0.0, 1.0]
    assert lse[0, 0, :2].tolist() == [-torch.inf] * 2


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_scores_that_keep_growing_move_the_maximum(emulated: Emulated, dtype: torch.dtype) -> None:
    # From tile to tile by 4 in base 2 (the bf16 maximum lags) and then by 80 (it must not).
    key = torch.zeros(1, 256, 1, 32, dtype=dtype)
    key[..., 0] = torch.tensor([0.0, 4.0, 8.0, 88.0]).repeat_interleave(64)[None, :, None] / 1.4427
    query, value = torch.zeros(1, 2, 1, 32, dtype=dtype), torch.randn(1, 256, 1, 32).to(dtype)
    query[..., 0] = 1.0
    out, lse = emulated().forward(query, key, value, scale=1.0)
    exact, exact_lse = reference.attention(query, key, value, scale=1.0)
    torch.testing.assert_close(out.double(), exact, rtol=0.0, atol=5e-7 if dtype is F32 else 4e-3)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, 1e30], ids=["nan", "inf", "a score that overflows"])
def test_what_is_no_number_shows_in_lse_too(emulated: Emulated, wrong: float, dtype: torch.dtype) -> None:
    query, key = torch.zeros(1, 3, 1, 32, dtype=dtype), torch.ones(1, 70, 1, 32, dtype=dtype)
    query[:, 1], key[:, 40] = wrong, 1e30 if wrong == 1e30 else 1.0
    out, lse = emulated().forward(query, key, torch.ones_like(key))
    assert out[0, :, 0, 0].isnan().tolist() == lse[0, 0].isnan().tolist() == [False, True, False]
    if wrong != wrong:  # lse of an infinite score is infinite there, and in fp64 nothing overflows
        assert reference.attention(query, key, key)[1][0, 0].isnan().tolist() == [False, True, False]


# Agreement with the reference


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("late", [False, True], ids=["copies at once", "copies late"])
@pytest.mark.parametrize("one", CASES.values(), ids=CASES)
def test_agrees(emulated: Emulated, one: Case, late: bool, dtype: torch.dtype) -> None:
    one = case(one.Tq, one.Tk, one.D, dtype, B=one.B, H=one.Hq, causal=one.causal, scale=one.scale)
    tensors, options = inputs(one)
    expect_within_bounds(one, *emulated(one.Tq, late).forward(*tensors, **options))


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", ["many tiles of 32 keys", "causal, more keys: the last query meets the last key"])
def test_copies_that_nothing_overlaps_change_no_bit(
    emulated: Emulated, single_buffered_folder: Path, name: str, dtype: torch.dtype
) -> None:
    """What `benchmarks.studies.double_buffer` times beside the kernels as they are."""
    one = CASES[name]
    tensors, options = inputs(case(one.Tq, one.Tk, one.D, dtype, causal=one.causal))
    path = single_buffered_folder / "libflash_attn.so"
    ctypes.CDLL(str(path)).emulator_settle(0, True)
    for with_it, without in zip(
        emulated().forward(*tensors, **options), CudaLibrary(path).forward(*tensors, **options), strict=True
    ):
        assert torch.equal(with_it, without)


@pytest.mark.parametrize("one", CASES.values(), ids=CASES)
def test_the_program_s_own_reference_is_ours(emulated: Emulated, one: Case) -> None:
    for dtype in (F32, BF16):
        tensors, options = inputs(case(one.Tq, one.Tk, one.D, dtype, B=one.B, H=one.Hq, causal=one.causal))
        exact, _ = reference.attention(*tensors, causal=one.causal)
        torch.testing.assert_close(emulated().reference(*tensors, **options), exact, rtol=0.0, atol=1e-14)


def test_the_reference_of_some_rows_leaves_the_others(emulated: Emulated) -> None:
    tensors, options = inputs(case(5, 7, 32))
    some = emulated().reference(*tensors, **options, every=2)
    assert some.isnan().all(-1)[0, :, 0].tolist() == [False, True, False, True, False]
    assert torch.equal(some[:, ::2], emulated().reference(*tensors, **options)[:, ::2])


# Refusals

X = torch.ones(1, 2, 1, 32)


@pytest.mark.parametrize(
    ("tensors", "options", "error", "words"),
    [
        ((torch.ones(1, 2, 1, 20),) * 3, {}, ValueError, "dim: expected a multiple of 8 from 8 to 128; got 20"),
        ((torch.ones(1, 2, 1, 136),) * 3, {}, ValueError, "got 136"),
        ((X, torch.ones(1, 0, 1, 32), torch.ones(1, 0, 1, 32)), {}, ValueError, "seq_k: expected 1 to 2"),
        ((X, X, X), {"scale": -1.0}, ValueError, "scale: expected a positive number"),
        ((X, X, X), {"scale": float("nan")}, ValueError, "scale: expected a positive number"),
        (
            (torch.ones(65)[1:].view(1, 2, 1, 32), X, X),
            {},
            ValueError,
            "q: expected an address that is a multiple of 16",
        ),
        ((X.half(),) * 3, {}, TypeError, "query: expected float32 or bfloat16"),
        ((X, X.bfloat16(), X), {}, TypeError, "key: expected float32 or bfloat16, the same for all"),
        ((X, X.expand(1, 2, 2, 32), X), {}, ValueError, "key: expected a contiguous"),
        ((X, torch.ones(1, 2, 2, 32), torch.ones(1, 2, 2, 32)), {}, ValueError, "key, value: expected"),
        ((X, X.to("meta"), X), {}, ValueError, "key: expected a tensor on the CPU; got one on meta"),
    ],
)
def test_refused(emulated: Emulated, tensors: tuple, options: dict, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        emulated().forward(*tensors, **options)


@pytest.mark.parametrize("which", range(4))
def test_null_is_refused(emulator: ctypes.CDLL, which: int) -> None:
    problem = ctypes.byref(_Problem(1, 1, 2, 2, 32, 0, 0.0, 0))
    address = ctypes.c_void_p(X.data_ptr())
    tensors = [None if i == which else address for i in range(4)]
    for status in (
        emulator.flash_attn_forward(problem, *tensors, None, None),
        emulator.flash_attn_reference(problem, *tensors[:3], 1, tensors[3]),
    ):
        assert status == 1
        assert (
            emulator.flash_attn_last_error().decode()
            == f"{('q', 'k', 'v', 'out')[which]}: expected an address; got NULL."
        )
    for status in (
        emulator.flash_attn_forward(None, *[address] * 4, None, None),
        emulator.flash_attn_reference(None, *[address] * 3, 1, address),
    ):
        assert status == 1 and emulator.flash_attn_last_error() == b"problem: expected an address; got NULL."


def test_sizes_whose_bytes_64_bits_do_not_count_are_refused(emulator: ctypes.CDLL) -> None:
    problem = _Problem(65535, 65535, 1 << 30, 1, 128, 0, 0.0, 0)
    address = ctypes.c_void_p(X.data_ptr())
    assert emulator.flash_attn_forward(ctypes.byref(problem), *[address] * 4, None, None) == 1
    assert emulator.flash_attn_last_error().startswith(b"batch * heads * seq: expected at most 2^50; got")


CHIPS = {  # sm, what its code is compiled for, KB of shared memory per block
    "sm_75": (75, 75, 64),
    "sm_80": (80, 80, 163),
    "sm_89": (89, 80, 99),
    "code for sm_75 on sm_90": (90, 75, 227),
    "no code": (70, 0, 96),
}


@pytest.mark.parametrize(
    ("chip", "dtype", "D", "words"),
    [
        ("sm_75", F32, 32, None),
        ("sm_75", F32, 64, r"expected 96 KB of shared memory for a block .*; got 64 KB \(sm_75\)"),
        ("sm_75", BF16, 32, "dtype: bf16 expects a build for sm_80 or later; got sm_75 code on sm_75"),
        ("code for sm_75 on sm_90", BF16, 32, "got sm_75 code on sm_90"),
        ("code for sm_75 on sm_90", F32, 128, None),
        ("sm_80", F32, 128, None),
        ("sm_89", F32, 64, None),
        ("sm_89", F32, 72, r"device: expected 112 KB of shared memory .*; got 99 KB \(sm_89\)"),
        ("sm_89", BF16, 128, None),
        ("no code", F32, 32, "device: expected a chip that this was built for; got sm_70"),
    ],
)
def test_chips(
    emulated: Emulated, emulator: ctypes.CDLL, chip: str, dtype: torch.dtype, D: int, words: str | None
) -> None:
    version, code, kilobytes = CHIPS[chip]
    emulator.emulator_chip(version, code, kilobytes << 10)
    x = torch.ones(1, 2, 1, D, dtype=dtype)

    def ring() -> torch.Tensor:
        with emulated().group(x, x, x, ranks=2) as group:
            return group.forward()[0]

    for call in (lambda: emulated().forward(x, x, x)[0], ring):
        with ThreadPoolExecutor(1) as thread:  # that has not looked at the GPU yet
            if words is None:
                assert torch.equal(thread.submit(call).result(), x)
            else:
                with pytest.raises(ValueError, match=words):
                    thread.submit(call).result()
