"""What is measured: a cell is one problem, in one direction, and who computes it; a suite is a list of cells."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..testing.inputs import Case

Direction = Literal["forward", "backward", "forward+backward"]
WORK = {"forward": 1.0, "backward": 2.5, "forward+backward": 3.5}
"""FLOPs of a direction, as a multiple of the forward's."""
FLOPS = "2 B Hq Tq Tk (D + Dv), halved where causal and Tq = Tk, x2.5 backward, x3.5 forward+backward"
TRAFFIC = "bytes of query, key, value and out once per call, x2 backward, x3 forward+backward"
"""What `flops` and `tensor_bytes` count, for readers of a table."""


class Cell(NamedTuple):
    name: str
    case: Case
    direction: Direction
    ours: tuple[str, ...]
    peers: tuple[str, ...]
    beside: tuple[str, ...] = ()  # measured and shown too, but compared with nobody
    bar: float | None = None  # what our time may be at most, as a multiple of the fastest peer's
    unit: Literal["TFLOP/s", "TB/s"] = "TFLOP/s"
    chunk: int = 0  # the sequence arrives in chunks of so many queries, each a call against all keys so far


class Tensors(NamedTuple):
    """Inputs of one call: query, key, value, the keywords of `attention`, and the gradient that arrives at out."""

    query: Tensor
    key: Tensor
    value: Tensor
    options: dict[str, Any]
    grad_out: Tensor


def draw(case: Case, seed: int = 0) -> Tensors:
    """Random inputs, drawn on the case's device. `testing.make` draws on the CPU in fp64: too slow for large cells."""
    device = torch.device(case.device)
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype = case.dtype) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    options: dict[str, Any] = {"causal": case.causal}
    if case.window is not None:
        options["window"] = case.window
    if case.mask is not None:
        options["mask"] = torch.rand(case.mask, generator=generator, device=device) > 0.3
    if case.bias is not None:
        options["bias"] = normal(*case.bias, dtype=case.aux_dtype or case.dtype)
    if case.alibi is not None:
        slopes = 2.0 ** (-8.0 * torch.arange(1, case.Hq + 1, device=device) / case.Hq)
        options["alibi_slopes"] = slopes if case.alibi == "H" else slopes.expand(case.B, -1).contiguous()
    if case.sink:
        options["sink"] = normal(case.Hq, dtype=torch.float32)
    if case.softcap:
        options["softcap"] = case.softcap
    if case.scale is not None:
        options["scale"] = case.scale
    if case.dropout_p:
        options |= {"dropout_p": case.dropout_p, "seed": torch.tensor([seed, 0], device=device)}
    return Tensors(
        normal(case.B, case.Tq, case.Hq, case.D),
        normal(case.B, case.Tk, case.Hkv, case.D),
        normal(case.B, case.Tk, case.Hkv, case.Dv),
        options,
        normal(case.B, case.Tq, case.Hq, case.Dv),
    )


def chunked(x: Tensors, size: int) -> list[Tensors]:
    """The calls in which a sequence arrives, `size` queries at a time against all keys so far: views, no copies."""
    length = x.query.shape[1]
    if not size:
        return [x]
    spans = [(start, min(start + size, length)) for start in range(0, length, size)]
    return [
        Tensors(x.query[:, start:end], x.key[:, :end], x.value[:, :end], x.options, x.grad_out[:, start:end])
        for start, end in spans
    ]


def calls(cell: Cell) -> list[Case]:
    """The problems of a cell's calls, one of each kind: the first chunk, whose keys are its own, the second, the last.

    What a provider cannot do in one of them it cannot do in the cell.
    """
    case, size = cell.case, cell.chunk
    if not size:
        return [case]
    ends = {min(size, case.Tk): None, min(2 * size, case.Tk): None, case.Tk: None}
    return [replace(case, Tq=(end - 1) % size + 1, Tk=end) for end in ends]


