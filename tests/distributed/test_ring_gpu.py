"""ring_attention() on GPUs: virtual ranks with the real kernels, gloo with CUDA tensors, NCCL between GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from stream_attention.backends.reference import attention as reference
from stream_attention.distributed import (
    Processes,
    Recorder,
    VirtualRanks,
    initialize,
    ring_attention,
    shard_sequence,
)
from stream_attention.distributed.shard import LAYOUTS
from stream_attention_tools.testing import Case

pytestmark = [pytest.mark.gpu, pytest.mark.xdist_group("ranks")]

BF16 = torch.bfloat16


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_virtual_ranks_with_the_real_kernels(layout: str, size: int, check_on_ring: Any) -> None:
    shapes: dict[str, Any] = {
        "Tq": 515,
        "Tk": 515,
        "Hq": 4,
        "Hkv": 2,
        "D": 64,
        "Dv": 64,
        "dtype": BF16,
        "device": "cuda",
    }
    for options in ({"causal": True}, {"window": (130, 40)}, {"causal": True, "dropout_p": 0.2, "alibi": "H"}):
        check_on_ring(Case(**shapes, **options), size, layout, "p2p", "auto")


def step(transport: Any, layout: Any, rotate: Any) -> list[list[Tensor]]:
    """For each rank of this process, its output and the gradients of its shards."""
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(1, 301, heads, 64, generator=generator).to("cuda", BF16) for heads in (4, 2, 2)]
    shards = [shard_sequence(t, group=transport, layout=layout) for t in drawn]
    leaves = [[t.detach().requires_grad_() for t in (one if isinstance(one, list) else [one])] for one in shards]
    given = leaves if isinstance(transport, VirtualRanks) else [one[0] for one in leaves]
    outs = ring_attention(*given, group=transport, layout=layout, rotate=rotate, causal=True, deterministic=True)
    outs = [outs] if isinstance(outs, Tensor) else outs
    torch.stack([out.float().square().sum() for out in outs]).sum().backward()
    return [[out.detach(), *(t.grad for t in mine)] for out, *mine in zip(outs, *leaves, strict=True)]


def on_a_process(rank: int, groups: Any, group: str, layout: str, rotate: str) -> tuple[Any, Any]:
    transport = Processes(groups[group], recorder=Recorder())
    (found,) = step(transport, layout, rotate)
    assert transport.recorder is not None
    return [t.cpu() for t in found], transport.recorder.entries[transport.rank]


def check(pool: Any, group: str, members: tuple[int, ...], layout: str, rotate: str) -> None:
    recorder = Recorder()
    expected = step(VirtualRanks(len(members), recorder=recorder), layout, rotate)
    for rank, (found, entries) in enumerate(
        pool.results(on_a_process, members, group=group, layout=layout, rotate=rotate)
    ):
        assert all(torch.equal(one, two.cpu()) for one, two in zip(found, expected[rank], strict=True))
        assert entries == recorder.entries[rank]


@pytest.fixture(scope="module")
def on_one_gpu(pool: Any) -> Iterator[Any]:
    """Four processes on gloo whose tensors are all on the first GPU."""
    ranks = type(pool)(4, {"pair": (0, 1)}, timeout_s=60.0, gpus=True)
    yield ranks
    ranks.close()


@pytest.mark.parametrize(("group", "members"), [("world", (0, 1, 2, 3)), ("pair", (0, 1))])
@pytest.mark.parametrize("rotate", ["p2p", "allgather"])
def test_gloo_carries_cuda_tensors_through_pinned_memory(
    on_one_gpu: Any, group: str, members: tuple[int, ...], rotate: str
) -> None:
    check(on_one_gpu, group, members, "zigzag", rotate)


def test_nccl_with_one_rank_never_communicates(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29671")):
        monkeypatch.setenv(name, value)
    initialize("nccl")
    try:
        recorder = Recorder()
        (found,) = step(Processes(recorder=recorder), "zigzag", "p2p")
        assert recorder.entries == {}
        (expected,) = step(VirtualRanks(1), "zigzag", "p2p")
        assert all(torch.equal(one, two) for one, two in zip(found, expected, strict=True))
    finally:
        dist.destroy_process_group()


@pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="NCCL wants a GPU for each rank, and there are fewer than two"
)
@pytest.mark.parametrize("rotate", ["p2p", "alltoall", "allgather"])
def test_nccl_between_gpus(pool: Any, rotate: str) -> None:
    size = min(torch.cuda.device_count(), 4)
    ranks = type(pool)(size, timeout_s=60.0, backend="nccl", gpus=True)
    try:
        check(ranks, "world", tuple(range(size)), "zigzag", rotate)
    finally:
        ranks.close()


def test_errors_do_not_grow_with_the_ring() -> None:
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(1, 2048, heads, 64, generator=generator).to("cuda", BF16) for heads in (4, 2, 2)]
    exact = reference.attention(*(t.double() for t in drawn), causal=True)[0]
    wrong = []
    for size in (1, 2, 4, 8):
        group = VirtualRanks(size)
        shards = [shard_sequence(t, group=group, layout="zigzag") for t in drawn]
        outs = ring_attention(*shards, group=group, layout="zigzag", causal=True)
        truths = shard_sequence(exact, group=group, layout="zigzag")
        wrong.append(
            torch.cat([out.double() - truth for out, truth in zip(outs, truths, strict=True)], 1).square().mean()
        )
    assert all(error <= 1.1**2 * wrong[0] for error in wrong)
