"""A workload in memory, and the calls that compute it: ours and FlashAttention-3's."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stream_attention import PagedKV, decode_attention, paged_attention, paged_plan, write_kv
from stream_attention_tools.bench.providers.base import error_line, tried
from stream_attention_tools.bench.providers.decode import FEW
from stream_attention_tools.bench.providers.flash_attention import FlashAttention3

from .batches import TABLE_TOKENS, Heads, Workload, ancestors

Call = Callable[[], Any]

OURS = ("paged", "paged, plan reused", "decode", "write_kv")
PEERS = ("fa3", "fa3, metadata reused")


class Step(NamedTuple):
    """A workload in memory."""

    workload: Workload
    query: Tensor  # [Nq, Hq, D]
    key_pages: Tensor  # [P, page, Hkv, D]
    value_pages: Tensor
    offsets: Tensor  # int32 [B + 1]
    lengths: Tensor  # int32 [B]
    table: Tensor  # int32 [B, W]
    sink: Tensor | None
    new: tuple[Tensor, Tensor, Tensor]  # keys and values of the new tokens, and their slots

    @property
    def call(self) -> tuple[Tensor, ...]:
        return self.query, self.key_pages, self.value_pages, self.offsets, self.lengths

    @property
    def pages(self) -> dict[str, Any]:
        """What `paged_attention` and `paged_plan` have in common beside the tensors."""
        longest = max(one.queries for one in self.workload.requests)
        return {"page_table": self.table, "max_seqlen_q": longest, "window": self.window}

    @property
    def window(self) -> tuple[int, int] | None:
        return None if self.workload.window is None else (self.workload.window - 1, 0)


def step(workload: Workload, heads: Heads, device: str, scale: int = 1) -> Step:
    """Random tensors, whose new tokens `write_kv` writes. Page 0 is nobody's, and what tables say behind a request."""
    generator = torch.Generator(device).manual_seed(workload.number)

    def normal(*shape: int, dtype: torch.dtype = workload.dtype) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    page, requests = workload.page, workload.requests
    common = workload.shared // page
    needed = [-(-one.keys // page) for one in requests]
    pool = common + sum(needed) - common * len(requests)
    free = (torch.randperm(pool, generator=torch.Generator().manual_seed(workload.number)) + 1).int()
    table = torch.zeros(len(requests), max(*needed, TABLE_TOKENS // scale // page), dtype=torch.int32)
    table[:, :common] = free[:common]
    taken, slots = common, []
    for row, one, columns in zip(table, requests, needed, strict=True):
        row[common:columns] = free[taken : taken + columns - common]
        taken += columns - common
        positions = torch.arange(one.keys - one.queries, one.keys)
        slots.append(row[positions // page].long() * page + positions % page)
    key_pages, value_pages = (normal(pool + 1, page, heads.kv, heads.dim) for _ in range(2))
    new = *(normal(workload.queries, heads.kv, heads.dim) for _ in range(2)), torch.cat(slots).to(device)
    made = Step(
        workload,
        normal(workload.queries, heads.query, heads.dim),
        key_pages,
        value_pages,
        torch.tensor([0, *accumulate(one.queries for one in requests)], dtype=torch.int32, device=device),
        torch.tensor([one.keys for one in requests], dtype=torch.int32, device=device),
        table.to(device),
        normal(heads.query, dtype=torch.float32) if workload.sink else None,
        new,
    )
    write_kv(new[0], new[1], key_pages, value_pages, new[2])
    return made


def fa3_or_why_not(folder: Path | None, device: str) -> Any:
    """The ops of FlashAttention-3 in a folder, or the reason why they are not there."""
    if folder is None:
        return "no --fa3 DIR was given"
    if device != "cuda" or torch.cuda.get_device_capability() != (9, 0):
        return "it runs on Hopper (sm_90) alone"
    peer = FlashAttention3(folder)
    return tried(peer._load) or peer._ops


# Who computes it: by name a call, or the reason why not


def calls(made: Step, fa3: Any) -> dict[str, Call | str]:
    """Everybody in the order of the file. `fa3` has FlashAttention-3's ops, or is the reason why they are not there."""
    ours: dict[str, Call | str] = {**_paged(made), "decode": _decode(made), "write_kv": _write(made)}
    return ours | _fa3(made, fa3)


def _paged(made: Step) -> dict[str, Call | str]:
    """With the plan made by the call itself, and before it, as the layers of a model share it."""
    tree: dict[str, Tensor] = {}
    if made.workload.tree:
        if "tree_mask" not in inspect.signature(paged_attention).parameters:
            return dict.fromkeys(OURS[:2], "paged_attention takes no tree masks")
        squares = [one.queries**2 for one in made.workload.requests]
        masks = [ancestors(one.queries).flatten() for one in made.workload.requests]
        tree["tree_mask"] = torch.cat(masks).to(made.query.device)
        tree["tree_offsets"] = made.offsets.new_tensor([0, *accumulate(squares)])
    options: dict[str, Any] = {**made.pages, **tree, "sink": made.sink}
    plan = paged_plan(*made.call, **made.pages)
    attend: Any = paged_attention
    return {
        "paged": lambda: attend(*made.call, **options),
        "paged, plan reused": lambda: attend(*made.call, **options, plan=plan),
    }


def _decode(made: Step) -> Call | str:
    counts = {one.queries for one in made.workload.requests}
    if len(counts) > 1 or max(counts) > FEW:
        return f"decode_attention requires as many queries of every request, {FEW} at most here"
    count, requests = counts.pop(), len(made.workload.requests)
    query = made.query.unflatten(0, (requests, count))
    cache = PagedKV(made.key_pages, made.value_pages, made.table, made.lengths)
    options: dict[str, Any] = {"window": made.window, "sink": made.sink}
    if made.workload.tree:
        options["tree_mask"] = ancestors(count).to(query.device).expand(requests, -1, -1).contiguous()
    attend: Any = decode_attention
    return lambda: attend(query, cache, **options).flatten(0, 1)


def _write(made: Step) -> Call:
    key, value, slots = made.new
    return lambda: write_kv(key, value, made.key_pages, made.value_pages, slots)


def _fa3(made: Step, fa3: Any) -> dict[str, Call | str]:
    """Its op, as `flash_attn_with_kvcache` calls it; its scheduler's metadata are made by the call, or before it."""
    lacking = [word for word, used in (("sinks", made.workload.sink), ("tree masks", made.workload.tree)) if used]
    if isinstance(fa3, str) or lacking:
        reason = fa3 if isinstance(fa3, str) else f"it has no {' and '.join(lacking)}"
        return dict.fromkeys(PEERS, reason)
    left, right = (-1, -1) if made.window is None else made.window
    longest = made.pages["max_seqlen_q"]
    common = {"is_causal": True, "window_size_left": left, "window_size_right": right, "num_splits": 0}
    common |= {"cu_seqlens_q": made.offsets, "seqused_k": made.lengths, "max_seqlen_q": longest}
    forward, query = fa3.fwd.default, made.query

    def attend(metadata: Tensor | None) -> Any:
        return forward(
            query, made.key_pages, made.value_pages, page_table=made.table, scheduler_metadata=metadata, **common
        )

    def metadata() -> Tensor:
        _, page, kv_heads, dim = made.key_pages.shape
        requests, columns = made.table.shape
        sizes = {"batch_size": requests, "max_seqlen_k": columns * page, "max_seqlen_k_new": 0, "page_size": page}
        sizes |= {"num_heads": query.shape[1], "num_heads_k": kv_heads, "headdim": dim, "headdim_v": dim}
        # Some builds have no defaults.
        unused = dict.fromkeys(("cu_seqlens_k", "cu_seqlens_k_new", "seqused_q", "leftpad_k", "pack_gqa"))
        unused |= {"attention_chunk": 0, "has_softcap": False, "sm_margin": 0}
        return fa3.get_scheduler_metadata.default(qkv_dtype=query.dtype, **sizes, **common, **unused)

    found: dict[str, Call | str] = {PEERS[0]: lambda: attend(None)}
    try:
        made_before = metadata()
        found[PEERS[1]] = lambda: attend(made_before)
    except Exception as error:  # a build without this op
        found[PEERS[1]] = error_line(error)
    return found
