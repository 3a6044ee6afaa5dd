"""A cache compressed by every method: the tokens and bytes that stay, and the error of later queries.

python examples/kv_compression.py [--length 2048] [--ratio 4] [--heads 8] [--kv-heads 2] [--dim 64] [--device cuda]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor

from stream_attention import attention, attention_mass, create_kv_compressor
from stream_attention_tools.cli.values import count, device

METHODS = ("importance", "snap", "chunk", "hybrid", "quantized", "key_norm", "streaming")
LATER = 16  # queries that come after the prompt
SHORTEST = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=count, default=2048, help="tokens of the prompt; default 2048")
    parser.add_argument("--ratio", type=float, default=4.0, help="how many times smaller; default 4")
    parser.add_argument("--heads", type=count, default=8, help="query heads; default 8")
    parser.add_argument("--kv-heads", type=count, default=2, help="default 2")
    parser.add_argument("--dim", type=count, default=64, help="of a head; default 64")
    parser.add_argument(
        "--device",
        type=device,
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="cpu, cuda or cuda:N; default: cuda if there is one",
    )
    options = parser.parse_args()
    if options.length < SHORTEST:
        parser.error(f"--length: expected at least {SHORTEST}; got {options.length}")
    if not options.ratio >= 1:
        parser.error(f"--ratio: expected at least 1; got {options.ratio:g}")
    if options.heads % options.kv_heads:
        parser.error(f"--kv-heads: expected a divisor of --heads {options.heads}; got {options.kv_heads}")
    if options.dim % 4:
        parser.error(f"--dim: expected a multiple of 4, as four quantised values share a word; got {options.dim}")

    query, keys, values = prompt(options.length, options.heads, options.kv_heads, options.dim, options.device)
    later, query = query[:, -LATER:], query[:, :-LATER]
    exact = attention(later, keys, values)
    mass = attention_mass(later, keys)

    print(f"A prompt of {options.length} tokens in which one key in 50 matters, and {LATER} later queries.")
    print(f"{'method':12} {'tokens':>7} {'bytes':>7} {'attention kept':>15} {'error of the output':>20}")
    for method in METHODS:
        compressor = create_kv_compressor(method)
        arguments = {"query": query} if compressor.uses_query else {}
        if method != "quantized":  # its ratio is that of its bits
            arguments["compression_ratio"] = options.ratio
        stored_keys, stored_values, stats = compressor.compress(keys, values, **arguments)
        new_keys, new_values = compressor.decompress(stored_keys, stored_values)
        out = attention(later, new_keys, new_values, mask=stats.mask(options.heads))
        kept = mass.gather(-1, stats.positions.clamp_min(0)).masked_fill(stats.positions < 0, 0.0).sum() / mass.sum()
        error = (out - exact).norm() / exact.norm()
        print(f"{method:12} {stats.tokens_retained:7} {stats.compression_ratio:6.1f}x {kept:14.1%} {error:20.3f}")

    _, lse = attention(query, keys, values, causal=True, return_lse=True)
    forward = seconds(lambda: attention(query, keys, values, causal=True))
    second = seconds(lambda: attention_mass(query, keys, lse, causal=True))
    window = seconds(lambda: attention_mass(query, keys, causal=True, window_queries=32))
    print(f"The mass of every key costs {second / forward:.2f} of the attention, by the last 32 queries", end=" ")
    print(f"{window / forward:.3f}.")


def prompt(length: int, heads: int, kv_heads: int, dim: int, where: str) -> tuple[Tensor, Tensor, Tensor]:
    """Queries of a prompt and of what follows it, keys and values; all queries of a head look the same way."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, length + LATER, heads, dim, generator=generator)
    keys, values = torch.randn(2, 1, length, kv_heads, dim, generator=generator)
    way = torch.nn.functional.normalize(torch.randn(kv_heads, dim, generator=generator), dim=-1)
    matters = torch.rand(1, length, kv_heads, 1, generator=generator) < 0.02
    keys += 8 * matters * way
    query += dim**0.5 * way.repeat_interleave(heads // kv_heads, 0)
    return query.to(where), keys.to(where), values.to(where)


def seconds(work: Callable[[], Tensor]) -> float:
    """The shortest of a few runs."""
    best = float("inf")
    for _ in range(4):
        began = time.perf_counter()
        work().sum().item()  # waits for a device
        best = min(best, time.perf_counter() - began)
    return best


if __name__ == "__main__":
    main()
