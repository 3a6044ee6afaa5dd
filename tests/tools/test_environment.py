"""What `make demo` and `make test` install: which torch, what is refused, and versions that resolve everywhere."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CONSTRAINTS = (ROOT / "constraints.txt").read_text(encoding="utf-8")
PYTHONS = [name.rpartition(" ")[2] for name in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", name)]
OLDEST_TORCH = "2.11.0"


def load(name: str) -> ModuleType:
    spec = spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


environment = load("environment")
fresh = load("fresh")


def chosen(asked: str = "", there: str = "", own: str = "", local: str = "", newest: str = "2.15.0") -> Any:
    return environment.choose(asked, there, (own, "/site" if own else ""), lambda: local, lambda: newest)


# Which torch


@pytest.mark.parametrize(
    ("facts", "requirement", "site", "words"),
    [
        ({}, "torch==2.15.0", "", "the newest of the package index; about"),
        ({"local": "2.13.0+cpu"}, "torch==2.13.0+cpu", "", "a wheel that pip finds on this machine"),
        ({"local": "2.10.0"}, "torch==2.15.0", "", "the newest"),
        ({"own": "2.12.1", "local": "2.13.0"}, "", "/site", "has already; nothing to download"),
        ({"own": "2.10.0"}, "torch==2.15.0", "", "the newest"),
        ({"there": "2.13.0+cpu"}, "", "", "installed already"),
        ({"there": "2.10.0", "own": "2.12.1"}, "torch==2.15.0", "", "the newest"),
        ({"asked": "2.12.1", "own": "2.12.1"}, "", "/site", "has already; nothing to download"),
        ({"asked": "2.13.0", "there": "2.13.0+cpu"}, "", "", "installed already"),
        ({"asked": "2.13.0", "local": "2.13.0+cpu"}, "torch==2.13.0+cpu", "", "a wheel that pip finds on this machine"),
        ({"asked": "2.11.0", "there": "2.13.0+cpu", "own": "2.15.0"}, "torch==2.11.0", "", "as asked"),
    ],
    ids=str,
)
def test_which_torch_is_used(facts: dict[str, str], requirement: str, site: str, words: str) -> None:
    choice = chosen(**facts)
    assert (choice.requirement, choice.site) == (requirement, site)
    assert words in choice.why


@pytest.mark.parametrize("asked", ["2.10.0", "latest"])
def test_a_torch_that_cannot_work_is_refused_with_what_to_type(asked: str) -> None:
    with pytest.raises(environment.Refused, match=rf"2\.11 or newer; got '{asked}'\.\nTry: make TORCH="):
        environment.check_torch(asked)
    environment.check_torch("")
    environment.check_torch("2.15.0")


def test_an_old_python_is_refused_with_what_to_type() -> None:
    with pytest.raises(environment.Refused, match=r"3\.11 or newer is needed; .* is 3\.10\.13.\n.*make PYTHON="):
        environment.check_python((3, 10, 13), True)


def test_a_python_without_venv_is_refused_with_the_apt_line() -> None:
    with pytest.raises(environment.Refused, match="sudo apt install python3-venv"):
        environment.check_python((3, 11, 2), False)


@pytest.mark.serial
def test_an_index_that_does_not_answer_is_refused_within_ten_seconds(tmp_path: Path) -> None:
    env = {"PATH": os.defpath, "HOME": str(tmp_path), "PIP_CONFIG_FILE": os.devnull}
    env["PIP_INDEX_URL"] = "http://127.0.0.1:9/simple"  # nobody listens there
    command = [sys.executable, "-I", str(ROOT / "tools/environment.py"), "demo", "--venv", str(tmp_path / "venv")]
    # -I hides the torch of this Python's user site; that of its own site-packages must be hidden too.
    hidden = [command[0], "-I", "-c", HIDE_TORCH.format(script=command[2], arguments=command[3:])]
    done = subprocess.run(hidden, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "pip finds no torch 2.11 or newer" in done.stderr and "PIP_FIND_LINKS" in done.stderr
    assert "onnection" in done.stderr and "experimental" not in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
    assert float(done.stdout.split("took ")[1]) < 10


HIDE_TORCH = """
import runpy, sys, time
from importlib import metadata
real = metadata.distribution
def distribution(name):
    if name == "torch":
        raise metadata.PackageNotFoundError(name)
    return real(name)
