"""stream-attention cluster: what attention over a long sequence takes on many GPUs, by scheme, and which one to take.

Times are predicted from the measured speed of one GPU, the bytes that the schemes send, and the links between GPUs;
what is assumed is printed. Nothing runs and no GPU need be here, unless --measure compares the predicted computing time
with virtual ranks on this machine.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..bench.grid import DTYPES
from ..bench.results import aligned
from ..bench.summary import short_time, size
from ..cluster.calibrate import Comparison, compare
from ..cluster.planner import Advice, Cluster, Prediction, assumptions, one_gpu_s, predict_all, recommend
from ..cluster.speed import H200, Speed, from_results
from ..cluster.traffic import Workload
from . import flags, scaling, values
from .command import Refused, command, results

UNITS = {"nvlink": 1e9, "network": 1e9, "nvlink_latency": 1e-6, "network_latency": 1e-6}
"""What the numbers of flags are in: GB/s and microseconds."""
PREDICTED = ("gpus_per_node", *UNITS, "results", "memory", "host_us", "plot")
"""What a measurement has no use for."""


def _run(options: argparse.Namespace) -> int:
    flags.writable_folder("--plot", options.plot, scaling.FILES[0])
    try:
        work = flags.workload(options, options.length, DTYPES[options.dtype])
        if options.measure:
            return _measure(work, options)
        if options.device:
            raise Refused("--device: expected with --measure; got neither a measurement nor a use for it")
        speed, cluster = _speed(options), _cluster(options)
        found = predict_all(work, cluster, speed)
        if not found:
            raise Refused(f"--length: expected at least two rows for each of {cluster.ranks} ranks; got {work.length}")
        advice = recommend(found, speed)
        why = flags.write_error(scaling.write, work, cluster, speed, options.plot) if options.plot else None
    except ValueError as refused:
        raise Refused(str(refused)) from None
    if options.json:
        print(json.dumps(_as_json(work, cluster, speed, found, advice), indent=1))
    else:
        _print(work, cluster, speed, found, advice)
    if options.plot and flags.report_unwritten({options.plot: why}):
        return 1
    for path in (options.plot / name for name in scaling.FILES) if options.plot else ():
        print(f"written to {path}", file=sys.stderr if options.json else sys.stdout)
    return 0


def _cluster(options: argparse.Namespace) -> Cluster:
    """What the flags give; the rest is the default of `Cluster`."""
    given = {name: getattr(options, name) for name in ("gpus_per_node", *UNITS)}
    return Cluster(options.ranks, **{name: n * UNITS.get(name, 1) for name, n in given.items() if n is not None})


def _speed(options: argparse.Namespace) -> Speed:
    speed = H200
    if options.results:
        speed = from_results([results(path, where="--results ") for path in options.results], like=H200)
    if options.memory is not None:
        speed = replace(speed, memory_bytes=options.memory * 2.0**30)
    return speed if options.host_us is None else replace(speed, host_s=options.host_us * 1e-6)


def _print(work: Workload, cluster: Cluster, speed: Speed, found: Sequence[Prediction], advice: Advice) -> None:
    alone = one_gpu_s(work, speed)
    nodes = -(-cluster.ranks // cluster.gpus_per_node)
    where = f"{cluster.ranks} GPU{'s' if cluster.ranks > 1 else ''} in {nodes} node{'s' if nodes > 1 else ''}"
    print(f"{_in_words(work)}: predicted for {where}, each as {speed.origin}")
    print(f"one GPU alone: {short_time(1e3 * alone)}\n")
    rows = [["scheme", "time", "x one GPU", "computing", "waiting", "sent", "memory", ""]]
    for one in found:
        notes = [
            "recommended" if one is advice.chosen else "",
            "" if one.exact else "an approximation",
            "" if one.sharded else "every rank has all tensors",
            "does not fit" if one.memory_bytes > speed.memory_bytes else "",
        ]
        time, *parts = (short_time(1e3 * seconds) for seconds in (one.seconds, one.compute_s, one.waiting_s))
        figures = [time, f"{alone / one.seconds:.1f}", *parts, size(one.sent_bytes), size(one.memory_bytes)]
        rows.append([str(one.scheme), *figures, ", ".join(note for note in notes if note)])
    print(aligned(rows))
    print(f"\nrecommended: {advice.chosen.scheme}: {advice.reason}\n\nassumed:")
    print("\n".join(f"- {assumption}" for assumption in assumptions(work, speed)))


def _as_json(
    work: Workload, cluster: Cluster, speed: Speed, found: Sequence[Prediction], advice: Advice
) -> dict[str, Any]:
    def scheme(one: Prediction) -> dict[str, Any]:
        times = {"ms": one.seconds * 1e3, "compute_ms": one.compute_s * 1e3, "waiting_ms": one.waiting_s * 1e3}
        sizes = {"sent_bytes": one.sent_bytes, "memory_bytes": int(one.memory_bytes)}
        fits = {"fits": one.memory_bytes <= speed.memory_bytes, "exact": one.exact, "sharded": one.sharded}
        return {"scheme": str(one.scheme), **times, **sizes, **fits}

    return {
        "problem": _in_words(work),
        "ranks": cluster.ranks,
        "speed": speed.origin,
        "one_gpu_ms": one_gpu_s(work, speed) * 1e3,
        "schemes": list(map(scheme, found)),
        "recommended": str(advice.chosen.scheme),
        "reason": advice.reason,
        "assumptions": assumptions(work, speed),
    }


def _measure(work: Workload, options: argparse.Namespace) -> int:
    """Predictions from this device's own speed beside virtual ranks on it."""
    if given := flags.given(options, PREDICTED):
        raise Refused(f"--measure: it predicts computing, from what it measures here; leave out {given}")
    device = torch.device(flags.device(options.device))
    speed, found = compare(work, options.ranks, device, begins=lambda what: print(f"{what} ...", file=sys.stderr))
    if options.json:
        call = {"call": _in_words(work), "ranks": options.ranks, "device": speed.name, "torch": torch.__version__}
        print(json.dumps({**call, "schemes": [_compared(one) for one in found]}, indent=1))
        return 0
    print(f"{_in_words(work)}: {options.ranks} virtual ranks on {speed.name}, one after another")
    of_rank = ["a rank, predicted", "measured", "ratio"]
    rows = [["scheme", "all ranks, predicted", "measured", "ratio", "of one pass", *of_rank]]
    for one in found:
        row = [one.predicted_ms, one.measured_ms, one.predicted_critical_ms, one.measured_critical_ms]
        times = list(map(short_time, row))
        critical = one.measured_critical_ms / one.predicted_critical_ms
        ratios = f"{one.ratio:.2f}", f"{one.of_one_pass:.2f}"
        rows.append([str(one.scheme), *times[:2], *ratios, *times[2:], f"{critical:.2f}"])
    print(aligned(rows))
    return 0


