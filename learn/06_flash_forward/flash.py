"""FlashAttention's forward in Triton: one kernel, compared with PyTorch.

python learn/06_flash_forward/flash.py [--length 100] [--heads 2] [--dim 32] [--block-m 32] [--block-n 32]

Without a GPU it runs in Triton's interpreter, and says so; with one it also measures the time.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

# triton.jit chooses between compiler and interpreter when it decorates, so this stands before the import.
os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")
import triton
import triton.language as tl

sys.path.insert(0, str(Path(__file__).parents[1]))
import checking

INTERPRETED = os.environ["TRITON_INTERPRET"] == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def flash_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr,
    stride_qb, stride_qt, stride_qh,
    stride_kb, stride_kt, stride_kh,
    stride_vb, stride_vt, stride_vh,
    stride_ob, stride_ot, stride_oh,
    q_len, k_len, heads, scale_log2,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """out = softmax(q k^T scale) v and its lse, for BLOCK_M queries of one head a program.

    Scores are in units of log2: 2^(s log2(e)) is e^s, and a GPU has an instruction for 2^x. "ieee": fp32 inputs are
    multiplied as fp32, not cut to 10 bits for the tensor cores; 16-bit inputs go there either way.
    """
    # Where am I.
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    batch = tl.program_id(1) // heads
    head = tl.program_id(1) % heads
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, D)
    q_ptr += batch * stride_qb + head * stride_qh
    k_ptr += batch * stride_kb + head * stride_kh
    v_ptr += batch * stride_vb + head * stride_vh
    out_ptr += batch * stride_ob + head * stride_oh
    mask_m = offs_m < q_len

    # Load Q, once.
    q = tl.load(q_ptr + offs_m[:, None] * stride_qt + offs_d[None, :], mask=mask_m[:, None], other=0.0)  # [BLOCK_M, D]

    # Initial state: nothing seen.
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D], tl.float32)

    # Stream tiles of keys and values.
    for start_n in range(0, k_len, BLOCK_N):
        rows = start_n + offs_n
        mask_n = rows < k_len
        k = tl.load(k_ptr + rows[:, None] * stride_kt + offs_d[None, :], mask=mask_n[:, None], other=0.0)
        scores = tl.dot(q, k.T, input_precision="ieee") * scale_log2  # [BLOCK_M, BLOCK_N]
        scores = tl.where(mask_n[None, :], scores, float("-inf"))  # keys past the end have weight 0

        new_max = tl.maximum(row_max, tl.max(scores, 1))
        weights = tl.exp2(scores - new_max[:, None])
        rescale = tl.exp2(row_max - new_max)
        row_sum = row_sum * rescale + tl.sum(weights, 1)
        row_max = new_max

        v = tl.load(v_ptr + rows[:, None] * stride_vt + offs_d[None, :], mask=mask_n[:, None], other=0.0)
        acc = acc * rescale[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")

    # Finish and store. lse is a natural logarithm, as everywhere outside kernels.
    out = acc / row_sum[:, None]
    lse = (row_max + tl.log2(row_sum)) / LOG2E
    tl.store(out_ptr + offs_m[:, None] * stride_ot + offs_d[None, :], out.to(out_ptr.dtype.element_ty), mask_m[:, None])
    tl.store(lse_ptr + tl.program_id(1) * q_len + offs_m, lse, mask=mask_m)


def flash_attention(q: Tensor, k: Tensor, v: Tensor, block_m: int = 64, block_n: int = 64) -> tuple[Tensor, Tensor]:
    """out `[B, Tq, H, D]` and lse `[B, H, Tq]`; D is a power of two from 16, and the last dims are contiguous."""
    B, Tq, H, D = q.shape
    out = torch.empty_like(q)
    lse = torch.empty(B, H, Tq, device=q.device, dtype=torch.float32)
    grid = (triton.cdiv(Tq, block_m), B * H)
    flash_kernel[grid](
        q, k, v, out, lse,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3],
        Tq, k.shape[1], H, D**-0.5 * LOG2E.value,
        D=D, BLOCK_M=block_m, BLOCK_N=block_n,
    )  # fmt: skip
    return out, lse


def standard_attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The definition, in fp64, with all scores in memory."""
    q, k, v = (t.double().transpose(1, 2) for t in (q, k, v))  # [B, H, T, D]
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    return (torch.softmax(scores, -1) @ v).transpose(1, 2), torch.logsumexp(scores, -1)


