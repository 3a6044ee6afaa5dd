"""The kernel that writes tokens to slots, for GPUs that are not here: what is compiled for a call."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing; run without TRITON_INTERPRET=1", allow_module_level=True)
pytest.importorskip("triton")

from compile_gate import atomics
from write_kv_cases import BF16, E4M3, F32, in_one

from stream_attention.gpu.write_kv import WriteKV
from stream_attention_tools.testing.offline import compiling_for, report


class Write(NamedTuple):
    """A call of the gate: four tokens to pages of 16, keys beside values as vLLM has them."""

    D: int = 128
    H: int = 8
    order: str = "LBNHC"
    stored: torch.dtype = BF16
    scaled: bool = False
    dtype: torch.dtype = BF16
    offset: int = 0
    arch: int = 90

    def launched(self) -> Any:
        """What is compiled for it."""

        def new() -> Tensor:
            numbers = torch.zeros(4 * self.H * self.D + self.offset, dtype=self.dtype)
            return numbers[self.offset :].view(4, self.H, self.D)

        pages = in_one(self.order, {"L": 2, "B": 3, "H": self.H, "N": 16}, (self.D, self.D), self.stored)
        scale = torch.ones(self.H) if self.scaled else None
        tensors = new(), new(), *pages, torch.zeros(4, dtype=torch.int64), scale, scale
        with compiling_for(self.arch) as compiled:
            WriteKV.prepare(tensors)(tensors)
        (one,) = compiled
        return one


KERNELS = {
    "rows": Write(),
    "heads before tokens": Write(order="LBHNC"),
    "many heads": Write(H=64, D=256),
    "one head": Write(H=1),
    "fp32": Write(stored=F32, dtype=F32),
    "e4m3": Write(stored=E4M3),
    "e4m3, scales": Write(stored=E4M3, scaled=True),
    "e4m3 of fp32, sm_89": Write(stored=E4M3, scaled=True, dtype=F32, arch=89),
    "e4m3, heads of 1": Write(stored=E4M3, D=1, H=3),
    "off 16 bytes": Write(offset=1),
    "sm_80": Write(arch=80),
}


@pytest.mark.parametrize("name", KERNELS)
def test_it_is_kept_in_registers_and_moved_in_wide_words(name: str) -> None:
    call = KERNELS[name]
    one = call.launched()
    made = report(one)
    figures = f"{name}: {made}"
    assert made.spill_bytes == 0 and made.shared_bytes == 0 and not made.warnings and not atomics(made), figures
    if call.offset or call.D == 1:
        assert ".v2" not in one.asm["ptx"] and ".v4" not in one.asm["ptx"], figures
    elif call.H == 1:
        assert "st.global.v2" in one.asm["ptx"], figures  # 128 channels for a warp
    else:
        narrow = call.stored is E4M3
        assert "ld.global.v4" in one.asm["ptx"] and f"st.global.v{2 if narrow else 4}" in one.asm["ptx"], figures
    assert ("e4m3x2" in one.asm["ptx"]) == ("div.rn.f32" in one.asm["ptx"]) == (call.stored is E4M3), figures
