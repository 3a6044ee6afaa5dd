"""tree_decode_attention(): a cache in parts, whose states are merged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from stream_attention import ContiguousKV, PagedKV, attention, decode_attention, quantize_kv
from stream_attention.backends.reference import attention as reference
from stream_attention.distributed import Recorder, VirtualRanks
from stream_attention.distributed.tree import tree_decode_attention

F64 = torch.float64


def normal(*shape: int, dtype: torch.dtype = F64, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


def parts_of(lengths: list[int], batch: int = 2, dtype: torch.dtype = F64) -> tuple[list[ContiguousKV], Tensor, Tensor]:
    """A cache in parts of these lengths, and its keys and values as a whole. Dv is not D."""
    key, value = normal(batch, sum(lengths), 2, 8, dtype=dtype), normal(batch, sum(lengths), 2, 5, dtype=dtype, seed=1)
    pairs = zip(key.split(lengths, 1), value.split(lengths, 1), strict=True)
    return [ContiguousKV(*pair) for pair in pairs], key, value


# Semantics


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("new", [1, 3])
def test_it_is_attention_over_all_parts_on_every_rank(size: int, new: int) -> None:
    """Parts of any length, also none; the last one holds the new tokens, among which the past is seen alone."""
    lengths = [(7 * rank) % 11 for rank in range(size)]
    lengths[-1] += new
    parts, key, value = parts_of(lengths)
    query, sink = normal(2, new, 4, 8, seed=2), normal(4, seed=3)
    options: dict[str, Any] = {"sink": sink, "softcap": 4.0, "scale": 0.3, "return_lse": True}
    expected, expected_lse = attention(query, key, value, causal=True, **options)
    outs, lses = tree_decode_attention(query, parts, group=VirtualRanks(size), **options)
    for out, lse in zip(outs, lses, strict=True):
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(lse, expected_lse)
        assert torch.equal(out, outs[0]) and torch.equal(lse, lses[0])


def test_without_causal_new_tokens_see_each_other() -> None:
    parts, key, value = parts_of([5, 4])
    query = normal(2, 3, 4, 8, seed=2)
    out = tree_decode_attention(query, parts, group=VirtualRanks(2), causal=False)[0]
    torch.testing.assert_close(out, attention(query, key, value))


def test_without_causal_a_part_shorter_than_the_queries_is_seen_whole() -> None:
    """Of a row that holds fewer tokens than there are queries, in a part with lengths."""
    parts, key, value = parts_of([2, 5])
    lengths = [torch.full((2,), part.capacity, dtype=torch.int32) for part in parts]
    parts = [ContiguousKV(part.key, part.value, its) for part, its in zip(parts, lengths, strict=True)]
    query = normal(2, 4, 4, 8, seed=2)
    out = tree_decode_attention(query, parts, group=VirtualRanks(2), causal=False)[0]
    torch.testing.assert_close(out, attention(query, key, value))


def test_what_requires_a_gradient_is_refused() -> None:
    parts, key, _ = parts_of([5, 4])
    query = normal(2, 1, 4, 8, seed=2).requires_grad_()
    with pytest.raises(
        ValueError, match=r"query: expected requires_grad=False.* under torch.no_grad\(\), or use ring_attention"
    ):
        tree_decode_attention(query, parts, group=VirtualRanks(2))
    with torch.no_grad():
        assert not tree_decode_attention(query, parts, group=VirtualRanks(2))[0].requires_grad
    key = parts[0].key.clone().requires_grad_()
    with pytest.raises(ValueError, match="cache: expected requires_grad=False"):
        tree_decode_attention(query.detach(), [ContiguousKV(key, parts[0].value), parts[1]], group=VirtualRanks(2))


def test_rows_of_a_batch_may_have_lengths_of_their_own() -> None:
    """Slots behind a row's length hold NaN, and one row has nothing on the first rank."""
    key, value = normal(2, 12, 2, 8), normal(2, 12, 2, 5, seed=1)
    lengths = torch.tensor([[6, 2], [0, 5]], dtype=torch.int32)  # of a rank and a row
    query = normal(2, 1, 4, 8, seed=2)
    caches = []
    for rank, columns in enumerate((slice(0, 6), slice(6, 12))):
        hidden = torch.arange(6) >= lengths[rank, :, None]
        held = [t[:, columns].masked_fill(hidden[..., None, None], torch.nan) for t in (key, value)]
        caches.append(ContiguousKV(held[0], held[1], lengths[rank]))
    out = tree_decode_attention(query, caches, group=VirtualRanks(2))[0]
    for row in range(2):
        seen = [*range(int(lengths[0, row])), *range(6, 6 + int(lengths[1, row]))]
        expected = attention(query[row : row + 1], key[row : row + 1, seen], value[row : row + 1, seen])
        torch.testing.assert_close(out[row : row + 1], expected)