def error(got: Tensor, exact: Tensor) -> str:
    """Below which power of ten the largest difference is."""
    largest = (got.double() - exact).abs().max().item()
    return next((f"below 1e-{digits}" for digits in range(9, 0, -1) if largest < 10.0**-digits), f"{largest:.2g}")


def show_tiles(tq: int, tk: int, batch: int, heads: int, block_m: int, block_n: int) -> None:
    tiles_m, tiles_n = triton.cdiv(tq, block_m), triton.cdiv(tk, block_n)
    programs, last = tiles_m * batch * heads, tk - (tiles_n - 1) * block_n
    print(f"{tq} queries in {tiles_m} tiles of {block_m}, times {batch * heads} heads: {programs} programs")
    print(f"{tk} keys: each program walks over {tiles_n} tiles of {block_n}, the last with {last}")


def show_times(block_m: int, block_n: int) -> None:
    """On a GPU: bf16, 16 heads of 128, 16k tokens in all, as in benchmarks/results/h200/forward.json."""
    print("\nbf16, milliseconds\n  length   this kernel   SDPA")
    for length in (512, 2048, 8192):
        q, k, v = torch.randn(3, 16384 // length, length, 16, 128, device="cuda", dtype=torch.bfloat16)
        ours = triton.testing.do_bench(lambda q=q, k=k, v=v: flash_attention(q, k, v, block_m, block_n))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        sdpa = triton.testing.do_bench(lambda q=q, k=k, v=v: F.scaled_dot_product_attention(q, k, v))
        print(f"  {length:6}   {ours:11.3f}   {sdpa:5.3f}")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=100, help="queries, and half as many more keys; default 100")
    parser.add_argument("--heads", type=int, default=2, help="heads of each of 2 sequences; default 2")
    parser.add_argument("--dim", type=int, default=32, help="numbers of a head, a power of two from 16; default 32")
    parser.add_argument("--block-m", type=int, default=32, help="queries of a tile, a power of two; default 32")
    parser.add_argument("--block-n", type=int, default=32, help="keys of a tile, a power of two; default 32")
    options = parser.parse_args(argv)
    if INTERPRETED:
        checking.require_interpreter()
    where = "in Triton's interpreter, on the CPU" if INTERPRETED else f"on {torch.cuda.get_device_name()}"
    print(f"The kernel runs {where}.\n")
    tq, tk = options.length, options.length * 3 // 2
    show_tiles(tq, tk, 2, options.heads, options.block_m, options.block_n)
    generator = torch.Generator().manual_seed(0)
    print("\ndtype  largest error against fp64: this kernel, its lse, torch's SDPA")
    for name, dtype in (("fp32", torch.float32), ("fp16", torch.float16)):
        q = torch.randn(2, tq, options.heads, options.dim, generator=generator).to(DEVICE, dtype)
        k, v = torch.randn(2, 2, tk, options.heads, options.dim, generator=generator).to(DEVICE, dtype)
        out, lse = flash_attention(q, k, v, options.block_m, options.block_n)
        exact_out, exact_lse = standard_attention(q, k, v)
        sdpa = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2)
        print(f"{name:6} {error(out, exact_out)}, {error(lse, exact_lse)}, {error(sdpa, exact_out)}")
    if not INTERPRETED:
        show_times(128, 64)


if __name__ == "__main__":
    main()
