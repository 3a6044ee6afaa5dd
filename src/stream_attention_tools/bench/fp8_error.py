"""What FP8 loses, by kind of input: the table of docs/numerics.md.

`python -m stream_attention_tools.bench.fp8_error` prints it. Every form of FP8 is computed by its specification, on the
CPU, and compared with fp64. Beside ours stands one scale for a whole tensor, as cuDNN has it, with everything else as
ours: the difference is what scales and rotation do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from stream_attention.backends.reference import attention as reference
from stream_attention.backends.reference import fp8 as reference_fp8
from stream_attention.base.fp8_layout import LARGEST
from stream_attention.ops.attention import attention
from stream_attention.ops.explain import problems_of_call

from .summary import markdown_table

LENGTH, HEADS, DIM = 512, 8, 128

Inputs = tuple[Tensor, Tensor, Tensor]


class Errors(NamedTuple):
    """Relative rms errors of the output: its distance from fp64 by the size of that, the mean over heads."""

    bf16: float
    per_tensor: float
    per_tensor_rotated: float
    blocks: float
    blocks_rotated: float


def normal(generator: torch.Generator) -> Inputs:
    """Q, K, V ~ N(0, 1)"""
    query, key, value = torch.randn(3, 1, LENGTH, HEADS, DIM, generator=generator)
    return query, key, value


def four_channels(generator: torch.Generator) -> Inputs:
    """4 channels of Q and K times 4"""
    return _larger(normal(generator), channels=4, factor=4.0)


def one_channel(generator: torch.Generator) -> Inputs:
    """1 channel of Q and K times 8"""
    return _larger(normal(generator), channels=1, factor=8.0)


def rare_outliers(generator: torch.Generator) -> Inputs:
    """N(0, 1) + N(0, 100) · Bernoulli(0.001)"""

    def with_outliers(x: Tensor) -> Tensor:
        where = torch.rand(x.shape, generator=generator) < 0.001
        return x + 10 * torch.randn(x.shape, generator=generator) * where

    query, key, value = map(with_outliers, normal(generator))
    return query, key, value


def unequal_heads(generator: torch.Generator) -> Inputs:
    """K and V of every second head 2^14 times smaller, Q larger"""
    query, key, value = normal(generator)
    size = torch.where(torch.arange(HEADS) % 2 == 0, 1.0, 2.0**-14)[:, None]
    return query / size, key * size, value * size


Kind = Callable[[torch.Generator], Inputs]
KINDS: tuple[Kind, ...] = (normal, four_channels, one_channel, rare_outliers, unequal_heads)


def errors(kind: Kind) -> tuple[Errors, Errors]:
    """Of inputs of a kind, in bf16: relative, and the rms of the difference itself."""
    query, key, value = (x.bfloat16() for x in kind(torch.Generator().manual_seed(0)))
    exact = reference.attention(query, key, value)[0]
    outs = (
        attention(query, key, value),
        per_tensor(query, key, value, rotate=False),
        per_tensor(query, key, value, rotate=True),
        attention(query, key, value, precision="fp8", backend="reference"),
        attention(query, key, value, precision="fp8", rotate=True, backend="reference"),
    )
    off = [out.double() - exact for out in outs]
    relative = [float((one[0].norm(dim=(0, 2)) / exact[0].norm(dim=(0, 2))).mean()) for one in off]
    return Errors(*relative), Errors(*(float(one.square().mean().sqrt()) for one in off))


def per_tensor(query: Tensor, key: Tensor, value: Tensor, rotate: bool) -> Tensor:
    """FP8 with one scale for each of Q, K and V, of all batch entries and heads."""
    (problem,), _ = problems_of_call(query, key, value, precision="fp8", backend="reference")
    turn = reference_fp8.hadamard(query.shape[-1])

    def code(x: Tensor, rotated: bool) -> tuple[Tensor, Tensor]:
        rows = x[0].transpose(0, 1).float().contiguous()
        rows = rows @ turn if rotated else rows
        scale = rows.abs().max() / LARGEST
        return reference_fp8.to_e4m3(rows / scale), scale

    (q, q_scale), (k, k_scale), (v, v_scale) = code(query, rotate), code(key, rotate), code(value, False)
    queries = reference_fp8.quantize_queries(query)
    keys = reference_fp8.quantize_keys(key, value)
    scales = torch.stack([k_scale / len(turn) if rotate else k_scale, v_scale]).expand_as(keys.scales)
    queries = queries._replace(query=q, scales=q_scale.expand_as(queries.scales))
    keys = keys._replace(key=k, value=reference_fp8.in_order(v).mT.contiguous(), scales=scales)
    return reference_fp8.attention(problem, queries, keys)[0]


def table() -> list[list[str]]:
    """Headings and a row for each kind, errors relative; that of the published comparison also as it has them."""
    rows = [["inputs", "bf16", "one scale a tensor", "and rotated", "ours", "ours, rotated"]]
    for kind in KINDS:
        relative, absolute = errors(kind)
        rows.append([str(kind.__doc__), *(f"{one:.1%}" for one in relative)])
        if kind is rare_outliers:
            rows.append(["the same, rms of the error", *(f"{one:.1e}" for one in absolute)])
    return rows


def _larger(inputs: Inputs, channels: int, factor: float) -> Inputs:
    query, key, value = inputs
    query[..., :channels] *= factor
    key[..., :channels] *= factor
    return query, key, value


if __name__ == "__main__":
    print("\n".join(markdown_table(table())))
