"""Rows of a pack behind its last sequence, under Triton's interpreter: cleared by small kernels beside the Hopper ones.

The portable kernels clear these rows themselves: tests/backends/triton/test_*_interpreted.py.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from stream_attention.backends.installed import interpreting
from stream_attention.base.problem import Inputs, Problem, state_problem

pytestmark = pytest.mark.skipif(not interpreting(), reason="TRITON_INTERPRET=1 is not set: `make test` runs these")

NAN = float("nan")
PACKS = {
    "no tail": ((3, 0, 5), 8),
    "one row": ((3, 0, 5), 9),
    "more than a block": ((70, 1), 300),
    "no sequence has rows": ((0, 0), 20),
    "offsets beyond the pack": ((9, 9), 12),
}


def packed(lengths: tuple[int, ...], rows: int, dtype: torch.dtype, heads: int = 3, dim: int = 40) -> Inputs:
    query, key, value = (torch.randn(rows, count, dim, dtype=dtype) for count in (heads, 1, 1))
    offsets = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32 if dtype is torch.float16 else torch.int64)
    return Inputs(query, key, value, cu_seqlens_q=offsets, cu_seqlens_k=offsets.clone())


def problem_of(inputs: Inputs, longest: int) -> Problem:
    return state_problem(
        inputs, q_len=longest, k_len=longest, causal=True, window=(-1, -1), softcap=0.0, scale=0.3, dropout_p=0.0,
        deterministic=False,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", PACKS)
def test_what_starts_a_packed_forward(name: str, dtype: torch.dtype) -> None:
    """Only the tail is written; the counter of tiles is 0; without an LSE none is written."""
    from stream_attention.gpu.tail import bind_start, resized_start
    from stream_attention.gpu.tile_list import most_tiles, words_of

    lengths, rows = PACKS[name]
    inputs = packed(lengths, rows, dtype)
    out, lse = torch.full((rows, 3, 40), NAN, dtype=dtype), torch.full((3, rows), NAN)
    tiles = torch.full((words_of(most_tiles(rows + 5, len(lengths), 128)),), 7, dtype=torch.int32)
    problem, ends = problem_of(inputs, max(lengths)), inputs[8:10]
    launch = bind_start(problem, inputs, 128, out, lse, tiles)
    launch(*ends, out, lse, tiles)
    tail = min(sum(lengths), rows)
    assert out[:tail].isnan().all() and (out[tail:] == 0).all()
    assert lse[:, :tail].isnan().all() and (lse[:, tail:] == -torch.inf).all()
    assert tiles[0] == 0
    for t in (out, lse):
        t.fill_(NAN)
    launch.replaced("write_lse", 0)(*ends, out, lse, tiles)
    assert (out[tail:] == 0).all() and lse.isnan().all()
    more = torch.full((rows + 5, 3, 40), NAN, dtype=dtype), torch.full((3, rows + 5), NAN)
    resized = resized_start(launch, problem, 128, rows + 5, rows + 5)
    assert resized is not None
    resized(*ends, *more, tiles)
    tail = min(sum(lengths), rows + 5)
    assert (more[0][tail:] == 0).all() and (more[1][:, tail:] == -torch.inf).all()
    assert more[0][:tail].isnan().all() and more[1][:, :tail].isnan().all()


@pytest.mark.parametrize("name", [name for name in PACKS if name != "offsets beyond the pack"])
def test_what_starts_a_packed_backward(name: str) -> None:
    """Gradients are cleared in the tail alone, and rows hold the LSE and dO . O of each sequence."""
    from stream_attention.backends.hopper.backward_rows import BackwardCall, bind_rows, most_of_pack
    from stream_attention.backends.hopper.tuning import BACKWARD_D64
    from stream_attention.base.state import Saved
    from stream_attention.gpu.prepass import Prepass
    from stream_attention.gpu.rows import Rows
    from stream_attention.gpu.tile_list import words_of

    lengths, rows = PACKS[name]
    inputs = packed(lengths, rows, torch.float16)
    problem = problem_of(inputs, max(max(lengths), 1))
    out, grad_out = torch.randn(2, rows, 3, 40, dtype=torch.float16)
    lse = torch.randn(3, rows)
    samples = Rows.samples(problem, inputs.query)
    found = Rows(*(torch.full(t.shape, NAN) for t in samples))
    padded = found.lse.shape[-1]
    scratch = torch.full((3 * padded * 64,), NAN)
    counts = torch.full((scratch.numel() // 64**2,), 9, dtype=torch.int32)
    counter = torch.full((2,), 9, dtype=torch.int32)
    most = most_of_pack(problem.batch, BACKWARD_D64.block_m, rows, rows)
    lists = [torch.zeros(words_of(tiles), dtype=torch.int32) for tiles in most]
    grads = [torch.full_like(t, NAN) for t in inputs[:3]]
    saved, workspace = Saved(out, lse, grad_out, None), (scratch, counts, counter, *lists)
    share = range(problem.batch * problem.kv_heads), 132
    call = BackwardCall.of(problem, inputs, BACKWARD_D64, Prepass.of(problem, inputs), saved)
    launch = bind_rows(call._replace(rows=found, workspace=workspace, grads=grads, saved=saved), *share)
    launch(out, grad_out, lse, None, inputs.cu_seqlens_q, inputs.cu_seqlens_k, *found, *workspace, *grads)
    for grad in grads:
        assert grad[: sum(lengths)].isnan().all() and (grad[sum(lengths) :] == 0).all()
    assert counter.tolist() == [-132, -132]
    assert [int(one[1]) for one in lists] == [sum(length > 0 for length in lengths)] * 2
    first = 0
    for sequence, length in enumerate(lengths):
        at = (first + 128 * sequence) // 128 * 128
        own = slice(first, first + length)
        _same(found.lse[:, at : at + length], lse[:, own] * math.log2(math.e))
        _same(found.delta[:, at : at + length], (out[own].float() * grad_out[own].float()).sum(-1).T)
        first += length


def _same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_rows_of_a_sequence_that_no_tile_covers() -> None:
    """Where a caller said that the longest sequence is shorter than it is."""
    from stream_attention.gpu.tail import resized_start

    lengths = (5, 0, 9, 3)
    inputs = packed(lengths, 20, torch.float16)
    out, lse, tiles = results(inputs)
    launch = started(inputs, 4, 4, out, lse, tiles)
    cleared = [4, *range(9, 14), *range(17, 20)]
    assert [row for row in range(20) if not out[row].any()] == cleared
    assert [row for row in range(20) if (lse[:, row] == -torch.inf).all()] == cleared
    resized = resized_start(launch, problem_of(inputs, 16), 4, 20, 20)
    assert resized is not None
    out.fill_(NAN)
    resized(*inputs[8:10], out, lse, tiles)
    assert [row for row in range(20) if not out[row].any()] == [17, 18, 19]


def results(inputs: Inputs, tile: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for out and the LSE, full of NaN, and for a list of tiles."""
    from stream_attention.gpu.tile_list import most_tiles, words_of

    rows, heads, _ = inputs.query.shape
    words = words_of(most_tiles(rows, inputs.cu_seqlens_q.numel() - 1, tile))
    return torch.full_like(inputs.query, NAN), torch.full((heads, rows), NAN), torch.zeros(words, dtype=torch.int32)


