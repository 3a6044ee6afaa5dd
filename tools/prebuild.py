"""Compile the common Hopper kernels ahead, for the wheel to carry. No GPU is needed.

python -m tools.prebuild [--only WORD] [--workers N] [--out FOLDER]

Each call of `COMMON` takes the road of a GPU without one; what its launches would compile is compiled, each form once,
and written where gpu/prebuilt.py looks. `make wheel` runs this before it builds.
"""

from __future__ import annotations

import argparse
import json
import os
import struct
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import triton
from torch import Tensor

from stream_attention import ContiguousKV, PagedKV, attention, decode_attention, quantize_kv, varlen_attention
from stream_attention.base import device, problem
from stream_attention.base.kv_layouts import checks
from stream_attention.base.problem import Hardware
from stream_attention.dispatch import launch_cache, plan
from stream_attention.gpu import launch, prebuilt
from stream_attention.ops import fp8
from stream_attention_tools.bench.progress import progress
from stream_attention_tools.offline import Form, launching_for

ARCH, NUM_SMS = 90, 132

MOST_BYTES = 10 << 20
"""Of machine code, for a wheel that is at most that large."""

LENGTHS = (128, 512, 1024, 2048, 4096, 16384)
BATCHES = (1, 4, 16)
MOST_TOKENS = 1 << 15
DIMS = (64, 128, 256)
HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
WINDOWS: dict[str, dict[str, Any]] = {
    "full": {}, "causal": {"causal": True}, "window": {"causal": True, "window": (1023, 0)},
}  # fmt: skip


class Call(NamedTuple):
    """A call of a public function on CPU tensors, by a name that says what it is."""

    name: str
    run: Callable[[], Any]


def common() -> Iterator[Call]:
    """The calls whose kernels are compiled ahead: forward and backward, dense and packed, decoding, and FP8."""
    for (word, dtype), dim, kind in product(HALVES.items(), DIMS, WINDOWS):
        for length, batch in product(LENGTHS, BATCHES):
            if batch * length <= MOST_TOKENS:
                name = f"{word} d{dim} {kind} {batch}x{length}"
                options = WINDOWS[kind]
                yield Call(name, partial(_both_ways, attention, dtype, (batch, length), dim, **options))
                if dtype is torch.bfloat16:
                    ends = torch.arange(batch + 1, dtype=torch.int32) * length
                    options = options | {"cu_seqlens_q": ends, "cu_seqlens_k": ends}
                    options |= {"max_seqlen_q": length, "max_seqlen_k": length}
                    packed = partial(_both_ways, varlen_attention, dtype, (batch * length,), dim, **options)
                    yield Call(f"packed {name}", packed)
    for dim, kind, length in product(DIMS, ("full", "causal"), (1024, 16384)):
        yield Call(f"fp8 d{dim} {kind} {length}", partial(_fp8, dim, kind, length))
    for dim, (heads, kv_heads), batch, keys in product(DIMS, ((8, 8), (32, 8), (64, 8)), (1, 64), (1024, 8192)):
        for cache in ("contiguous", "paged 16", "paged 64", "int8", "int4"):
            name = f"decode d{dim} {heads}/{kv_heads} {batch}x{keys} {cache}"
            yield Call(name, partial(_decode, dim, heads, kv_heads, batch, keys, cache))


def _tensor(*shape: int, dtype: torch.dtype = torch.bfloat16, grad: bool = False) -> Tensor:
    return torch.empty(shape, dtype=dtype, requires_grad=grad)  # of memory that nobody touches


