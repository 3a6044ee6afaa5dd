"""Long sequences, forward and backward, in memory that grows with N: of 16k to 1M tokens what this machine can do.

    python examples/long_context_example.py [--budget-seconds 60] [--lengths 16384 65536] [--window 1024]

It measures a short sequence first, says what each length would take, and runs those that fit the budget. `--window`
looks back that many tokens instead of at all of them: then a million tokens take seconds on a CPU.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

import torch
from torch import Tensor

from stream_attention import attention, explain
from stream_attention.testing.memory import peak_bytes

LENGTHS = [2**power for power in range(14, 21)]  # 16k to 1M


def inputs(length: int, options: argparse.Namespace) -> list[Tensor]:
    """Query, key and value `[1, length, heads, dim]`."""
    shape = (1, length, options.heads, options.dim)
    kind = {"device": options.device, "dtype": options.dtype, "requires_grad": True}
    return [torch.randn(shape, **kind) for _ in range(3)]


def visible(options: argparse.Namespace) -> dict[str, Any]:
    """The arguments that say which keys a token sees."""
    return {"causal": True, "window": (options.window, 0) if options.window else None}


def step(qkv: list[Tensor], options: argparse.Namespace) -> tuple[float, Tensor]:
    """One forward and backward: its seconds, and the last rows of the output."""
    began = now(options.device)
    out = attention(*qkv, **visible(options))
    out.backward(torch.ones_like(out))
    return now(options.device) - began, out[:, -4:].detach().clone()


def error(rows: Tensor, qkv: list[Tensor], options: argparse.Namespace) -> float:
    """The largest error of those rows' first head against fp64."""
    query, key, value = (t.detach()[:, :, :1].double() for t in qkv)
    # Causal is aligned bottom-right, so the last queries alone see what they see in the whole.
    exact = attention(query[:, -4:], key, value, backend="reference", **visible(options))
    return float((rows[:, :, :1] - exact).abs().max())


def now(device: str) -> float:
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter()


def scores(length: int, options: argparse.Namespace) -> int:
    """How many scores causal attention computes."""
    seen = min(options.window, length) if options.window else length / 2
    return int(options.heads * length * seen)


def bytes_needed(length: int, options: argparse.Namespace) -> int:
    """Q, K, V, the output, its gradient and theirs: eight tensors."""
    return 8 * length * options.heads * options.dim * options.dtype.itemsize


def memory_here(device: str) -> int:
    if device.startswith("cuda"):
        return torch.cuda.mem_get_info()[0]
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2  # half: others live here too


def seconds_per_score(options: argparse.Namespace) -> float:
    """From a sequence long enough to be timed, none longer than the longest that is asked for."""
    length = 2048
    while True:
        qkv = inputs(length, options)
        seconds = min(step(qkv, options)[0] for _ in range(3))  # the first also compiles or warms up
        if seconds > 0.1 or 2 * length > max(options.lengths):
            return seconds / scores(length, options)
        length *= 2


def size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if count < 1024 or unit == "TiB":
            break
        count /= 1024
    return f"{count:.1f} {unit}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--budget-seconds", type=float, default=60.0, help="for all lengths together")
    parser.add_argument("--window", type=int, default=0, help="how many tokens each one looks back; 0: all")
    parser.add_argument("--heads", type=int, default=1)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    options.lengths.sort()
    options.dtype = torch.bfloat16 if options.device.startswith("cuda") else torch.float32
    torch.manual_seed(0)

    rate = seconds_per_score(options)
    memory = memory_here(options.device)
    print(f"{options.device}: {1e-9 / rate:.2g} G scores/s forward and backward, {size(memory)} to use\n")
    print(f"{'length':>9} {'estimate':>12} {'O(N) memory':>12} {'N x N matrix':>13}")
    left, chosen = options.budget_seconds, []
    for length in options.lengths:
        seconds, needed = rate * scores(length, options), bytes_needed(length, options)
        matrix = options.heads * length**2 * options.dtype.itemsize
        verdict = "run"
        if seconds > left:
            verdict = "skip: not in the budget"
        elif needed > memory:
            verdict = "skip: not in memory"
        else:
            left -= seconds
            chosen.append(length)
        print(f"{length:>9} {seconds:>10.1f} s {size(needed):>12} {size(matrix):>13}  {verdict}")
    if not chosen:
        raise SystemExit("nothing fits; give --budget-seconds more, or --lengths less")

    print("\nThe plan of the longest:")
    empty = torch.empty(1, chosen[-1], options.heads, options.dim, device=options.device, dtype=options.dtype)
    explain(empty, empty, empty, **visible(options))
    del empty

    print(f"\n{'length':>9} {'seconds':>12} {'peak memory':>12} {'bytes/token':>13} {'error':>9}")
    for length in chosen:
        qkv, results = inputs(length, options), []
        peak = peak_bytes(lambda qkv=qkv, results=results: results.append(step(qkv, options)), options.device)
        seconds, rows = results[0]
        peak += sum(tensor.nbytes for tensor in qkv)
        figures = f"{size(peak):>12} {peak / length:>13.0f} {error(rows, qkv, options):>9.1e}"
        print(f"{length:>9} {seconds:>10.1f} s {figures}", flush=True)


if __name__ == "__main__":
    main()
