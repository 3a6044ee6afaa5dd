"""What the machine has, what is enabled on it, what would enable the rest, and a self-check that can fail."""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import stream_attention
from stream_attention.backends import BACKENDS, installed
from stream_attention.backends.eager import blocked as eager
from stream_attention.base import device
from stream_attention_tools.cli import info as cli

on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here, and it is the one that is checked")


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return cli.collect()


# What it finds


def test_versions_are_those_of_what_is_imported_here(found: dict[str, Any]) -> None:
    versions = found["versions"]
    assert set(versions) == {"stream_attention", "python", "torch", "cuda", "hip", "cudnn", "triton"}
    assert versions["stream_attention"] == stream_attention.__version__
    assert (versions["python"], versions["torch"]) == (platform.python_version(), torch.__version__)
    assert versions["cuda"] == torch.version.cuda


def rows_of(found: dict[str, Any]) -> dict[str, str]:
    """The text's lines of columns: name -> the rest."""
    shown = cli.text(found).partition("\nenvironment\n")[0].replace("\n    -> ", " -> ")
    lines = [line.split(maxsplit=1) for line in shown.splitlines() if line.startswith("  ")]
    return {name: " ".join(rest.split()) for name, rest in lines}


def test_an_extra_that_is_missing_or_too_old_says_what_to_type(found: dict[str, Any]) -> None:
    rows = rows_of(found | {"extras": {"transformers": None, "pyyaml": None, "rich": "1.2.3"}})
    assert rows["transformers"] == "Hugging Face models not installed -> pip install transformers"
    assert rows["pyyaml"] == "StreamAttentionConfig.from_yaml not installed -> pip install pyyaml"
    assert rows["rich"] == "progress of benchmarks 1.2.3"
    old = rows_of(found | {"extras": {"transformers": "4.55.2"}})["transformers"]
    assert old.endswith("off: expected 4.56 or newer; found 4.55.2 -> pip install --upgrade transformers")


def test_every_backend_is_there_with_its_reasons(found: dict[str, Any]) -> None:
    its = found["backends"]
    assert [one["name"] for one in its["all"]] == [backend.name for backend in BACKENDS]
    assert all(one["available"] != bool(one["why_not"]) for one in its["all"])
    assert "Tq=4096 Tk=4096 Hq=32 Hkv=32 D=128" in its["problem"]
    assert its["auto"] in [one["name"] for one in its["all"] if one["available"]]
    rows = rows_of(found)
    for one in its["all"]:
        assert (" off: " in rows[one["name"]]) == (not one["available"])


@on_cpu
def test_without_a_gpu_it_says_why_there_is_none_and_what_that_turns_off(found: dict[str, Any]) -> None:
    assert found["gpus"] == [] and found["why_no_gpu"] and found["backends"]["auto"] == "eager"
    assert found["fp8"]["auto"] is None
    rows = rows_of(found)
    told = rows["gpu"].removeprefix("none: ").removesuffix(" ...")  # torch's own words, as far as the line goes
    assert told and found["why_no_gpu"].startswith(told)
    assert rows["gluon"] == "Hopper kernels off: no CUDA device"
    assert rows["triton"] == "GPU kernels off: no CUDA device"
    assert rows["FP8"] == 'precision="fp8" off: no CUDA device'
    assert rows["eager"].endswith(" on") and rows["reference"].endswith(" on")


@on_cpu
def test_a_gpu_that_the_driver_sees_and_torch_does_not_says_what_to_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho '570.1, NVIDIA H200'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(torch.version, "cuda", None)
    found = cli.collect(details=False)
    command = f"pip install --force-reinstall {installed.TORCH}"
    assert found["enable_gpu"] == command
    rows = rows_of(found)
    assert rows["gpu"] == f"none: this build of torch has no CUDA -> {command}"
    assert rows["driver"] == "570.1, which sees NVIDIA H200"


