"""paged_attention: ragged queries on paged keys, in plain torch, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import paged_cases
import pytest
import torch
from paged_cases import NOWHERE, Case, check, draw, expected
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from stream_attention import (
    PagedKV,
    UnsupportedProblem,
    attention,
    decode_attention,
    explain_paged,
    paged_attention,
    paged_plan,
    varlen_attention,
    write_kv,
)
from stream_attention.dispatch import paged


@pytest.mark.parametrize("seed", range(40))
def test_agreement_with_the_reference(seed: int) -> None:
    check(draw(seed), "eager", listed=seed % 3 == 0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_agreement_in_other_dtypes(dtype: torch.dtype) -> None:
    for seed in range(100, 104):
        check(draw(seed, dtype), "auto")


def test_tokens_of_a_step_are_what_decode_attention_gives() -> None:
    case = draw(1, q_lens=[1, 1, 1], k_lens=[33, 0, 70], window=None, alibi_slopes=None, sink=None)
    query, key, value, _, lengths = case.tensors
    options = {name: case.options[name] for name in ("softcap", "scale")}
    table = case.table.clamp(max=key.shape[0] - 1)
    cache = PagedKV(key, value, table, lengths)
    step = decode_attention(query[:3, None], cache, **options)
    torch.testing.assert_close(paged_attention(*case.tensors, **case.pages, **options)[:3], step[:, 0])


def test_prompts_without_a_past_are_what_varlen_attention_gives() -> None:
    case = draw(2, q_lens=[5, 0, 23], k_lens=[5, 0, 23], window=None, alibi_slopes=None, sink=None, causal=True)
    query, key, value, offsets, _ = case.tensors
    rows = [case.table[b, : -(-n // key.shape[1])].long() for b, n in enumerate(case.k_lens)]
    keys, values = (
        torch.cat([t[row].flatten(0, 1)[:n] for row, n in zip(rows, case.k_lens, strict=True)]) for t in (key, value)
    )
    packed = varlen_attention(
        query[:28], keys, values, cu_seqlens_q=offsets, cu_seqlens_k=offsets, causal=True,
        softcap=case.options["softcap"], scale=case.options["scale"],
    )  # fmt: skip
    torch.testing.assert_close(paged_attention(*case.tensors, **case.pages, **case.options)[:28], packed)


def test_rows_of_no_request_are_0_or_what_they_were_in_out() -> None:
    case = draw(3, q_lens=[2, 0, 3], k_lens=[9, 5, 0])
    query = torch.cat([case.tensors[0][:5], torch.full_like(case.tensors[0][:1], torch.nan).expand(4, -1, -1)])
    tensors = (query, *case.tensors[1:])
    out = paged_attention(*tensors, **case.pages, **case.options)
    assert not out[5:].any() and not out[2:5].any() and out[:2].all()
    given = torch.full_like(out, 7.0)
    found = paged_attention(*tensors, **case.pages, **case.options, out=given)
    assert found is given and torch.equal(given[:5], out[:5]) and (given[5:] == 7).all()


@pytest.mark.parametrize("requests", [0, 2])
def test_no_queries(requests: int) -> None:
    case = draw(4, q_lens=[0] * requests, k_lens=[4] * requests, alibi_slopes=None)
    out, lse = paged_attention(*case.tensors, **case.pages, **case.options, return_lse=True)
    assert not out.any() and (lse == -torch.inf).all()


def test_a_wrong_entry_of_the_table_reaches_its_own_request_alone() -> None:
    case = draw(5, q_lens=[2, 3, 1], k_lens=[20, 20, 20], window=None, sink=None)
    clean = paged_attention(*case.tensors, **case.pages, **case.options)
    case.table[1, 0] = -1
    out = paged_attention(*case.tensors, **case.pages, **case.options, validate=False)
    assert torch.equal(out[:2], clean[:2]) and torch.equal(out[5:6], clean[5:6]) and out[2:5].isnan().any()


def test_a_tree_by_hand() -> None:
    """Two drafts of one token each behind a token: neither sees the other. A request without a tree is causal."""
    pages = torch.randn(2, 2, 8, 1, 16)
    query, lengths = torch.randn(5, 2, 16), torch.tensor([6, 4], dtype=torch.int32)
    table, offsets = torch.tensor([[1], [0]], dtype=torch.int32), torch.tensor([0, 3, 5], dtype=torch.int32)
    tree = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool)
    begins = torch.tensor([0, 9, 9], dtype=torch.int32)
    out = paged_attention(
        query, *pages, offsets, lengths, page_table=table, max_seqlen_q=3, tree_mask=tree.flatten(), tree_offsets=begins
    )
    key, value = pages[:, 1, None]
    without = [0, 1, 2, 3, 5]  # the second draft sees what it would if the first were not there
    alone = attention(query[None, 2:3], key[:, without], value[:, without])
    torch.testing.assert_close(out[2], alone[0, 0])
    torch.testing.assert_close(out[:2], attention(query[None, :2], key[:, :5], value[:, :5], causal=True)[0])
    key, value = pages[:, 0, None, :4]
    torch.testing.assert_close(out[3:], attention(query[None, 3:], key, value, causal=True)[0])


def test_a_tree_of_a_wrong_size_is_none_where_nothing_is_checked() -> None:
    case = draw(8, q_lens=[3, 2], k_lens=[20, 9], causal=True, tree_mask=None, tree_offsets=None)
    tree = {"tree_mask": torch.zeros(7) > 0, "tree_offsets": torch.tensor([0, 7, 7])}
    plain = paged_attention(*case.tensors, **case.pages, **case.options)
    found = paged_attention(*case.tensors, **case.pages, **case.options | tree, validate=False)
    torch.testing.assert_close(found, plain)


def test_pages_in_e4m3_are_what_write_kv_writes() -> None:
    key, value = torch.randn(2, 11, 2, 16)
    pages = torch.zeros(2, 3, 4, 2, 16).to(torch.float8_e4m3fn)
    scales = {"k_scale": torch.tensor([0.02, 0.03]), "v_scale": 0.025}
    write_kv(key, value, *pages, torch.arange(11), **scales)
    query, offsets = torch.randn(11, 4, 16), torch.tensor([0, 11], dtype=torch.int32)
    table = torch.tensor([[0, 1, 2]], dtype=torch.int32)
    out = paged_attention(query, *pages, offsets, offsets[1:], page_table=table, max_seqlen_q=11, **scales)
    keys = pages[0].flatten(0, 1)[None, :11].float() * scales["k_scale"][:, None]
    values = pages[1].flatten(0, 1)[None, :11].float() * 0.025
    torch.testing.assert_close(out, attention(query[None], keys, values, causal=True)[0])


def test_what_other_requests_do_changes_no_bit_of_an_invariant_call() -> None:
    case = draw(8, q_lens=[2, 9, 1], k_lens=[50, 9, 40], window=None, causal=True, sink=None, alibi_slopes=None)
    query, key, value, _, lengths = case.tensors
    whole = paged_attention(*case.tensors, **case.pages, **case.options, batch_invariant=True)
    for request, (first, last) in enumerate([(0, 2), (2, 11), (11, 12)]):
        offsets = torch.tensor([0, last - first], dtype=torch.int32)
        options = {name: x for name, x in case.options.items() if not isinstance(x, Tensor)}
        alone = paged_attention(
            query[first:last], key, value, offsets, lengths[request : request + 1],
            page_table=case.table[request : request + 1], max_seqlen_q=last - first, batch_invariant=True, **options,
        )  # fmt: skip
        assert torch.equal(whole[first:last], alone)


def without_tree(seed: int, **given: Any) -> Case:
    """A case whose calls differ in lengths alone from others of it."""
    given |= {"window": None, "causal": True, "softcap": 0.0, "sink": None, "alibi_slopes": None, "dims": (32, 32)}
    return draw(seed, e4m3=False, tree_mask=None, tree_offsets=None, **given)


def test_new_lengths_compile_nothing_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries, keys, requests, pages and their table are sizes of the graph."""
    torch._dynamo.reset()
    monkeypatch.setattr(torch.fx.experimental._config, "use_duck_shape", False)  # sizes that are equal by chance
    monkeypatch.setattr(paged_cases, "LAYOUTS", ("pages",))
    graphs = []

    def count(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append(graph)
        return graph

    def step(tensors: tuple[Tensor, ...], pages: dict[str, Any], out: Tensor | None) -> Any:
        return paged_attention(*tensors, **pages, out=out, return_lse=True)

    compiled = torch.compile(step, backend=count, fullgraph=True, dynamic=True)
    for q_lens, k_lens in (([3, 40], [80, 90]), ([7, 5], [30, 66]), ([2, 9, 30], [20, 9, 61]), ([50, 2], [50, 2])):
        case = without_tree(10, q_lens=q_lens, k_lens=k_lens)
        out = torch.zeros(case.tensors[0].shape)
        with torch.no_grad():
            compiled_found = compiled(case.tensors, case.pages, out)
            found = step(case.tensors, case.pages, None)
        assert compiled_found[0] is out
        torch.testing.assert_close(compiled_found, found)
    assert len(graphs) == 1


@pytest.mark.parametrize("seed", [3, 11, 20, 27])
def test_the_ops_pass_opcheck(seed: int) -> None:
    case = draw(seed, e4m3=False)  # opcheck multiplies what an op reads
    given: list[Any] = []
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(paged.call_key, "is_watched", lambda: True)
        patch.setattr(paged, "_by_op", lambda *call: given.extend(call) or (torch.zeros(()), None))
        paged_attention(*case.tensors, **case.pages, **case.options)
    inputs, options, look, _ = given
    arguments = *inputs[:-2], *options, look, None, ()
    torch.library.opcheck(torch.ops.stream_attention.paged.default, arguments)
    out = torch.zeros(*case.tensors[0].shape[:2], case.tensors[2].shape[3], dtype=case.tensors[0].dtype)
    torch.library.opcheck(torch.ops.stream_attention.paged_into.default, (*arguments, out))


def test_fake_tensors_go_through() -> None:
    case = draw(12)
    with FakeTensorMode() as mode, torch.no_grad():
        fake = replace(case, tensors=tuple(map(mode.from_tensor, case.tensors)), table=mode.from_tensor(case.table))
        options = {name: mode.from_tensor(x) if isinstance(x, Tensor) else x for name, x in case.options.items()}
        out, lse = paged_attention(*fake.tensors, **fake.pages, **options, return_lse=True)
    query, value = case.tensors[0], case.tensors[2]
    assert out.shape == (*query.shape[:2], value.shape[3]) and lse.shape == (query.shape[1], query.shape[0])


CASE = draw(7, q_lens=[2, 3], k_lens=[20, 9], alibi_slopes=None, sink=None, e4m3=False)
E4M3 = draw(7, q_lens=[2, 3], k_lens=[20, 9], alibi_slopes=None, sink=None, e4m3=True)


def changed(place: int, t: Tensor) -> Case:
    return replace(CASE, tensors=(*CASE.tensors[:place], t, *CASE.tensors[place + 1 :]))


Q, K, V, OFFSETS, KEYS = CASE.tensors
REFUSED: dict[str, tuple[Case, dict[str, Any], str]] = {
    "4-D query": (changed(0, Q[None]), {}, r"query: expected \[Nq, Hq, D="),
    "dtype of the query": (changed(0, Q.half()), {}, "query: expected the dtype of key_pages"),
    "heads": (changed(0, Q[:, :1].expand(-1, 2 * K.shape[2] + 1, -1)), {}, "query: expected a multiple of"),
    "flat pages": (changed(1, K[0]), {}, r"key_pages: expected shape \[P, page, Hkv, D\]"),
    "other values": (changed(2, V[1:]), {}, "value_pages: expected shape"),
    "offsets": (changed(3, OFFSETS[:-1]), {}, r"cu_seqlens_q: expected shape \[B \+ 1 = 3\]"),
    "offsets of int64": (changed(3, OFFSETS.long()), {}, r"cu_seqlens_q: expected dtype torch.int32.*\.int\(\)"),
    "offsets that fall": (changed(3, OFFSETS.flip(0)), {}, "cu_seqlens_q: expected 0 as the first value"),
    "more queries than said": (CASE, {"max_seqlen_q": 1}, "max_seqlen_q: expected at least the longest sequence, 3"),
    "keys of int64": (changed(4, KEYS.long()), {}, "seqused_k: expected dtype torch.int32"),
    "negative keys": (changed(4, KEYS - 100), {}, "seqused_k: expected from 0 to"),
    "more keys than the table": (changed(4, KEYS + 1000), {}, "seqused_k: expected from 0 to"),
    "a missing page": (replace(CASE, table=CASE.table * 0 + NOWHERE), {}, "page_table: expected pages from 0 to"),
    "table of floats": (replace(CASE, table=CASE.table.float()), {}, "page_table: expected dtype torch.int32"),
    "1-D table": (replace(CASE, table=CASE.table[0]), {}, "page_table: expected shape"),
    "negative max_seqlen_q": (CASE, {"max_seqlen_q": -1}, "max_seqlen_q: expected at least 0"),
    "max_seqlen_q of float": (CASE, {"max_seqlen_q": 2.0}, "max_seqlen_q: expected an int"),
    "shape of out": (CASE, {"out": Q[:1]}, "out: expected"),
    "slopes": (CASE, {"alibi_slopes": torch.rand(1)}, "alibi_slopes: expected shape"),
    "window": (CASE, {"window": 3}, "window: expected a tuple of two ints"),
    "gradient": (changed(0, Q.clone().requires_grad_()), {}, "query: expected requires_grad=False"),
    "block_table": (CASE, {"block_table": CASE.table}, "`block_table` is called `page_table` here"),
    "lengths of keys as offsets": (CASE, {"cu_seqlens_k": OFFSETS}, "`cu_seqlens_k` is called `seqused_k` here"),
    "descale of FA3": (CASE, {"k_descale": KEYS.float()}, "`k_descale` is called `k_scale` here"),
    "sinks of vLLM": (CASE, {"sinks": None}, "`sinks` is called `sink` here"),
    "unknown word": (CASE, {"dropout_p": 0.1}, "unexpected keyword argument 'dropout_p'"),
    "max_seqlen_q as a tensor": (CASE, {"max_seqlen_q": KEYS.max()}, r"max_seqlen_q: expected an int.*Call int\(\)"),
    "swapped": (replace(CASE, tensors=(Q, K, V, KEYS, OFFSETS)), {}, "cu_seqlens_q: .*Are the two swapped"),
    "causal of fewer requests": (CASE, {"causal": KEYS[:1].bool()}, r"causal: expected shape \[B=2\]"),
    "causal of floats": (
        CASE,
        {"causal": KEYS.float()},
        r"causal: expected dtype torch.bool or torch.int32.*\.bool\(\)",
    ),
    "a tree without offsets": (
        CASE,
        {"tree_mask": torch.ones(13) > 0},
        "tree_offsets: expected a tensor beside tree_mask",
    ),
    "offsets without trees": (CASE, {"tree_offsets": OFFSETS}, "tree_mask: expected a tensor beside tree_offsets"),
    "a tree that is no square": (
        CASE,
        {"tree_mask": torch.ones(13) > 0, "tree_offsets": torch.tensor([0, 3, 12])},
        "tree_offsets: expected the 2 x 2 elements of request 0, or none; got 3, from 0 to 3",
    ),
    "trees beyond their mask": (
        CASE,
        {"tree_mask": torch.ones(12) > 0, "tree_offsets": torch.tensor([0, 4, 13])},
        "tree_offsets: expected from 0 to the 12 elements of tree_mask",
    ),
    "2-D trees": (
        CASE,
        {"tree_mask": torch.ones(2, 2) > 0, "tree_offsets": OFFSETS},
        r"tree_mask: expected shape \[elements of all trees\].*torch.cat",
    ),
    "a scale of pages that have none": (CASE, {"k_scale": 2.0}, "k_scale: expected None for pages in torch.float32"),
    "shape of a scale": (E4M3, {"v_scale": torch.ones(3, 3)}, r"v_scale: expected shape \[\], \[Hkv="),
    "scale of bf16": (E4M3, {"k_scale": torch.ones((), dtype=torch.bfloat16)}, "k_scale: expected dtype torch.float32"),
    "scale 0": (E4M3, {"k_scale": 0.0}, "k_scale: expected from"),
    "pages in bytes": (
        replace(E4M3, tensors=(E4M3.tensors[0], *(t.view(torch.uint8) for t in E4M3.tensors[1:3]), *E4M3.tensors[3:])),
        {"k_scale": None, "v_scale": None},
        r"key_pages: .*pass key_pages.view\(torch.float8_e4m3fn\)",
    ),
    "batch_invariant": (CASE, {"batch_invariant": 1}, "batch_invariant: expected a bool"),
    "causal of FA": (CASE, {"is_causal": True}, "`is_causal` is called `causal` here"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_refused_in_words(name: str) -> None:
    case, wrong, words = REFUSED[name]
    options = {**case.pages, **case.options, **wrong}
    with pytest.raises((ValueError, TypeError), match=words):
        paged_attention(*case.tensors, **options)


def test_pages_are_said_in_one_way() -> None:
    for tables in (CASE.pages | CASE.listed, {"max_seqlen_q": 3}, {"kv_indptr": OFFSETS, "max_seqlen_q": 3}):
        with pytest.raises(ValueError, match="page_table: expected it, or kv_indptr and kv_indices"):
            paged_attention(*CASE.tensors, **tables)


def test_the_longest_request_bounds_lengths() -> None:
    listed = {name: value for name, value in CASE.listed.items() if name != "max_seqlen_k"}
    expected = paged_attention(*CASE.tensors, **CASE.pages, **CASE.options)
    assert torch.equal(paged_attention(*CASE.tensors, **listed, **CASE.options), expected)
    with pytest.raises(ValueError, match="seqused_k: expected from 0 to the 19 keys that a request may have; got 20"):
        paged_attention(*CASE.tensors, **CASE.pages, **CASE.options, max_seqlen_k=19)


def test_a_plan_is_taken_and_anything_else_refused() -> None:
    plan = paged_plan(*CASE.tensors, **CASE.pages, window=CASE.options["window"])
    expected = paged_attention(*CASE.tensors, **CASE.pages, **CASE.options)
    assert torch.equal(paged_attention(*CASE.tensors, **CASE.pages, **CASE.options, plan=plan), expected)
    with pytest.raises(TypeError, match="plan: expected a PagedPlan, from paged_plan; got Tensor"):
        paged_attention(*CASE.tensors, **CASE.pages, plan=plan.work)  # type: ignore[arg-type]


def test_a_list_that_is_too_short_is_refused() -> None:
    listed = CASE.listed
    with pytest.raises(ValueError, match="kv_indptr: expected a last value of at most"):
        paged_attention(*CASE.tensors, **listed | {"kv_indices": listed["kv_indices"][:-1]})
    offsets = listed["kv_indptr"].clone()
    offsets[-1] -= 1
    with pytest.raises(ValueError, match="kv_indices: expected a page for each of the 9 keys of request 1"):
        paged_attention(*CASE.tensors, **listed | {"kv_indptr": offsets})
    with pytest.raises(ValueError, match="kv_indptr: expected 0 as the first value; got -1"):
        paged_attention(*CASE.tensors, **listed | {"kv_indptr": listed["kv_indptr"] - 1})


def test_a_backend_that_cannot_says_why() -> None:
    with pytest.raises(UnsupportedProblem, match="gluon: does not support ragged queries on pages"):
        paged_attention(*CASE.tensors, **CASE.pages, backend="gluon")
    with pytest.raises(UnsupportedProblem, match="reference"):
        paged_attention(*CASE.tensors, **CASE.pages, backend="reference")


def test_explain_says_what_would_run_and_refuses_what_the_call_does(capsys: pytest.CaptureFixture[str]) -> None:
    plan = explain_paged(*CASE.tensors, **CASE.pages, **CASE.options)
    printed = capsys.readouterr().out
    assert plan.backend == "eager" and "Tq<=3" in printed and "ragged queries on pages" in printed
    assert explain_paged(*CASE.tensors, **CASE.listed, **CASE.options).backend == "eager"
    with pytest.raises(ValueError, match="page_table: expected it, or kv_indptr and kv_indices; got neither"):
        explain_paged(*CASE.tensors, max_seqlen_q=3)
    with pytest.raises(TypeError, match="block_table"):
        explain_paged(*CASE.tensors, **CASE.pages, block_table=CASE.table)


def test_the_check_itself_finds_a_wrong_result() -> None:
    case = draw(8, q_lens=[3], k_lens=[9], window=None, causal=True)
    exact, _ = expected(case)
    other, _ = expected(replace(case, options=case.options | {"causal": False}))
    assert (exact - other).abs().max() > 1e-3
