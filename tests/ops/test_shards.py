"""Shards of a call are prepared once: what is kept computes what a call prepared anew does, and keeps no tensor."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from stream_attention.base.problem import Inputs, Positions, Wanted
from stream_attention.dispatch import launch_cache
from stream_attention.distributed import VirtualRanks, ring_attention, shard_sequence
from stream_attention.ops import shards
from stream_attention.ops.shards import backward_step, forward_into

HOW: dict[str, Any] = {"causal": False, "window": (-1, -1), "softcap": 0.0, "scale": 0.1, "dropout_p": 0.0}
HOW |= {"deterministic": False, "q_len": 0, "k_len": 0, "positions": Positions()}
CAUSAL = HOW | {"window": (-1, 0), "positions": Positions(q_start=64)}


@pytest.fixture(autouse=True)
def nothing_is_kept() -> Iterator[None]:
    launch_cache.clear()
    yield
    launch_cache.clear()


@pytest.fixture
def preparations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is prepared, one entry each."""
    found: list[str] = []

    def counted(name: str) -> Callable[..., Any]:
        prepare = getattr(shards, name)

        def counts(*arguments: Any) -> Any:
            found.append(name)
            return prepare(*arguments)

        return counts

    for name in ("_prepare_into", "prepare_backward"):
        monkeypatch.setattr(shards, name, counted(name))
    return found


def shard(dtype: torch.dtype = torch.float32, length: int = 64) -> Inputs:
    return Inputs(*torch.randn(3, 1, length, 2, 64, dtype=dtype))


def state(inputs: Inputs) -> tuple[Tensor, Tensor]:
    batch, rows, heads, dim = inputs.query.shape
    return torch.randn(batch, rows, heads, dim), torch.randn(batch, heads, rows)


@pytest.mark.parametrize("rotate", ["p2p", "alltoall"])
def test_a_ring_prepares_a_step_once(rotate: Any, preparations: list[str]) -> None:
    """Four ranks take four steps each. Those after the first merge into a state, and all are alike but for that."""
    group = VirtualRanks(4)

    def layer() -> None:
        whole = (torch.randn(1, 128, 2, 64).requires_grad_() for _ in range(3))
        outs = ring_attention(*(shard_sequence(x, group=group) for x in whole), group=group, rotate=rotate)
        torch.cat(outs, 1).sum().backward()

    layer()
    assert sorted(preparations) == ["_prepare_into", "_prepare_into", "prepare_backward"]
    layer()
    assert len(preparations) == 3


def test_a_causal_ring_prepares_what_differs(preparations: list[str]) -> None:
    """The step on the diagonal masks; of the others all keys are visible, wherever they stand."""
    group = VirtualRanks(4)
    pieces = [shard_sequence(x, group=group) for x in torch.randn(3, 1, 128, 2, 64)]
    ring_attention(*pieces, group=group, causal=True)
    assert len(preparations) == 2
    ring_attention(*pieces, group=group, causal=True, scale=0.5)
    assert len(preparations) == 4


@pytest.mark.parametrize("resumes", [False, True])
@pytest.mark.parametrize("how", [HOW, CAUSAL], ids=["all", "causal"])
def test_what_is_kept_computes_what_is_prepared_anew(how: dict[str, Any], resumes: bool) -> None:
    forward_into(inputs := shard(), *state(inputs), resumes=resumes, **how)
    inputs, (out, lse) = shard(), state(inputs)
    fresh = out.clone(), lse.clone()
    forward_into(inputs, out, lse, resumes=resumes, **how)
    launch_cache.clear()
    forward_into(inputs, *fresh, resumes=resumes, **how)
    assert torch.equal(out, fresh[0]) and torch.equal(lse, fresh[1])


def test_rows_that_lie_otherwise_are_prepared_anew(preparations: list[str]) -> None:
    inputs = shard()
    out, lse = (torch.zeros(1, 80, 2, 64), torch.zeros(1, 2, 80))
    forward_into(inputs, out[:, :64], lse[..., :64], resumes=False, **HOW)
    forward_into(inputs, out[:, 16:], lse[..., 16:], resumes=False, **HOW)
    assert len(preparations) == 1, "adjacent rows lie alike"
    forward_into(inputs, *state(inputs), resumes=False, **HOW)
    forward_into(shard(torch.float64), *(t.double() for t in state(inputs)), resumes=False, **HOW)
    forward_into(shard(length=32), *state(shard(length=32)), resumes=False, **HOW)
    assert len(preparations) == 4


def test_a_step_keeps_no_tensor() -> None:
    inputs = shard()
    (out, lse), grad = state(inputs), torch.randn(1, 64, 2, 64)
    forward_into(inputs, out, lse, resumes=True, **HOW)
    backward_step(inputs, out, lse, grad, None, wanted=Wanted(), **HOW)
    assert launch_cache.size() == 2
    kept = [weakref.ref(t) for t in (*inputs[:3], out, lse, grad)]
    del inputs, out, lse, grad
    gc.collect()
    assert not any(one() is not None for one in kept)


def test_without_the_cache_every_step_is_prepared(preparations: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_cache, "ENABLED", False)
    for _ in range(3):
        forward_into(inputs := shard(), *state(inputs), resumes=False, **HOW)
    assert len(preparations) == 3 and launch_cache.size() == 0


def test_a_step_is_compared_with_one_prepared_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_cache, "COMPARE", True)
    inputs = shard()
    out, lse = torch.zeros(1, 80, 2, 64), torch.zeros(1, 2, 80)  # the state's rows are some of these
    for resumes in (False, True, True):
        forward_into(inputs, out[:, 8:72], lse[..., 8:72], resumes=resumes, **HOW)
    assert not out[:, :8].any() and not out[:, 72:].any()
    out, lse = state(inputs)
    for _ in range(2):
        backward_step(inputs, out, lse, torch.randn(1, 64, 2, 64), None, wanted=Wanted(), **HOW)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter has no driver")
@pytest.mark.parametrize("forced", ["gluon", "triton"])
@pytest.mark.parametrize("resumes", [False, True])
def test_a_kept_step_hands_the_driver_what_one_prepared_anew_does(
    forced: str, resumes: bool, hopper_triton: None
) -> None:
    pytest.importorskip("triton")
    from pretend_gpu import pretend_gpu

    with pretend_gpu() as launches:
        for how in (HOW, CAUSAL):
            tried = []
            for repeat in range(3):
                if repeat == 2:
                    launch_cache.clear()
                inputs, grad = shard(torch.bfloat16, 256), torch.zeros(1, 256, 2, 64, dtype=torch.bfloat16)
                out, lse = state(inputs)
                forward_into(inputs, out, lse, resumes=resumes, backend=forced, **how)
                written_in_place = out.data_ptr() in launches[-1].addresses
                assert inputs.query.data_ptr() in launches[0].addresses
                assert written_in_place == (forced == "gluon"), "the Triton kernel's state is merged after"
                backward_step(inputs, out.bfloat16(), lse, grad, None, wanted=Wanted(), backend=forced, **how)
                tried.append(launches[:])
                launches.clear()
            prepared, kept, anew = tried
            assert len(prepared) > 1 and prepared == kept == anew
