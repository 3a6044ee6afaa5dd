"""What a provider is, and what its answers share."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from ...testing.inputs import Case, Tensors
from ..suites import Cell, kv_bytes


class Provider:
    """One way to compute attention.

    `why_not` says in a sentence why it cannot compute a cell here (None: it can); `attend` computes it, layout
    `[B, T, H, D]` in and out, packed `[N, H, D]`. A peer gets views of the same memory: nobody's tensors are copied for
    them.
    """

    name = ""
    label = ""  # at the head of a table's columns
    about = ""  # one sentence
    ours = False  # computed by this package: to fail is to be wrong, wherever in a cell it stands

    def why_not(self, cell: Cell) -> str | None:
        raise NotImplementedError

    def attend(self, x: Tensors) -> Tensor:
        raise NotImplementedError

    def bare(self, x: Tensors) -> Callable[[], object]:
        """The call on `x` with nothing of the benchmark around it, to measure what a call costs the host.

        It is made within `call_context()`, and may write where an earlier call of it has written.
        """
        return lambda: self.attend(x)

    def call_context(self) -> AbstractContextManager[object]:
        """The context in which bare calls are made."""
        return nullcontext()

    def reference_inputs(self, x: Tensors) -> Tensors:
        """The inputs that its answer to `x` is compared on: others where it keeps keys and values in fewer bits."""
        return x

    def tolerance_sources(self, x: Tensors) -> list[Tensor]:
        """Computations of a part `x` of the reference inputs whose errors widen the tolerance, beside those of its
        dtype: where its specification rounds more than that."""
        return []

    def kv_bytes(self, case: Case, x: Tensors) -> float:
        """Bytes of keys and values that a call on `x` reads."""
        return kv_bytes(case)

    def case(self, case: Case) -> Case:
        """The problem that is really computed."""
        return case

    def ran(self, x: Tensors, backward: bool = False) -> str | None:
        """What computes `x`, where the provider chooses by itself and can say it."""
        return None


MODIFIERS = {name: name for name in ("window", "mask", "bias", "alibi", "sink", "softcap", "scale")}
MODIFIERS |= {"alibi": "ALiBi", "dropout_p": "dropout (its mask would be another one)", "lengths_q": "packed sequences"}


def without_modifiers(case: Case, *but: str) -> str | None:
    """Why a peer that is called without modifiers, `but` those named, cannot compute a case."""
    given = (field for field in MODIFIERS if getattr(case, field) != getattr(Case, field))
    present = [MODIFIERS[field] for field in given if field not in but]
    return f"it is called here without {', '.join(present)}" if present else None


def needs(case: Case, module: str, capability: tuple[int, int], dtypes: tuple[torch.dtype, ...]) -> str | None:
    """Why a library of CUDA kernels cannot be used: it is not there, or not for this device or dtype."""
    if not installed(module):
        return f"{module} is not installed"
    if case.device != "cuda":
        return f"{module} computes on CUDA devices alone"
    if torch.cuda.get_device_capability() < capability:
        return f"{module} needs compute capability {'.'.join(map(str, capability))} or newer"
    if case.dtype not in dtypes:
        return f"{module} computes in {' and '.join(str(d).removeprefix('torch.') for d in dtypes)}"
    return tried(lambda: import_module(module))


def installed(module: str) -> bool:
    """Whether a module can be found; those around it are imported, itself not."""
    try:
        return find_spec(module) is not None
    except ImportError:  # what is around it is not there, or broken
        return False


def tried(attempt: Callable[[], Any]) -> str | None:
    """Why an attempt failed, in the first line of its exception; None if it did not."""
    try:
        attempt()
    except Exception as error:
        return error_line(error)
    return None


def error_line(error: Exception) -> str:
    """An exception's name and the first line of what it says."""
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
