"""Machine code that came with the wheel: common kernels of Hopper, loaded by the CUDA driver and launched without
Triton's compiler, and without a C compiler on the machine.

`make wheel` compiles them (tools/prebuild.py) into the folder `machine_code` beside this file: an
index, and the compressed cubins one behind the other. Code is used on GPUs of the compute capability that it was built
for, and only while the sources are those that it was built from; whatever else, or what the driver refuses, is compiled
as ever.

`STREAM_ATTENTION_PREBUILT=0` turns it off.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..base.device import arch
from . import driver

if TYPE_CHECKING:
    from .launch import Kernel

FOLDER = Path(__file__).with_name("machine_code")
INDEX, CODE = "index.json", "code.bin"
ENABLED = os.environ.get("STREAM_ATTENTION_PREBUILT", "1").lower() not in ("0", "false", "off", "no")

METADATA = (
    *("num_warps", "shared", "launch_pdl", "num_ctas", "launch_cooperative_grid"),
    *("global_scratch_size", "profile_scratch_size", "tensordesc_meta"),
)
"""What a launch asks of Triton's metadata of a kernel."""

_PACKAGE = Path(__file__).parents[1]


class Loaded(NamedTuple):
    """A kernel that was loaded: what Triton's own has of it that a launch by the driver reads."""

    metadata: Any
    function: int
    src: Any  # with the types of the parameters as `signature`


class Index(NamedTuple):
    """What the folder holds."""

    arch: int  # compute capability, 90 for 9.0
    triton: str  # the release that compiled it
    kernels: dict[str, dict[str, Any]]  # by `name_of`: where the code lies, its metadata and signature


def name_of(kernel: Kernel, key: tuple[Any, ...]) -> str:
    """What tells a compiled form of a kernel from others: the key of its launches, without the device."""
    return f"{kernel.function.__module__}.{kernel.function.__name__} {key[1:]!r}"


def find(kernel: Kernel, key: tuple[Any, ...]) -> Loaded | None:
    """The compiled form of a kernel for launches with a key, loaded on their device; None if it did not come along."""
    device = key[0]
    if not ENABLED or getattr(_thread, "compiles", False) or device.type != "cuda" or (found := index()) is None:
        return None
    entry = found.kernels.get(name_of(kernel, key))
    if entry is None or arch(device) != found.arch:
        return None
    try:
        with (FOLDER / CODE).open("rb") as code:
            code.seek(entry["at"])
            image = zlib.decompress(code.read(entry["size"]))
    except (OSError, zlib.error):  # cut off, or not readable
        return None
    metadata = SimpleNamespace(**entry["metadata"])
    with torch.cuda.device(device):
        function = driver.load(image, entry["name"], metadata.shared)
    return None if function is None else Loaded(metadata, function, SimpleNamespace(signature=entry["signature"]))


@contextmanager
def compiling() -> Iterator[None]:
    """Within this block, in this thread, kernels are compiled by the installed Triton: it is what a check is of."""
    _thread.compiles = True
    try:
        yield
    finally:
        _thread.compiles = False


_thread = threading.local()


@cache
def index() -> Index | None:
    """What came along; None if nothing did, or the sources were changed since."""
    try:
        found = json.loads((FOLDER / INDEX).read_text(encoding="utf-8"))
        return Index(found["arch"], found["triton"], found["kernels"]) if found["sources"] == sources() else None
    except (OSError, ValueError, KeyError):  # none, or one that was cut off
        return None


def sources() -> str:
    """One number for all files that device code may come from."""
    found = hashlib.sha256()
    for folder in ("backends", "base", "gpu"):
        for file in sorted((_PACKAGE / folder).rglob("*.py")):
            found.update(file.relative_to(_PACKAGE).as_posix().encode() + file.read_bytes())
    return found.hexdigest()
