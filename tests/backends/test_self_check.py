"""A Triton release with which nobody ran the Hopper kernels: how they are compared, and what plans make of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from shutil import rmtree
from typing import Any

import pytest
import torch
from gpu_here import pretend_here
from torch import Tensor

from stream_attention import UnsupportedProblem, explain
from stream_attention.backends import BY_NAME, installed, probe, self_check
from stream_attention.backends.base import Backend
from stream_attention.backends.eager import Eager
from stream_attention.backends.probe import Answer
from stream_attention.base.kv_layouts.quantized_tensor import Coding
from stream_attention.base.problem import (
    KV,
    UNBOUNDED,
    Gradients,
    Hardware,
    Operands,
    Problem,
    Scores,
    Shape,
)
from stream_attention.dispatch import prepare
from stream_attention.dispatch.plan import forget_plans, plan

PlannedWith = Callable[[str | None], None]

AGREE = Answer(True, "results differ from the portable kernel's by at most 0.20 times the tolerance")
DIFFER = Answer(False, "out differs from the portable kernel's by 40 times the tolerance")


def problem(**facts: Any) -> Problem:
    shape, scores = Shape(2, 4096, 16, 16, 128, 128), Scores(128**-0.5)
    hopper = Hardware(torch.device("cuda", 0), 90, 132)
    return Problem(shape, KV("dense", 4096), Operands(torch.bfloat16), hopper, scores=scores).replace(**facts)


def on_cpu(**facts: Any) -> Problem:
    return problem(**{"device": torch.device("cpu"), "arch": 0, "head_dim": 64, "value_dim": 64, **facts})


def coding(format: str) -> Coding:
    return Coding(format, 64, True, False, torch.float16, 192, True, True)


def cached(format: str, **facts: Any) -> Problem:
    return problem(layout="cache", coding=coding(format), q_len=1, dtype=torch.float16, kv_heads=4, **facts)


# The comparison

KINDS: dict[str, dict[str, Any]] = {
    "forward, D=64, Dv=64": {},
    "forward, D=256, Dv=128": {"head_dim": 192, "value_dim": 128},
    "backward, D=64, Dv=64": {"backward": True, "head_dim": 40},
    **{
        f"decode from {format}, D=64, Dv=64": {"layout": "cache", "coding": coding(format), "q_len": 1}
        for format in ("int4", "int8", "fp8")
    },
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_kernel_agrees_with_itself(kind: str) -> None:
    asked = on_cpu(**KINDS[kind])
    assert self_check._kind(asked) == kind
    assert self_check.compare(asked, Eager(), Eager()) == Answer(True, AGREE.words.replace("0.20", "0.00"))


class Wrong(Eager):
    """Changes one element of one result."""

    def __init__(self, change: Callable[[tuple[Any, ...]], Any]) -> None:
        self.change = change

    def prepare_decode(self, *call: Any) -> Any:
        compute = super().prepare_decode(*call)
        return lambda inputs: self.change(compute(inputs))

    def forward(self, *call: Any) -> Any:
        return self.change(super().forward(*call))

    def backward(self, *call: Any, **wanted: Any) -> Gradients:
        return Gradients._make(self.change(super().backward(*call, **wanted)))


def with_one(index: int, value: float) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    def change(results: tuple[Any, ...]) -> tuple[Any, ...]:
        found = list(results)
        found[index] = found[index].clone()
        found[index].view(-1)[-1] = value
        return tuple(found)

    return change


@pytest.mark.parametrize("value", [3.0, float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(
    ("facts", "index", "name"),
    [
        ({}, 0, "out"),
        ({}, 1, "lse"),
        ({"layout": "cache", "coding": coding("int4"), "q_len": 1}, 0, "out"),
        ({"layout": "cache", "coding": coding("int8"), "q_len": 1}, 1, "lse"),
        ({"backward": True}, 0, "the gradient of query"),
        ({"backward": True}, 2, "of value"),
    ],
    ids=str,
)
def test_one_wrong_element_is_found_and_named(facts: dict[str, Any], index: int, name: str, value: float) -> None:
    found = self_check.compare(on_cpu(**facts), Wrong(with_one(index, value)), Eager())
    assert not found.yes and found.words.startswith(f"{name} differs from the portable kernel's by ")


def test_rounding_is_no_difference() -> None:
    """Probabilities rounded to bf16 by two backends in two ways."""

    class Rounded(Eager):
        def forward(self, *call: Any) -> Any:
            out, lse = super().forward(*call)
            return (out.float() * (1 + 2.0**-8)).to(out.dtype), lse + 2.0**-12

    assert self_check.compare(on_cpu(), Rounded(), Eager()).yes


@pytest.mark.parametrize(
    ("ours", "theirs", "share"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([-torch.inf, 2.0], [-torch.inf, 2.0], 0.0),
        ([torch.nan, 2.0], [torch.nan, 2.0], 0.0),  # both say so
        ([1.0, 2.0], [torch.nan, 2.0], torch.inf),
        ([torch.inf, 2.0], [1.0, 2.0], torch.inf),
        ([0.0, 0.0], [0.0, 0.0], 0.0),
        ([1.5, 3.0], [1.0, 3.0], 0.5 / (0.1 * (3 + 2))),
    ],
)
def test_a_difference_is_a_share_of_what_is_allowed(ours: list[float], theirs: list[float], share: float) -> None:
    assert self_check._share(*map(torch.tensor, (ours, theirs)), 0.1) == pytest.approx(share)


def test_a_portable_kernel_that_fails_is_no_answer() -> None:
    class Fails(Eager):
        def prepare(self, *call: Any) -> Any:
            raise RuntimeError("Failed to find C compiler")

    with pytest.raises(probe.Unanswered):
        self_check.compare(on_cpu(), Eager(), Fails())
    with pytest.raises(RuntimeError, match="C compiler"):
        self_check.compare(on_cpu(), Fails(), Eager())


# What plans make of it


class Checks:
    """In place of the comparison: says what it is told, and counts."""

    def __init__(self, answer: Answer | Exception) -> None:
        self.answer, self.asked = answer, list[str]()

    def __call__(self, problem: Problem, ours: Backend, portable: Backend) -> Answer:
        assert (ours.name, portable.name) == ("gluon", "triton")
        self.asked.append(self_check._kind(problem))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


Checked = Callable[..., Checks]


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, planned_with: PlannedWith) -> Checked:
    """`checked(answer, release)`: a Hopper GPU with that Triton, and a self-check that says so."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("STREAM_ATTENTION_HOPPER", raising=False)
    monkeypatch.setattr(prepare, "_warned", set())

    def with_answer(answer: Answer | Exception = AGREE, release: str = "3.10") -> Checks:
        pretend_here(monkeypatch)
        planned_with(release)
        checks = Checks(answer)
        monkeypatch.setattr(self_check, "compare", checks)
        return checks

    return with_answer


