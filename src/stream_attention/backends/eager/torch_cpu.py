"""torch's own CPU kernel, the one behind SDPA: plain and causal calls, with a mask, a bias or a sink.

The op adds `attn_mask` to the scores, so a boolean mask is handed over as 0 and -inf, and a bias as it lies. Three
contracts are not the op's own, and are kept here:

- It multiplies 0 by what it does not see, so NaN and Inf in masked keys, values, queries and gradients come out as NaN,
  and as nothing else. Where a result has a NaN, rows that are masked altogether are zeroed and the op runs again, with
  the bits of a call whose padding is finite; where there is a NaN still, the caller has the blocked pass. A sum finds
  it in 0.05 ms for 4 MiB (AMD EPYC, one core, torch 2.13, 2026-11-18; `isnan().any()` takes 1.1 ms, the call 100 ms).
- It gives a row that sees no key LSE 0. Where an LSE is 0, the mask says whether the row sees a key.
- A sink is one more logit of no value. It rescales the output and the LSE; the op's backward takes both as they are.

A mask is converted for a few queries at a time, so that memory is O(N) (`tuning.eager.mask_blocks`). -inf is written as
bits: a conversion and two integer passes take 0.35 ms for 2M elements, where `where` takes 5 ms and `masked_fill` 9 ms.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from ...base.problem import Gradients, Inputs, Problem
from ...base.state import EMPTY, add_sink, per_row
from .tuning import mask_blocks, spans

forward_op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward_op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

_MINUS_INF = {
    torch.float16: (torch.int16, -0x0400),
    torch.bfloat16: (torch.int16, -0x0080),
    torch.float32: (torch.int32, -0x0080_0000),
    torch.float64: (torch.int64, -0x0010_0000_0000_0000),
}
"""-inf of each dtype, as an integer of its width."""


def forward(problem: Problem, inputs: Inputs) -> tuple[Tensor, Tensor] | None:
    """out `[B, Tq, Hq, Dv]` and lse `[B, Hq, Tq]`; None where a NaN may have come from a masked element."""
    problem, inputs = _scaled(problem, inputs)
    if not problem.mask and problem.bias is None:
        query, key, value = _heads_first(*inputs[:3])
        out, lse = forward_op(query, key, value, 0.0, problem.right == 0, scale=problem.scale)
        out, lse = out.transpose(1, 2).contiguous(), lse.contiguous()  # the op lays its output out as the query lies
    else:
        out, lse = _masked_forward(problem, inputs)
        if _has_nan(out):
            out, lse = _masked_forward(problem, _without_masked(inputs, _unmasked(problem, inputs)))
            if _has_nan(out):
                return None
    return (out, lse) if inputs.sink is None else add_sink(out, lse, inputs.sink)


def backward(problem: Problem, inputs: Inputs, out: Tensor, lse: Tensor, grad_out: Tensor) -> Gradients | None:
    """The gradients of query, key and value, `lse` with its sink; None as in `forward`."""
    scale = problem.scale
    problem, inputs = _scaled(problem, inputs)
    if not problem.mask and problem.bias is None:
        tensors = _heads_first(grad_out, *inputs[:3], out)
        grads = _backward_op(*tensors, lse, 0.0, problem.right == 0, scale=problem.scale)
        dq, dk, dv = _heads_first(*grads)
    else:
        dq, dk, dv = _masked_backward(problem, inputs, out, lse, grad_out)
        if any(map(_has_nan, (dq, dk, dv))):
            unmasked = _unmasked(problem, inputs)
            inputs, grad_out = _without_masked(inputs, unmasked), grad_out.masked_fill(~per_row(unmasked.queries), 0.0)
            dq, dk, dv = _masked_backward(problem, inputs, out, lse, grad_out)
            if any(map(_has_nan, (dq, dk, dv))):
                return None
    return Gradients(dq if problem.scale == scale else dq.mul_(scale), dk, dv)


def _scaled(problem: Problem, inputs: Inputs) -> tuple[Problem, Inputs]:
    """The same problem with a scale by which the op's two directions multiply alike.

    The forward rounds q . k and then its product with the scale; the backward's matrix product takes the scale as a
    factor. Where these differ, probabilities recomputed from the LSE are off by |score| * eps: 5 to 16 eps for normal
    inputs of D 80 and 128 (torch 2.13, 2026-11-18). So the query is multiplied by the scale first, unless that is a
    power of two (and there are two keys: a product with one is another routine). A query of half precision would be
    rounded by it, which is more.
    """
    exact = math.frexp(problem.scale)[0] == 0.5 and problem.k_len > 1
    if exact or problem.dtype is not problem.state_dtype:
        return problem, inputs
    return problem.replace(scale=1.0), inputs._replace(query=inputs.query * problem.scale)


def less_lse_gradient(out: Tensor, grad_out: Tensor, grad_lse: Tensor) -> Tensor | None:
    """An output whose dO . O is that of `out` less `grad_lse`; None where no such output exists.

    The op takes no gradient of the LSE, but reads `out` for delta = dO . O alone. A row's largest element of dO carries
    it: the error of delta is eps * (|dO . O| + |dLSE|), as that of a difference. An output of half precision cannot
    hold it, nor one whose row of dO is 0.
    """
    if out.dtype is not grad_lse.dtype:
        return None
    place = grad_out.abs().argmax(-1, keepdim=True)
    arriving = grad_lse.transpose(1, 2).unsqueeze(-1)  # [B, Tq, Hq, 1]
    carried = torch.where(arriving == 0, 0.0, arriving / grad_out.gather(-1, place))
    return out.scatter_add(-1, place, -carried) if carried.isfinite().all() else None


class _Block(NamedTuple):
    """Batch entries and queries that one call of the op computes, and what it adds to their scores."""

    batch: slice
    rows: slice
    keys: slice
    causal: bool  # whether the op hides the keys behind each query; in a part of the queries the mask does
    mask: Tensor  # [B, Hq, m, n] of the block, each dim may be 1


def _masked_forward(problem: Problem, inputs: Inputs) -> tuple[Tensor, Tensor]:
    query, key, value = inputs[:3]
    out = None
    lse = query.new_empty(problem.batch, problem.q_heads, problem.q_len, dtype=problem.state_dtype)
    for batch, rows, keys, causal, mask in _blocks(problem, inputs):
        tensors = _heads_first(query[batch, rows], key[batch, keys], value[batch, keys])
        its_out, its_lse = forward_op(*tensors, 0.0, causal, attn_mask=mask, scale=problem.scale)
        its_out = its_out.transpose(1, 2)
        lse[batch, :, rows] = its_lse
        if its_out.shape == query.shape:  # one block
            out = its_out.contiguous()
        else:
            out = torch.empty_like(query, memory_format=torch.contiguous_format) if out is None else out
            out[batch, rows] = its_out
        del mask  # before the next one is made
    assert out is not None
    if _some(lse == 0):
        lse.masked_fill_(~_unmasked(problem, inputs).queries, EMPTY)
    return out, lse


def _masked_backward(
    problem: Problem, inputs: Inputs, out: Tensor, lse: Tensor, grad_out: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, those of blocks summed in the LSE's dtype."""
    query, key, value = inputs[:3]
    lse = lse.masked_fill(lse == EMPTY, 0.0)  # as the op has it: exp(-inf - 0) is 0
    dq = dk = dv = None
    for batch, rows, keys, causal, mask in _blocks(problem, inputs):
        of_rows = _heads_first(grad_out[batch, rows], query[batch, rows], out[batch, rows])
        of_keys = _heads_first(key[batch, keys], value[batch, keys])
        tensors = of_rows[0], of_rows[1], *of_keys, of_rows[2], lse[batch, :, rows].contiguous()
        grads = _backward_op(*tensors, 0.0, causal, attn_mask=mask, scale=problem.scale)
        its_dq, its_dk, its_dv = (grad.transpose(1, 2) for grad in grads)
        if its_dq.shape == query.shape:  # one block
            return its_dq, its_dk, its_dv
        if dq is None or dk is None or dv is None:
            dq = torch.empty_like(query, memory_format=torch.contiguous_format)
            dk, dv = (torch.zeros_like(t, dtype=problem.state_dtype) for t in (key, value))
        dq[batch, rows] = its_dq
        dk[batch, keys] += its_dk
        dv[batch, keys] += its_dv
        del mask  # before the next one is made
    assert dq is not None and dk is not None and dv is not None
    return dq, dk.to(key.dtype), dv.to(value.dtype)


