"""What the tests of cuda/ share: the cases, and the earned tolerance for results that no backend of ours computed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stream_attention.backends.reference import attention as reference
from stream_attention_tools.testing import Case, check_case, make

F32, BF16 = torch.float32, torch.bfloat16


def case(
    Tq: int,
    Tk: int,
    D: int = 64,
    dtype: torch.dtype = F32,
    *,
    B: int = 1,
    H: int = 1,
    causal: bool = False,
    scale: float | None = None,
    device: str = "cpu",
) -> Case:
    shape = {"B": B, "Tq": Tq, "Tk": Tk, "Hq": H, "Hkv": H, "D": D, "Dv": D}
    return Case(**shape, dtype=dtype, causal=causal, scale=scale, device=device, backward=False)


def inputs(one: Case) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]:
    """Query, key and value of a case, and the keywords of `CudaLibrary.forward`."""
    query, key, value, _ = make(one)
    return (query, key, value), {"causal": one.causal, "scale": one.scale or 0.0}


def expect_within_bounds(one: Case, out: Tensor, lse: Tensor | None = None) -> None:
    """What `check_case` allows any backend on this case, of which it is told by checking ours."""
    allowed = check_case(one, "eager")
    exact_out, exact_lse = _exact(one)
    assert (out.double() - exact_out).abs().max().item() <= allowed.bounds["out"], allowed
    if lse is not None:
        seen = exact_lse != -torch.inf
        assert torch.equal(lse != -torch.inf, seen)
        if seen.any():
            assert (lse.double() - exact_lse)[seen].abs().max().item() <= allowed.bounds["lse"], allowed


def _exact(one: Case) -> tuple[Tensor, Tensor]:
    query, key, value, _ = make(one)
    return reference.attention(query, key, value, causal=one.causal, scale=one.scale)
