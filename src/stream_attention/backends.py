"""The backends, in order of preference.

Dispatch is data: each row says why it cannot do a problem (nothing: it can), how it would be configured, and where its
kernels are. Asking needs no kernel module, so planning works on a machine that lacks what a backend needs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NamedTuple

import torch

from .problem import Problem
from .tuning import eager as eager_tuning
from .tuning import triton as triton_tuning


class Backend(NamedTuple):
    name: str
    module: str  # has forward(problem, inputs, config) and, unless why_not says otherwise, backward
    why_not: Callable[[Problem], tuple[str, ...]]  # sentences; empty if it can
    configure: Callable[[Problem], Any]
    why_named_only: Callable[[Problem], tuple[str, ...]] = lambda problem: ()  # why "auto" leaves it although it can
    forceable: Mapping[str, tuple[int, ...]] = {}  # fields of a forward's config that a caller may set, with the values

    def load(self) -> ModuleType:
        """The kernel module, imported on first use."""
        return _import(self.module)


@cache
def _import(module: str) -> ModuleType:
    return import_module(module, __package__)


def _triton_why_not(problem: Problem) -> tuple[str, ...]:
    if find_spec("triton") is None:
        return ("Triton is not installed",)
    on_gpu = problem.device.type == "cuda"
    dims = (problem.head_dim, problem.value_dim)
    hint = " (for tests: TRITON_INTERPRET=1, set before Triton is imported)" if problem.device.type == "cpu" else ""
    reasons = (
        (not on_gpu and not interpreting(), f"it runs on CUDA devices, not on {problem.device.type}{hint}"),
        (on_gpu and 0 < problem.arch < 80, f"it needs compute capability 8.0 or newer, not {problem.arch / 10}"),
        (problem.dtype is torch.float64, "it computes in fp32 and takes no float64"),
        (problem.last_position >= 1 << 30, "it counts positions in 32 bits, up to 2**30"),
        (
            any(dim % 8 or dim > 256 for dim in dims),
            f"it takes head dims that are multiples of 8 up to 256, not {dims}",
        ),
    )
    return tuple(reason for applies, reason in reasons if applies)


def _triton_why_named_only(problem: Problem) -> tuple[str, ...]:
    if problem.device.type == "cpu":
        return ("its interpreter is for tests; name it to use it",)
    return ()


def interpreting() -> bool:
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")  # as Triton reads it


def _eager_why_not(problem: Problem) -> tuple[str, ...]:
    return ()


def _reference_why_not(problem: Problem) -> tuple[str, ...]:
    if problem.partial:
        return ("it computes whole calls, not partial states",)
    return ()


BACKENDS: tuple[Backend, ...] = (
    Backend(
        "triton",
        ".kernels.triton",
        _triton_why_not,
        triton_tuning.configure,
        _triton_why_named_only,
        triton_tuning.FORCEABLE,
    ),
    Backend("eager", ".kernels.eager", _eager_why_not, eager_tuning.configure),
    Backend("reference", ".kernels.reference", _reference_why_not, lambda problem: "dense, fp64"),
)
BY_NAME = {backend.name: backend for backend in BACKENDS}
AUTO = "auto"
