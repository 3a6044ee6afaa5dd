"""The backward in Triton, from q, k, v, the output, its gradient and the saved LSE: no matrix was kept."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch
from torch import Tensor

os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")  # before Triton is imported

import triton
import triton.language as tl

sys.path.insert(0, str(Path(__file__).parents[1]))
import checking
import measured

INTERPRETED = os.environ["TRITON_INTERPRET"] == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"


@triton.jit
def load_tile(ptr, offs, length, D: tl.constexpr):
    """Rows `offs` of a [length, D] matrix; rows that do not exist are 0."""
    return tl.load(ptr + offs[:, None] * D + tl.arange(0, D)[None, :], mask=(offs < length)[:, None], other=0.0)


@triton.jit
def tile_weights(q, k, lse, offs_n, k_len, scale):
    """p = exp(s - lse): the softmax again, in one step, as the LSE has the max and the sum in it."""
    scores = tl.dot(q, k.T, input_precision="ieee") * scale
    return tl.where((offs_n < k_len)[None, :], tl.exp(scores - lse[:, None]), 0.0)


@triton.jit
def forward_kernel(q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, q_len, k_len, scale,
                   D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):  # fmt: skip
    """Step 06, and one number more per row: lse = max + log(sum)."""
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    q = load_tile(q_ptr, offs_m, q_len, D)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    for start in range(0, k_len, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)
        scores = tl.dot(q, load_tile(k_ptr, offs_n, k_len, D).T, input_precision="ieee") * scale
        scores = tl.where((offs_n < k_len)[None, :], scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        weights = tl.exp(scores - new_max[:, None])
        rescale = tl.exp(row_max - new_max)
        row_sum = row_sum * rescale + tl.sum(weights, 1)
        acc = acc * rescale[:, None] + tl.dot(weights, load_tile(v_ptr, offs_n, k_len, D), input_precision="ieee")
        row_max = new_max
    rows = offs_m < q_len
    tl.store(out_ptr + offs_m[:, None] * D + tl.arange(0, D)[None, :], acc / row_sum[:, None], mask=rows[:, None])
    tl.store(lse_ptr + offs_m, row_max + tl.log(row_sum), mask=rows)


@triton.jit
def query_kernel(q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, dq_ptr, q_len, k_len, scale,
                 D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):  # fmt: skip
    """A program owns a tile of queries and streams the keys: dq = scale * sum_n ds k."""
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = offs_m < q_len
    q = load_tile(q_ptr, offs_m, q_len, D)
    dout = load_tile(dout_ptr, offs_m, q_len, D)
    lse = tl.load(lse_ptr + offs_m, mask=rows, other=float("inf"))  # +inf: a row that does not exist weighs 0
    delta = tl.load(delta_ptr + offs_m, mask=rows, other=0.0)
    dq = tl.zeros([BLOCK_M, D], tl.float32)
    for start in range(0, k_len, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)
        k = load_tile(k_ptr, offs_n, k_len, D)
        v = load_tile(v_ptr, offs_n, k_len, D)
        p = tile_weights(q, k, lse, offs_n, k_len, scale)
        dp = tl.dot(dout, v.T, input_precision="ieee")
        ds = p * (dp - delta[:, None])
        dq += tl.dot(ds, k, input_precision="ieee")
    tl.store(dq_ptr + offs_m[:, None] * D + tl.arange(0, D)[None, :], dq * scale, mask=rows[:, None])


@triton.jit
def key_kernel(q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, q_len, k_len, scale,
               D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):  # fmt: skip
    """A program owns a tile of keys and streams the queries: dv = sum_m p^T dout, dk = scale * sum_m ds^T q."""
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = load_tile(k_ptr, offs_n, k_len, D)
    v = load_tile(v_ptr, offs_n, k_len, D)
    dk = tl.zeros([BLOCK_N, D], tl.float32)
    dv = tl.zeros([BLOCK_N, D], tl.float32)
    for start in range(0, q_len, BLOCK_M):
        offs_m = start + tl.arange(0, BLOCK_M)
        q = load_tile(q_ptr, offs_m, q_len, D)
        dout = load_tile(dout_ptr, offs_m, q_len, D)
        lse = tl.load(lse_ptr + offs_m, mask=offs_m < q_len, other=float("inf"))
        delta = tl.load(delta_ptr + offs_m, mask=offs_m < q_len, other=0.0)
        p = tile_weights(q, k, lse, offs_n, k_len, scale)
        dv += tl.dot(p.T, dout, input_precision="ieee")
        dp = tl.dot(dout, v.T, input_precision="ieee")
        ds = p * (dp - delta[:, None])
        dk += tl.dot(ds.T, q, input_precision="ieee")
    offs = offs_n[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(dk_ptr + offs, dk * scale, mask=(offs_n < k_len)[:, None])
    tl.store(dv_ptr + offs, dv, mask=(offs_n < k_len)[:, None])


def forward(q: Tensor, k: Tensor, v: Tensor, block: int = 32) -> tuple[Tensor, Tensor]:
    """out `[Tq, D]` and lse `[Tq]` of one head in fp32."""
    out, lse = torch.empty_like(q), q.new_empty(q.shape[0])
    grid = (triton.cdiv(q.shape[0], block),)
    sizes = q.shape[0], k.shape[0], q.shape[1] ** -0.5, q.shape[1], block, block
    forward_kernel[grid](q, k, v, out, lse, *sizes)
    return out, lse


def backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, block: int = 32
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv."""
    delta = (dout * out).sum(-1)  # what every weight of a row pays for the sum being 1
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    given = q, k, v, dout, lse, delta
    sizes = q.shape[0], k.shape[0], q.shape[1] ** -0.5, q.shape[1], block, block
    query_kernel[(triton.cdiv(q.shape[0], block),)](*given, dq, *sizes)
    key_kernel[(triton.cdiv(k.shape[0], block),)](*given, dk, dv, *sizes)
    return dq, dk, dv


