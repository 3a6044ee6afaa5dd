"""What the compile gates share: problems on GPUs that are not here, and what may be said against a compiled kernel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest
import torch
from gates import GATED_TRITON
from torch import Tensor

from stream_attention.backends.installed import triton_release
from stream_attention.backends.triton.tuning import Row, configure_backward, configure_forward
from stream_attention.base.problem import KV, Hardware, Inputs, Operands, Problem, Shape, state_problem
from stream_attention_tools.testing.offline import Report

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32

RELEASE = triton_release()
"""The compiler that is looked at. What it is known to do is a table under this name, in the test that reads it."""

FULL = "3.6"
"""The release with which every kernel is compiled; with the others, for the sake of time, one of each kind."""

with_tables = pytest.mark.skipif(
    RELEASE not in GATED_TRITON,
    reason=f"nothing is known of what Triton {RELEASE} makes of these kernels: add it to RELEASES of "
    "tests/backends/gates.py, write its tables, and run `make gates-all`",
)
"""For tests that read such a table."""

SHARED_KIB = {80: 163, 86: 99, 89: 99, 90: 227, 120: 99}
"""Shared memory a program may use, by architecture."""

LONG = 16384
"""Keys of a problem that takes a row without a limit: more than every limit in the tables."""

C = TypeVar("C")


def problem(
    B: int = 4, Tq: int = 4096, Tk: int = 4096, Hq: int = 16, Hkv: int = 16, D: int = 128, **facts: Any
) -> Problem:
    """A problem in bf16 on an H200, except for `facts`."""
    h200 = Hardware(torch.device("cuda"), 90, 132)
    return Problem(Shape(B, Tq, Hq, Hkv, D, D), KV("dense", Tk), Operands(BF16), h200).replace(**facts)


def named(tables: Mapping[str, Mapping[int, tuple[Row[C], ...]]]) -> dict[str, tuple[Row[C], ...]]:
    """Every table by its kind and architecture, such as "plain 90"."""
    return {f"{kind} {arch}": table for kind, by_arch in tables.items() for arch, table in by_arch.items()}


@dataclass(frozen=True)
class Compiled:
    """One call of a gate: a problem with these modifiers on an architecture, configured as it would be there."""

    arch: int
    D: int
    causal: bool = False
    modifiers: tuple[str, ...] = ()
    Tk: int = 4096
    Tq: int = 128
    Hq: int = 2
    Hkv: int = 2
    Dv: int = 0
    dtype: torch.dtype = BF16
    backward: bool = False

    def inputs(self) -> Inputs:
        shift = 1 if "misaligned" in self.modifiers else 0

        def zeros(*shape: int, dtype: torch.dtype = self.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype)

        def rows(length: int, heads: int, dim: int) -> Tensor:
            lead = () if "packed" in self.modifiers else (1,)
            return zeros(length * heads * dim + shift)[shift:].view(*lead, length, heads, dim)

        tile = (1, 1, self.Tq, self.Tk)
        offsets = torch.tensor([0, self.Tq], dtype=torch.int32), torch.tensor([0, self.Tk], dtype=torch.int32)
        extra = {
            "mask": {"mask": zeros(*tile, dtype=torch.bool)},
            "bias": {"bias": zeros(*tile)},
            "bias of keys": {"bias": zeros(1, 1, 1, self.Tk)},
            "bias of queries": {"bias": zeros(1, 1, self.Tq, 1)},
            "alibi": {"alibi_slopes": zeros(1, self.Hq, dtype=F32)},
            "sink": {"sink": zeros(self.Hq, dtype=F32)},
            "dropout": {"seed": zeros(2, dtype=torch.int64)},
            "intervals": {"query_bounds": zeros(1, 1, 3, self.Tq, dtype=torch.int32)},
            "intervals of keys": {
                "query_bounds": zeros(1, 1, 3, self.Tq, dtype=torch.int32),
                "key_bounds": zeros(1, 1, 2, self.Tk, dtype=torch.int32),
            },
            "packed": {"cu_seqlens_q": offsets[0], "cu_seqlens_k": offsets[1]},
        }
        options = {name: tensor for modifier in self.modifiers for name, tensor in extra.get(modifier, {}).items()}
        return Inputs(
            rows(self.Tq, self.Hq, self.D),
            rows(self.Tk, self.Hkv, self.D),
            rows(self.Tk, self.Hkv, self.Dv or self.D),
            **options,
        )

    def problem(self, inputs: Inputs) -> Problem:
        stated = state_problem(
            inputs,
            q_len=self.Tq,
            k_len=self.Tk,
            causal=self.causal,
            window=(100, -1) if "window" in self.modifiers else (-1, -1),
            softcap=20.0 if "softcap" in self.modifiers else 0.0,
            scale=self.D**-0.5,
            dropout_p=0.1 if "dropout" in self.modifiers else 0.0,
            deterministic=False,
        )
        # Any backward fills a GPU of one processor, so that nothing of it is split.
        num_sms = 1 if self.backward and "splits" not in self.modifiers else 132
        there: dict[str, Any] = {"device": torch.device("cuda"), "arch": self.arch, "num_sms": num_sms}
        there |= {"backward": self.backward, "lse_grad": "gradient of the LSE" in self.modifiers}
        return stated.replace(tf32="tf32" in self.modifiers, **there)

    def config(self) -> Any:
        """Of the kernel with tiles: few queries, which a decode kernel may take, run there if they have a mask."""
        return self._configure(self.problem(self.inputs()))

    def _configure(self, stated: Problem) -> Any:
        return (configure_backward if self.backward else configure_forward)(stated)

    def shared_kib(self) -> int:
        """What the smallest GPU has that is given this configuration and makes the same products of it."""
        stated = self.problem(self.inputs())
        config = self._configure(stated)
        return min(
            kib
            for arch, kib in SHARED_KIB.items()
            if (arch == 90) == (self.arch == 90) and self._configure(stated.replace(arch=arch)) == config
        )

    def __str__(self) -> str:
        dims = f"d{self.D}" + (f"/{self.Dv}" if self.Dv else "")
        heads = f" {self.Hq}/{self.Hkv} heads, {self.Tq} queries" if self.Hq != self.Hkv or self.Tq < 128 else ""
        shape = f"{dims} {'causal' if self.causal else 'full'} {self.Tk}{heads}"
        return " ".join([f"sm_{self.arch}", str(self.dtype)[6:], shape, *self.modifiers])


def rows_of(arch: int, table: tuple[Row[Any], ...], **how: Any) -> list[Compiled]:
    return [Compiled(arch, row.width, row.causal, Tk=min(row.up_to, LONG), **how) for row in table]


def gated(calls: Mapping[str, Compiled], release: str) -> list[str]:
    """Of calls, those that are compiled with a release of Triton: all, or one of each kind, at D 128 if possible."""
    if release == FULL:
        return list(calls)
    kinds: dict[Any, str] = {}
    for name, call in sorted(calls.items(), key=lambda item: item[1].D != 128):
        width = 0 if call.modifiers or call.arch != 90 else call.D
        kinds.setdefault((call.arch, call.dtype, call.modifiers, call.Tq, width), name)
    return [name for name in calls if name in kinds.values()]


def faults(kernel: Compiled, product_rows: int, made: Report) -> list[str]:
    """What is wrong with what the compiler made, in sentences; nothing of spills and waits, which may be known.

    `product_rows` are those of a product's result: from 64 on, Hopper's matrix instructions take a warpgroup.
    """
    found, opcodes, limit = [], made.instructions, kernel.shared_kib()
    if made.shared_bytes > limit * 1024:
        found.append(f"does not run at all: {made.shared_bytes / 1024:g} KiB of shared memory where {limit} are")
    if made.registers > 255:
        found.append(f"{made.registers} registers")
    if kernel.dtype is not F32 or "tf32" in kernel.modifiers:
        right, wrong = ("HGMMA", "HMMA") if kernel.arch >= 90 and product_rows >= 64 else ("HMMA", "HGMMA")
        if not opcodes[right] or opcodes[wrong]:
            found.append(f"products are not by {right} alone: {opcodes}")
    if added := atomics(made):
        found.append(f"adds in no fixed order, by {', '.join(added)}")
    return found


def beyond(spilt: int, known: int) -> bool:
    """Whether spills, in bytes, are not as they are known: there are more, or a line for a kernel without any."""
    return spilt > known or (known > 0 and spilt == 0)


def atomics(made: Report) -> list[str]:
    """Instructions by which programs add to memory in the order in which they happen to come."""
    return [code for code in made.instructions if "ATOM" in code or ("RED" in code and "REDUX" not in code)]


def serialised(made: Report) -> bool:
    """Whether the assembler says that Hopper's products wait for each other."""
    return any("(C75" in warning for warning in made.warnings)
