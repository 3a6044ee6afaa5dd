"""Launches for a GPU that is not there: what Triton would compile for them, under the names its cache has for it.

Triton itself binds, types and specialises the arguments, with a driver that only says which GPU is meant. So a kernel
gets the key that a launch on that GPU looks for, and what is compiled here is found there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import triton
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.cache import get_cache_key, get_cache_manager
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction


class Form(NamedTuple):
    """One form of a jit function, as a launch asks for it: constants, types and alignment of arguments, options."""

    source: Any
    target: GPUTarget
    options: Any

    @property
    def name(self) -> str:
        """Where the function stands, such as "triton.backward_key"."""
        return str(self.source.fn.__module__).removeprefix("stream_attention.").removeprefix("backends.")

    @property
    def key(self) -> str:
        """Under which Triton's cache keeps it: a hash of the function and all it calls, what is said above, Triton's
        own files, the version of ptxas and the environment variables that change code."""
        backend = make_backend(self.target)
        text = get_cache_key(self.source, backend, self.options, env_vars=get_cache_invalidating_env_vars())
        return hashlib.sha256(text.encode("utf-8")).hexdigest()

    @property
    def is_cached(self) -> bool:
        """Whether a launch would find it, as Triton looks for it."""
        metadata = f"{self.source.name[:150]}.json"
        return metadata in (get_cache_manager(self.key).get_group(metadata) or {})

    def compile(self) -> Any:
        """Compile it into Triton's cache, or take it from there."""
        return triton.compile(self.source, target=self.target, options=self.options.__dict__)


@contextmanager
def launching_for(arch: int, take: Callable[[Form], None]) -> Iterator[None]:
    """Within this block, launches of jit functions are those of a GPU of compute capability `arch` (90 for 9.0): each
    is handed over to `take` and does not run. CPU and meta tensors stand for pointers."""
    target = GPUTarget("cuda", arch, 32)
    device = f"sm_{arch}"  # apart from the numbers of devices that are there, for which functions keep what they bind
    stand_in = SimpleNamespace(
        get_current_device=lambda: device, get_current_stream=lambda device: 0, get_current_target=lambda: target
    )

    def hand_over(
        self: Any, key: Any, signature: Any, device: Any, constants: Any, options: Any, attributes: Any, warmup: bool
    ) -> None:
        take(Form(self.ASTSource(self, signature, constants, attributes), target, options))

    with patch.object(JITFunction, "_do_compile", hand_over), patch.object(driver, "_active", stand_in):
        yield
