"""Calls of ragged queries on paged keys, drawn at random, and what they give: `attention` in fp64, by requests."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stream_attention import attention, paged_attention

LAYOUTS = ("pages", "heads first", "side by side", "side by side, heads first", "strided")
"""How a pool may lie: in order, heads before tokens, K and V in one row as vLLM keeps them, or with gaps."""

NOWHERE = 10**6
"""A page that does not exist, where a table says nothing."""


@dataclass
class Case:
    """The tensors of a call, its options, and the lengths that it was made of."""

    tensors: tuple[Tensor, ...]  # query, key_pages, value_pages, cu_seqlens_q, seqused_k
    table: Tensor
    q_lens: list[int]
    k_lens: list[int]
    options: dict[str, Any]

    @property
    def pages(self) -> dict[str, Any]:
        return {"page_table": self.table, "max_seqlen_q": max(self.q_lens, default=0)}

    @property
    def listed(self) -> dict[str, Any]:
        """The same pages as a list."""
        page = self.tensors[1].shape[1]
        counts = [-(-length // page) for length in self.k_lens]
        parts = [self.table[b, :count] for b, count in enumerate(counts)]
        return {
            "kv_indptr": torch.tensor([0, *counts]).cumsum(0).int().to(self.table.device),
            "kv_indices": torch.cat(parts) if parts else self.table.new_zeros(0),
            "max_seqlen_q": max(self.q_lens, default=0),
            "max_seqlen_k": max(self.k_lens, default=0),
        }

    def to(self, device: str) -> Case:
        options = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in self.options.items()}
        tensors = tuple(t.to(device) for t in self.tensors)
        return Case(tensors, self.table.to(device), self.q_lens, self.k_lens, options)


def pool(layout: str, pages: int, page: int, heads: int, dim: int, value_dim: int, dtype: torch.dtype) -> list[Tensor]:
    """Key and value pages, NaN all over."""
    nan = torch.nan
    if layout == "heads first":
        return [torch.full((pages, heads, page, d), nan, dtype=dtype).transpose(1, 2) for d in (dim, value_dim)]
    if layout == "side by side":
        both = torch.full((pages, page, heads, dim + value_dim), nan, dtype=dtype)
        return list(both.split([dim, value_dim], -1))
    if layout == "side by side, heads first":
        both = torch.full((pages, heads, page, dim + value_dim), nan, dtype=dtype).transpose(1, 2)
        return list(both.split([dim, value_dim], -1))
    if layout == "strided":
        return [
            torch.full((pages + 1, page + 2, heads + 1, d + 8), nan, dtype=dtype)[1:, 1:-1, :-1, :d]
            for d in (dim, value_dim)
        ]
    return [torch.full((pages, page, heads, d), nan, dtype=dtype) for d in (dim, value_dim)]


def draw(seed: int, dtype: torch.dtype = torch.float32, longest: int = 40, **given: Any) -> Case:
    """A case. What no request has is NaN: keys behind its length, pages of nobody, rows of padding."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    batch = rng.choice((1, 2, 5, 9))
    page, kv_heads, group = rng.choice((1, 4, 16, 48)), rng.choice((1, 2)), rng.choice((1, 2, 3, 4))
    dim, value_dim = given.pop("dims", rng.choice(((16, 16), (32, 32), (40, 24), (64, 64))))
    q_lens = given.pop("q_lens", [rng.choice((0, 1, 1, 3, 17, longest)) for _ in range(batch)])
    k_lens = given.pop("k_lens", [rng.choice((0, 1, n, n + rng.randrange(60), n + rng.randrange(200))) for n in q_lens])
    needed = [-(-length // page) for length in k_lens]
    e4m3 = given.pop("e4m3", seed % 4 == 3 and dtype is not torch.float64)
    stored = torch.float8_e4m3fn if e4m3 else dtype
    key, value = pool(rng.choice(LAYOUTS), sum(needed) + 2, page, kv_heads, dim, value_dim, stored)
    table = torch.full((len(q_lens), max([1, *needed]) + rng.randrange(3)), NOWHERE, dtype=torch.int32)
    free = torch.randperm(sum(needed) + 2, generator=generator).tolist()
    for request, length in enumerate(k_lens):
        for n in range(needed[request]):
            table[request, n] = place = free.pop()
            tokens = min(page, length - n * page)
            key[place, :tokens] = normal(tokens, kv_heads, dim).to(stored)
            value[place, :tokens] = normal(tokens, kv_heads, value_dim).to(stored)
    rows = sum(q_lens)
    query = torch.full((rows + rng.choice((0, 3)), kv_heads * group, dim), torch.nan, dtype=dtype)
    query[:rows] = normal(rows, kv_heads * group, dim)
    offsets = torch.tensor([0, *q_lens]).cumsum(0).int()
    options: dict[str, Any] = {
        "causal": rng.random() < 0.7,
        "window": rng.choice((None, None, (7, 0), (20, 5), (-1, 3))),
        "softcap": rng.choice((0.0, 0.0, 2.0)),
        "scale": rng.choice((None, None, 0.3)),
    }
    if rng.random() < 0.4:
        slopes = torch.rand(len(q_lens), kv_heads * group, generator=generator)
        options["alibi_slopes"] = slopes if rng.random() < 0.5 or not q_lens else slopes[0]
    if rng.random() < 0.4:
        options["sink"] = torch.randn(kv_heads * group, generator=generator)
    if rng.random() < 0.3:
        options["causal"] = torch.rand(len(q_lens), generator=generator) < 0.5
        if rng.random() < 0.5:
            options["causal"] = options["causal"].int()
    if rng.random() < 0.3:
        options |= trees(q_lens, rng, generator)
    if e4m3:
        shapes: list[Any] = [(), (1,), (kv_heads,), (len(q_lens), kv_heads), (1, kv_heads), (len(q_lens), 1), None, 2.0]
        for name in ("k_scale", "v_scale"):
            shape = rng.choice(shapes)
            drawn = isinstance(shape, tuple)
            options[name] = torch.rand(shape, generator=generator) * 2 + 0.5 if drawn else shape
    return Case(
        (query, key, value, offsets, torch.tensor(k_lens, dtype=torch.int32)), table, q_lens, k_lens, options | given
    )


def trees(q_lens: list[int], rng: random.Random, generator: torch.Generator) -> dict[str, Tensor]:
    """Masks of the new tokens of most requests, of any pattern: rows that see nothing among them."""
    masks = [torch.rand(n, n, generator=generator) < 0.5 if rng.random() < 0.7 else torch.ones(0) > 0 for n in q_lens]
    elements = torch.cat([mask.flatten() for mask in masks]) if masks else torch.ones(0) > 0
    offsets = torch.tensor([0, *(mask.numel() for mask in masks)]).cumsum(0)
    return {"tree_mask": elements, "tree_offsets": offsets if rng.random() < 0.5 else offsets.int()}


def own_options(case: Case, request: int, q_len: int, length: int) -> dict[str, Any]:
    """The options of one request, as `attention` takes them: a tree is a mask."""
    options = {name: x for name, x in case.options.items() if name not in ("k_scale", "v_scale", "batch_invariant")}
    if isinstance(options["causal"], Tensor):
        options["causal"] = bool(options["causal"][request])
    slopes = options.get("alibi_slopes")
    if slopes is not None:
        options["alibi_slopes"] = slopes if slopes.dim() == 1 else slopes[request]
    elements, offsets = options.pop("tree_mask", None), options.pop("tree_offsets", None)
    if elements is not None and offsets[request] != offsets[request + 1]:
        mask = torch.ones(q_len, length, dtype=torch.bool)
        tree = elements[offsets[request] : offsets[request + 1]].view(q_len, q_len)
        old = length - q_len
        mask[:, max(old, 0) :] = tree[:, max(-old, 0) :]
        mask[: max(-old, 0)] = False  # they stand before position 0
        options |= {"mask": mask, "causal": False}
    return options


def scaled(pages: Tensor, scale: Any, request: int) -> Tensor:
    """Keys or values `[1, Tk, Hkv, D]` of a request, with what they are to be multiplied by."""
    if isinstance(scale, Tensor):
        scale = scale[min(request, scale.shape[0] - 1)] if scale.dim() == 2 else scale
        return pages * scale.to(pages.dtype).expand(pages.shape[2])[:, None]
    return pages if scale is None else pages * scale


def expected(case: Case, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Out and LSE by the reference, request by request; rows of no request are 0 and -inf."""
    query, key, value, offsets, _ = case.tensors
    rows, heads, _ = query.shape
    out = torch.zeros(rows, heads, value.shape[3], dtype=torch.float64)
    lse = torch.full((heads, rows), -torch.inf, dtype=torch.float64)
    for request, length in enumerate(case.k_lens):
        first, last = offsets[request : request + 2].tolist()
        if first == last:
            continue
        pages = case.table[request, : -(-length // key.shape[1])].long()
        keys, values = (
            scaled(t[pages].flatten(0, 1)[:length].to(dtype)[None], case.options.get(name), request)
            for t, name in ((key, "k_scale"), (value, "v_scale"))
        )
        options = own_options(case, request, int(last - first), length)
        backend = "reference" if dtype is torch.float64 else "eager"
        its_out, its_lse = attention(
            query[None, first:last].to(dtype), keys, values, **options, return_lse=True, backend=backend
        )
        out[first:last], lse[:, first:last] = its_out[0].double(), its_lse[0].double()
    return out, lse


def check(case: Case, backend: str, device: str = "cpu", listed: bool = False) -> None:
    """Compare a call with fp64: its error may be twice that of the same computation by `attention` in its dtype."""
    moved = case.to(device)
    table = moved.listed if listed else moved.pages
    out, lse = paged_attention(*moved.tensors, **table, **moved.options, return_lse=True, backend=backend)
    (exact, exact_lse), (rounded, rounded_lse) = expected(case), expected(case, case.tensors[0].dtype)
    least = 4 * torch.finfo(case.tensors[0].dtype).eps
    for name, one, spec, narrow, tiny in (
        ("out", out, exact, rounded, least),
        ("lse", lse, exact_lse, rounded_lse, 1e-5),
    ):
        one = one.cpu().double()
        infinite = spec.isinf()
        assert torch.equal(one[infinite], spec[infinite]), f"{name}: rows that see nothing"
        error = (one - spec)[~infinite].abs().max() if (~infinite).any() else torch.tensor(0.0)
        allowed = 2 * (narrow - spec)[~infinite].abs().max() if (~infinite).any() else torch.tensor(0.0)
        size = spec[~infinite].abs().max() if (~infinite).any() else torch.tensor(0.0)
        assert error <= allowed + tiny * size, f"{name}: error {error:.2e}, allowed {allowed + tiny * size:.2e}"