def shortened(case: Case, rows: int, batch: int) -> Case:
    """The same features with at most so many queries, keys and batch entries; fewer queries than keys stay fewer."""
    q_rows = rows if case.Tq >= case.Tk else rows // 2
    limits = (batch, case.Hq, q_rows, rows)

    def shape(of: tuple[int, ...] | None) -> tuple[int, ...] | None:
        return of and tuple(min(size, limit) for size, limit in zip(of, limits[-len(of) :], strict=True))

    return replace(
        case,
        B=min(case.B, batch),
        Tq=min(case.Tq, q_rows),
        Tk=min(case.Tk, rows),
        mask=shape(case.mask),
        bias=shape(case.bias),
    )


def flops(case: Case, direction: Direction = "forward") -> float:
    """2 B Hq Tq Tk (D + Dv), halved for a square causal problem, times 2.5 for backward: one formula for everybody.

    Nothing is taken off for what a mask, a window or dropout would let a kernel skip.
    """
    forward = 2.0 * case.B * case.Hq * case.Tq * case.Tk * (case.D + case.Dv)
    return forward * (0.5 if case.causal and case.Tq == case.Tk else 1.0) * WORK[direction]


def kv_bytes(case: Case) -> float:
    """Bytes of K and V: what a decode step cannot avoid reading."""
    return float(case.B * case.Tk * case.Hkv * (case.D + case.Dv) * case.dtype.itemsize)


def tensor_bytes(cell: Cell, case: Case) -> float:
    """Bytes of query, key, value and out, once per call; twice for backward, which has their gradients too."""
    q_row, out_row = case.Hq * case.D, case.Hq * case.Dv
    kv_row = case.Hkv * (case.D + case.Dv)
    size = cell.chunk or case.Tk
    keys = sum(min(start + size, case.Tk) for start in range(0, case.Tk, size))
    once = case.B * (case.Tq * (q_row + out_row) + keys * kv_row) * case.dtype.itemsize
    return float(once * {"forward": 1, "backward": 2, "forward+backward": 3}[cell.direction])


# Suites


def cpu() -> Iterator[Cell]:
    """On a CPU: `attention` against SDPA where SDPA can, the blocked pass against dense torch elsewhere."""
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
    for length, dtype in ((n, d) for n in (1024, 2048, 4096) for d in dtypes):
        base = Case(B=1, Tq=length, Tk=length, Hq=8, Hkv=8, D=64, Dv=64, dtype=dtypes[dtype])
        for kind, case in (
            ("full", base),
            ("causal", replace(base, causal=True)),
            ("gqa 8/2 causal", replace(base, causal=True, Hkv=2)),
        ):
            directions: tuple[Direction, ...] = ("forward", "forward+backward")
            for direction in directions:
                yield Cell(f"{kind} {length} {dtype}", case, direction, ("stream",), ("sdpa",), bar=1.05)
    for length, bar in ((2048, 2.0), (8192, 1.0)):
        for dtype in dtypes:
            base = Case(B=1, Tq=length, Tk=length, Hq=4, Hkv=4, D=64, Dv=64, dtype=dtypes[dtype])
            for kind, case in (
                ("causal alibi", replace(base, causal=True, alibi="H")),
                ("mask", replace(base, mask=(1, 1, length, length))),
                ("softcap", replace(base, softcap=20.0)),
                ("plain", base),
            ):
                yield Cell(f"{kind} {length} {dtype}", case, "forward", ("blocked",), ("dense",), bar=bar)


def _on_gpu(batch: int, lengths: tuple[int, int], heads: tuple[int, int], head_dim: int, causal: bool = False) -> Case:
    """A bf16 problem by (Tq, Tk) and (Hq, Hkv)."""
    (q_len, k_len), (q_heads, kv_heads) = lengths, heads
    return Case(
        B=batch,
        Tq=q_len,
        Tk=k_len,
        Hq=q_heads,
        Hkv=kv_heads,
        D=head_dim,
        Dv=head_dim,
        dtype=torch.bfloat16,
        device="cuda",
        causal=causal,
    )


