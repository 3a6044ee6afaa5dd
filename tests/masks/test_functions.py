"""from_function, from_block_mask: what a function says, in the form that says it in the least memory."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from tests.masks.named_masks import CASES, Call, dense_of, natten
from tests.masks.random_masks import BATCH, HEADS, random_mask, whole
from tests.masks.test_tile_states import states_of
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask, noop_mask

from stream_attention.masks import Mask, from_block_mask, from_function, functions, tiles


def sizes_of(dense: Tensor) -> dict[str, int]:
    return dict(zip(("batch", "heads", "q_len", "k_len"), dense.shape, strict=True))


def form(mask: Mask) -> str:
    names = {name for name, _ in mask.tensors()}
    return "dense" if "dense" in names else "query" if names & {"query_start", "query_end"} else "key"


# Named masks

CALLS = [Call(1, 1), Call(100, 100), Call(128, 128), Call(129, 129), Call(1025, 1025), Call(65, 129), Call(129, 65)]


@pytest.mark.parametrize("call", CALLS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_a_named_mask_is_its_formula(name: str, call: Call) -> None:
    case = CASES[name]
    if case.square and call.q_len != call.k_len:
        call = Call(call.q_len, call.q_len)
    expected = dense_of(case, call)
    made = from_function(case.formula(call), case.batch, case.heads, *call)
    assert torch.equal(made.as_dense(**sizes_of(expected)), expected)
    assert case.found in ("", form(made))
    exact = states_of(expected, 16, 32)
    for mask in [made] if case.built is None else [made, case.built(call)]:
        assert torch.equal(mask.as_dense(**sizes_of(expected)), expected), mask
        found = tiles(mask, *call, 16, 32, *expected.shape[:2])
        assert bool(((found == exact) | (found == 1)).all())


# What it is recognised as


def test_an_interval_of_queries_is_found_where_keys_are_none() -> None:
    """Each key is seen for a time; the keys of a query have gaps."""
    mask = from_function(CASES["queries per key, to an end"].formula(Call(40, 40)), None, None, 40, 40)
    assert form(mask) == "query" and mask.sizes == (None, None, 40, 40)
    flamingo = from_function(lambda b, h, i, j: (i >= SPANS[j // 10][0]) & (i < SPANS[j // 10][1]), 1, 1, 64, 40)
    assert form(flamingo) == "query"


SPANS = torch.tensor([[0, 30], [40, 64], [10, 20], [0, 64]])


def test_bounds_that_mask_nothing_are_left_out() -> None:
    mask = from_function(lambda b, h, i, j: i >= j, None, None, 8, 8)
    assert mask.key_start is None and mask.key_end is not None
    mask = from_function(lambda b, h, i, j: i <= j, None, None, 8, 8)
    assert mask.key_end is None and mask.key_start is not None
    assert from_function(noop_mask, 2, 2, 8, 9) == Mask(q_len=8, k_len=9)


def test_dims_that_do_not_matter_are_1() -> None:
    lengths = torch.tensor([3, 3, 3])
    by_reading = from_function(lambda b, h, i, j: i >= j, 7, 64, 8, 8)
    by_values = from_function(lambda b, h, i, j: j < lengths[b] + 0 * h, 3, 4, 8, 8)
    assert by_reading.sizes[:2] == by_values.sizes[:2] == (None, None)
    per_head = from_function(lambda b, h, i, j: i - j >= h, 3, 4, 8, 8)
    assert per_head.sizes == (None, 4, 8, 8) and per_head.key_end is not None and per_head.key_end.shape == (1, 4, 8)


@pytest.mark.parametrize(
    "name", ["2, 3 causal", "23 checkerboard", "queries per key, to an end", "8 prefix LM of each entry"]
)
def test_strips_of_any_size_give_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, call = CASES[name], Call(30, 40)
    at_once = from_function(case.formula(call), case.batch, case.heads, *call)
    for strip in (1, 100, 999):
        monkeypatch.setattr(functions, "STRIP", strip)
        made = from_function(case.formula(call), case.batch, case.heads, *call)
        assert torch.equal(made.as_dense(), dense_of(case, call)) and form(made) == form(at_once)


def test_the_function_never_sees_more_than_a_strip(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    evaluated = functions._Evaluated.rows

    def counted(self: Any, first: int, last: int) -> Tensor:
        found = evaluated(self, first, last)
        rows.append(found.numel())
        return found

    monkeypatch.setattr(functions._Evaluated, "rows", counted)
    monkeypatch.setattr(functions, "STRIP", 4096)
    from_function(lambda b, h, i, j: (i + j + b + h) % 2 == 0, 2, 4, 200, 128)
    assert max(rows) <= 4096 and len(rows) > 50


def test_lengths_of_0_are_masks_too() -> None:
    for sizes in ((0, 3), (3, 0), (0, 0)):
        mask = from_function(lambda b, h, i, j: i >= j, 2, 2, *sizes)
        assert mask.as_dense().shape == (1, 1, *sizes)


def test_the_mask_fits_no_other_sizes() -> None:
    mask = from_function(lambda b, h, i, j: i >= j, None, None, 8, 8)
    for sizes in ({"q_len": 9}, {"k_len": 16}):
        with pytest.raises(ValueError, match="as the call has; got 8"):
            mask.check(**sizes)


@pytest.mark.parametrize("part", ["keys", "queries", "labels", "dense"])
def test_random_masks_are_recognised(part: str) -> None:
    random = Random(7)
    allowed = {"keys": {"key"}, "queries": {"key", "query"}}.get(part, {"key", "query", "dense"})
    for _ in range(40):
        dense = whole(random_mask(random, 6, 7, (part,)), 6, 7)
        made = from_function(lambda b, h, i, j, dense=dense: dense[b, h, i, j], BATCH, HEADS, 6, 7)
        assert torch.equal(made.as_dense(batch=BATCH, heads=HEADS), dense) and form(made) in allowed


# Functions as people write them for FlexAttention


def gym_masks() -> dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]]:
    """A mask of each kind that attention-gym has, for 64 tokens, 2 batch entries and 2 heads."""
    offsets = torch.tensor([0, 10, 11, 40, 64])
    ids = torch.repeat_interleave(torch.arange(4), offsets.diff())
    prefix_of = torch.tensor([0, 0, 0, 2])
    is_global = torch.arange(64) % 17 == 3
    chosen = torch.tensor([[[[0, 3], [1, 2], [0, 1], [2, 3]], [[1, 1], [0, 3], [2, 0], [3, 1]]]]).expand(2, -1, -1, -1)
    filled = torch.tensor([16, 9, 16, 4])
    tree = torch.tril(torch.ones(48, 48, dtype=torch.bool)) & (torch.arange(48) % 3 != 1)

    def inner_causal(b: Any, h: Any, i: Any, j: Any) -> Any:
        return i >= j

    def of_documents(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (ids[i] == ids[j]) & inner_causal(b, h, i - offsets[ids[i]], j - offsets[ids[j]])

    def shared_prefix(b: Any, h: Any, i: Any, j: Any) -> Any:
        own = (j >= offsets[ids[i]]) & (j <= i)
        return own | (ids[j] == prefix_of[ids[i]])

    def tile_window(i: Any, j: Any) -> Any:
        """Tiles of 4 x 2 on a canvas of 8 x 8, those at most one away from a tile that is moved inside."""
        x, y = (i % 8 // 4).clamp(1, 1), (i // 8 // 2).clamp(1, 2)
        return (abs(x - j % 8 // 4) <= 1) & (abs(y - j // 8 // 2) <= 1)

    def by_tiles(index: Any) -> Any:
        """The place on a canvas of 8 x 8 of tokens that lie tile by tile, 4 x 4 each."""
        tile, inner = index // 16, index % 16
        return (tile // 2 * 4 + inner // 4) * 8 + tile % 2 * 4 + inner % 4

    def box_of_tiles(i: Any, j: Any) -> Any:
        """A canvas of 4 x 4 x 4 in tiles of 2 x 2 x 1: the tiles of the own column, at most one layer away."""
        same = (i // 2 % 2 == j // 2 % 2) & (i // 8 % 2 == j // 8 % 2)
        return same & (abs((i // 16).clamp(1, 2) - j // 16) <= 1)

    return {
        "dilated": lambda b, h, i, j: (abs(i - j) <= 12) & (abs(i - j) % 4 == 0),
        "document": of_documents,
        "packed causal": lambda b, h, i, j: (offsets[ids[i]] <= j) & (j <= i),
        "shared prefix": shared_prefix,
        "batchify": lambda b, h, i, j: (i // 16 == j // 16) & inner_causal(b, h, i % 16, j % 16),
        "global": lambda b, h, i, j: (abs(i - j) <= 3) | is_global[i] | is_global[j],
        "flamingo": lambda b, h, i, j: (SPANS[j // 16][0] <= i) & (i < SPANS[j // 16][1]),
        "natten": lambda b, h, i, j: natten(i, j, 8, 8, 2, 1),
        "sta with text": lambda b, h, i, j: torch.where((i < 48) & (j < 48), tile_window(i, j), True),
        "svg temporal": lambda b, h, i, j: (i < 4) | (j < 4) | (abs((i - 4) % 12 - (j - 4) % 12) < 2),
        "svg spatial": lambda b, h, i, j: (i < 4) | (j < 16) | (abs(i - j) < 6),
        "tiled natten": lambda b, h, i, j: natten(by_tiles(i), by_tiles(j), 8, 8, 2, 1),
        "sta in three dims": lambda b, h, i, j: box_of_tiles(i, j),
        "jetspec training": lambda b, h, i, j: (
            (j < 16) & (i < 16) & (j <= i)
            | ((j < 16) & (i >= 16))
            | ((i >= 16) & (j >= 16) & ((i - 16) // 8 == (j - 16) // 8) & ((j - 16) % 8 <= (i - 16) % 8))
        ),
        "jetspec tree": lambda b, h, i, j: (j < 16) | tree[i.clamp(max=47), (j - 16).clamp(min=0)],
        "vsa": lambda b, h, i, j: (chosen[b, h, i // 16] == j // 16).any() & (j % 16 < filled[j // 16]),
        "by head and entry": lambda b, h, i, j: (i + b >= j) & ((h == 0) | (j % 2 == 0)),
    }


@pytest.mark.parametrize("name", gym_masks())
def test_a_function_means_what_it_means_to_flex_attention(name: str) -> None:
    function = gym_masks()[name]
    made = from_function(function, 2, 2, 64, 64)
    assert torch.equal(made.as_dense(batch=2, heads=2), create_mask(function, 2, 2, 64, 64, device="cpu"))


def test_tables_are_read_by_numbers_and_tensors() -> None:
    """`table[1, q_idx]` and `table[b][q_idx]`; a tensor of no dimension gathers, as in FlexAttention."""
    lines = torch.tensor([[0, 1, 2], [1, 0, 1]])
    for function in (lambda b, h, i, j: lines[1, i] == lines[b][j], lambda b, h, i, j: lines[-1][i] == lines[b, j]):
        assert torch.equal(from_function(function, 2, 1, 3, 3).as_dense()[:, 0], lines[1][:, None] == lines[:, None])


# BlockMask


@pytest.mark.parametrize("lengths", [(128, 128), (100, 130)])
def test_a_block_mask_is_its_function(lengths: tuple[int, int]) -> None:
    for function in (gym_masks()["dilated"], lambda b, h, i, j: (i >= j) & (j % (h + 2) == 0)):
        made = from_block_mask(create_block_mask(function, 2, 3, *lengths, device="cpu", BLOCK_SIZE=32))
        assert torch.equal(made.as_dense(batch=2, heads=3), create_mask(function, 2, 3, *lengths, device="cpu"))


def test_the_lists_of_a_block_mask_mask_too() -> None:
    counts, indices = torch.tensor([[[1, 2]]]).int(), torch.tensor([[[[1, 0], [0, 1]]]]).int()
    full = torch.tensor([[[1, 0]]]).int(), torch.tensor([[[[0, 1], [0, 1]]]]).int()
    lists = BlockMask.from_kv_blocks(counts, indices, *full, 4, lambda b, h, i, j: i % 4 >= j % 4)
    expected = torch.cat(
        [torch.cat([torch.ones(4, 4), torch.ones(4, 4).tril()], 1), torch.ones(4, 4).tril().repeat(1, 2)]
    )
    assert torch.equal(from_block_mask(lists).as_dense()[0, 0], expected.bool())
    no_function = BlockMask.from_kv_blocks(counts[..., :1], indices[:, :, :1], BLOCK_SIZE=4, mask_mod=noop_mask)
    assert from_block_mask(no_function).as_dense()[0, 0].int().tolist() == [[0, 0, 0, 0, 1, 1, 1, 1]] * 4


# Refusals


def branches(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return q_idx >= kv_idx if q_idx > 3 else kv_idx == 0


@pytest.mark.parametrize(
    ("function", "error", "said"),
    [
        (branches, ValueError, "branches: expected torch operations on its arguments; got a branch on them, or an int"),
        (lambda b, h, i, j: int(i) > j, ValueError, "Write & and | for and and or, torch.where for if"),
        (lambda b, h, i, j: torch.rand(()) > 0.5, ValueError, "one that draws random numbers. Draw them before"),
        (lambda b, h, i, j: True, TypeError, "expected a bool tensor returned; got bool. A constant is b.new_ones(("),
        (lambda b, h, i, j: i - j, TypeError, "expected dtype torch.bool returned (True = attend); got torch.int32"),
        (
            lambda b, h, i, j: torch.ones(3) > i,
            ValueError,
            "expected a tensor of no dimension returned; got [3]",
        ),
        (lambda s, b, h, i, j: s, TypeError, "got <lambda>(s, b, h, i, j). A score_mod is no mask"),
        (lambda i, j: i >= j, TypeError, "expected a function (b, h, q_idx, kv_idx); got <lambda>(i, j)"),
        (3, TypeError, "mask_mod: expected a function (b, h, q_idx, kv_idx); got int"),
    ],
)
def test_a_function_that_is_no_mask_is_refused(function: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error) as caught:
        from_function(function, 2, 2, 8, 8)
    assert said in str(caught.value)


def test_an_error_of_the_function_is_its_own() -> None:
    ids = torch.zeros(4, dtype=torch.int64)
    with pytest.raises(IndexError, match="out of bounds"):
        from_function(lambda b, h, i, j: ids[i] == 0, 1, 1, 8, 8)
    with pytest.raises(ZeroDivisionError):
        from_function(lambda b, h, i, j: 1 // 0, 1, 1, 8, 8)


@pytest.mark.parametrize(
    ("sizes", "error", "said"),
    [
        ((0, 1, 8, 8), ValueError, "batch: expected at least 1; got 0"),
        ((1, 2.0, 8, 8), TypeError, "heads: expected an int; got 2.0"),
        ((1, 1, -1, 8), ValueError, "q_len: expected at least 0; got -1"),
    ],
)
def test_sizes_that_are_none_are_refused(sizes: tuple[Any, ...], error: type[Exception], said: str) -> None:
    with pytest.raises(error) as caught:
        from_function(lambda b, h, i, j: i >= j, *sizes)
    assert said in str(caught.value)


def test_what_is_no_block_mask_is_refused() -> None:
    with pytest.raises(TypeError, match="block_mask: expected a BlockMask of FlexAttention; got function"):
        from_block_mask(branches)