def _both_ways(op: Callable[..., Tensor], dtype: torch.dtype, rows: tuple[int, ...], dim: int, **options: Any) -> None:
    """Forward alone and with the backward; bf16 also with a backward that is deterministic."""
    tensors = [_tensor(*rows, 2048 // dim, dim, dtype=dtype, grad=True) for _ in range(3)]
    with torch.no_grad():
        op(*tensors, **options)
    for deterministic in (False, True) if dtype is torch.bfloat16 else (False,):
        out = op(*tensors, **options, deterministic=deterministic)
        torch.autograd.grad(out, tensors, torch.empty_like(out))


def _fp8(dim: int, kind: str, length: int) -> None:
    query, key, value = (_tensor(1, length, 2048 // dim, dim) for _ in range(3))
    attention(query, key, value, precision="fp8", **WINDOWS[kind])


def _decode(dim: int, heads: int, kv_heads: int, batch: int, keys: int, cache: str) -> None:
    kind, _, page = cache.partition(" ")
    lengths = torch.full((batch,), keys, dtype=torch.int32)
    kv: Any
    if kind == "paged":
        pages, size = batch * keys // int(page), int(page)
        key, value = (_tensor(pages, size, kv_heads, dim) for _ in range(2))
        kv = PagedKV(key, value, torch.zeros(batch, keys // size, dtype=torch.int32), lengths)
    elif kind == "contiguous":
        key, value = (_tensor(batch, keys, kv_heads, dim) for _ in range(2))
        kv = ContiguousKV(key, value, lengths)
    else:  # of a short cache: the kernels are the same
        key, value = (torch.zeros(batch, 256, kv_heads, dim, dtype=torch.bfloat16) for _ in range(2))
        kv = quantize_kv(ContiguousKV(key, value), kind)
    decode_attention(_tensor(batch, 1, heads, dim), kv)


@contextmanager
def forms() -> Iterator[dict[str, Form]]:
    """Within this block, calls on CPU tensors are those of a Hopper GPU. Yields what they would compile, each kernel by
    the name under which gpu/prebuilt.py looks for it."""
    found: dict[str, Form] = {}
    names: list[str] = []
    call_triton = launch._Binding.call_triton

    def named(self: Any, *arguments: Any) -> None:
        names.append(prebuilt.name_of(self.kernel, self.key))
        call_triton(self, *arguments)

    def keep(form: Form) -> None:
        found.setdefault(names[-1], form)

    with (
        patch.object(problem, "hardware_of", lambda _: Hardware(torch.device("cuda", 0), ARCH, NUM_SMS)),
        patch.object(device, "arch", lambda _: ARCH),
        patch.object(fp8, "makes_fp8_codes", lambda _: True),
        patch.object(checks, "should_validate", lambda asked, _: bool(asked)),
        patch.object(launch._Binding, "is_compiled", lambda self: False),
        patch.object(launch._Binding, "call_triton", named),
        launching_for(ARCH, keep),
    ):
        launch_cache.clear()
        plan.forget_plans()
        try:
            yield found
        finally:
            launch_cache.clear()
            plan.forget_plans()


def wanted(calls: Sequence[Call]) -> dict[str, str]:
    """The kernels that calls ask for, by name, with the first call of each."""
    first: dict[str, str] = {}
    for call in calls:
        with forms() as found:
            call.run()
        first = dict.fromkeys(found, call.name) | first
    return first


def _compile(job: tuple[str, str]) -> tuple[dict[str, Any], bytes]:
    """Run a call once more, in this process, and compile the one of its kernels that is meant: its entry in the index,
    and the machine code."""
    name, call_name = job
    with forms() as found:
        next(call for call in common() if call.name == call_name).run()
    compiled = found[name].compile()
    metadata = {field: getattr(compiled.metadata, field, None) for field in prebuilt.METADATA}
    entry = {"name": compiled.metadata.name, "metadata": metadata, "signature": dict(compiled.src.signature)}
    return entry, zlib.compress(without_ptx(compiled.asm["cubin"]), 9)


def without_ptx(cubin: bytes) -> bytes:
    """A cubin with zeros for the text of the PTX that it was assembled from, which is for profilers, and half of it.

    To compile without it (TRITON_DISABLE_LINE_INFO) would give other machine code than what the gates check.
    """
    found = bytearray(cubin)
    (table,) = struct.unpack_from("<Q", found, 0x28)
    entry_size, count, names = struct.unpack_from("<3H", found, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", found, table + place * entry_size) for place in range(count)]
    for name, _, _, _, at, size in sections:
        start = sections[names][4] + name
        if found[start : found.index(0, start)] == b".nv_debug_ptx_txt":
            found[at : at + size] = bytes(size)
    return bytes(found)


def build(folder: Path, jobs: Sequence[tuple[str, str]], workers: int) -> dict[str, Any]:
    """Compile kernels, each with a call that asks for it, and write them to a folder. Returns the index."""
    assert not any(" at 0x" in name for name, _ in jobs), "a name that differs from process to process"
    kernels: dict[str, Any] = {}
    code = b""
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool, progress(len(jobs)) as shown:
        for (name, call), (entry, cubin) in zip(jobs, pool.map(_compile, jobs), strict=True):
            kernels[name] = {**entry, "at": len(code), "size": len(cubin)}
            code += cubin
            shown.done(f"{len(kernels)} of {len(jobs)}: {entry['name']} of {call}, {len(cubin) >> 10} KB")
    found = {"arch": ARCH, "triton": triton.__version__, "sources": prebuilt.sources(), "kernels": kernels}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / prebuilt.CODE).write_bytes(code)
    (folder / prebuilt.INDEX).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.prebuild", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--only", default="", metavar="WORD", help="calls whose name contains this")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, default=prebuilt.FOLDER)
    parser.add_argument("--list", action="store_true", help="list the kernels; compile none")
    flags = parser.parse_args(argv)
    calls = [call for call in common() if flags.only in call.name]
    if not calls:
        parser.error(f"--only: expected a word of a call's name; got {flags.only!r}")
    jobs = list(wanted(calls).items())
    if flags.list:
        for name, call in jobs:
            print(f"{call}: {name}")
        print(f"{len(jobs)} kernels of {len(calls)} calls")
        return 0
    began = time.perf_counter()
    build(flags.out, jobs, flags.workers)
    size = (flags.out / prebuilt.CODE).stat().st_size
    if size > MOST_BYTES:
        print(f"{size / 2**20:.1f} MB of machine code; at most {MOST_BYTES >> 20} may go into a wheel", file=sys.stderr)
        return 1
    seconds = time.perf_counter() - began
    print(f"{len(jobs)} kernels, {size / 2**20:.1f} MB, in {seconds:.0f} s: {flags.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
