"""The documented grid: one problem over sequence lengths, ours beside one baseline, in the documented table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..testing.inputs import Case
from .providers import Ours, Provider
from .run import why_not
from .suites import Cell, Direction
from .summary import is_plain

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}

OURS, PLAIN = "stream", "plain"
BASELINES = {"cuda": ("fa3", "sdpa cudnn", "sdpa flash", "sdpa", PLAIN), "cpu": ("sdpa", PLAIN)}
"""Whom ours is compared with: the first that can. Where no peer can (dropout, whose mask is a library's own), the same
call without modifiers, which shows what they cost."""


@dataclass(frozen=True)
class Grid:
    """What the flags of the command say."""

    seq: tuple[int, ...] = (512, 1024, 2048, 4096)
    batch: int = 1
    heads: int = 8
    kv_heads: int = 8
    dim: int = 64
    dtype: str = "fp32"
    device: str = "cpu"
    causal: bool = True
    backward: bool = False
    decode: bool = False
    dropout: float = 0.0
    chunk: int = 0

    def cells(self, ours: Sequence[str] = (OURS,), peers: Sequence[str] = ()) -> list[Cell]:
        """One cell per length. Ours but the first are measured beside it."""
        direction: Direction = "backward" if self.backward else "forward"
        return [
            Cell(self._name(n), self.case(n), direction, (ours[0],), tuple(peers), tuple(ours[1:]), chunk=self.chunk)
            for n in self.seq
        ]

    def case(self, length: int) -> Case:
        shape = (self.batch, 1 if self.decode else length, length, self.heads, self.kv_heads, self.dim, self.dim)
        return Case(*shape, DTYPES[self.dtype], self.device, causal=self.causal, dropout_p=self.dropout)

    def _name(self, length: int) -> str:
        words = (
            "decode" if self.decode else "causal" if self.causal else "full",
            f"gqa {self.heads}/{self.kv_heads}" if self.kv_heads != self.heads else "",
            f"chunk={self.chunk}" if self.chunk else "",
            f"dropout={self.dropout:g}" if self.dropout else "",
            str(length),
            self.dtype,
        )
        return " ".join(word for word in words if word)


def why_not_all(name: str, providers: dict[str, Provider], cells: Iterable[Cell]) -> str | None:
    """Why a provider cannot compute the cells: its reason for the first that it cannot."""
    return next((reason for cell in cells if (reason := why_not(providers[name], cell)) is not None), None)


def baseline(providers: dict[str, Provider], cells: Sequence[Cell]) -> tuple[str, dict[str, str]]:
    """Whom ours is compared with where nobody was named, and why each before it was passed over."""
    passed_over: dict[str, str] = {}
    for name in BASELINES[cells[0].case.device]:
        if (reason := why_not_all(name, providers, cells)) is None:
            return name, passed_over
        passed_over[name] = reason
    raise AssertionError("attention without modifiers computes every cell")


def split(names: Sequence[str], providers: dict[str, Provider]) -> tuple[list[str], list[str]]:
    """Those named as ours and peers, each in the order of the table; ours is `stream` unless a backend was named."""
    mine = [name for name in names if isinstance(providers[name], Ours) and not is_plain(name)]
    peers = [name for name in names if name not in mine]
    ranked = [name for name in BASELINES["cuda"] if name in peers]
    return mine or [OURS], ranked + [name for name in peers if name not in ranked]


def others(cell: Cell) -> tuple[str, ...]:
    """Who stands beside ours in the table; the first is the baseline."""
    return (*cell.peers, *cell.beside)


def documented(entry: dict[str, Any], cell: Cell) -> dict[str, Any]:
    """The keys that readers of the documented JSON look for. Those of fa3 are there only where FlashAttention-3 ran."""
    ours, peer = cell.ours[0], next(iter(others(cell)), None)
    one, other = entry["providers"][ours], entry["providers"].get(peer, {})
    keys = {
        "seq_len": cell.case.Tk,
        "fused": ours,
        "fused_time_ms": one.get("median_ms"),
        "fused_tflops": one.get("tflops"),
        "fused_gb_per_s": one.get("gb_per_s"),
        "baseline": peer,
        "baseline_time_ms": other.get("median_ms"),
        "baseline_tflops": other.get("tflops"),
        "speedup_vs_baseline": _speedup(one, other),
    }
    fa3 = entry["providers"].get("fa3", {})
    if "median_ms" in fa3:
        keys |= {"fa3_time_ms": fa3["median_ms"], "fa3_tflops": fa3["tflops"], "speedup_vs_fa3": _speedup(one, fa3)}
    return keys


def table(entries: Sequence[dict[str, Any]], cells: Sequence[Cell], providers: dict[str, Provider]) -> list[list[str]]:
    """The documented columns under the documented heads, then bandwidth and spread, then everybody else."""
    ours, names = cells[0].ours[0], others(cells[0])
    first, rest = names[:1], names[1:]

    def headed(name: str) -> list[str]:
        label = providers[name].label.replace(" ", "-")
        return [f"{label}(ms)", f"{label}(TF)", f"{label}/Fused(ms)"]

    def columns(names: Sequence[str], of: Callable[[str], list[str]]) -> list[str]:
        return [column for name in names for column in of(name)]

    heads = ["SeqLen", *(["Chunk"] if cells[0].chunk else []), "Fused(ms)", "Fused(TF)", *columns(first, headed)]
    rows = [[*heads, "Fused(GB/s)", "Fused(p20-p80)", *columns(rest, headed)]]
    for entry, cell in zip(entries, cells, strict=True):
        fused = entry["providers"][ours]
        compared = {name: _compared(fused, one) for name, one in entry["providers"].items()}
        spread = f"{fused['p20_ms']:.3f}-{fused['p80_ms']:.3f}" if "median_ms" in fused else "-"
        row = [str(cell.case.Tk), *([str(cell.chunk)] if cell.chunk else []), _time(fused), _number(fused, "tflops")]
        row += [*columns(first, compared.__getitem__), _number(fused, "gb_per_s"), spread]
        rows.append(row + columns(rest, compared.__getitem__))
    return rows


def errors(entry: dict[str, Any]) -> str:
    """Everybody's largest error against fp64 beside what it may be."""
    shown = (
        f"{name} {one['error']:.1e} of {one['allowed']:.1e}{'' if one['right'] else ' WRONG'}"
        for name, one in entry["providers"].items()
        if "error" in one
    )
    return ", ".join(shown)


def _compared(fused: dict[str, Any], one: dict[str, Any]) -> list[str]:
    speedup = _speedup(fused, one)
    return [_time(one), _number(one, "tflops"), "-" if speedup is None else f"{speedup:.2f}"]


def _speedup(fused: dict[str, Any], one: dict[str, Any]) -> float | None:
    """Our speed as a multiple of another's, of the medians that stand beside it."""
    return one["median_ms"] / fused["median_ms"] if "median_ms" in one and "median_ms" in fused else None


def _time(one: dict[str, Any]) -> str:
    if "median_ms" in one:
        return f"{one['median_ms']:.3f}"
    return "WRONG" if one.get("right") is False and "error" in one else "FAILED" if "failed" in one else "-"


def _number(one: dict[str, Any], key: str) -> str:
    if key not in one:
        return "-"
    return f"{one[key]:.2f}" if one[key] >= 1 else f"{one[key]:.4f}"