def forward(direction: Direction = "forward") -> Iterator[Cell]:
    """The grid of the published comparisons: hidden 2048, batch * length = 16384, bf16."""
    for head_dim in (64, 128, 256):
        for causal in (False, True):
            for length in (512, 1024, 2048, 4096, 8192, 16384):
                heads = 2048 // head_dim
                case = _on_gpu(16384 // length, (length, length), (heads, heads), head_dim, causal)
                name = f"d{head_dim} {'causal' if causal else 'full'} {length}"
                yield Cell(name, case, direction, ("gluon", "triton"), ("sdpa flash", "sdpa cudnn", "fa3"))


def backward() -> Iterator[Cell]:
    """The same grid, backward alone, and what `deterministic=True` costs."""
    for cell in forward("backward"):
        yield cell._replace(beside=("triton deterministic",))


def modifiers(direction: Direction = "forward") -> Iterator[Cell]:
    """What each modifier costs: d128 causal 4k with it, against the same call without it."""
    length = 4096
    base = _on_gpu(4, (length, length), (16, 16), 128, causal=True)
    for name, case in (
        ("window 1024", replace(base, window=(1024, 0))),
        ("mask", replace(base, mask=(1, 1, length, length))),
        ("bias", replace(base, bias=(1, 1, length, length))),
        ("alibi", replace(base, alibi="H")),
        ("sink", replace(base, sink=True)),
        ("softcap", replace(base, softcap=20.0)),
        ("dropout", replace(base, dropout_p=0.1)),
        ("gqa 16/4", replace(base, Hkv=4)),
        ("everything", replace(base, window=(1024, 0), alibi="H", sink=True, softcap=20.0, dropout_p=0.1)),
    ):
        yield Cell(name, case, direction, ("gluon", "triton"), ("plain",))


def modifiers_backward() -> Iterator[Cell]:
    """What each costs in the backward, gradients of query, key and value alone."""
    return modifiers("backward")


def decode() -> Iterator[Cell]:
    """One query per sequence against a long cache."""
    for batch, q_heads, kv_heads, head_dim, keys in (
        (1, 32, 8, 128, 8192),
        (1, 32, 8, 128, 131072),
        (8, 32, 8, 128, 8192),
        (8, 32, 8, 128, 32768),
        (64, 32, 8, 128, 8192),
        (64, 32, 8, 128, 1024),
        (1, 32, 32, 128, 16384),
        (16, 64, 8, 128, 16384),
        (8, 16, 2, 64, 32768),
        (16, 8, 1, 256, 16384),
    ):
        case = _on_gpu(batch, (1, keys), (q_heads, kv_heads), head_dim)
        name = f"b{batch} {q_heads}/{kv_heads} d{head_dim} {keys}"
        yield Cell(name, case, "forward", ("gluon", "triton"), ("sdpa flash", "sdpa cudnn", "fa3"), unit="TB/s")


def small() -> Iterator[Cell]:
    """Calls so short that the host decides: what one takes in all, beside FlashAttention-3's own op."""
    for batch, length, heads, head_dim in (
        (1, 128, 8, 64),
        (1, 512, 16, 64),
        (4, 256, 16, 128),
        (32, 128, 12, 64),
        (256, 64, 8, 32),
    ):
        for causal in (False, True):
            case = _on_gpu(batch, (length, length), (heads, heads), head_dim, causal)
            name = f"b{batch} s{length} h{heads} d{head_dim} {'causal' if causal else 'full'}"
            yield Cell(name, case, "forward", ("stream",), ("fa3",), beside=("sdpa",), bar=1.0)


SUITES: dict[str, Callable[[], Iterator[Cell]]] = {
    "cpu": cpu,
    "forward": forward,
    "backward": backward,
    "modifiers": modifiers,
    "modifiers-backward": modifiers_backward,
    "decode": decode,
    "small": small,
}
