"""The kernel that appends to caches, for GPUs that are not here: how a call is cut, and what is compiled for it."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing; run without TRITON_INTERPRET=1", allow_module_level=True)
pytest.importorskip("triton")

from append_cases import BF16, F16, F32, angles, caches, normal
from compile_gate import atomics

from stream_attention.base.kv_layouts import Rotary
from stream_attention.gpu.append import Append as Launches
from stream_attention_tools.testing.offline import compiling_for, report


class Append(NamedTuple):
    """A call of the gate: n tokens to rows of 64 slots, or pages of 16, with `pairs` turned."""

    n: int = 1
    D: int = 128
    H: int = 8
    B: int = 2
    paged: bool = True
    pairs: int = 0
    interleaved: bool = False
    dtype: torch.dtype = BF16
    offset: int = 0
    arch: int = 90

    def launched(self) -> list[Any]:
        """What is compiled for it, in the order of launches."""

        def shifted(t: Tensor) -> Tensor:
            return torch.zeros(t.numel() + self.offset, dtype=t.dtype)[self.offset :].view(t.shape)

        dense, paged = caches(*[0] * self.B, capacity=64, heads=self.H, dim=self.D, page=16, dtype=self.dtype)
        stores = (paged.key_pages, paged.value_pages) if self.paged else (dense.key, dense.value)
        new = shifted(normal(self.B, self.n, self.H, self.D, dtype=self.dtype))
        rotary = Rotary(*angles(64, self.pairs), self.interleaved) if self.pairs else None
        with compiling_for(self.arch) as compiled:
            table = paged.page_table if self.paged else None
            cos, sin, interleaved = rotary or (None, None, False)
            tensors = new, new, *map(shifted, stores), cos, sin, table, paged.lengths
            Launches.prepare(tensors, 64, interleaved)(tensors)
        return compiled


KERNELS = {
    "rows": Append(paged=False),
    "pages": Append(),
    "halves": Append(pairs=64),
    "interleaved": Append(pairs=64, interleaved=True, dtype=F16),
    "partial": Append(pairs=40, n=8, D=256),
    "long": Append(pairs=64, n=70),
    "long, interleaved, fp32": Append(pairs=128, interleaved=True, n=70, D=256, dtype=F32),
    "off 16 bytes": Append(pairs=128, interleaved=True, n=70, D=256, dtype=F32, offset=1),
    "sm_80": Append(pairs=64, n=70, dtype=F32, arch=80),
}


# How a call is cut


@pytest.mark.parametrize(
    ("call", "launches"),
    [
        (Append(), 1),
        (Append(B=256), 1),
        (Append(H=32), 1),
        (Append(n=8), 1),
        (Append(n=0), 1),
        (Append(n=9), 2),
        (Append(n=64), 2),
    ],
    ids=str,
)
def test_a_step_of_decoding_is_one_launch(call: Append, launches: int) -> None:
    names = [one.metadata.name for one in call.launched()]
    assert names == ["_append_kernel", "_advance_kernel"][:launches]


# What the compiler makes of it


@pytest.mark.parametrize("name", KERNELS)
def test_it_is_kept_in_registers_and_moved_in_wide_words(name: str) -> None:
    call = KERNELS[name]
    for one in call.launched():
        made = report(one)
        figures = f"{one.metadata.name}: {made}"
        assert made.spill_bytes == 0 and not made.warnings and not atomics(made), figures
        assert made.instructions["FFMA"] == 0, figures  # torch rounds products before it adds them
        if one.metadata.name == "_append_kernel":
            assert (made.instructions["FMUL"] > 0) == (call.pairs > 0), figures
            assert ("st.global.v4" in one.asm["ptx"]) == (call.offset == 0), figures


def test_every_thread_has_read_the_length_before_one_writes_it() -> None:
    for name in ("rows", "pages"):
        (one,) = KERNELS[name].launched()
        ptx = one.asm["ptx"]
        read, barrier, written = ptx.index("ld.global.b32"), ptx.index("bar.sync"), ptx.rindex("st.global.b32")
        assert read < barrier < written and ptx.count("st.global.b32") == 1
