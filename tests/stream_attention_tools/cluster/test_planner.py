"""The planner: facts about schemes that hold on any cluster, and its compute term beside virtual ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from stream_attention.base.problem import sides_of
from stream_attention.distributed.shard import LAYOUTS, positions_of, runs_of
from stream_attention.distributed.transport import VirtualRanks
from stream_attention_tools.cluster.calibrate import compare
from stream_attention_tools.cluster.planner import (
    Cluster,
    Prediction,
    assumptions,
    one_gpu_s,
    predict,
    predict_all,
    recommend,
    schemes,
    visible_tiles,
    why_not,
)
from stream_attention_tools.cluster.speed import H200
from stream_attention_tools.cluster.traffic import Scheme, Workload
from stream_attention_tools.cluster.trial import Trial

LONG = Workload(1 << 20, heads=32, kv_heads=8, dim=128)
RING, ZIGZAG = Scheme("ring"), Scheme("ring", "zigzag")
AT_ONCE = replace(H200, host_s=0.0)  # a host that takes no time


def seconds(scheme: Scheme, work: Workload, **cluster: Any) -> float:
    return predict(scheme, work, Cluster(**cluster), AT_ONCE).seconds


# What is computed


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tiles_see_as_many_pairs_as_positions_say(layout: Any, causal: bool) -> None:
    size, length = 3, 25
    runs = [runs_of(layout, length, size, rank) for rank in range(size)]
    for q_runs in runs:
        for k_runs in runs:
            q, k = positions_of(q_runs), positions_of(k_runs)
            expected = int((q[:, None] >= k[None, :]).sum()) if causal else len(q) * len(k)
            assert sum(tile.visible for tile in visible_tiles(q_runs, k_runs, sides_of(causal, None))) == expected


def test_one_rank_waits_for_nothing() -> None:
    for backward in (False, True):
        work = replace(LONG, backward=backward)
        for one in predict_all(work, Cluster(1), H200):
            assert one.waiting_s == 0 and one.sent_bytes == 0
            assert one.seconds == pytest.approx(one_gpu_s(work, H200), rel=0.01)  # a copy of its state beyond it


def test_zigzag_is_twice_as_fast_as_contiguous_where_computing_counts() -> None:
    """2 - 1/P: the last rank of P sees everything, and in balance each sees half."""
    for ranks in (8, 32):
        cluster = {"ranks": ranks, "gpus_per_node": ranks, "nvlink": 1e15}
        work = replace(LONG, length=1 << 22)
        ratio = seconds(RING, work, **cluster) / seconds(ZIGZAG, work, **cluster)
        assert ratio == pytest.approx(2 - 1 / ranks, rel=0.06)


def test_zigzag_gains_nothing_where_all_see_all() -> None:
    assert ZIGZAG not in schemes(replace(LONG, causal=False), Cluster(8))


def test_all_ranks_together_compute_about_what_one_does() -> None:
    for work in (LONG, replace(LONG, causal=False), replace(LONG, backward=True)):
        alone = one_gpu_s(work, AT_ONCE)
        for one in predict_all(work, Cluster(8), AT_ONCE):
            if one.exact:
                assert 0.97 * alone < one.work_s < 1.5 * alone  # full tiles are faster than causal ones of their size
                assert one.work_s <= 8.001 * one.compute_s


def test_star_is_cheaper_and_said_to_be_no_attention() -> None:
    (star,) = (one for one in predict_all(LONG, Cluster(64), AT_ONCE) if not one.exact)
    assert star.sent_bytes == 0 and star.waiting_s == 0
    assert star.seconds < seconds(ZIGZAG, LONG, ranks=64)


# What is sent


@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 8), (16, 16), (64, 8)])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_where_bandwidth_counts_ulysses_beats_a_ring_iff_ranks_exceed_one_and_the_group(
    heads: int, kv_heads: int, ranks: int
) -> None:
    work = Workload(1 << 16, heads, kv_heads, 128, causal=False)
    slow = {"ranks": ranks, "nvlink": 1e6, "nvlink_latency": 0.0}
    ulysses, ring = seconds(Scheme("ulysses"), work, **slow), seconds(RING, work, **slow)
    if ranks == 1 + heads // kv_heads:
        assert ulysses == pytest.approx(ring, rel=1e-3)
    else:
        assert (ulysses < ring) == (ranks > 1 + heads // kv_heads)


@pytest.mark.parametrize("backward", [False, True])
def test_no_scheme_gains_from_a_slower_link_or_loses_by_a_faster_one(backward: bool) -> None:
    work = replace(LONG, length=1 << 16, backward=backward)
    for scheme in schemes(work, Cluster(32)):
        for name, values in (
            ("nvlink", (50e9, 400e9, 900e9)),
            ("network", (5e9, 50e9, 400e9)),
            ("network_latency", (1e-3, 20e-6, 0.0)),
        ):
            slower, usual, faster = (seconds(scheme, work, ranks=32, **{name: value}) for value in values)
            assert slower >= usual >= faster


def test_a_step_takes_the_longer_of_computing_and_sending() -> None:
    work = Workload(1 << 15, 32, 8, 128)
    fast = predict(ZIGZAG, work, Cluster(8, nvlink=1e15, nvlink_latency=0.0), AT_ONCE)
    assert fast.seconds == pytest.approx(fast.compute_s)
    slow = predict(ZIGZAG, work, Cluster(8, nvlink=1e6, nvlink_latency=0.0), AT_ONCE)
    last = fast.phases[-1].compute_s
    assert slow.seconds == pytest.approx(slow.sent_bytes / 1e6 + last)  # the last step sends nothing


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_phases_send_the_bytes_of_the_formula(ranks: int) -> None:
    """On a link without latency, what all phases send by its bandwidth is what the formula counts."""
    cluster = Cluster(ranks, nvlink=1e9, nvlink_latency=0.0)
    work = Workload(ranks * 64, 16, 8, 64, causal=False, backward=True)
    for scheme in schemes(work, cluster):
        one = predict(scheme, work, cluster, AT_ONCE)
        phases = sum(phase.times * phase.send_s for phase in one.phases) * 1e9
        assert phases == pytest.approx(one.sent_bytes, rel=1e-6), scheme


def test_rings_over_nodes_are_as_fast_as_the_network_and_heads_stay_in_a_node() -> None:
    slow = {"ranks": 64, "network": 1e9, "network_latency": 0.0, "nvlink_latency": 0.0}
    work = replace(LONG, length=1 << 17)
    flat, deep = seconds(ZIGZAG, work, **slow), seconds(Scheme("ulysses", "zigzag", 8), work, **slow)
    assert flat > 6 * deep  # of the ring's 63 hops at the network's speed, 7 are left


def test_memory_is_about_what_virtual_ranks_hold() -> None:
    for backward in (False, True):
        work = Workload(256, 8, 4, 32, backward=backward)
        for scheme in (ZIGZAG, Scheme("allgather", "zigzag"), Scheme("ulysses"), Scheme("query")):
            predicted = predict(scheme, work, Cluster(4), H200).memory_bytes
            held = Trial(scheme, work, VirtualRanks(4), torch.device("cpu")).measure(1).memory_bytes
            assert held / 2 < predicted < 2 * held, (scheme, backward, predicted / held)


# What is recommended


def test_the_fastest_exact_scheme_over_shards_is_recommended_with_its_reason() -> None:
    for work in (LONG, replace(LONG, backward=True), replace(LONG, causal=False)):
        found = predict_all(work, Cluster(64), H200)
        chosen, reason = recommend(found, H200)
        assert chosen.exact and chosen.sharded
        assert all(chosen.seconds <= 1.01 * one.seconds for one in found if one.exact and one.sharded)
        assert "of the others " in reason and "x as long: it computes" in reason


def test_what_does_not_fit_is_not_recommended() -> None:
    found = predict_all(LONG, Cluster(8), H200)
    by_size = sorted(one.memory_bytes for one in found if one.exact and one.sharded)
    small = replace(H200, memory_bytes=by_size[0])
    chosen, reason = recommend(found, small)
    assert chosen.memory_bytes == by_size[0]
    assert "more memory than the GPU has: " in reason


def test_calls_too_small_for_the_gpu_are_the_hosts() -> None:
    one = predict(ZIGZAG, LONG, Cluster(4096), H200)
    assert isinstance(one, Prediction) and one.kernel_s < one.compute_s / 2
    assert "is the host's" in recommend([one], H200).reason


def test_assumptions_say_what_stands_for_what() -> None:
    assert not any("stands for" in line for line in assumptions(LONG, H200))
    assert any("stands for head dim 96" in line for line in assumptions(replace(LONG, dim=96), H200))


def test_four_thousand_gpus_are_planned_in_a_moment() -> None:
    found = predict_all(replace(LONG, backward=True), Cluster(4096), H200)
    assert {one.scheme.name for one in found} == {"ring", "allgather", "ulysses", "query"}


# The compute term beside measurement


FACTOR = 2.0
"""Whole calls, from which it is predicted, do what tiles and merges do up to this: a CPU whose other core is busy."""


@pytest.mark.serial  # it measures
def test_predicted_computing_is_that_of_virtual_ranks() -> None:
    work = Workload(1536, 4, 4, 64, dtype=torch.float32)
    only = (RING, ZIGZAG, Scheme("ulysses"), Scheme("query"))
    for _ in range(3):  # the machine is shared: a disturbed turn is not the planner's
        _, found = compare(work, 4, torch.device("cpu"), only=only, rounds=2)
        ratios = {str(one.scheme): one.ratio for one in found}
        if all(1 / FACTOR < ratio < FACTOR for ratio in ratios.values()):
            break
    assert all(1 / FACTOR < ratio < FACTOR for ratio in ratios.values()), ratios


# Refusals


@pytest.mark.parametrize(
    ("scheme", "work", "ranks", "words"),
    [
        (Scheme("ulysses"), LONG, 64, "32 heads cannot be divided among 64 ranks"),
        (Scheme("ulysses", "zigzag", 3), LONG, 8, "a ring of 3 does not divide 8 ranks"),
        (Scheme("star"), replace(LONG, causal=False), 8, "encodes a causal context"),
        (Scheme("star"), replace(LONG, backward=True), 8, "has no backward"),
        (RING, replace(LONG, length=15), 8, "15 rows are less than two for each of 8 ranks"),
    ],
)
def test_a_scheme_that_cannot_says_why(scheme: Scheme, work: Workload, ranks: int, words: str) -> None:
    reason = why_not(scheme, work, Cluster(ranks))
    assert reason is not None and words in reason
    with pytest.raises(ValueError, match=words):
        predict(scheme, work, Cluster(ranks), H200)
    assert scheme not in schemes(work, Cluster(ranks))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"ranks": 0}, "ranks: expected at least 1"),
        ({"ranks": 12}, "ranks: expected whole nodes of 8 GPUs"),
        ({"ranks": 8, "network": 0.0}, "network: expected a positive number of bytes per second"),
        ({"ranks": 8, "nvlink_latency": -1.0}, "nvlink_latency: expected a number of seconds of at least 0"),
    ],
)
def test_a_cluster_that_is_none_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Cluster(**given)


def test_nothing_to_choose_from_is_refused() -> None:
    star = [one for one in predict_all(LONG, Cluster(8), H200) if not one.exact]
    with pytest.raises(ValueError, match="predictions: expected some of exact schemes"):
        recommend(star, H200)
