"""StreamAttentionConfig: its fields, where they are read from, and what it refuses."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stream_attention import StreamAttention, StreamAttentionConfig
from stream_attention.base import device
from stream_attention.core.config import VARIABLES
from stream_attention.dispatch.plan import plan
from stream_attention_tools.module_tools import causal_problem

ROOT = Path(__file__).resolve().parents[2]

DEFAULTS = {
    "num_heads": 32,
    "head_dim": 128,
    "tile_size_q": 128,
    "tile_size_k": 64,
    "use_fp16": True,
    "gradient_checkpointing": False,
    "use_qkv_projections": True,
    "qkv_bias": False,
    "use_layer_norm": False,
    "dropout": 0.0,
    "enable_distributed": True,
    "num_warps": 4,
    "num_stages": 2,
    "max_sequence_length": 65536,
    "enable_flash_attention": True,
    "enable_ring_attention": True,
    "enable_star_attention": True,
    "enable_kv_compression": True,
    "kv_compression_ratio": 4.0,
    "star_attention_block_size": 2048,
    "star_attention_anchor_size": 256,
    "star_attention_num_hosts": 1,
}
"""As users of the first StreamAttention know them, without the two that a ring has nothing to decide by."""


# Fields


def test_the_fields_their_order_and_their_defaults_are_the_known_ones() -> None:
    assert list(StreamAttentionConfig().to_dict().items()) == list(DEFAULTS.items())


def test_every_field_is_explained() -> None:
    text = StreamAttentionConfig.__doc__ or ""
    assert [name for name in DEFAULTS if f"`{name}`" not in text] == []


def test_a_dict_and_back() -> None:
    config = StreamAttentionConfig(num_heads=3, head_dim=20, dropout=0.25, tile_size_k=16)
    assert StreamAttentionConfig.from_dict(config.to_dict()) == config
    assert StreamAttentionConfig.from_dict({}) == StreamAttentionConfig()


@pytest.mark.parametrize(
    ("fields", "asked"),
    [
        ({}, "auto"),
        ({"tile_size_q": 128, "tile_size_k": 64}, "auto"),
        ({"tile_size_q": 64}, "triton(block_m=64)"),
        ({"tile_size_k": 128, "num_warps": 8}, "triton(block_n=128, num_warps=8)"),
        ({"num_stages": 3}, "triton(num_stages=3)"),
        ({"enable_flash_attention": False}, "reference"),
    ],
    ids=str,
)
def test_default_tiles_are_planned_and_others_forced(fields: dict[str, Any], asked: str) -> None:
    assert StreamAttentionConfig(**fields).backend == asked


# Tile sizes


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the planner answers")
@pytest.mark.parametrize(
    ("seq_len", "tiles"),
    [(1, (64, 64)), (1024, (64, 64)), (1025, (128, 64)), (4096, (128, 64)), (16384, (128, 128)), (16385, (256, 128))],
)
def test_without_a_gpu_tile_sizes_follow_the_rule_of_thumb(seq_len: int, tiles: tuple[int, int]) -> None:
    assert StreamAttentionConfig().optimal_tile_sizes(seq_len) == tiles


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch says that there is an H200."""
    properties = SimpleNamespace(major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    device._facts.cache_clear()
    yield
    device._facts.cache_clear()


@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize("seq_len", [512, 8192])
def test_with_a_gpu_tile_sizes_are_the_planned_ones(seq_len: int) -> None:
    pytest.importorskip("triton")
    config = StreamAttentionConfig(num_heads=8, head_dim=64)
    planned = plan(causal_problem(config, seq_len, torch.device("cuda", 0)), "triton").config
    assert config.optimal_tile_sizes(seq_len) == (planned.block_m, planned.block_n)
    forced = dataclasses.replace(config, tile_size_k=16)
    assert forced.optimal_tile_sizes(seq_len) == (planned.block_m, 16)


@pytest.mark.usefixtures("h200")
def test_with_a_gpu_that_triton_cannot_use_it_is_the_rule_of_thumb() -> None:
    assert StreamAttentionConfig(head_dim=320).optimal_tile_sizes(2048) == (128, 64)


# The environment


def test_no_variable_gives_the_defaults() -> None:
    assert StreamAttentionConfig.from_env({"HOME": "/"}) == StreamAttentionConfig()


def test_each_variable_sets_its_field() -> None:
    values = ["3", "20", "32", "16", "100", "no", "1.5", "128", "7", "2"]
    config = StreamAttentionConfig.from_env(dict(zip(VARIABLES, values, strict=True)))
    expected = (3, 20, 32, 16, 100, False, 1.5, 128, 7, 2)
    assert tuple(getattr(config, field) for field in VARIABLES.values()) == expected


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAM_ATTENTION_NUM_HEADS", " 5 ")
    monkeypatch.setenv("STREAM_ATTENTION_COMMIT", "0123abc")  # ours, but no field
    assert StreamAttentionConfig.from_env().num_heads == 5


@pytest.mark.parametrize(
    ("text", "value"), [("1", True), ("true", True), ("Yes", True), ("on", True), ("0", False), ("OFF", False)]
)
def test_words_for_a_flag(text: str, value: bool) -> None:
    environ = {"STREAM_ATTENTION_ENABLE_KV_COMPRESSION": text}
    assert StreamAttentionConfig.from_env(environ).enable_kv_compression is value


@pytest.mark.parametrize(
    ("variable", "text", "words"),
    [
        ("STREAM_ATTENTION_NUM_HEADS", "many", r"STREAM_ATTENTION_NUM_HEADS: expected a whole number; got 'many'"),
        ("STREAM_ATTENTION_NUM_HEADS", "", r"STREAM_ATTENTION_NUM_HEADS: expected a whole number; got ''"),
        ("STREAM_ATTENTION_KV_COMPRESSION_RATIO", "4x", r"KV_COMPRESSION_RATIO: expected a number; got '4x'"),
        ("STREAM_ATTENTION_ENABLE_KV_COMPRESSION", "2", r"ENABLE_KV_COMPRESSION: expected one of 1, true.*; got '2'"),
        ("STREAM_ATTENTION_TILE_Q", "100", r"STREAM_ATTENTION_TILE_Q \(tile_size_q: expected one of 16, 32.*; got 100"),
        ("STREAM_ATTENTION_NUM_HEAD", "8", r"NUM_HEAD: expected .*Did you mean STREAM_ATTENTION_NUM_HEADS\?"),
        ("STREAM_ATTENTION_XYZ", "8", r"XYZ: expected .*; got none of that name. There are STREAM_ATTENTION_NUM_HEADS"),
    ],
)
def test_a_bad_variable_is_named(variable: str, text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        StreamAttentionConfig.from_env({variable: text})


def test_the_example_file_is_the_defaults() -> None:
    lines = (ROOT / ".env.example").read_text().splitlines()
    pairs = [shlex.split(line, comments=True) for line in lines]
    environ = dict(pair[0].split("=", 1) for pair in pairs if pair)
    assert list(environ) == list(VARIABLES)
    assert StreamAttentionConfig.from_env(environ) == StreamAttentionConfig()


# Fields that are gone: a ring has no blocks that overlap


RETIRED = {
    "ring_attention_block_size": (2048, "STREAM_ATTENTION_RING_BLOCK_SIZE"),
    "ring_attention_overlap_size": (256, "STREAM_ATTENTION_RING_OVERLAP_SIZE"),
}


def made(how: str, name: str, value: Any, folder: Path) -> StreamAttentionConfig:
    """A config that is given the field, in each of the ways there are."""
    config = StreamAttentionConfig()
    if how == "constructor":
        config = StreamAttentionConfig(**{name: value})
    elif how == "attribute":
        setattr(config, name, value)
    elif how == "dict":
        config = StreamAttentionConfig.from_dict({name: value})
    elif how == "environment":
        config = StreamAttentionConfig.from_env({RETIRED[name][1]: str(value)})
    else:
        pytest.importorskip("yaml")
        config = StreamAttentionConfig.from_yaml(written(folder, f"{name}: {value}\n"))
    return config


@pytest.mark.parametrize("how", ["constructor", "attribute", "dict", "environment", "yaml"])
@pytest.mark.parametrize("name", RETIRED)
def test_a_field_that_is_gone_is_accepted_at_its_default_alone(how: str, name: str, tmp_path: Path) -> None:
    default, variable = RETIRED[name]
    with pytest.warns(DeprecationWarning, match=f"{name} is no field any more, as a ring .* Leave it out") as warned:
        config = made(how, name, default, tmp_path)
    assert [warning.filename for warning in warned] == [__file__]  # where the caller is to leave it out
    assert config == StreamAttentionConfig() and not hasattr(config, name) and name not in config.to_dict()
    named = rf"{variable} \({name}" if how == "environment" else name
    with pytest.raises(ValueError, match=rf"{named}: expected none: it is no field any more, .*; got 64. Leave it out"):
        made(how, name, 64, tmp_path)


# YAML


def written(folder: Path, text: str) -> Path:
    path = folder / "config.yaml"
    path.write_text(text)
    return path


def test_yaml_sets_the_fields_it_names(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    path = written(tmp_path, "num_heads: 4\ndropout: 0.1\nkv_compression_ratio: 2\nuse_fp16: false\n")
    expected = StreamAttentionConfig(num_heads=4, dropout=0.1, kv_compression_ratio=2.0, use_fp16=False)
    assert StreamAttentionConfig.from_yaml(path) == StreamAttentionConfig.from_yaml(str(path)) == expected
    assert StreamAttentionConfig.from_yaml(written(tmp_path, "# nothing\n")) == StreamAttentionConfig()


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        ("num_head: 4", ValueError, r"num_head: expected a field .*Did you mean num_heads\?"),
        ("- num_heads", TypeError, "config.yaml: expected a mapping of field names to values; got a list"),
        ("num_heads: '4'", TypeError, r"num_heads: expected an int; got '4' \(str\)"),
        ("num_heads: true", TypeError, r"num_heads: expected an int; got True \(bool\)"),
        ("dropout: 1e-1", TypeError, r"config.yaml: dropout: .* got '1e-1' \(str\). YAML reads 1e-1 as text.* 1.0e-1"),
        ("dropout: no number\nhead_dim: 1", TypeError, r"config.yaml: dropout: .* got 'no number' \(str\)$"),
        ("num_heads: [4", ValueError, r"(?s)config.yaml: expected plain YAML; got .*line 1"),
        ("num_heads: !!python/object/apply:os.getpid []", ValueError, "could not determine a constructor"),
    ],
)
def test_yaml_that_is_no_config_is_refused(tmp_path: Path, text: str, error: type[Exception], words: str) -> None:
    pytest.importorskip("yaml")
    with pytest.raises(error, match=words):
        StreamAttentionConfig.from_yaml(written(tmp_path, text))


def test_without_pyyaml_it_says_what_to_type(tmp_path: Path) -> None:
    path = written(tmp_path, "num_heads: 4")
    script = (
        "import sys; sys.modules['yaml'] = None\n"
        "from stream_attention import StreamAttentionConfig\n"
        f"StreamAttentionConfig.from_yaml({str(path)!r})"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=False)
    assert "ImportError: from_yaml needs PyYAML: pip install pyyaml" in done.stderr


# Refusals


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_heads": 0}, "num_heads: expected at least 1; got 0"),
        ({"head_dim": -1}, "head_dim: expected at least 1"),
        ({"max_sequence_length": 0}, "max_sequence_length: expected at least 1"),
        ({"star_attention_num_hosts": 0}, "star_attention_num_hosts: expected at least 1"),
        ({"star_attention_anchor_size": -1}, "star_attention_anchor_size: expected at least 0"),
        ({"kv_compression_ratio": 0.5}, "kv_compression_ratio: expected at least 1; got 0.5"),
        ({"kv_compression_ratio": float("nan")}, "kv_compression_ratio: expected at least 1; got nan"),
        ({"dropout": 1.0}, "dropout: expected a probability in [0, 1); got 1.0"),
        ({"dropout": -0.1}, "dropout: expected a probability"),
        ({"tile_size_q": 8}, "tile_size_q: expected one of 16, 32, 64, 128, 256; got 8"),
        ({"tile_size_k": 96}, "tile_size_k: expected one of"),
        ({"num_warps": 3}, "num_warps: expected one of 1, 2, 4, 8, 16; got 3"),
        ({"num_stages": 0}, "num_stages: expected one of 1, 2,"),
        ({"qkv_bias": True, "use_qkv_projections": False}, "qkv_bias: expected False without projections"),
        ({"enable_flash_attention": False, "tile_size_q": 64}, "enable_flash_attention: expected True where tiles"),
    ],
    ids=str,
)
def test_values_out_of_range_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        StreamAttentionConfig(**fields)


