"""Attention in FP8: what it loses, with and without rotation, and a prefix that is quantised once and read many times.

python examples/fp8.py [--prefix 1024] [--steps 4] [--heads 8] [--kv-heads 2] [--dim 128] [--device cuda]

Where no kernel for FP8 runs, on a CPU say, its specification does: dense and slow, with the same numbers.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

from stream_attention import UnsupportedProblem, attention, attention_fp8, explain, merge_states, quantize_fp8
from stream_attention_tools.cli.values import count, device

OUTLIER = 8.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefix", type=count, default=1024, help="keys that are quantised once; default 1024")
    parser.add_argument("--steps", type=count, default=4, help="tokens that follow, one by one; default 4")
    parser.add_argument("--heads", type=count, default=8, help="of queries; default 8")
    parser.add_argument("--kv-heads", type=count, default=2, help="of keys and values; default 2")
    parser.add_argument("--dim", type=count, default=128, help="of a head: 64, 128 or 256; default 128")
    parser.add_argument(
        "--device",
        type=device,
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="cpu, cuda or cuda:N; default: cuda if there is one",
    )
    options = parser.parse_args()
    if options.heads % options.kv_heads:
        parser.error(f"--kv-heads: expected a divisor of --heads {options.heads}; got {options.kv_heads}")
    if options.dim not in (64, 128, 256):
        parser.error(f"--dim: expected 64, 128 or 256; got {options.dim}")
    torch.manual_seed(0)

    def tokens(n: int, heads: int) -> Tensor:
        return torch.randn(1, n, heads, options.dim, device=options.device).bfloat16()

    query, key = tokens(options.prefix, options.heads), tokens(options.prefix, options.kv_heads)
    value = tokens(options.prefix, options.kv_heads)

    print("1. Which backend computes it. None falls back to another precision:")
    try:
        backend = explain(query, key, value, causal=True, precision="fp8").backend
    except UnsupportedProblem as refusal:
        print(refusal)
        backend = "reference"

    print("2. What it loses, as the relative rms error of the output:")
    for kind, factor in (("normal inputs", 1.0), (f"one channel of Q and K times {OUTLIER:g}", OUTLIER)):
        q, k = query.clone(), key.clone()
        q[..., 0] *= factor
        k[..., 0] *= factor
        exact = attention(q, k, value, causal=True)
        plain, rotated = (
            attention(q, k, value, causal=True, precision="fp8", rotate=rotate, backend=backend)
            for rotate in (False, True)
        )
        print(f"   {kind}: {lost(plain, exact):.1%}, rotated {lost(rotated, exact):.1%}")

    print("3. A quantised prefix, and the tokens that follow it in full precision:")
    kv = quantize_fp8(key, value)
    print(f"   {kv}: {kv.nbytes / (key.nbytes + value.nbytes):.0%} of its bytes")
    fresh_key, fresh_value = key[:, :0], value[:, :0]
    worst = 0.0
    for _ in range(options.steps):
        q, k, v = tokens(1, options.heads), tokens(1, options.kv_heads), tokens(1, options.kv_heads)
        fresh_key, fresh_value = torch.cat([fresh_key, k], 1), torch.cat([fresh_value, v], 1)
        old = attention_fp8(q, kv, return_lse=True, backend=backend)  # all of the prefix is before the query
        new = attention(q, fresh_key, fresh_value, causal=True, return_lse=True)
        out, _ = merge_states(*zip(old, new, strict=True))
        exact = attention(q, torch.cat([key, fresh_key], 1), torch.cat([value, fresh_value], 1), causal=True)
        worst = max(worst, lost(out, exact))
    print(f"   {options.steps} steps, each merged of both: relative rms error at most {worst:.1%}")


def lost(actual: Tensor, exact: Tensor) -> float:
    return float((actual.float() - exact.float()).norm() / exact.float().norm())


if __name__ == "__main__":
    main()
