"""The Triton kernels of paged_attention for GPUs that are not here: what the compiler makes of them."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("run without TRITON_INTERPRET=1", allow_module_level=True)
pytest.importorskip("triton")

from compile_gate import BF16, F32, RELEASE, SHARED_KIB

from stream_attention.backends import BY_NAME
from stream_attention.base.problem import Hardware, PagedInputs, Problem, Scores, Window, paged_problem
from stream_attention_tools.testing.offline import compiling_for, report

CALLS: dict[str, dict[str, Any]] = {
    "tokens": {"q_len": 1},
    "tokens, d64": {"q_len": 1, "dim": 64},
    "prompts": {"q_len": 2048},
    "prompts, d256": {"q_len": 2048, "dim": 256},
    "prompts, pages of 256": {"q_len": 2048, "page": 256},
    "prompts in fp32": {"q_len": 2048, "dtype": F32},
    "tokens, list of pages": {"q_len": 1, "page": 1, "listed": True},
    "prompts, window, sink, slopes, softcap": {"q_len": 64, "everything": True},
    "prompts on an A100": {"q_len": 2048, "arch": 80},
}


SPILLS = {"3.9": {"prompts, window, sink, slopes, softcap": 40}}
"""Bytes that are known to spill, by Triton's release."""


def call(
    q_len: int,
    dim: int = 128,
    page: int = 16,
    dtype: torch.dtype = BF16,
    arch: int = 90,
    listed: bool = False,
    everything: bool = False,
) -> tuple[Problem, PagedInputs]:
    heads, kv_heads, requests = 8, 2, 3

    def zeros(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    def ints(*shape: int) -> torch.Tensor:
        return zeros(*shape, dtype=torch.int32)

    pages = zeros(64, page, kv_heads, dim), zeros(64, page, kv_heads, dim)
    table, indptr = (ints(64), ints(requests + 1)) if listed else (ints(requests, 16), None)
    more = (zeros(1, heads, dtype=F32), zeros(heads, dtype=F32)) if everything else (None, None)
    inputs = PagedInputs(
        zeros(requests * q_len, heads, dim), *pages, ints(requests + 1), ints(requests), table, indptr, *more,
        return_lse=True,
    )  # fmt: skip
    scores = Scores(dim**-0.5, 20.0 if everything else 0.0, alibi=everything, sink=everything)
    window = Window(100 if everything else -1, 0)
    problem = paged_problem(inputs, q_len, 4096, window=window, scores=scores)
    return problem.replace(**Hardware(torch.device("cuda"), arch, 132)._asdict()), inputs


@pytest.mark.parametrize("name", CALLS)
def test_nothing_spills_that_is_not_known_and_it_fits(name: str) -> None:
    problem, inputs = call(**CALLS[name])
    backend = BY_NAME["triton"]
    config = backend.configure(problem)
    with compiling_for(problem.arch) as compiled:
        backend.prepare_paged(problem, inputs, config)(inputs)
    made = {kernel.metadata.name: report(kernel) for kernel in compiled}
    assert set(made) == {"_list_kernel", "_paged_kernel", "_merge_splits_kernel"}
    for kernel, its in made.items():
        known = SPILLS.get(RELEASE, {}).get(name, 0) if kernel == "_paged_kernel" else 0
        assert its.spill_bytes <= known, f"{kernel}: {its}"
        assert its.shared_bytes <= 1024 * SHARED_KIB[problem.arch], f"{kernel}: {its}"
    if problem.dtype is BF16:
        assert made["_paged_kernel"].instructions["HGMMA"] + made["_paged_kernel"].instructions["HMMA"] > 0
