"""The documentation is true: its Python runs, its command lines parse, its links lead somewhere, its tables are whole.

In a page a ```python block runs; what only shows a signature or an output is fenced as ```text.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import os
import re
import shlex
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import stream_attention
from stream_attention import (
    FlashAttentionV3,
    FusedOnlineAttention,
    StreamAttention,
    StreamAttentionConfig,
    StreamMultiheadAttention,
    create_kv_compressor,
    create_stream_attention,
)
from stream_attention.kvcache.compressor import METHODS
from stream_attention_tools.cli.main import COMMANDS

ROOT = Path(__file__).resolve().parents[1]
DOCS = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md"))
PAGES = ["README.md", *DOCS]
LEARN = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "learn").rglob("*.md"))
ALL_PAGES = [*PAGES, *LEARN, "cuda/README.md", "CONTRIBUTING.md", "DESIGN.md", "CHANGELOG.md", "SECURITY.md"]

BLOCKS_ALONE = {"docs/api.md"}
"""Pages whose blocks each stand alone. Elsewhere blocks follow from each other, as pasted one after the other into one
session. Both start with nothing."""


class Block(NamedTuple):
    page: str
    line: int  # of its first line of code
    language: str
    code: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(page: str, *languages: str) -> list[Block]:
    text = (ROOT / page).read_text()
    found = re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    blocks = [Block(page, text.count("\n", 0, one.start()) + 2, one[1], one[2]) for one in found]
    return [block for block in blocks if block.language in languages]


def runnable(page: str) -> list[Block]:
    """What is fenced as Python; signatures that are only shown are fenced as text."""
    return blocks_of(page, "python")


# Python


@pytest.fixture
def same_environment() -> Iterator[None]:
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.parametrize("page", [page for page in PAGES if runnable(page)])
@pytest.mark.usefixtures("same_environment")
def test_the_python_of_a_page_runs_in_order(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    for block in runnable(page):
        if page in BLOCKS_ALONE:
            names = {}
        code = "\n" * (block.line - 1) + block.code  # a traceback names the line of the page
        exec(compile(code, str(ROOT / page), "exec"), names)


def test_the_pages_with_examples_have_some() -> None:
    """What the fences are matched with finds them."""
    counts = {page: len(runnable(page)) for page in PAGES}
    assert counts["README.md"] >= 1 and counts["docs/api.md"] >= 4
    assert counts["docs/modules.md"] >= 5 and counts["docs/troubleshooting.md"] >= 5


@pytest.mark.parametrize("page", ALL_PAGES)
def test_every_fence_says_what_it_is(page: str) -> None:
    opened = re.findall(r"^```(.*)\n(?:.*\n)*?```$", (ROOT / page).read_text(), re.MULTILINE)
    assert set(opened) <= {"python", "bash", "text", "yaml", "docker", ""}


# Command lines

Parsed = type("Parsed", (Exception,), {})


def command_lines() -> list[tuple[str, str]]:
    """(where, line) of each command of ours that a page shows, in a shell block or as inline code."""
    ours = re.compile(r"(stream-attention(-[a-z]+)?|python -m stream_attention\.[\w.]+)( .*)?")
    found = []
    for page in ALL_PAGES:
        for block in blocks_of(page, "bash"):
            for number, line in enumerate(block.code.replace("\\\n", " ").splitlines()):
                if ours.fullmatch(line.strip()):
                    found.append((f"{page}:{block.line + number}", line.strip()))
        prose = re.sub(r"^```.*?^```$", "", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)
        for span in re.findall(r"`([^`]+)`", prose):
            if ours.fullmatch(" ".join(span.split())):
                found.append((page, " ".join(span.split())))
    return list(dict.fromkeys(found))


def module_and_words(line: str) -> tuple[str, list[str]]:
    """The module of a command, and what it is given."""
    name, *words = shlex.split(line, comments=True)
    if name == "python":
        module = words[1]
        words = words[2:]
    elif name == "stream-attention":
        module = "stream_attention.cli.main"
    else:
        scripts = _scripts()
        assert name in scripts, f"{name} is no command of pyproject.toml"
        module = scripts[name]
    if module == "stream_attention.cli.main" and words and not words[0].startswith("-"):
        assert words[0] in COMMANDS, f"stream-attention has no command {words[0]}"
        return f"stream_attention.cli.{COMMANDS[words[0]][0]}", words[1:]
    return module, words


def _scripts() -> dict[str, str]:
    table = (ROOT / "pyproject.toml").read_text().partition("[project.scripts]\n")[2].partition("\n[")[0]
    return dict(re.findall(r'^(\S+) = "([\w.]+):main"$', table, re.MULTILINE))


@pytest.mark.parametrize(("where", "line"), command_lines(), ids=lambda text: text[:60])
def test_a_command_line_that_is_shown_is_accepted(
    where: str, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module, words = module_and_words(line)
    main = import_module(module).main
    if not words:  # a name in prose; what a command needs at least is not asked of it
        assert callable(main)
        return
    parse = argparse.ArgumentParser.parse_args

    def parse_and_stop(parser: argparse.ArgumentParser, args: Any = None, namespace: Any = None) -> None:
        parse(parser, args, namespace)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
    with pytest.raises((Parsed, SystemExit)) as stopped:
        main(words)
    refused = capsys.readouterr().err
    assert stopped.type is Parsed or stopped.value.code == 0, f"{where}: {line}\n{refused}"  # 0: --help, --version


def test_command_lines_are_found() -> None:
    lines = [line for _, line in command_lines()]
    assert any(line.startswith("python -m stream_attention.cli.benchmark --device cuda") for line in lines)
    assert any(line.startswith("stream-attention plan --q") for line in lines)


def test_a_command_line_with_a_wrong_flag_would_be_noticed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for line in ("stream-attention plan --q 1x2", "stream-attention info --no-such-flag"):
        wrong = f"{line} --no-such-flag"
        with pytest.raises(AssertionError, match="--no-such-flag"):
            test_a_command_line_that_is_shown_is_accepted("a page", wrong, monkeypatch, capsys)
        monkeypatch.undo()


@pytest.mark.parametrize("page", ALL_PAGES)
def test_the_make_targets_and_scripts_of_a_page_exist(page: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    shown = "\n".join(block.code for block in blocks_of(page, "bash"))
    prose = re.sub(r"^```.*?^```$", "", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)
    said = re.findall(r"^make ([a-z-]+)", shown, re.MULTILINE) + re.findall(r"`make ([a-z-]+)", prose)
    assert set(said) <= targets
    scripts = re.findall(r"\bexamples/\w+\.py\b", (ROOT / page).read_text())
    assert [script for script in scripts if not (ROOT / script).exists()] == []


# Links


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    seen: dict[str, int] = {}
    found = set()
    for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        slug = re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
        found.add(slug if slug not in seen else f"{slug}-{seen[slug]}")
        seen[slug] = seen.get(slug, 0) + 1
    return found


@pytest.mark.parametrize("page", ALL_PAGES)
def test_the_links_of_a_page_lead_somewhere(page: str) -> None:
    text = re.sub(r"^```.*?^```$", "", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)
    targets = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'(?:src|srcset|href)="([^"]+)"', text)
    broken = []
    for target in targets:
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = (ROOT / page).parent / path if path else ROOT / page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    assert broken == []


def test_anchors_are_those_of_github(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# `attention`\n## Which kernel ran?\n## NaN and Inf\n```bash\n# no heading\n```\n## NaN and Inf\n")
    assert anchors(page) == {"attention", "which-kernel-ran", "nan-and-inf", "nan-and-inf-1"}


def test_every_page_is_reached_from_the_readme() -> None:
    reached, ahead = set(), ["README.md"]
    while ahead:
        page = ahead.pop()
        reached.add(page)
        for target in re.findall(r"\]\(([^)#\s]+\.md)", (ROOT / page).read_text()):
            linked = ((ROOT / page).parent / target).resolve()
            if "://" not in target and linked.relative_to(ROOT).as_posix() not in reached:
                ahead.append(linked.relative_to(ROOT).as_posix())
    assert set(DOCS) <= reached


# Tables that must be whole


def test_the_table_of_fields_has_all_22_with_their_defaults() -> None:
    page = (ROOT / "docs/modules.md").read_text()
    table = page.partition("| field | default |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| `(\w+)` \| (\S+) \|", table, re.MULTILINE)
    assert rows == [(field.name, str(field.default)) for field in dataclasses.fields(StreamAttentionConfig)]
    assert len(rows) == 22


def test_the_table_of_compressors_has_their_options_with_their_defaults() -> None:
    table = (ROOT / "docs/kv_cache.md").read_text().partition("| method | options")[2].partition("\n\n")[0]
    rows = {name: re.findall(r"`(\w+)=([^`]+)`", row) for name, row in re.findall(r"^\| `(\w+)` \|(.*)", table, re.M)}
    assert rows.keys() == METHODS.keys()
    for method, said in rows.items():
        options = inspect.signature(type(create_kv_compressor(method))).parameters.values()
        defaults = {option.name: str(option.default) for option in options}
        if method == "importance":
            defaults["importance"] = defaults.pop("method")
        assert {name: default.strip('"') for name, default in said} == defaults


def test_the_table_of_variables_has_those_that_from_env_reads() -> None:
    from stream_attention.core.config import VARIABLES

    page = (ROOT / "docs/environment.md").read_text()
    rows = re.findall(
        r"^\| `(STREAM_ATTENTION_\w+)` \| `(\w+)`", page.partition("| variable | field |")[2], re.MULTILINE
    )
    assert dict(rows) == VARIABLES


def variables_read(source: str) -> set[str]:
    """Environment variables that a file names: by `os.environ`, by `launched`, or as one of ours."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(
                func=ast.Attribute(value=ast.Attribute(attr="environ")), args=[ast.Constant(value=str(name)), *_]
            ):
                found.add(name)
            case ast.Call(func=ast.Name(id="launched"), args=[ast.Constant(value=str(name)), *_]):
                found.add(name)
            case ast.Subscript(value=ast.Attribute(attr="environ"), slice=ast.Constant(value=str(name))):
                found.add(name)
            case ast.Compare(left=ast.Constant(value=str(name)), comparators=[ast.Attribute(attr="environ")]):
                found.add(name)
            case ast.Constant(value=str(name)) if re.fullmatch(r"STREAM_ATTENTION_[A-Z_]+", name):
                found.add(name)
    return found


