"""attention() of jagged nested tensors: each entry is a call of its own, and results are nested as the query is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from stream_attention import FusedOnlineAttention, attention, explain, varlen_attention

F64 = torch.float64
Q_LENGTHS, K_LENGTHS = (3, 0, 5, 2), (4, 2, 5, 7)
HEADS, DIM = 4, 8


def rows(count: int, heads: int = HEADS, dim: int = DIM, seed: int = 0) -> Tensor:
    return torch.randn(count, heads, dim, generator=torch.Generator().manual_seed(seed), dtype=F64)


def jagged(lengths: tuple[int, ...], **options: Any) -> Tensor:
    parts = list(rows(sum(lengths), **options).split(lengths))
    return torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)


def qkv(kv_heads: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """Two lengths for each entry; key and value have the same."""
    query, key = jagged(Q_LENGTHS), jagged(K_LENGTHS, heads=kv_heads, seed=1)
    value = torch.nested.nested_tensor_from_jagged(rows(sum(K_LENGTHS), kv_heads, 6, seed=2), key.offsets())
    return query, key, value.requires_grad_()


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (2, 1)},
    "everything": {"causal": True, "softcap": 3.0, "scale": 0.3, "sink": torch.ones(HEADS, dtype=F64)},
    "slopes": {"alibi_slopes": torch.linspace(0.1, 1.0, HEADS, dtype=F64)},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_each_entry_is_a_call_of_its_own(name: str) -> None:
    nested, options = qkv(), OPTIONS[name]
    out, lse = attention(*nested, return_lse=True, **options)
    assert out.is_nested and out.layout is torch.jagged
    assert out.shape[:3] == nested[0].shape[:3] and out.shape[3] == 6  # the same ragged size: they may be added
    assert lse.shape == (len(Q_LENGTHS), HEADS, nested[0].shape[1])
    weights = torch.randn(sum(Q_LENGTHS), HEADS, 6, dtype=F64)
    found = torch.autograd.grad((out.values() * weights).sum(), nested)
    entries = [t.unbind() for t in (*nested, out, lse, *found)]
    for index, (query, key, value, part, part_lse, *grads) in enumerate(zip(*entries, strict=True)):
        alone = [t.detach()[None].requires_grad_() for t in (query, key, value)]
        expected, expected_lse = attention(*alone, return_lse=True, backend="reference", **options)
        torch.testing.assert_close((part, part_lse), (expected[0], expected_lse[0]))
        own = weights.split(Q_LENGTHS)[index]
        wanted = torch.autograd.grad((expected[0] * own).sum(), alone)
        torch.testing.assert_close(tuple(grads), tuple(grad[0] for grad in wanted))


def test_it_is_the_pack_it_holds_without_a_copy() -> None:
    query, key, value = qkv()
    out = attention(query, key, value, causal=True, dropout_p=0.3, seed=5)
    packing = {"cu_seqlens_q": query.offsets(), "cu_seqlens_k": key.offsets()}
    packed = (t.values() for t in (query, key, value))
    expected = varlen_attention(*packed, **packing, causal=True, dropout_p=0.3, seed=5)
    assert torch.equal(out.values(), expected) and out.offsets() is query.offsets()


def test_self_attention_stays_in_the_model() -> None:
    x = jagged(Q_LENGTHS)
    (x + attention(x, x, x, causal=True)).sum().backward()
    assert x.grad is not None and x.grad.shape == x.shape
    assert FusedOnlineAttention(HEADS, DIM)(x, x, x).shape == x.shape


def test_compiled_in_one_graph_it_computes_the_same() -> None:
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    nested = qkv()
    out = compiled(*nested, causal=True)
    assert out.shape[:2] == nested[0].shape[:2]
    torch.testing.assert_close(out.values(), attention(*nested, causal=True).values())
    grads = [torch.autograd.grad(o.values().sum(), nested) for o in (out, attention(*nested, causal=True))]
    for found, expected in zip(*grads, strict=True):
        torch.testing.assert_close(found.values(), expected.values())


def test_explain_knows_them(capsys: pytest.CaptureFixture[str]) -> None:
    planned = explain(*qkv(), causal=True)
    assert planned.problem.packed and planned.problem.batch == 4 and planned.problem.q_len == 5
    assert "packed B=4 Tq<=5 Tk<=7 Hq=4 Hkv=2" in capsys.readouterr().out


# Refusals


def strided() -> Tensor:
    return torch.nested.nested_tensor([rows(3), rows(5)], layout=torch.strided)


def gaps() -> Tensor:
    return torch.nested.nested_tensor_from_jagged(rows(10), torch.tensor([0, 5, 10]), lengths=torch.tensor([3, 4]))


QUERY, KEY, VALUE = qkv()
TRUE = torch.ones(1, dtype=torch.bool)
WRONG: dict[str, tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = {
    "mask": ((QUERY, KEY, VALUE), {"mask": TRUE}, ValueError, r"mask: expected None with nested .*to_padded_tensor"),
    "bias": ((QUERY, KEY, VALUE), {"bias": rows(1)[0]}, ValueError, "bias: expected None with nested tensors"),
    "strided layout": ((strided(),) * 3, {}, TypeError, r"query: expected .* layout torch.jagged; got torch.strided"),
    "plain key": ((QUERY, rows(3)[None], VALUE), {}, TypeError, "key: expected a nested tensor like the query; got"),
    "plain query": ((rows(3)[None], KEY, VALUE), {}, TypeError, "key: expected a strided tensor; got a nested one"),
    "no tensor": ((QUERY, KEY, None), {}, TypeError, "value: expected a nested tensor like the query; got None"),
    "heads first": (
        (QUERY.transpose(1, 2), KEY, VALUE),
        {},
        ValueError,
        r"query: expected \[B, j, H, D\] with ragged j; got 4 dims, of which dim 2 is ragged. Pass x.transpose\(1, 2\)",
    ),
    "three dims": ((QUERY.flatten(2), KEY, VALUE), {}, ValueError, r"query: expected \[B, j, H, D\] .*; got 3 dims"),
    "gaps": (
        (gaps(),) * 3,
        {},
        ValueError,
        r"query: expected sequences without gaps .* Call .contiguous\(\) on it first",
    ),
    "other lengths": (
        (QUERY, KEY, QUERY),
        {},
        ValueError,
        "key and value: expected .* the same lengths in both",
    ),
    "other batch": ((QUERY, *(jagged((2, 3)),) * 2), {}, ValueError, "key and value: expected the query's B"),
    "heads": ((QUERY, *qkv(kv_heads=3)[1:]), {}, ValueError, "query: expected a multiple of the 3 KV heads as Hq"),
    "an option": ((QUERY, KEY, VALUE), {"softcap": -1.0}, ValueError, "softcap: expected"),
}


@pytest.mark.parametrize("name", WRONG)
def test_refuses(name: str) -> None:
    tensors, options, error, words = WRONG[name]
    for call in (attention, explain):
        with pytest.raises(error, match=words):
            call(*tensors, **options)
