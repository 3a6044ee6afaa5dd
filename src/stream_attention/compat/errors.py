"""Refusals as the libraries raise them: their exception types, their names of arguments."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

from torch import Tensor

from ..base.errors import refuse

THEIR_NAMES = {
    "query": "q",
    "key": "k",
    "value": "v",
    "key_pages": "k_cache",
    "lengths": "cache_seqlens",
    "value_pages": "v_cache",
    "scale": "softmax_scale",
    "window": "window_size",
}
"""What FlashAttention calls an argument of ours."""

refuse_missing: Callable[..., NoReturn] = partial(refuse, error=NotImplementedError)
"""`refuse`, where the library has what is not here. A NotImplementedError is a RuntimeError, which it raises itself."""


def as_runtime_error(error: Exception) -> RuntimeError:
    """A refusal of an op as FlashAttention raises it: its C++ checks raise RuntimeError, whatever is wrong."""
    name, colon, rest = str(error).partition(":")
    return RuntimeError(f"{THEIR_NAMES.get(name, name)}{colon}{rest}")


def refuse_given(hint: str, **given: Any) -> None:
    """Refuse arguments that the library has and this one has not, but for their defaults, None and 0."""
    for name, value in given.items():
        if isinstance(value, Tensor) or value:
            refuse_missing(name, "its default", "a tensor" if isinstance(value, Tensor) else repr(value), hint)
