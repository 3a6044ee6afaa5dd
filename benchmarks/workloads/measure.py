"""Compare the results of calls with fp64 on some rows, then time them in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from stream_attention_tools.bench.accuracy import Verdict, rows_verdict
from stream_attention_tools.bench.providers.base import error_line
from stream_attention_tools.bench.timing import Latency, captured, interleaved
from stream_attention_tools.testing.inputs import Tensors
from stream_attention_tools.testing.memory import peak_bytes

from .batches import ancestors
from .calls import OURS, Call, Step, calls


def sampled(made: Step) -> Iterator[tuple[slice, list[int], list[int], Tensors]]:
    """Of the first, the longest and the last request, up to eight rows in the query heads of the first and the last
    KV head: where its rows lie, which rows, which query heads, and what the reference computes them from."""
    requests, heads, kv_heads = made.workload.requests, made.query.shape[1], made.key_pages.shape[2]
    group, starts = heads // kv_heads, [0, *accumulate(one.queries for one in requests)]
    kv_drawn = sorted({0, kv_heads - 1})
    drawn = [head * group + n for head in kv_drawn for n in range(group)]
    longest = max(range(len(requests)), key=lambda n: requests[n].keys)
    for number in sorted({0, longest, len(requests) - 1}):
        one, page = requests[number], made.workload.page
        rows = sorted({n * (one.queries - 1) // 7 for n in range(8)})
        pages = made.table[number, : -(-one.keys // page)].long()
        key, value = (
            t[pages][:, :, kv_drawn].flatten(0, 1)[: one.keys][None] for t in (made.key_pages, made.value_pages)
        )
        place = slice(starts[number], starts[number + 1])
        options: dict[str, Any] = {"causal": not made.workload.tree, "window": made.window}
        if made.sink is not None:
            options["sink"] = made.sink[drawn]
        if made.workload.tree:
            older = torch.ones(len(rows), one.keys - one.queries, dtype=torch.bool)
            mask = torch.cat([older, ancestors(one.queries)[rows]], dim=1).to(key.device)
            options["mask"] = mask[None, None]
        options["q_positions"] = torch.tensor(rows, device=key.device) + (one.keys - one.queries)
        query = made.query[place][rows][:, drawn][None]
        yield place, rows, drawn, Tensors(query, key, value, options, query.new_empty(0))


def checked(made: Step, out: Tensor) -> Verdict:
    """A result `[Nq, Hq, D]` beside fp64 on sampled rows: the worst by what is allowed."""
    with torch.no_grad():
        verdicts = [rows_verdict(out[place][rows][:, heads][None], x) for place, rows, heads, x in sampled(made)]
    return max(verdicts, key=lambda one: (not one.right, one.error / max(one.allowed, 1e-30)))


class Wrong(Exception):
    """A result of ours that is further from fp64 than it may be."""


def measure(made: Step, fa3: Any, rounds: int, now: Callable[[str], None]) -> dict[str, Any]:
    """Everybody's error and times, or why there are none; on a GPU also the memory of a call and times of replays.

    Raises:
        Wrong: one of ours is.
    """
    device = made.query.device.type
    entries: dict[str, dict[str, Any]] = {}
    called: dict[str, Callable[[int], object]] = {}
    replayed: dict[str, Callable[[int], object]] = {}
    for name, call in calls(made, fa3).items():
        now(f"{made.workload.name}: checking {name}")
        if isinstance(call, str):
            entries[name] = {"unavailable": call}
            continue
        try:
            entries[name], allowed = _verdict(made, name, call)
            if device == "cuda":
                entries[name]["peak_bytes"] = peak_bytes(call, device)
                graph = captured([call], allowed)
                replayed[name] = lambda n, graph=graph: graph.replay()
            called[name] = lambda n, call=call: call()
        except Exception as error:
            if name in OURS:
                raise
            entries[name] = {"unavailable": error_line(error)}
    now(f"{made.workload.name}: timing {', '.join(called)}")
    flush = torch.empty(256 << 20 if device == "cuda" else 0, dtype=torch.int8, device=device)
    for kind, its, clock in (
        ("replayed", replayed, "graph"),
        ("called", called, "calls" if device == "cuda" else "wall"),
    ):
        samples = interleaved(its, clock, rounds, warmup=3, before=flush.zero_) if its else {}
        for name, ms in samples.items():
            latency = Latency.of(ms)
            entries[name][kind] = {
                f"{key}_us": round(getattr(latency, key) * 1e3, 2) for key in ("median", "p20", "p80")
            }
    return entries


def _verdict(made: Step, name: str, call: Call) -> tuple[dict[str, Any], float]:
    """How a result stands beside fp64, and how far a replay's may be from it; `write_kv` has none but its keys."""
    found = call()
    if name == "write_kv":
        return {}, 0.0
    verdict = checked(made, found if isinstance(found, Tensor) else found[0])
    if not verdict.right:
        raise Wrong(f"{name}: error {verdict.error:.2e}, allowed {verdict.allowed:.2e}")
    return {"error": verdict.error, "allowed": verdict.allowed}, verdict.allowed
