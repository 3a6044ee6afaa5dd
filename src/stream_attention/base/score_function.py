"""Functions of scores and indices, as users write them: `score_mod(score, b, h, q_idx, kv_idx) -> score`.

A function is written for one score: five tensors of no dimension. It is evaluated for many at once by `torch.vmap`, and
for visible ones alone: what it makes of others, NaN or an index behind the end of a table, is nobody's business.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_batchedtensor
from torch.overrides import TorchFunctionMode

from .errors import refuse

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""`score_mod(score, b, h, q_idx, kv_idx)` on tensors of no dimension; indices are int32, h is the query head."""


class GatherByIndex(TorchFunctionMode):
    """`table[b, q_idx]` by tensors of no dimension gathers. Plain torch would ask them for an int."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__getitem__:
            table, index = args
            indices = index if isinstance(index, tuple) else (index,)
            by_tensors = any(isinstance(one, Tensor) for one in indices)
            if by_tensors and all(isinstance(one, (Tensor, int)) for one in indices):
                places = [one if isinstance(one, Tensor) else torch.tensor(one, device=table.device) for one in indices]
                return torch.ops.aten.index.Tensor(table, places)
        return func(*args, **(kwargs or {}))


class _Captures(GatherByIndex):
    """Also collects the tensors that a function reads and that want a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[int, Tensor] = {}
        self._made: dict[int, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for one in torch.utils._pytree.tree_leaves((args, kwargs or {})):
            if (
                isinstance(one, Tensor)
                and not is_batchedtensor(one)
                and one.requires_grad
                and id(one) not in self._made
            ):
                self.found[id(one)] = one
        result = super().__torch_function__(func, types, args, kwargs)
        if isinstance(result, Tensor):
            self._made[id(result)] = result
        return result


@contextmanager
def refusing_branches(name: str) -> Iterator[None]:
    """Say in words what vmap cannot map."""
    try:
        yield
    except RuntimeError as error:
        if not str(error).startswith("vmap:"):
            raise
        if "random" in str(error):
            expected, actual = "a function of its arguments", "one that draws random numbers"
            hint = "Draw them before, into a tensor that it reads"
        else:
            expected, actual = "torch operations on its arguments", "a branch on them, or an int of one"
            hint = "Write & and | for and and or, torch.where for if, and no int(), bool() or item()"
        refuse(name, expected, actual, hint)


def name_of(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)


def takes(argument: str, function: Any, expected: str, count: int, hint: str = "") -> None:
    """Refuse what is no function of so many arguments."""
    if not callable(function):
        refuse(argument, f"a function {expected}", type(function).__name__, error=TypeError)
    try:
        signature = inspect.signature(function)
    except ValueError:  # of a function that says nothing; its call will
        return
    try:
        signature.bind(*range(count))
    except TypeError:
        name, hint = name_of(function), hint if len(signature.parameters) == 9 - count else ""
        refuse(name, f"a function {expected}", f"{name}{signature}", hint, TypeError)


class ScoreFunction:
    """A function of a call, with the tensors that it reads and that want a gradient."""

    def __init__(self, function: ScoreMod, device: torch.device) -> None:
        takes("score_mod", function, "(score, b, h, q_idx, kv_idx)", 5, "A mask_mod is a mask: masks.from_function.")
        self.name, self._function = name_of(function), function
        with _Captures() as captures, torch.enable_grad():
            places = torch.zeros(4, 1, dtype=torch.int32, device=device)
            self._mapped(torch.vmap(self._one), torch.zeros(1, device=device), *places)
        self.captured = [*captures.found.values()]
        self.gradients: list[Tensor] = []  # of these, while a backward adds them up

    def _one(self, score: Tensor, *indices: Tensor) -> Tensor:
        found: Any = self._function(score, *indices)
        if not isinstance(found, Tensor):
            hint = "A constant is score.new_full((), x)." if isinstance(found, (int, float)) else ""
            refuse(self.name, "a tensor returned", type(found).__name__, hint, TypeError)
        if found.dim():
            hint = "It is called for one score at a time; reduce by sum()"
            refuse(self.name, "a tensor of no dimension returned", list(found.shape), hint)
        if not found.dtype.is_floating_point:
            hint = "A mask_mod is a mask: masks.from_function." if found.dtype is torch.bool else ""
            refuse(self.name, "a score returned, of a floating dtype", found.dtype, hint, TypeError)
        return found.to(score.dtype)

    def _mapped(self, mapped: Any, *arguments: Tensor) -> Tensor:
        with GatherByIndex(), refusing_branches(self.name):
            found: Tensor = mapped(*arguments)
            return found

    def __call__(self, scores: Tensor, visible: Tensor | None, *indices: Tensor) -> Tensor:
        """Scores `[B, H, m, n]` after the function, -inf where not `visible`. Indices are those of each dim."""
        if visible is None:
            mapped: Any = self._one
            for level in reversed(range(4)):
                mapped = torch.vmap(mapped, in_dims=(0, *(0 if at == level else None for at in range(4))))
            return self._mapped(mapped, scores, *indices)
        there = visible.expand(scores.shape).nonzero(as_tuple=True)
        listed = (index[at] for index, at in zip(indices, there, strict=True))
        found = self._mapped(torch.vmap(self._one), scores[there], *listed)
        return torch.full_like(scores, -torch.inf).index_put(there, found)
