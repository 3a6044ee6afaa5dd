"""What a call of another library becomes computes the same."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import stream_attention
from stream_attention.compat import bert_padding, flash_attn, flash_attn_interface, sdpa, xformers
from stream_attention_tools.cli import migrate as cli

OFFSETS, TABLE = torch.tensor([0, 3, 10], dtype=torch.int32), torch.tensor([[2, 0], [1, 3]], dtype=torch.int32)
NAMES: dict[str, Any] = {
    "q": torch.randn(2, 9, 4, 8),
    "k": torch.randn(2, 9, 2, 8),
    "v": torch.randn(2, 9, 2, 8),
    "qkv": torch.randn(2, 9, 3, 4, 8),
    "kv": torch.randn(2, 9, 2, 2, 8),
    "rows": torch.randn(10, 4, 8),
    "packed": torch.randn(10, 3, 4, 8),
    "offsets": OFFSETS,
    "pages": torch.randn(4, 4, 4, 8),
    "table": TABLE,
    "slopes": torch.rand(4),
    "heads": torch.randn(2, 9, 8, 8),
    "many": torch.randn(2, 9, 4, 8),
    "cache": torch.randn(2, 16, 2, 8),
    "new": torch.randn(2, 1, 2, 8),
    "lengths": torch.tensor([3, 9], dtype=torch.int32),
    "mask": torch.rand(2, 1, 4, 4) > 0.3,
    "bias": torch.randn(2, 4, 9, 9),
    "outs": torch.randn(3, 2, 9, 4, 8),
    "lses": torch.randn(3, 2, 9, 4),
}
CALLS = {
    # a call as it is found -> the module whose function it calls
    "flash_attn_func(q, k, v, 0.0, 0.3, True, (4, 0), 2.0, slopes)": flash_attn,
    "flash_attn_func(q * 1, k, v, causal=True, return_attn_probs=True)": flash_attn,
    "flash_attn_qkvpacked_func(qkv + 0, causal=True)": flash_attn,
    "flash_attn_kvpacked_func(q, kv, window_size=(-1, 2))": flash_attn,
    "flash_attn_varlen_func(rows, rows, rows, offsets, offsets, 7, 7, causal=True)": flash_attn,
    "flash_attn_varlen_func(rows, pages, pages, offsets, offsets, 7, 7, block_table=table)": flash_attn,
    "flash_attn_varlen_qkvpacked_func(packed, offsets, 7)": flash_attn,
    "flash_attn_with_kvcache(q[:, -1:], cache, cache, cache_seqlens=lengths)": flash_attn,
    "flash_attn_with_kvcache(many[:, :2], pages, pages, cache_seqlens=lengths - 2, block_table=table)": flash_attn,
    "flash_attn_with_kvcache(q[:, :1], cache, cache, new, new, cache_seqlens=lengths, causal=True)": flash_attn,
    "flash_attn_interface.flash_attn_func(q, k, v, None, True, num_splits=4)": flash_attn_interface,
    "flash_attn_interface.flash_attn_combine(outs, lses)": flash_attn_interface,
    "F.scaled_dot_product_attention(q, q, q, attn_mask=mask, scale=0.3)": sdpa,
    "torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)": sdpa,
    "xops.memory_efficient_attention(q, q, q, bias, scale=0.3)": xformers,
    "xops.memory_efficient_attention(q, q, q, xops.LowerTriangularMask())": xformers,
}
IMPORTS = """
import torch, flash_attn_interface
import torch.nn.functional as F
import xformers.ops as xops
"""


def as_found(call: str) -> cli.Found:
    name = call.partition("(")[0]
    imported = f"from flash_attn import {name}\n" if "." not in name else ""
    (found,) = cli.calls(f"{IMPORTS}{imported}{call}")
    return found


@pytest.mark.parametrize("call", CALLS)
def test_what_a_call_becomes_computes_the_same(call: str) -> None:
    module: Any = CALLS[call]
    path, _, arguments = call.partition("(")
    function = getattr(module, path.rpartition(".")[2])
    theirs = eval(f"function({arguments}", NAMES | {"function": function, "xops": xformers})
    names = NAMES | {name: getattr(stream_attention, name) for name in stream_attention.__all__}
    *first, last = as_found(call).advice.code
    exec("\n".join([*first, f"result = {last}"]), names)
    ours, wanted = (x if isinstance(x, Tensor) else x[0] for x in (names["result"], theirs))
    assert_close(ours, wanted)


def test_every_function_of_ours_has_a_rule() -> None:
    for library, modules in cli._MODULES.items():
        functions = {name for module in modules for name in module.__all__ if inspect.isfunction(getattr(module, name))}
        without = functions - cli._RULES[library].keys()
        expected = {
            "xformers": {
                "memory_efficient_attention_forward_requires_grad",
                "memory_efficient_attention_partial",
                "merge_attentions",
            }
        }
        assert without == expected.get(library, set())
    assert set(bert_padding.__all__) <= cli._RULES["flash_attn"].keys()


@pytest.mark.parametrize(
    ("source", "code", "note"),
    [
        ("from flash_attn import flash_attn_func as f\nf(*tensors)", [], "its arguments are passed by"),
        ("from flash_attn import flash_attn_func as f\nf(q)", [], "missing a required argument"),
        ("from flash_attn.bert_padding import pad_input\npad_input(x, i, 2, 3)", [], "stream_attention.compat"),
        ("import flash_attn\nflash_attn.flash_attn_func(q, k, v, dropout_p=0.1)", None, "another pattern"),
        ("import flash_attn_interface as f\nf.flash_attn_func(q, k, v, qv=x)", None, "qv: nothing here does it"),
        ("import flash_attn_interface as f\nf.get_scheduler_metadata(1, 2, 3, 4, 5, 6, n)", [], "leave it out"),
        (
            "import flash_attn_interface as f\nf.flash_attn_qkvpacked_func(qkv, num_heads_q=8)",
            ["attention(*qkv.split([8, Hkv, Hkv], 2))"],
            None,
        ),
        (
            "import flash_attn_interface as f\nf.flash_attn_varlen_func(q, k, v, a, b, 1, 2, c)",
            ["varlen_attention(q, k, v, cu_seqlens_q=a, cu_seqlens_k=b, max_seqlen_q=1, max_seqlen_k=2)"],
            "seqused_q: nothing here takes it",
        ),
        (
            "AutoModel.from_pretrained(name, attn_implementation='flash_attention_2')",
            None,
            "or flash_attention_2, inside of stream_attention.compat.install",
        ),
    ],
)
def test_what_is_said_of_a_call(source: str, code: list[str] | None, note: str | None) -> None:
    (found,) = cli.calls(source)
    assert code is None or found.advice.code == code
    assert note is None or any(note in one for one in found.advice.notes)


def test_functions_of_the_same_name_from_elsewhere_are_not_found() -> None:
    assert (
        cli.calls("from mine import flash_attn_func\nflash_attn_func(q, k, v)\nscaled_dot_product_attention(q)") == []
    )
    assert cli.calls("from . import flash_attn\nflash_attn.flash_attn_func(q, k, v)") == []
    assert cli.calls("AutoModel.from_pretrained(name, attn_implementation='sdpa')") == []


def test_the_command_prints_where_what_and_how_many(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = (
        "from flash_attn import flash_attn_func\n\nout = flash_attn_func(q, k, v,\n                      causal=True)\n"
    )
    (tmp_path / "model.py").write_text(source)
    assert cli.main([str(tmp_path / "model.py")]) == 0
    assert capsys.readouterr().out == (
        f"{tmp_path}/model.py:3  flash_attn_func(q, k, v, causal=True)\n"
        "    attention(q, k, v, causal=True)\n"
        "calls of other attention libraries: 1, files: 1\n"
    )
    assert (tmp_path / "model.py").read_text() == source


@pytest.mark.parametrize(
    ("text", "words"), [(b"def f(:\n", "invalid syntax"), (b"\xff\xfe", "decode"), (None, "No such")]
)
def test_what_is_no_python_is_refused(
    text: bytes | None, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.py"
    if text is not None:
        path.write_bytes(text)
    assert cli.main([str(path)]) == 2
    error = capsys.readouterr().err
    assert f"{path}: expected a Python file; got " in error and words in error