def started(inputs: Inputs, longest: int, tile: int, *written: Tensor) -> Any:
    """The launch before a forward, after it ran."""
    from stream_attention.gpu.tail import bind_start

    launch = bind_start(problem_of(inputs, longest), inputs, tile, *written)
    launch(*inputs[8:10], *written)
    return launch


def test_programs_beyond_those_that_clear_do_nothing() -> None:
    """A launch may have millions: the products of their numbers would not fit 32 bits."""
    from stream_attention.gpu.launch import Sizes
    from stream_attention.gpu.tail import PROGRAMS

    inputs = packed((1, 2), 3 * PROGRAMS, torch.float16)
    out, lse, tiles = results(inputs)
    launch = started(inputs, 2, 4, out, lse, tiles)
    for t in (out, lse):
        t.fill_(NAN)
    many = launch.resized(PROGRAMS + 3, Sizes("rows", (3 * PROGRAMS,), {}, {}))
    assert many is not None
    many(*inputs[8:10], out, lse, tiles)
    assert out[:3].isnan().all() and (out[3:] == 0).all() and (lse[:, 3:] == -torch.inf).all()


def test_rows_before_the_first_sequence_are_cleared() -> None:
    """Offsets that do not begin at 0 are refused on a CPU; on a GPU nobody looks."""
    inputs = packed((1, 2), 9, torch.float16)._replace(cu_seqlens_q=torch.tensor([2, 5, 6]))
    out, lse, tiles = results(inputs)
    started(inputs, 3, 4, out, lse, tiles)
    assert [row for row in range(9) if not out[row].any()] == [0, 1, 6, 7, 8]


def test_rows_behind_more_elements_than_32_bits_are_cleared() -> None:
    rows, heads, dim = (1 << 16) + 1, 128, 256
    ends = torch.tensor([0, rows - 1], dtype=torch.int32)
    # Memory that nobody touches takes no room, and of out and lse only the last row is touched.
    query, key = (torch.empty(rows, count, dim, dtype=torch.float16) for count in (heads, 1))
    out, lse, tiles = torch.empty_like(query), torch.empty(heads, rows), torch.zeros(1 << 16, dtype=torch.int32)
    out[-1], lse[:, -1] = NAN, NAN
    started(Inputs(query, key, key, cu_seqlens_q=ends, cu_seqlens_k=ends.clone()), rows, 1 << 14, out, lse, tiles)
    assert not out[-1].any() and (lse[:, -1] == -torch.inf).all()
