"""Queries divided among ranks that have everything: the function, the fused module, and flash_attention."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attention.kernels import flash_attention
from stream_attention import FusedOnlineAttention, attention
from stream_attention.distributed import Recorder, VirtualRanks
from stream_attention.distributed.query_shard import _QuerySharding, query_sharded_attention
from stream_attention.distributed.shard_attention import Attention
from stream_attention_tools.testing import Case, check_case, tolerance

SRC = Path(__file__).parents[2] / "src"
BF16, F64 = torch.bfloat16, torch.float64


def on_ranks(size: int) -> Callable[..., tuple[Tensor, Tensor]]:
    """A call of `attention` as ranks compute it together, each with copies; gradients are those of rank 0's."""
    group = VirtualRanks(size)

    def copies(t: Tensor) -> list[Tensor]:
        return [t, *(t.detach().clone().requires_grad_(t.requires_grad) for _ in range(size - 1))]

    def the_same(results: list[Tensor]) -> Tensor:
        """Rank 0's, behind which the same gradient arrives at all ranks."""
        for other in results[1:]:
            assert torch.equal(other, results[0])
        finite = [torch.where(r == -torch.inf, 0.0, r) for r in results[1:]]
        return results[0] + sum(other - other.detach() for other in finite) if finite else results[0]

    def run(case: Case, tensors: dict[str, Tensor], options: dict[str, Any], backend: str, config: None) -> Any:
        everything = {name: copies(t) if isinstance(t, Tensor) else t for name, t in (options | tensors).items()}
        outs, lses = query_sharded_attention(**everything, group=group, return_lse=True, backend=backend)
        return the_same(outs), the_same(lses)

    return run


def drawn(*shape: int, dtype: torch.dtype = F64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=F64).to(dtype) for _ in range(3)]


# Agreement with the reference, under the tolerance that one device earns

CASES = {
    "causal": Case(Tq=37, Tk=37, causal=True),
    "non-causal": Case(B=2, Tq=37, Tk=37, Hq=4, Hkv=2, Dv=8),
    "local queries, global keys": Case(Tq=16, Tk=61, causal=True, lse_grad=True),
    "more queries than keys": Case(Tq=34, Tk=21, causal=True),
    "window": Case(Tq=40, Tk=40, window=(3, 6)),
    "fewer queries than ranks": Case(Tq=2, Tk=9, causal=True),
    "no query": Case(Tq=0, Tk=9),
    "no key": Case(Tq=9, Tk=0),
    "dropout draws the mask of one device": Case(B=2, Tq=29, Tk=29, causal=True, dropout_p=0.3),
    "mask": Case(B=2, Tq=23, Tk=23, mask=(2, 1, 23, 23), causal=True),
    "bias of rows": Case(B=2, Tq=23, Tk=23, bias=(2, 23, 23), bias_hides=True),
    "everything": Case(
        B=2,
        Tq=27,
        Tk=31,
        Hq=4,
        causal=True,
        window=(17, -1),
        mask=(1, 4, 27, 31),
        bias=(2, 1, 1, 31),
        alibi="BH",
        sink=True,
        softcap=3.0,
        dropout_p=0.2,
        lse_grad=True,
    ),
    "bf16": Case(Tq=37, Tk=37, Hq=4, causal=True, dtype=BF16),
    "fp16, whose gradients stay fp16": Case(Tq=37, Tk=37, causal=True, dtype=torch.float16),
    "not contiguous": Case(B=2, Tq=26, Tk=26, causal=True, layout="strided", mask=(2, 1, 26, 26)),
}


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("name", CASES)
def test_every_rank_has_what_one_device_has(name: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tolerance, "run", on_ranks(size))
    check_case(CASES[name], "eager")


