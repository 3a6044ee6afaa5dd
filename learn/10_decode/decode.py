"""One new token against a cache, in Triton: the keys are split over programs, and their states are merged."""

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
def split_kernel(q_ptr, k_ptr, v_ptr, outs_ptr, lses_ptr, k_len, splits, scale, q_heads, kv_heads,
                 GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr):  # fmt: skip
    """The state (out, lse) of one KV head over one part of the keys. The rows of a tile are the heads that share it."""
    kv_head, split = tl.program_id(0), tl.program_id(1)
    offs_r, offs_d = tl.arange(0, ROWS), tl.arange(0, D)
    rows = offs_r < GROUP  # the matrix unit wants 16 rows, even if fewer heads share the keys
    heads = kv_head * GROUP + offs_r
    q = tl.load(q_ptr + heads[:, None] * D + offs_d[None, :], mask=rows[:, None], other=0.0)
    tiles = tl.cdiv(k_len, BLOCK_N)
    per_split = tl.cdiv(tiles, splits)
    begin = split * per_split
    end = tl.minimum(begin + per_split, tiles)  # before begin where tiles are fewer than splits: nothing to do
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D], tl.float32)
    for tile in range(begin, end):
        offs_n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        offs = (offs_n[:, None] * kv_heads + kv_head) * D + offs_d[None, :]
        k = tl.load(k_ptr + offs, mask=(offs_n < k_len)[:, None], other=0.0)
        v = tl.load(v_ptr + offs, mask=(offs_n < k_len)[:, None], other=0.0)
        scores = tl.dot(q, k.T, input_precision="ieee") * scale  # [ROWS, BLOCK_N]
        scores = tl.where((offs_n < k_len)[None, :], scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        weights = tl.exp(scores - new_max[:, None])
        rescale = tl.exp(row_max - new_max)
        row_sum = row_sum * rescale + tl.sum(weights, 1)
        acc = acc * rescale[:, None] + tl.dot(weights, v, input_precision="ieee")
        row_max = new_max
    seen = row_sum > 0
    out = acc / tl.where(seen, row_sum, 1.0)[:, None]
    lse = tl.where(seen, row_max + tl.log(tl.where(seen, row_sum, 1.0)), float("-inf"))
    state = split * q_heads + heads
    tl.store(outs_ptr + state[:, None] * D + offs_d[None, :], out, mask=rows[:, None])
    tl.store(lses_ptr + state, lse, mask=rows)


@triton.jit
def merge_kernel(outs_ptr, lses_ptr, out_ptr, splits, q_heads, D: tl.constexpr, SPLITS: tl.constexpr):
    """out = sum_s exp(lse_s - lse) out_s of one head: step 04's merge of all parts at once."""
    head = tl.program_id(0)
    offs_s, offs_d = tl.arange(0, SPLITS), tl.arange(0, D)
    there = offs_s < splits
    lse = tl.load(lses_ptr + offs_s * q_heads + head, mask=there, other=float("-inf"))
    outs = tl.load(outs_ptr + (offs_s * q_heads + head)[:, None] * D + offs_d[None, :], mask=there[:, None], other=0.0)
    weights = tl.exp(lse - tl.max(lse, 0))  # an empty part has lse -inf and weighs 0
    out = tl.sum(outs * weights[:, None], 0) / tl.sum(weights, 0)
    tl.store(out_ptr + head * D + offs_d, out)


def decode(q: Tensor, k: Tensor, v: Tensor, splits: int, block: int) -> Tensor:
    """`q [Hq, D]` of the last token against `k` and `v [T, Hkv, D]`, in fp32."""
    (q_heads, dim), (length, kv_heads) = q.shape, k.shape[:2]
    outs, lses = q.new_empty(splits, q_heads, dim), q.new_empty(splits, q_heads)
    out, group = torch.empty_like(q), q_heads // kv_heads
    split_kernel[(kv_heads, splits)](
        q, k, v, outs, lses, length, splits, dim**-0.5, q_heads, kv_heads, group, max(16, group), dim, block
    )  # fmt: skip
    merge_kernel[(q_heads,)](outs, lses, out, splits, q_heads, dim, triton.next_power_of_2(splits))
    return out


def reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The definition, in fp64."""
    k, v = (x.double().repeat_interleave(q.shape[0] // k.shape[1], dim=1) for x in (k, v))
    weights = torch.softmax(torch.einsum("hd,nhd->hn", q.double(), k) * q.shape[1] ** -0.5, dim=-1)
    return torch.einsum("hn,nhd->hd", weights, v)


def print_times() -> None:
    """What decode_attention took, and how much of the memory's speed that is."""
    found = measured.results("decode")
    most = found["read_bandwidth"]["tb_per_s"]
    print(f"\nOn an H200 (decode.json), bf16; a plain sum reads its memory at {most:.2f} TB/s:")
    print(f"{'batch':>6}{'heads':>8}{'keys':>8}{'splits':>8}{'time':>10}{'cache':>10}{'read at':>12}")
    for name in ("b1 32/8 d128 8192", "b1 32/8 d128 131072", "b8 32/8 d128 8192", "b64 32/8 d128 8192"):
        cell = next(one for one in found["cells"] if one["name"] == name)
        problem, ours = cell["problem"], cell["providers"]["decode"]
        splits = ours["ran"].partition("keys in ")[2].partition(" ")[0] or "1"
        size = 2 * 2 * problem["B"] * problem["Tk"] * problem["Hkv"] * problem["D"]
        speed = size / ours["median_ms"] / 1e9
        print(
            f"{problem['B']:6}{problem['Hq']:>5}/{problem['Hkv']}{problem['Tk']:9}{splits:>8}"
            f"{ours['median_ms'] * 1e3:7.1f} us{size / 1e6:7.0f} MB{speed:7.2f} TB/s"
        )


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keys", type=int, default=500)
    parser.add_argument("--block", type=int, default=32)
    flags = parser.parse_args(argv)
    if INTERPRETED:
        checking.require_interpreter()
    where = "in Triton's interpreter, on the CPU" if INTERPRETED else f"on {torch.cuda.get_device_name()}"
    print(f"The kernels run {where}.\n")
    torch.manual_seed(0)
    q = torch.randn(8, 32, device=DEVICE)
    k, v = torch.randn(2, flags.keys, 2, 32, device=DEVICE)
    tiles = triton.cdiv(flags.keys, flags.block)
    print(f"1 token, 8 heads on 2 KV heads, {flags.keys} keys = {tiles} tiles of {flags.block}")
    print(f"{'splits':>8}{'programs':>10}{'tiles in a row':>16}{'bytes of states':>17}")
    for splits in (1, 2, 4, 8, 32):
        error = (decode(q, k, v, splits, flags.block).double() - reference(q, k, v)).abs().max().item()
        states = splits * 8 * (32 + 1) * 4
        right = "right" if error < 1e-5 else f"WRONG by {error:.1e}"
        print(f"{splits:8}{2 * splits:10}{triton.cdiv(tiles, splits):16}{states:17,}   {right}")
    print_times()


if __name__ == "__main__":
    main()
