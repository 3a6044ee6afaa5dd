"""Where torch.compile breaks its graph."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def graph_break(reason: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate a function that is not compiled: torch.compile breaks its graph at the call, for this reason."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            if not torch.compiler.is_compiling():  # `disable` would import torch._dynamo, which takes 2 s
                return function(*args, **kwargs)
            disabled = torch.compiler.disable(function, reason=reason)
            return disabled(*args, **kwargs)

        return call

    return decorate
