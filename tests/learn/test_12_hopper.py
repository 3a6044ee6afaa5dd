from __future__ import annotations

from typing import Any

import pytest
import torch

from .outputs import results, shown

triton = pytest.importorskip("triton")
with_36 = pytest.mark.skipif(not triton.__version__.startswith("3.6"), reason="the text shows what Triton 3.6 makes")


@pytest.fixture
def hopper(step: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The program, which finds the kernel in its own folder."""
    monkeypatch.syspath_prepend(str(step.folder))
    return step.load("hopper")


@with_36
@pytest.mark.usefixtures("hopper")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the text shows what is printed without a GPU")
def test_the_program_prints_what_the_text_shows(step: Any) -> None:
    assert step.printed("hopper") == shown(step.text, "python learn/12_hopper/hopper.py")


@with_36
def test_the_wait_that_was_written_last_is_moved_up_and_pinned_again(hopper: Any) -> None:
    """If a newer assembler leaves the wait where it was, the text has a story less to tell: this test says so."""

    def order(name: str) -> list[str]:
        return [
            event.split(" x")[0]
            for event in hopper.events(hopper.main_loop(hopper.machine_code(hopper.compiled(name))))
        ]

    moved, pinned = order("overlap"), order("pinned")
    assert moved.index("wait 0") < moved.index("exp2") and pinned.index("exp2") < pinned.index("wait 0")


def test_the_text_says_what_was_measured(step: Any) -> None:
    cells = {cell["name"]: cell["providers"] for cell in results("forward")["cells"]}
    for dim in (64, 128):
        of_dim = [its for name, its in cells.items() if name.startswith(f"d{dim} ")]
        ratios = [its["triton"]["vs_ours"] for its in of_dim]
        assert len(ratios) == 12 and f"{min(ratios):.2f}-{max(ratios):.2f}" in step.text


@pytest.mark.gpu
@pytest.mark.parametrize("order", ["in order", "overlap", "pinned"])
@pytest.mark.parametrize("keys", [64, 192, 256, 1024])
def test_the_kernel_is_right_on_a_gpu(
    step: Any, monkeypatch: pytest.MonkeyPatch, order: str, keys: int
) -> None:  # pragma: no cover
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernel is for Hopper")
    monkeypatch.syspath_prepend(str(step.folder))
    q, k, v = (torch.randn(n, 64, device="cuda", dtype=torch.bfloat16) for n in (128, keys, keys))
    exact = torch.softmax(q.double() @ k.double().T / 8, dim=-1) @ v.double()
    out = step.load("flash_gluon").attention(q, k, v, order)
    torch.testing.assert_close(out.double(), exact, atol=0.02, rtol=0)


def test_the_solution_passes_and_the_gap_is_named(step: Any) -> None:
    assert step.checked("--solution")[0] == 0
    status, said = step.checked()
    assert status == 1 and "not written yet" in said


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        (lambda use, slots: (use % slots, (use // slots) & 1, (use // slots) & 1), "both wait for ever, after 0 tiles"),
        (lambda use, slots: (use % slots, use & 1, (use & 1) ^ 1), "a ring of"),
        (lambda use, slots: (use % slots, (use // slots) & 1, 1), "before tile"),
        (lambda use, slots: (0, use & 1, (use & 1) ^ 1), "should use slots"),
        (
            lambda use, slots: (use % slots, ((use // slots) & 1) ^ 1, ((use // slots) & 1) ^ 1),
            "both wait for ever, after 1 tiles",
        ),
    ],
)
def test_plausible_mistakes_are_found(step: Any, wrong: Any, word: str) -> None:
    assert word in step.complaints(wrong)
