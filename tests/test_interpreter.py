"""Triton's interpreter does what it did before it was made quicker, and refuses what it refused."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip(
        "set TRITON_INTERPRET=1; make test does, in a process of its own, since triton.jit chooses at decoration",
        allow_module_level=True,
    )
pytest.importorskip("triton")

import triton
from triton import language as tl
from triton.runtime import interpreter
from triton.runtime.errors import InterpreterError


@triton.jit
def _twice(x):
    return x + x


@triton.jit
def _twice_kernel(x_ptr, out_ptr, N: tl.constexpr):
    offs = tl.arange(0, N)
    tl.store(out_ptr + offs, _twice(tl.load(x_ptr + offs)))


def language() -> list[object]:
    return [vars(part)[name] for part in (tl, tl.core, tl.math, tl.tensor) for name in sorted(vars(part))]


def test_the_language_is_as_it_was_after_a_launch_and_after_one_that_failed() -> None:
    """A function that is left in place would be found by kernels that are compiled."""
    x, found = torch.arange(8), torch.zeros(8, dtype=torch.int64)
    _twice_kernel[(1,)](x, found, 8)  # the first launch adds names to this module
    before = language()
    for _ in range(2):  # the second finds nothing of the first
        found.zero_()
        _twice_kernel[(1,)](x, found, 8)
        assert torch.equal(found, 2 * x)
        assert all(now is then for now, then in zip(language(), before, strict=True))
        with pytest.raises(InterpreterError):
            _twice_kernel[(1,)](x, found, 7)
        assert all(now is then for now, then in zip(language(), before, strict=True))


def test_a_shape_that_is_refused_is_refused_after_one_that_looks_like_it() -> None:
    assert tl.block_type(tl.int32, [1, 8]) == tl.block_type(tl.int32, [tl.constexpr(1), tl.constexpr(8)])
    assert tl.block_type(tl.int32, [1, 8]) != tl.block_type(tl.int32, [8, 1])
    assert tl.block_type(tl.int32, [1, 8]) != tl.block_type(tl.int64, [1, 8])
    for _ in range(2):
        with pytest.raises(TypeError, match="must have type"):
            tl.block_type(tl.int32, [1.0, 8])
        with pytest.raises(ValueError, match="power of 2"):
            tl.block_type(tl.int32, [1, 7])
        with pytest.raises(TypeError, match="0d"):
            tl.block_type(tl.int32, [])


@pytest.fixture
def _debugging(monkeypatch: pytest.MonkeyPatch) -> None:
    builder = interpreter.interpreter_builder
    monkeypatch.setattr(builder, "options", replace(builder.options, debug=True))


@pytest.mark.usefixtures("_debugging")
def test_overflow_is_asserted_where_anything_is() -> None:
    x, found = torch.full((8,), 2**30, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
    _twice_kernel[(1,)](x - 1, found, 8)
    assert torch.equal(found, 2 * (x - 1))
    with pytest.raises(InterpreterError, match="overflow"):
        _twice_kernel[(1,)](x, found, 8)


def test_nothing_is_asserted_by_default() -> None:
    """Otherwise overflow would have to be looked for: `quicken` leaves that out."""
    assert not interpreter.InterpreterOptions().debug and not interpreter.interpreter_builder.options.debug
