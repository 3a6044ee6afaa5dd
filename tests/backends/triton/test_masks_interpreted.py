"""Masks given as intervals in the Triton kernels, under Triton's interpreter: lists of tiles, forward and backward."""

from __future__ import annotations

import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "masks"))

from random_masks import BATCH, HEADS, random_mask
from torch import Tensor

from stream_attention import attention, masks
from stream_attention.backends.installed import interpreting
from stream_attention.base.problem import Inputs, Window, state_problem
from stream_attention.masks.lowering import lowered
from stream_attention_tools.testing import Case, check_case, poisoned_memory
from stream_attention_tools.testing.inputs import INTERVALS

pytestmark = [
    pytest.mark.skipif(not interpreting(), reason="TRITON_INTERPRET=1 is not set: `make test` runs these"),
    pytest.mark.filterwarnings("ignore:divide by zero encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning"),
]


@pytest.mark.parametrize("of_keys", [False, True], ids=["by queries", "by keys"])
@pytest.mark.parametrize("seed", range(30))
def test_a_list_has_the_tiles_that_are_seen_those_in_part_first(seed: int, of_keys: bool) -> None:
    from stream_attention.gpu.bounds import HEADER, list_step

    rng = Random(seed)
    q_len, k_len = rng.choice((1, 20, 65)), rng.choice((1, 33, 100))
    mask = random_mask(rng, q_len, k_len, rng.choice((("keys",), ("queries",), ("labels", "keys"), ("band", "labels"))))
    made = lowered(mask, q_len, k_len, torch.device("cpu"), Window())
    if made.query_bounds is None:
        pytest.skip("a mask of no intervals")
    query, key = torch.zeros(BATCH, q_len, HEADS, 16), torch.zeros(BATCH, k_len, HEADS, 16)
    inputs = Inputs(query, key, key, query_bounds=made.query_bounds, key_bounds=made.key_bounds)
    problem = state_problem(inputs, q_len, k_len, False, (-1, -1), 0.0, 1.0, 0.0, False)
    rows, columns = 16, 32
    with poisoned_memory():
        lists = list_step(problem, inputs, rows, columns, of_keys).run(inputs)
    visible = mask.as_dense(q_len=q_len, k_len=k_len).expand(*made.query_bounds.shape[:2], -1, -1).flatten(0, 1)
    for entry, its in enumerate(lists.tolist()):
        for owner, (partial, seen, *tiles) in enumerate(its):
            assert len(set(tiles[:seen])) == seen and 0 <= partial <= seen <= len(tiles)
            for other in range(len(tiles)):
                m, n = (other, owner) if of_keys else (owner, other)
                tile = visible[entry, m * rows : (m + 1) * rows, n * columns : (n + 1) * columns]
                if other not in tiles[:seen]:
                    assert not tile.any(), "a tile that is seen was left out"
                if other in tiles[partial:seen]:
                    assert tile.all() and tile.shape == (rows, columns), "a tile that is cut counts as whole"
                if tile.all() and tile.shape == (rows, columns):
                    assert other in tiles[partial:seen], "a tile that all see is tested element by element"
    assert HEADER == 2


@pytest.mark.parametrize("intervals", INTERVALS)
@pytest.mark.parametrize("seed", range(5))
def test_intervals_with_every_modifier_and_gradient(intervals: Any, seed: int) -> None:
    rng = Random(seed)
    heads = rng.choice((1, 2))
    case = Case(
        B=rng.choice((1, 2)), Tq=rng.choice((1, 33, 70)), Tk=rng.choice((1, 50, 70)), Hq=heads * rng.choice((1, 3)),
        Hkv=heads, seed=seed, intervals=intervals, causal=rng.random() < 0.4,
        window=rng.choice((None, (20, 3), (-1, 9))), sink=rng.random() < 0.3, softcap=rng.choice((0.0, 2.0)),
        alibi=rng.choice((None, "H")), dropout_p=rng.choice((0.0, 0.3)), lse_grad=rng.random() < 0.5,
    )  # fmt: skip
    if rng.random() < 0.3:
        case = Case(**case.given() | {"mask": (1, 1, case.Tq, case.Tk), "bias": (1, 1, case.Tq, case.Tk)})
    check_case(case, "triton")


def test_what_nobody_sees_may_be_nan() -> None:
    mask = masks.documents(torch.tensor([0] * 20 + [1] * 10 + [2] * 10), torch.tensor([0] * 15 + [3] * 20 + [2] * 9))
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, length, 2, 16, generator=generator) for length in (40, 44, 44)]
    dirty = [t.clone() for t in inputs]
    dirty[0][:, 20:30], dirty[1][:, 15:35], dirty[2][:, 15:35] = torch.nan, torch.nan, torch.inf

    def results(its: list[Tensor]) -> tuple[Tensor, ...]:
        leaves = [t.clone().requires_grad_() for t in its]
        out = attention(*leaves, mask=mask, backend="triton")
        return out, *torch.autograd.grad(out, leaves, torch.ones_like(out))

    for one, other in zip(results(inputs), results(dirty), strict=True):
        torch.testing.assert_close(one, other, atol=0.0, rtol=0.0)
