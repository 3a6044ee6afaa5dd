"""The examples run at a small size and print what they promise; the Dockerfile, which nothing here builds, is sane."""

from __future__ import annotations

import ast
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py"))
WITH_FLAGS = [name for name in EXAMPLES if name != "demo.py"]  # `make demo` takes none, and is not small


def run(name: str, *flags: str) -> str:
    """What an example prints, from a process of its own with one thread."""
    paths = os.pathsep.join([str(ROOT / "src"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    env = {**os.environ, "PYTHONPATH": paths.rstrip(os.pathsep), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "examples" / name), *flags]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{shlex.join(command)}:\n{done.stdout}\n{done.stderr}"
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
    printed = run("train_transformer_block.py", "--pairs", "6", "--steps", "200", "--device", "cpu")
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
    lengths = ("512", "2048", "4096", str(1 << 24))
    flags = ("--lengths", *lengths, "--budget-seconds", "60", "--window", window, "--dim", "16", "--device", "cpu")
    printed = run("long_context_example.py", *flags)
    plan, measured = printed.split("The plan of the longest:")
    verdicts = dict(re.findall(r"^ +(\d+) .*?(run|skip: [a-z ]+)$", plan, re.MULTILINE))
    assert [verdicts[length] for length in lengths[:3]] == ["run"] * 3
    assert verdicts[lengths[3]].startswith("skip") if window == "0" else lengths[3] in verdicts
    rows = re.findall(r"^ +(\d+) +\S+ s +\S+ \w+ +(\d+) +(\S+)$", measured, re.MULTILINE)
    assert [length for length, _, _ in rows][:3] == list(lengths[:3])
    (_, before), (_, after) = [(int(length), int(length) * int(count)) for length, count, _ in rows[1:3]]
    # Eight tensors of 16 floats are 512 bytes per token, and tiles come once; a matrix would add 4 bytes per pair.
    assert 512 <= (after - before) / 2048 < 1024
    assert max(float(error) for _, _, error in rows) < 1e-5


# How they are started


@pytest.mark.parametrize("name", WITH_FLAGS)
def test_an_example_says_how_it_is_started(name: str) -> None:
    source = (ROOT / "examples" / name).read_text()
    docstring = ast.get_docstring(ast.parse(source), clean=False) or ""
    launch = re.search(rf"^ *python examples/{name}(.*)$", docstring, re.MULTILINE)
    assert launch, "no launch line"
    declared = set(re.findall(r'add_argument\(\s*"(--[\w-]+)"', source))
    assert declared and set(re.findall(r"--[\w-]+", launch[1])) <= declared


def test_every_example_has_a_test_here() -> None:
    tested = Path(__file__).read_text()
    assert [name for name in WITH_FLAGS if f'"{name}"' not in tested] == []


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
