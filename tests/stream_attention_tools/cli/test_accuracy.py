"""The accuracy command: what it prints, what it honours, and that it fails when somebody is wrong."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from stream_attention_tools.bench import providers as providers_
from stream_attention_tools.cli import accuracy
from stream_attention_tools.testing.inputs import Tensors

SMALL = ["--device", "cpu", "--seq", "48", "--heads", "4", "--dim", "16"]


class Off(providers_.Ours):
    """Ours, off by a hundredth of one element's value, or of one gradient's."""

    def __init__(self, backward_alone: bool = False) -> None:
        super().__init__("stream", "auto")
        self.backward_alone = backward_alone

    def attend(self, x: Tensors) -> torch.Tensor:
        out = super().attend(x)
        bent = out * 1.01
        return out + (bent - bent.detach()) - (out - out.detach()) if self.backward_alone else bent


def test_it_prints_the_documented_line_and_every_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    assert accuracy.main([*SMALL, "--providers", "stream", "reference", "sdpa"]) == 0
    lines = capsys.readouterr().out.splitlines()
    mean, largest = (float(part.split(": ")[1]) for part in lines[1].split(", "))
    assert lines[1].startswith("Mean abs diff: ") and ", Max abs diff: " in lines[1] and 0 < mean < largest < 1e-5
    rows = {line.split()[0]: line for line in lines[3:]}
    assert set(rows) == {"provider", "stream", "reference", "sdpa"}
    assert all("PASS" in rows[name] for name in ("stream", "reference", "sdpa"))
    assert "eager: torch's CPU flash op" in rows["stream"]  # which backend ran


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_the_dtype_that_is_asked_for_is_honoured_on_the_cpu(
    dtype: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "accuracy.json"
    assert accuracy.main([*SMALL, "--dtype", dtype, "--json-out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["problem"]["dtype"] == {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}[dtype]
    rounding = {"fp16": 2**-11, "bf16": 2**-8, "fp32": 2**-24}[dtype]
    assert 0.1 * rounding < found["providers"]["stream"]["results"]["out"]["error"] < 20 * rounding
    assert "forcing" not in capsys.readouterr().out


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_on_a_gpu_output_and_gradients_are_within_what_is_allowed(
    dtype: str, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = f"--device cuda --seq 512 --heads 4 --dim 64 --dtype {dtype} --backward --providers stream".split()
    assert accuracy.main(argv) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("stream ")]
    assert [row[1] for row in rows] == ["out", "d_query", "d_key", "d_value"]
    assert all(row[4] == "PASS" and row[5] in ("gluon:", "triton:") for row in rows), rows


def test_folders_around_the_file_are_made(tmp_path: Path) -> None:
    assert accuracy.main([*SMALL, "--json-out", str(tmp_path / "not" / "there" / "a.json")]) == 0
    assert "providers" in json.loads((tmp_path / "not" / "there" / "a.json").read_text())


LIMITED = """
import resource, sys
from stream_attention_tools.cli.accuracy import main
resource.setrlimit(resource.RLIMIT_FSIZE, (200, 200))
sys.exit(main(sys.argv[1:]))
"""


def test_a_full_disk_keeps_the_old_file_and_the_verdicts_are_printed(tmp_path: Path) -> None:
    """A limit on the size of files stands for it."""
    out = tmp_path / "a.json"
    out.write_text("old")
    command = [sys.executable, "-c", LIMITED, *SMALL, "--json-out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and "PASS" in done.stdout
    assert done.stderr == f"{out} cannot be written: File too large; what was there before is as it was\n"
    assert out.read_text() == "old" and list(tmp_path.iterdir()) == [out]


def test_gradients_dropout_and_kv_heads(tmp_path: Path) -> None:
    out = tmp_path / "accuracy.json"
    argv = [*SMALL, "--kv-heads", "2", "--dropout", "0.3", "--no-causal", "--backward", "--seed", "7"]
    assert accuracy.main([*argv, "--json-out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["problem"]["Hkv"] == 2 and found["problem"]["dropout_p"] == 0.3 and found["seed"] == 7
    assert list(found["providers"]["stream"]["results"]) == ["out", "d_query", "d_key", "d_value"]
    assert found["commit"] and found["versions"]["torch"] and found["machine"]


def test_another_seed_draws_other_inputs(tmp_path: Path) -> None:
    errors = set()
    for seed in ("1", "1", "2"):
        assert accuracy.main([*SMALL, "--seed", seed, "--json-out", str(tmp_path / "a.json")]) == 0
        results = json.loads((tmp_path / "a.json").read_text())["providers"]["stream"]["results"]
        errors.add(results["out"]["mean"])
    assert len(errors) == 2


@pytest.mark.parametrize("backward_alone", [False, True])
def test_the_exit_code_is_1_where_a_bound_is_missed(
    backward_alone: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(providers_, "by_name", lambda fa3=None: PROVIDERS | {"stream": Off(backward_alone)})
    assert accuracy.main([*SMALL, "--backward"]) == 1
    verdicts = {line.split()[1]: line for line in capsys.readouterr().out.splitlines() if line.startswith("stream")}
    assert ("FAIL" in verdicts["out"]) != backward_alone
    assert all("FAIL" in verdicts[name] for name in ("d_query", "d_key", "d_value"))


PROVIDERS = providers_.by_name()


class Broken(providers_.Ours):
    def attend(self, x: Tensors) -> torch.Tensor:
        raise RuntimeError("no kernel image")


def test_one_that_raises_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(providers_, "by_name", lambda fa3=None: PROVIDERS | {"stream": Broken("stream", "auto")})
    assert accuracy.main(SMALL) == 1
    assert "no kernel image" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--providers", "sdpa-cudnn"], "--providers sdpa-cudnn: it is a CUDA kernel, and the device is the cpu"),
        (["--kv-heads", "3"], "divisor"),
        (["--fa3", "."], "Hopper"),
        (["--json-out", "/dev/null/below"], "cannot be written"),
    ],
)
def test_refusals(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert accuracy.main([*SMALL, *argv]) == 2
    assert words in capsys.readouterr().err


def test_fp64_is_refused_as_what_the_others_are_compared_with(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        accuracy.main([*SMALL, "--dtype", "fp64"])
    assert "expected one of fp16, bf16, fp32; got fp64, which the reference computes in" in capsys.readouterr().err


@pytest.mark.parametrize("seed", ["99999999999999999999", str(2**63), str(-(2**63) - 1)])
def test_a_seed_of_more_than_64_bits_is_refused(seed: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        accuracy.main([*SMALL, f"--seed={seed}"])
    assert ended.value.code == 2
    assert f"argument --seed: expected a 64-bit integer; got {str(seed)!r}" in capsys.readouterr().err


@pytest.mark.parametrize("seed", [str(2**63 - 1), str(-(2**63))])
def test_every_seed_of_64_bits_is_taken(seed: str) -> None:
    assert accuracy.main([*SMALL, f"--seed={seed}", "--dropout", "0.1"]) == 0