def test_causal_work_is_in_balance() -> None:
    """Of 32 rows in chunks of 4, rank r has chunks r and 7 - r; each rank's rows see as many keys as any other's."""
    for sides, wanted in (((-1, 0), {132}), ((-1, -1), {36, 100, 164, 228})):
        sharding = _QuerySharding(Attention(sides, 0.0, {}), 32, 32, 4, return_lse=False)
        seen = {sum(run.start + i + 1 for run in runs for i in range(run.length)) for runs in sharding.runs}
        assert seen == wanted


def test_bytes_are_the_formula() -> None:
    """A rank sends its rows of the output to all others; back, those of the gradient, and keys' and values' in fp32."""
    size, batch, length, heads, dim = 4, 2, 16, 2, 8
    recorder = Recorder()
    copies = [
        [t.requires_grad_()] + [t.detach().clone().requires_grad_() for _ in range(3)]
        for t in drawn(batch, length, heads, dim, dtype=BF16)
    ]
    outs = query_sharded_attention(*copies, group=VirtualRanks(size, recorder=recorder), causal=True)
    numbers = batch * length * heads * dim
    for rank in range(size):
        assert recorder.bytes_sent(rank) == (size - 1) * numbers // size * 2
    recorder.entries.clear()
    torch.stack([out.float().sum() for out in outs]).sum().backward()
    for rank in range(size):
        assert recorder.bytes_sent(rank) == (size - 1) * numbers // size * (2 + 2 * 2 * 4)
        assert recorder.kinds(rank) == recorder.kinds(0)


def test_a_rank_alone_says_nothing_and_is_given_tensors() -> None:
    recorder = Recorder()
    query, key, value = drawn(2, 9, 2, 8)
    out = query_sharded_attention(query, key, value, group=VirtualRanks(1, recorder=recorder), causal=True)
    assert torch.equal(out, attention(query, key, value, causal=True)) and recorder.entries == {}


def test_bad_calls_are_refused() -> None:
    tensors, group = [[t] * 2 for t in drawn(1, 6, 2, 8)], VirtualRanks(2)
    with pytest.raises(ValueError, match="backend: expected one that computes partial states; got 'reference'"):
        query_sharded_attention(*tensors, group=group, backend="reference")
    with pytest.raises(ValueError, match="query: expected one tensor for each of the 2 ranks"):
        query_sharded_attention(tensors[0][:1], *tensors[1:], group=group)
    with pytest.raises(ValueError, match="dropout_p: expected a probability"):
        query_sharded_attention(*tensors, group=group, dropout_p=1.0)


# On processes: the fused module and the 2-D function, as users know them

ranks = pytest.mark.xdist_group("ranks")


def fused(length: int, distributed: bool, process_group: Any = None, seed: int | None = None) -> list[Tensor]:
    """The module's output, LSE and gradients, with dropout and a mask."""
    attend = FusedOnlineAttention(num_heads=2, head_dim=8, dropout=0.25)
    attend.set_deterministic(True, seed=7 if seed is None else seed)
    attend.set_distributed(distributed, process_group)
    leaves = [t.requires_grad_() for t in drawn(2, length, 2, 8)]
    mask = torch.arange(length) != 1
    out, lse = attend(*leaves, return_lse=True, attention_mask=mask.expand(2, length))
    return [out.detach(), lse.detach(), *torch.autograd.grad(out.square().sum() + lse.sum(), leaves)]


def fused_on_a_rank(rank: int, groups: Any, group: str, length: int) -> list[Tensor]:
    """Seeds differ, and rank 0's is everyone's."""
    import torch.distributed as dist

    return fused(length, True, groups[group], seed=7 + dist.get_rank(groups[group]))


@ranks
@pytest.mark.parametrize(("group", "members"), [("world", None), ("odd", (1, 3))])
@pytest.mark.parametrize("length", [12, 13, 3])
def test_the_fused_module_divides_queries_and_gathers_the_result(
    pool: Any, group: str, members: Any, length: int
) -> None:
    """A rank's causal rows stand where they stand, no length has to be divisible, and every rank has everything."""
    expected = fused(length, False)
    for found in pool.results(fused_on_a_rank, members, group=group, length=length):
        for one, two in zip(found, expected, strict=True):
            torch.testing.assert_close(one, two)


