"""What tests of several ranks share: processes that are ranks, and the comparison of a ring with one device."""

from __future__ import annotations

import os
import pickle
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from torch import Tensor

from stream_attention.distributed import VirtualRanks, ring_attention, shard_sequence, unshard_sequence
from stream_attention_tools.testing import Case, check_case, tolerance

CHILD = Path(__file__).parent / "rank_main.py"
SRC = Path(__file__).parents[2] / "src"
PATIENCE_S = 60.0


class Reply(NamedTuple):
    """What a rank's function returned, or what it raised."""

    rank: int  # of the world
    result: Any = None
    error: str = ""  # "Type: message"
    seconds: float = 0.0


class Pool:
    """`size` processes; `groups` of them are made by all, in order. A function runs on the ranks it is sent to.

    A function is named by its file, so it may stand in the test file: `pool.run(on_each, x=1)` calls
    `on_each(rank=..., groups={...}, x=1)` there, with `groups` by name and "world" among them.
    """

    def __init__(
        self,
        size: int,
        groups: dict[str, tuple[int, ...]] | None = None,
        timeout_s: float = 20.0,
        backend: str = "gloo",
        gpus: bool = False,
    ) -> None:
        self.size = size
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        env = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size)}
        env |= {"PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1"}
        env |= {} if gpus else {"CUDA_VISIBLE_DEVICES": ""}
        self.processes = [
            subprocess.Popen(
                [sys.executable, str(CHILD)],
                env=env | {"RANK": str(rank)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            for rank in range(size)
        ]
        for process in self.processes:
            self._send(process, (groups or {}, timeout_s, backend))
        self.replies(range(size))

    def run(self, function: Callable[..., Any], ranks: Sequence[int] | None = None, **arguments: Any) -> list[Reply]:
        """The replies of `ranks` (None: all), in their order."""
        ranks = range(self.size) if ranks is None else ranks
        self.send(function, ranks, **arguments)
        return self.replies(ranks)

    def send(self, function: Callable[..., Any], ranks: Sequence[int], **arguments: Any) -> None:
        for rank in ranks:
            self._send(self.processes[rank], (function.__code__.co_filename, function.__name__, arguments))

    def results(self, function: Callable[..., Any], ranks: Sequence[int] | None = None, **arguments: Any) -> list[Any]:
        """What the function returned on each rank; none may have raised."""
        replies = self.run(function, ranks, **arguments)
        assert [reply.error for reply in replies] == [""] * len(replies)
        return [reply.result for reply in replies]

    def end(self, rank: int) -> int:
        """Let a rank's process end by itself; its exit status."""
        stdin = self.processes[rank].stdin
        assert stdin is not None
        stdin.close()
        return self.processes[rank].wait(timeout=10)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    def _send(self, process: subprocess.Popen[bytes], message: Any) -> None:
        assert process.stdin is not None
        pickle.dump(message, process.stdin)
        process.stdin.flush()

    def replies(self, ranks: Sequence[int]) -> list[Reply]:
        """One reply each; a rank that has died says so, and one that hangs ends the pool."""
        deadline = time.monotonic() + PATIENCE_S
        replies = []
        for rank in ranks:
            process = self.processes[rank]
            assert process.stdout is not None
            started = time.monotonic()
            ready = _readable(process.stdout.fileno(), deadline - time.monotonic())
            if not ready:
                self.close()
                pytest.fail(f"rank {rank} hangs: no reply in {PATIENCE_S:g} s")
            try:
                replies.append(Reply(rank, *pickle.load(process.stdout)))
            except EOFError:
                replies.append(Reply(rank, None, "died", time.monotonic() - started))
        return replies


def _readable(descriptor: int, seconds: float) -> bool:
    return bool(select.select([descriptor], [], [], max(0.0, seconds))[0])


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Four ranks; "pair" is two of them, "odd" two whose ranks in the group are not those of the world."""
    ranks = Pool(4, {"pair": (0, 1), "odd": (1, 3)})
    yield ranks
    ranks.close()


def on_ranks(attend: Callable[..., Any], size: int, layout: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    """A call of `attention`, or `varlen_attention`, as ranks compute it: whole tensors in, whole tensors out."""
    group = VirtualRanks(size)

    def run(case: Case, tensors: dict[str, Tensor], options: dict[str, Any], backend: str, config: None) -> Any:
        everything, dim = options | tensors, 0 if case.packed else 1
        for name in ("query", "key", "value"):
            everything[name] = shard_sequence(everything[name], group=group, layout=layout, dim=dim)
        for name in {"mask", "bias"} & set(everything):
            tile = everything[name][(None,) * (4 - everything[name].dim())]
            by_rows = tile.shape[2] == case.Tq > 1
            everything[name] = shard_sequence(tile, group=group, layout=layout, dim=2) if by_rows else [tile] * size
        if case.packed:
            everything["cu_seqlens"] = everything.pop("cu_seqlens_q")
            del everything["cu_seqlens_k"]
        outs, lses = attend(**everything, group=group, layout=layout, backend=backend, return_lse=True)
        out = unshard_sequence(outs, group=group, layout=layout, dim=dim)[0]
        return out, unshard_sequence(lses, group=group, layout=layout, dim=-1)[0]

    return run


@pytest.fixture
def check_on_ranks(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., Any], Case, int, str, str], None]:
    """`check_case`, of ranks instead of one device: within the tolerance that one device earns."""

    def check(attend: Callable[..., Any], case: Case, size: int, layout: str, backend: str) -> None:
        monkeypatch.setattr(tolerance, "run", on_ranks(attend, size, layout))
        check_case(case, backend)

    return check


@pytest.fixture
def check_on_ring(check_on_ranks: Callable[..., None]) -> Callable[[Case, int, str, str, str], None]:
    def check(case: Case, size: int, layout: str, rotate: str, backend: str) -> None:
        check_on_ranks(partial(ring_attention, rotate=rotate), case, size, layout, backend)

    return check