def by_autograd(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
    """What torch says, in fp64, with the whole matrix kept."""
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    out = torch.softmax(leaves[0] @ leaves[1].T * q.shape[1] ** -0.5, dim=-1) @ leaves[2]
    return torch.autograd.grad(out, leaves, dout.double())


def print_times() -> None:
    print("\nTime of the backward / time of the forward on an H200 (backward.json, forward.json; head dim 128, full):")
    print(f"{'tokens':>8}{'triton':>9}{'gluon':>8}")
    for length in (512, 2048, 8192, 16384):
        cell = f"d128 full {length}"
        ratios = [
            measured.milliseconds("backward", cell, one) / measured.milliseconds("forward", cell, one)
            for one in ("triton", "gluon")
        ]
        print(f"{length:8}{ratios[0]:9.2f}{ratios[1]:8.2f}")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--queries", type=int, default=100)
    parser.add_argument("--keys", type=int, default=130)
    flags = parser.parse_args(argv)
    if INTERPRETED:
        checking.require_interpreter()
    where = "in Triton's interpreter, on the CPU" if INTERPRETED else f"on {torch.cuda.get_device_name()}"
    print(f"The kernels run {where}.\n")
    torch.manual_seed(0)
    q, dout = torch.randn(2, flags.queries, 32, device=DEVICE)
    k, v = torch.randn(2, flags.keys, 32, device=DEVICE)
    print(f"{flags.queries} queries, {flags.keys} keys, head dim 32, fp32, against autograd in fp64:")
    out, lse = forward(q, k, v)
    for name, got, wanted in zip(
        ("dq", "dk", "dv"), backward(q, k, v, out, lse, dout), by_autograd(q, k, v, dout), strict=True
    ):
        error = (got.double() - wanted).abs().max().item()
        print(f"  {name}  {'right' if error < 1e-4 else f'WRONG by {error:.1e}'}")
    print(f"kept by the forward beside q, k, v and out: the LSE, {lse.numel() * 4:,} bytes")
    print(f"kept by torch.softmax: the weights, {flags.queries * flags.keys * 4:,} bytes")
    print("products per pair of tiles: forward 2, backward 3 for dq and 4 for dk and dv, of which 2 are done twice")
    print_times()


if __name__ == "__main__":
    main()
