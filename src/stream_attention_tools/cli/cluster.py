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
from ..bench.results import aligned, load
from ..cluster.calibrate import Comparison, compare
from ..cluster.planner import (
    Advice,
    Cluster,
    Prediction,
    assumptions,
    one_gpu_s,
    predict_all,
    recommend,
)
from ..cluster.speed import H200, Speed, from_results
from ..cluster.traffic import Workload
from . import flags, scaling, values
from .ending import quiet
from .flags import Refused

PROG = "python -m stream_attention.cli.cluster"
UNITS = {"nvlink": 1e9, "network": 1e9, "nvlink_latency": 1e-6, "network_latency": 1e-6}
"""What the numbers of flags are in: GB/s and microseconds."""
PREDICTED = ("gpus_per_node", *UNITS, "results", "memory", "host_us", "plot")
"""What a measurement has no use for."""


@quiet
def main(argv: Sequence[str] | None = None, prog: str = PROG) -> int:
    """The command; returns its exit code."""
    options = _parser(prog).parse_args(argv)
    return flags.exit_code(prog, lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    flags.writable_folder("--plot", options.plot, scaling.FILES[0])
    try:
        work = _workload(options)
        if options.measure:
            return _measure(work, options)
        if options.device:
            raise Refused("--device: expected with --measure; got neither a measurement nor a use for it")
        speed, cluster = _speed(options), _cluster(options)
        found = predict_all(work, cluster, speed)
        if not found:
            raise Refused(f"--length: expected at least two rows for each of {cluster.ranks} ranks; got {work.length}")
        advice = recommend(found, speed)
        why = flags.written(scaling.write, work, cluster, speed, options.plot) if options.plot else None
    except ValueError as refused:
        raise Refused(str(refused)) from None
    if options.json:
        print(json.dumps(_told(work, cluster, speed, found, advice), indent=1))
    else:
        _print(work, cluster, speed, found, advice)
    if options.plot and flags.report_unwritten({options.plot: why}):
        return 1
    for path in (options.plot / name for name in scaling.FILES) if options.plot else ():
        print(f"written to {path}", file=sys.stderr if options.json else sys.stdout)
    return 0


def _workload(options: argparse.Namespace) -> Workload:
    return Workload(
        options.length,
        options.heads,
        options.kv_heads or options.heads,
        options.dim,
        options.batch,
        options.causal,
        DTYPES[options.dtype],
        options.backward,
    )


def _cluster(options: argparse.Namespace) -> Cluster:
    """As told; the rest is as a `Cluster` is by itself."""
    said = {name: getattr(options, name) for name in ("gpus_per_node", *UNITS)}
    return Cluster(options.ranks, **{name: n * UNITS.get(name, 1) for name, n in said.items() if n is not None})


def _speed(options: argparse.Namespace) -> Speed:
    speed = H200
    if options.results:
        speed = from_results([_results(path) for path in options.results], like=H200)
    if options.memory is not None:
        speed = replace(speed, memory_bytes=options.memory * 2.0**30)
    return speed if options.host_us is None else replace(speed, host_s=options.host_us * 1e-6)


def _results(path: Path) -> dict[str, Any]:
    try:
        return load(path)
    except OSError as error:
        raise Refused(f"--results {path}: expected a results file; got {error.strerror or error}") from None
    except ValueError as error:
        raise Refused(f"--results {path}: {error}") from None


def _print(work: Workload, cluster: Cluster, speed: Speed, found: Sequence[Prediction], advice: Advice) -> None:
    alone = one_gpu_s(work, speed)
    nodes = -(-cluster.ranks // cluster.gpus_per_node)
    where = f"{cluster.ranks} GPU{'s' if cluster.ranks > 1 else ''} in {nodes} node{'s' if nodes > 1 else ''}"
    print(f"{_in_words(work)}: predicted for {where}, each as {speed.origin}")
    print(f"one GPU alone: {_time(alone)}")
    print()
    rows = [["scheme", "time", "x one GPU", "computing", "waiting", "sent", "memory", ""]]
    for one in found:
        notes = [
            "recommended" if one is advice.chosen else "",
            "" if one.exact else "an approximation",
            "" if one.sharded else "every rank has all tensors",
            "does not fit" if one.memory_bytes > speed.memory_bytes else "",
        ]
        rows.append(
            [
                str(one.scheme),
                _time(one.seconds),
                f"{alone / one.seconds:.1f}",
                _time(one.compute_s),
                _time(one.waiting_s),
                _size(one.sent_bytes),
                _size(one.memory_bytes),
                ", ".join(note for note in notes if note),
            ]
        )
    print(aligned(rows))
    print()
    print(f"recommended: {advice.chosen.scheme}: {advice.reason}")
    print()
    print("assumed:")
    for one_of_them in assumptions(work, speed):
        print(f"- {one_of_them}")


def _told(
    work: Workload, cluster: Cluster, speed: Speed, found: Sequence[Prediction], advice: Advice
) -> dict[str, Any]:
    return {
        "problem": _in_words(work),
        "ranks": cluster.ranks,
        "speed": speed.origin,
        "one_gpu_ms": one_gpu_s(work, speed) * 1e3,
        "schemes": [
            {
                "scheme": str(one.scheme),
                "ms": one.seconds * 1e3,
                "compute_ms": one.compute_s * 1e3,
                "waiting_ms": one.waiting_s * 1e3,
                "sent_bytes": one.sent_bytes,
                "memory_bytes": int(one.memory_bytes),
                "fits": one.memory_bytes <= speed.memory_bytes,
                "exact": one.exact,
                "sharded": one.sharded,
            }
            for one in found
        ],
        "recommended": str(advice.chosen.scheme),
        "reason": advice.reason,
        "assumptions": assumptions(work, speed),
    }


def _measure(work: Workload, options: argparse.Namespace) -> int:
    """Predictions from this device's own speed beside virtual ranks on it."""
    said = [f"--{name.replace('_', '-')}" for name in PREDICTED if getattr(options, name) is not None]
    if said:
        raise Refused(f"--measure: it predicts computing, from what it measures here; leave out {', '.join(said)}")
    device = torch.device(flags.device(options.device))
    speed, found = compare(work, options.ranks, device, begins=lambda what: print(f"{what} ...", file=sys.stderr))
    if options.json:
        call = {"call": _in_words(work), "ranks": options.ranks, "device": speed.name, "torch": torch.__version__}
        print(json.dumps({**call, "schemes": [_compared(one) for one in found]}, indent=1))
        return 0
    print(f"{_in_words(work)}: {options.ranks} virtual ranks on {speed.name}, one after another")
    rows = [
        ["scheme", "all ranks, predicted", "measured", "ratio", "of one pass", "a rank, predicted", "measured", "ratio"]
    ]
    for one in found:
        row = [one.predicted_ms, one.measured_ms, one.predicted_critical_ms, one.measured_critical_ms]
        times = [_time(ms / 1e3) for ms in row]
        critical = one.measured_critical_ms / one.predicted_critical_ms
        ratios = f"{one.ratio:.2f}", f"{one.of_one_pass:.2f}"
        rows.append([str(one.scheme), *times[:2], *ratios, *times[2:], f"{critical:.2f}"])
    print(aligned(rows))
    return 0


def _compared(one: Comparison) -> dict[str, Any]:
    return {**one._asdict(), "scheme": str(one.scheme), "ratio": one.ratio, "of_one_pass": one.of_one_pass}


def _in_words(work: Workload) -> str:
    dtype = str(work.dtype).removeprefix("torch.")
    shape = f"B={work.batch} T={work.length} Hq={work.heads} Hkv={work.kv_heads} D={work.dim} {dtype}"
    return f"{shape} {'causal' if work.causal else 'full'}, {'training step' if work.backward else 'forward'}"


def _time(seconds: float) -> str:
    unit, scale = ("s", 1.0) if seconds >= 1 else ("ms", 1e3) if seconds >= 1e-3 else ("us", 1e6)
    return f"{seconds * scale:.3g} {unit}"


def _size(count: float) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count:.0f} B"


def _number(unit: str, above: float | None = None) -> Callable[[str], float]:
    def parsed(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = float("nan")
        if not 0 <= number < float("inf") or number == above:
            bound = "at least 0" if above is None else f"more than {above:g}"
            raise argparse.ArgumentTypeError(f"expected {unit}, {bound}; got {text!r}")
        return number

    return parsed


def _field(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog, description=flags.about(__doc__), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cluster = parser.add_argument_group("the cluster").add_argument
    cluster("--ranks", type=values.count, default=8, metavar="N", help="GPUs; default %(default)s")
    cluster("--gpus-per-node", type=values.count, metavar="N", help=f"default {Cluster.gpus_per_node}")
    for flag, where in (("--nvlink", "within a node"), ("--network", "between nodes")):
        usual = getattr(Cluster, _field(flag)) / UNITS[_field(flag)]
        told = f"GB/s {where}, of a GPU in each direction; default {usual:g}"
        cluster(flag, type=_number("GB/s", above=0.0), metavar="GB/s", help=told)
    for flag, where in (("--nvlink-latency", "within a node"), ("--network-latency", "between nodes")):
        usual = getattr(Cluster, _field(flag)) / UNITS[_field(flag)]
        told = f"microseconds of a message {where}; default {usual:g}"
        cluster(flag, type=_number("microseconds"), metavar="US", help=told)
    told = "results of the benchmark command on such a GPU; default: those of an H200"
    cluster("--results", type=Path, nargs="+", metavar="FILE", help=told)
    told = "of a GPU; default: that of the measured one"
    cluster("--memory", type=_number("GiB", above=0.0), metavar="GIB", help=told)
    told = f"microseconds of the host for a call of a kernel; default {H200.host_s * 1e6:g}"
    cluster("--host-us", type=_number("microseconds"), metavar="US", help=told)
    call = parser.add_argument_group("the call").add_argument
    call("--length", type=values.count, default=131072, metavar="N", help="rows of the sequence; default %(default)s")
    call("--heads", type=values.count, default=32, metavar="N", help="query heads; default %(default)s")
    call("--kv-heads", type=values.count, metavar="N", help="KV heads, which divide the heads; default: as many")
    call("--dim", type=values.count, default=128, metavar="N", help="head dim; default %(default)s")
    call("--batch", type=values.count, default=1, metavar="N", help="batch entries; default %(default)s")
    call("--causal", action=argparse.BooleanOptionalAction, default=True, help="default: causal")
    call("--dtype", choices=tuple(DTYPES), default="bf16", help="default %(default)s")
    call("--backward", action="store_true", help="a training step: forward and backward")
    parser.add_argument("--plot", type=Path, metavar="DIR", help="draw strong and weak scaling to 4,096 GPUs into it")
    parser.add_argument("--json", action="store_true", help="for a program")
    parser.add_argument("--measure", action="store_true", help="compare predicted computing with virtual ranks here")
    flags.add_device(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