def _blocks(problem: Problem, inputs: Inputs) -> Iterator[_Block]:
    """The blocks of a call with a mask or a bias; one, where what the op reads is small or the caller's own."""
    mask, bias = _collapsed(inputs.mask), _collapsed(inputs.bias)
    sizes = problem.batch, problem.q_len
    if mask is not None or bias is None or not _readable(problem, bias):
        sizes = mask_blocks(*sizes, _joint_shape(mask, bias))
    for batch, rows in _batches_and_rows(problem, *sizes):
        keys, whole = _keys_of(problem, rows), rows == slice(0, problem.q_len)
        visible, its_bias = (None if x is None else tile_of(x, batch, rows, keys) for x in (mask, bias))
        if problem.right == 0 and not whole:
            in_order = _in_order(problem, rows, keys)
            visible = in_order if visible is None else visible & in_order
        yield _Block(batch, rows, keys, problem.right == 0 and whole, _added(problem, visible, its_bias))


def _added(problem: Problem, visible: Tensor | None, bias: Tensor | None) -> Tensor:
    """What the op adds to the scores of a tile: the bias, and -inf where the mask hides."""
    if bias is None:
        assert visible is not None
        integer, minus_inf = _MINUS_INF[problem.dtype]
        bits = visible.view(torch.int8).to(integer, memory_format=torch.contiguous_format)
        return bits.sub_(1).bitwise_and_(minus_inf).view(problem.dtype)
    if not _readable(problem, bias):
        dtype = problem.state_dtype
        if bias.dtype.itemsize > dtype.itemsize:  # huge is not -inf
            finite = bias.clamp(torch.finfo(dtype).min, torch.finfo(dtype).max)
            bias = torch.where(bias == EMPTY, bias, finite)
        bias = bias.to(dtype, memory_format=torch.contiguous_format)
    return bias if visible is None else torch.where(visible, bias, EMPTY)


