"""The C functions of cuda/include/flash_attn.h from Python, by ctypes: for tests, and to try the kernels out.

>>> library = CudaLibrary("cuda/build/libflash_attn.so")  # doctest: +SKIP
>>> out, lse = library.forward(query, key, value, causal=True)  # doctest: +SKIP
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

Strategy = Literal["ring", "queries"]
Transport = Literal["nccl", "copy"]

_DTYPES = {torch.float32: 0, torch.bfloat16: 1}
_STRATEGIES = {"ring": 0, "queries": 1}
_TRANSPORTS = {"nccl": 0, "copy": 1}
_REFUSED = 1


class _Problem(ctypes.Structure):
    _fields_ = [
        ("batch", ctypes.c_int),
        ("heads", ctypes.c_int),
        ("seq_q", ctypes.c_int),
        ("seq_k", ctypes.c_int),
        ("dim", ctypes.c_int),
        ("causal", ctypes.c_int),
        ("scale", ctypes.c_float),
        ("dtype", ctypes.c_int),
    ]


class _Range(ctypes.Structure):
    _fields_ = [("start", ctypes.c_int), ("length", ctypes.c_int)]


class _RingStep(ctypes.Structure):
    _fields_ = [
        ("shard", ctypes.c_int),
        ("keys", _Range),
        ("offset", ctypes.c_int),
        ("computes", ctypes.c_int),
        ("first", ctypes.c_int),
        ("last", ctypes.c_int),
    ]


class RingStep(NamedTuple):
    shard: int
    keys: range
    offset: int
    computes: bool
    first: bool
    last: bool


class CudaLibrary:
    """A build of libflash_attn.so. Tensors are contiguous [B, T, H, D], fp32 or bf16.

    What the library refuses raises ValueError, what fails in CUDA or NCCL RuntimeError, each in the library's words.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._library = ctypes.CDLL(os.fspath(path))
        self._emulated = hasattr(self._library, "emulator_settle")  # tests/cuda/emulator: its GPU is the CPU
        self._library.flash_attn_last_error.restype = ctypes.c_char_p
        self._library.flash_attn_group_bytes_per_gpu.restype = ctypes.c_size_t
        self._library.flash_attn_shard.restype = _Range
        self._library.flash_attn_schedule.restype = _RingStep

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, causal: bool = False, scale: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        """On the tensors' GPU and torch's current stream: out like query, lse [B, H, Tq] in fp32. Scale 0: D**-0.5."""
        problem = _problem(query, key, value, causal, scale)
        _expect_on("cpu" if self._emulated else "cuda", query, key, value)
        out = torch.full_like(query, torch.nan)
        lse = torch.full((problem.batch, problem.heads, problem.seq_q), torch.nan, device=query.device)
        stream = torch.cuda.current_stream(query.device).cuda_stream if query.is_cuda else 0
        pointers = [_pointer(x) for x in (query, key, value, out, lse)]
        with torch.cuda.device(query.device) if query.is_cuda else nullcontext():  # the library's is the current one
            self._call("flash_attn_forward", ctypes.byref(problem), *pointers, ctypes.c_void_p(stream))
        return out, lse

    @contextmanager
    def group(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        ranks: int,
        strategy: Strategy = "ring",
        transport: Transport = "copy",
        causal: bool = False,
        scale: float = 0.0,
    ) -> Iterator[Group]:
        """Ranks that have been given their shards of these tensors, which lie on the host or on a GPU."""
        problem = _problem(query, key, value, causal, scale)
        handle = ctypes.c_void_p()
        which = _choice("strategy", strategy, _STRATEGIES), _choice("transport", transport, _TRANSPORTS)
        _wait_for(query, key, value)
        self._call("flash_attn_group_create", ctypes.byref(problem), ranks, *which, ctypes.byref(handle))
        try:
            self._call("flash_attn_group_load", handle, *(_pointer(x) for x in (query, key, value)))
            yield Group(self, handle, query)
        finally:
            self._library.flash_attn_group_destroy(handle)

    def reference(
        self, query: Tensor, key: Tensor, value: Tensor, *, causal: bool = False, scale: float = 0.0, every: int = 1
    ) -> Tensor:
        """The library's own fp64 on the CPU, of every `every`-th query; the other rows are NaN."""
        problem = _problem(query, key, value, causal, scale)
        _expect_on("cpu", query, key, value)
        out = torch.full(query.shape, torch.nan, dtype=torch.float64)
        pointers = [_pointer(x) for x in (query, key, value)]
        self._call("flash_attn_reference", ctypes.byref(problem), *pointers, every, _pointer(out))
        return out

    def shard(self, total: int, ranks: int, rank: int) -> range:
        _expect_rank(ranks, rank)
        found = self._library.flash_attn_shard(total, ranks, rank)
        return range(found.start, found.start + found.length)

    def schedule(self, seq_q: int, seq_k: int, ranks: int, rank: int, *, causal: bool = False) -> list[RingStep]:
        """What a rank of a ring does, step by step."""
        _expect_rank(ranks, rank)
        problem = _Problem(1, 1, seq_q, seq_k, 64, causal, 0.0, 0)
        steps = [self._library.flash_attn_schedule(ctypes.byref(problem), ranks, rank, step) for step in range(ranks)]
        return [
            RingStep(
                one.shard,
                range(one.keys.start, one.keys.start + one.keys.length),
                one.offset,
                bool(one.computes),
                bool(one.first),
                bool(one.last),
            )
            for one in steps
        ]

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            words = self._library.flash_attn_last_error().decode()
            raise ValueError(words) if status == _REFUSED else RuntimeError(f"{name}: {words}")


