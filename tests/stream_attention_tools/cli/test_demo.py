"""The demo: one device beside ranks, virtual or real, with bytes that are those of the formula."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from stream_attention_tools.cli import demo
from stream_attention_tools.cluster.traffic import Scheme, Workload
from stream_attention_tools.cluster.trial import ClockedRanks, Measured, Trial

SMALL = "--device cpu --seq 96 --dim 8 --heads 4 --iters 1".split()


@pytest.fixture(autouse=True)
def _not_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


def told(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert demo.main([*SMALL, *argv, "--json"]) == 0
    return dict(json.loads(capsys.readouterr().out))


# What it says


@pytest.mark.parametrize("backward", [[], ["--backward"]], ids=["forward", "backward"])
@pytest.mark.parametrize(
    "scheme",
    [
        "--scheme ring",
        "--scheme ring --layout contiguous",
        "--scheme ring --layout striped --no-causal",
        "--scheme allgather",
        "--scheme ulysses --kv-heads 2",
        "--scheme ulysses --ring-size 2",
        "--scheme query --batch 2",
        "--scheme ring --dtype bf16",
    ],
)
def test_every_scheme_agrees_with_one_device_and_with_the_formula(
    scheme: str, backward: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    found = told(capsys, *scheme.split(), *backward)
    assert found["ranks"] == 4 and found["virtual"] and found["right"]
    assert found["sent_bytes"] == found["formula_bytes"] > 0
    assert found["difference"] <= found["allowed"] < (0.5 if "bf16" in scheme else 1e-4)
    assert 0 < found["critical_ms"] <= found["ranks_ms"] and found["memory_bytes"] > 0
    assert found["speed_up"] == found["single_ms"] / found["critical_ms"]


def test_one_rank_sends_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, "--ranks", "1")
    assert found["sent_bytes"] == found["formula_bytes"] == 0
    assert found["critical_ms"] == found["ranks_ms"]


def test_the_layout_is_in_balance_unless_it_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert told(capsys)["layout"] == "zigzag"
    assert told(capsys, "--no-causal")["layout"] == "contiguous"
    assert told(capsys, "--scheme", "ulysses")["layout"] == "contiguous"
    assert told(capsys, "--layout", "striped")["layout"] == "striped"


def test_a_reader_is_told_that_virtual_ranks_take_turns(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main([*SMALL, "--ranks", "3"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "ring zigzag: 3 ranks, virtual, in one process, on cpu"
    assert printed[1] == "B=1 T=96 Hq=4 Hkv=4 D=8 float32 causal, forward"
    assert [line.split("  ")[0] for line in printed[2:]] == [
        "one device",
        "3 ranks, sum",
        "3 ranks, each",
        "max |difference|",
        "memory per rank",
        "sent per rank",
    ]
    assert "ranks run one after another on one device" in printed[3]
    assert "the critical path, had each a device and sending been free" in printed[4]
    assert "equal to the formula's 16384" in printed[-1]


def test_wrong_results_or_bytes_are_not_right() -> None:
    right = Measured(1.0, 1.0, 1.0, 1e-7, 1e-6, 1, 10, 10)
    assert right.right
    assert not right._replace(difference=2e-6).right and not right._replace(difference=float("nan")).right
    assert not right._replace(sent_bytes=9).right


def test_the_critical_path_is_the_longest_of_every_turn() -> None:
    """A contiguous causal ring: the last of two ranks computes three times what the first does, and then some more."""
    work = Workload(768, 4, 4, 64, dtype=torch.float32)
    shares = []
    for _ in range(3):  # the machine is shared
        found = Trial(Scheme("ring"), work, ClockedRanks(2), torch.device("cpu")).measure(3)
        shares.append(found.critical_ms / found.ranks_ms)
        assert 0.5 <= shares[-1] <= 1.0
        if 0.6 < shares[-1] < 0.9:
            break
    assert 0.6 < shares[-1] < 0.9  # (1 + 2) of (1 + 1 + 2) halves of squares


def test_ranks_that_torchrun_started_do_the_same(tmp_path: Any) -> None:
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    command += ["-m", "stream_attention_tools.cli.demo", *SMALL, "--backward", "--json"]
    done = subprocess.run(
        command, env=env | {"OMP_NUM_THREADS": "1"}, cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)  # of the first rank alone
    assert found["ranks"] == 2 and not found["virtual"] and found["right"]
    assert found["ranks_ms"] == found["critical_ms"]
    assert found["sent_bytes"] == 48 * 4 * 16 * 4 * 3  # half of the keys and values, again, and their gradients


# Refusals


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("--ring-size 2", "--ring-size: expected with --scheme ulysses; got --scheme ring"),
        ("--scheme query --layout zigzag", "--layout: expected with a scheme that shards the sequence"),
        ("--kv-heads 3", "kv_heads: expected a divisor of the 4 heads; got 3"),
        ("--seq 7", "length: expected at least two rows for each of 4 ranks; got 7"),
        ("--scheme ulysses --ranks 8", "query: expected at least a head for each of the 8 ranks"),
        ("--scheme ulysses --ring-size 3", "ring_size: expected an int that divides the 4 ranks; got 3"),
    ],
)
def test_what_cannot_be_run_is_refused_with_its_reason(
    argv: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo.main([*SMALL, *argv.split()]) == 2
    printed = capsys.readouterr()
    assert words in printed.err and printed.out == ""


def test_ranks_other_than_torchruns_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert demo.main([*SMALL, "--ranks", "4"]) == 2
    assert "--ranks: expected none, or the 2 that torchrun started; got 4" in capsys.readouterr().err
    assert demo.main(SMALL) == 2
    assert "no MASTER_ADDR, MASTER_PORT. Start the script with torchrun" in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "x")
    assert demo.main([*SMALL, "--ranks", "4"]) == 2
    assert "WORLD_SIZE: expected a whole number of at least 1 in the environment; got 'x'" in capsys.readouterr().err


def test_star_has_no_trial() -> None:
    with pytest.raises(ValueError, match="scheme: expected an exact one; got 'star'"):
        Trial(Scheme("star"), Workload(64, 4, 4, 8), ClockedRanks(2), torch.device("cpu"))
