"""python -m stream_attention.cli.warmup [--arch CC] ...: compile the kernels of calls to come into Triton's cache.

Without flags: those that a GPU of this machine would run for bf16, head dims 64 and 128, full and causal, forward and
backward, at the usual lengths. With --arch no GPU need be here, as where an image is built. Where there is one, every
kernel is launched once after it, and the time of first calls is reported. The exit code is 1 if a kernel does not
compile, or a call had to compile one all the same.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import torch

from stream_attention import __version__
from stream_attention.backends.installed import interpreting
from stream_attention.base.device import arch, num_sms

from .. import warmup
from ..bench.progress import progress
from ..testing.inputs import Case, packed
from ..warmup import Call, Gpu, Kernel, Made, with_tiles
from . import values
from .command import Refused, command
from .plan import DTYPES, gpu_in_words

LENGTHS = (128, 256, 512, 640, 1024, 1280, 1536, 2000, 2048, 2560, 3072, 4096, 5120, 8192, 16384)
BATCHES = (1, 4, 16, 64)
MOST_TOKENS = 1 << 16
"""Which kernel runs depends on the length, and on whether there is enough to fill a GPU: lengths on both sides of the
edges of the tables, in batches of up to so many tokens, ask for all of them."""


def _run(options: argparse.Namespace) -> int:
    if find_spec("triton") is None:
        raise Refused("Triton is not installed, and without it there are no kernels to compile")
    if interpreting():
        raise Refused("TRITON_INTERPRET is set: interpreted kernels are not compiled; unset it")
    gpu, words, is_here = _gpu(options)
    if options.first_call and not is_here:
        raise Refused(f"--first-call: expected on a machine with such a GPU; got {words}")
    _check_cache()
    begun = time.perf_counter()
    kernels, without = warmup.kernels_of(_calls(options), gpu)
    if not kernels:
        raise Refused(f"nothing to compile: {'; '.join(f'{call} is for {why}' for why, call in without.items())}")
    to_compile = [kernel for kernel in kernels if not kernel.cached]
    workers = min(options.workers or _cores(), max(1, len(to_compile)))
    try:
        made = _compiled(to_compile, gpu, workers)
    except BrokenProcessPool:
        print("a worker was killed, perhaps for want of memory; say fewer --workers", file=sys.stderr)
        return 1
    found = {
        "arch": gpu.arch,
        "processors": gpu.num_sms,
        "device": words,
        **_conditions(gpu),
        "kernels": [_entry(kernel, made.get(kernel)) for kernel in kernels],
        "compiled": sum(not one.error for one in made.values()),
        "already_there": len(kernels) - len(to_compile),
        "failed": sum(bool(one.error) for one in made.values()),
        "not_compiled": without,
        "workers": workers,
        "seconds": round(time.perf_counter() - begun, 2),
        "first_calls": None,
    }
    if is_here and options.first_call is not False and not found["failed"]:
        found["first_calls"] = _first_calls(kernels)
    print(json.dumps(found, indent=1) if options.json else _text(found))
    late = sum(call["compiled"] for call in (found["first_calls"] or {"cached": []})["cached"])
    return 1 if found["failed"] or late else 0


def _cores() -> int:
    """How many this process may use; where the system does not say, all there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _check_cache() -> None:
    """Refuse a folder for the cache that cannot be written, before anything is compiled for it."""
    import triton

    folder = Path(triton.knobs.cache.dir)
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):
        raise Refused(f"TRITON_CACHE_DIR: expected a folder that can be written; got {folder}")


def _gpu(options: argparse.Namespace) -> tuple[Gpu, str, bool]:
    """The GPU that is compiled for, in words too, and whether it is one of this machine."""
    here = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
    if here is not None and not arch(here):
        raise Refused("the GPU here is none of NVIDIA's, and the kernels are compiled for those")
    if options.arch is None:
        if here is None:
            hint = "Say --arch 90 to compile for an H100 or H200."
            raise Refused(f"--arch: expected where torch finds no GPU; got none. {hint}")
        gpu = Gpu(arch(here), options.processors or num_sms(here))
        return gpu, f"{torch.cuda.get_device_name(here)}, the GPU {here} of this machine", True
    count, words = gpu_in_words(options.arch, options.processors)
    return Gpu(options.arch, count), words, here is not None and arch(here) == options.arch


