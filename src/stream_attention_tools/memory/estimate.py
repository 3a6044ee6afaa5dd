"""How much memory a call or a cache will take, found out without any: both are made on tensors that have none.

A call is planned for its device and run on "meta" tensors, and a dispatch mode adds up what it allocates and when. So
there is no formula here that could differ from what the kernels do: scratch, splits and copies are counted because they
are made. Only how often is cut short: the eager backend, which takes the same memory for every tile, walks a few.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stream_attention.backends import COMPILED
from stream_attention.base.device import arch, num_sms
from stream_attention.base.errors import check_int as count
from stream_attention.base.errors import refuse
from stream_attention.base.kv_layouts import ContiguousKV, PagedKV
from stream_attention.base.problem import UNBOUNDED
from stream_attention.dispatch.plan import Plan, plan, requested
from stream_attention.dispatch.validate import DTYPES
from stream_attention.kvcache import quantize_kv

from ..testing.inputs import Case, stated
from ..warmup import Call, Gpu, compute, launch, with_tiles

CUDA_BLOCK = 512
"""Bytes to which CUDA's caching allocator rounds up. Large blocks that it kept for reuse may be up to 1 MiB larger."""


@dataclass(frozen=True)
class AttentionMemory:
    """Bytes of one call of `attention`, on the backend that would compute it."""

    backend: str
    inputs: int  # query, key and value, and mask, bias, slopes and sink where there are any
    saved: int  # output and LSE, which is all that a backward needs beside the inputs
    forward: int  # the most allocated beyond the inputs while the forward runs, the output included
    backward: int | None  # likewise while the backward runs, with output, LSE and the gradients in and out; None: none
    matrix: int  # of the Tq x Tk scores of all heads in the call's dtype, which are never allocated

    @property
    def peak(self) -> int:
        """The most at any time, inputs included."""
        return self.inputs + max(self.forward, self.backward or 0)

    def __str__(self) -> str:
        backward = "" if self.backward is None else f", backward {_size(self.backward)}"
        return (
            f"{self.backend}: inputs {_size(self.inputs)}; beyond them forward {_size(self.forward)}{backward}; "
            f"saved {_size(self.saved)}; the matrix would be {_size(self.matrix)}"
        )


def estimate_attention_memory(
    batch: int,
    q_len: int,
    heads: int,
    head_dim: int,
    *,
    k_len: int | None = None,
    kv_heads: int | None = None,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    mask: bool = False,
    bias: bool = False,
    alibi: bool = False,
    sink: bool = False,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    backward: bool = True,
    device: torch.device | str | None = None,
    gpu: tuple[int, int] | None = None,
    backend: str = "auto",
) -> AttentionMemory:
    """What a call of `attention` on these shapes will take, and what it will take in training. Allocates nothing.

    Args:
        batch, q_len, heads, head_dim: of the query `[B, Tq, Hq, D]`.
        k_len, kv_heads, value_dim: of key and value; None: those of the query.
        mask, bias: whether there are any, `[Tq, Tk]` and `[Hq, Tq, Tk]` in the dtype of the query; no gradient of it.
        alibi, sink: whether there are any, one fp32 number per head each.
        backward: also estimate the backward, for the gradients of query, key and value.
        device: cpu or cuda; None: cuda where there is a GPU or `gpu` is given, else cpu.
        gpu: (compute capability, multiprocessors) of a GPU that need not be here; (90, 132) is an H100 or H200.
        backend: as in `attention`, but not "reference", which does hold the matrix.

    Figures for a GPU are exact, in whole blocks of its allocator. On a CPU they are so but for a few MiB: tiles of up
    to 2 MiB that what is visible makes smaller or unnecessary, and buffers of threads inside torch's own flash op. Not
    for use while other threads launch Triton kernels.

    >>> estimate_attention_memory(1, 4096, 8, 64, dtype=torch.float32, device="cpu", backward=False).saved == (
    ...     4096 * 8 * (64 + 1) * 4
    ... )
    True
    """
    kv_heads = heads if kv_heads is None else kv_heads
    k_len, value_dim = q_len if k_len is None else k_len, head_dim if value_dim is None else value_dim
    sizes = {"batch": batch, "q_len": q_len, "heads": heads, "head_dim": head_dim, "kv_heads": kv_heads}
    for name, size in (sizes | {"k_len": k_len, "value_dim": value_dim}).items():
        count(name, size, 0 if name in ("batch", "q_len", "k_len") else 1)
    if dtype not in DTYPES:
        refuse("dtype", "float16, bfloat16, float32 or float64", dtype)
    if backend == "reference":
        refuse("backend", "one that streams", repr(backend), "The reference holds the matrix, several times over.")
    where, on = _device_and_gpu(device, gpu)
    options: dict[str, Any] = {"causal": causal, "window": window, "softcap": softcap, "dropout_p": dropout_p}
    case = Case(batch, q_len, k_len, heads, kv_heads, head_dim, value_dim, dtype, **options, sink=sink)
    x = Call(with_tiles(case, mask, bias, alibi)).inputs("meta")
    problem, inputs = stated(x, x.tensors, x.options)
    problem = problem.replace(device=where, arch=on.arch, num_sms=on.num_sms)
    asked = requested(backend)
    forward = plan(problem, asked)
    unit = CUDA_BLOCK if where.type == "cuda" else 1
    of_inputs = sum(_rounded(t.nbytes, unit) for t in inputs[:7] if t is not None)
    compiled = forward.backend in COMPILED
    if compiled and where.type == "cpu":
        refuse("backend", '"auto" or "eager" on a CPU', repr(backend), "Triton's interpreter is not what one measures.")
    wide = 8 if dtype is torch.float64 else 4
    out, lse = batch * q_len * heads * value_dim * dtype.itemsize, batch * q_len * heads * wide

    def peak(direction: bool) -> int:
        with _Tally(unit, (t for t in inputs if t is not None)) as tally:
            if compiled:
                launch(problem, inputs, asked, direction)
            else:
                compute(problem, inputs, asked, direction, _few_tiles)
        return tally.peak + (0 if inputs.seed is None else _rounded(inputs.seed.nbytes, unit))

    saved = _rounded(out, unit) + _rounded(lse, unit)
    matrix = batch * heads * q_len * k_len * dtype.itemsize
    return AttentionMemory(forward.backend, of_inputs, saved, peak(False), peak(True) if backward else None, matrix)


