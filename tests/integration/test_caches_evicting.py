"""A bounded layer keeps the first tokens, the latest, and those that matter; until it must, it keeps all."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from stream_attention import attention
from stream_attention.integration.evicting_layer import VOTERS, Budget, EvictingLayer
from stream_attention.integration.placeholder import MAX_DECODE_QUERIES, read

HEADS, DIM = 2, 16
SMALL = Budget(tokens=12, sinks=2, recent=4, heavy="attention", every=5)
SCORES = ("attention", "key_norm", "value_norm", None)


def budget(heavy: str | None) -> Budget:
    return SMALL._replace(heavy=heavy, recent=4 if heavy is not None else 10)


def drawn(tokens: int, batch: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """Queries `[B, tokens, Hq, D]`, keys and values `[B, Hkv, tokens, D]`; a token's first channel is its number."""
    generator = torch.Generator().manual_seed(tokens)
    key, value = torch.randn(2, batch, HEADS, tokens, DIM, generator=generator)
    key[..., 0] = torch.arange(tokens)
    query = torch.randn(batch, tokens, 2 * HEADS, DIM, generator=generator)
    query[..., 0] = 0.0
    return query, key, value


def fed(layer: EvictingLayer, tokens: tuple[Tensor, Tensor, Tensor], sizes: list[int]) -> Tensor:
    """The attention of all tokens in turn, as the attention function computes it."""
    outs, start = [], 0
    for size in sizes:
        part = slice(start, start + size)
        query, given = tokens[0][:, part], [x[:, :, part] for x in tokens[1:]]
        keys, values = layer.update(*given)
        out = read(query, keys, None)
        outs.append(attention(query, keys.transpose(1, 2), values.transpose(1, 2), causal=True) if out is None else out)
        keys.stream_cached.observer(query, {})  # type: ignore[attr-defined]
        start += size
    return torch.cat(outs, 1)


def kept(layer: EvictingLayer, row: int = 0) -> list[list[int]]:
    """The numbers of the tokens that each head of a row holds."""
    assert layer.kv is not None
    return layer.kv.key[row, : layer.rows[row], :, 0].T.int().tolist()


# What stays


@pytest.mark.parametrize("heavy", SCORES)
def test_nothing_goes_before_there_is_no_room(heavy: str | None) -> None:
    layer, tokens = EvictingLayer(None, budget(heavy)), drawn(17)
    out = fed(layer, tokens, [10, *[1] * 7])
    assert kept(layer) == [[*range(17)]] * HEADS
    query, key, value = tokens[0], *(x.transpose(1, 2) for x in tokens[1:])
    torch.testing.assert_close(out, attention(query, key, value, causal=True))


@pytest.mark.parametrize("heavy", SCORES)
@pytest.mark.parametrize("sizes", [[40], [10, *[1] * 30], [10, 30], [10, 6, 6, 6, 6, 6]], ids=str)
def test_the_first_and_the_latest_stay(heavy: str | None, sizes: list[int]) -> None:
    layer = EvictingLayer(None, budget(heavy))
    fed(layer, drawn(40), sizes)
    assert layer.get_seq_length() == 40 and 12 <= layer.rows[0] <= 17
    for row in range(2):
        for tokens in kept(layer, row):
            assert tokens == sorted({*tokens}) and {0, 1, 36, 37, 38, 39} <= {*tokens}


def test_without_others_the_latest_fill_the_budget() -> None:
    layer = EvictingLayer(None, budget(None))
    fed(layer, drawn(40), [40])
    assert kept(layer) == [[0, 1, *range(30, 40)]] * HEADS


def test_what_the_latest_queries_look_at_stays() -> None:
    query, key, value = drawn(40)
    way = torch.nn.functional.normalize(torch.randn(DIM - 1), dim=0)
    query[..., 1:] += 4 * way
    key[:, 0, 20, 1:] += 8 * way
    key[:, 1, 7, 1:] += 8 * way
    layer = EvictingLayer(None, SMALL)
    fed(layer, (query, key, value), [40])
    assert [20 in kept(layer)[0], 7 in kept(layer)[1]] == [True, True]
    key[:, 0, 20, 1:], key[:, 1, 7, 1:] = way, way
    layer = EvictingLayer(None, SMALL)
    fed(layer, (-query, key - 8 * torch.cat([torch.zeros(1), way]), value), [40])
    assert [20 in kept(layer)[0], 7 in kept(layer)[1]] == [False, False]


def test_norms_choose_small_keys_or_large_values() -> None:
    for heavy, factor in (("key_norm", 1e-3), ("value_norm", 10.0)):
        query, key, value = drawn(40)
        (key if heavy == "key_norm" else value)[:, :, 10:16, 1:] *= factor
        key[..., 0] *= 1e-3  # the numbers must not weigh
        layer = EvictingLayer(None, budget(heavy))
        fed(layer, (query, key, value), [40])
        assert layer.kv is not None
        assert (layer.kv.key[0, :12, 0, 0] * 1e3).round().int().tolist() == [0, 1, *range(10, 16), 36, 37, 38, 39]


def test_tokens_go_when_so_many_have_come_and_not_before() -> None:
    layer, lengths = EvictingLayer(None, SMALL), []
    tokens = drawn(60)
    fed(layer, tokens, [10])
    for at in range(10, 60):
        fed(layer, (tokens[0][:, at : at + 1], *(x[:, :, at : at + 1] for x in tokens[1:])), [1])
        lengths.append(layer.rows[0])
    assert lengths == [*range(11, 18), *[13, 14, 15, 16, 17] * 8, 13, 14, 15]
    assert layer.kv is not None and layer.kv.lengths is not None and layer.kv.lengths.tolist() == layer.rows


