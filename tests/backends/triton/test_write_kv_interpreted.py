"""The kernel that writes tokens to slots, in Triton's interpreter: each call against a loop over its tokens."""

from __future__ import annotations

import os
import random

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip(
        "set TRITON_INTERPRET=1; make test does, in a process of its own, since triton.jit chooses at decoration",
        allow_module_level=True,
    )
pytest.importorskip("triton")

from write_kv_cases import BF16, E4M3, F16, F32, ORDERS, Case, check, draw_case, filled, in_one

from stream_attention.gpu import write_kv as module
from stream_attention.ops.write_kv import _has_kernel

pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("tile", [module.TILE, 64], ids=["as it is", "small tiles"])
def test_random_calls(tile: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TILE", tile)
    draw = random.Random(f"{seed} {tile}")
    for _ in range(5):
        check(draw_case(draw))


@pytest.mark.parametrize("stored", [BF16, E4M3], ids=str)
@pytest.mark.parametrize("order", ORDERS)
def test_layouts_of_vllm(order: str, stored: torch.dtype) -> None:
    for page in (1, 16, 256):
        stores = in_one(order, {"L": 3, "B": 5, "H": 2, "N": page}, (64, 64), stored)
        slots = torch.tensor([5 * page - 1, -1, 0, page, 5 * page])
        check(Case(*filled((2, 9, 2, 64), BF16), *stores, slots))


def test_every_number_in_e4m3() -> None:
    """As torch has it, which test_write_kv.py compares with the nearest of all codes."""
    numbers = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(-1, 8, 128)
    for dtype in (BF16, F16):
        new = numbers.view(dtype)
        for scale in (None, 0.3, torch.rand(8) + 0.1):
            stores = [filled((len(new), 8, 128), E4M3, seed) for seed in range(2)]
            check(Case(new, new, *stores, torch.randperm(len(new)), scale, 7.0))


def test_what_the_kernel_is_not_for() -> None:
    new, stores, slots = filled((2, 3, 2, 8), F32), filled((2, 4, 4, 2, 8), F32), torch.arange(3)
    assert _has_kernel((*new, *stores, slots, None, None))
    assert not _has_kernel((*new.double(), *stores.double(), slots, None, None))
    assert not _has_kernel((torch._neg_view(new[0]), new[1], *stores, slots, None, None))