def estimate_kv_cache_bytes(
    batch: int,
    tokens: int,
    kv_heads: int,
    head_dim: int,
    *,
    value_dim: int | None = None,
    layers: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    page: int | None = None,
    format: str | None = None,
    **coding: Any,
) -> int:
    """What caches of `layers` layers hold when they are made: `nbytes` of the cache, before it is.

    Args:
        tokens: that a row can hold. With `page` a row has whole pages.
        value_dim: None: that of the keys.
        page: tokens of a page, for a `PagedKV`; None: a `ContiguousKV` with lengths.
        format: "fp8", "int8" or "int4" for what `quantize_kv` makes of it; None: in full precision.
        coding: keywords of `quantize_kv`: group, residual, keys, values, scale_dtype.

    >>> estimate_kv_cache_bytes(16, 32768, 8, 128, layers=32) / 2**30  # Llama-3-8B in bf16
    64.0000019...
    >>> estimate_kv_cache_bytes(16, 32768, 8, 128, layers=32, format="int4") / 2**30
    18.30...
    """
    for name, size in (("batch", batch), ("tokens", tokens), ("kv_heads", kv_heads), ("layers", layers)):
        count(name, size, 0 if name in ("batch", "tokens") else 1)
    dims = count("head_dim", head_dim, 1), count("value_dim", head_dim if value_dim is None else value_dim, 1)
    if dtype not in DTYPES:
        refuse("dtype", "float16, bfloat16, float32 or float64", dtype)
    if coding and format is None:
        refuse(", ".join(coding), "with a format", "none")
    with torch.device("meta"):
        lengths = torch.empty(batch, dtype=torch.int32)
        cache: ContiguousKV | PagedKV
        if page is None:
            key, value = (torch.empty(batch, tokens, kv_heads, dim, dtype=dtype) for dim in dims)
            cache = ContiguousKV(key, value, lengths)
        else:
            pages = -(-tokens // count("page", page, 1))
            key, value = (torch.empty(batch * pages, page, kv_heads, dim, dtype=dtype) for dim in dims)
            cache = PagedKV(key, value, torch.empty(batch, pages, dtype=torch.int32), lengths)
        made = cache if format is None else quantize_kv(cache, format, **coding)
    return layers * made.nbytes


class _Tally(TorchDispatchMode):
    """Bytes of the storages that ops make within it: allocated now, and at most."""

    def __init__(self, unit: int, there: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.unit, self.allocated, self.peak = unit, 0, 0
        self._alive = {tensor.untyped_storage()._cdata for tensor in there}

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op is torch.ops.aten._efficient_attention_backward.default:  # its function for meta tensors takes no `out`
            result = (*(torch.empty_like(t) for t in args[1:4]), torch.empty(0))
        else:
            result = op(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.device.type == "meta":
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._alive:
            return
        size = _rounded(storage.nbytes(), self.unit)
        self._alive.add(key)
        self.allocated += size
        self.peak = max(self.peak, self.allocated)
        weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self._alive.discard(key)
        self.allocated -= size


def _few_tiles(planned: Plan) -> Plan:
    """The same plan for queries that stand so early that the last of them alone see keys, few, but whole tiles."""
    problem, config = planned.problem, planned.config
    left, right = (
        config.block_k if side == UNBOUNDED else min(side, config.block_k) for side in (problem.left, problem.right)
    )
    start = left + config.block_q - problem.q_len
    early = problem.replace(device=torch.device("meta"), q_start=start, q_base=start, right=right)
    return planned._replace(problem=early if problem.left == UNBOUNDED else early.replace(left=left))


def _device_and_gpu(device: torch.device | str | None, gpu: tuple[int, int] | None) -> tuple[torch.device, Gpu]:
    if device is None:
        device = "cuda" if gpu is not None or torch.cuda.is_available() else "cpu"
    where = torch.device(device)
    if where.type not in ("cpu", "cuda"):
        refuse("device", "cpu or cuda", where)
    if where.type == "cpu":
        if gpu is not None:
            refuse("gpu", "None for device cpu", gpu)
        return where, Gpu(0, 0)
    if gpu is not None:
        capability, number = gpu
        return where, Gpu(count("gpu", capability, 1), count("gpu", number, 1))
    if not torch.cuda.is_available():
        refuse("gpu", "(compute capability, multiprocessors), as torch finds no GPU", None, "(90, 132) is an H200.")
    return where, Gpu(arch(where), num_sms(where))


def _rounded(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def _size(size: int) -> str:
    return f"{size / (1 << 30):.2f} GiB" if size >= 1 << 30 else f"{size / (1 << 20):.2f} MiB"
