"""Causal attention in Triton, three ways: the same answer, with fewer and fewer tiles read and masked."""

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

WAYS = {"mask everything": (False, False), "skip masked tiles": (True, False), "mask the edge only": (True, True)}
"""Whether tiles that nobody sees are skipped, and whether tiles that everybody sees go without a mask."""


@triton.jit
def attend_tile(tile_n, q, q_pos, k_ptr, v_ptr, k_len, scale, row_max, row_sum, acc,
                D: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """One step of the online softmax (step 04)."""
    offs_n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs = offs_n[:, None] * D + tl.arange(0, D)[None, :]
    if MASKED:
        k = tl.load(k_ptr + offs, mask=(offs_n < k_len)[:, None], other=0.0)
        v = tl.load(v_ptr + offs, mask=(offs_n < k_len)[:, None], other=0.0)
    else:
        k = tl.load(k_ptr + offs)
        v = tl.load(v_ptr + offs)
    scores = tl.dot(q, k.T, input_precision="ieee") * scale  # [BLOCK_M, BLOCK_N]
    if MASKED:
        seen = (offs_n[None, :] <= q_pos[:, None]) & (offs_n < k_len)[None, :]
        scores = tl.where(seen, scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    safe_max = tl.where(new_max == float("-inf"), 0.0, new_max) if MASKED else new_max  # a row may have seen nothing
    weights = tl.exp(scores - safe_max[:, None])
    rescale = tl.exp(row_max - safe_max)
    acc = acc * rescale[:, None] + tl.dot(weights, v, input_precision="ieee")
    return new_max, row_sum * rescale + tl.sum(weights, 1), acc


@triton.jit
def causal_kernel(q_ptr, k_ptr, v_ptr, out_ptr, read_ptr, masked_ptr, q_len, k_len, scale,
                  D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                  SKIP: tl.constexpr, EDGE_ONLY: tl.constexpr):  # fmt: skip
    # Query row i stands at position i + k_len - q_len: the last query sees every key.
    tile_m = tl.program_id(0)
    offs_m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, D)
    first_pos = tile_m * BLOCK_M + k_len - q_len
    last_pos = tl.minimum(first_pos + BLOCK_M, k_len) - 1
    q = tl.load(q_ptr + offs_m[:, None] * D + offs_d[None, :], mask=(offs_m < q_len)[:, None], other=0.0)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D], tl.float32)

    # Tiles [0, whole) are seen by every row, [whole, end) by some, the rest by none.
    end = tl.cdiv(k_len, BLOCK_N)
    whole = 0
    if SKIP:
        end = tl.cdiv(tl.maximum(last_pos + 1, 0), BLOCK_N)
    if EDGE_ONLY:
        whole = tl.maximum(first_pos + 1, 0) // BLOCK_N
    q_pos = offs_m + k_len - q_len
    for tile_n in range(whole):
        row_max, row_sum, acc = attend_tile(
            tile_n, q, q_pos, k_ptr, v_ptr, k_len, scale, row_max, row_sum, acc, D, BLOCK_N, False
        )
    for tile_n in range(whole, end):
        row_max, row_sum, acc = attend_tile(
            tile_n, q, q_pos, k_ptr, v_ptr, k_len, scale, row_max, row_sum, acc, D, BLOCK_N, True
        )

    out = acc / tl.where(row_sum == 0, 1.0, row_sum)[:, None]
    tl.store(out_ptr + offs_m[:, None] * D + offs_d[None, :], out, mask=(offs_m < q_len)[:, None])
    tl.store(read_ptr + tile_m, end)
    tl.store(masked_ptr + tile_m, end - whole)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, way: str, block: int) -> tuple[Tensor, int, int]:
    """Attention of one head, `[T, D]` in fp32, with the tiles that were read and those that were masked."""
    tiles = triton.cdiv(q.shape[0], block)
    out = torch.full_like(q, float("nan"))
    read, masked = torch.zeros(2, tiles, dtype=torch.int32, device=q.device)
    causal_kernel[(tiles,)](
        q, k, v, out, read, masked, q.shape[0], k.shape[0], q.shape[1] ** -0.5, q.shape[1], block, block, *WAYS[way]
    )  # fmt: skip
    return out, int(read.sum()), int(masked.sum())


def reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The definition, in fp64, with the whole matrix."""
    q, k, v = q.double(), k.double(), v.double()
    q_pos = torch.arange(q.shape[0], device=q.device) + k.shape[0] - q.shape[0]
    hidden = torch.arange(k.shape[0], device=q.device)[None, :] > q_pos[:, None]
    weights = torch.softmax((q @ k.T * q.shape[1] ** -0.5).masked_fill(hidden, float("-inf")), dim=-1)
    return weights.nan_to_num(0.0) @ v  # a query before the first key sees nothing: 0


def print_by_length(block: int = 128) -> None:
    """Tiles by arithmetic, beside times that were measured."""
    print(f"\nTiles of {block} x {block}, and time of causal / full on an H200 (forward.json, head dim 128):")
    print(f"{'tokens':>8}{'tiles read':>12}{'of them masked':>16}{'triton':>9}{'gluon':>8}")
    for length in (512, 1024, 2048, 4096, 8192, 16384):
        n = length // block
        read = n * (n + 1) // 2
        ratios = [
            measured.milliseconds("forward", f"d128 causal {length}", name)
            / measured.milliseconds("forward", f"d128 full {length}", name)
            for name in ("triton", "gluon")
        ]
        print(f"{length:8}{read / n**2:12.1%}{n / read:16.1%}{ratios[0]:9.2f}{ratios[1]:8.2f}")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--queries", type=int, default=200)
    parser.add_argument("--keys", type=int, default=200)
    parser.add_argument("--block", type=int, default=32)
    flags = parser.parse_args(argv)
    if INTERPRETED:
        checking.require_interpreter()
    where = "in Triton's interpreter, on the CPU" if INTERPRETED else f"on {torch.cuda.get_device_name()}"
    print(f"The kernels run {where}.\n")
    torch.manual_seed(0)
    q, k, v = (torch.randn(length, 32, device=DEVICE) for length in (flags.queries, flags.keys, flags.keys))
    print(f"{flags.queries} queries, {flags.keys} keys, tiles of {flags.block} x {flags.block}")
    print(f"{'':20}{'tiles read':>12}{'tiles masked':>14}")
    for way in WAYS:
        out, read, masked = causal_attention(q, k, v, way, flags.block)
        error = (out.double() - reference(q, k, v)).abs().max().item()
        print(f"{way:20}{read:12}{masked:14}   {'right' if error < 1e-5 else f'WRONG by {error:.1e}'}")
    print_by_length()


if __name__ == "__main__":
    main()
