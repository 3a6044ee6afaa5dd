"""explain(): what a call would do, without doing it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..backends import BY_NAME, installed, sdpa_time, self_check
from ..base.problem import UNBOUNDED, Problem, Window, gradient_of, sides_of
from ..base.score_function import ScoreFunction
from ..dispatch import validate
from ..dispatch.plan import Plan, plan
from ..dispatch.prepare import problem_of
from ..masks import Mask
from ..masks.lowering import lowered, walked
from .attention import attention, prepare_attention
from .fp8 import in_fp8
from .nested import packed as packed_nested
from .varlen import prepare_varlen, varlen_attention


def explain(query: Tensor, key: Tensor, value: Tensor, **arguments: Any) -> Plan:
    """Print which kernel would run for a call, how configured, and why each preferred one was passed over.

    Takes the arguments of `attention`, or those of `varlen_attention` where `cu_seqlens` are among them. Computes
    nothing of the call. If an input requires a gradient, the plan of the backward is printed too (where the LSE is
    returned, as if a gradient came through it). Of DTensors it explains this rank's part. Of a `Mask` a line says how
    much is visible, and how many tiles are skipped; it waits for the device. Further lines say what a
    self-check of the Hopper kernels found, with a Triton newer than those they ran with, and what the portable kernels
    were timed at on a kind of GPU that they never ran on; either is made here if the call would make it. A last line
    says where the tensors look like `[B, H, T, D]`: more than 256 heads, or 8 for each query, with as many KV heads and
    no more keys than queries.

    Returns:
        The `Plan` of the forward.

    Raises:
        What the call itself would raise.

    >>> import torch
    >>> from stream_attention import explain
    >>> plan = explain(*torch.randn(3, 1, 64, 4, 32), causal=True)  # doctest: +ELLIPSIS
    forward   dense B=1 Tq=64 Tk=64 Hq=4 Hkv=4 D=32 Dv=32 float32 on cpu scale=0.176777 causal
    backend   eager: torch's CPU flash op
    not       gluon: ...
    not       triton: ...
    """
    problems, backend = problems_of_call(query, key, value, **arguments)
    planned = print_plans(problems, backend)
    if planned.problem.bounds:
        print(_of_the_mask(planned, arguments["mask"], arguments.get("causal", False), arguments.get("window")))
    for line in dict.fromkeys(line for problem in problems for line in _of_the_machine(plan(problem, backend))):
        print(line)
    if query.dim() == 4 and validate.looks_transposed(query, key, by_strides=False):
        print(f"layout    looks transposed: {list(query.shape)} is read as [B, T, H, D]; pass x.transpose(1, 2)")
    return planned


def problems_of_call(query: Tensor, key: Tensor, value: Tensor, **arguments: Any) -> tuple[list[Problem], str]:
    """What a call would have to compute: its forward and, where a gradient is wanted, its backward; and the backend
    it asks for. Reads no tensor's values, so meta tensors pose the problem of tensors that nobody allocates."""
    if isinstance(query, Tensor) and query.is_nested:
        tensors, packing = packed_nested(query, key, value, arguments.pop("mask", None), arguments.pop("bias", None))
        return problems_of_call(*tensors, **(arguments | packing))
    if isinstance(query, Tensor) and hasattr(query, "device_mesh"):
        from .dtensor import local_shards

        arguments |= local_shards({"query": query, "key": key, "value": value, **arguments}, arguments)
        return problems_of_call(**arguments)
    packed = "cu_seqlens_q" in arguments or "cu_seqlens_k" in arguments
    op, prepare = (varlen_attention, prepare_varlen) if packed else (attention, prepare_attention)
    given = validate.bound(op, query, key, value, **arguments)
    if given["seed"] is None:
        given["seed"] = 0  # a plan needs no random numbers, so none are drawn
    problem, inputs, backend = problem_of(prepare(**given))
    if given.get("score_mod") is not None:
        problem = problem.replace(function=ScoreFunction(given["score_mod"], problem.device).name)
    if given["precision"] is not None:
        return [in_fp8(problem)], backend
    problems = [problem]
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs):
        problems.append(gradient_of(problem, inputs, lse_grad=given["return_lse"]))
    return problems, backend


def print_plans(problems: list[Problem], backend: str) -> Plan:
    """Plan the problems of one call, print the plans, and return that of the forward."""
    forward, *backwards = [plan(problem, backend) for problem in problems]
    print(forward)
    for backward in backwards:
        through = ", with a gradient through the LSE" if backward.problem.lse_grad else ""
        _, _, chosen = str(backward).partition("\n")  # its first line is the problem, which the forward has shown
        print(f"backward  of the same call{through}\n{chosen}")
    return forward


def _of_the_mask(planned: Plan, mask: Mask, causal: bool, window: tuple[int, int] | None) -> str:
    """What a mask by intervals leaves of a call, by the tiles of its forward."""
    problem, config, sides = planned.problem, planned.config, sides_of(causal, window)
    left, right = (None if side == UNBOUNDED else side for side in sides)
    mask, lengths = mask & Mask(left, right), (problem.q_len, problem.k_len)
    rows, columns = (getattr(config, name, None) or getattr(config, other) for name, other in _TILE)
    some, whole = walked(lowered(mask, *lengths, problem.device, Window()), problem.k_len, rows, columns)
    shares = 1 - some.float().mean().item(), whole.float().mean().item()
    visible = mask.density(q_len=lengths[0], k_len=lengths[1])
    return (
        f"mask      {mask}: {visible:.1%} of the scores are visible; of tiles of {rows} x {columns} "
        f"{shares[0]:.1%} are skipped, {shares[1]:.1%} need no test"
    )


_TILE = ("block_m", "block_q"), ("block_n", "block_k")
"""Rows and columns of a tile, as configurations call them."""


def _of_the_machine(planned: Plan) -> Iterator[str]:
    """What else is known of a plan's GPU and of its Triton."""
    problem = planned.problem
    if problem.device.type != "cuda":
        return
    if planned.backend == "gluon" and (found := self_check.answer(problem, BY_NAME["gluon"])):
        yield f"checked   {problem.kind} with Triton {installed.triton_version()}: {found.words}"
    if problem.arch not in installed.RAN_ON:
        this = f"compute capability {problem.arch / 10}" if problem.arch else "this GPU"
        ran_on = ", ".join(f"{gpu} ({arch / 10})" for arch, gpu in installed.RAN_ON.items())
        yield f"gpu       no kernel of ours ever ran on {this}, only on {ran_on}"
        if planned.backend == "triton" and (found := sdpa_time.answer(problem)):
            yield f"timed     {found.words}"
