"""Why our kernels cannot serve a model: the sentences of the backends' `why_not`, without a tensor or an engine."""

from __future__ import annotations

import torch

from ..backends import BY_NAME
from ..base.fp8_layout import E4M3
from ..base.problem import KV, Hardware, Operands, Problem, Scores, Shape, dtype_name

PAGE = 16
"""Tokens of a page. No reason depends on it: engines split pages that are larger than ours may be."""


def why_not(
    head_dim: int,
    dtype: torch.dtype,
    *,
    page_dtype: torch.dtype,
    sink: bool = False,
    device_type: str = "cuda",
    arch: int = 0,
) -> tuple[str, ...]:
    """Why `paged_attention` cannot serve layers such as these on one device, in sentences; empty if it can.

    Args:
        head_dim: D of queries, keys and values.
        dtype: of queries.
        page_dtype: of keys and values in pages.
        sink: whether layers have sinks.
        device_type, arch: as in `torch.device(...).type`; 90 is compute capability 9.0, and 0 a GPU of another maker.

    >>> import torch
    >>> why_not(64, torch.bfloat16, page_dtype=torch.float16, device_type="cpu")
    ('requires pages in the dtype of queries, bfloat16, or in float8_e4m3fn; got float16',)
    """
    own = (
        f"requires pages in the dtype of queries, {dtype_name(dtype)}, or in {dtype_name(E4M3)}; "
        f"got {dtype_name(page_dtype)}"
    )
    backend = BY_NAME["triton" if device_type == "cuda" else "eager"]  # plain torch would synchronise with a GPU
    problem = Problem(
        Shape(1, 1, 1, 1, head_dim, head_dim),
        KV("cache", PAGE, PAGE, ragged=True, e4m3=page_dtype is E4M3),
        Operands(dtype),
        Hardware(torch.device(device_type), arch),
        scores=Scores(sink=sink),
    )
    return (*([] if page_dtype in (dtype, E4M3) else [own]), *backend.why_not(problem))