@pytest.mark.parametrize("release", ["3.10", "4.0", "10.1"])
def test_kernels_that_agree_are_enabled(checked: Checked, release: str) -> None:
    checks = checked(AGREE, release)
    assert plan(problem()).backend == "gluon" and plan(problem()).passed_over == ()
    assert plan(problem(right=0, q_len=8192, k_len=8192)).backend == "gluon"
    assert checks.asked == ["forward, D=128, Dv=128"]


def test_each_kind_of_kernel_is_checked_when_it_is_first_used(checked: Checked) -> None:
    checks = checked()
    for facts in ({}, {"backward": True}, {"fp8": True}, {"head_dim": 64, "value_dim": 64}, {"head_dim": 96}):
        assert plan(problem(**facts)).backend == "gluon"
    assert plan(cached("int4")).backend == "gluon"
    names = "forward", "backward", "forward in fp8"
    kinds = [f"{name}, D=128, Dv=128" for name in names] + ["forward, D=64, Dv=64"]
    assert checks.asked == [*kinds, "decode from int4, D=128, Dv=128"]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (DIFFER, DIFFER.words),
        (AttributeError("'Rows' object has no attribute 'x'"), "AttributeError: 'Rows' object has no attribute 'x'"),
        (RuntimeError("PTXAS failed\nlong log"), "RuntimeError: PTXAS failed"),
        (TimeoutError("the kernels did not finish"), "TimeoutError: the kernels did not finish"),
    ],
    ids=str,
)
def test_kernels_that_differ_or_fail_are_passed_over_with_the_reason(
    checked: Checked, answer: Answer | Exception, words: str
) -> None:
    checks = checked(answer)
    for _ in range(2):
        planned = plan(problem())
        assert planned.backend == "triton"
        assert planned.passed_over == (("gluon", (f"failed the self-check with Triton 3.10: {words}",)),)
        forget_plans()
    with pytest.raises(UnsupportedProblem, match="failed the self-check"):
        plan(problem(), "gluon")
    assert len(checks.asked) == 1


