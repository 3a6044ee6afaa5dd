"""A device's speed: what is measured is given back, and what is between it lies between."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from stream_attention_tools.bench.results import load
from stream_attention_tools.cluster.speed import H200, Curve, Tile, from_results

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results" / "h200"
BF16 = torch.bfloat16
SHAPE: dict[str, Any] = {"dtype": BF16, "dim": 128, "batch": 1, "heads": 16}


def test_a_measured_call_takes_what_was_measured() -> None:
    length = 16384
    full = H200.kernel_s("forward", Tile(length, length, length**2), **SHAPE)
    assert full == pytest.approx(2.990e-3, rel=0.01)
    causal = H200.kernel_s("forward", Tile(length, length, length * (length + 1) // 2), **SHAPE)
    assert causal == pytest.approx(1.508e-3, rel=0.01)
    backward = H200.kernel_s("backward", Tile(length, length, length**2), **SHAPE)
    assert backward == pytest.approx(8.580e-3, rel=0.01)


def test_the_table_is_that_of_the_results() -> None:
    """A remeasurement that moves a rate by more than 5 % is written into the table."""
    found = from_results([load(RESULTS / f"{name}.json") for name in ("forward", "backward")], like=H200)
    assert found.name == H200.name and found.num_sms == H200.num_sms
    assert found.memory_bytes == pytest.approx(H200.memory_bytes)
    assert set(found.rates) == set(H200.rates)
    for curve, points in found.rates.items():
        assert [length for length, _ in points] == [length for length, _ in H200.rates[curve]]
        for (_, new), (_, old) in zip(points, H200.rates[curve], strict=True):
            assert new == pytest.approx(old, rel=0.05), curve


def test_between_two_lengths_the_rate_lies_between_and_beyond_them_it_is_bounded() -> None:
    curve = Curve("forward", BF16, True, 128)
    points = dict(H200.rates[curve])
    assert points[2048] < H200.rate(curve, 3000) < points[4096]
    assert H200.rate(curve, 10**6) == points[16384]
    assert H200.rate(curve, 256) == points[512] / 2  # a row costs as much as one of 512


def test_a_gpu_that_is_not_filled_is_slower_in_proportion() -> None:
    few = H200.kernel_s("forward", Tile(128, 4096, 128 * 4096), **SHAPE | {"heads": 33})
    enough = H200.kernel_s("forward", Tile(512, 4096, 512 * 4096), **SHAPE | {"heads": 33})
    assert few == pytest.approx(enough)


def test_what_sees_nothing_takes_no_time() -> None:
    assert H200.kernel_s("forward", Tile(128, 128, 0), **SHAPE) == 0


def test_the_nearest_measurement_stands_for_another_and_says_so() -> None:
    told = H200.stands_for(Curve("forward", torch.float16, False, 112))
    assert told == "head dim 128 in torch.bfloat16 stands for head dim 112 in torch.float16"
    assert H200.stands_for(Curve("forward", BF16, False, 128)) is None
    with pytest.raises(ValueError, match=r"a full forward in torch.float32 among those measured; got backward in"):
        H200.rate(Curve("forward", torch.float32, False, 128), 1024)


def test_results_that_say_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="results: expected dense calls of ours"):
        from_results([load(RESULTS / "decode.json")], like=H200)
    forward = load(RESULTS / "forward.json")
    other = forward | {"machine": forward["machine"] | {"name": "another"}}
    with pytest.raises(ValueError, match="files of one machine; got NVIDIA H200, another"):
        from_results([forward, other], like=H200)