class Group:
    """Made by `CudaLibrary.group`."""

    def __init__(self, library: CudaLibrary, handle: ctypes.c_void_p, query: Tensor) -> None:
        self._library, self._handle, self._query = library, handle, query

    def forward(self) -> tuple[Tensor, float]:
        """The whole output, where the query lies, and the milliseconds it took. Can be called again."""
        milliseconds = ctypes.c_float()
        self._library._call("flash_attn_group_forward", self._handle, ctypes.byref(milliseconds))
        out = torch.full_like(self._query, torch.nan)
        _wait_for(out)
        self._library._call("flash_attn_group_store", self._handle, _pointer(out))
        return out, milliseconds.value

    @property
    def bytes_per_gpu(self) -> int:
        return int(self._library._library.flash_attn_group_bytes_per_gpu(self._handle))


def _problem(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> _Problem:
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dim() != 4 or not x.is_contiguous():
            raise ValueError(f"{name}: expected a contiguous [B, T, H, D]; got {list(x.shape)}, strides {x.stride()}.")
        if x.dtype not in _DTYPES or x.dtype != query.dtype:
            raise TypeError(f"{name}: expected float32 or bfloat16, the same for all; got {x.dtype}.")
    B, Tq, H, D = query.shape
    Tk = key.shape[1]
    if key.shape != (B, Tk, H, D) or value.shape != key.shape:
        shapes = f"{list(key.shape)} and {list(value.shape)}"
        raise ValueError(f"key, value: expected [{B}, Tk, {H}, {D}] like query; got {shapes}.")
    return _Problem(B, H, Tq, Tk, D, causal, scale, _DTYPES[query.dtype])


def _expect_on(kind: str, query: Tensor, key: Tensor, value: Tensor) -> None:
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.device.type != kind or x.device != query.device:
            where = "the CPU" if kind == "cpu" else "a GPU, the same for all"
            raise ValueError(f"{name}: expected a tensor on {where}; got one on {x.device}.")


def _expect_rank(ranks: int, rank: int) -> None:
    if not 0 <= rank < ranks:
        raise ValueError(f"rank: expected 0 <= rank < ranks; got rank {rank} of {ranks}.")


def _choice(name: str, word: str, choices: dict[str, int]) -> int:
    if word not in choices:
        raise ValueError(f"{name}: expected {' or '.join(choices)}; got {word!r}.")
    return choices[word]


def _wait_for(*tensors: Tensor) -> None:
    """Until torch has made them: groups copy on the default stream, which torch's other streams do not wait for."""
    for device in {x.device for x in tensors if x.is_cuda}:
        torch.cuda.current_stream(device).synchronize()


def _pointer(x: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(x.data_ptr())
