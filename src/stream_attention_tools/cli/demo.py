"""python -m stream_attention_tools.cli.demo: one attention call by one device and by several ranks, side by side.

Ranks are virtual ones in this process, or those that torchrun started:

    python -m stream_attention_tools.cli.demo --seq 2048 --dim 64 --ranks 4
    torchrun --nproc-per-node=4 -m stream_attention_tools.cli.demo --seq 2048 --dim 64

It prints the time of both, the largest difference, a rank's memory, and the bytes it sends beside what the formula
says. The exit code is 1 if results differ by more than rounding or bytes are not those of the formula.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from typing import Any, get_args

import torch

from stream_attention.base.errors import refuse
from stream_attention.distributed.processes import Processes, initialize, launched
from stream_attention.distributed.shard import Layout
from stream_attention.distributed.transport import CommunicationError

from ..cluster.traffic import Scheme, Workload
from ..cluster.trial import ClockedRanks, Measured, Trial
from . import flags, values
from .command import Refused, command
from .plan import DTYPES

SCHEMES = ("ring", "allgather", "ulysses", "query")


def _run(options: argparse.Namespace) -> int:
    on_processes = "RANK" in os.environ
    device = torch.device(flags.device(options.device))
    try:
        if on_processes and options.ranks is not None and options.ranks != launched("WORLD_SIZE", 1):
            refuse("--ranks", f"none, or the {launched('WORLD_SIZE', 1)} that torchrun started", options.ranks)
        dtype = DTYPES[options.dtype] if options.dtype else torch.bfloat16 if device.type == "cuda" else torch.float32
        work = flags.workload(options, options.seq, dtype)
        scheme = _scheme(options, work)
        if on_processes:
            return _on_processes(scheme, work, device, options)
        trial = Trial(scheme, work, ClockedRanks(options.ranks or 4), device)
        found = trial.measure(options.iters)
    except (ValueError, CommunicationError) as refused:
        raise Refused(str(refused)) from None
    _print(trial, found, options.json)
    return 0 if found.right else 1


def _on_processes(scheme: Scheme, work: Workload, device: torch.device, options: argparse.Namespace) -> int:
    """This process is a rank; the first one speaks."""
    import torch.distributed as dist

    initialize()
    try:
        if device.type == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
        trial = Trial(scheme, work, Processes(), device)
        found = trial.measure(options.iters)
        if trial.transport.ranks == (0,):
            _print(trial, found, options.json)
    finally:
        dist.destroy_process_group()
    return 0 if found.right else 1


def _scheme(options: argparse.Namespace, work: Workload) -> Scheme:
    """The scheme as asked for; without --layout, the balanced one."""
    name, ring_size = options.scheme, options.ring_size or 1
    if options.ring_size and name != "ulysses":
        raise Refused(f"--ring-size: expected with --scheme ulysses; got --scheme {name}")
    if options.layout and name == "query":
        raise Refused("--layout: expected with a scheme that shards the sequence; got --scheme query")
    balanced: Layout = "zigzag" if work.causal and (name in ("ring", "allgather") or ring_size > 1) else "contiguous"
    return Scheme(name, options.layout or balanced, ring_size)


def _print(trial: Trial, found: Measured, as_json: bool) -> None:
    virtual = isinstance(trial.transport, ClockedRanks)
    if as_json:
        print(json.dumps(_as_json(trial, found, virtual)))
        return
    from ..bench.results import aligned

    work, size = trial.work, trial.transport.size
    ranks = f"{size} rank{'s' if size > 1 else ''}"
    kind = "virtual, in one process" if virtual else "a process each"
    print(f"{trial.scheme}: {ranks}, {kind}, on {trial.device.type}")
    print(f"{work}, {'forward and backward' if work.backward else 'forward'}")
    speed_up = f"speed-up {found.single_ms / found.critical_ms:.2f}x"
    rows = [["one device", f"{found.single_ms:.3f} ms", ""]]
    if virtual:
        share = f"{found.ranks_ms / found.single_ms:.2f}x one device: ranks run one after another on one device"
        each = f"{speed_up}: the critical path, had each a device and sending been free"
        rows += [[f"{ranks}, sum", f"{found.ranks_ms:.3f} ms", share]]
        rows += [[f"{ranks}, each", f"{found.critical_ms:.3f} ms", each]]
    else:
        rows.append([ranks, f"{found.critical_ms:.3f} ms", f"{speed_up}, of the slowest rank"])
    agrees = "rounding" if found.difference <= found.allowed else "WRONG"
    equal = "equal to" if found.sent_bytes == found.formula_bytes else "NOT"
    rows += [
        ["max |difference|", f"{found.difference:.2e}", f"{agrees}: at most {found.allowed:.2e}"],
        ["memory per rank", f"{found.memory_bytes / 2**20:.2f} MiB", "inputs, and the peak beyond them"],
        ["sent per rank", f"{found.sent_bytes} bytes", f"{equal} the formula's {found.formula_bytes}, by the busiest"],
    ]
    print(aligned(rows))


def _as_json(trial: Trial, found: Measured, virtual: bool) -> dict[str, Any]:
    scheme = {"scheme": str(trial.scheme), "layout": trial.scheme.layout, "ranks": trial.transport.size}
    where = {"virtual": virtual, "device": trial.device.type}
    work = asdict(trial.work) | {"dtype": str(trial.work.dtype).removeprefix("torch.")}
    measured = found._asdict() | {"speed_up": found.single_ms / found.critical_ms, "right": found.right}
    return scheme | where | work | measured


def _flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    flags.add_workload(add, "--seq", rows=1024, heads=8, dim=64)
    add("--ranks", type=values.count, metavar="N", help="virtual ranks; default 4, or those that torchrun started")
    add("--scheme", choices=SCHEMES, default="ring", help="default %(default)s")
    add("--ring-size", type=values.count, metavar="R", help="of ulysses: a ring of R groups that divide the heads")
    add("--layout", choices=get_args(Layout), help="of the shards; default: in balance, so zigzag for a causal ring")
    add("--dtype", choices=tuple(DTYPES), metavar="DTYPE", help="fp16, bf16 (default on cuda), fp32 (on cpu) or fp64")
    flags.add_device(parser)
    best = "rounds, of which the best counts; default %(default)s"
    add("--iters", type=values.count, default=3, metavar="N", help=best)
    add("--json", action="store_true", help="for a program")


main = command("python -m stream_attention_tools.cli.demo", __doc__, _flags, _run)

if __name__ == "__main__":
    sys.exit(main())
