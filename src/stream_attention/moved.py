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

RENAMED = {
    "distributed.call": "autograd",
    "distributed.heads": "head_exchange",
    "distributed.local": "shard_attention",
    "distributed.request": "call_spec",
    "distributed.seed": "agreement",
    "distributed.uncompiled": "graph_break",
    "distributed.whole": "full_kv",
    "integration.evicting": "evicting_layer",
    "integration.held": "placeholder",
    "integration.layer": "cache_layer",
    "integration.quantised": "quantized_layer",
    "kvcache.request": "compression_spec",
}
"""Modules of this package with a new name in the same folder."""


LAYERED = {
    f"stream_attention.{old}": f"stream_attention.{new}"
    for old, new in {
        **{name: f"base.{name}" for name in ("device", "errors", "problem", "state")},
        "cache_views": "base.kv_layouts",
        "cache_views.codes": "base.kv_layouts.quantized_tensor",
        "kernels": "backends",
        "kernels.gluon": "backends.hopper",
        "kernels.reference": "backends.reference.attention",
        "kernels.reference_fp8": "backends.reference.fp8",
        "plan": "dispatch.plan",
        "tuning": "backends",
        "tuning.decode": "gpu.decode_tuning",
        "tuning.gluon": "backends.hopper.tuning",
        "tuning.triton": "backends.triton.tuning",
        "validate": "dispatch.validate",
    }.items()
}
"""What moved when the folders of this package became layers."""


def _moved(old: str, new: str, names: str) -> dict[str, str]:
    return {f"stream_attention.{old}.{name}": f"stream_attention_tools.{new}.{name}" for name in names.split()}


MOVED = {
    **{f"stream_attention.{old}": f"stream_attention.{old.partition('.')[0]}.{new}" for old, new in RENAMED.items()},
    "stream_attention.benchmark": "stream_attention_tools.bench",
    **_moved("benchmark", "report", "figures models page plots style"),
    "stream_attention.benchmark.cells": "stream_attention_tools.bench.suites",
    "stream_attention.benchmark.form": "stream_attention_tools.bench.schema",
    "stream_attention.benchmark.graphs": "stream_attention_tools.bench.timing",
    "stream_attention.benchmark.overview": "stream_attention_tools.report.readme_report",
    "stream_attention.cli": "stream_attention_tools.cli",
    **_moved("distributed", "cluster", "calibrate planner speed traffic trial"),
    "stream_attention.core._measure": "stream_attention_tools.module_tools",
    "stream_attention.core.flashattention_v3": "stream_attention_tools.baseline",
    "stream_attention.distributed.demo": "stream_attention_tools.cli.demo",
    "stream_attention.testing": "stream_attention_tools.testing",
    **{f"stream_attention.{old}": "stream_attention_tools.files" for old in ("files", "base.files")},
    **LAYERED,
    "stream_attention.ops.warmup": "stream_attention_tools.warmup",
    "stream_attention.tuning.search": "stream_attention_tools.tune",
    **_moved("utils", "memory", "allocator estimate profiler timeline"),
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