def test_the_page_of_environment_variables_has_those_that_the_sources_read() -> None:
    page = (ROOT / "docs/environment.md").read_text()
    first_cells = re.findall(r"^\| (`[A-Z].*?) \|", page, re.MULTILINE)
    retired = re.findall(r"^`STREAM.* do nothing", page, re.MULTILINE)
    listed = {name for cell in [*first_cells, *retired] for name in re.findall(r"`([A-Z_]+)`", cell)}
    read = set().union(*(variables_read(path.read_text()) for path in (ROOT / "src").rglob("*.py")))
    assert listed == read


def test_from_env_accepts_every_variable_of_the_page_that_is_read_elsewhere() -> None:
    first = (ROOT / "docs/environment.md").read_text().partition("## `StreamAttentionConfig")[0]
    elsewhere = dict.fromkeys(re.findall(r"^\| `(STREAM_ATTENTION_\w+)`", first, re.MULTILINE), "1")
    assert len(elsewhere) >= 4
    assert StreamAttentionConfig.from_env(elsewhere) == StreamAttentionConfig()


def test_the_commands_page_names_every_command_and_every_flag() -> None:
    page = (ROOT / "docs/commands.md").read_text()
    missing = []
    for name, (module, _) in COMMANDS.items():
        source = (ROOT / f"src/stream_attention_tools/cli/{module}.py").read_text()
        if module in ("benchmark", "accuracy"):
            source += (ROOT / "src/stream_attention_tools/cli/flags.py").read_text()
        flags = set(re.findall(r'"(--[a-z][a-z0-9-]+)"', source))
        missing += [f"{name} {flag}" for flag in sorted(flags) if not re.search(rf"{flag}\b", page)]
    assert missing == []


