"""What is measured: a cell is one problem, in one direction, and who computes it; a suite is a list of cells."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Literal, NamedTuple

import torch

from ..testing.inputs import Case, Tensors, packed, sequences

Direction = Literal["forward", "backward", "forward+backward"]
WORK = {"forward": 1.0, "backward": 2.5, "forward+backward": 3.5}
"""FLOPs of a direction, as a multiple of the forward's."""
FLOPS = (
    "2 B Hq Tq Tk (D + Dv), halved where causal and Tq = Tk, packed sequences one by one, x2.5 backward, "
    "x3.5 forward+backward"
)
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

    @property
    def everybody(self) -> tuple[str, ...]:
        return (*self.ours, *self.beside, *self.peers)


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
    """The same features with at most so many queries, keys and batch entries; fewer queries than keys stay fewer.

    Of packed sequences the first are kept, each with so many rows.
    """
    if case.packed:
        cut = [(min(q, rows if q >= k else rows // 2), min(k, rows)) for q, k in sequences(case)[:batch]]
        return packed(case, tuple(q for q, _ in cut), tuple(k for _, k in cut))
    q_rows = rows if case.Tq >= case.Tk else rows // 2
    limits = (batch, case.Hq, q_rows, rows)

    def shape(of: tuple[int, ...] | None) -> tuple[int, ...] | None:
        return of and tuple(min(size, limit) for size, limit in zip(of, limits[-len(of) :], strict=True))

    case = replace(case, B=min(case.B, batch), Tq=min(case.Tq, q_rows), Tk=min(case.Tk, rows))
    return replace(case, mask=shape(case.mask), bias=shape(case.bias))


def flops(case: Case, direction: Direction = "forward") -> float:
    """2 B Hq Tq Tk (D + Dv), halved for a square causal problem, times 2.5 for backward: one formula for everybody.

    Packed sequences count one by one. Nothing is taken off for what a mask, a window or dropout would let a kernel
    skip.
    """
    scores = sum(q * k * (0.5 if case.causal and q == k else 1.0) for q, k in sequences(case))
    return 2.0 * case.Hq * scores * (case.D + case.Dv) * WORK[direction]


def kv_bytes(case: Case) -> float:
    """Bytes of K and V: what a decode step cannot avoid reading."""
    keys = sum(k for _, k in sequences(case))
    return float(keys * case.Hkv * (case.D + case.Dv) * case.dtype.itemsize)


def tensor_bytes(cell: Cell, case: Case) -> float:
    """Bytes of query, key, value and out, once per call; twice for backward, which has their gradients too."""
    q_row, out_row = case.Hq * case.D, case.Hq * case.Dv
    kv_row = case.Hkv * (case.D + case.Dv)

    def read(keys: int) -> int:
        size = cell.chunk or keys
        return sum(min(start + size, keys) for start in range(0, keys, size))

    rows = sum(q * (q_row + out_row) + read(k) * kv_row for q, k in sequences(case))
    once = rows * case.dtype.itemsize
    return float(once * {"forward": 1, "backward": 2, "forward+backward": 3}[cell.direction])


# Suites


def cpu() -> Iterator[Cell]:
    """On a CPU: `attention` against SDPA where SDPA can, the blocked pass against dense torch elsewhere."""
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
    for length, dtype in product((1024, 2048, 4096), dtypes):
        base = Case(1, length, length, 8, 8, 64, 64, dtypes[dtype])
        causal = replace(base, causal=True)
        for kind, case in (("full", base), ("causal", causal), ("gqa 8/2 causal", replace(causal, Hkv=2))):
            both: tuple[Direction, ...] = ("forward", "forward+backward")
            for direction in both:
                yield Cell(f"{kind} {length} {dtype}", case, direction, ("stream",), ("sdpa",), bar=1.05)
    for (length, bar), dtype in product(((2048, 2.0), (8192, 1.0)), dtypes):
        base = Case(1, length, length, 4, 4, 64, 64, dtypes[dtype])
        for kind, case in (
            ("causal alibi", replace(base, causal=True, alibi="H")),
            ("mask", replace(base, mask=(1, 1, length, length))),
            ("softcap", replace(base, softcap=20.0)),
            ("plain", base),
        ):
            yield Cell(f"{kind} {length} {dtype}", case, "forward", ("blocked",), ("dense",), bar=bar)


def _on_gpu(batch: int, lengths: tuple[int, int], heads: tuple[int, int], head_dim: int, causal: bool = False) -> Case:
    """A bf16 problem by (Tq, Tk) and (Hq, Hkv)."""
    return Case(batch, *lengths, *heads, head_dim, head_dim, torch.bfloat16, "cuda", causal=causal)


KINDS = {"full": False, "causal": True}
GPU_PEERS = ("sdpa flash", "sdpa cudnn", "fa3")


def forward(direction: Direction = "forward") -> Iterator[Cell]:
    """The grid of the published comparisons: hidden 2048, batch * length = 16384, bf16."""
    lengths = (512, 1024, 2048, 4096, 8192, 16384)
    for head_dim, (kind, causal), length in product((64, 128, 256), KINDS.items(), lengths):
        heads = 2048 // head_dim
        case = _on_gpu(16384 // length, (length, length), (heads, heads), head_dim, causal)
        yield Cell(f"d{head_dim} {kind} {length}", case, direction, ("gluon", "triton"), GPU_PEERS)


def backward() -> Iterator[Cell]:
    """The same grid, backward alone, and what `deterministic=True` costs."""
    for cell in forward("backward"):
        yield cell._replace(beside=("gluon deterministic",))


def modifiers(direction: Direction = "forward") -> Iterator[Cell]:
    """What each modifier costs: d128 causal 4k with it, against the same call without it on the same backend."""
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
        yield Cell(name, case, direction, ("gluon", "triton"), ("plain gluon", "plain triton"))


def modifiers_backward() -> Iterator[Cell]:
    """What each costs in the backward, gradients of query, key and value alone."""
    return modifiers("backward")


RAGGED = (172, 615, 298, 789, 864, 84, 68, 2084, 188, 170, 4022, 452, 2075, 464, 913, 120, 897, 2109)
"""Lengths of packed sequences, log-uniform between 64 and 4096, drawn once by random.Random(3): 16384 rows."""
PACKS = {"32x512": (512,) * 32, "ragged": RAGGED, "4x4096": (4096,) * 4}


def shapes() -> Iterator[Cell]:
    """Grouped heads by length and packed sequences, equal and ragged: 16384 rows, bf16."""
    ours = ("gluon", "triton")
    for (kind, causal), length in product(KINDS.items(), (1024, 4096, 16384)):
        case = _on_gpu(16384 // length, (length, length), (32, 8), 128, causal)
        yield Cell(f"gqa 32/8 d128 {kind} {length}", case, "forward", ours, GPU_PEERS)
    for head_dim, packs in ((128, tuple(PACKS)), (64, ("ragged",)), (256, ("ragged",))):
        heads = 2048 // head_dim
        for (kind, causal), pack in product(KINDS.items(), packs):
            case = packed(_on_gpu(1, (1, 1), (heads, heads), head_dim, causal), PACKS[pack])
            yield Cell(f"packed d{head_dim} {kind} {pack}", case, "forward", ours, (*GPU_PEERS, "fa2"))


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
        yield Cell(name, case, "forward", ("decode",), GPU_PEERS, beside=("triton",), bar=1.0, unit="TB/s")


RAGGED_ROWS = (1314, 28012, 865, 9600, 729, 1432, 32649, 1223)
"""Keys of the rows of a ragged cache, log-uniform between 512 and 32768, drawn once by random.Random(8)."""


def caches() -> Iterator[Cell]:
    """One query per sequence against other kinds of cache, beside bf16 rows; ragged rows; tokens that are appended."""
    for batch, keys in ((8, 32768), (1, 8192)):
        case, problem = _on_gpu(batch, (1, keys), (32, 8), 128), f"b{batch} 32/8 d128 {keys}"
        bars = {f"paged {page}": 1.05 for page in (16, 64, 256)}
        bars |= {"fp8": 1 / 1.85, "int8": 1 / 1.85, "int4": 1 / 2.6} if batch == 8 else {}
        for kind in ("paged 16", "paged 64", "paged 256", "fp8", "int8", "int4", "batch invariant"):
            yield Cell(f"{kind} {problem}", case, "forward", (kind,), ("decode",), bar=bars.get(kind), unit="TB/s")
    ragged = packed(_on_gpu(1, (1, 1), (32, 8), 128), (1,) * len(RAGGED_ROWS), RAGGED_ROWS)
    yield Cell("ragged b8 32/8 d128", ragged, "forward", ("decode",), (), unit="TB/s")
    for batch in (8, 1):
        new = _on_gpu(batch, (1, 1), (32, 8), 128)
        name = f"append b{batch} 32/8 d128"
        yield Cell(name, new, "forward", ("append",), (), beside=("append rotary",), unit="TB/s")


def small() -> Iterator[Cell]:
    """Calls so short that host overhead dominates: what one takes in all, beside FlashAttention-3's own op."""
    shapes = ((1, 128, 8, 64), (1, 512, 16, 64), (4, 256, 16, 128), (32, 128, 12, 64), (256, 64, 8, 32))
    for (batch, length, heads, head_dim), (kind, causal) in product(shapes, KINDS.items()):
        case = _on_gpu(batch, (length, length), (heads, heads), head_dim, causal)
        name = f"b{batch} s{length} h{heads} d{head_dim} {kind}"
        yield Cell(name, case, "forward", ("stream",), ("fa3",), beside=("sdpa",), bar=1.0)


def head_dims() -> Iterator[Cell]:
    """Head dims that no tile of ours fits: padded to a multiple of 8, or computed by torch's own kernels above 256."""
    for head_dim, (kind, causal) in product((84, 100, 320, 512), KINDS.items()):
        heads = 2048 // head_dim
        case, name = _on_gpu(4, (4096, 4096), (heads, heads), head_dim, causal), f"d{head_dim} {kind} 4096"
        yield Cell(name, case, "forward", ("stream",), ("sdpa",), beside=("blocked",))
        yield Cell(name, case, "backward", ("stream",), ("sdpa",), beside=("stream deterministic",))


def fp8() -> Iterator[Cell]:
    """`attention(precision="fp8")`, quantisation included, beside bf16; rotated, and its kernel alone."""
    for cell in forward():
        if cell.case.Tq in (2048, 8192, 16384):
            peers, beside = ("bf16", "sdpa cudnn", "fa3"), ("e4m3 rotated", "e4m3 kernel")
            yield cell._replace(ours=("e4m3",), peers=peers, beside=beside)


SUITES: dict[str, Callable[[], Iterator[Cell]]] = {
    suite.__name__.replace("_", "-"): suite
    for suite in (cpu, forward, backward, modifiers, modifiers_backward, shapes, fp8, decode, caches, small, head_dims)
}
