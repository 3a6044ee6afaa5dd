"""install(): imports find ours inside of it alone, and everything is as it was behind it."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from stream_attention.compat import install
from stream_attention.compat.sdpa import scaled_dot_product_attention

ROOT = Path(__file__).resolve().parents[2]
VERSIONS = {"flash_attn": "2.8.3", "flash_attn_interface": "3.0.0", "xformers": "0.0.34"}
DISTRIBUTIONS = {"flash_attn": "flash-attn", "flash_attn_interface": "flash-attn-3", "xformers": "xformers"}
ABSENT = [name for name in VERSIONS if find_spec(name) is None]
"""Libraries that are not installed here, which CI's environment has none of."""


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    modules, finders = set(sys.modules), list(sys.meta_path)
    yield
    assert sys.meta_path == finders
    left = {name for name in set(sys.modules) - modules if name.partition(".")[0] in VERSIONS}
    assert left == set()


@pytest.mark.parametrize("name", ABSENT)
def test_an_import_finds_ours_inside_alone(name: str) -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(name)
    with install(name) as installed:
        assert installed.active
        module = importlib.import_module(name)
        assert module.__version__ == f"{VERSIONS[name]}+stream.attention"
        assert importlib.metadata.version(DISTRIBUTIONS[name]) == module.__version__
        assert importlib.metadata.packages_distributions()[name] == [DISTRIBUTIONS[name]]
        spec = find_spec(name)
        assert spec is not None and spec.origin is not None and spec.origin.startswith("stream_attention.compat.")
    assert not installed.active
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(name)
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version(DISTRIBUTIONS[name])
    assert name not in importlib.metadata.packages_distributions()


@pytest.mark.skipif("flash_attn" not in ABSENT, reason="flash-attn is installed here")
def test_modules_within_flash_attn_as_models_import_them() -> None:
    code = (
        "from flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache\n"
        "from flash_attn.bert_padding import index_first_axis, pad_input, unpad_input\n"
        "from flash_attn.flash_attn_interface import flash_attn_varlen_qkvpacked_func\n"
        "import flash_attn\n"
        "assert flash_attn.bert_padding.unpad_input is unpad_input\n"
        "assert flash_attn.flash_attn_interface.flash_attn_func is flash_attn_func\n"
    )
    names: dict[str, object] = {}
    with install("flash_attn"):
        exec(code, names)
        with pytest.raises(ModuleNotFoundError, match="layers"):
            importlib.import_module("flash_attn.layers")
    assert getattr(names["unpad_input"], "__module__", "") == "stream_attention.compat.bert_padding"


@pytest.mark.skipif("xformers" not in ABSENT, reason="xformers is installed here")
def test_modules_within_xformers() -> None:
    names: dict[str, object] = {}
    with install("xformers"):
        exec(
            "import xformers.ops as xops\nfrom xformers.ops import fmha\nfrom xformers.ops.fmha.attn_bias import "
            "BlockDiagonalMask\nassert xops.fmha.attn_bias.BlockDiagonalMask is fmha.BlockDiagonalMask\n"
            "assert xops.LowerTriangularMask is fmha.LowerTriangularMask\nmask = xops.LowerTriangularMask()",
            names,
        )
    assert type(names["mask"]).__module__ == "stream_attention.compat.attn_bias"


@pytest.mark.skipif("flash_attn" not in ABSENT, reason="flash-attn is installed here")
def test_undo_may_be_called_again_and_an_inner_install_changes_nothing() -> None:
    outer = install("flash_attn")
    inner = install("flash_attn")
    assert outer.active and not inner.active
    inner.undo()
    assert find_spec("flash_attn") is not None
    outer.undo()
    outer.undo()
    assert find_spec("flash_attn") is None


@pytest.mark.skipif("flash_attn" not in ABSENT, reason="flash-attn is installed here")
def test_a_library_that_is_there_stays_unless_it_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "flash_attn.py").write_text("__version__ = '2.0'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    flash_attn = importlib.import_module("flash_attn")
    assert flash_attn.__version__ == "2.0"
    with install("flash_attn") as installed:
        assert not installed.active and importlib.import_module("flash_attn") is flash_attn
    with install("flash_attn", replace=True):
        ours = importlib.import_module("flash_attn")
        assert ours.__version__ == "2.8.3+stream.attention"
    assert sys.modules.pop("flash_attn") is flash_attn


def test_sdpa_is_replaced_and_restored() -> None:
    theirs = torch.nn.functional.scaled_dot_product_attention
    layer = torch.nn.MultiheadAttention(16, 4, batch_first=True)
    x = torch.randn(2, 5, 16)
    wanted, _ = layer(x, x, x, need_weights=False)
    with install("sdpa") as installed, install("sdpa") as again:
        assert installed.active and not again.active
        assert torch.nn.functional.scaled_dot_product_attention is scaled_dot_product_attention
        torch.testing.assert_close(layer(x, x, x, need_weights=False)[0], wanted)
    assert torch.nn.functional.scaled_dot_product_attention is theirs


def test_another_name_is_refused_with_those_there_are() -> None:
    words = "name: expected one of flash_attn, flash_attn_interface, xformers, sdpa, flex; got 'flash-attn'"
    with pytest.raises(ValueError, match=words):
        install("flash-attn")


@pytest.mark.skipif("flash_attn" not in ABSENT, reason="flash-attn is installed here")
def test_in_a_fresh_process_nothing_is_installed_unasked() -> None:
    probe = """
import importlib.util
import stream_attention, stream_attention.compat
assert importlib.util.find_spec("flash_attn") is None
with stream_attention.compat.install("flash_attn"):
    import torch
    from flash_attn import flash_attn_func
    print(flash_attn_func(*torch.randn(3, 1, 4, 2, 8), causal=True).shape)
try:
    import flash_attn
except ModuleNotFoundError:
    print("absent again")
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-c", probe], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout == "torch.Size([1, 4, 2, 8])\nabsent again\n"
