"""Ranks that are processes, on torch.distributed: NCCL between GPUs, gloo between CPUs, gloo for GPUs without NCCL.

NCCL has its own streams, so its communication overlaps with kernels until `Wait`. Gloo has no P2P of CUDA tensors;
those go through pinned memory. Every wait is bounded: gloo's by `timeout_s`, NCCL's by the timeout of its group, after
which its watchdog ends the process. A group of one never communicates.

On gloo a collective is made of P2P: one of gloo's own that timed out continues in a thread, which keeps the process
from ending. Tags keep messages of different calls apart.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, NoReturn, TypeAlias, TypeVar
from weakref import WeakKeyDictionary, WeakSet
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from ..base.errors import refuse
from .transport import (
    Agreement,
    AllGather,
    CommunicationError,
    Exchange,
    Pending,
    Recorder,
    Start,
    Strategy,
    Transport,
    VirtualRanks,
    Wait,
    resume,
)

T = TypeVar("T")
Group: TypeAlias = Any  # dist.ProcessGroup | DeviceMesh | Transport | None, some of which a build of torch may lack

TIMEOUT_S = 120.0
"""How long a rank waits for the others by default."""

_timeouts: WeakKeyDictionary[Any, float] = WeakKeyDictionary()
"""The `timeout_s` of `initialize`, by the default group that it made."""

_LAUNCH = "Start the script with torchrun, which sets them: torchrun --nproc-per-node=2 script.py"
_INITIALIZE = "Call stream_attention.distributed.initialize() first."
_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def initialize(backend: str | None = None, *, timeout_s: float = TIMEOUT_S) -> None:
    """Join the processes that torchrun started: `init_process_group` with a bounded timeout and this rank's GPU.

    Args:
        backend: None is NCCL where every process of this node has a GPU of its own, else gloo.
        timeout_s: how long ranks wait for each other, here and in the calls after it, unless a group was made with
            another timeout (NCCL) or `Processes` with another (gloo).
    """
    _check_build()
    if dist.is_initialized():
        refuse("initialize", "one call, before any other", "a process group that is there already")
    missing = [name for name in _VARIABLES if not os.environ.get(name)]
    if missing:
        refuse("environment", f"{', '.join(_VARIABLES)}", f"no {', '.join(missing)}", _LAUNCH)
    rank, size = launched("RANK", 0), launched("WORLD_SIZE", 1)
    if not rank < size:
        refuse("RANK", f"below WORLD_SIZE={size}", rank, _LAUNCH)
    launched("MASTER_PORT", 0, 65535)
    _seconds(timeout_s)
    local_rank, local_size = launched("LOCAL_RANK", 0, default=rank), launched("LOCAL_WORLD_SIZE", 1, default=size)
    gpus = torch.cuda.device_count()
    if backend is None:
        backend = "nccl" if gpus >= local_size and dist.is_nccl_available() else "gloo"
    if gpus:
        torch.cuda.set_device(local_rank % gpus)
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    except RuntimeError as error:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']} within {timeout_s:g} s"
        raise CommunicationError(
            f"initialize: the {size} processes did not connect at {where}: {_first_line(error)}. All of them must be "
            "running, with this MASTER_ADDR and MASTER_PORT, and able to reach that host."
        ) from error
    _timeouts[dist.group.WORLD] = timeout_s


def launched(name: str, least: int, most: int | None = None, default: int | None = None) -> int:
    """A variable that torchrun sets, as an int from `least` to `most`; `default` where it is not set."""
    if name not in os.environ and default is not None:
        return default
    text = os.environ.get(name, "")
    if not text.isdecimal() or int(text) < least or (most is not None and int(text) > most):
        expected = f"a whole number of at least {least}" if most is None else f"a whole number from {least} to {most}"
        refuse(name, f"{expected} in the environment", repr(text), _LAUNCH)
    return int(text)


def _first_line(error: Exception) -> str:
    """Without the stack of C++ frames that torch writes below it."""
    return str(error).strip().partition("\n")[0].rstrip(".")


def _check_build() -> None:
    if not dist.is_available():
        hint = "Type: pip install --force-reinstall torch"
        refuse("torch.distributed", "a build of torch with it", "one without", hint)


def transport_of(group: Group = None) -> Transport:
    """The transport of a `group` argument: a process group, a 1-D device mesh, a transport itself.

    None is the default group, or one rank where there is none and the process was not launched as one of several.
    """
    if isinstance(group, Transport):
        return group
    if group is None and not (dist.is_available() and dist.is_initialized()):
        size = launched("WORLD_SIZE", 1, default=1)
        if size > 1:
            expected = f"a process group of the {size} processes (WORLD_SIZE={size})"
            refuse("group", expected, "none initialised", _INITIALIZE)
        return VirtualRanks(1)
    return Processes(group)


class _Work(NamedTuple):
    """A started communication."""

    handles: list[Any]
    buffers: Mapping[int, Tensor]  # what is received, before it is copied to the strategy's tensors
    kept: Any  # alive until then


class Processes(Transport):
    """This process as a rank of a group.

    Args:
        group: a process group, or a device mesh of one dim; None is the default group.
        timeout_s: None is that of `initialize` on gloo, or 120 s if the default group was made without it; and the
            group's own timeout on NCCL, where a number is refused.
        recorder: notes what is sent.
    """

    def __init__(
        self, group: Group = None, *, timeout_s: float | None = None, recorder: Recorder | None = None
    ) -> None:
        _check_kind(group)
        _check_build()
        if not dist.is_initialized():
            refuse("group", "an initialised torch.distributed", "none", _INITIALIZE)
        self.group, self.recorder = _process_group(group), recorder
        self.size, self.rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        self.ranks = (self.rank,)
        # "cpu:gloo,cuda:nccl": which backend serves which device
        self.backends = dict(one.split(":") for one in dist.get_backend_config(self.group).split(","))
        if timeout_s is not None:
            _seconds(timeout_s)
            if "nccl" in self.backends.values():
                hint = "Pass timeout= to init_process_group or new_group: waiting here would block the host."
                refuse("timeout_s", "None for a group with NCCL", timeout_s, hint)
        self.timeout_s = _timeouts.get(dist.group.WORLD, TIMEOUT_S) if timeout_s is None else timeout_s
        self.collectives = False  # gloo's own, too; for tests of what NCCL does

    def run(self, strategies: Sequence[Strategy[T]], device: torch.device) -> list[T]:
        (strategy,) = strategies
        backend = self.backends.get(device.type)
        if self.size > 1 and backend is None:
            refuse("group", f"a backend for {device.type} tensors", self.backends, "Create it with nccl or gloo.")
        runner = _Run(self, device, backend or "", strategy)
        answer: Any = None
        try:
            while True:
                done, yielded = resume(strategy, answer)
                if done:
                    return [yielded]
                if isinstance(yielded, Start):
                    answer = runner.start(yielded.communication)
                else:
                    pending = yielded.pending if isinstance(yielded, Wait) else runner.start(yielded)
                    answer = runner.finish(pending)
        finally:
            strategy.close()


class _Run:
    """One strategy's communications, numbered, so that two in flight between a pair of ranks are not confused."""

    def __init__(self, transport: Processes, device: torch.device, backend: str, strategy: Strategy[Any]) -> None:
        self.name = getattr(strategy, "__qualname__", "")  # of its function: "Ring.backward"
        self.transport, self.group = transport, transport.group
        self.rank, self.size = transport.rank, transport.size
        self.device, self.nccl = device, backend == "nccl"
        self.staged = device.type == "cuda" and backend == "gloo"
        self.count = 0

    def start(self, communication: Exchange) -> Pending:
        assert self.size > 1, "a group of one never communicates"
        self.transport.note(self.rank, communication)
        self.count += 1
        try:
            if self.nccl and self.count == 1:
                _connect(self.group, self.device)
            return Pending(communication, (self.count, self._begin(communication)))
        except RuntimeError as error:
            self._fail(self.count, communication, error)

    def finish(self, pending: Pending) -> Mapping[int, Tensor]:
        communication, (number, work) = pending
        try:
            for handle in work.handles:
                # With a timeout NCCL would block the host. Without one the stream waits, under the group's watchdog.
                handle.wait() if self.nccl else handle.wait(timedelta(seconds=self.transport.timeout_s))
        except RuntimeError as error:
            self._fail(number, communication, error)
        for rank, buffer in communication.receives.items():
            arrived = work.buffers[rank]
            if arrived is not buffer:
                buffer.copy_(arrived.view(buffer.dtype).view(buffer.shape), non_blocking=True)
        return communication.receives

    def _begin(self, communication: Exchange) -> _Work:
        distinct = {id(tensor): tensor for tensor in communication.sends.values()}  # one copy for all who get it
        ready = {name: self._outgoing(tensor) for name, tensor in distinct.items()}
        sends = {rank: ready[id(tensor)] for rank, tensor in communication.sends.items()}
        if self.staged:
            torch.cuda.current_stream(self.device).synchronize()  # the copies to the host are there
        if type(communication) is Exchange or not (self.nccl or self.transport.collectives):
            return self._point_to_point(communication, sends)
        sizes = {tensor.nbytes for tensor in (*sends.values(), *communication.receives.values())}
        if isinstance(communication, AllGather) and len(sizes) == 1:
            return self._all_gather(next(iter(sends.values())))
        return self._all_to_all(sends, communication.receives)

    def _point_to_point(self, communication: Exchange, sends: Mapping[int, Tensor]) -> _Work:
        buffers = {rank: self._incoming(tensor) for rank, tensor in communication.receives.items()}
        ops = [
            dist.P2POp(op, tensor, group=self.group, group_peer=rank, tag=self._tag(communication, tensor))
            for op, side in ((dist.isend, sends), (dist.irecv, buffers))
            for rank, tensor in side.items()
            if tensor.numel()
        ]
        return _Work(dist.batch_isend_irecv(ops) if ops else [], buffers, sends)

    def _tag(self, communication: Exchange, tensor: Tensor) -> int:
        """A digest of a message, so that messages of different calls never match: both sides time out instead.

        Gloo aborts the process where a message is not of the expected size. Agreements have one size and one tag, so
        that those of different calls match: they report which calls differ.
        """
        kind = type(communication).__name__
        place = "" if isinstance(communication, Agreement) else f"{self.name} {self.count} {tensor.nbytes}"
        return crc32(f"{kind} {place}".encode()) >> 1  # gloo takes 31 bits

    def _all_gather(self, tensor: Tensor) -> _Work:
        gathered = [torch.empty_like(tensor) for _ in range(self.size)]
        handle = dist.all_gather(gathered, tensor, group=self.group, async_op=True)
        return _Work([handle], dict(enumerate(gathered)), tensor)

    def _all_to_all(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> _Work:
        """As bytes, so that tensors of any number and shape are one message."""
        host = torch.device("cpu") if self.staged else self.device
        parts = [sends[rank].flatten().view(torch.uint8) for rank in range(self.size) if rank in sends]
        outgoing = torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8, device=host)
        splits_out, splits_in = (
            [side[rank].nbytes if rank in side else 0 for rank in range(self.size)] for side in (sends, receives)
        )
        incoming = torch.empty(sum(splits_in), dtype=torch.uint8, device=host)
        handle = dist.all_to_all_single(incoming, outgoing, splits_in, splits_out, group=self.group, async_op=True)
        buffers = dict(enumerate(incoming.split(splits_in)))
        return _Work([handle], buffers, outgoing)

    def _outgoing(self, tensor: Tensor) -> Tensor:
        if not self.staged:
            return tensor.contiguous()
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)

    def _incoming(self, tensor: Tensor) -> Tensor:
        if tensor.is_contiguous() and not self.staged:
            return tensor
        device = torch.device("cpu") if self.staged else self.device
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=device, pin_memory=self.staged)

    def _fail(self, number: int, communication: Exchange, error: Exception) -> NoReturn:
        partners = sorted({*communication.sends, *communication.receives})
        names = ", ".join(f"{rank} (rank {dist.get_global_rank(self.group, rank)} of the world)" for rank in partners)
        limit = "the timeout of the group" if self.nccl else f"{self.transport.timeout_s:g} s"
        raise CommunicationError(
            f"{type(communication).__name__} {number} of rank {self.rank} with rank {names} failed within "
            f"{limit}: {_first_line(error)}. Either one of these ranks has died or raised: look at its "
            f"output first. Or it makes other calls (this rank is in {self.name}): every rank of the group must make "
            "the same ones in the same order. "
            "This group cannot be used any more; start the job again (torchrun --max-restarts does so by itself)."
        ) from error


