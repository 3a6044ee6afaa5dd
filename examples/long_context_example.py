"""Long sequences, forward and backward, in memory that grows with N: from 16k tokens up to what this machine can do.

    python examples/long_context_example.py [--budget-seconds 60] [--lengths 16384 65536] [--window 1024]

From the shortest to the longest, it estimates each length from the one before, and runs it if time and memory are left.
The budget covers everything from the first tensor on; a run that exceeds it is stopped. With `--window` each token sees
that many tokens instead of all, so that time grows with N too: with 1024, a million tokens of one head took half a
minute and 2.9 GiB on one core of a shared server.
"""

from __future__ import annotations

import argparse
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stream_attention import attention, explain
from stream_attention_tools.cli.values import count, count_or_none, device, seconds

LENGTHS = [2**power for power in range(14, 21)]  # 16k to 1M
MARGIN = 1.25  # estimates are this much on the safe side


class Run(NamedTuple):
    """One length, done: the seconds of forward and backward, those of everything, bytes at the peak, an error."""

    length: int
    seconds: float
    spent: float
    peak: int
    error: float


def inputs(length: int, options: argparse.Namespace, made: Callable[..., Tensor] = torch.randn) -> list[Tensor]:
    """Query, key and value `[1, length, heads, dim]`."""
    shape = (1, length, options.heads, options.dim)
    kind = {"device": options.device, "dtype": options.dtype, "requires_grad": True}
    return [made(shape, **kind) for _ in range(3)]


def visible(options: argparse.Namespace) -> dict[str, Any]:
    """The arguments that say which keys a token sees."""
    return {"causal": True, "window": (options.window, 0) if options.window else None}


def run(length: int, options: argparse.Namespace) -> Run:
    """Draw inputs, one forward and backward, and a look at the last rows."""
    began = now(options.device)
    qkv = inputs(length, options)
    stepping = now(options.device)
    out = attention(*qkv, **visible(options))
    out.backward(torch.ones_like(out))
    stepped = now(options.device)
    rows = out[:, -4:].detach().clone()
    del out
    for tensor in qkv:
        tensor.grad = None
    found = error(rows, qkv, options)
    return Run(length, stepped - stepping, now(options.device) - began, peak(options), found)


def error(rows: Tensor, qkv: list[Tensor], options: argparse.Namespace) -> float:
    """The largest error of those rows' first head against fp64."""
    query = qkv[0].detach()[:, -4:, :1].double()
    # Causal is aligned bottom-right, so the last queries alone see what they see in the whole.
    key, value = (t.detach()[:, -options.window - 4 if options.window else 0 :, :1].double() for t in qkv[1:])
    exact = attention(query, key, value, backend="reference", **visible(options))
    return float((rows[:, :, :1] - exact).abs().max())


def now(device: str) -> float:
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter()


def scores(length: int, options: argparse.Namespace) -> int:
    """How many scores causal attention computes."""
    visible = min(options.window, length) if options.window else length / 2
    return int(options.heads * length * visible)


def bytes_needed(length: int, first: Run, last: Run, options: argparse.Namespace) -> int:
    """Peak memory of the last run, and for each further token what those since the first took, eight tensors at least.

    Those are Q, K, V, the output, its gradient and theirs.
    """
    tensors = 8 * options.heads * options.dim * options.dtype.itemsize
    grown = (last.peak - first.peak) / (last.length - first.length) if last.length > first.length else 0.0
    return last.peak + int(max(tensors, grown) * (length - last.length))


def peak(options: argparse.Namespace) -> int:
    """Peak bytes since Python and torch were loaded; lengths grow, so those of the last one."""
    if options.device.startswith("cuda"):
        return torch.cuda.max_memory_allocated(options.device)
    return resident() - options.loaded


def resident() -> int:
    """The most memory this process had. Linux counts in rusage what its parent had too, so not there."""
    status = Path("/proc/self/status")
    if status.exists():
        return 1024 * next(int(line.split()[1]) for line in status.read_text().splitlines() if "VmHWM" in line)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def memory_here(device: str) -> int:
    if device.startswith("cuda"):
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2  # half: others live here too


def size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if count < 1024 or unit == "TiB":
            break
        count /= 1024
    return f"{count:.1f} {unit}"


def out_of_time(*_: object) -> None:
    raise TimeoutError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--lengths", type=count, nargs="+", default=LENGTHS, metavar="N", help="tokens; default 16384 ... 1048576"
    )
    parser.add_argument(
        "--budget-seconds", type=seconds, default=60.0, metavar="S", help="for all lengths together; default 60"
    )
    parser.add_argument(
        "--window", type=count_or_none, default=0, metavar="N", help="how many tokens each looks back; default 0: all"
    )
    parser.add_argument("--heads", type=count, default=1, help="default 1")
    parser.add_argument("--dim", type=count, default=64, help="of a head; default 64")
    parser.add_argument(
        "--device",
        type=device,
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="cpu, cuda or cuda:N; default: cuda if there is one",
    )
    options = parser.parse_args()
    options.dtype = torch.bfloat16 if options.device.startswith("cuda") else torch.float32
    options.loaded = resident()
    torch.manual_seed(0)
    end = time.perf_counter() + options.budget_seconds
    signal.signal(signal.SIGALRM, out_of_time)
    signal.setitimer(signal.ITIMER_REAL, options.budget_seconds)
    try:
        done = run_all(sorted(set(options.lengths)), end, options)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    if not done:
        raise SystemExit("nothing fits; give --budget-seconds more, or --lengths less")
    print("\nHow the longest ran:")
    explain(*inputs(done[-1].length, options, torch.empty), **visible(options))


def run_all(lengths: list[int], end: float, options: argparse.Namespace) -> list[Run]:
    """Those lengths that fit."""
    memory, done = memory_here(options.device), []
    try:
        short = [run(min(2048, lengths[0]), options) for _ in range(3)]  # the first also compiles or warms up
        first = last = min(short, key=lambda one: one.spent)
        print(f"{options.device}: {options.budget_seconds:g} s, {size(memory)} of memory to use\n")
        print(f"{'':9} {'estimates':>38} | measured")
        print(f"{'length':>9} {'all of it':>11} {'memory':>12} {'N x N matrix':>13}", end=" | ")
        print(f"{'step':>10} {'peak memory':>12} {'bytes/token':>12} {'error':>9}")
        for length in lengths:
            expected = MARGIN * last.spent * scores(length, options) / scores(last.length, options)
            needed = bytes_needed(length, first, last, options)
            matrix = options.heads * length**2 * options.dtype.itemsize
            print(f"{length:>9} {expected:>9.1f} s {size(needed):>12} {size(matrix):>13}", end=" | ", flush=True)
            left = end - time.perf_counter()
            if needed > memory:
                print("skipped: not in memory")
            elif expected > left:
                print(f"skipped: {left:.0f} s are left of the budget")
            else:
                last = run(length, options)
                done.append(last)
                print(
                    f"{last.seconds:>8.2f} s {size(last.peak):>12} {last.peak / length:>12.0f} {last.error:>9.1e}",
                    flush=True,
                )
    except TimeoutError:
        print("broken off: the budget is spent")
    return done


if __name__ == "__main__":
    main()
