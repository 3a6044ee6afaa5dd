"""Shards of a ring by the Gluon kernels on a Hopper GPU: states that join others where they lie, gradients in fp32.

tests/distributed/test_ring_gpu.py has whole rings against fp64.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
from shard_state import forward_state
from torch import Tensor

from stream_attention.base.problem import Inputs, Positions, Wanted
from stream_attention.base.state import merge
from stream_attention.ops.shards import backward_step, forward_into

pytest.importorskip("triton")

from gpu_tools import compile_ahead, normal, qkv

from stream_attention_tools.offline import launching_for

pytestmark = pytest.mark.gpu

DIMS = [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)]
HOW: dict[str, dict[str, Any]] = {
    "all see all": {},
    "an edge": {"window": (-1, 0), "positions": Positions(100, 1, 0, 1, 0)},  # of the later keys rows see few, or none
    "an edge in one block": {"window": (-1, 0), "positions": Positions(128, 1, 0, 1, 0)},  # of the earlier keys
    "a window": {"window": (130, 40), "positions": Positions(250, 1, 0, 1, 0)},
    "softcap": {"softcap": 4.0},
    "alibi": {"alibi": True},
    "dropout": {"dropout_p": 0.3},
}
KEYS = (slice(400, 700), slice(0, 400))
"""Two shards, the later one first."""
TILE_AFTER_TILE: dict[str, Any] = {"rows": 1100, "heads": (32, 8)}
"""Six tiles or more for each of 64 heads, the last one not full: programs have several."""
ONE_AFTER_ANOTHER = (slice(0, 390), slice(390, 400), slice(400, 700))
"""Shards of several blocks and of one; where there is an edge, whole tiles see none of the last."""


@dataclass
class Call:
    """Queries with two shards of keys."""

    how: str
    dims: tuple[int, int]
    rows: int = 500
    heads: tuple[int, int] = (4, 2)

    def __post_init__(self) -> None:
        heads, kv_heads = self.heads
        self.query, self.key, value = qkv(B=2, Tq=self.rows, Tk=700, Hq=heads, Hkv=kv_heads, D=self.dims[0])
        self.value = value[..., : self.dims[1]].contiguous()
        self.grad = normal(2, self.rows, heads, self.dims[1], seed=7)

    def shard(self, keys: slice, **changed: Any) -> tuple[Inputs, dict[str, Any]]:
        options: dict[str, Any] = {"causal": False, "window": (-1, -1), "softcap": 0.0, "scale": 0.1, "dropout_p": 0.0}
        options |= {"deterministic": False, "q_len": 0, "k_len": 0, "backend": "gluon"}
        options |= {"positions": Positions(0, 1, 0, 1, 0), **HOW[self.how], **changed}
        slopes = normal(1, self.heads[0]).float().abs() if options.pop("alibi", False) else None
        seed = torch.tensor([7, 0], device="cuda") if options["dropout_p"] else None
        options["positions"] = options["positions"]._replace(k_start=keys.start)
        return Inputs(self.query, self.key[:, keys], self.value[:, keys], alibi_slopes=slopes, seed=seed), options

    def room(self) -> tuple[Tensor, Tensor]:
        """Of more rows than there are queries, which are those from row 50 on."""
        out = torch.full((2, self.rows + 200, self.heads[0], self.dims[1]), torch.nan, device="cuda")
        return out, torch.full((2, self.heads[0], self.rows + 200), -torch.inf, device="cuda")

    def within(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """The rows of the queries."""
        return out[:, 50 : 50 + self.rows], lse[..., 50 : 50 + self.rows]

    def joined(self, shards: tuple[slice, ...]) -> None:
        """One shard after another."""
        out, lse = self.within(*self.room())
        for n, (inputs, options) in enumerate(map(self.shard, shards)):
            forward_into(inputs, out, lse, resumes=n > 0, **options)

    def gradients(self, backend: str) -> Any:
        """Of queries, keys and values, in fp32; the same bits every time where Gluon can."""
        inputs, options = self.shard(slice(0, 700), deterministic=self.in_order)
        out, lse = forward_state(inputs, **options)
        options["backend"] = backend
        return backward_step(inputs, out.to(self.query.dtype), lse, self.grad, None, wanted=Wanted(), **options)[:3]

    @property
    def in_order(self) -> bool:
        return self.dims[0] <= 128


def compile_call(how: str, dims: tuple[int, int]) -> str:
    """Compile what the tests launch; what went wrong, or nothing."""
    try:
        call = Call(how, dims)
        with launching_for(90, lambda form: form.compile()):
            call.joined(KEYS)
            Call(how, dims, **TILE_AFTER_TILE).joined(ONE_AFTER_ANOTHER)
            forward_state(call.shard(KEYS[0])[0], **call.shard(KEYS[0])[1])
            if dims[0] == dims[1]:
                call.gradients("gluon")
                call.gradients("triton")
    except Exception as error:
        return f"{how} {dims}: {type(error).__name__}: {error}"
    return ""


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    compile_ahead(compile_call, *zip(*product(HOW, DIMS), strict=True))


@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("how", HOW)
def test_a_state_is_joined_where_it_lies(how: str, dims: tuple[int, int]) -> None:
    """Some keys, then others, are what merging their states is. Nobody else's rows are touched, and what an empty state
    held is not looked at."""
    call = Call(how, dims)
    states = [forward_state(inputs, **options) for inputs, options in map(call.shard, KEYS)]
    whole, lses = call.room()
    out, lse = call.within(whole, lses)
    inputs, options = call.shard(KEYS[0])
    forward_into(inputs, out, lse, resumes=False, **options)
    assert torch.equal(out, states[0][0]) and torch.equal(lse, states[0][1])
    out.masked_fill_((lse == -torch.inf).transpose(1, 2)[..., None], torch.nan)
    inputs, options = call.shard(KEYS[1])
    forward_into(inputs, out, lse, resumes=True, **options)
    check(whole, lses, call, states)


def check(whole: Tensor, lses: Tensor, call: Call, states: list[tuple[Tensor, Tensor]]) -> None:
    """The rows of a call are the states merged, and all others as they were."""
    merged, merged_lse = merge([state[0].double() for state in states], [state[1].double() for state in states])
    out, lse = call.within(whole, lses)
    torch.testing.assert_close(out.double(), merged, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(lse.double(), merged_lse, rtol=2e-6, atol=2e-6)
    behind = 50 + call.rows
    assert whole[:, :50].isnan().all() and whole[:, behind:].isnan().all()
    assert (lses[..., :50] == -torch.inf).all() and (lses[..., behind:] == -torch.inf).all()


@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("how", HOW)
def test_a_program_joins_tile_after_tile(how: str, dims: tuple[int, int]) -> None:
    """Places in shared memory are used again, and rows that see none of the keys keep what they had."""
    call = Call(how, dims, **TILE_AFTER_TILE)
    shards = [call.shard(keys) for keys in ONE_AFTER_ANOTHER]
    states = [forward_state(inputs, **options) for inputs, options in shards]
    whole, lses = call.room()
    out, lse = call.within(whole, lses)
    for n, (inputs, options) in enumerate(shards):
        before = out.clone()
        forward_into(inputs, out, lse, resumes=n > 0, **options)
        unseen = (states[n][1] == -torch.inf).transpose(1, 2)
        if n > 0 and dims[1] <= 128:
            torch.testing.assert_close(out[unseen], before[unseen], rtol=5e-7, atol=0.0)
    check(whole, lses, call, states)


@pytest.mark.parametrize("dims", [dims for dims in DIMS if dims[0] == dims[1]], ids=str)
@pytest.mark.parametrize("how", HOW)
def test_gradients_of_a_shard_are_those_of_a_call_before_they_are_rounded(how: str, dims: tuple[int, int]) -> None:
    call = Call(how, dims)
    grads = call.gradients("gluon")
    for name, ours, theirs in zip(("query", "key", "value"), grads, call.gradients("triton"), strict=True):
        assert ours.dtype is torch.float32
        error = (ours - theirs).norm() / theirs.norm()
        assert error < 4e-3, f"{name}: {error:.1e} of Triton's"  # weights and dS are rounded to bf16 in both
    if call.in_order:
        assert all(torch.equal(one, other) for one, other in zip(grads, call.gradients("gluon"), strict=True))