def _calls(options: argparse.Namespace) -> Iterator[Call]:
    """The calls that are warmed up, short ones first: a kernel is shown, and launched, with the first that needs it."""
    kv_heads = options.kv_heads or options.heads
    if options.heads % kv_heads:
        raise Refused(f"--kv-heads: expected a divisor of --heads {options.heads}; got {kv_heads}")
    if options.packed and (options.mask or options.bias):
        raise Refused("--packed: expected without --mask and --bias, which packed calls do not take; got both")
    causal = (False, True) if options.causal is None else (options.causal,)
    parameters = (False, True) if options.backward and (options.bias or options.alibi or options.sink) else (False,)
    same = {"window": options.window, "sink": options.sink, "softcap": options.softcap, "dropout_p": options.dropout}
    for dtype, dim, is_causal, its in product(options.dtype, options.dim, causal, parameters):
        rest = (options.heads, kv_heads, dim, options.value_dim or dim, DTYPES[dtype])
        found: list[Case] = []
        for length, pack in product(sorted(options.seq), (False, True) if options.packed else (False,)):
            for batch in options.batch or (one for one in BATCHES if one * length <= MOST_TOKENS):
                case = Case(batch, length, length, *rest, causal=is_causal, backward=options.backward, **same)
                found.append(packed(case, (length,) * batch) if pack else case)
        for length, batch in product(sorted(options.seq), options.batch or BATCHES) if options.decode else ():
            found.append(Case(batch, 1, length, *rest, causal=is_causal, backward=False, **same))
        for case in found:
            yield Call(with_tiles(case, options.mask, options.bias, options.alibi), options.backend, its)


def _compiled(kernels: list[Kernel], gpu: Gpu, workers: int) -> dict[Kernel, Made]:
    if not kernels:
        return {}
    print(f"{len(kernels)} kernels to compile in {workers} processes", file=sys.stderr, flush=True)
    made = {}
    with progress(len(kernels)) as shown:
        for one in warmup.compile_ahead(kernels, gpu, workers):
            made[one.kernel] = one
            shown.done(f"{one.seconds:6.1f} s  {one.kernel}" + (f"  FAILED: {one.error}" if one.error else ""))
    return made


def _entry(kernel: Kernel, its: Made | None) -> dict[str, Any]:
    outcome = {"seconds": its and round(its.seconds, 2), "error": (its and its.error) or None}
    return {"kernel": kernel.name, "for": str(kernel.call), "key": kernel.key, **outcome}


def _conditions(gpu: Gpu) -> dict[str, Any]:
    """What a machine must have in common with this one to find what was compiled."""
    import triton
    from triton.backends.nvidia.compiler import get_ptxas

    from .. import launchers

    return {
        "cache": str(triton.knobs.cache.dir),
        "stream_attention": __version__,
        "triton": triton.__version__,
        "ptxas": get_ptxas(gpu.arch).version,
        "python": ".".join(map(str, sys.version_info[:2])),
        "why_no_launchers": launchers.why_not(),
    }


def _first_calls(kernels: list[Kernel]) -> dict[str, Any]:
    """First calls in a process, with the cache; and one of them without it."""
    calls = list(dict.fromkeys(kernel.call for kernel in kernels))
    print(f"{len(calls)} first calls, and one with an empty cache", file=sys.stderr, flush=True)
    return {"cached": warmup.first_calls(calls), "empty": warmup.first_calls(calls[:1], cached=False)[0]}


def _text(found: dict[str, Any]) -> str:
    lines = [
        f"device    {found['device']}",
        f"cache     {found['cache']}",
        f"kernels   {len(found['kernels'])}: {found['compiled']} compiled, {found['already_there']} already there"
        + (f", {found['failed']} FAILED" if found["failed"] else "")
        + f", in {found['seconds']:.1f} s",
    ]
    lines += [f"FAILED    {one['kernel']}: {one['for']}: {one['error']}" for one in found["kernels"] if one["error"]]
    lines += [f"none      for {call}: {why}" for why, call in found["not_compiled"].items()]
    if found["why_no_launchers"] is not None:
        lines.append(f"not built what launches them, which first calls build: {found['why_no_launchers']}")
    lines += [
        f"found by  stream-attention {found['stream_attention']}, Triton {found['triton']}, ptxas {found['ptxas']}, "
        f"Python {found['python']}, where the cache lies at the same path"
    ]
    if found["first_calls"] is not None:
        lines += _first_call_lines(**found["first_calls"])
    return "\n".join(lines)