# What is read


def test_later_queries_see_what_stayed_and_themselves() -> None:
    for new in (1, 4, MAX_DECODE_QUERIES + 4):
        layer, tokens = EvictingLayer(None, SMALL), drawn(40 + new)
        fed(layer, tuple(x[:, :40] if n == 0 else x[:, :, :40] for n, x in enumerate(tokens)), [40])
        assert layer.kv is not None
        stayed = [x[:, :12].clone() for x in (layer.kv.key, layer.kv.value)]
        query, key, value = tokens[0][:, 40:], *(x[:, :, 40:] for x in tokens[1:])
        keys, values = layer.update(key, value)
        assert keys.isnan().all() and keys.shape == values.shape == (2, HEADS, 40 + new, DIM)
        seen = [torch.cat([old, x.transpose(1, 2)], 1) for old, x in zip(stayed, (key, value), strict=True)]
        torch.testing.assert_close(read(query, keys, None), attention(query, *seen, causal=True))
        keys.stream_cached.observer(query, {})  # type: ignore[attr-defined]
        assert layer.rows[0] == (12 if new > 5 else 12 + new)


@pytest.mark.parametrize("heavy", SCORES)
@pytest.mark.parametrize("sizes", [[40], [10, 30]], ids=str)
def test_a_padded_row_keeps_what_it_would_keep_alone(heavy: str | None, sizes: list[int]) -> None:
    pads = [0, 7]
    tokens, mask = drawn(40), torch.arange(sizes[0]) >= torch.tensor(pads)[:, None]
    layer = EvictingLayer(mask, budget(heavy))
    tokens[0][1, :7] = 1e4  # of padding, whose queries have no vote
    fed(layer, tokens, sizes)
    for row, pad in enumerate(pads):
        alone = EvictingLayer(None, budget(heavy))
        query, key, value = (x[row : row + 1] for x in tokens)
        fed(alone, (query[:, pad:], key[:, :, pad:], value[:, :, pad:]), [sizes[0] - pad, *sizes[1:]])
        assert kept(layer, row) == kept(alone)


def test_rows_lose_tokens_together_and_never_their_first_and_latest() -> None:
    """When the longest has no room; so a shorter one may lose some earlier than it would alone."""
    tokens, mask = drawn(40), torch.arange(10) >= torch.tensor([[0], [7]])
    layer = EvictingLayer(mask, SMALL)
    fed(layer, tokens, [10, *[1] * 30])
    for row, pad in enumerate((0, 7)):
        assert all({pad, pad + 1, 36, 37, 38, 39} <= {*of_head} <= {*range(pad, 40)} for of_head in kept(layer, row))


def test_no_more_queries_are_held_than_vote() -> None:
    layer = EvictingLayer(None, SMALL)
    fed(layer, drawn(60), [30, *[1] * 30])
    assert layer.voters is not None and layer.voters.shape == (2, 4, 2 * HEADS, DIM)
    assert layer.kv is not None and layer.nbytes == layer.kv.nbytes + layer.voters.untyped_storage().nbytes()
    assert Budget(4096, 4, 2048, "attention", 64).voters == VOTERS and budget("key_norm").voters == 0


# What transformers may do with it


def test_cropping_undoes_what_came_since_tokens_went() -> None:
    layer, tokens = EvictingLayer(None, SMALL), drawn(43)
    fed(layer, tokens, [40, 1, 1, 1])
    layer.crop(-2)
    assert layer.get_seq_length() == 41 and layer.rows == [13, 13] and kept(layer)[0][-1] == 40
    with pytest.raises(ValueError, match="at most the 1 tokens since the last eviction; got 2"):
        layer.crop(-2)
    assert layer.get_seq_length() == 41
    whole = EvictingLayer(None, SMALL)
    fed(whole, drawn(15), [15])
    whole.crop(-10)
    assert kept(whole) == [[*range(5)]] * HEADS


def test_rows_are_chosen_and_repeated() -> None:
    layer = EvictingLayer(None, SMALL)
    fed(layer, drawn(41), [40, 1])
    before = [kept(layer, row) for row in range(2)]
    layer.batch_repeat_interleave(2)
    layer.reorder_cache(torch.tensor([3, 0]))
    assert [kept(layer, row) for row in range(2)] == before[::-1]
    assert layer.voters is not None and layer.voters.shape[0] == 2


def test_a_reset_forgets_everything() -> None:
    layer = EvictingLayer(None, SMALL)
    fed(layer, drawn(40), [40])
    layer.reset()
    assert layer.get_seq_length() == layer.nbytes == 0 and layer.voters is None
    fed(layer, drawn(15, batch=1), [15])
    assert kept(layer) == [[*range(15)]] * HEADS


def test_an_attention_that_shows_no_queries_is_refused() -> None:
    layer = EvictingLayer(None, SMALL)
    layer.update(*drawn(40)[1:])
    with pytest.raises(ValueError, match='"stream_attention", which passes the cache its queries'):
        layer.update(*drawn(1)[1:])
    blind = EvictingLayer(None, budget("key_norm"))
    blind.update(*drawn(40)[1:])
    blind.update(*drawn(1)[1:])
    assert blind.rows == [13, 13]