@pytest.mark.parametrize("release", ["3.5", "2.3", *installed.HOPPER_TRITON])
def test_older_releases_and_those_that_were_run_are_not_checked(checked: Checked, release: str) -> None:
    checks = checked(DIFFER, release)
    enabled = release in installed.HOPPER_TRITON
    assert plan(problem()).backend == ("gluon" if enabled else "triton") and not checks.asked
    if not enabled:
        told = f"enabled only for Triton 3.6-3.9; found {release}; run `stream-attention info`"
        assert plan(problem()).passed_over == (("gluon", (told,)),)


@pytest.mark.parametrize(
    "facts",
    [
        {"dtype": torch.float32},
        {"mask": True},
        {"q_len": 512, "k_len": 512, "batch": 1},
        {"q_len": 1, "k_len": 65536},
        {"arch": 80},
        {"device": torch.device("cpu"), "arch": 0},
    ],
    ids=str,
)
def test_what_would_not_run_on_them_is_not_checked(checked: Checked, facts: dict[str, Any]) -> None:
    checks = checked()
    assert plan(problem(**facts)).backend != "gluon" and not checks.asked


def test_a_short_call_that_names_them_is_checked(checked: Checked) -> None:
    checks = checked()
    assert plan(problem(q_len=512, k_len=512, batch=1), "gluon").backend == "gluon" and len(checks.asked) == 1


def test_the_variable_decides_otherwise(checked: Checked, monkeypatch: pytest.MonkeyPatch) -> None:
    checks = checked(DIFFER)
    monkeypatch.setenv("STREAM_ATTENTION_HOPPER", "on")
    assert plan(problem()).backend == "gluon" and not checks.asked
    forget_plans()
    monkeypatch.setenv("STREAM_ATTENTION_HOPPER", "OFF")
    assert plan(problem()).passed_over == (("gluon", ("turned off by STREAM_ATTENTION_HOPPER=off",)),)
    forget_plans()
    monkeypatch.setenv("STREAM_ATTENTION_HOPPER", "yes")
    with pytest.raises(ValueError, match="STREAM_ATTENTION_HOPPER: expected auto, on or off; got 'yes'"):
        plan(problem())
    assert not BY_NAME["triton"].why_not(problem()) and not checks.asked


def test_off_holds_for_releases_that_were_run_too(checked: Checked, monkeypatch: pytest.MonkeyPatch) -> None:
    checked(AGREE, "3.6")
    monkeypatch.setenv("STREAM_ATTENTION_HOPPER", "off")
    assert plan(problem()).backend == "triton"


