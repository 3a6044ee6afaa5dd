"""flash_attn_with_kvcache of both libraries: a row after the other, in plain torch and fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.compat.eager import attend, randn, rotated, visible
from torch import Tensor
from torch.testing import assert_close

from stream_attention.base.kv_layouts.write import Rotary
from stream_attention.compat import flash_attn, flash_attn_interface

TOKENS, HEADS, KV_HEADS, DIM = 24, 4, 2, 8
LENGTHS = torch.tensor([5, 0, 17], dtype=torch.int32)
ANGLES = randn(TOKENS, 3, seed=9)
SLOPES = torch.tensor([0.5, 0.25, 0.125, 1.0])


def rows_of(given: dict[str, Any], batch: int) -> list[tuple[Tensor, Tensor]]:
    """Where tokens of each row lie in a cache: (row or page, slot) by position from its first token on."""
    table = given.get("block_table", given.get("page_table"))
    index = given.get("cache_batch_idx")
    found = []
    for row in range(batch):
        first = 0 if given.get("cache_leftpad") is None else int(given["cache_leftpad"][row])
        stored = row if index is None else int(index[row])
        if table is None:
            slot = torch.arange(first, TOKENS)
            found.append((torch.full_like(slot, stored), slot))
        else:
            position = torch.arange(first, table.shape[1] * given["page"])
            found.append((table[stored].long()[position // given["page"]], position % given["page"]))
    return found


def compare(library: Any, q_len: int, new: int, stores: tuple[Tensor, Tensor], **given: Any) -> None:
    """A call on rows of LENGTHS tokens against attention written out, and what it leaves behind."""
    batch, rotary = 3, given.pop("rotary", None)
    q = randn(batch, q_len, HEADS, DIM, seed=3)
    k, v = randn(batch, new, KV_HEADS, DIM, seed=4), randn(batch, new, KV_HEADS, DIM, seed=5)
    causal, window = given.get("causal", False), given.get("window_size", (-1, -1))
    ours = [x.clone() for x in stores]
    truth = [x.clone() for x in stores]
    passed = {name: value for name, value in given.items() if name != "page"}
    if rotary is not None:
        passed |= {"rotary_cos": rotary.cos, "rotary_sin": rotary.sin, "rotary_interleaved": rotary.interleaved}
    lengths = passed.setdefault("cache_seqlens", LENGTHS)
    before = lengths.clone() if isinstance(lengths, Tensor) else None
    tensors = (k, v) if new else (None, None)
    out, lse, *_ = library.flash_attn_with_kvcache(q, *ours, *tensors, **passed, return_softmax_lse=True)
    for row, (store, slot) in enumerate(rows_of(given, batch)):
        first = 0 if given.get("cache_leftpad") is None else int(given["cache_leftpad"][row])
        length = TOKENS if lengths is None else int(lengths if isinstance(lengths, int) else lengths[row])
        its_q, its_k = q[row : row + 1], k[row : row + 1]
        if rotary is not None:
            start = length if given.get("rotary_seqlens") is None else int(given["rotary_seqlens"][row])
            bounded = causal or max(window) >= 0
            its_q = rotated(its_q, (start + torch.arange(q_len) * bounded)[None], rotary)
            its_k = rotated(its_k, (start + torch.arange(new))[None], rotary)
        written = slice(length - first, length - first + new)
        for one, fresh in zip(truth, (its_k, v[row : row + 1]), strict=True):
            one[store[written], slot[written]] = fresh[0]
        end = length - first + new
        keys, values = (one[store[:end], slot[:end]][None] for one in truth)
        slopes = given.get("alibi_slopes")
        options = {"scale": given.get("softmax_scale"), "softcap": given.get("softcap", 0.0), "slopes": slopes}
        wanted, its_lse = attend(its_q, keys, values, visible(q_len, end, causal, window), **options)
        assert_close(out[row], wanted[0])
        absent = torch.inf if library is flash_attn else -torch.inf
        assert_close(lse[row].double(), its_lse[0].masked_fill(its_lse[0] == -torch.inf, absent))
    for mine, theirs in zip(ours, truth, strict=True):
        assert_close(mine, theirs)
    assert before is None or torch.equal(lengths, before)  # they are the caller's


def contiguous(rows: int = 3) -> tuple[Tensor, Tensor]:
    return randn(rows, TOKENS, KV_HEADS, DIM), randn(rows, TOKENS, KV_HEADS, DIM, seed=1)


def paged(page: int) -> dict[str, Any]:
    count = TOKENS // page
    table = torch.randperm(3 * count + 2, generator=torch.Generator().manual_seed(0))[: 3 * count]
    pages = randn(3 * count + 2, page, KV_HEADS, DIM), randn(3 * count + 2, page, KV_HEADS, DIM, seed=1)
    return {"table": table.view(3, count).int(), "pages": pages}


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "a window": {"window_size": (4, 0)},
    "a softcap and a scale": {"softcap": 2.0, "softmax_scale": 0.3, "causal": True},
    "splits, which are planned here": {"num_splits": 3},
    "one length for all": {"cache_seqlens": 7, "causal": True},
    "a left padding": {"cache_leftpad": torch.tensor([2, 0, 9], dtype=torch.int32), "causal": True},
    "rows of a larger cache": {"cache_batch_idx": torch.tensor([4, 0, 2], dtype=torch.int32), "causal": True},
    "rotated": {"rotary": Rotary(ANGLES.cos(), ANGLES.sin(), True), "causal": True},
    "rotated in halves, all queries alike": {"rotary": Rotary(ANGLES.cos(), ANGLES.sin(), False)},
    "rotated with a left padding": {
        "rotary": Rotary(ANGLES.cos(), ANGLES.sin(), True),
        "cache_leftpad": torch.tensor([2, 0, 9], dtype=torch.int32),
        "window_size": (6, -1),
    },
}


@pytest.mark.parametrize("new", [0, 1, 3])
@pytest.mark.parametrize("given", CASES.values(), ids=CASES)
@pytest.mark.parametrize("library", [flash_attn, flash_attn_interface], ids=["2", "3"])
def test_a_contiguous_cache(library: Any, given: dict[str, Any], new: int) -> None:
    if "rotary" in given and not new:
        new = 2  # without new tokens nothing is rotated: refused below
    compare(library, max(new, 1), new, contiguous(5), **given)


def test_slopes_and_a_cache_without_lengths() -> None:
    compare(flash_attn, 2, 0, contiguous(), alibi_slopes=SLOPES, causal=True)
    compare(flash_attn_interface, 2, 0, contiguous(), cache_seqlens=None)


@pytest.mark.parametrize("page", [4, 24], ids=str)
@pytest.mark.parametrize(("library", "name"), [(flash_attn, "block_table"), (flash_attn_interface, "page_table")])
def test_pages(library: Any, name: str, page: int) -> None:
    made = paged(page)
    compare(library, 2, 2, made["pages"], **{name: made["table"], "page": page, "causal": True})


def test_rows_of_a_larger_page_table() -> None:
    """FlashAttention-3 takes `cache_batch_idx` beside a table, as the rows of the table."""
    made = paged(4)
    table, index = made["table"].repeat(2, 1), torch.tensor([4, 0, 2], dtype=torch.int32)
    options = {"page_table": table, "page": 4, "cache_batch_idx": index, "causal": True}
    compare(flash_attn_interface, 2, 2, made["pages"], **options)
    compare(flash_attn_interface, 1, 0, made["pages"], **options)


def test_pages_of_more_tokens_than_a_cache_of_ours_has() -> None:
    """They are divided: 512 tokens are two pages of 256."""
    pages, values = randn(2, 512, 1, 4), randn(2, 512, 1, 4, seed=1)
    table, lengths = torch.tensor([[1, 0]], dtype=torch.int32), torch.tensor([700], dtype=torch.int32)
    q, k = randn(1, 1, 1, 4), randn(1, 1, 1, 4, seed=2)
    out = flash_attn.flash_attn_with_kvcache(q, pages, values, k, k, cache_seqlens=lengths, block_table=table)
    assert torch.equal(pages[0, 188], k[0, 0])
    keys, whole = (x[[1, 0]].flatten(0, 1)[None, :701] for x in (pages, values))
    assert_close(out, attend(q, keys, whole)[0])


def test_a_left_padding_of_rows_in_pages() -> None:
    made = paged(4)
    first = torch.tensor([2, 0, 9], dtype=torch.int32)
    given = {"page_table": made["table"], "page": 4, "cache_leftpad": first, "causal": True}
    compare(flash_attn_interface, 1, 1, made["pages"], **given)


def test_rotary_positions_of_their_own() -> None:
    rotary, at = Rotary(ANGLES.cos(), ANGLES.sin(), True), torch.tensor([1, 0, 9], dtype=torch.int32)
    compare(flash_attn_interface, 2, 2, contiguous(), rotary=rotary, rotary_seqlens=at, causal=True)


@pytest.mark.parametrize("in_pages", [True, False])
@pytest.mark.parametrize("rotary", [None, Rotary(ANGLES.cos(), ANGLES.sin(), False)], ids=["plain", "rotated"])
def test_ragged_queries_and_new_tokens(rotary: Rotary | None, in_pages: bool) -> None:
    q_offsets, k_offsets = torch.tensor([[0, 3, 4, 6], [0, 2, 2, 5]], dtype=torch.int32)
    q, k, v = randn(7, HEADS, DIM, seed=3), randn(6, KV_HEADS, DIM, seed=4), randn(6, KV_HEADS, DIM, seed=5)
    made = paged(4)
    stores = made["pages"] if in_pages else contiguous()
    ours = [x.clone() for x in stores]
    truth = [x.clone() for x in stores]
    given = {"page_table": made["table"], "page": 4} if in_pages else {}
    options: dict[str, Any] = {name: value for name, value in given.items() if name != "page"}
    if rotary is not None:
        options |= {"rotary_cos": rotary.cos, "rotary_sin": rotary.sin, "rotary_interleaved": False}
    options |= {"cu_seqlens_q": q_offsets, "cu_seqlens_k_new": k_offsets, "max_seqlen_q": 3, "causal": True}
    call = flash_attn_interface.flash_attn_with_kvcache
    out, lse, *_ = call(q, *ours, k, v, cache_seqlens=LENGTHS, **options, return_softmax_lse=True)
    assert lse.shape == (HEADS, 7)
    for row, (store, slot) in enumerate(rows_of(given, 3)):
        rows, fresh = slice(*q_offsets[row : row + 2].tolist()), slice(*k_offsets[row : row + 2].tolist())
        length = int(LENGTHS[row])
        end = length + fresh.stop - fresh.start
        its_q, its_k = q[None, rows], k[None, fresh]
        if rotary is not None:
            its_q = rotated(its_q, torch.arange(length, length + its_q.shape[1])[None], rotary)
            its_k = rotated(its_k, torch.arange(length, end)[None], rotary)
        truth[0][store[length:end], slot[length:end]] = its_k[0]
        truth[1][store[length:end], slot[length:end]] = v[fresh]
        keys, values = (x[store[:end], slot[:end]][None] for x in truth)
        wanted, its_lse = attend(its_q, keys, values, visible(its_q.shape[1], end, True))
        assert_close(out[rows], wanted[0])
        assert_close(lse[:, rows].double(), its_lse[0])
    for mine, theirs in zip(ours, truth, strict=True):
        assert_close(mine, theirs)


def test_it_is_not_differentiable_as_in_the_library() -> None:
    q = randn(3, 1, HEADS, DIM).requires_grad_()
    assert not flash_attn.flash_attn_with_kvcache(q, *contiguous(), cache_seqlens=LENGTHS).requires_grad


# Refusals

Q, CACHE = torch.zeros(3, 1, HEADS, DIM), torch.zeros(3, TOKENS, KV_HEADS, DIM)
NEW, COS = torch.zeros(3, 1, KV_HEADS, DIM), torch.zeros(TOKENS, 4)
INDEX, TABLE = torch.zeros(3, dtype=torch.int32), torch.zeros(3, 1, dtype=torch.int32)
two, three = flash_attn.flash_attn_with_kvcache, flash_attn_interface.flash_attn_with_kvcache
REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "last dim": (lambda: two(Q, CACHE[..., ::2], CACHE[..., ::2]), AssertionError, "^k_cache: expected a contiguous"),
    "k alone": (lambda: two(Q, CACHE, CACHE, NEW, cache_seqlens=1), RuntimeError, "^v: expected new values"),
    "no lengths": (lambda: two(Q, CACHE, CACHE, NEW, NEW), RuntimeError, "^cache_seqlens: expected an int or a tensor"),
    "too many": (
        lambda: two(Q, CACHE, CACHE, NEW, NEW, cache_seqlens=TOKENS),
        RuntimeError,
        "^cache_seqlens: expected from 0 to the capacity, 24; got 24 in row 0, with 1 to append",
    ),
    "length": (lambda: two(Q, CACHE, CACHE, cache_seqlens=25), RuntimeError, "^cache_seqlens: expected from 0"),
    "int64": (
        lambda: two(Q, CACHE, CACHE, cache_seqlens=LENGTHS.long()),
        RuntimeError,
        "^cache_seqlens: expected dtype torch.int32",
    ),
    "rotary alone": (
        lambda: two(Q, CACHE, CACHE, rotary_cos=COS, rotary_sin=COS),
        RuntimeError,
        "^k: expected new tokens where rotary_cos is given",
    ),
    "no sin": (
        lambda: two(Q, CACHE, CACHE, NEW, NEW, COS, cache_seqlens=1),
        RuntimeError,
        r"^rotary_cos and rotary_sin: expected shape \[positions, R / 2\]",
    ),
    "wide": (
        lambda: two(Q, CACHE, CACHE, NEW, NEW, COS.repeat(1, 2), COS.repeat(1, 2), 1),
        RuntimeError,
        "R at most D=8",
    ),
    "short tables": (
        lambda: two(Q, CACHE, CACHE, NEW, NEW, COS[:3], COS[:3], 5),
        RuntimeError,
        "^cache_seqlens: expected from 0 to the rotary table's positions, 3",
    ),
    "index and pages": (
        lambda: two(Q, CACHE, CACHE, cache_batch_idx=INDEX, block_table=TABLE),
        RuntimeError,
        "^cache_batch_idx: expected None with a block_table",
    ),
    "padding and pages": (
        lambda: two(Q, CACHE, CACHE, cache_leftpad=INDEX, block_table=TABLE),
        RuntimeError,
        "^cache_leftpad: expected None with a block_table",
    ),
    "gaps": (
        lambda: two(Q, CACHE[:, :20], CACHE[:, :20], cache_seqlens=1, cache_batch_idx=INDEX),
        NotImplementedError,
        "^k_cache: expected rows that follow each other in memory",
    ),
    "dtype": (lambda: two(Q.half(), CACHE, CACHE, cache_seqlens=1), RuntimeError, "^q: expected the cache's dtype"),
    "max_seqlen_q": (
        lambda: three(Q[:, 0], CACHE, CACHE, cache_seqlens=1, cu_seqlens_q=torch.arange(4).int()),
        RuntimeError,
        "^max_seqlen_q: expected an int where cu_seqlens_q is given",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_bad_call_raises_what_the_library_raises(name: str) -> None:
    call, error, words = REFUSED[name]
    with pytest.raises(error, match=words):
        call()