def _first_call_lines(cached: list[dict[str, Any]], empty: dict[str, Any]) -> list[str]:
    def seconds(one: dict[str, Any]) -> str:
        return f"{one['forward']:.2f} s" + ("" if one["backward"] is None else f", backward {one['backward']:.2f} s")

    lines = [
        f"first call of a process, {empty['call']}",
        f"          from the cache {seconds(cached[0])}; with an empty one {seconds(empty)}",
    ]
    slowest = max(cached[1:], key=lambda one: one["forward"] + (one["backward"] or 0), default=None)
    if slowest is not None:
        lines.append(f"          the slowest of {len(cached) - 1} after it {seconds(slowest)}: {slowest['call']}")
    lines += [f"COMPILED  {one['compiled']} kernels once more: {one['call']}" for one in cached if one["compiled"]]
    return lines


def _flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("the GPU").add_argument
    add("--arch", type=values.capability, metavar="CC", help="compute capability, 90 for 9.0; default: its own")
    add("--processors", type=values.count, metavar="N", help="how many multiprocessors it has")

    add = parser.add_argument_group("the calls, all combinations").add_argument
    add("--dim", type=values.count, nargs="+", default=[64, 128], metavar="N", help="head dims; default 64 128")
    add("--value-dim", type=values.count, metavar="N", help="head dim of the value; default: that of the key")
    dtypes = "fp16, bf16 (the default), fp32"
    add("--dtype", nargs="+", choices=("fp16", "bf16", "fp32"), default=["bf16"], metavar="DTYPE", help=dtypes)
    add("--causal", action=argparse.BooleanOptionalAction, help="causal calls only, or full ones only; default: both")
    lengths = f"lengths; default {len(LENGTHS)} from {LENGTHS[0]} to {LENGTHS[-1]}"
    add("--seq", type=values.count, nargs="+", default=list(LENGTHS), metavar="N", help=lengths)
    batches = f"batch entries; default {' '.join(map(str, BATCHES))}, up to {MOST_TOKENS} tokens"
    add("--batch", type=values.count, nargs="+", metavar="N", help=batches)
    add("--heads", type=values.count, default=8, metavar="N", help="query heads; default 8")
    add("--kv-heads", type=values.count, metavar="N", help="KV heads, which divide the heads; default: as many")
    add("--backward", action=argparse.BooleanOptionalAction, default=True, help="default: with the backward")
    decode = "one query per sequence against --seq keys; default: these too"
    add("--decode", action=argparse.BooleanOptionalAction, default=True, help=decode)
    add("--packed", action="store_true", help="packed sequences, varlen_attention, too")
    add("--window", type=values.window, metavar="LEFT,RIGHT", help="-1 is unbounded; write --window=-1,0 with the =")
    add("--mask", action="store_true", help="with a boolean mask")
    add("--bias", action="store_true", help="with a bias, and with and without its gradient")
    add("--alibi", action="store_true", help="with ALiBi slopes, likewise")
    add("--sink", action="store_true", help="with attention sinks, likewise")
    add("--softcap", type=float, default=0.0, metavar="C", help="scores s become C * tanh(s / C); default 0: not")
    add("--dropout", type=values.probability, default=0.0, metavar="P", help="dropout; default 0")
    add("--backend", default="auto", metavar="NAME", help="the backend that must do it; default: auto")

    add = parser.add_argument_group("compiling").add_argument
    add("--workers", type=values.count, metavar="N", help="processes; default: a core each")
    first = "time first calls; default: where the GPU is here"
    add("--first-call", action=argparse.BooleanOptionalAction, help=first)
    add("--json", action="store_true", help="print what was done as JSON")


main = command(
    "python -m stream_attention.cli.warmup",
    __doc__,
    _flags,
    _run,
    refused=(Refused, ValueError, TypeError),
    interrupted="interrupted; what was compiled stays in the cache",
)

if __name__ == "__main__":
    sys.exit(main())