def _check_kind(group: Group) -> None:
    known = group is None or hasattr(group, "get_group")  # a DeviceMesh
    if not known and dist.is_available():
        known = isinstance(group, dist.ProcessGroup) or group == dist.GroupMember.NON_GROUP_MEMBER  # an int
    if not known:
        kinds = "a ProcessGroup, a DeviceMesh, a transport or None"
        refuse("group", kinds, f"{group!r} ({type(group).__name__})", error=TypeError)


def _process_group(group: Group) -> Any:
    if group is None:
        return dist.group.WORLD
    if hasattr(group, "get_group"):  # a DeviceMesh
        if group.ndim != 1:
            hint = "Pick one: mesh['name']; ulysses_attention takes two, (ring, Ulysses)."
            refuse("group", "a device mesh of one dim", f"{group.ndim} dims", hint)
        return group.get_group()
    if group == dist.GroupMember.NON_GROUP_MEMBER or dist.get_rank(group) < 0:
        who = f"rank {dist.get_rank()} of the world, which is not"
        refuse("group", "a group that this process is a member of", who, "Call on the members of the group only.")
    return group


_connected: WeakSet[Any] = WeakSet()


def _connect(group: Any, device: torch.device) -> None:
    """NCCL: if the first call of a group is P2P, all its ranks must take part in it, so a collective comes first."""
    if group not in _connected:
        dist.all_reduce(torch.zeros(1, device=device), group=group)
        _connected.add(group)


def _seconds(timeout_s: Any) -> None:
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, (int, float)) or not 0 < timeout_s < float("inf"):
        refuse("timeout_s", "a positive number of seconds", repr(timeout_s))