def differing(rank: int, groups: Any, what: str) -> Any:
    query, key, value = drawn(1, 6 if what == "query" and rank == 2 else 5, 2, 8)
    if what == "value" and rank == 2:
        value.requires_grad_()
    sink = torch.zeros(2, dtype=BF16 if what == "sink" and rank == 2 else query.dtype)
    here = rank == 2
    options: dict[str, Any] = {"return_lse": what == "return_lse" and here, "causal": what == "causal" and here}
    return query_sharded_attention(query, key[:, :5], value[:, :5], sink=sink, **options)


@ranks
@pytest.mark.parametrize("what", ["query", "value", "sink", "return_lse", "causal"])
def test_ranks_that_differ_are_told_at_once(pool: Any, what: str) -> None:
    """By a shape, a gradient that is wanted, a dtype, an option."""
    for reply in pool.run(differing, what=what):
        assert f"ValueError: {what}: expected the same on all 4 ranks" in reply.error
        assert reply.seconds < 5


def fused_alone(rank: int, groups: Any) -> Tensor:
    attend = FusedOnlineAttention(num_heads=2, head_dim=8)
    return attend(*(t + rank for t in drawn(1, 5, 2, 8)))


@ranks
def test_a_module_that_was_not_asked_computes_alone(pool: Any) -> None:
    """As under DistributedDataParallel, where ranks have batches of their own."""
    for rank, out in enumerate(pool.results(fused_alone)):
        torch.testing.assert_close(out, attention(*(t + rank for t in drawn(1, 5, 2, 8)), causal=True))


def two_dims(rank: int, groups: Any, causal: bool) -> list[Tensor]:
    Q, K, V = (t[0, :, 0].requires_grad_() for t in drawn(1, 11, 1, 8))
    out = flash_attention(Q[:7], K, V, causal=causal, enable_distributed=True)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), (Q, K, V))]


@ranks
@pytest.mark.parametrize("causal", [False, True])
def test_flash_attention_divides_queries_and_gathers_the_result(pool: Any, causal: bool) -> None:
    Q, K, V = (t[0, :, 0].requires_grad_() for t in drawn(1, 11, 1, 8))
    out = flash_attention(Q[:7], K, V, causal=causal)
    expected = [out.detach(), *torch.autograd.grad(out.square().sum(), (Q, K, V))]
    for found in pool.results(two_dims, causal=causal):
        for one, two in zip(found, expected, strict=True):
            torch.testing.assert_close(one, two)


def test_under_torchrun(tmp_path: Path) -> None:
    """The script of the documentation: queries of one matrix, started by torchrun, the whole result on every rank."""
    script = tmp_path / "script.py"
    script.write_text(
        "import torch, torch.distributed as dist\n"
        "from flash_attention.kernels import flash_attention\n"
        "from stream_attention.distributed import initialize\n"
        "initialize()\n"
        "torch.manual_seed(0)\n"
        "Q, K, V = torch.randn(3, 33, 16)\n"
        "O = flash_attention(Q, K, V, causal=True, enable_distributed=True)\n"
        "assert torch.allclose(O, flash_attention(Q, K, V, causal=True), atol=1e-6)\n"
        "print(f'rank {dist.get_rank()} of {dist.get_world_size()} {list(O.shape)}\\n', end='', flush=True)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["rank 0 of 2 [33, 16]", "rank 1 of 2 [33, 16]"]


def test_what_was_launched_but_not_initialised_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    attend = FusedOnlineAttention(num_heads=2, head_dim=8)
    attend.set_distributed(True)
    for call in (attend, lambda *t: flash_attention(*(x[0, :, 0] for x in t), enable_distributed=True)):
        with pytest.raises(ValueError, match=r"group: expected a process group of the 2 processes.*initialize\(\)"):
            call(*drawn(1, 5, 2, 8))
