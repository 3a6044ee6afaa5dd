"""Modules that moved to `stream_attention_tools`, or were renamed, can still be imported under their old names.

`python -m` runs them too. Only an import of an old name loads `stream_attention_tools`. The commands keep their names
(`python -m stream_attention.cli.benchmark`); other old names are deprecated.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import CodeType, ModuleType
from warnings import warn

_FOLDERS = (
    # old folder, new folder, modules and packages in it: their names, or old=new
    ("", "base", "device errors problem state cache_views=kv_layouts"),
    ("", "dispatch", "plan validate"),
    ("", "", "kernels=backends tuning=backends"),
    ("cache_views", "base.kv_layouts", "codes=quantized_tensor"),
    ("kernels", "backends", "gluon=hopper reference=reference.attention reference_fp8=reference.fp8"),
    ("tuning", "backends", "gluon=hopper.tuning triton=triton.tuning"),
    ("tuning", "gpu", "decode=decode_tuning"),
    ("distributed", "distributed", "call=autograd heads=head_exchange local=shard_attention request=call_spec"),
    ("distributed", "distributed", "seed=agreement uncompiled=graph_break whole=shard_attention"),
    ("integration", "integration", "evicting=evicting_layer held=placeholder layer=cache_layer"),
    ("integration", "integration", "quantised=quantized_layer"),
    ("kvcache", "kvcache", "request=compression_spec"),
)
_TO_TOOLS = (
    ("", "", "benchmark=bench cli files testing"),
    ("base", "", "files"),
    ("benchmark", "bench", "cells=suites form=schema graphs=timing"),
    ("benchmark", "report", "figures models overview=readme_report page plots"),
    ("core", "", "_measure=module_tools flashattention_v3=baseline"),
    ("distributed", "cli", "demo"),
    ("distributed", "cluster", "calibrate planner speed traffic trial"),
    ("ops", "", "warmup"),
    ("tuning", "", "search=tune"),
    ("utils", "memory", "estimate profiler timeline=profiler"),
    ("utils", "testing", "allocator"),
)

MOVED = {
    ".".join(filter(None, ("stream_attention", old_folder, old))): ".".join(filter(None, (package, folder, new or old)))
    for package, rows in (("stream_attention", _FOLDERS), ("stream_attention_tools", _TO_TOOLS))
    for old_folder, folder, names in rows
    for old, _, new in (name.partition("=") for name in names.split())
}
"""Old name -> new name, of modules and of packages with all that is in them."""

KEPT = tuple(
    f"stream_attention.{name}"
    for name in ("cli", "core._measure", "core.flashattention_v3", "utils.estimate", "utils.profiler")
)
"""Old names that are not deprecated: commands, and instruments that `core` and `utils.memory` offer."""


def new_name(old: str) -> str | None:
    """Where the module `old` is now; None if it did not move."""
    for start in sorted(MOVED, key=len, reverse=True):
        if old == start or old.startswith(f"{start}."):
            return MOVED[start] + old.removeprefix(start)
    return None


class OldNames(MetaPathFinder, Loader):
    """Finds modules under their old names. What it loads forwards attributes to the module itself (PEP 562)."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if not fullname.startswith("stream_attention.") or (new := new_name(fullname)) is None:
            return None
        found = find_spec(new)
        if found is None:
            return None
        return ModuleSpec(fullname, self, origin=new, is_package=found.submodule_search_locations is not None)

    def exec_module(self, module: ModuleType) -> None:
        real = import_module(_resolve(module.__name__))
        module.__doc__ = real.__doc__
        module.__dict__["__getattr__"] = lambda name: getattr(real, name)

    def get_code(self, fullname: str) -> CodeType:
        """What `python -m` runs."""
        run = f"from runpy import run_module\nrun_module({_resolve(fullname)!r}, run_name=__name__, alter_sys=True)\n"
        return compile(run, fullname, "exec")


def _resolve(old: str) -> str:
    """The new name, after a warning if the old one is deprecated."""
    new = new_name(old)
    assert new is not None
    if not old.startswith(KEPT):
        warn(f"{old} is deprecated: it moved to {new}", DeprecationWarning, stacklevel=3)
    return new


def install() -> None:
    """Let imports find old names. Before other finders: a folder that moved may have left its __pycache__."""
    if not any(isinstance(finder, OldNames) for finder in sys.meta_path):
        sys.meta_path.insert(0, OldNames())