metadata.distribution = distribution
sys.argv = [{script!r}, *{arguments!r}]
began = time.monotonic()
try:
    runpy.run_path({script!r}, run_name="__main__")
finally:
    print("took", time.monotonic() - began)
"""


def test_the_torch_of_the_chosen_python_is_borrowed(tmp_path: Path) -> None:
    folder = tmp_path / "venv"
    command = [sys.executable, str(ROOT / "tools/environment.py"), "demo", "--venv", str(folder), "--dry-run"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"torch: \S+, which .+ has already; nothing to download\n", done.stdout)
    assert not folder.exists(), "a dry run makes nothing"
    python = environment.make_venv(folder)
    assert environment.fits(folder) and not environment.installed(python)
    environment.borrow(python, environment.own_torch()[1])
    assert environment.installed(python) == environment.own_torch()[0]
    (folder / "pyvenv.cfg").write_text("version = 3.11.99\n")
    assert not environment.fits(folder), "of another Python"


def test_a_folder_that_is_no_environment_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(environment.Refused, match="is no virtual environment and not empty"):
        environment.make_venv(tmp_path)
    assert (tmp_path / "thesis.txt").exists()


def test_pip_is_not_told_to_install_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_USER", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "/wheels")
    assert "PIP_USER" not in environment._environment()
    assert environment._environment()["PIP_FIND_LINKS"] == "/wheels"


@pytest.mark.parametrize("step", ["demo", "dev"])
def test_the_demonstration_installs_what_it_needs_and_no_more(
    step: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commands: list[tuple[str, ...]] = []
    monkeypatch.setattr(environment, "pip", lambda python, *words: commands.append(words))
    monkeypatch.setattr(environment, "make_venv", lambda folder: folder / "bin" / "python")
    monkeypatch.setattr(environment, "chosen", lambda asked, python: chosen(local="2.13.0+cpu"))
    monkeypatch.setattr(environment, "_runs", lambda python, code: code == "import torch")  # a CPU build: no Triton
    options = {"step": step, "venv": tmp_path, "torch": "", "triton": "", "dry_run": False}
    environment.build(argparse.Namespace(**options))
    said, constraints = capsys.readouterr().out, str(ROOT / "constraints.txt")
    asked = [word for words in commands for word in words[1:] if not word.startswith("-") and word != constraints]
    first = ["torch==2.13.0+cpu", "setuptools", "wheel", "matplotlib"]
    assert asked == first + ([str(ROOT)] if step == "demo" else ["triton==3.6.0", f"{ROOT}[dev]"])
    assert said.startswith("torch: 2.13.0+cpu, a wheel that pip finds on this machine; about 0.2 GB")
    assert ("--no-deps" in commands[-1]) == (step == "demo")


# Versions


def test_what_the_installer_asks_for_is_what_the_package_declares() -> None:
    assert PROJECT["requires-python"] == f">={'.'.join(map(str, environment.PYTHON))}" == f">={PYTHONS[0]}"
    assert f"torch>={'.'.join(map(str, environment.TORCH))}" in PROJECT["dependencies"]
    assert OLDEST_TORCH.startswith(".".join(map(str, environment.TORCH)))
    assert fresh.CASES["oldest"]["TORCH"] == OLDEST_TORCH


def test_the_pins_leave_torch_and_triton_alone_and_name_no_index() -> None:
    names = {line.partition("==")[0] for line in CONSTRAINTS.splitlines() if "==" in line}
    assert len(names) > 50
    assert not {name for name in names if re.match(r"torch$|triton|nvidia", name)}
    assert "://" not in CONSTRAINTS and "--" not in CONSTRAINTS


def resolve(python: str, torch: str, *extras: str) -> subprocess.CompletedProcess[str]:
    """Let uv choose versions for a Python and a torch, with our pins, and install nothing."""
    uv = shutil.which("uv", path=str(Path(sys.executable).parent)) or shutil.which("uv")
    assert uv is not None, "uv is in the extra dev"
    lines = [*PROJECT["dependencies"], f"torch{torch}"]
    for extra in extras:
        lines += [one for one in PROJECT["optional-dependencies"][extra] if not one.startswith("stream-attention")]
    command = [uv, "pip", "compile", "--no-config", "-q", "-", "-c", str(ROOT / "constraints.txt"), "--no-header"]
    command += ["--python-version", python, "--python-platform", "x86_64-manylinux_2_28", "--only-binary", ":all:"]
    return subprocess.run(command, input="\n".join(lines), capture_output=True, text=True, timeout=120)


EXTRAS = ("hf", "bench", "docs", "dev")
TORCHES = {"oldest torch": f"=={OLDEST_TORCH}", "newest torch": ""}
RESOLVED = [*((python, "newest torch") for python in (*PYTHONS, "3.11.2")), ("3.11.2", "oldest torch")]


@pytest.fixture(scope="module")
def resolutions() -> dict[tuple[str, str], subprocess.CompletedProcess[str]]:
    """All of them at once: most of the time is spent waiting for the index."""
    with ThreadPoolExecutor(len(RESOLVED)) as pool:
        done = pool.map(lambda one: resolve(one[0], TORCHES[one[1]], *EXTRAS), RESOLVED)
        return dict(zip(RESOLVED, done, strict=True))


@pytest.mark.xdist_group("resolve")
@pytest.mark.parametrize(("python", "torch"), RESOLVED)
def test_every_python_resolves_with_every_extra(resolutions: Any, python: str, torch: str) -> None:
    """A pin that a declared Python cannot take fails here; 3.11.2 is Debian 12's."""
    done = resolutions[python, torch]
    if done.returncode and re.search(r"[Ff]ailed to fetch|[Cc]ould not connect|error sending request", done.stderr):
        pytest.skip(f"the package index does not answer: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    found = dict(re.findall(r"^([\w.-]+)==(\S+)", done.stdout, re.MULTILINE))
    assert environment.supported(found["torch"]) and tuple(map(int, found["numpy"].split(".")[:2])) < (2, 4)
    assert {"transformers", "matplotlib", "mkdocs", "pytest"} <= found.keys()


@pytest.mark.xdist_group("resolve")
def test_a_pin_that_excludes_a_declared_python_is_seen(
    resolutions: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mistake that kept pip busy for half an hour: a version that needs Python 3.11.5, without a marker."""
    wrong = re.sub(r"^pymdown-extensions==.*\n", "", CONSTRAINTS, flags=re.MULTILINE) + "pymdown-extensions==13.0\n"
    (tmp_path / "constraints.txt").write_text(wrong)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    monkeypatch.setenv("UV_OFFLINE", "1")  # the other resolutions have fetched what there is to know
    done = resolve("3.11.2", "", *EXTRAS)
    if resolutions["3.11.2", "newest torch"].returncode:
        pytest.skip("the package index does not answer")
    said = " ".join(done.stderr.split())
    assert done.returncode != 0 and "pymdown-extensions==13.0 depends on Python>=3.11.5" in said


# What `make fresh` wrote


def test_strangers_ran_the_two_commands() -> None:
    rows = json.loads(fresh.RESULTS.read_text(encoding="utf-8"))
    assert rows.keys() == fresh.CASES.keys()
    for case, row in rows.items():
        assert [step["command"].split()[:2] for step in row["steps"]] == [["make", "demo"], ["make", "test"]], case
        assert all(step["exit"] == 0 and step["seconds"] > 0 for step in row["steps"]), case
        assert row["steps"][1]["seconds"] < 12 * 60, "CI runs this step, and has 12 minutes"
        tests = row["steps"][1]["tests"]
        assert tests.keys() == {"parallel", "interpreted", "serial"}, case
        assert all(re.search(r"\d+ passed", line) and "failed" not in line for line in tests.values()), case
        assert row["versions"]["python"].startswith("3.11") and environment.supported(row["versions"]["torch"]), case
    assert rows["oldest"]["versions"]["torch"].startswith(OLDEST_TORCH)
    assert "+cpu" in rows["local"]["versions"]["torch"]


def test_the_log_of_a_run_is_read() -> None:
    log = "x\n.venv is ready for demo, after 95 s\n.venv is ready for dev, after 20 s\nparallel: 10 passed in 3s\n"
    assert fresh.ready(log) == 115 and fresh.closing_lines(log) == {"parallel": "10 passed in 3s"}