# On a machine with GPUs, which torch is told of


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., dict[str, Any]]]:
    """`machine((9, 0), "3.6.0", count)`: what `collect` finds with such GPUs and such a Triton, or None."""

    def forget() -> None:
        device._facts.cache_clear()
        installed.triton_release.cache_clear()

    def collected(capability: tuple[int, int], triton: str | None, count: int = 1) -> dict[str, Any]:
        major, minor = capability
        gpu = SimpleNamespace(
            name="NVIDIA H200", major=major, minor=minor, multi_processor_count=132, total_memory=int(139.8 * 2**30)
        )
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "init", lambda: None)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
        monkeypatch.setattr(sys, "platform", "linux")
        for name in [name for name in sys.modules if name.partition(".")[0] == "triton"]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
        if triton is None:
            monkeypatch.setattr(sys, "meta_path", [WithoutTriton(finder) for finder in sys.meta_path])
        else:
            metadata = tmp_path / f"triton-{triton}.dist-info"
            metadata.mkdir()
            (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: triton\nVersion: {triton}\n")
            (tmp_path / "triton").mkdir()
            (tmp_path / "triton" / "__init__.py").touch()
        forget()
        monkeypatch.setattr(installed, "HAS_TRITON", triton is not None)
        return cli.collect(details=False)

    yield collected
    forget()


class WithoutTriton:
    """A finder that does not find it."""

    def __init__(self, finder: Any) -> None:
        self.finder = finder

    def __getattr__(self, name: str) -> Any:
        return getattr(self.finder, name)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        return None if name.partition(".")[0] == "triton" else self.finder.find_spec(name, path, target)


@pytest.mark.parametrize("triton", ["3.6.0", "3.9.1"])
def test_on_hopper_everything_is_on(machine: Any, triton: str) -> None:
    found = machine((9, 0), triton)
    rows = rows_of(found)
    assert rows["gpu"] == "0 NVIDIA H200, compute capability 9.0, 132 multiprocessors, 139.8 GiB"
    assert found["backends"]["auto"] == "gluon"
    assert all(rows[name].endswith(" on") for name in ("gluon", "triton", "eager", "reference"))
    assert rows["FP8"].endswith(" on: gluon")
    assert cli.text(found).startswith(
        f"stream-attention {stream_attention.__version__}, Python {platform.python_version()}, "
        f"torch {torch.__version__} (CUDA 13.0), Triton {triton}\n"
    )


@pytest.mark.parametrize("triton", ["3.5.1", "4.0.0"])
def test_a_triton_that_gluon_is_not_enabled_for_says_what_to_type(machine: Any, triton: str) -> None:
    rows = rows_of(machine((9, 0), triton))
    why = f"enabled only for Triton 3.6-3.9; found {triton[:3]}"
    assert rows["gluon"] == f"Hopper kernels off: {why} -> pip install {installed.TORCH}"
    assert rows["triton"].endswith(" on") and rows["FP8"].endswith(" on: triton")


def test_without_triton_it_says_what_to_type(machine: Any) -> None:
    found = machine((9, 0), None)
    assert found["versions"]["triton"] is None and ", no Triton\n" in cli.text(found)
    rows = rows_of(found)
    for name in ("gluon", "triton", "FP8"):
        assert "off: Triton is not installed -> pip install 'triton" in rows[name]


@pytest.mark.parametrize(
    ("asked", "typed"),
    [
        (['triton~=3.9.0; platform_system == "Linux" and python_version < "3.16"'], "triton~=3.9.0"),
        (["triton (==3.6.0)", "numpy"], "triton==3.6.0"),
        (["triton-kernels==1.0", "numpy"], "triton>=3.6"),
        (None, "triton>=3.6"),
    ],
)
def test_the_triton_to_install_is_the_one_that_torch_asks_for(
    asked: list[str] | None, typed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installed, "requires", lambda package: asked)
    assert installed.triton_of_torch() == typed


def test_on_an_older_gpu_no_command_would_help(machine: Any) -> None:
    rows = rows_of(machine((8, 0), "3.6.0"))
    assert rows["gluon"] == "Hopper kernels off: requires Hopper (compute capability 9.0); got 8.0"
    assert rows["triton"].endswith(" on")
    assert rows["FP8"].endswith(" off: FP8 requires compute capability 8.9 or newer; got 8.0")


def test_equal_gpus_share_a_line(machine: Any) -> None:
    rows = rows_of(machine((9, 0), "3.6.0", 8))
    assert rows["gpu"] == "0-7 NVIDIA H200, compute capability 9.0, 132 multiprocessors, 139.8 GiB"


# It fits one screen


def fits(printed: str) -> bool:
    lines = printed.splitlines()
    return len(lines) <= 24 and max(map(len, lines)) <= cli.WIDTH


@pytest.mark.parametrize("triton", ["3.6.0", "4.0.0", None])
def test_it_fits_one_screen_with_a_gpu(machine: Any, triton: str | None) -> None:
    found = machine((9, 0), triton)
    lacking = found | {"extras": dict.fromkeys(found["extras"]), "environment": {}}
    assert fits(f"{cli.text(lacking)}\n\nTo compare a small call ...")


def test_it_fits_one_screen_here(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in cli.collect(details=False)["environment"]:
        monkeypatch.delenv(name)
    assert cli.main([]) == 0
    printed = capsys.readouterr().out
    assert fits(printed) and "environment" not in printed and printed.rstrip().endswith(" --check")


def test_many_variables_take_few_lines(found: dict[str, Any]) -> None:
    environment = {f"NCCL_VARIABLE_{number}": "x" * 20 for number in range(12)}
    block = cli.text(found | {"environment": environment}).partition("\nenvironment\n")[2]
    assert block.split() == [f"{name}={value}" for name, value in environment.items()]
    assert len(block.splitlines()) == 6


TIMED = """
import time
import torch
begun = time.perf_counter()
from stream_attention_tools.cli.main import main
assert main(["info"]) == 0
print(time.perf_counter() - begun)
"""


@pytest.mark.serial
def test_it_takes_at_most_a_second_more_than_import_torch() -> None:
    """0.2 s on two cores of an AMD EPYC, 2026-11-18."""

    def seconds() -> float:
        done = subprocess.run([sys.executable, "-c", TIMED], capture_output=True, text=True, timeout=120, check=True)
        return float(done.stdout.split()[-1])

    assert statistics.median(seconds() for _ in range(3)) < 1.0


@pytest.mark.gpu
def test_gpus_are_those_of_torch(found: dict[str, Any]) -> None:
    assert len(found["gpus"]) == torch.cuda.device_count() and found["why_no_gpu"] is None
    assert found["gpus"][0]["name"] == torch.cuda.get_device_name(0) and found["gpus"][0]["processors"] > 0


def test_the_environment_is_what_matters_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"STREAM_ATTENTION_ANYTHING": "1", "TRITON_CACHE_DIR": "/x", "LOCAL_RANK": "3", "CUDA_VISIBLE_DEVICES": "0"}
    for name, value in (told | {"SECRET_TOKEN": "hush"}).items():
        monkeypatch.setenv(name, value)
    environment = cli.collect()["environment"]
    assert environment.items() >= told.items() and "SECRET_TOKEN" not in environment


def test_a_peer_that_is_installed_but_broken_says_what_its_import_raised(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "flash_attn_interface.py").write_text("raise OSError('undefined symbol: _ZN2at4_ops')\n")
    monkeypatch.syspath_prepend(tmp_path)
    peer = cli.collect()["peers"]["FlashAttention-3"]
    assert peer["version"] is None
    assert peer["why_not"] == "installed, but importing it raises OSError: undefined symbol: _ZN2at4_ops"
    quick = cli.collect(details=False)["peers"]["FlashAttention-3"]  # it is not imported
    assert quick == {"version": "version unknown", "why_not": None}


# The self-check


def test_the_self_check_passes_and_says_by_how_much() -> None:
    check = cli.self_check()
    assert check["passed"] and check["message"] is None
    assert list(check["results"]) == ["out", "lse", "d_query", "d_key", "d_value"]
    assert all(0 < one["error"] <= one["allowed"] < 1 for one in check["results"].values())
    assert "causal" in check["problem"] and set(check["backends"]) == {"forward", "backward"}
    shown = cli.check_text(check)
    assert shown.startswith("self-check passed in ")
    assert f"error {check['results']['d_key']['error']:.2e}, allowed" in shown


@pytest.mark.gpu
def test_on_a_gpu_the_self_check_runs_its_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--json", "--check"]) == 0
    check = json.loads(capsys.readouterr().out)["check"]
    assert check["passed"] and set(check["backends"].values()) <= {"gluon", "triton"}


@on_cpu
def test_a_wrong_kernel_fails_the_self_check(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = eager.forward

    def a_little_wrong(*arguments: Any) -> Any:
        out, lse = right(*arguments)
        return out * 1.0001, lse

    monkeypatch.setattr(eager, "forward", a_little_wrong)
    assert cli.main(["--check"]) == 1
    printed = capsys.readouterr().out
    assert "self-check FAILED in " in printed and "wrong by more than the tolerance: out" in printed
    assert cli.main(["--json", "--check"]) == 1
    check = json.loads(capsys.readouterr().out)["check"]
    assert not check["passed"] and "allowed" in check["message"]


@on_cpu
def test_a_kernel_that_raises_fails_the_self_check_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*arguments: Any) -> Any:
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(eager, "forward", broken)
    assert cli.main(["--check"]) == 1
    assert "raised RuntimeError: no kernel image is available" in capsys.readouterr().out


# The command


@pytest.mark.parametrize("flags", [[], ["--no-check"]], ids=str)
def test_nothing_is_computed_unless_it_is_asked_for(
    flags: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eager, "forward", None)
    assert cli.main(flags) == 0
    printed = capsys.readouterr().out
    assert "self-check" not in printed and "\x1b" not in printed
    assert cli.main([*flags, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["check"] is None


def test_no_check_is_accepted_and_not_advertised(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    printed = capsys.readouterr().out
    assert "--check" in printed and "--no-check" not in printed


WITHOUT_TRITON = """
import sys
from importlib.machinery import PathFinder

class WithoutIt:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return None if name.partition(".")[0] == "triton" else PathFinder.find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = WithoutIt
from stream_attention_tools.cli.info import main
sys.exit(main(["--json", "--check"]))
"""


@on_cpu
def test_on_a_machine_without_triton_it_says_so_and_the_rest_works() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_TRITON], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert set(found) == {
        *("versions", "extras", "peers", "machine", "gpus", "why_no_gpu", "enable_gpu", "driver", "backends", "fp8"),
        *("environment", "check"),
    }
    assert found["versions"]["triton"] is None
    reasons = {one["name"]: one["why_not"] for one in found["backends"]["all"]}
    assert reasons["gluon"] == reasons["triton"] == ["Triton is not installed"]
    assert found["check"]["passed"]
    assert set(found["machine"]) == {"os", "cpu", "isa", "cores", "threads"}
    assert all(set(one) == {"error", "allowed"} for one in found["check"]["results"].values())


def test_it_is_a_module_too() -> None:
    argv = [sys.executable, "-m", "stream_attention.cli.info"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split()[:2] == ["stream-attention", f"{stream_attention.__version__},"] and done.stderr == ""
    assert done.stdout.endswith(" python -m stream_attention.cli.info --check\n")