def _compared(one: Comparison) -> dict[str, Any]:
    return {**one._asdict(), "scheme": str(one.scheme), "ratio": one.ratio, "of_one_pass": one.of_one_pass}


def _in_words(work: Workload) -> str:
    return f"{work}, {'training step' if work.backward else 'forward'}"


def _number(unit: str, may_be_0: bool = False) -> Callable[[str], float]:
    bound = "at least 0" if may_be_0 else "more than 0"
    return values.number(float, f"{unit}, {bound}", lambda n: 0 < n < float("inf") or (may_be_0 and n == 0))


def _flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("the cluster").add_argument
    add("--ranks", type=values.count, default=8, metavar="N", help="GPUs; default %(default)s")
    add("--gpus-per-node", type=values.count, metavar="N", help=f"default {Cluster.gpus_per_node}")
    for name, where in (("nvlink", "within a node"), ("network", "between nodes")):
        usual, latency = (getattr(Cluster, one) / UNITS[one] for one in (name, f"{name}_latency"))
        what = f"GB/s {where}, of a GPU in each direction; default {usual:g}"
        add(f"--{name}", type=_number("GB/s"), metavar="GB/s", help=what)
        what = f"microseconds of a message {where}; default {latency:g}"
        add(f"--{name}-latency", type=_number("microseconds", may_be_0=True), metavar="US", help=what)
    what = "results of the benchmark command on such a GPU; default: those of an H200"
    add("--results", type=Path, nargs="+", metavar="FILE", help=what)
    what = "of a GPU; default: that of the measured one"
    add("--memory", type=_number("GiB"), metavar="GIB", help=what)
    what = f"microseconds of the host for a call of a kernel; default {H200.host_s * 1e6:g}"
    add("--host-us", type=_number("microseconds", may_be_0=True), metavar="US", help=what)
    add = parser.add_argument_group("the call").add_argument
    flags.add_workload(add, "--length", rows=131072, heads=32, dim=128)
    add("--dtype", choices=tuple(DTYPES), default="bf16", help="default %(default)s")
    add = parser.add_argument
    add("--plot", type=Path, metavar="DIR", help="draw strong and weak scaling to 4,096 GPUs into it")
    add("--json", action="store_true", help="for a program")
    add("--measure", action="store_true", help="compare predicted computing with virtual ranks here")
    flags.add_device(parser)


main = command("python -m stream_attention.cli.cluster", __doc__, _flags, _run)

if __name__ == "__main__":
    sys.exit(main())
