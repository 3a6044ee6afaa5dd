"""Importance: the attention itself says what stays."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from stream_attention import attention, attention_mass
from stream_attention.backends.reference import attention as reference
from stream_attention.kvcache import ImportanceBasedCompressor, StreamingCompressor


def looking_at(wanted: list[list[int]], length: int = 32) -> tuple[Tensor, Tensor, Tensor]:
    """One row whose KV heads' queries look at the wanted keys of each head, from the second half on."""
    heads = len(wanted)
    query, keys = torch.zeros(1, length, heads, 8), torch.zeros(1, length, heads, 8)
    query[:, length // 2 :, :, 0] = 30.0
    for head, places in enumerate(wanted):
        keys[:, places, head, 0] = 3.0
    return query, keys, torch.randn(1, length, heads, 8, generator=torch.Generator().manual_seed(0))


# Semantics


def test_each_head_keeps_what_its_queries_look_at() -> None:
    query, keys, values = looking_at([[3, 7, 9, 12], [1, 2, 13, 14]])
    _, _, stats = ImportanceBasedCompressor().compress(keys, values, 8.0, query=query)
    assert stats.positions[0].tolist() == [[3, 7, 9, 12], [1, 2, 13, 14]]
    assert stats.method == "importance (attention_sum)"


def test_heads_that_share_a_key_vote_together() -> None:
    query, keys, values = looking_at([[3, 7]])
    two = torch.cat([query, torch.zeros_like(query)], dim=2)
    _, _, stats = ImportanceBasedCompressor().compress(keys, values, 16.0, query=two)
    assert stats.positions[0].tolist() == [[3, 7]]


def test_norms_by_name() -> None:
    keys = torch.arange(1.0, 9.0).view(1, 8, 1, 1).expand(1, 8, 1, 4)
    values = keys.flip(1)
    kept = {
        method: ImportanceBasedCompressor(method).compress(keys, values, 4.0)[2].positions.flatten().tolist()
        for method in ("auto", "key_norm", "value_norm")
    }
    assert kept == {"auto": [0, 1], "key_norm": [0, 1], "value_norm": [0, 1]}
    assert ImportanceBasedCompressor("value_norm").compress(values, keys, 4.0)[2].positions.tolist() == [[[6, 7]]]


def test_keeping_the_most_attention_changes_the_output_least() -> None:
    """Where attention is concentrated, a quarter of the cache by mass beats the latest quarter by far."""
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(2, 128, 4, 16, generator=generator) * 3
    keys, values = torch.randn(2, 2, 128, 2, 16, generator=generator)
    last, whole = query[:, -8:], attention(query[:, -8:], keys, values)
    errors = []
    for compressor, said in ((ImportanceBasedCompressor(), {"query": last}), (StreamingCompressor(), {})):
        new_keys, new_values, _ = compressor.compress(keys, values, 4.0, **said)
        errors.append(float((attention(last, *compressor.decompress(new_keys, new_values)) - whole).norm()))
    assert errors[0] < 0.5 * errors[1], errors


def test_a_mass_says_what_its_query_would() -> None:
    query, keys, values = (torch.randn(2, 40, h, 8, generator=torch.Generator().manual_seed(h)) for h in (4, 2, 2))
    by_query = ImportanceBasedCompressor().compress(keys, values, 4.0, query=query, scale=1.0, causal=False)[2]
    mass = attention_mass(query, keys, scale=1.0)
    by_mass = ImportanceBasedCompressor().compress(keys, values, 4.0, mass=mass)[2]
    assert torch.equal(by_query.positions, by_mass.positions)
    exact = reference.attention_mass(query, keys, scale=1.0).topk(10).indices.sort(-1).values
    assert torch.equal(by_mass.positions, exact)


def test_queries_on_padding_do_not_vote() -> None:
    query, keys, values = looking_at([[3, 7]], length=60)
    keys[:, [4, 5], :, 1] = 3.0
    query[:, 5:20, :, 0] = 30.0
    query[:, 20:, :, 0], query[:, 20:, :, 1] = 0.0, 30.0  # of padding: two times as many votes for 4 and 5
    compressor = ImportanceBasedCompressor()
    assert compressor.compress(keys, values, 30.0, query=query)[2].positions.tolist() == [[[4, 5]]]
    lengths = torch.tensor([20])
    assert compressor.compress(keys, values, 10.0, query=query, lengths=lengths)[2].positions.tolist() == [[[3, 7]]]


# Weights that arrive from elsewhere


def test_attention_weights_add_up_until_they_are_used() -> None:
    keys, values = torch.randn(2, 1, 6, 1, 4, generator=torch.Generator().manual_seed(0))
    compressor = ImportanceBasedCompressor("attention_sum")
    compressor.update_attention_scores(torch.tensor([0.0, 0.9, 0.1, 0.0]).view(1, 1, 1, 4))
    late = torch.tensor([[0.0, 0.1, 0.2, 0.0, 0.7, 0.0], [0.0, 0.0, 0.9, 0.0, 0.0, 0.1]])
    compressor.update_attention_scores(late.view(1, 1, 2, 6))  # sums: 0, 1, 1.2, 0, 0.7, 0.1
    stats = compressor.compress(keys, values, 3.0)[2]
    assert stats.positions.tolist() == [[[1, 2]]] and stats.method == "importance (attention_sum)"
    with pytest.raises(ValueError, match="query: expected query or mass; got None"):
        compressor.compress(keys, values, 3.0)  # they were used up


def test_weights_and_a_query_vote_together() -> None:
    query, keys, values = looking_at([[3, 7]], length=16)
    compressor = ImportanceBasedCompressor()
    weights = torch.zeros(1, 1, 1, 16)
    weights[..., 11] = 100.0
    compressor.update_attention_scores(weights)
    assert compressor.compress(keys, values, 8.0, query=query)[2].positions.tolist() == [[[3, 11]]]


# Refusals


def test_what_cannot_be_scored_is_refused() -> None:
    keys = values = torch.zeros(1, 6, 2, 4)
    with pytest.raises(ValueError, match=r"method: expected one of auto, attention_sum, .*; got 'random'"):
        ImportanceBasedCompressor("random")
    with pytest.raises(ValueError, match=r'query: expected query or mass.*"key_norm" and "streaming" need neither'):
        ImportanceBasedCompressor("attention_sum").compress(keys, values)
    with pytest.raises(ValueError, match="query: expected None; got a value"):
        ImportanceBasedCompressor("value_norm").compress(keys, values, query=keys)
    with pytest.raises(
        ValueError, match=r"weights: expected none for the method key_norm, .*; got a value. Make it with"
    ):
        ImportanceBasedCompressor("key_norm").update_attention_scores(torch.zeros(1, 2, 1, 6))
    compressor = ImportanceBasedCompressor()
    with pytest.raises(ValueError, match=r"weights: expected a floating tensor \[B, Hq, Tq, T\]; got \[2, 6\]"):
        compressor.update_attention_scores(torch.zeros(2, 6))
    compressor.update_attention_scores(torch.zeros(1, 2, 1, 7))
    with pytest.raises(ValueError, match=r"weights: expected \[B, Hq\] = \[1, 2\], T from 7; got \[1, 2, 1, 6\]"):
        compressor.update_attention_scores(torch.zeros(1, 2, 1, 6))
    with pytest.raises(ValueError, match=r"update_attention_scores: expected weights of \[B=1, Hq, Tq, T=6\]"):
        compressor.compress(keys, values)