@pytest.mark.parametrize("name", list(DEFAULTS))
def test_values_of_the_wrong_type_are_refused(name: str) -> None:
    for value in ("1", None, [1], *([1] if isinstance(DEFAULTS[name], bool) else [True])):
        with pytest.raises(TypeError, match=f"{name}: expected an? (bool|int|number); got "):
            StreamAttentionConfig(**{name: value})
    if type(DEFAULTS[name]) is int:
        with pytest.raises(TypeError, match=f"{name}: expected an int; got 64.0"):
            StreamAttentionConfig(**{name: 64.0})


def test_a_dict_with_another_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"droput: expected a field .*Did you mean dropout\?"):
        StreamAttentionConfig.from_dict({"droput": 0.1})
    with pytest.raises(ValueError, match=r"banana: expected a field .*; got none of that name. There are num_heads, "):
        StreamAttentionConfig.from_dict({"banana": 1})
    with pytest.raises(TypeError, match="values: expected a mapping"):
        StreamAttentionConfig.from_dict([("dropout", 0.1)])  # type: ignore[arg-type]


def test_what_is_set_later_is_checked_too() -> None:
    config = StreamAttentionConfig()
    config.dropout = 0
    assert config.dropout == 0.0 and type(config.dropout) is float
    with pytest.raises(AttributeError, match=r"dropuot: expected a field .*Did you mean dropout\?"):
        config.dropuot = 0.1  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="backend: expected a field"):
        config.backend = "eager"  # type: ignore[misc]
    with pytest.raises(ValueError, match="num_warps: expected one of 1, 2, 4, 8, 16; got 3"):
        config.num_warps = 3
    with pytest.raises(TypeError, match="use_fp16: expected a bool; got 1"):
        config.use_fp16 = 1  # type: ignore[assignment]
    assert config == StreamAttentionConfig()


def test_fields_that_contradict_each_other_raise_where_a_module_is_made() -> None:
    config = StreamAttentionConfig()
    config.use_qkv_projections = False
    config.qkv_bias = True
    with pytest.raises(ValueError, match="qkv_bias: expected False without projections"):
        StreamAttention(config)


@pytest.mark.parametrize("seq_len", [0, True, 1.5])
def test_a_length_that_is_none_is_refused(seq_len: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="seq_len: expected"):
        StreamAttentionConfig().optimal_tile_sizes(seq_len)
