"""The quick start on a GPU: the README's first lines as pasted, and the examples that a newcomer starts."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from gpu_tools import assert_earned
from tests.test_docs import runnable
from tests.test_examples import ended, figures

from stream_attention.backends.reference import attention as reference

pytestmark = pytest.mark.gpu


def test_the_lines_of_the_readme_are_as_exact_as_plain_torch(capsys: pytest.CaptureFixture[str]) -> None:
    """As pasted, where tensors are on the GPU unless it is said otherwise."""
    names: dict[str, Any] = {}
    with torch.device("cuda"):
        exec(runnable("README.md")[0].code, names)
    tensors = [names[name] for name in ("q", "k", "v")]
    attend = partial(reference.attention, causal=True, alibi_slopes=names["slopes"])

    def plain(*tensors: Tensor) -> list[Tensor]:
        leaves = [tensor.detach().requires_grad_() for tensor in tensors]
        loss = attend(*leaves, compute_dtype=leaves[0].dtype)[0].square().mean()
        return [loss.detach(), *torch.autograd.grad(loss, leaves)]

    loss = names["attention"](*tensors, causal=True, alibi_slopes=names["slopes"]).square().mean()
    assert all(tensor.is_cuda for tensor in tensors)
    assert_earned([loss.detach(), *(tensor.grad for tensor in tensors)], plain, *(t.detach() for t in tensors))
    assert re.search(r"^backend +(triton|gluon)", capsys.readouterr().out, re.MULTILINE)


def printed_by(name: str, flags: str) -> str:
    done = ended(name, *flags.split(), "--device", "cuda")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_basic_usage_agrees_with_itself() -> None:
    printed = printed_by("basic_usage.py", "--length 1024 --heads 8 --dim 64")
    assert re.search(r"computed by (triton|gluon)", printed)
    assert max(figures(r": (\d\.\de[+-]\d\d)\n", printed)) < 1e-2  # cache, padding, merged states, in fp16


def test_a_stock_encoder_gives_what_it_gave_with_its_attention_replaced() -> None:
    """The example itself compares outputs, and fails where they differ."""
    printed = printed_by("integration_example.py", "--length 256 --embed 128 --heads 2 --rounds 2")
    assert "2 modules replaced" in printed and "gradients in 13 parameters" in printed
