from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from .outputs import shown

interpreted = pytest.mark.usefixtures("interpreter")


@interpreted
def test_the_program_prints_what_the_text_shows(step: Any) -> None:
    assert step.printed("backward") == shown(step.text, "python learn/08_backward/backward.py")


@interpreted
@pytest.mark.parametrize(("queries", "keys"), [(32, 32), (5, 70), (33, 1)])
def test_gradients_are_those_of_autograd(step: Any, queries: int, keys: int) -> None:
    backward = step.load("backward")
    (q, dout), (k, v) = torch.randn(2, queries, 16), torch.randn(2, keys, 16)
    out, lse = backward.forward(q, k, v)
    torch.testing.assert_close(lse, torch.logsumexp(q @ k.T / 4, dim=-1))
    gradients = backward.backward(q, k, v, out, lse, dout)
    for got, wanted in zip(gradients, backward.by_autograd(q, k, v, dout), strict=True):
        torch.testing.assert_close(got.double(), wanted, atol=1e-4, rtol=0)


def test_the_kernels_compile_for_a_gpu(step: Any, compiler: Callable[..., list[Any]]) -> None:
    program, x = step.load("backward"), torch.zeros(64, 32)
    made = compiler(lambda: (program.forward(x, x, x), program.backward(x, x, x, x, x[:, 0], x)))
    assert [kernel.metadata.name for kernel in made] == ["forward_kernel", "query_kernel", "key_kernel"]


@pytest.mark.gpu
def test_the_program_on_a_gpu(step: Any) -> None:
    printed = step.started("backward")
    assert printed.count("right") == 3 and "interpreter" not in printed


def test_the_numbers_by_hand() -> None:
    p, dp = torch.tensor([0.75, 0.25]), torch.tensor([2.0, -2.0])
    delta = (p * dp).sum()
    assert delta == 1 and (p * (dp - delta)).tolist() == [0.75, -0.75]


def test_the_solution_passes_and_the_gap_is_named(step: Any) -> None:
    assert step.checked("--solution")[0] == 0
    status, said = step.checked()
    assert status == 1 and "not written yet" in said


def weights(q: Tensor, k: Tensor, lse: Tensor, scale: float) -> Tensor:
    return torch.exp(q @ k.T * scale - lse[:, None])


def no_scale(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, lse: Tensor, delta: Tensor, scale: float) -> Any:
    p = weights(q, k, lse, scale)
    ds = p * (dout @ v.T - delta[:, None])
    return ds @ k, ds.T @ q, p.T @ dout


def no_delta(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, lse: Tensor, delta: Tensor, scale: float) -> Any:
    p = weights(q, k, lse, scale)
    ds = p * (dout @ v.T)
    return ds @ k * scale, ds.T @ q * scale, p.T @ dout


def delta_of_the_tile(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, lse: Tensor, delta: Tensor, scale: float) -> Any:
    p, dp = weights(q, k, lse, scale), dout @ v.T
    ds = p * (dp - (p * dp).sum(-1, keepdim=True))
    return ds @ k * scale, ds.T @ q * scale, p.T @ dout


def softmax_of_the_tile(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, lse: Tensor, delta: Tensor, scale: float) -> Any:
    p = torch.softmax(q @ k.T * scale, dim=-1)
    ds = p * (dout @ v.T - delta[:, None])
    return ds @ k * scale, ds.T @ q * scale, p.T @ dout


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (no_scale, ["dq is 2 times", "dk is 2 times", "scale 0.5"]),
        (no_delta, ["dq is off", "dk is off"]),
        (delta_of_the_tile, ["tiles of 4: dq is off"]),
        (softmax_of_the_tile, ["dv is off"]),
        (lambda *given: given[:3], ["4 queries"]),
    ],
)
def test_plausible_mistakes_are_found(step: Any, wrong: Any, words: list[str]) -> None:
    said = step.complaints(wrong)
    assert all(word in said for word in words), said
