"""Which calls may be repeated without checks: those with the facts of an earlier one, which nobody wants to see.

That a repeated call computes the same is tested under Triton's interpreter (test_recall_interpreted.py) and on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from stream_attention import attention, force_backend
from stream_attention.ops import recall

PLAIN: dict[str, Any] = {
    "causal": True,
    "window": None,
    "softcap": 0.0,
    "scale": None,
    "deterministic": None,
    "backend": "auto",
}


def tensors() -> tuple[Tensor, Tensor, Tensor]:
    return tuple(torch.randn(3, 2, 16, 4, 8, dtype=torch.float16).unbind())  # type: ignore[return-value]


def facts(*qkv: Tensor, **options: Any) -> Hashable | None:
    return recall.facts_of(*(qkv or tensors()), **(PLAIN | options))


def test_equal_calls_have_equal_facts_and_they_are_a_key() -> None:
    assert facts() == facts() and hash(facts()) == hash(facts())


def shifted(t: Tensor) -> Tensor:
    """The same numbers, two bytes off the alignment."""
    room = torch.empty(t.numel() + 1, dtype=t.dtype)
    return room[1:].view(t.shape).copy_(t)


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "batch": lambda t: t[:1],
    "length": lambda t: t[:, :8],
    "heads": lambda t: t[:, :, :2],
    "head dim": lambda t: t[..., :4],
    "strides": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "dtype": lambda t: t.bfloat16(),
    "alignment": shifted,
}


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_any_tensor_changes_the_facts(change: str, place: int) -> None:
    qkv = tensors()
    changed = tuple(CHANGES[change](t) if n == place else t for n, t in enumerate(qkv))
    assert facts(*changed) not in (None, facts(*qkv))


@pytest.mark.parametrize(
    "option",
    [
        {"causal": False},
        {"window": (3, 0)},
        {"softcap": 1.0},
        {"scale": 0.25},
        {"deterministic": True},
        {"backend": "triton"},
    ],
    ids=lambda option: next(iter(option)),
)
def test_a_change_of_any_option_changes_the_facts(option: dict[str, Any]) -> None:
    qkv = tensors()
    assert facts(*qkv, **option) not in (None, facts(*qkv))


def test_switches_outside_the_call_are_facts() -> None:
    qkv = tensors()
    with force_backend("triton"):
        assert facts(*qkv) not in (None, facts(*qkv, backend="eager"))
        forced = facts(*qkv)
    assert forced != facts(*qkv)
    torch.use_deterministic_algorithms(True)
    try:
        deterministic = facts(*qkv)
    finally:
        torch.use_deterministic_algorithms(False)
    assert deterministic == facts(*qkv, deterministic=True) != facts(*qkv)


@pytest.mark.parametrize(
    "option",
    [
        {"causal": 1},
        {"deterministic": 1},
        {"window": [3, 0]},
        {"softcap": 0},
        {"softcap": False},
        {"scale": True},
        {"window": (True, False)},
        {"window": (1.0, 0)},
        {"window": ([1], 0)},
        {"window": (1, 0, 0)},
        {"backend": ["triton"]},
    ],
    ids=str,
)
def test_what_equals_a_legal_value_and_is_not_one_takes_the_ordinary_way(option: dict[str, Any]) -> None:
    assert facts(**option) is None


NOT_MEMORY: dict[str, Callable[[Tensor], Tensor]] = {
    "sparse": lambda t: t.to_sparse(),
    "nested": lambda t: torch.nested.as_nested_tensor(list(t.unbind())),
    "zeros without memory": lambda t: torch._efficientzerotensor(t.shape, dtype=t.dtype),
    "functional": lambda t: torch._to_functional_tensor(t.clone()),
    "empty": lambda t: t.new_empty(0, 16, 4, 8),
    "meta": lambda t: t.to("meta"),
}


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("kind", NOT_MEMORY)
def test_tensors_without_memory_of_their_own_take_the_ordinary_way(kind: str, place: int) -> None:
    qkv = list(tensors())
    qkv[place] = NOT_MEMORY[kind](qkv[place])
    assert facts(*qkv) is None


def test_tensors_of_inference_mode_are_memory() -> None:
    with torch.inference_mode():
        assert facts() is not None and facts(*tensors()) is not None


class Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize(
    "other", [lambda t: t.float(), torch._neg_view, lambda t: t.as_subclass(Subclass)], ids=("fp32", "neg", "subclass")
)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_tensors_that_are_more_than_memory_take_the_ordinary_way(other: Callable[[Tensor], Tensor], place: int) -> None:
    qkv = list(tensors())
    qkv[place] = other(qkv[place])
    found = facts(*qkv)
    if qkv[place].dtype is torch.float32 and place > 0:  # a mix, which is refused the first time
        assert found != facts(*tensors())
    else:
        assert found is None


class Quiet(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "watch",
    [
        lambda: torch.autocast("cpu", torch.bfloat16),
        Quiet,
        lambda: FlopCounterMode(display=False),
        lambda: torch.device("cpu"),
        forward_ad.dual_level,
        lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
    ],
    ids=("autocast", "mode", "flop counter", "default device", "forward mode", "profiler"),
)
def test_where_somebody_watches_the_op_is_seen(watch: Callable[[], AbstractContextManager[Any]]) -> None:
    qkv = tensors()
    assert facts(*qkv) is not None
    with watch():
        assert facts(*qkv) is None


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_gradient_needs_the_op(place: int) -> None:
    qkv = list(tensors())
    qkv[place].requires_grad_()
    assert facts(*qkv) is None
    with torch.no_grad():
        assert facts(*qkv) is not None


def test_torch_func_needs_the_op() -> None:
    seen = []

    def inside(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen.append(facts(q, k, v))
        return q.sum()

    torch.vmap(inside)(*(t[None] for t in tensors()))
    assert seen == [None]


def test_a_trace_needs_the_op() -> None:
    seen = []

    def inside(q: Tensor) -> Tensor:
        seen.append(facts(q, q, q))
        return q + 1

    torch.jit.trace(inside, tensors()[0], check_trace=False)
    assert seen == [None]


def test_calls_on_a_cpu_are_not_remembered() -> None:
    """The CPU's kernels have no launch to repeat, and asking would only cost them time."""
    recall._known.clear()
    q, k, v = tensors()
    attention(q, k, v)
    assert not recall._known
