"""How long a kernel takes on one device: interpolated between measurements of whole calls."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch

from stream_attention.base.errors import refuse

Direction = Literal["forward", "backward"]
FLOPS = {"forward": 2.0, "backward": 5.0}
"""Per visible pair of query and key, and per number of D and Dv: two products, or five in the backward."""

BLOCK = 128
"""Rows that one multiprocessor works on at a time."""

MERGED, FOLDED, ADDED = 3, 2, 3
"""Passes over fp32 numbers: to merge a state into another (`ops.merge.fold_state`), to copy the first, to add one."""


class Curve(NamedTuple):
    """What a row of measurements over length is of."""

    direction: Direction
    dtype: torch.dtype
    causal: bool
    dim: int


class Tile(NamedTuple):
    """One call of a kernel, of some heads of a batch."""

    rows: int
    keys: int
    visible: int  # pairs of a row and a key that it sees


@dataclass(frozen=True)
class Speed:
    """A device as measured: TFLOP/s by length, memory bandwidth, and what the host takes for a call."""

    name: str
    origin: str
    rates: Mapping[Curve, tuple[tuple[int, float], ...]] = field(repr=False)
    num_sms: int
    bytes_per_s: float
    memory_bytes: float
    host_s: float

    def kernel_s(
        self, direction: Direction, tile: Tile, *, dtype: torch.dtype, dim: int, batch: int, heads: int
    ) -> float:
        """Seconds of one call on a device that has nothing else to do."""
        if not tile.visible:
            return 0.0
        causal = tile.visible < tile.rows * tile.keys
        rows, keys = (tile.rows, tile.keys) if direction == "forward" else (tile.keys, tile.rows)
        # What a block of rows goes through; a triangle's rows do so on average through half of its side.
        length = 2 * tile.visible / tile.rows if causal else keys
        blocks = batch * heads * -(-rows // BLOCK)
        rate = self.rate(Curve(direction, dtype, causal, dim), length) * min(1.0, blocks / self.num_sms)
        return FLOPS[direction] * batch * heads * tile.visible * 2 * dim / (rate * 1e12)

    def memory_s(self, passes: float, numbers: float) -> float:
        """Seconds of passes over so many fp32 numbers."""
        return passes * numbers * 4 / self.bytes_per_s

    def rate(self, curve: Curve, length: float) -> float:
        """TFLOP/s; between measured lengths by the logarithm, as at the longest beyond, in proportion below."""
        points = self.rates[self.nearest(curve)]
        first, last = points[0], points[-1]
        if length <= first[0]:
            return first[1] * length / first[0]
        for (short, slow), (long, fast) in pairwise(points):
            if length <= long:
                return slow + (fast - slow) * math.log(length / short) / math.log(long / short)
        return last[1]

    def nearest(self, curve: Curve) -> Curve:
        """The measured row that stands for one: of the nearest head dim, and bf16 for fp16."""
        half = (torch.float16, torch.bfloat16)
        dtypes = half if curve.dtype in half else (curve.dtype,)
        found = [one for one in self.rates if one[0] == curve.direction and one.causal == curve.causal]
        found = [one for one in found if one.dtype in dtypes]
        if not found:
            known = sorted({f"{one.direction} in {one.dtype}" for one in self.rates})
            wanted = f"a {'causal' if curve.causal else 'full'} {curve.direction} in {curve.dtype} among those measured"
            refuse("speed", wanted, ", ".join(known), "Measure it: stream-attention-benchmark --json-out.")
        return min(found, key=lambda one: (abs(math.log(one.dim / curve.dim)), one.dtype != curve.dtype))

    def stands_for(self, curve: Curve) -> str | None:
        """What another row of measurements stands for, where it does."""
        found = self.nearest(curve)
        if found == curve:
            return None
        return f"head dim {found.dim} in {found.dtype} stands for head dim {curve.dim} in {curve.dtype}"


def from_results(files: Iterable[dict[str, Any]], like: Speed) -> Speed:
    """The speed that results files of the benchmark command tell; what they do not tell is as in `like`."""
    rates: dict[Curve, dict[int, float]] = {}
    machines, dates = {}, []
    for results in files:
        machine = results["machine"]
        machines[machine["name"]] = machine
        dates.append(str(results["date"])[:10])
        for cell in results["cells"]:
            curve, length = _curve(cell)
            entry = cell["providers"].get(cell["ours"], {})
            if curve is not None and "tflops" in entry:
                rates.setdefault(curve, {})[length] = float(entry["tflops"])
    if not rates:
        refuse("results", "dense calls of ours with Tq = Tk and one head dim, timed", "none")
    if len(machines) > 1:
        refuse("results", "files of one machine", ", ".join(machines))
    (name, machine), *_ = machines.items()
    return Speed(
        name,
        f"{name}, {', '.join(sorted(set(dates)))}",
        {curve: tuple(sorted(its.items())) for curve, its in rates.items()},
        int(machine.get("multiprocessors", like.num_sms if machine.get("device") == "cuda" else 1)),
        like.bytes_per_s,
        machine["memory_gib"] * 2.0**30 if "memory_gib" in machine else like.memory_bytes,
        like.host_s,
    )


def _curve(cell: dict[str, Any]) -> tuple[Curve | None, int]:
    """What a cell measures and at which length; None where that is no plain square call."""
    problem = cell["problem"]
    plain = {"B", "Tq", "Tk", "Hq", "Hkv", "D", "Dv", "dtype", "device", "causal"}
    dtype = getattr(torch, str(problem.get("dtype")), None)
    square = problem.get("Tq") == problem["Tk"] and problem.get("D") == problem.get("Dv")
    if cell["direction"] not in FLOPS or not square or set(problem) - plain or not isinstance(dtype, torch.dtype):
        return None, 0
    if problem.get("Hq") != problem.get("Hkv"):
        return None, 0  # other heads, other lengths: one row is of one problem
    return Curve(cell["direction"], dtype, bool(problem.get("causal")), problem["D"]), problem["Tk"]


_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
_H200: dict[tuple[Direction, int], tuple[tuple[int, ...], tuple[int, ...]]] = {
    ("forward", 64): ((426, 479, 552, 567, 576, 582), (268, 370, 449, 505, 563, 577)),
    ("forward", 128): ((567, 662, 708, 729, 737, 735), (364, 490, 602, 673, 711, 729)),
    ("forward", 256): ((549, 665, 736, 771, 784, 788), (355, 511, 631, 713, 760, 783)),
    ("backward", 64): ((334, 429, 490, 512, 536, 557), (206, 316, 422, 499, 532, 559)),
    ("backward", 128): ((400, 515, 587, 622, 642, 641), (243, 378, 491, 575, 624, 634)),
    ("backward", 256): ((319, 398, 450, 476, 488, 494), (196, 296, 380, 442, 467, 493)),
}  # full, causal

H200 = Speed(
    "NVIDIA H200",
    "NVIDIA H200, 2026-11-15, benchmarks/results/h200/forward.json and backward.json",
    {
        Curve(direction, torch.bfloat16, causal, dim): tuple(zip(_LENGTHS, map(float, rates), strict=True))
        for (direction, dim), both in _H200.items()
        for causal, rates in zip((False, True), both, strict=True)
    },
    num_sms=132,
    bytes_per_s=4.0e12,
    memory_bytes=139.8 * 2.0**30,
    host_s=100e-6,
)
"""TFLOP/s as measured; the bandwidth and the host's time for a call with its merge are assumptions."""