def test_parts_may_be_paged_and_quantised() -> None:
    key, value = normal(1, 64, 2, 16, dtype=torch.float32), normal(1, 64, 2, 16, dtype=torch.float32, seed=1)
    paged = PagedKV(
        key[:, :32].reshape(4, 8, 2, 16),
        value[:, :32].reshape(4, 8, 2, 16),
        torch.arange(4, dtype=torch.int32)[None],
        torch.tensor([32], dtype=torch.int32),
    )
    coded = quantize_kv(ContiguousKV(key[:, 32:], value[:, 32:]), "int8", group=16, residual=16)
    query = normal(1, 1, 4, 16, dtype=torch.float32, seed=2)
    out = tree_decode_attention(query, [paged, coded], group=VirtualRanks(2))[0]
    error = (out - attention(query, key, value)).abs().max()
    assert 0 < error < 0.02  # of the codes


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_parts_of_whole_groups_have_the_codes_of_one_cache(format: str) -> None:
    """Scales are of 16 tokens or channels, and no rank's part ends inside a group."""
    key, value = normal(1, 64, 2, 16, dtype=torch.float32), normal(1, 64, 2, 16, dtype=torch.float32, seed=1)
    query = normal(1, 2, 4, 16, dtype=torch.float32, seed=2)
    sizes: dict[str, Any] = {"group": 16, "residual": 0}
    parts = [
        quantize_kv(ContiguousKV(*pair), format, **sizes)
        for pair in zip(*(t.split(16, 1) for t in (key, value)), strict=True)
    ]
    one = quantize_kv(ContiguousKV(key, value), format, **sizes)
    outs = tree_decode_attention(query, parts, group=VirtualRanks(4))
    torch.testing.assert_close(outs[3], decode_attention(query, one))
    assert (outs[3] - attention(query, key, value, causal=True)).abs().max() > 1e-4  # of the codes


def test_a_rank_alone_says_nothing_and_is_given_a_tensor() -> None:
    (part,), key, value = parts_of([9])
    query = normal(2, 1, 4, 8, seed=2)
    recorder = Recorder()
    out = tree_decode_attention(query, part, group=VirtualRanks(1, recorder=recorder))
    torch.testing.assert_close(out, attention(query, key, value))
    assert recorder.entries == {}


# Accuracy and bytes


