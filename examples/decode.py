"""Decode token by token: rows of different lengths in shuffled pages, a step in a CUDA graph, a quantised cache.

python examples/decode.py [--prompt 512] [--steps 16] [--heads 8] [--kv-heads 2] [--dim 64] [--device cuda]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import Tensor

from stream_attention import (
    PagedKV,
    Rotary,
    attention,
    decode_attention,
    decode_workspace,
    explain_decode,
    quantize_kv,
)
from stream_attention_tools.cli.values import count, device

ROWS = 3
PAGE = 64
GROUP, RESIDUAL = 32, 32  # of quantised caches: a block of tokens, and the latest ones that stay as they came
SHORTEST = 4 * PAGE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", type=count, default=512, help="tokens of the longest prompt; default 512")
    parser.add_argument("--steps", type=count, default=16, help="tokens that follow; default 16")
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
    if options.prompt < SHORTEST:
        parser.error(f"--prompt: expected at least {SHORTEST}; got {options.prompt}")
    if options.heads % options.kv_heads:
        parser.error(f"--kv-heads: expected a divisor of --heads {options.heads}; got {options.kv_heads}")
    if options.dim % 4:
        parser.error(f"--dim: expected a multiple of 4, as four quantised values share a word; got {options.dim}")
    torch.manual_seed(0)
    if options.device != "cpu":
        torch.cuda.set_device(options.device)
    dtype = torch.bfloat16 if options.device != "cpu" else torch.float32

    def tokens(n: int, heads: int) -> Tensor:
        return torch.randn(ROWS, n, heads, options.dim, device=options.device, dtype=dtype)

    # Pages of all rows are one pool; a row's lie wherever the table says.
    pages_of_row = -(-(options.prompt + options.steps) // PAGE)
    pool = tokens(0, options.kv_heads).new_zeros(2, ROWS * pages_of_row, PAGE, options.kv_heads, options.dim)
    table = torch.randperm(ROWS * pages_of_row, dtype=torch.int32).view(ROWS, -1).to(options.device)
    cache = PagedKV(*pool, table, lengths=torch.zeros(ROWS, dtype=torch.int32, device=options.device))
    rotary = angles(pages_of_row * PAGE, options.dim, options.device)

    # Every row gets as many tokens as the longest prompt has; what a shorter one did not have is taken back.
    cache.append(tokens(options.prompt, options.kv_heads), tokens(options.prompt, options.kv_heads), rotary=rotary)
    cache.lengths.copy_(torch.tensor([options.prompt, options.prompt // 2, 1]))
    print(f"{ROWS} rows of {listed(cache.lengths)} tokens in {table.numel()} pages of {PAGE}, which lie in any order.")

    # A step of a model, for the part that is ours. The tensors stay where they are: a CUDA graph reads and writes them.
    query, key, value = tokens(1, options.heads), tokens(1, options.kv_heads), tokens(1, options.kv_heads)
    out, workspace = torch.empty_like(query), decode_workspace(query, cache)

    def step() -> None:
        turned = turn(query, cache.lengths, rotary)  # keys are turned by append; their positions are still to be taken
        cache.append(key, value, rotary=rotary)
        decode_attention(turned, cache, out=out, workspace=workspace)

    plan = explain_decode(query, cache)
    replay = step if options.device == "cpu" else captured(step, cache.lengths)
    worst = 0.0
    for _ in range(options.steps):
        for new in (query, key, value):
            new.normal_()
        replay()
        worst = max(worst, difference(out, plainly(turn(query, cache.lengths - 1, rotary), cache)))
    how = f"computed by {plan.backend}{'' if options.device == 'cpu' else ', replayed as a CUDA graph'}"
    print(f"{options.steps} steps, {how}: rows of {listed(cache.lengths)} tokens.")
    print(f"Largest difference from attention() on each row alone: {worst:.1e}")

    print("The same cache quantised, and the error of a query's output:")
    question = tokens(1, options.heads)
    exact = decode_attention(question, cache)
    for format in ("fp8", "int8", "int4"):
        small = quantize_kv(cache, format, group=GROUP, residual=RESIDUAL)
        error = (decode_attention(question, small) - exact).norm() / exact.norm()
        print(f"{format:5} {cache.nbytes / small.nbytes:5.1f}x smaller, error of the output {error:.4f}")
    explain_decode(question, small)


def angles(positions: int, dim: int, where: str) -> Rotary:
    pairs = dim // 2
    angle = torch.arange(positions)[:, None] * 10000.0 ** -(torch.arange(pairs) / pairs)
    return Rotary(angle.cos().to(where), angle.sin().to(where))


def turn(query: Tensor, positions: Tensor, rotary: Rotary) -> Tensor:
    """A query of each row `[B, 1, Hq, D]`, rotated by its row's position `[B]` as `append` rotates keys."""
    x, y = query.float().chunk(2, -1)
    cos, sin = (table[positions.long(), None, None] for table in rotary[:2])
    return torch.cat([x * cos - y * sin, y * cos + x * sin], -1).to(query.dtype)


def captured(step: Callable[[], None], lengths: Tensor) -> Callable[[], None]:
    """The replay of a CUDA graph of the step. What runs before the capture, to compile, is taken back."""
    before, aside, graph = lengths.clone(), torch.cuda.Stream(), torch.cuda.CUDAGraph()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        step()
    torch.cuda.current_stream().wait_stream(aside)
    lengths.copy_(before)
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def plainly(query: Tensor, cache: PagedKV) -> Tensor:
    """What `attention` makes of each row, its keys and values gathered from the pages."""
    keys, values = cache.tile(0, cache.capacity)
    rows = [(slice(b, b + 1), length) for b, length in enumerate(cache.lengths.tolist())]
    return torch.cat([attention(query[b], keys[b, :length], values[b, :length]) for b, length in rows])


def difference(a: Tensor, b: Tensor) -> float:
    return float((a.float() - b.float()).abs().max())


def listed(lengths: Tensor) -> str:
    *first, last = (str(length) for length in lengths.tolist())
    return f"{', '.join(first)} and {last}"


if __name__ == "__main__":
    main()
