"""What torch's allocators hold, now and at most, read without a synchronisation.

Of CUDA's caching allocator the books are kept by torch, on the host. The CPU's has none, but tells a torch profiler of
every block it gives and takes back: between two readings such a profiler listens, and its events are added up. Both see
every allocation of a kernel too, however short. To read a peak is to begin a new one.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch._C._autograd import DeviceType

from stream_attention.base.errors import refuse

_STATM, _MEMINFO = Path("/proc/self/statm"), Path("/proc/meminfo")


class Reading(NamedTuple):
    """Bytes at a moment. None: this system does not say."""

    allocated: int  # of tensors
    peak: int  # the most of these since the reading before
    reserved: int | None  # that the allocator holds, of which tensors have a part
    reserved_peak: int | None
    device: int | None  # in use on the whole device, by whomever
    process: int | None  # resident in host memory


class CudaAllocator:
    """Of a CUDA device. Readings reset the peaks that torch.cuda.max_memory_allocated() and its like return."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def open(self) -> None:
        torch.cuda.init()
        torch.cuda.reset_peak_memory_stats(self.device)

    def read(self) -> Reading:
        stats = torch.cuda.memory_stats(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        free, total = torch.cuda.mem_get_info(self.device)
        allocated, peak = (stats[f"allocated_bytes.all.{when}"] for when in ("current", "peak"))
        reserved, most = (stats[f"reserved_bytes.all.{when}"] for when in ("current", "peak"))
        return Reading(allocated, peak, reserved, most, total - free, resident_bytes())

    def close(self) -> None:
        pass


class CpuAllocator:
    """Of the CPU. `allocated` counts from `open`: nobody knows what was there before, nor how much of it is freed. What
    the process has resident stands for reserved memory, and the machine for the device."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self._allocated = 0
        self._listener: torch.profiler.profile | None = None

    def open(self) -> None:
        if torch._C._autograd._profiler_enabled():
            raise RuntimeError("memory of the CPU: expected no other torch profiler, which would hear it; got one")
        self._allocated = 0
        self._listen()

    def read(self) -> Reading:
        peak = self._allocated
        for change in self._recorded():
            self._allocated += change
            peak = max(peak, self._allocated)
        self._listen()
        resident = resident_bytes()
        return Reading(self._allocated, peak, resident, resident, _used_bytes(), resident)

    def close(self) -> None:
        if self._listener is not None:
            self._recorded()

    def _listen(self) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # read when the first profiler starts, which else chatters
        from torch.profiler import ProfilerActivity, profile

        # The one cycle is all there is; without the last argument torch 2.11 warns of others.
        self._listener = profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True)
        self._listener.__enter__()

    def _recorded(self) -> list[int]:
        """Changes in bytes since `_listen`, in order; the profiler ends."""
        assert self._listener is not None
        listener, self._listener = self._listener, None
        listener.__exit__(None, None, None)
        assert listener.profiler is not None and listener.profiler.kineto_results is not None
        events: Iterable[Any] = listener.profiler.kineto_results.events()
        ours = (e for e in events if e.name() == "[memory]" and e.device_type() == DeviceType.CPU)
        return [event.nbytes() for event in sorted(ours, key=lambda event: event.start_ns())]


def allocator_of(device: torch.device | str | int | None) -> CudaAllocator | CpuAllocator:
    """The allocator of a device; None: of the current CUDA device if there is one, else of the CPU."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    where = torch.device(device)
    if where.type == "cpu":
        return CpuAllocator()
    if where.type != "cuda":
        refuse("device", "cpu or cuda", where)
    if not torch.cuda.is_available():
        refuse("device", "cpu, as torch finds no CUDA device", where)
    return CudaAllocator(torch.device("cuda", torch.cuda.current_device() if where.index is None else where.index))


def resident_bytes() -> int | None:
    """What this process has in host memory."""
    if not _STATM.exists():
        return None
    return int(_STATM.read_text(encoding="utf-8").split()[1]) * mmap.PAGESIZE


def _used_bytes() -> int | None:
    """What is in use of the machine's memory and could not be given to anyone else."""
    if not _MEMINFO.exists():
        return None
    lines = (line.split() for line in _MEMINFO.read_text(encoding="utf-8").splitlines())  # MemTotal: 123 kB
    kib = {words[0]: int(words[1]) for words in lines}
    return (kib["MemTotal:"] - kib["MemAvailable:"]) * 1024
