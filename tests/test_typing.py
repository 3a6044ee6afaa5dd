"""What a type checker knows of a call: `return_lse` decides between a tensor and a pair."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SNIPPET = """
from typing import assert_type

from torch import Tensor

from stream_attention import (
    Fp8KV,
    ContiguousKV,
    attention,
    attention_fp8,
    decode_attention,
    merge_states,
    varlen_attention,
)

Pair = tuple[Tensor, Tensor]


def calls(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, cache: ContiguousKV, codes: Fp8KV, flag: bool) -> None:
    assert_type(attention(q, k, v), Tensor)
    assert_type(attention(q, k, v, causal=True, return_lse=False), Tensor)
    assert_type(attention(q, k, v, window=(3, 0), mask=q, return_lse=True), Pair)
    assert_type(attention(q, k, v, return_lse=flag), Tensor | Pair)
    assert_type(varlen_attention(q, k, v, cu_seqlens_q=offsets, cu_seqlens_k=offsets), Tensor)
    assert_type(varlen_attention(q, k, v, cu_seqlens_q=offsets, cu_seqlens_k=offsets, return_lse=True), Pair)
    assert_type(varlen_attention(q, k, v, cu_seqlens_q=offsets, cu_seqlens_k=offsets, return_lse=flag), Tensor | Pair)
    assert_type(decode_attention(q, cache), Tensor)
    assert_type(decode_attention(q, cache, softcap=30.0, return_lse=True), Pair)
    assert_type(decode_attention(q, cache, return_lse=flag), Tensor | Pair)
    assert_type(attention_fp8(q, codes), Tensor)
    assert_type(attention_fp8(q, codes, return_lse=True), Pair)
    assert_type(merge_states([q, q], [k, k]), Pair)


def mistakes(q: Tensor, k: Tensor, v: Tensor, cache: ContiguousKV) -> None:
    attention(q, k, v, True)  # mistake
    attention(q, k, v, is_causal=True)  # mistake
    attention(q, k, v, scale="1")  # mistake
    varlen_attention(q, k, v)  # mistake
    decode_attention(q, cache, dropout_p=0.1)  # mistake
"""


def test_a_type_checker_knows_what_calls_return_and_take(tmp_path: Path) -> None:
    pytest.importorskip("mypy", reason="types are checked with the mypy of the dev extra")
    snippet = tmp_path / "snippet.py"
    snippet.write_text(SNIPPET)
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), str(snippet)]
    environment = os.environ | {"MYPYPATH": str(ROOT / "src")}  # this checkout, whatever is installed
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    found = {int(line.split(":")[1]) for line in done.stdout.splitlines() if ": error:" in line}
    expected = {number for number, line in enumerate(SNIPPET.splitlines(), 1) if line.endswith("# mistake")}
    assert found == expected, done.stdout + done.stderr
