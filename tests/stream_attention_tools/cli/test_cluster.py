"""Clusters from the command line: predictions, the recommendation, the pictures, and what is refused."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from stream_attention_tools.cli import cluster as cli
from stream_attention_tools.cli import scaling
from stream_attention_tools.cluster.planner import Cluster
from stream_attention_tools.cluster.speed import H200
from stream_attention_tools.cluster.traffic import Workload
from stream_attention_tools.report.figures import Plot

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results" / "h200"


def told(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert cli.main([*argv, "--json"]) == 0
    return dict(json.loads(capsys.readouterr().out))


def by_scheme(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {one["scheme"]: one for one in found["schemes"]}


# What it says


def test_every_scheme_has_a_line_and_one_is_recommended(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main("--ranks 64 --length 1048576 --kv-heads 8".split()) == 0
    printed = capsys.readouterr().out
    assert "predicted for 64 GPUs in 8 nodes, each as NVIDIA H200, 2026-" in printed
    lines = printed.splitlines()
    for words in ("ring zigzag ", "ring contiguous ", "all-gather zigzag ", "ulysses x ring of ", "query sharding "):
        assert any(line.startswith(words) for line in lines)
    assert not any(line.startswith("ulysses  ") for line in lines)  # 32 heads, 64 GPUs
    assert sum("recommended" in line for line in lines) == 2  # in the table, and with its reason
    (star,) = (line for line in lines if line.startswith("star phase 1"))
    assert star.endswith("an approximation")
    assert lines.index("assumed:") < len(lines) - 5


def test_flags_reach_the_prediction(capsys: pytest.CaptureFixture[str]) -> None:
    usual = by_scheme(told(capsys, "--ranks", "16"))["ring zigzag"]
    for flags, key, more in (
        (["--network", "1"], "ms", True),
        (["--network-latency", "5000"], "ms", True),
        (["--gpus-per-node", "16", "--nvlink", "1"], "ms", True),
        (["--gpus-per-node", "16", "--nvlink-latency", "5000"], "ms", True),
        (["--length", "65536"], "ms", False),
        (["--heads", "16"], "ms", False),
        (["--kv-heads", "8"], "sent_bytes", False),
        (["--dim", "64"], "sent_bytes", False),
        (["--batch", "2"], "ms", True),
        (["--backward"], "sent_bytes", True),
        (["--host-us", "9000"], "ms", True),
    ):
        other = by_scheme(told(capsys, "--ranks", "16", *flags))["ring zigzag"]
        assert (other[key] > usual[key]) == more and other[key] != usual[key], flags
    full = told(capsys, "--ranks", "16", "--no-causal")
    assert "ring zigzag" not in by_scheme(full) and "star phase 1" not in by_scheme(full)
    assert not any(one["fits"] for one in told(capsys, "--memory", "0.001")["schemes"])
    assert any("stands for" in one for one in told(capsys, "--dtype", "fp16")["assumptions"])


def test_results_of_the_benchmark_command_are_the_speed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = json.loads((RESULTS / "forward.json").read_text())
    found["machine"]["name"] = "half an H200"
    for cell in found["cells"]:
        cell["providers"][cell["ours"]]["tflops"] /= 2
    path = tmp_path / "half.json"
    path.write_text(json.dumps(found))
    usual = told(capsys, "--results", str(RESULTS / "forward.json"), "--host-us", "0")
    half = told(capsys, "--results", str(path), "--host-us", "0")
    assert half["speed"].startswith("half an H200, 2026-")
    assert half["one_gpu_ms"] == pytest.approx(2 * usual["one_gpu_ms"])


# The pictures


def test_strong_and_weak_scaling_are_drawn_light_and_dark(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    assert cli.main(["--ranks", "64", "--plot", str(tmp_path / "new")]) == 0
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == sorted(scaling.FILES)
    printed = capsys.readouterr().out
    for name in scaling.FILES:
        assert f"written to {tmp_path / 'new' / name}" in printed
        drawn = (tmp_path / "new" / name).read_text()
        root = ElementTree.fromstring(drawn)
        texts = {(node.text or "").strip() for node in root.iter()}
        assert any("over GPUs" in text for text in texts) and {"GPUs", "4k", "ulysses x ring"} <= texts
    light, dark = ((tmp_path / "new" / name).read_text() for name in scaling.FILES[:2])
    assert light != dark and "#ffffff" in light and "#14171a" in dark


@pytest.mark.parametrize("drawn", [scaling.strong, scaling.weak])
def test_every_exact_scheme_has_its_line_as_far_as_it_can_go(drawn: Callable[..., Plot]) -> None:
    axes = pytest.importorskip("matplotlib.figure").Figure().subplots()
    drawn(Workload(131072, heads=32, kv_heads=32, dim=128), Cluster(64), H200).draw(axes)
    most = {line.get_label(): line.get_xdata()[-1] for line in axes.lines}
    assert most.pop("ulysses") == 32  # as many as there are heads
    schemes = {"ring zigzag", "ring contiguous", "all-gather", "ulysses x ring", "query sharding"}
    assert most.keys() - {scaling.IDEAL} == schemes and set(most.values()) == {4096}


def test_without_matplotlib_the_plots_are_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main(["--plot", str(tmp_path / "new")]) == 2
    said = capsys.readouterr()
    assert "--plot: expected matplotlib, which draws; got none. Type: pip install matplotlib" in said.err
    assert said.out == "" and not (tmp_path / "new").exists()


# Beside measurement


def test_measure_puts_predictions_beside_virtual_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    small = "--measure --device cpu --ranks 2 --length 128 --heads 2 --dim 16 --dtype fp32".split()
    assert cli.main(small) == 0
    said = capsys.readouterr()
    assert said.err.splitlines()[:2] == ["whole calls ...", "ring contiguous ..."]
    lines = said.out.splitlines()
    assert "2 virtual ranks on this CPU, one after another" in lines[0]
    assert [line.split("  ")[0] for line in lines[2:]] == [
        "ring contiguous",
        "ring zigzag",
        "all-gather contiguous",
        "all-gather zigzag",
        "ulysses",
        "query sharding",
    ]
    assert cli.main([*small, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ranks"] == 2 and found["device"] == "this CPU"
    for one in found["schemes"]:
        assert one["ratio"] == one["measured_ms"] / one["predicted_ms"] > 0
        assert one["of_one_pass"] == one["measured_ms"] / one["single_ms"] > 0


# Refusals


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("--ranks 12", "ranks: expected whole nodes of 8 GPUs, or less than one; got 12"),
        ("--kv-heads 5", "kv_heads: expected a divisor of the 32 heads; got 5"),
        ("--length 10", "--length: expected at least two rows for each of 8 ranks; got 10"),
        ("--dtype fp32", "speed: expected a causal forward in torch.float32 among those measured"),
        ("--device cpu", "--device: expected with --measure"),
        ("--results no-such.json", "--results no-such.json: expected a results file; got No such file"),
        ("--measure --results x.json --nvlink 9", "leave out --nvlink, --results"),
        ("--plot /dev/null", "--plot /dev/null cannot be written: Not a directory"),
    ],
)
def test_what_cannot_be_predicted_is_refused_with_its_reason(
    argv: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(argv.split()) == 2
    printed = capsys.readouterr()
    assert words in printed.err and printed.out == ""


@pytest.mark.parametrize(("flag", "text"), [("--nvlink", "0"), ("--network", "fast"), ("--host-us", "-1")])
def test_numbers_that_are_none_are_refused(flag: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main([f"{flag}={text}"])
    assert left.value.code == 2
    assert f"got {text!r}" in capsys.readouterr().err
