"""A case in memory, and who computes it: ours by several ways, FlexAttention, FlashAttention-3 and SDPA."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from stream_attention import attention, varlen_attention
from stream_attention_tools.bench.providers.flash_attention import HALVES, _FlashAttention3
from stream_attention_tools.bench.providers.torch_attention import Flex, Sdpa
from stream_attention_tools.testing.inputs import Tensors

from .cases import Problem, offsets

OURS = ("ours", "dense mask", "varlen", "unshared pack", "plain")
"""With the `Mask` or bias; with the mask as a matrix; the same sequences packed, or packed each with its own copy of
the trunk; and without the bias."""
PEERS = ("flex", "fa3", "sdpa")


class Made(NamedTuple):
    """A case in memory."""

    problem: Problem
    query: Tensor  # [B, T, Hq, D]
    key: Tensor
    value: Tensor
    grad: Tensor
    bias: Tensor | None
    dense: Tensor | None  # the mask as a matrix

    @property
    def device(self) -> str:
        return self.query.device.type


class Provider(NamedTuple):
    """Who computes a case."""

    attend: Callable[..., Tensor]  # of the inputs, `[B, T, H, D]` in and out
    inputs: tuple[Tensor, ...]  # query, key, value, and a bias that has a gradient
    bias: Tensor | None = None  # that is added to the scores
    mask_bytes: int = 0  # of the tensors that say what is visible
    tokens: Tensor | None = None  # of the rows, where these are not the tokens of the case
    block_mask_ms: float | None = None  # to make a block mask, which is outside of the other times


def make(problem: Problem, dtype: torch.dtype, device: str) -> Made:
    """Random tensors."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    batch, length, heads = problem.batch, problem.length, problem.heads
    query, grad = (normal(batch, length, heads.query, heads.dim) for _ in range(2))
    key, value = (normal(batch, length, heads.kv, heads.dim) for _ in range(2))
    bias = normal(1, heads.query, length, length) if problem.bias else None
    dense = None if problem.mask is None else problem.mask.as_dense(q_len=length, k_len=length)
    return Made(problem, query, key, value, grad, bias, dense)


def providers(made: Made, fa3: Any) -> dict[str, Provider | str]:
    """Everybody who is for the case, or the reason why not. `fa3` has FlashAttention-3's ops, or is the reason."""
    inputs = made.query, made.key, made.value
    found = _with_a_bias(made, inputs) if made.problem.bias else _with_a_mask(made, inputs, fa3)
    return {name: found[name] for name in (*OURS, *PEERS) if name in found}


def _with_a_mask(made: Made, inputs: tuple[Tensor, ...], fa3: Any) -> dict[str, Provider | str]:
    problem, dense = made.problem, made.dense
    assert problem.mask is not None and dense is not None
    size = sum(tensor.nbytes for _, tensor in problem.mask.tensors())
    found: dict[str, Provider | str] = {
        "ours": Provider(lambda *qkv: attention(*qkv, mask=problem.mask), inputs, mask_bytes=size),
        "dense mask": Provider(lambda *qkv: attention(*qkv, mask=dense), inputs, mask_bytes=dense.nbytes),
        "sdpa": Provider(lambda *qkv: _sdpa(dense, *qkv), inputs, mask_bytes=dense.nbytes),
        "flex": _flex(made, inputs),
    }
    if problem.lengths:
        found |= _packed(made, inputs, fa3)
    return found


def _packed(made: Made, inputs: tuple[Tensor, ...], fa3: Any) -> dict[str, Provider | str]:
    """The sequences that have the same result, packed. Tokens that are in several of them are copied beforehand."""
    problem = made.problem
    tokens, cu_seqlens, longest = problem.tokens, offsets(problem.lengths, made.device), max(problem.lengths)
    packing = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens, "max_seqlen_q": longest, "max_seqlen_k": longest}
    options: dict[str, Any] = {"causal": problem.causal, "window": problem.window, **packing}
    if tokens is not None:
        inputs = tuple(tensor[:, tokens] for tensor in inputs)

    def ours(*qkv: Tensor) -> Tensor:
        return varlen_attention(*(tensor.flatten(0, 1) for tensor in qkv), **options).view_as(qkv[0])

    def theirs(*qkv: Tensor) -> Tensor:
        rows = (tensor.flatten(0, 1) for tensor in qkv)
        out: Tensor = _FlashAttention3.apply(*rows, problem.causal, packing, fa3)
        return out.view_as(qkv[0])

    reason = fa3 if isinstance(fa3, str) else "it computes in float16 and bfloat16"
    if problem.window is not None:
        reason = "it is called here without a window"
    called = not isinstance(fa3, str) and problem.window is None and made.query.dtype in HALVES
    name = "varlen" if tokens is None else "unshared pack"
    size = cu_seqlens.nbytes
    return {
        name: Provider(ours, inputs, mask_bytes=size, tokens=tokens),
        "fa3": Provider(theirs, inputs, mask_bytes=size, tokens=tokens) if called else reason,
    }


def _with_a_bias(made: Made, inputs: tuple[Tensor, ...]) -> dict[str, Provider | str]:
    bias, learned = made.bias, made.problem.bias == "learned"
    assert bias is not None
    given = (*inputs, bias) if learned else inputs

    def provider(attend: Callable[..., Tensor]) -> Provider:
        """Of a function whose fourth argument is the bias."""
        return Provider(attend if learned else lambda *qkv: attend(*qkv, bias), given, bias, bias.nbytes)

    flex: Provider | str = "it runs on a GPU here"
    if made.device == "cuda":
        function = Flex()

        def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
            def added(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
                return score + bias[0, h, q_idx, kv_idx]

            return function.call(_tensors(query, key, value), score_mod=added)

        flex = provider(attend)
    return {
        "ours": provider(lambda query, key, value, bias: attention(query, key, value, bias=bias)),
        "plain": Provider(attention, inputs),
        "sdpa": provider(lambda query, key, value, bias: _sdpa(bias, query, key, value)),
        "flex": flex,
    }


def _flex(made: Made, inputs: tuple[Tensor, ...]) -> Provider | str:
    """Compiled, with a block mask that is made before."""
    if made.device != "cuda":
        return "it runs on a GPU here"
    function, (block_mask, ms) = Flex(), timed(lambda: _block_mask(made.problem, made.device))
    size = sum(one.nbytes for one in block_mask.as_tuple() if isinstance(one, Tensor))
    return Provider(
        lambda *qkv: function.call(_tensors(*qkv), block_mask=block_mask),
        inputs,
        mask_bytes=size,
        block_mask_ms=ms,
    )


def _block_mask(problem: Problem, device: str) -> BlockMask:
    assert problem.mask is not None and problem.sees is not None
    batch, heads = problem.mask.sizes[:2]
    length = problem.length
    return create_block_mask(problem.sees, batch, heads, length, length, device=device)


def timed(call: Callable[[], Any], device: str = "cuda") -> tuple[Any, float]:
    """What a call returns, and its milliseconds from an idle device to an idle device."""
    idle = torch.cuda.synchronize if device == "cuda" else lambda: None
    idle()
    began = time.perf_counter()
    result = call()
    idle()
    return result, (time.perf_counter() - began) * 1e3


def _sdpa(added: Tensor, *qkv: Tensor) -> Tensor:
    return Sdpa().attend(_tensors(*qkv, mask=added))


def _tensors(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensors:
    return Tensors(query, key, value, {"causal": False, **options}, query)