# What the documents of the systems we replace show, on one device. Theirs is the surface, ours the words and the sizes.


def test_the_quick_start_of_old() -> None:
    config = StreamAttentionConfig(
        num_heads=32, head_dim=128, tile_size_q=128, tile_size_k=64, use_qkv_projections=True
    )
    module = StreamAttention(config)
    features = config.num_heads * config.head_dim
    hidden = torch.randn(2, 32, features, device=module.attention.device)
    with torch.no_grad():
        assert module(hidden).shape == (2, 32, 4096)
    query = torch.randn(2, 32, config.num_heads, config.head_dim)
    key, value = torch.randn_like(query), torch.randn_like(query)
    with torch.no_grad():
        assert module(query, key, value, causal=True).shape == query.shape


def test_the_signatures_of_old() -> None:
    config = StreamAttentionConfig(num_heads=4, head_dim=16)
    module, hidden = StreamAttention(config), torch.randn(2, 10, 64)
    query, key, value = torch.randn(3, 2, 10, 4, 16)
    whole = module(hidden_states=hidden, use_cache=False, causal=True)
    out, (keys, values) = module(hidden, use_cache=True)
    assert torch.equal(out, whole) and keys.shape == values.shape == (2, 10, 4, 16)
    by_name = module(query=query, key=key, value=value, causal=True)
    assert torch.equal(by_name, module(query, key, value))

    fused = FusedOnlineAttention(num_heads=4, head_dim=16)
    out, lse = fused(query, key, value, causal=True, return_lse=True)
    torch.testing.assert_close(out, by_name)
    assert lse.shape == (2, 4, 10) and lse.dtype is torch.float32
    wanted = {"time_ms", "tflops", "bandwidth_gb_s", "seq_len", "batch_size"}
    assert wanted <= fused.benchmark(64, batch_size=1, warmup=1, iterations=2).keys()

    baseline = FlashAttentionV3(config)
    torch.testing.assert_close(baseline(query, key, value, causal=True), by_name)
    assert wanted <= baseline.benchmark(64, batch_size=1, warmup=1, iterations=2).keys()
    assert baseline.kernel == "SDPA CPU"  # and never "FlashAttention-3" where it did not run

    assert isinstance(create_stream_attention(config), StreamAttention)
    assert isinstance(create_stream_attention(64, 4, batch_first=True), StreamMultiheadAttention)


