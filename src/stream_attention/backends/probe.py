"""What only a run on the GPU tells of an installation: asked once, and remembered on disk.

An experiment runs in a thread of its own, whose gradient mode, autocast, modes, device and stream are fresh, so the
caller's are left alone. A file lies beside the kernels that Triton has compiled: one for each question, GPU, Triton,
torch and version of our kernels. One process at a time asks; the others wait for its answer. Where a process died that
was asking, the answer is no, so a kernel that crashes or hangs does so once.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from hashlib import sha256
from pathlib import Path
from threading import Lock, Thread
from typing import Any, NamedTuple

import torch

from ..base.device import arch
from ..base.graph_break import graph_break
from ..base.problem import Problem
from . import installed

LONGEST_S = 10
"""How long the kernels of an experiment may run, which take milliseconds."""


class Answer(NamedTuple):
    yes: bool
    words: str  # what was found


class Unanswered(Exception):
    """Raised by an experiment where what failed says nothing of its question."""


_answers: dict[Path, Answer] = {}
_lock = Lock()
_may_run = True


@graph_break("a file is read, or kernels run")
def ask(question: str, problem: Problem, experiment: Callable[[], Answer]) -> Answer | None:
    """The answer for the GPU of a problem: remembered, or found by `experiment`.

    None where nothing is remembered and an experiment cannot run: the GPU is not one of this machine (a plan may be for
    another), its number is not known, or a CUDA graph is captured; or one did not get to an answer, as where memory was
    full. A graph of torch.compile breaks here, so nothing runs while it traces.
    """
    if not is_here(problem):
        return None
    setup = {
        "question": question,
        "gpu": torch.cuda.get_device_name(problem.device),
        "triton": installed.triton_version(),
        "torch": str(torch.__version__),
        "kernels": _kernels(),
    }
    path = folder() / f"{sha256(json.dumps(setup).encode()).hexdigest()[:32]}.json"
    with _lock:
        if path in _answers:
            return _answers[path]
        found = _remembered(path)
        if found is None or found == _unfinished(path):
            if not _may_run or problem.device.index is None or torch.cuda.is_current_stream_capturing():
                return found
            with _alone(path):
                found = _remembered(path) or _run(problem.device, experiment, path, setup)
        if found is not None:
            _answers[path] = found
        return found


def is_here(problem: Problem) -> bool:
    """Whether a problem's GPU is one of this machine."""
    return problem.device.type == "cuda" and torch.cuda.is_available() and arch(problem.device) == problem.arch


@contextmanager
def only_remembered() -> Iterator[None]:
    """Within this block no experiment runs."""
    global _may_run
    _may_run = False
    try:
        yield
    finally:
        _may_run = True


def folder() -> Path:
    """Where answers are kept: in Triton's cache."""
    home = os.environ.get("TRITON_HOME") or os.path.expanduser("~")
    return Path(os.environ.get("TRITON_CACHE_DIR") or os.path.join(home, ".triton", "cache"), "stream_attention")


def wait_for(stream: Any) -> None:
    """Wait for a stream, but not for ever."""
    deadline = time.monotonic() + LONGEST_S
    while not stream.query():
        if time.monotonic() > deadline:
            raise TimeoutError(f"the kernels did not finish in {LONGEST_S} s; restart the process")
        time.sleep(1e-4)


def _run(device: torch.device, experiment: Callable[[], Answer], path: Path, setup: dict[str, str]) -> Answer | None:
    found: Answer | None = None
    _remember(path, _unfinished(path), setup)

    def run() -> None:
        nonlocal found
        try:
            with torch.no_grad(), torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
                found = experiment()
        except Unanswered:
            pass
        except Exception as error:  # whatever a compiler, a driver or Triton's Python raises is the answer
            if "out of memory" not in str(error) and "capturing" not in str(error):
                first_line = next(iter(str(error).strip().splitlines()), "")
                found = Answer(False, f"{type(error).__name__}: {first_line}"[:300])

    watch = torch.cuda.get_sync_debug_mode()
    try:
        if watch:  # of the whole process; setting it warns
            torch.cuda.set_sync_debug_mode("default")
        thread = Thread(target=run, name="stream_attention probe", daemon=True)
        thread.start()
        thread.join()  # which Ctrl-C ends
    finally:
        if watch:
            torch.cuda.set_sync_debug_mode(watch)
        if found is not None:
            _remember(path, found, setup)
        else:
            with suppress(OSError):
                path.unlink()
    return found


def _unfinished(path: Path) -> Answer:
    return Answer(False, f"a process that ran it did not finish; delete {path} to run it again")


def _remembered(path: Path) -> Answer | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        yes, words = found["yes"], found["words"]
    except (OSError, ValueError, KeyError, TypeError):  # there is none, or not a whole one
        return None
    return Answer(yes, words) if type(yes) is bool and type(words) is str else None


def _remember(path: Path, answer: Answer, setup: dict[str, str]) -> None:
    text = json.dumps({**setup, **answer._asdict(), "date": time.strftime("%Y-%m-%d")}, indent=1) + "\n"
    with suppress(OSError):  # a folder that cannot be written: this process alone knows
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_suffix(f".{os.getpid()}")
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """One process of the machine at a time, where files can be locked. The lock of a process that dies is free."""
    try:
        import fcntl

        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.with_suffix(".lock").open("w", encoding="utf-8")
    except (ImportError, OSError):
        yield
        return
    with file:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@cache
def _kernels() -> str:
    """A digest of our kernels' sources: of others everything is asked anew."""
    backends = Path(__file__).parent
    files = sorted(file for root in (backends, backends.parent / "gpu") for file in root.rglob("*.py"))
    return sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]
