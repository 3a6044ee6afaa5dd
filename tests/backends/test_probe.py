"""What is asked of a GPU once: where the answer is kept, when nothing is asked, and that the caller notices nothing."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gpu_here import pretend_here
from torch._subclasses.fake_tensor import FakeTensorMode

from stream_attention.backends import installed, probe
from stream_attention.backends.probe import Answer, Unanswered, ask
from stream_attention.base.problem import KV, Hardware, Operands, Problem, Shape

YES = Answer(True, "they agree")
PROBLEM = Problem(
    Shape(1, 64, 4, 4, 64, 64), KV("dense", 64), Operands(torch.bfloat16), Hardware(torch.device("cuda", 0), 90, 132)
)


class Experiment:
    """Counts how often it ran."""

    def __init__(self, answer: Answer = YES) -> None:
        self.answer, self.runs = answer, 0

    def __call__(self) -> Answer:
        self.runs += 1
        return self.answer


def test_it_is_asked_once_in_a_process_and_once_on_a_machine(h200_here: Callable[[], None]) -> None:
    experiment = Experiment()
    assert [ask("?", PROBLEM, experiment) for _ in range(3)] == [YES] * 3
    h200_here()  # another process
    assert ask("?", PROBLEM, experiment) == YES and experiment.runs == 1
    (kept,) = probe.folder().glob("*.json")
    found = json.loads(kept.read_text())
    assert found["yes"] is True and found["gpu"] == "NVIDIA H200" and found["question"] == "?"


def test_another_question_gpu_triton_torch_or_kernel_is_asked_anew(
    h200_here: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = Experiment()
    ask("?", PROBLEM, experiment)
    ask("another?", PROBLEM, experiment)
    for target, name, value in (
        (torch.cuda, "get_device_name", lambda device: "NVIDIA H100"),
        (installed, "triton_version", lambda: "4.0.1+git1234"),
        (torch, "__version__", "9.9"),
        (probe, "_kernels", lambda: "other sources"),
    ):
        monkeypatch.setattr(target, name, value)
        ask("?", PROBLEM, experiment)
    assert experiment.runs == 6


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"null", b'{"yes": true}', b'{"yes": 1, "words": ""}', b"\xff\xfe\x00"], ids=repr
)
def test_a_damaged_file_is_asked_anew_and_replaced(h200_here: Callable[[], None], content: bytes) -> None:
    experiment = Experiment()
    ask("?", PROBLEM, experiment)
    (kept,) = probe.folder().glob("*.json")
    kept.write_bytes(content)
    h200_here()
    assert ask("?", PROBLEM, experiment) == YES and experiment.runs == 2
    assert json.loads(kept.read_text())["yes"] is True


def test_a_folder_that_cannot_be_written_is_no_error(
    h200_here: Callable[[], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a file").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "a file" / "below"))
    experiment = Experiment()
    assert ask("?", PROBLEM, experiment) == ask("?", PROBLEM, experiment) == YES and experiment.runs == 1


def test_the_folder_is_in_tritons_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    triton = pytest.importorskip("triton")
    for name in ("TRITON_CACHE_DIR", "TRITON_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert probe.folder() == Path(triton.knobs.cache.dir, "stream_attention")
    monkeypatch.setenv("TRITON_HOME", str(tmp_path))
    assert probe.folder() == Path(triton.knobs.cache.dir, "stream_attention")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "kernels"))
    assert probe.folder() == Path(triton.knobs.cache.dir, "stream_attention")


@pytest.mark.parametrize("error", [RuntimeError("CUDA error: bad\nhint"), AttributeError("no attribute"), KeyError(1)])
@pytest.mark.usefixtures("h200_here")
def test_whatever_an_experiment_raises_is_a_no(error: Exception) -> None:
    def raises() -> Answer:
        raise error

    found = ask("?", PROBLEM, raises)
    assert found is not None and not found.yes
    assert found.words.startswith(type(error).__name__) and "\n" not in found.words


@pytest.mark.parametrize(
    "error",
    [
        Unanswered(),
        torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to ..."),
        RuntimeError("Triton Error [CUDA]: out of memory"),
    ],
    ids=repr,
)
@pytest.mark.usefixtures("h200_here")
def test_what_says_nothing_of_the_question_is_no_answer_and_not_remembered(error: Exception) -> None:
    def raises() -> Answer:
        raise error

    assert ask("?", PROBLEM, raises) is None
    assert not list(probe.folder().glob("*.json"))
    assert ask("?", PROBLEM, Experiment()) == YES


# Where nothing can be asked


def test_during_the_capture_of_a_cuda_graph_nothing_is_asked_but_what_is_known_holds(
    h200_here: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = Experiment()
    with monkeypatch.context() as captured:
        captured.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert ask("?", PROBLEM, experiment) is None and experiment.runs == 0
    assert ask("?", PROBLEM, experiment) == YES  # behind it
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    h200_here()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert ask("?", PROBLEM, experiment) == YES and experiment.runs == 1  # from the disk


@pytest.mark.usefixtures("h200_here")
def test_a_graph_of_torch_compile_breaks_and_asks_when_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # torch.compile would look for Triton's GPU
    monkeypatch.setattr(probe, "is_here", lambda problem: True)
    traced = []

    def experiment() -> Answer:
        traced.append(torch.compiler.is_compiling())
        return YES

    def asks(x: torch.Tensor) -> torch.Tensor:
        return x + (0 if ask("?", PROBLEM, experiment) is None else 1)

    compiled = torch.compile(asks, backend="eager")
    assert [compiled(torch.zeros(1)).item() for _ in range(2)] == [1, 1]
    assert traced == [False]


@pytest.mark.parametrize(
    "facts",
    [{"device": torch.device("cuda")}, {"arch": 80}, {"device": torch.device("cpu")}],
    ids=["a GPU without a number", "another GPU", "a CPU"],
)
@pytest.mark.usefixtures("h200_here")
def test_of_a_gpu_that_need_not_be_here_nothing_is_asked(facts: dict[str, Any]) -> None:
    experiment = Experiment()
    assert ask("?", PROBLEM.replace(**facts), experiment) is None and experiment.runs == 0


def test_without_a_gpu_nothing_is_asked_and_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    experiment = Experiment()
    assert ask("?", PROBLEM, experiment) is None and experiment.runs == 0
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("h200_here")
def test_who_only_looks_asks_nothing() -> None:
    experiment = Experiment()
    with probe.only_remembered():
        assert ask("?", PROBLEM, experiment) is None
    assert ask("?", PROBLEM, experiment) == YES and experiment.runs == 1


# Processes and threads


def test_what_a_process_that_died_had_asked_is_a_no_until_its_file_is_deleted(h200_here: Callable[[], None]) -> None:
    experiment = Experiment()
    ask("?", PROBLEM, experiment)
    (kept,) = probe.folder().glob("*.json")
    probe._remember(kept, probe._unfinished(kept), {})
    h200_here()
    found = ask("?", PROBLEM, experiment)
    assert found is not None and not found.yes and f"delete {kept} " in found.words and experiment.runs == 1
    kept.unlink()
    h200_here()
    assert ask("?", PROBLEM, experiment) == YES and experiment.runs == 2


def test_while_it_runs_the_file_says_that_it_did_not_finish(h200_here: Callable[[], None]) -> None:
    def experiment() -> Answer:
        (kept,) = probe.folder().glob("*.json")
        assert json.loads(kept.read_text())["words"] == probe._unfinished(kept).words
        return YES

    assert ask("?", PROBLEM, experiment) == YES


@pytest.mark.usefixtures("h200_here")
def test_an_interrupt_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    end = Event()

    class Interrupted(Thread):
        def join(self, timeout: float | None = None) -> None:
            raise KeyboardInterrupt

    def experiment() -> Answer:
        end.wait()
        return YES

    with monkeypatch.context() as interrupted:
        interrupted.setattr(probe, "Thread", Interrupted)
        with pytest.raises(KeyboardInterrupt):
            ask("?", PROBLEM, experiment)
    end.set()
    assert not list(probe.folder().glob("*.json"))
    assert ask("?", PROBLEM, Experiment()) == YES


@pytest.mark.usefixtures("h200_here")
def test_threads_ask_once() -> None:
    experiment, found = Experiment(), []
    threads = [Thread(target=lambda: found.append(ask("?", PROBLEM, experiment))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [YES] * 8 and experiment.runs == 1


def test_one_of_several_processes_asks_and_the_others_wait(h200_here: Callable[[], None], tmp_path: Path) -> None:
    pytest.importorskip("fcntl")
    log = tmp_path / "log"

    def experiment() -> Answer:
        with log.open("a") as file:
            file.write("ran\n")
        time.sleep(0.3)
        return YES

    def process(index: int) -> None:
        (tmp_path / f"answer {index}").write_text(str(ask("?", PROBLEM, experiment)))

    fork = get_context("fork")
    processes = [fork.Process(target=process, args=(index,)) for index in range(4)]
    for one in processes:
        one.start()
    for one in processes:
        one.join(60)
    assert [(tmp_path / f"answer {index}").read_text() for index in range(4)] == [str(YES)] * 4
    assert log.read_text() == "ran\n"


# The caller notices nothing


@pytest.mark.usefixtures("h200_here")
def test_an_experiment_sees_none_of_the_callers_modes_and_leaves_them_alone() -> None:
    seen = []

    def experiment() -> Answer:
        t = torch.ones(2, dtype=torch.bfloat16) @ torch.ones(2, dtype=torch.bfloat16)
        seen.append((torch.is_grad_enabled(), torch.is_inference(t), torch.is_autocast_enabled("cpu"), t.device.type))
        assert type(t) is torch.Tensor and t.item() == 2
        torch.randn(3, generator=torch.Generator().manual_seed(0))
        return YES

    state = torch.get_rng_state()
    with torch.autocast("cpu", dtype=torch.float16), FakeTensorMode(), torch.device("meta"), torch.inference_mode():
        assert ask("?", PROBLEM, experiment) == YES
        assert torch.is_autocast_enabled("cpu") and torch.is_inference_mode_enabled()
    assert seen == [(False, False, False, "cpu")]
    assert torch.is_grad_enabled() and torch.equal(torch.get_rng_state(), state)


def test_kernels_that_do_not_finish_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "LONGEST_S", 0.01)
    with pytest.raises(TimeoutError, match="did not finish in"):
        probe.wait_for(SimpleNamespace(query=lambda: False))
    probe.wait_for(SimpleNamespace(query=lambda: True))


@pytest.fixture
def h200_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], None]:
    """An H200 and an empty cache. To call it is to be another process, which remembers nothing by itself."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))

    def another_process() -> None:
        pretend_here(monkeypatch)

    another_process()
    return another_process