def _readable(problem: Problem, bias: Tensor) -> bool:
    """Whether the op reads a bias as it lies."""
    return bias.dtype in (problem.dtype, problem.state_dtype) and (bias.shape[3] == 1 or bias.stride(3) == 1)


class _Unmasked(NamedTuple):
    """Which queries see a key, and which keys are visible to a query."""

    queries: Tensor  # [B, Hq, Tq]
    keys: Tensor  # [B, Hkv, Tk]


def _unmasked(problem: Problem, inputs: Inputs) -> _Unmasked:
    queries, keys = (
        torch.zeros(problem.batch, problem.q_heads, length, dtype=torch.bool, device=problem.device)
        for length in (problem.q_len, problem.k_len)
    )
    for block in _blocks(problem, inputs):
        visible = ~(block.mask < torch.finfo(block.mask.dtype).min)  # NaN masks nothing
        if block.causal:
            visible = visible & _in_order(problem, block.rows, block.keys)
        queries[block.batch, :, block.rows] = any_of(visible, 3)
        keys[block.batch, :, block.keys] |= any_of(visible, 2)
    return _Unmasked(queries, any_of(keys.unflatten(1, (problem.kv_heads, problem.group)), 2))


def _without_masked(inputs: Inputs, unmasked: _Unmasked) -> Inputs:
    """Queries that see no key, keys that no query sees and their values are 0."""
    query = inputs.query.masked_fill(~per_row(unmasked.queries), 0.0)
    key, value = (t.masked_fill(~per_row(unmasked.keys), 0.0) for t in (inputs.key, inputs.value))
    return inputs._replace(query=query, key=key, value=value)


def _batches_and_rows(problem: Problem, block_b: int, block_q: int) -> Iterator[tuple[slice, slice]]:
    for entries, rows in product(spans(0, problem.batch, block_b), spans(0, problem.q_len, block_q)):
        yield slice(*entries), slice(*rows)


def _keys_of(problem: Problem, rows: slice) -> slice:
    """The keys that these queries may see. In a causal call key and query i stand at one position."""
    return slice(0, min(problem.k_len, rows.stop) if problem.right == 0 else problem.k_len)


def _in_order(problem: Problem, rows: slice, keys: slice) -> Tensor:
    """Which keys do not lie behind the query, `[1, 1, m, n]`."""
    at = torch.arange(max(rows.stop, keys.stop), device=problem.device)
    return (at[keys] <= at[rows].unsqueeze(1))[None, None]


def _joint_shape(mask: Tensor | None, bias: Tensor | None) -> tuple[int, int, int, int]:
    b, h, m, n = (max(x.shape[dim] for x in (mask, bias) if x is not None) for dim in range(4))
    return b, h, m, n


def _collapsed(x: Tensor | None) -> Tensor | None:
    """A mask or a bias whose expanded dims are 1 again."""
    return x if x is None else x[tuple(slice(0, 1) if not step else slice(None) for step in x.stride())]


def tile_of(x: Tensor, batch: slice, rows: slice, keys: slice) -> Tensor:
    """The tile of a tensor broadcastable to `[B, Hq, Tq, Tk]`; broadcast dims stay 1."""
    x = x[batch] if x.shape[0] > 1 else x
    x = x[:, :, rows] if x.shape[2] > 1 else x
    return x[..., keys] if x.shape[3] > 1 else x


def _heads_first(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(t.transpose(1, 2) for t in tensors)


def any_of(flags: Tensor, dim: int) -> Tensor:
    """`flags.any(dim)`, which takes 20 times as long."""
    return flags.view(torch.uint8).amax(dim).view(torch.bool)


def _has_nan(x: Tensor) -> bool:
    """Whether there is a NaN, or elements whose sum is one."""
    return _some(x.sum().isnan())


def _some(flags: Tensor) -> bool:
    """Whether a flag is set; none is in a dry run on tensors without memory."""
    return flags.device.type != "meta" and bool(flags.any())
