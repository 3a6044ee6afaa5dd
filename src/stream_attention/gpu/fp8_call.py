"""A call in FP8 on a GPU: a launch that quantises, and one that attends to what it wrote.

Codes, the LSE where nobody wants it, and the counter of tiles lie in one allocation, freed once both are queued.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..base.fp8_layout import CodedInputs, KeyCodes, QueryCodes
from ..base.problem import Forward, Inputs, Problem
from . import driver
from .arguments import sample
from .launch import Launch, Sizes
from .quantize_fp8 import Quantization
from .scratch import Outputs, Sample, Scratch


def no_counter(problem: Problem) -> Sample:
    """Of a kernel whose programs have a tile each."""
    return Sample((0,), torch.int32)


class Fp8Call(NamedTuple):
    """What a kernel attends to and what it writes, in memory or as samples."""

    problem: Problem
    queries: QueryCodes
    keys: KeyCodes
    ends: tuple[Tensor | None, Tensor | None]  # cu_seqlens of both
    config: Any
    outputs: Outputs
    counter: Any
    device: torch.device


class Fp8Kernel(NamedTuple):
    """How a backend attends to codes."""

    bind: Callable[[Fp8Call], Launch]
    """The kernel as a function of codes of queries, keys and values, scales of queries and keys, cu_seqlens of both,
    out, lse and counter."""

    sizes: Callable[[Fp8Call], tuple[int, Sizes]]
    """The grid, and the arguments that depend on lengths."""

    counter: Callable[[Problem], Sample] = no_counter
    """From which programs fetch tiles: it is 0 when the kernel begins."""

    def prepare(self, problem: Problem, inputs: Inputs | CodedInputs, config: Any, rotate: bool) -> Forward:
        """The forward of every call whose tensors lie as these do."""
        outputs = Outputs.of(problem, inputs.query.shape[-3])
        if problem.empty:
            return lambda inputs, with_lse: outputs.allocate(inputs.query)
        made, keys = _quantization(problem, inputs)
        counter = self.counter(problem)
        call = Fp8Call(problem, made.queries, keys, made.ends, config, outputs, counter, inputs.query.device)
        return _Forward(self, made, made.bind(rotate), self.bind(call), outputs, counter)


def _quantization(problem: Problem, inputs: Inputs | CodedInputs) -> tuple[Quantization, KeyCodes]:
    """What a call quantises, and the codes of keys which are attended to; samples stand for what is written."""
    query, key, value = inputs[:3]
    ends = inputs.cu_seqlens_q, inputs.cu_seqlens_k
    if isinstance(inputs, CodedInputs):
        return Quantization.of(query, None, None, ends, (problem.q_len, 0), empty=sample), inputs.kv.codes
    made = Quantization.of(query, key, value, ends, (problem.q_len, problem.k_len), problem.left, sample)
    return made, made.keys


class _Forward:
    """The two launches, as a function of inputs."""

    __slots__ = ("_attend", "_by_address", "_counter", "_kernel", "_outputs", "_quantize", "_scratch")

    def __init__(
        self, kernel: Fp8Kernel, made: Quantization, quantize: Launch, attend: Launch, outputs: Outputs, counter: Sample
    ) -> None:
        self._kernel, self._quantize, self._attend, self._outputs = kernel, quantize, attend, outputs
        self._counter = counter.numel()
        self._by_address = False  # whether both are compiled, so that launches take addresses
        keys = () if made.keys is None else made.keys[:3]
        self._scratch = Scratch.of(*made.queries[:2], counter, outputs.lse, *keys)

    def __call__(self, inputs: Any, with_lse: bool) -> tuple[Tensor, Tensor | None]:
        query, key, value = inputs[:3]
        ends = inputs.cu_seqlens_q, inputs.cu_seqlens_k
        by_address = self._by_address
        if not by_address:
            by_address = driver.is_available() and self._quantize.is_compiled and self._attend.is_compiled
            self._by_address = by_address
        by_address = by_address and query.get_device() == torch._C._cuda_getDevice()
        memory, (q_codes, q_scales, counter, lse, *keys) = self._scratch.allocate(query, by_address)
        if keys:
            k_codes, v_codes, k_scales = keys
        else:
            k_codes, v_codes, k_scales, _ = inputs.kv.codes
            key = value = query
        out, found = self._outputs.allocate(query, by_address, with_lse)
        if by_address and self._counter:
            driver.fill_words(counter, 0, self._counter, torch._C._cuda_getCurrentRawStream(query.get_device()))
        elif not by_address:
            counter.zero_()
        codes = q_codes, k_codes, v_codes, q_scales, k_scales
        self._quantize(query, key, value, *codes, *ends)
        self._attend(*codes, *ends, out, lse if found is None else found, counter)
        del memory  # all that reads it is queued
        return out, found

    def resized(self, problem: Problem, inputs: Any, config: Any) -> Forward | None:
        """The same call on tensors of other lengths; None where another kernel computes it."""
        if problem.empty:
            return None
        outputs = self._outputs.resized(inputs.query.shape[-3])
        kernel, (made, keys) = self._kernel, _quantization(problem, inputs)
        quantize = self._quantize.resized(*made.sizes())
        counter, device = kernel.counter(problem), inputs.query.device
        call = Fp8Call(problem, made.queries, keys, made.ends, config, outputs, counter, device)
        attend = self._attend.resized(*kernel.sizes(call))
        if quantize is None or attend is None:
            return None
        return _Forward(kernel, made, quantize, attend, outputs, counter)
