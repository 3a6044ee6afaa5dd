"""ulysses_attention(), also inside a ring, on virtual ranks and on processes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from stream_attention import attention
from stream_attention.backends.reference import attention as reference
from stream_attention.distributed import (
    CommunicationError,
    Processes,
    Recorder,
    VirtualRanks,
    shard_sequence,
    unshard_sequence,
)
from stream_attention.distributed.ulysses import ulysses_attention
from stream_attention_tools.testing import Case

BF16, F64 = torch.bfloat16, torch.float64


@pytest.fixture
def check_on_ulysses(check_on_ranks: Callable[..., None]) -> Callable[[Case, int, int, str], None]:
    def check(case: Case, size: int, ring_size: int, layout: str) -> None:
        check_on_ranks(partial(ulysses_attention, ring_size=ring_size), case, size, layout, "eager")

    return check


def shards_of(group: VirtualRanks, layout: Any, *tensors: Tensor) -> list[list[Tensor]]:
    return [shard_sequence(t, group=group, layout=layout) for t in tensors]


def drawn(*shape: int, dtype: torch.dtype = F64, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=F64).to(dtype).requires_grad_() for _ in range(3)]


# Agreement with the reference, under the tolerance that one device earns

CASES = {
    "causal": Case(Tq=37, Tk=37, Hq=8, Hkv=8, D=8, Dv=8, causal=True),
    "non-causal": Case(Tq=37, Tk=37, Hq=8, Hkv=8, D=8, Dv=8),
    "grouped heads, Dv != Dk": Case(B=2, Tq=25, Tk=25, Hq=16, Hkv=8, D=8, Dv=12, causal=True, lse_grad=True),
    "KV heads that several ranks read": Case(Tq=25, Tk=25, Hq=8, Hkv=2, D=8, Dv=8, causal=True),
    "one KV head": Case(Tq=19, Tk=19, Hq=8, Hkv=1, D=8, Dv=8),
    "heads that no number of ranks divides": Case(B=2, Tq=19, Tk=19, Hq=9, Hkv=3, D=8, Dv=8, causal=True),
    "groups of heads cut between ranks": Case(Tq=19, Tk=19, Hq=10, Hkv=5, D=8, Dv=8, lse_grad=True),
    "window": Case(Tq=40, Tk=40, Hq=8, Hkv=8, D=8, Dv=8, causal=True, window=(5, 0)),
    "more keys than queries": Case(Tq=21, Tk=34, Hq=8, Hkv=4, D=8, Dv=8, causal=True),
    "fewer tokens than ranks": Case(Tq=3, Tk=3, Hq=8, Hkv=8, D=8, Dv=8, causal=True, lse_grad=True),
    "no token": Case(Tq=0, Tk=0, Hq=8, Hkv=8, D=8, Dv=8),
    "dropout draws the mask of one device": Case(B=2, Tq=21, Tk=21, Hq=8, Hkv=4, D=8, Dv=8, causal=True, dropout_p=0.3),
    "slopes of a batch": Case(B=2, Tq=21, Tk=21, Hq=8, Hkv=8, D=8, Dv=8, causal=True, alibi="BH", dropout_p=0.2),
    "softcap and sink": Case(Tq=29, Tk=29, Hq=8, Hkv=8, D=8, Dv=8, causal=True, softcap=2.0, sink=True, lse_grad=True),
    "mask of a head each": Case(B=2, Tq=23, Tk=23, Hq=8, Hkv=8, D=8, Dv=8, mask=(2, 8, 23, 23), causal=True),
    "padding": Case(B=2, Tq=23, Tk=23, Hq=8, Hkv=8, D=8, Dv=8, mask=(2, 1, 1, 23)),
    "bias of rows": Case(B=2, Tq=23, Tk=23, Hq=8, Hkv=8, D=8, Dv=8, bias=(2, 1, 23, 23), bias_hides=True),
    "bias of heads": Case(Tq=23, Tk=23, Hq=8, Hkv=8, D=8, Dv=8, bias=(8, 1, 23), causal=True, aux_dtype=torch.float32),
    "everything": Case(
        B=2, Tq=27, Tk=31, Hq=8, Hkv=2, D=8, Dv=8, causal=True, window=(17, -1), mask=(1, 8, 27, 31),
        bias=(2, 1, 27, 31), alibi="H", sink=True, softcap=3.0, dropout_p=0.2, lse_grad=True,
    ),
    "not contiguous": Case(B=2, Tq=26, Tk=26, Hq=8, Hkv=8, D=8, Dv=8, layout="strided", mask=(2, 1, 26, 26)),
    "heads first": Case(B=2, Tq=26, Tk=26, Hq=8, Hkv=8, D=8, Dv=8, causal=True, layout="heads_first"),
    "bf16": Case(Tq=37, Tk=37, Hq=8, Hkv=4, D=8, Dv=8, causal=True, dtype=BF16),
    "fp16, whose gradients stay fp16": Case(Tq=37, Tk=37, Hq=8, Hkv=2, D=8, Dv=8, causal=True, dtype=torch.float16),
    "packed": Case(lengths_q=(5, 0, 17, 1, 9), lengths_k=(5, 0, 17, 1, 9), Hq=8, Hkv=4, D=8, Dv=8, causal=True),
    "packed, everything": Case(
        lengths_q=(7, 13, 4), lengths_k=(7, 13, 4), tail=3, Hq=8, Hkv=8, D=8, Dv=8, window=(6, 2), alibi="BH",
        sink=True, dropout_p=0.2, lse_grad=True,
    ),
}  # fmt: skip
DEALS = ((3, 1), (4, 2), (8, 1), (2, 1), (8, 2), (1, 1), (8, 4), (4, 1))
"""(ranks, of which in a ring)."""


@pytest.mark.parametrize("name", CASES)
def test_ranks_are_as_exact_as_one_device(name: str, check_on_ulysses: Any) -> None:
    case, number = CASES[name], list(CASES).index(name)
    for turn, layout in enumerate(("contiguous", "zigzag", "striped")):
        size, ring_size = DEALS[(number + 3 * turn) % len(DEALS)]
        if case.dropout_p and case.Hq % (size // ring_size):
            size, ring_size = 4, 2
        check_on_ulysses(case, size, 1 if layout == "striped" else ring_size, layout)


@pytest.mark.parametrize(("size", "ring_size"), DEALS)
def test_every_number_of_ranks_forward_and_backward(size: int, ring_size: int, check_on_ulysses: Any) -> None:
    for layout in ("contiguous", "zigzag"):
        case = Case(Tq=43, Tk=43, Hq=8, Hkv=4, D=8, Dv=8, causal=True, dtype=BF16, lse_grad=True)
        check_on_ulysses(case, size, ring_size, layout)


def errors(size: int, ring_size: int) -> dict[str, float]:
    """Largest error against fp64 of bf16 results, by name; U = 4 and 8 ranks read a KV head of two."""
    generator = torch.Generator().manual_seed(0)
    query, key, value, grad = (torch.randn(1, 96, heads, 32, generator=generator).to(BF16) for heads in (8, 2, 2, 8))
    exact_leaves = [t.double().requires_grad_() for t in (query, key, value)]
    exact = reference.attention(*exact_leaves, causal=True)[0]
    leaves, group = [t.requires_grad_() for t in (query, key, value)], VirtualRanks(size)
    shards = shards_of(group, "zigzag", *leaves)
    outs = ulysses_attention(*shards, group=group, ring_size=ring_size, layout="zigzag", causal=True)
    out = unshard_sequence(outs, group=group, layout="zigzag")[0]
    truths = exact, *torch.autograd.grad(exact, exact_leaves, grad.double())
    results = out, *torch.autograd.grad(out, leaves, grad)
    names = ("out", "d_query", "d_key", "d_value")
    return {
        name: (result.double() - truth).abs().max().item()
        for name, result, truth in zip(names, results, truths, strict=True)
    }


def test_errors_do_not_grow_with_the_ranks() -> None:
    """Gradients of a KV head that several ranks read, rounded to bf16 by each, would be 1.5 times as wrong."""
    alone = errors(1, 1)
    for size, ring_size in ((2, 1), (4, 1), (8, 1), (4, 2), (8, 2), (8, 4)):
        for name, largest in errors(size, ring_size).items():
            assert largest <= 1.1 * alone[name], (size, ring_size, name)


# What other libraries' users report


def test_scores_hundreds_apart_do_not_overflow() -> None:
    query, key, value = (t.detach().float() for t in drawn(1, 24, 4, 8))
    key[:, :6], key[:, 12:18] = key[:, :6] * 90, key[:, 12:18] * -300
    group = VirtualRanks(4)
    outs = ulysses_attention(*shards_of(group, "contiguous", query, key, value), group=group, ring_size=2)
    exact, exact_lse = reference.attention(query, key, value)
    assert exact_lse.max() - exact_lse.min() > 200
    torch.testing.assert_close(torch.cat(outs, 1).double(), exact, rtol=1e-4, atol=1e-4)


def test_contiguous_shards_of_any_lengths() -> None:
    lengths, group = [7, 0, 1, 12], VirtualRanks(4)
    query, key, value = drawn(1, 20, 4, 8)
    for ring_size in (1, 2):
        expected = attention(query, key, value, causal=True)
        shards = [list(t.split(lengths, dim=1)) for t in (query, key, value)]
        outs = ulysses_attention(*shards, group=group, ring_size=ring_size, causal=True)
        assert [out.shape[1] for out in outs] == lengths
        torch.testing.assert_close(torch.cat(outs, 1), expected)
        found = torch.autograd.grad(torch.cat(outs, 1).square().sum(), (query, key, value))
        torch.testing.assert_close(found, torch.autograd.grad(expected.square().sum(), (query, key, value)))


def test_a_mask_of_one_row_per_rank_is_not_one_for_all_rows() -> None:
    query, key, value = drawn(1, 4, 4, 8)
    rows = torch.tril(torch.ones(4, 4, dtype=torch.bool))
    group = VirtualRanks(4)
    shards = shards_of(group, "contiguous", query, key, value)
    outs = ulysses_attention(*shards, group=group, mask=list(rows[None, None].split(1, dim=2)))
    torch.testing.assert_close(torch.cat(outs, 1), attention(query, key, value, causal=True))
    same = torch.tensor([True, False, True, True])
    outs = ulysses_attention(*shards, group=group, mask=[same] * 4)
    torch.testing.assert_close(torch.cat(outs, 1), attention(query, key, value, mask=same))


def test_one_row_of_a_mask_beside_rows_of_it_on_other_ranks_is_its_row() -> None:
    query, key, value = drawn(1, 5, 4, 8)
    rows, group = torch.tril(torch.ones(5, 5, dtype=torch.bool))[None, None], VirtualRanks(3)
    shards = [list(t.split([1, 3, 1], dim=1)) for t in (query, key, value)]
    outs = ulysses_attention(*shards, group=group, mask=list(rows.split([1, 3, 1], dim=2)))
    torch.testing.assert_close(torch.cat(outs, 1), attention(query, key, value, causal=True))


@pytest.mark.parametrize("ring_size", [1, 2])
def test_a_gradient_of_one_ranks_output_reaches_all_shards(ring_size: int) -> None:
    query, key, value = drawn(1, 16, 4, 8)
    group = VirtualRanks(4)
    outs = ulysses_attention(*shards_of(group, "contiguous", query, key, value), group=group, ring_size=ring_size)
    found = torch.autograd.grad(outs[2].sum(), (query, key, value))
    expected = torch.autograd.grad(attention(query, key, value)[:, 8:12].sum(), (query, key, value))
    torch.testing.assert_close(found, expected)


def test_gradients_agree_with_differences() -> None:
    group = VirtualRanks(4)
    query, key, value = (t[:, :5] for t in drawn(1, 5, 2, 3))
    slopes = torch.rand(2, dtype=F64).requires_grad_()

    def ranks(query: Tensor, key: Tensor, value: Tensor, slopes: Tensor) -> tuple[Tensor, Tensor]:
        shards = shards_of(group, "zigzag", query, key, value)
        options: dict[str, Any] = {"group": group, "ring_size": 2, "layout": "zigzag", "causal": True}
        outs, lses = ulysses_attention(*shards, **options, alibi_slopes=slopes, return_lse=True)
        out = unshard_sequence(outs, group=group, layout="zigzag")[0]
        return out, unshard_sequence(lses, group=group, layout="zigzag", dim=2)[0]

    assert torch.autograd.gradcheck(ranks, (query, key, value, slopes))


def test_only_the_keys_want_a_gradient() -> None:
    query, key, value = (t.detach() for t in drawn(1, 12, 4, 8))
    group, key = VirtualRanks(3), key.requires_grad_()
    outs = ulysses_attention(*shards_of(group, "contiguous", query, key, value), group=group)
    (found,) = torch.autograd.grad(torch.cat(outs, 1).square().sum(), key)
    torch.testing.assert_close(found, torch.autograd.grad(attention(query, key, value).square().sum(), key)[0])


@pytest.mark.parametrize(("size", "heads"), [(2, 2), (2, 3), (4, 4)])
@pytest.mark.parametrize("bias_heads", [False, True])
def test_the_gradient_of_a_bias_comes_home_from_a_rank_with_one_head(size: int, heads: int, bias_heads: bool) -> None:
    query, key, value = drawn(1, 8, heads, 8)
    group, bias = VirtualRanks(size), torch.randn(1, heads if bias_heads else 1, 8, 8, dtype=F64).requires_grad_()
    shards = shards_of(group, "contiguous", query, key, value)
    outs = ulysses_attention(*shards, group=group, bias=shard_sequence(bias, group=group, dim=2))
    (found,) = torch.autograd.grad(torch.cat(outs, 1).square().sum(), bias)
    expected = attention(query, key, value, bias=bias)
    torch.testing.assert_close(found, torch.autograd.grad(expected.square().sum(), bias)[0])


# What is said, and how many bytes it takes

B, N, HQ, HKV, D, DV = 2, 48, 8, 4, 8, 4


def recorded(size: int, ring_size: int, backward: bool = False, kv_heads: int = HKV, **options: Any) -> Recorder:
    """What ranks say in one forward, and with `backward` in the backward alone."""
    recorder = Recorder()
    group = VirtualRanks(size, recorder=recorder)
    shapes = ((B, N, HQ, D), (B, N, kv_heads, D), (B, N, kv_heads, DV))
    tensors = (torch.randn(shape, dtype=BF16).requires_grad_() for shape in shapes)
    shards = shards_of(group, "zigzag", *tensors)
    given: dict[str, Any] = {"group": group, "ring_size": ring_size, "layout": "zigzag", "length": N, **options}
    outs = ulysses_attention(*shards, **given)
    if backward:
        recorder.entries.clear()
        torch.stack([out.float().sum() for out in outs]).sum().backward()
    return recorder


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("size", [2, 4])
def test_bytes_are_the_formula(size: int, backward: bool) -> None:
    """(P-1)/P of a rank's queries, keys, values and output; back the same way with the gradients."""
    recorder = recorded(size, 1, backward, causal=True)
    numbers = B * (N // size) * (HQ + HKV) * (D + DV)
    for rank in range(size):
        assert recorder.kinds(rank) == ["AllToAll", "AllToAll"]
        assert recorder.bytes_sent(rank) * size == (size - 1) * numbers * 2


def test_a_kv_head_that_all_read_goes_to_all_and_its_gradient_is_fp32() -> None:
    rows, queries = B * N // 8, (D + DV) * HQ
    for rank in range(8):
        assert recorded(8, 1, kv_heads=1).bytes_sent(rank) == 7 * rows * (queries // 8 + D + DV) * 2
        assert recorded(8, 1, True, kv_heads=1).bytes_sent(rank) == 7 * rows * (queries // 8 * 2 + (D + DV) * 4)


def test_with_a_ring_come_the_bytes_of_its_shards() -> None:
    """Which have U times the rows and 1/U of the heads."""
    recorder = recorded(4, 2)
    divided = B * (N // 4) * (HQ + HKV) * (D + DV) * 2 // 2
    passed = B * (N // 2) * (HKV // 2) * (D + DV) * 2
    for rank in range(4):
        assert recorder.kinds(rank) == ["AllToAll", "Exchange", "AllToAll"]
        assert recorder.bytes_sent(rank) == divided + passed


@pytest.mark.parametrize("backward", [False, True])
def test_every_rank_says_the_same_things_in_the_same_order(backward: bool) -> None:
    for options in ({"causal": True, "window": (4, 0)}, {"dropout_p": 0.1, "seed": 1}, {"rotate": "allgather"}):
        recorder = recorded(8, 4, backward, **options)
        kinds = recorder.kinds(0)
        assert kinds and all(recorder.kinds(rank) == kinds for rank in range(8))


def test_one_rank_says_nothing() -> None:
    assert recorded(1, 1).entries == recorded(1, 1, backward=True).entries == {}


# Processes

pool_of_ranks = pytest.mark.xdist_group("ranks")


def step(transport: Any, mesh: Any = None, **options: Any) -> list[list[Tensor]]:
    """For each rank of this process, its output and the gradients of its shards."""
    shapes = ((2, 29, 4, 8), (2, 29, 2, 8), (2, 29, 2, 12))
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=generator).to(BF16) for shape in shapes]
    shards = [shard_sequence(t, group=transport, layout="zigzag") for t in tensors]
    leaves = [[t.detach().requires_grad_() for t in (one if isinstance(one, list) else [one])] for one in shards]
    given = leaves if isinstance(transport, VirtualRanks) else [one[0] for one in leaves]
    outs = ulysses_attention(*given, group=mesh or transport, layout="zigzag", causal=True, **options)
    outs = [outs] if isinstance(outs, Tensor) else outs
    torch.stack([out.float().square().sum() for out in outs]).sum().backward()
    return [[out.detach(), *(t.grad for t in mine)] for out, *mine in zip(outs, *leaves, strict=True)]


def on_a_process(rank: int, groups: Any, group: str, options: dict[str, Any]) -> tuple[Any, Any]:
    transport = Processes(groups[group], recorder=Recorder())
    (found,) = step(transport, **options)
    assert transport.recorder is not None
    return found, transport.recorder.entries[transport.rank]


@pool_of_ranks
@pytest.mark.parametrize(
    ("group", "members", "options"),
    [
        ("world", (0, 1, 2, 3), {}),
        ("world", (0, 1, 2, 3), {"ring_size": 2, "dropout_p": 0.2, "seed": 3}),
        ("odd", (1, 3), {"sink": torch.tensor([0.5, -1.0, 0.0, 2.0])}),
    ],
)
def test_processes_do_what_virtual_ranks_do(
    pool: Any, group: str, members: tuple[int, ...], options: dict[str, Any]
) -> None:
    recorder = Recorder()
    expected = step(VirtualRanks(len(members), recorder=recorder), **options)
    for rank, (found, entries) in enumerate(pool.results(on_a_process, members, group=group, options=options)):
        assert all(torch.equal(one, two) for one, two in zip(found, expected[rank], strict=True))
        assert entries == recorder.entries[rank]


def on_a_mesh(rank: int, groups: Any, mesh_of: list[list[int]]) -> Any:
    from torch.distributed.device_mesh import DeviceMesh

    mesh = DeviceMesh("cpu", mesh_of, mesh_dim_names=("ring", "ulysses"))
    flat = Processes() if mesh_of == [[0, 1], [2, 3]] else Processes(mesh._flatten())
    return flat.rank, step(flat, mesh)[0]


@pool_of_ranks
@pytest.mark.parametrize("ranks", [[[0, 1], [2, 3]], [[3, 1], [0, 2]]])
def test_a_mesh_is_a_ring_of_groups_that_divide_heads(pool: Any, ranks: list[list[int]]) -> None:
    expected = step(VirtualRanks(4), ring_size=2)
    results = pool.results(on_a_mesh, mesh_of=ranks)
    assert sorted(rank for rank, _ in results) == [0, 1, 2, 3]
    for rank, found in results:
        assert all(torch.equal(one, two) for one, two in zip(found, expected[rank], strict=True))


def with_a_mask_on_rank_1(rank: int, groups: Any) -> Tensor:
    query = torch.randn(1, 4, 4, 8)
    return ulysses_attention(query, query, query, mask=torch.ones(4, 16, dtype=torch.bool) if rank == 1 else None)


@pool_of_ranks
def test_a_mask_on_some_ranks_only_is_refused_on_all(pool: Any) -> None:
    for reply in pool.run(with_a_mask_on_rank_1):
        assert "mask given: expected the same on all 4 ranks" in reply.error


def with_the_lse_on_rank_1(rank: int, groups: Any) -> Any:
    query = torch.randn(1, 4, 4, 8)
    return ulysses_attention(query, query, query, return_lse=rank == 1)


@pool_of_ranks
def test_the_lse_on_some_ranks_only_is_refused_on_all(pool: Any) -> None:
    for reply in pool.run(with_the_lse_on_rank_1):
        assert "return_lse: expected the same on all 4 ranks" in reply.error


# Refusals


@pytest.mark.parametrize(
    ("size", "options", "words"),
    [
        (8, {}, r"query: expected at least a head for each of the 8 ranks .*; got Hq=6. .*ring_size"),
        (4, {"dropout_p": 0.1, "seed": 0}, r"dropout_p: expected 0 where Hq=6 is not divided by 4 ranks"),
        (4, {"ring_size": 3}, r"ring_size: expected an int that divides the 4 ranks; got 3"),
        (4, {"ring_size": True}, r"ring_size: expected an int"),
        (4, {"ring_size": 2, "layout": "striped"}, r"layout: expected 'contiguous' or 'zigzag' with a ring"),
        (4, {"layout": "diagonal"}, r"layout: expected 'contiguous' or 'zigzag' or 'striped'; got 'diagonal'"),
        (4, {"ring_size": 2, "rotate": "left"}, r"rotate: expected 'p2p' or 'alltoall' or 'allgather'; got 'left'"),
        (2, {"rotate": "allgather"}, r"rotate: expected 'p2p', its default, without a ring"),
        (
            2,
            {"mask": [torch.ones(4, 8, dtype=torch.bool), torch.ones(1, 8, dtype=torch.bool)]},
            r"mask: expected a row per query",
        ),
        (2, {"backend": "reference"}, r"backend: expected one that computes partial states"),
    ],
    ids=str,
)
def test_bad_calls_are_refused(size: int, options: dict[str, Any], words: str) -> None:
    group = VirtualRanks(size)
    shards = shards_of(group, "contiguous", *torch.randn(3, 1, 8, 6, 8))
    with pytest.raises(ValueError, match=words):
        ulysses_attention(*shards, group=group, **options)


def test_ranks_that_have_other_heads_are_told_apart() -> None:
    query = [torch.randn(1, 2, 4, 8), torch.randn(1, 2, 2, 8)]
    with pytest.raises((ValueError, CommunicationError), match="heads"):
        ulysses_attention(query, query, query, group=VirtualRanks(2))
