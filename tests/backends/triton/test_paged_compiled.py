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
from stream_attention.base.problem import Hardware, PagedInputs, Problem, Request, Scores, paged_problem
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
    "prompts, d96": {"q_len": 2048, "dim": 96},
    "tokens in e4m3": {"q_len": 1, "e4m3": True},
    "prompts in e4m3": {"q_len": 2048, "e4m3": True},
    "drafts with trees": {"q_len": 8, "tree": True},
    "batch-invariant": {"q_len": 2048, "invariant": True},
}


SPILLS = {"3.6": {"drafts with trees": 8}, "3.9": {"prompts, window, sink, slopes, softcap": 48}}
"""Bytes that are known to spill, by Triton's release."""


def call(
    q_len: int,
    dim: int = 128,
    page: int = 16,
    dtype: torch.dtype = BF16,
    arch: int = 90,
    listed: bool = False,
    everything: bool = False,
    e4m3: bool = False,
    tree: bool = False,
    invariant: bool = False,
) -> tuple[Problem, PagedInputs, Request]:
    heads, kv_heads, requests = 8, 2, 3

    def zeros(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    def ints(*shape: int) -> torch.Tensor:
        return zeros(*shape, dtype=torch.int32)

    pages = [zeros(64, page, kv_heads, dim, dtype=torch.float8_e4m3fn if e4m3 else dtype) for _ in "kv"]
    table, indptr = (ints(64), ints(requests + 1)) if listed else (ints(requests, 16), None)
    more = (zeros(1, heads, dtype=F32), zeros(heads, dtype=F32)) if everything else (None, None)
    inputs = PagedInputs(
        zeros(requests * q_len, heads, dim), *pages, ints(requests + 1), ints(requests), table, indptr, *more,
        return_lse=True,
    )  # fmt: skip
    if e4m3:
        inputs = inputs._replace(k_scale=zeros(1, kv_heads, dtype=F32), v_scale=zeros(1, kv_heads, dtype=F32))
    if tree:
        inputs = inputs._replace(tree_mask=zeros(64, dtype=torch.bool), tree_offsets=ints(requests + 1))
    scores = Scores(dim**-0.5, 20.0 if everything else 0.0, mask=tree, alibi=everything, sink=everything)
    window = (100 if everything else -1, 0)
    problem = paged_problem(inputs, q_len, 4096, causal=True, window=window, scores=scores)
    problem = problem.replace(**Hardware(torch.device("cuda"), arch, 132)._asdict())
    return problem, inputs, Request(batch_invariant=invariant)


@pytest.mark.parametrize("name", CALLS)
def test_nothing_spills_that_is_not_known_and_it_fits(name: str) -> None:
    problem, inputs, request = call(**CALLS[name])
    backend = BY_NAME["triton"]
    config = backend.configure(problem, request)
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
