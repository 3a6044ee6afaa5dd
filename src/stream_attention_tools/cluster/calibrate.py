"""The planner's compute term beside measurement: this device's speed, and virtual ranks that run what is predicted."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch

from stream_attention.base.problem import CallOptions
from stream_attention.distributed.shard import Run
from stream_attention.distributed.shard_attention import Attention, Rows, State
from stream_attention.ops.attention import attention

from .planner import Cluster, predict, schemes
from .speed import FLOPS, Curve, Direction, Speed
from .traffic import Scheme, Workload
from .trial import ClockedRanks, Trial, clock


class Comparison(NamedTuple):
    """Milliseconds of all ranks together, and of the one that takes longest at every step; nothing is sent."""

    scheme: Scheme
    predicted_ms: float
    measured_ms: float
    predicted_critical_ms: float
    measured_critical_ms: float
    single_ms: float  # one device, one pass, in the same rounds

    @property
    def ratio(self) -> float:
        return self.measured_ms / self.predicted_ms

    @property
    def of_one_pass(self) -> float:
        """What all ranks compute together, as a multiple of one pass: what dividing it costs."""
        return self.measured_ms / self.single_ms


def compare(
    work: Workload,
    ranks: int,
    device: torch.device,
    *,
    only: Iterable[Scheme] | None = None,
    rounds: int = 3,
    begins: Callable[[str], None] = lambda what: None,
) -> tuple[Speed, list[Comparison]]:
    """Every exact scheme on virtual ranks, beside what is predicted from whole calls measured on the same device.

    `begins` is called with the name of what is measured next.
    """
    cluster = Cluster(ranks, gpus_per_node=ranks)
    begins("whole calls")
    speed = measured_speed(work, device, max(1, work.length // ranks // 2), rounds)
    found = []
    for scheme in schemes(work, cluster) if only is None else only:
        if scheme.name != "star":
            begins(str(scheme))
            expected = predict(scheme, work, cluster, speed)
            taken = Trial(scheme, work, ClockedRanks(ranks), device).measure(rounds)
            pairs = expected.work_s * 1e3, taken.ranks_ms, expected.compute_s * 1e3, taken.critical_ms
            found.append(Comparison(scheme, *pairs, taken.single_ms))
    return speed, found


def measured_speed(work: Workload, device: torch.device, shortest: int, rounds: int = 3) -> Speed:
    """This device's speed for such calls, at lengths from `shortest` to the whole: full, and causal where they are."""
    lengths = [shortest]
    while lengths[-1] < work.length:
        lengths.append(min(2 * lengths[-1], work.length))
    rates: dict[Curve, tuple[tuple[int, float], ...]] = {}
    for causal in {work.causal, False}:
        found: dict[Direction, list[tuple[int, float]]] = {}
        for length in lengths:
            pairs = length * (length + 1) / 2 if causal else length * length
            for direction, seconds in _whole_call_s(work, length, causal, device, rounds).items():
                flops = FLOPS[direction] * work.heads * pairs * 2 * work.dim
                found.setdefault(direction, []).append((length, flops / seconds / 1e12))
        rates |= {Curve(one, work.dtype, causal, work.dim): tuple(points) for one, points in found.items()}
    on_gpu = device.type == "cuda"
    properties: Any = torch.cuda.get_device_properties(device) if on_gpu else None
    return Speed(
        properties.name if on_gpu else "this CPU",
        "measured here",
        rates,
        num_sms=properties.multi_processor_count if on_gpu else 1,
        bytes_per_s=_bytes_per_s(device, rounds),
        memory_bytes=float(properties.total_memory) if on_gpu else float("inf"),
        host_s=_host_s(work, device, rounds),
    )


def _whole_call_s(
    work: Workload, length: int, causal: bool, device: torch.device, rounds: int
) -> dict[Direction, float]:
    """Seconds of a batch entry of the call, the best of the rounds, and of its backward where there is one.

    A GPU gets as many entries as fill it: how a call that does not is slower, `Speed` knows.
    """
    batch = work.batch * (-(-work.length // length) if device.type == "cuda" else 1)
    query, key, value = (
        torch.randn(batch, length, heads, work.dim, device=device, dtype=work.dtype, requires_grad=work.backward)
        for heads in (work.heads, work.kv_heads, work.kv_heads)
    )
    taken: dict[Direction, float] = {}
    taken["forward"] = _best_s(lambda: attention(query, key, value, causal=causal), device, rounds) / batch
    if work.backward:
        out = attention(query, key, value, causal=causal)
        gradients = partial(torch.autograd.grad, out, (query, key, value), out.detach(), retain_graph=True)
        taken["backward"] = _best_s(gradients, device, rounds) / batch
    return taken


def _best_s(call: Callable[[], object], device: torch.device, rounds: int) -> float:
    """Seconds, the best of the rounds after one that warms up."""
    taken = []
    for _ in range(rounds + 1):
        stop = clock(device, computes=True)
        call()
        taken.append(stop()())
    return min(taken[1:]) / 1e3


def _bytes_per_s(device: torch.device, rounds: int) -> float:
    """Of adding two large tensors of fp32."""
    numbers = (1 << 28) if device.type == "cuda" else (1 << 22)
    one, other = torch.ones(2, numbers, device=device)
    return 3 * 4 * numbers / _best_s(lambda: one.add_(other), device, rounds)


def _host_s(work: Workload, device: torch.device, rounds: int, calls: int = 20) -> float:
    """Seconds of a call so small that the device does not matter, its state merged into another."""
    tensors = [torch.randn(1, 2, heads, work.dim, device=device, dtype=work.dtype) for heads in (1, 1, 1)]
    options = Attention.of(tensors[0], CallOptions())
    rows, state = Rows((Run(0, 2, 0),), tensors[0]), State(tensors[0], work.dim)

    def many() -> None:
        for _ in range(calls):
            options.forward(state, rows, tensors[1], tensors[2], rows.runs)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return _best_s(many, torch.device("cpu"), rounds) / calls  # by the host's clock