def test_in_the_capture_of_a_cuda_graph_the_portable_kernel_runs_and_says_why(
    checked: Checked, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks = checked()
    with monkeypatch.context() as captured:
        captured.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        planned = plan(problem())
    why = "not checked yet with Triton 3.10: the first new call outside of a CUDA graph's capture is checked"
    assert planned.backend == "triton" and planned.passed_over == (("gluon", (why,)),) and not checks.asked
    assert plan(problem(right=0)).backend == "gluon"  # another call, behind the capture


@pytest.mark.parametrize("first", ["compiled", "called"])
@pytest.mark.parametrize("answer", [AGREE, DIFFER], ids=["they agree", "they differ"])
def test_a_compiled_call_on_a_cache_breaks_its_graph_and_checks_outside(
    checked: Checked, answer: Answer, first: str, recwarn: Any
) -> None:
    pytest.importorskip("triton")
    from pretend_gpu import pretend_gpu
    from stream_attention import ContiguousKV, decode_attention, quantize_kv

    checks = checked(answer)
    key, value = torch.randn(2, 1, 1024, 2, 128, dtype=torch.bfloat16)
    cache = quantize_kv(ContiguousKV(key, value), "int4")
    query = torch.randn(1, 1, 8, 128, dtype=torch.bfloat16)
    with pretend_gpu() as launches, pytest.MonkeyPatch.context() as patch:
        if first == "called":
            decode_attention(query, cache)
        patch.setattr(torch.cuda, "is_available", lambda: False)  # torch.compile would look for Triton's GPU
        patch.setattr(probe, "is_here", lambda problem: True)
        torch.compile(decode_attention, backend="eager")(query, cache)
    assert checks.asked == ["decode from int4, D=128, Dv=128"]
    assert launches and len([one for one in recwarn if DIFFER.words in str(one.message)]) == (answer is DIFFER)


# What it says


def test_explain_says_what_the_check_found(checked: Checked, capsys: pytest.CaptureFixture[str]) -> None:
    checked()
    printed = explained(capsys)
    found = f"with Triton {installed.triton_version()}: {AGREE.words}"
    assert printed[-2:] == [f"checked   forward {found}", f"checked   backward {found}"]
    checked(AGREE, "3.9")
    assert not any(line.startswith("checked") for line in explained(capsys))
    rmtree(probe.folder())
    checked(DIFFER)
    assert f"not       gluon: failed the self-check with Triton 3.10: {DIFFER.words}" in explained(capsys)


def explained(capsys: pytest.CaptureFixture[str]) -> list[str]:
    from stream_attention.ops import explain as module

    problems = [problem(), problem(backward=True)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "problems_of_call", lambda *tensors, **arguments: (problems, "auto"))
        explain(*torch.empty(3, 1, 8, 2, 4))
    return capsys.readouterr().out.splitlines()


REMEDY = f"To change that: pip install {installed.TORCH}"


@pytest.mark.parametrize(
    ("answer", "release", "told"),
    [
        (DIFFER, "3.10", f"failed the self-check with Triton 3.10: {DIFFER.words}"),
        (AGREE, "3.5", "enabled only for Triton 3.6-3.9; found 3.5; run `stream-attention info`"),
    ],
    ids=["it failed", "an old one"],
)
def test_a_call_that_misses_them_warns_once_with_the_remedy(
    checked: Checked, answer: Answer, release: str, told: str, monkeypatch: pytest.MonkeyPatch, recwarn: Any
) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    checked(answer, release)
    for facts in ({}, {"right": 0}, {"batch": 3}):
        prepare.warn_if_lacking(plan(problem(**facts)))
    (warning,) = recwarn
    runs = 'stream_attention: forward runs on backend "triton", not on "gluon"'
    assert str(warning.message).startswith(f"{runs}: {told}. {REMEDY}; or set STREAM_ATTENTION_HOPPER to on ")


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("facts", "named"),
    [
        ({}, "triton"),  # as it was asked to
        ({"mask": True}, "auto"),
        ({"q_len": 512, "k_len": 512, "batch": 1}, "auto"),
        ({"arch": 80}, "auto"),
        ({"device": torch.device("cpu"), "arch": 0}, "auto"),
    ],
    ids=str,
)
def test_what_they_would_not_run_does_not_warn(checked: Checked, facts: dict[str, Any], named: str) -> None:
    checked(DIFFER)
    prepare.warn_if_lacking(plan(problem(**facts), named))


@pytest.mark.filterwarnings("error")
def test_who_turned_them_off_is_not_warned(checked: Checked, monkeypatch: pytest.MonkeyPatch) -> None:
    checked(DIFFER)
    monkeypatch.setenv("STREAM_ATTENTION_HOPPER", "off")
    prepare.warn_if_lacking(plan(problem()))


@pytest.mark.parametrize(
    ("facts", "missed", "warns"),
    [
        ({}, "gluon", True),
        ({"arch": 80}, "triton", True),
        ({"arch": 80, "mask": True}, "triton", True),
        ({"arch": 75}, "", False),
        ({"arch": 80, "dtype": torch.float64}, "", False),
        ({"arch": 80, "head_dim": 320, "value_dim": 320}, "", False),
        ({"device": torch.device("cpu"), "arch": 0}, "", False),
    ],
    ids=str,
)
def test_without_triton_a_call_on_a_gpu_warns(
    checked: Checked, facts: dict[str, Any], missed: str, warns: bool, monkeypatch: pytest.MonkeyPatch, recwarn: Any
) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    checked()
    monkeypatch.setattr(installed, "HAS_TRITON", False)
    forget_plans()
    prepare.warn_if_lacking(plan(problem(**facts)))
    assert [str(one.message) for one in recwarn] == [
        f'stream_attention: forward runs on backend "eager", not on "{missed}": Triton is not installed. '
        f"To change that: pip install '{installed.triton_of_torch()}'"
    ] * warns


def test_a_call_itself_warns(checked: Checked, recwarn: Any) -> None:
    pytest.importorskip("triton")
    from pretend_gpu import pretend_gpu
    from stream_attention import attention

    checked(DIFFER)
    tensors: list[Tensor] = list(torch.zeros(3, 1, 4096, 8, 128, dtype=torch.bfloat16))
    with pretend_gpu() as launches:
        for _ in range(2):
            attention(*tensors)
            attention(*tensors, window=(5, UNBOUNDED))
    assert [DIFFER.words in str(one.message) for one in recwarn] == [True]
    assert {one.kernel for one in launches} == {"_forward_kernel"}
