"""What the machine has, what can run on it, and a self-check that can fail."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from typing import Any

import pytest
import torch

import stream_attention
from stream_attention.backends import BACKENDS
from stream_attention.cli import info as cli
from stream_attention.kernels import eager

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


def test_an_extra_that_is_missing_says_how_to_get_it(found: dict[str, Any]) -> None:
    without = found | {"extras": {"transformers": None, "rich": "1.2.3"}}
    lines = [line.split(maxsplit=1) for line in cli.text(without).splitlines() if line.strip()]
    assert ["transformers", 'not installed; pip install "stream-attention[hf]"'] in lines and ["rich", "1.2.3"] in lines


def test_every_backend_is_there_with_its_reasons(found: dict[str, Any]) -> None:
    backends = found["backends"]
    assert [one["name"] for one in backends["all"]] == [backend.name for backend in BACKENDS]
    assert all(one["available"] != bool(one["why_not"]) for one in backends["all"])
    assert "Tq=1024 Tk=1024 Hq=8 Hkv=8 D=128" in backends["problem"]
    assert backends["auto"] in [one["name"] for one in backends["all"] if one["available"]]
    shown = cli.text(found).split("\nbackends, for ")[1].splitlines()
    for one in backends["all"]:
        (line,) = (line for line in shown if line.startswith(f"  {one['name']} "))
        assert all(reason in line for reason in one["why_not"])
        assert ("available" in line) and ("not available" in line) == (not one["available"])


@on_cpu
def test_without_a_gpu_it_says_why_there_is_none_and_why_triton_cannot_run(found: dict[str, Any]) -> None:
    assert found["gpus"] == [] and found["why_no_gpu"]
    on_gpus = [one for one in found["backends"]["all"] if one["name"] in ("gluon", "triton")]
    assert len(on_gpus) == 2 and found["backends"]["auto"] == "eager"
    assert all(one["why_not"] or one["why_named_only"] for one in on_gpus)
    assert f"none: {found['why_no_gpu']}" in cli.text(found)


def test_a_gpu_is_one_line() -> None:
    gpu = {"index": 1, "name": "NVIDIA H200", "capability": "9.0", "processors": 132, "memory_gib": 139.8}
    shown = cli.text(cli.collect() | {"gpus": [gpu], "driver": {"version": "570.1", "gpus": ["NVIDIA H200"]}})
    rows = [line.split() for line in shown.splitlines()]
    assert "gpu 1 NVIDIA H200, compute capability 9.0, 132 multiprocessors, 139.8 GiB".split() in rows
    assert "nvidia driver 570.1; it sees NVIDIA H200".split() in rows


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


@on_cpu
def test_a_wrong_kernel_fails_the_self_check(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = eager.forward

    def a_little_wrong(*arguments: Any) -> Any:
        out, lse = right(*arguments)
        return out * 1.0001, lse

    monkeypatch.setattr(eager, "forward", a_little_wrong)
    assert cli.main([]) == 1
    printed = capsys.readouterr().out
    assert "self-check FAILED in " in printed and "wrong by more than was earned: out" in printed
    assert cli.main(["--json"]) == 1
    check = json.loads(capsys.readouterr().out)["check"]
    assert not check["passed"] and "allowed" in check["message"]


@on_cpu
def test_a_kernel_that_raises_fails_the_self_check_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*arguments: Any) -> Any:
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(eager, "forward", broken)
    assert cli.main([]) == 1
    assert "raised RuntimeError: no kernel image is available" in capsys.readouterr().out


# The command


def test_no_check_checks_nothing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eager, "forward", None)
    assert cli.main(["--no-check"]) == 0
    printed = capsys.readouterr().out
    assert "self-check" not in printed and "\x1b" not in printed
    assert cli.main(["--no-check", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["check"] is None


WITHOUT_TRITON = """
import sys
from importlib.machinery import PathFinder

class WithoutIt:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return None if name.partition(".")[0] == "triton" else PathFinder.find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = WithoutIt
from stream_attention.cli.info import main
sys.exit(main(["--json"]))
"""


@on_cpu
def test_on_a_machine_without_triton_it_says_so_and_the_rest_works() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_TRITON], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert set(found) == {
        *("versions", "extras", "peers", "machine", "gpus", "why_no_gpu", "driver", "backends", "environment", "check")
    }
    assert found["versions"]["triton"] is None
    reasons = {one["name"]: one["why_not"] for one in found["backends"]["all"]}
    assert reasons["gluon"] == reasons["triton"] == ["Triton is not installed"]
    assert found["check"]["passed"]
    assert set(found["machine"]) == {"os", "cpu", "isa", "cores", "threads"}
    assert all(set(one) == {"error", "allowed"} for one in found["check"]["results"].values())


def test_it_is_a_module_too() -> None:
    argv = [sys.executable, "-m", "stream_attention.cli.info", "--no-check"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split()[:2] == ["stream-attention", stream_attention.__version__] and done.stderr == ""