def test_the_config_of_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAM_ATTENTION_NUM_HEADS", "16")
    monkeypatch.setenv("STREAM_ATTENTION_ENABLE_KV_COMPRESSION", "no")
    config = StreamAttentionConfig.from_env()
    assert (config.num_heads, config.enable_kv_compression, config.head_dim) == (16, False, 128)
    assert len(config.to_dict()) == 22


def test_masks_dropout_slopes_and_the_deterministic_mode_of_old() -> None:
    query, key, value = torch.randn(3, 1, 12, 2, 8).requires_grad_()
    fused = FusedOnlineAttention(num_heads=2, head_dim=8)
    keep, slopes = torch.rand(1, 12, 12) > 0.2, torch.tensor([0.5, 0.25])
    added = torch.zeros(1, 12, 12).masked_fill(~keep, -torch.inf)
    boolean = fused(query, key, value, attention_mask=keep, alibi_slopes=slopes)
    torch.testing.assert_close(fused(query, key, value, attention_mask=added, alibi_slopes=slopes), boolean)
    results = []
    for _ in range(2):
        fused.set_deterministic(True, seed=11)
        out = fused(query, key, value, dropout_p=0.5)
        results.append((out, *torch.autograd.grad(out.square().sum(), (query, key, value))))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert not torch.equal(results[0][0], fused(query, key, value))


def test_the_memory_tools_of_old() -> None:
    profiler = stream_attention.MemoryProfiler("cpu")
    profiler.start()
    layers = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
    stream_attention.gradient_checkpoint_sequential(layers, 2, torch.randn(2, 8)).sum().backward()
    profiler.snapshot("trained")
    report = profiler.report()
    profiler.stop()
    assert {"snapshots", "peak_allocated_mb", "peak_reserved_mb", "deltas"} <= report.keys()
    assert {"label", "allocated_mb", "reserved_mb", "timestamp"} <= report["snapshots"][1].keys()
    assert report["peak_allocated_mb"] > 0
    with pytest.raises(ImportError, match="cannot import name 'nothing'"):
        exec("from stream_attention import nothing", {})


def test_the_two_dimensional_call_of_old() -> None:
    from flash_attention.kernels import flash_attention

    local, total, features = 16, 1024, 128
    queries, keys, values = torch.randn(local, features), *torch.randn(2, total, features)
    out = flash_attention(queries, keys, values)
    assert out.shape == (local, features)
    torch.testing.assert_close(out, torch.softmax(queries @ keys.T / features**0.5, -1) @ values)


def test_the_command_lines_of_old(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    shown = (
        "stream-attention-benchmark --seq 512 1024 2048 4096 --batch 1 --heads 8 --dim 64 --warmup 10 --iters 50",
        "stream-attention-benchmark --seq 1024 --chunk 128 --json_out figures.json",
        "stream-attention-test --seq 1024 --batch 2 --heads 8 --dim 64 --dtype fp16",
    )
    for line in shown:
        test_a_command_line_that_is_shown_is_accepted("", line, monkeypatch, capsys)
        monkeypatch.undo()
    assert {"stream-attention", "stream-attention-benchmark", "stream-attention-test"} <= set(_scripts())
