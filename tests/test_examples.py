"""The examples run at a small size and print what they promise; the Dockerfile, which nothing here builds, is sane."""

from __future__ import annotations

import ast
import os
import re
import runpy
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
from _pytest.capture import CaptureResult

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py"))


def ended(name: str, *flags: str, launch: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """An example that ran in a process of its own with one thread; `launch` is what Python runs it by."""
    paths = os.pathsep.join([str(ROOT / "src"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    env = {**os.environ, "PYTHONPATH": paths.rstrip(os.pathsep), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launch, str(ROOT / "examples" / name), *flags]
    return subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=300)


def run(name: str, *flags: str, launch: tuple[str, ...] = ()) -> str:
    """What an example prints that ends well."""
    done = ended(name, *flags, launch=launch)
    assert done.returncode == 0, f"{shlex.join(done.args)}:\n{done.stdout}\n{done.stderr}"
    assert done.stderr == ""
    return done.stdout


def figures(pattern: str, printed: str) -> list[float]:
    found = [float(figure) for figure in re.findall(pattern, printed)]
    assert found, f"no {pattern!r} in\n{printed}"
    return found


# What they show


def test_basic_usage_agrees_with_itself() -> None:
    printed = run("basic_usage.py", "--length", "64", "--heads", "2", "--dim", "16", "--device", "cpu")
    assert "[2, 64, 32] -> [2, 64, 32], computed by eager" in printed
    differences = figures(r": (\d\.\de[+-]\d\d)\n", printed)  # cache, padding, merged states
    assert len(differences) == 3 and max(differences) < 1e-5
    assert "lse [2, 2, 64] torch.float32; 2 parts merged" in printed
    assert "gradient [2, 64, 2, 16]" in printed and "\nbackend   eager" in printed


def test_integration_gives_what_torch_gives() -> None:
    flags = "--length 48 --embed 32 --heads 2 --rounds 2 --compile aot_eager --device cpu".split()
    printed = run("integration_example.py", *flags)
    assert "2 modules replaced" in printed
    differences = figures(r"(?:outputs|output|weights|difference) (\d\.\de[+-]\d\d)", printed)
    assert len(differences) == 4 and max(differences) < 1e-5
    assert len(figures(r"(?:nn.MultiheadAttention|ours) +(\d+\.\d\d) ms", printed)) == 2
    assert "gradients in 13 parameters" in printed  # 5 of attention, 4 of two norms, 4 of the MLP


def test_training_converges_and_needs_the_attention() -> None:
    printed = run("train_transformer_block.py", "--pairs", "5", "--steps", "150", "--device", "cpu")
    ((with_it, without, chance),) = re.findall(r"with attention (\S+), without (\S+), chance (\S+)\n", printed)
    assert float(with_it) > 0.95
    assert float(without) < 2 * float(chance)
    losses = figures(r"loss (\d\.\d+)", printed)
    assert len(losses) == 20 and losses[9] < 0.2 < 2.0 < losses[19]  # ten figures with attention, ten without


def test_training_says_when_it_did_not_converge(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["example", "--steps", "2", "--batch", "4", "--dim", "16", "--device", "cpu"])
    with pytest.raises(SystemExit, match="did not learn"):
        runpy.run_path(str(ROOT / "examples/train_transformer_block.py"), run_name="__main__")


@pytest.mark.parametrize("window", ["0", "64"])
def test_long_context_runs_what_fits_in_memory_that_grows_with_the_length(window: str) -> None:
    lengths = ("2048", "8192", "16384", str(1 << 40))
    flags = ("--lengths", *lengths, "--budget-seconds", "60", "--window", window, "--dim", "16", "--device", "cpu")
    printed = run("long_context_example.py", *flags)
    rows = re.findall(r"^ +(\d+) .*\| +\S+ s +\S+ \w+ +(\d+) +(\S+)$", printed, re.MULTILINE)
    assert tuple(length for length, _, _ in rows) == lengths[:3]
    assert re.search(rf"^ *{lengths[3]} .*\| skipped: not in memory$", printed, re.MULTILINE)
    # Of the process itself: eight tensors of 16 floats are 8 MiB at 16k tokens, and a matrix would be 1 GiB.
    peaks = [int(length) * int(count) for length, count, _ in rows]
    assert peaks == sorted(peaks) and 8 << 20 <= peaks[2] < 256 << 20
    assert max(float(error) for _, _, error in rows) < 1e-5
    assert printed.partition("How the longest ran:")[2].startswith("\nforward   dense B=1 Tq=16384 ")


def test_long_context_ends_when_its_budget_is_spent() -> None:
    began = time.perf_counter()
    done = ended("long_context_example.py", "--budget-seconds", "0.001", "--device", "cpu")
    assert done.returncode == 1 and done.stdout == "broken off: the budget is spent\n"
    assert done.stderr == "nothing fits; give --budget-seconds more, or --lengths less\n"
    flags = "--budget-seconds 20 --lengths 2048 1048576 --device cpu --dim 16".split()
    printed = run("long_context_example.py", *flags)
    assert "s are left of the budget" in printed and time.perf_counter() - began < 60


def test_kv_compression_keeps_what_later_queries_look_at() -> None:
    flags = "--length 512 --ratio 4 --heads 4 --kv-heads 2 --dim 32 --device cpu".split()
    printed = run("kv_compression.py", *flags)
    rows = re.findall(r"^(\w+) +(\d+) +(\d+\.\d)x +(\d+\.\d)% +(\d+\.\d+)$", printed, re.MULTILINE)
    table = {name: (int(tokens), float(ratio), float(kept), float(error)) for name, tokens, ratio, kept, error in rows}
    assert set(table) == {"importance", "snap", "chunk", "hybrid", "quantized", "key_norm", "streaming"}
    assert all(table[name][:2] == (128, 4.0) for name in ("importance", "snap", "chunk", "key_norm", "streaming"))
    assert table["hybrid"][0] == 256 and table["quantized"][0] == 512 and table["quantized"][2] == 100.0
    for name in ("importance", "snap", "hybrid", "quantized"):
        assert table[name][2] > 90 and table[name][3] < 0.25 < table["streaming"][3]
    assert len(figures(r"costs (\d\.\d+) of the attention, by the last 32 queries \d\.\d+\.\n", printed)) == 1


def test_decode_agrees_with_attention_at_every_step_and_loses_little_in_few_bits() -> None:
    printed = run("decode.py", *"--prompt 256 --steps 70 --heads 4 --kv-heads 2 --dim 32 --device cpu".split())
    assert "3 rows of 256, 128 and 1 tokens in 18 pages of 64" in printed
    assert "70 steps, computed by eager: rows of 326, 198 and 71 tokens." in printed
    (difference,) = figures(r"on each row alone: (\d\.\de[+-]\d\d)\n", printed)
    assert difference < 1e-5
    rows = re.findall(r"^(\w+) +(\d\.\d)x smaller, error of the output (\d\.\d+)$", printed, re.MULTILINE)
    table = {name: (float(ratio), float(error)) for name, ratio, error in rows}
    assert set(table) == {"fp8", "int8", "int4"}
    assert 1.5 < table["int8"][0] < table["int4"][0]
    assert 0 < table["int8"][1] < table["fp8"][1] < table["int4"][1] < 0.2
    assert printed.count("\nbackend   eager") == 2 and "quantised to int4" in printed.rpartition("decode    ")[2]


def test_ring_attention_gives_what_one_device_gives_and_sends_what_the_formula_says() -> None:
    flags = "--length 96 --heads 4 --kv-heads 2 --dim 16 --device cpu".split()
    printed = run("ring_attention.py", "--ranks", "3", *flags)
    assert printed.startswith("ranks      3 virtual; a sequence of 96 tokens, on cpu\n")
    assert figures(r"zigzag +the busiest rank has (\S+) of", printed) == [1.0]
    assert max(figures(r"off by (\d\.\de[+-]\d\d)", printed)) < 1e-4
    sent, formula = figures(r"sent (\d+) bytes", printed), re.findall(r"by the formula (\d+) and (\d+)\n", printed)
    assert sent[:2] == [float(figure) for figure in formula[0]] and len(sent) == 4


def test_ring_attention_says_the_same_of_processes() -> None:
    flags = "--length 96 --heads 4 --kv-heads 2 --dim 16 --device cpu".split()
    virtual = run("ring_attention.py", "--ranks", "2", *flags)
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    assert run("ring_attention.py", *flags, launch=launch) == virtual.replace("2 virtual", "2 processes")


# How they are started


def test_checkpointing_runs_attention_once_and_keeps_little() -> None:
    printed = run("checkpointing.py", *"--layers 4 --length 256 --dim 64 --heads 2 --device cpu".split())
    rows = re.findall(r"^([\w ]+?) +(\d+\.\d) +(\d+\.\d) +(\d+)x +the same$", printed, re.MULTILINE)
    table = {name: (float(kept), float(peak), int(runs)) for name, kept, peak, runs in rows}
    assert [runs for _, _, runs in table.values()] == [4, 8, 8, 4] and len(table) == 4
    kept = [figures[0] for figures in table.values()]
    assert kept[2] < kept[1] < kept[3] < kept[0] / 4
    assert "Attention keeps 0.06 MiB a block, 0.3 in all." in printed


def test_huggingface_gives_what_the_model_gave() -> None:
    printed = run("huggingface.py", *"--length 48 --heads 4 --kv-heads 2 --dim 16 --device cpu".split())
    assert "Replaced 2 attention modules" in printed and "100% of 32 x 2" in printed
    assert max(figures(r"differ by (\d\.\de[+-]\d\d)", printed)) < 1e-4
    assert "has its attention again: sdpa" in printed


def test_fp8_says_what_it_loses() -> None:
    printed = run("fp8.py", *"--prefix 200 --steps 2 --heads 4 --kv-heads 2 --dim 64 --device cpu".split())
    assert "  eager: does not support FP8; FP8 requires Triton" in printed
    (plain, rotated), (outlier, spread) = (
        [float(one) for one in pair] for pair in re.findall(r": (\d+\.\d)%, rotated (\d+\.\d)%", printed)
    )
    assert max(plain, rotated) < 6.3 and spread < 8 and outlier > 1.7 * spread
    assert "<Fp8KV: 1 rows of 200 keys, 2 heads of 64, of bfloat16 on cpu>" in printed
    assert max(figures(r"at most (\d+\.\d)%", printed)) < 8


def test_long_generation_is_bounded_where_it_says_so() -> None:
    printed = run("long_generation.py", *"--prompt 200 --new 20 --budget 32 --layers 2 --device cpu".split())
    rows = re.findall(r"^(.+?) {2,}(\d+) +(\d+) +([\d.]+) +(\d+)%", printed, re.MULTILINE)
    assert len(rows) == 5 and {seen for _, seen, *_ in rows} == {"219"}
    assert [int(held) for _, _, held, *_ in rows] == [219, 219, 219, 51, 51] and rows[0][4] == "100"


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_says_how_it_is_started(name: str) -> None:
    source = (ROOT / "examples" / name).read_text()
    docstring = ast.get_docstring(ast.parse(source), clean=False) or ""
    launch = re.search(rf"^ *python examples/{name}(.*)$", docstring, re.MULTILINE)
    assert launch, "no launch line"
    declared = set(re.findall(r'add_argument\(\s*"(--[\w-]+)"', source))
    assert declared and set(re.findall(r"--[\w-]+", launch[1])) <= declared


def test_every_example_has_a_test_here() -> None:
    tested = Path(__file__).read_text()
    assert [name for name in EXAMPLES if f'"{name}"' not in tested] == []


@pytest.mark.parametrize("name", EXAMPLES)
def test_help_explains_every_flag_and_runs_nothing(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = refused(name, ["--help"], 0, monkeypatch, capsys).out
    source = (ROOT / "examples" / name).read_text()
    for flag in re.findall(r'add_argument\(\s*"(--[\w-]+)"', source):
        assert re.search(rf"^  {flag}( .*)?(  |\n {{10,}})[a-z]", shown, re.MULTILINE), f"{flag} has no help"


@pytest.mark.parametrize(
    ("name", "flags", "words"),
    [
        (
            "demo.py",
            "--out README.md/x.png",
            "--out: expected a file that can be written; got 'README.md/x.png': Not a",
        ),
        ("basic_usage.py", "--length 0", "--length: expected a number of at least 1; got '0'"),
        ("basic_usage.py", "--length 3", "--length: expected at least 16; got 3"),
        ("basic_usage.py", "--device tpu", "--device: expected cpu, cuda or cuda:N; got 'tpu'"),
        ("basic_usage.py", "--device cuda:99", "--device: torch finds "),
        ("integration_example.py", "--heads 3", "--heads: expected a divisor of --embed 256; got 3"),
        ("integration_example.py", "--length 5", "--length: expected more than the 5 tokens of padding; got 5"),
        ("integration_example.py", "--compile fast", "--compile: expected a backend of torch.compile; got 'fast'"),
        ("huggingface.py", "--kv-heads 3", "--kv-heads: expected a divisor of --heads 8; got 3"),
        ("huggingface.py", "--dim 3", "--dim: expected an even number"),
        ("train_transformer_block.py", "--steps 0", "--steps: expected a number of at least 1; got '0'"),
        ("train_transformer_block.py", "--heads 3", "--heads: expected a divisor of --dim 64; got 3"),
        ("train_transformer_block.py", "--lr 0", "--lr: expected more than 0; got 0"),
        ("long_context_example.py", "--lengths 64 0", "--lengths: expected a number of at least 1; got '0'"),
        ("long_context_example.py", "--budget-seconds 0", "--budget-seconds: expected more than 0 seconds; got '0'"),
        ("kv_compression.py", "--length 8", "--length: expected at least 64; got 8"),
        ("kv_compression.py", "--ratio 0.5", "--ratio: expected at least 1; got 0.5"),
        ("kv_compression.py", "--kv-heads 3", "--kv-heads: expected a divisor of --heads 8; got 3"),
        (
            "kv_compression.py",
            "--dim 6",
            "--dim: expected a multiple of 4, as four quantised values share a word; got 6",
        ),
        ("checkpointing.py", "--heads 3", "--heads: expected a divisor of --dim 256; got 3"),
        ("checkpointing.py", "--plot no/x.png", "--plot: expected a file in a folder that is there; got 'no/x.png'"),
        ("decode.py", "--prompt 100", "--prompt: expected at least 256; got 100"),
        ("decode.py", "--kv-heads 3", "--kv-heads: expected a divisor of --heads 8; got 3"),
        ("decode.py", "--dim 6", "--dim: expected a multiple of 4, as four quantised values share a word; got 6"),
        ("fp8.py", "--kv-heads 3", "--kv-heads: expected a divisor of --heads 8; got 3"),
        ("fp8.py", "--dim 96", "--dim: expected 64, 128 or 256; got 96"),
        ("ring_attention.py", "--kv-heads 3", "--kv-heads: expected a divisor of --heads 8; got 3"),
        ("ring_attention.py", "--ranks 9", "--heads: expected at least the 9 ranks, which divide them; got 8"),
        ("long_context_example.py", "--window=-1", "--window: expected a number of at least 0; got '-1'"),
    ],
)
def test_what_an_example_cannot_do_is_refused_in_a_line(
    name: str, flags: str, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(name, flags.split(), 2, monkeypatch, capsys)
    assert words in said.err.splitlines()[-1] and said.out == ""


def refused(
    name: str, flags: list[str], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> CaptureResult[str]:
    """What an example says that ends before it begins."""
    monkeypatch.setattr(sys, "argv", [name, *flags])
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
    assert left.value.code == code
    return capsys.readouterr()


@pytest.mark.slow
def test_the_demo_runs_to_its_end_and_draws_where_it_is_told(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    said = run("demo.py", "--longest", "1024", "--out", str(tmp_path / "demo.png"))
    assert re.findall(r"^ +(\d+) (\w+) +\d\.\de-\d\d ", said, re.MULTILINE) == [
        (length, dtype) for dtype in ("fp32", "bf16") for length in ("256", "512", "1024")
    ]
    assert f"The picture: {tmp_path / 'demo.png'}" in said and "Next: `make test`" in said
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


# The Dockerfile


def instructions() -> list[tuple[str, str]]:
    """(instruction, arguments) of the Dockerfile, continued lines joined, comments left out."""
    text = re.sub(r"^\s*#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    found = []
    for line in filter(None, map(str.strip, text.splitlines())):
        word, _, rest = line.partition(" ")
        found.append((word, rest.strip()))
    return found


def of(word: str) -> list[str]:
    return [rest for its, rest in instructions() if its == word]


def test_the_dockerfile_is_built_on_a_pinned_official_image() -> None:
    assert of("FROM") == ["${BASE}"]
    (base,) = of("ARG")
    assert re.fullmatch(r"BASE=pytorch/pytorch:\d+\.\d+\.\d+-cuda\d+\.\d+-cudnn\d+-runtime", base)  # no registry host
    known = {"FROM", "ARG", "RUN", "WORKDIR", "COPY", "USER", "ENV", "CMD"}
    assert {word for word, _ in instructions()} == known


def test_what_the_dockerfile_copies_exists_and_is_let_in() -> None:
    copied = [source for line in of("COPY") for source in line.split()[:-1]]
    assert {"pyproject.toml", "src"} <= set(copied)
    assert [source for source in copied if not (ROOT / source).exists()] == []
    let_in = re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    assert set(let_in) == set(copied)
    project = (ROOT / "pyproject.toml").read_text()
    needed = re.findall(r'^readme = "(.+)"$|^license-files = \["(.+)"\]$', project, re.MULTILINE)
    assert {name for pair in needed for name in pair if name} <= set(copied)  # else pip cannot build it


def test_the_container_is_not_run_by_root_and_says_what_it_is() -> None:
    user = of("USER")[-1]
    assert user != "root" and any(f"useradd --create-home {user}" in line for line in of("RUN"))
    order = [word for word, _ in instructions()]
    assert order.index("USER") > max(at for at, word in enumerate(order) if word in ("RUN", "COPY"))
    assert of("CMD") == ['["stream-attention", "info"]']


def test_the_dockerfile_names_no_host_and_says_that_ci_does_not_build_it() -> None:
    text = (ROOT / "Dockerfile").read_text()
    assert "://" not in text and not re.search(r"\b[\w-]+\.(io|com|org|net)\b", text)
    head = text.partition("\nARG ")[0]
    assert "CI has neither Docker nor a GPU" in head
    for word in ("--gpus all", "--ipc=host", "--shm-size", "torchrun", "MASTER_PORT"):
        assert word in head
