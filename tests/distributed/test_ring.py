"""ring_attention() on virtual ranks: the real kernels, every rank, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from stream_attention import RingAttention, StreamAttentionConfig, attention, varlen_attention
from stream_attention.backends.reference import attention as reference
from stream_attention.distributed import Recorder, VirtualRanks, ring_attention, shard_sequence, unshard_sequence
from stream_attention.distributed.shard import LAYOUTS
from stream_attention_tools.testing import Case

ROTATIONS = ("p2p", "alltoall", "allgather")
BF16, F64 = torch.bfloat16, torch.float64


def whole(shards: list[Tensor], layout: str, dim: int = 1) -> Tensor:
    return unshard_sequence(shards, group=VirtualRanks(len(shards)), layout=layout, dim=dim)[0]  # type: ignore[arg-type]


# Agreement with the reference, under the tolerance that one device earns

CASES = {
    "causal": Case(Tq=37, Tk=37, causal=True),
    "non-causal, also where layouts balance causal work": Case(Tq=37, Tk=37),
    "grouped heads, Dv != Dk": Case(B=2, Tq=33, Tk=33, Hq=6, Hkv=2, D=8, Dv=12, causal=True),
    "one key head": Case(Tq=19, Tk=19, Hq=4, Hkv=1, lse_grad=True),
    "window back": Case(Tq=40, Tk=40, causal=True, window=(5, 0)),
    "window both ways": Case(Tq=40, Tk=40, window=(3, 6)),
    "window of itself": Case(Tq=11, Tk=11, window=(0, 0)),
    "more keys than queries": Case(Tq=21, Tk=34, causal=True, lse_grad=True),
    "more queries than keys": Case(Tq=34, Tk=21, causal=True),
    "fewer tokens than ranks": Case(Tq=3, Tk=3, causal=True),
    "no token": Case(Tq=0, Tk=0),
    "no key": Case(Tq=9, Tk=0),
    "slopes": Case(B=2, Tq=29, Tk=29, causal=True, alibi="BH"),
    "dropout draws the mask of one device": Case(B=2, Tq=29, Tk=29, causal=True, dropout_p=0.3),
    "softcap and sink": Case(Tq=29, Tk=29, causal=True, softcap=2.0, sink=True, lse_grad=True),
    "mask": Case(B=2, Tq=23, Tk=23, mask=(2, 1, 23, 23), causal=True),
    "padding": Case(B=2, Tq=23, Tk=23, mask=(2, 1, 1, 23)),
    "bias": Case(B=2, Tq=23, Tk=23, bias=(1, 2, 23, 23), bias_hides=True),
    "bias of keys": Case(Tq=23, Tk=23, bias=(23,), causal=True, aux_dtype=torch.float32),
    "everything": Case(
        B=2,
        Tq=27,
        Tk=31,
        Hq=4,
        causal=True,
        window=(17, -1),
        mask=(1, 4, 27, 31),
        bias=(2, 1, 1, 31),
        alibi="H",
        sink=True,
        softcap=3.0,
        dropout_p=0.2,
        lse_grad=True,
    ),
    "not contiguous": Case(B=2, Tq=26, Tk=26, causal=True, layout="strided", mask=(2, 1, 26, 26)),
    "heads first": Case(B=2, Tq=26, Tk=26, causal=True, layout="heads_first"),
    "expanded": Case(B=2, Tq=26, Tk=26, layout="expanded"),
    "bf16": Case(Tq=37, Tk=37, Hq=4, causal=True, dtype=BF16),
    "fp16, whose gradients stay fp16": Case(Tq=37, Tk=37, causal=True, dtype=torch.float16),
    "packed": Case(lengths_q=(5, 0, 17, 1, 9), lengths_k=(5, 0, 17, 1, 9), causal=True),
    "packed, everything": Case(
        lengths_q=(7, 13, 4),
        lengths_k=(7, 13, 4),
        tail=3,
        Hq=4,
        window=(6, 2),
        alibi="BH",
        sink=True,
        dropout_p=0.2,
        lse_grad=True,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_ring_is_as_exact_as_one_device(name: str, check_on_ring: Any) -> None:
    """Three ranks and more: a backward that reuses the first shard it was sent passes with two."""
    number = list(CASES).index(name)
    for turn, layout in enumerate(LAYOUTS):
        size, rotate = (1, 2, 3, 4, 8)[(number + turn) % 5], ROTATIONS[(number + turn) % 3]
        for ranks in {size, 3}:
            check_on_ring(CASES[name], ranks, layout, rotate, "eager")


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_every_number_of_ranks_forward_and_backward(size: int, dtype: torch.dtype, check_on_ring: Any) -> None:
    for layout in LAYOUTS:
        for rotate in ROTATIONS:
            case = Case(Tq=43, Tk=43, Hq=4, Hkv=2, D=8, Dv=8, causal=True, dtype=dtype, lse_grad=True)
            check_on_ring(case, size, layout, rotate, "eager")


def errors(size: int, layout: str, spread: float) -> dict[str, tuple[float, float]]:
    """Root mean square and largest error against fp64 of bf16 results, by name."""
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(1, 192, heads, 32, generator=generator) for heads in (4, 2, 2, 4)]
    query, key, value, grad = (t.to(BF16) for t in (drawn[0] * spread, *drawn[1:]))
    exact_leaves = [t.double().requires_grad_() for t in (query, key, value)]
    exact = reference.attention(*exact_leaves, causal=True)[0]
    leaves = [t.requires_grad_() for t in (query, key, value)]
    group = VirtualRanks(size)
    shards = [shard_sequence(t, group=group, layout=layout) for t in leaves]  # type: ignore[arg-type]
    out = whole(ring_attention(*shards, group=group, layout=layout, causal=True), layout)  # type: ignore[arg-type]
    truths = exact, *torch.autograd.grad(exact, exact_leaves, grad.double())
    results = out, *torch.autograd.grad(out, leaves, grad)
    wrong = [result.double() - truth for result, truth in zip(results, truths, strict=True)]
    names = ("out", "d_query", "d_key", "d_value")
    return {name: (x.square().mean().sqrt().item(), x.abs().max().item()) for name, x in zip(names, wrong, strict=True)}


@pytest.mark.parametrize("spread", [1.0, 6.0])
def test_errors_do_not_grow_with_the_ring(spread: float) -> None:
    """Partial results in bf16 would be 1.6 times as wrong, and a bf16 sum of them worse with every rank."""
    alone = errors(1, "contiguous", spread)
    for size in (2, 3, 4, 8):
        for layout in LAYOUTS:
            for name, (mean, largest) in errors(size, layout, spread).items():
                assert mean <= 1.1 * alone[name][0], (size, layout, name)
                assert largest <= 1.1 * alone[name][1], (size, layout, name)


# What other libraries' users report


def shards_of(group: VirtualRanks, layout: str, *tensors: Tensor) -> list[list[Tensor]]:
    return [shard_sequence(t, group=group, layout=layout) for t in tensors]  # type: ignore[arg-type]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_scores_hundreds_apart_between_shards_do_not_overflow(layout: Any) -> None:
    query, key, value = torch.randn(3, 1, 24, 2, 8, generator=torch.Generator().manual_seed(0))
    key[:, :6], key[:, 12:18] = key[:, :6] * 90, key[:, 12:18] * -300
    group = VirtualRanks(4)
    outs, lses = ring_attention(
        *shards_of(group, layout, query, key, value), group=group, layout=layout, return_lse=True
    )
    exact, exact_lse = reference.attention(query, key, value)
    assert exact_lse.max() - exact_lse.min() > 200
    torch.testing.assert_close(whole(outs, layout).double(), exact, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(whole(lses, layout, 2).double(), exact_lse, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("hidden", ["the first shard", "all shards", "the rows of one rank"])
def test_shards_and_rows_that_see_nothing_give_zeros_and_no_nan(hidden: str) -> None:
    query, key, value = (t.requires_grad_() for t in torch.randn(3, 1, 12, 2, 8))
    mask = torch.ones(1, 1, 12, 12, dtype=torch.bool)
    mask[:, :, : 4 if hidden == "the rows of one rank" else None, : 4 if hidden == "the first shard" else None] = False
    group = VirtualRanks(3)
    masks = shard_sequence(mask, group=group, dim=2)
    outs, lses = ring_attention(
        *shards_of(group, "contiguous", query, key, value), group=group, mask=masks, return_lse=True
    )
    expected, expected_lse = attention(query, key, value, mask=mask, return_lse=True)
    torch.testing.assert_close(torch.cat(outs, 1), expected)
    torch.testing.assert_close(torch.cat(lses, 2), expected_lse)
    found = torch.autograd.grad(torch.cat(outs, 1).sum(), (query, key, value))
    torch.testing.assert_close(found, torch.autograd.grad(expected.sum(), (query, key, value)))


def test_packed_documents_are_not_one_sequence() -> None:
    query, key, value = torch.randn(3, 20, 2, 8)
    offsets = torch.tensor([0, 6, 13, 20])
    group = VirtualRanks(4)
    shards = [shard_sequence(t, group=group, layout="zigzag", dim=0) for t in (query, key, value)]
    outs = ring_attention(*shards, group=group, layout="zigzag", causal=True, cu_seqlens=offsets)
    expected = varlen_attention(query, key, value, cu_seqlens_q=offsets, cu_seqlens_k=offsets, causal=True)
    torch.testing.assert_close(whole(outs, "zigzag", 0), expected)
    outs = ring_attention(*shards, group=group, layout="zigzag", causal=True, cu_seqlens=[0, 20])
    assert (whole(outs, "zigzag", 0) - expected).abs().max() > 0.1


def test_dropout_is_that_of_one_device_and_differentiates_as_it_was_drawn() -> None:
    query, key, value = (t.requires_grad_() for t in torch.randn(3, 2, 18, 2, 8, dtype=F64))
    expected = attention(query, key, value, dropout_p=0.5, seed=11)
    group = VirtualRanks(3)
    outs = ring_attention(
        *shards_of(group, "striped", query, key, value), group=group, layout="striped", dropout_p=0.5, seed=11
    )
    torch.testing.assert_close(whole(outs, "striped"), expected)
    found = torch.autograd.grad(whole(outs, "striped").square().sum(), (query, key, value))
    torch.testing.assert_close(found, torch.autograd.grad(expected.square().sum(), (query, key, value)))


def test_contiguous_shards_of_any_lengths() -> None:
    lengths = [7, 0, 1, 12]
    query, key, value = (t.requires_grad_() for t in torch.randn(3, 1, 20, 2, 8, dtype=F64))
    for rotate in ROTATIONS:
        shards = [list(t.split(lengths, dim=1)) for t in (query, key, value)]
        outs = ring_attention(*shards, group=VirtualRanks(4), causal=True, rotate=rotate)
        expected = attention(query, key, value, causal=True)
        assert [out.shape[1] for out in outs] == lengths
        torch.testing.assert_close(torch.cat(outs, 1), expected)
        found = torch.autograd.grad(torch.cat(outs, 1).square().sum(), (query, key, value))
        torch.testing.assert_close(found, torch.autograd.grad(expected.square().sum(), (query, key, value)))


def test_a_gradient_of_one_ranks_output_reaches_all_shards() -> None:
    query, key, value = (t.requires_grad_() for t in torch.randn(3, 1, 16, 2, 8, dtype=F64))
    group = VirtualRanks(4)
    outs = ring_attention(*shards_of(group, "contiguous", query, key, value), group=group)
    found = torch.autograd.grad(outs[2].sum(), (query, key, value))
    expected = torch.autograd.grad(attention(query, key, value)[:, 8:12].sum(), (query, key, value))
    torch.testing.assert_close(found, expected)


def test_gradients_agree_with_differences() -> None:
    group = VirtualRanks(3)
    tensors = [t.requires_grad_() for t in torch.randn(3, 1, 7, 1, 3, dtype=F64)]
    slopes = torch.rand(1, dtype=F64).requires_grad_()

    def ring(query: Tensor, key: Tensor, value: Tensor, slopes: Tensor) -> tuple[Tensor, Tensor]:
        shards = shards_of(group, "zigzag", query, key, value)
        outs, lses = ring_attention(
            *shards, group=group, layout="zigzag", causal=True, alibi_slopes=slopes, return_lse=True
        )
        return whole(outs, "zigzag"), whole(lses, "zigzag", 2)

    assert torch.autograd.gradcheck(ring, (*tensors, slopes))


@pytest.mark.parametrize("rotate", ROTATIONS)
def test_runs_are_equal_bit_for_bit(rotate: Any) -> None:
    query, key, value = (t.to(BF16).requires_grad_() for t in torch.randn(3, 1, 24, 2, 8))
    group = VirtualRanks(4)

    def once(rotate: Any) -> tuple[Tensor, ...]:
        shards = shards_of(group, "zigzag", query, key, value)
        ring: dict[str, Any] = {"group": group, "layout": "zigzag", "rotate": rotate, "causal": True}
        out = whole(ring_attention(*shards, **ring, deterministic=True), "zigzag")
        return out, *torch.autograd.grad(out.float().square().sum(), (query, key, value))

    for one, two in zip(once(rotate), once(rotate), strict=True):
        assert torch.equal(one, two)
    for one, two in zip(once("p2p"), once("alltoall"), strict=True):
        assert torch.equal(one, two)


# What is said, and how many bytes it takes

B, N, HQ, HKV, D, DV = 2, 48, 4, 2, 8, 4


def recorded(
    size: int, layout: str, rotate: str, dtype: torch.dtype = BF16, backward: bool = False, **options: Any
) -> Recorder:
    """What ranks say in one forward, and with `backward` in the backward alone."""
    recorder = Recorder()
    group = VirtualRanks(size, recorder=recorder)
    shapes = ((B, N, HQ, D), (B, N, HKV, D), (B, N, HKV, DV))
    shards = shards_of(group, layout, *(torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes))
    outs = ring_attention(*shards, group=group, layout=layout, rotate=rotate, length=N, **options)  # type: ignore[arg-type]
    if backward:
        recorder.entries.clear()
        torch.stack([out.float().sum() for out in outs]).sum().backward()
    return recorder


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("rotate", ROTATIONS)
@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_bytes_are_the_formula_where_every_rank_sees_every_shard(size: int, rotate: str, backward: bool) -> None:
    """(P-1)/P of all keys and values per rank; in the backward again, and as many numbers in fp32."""
    for layout, causal in (("zigzag", True), ("striped", True), ("contiguous", False)):
        recorder = recorded(size, layout, rotate, causal=causal, backward=backward)
        numbers = B * N * HKV * (D + DV)
        for rank in range(size):
            assert recorder.bytes_sent(rank) * size == (size - 1) * numbers * (2 + 4 if backward else 2)


@pytest.mark.parametrize("backward", [False, True])
def test_a_causal_ring_of_contiguous_shards_sends_none_to_earlier_ranks(backward: bool) -> None:
    size = 4
    recorder = recorded(size, "contiguous", "p2p", causal=True, backward=backward)
    shard = B * (N // size) * HKV * (D + DV)
    sent = sum(recorder.bytes_sent(rank) for rank in range(size))
    assert sent == (3 + 2 + 1) * shard * (6 if backward else 2)
    assert recorder.bytes_sent(size - 1) == (3 * shard * 4 if backward else 0)  # the gradients that come home from it


@pytest.mark.parametrize("rotate", ["p2p", "alltoall"])
def test_shards_out_of_the_window_are_not_sent(rotate: str) -> None:
    size, shard = 8, B * (N // 8) * HKV * (D + DV) * 2
    back = recorded(size, "contiguous", rotate, window=(N // 8, 0))
    assert [back.bytes_sent(rank) for rank in range(size)] == [shard] * 7 + [0]
    both = recorded(size, "contiguous", rotate, window=(1, 1))
    assert sum(both.bytes_sent(rank) for rank in range(size)) == 14 * shard  # each to its neighbours, and no farther
    assert len(both.kinds(0)) == 2
    none = recorded(size, "contiguous", rotate, window=(0, 0))
    assert none.entries == {}


def test_documents_that_end_with_a_shard_are_not_sent() -> None:
    recorder = Recorder()
    group = VirtualRanks(4, recorder=recorder)
    shards = [list(t.split(5)) for t in torch.randn(3, 20, 2, 8)]
    ring_attention(*shards, group=group, cu_seqlens=[0, 5, 10, 15, 20], causal=True, length=20)
    assert recorder.entries == {}
    ring_attention(*shards, group=group, cu_seqlens=[0, 5, 11, 15, 20], causal=True, length=20)
    assert [sum(recorder.bytes_sent(rank) for rank in range(4))] == [5 * 2 * (8 + 8) * 4]


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("rotate", ROTATIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rank_says_the_same_things_in_the_same_order(layout: str, rotate: str, backward: bool) -> None:
    """Also where one has nothing to say: a rank that skipped a message would leave the others waiting."""
    for options in ({"causal": True}, {"causal": True, "window": (4, 0)}, {"window": (2, 9)}, {}):
        recorder = recorded(5, layout, rotate, backward=backward, **options)
        kinds = recorder.kinds(0)
        assert kinds and all(recorder.kinds(rank) == kinds for rank in range(5))
        for number in range(len(kinds)):
            said = [recorder.entries[rank][number] for rank in range(5)]
            for one in range(5):
                for other in range(5):
                    assert said[one].sent.get(other) == said[other].received.get(one)


def test_a_length_that_is_known_is_not_asked_for() -> None:
    recorder = Recorder()
    group = VirtualRanks(2, recorder=recorder)
    shards = shards_of(group, "contiguous", *torch.randn(3, 1, 8, 2, 8))
    ring_attention(*shards, group=group, length=8)
    assert recorder.kinds(0) == ["Exchange"]
    ring_attention(*shards, group=group)
    assert recorder.kinds(0) == ["Exchange", "Agreement", "Exchange"]


def test_a_group_of_one_never_communicates() -> None:
    recorder = Recorder()
    query, key, value = (t.requires_grad_() for t in torch.randn(3, 1, 8, 2, 8))
    (out,) = ring_attention([query], [key], [value], group=VirtualRanks(1, recorder=recorder), causal=True)
    out.sum().backward()
    assert recorder.entries == {}
    assert torch.equal(ring_attention(query, key, value, causal=True), out)  # a process that is alone


# In torch.compile and torch.func


def test_compiled_code_breaks_at_a_ring_and_nothing_of_it_is_traced(recwarn: pytest.WarningsRecorder) -> None:
    group, tensors = VirtualRanks(2), torch.randn(3, 1, 8, 2, 8)
    ring = RingAttention(StreamAttentionConfig(num_heads=2, head_dim=8), group)
    graphs = []

    def layer(query: Any, key: Any, value: Any) -> Any:
        outs = ring_attention([2 * t for t in query], key, value, group=group, causal=True)
        return unshard_sequence(ring([2 * t for t in outs], key, value), group=group)[0]

    def compiler(graph: torch.fx.GraphModule, example_inputs: Any) -> Any:
        graphs.append([node for node in graph.graph.nodes if node.op == "call_function"])
        return graph

    shards = shards_of(group, "contiguous", *tensors)
    found = torch.compile(layer, backend=compiler)(*shards)
    torch.testing.assert_close(found, layer(*shards))
    assert list(map(len, graphs)) == [2, 2] and not recwarn.list


def test_there_is_no_derivative_but_the_first() -> None:
    group, query = VirtualRanks(2), torch.randn(1, 8, 2, 8, requires_grad=True)
    shards = shards_of(group, "contiguous", query)[0]
    (grad,) = torch.autograd.grad(
        torch.cat(ring_attention(shards, shards, shards, group=group), 1).sum(), query, create_graph=True
    )
    with pytest.raises(NotImplementedError, match="attention over several ranks has no second derivative"):
        grad.sum().backward()
    with forward_ad.dual_level():
        dual = [forward_ad.make_dual(t.detach(), torch.ones_like(t)) for t in shards]
        with pytest.raises(NotImplementedError, match="has no forward-mode derivative"):
            ring_attention(dual, dual, dual, group=group)


def test_torch_func_is_refused() -> None:
    query = torch.randn(2, 1, 8, 2, 8)
    for transform in (torch.func.vmap, lambda call: torch.func.grad(lambda x: call(x).sum())):
        with pytest.raises(ValueError, match="query: expected a tensor outside of"):
            transform(lambda x: ring_attention(x, x, x))(query if transform is torch.func.vmap else query[0])


# Refusals


def call(size: int = 2, **options: Any) -> Any:
    group = VirtualRanks(size)
    tensors = {name: torch.randn(1, 8, 2, 8) for name in ("query", "key", "value")}
    shards = {name: shard_sequence(t, group=group) for name, t in tensors.items()}
    return ring_attention(**({"group": group} | shards | options))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"layout": "snake"}, "layout: expected 'contiguous'"),
        ({"rotate": "left"}, "rotate: expected 'p2p' or 'alltoall' or 'allgather'; got 'left'"),
        ({"query": [torch.ones(1, 4, 2, 8)]}, "query: expected one tensor for each of the 2 ranks"),
        ({"key": [torch.ones(1, 4, 2, 8), torch.ones(1, 4, 2, 4)]}, "key: expected the query's head dim"),
        ({"dropout_p": 0.1}, "seed: expected the same on every rank, when there is dropout; got None"),
        ({"mask": [torch.ones(4, 4, dtype=torch.bool)] * 2}, r"mask: expected broadcastable .* = \[1, 2, 4, 8\]"),
        ({"mask": torch.ones(4, 8, dtype=torch.bool)}, "mask: expected one tensor for each of the 2 ranks"),
        ({"backend": "reference"}, "backend: expected one that computes partial states"),
        ({"length": 9}, "length: expected that of shards of 5 rows on rank 1; got 9 beside"),
        ({"length": 2.0}, "length: expected an int"),
        ({"window": (-2, 0)}, "window: expected sides of at least -1"),
        ({"cu_seqlens": [0, 8]}, r"query: expected shape \[Nq, Hq, D\]"),
    ],
)
def test_a_bad_call_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=words):
        call(**options)


def test_packed_calls_are_refused_what_they_cannot_do() -> None:
    shards = [[torch.ones(4, 2, 8)] * 2] * 3
    with pytest.raises(ValueError, match="mask and bias: expected None for packed"):
        ring_attention(*shards, group=VirtualRanks(2), cu_seqlens=[0, 8], mask=[torch.ones(4, 8).bool()] * 2)
    with pytest.raises(ValueError, match="cu_seqlens: expected a last value of at most the 8 rows of all ranks; got 9"):
        ring_attention(*shards, group=VirtualRanks(2), cu_seqlens=[0, 9])
    with pytest.raises(ValueError, match="key: expected as many rows as the query, 4, of packed sequences; got 3"):
        ring_attention(
            shards[0], [torch.ones(3, 2, 8)] * 2, [torch.ones(3, 2, 8)] * 2, group=VirtualRanks(2), cu_seqlens=[0]
        )


def test_shards_of_other_ranks_with_other_heads_are_refused() -> None:
    query, two, one = torch.ones(1, 4, 4, 8), torch.ones(1, 4, 2, 8), torch.ones(1, 4, 1, 8)
    with pytest.raises(ValueError, match=r"heads: expected the same on all 2 ranks; got \(4, 2\) on rank 0"):
        ring_attention([query, query], [two, one], [two, one], group=VirtualRanks(2))


def test_unequal_shards_are_contiguous() -> None:
    shards = [[torch.ones(1, n, 2, 8) for n in (1, 5)]] * 3
    with pytest.raises(ValueError, match=r"shards: expected lengths \[3, 3\] for 6 positions in striped layout"):
        ring_attention(*shards, group=VirtualRanks(2), layout="striped")


def test_cases_cover_every_modifier() -> None:
    modifiers = ("causal", "window", "mask", "bias", "alibi", "sink", "softcap", "dropout_p", "lse_grad", "lengths_q")
    default = Case()
    for name in modifiers:
        assert any(getattr(case, name) != getattr(default, name) for case in CASES.values()), name