def test_errors_do_not_grow_with_the_ranks() -> None:
    """States are fp32, so bf16 results are rounded once."""

    def error(size: int) -> float:
        parts, key, value = parts_of([512 // size] * size, batch=1, dtype=torch.bfloat16)
        query = normal(1, 1, 4, 8, dtype=torch.bfloat16, seed=2)
        out = tree_decode_attention(query, parts, group=VirtualRanks(size))[0]
        return (out.double() - reference.attention(query, key, value)[0]).abs().max().item()

    assert all(error(size) <= 1.1 * error(1) for size in (2, 4, 8))


def test_scores_hundreds_apart_between_ranks_do_not_overflow() -> None:
    parts, key, value = parts_of([6, 6, 6], dtype=torch.float32)
    key[:, :6].mul_(90)
    key[:, 6:12].mul_(-300)
    query = normal(2, 1, 4, 8, dtype=torch.float32, seed=2)
    exact, exact_lse = reference.attention(query, key, value)
    out, lse = tree_decode_attention(query, parts, group=VirtualRanks(3), return_lse=True)
    assert exact_lse.abs().max() > 200
    torch.testing.assert_close(out[0].double(), exact, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(lse[0].double(), exact_lse, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("length", [8, 800])
def test_only_states_travel_whatever_the_length(length: int) -> None:
    size, batch, new, heads, value_dim = 4, 2, 3, 4, 5
    recorder = Recorder()
    parts, _, _ = parts_of([length] * size, dtype=torch.float32)
    query = normal(batch, new, heads, 8, dtype=torch.float32)
    tree_decode_attention(query, parts, group=VirtualRanks(size, recorder=recorder))
    for rank in range(size):
        assert recorder.kinds(rank) == ["Agreement", "AllGather"]
        assert recorder.bytes_sent(rank) == (size - 1) * batch * new * heads * (value_dim + 1) * 4


# Processes


def decode(rank: int, groups: Any, group: str, lengths: list[int]) -> Tensor:
    import torch.distributed as dist

    mine = parts_of(lengths)[0][dist.get_rank(groups[group])]
    return tree_decode_attention(normal(2, 2, 4, 8, seed=2), mine, group=groups[group])


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize(("group", "members", "lengths"), [("world", None, [3, 0, 6, 4]), ("odd", (1, 3), [3, 6])])
def test_processes(pool: Any, group: str, members: Any, lengths: list[int]) -> None:
    _, key, value = parts_of(lengths)
    outs = pool.results(decode, members, group=group, lengths=lengths)
    torch.testing.assert_close(outs[0], attention(normal(2, 2, 4, 8, seed=2), key, value, causal=True))
    assert all(torch.equal(out, outs[0]) for out in outs)


def with_other_queries_on_rank_1(rank: int, groups: Any) -> Tensor:
    mine = parts_of([3, 3, 3, 3])[0][rank]
    return tree_decode_attention(normal(2, 1 + (rank == 1), 4, 8), mine)


@pytest.mark.xdist_group("ranks")
def test_ranks_with_other_queries_are_told_at_once(pool: Any) -> None:
    for rank, reply in enumerate(pool.run(with_other_queries_on_rank_1)):
        words = "[B, Tq, Hq, Dv] of query and cache: expected the same on all 4 ranks"
        assert words in reply.error and f"[2, {1 + (rank == 1)}, 4, 5] on rank {rank}" in reply.error


def with_options_on_rank_1(rank: int, groups: Any, name: str) -> Tensor:
    mine = parts_of([3, 3, 3, 3])[0][rank]
    other: dict[str, Any] = {"sink": normal(4), "causal": False, "softcap": 3.0, "scale": 0.5}
    return tree_decode_attention(normal(2, 1, 4, 8), mine, **({name: other[name]} if rank == 1 else {}))


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("name", ["sink", "causal", "softcap", "scale"])
def test_ranks_with_other_options_are_told_at_once(pool: Any, name: str) -> None:
    for reply in pool.run(with_options_on_rank_1, name=name):
        assert f"ValueError: {name}: expected the same on all 4 ranks" in reply.error


# Refusals


def test_bad_calls_are_refused() -> None:
    parts, key, _ = parts_of([4, 2])
    query, group = normal(2, 3, 4, 8), VirtualRanks(2)
    with pytest.raises(
        ValueError, match=r"cache: expected a capacity for the 3 new tokens on the last rank; got 2. Append"
    ):
        tree_decode_attention(query, parts, group=group)
    with pytest.raises(ValueError, match="cache: expected one for each of the 2 ranks of this process; got 1"):
        tree_decode_attention(query, parts[:1], group=group)
    with pytest.raises(TypeError, match="cache: expected a ContiguousKV, PagedKV or QuantizedKV; got Tensor"):
        tree_decode_attention(query, [key, key], group=group)
    with pytest.raises(TypeError, match=r"query: expected the cache's dtype torch\.float64; got torch\.float32"):
        tree_decode_attention(query.float(), parts, group=group, causal=False)
    with pytest.raises(ValueError, match="softcap: expected 0"):
        tree_decode_attention(query, parts, group=group, causal=False, softcap=-1.0)
