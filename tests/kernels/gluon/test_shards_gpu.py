"""Shards of a ring by the Gluon kernels on a Hopper GPU: states that join others where they lie, gradients in fp32.

tests/distributed/test_ring_gpu.py has whole rings against fp64.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from stream_attention.ops.attention import backward_step, forward_into, forward_state
from stream_attention.problem import Inputs, Positions, Wanted
from stream_attention.state import merge

pytest.importorskip("triton")

from gpu_tools import compile_ahead, normal, qkv

from stream_attention.kernels.offline import launching_for

pytestmark = pytest.mark.gpu

DIMS = [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)]
HOW: dict[str, dict[str, Any]] = {
    "all see all": {},
    "an edge": {"window": (-1, 0), "positions": Positions(100, 1, 0, 1, 0)},  # of the later keys rows see few, or none
    "a window": {"window": (130, 40), "positions": Positions(250, 1, 0, 1, 0)},
    "softcap": {"softcap": 4.0},
    "alibi": {"alibi": True},
    "dropout": {"dropout_p": 0.3},
}
KEYS = (slice(400, 700), slice(0, 400))
"""Two shards, the later one first."""


@dataclass
class Call:
    """Queries with two shards of keys."""

    how: str
    dims: tuple[int, int]

    def __post_init__(self) -> None:
        self.query, self.key, value = qkv(B=2, Tq=500, Tk=700, Hq=4, Hkv=2, D=self.dims[0])
        self.value = value[..., : self.dims[1]].contiguous()
        self.grad = normal(2, 500, 4, self.dims[1], seed=7)

    def shard(self, keys: slice, **changed: Any) -> tuple[Inputs, dict[str, Any]]:
        options: dict[str, Any] = {"causal": False, "window": (-1, -1), "softcap": 0.0, "scale": 0.1, "dropout_p": 0.0}
        options |= {"deterministic": False, "q_len": 0, "k_len": 0, "backend": "gluon"}
        options |= {"positions": Positions(0, 1, 0, 1, 0), **HOW[self.how], **changed}
        slopes = normal(1, 4).float().abs() if options.pop("alibi", False) else None
        seed = torch.tensor([7, 0], device="cuda") if options["dropout_p"] else None
        options["positions"] = options["positions"]._replace(k_start=keys.start)
        return Inputs(self.query, self.key[:, keys], self.value[:, keys], alibi_slopes=slopes, seed=seed), options

    def room(self) -> tuple[Tensor, Tensor]:
        """Of more rows than there are queries."""
        out = torch.full((2, 700, 4, self.dims[1]), torch.nan, device="cuda")
        return out, torch.full((2, 4, 700), -torch.inf, device="cuda")

    def joined(self, out: Tensor, lse: Tensor) -> None:
        """Both shards, into rows 50 to 550."""
        for n, (inputs, options) in enumerate(map(self.shard, KEYS)):
            forward_into(inputs, out[:, 50:550], lse[..., 50:550], resumes=n > 0, **options)

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
            call.joined(*call.room())
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
    out, lse = whole[:, 50:550], lses[..., 50:550]
    inputs, options = call.shard(KEYS[0])
    forward_into(inputs, out, lse, resumes=False, **options)
    assert torch.equal(out, states[0][0]) and torch.equal(lse, states[0][1])
    out.masked_fill_((lse == -torch.inf).transpose(1, 2)[..., None], torch.nan)
    inputs, options = call.shard(KEYS[1])
    forward_into(inputs, out, lse, resumes=True, **options)
    merged, merged_lse = merge([state[0].double() for state in states], [state[1].double() for state in states])
    torch.testing.assert_close(out.double(), merged, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(lse.double(), merged_lse, rtol=2e-6, atol=2e-6)
    assert whole[:, :50].isnan().all() and whole[:, 550:].isnan().all() and (lses[..., 550:] == -torch.inf).all()


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
