"""attention() and varlen_attention() of DTensors (ops/dtensor.py): shards by batch or heads are the whole call."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import pytest
import torch
from torch import Tensor

from stream_attention import FusedOnlineAttention, attention, explain, varlen_attention

pytest.importorskip("torch.distributed.tensor")

pytestmark = pytest.mark.xdist_group("ranks")

F64 = torch.float64
HEADS, DIM, VALUE_DIM, BATCH, Q_LEN, K_LEN = 4, 8, 6, 3, 5, 7  # two ranks have batches of 2 and 1
OFFSETS = {"cu_seqlens_q": torch.tensor([0, 3, 5]), "cu_seqlens_k": torch.tensor([0, 4, 7])}


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def call_tensors(kv_heads: int, packed: bool, modified: bool) -> dict[str, Tensor]:
    """The whole tensors of a call: query, key, value and the differentiable ones beside them."""
    batch = () if packed else (BATCH,)
    tensors = {
        "query": normal(*batch, Q_LEN, HEADS, DIM, seed=0),
        "key": normal(*batch, K_LEN, kv_heads, DIM, seed=1),
        "value": normal(*batch, K_LEN, kv_heads, VALUE_DIM, seed=2),
    }
    if modified:
        tensors |= {"sink": normal(HEADS, seed=3), "alibi_slopes": normal(HEADS, seed=4)}
    if modified and not packed:
        tensors |= {"bias": normal(HEADS, Q_LEN, 1, seed=5), "alibi_slopes": normal(BATCH, HEADS, seed=4)}
    return tensors


def placements_of(names: str) -> list[Any]:
    from torch.distributed.tensor import Partial, Replicate, Shard

    kinds = {"batch": Shard(0), "heads": Shard(2), "rows": Shard(1), "dim": Shard(3), "packed heads": Shard(1)}
    return [(kinds | {"whole": Replicate(), "sum": Partial()})[name] for name in names.split(", ")]


def distributed(tensors: dict[str, Tensor], placed: dict[str, str]) -> dict[str, Any]:
    """DTensors over a mesh of 2 x 2; what `placed` does not name is a tensor that all ranks have."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    mesh = init_device_mesh("cpu", (2, 2))
    made = {n: distribute_tensor(t, mesh, placements_of(placed[n])) if n in placed else t for n, t in tensors.items()}
    return {name: tensor.detach().requires_grad_() for name, tensor in made.items()}


def full(tensor: Any) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def compare(
    rank: int, groups: Any, placed: dict[str, str], kv_heads: int, packed: bool, modified: bool, compiled: bool
) -> None:
    whole = {n: t.requires_grad_() for n, t in call_tensors(kv_heads, packed, modified).items()}
    op: Any = varlen_attention if packed else attention
    options: dict[str, Any] = {"causal": True, "return_lse": True} | (OFFSETS if packed else {})
    if modified and not packed:
        options["mask"] = torch.arange(K_LEN) < torch.tensor([7, 6, 4])[:, None, None, None]
    expected, expected_lse = op(**whole, **options)
    weights = normal(*expected.shape, seed=6)
    wanted = torch.autograd.grad((expected * weights).sum() + expected_lse.sum(), list(whole.values()))

    tensors = distributed(whole, placed)
    call = torch.compile(op, fullgraph=True, backend="aot_eager") if compiled else op
    out, lse = call(**tensors, **options)
    assert out.placements == tuple(placements_of(placed["query"])) and out.shape == expected.shape
    torch.testing.assert_close((full(out), full(lse)), (expected, expected_lse))
    ((full(out) * weights).sum() + full(lse).sum()).backward()
    for name, gradient in zip(whole, wanted, strict=True):
        torch.testing.assert_close(full(tensors[name].grad), gradient, msg=lambda text, name=name: f"{name}: {text}")


def all_alike(placements: str) -> dict[str, str]:
    return dict.fromkeys(("query", "key", "value"), placements)


CASES: dict[str, dict[str, Any]] = {
    "heads": {"placed": all_alike("whole, heads")},
    "batch": {"placed": all_alike("batch, whole")},
    "batch and heads": {"placed": all_alike("batch, heads")},
    "heads over both": {"placed": all_alike("heads, heads"), "kv_heads": 4},
    "whole": {"placed": all_alike("whole, whole")},
    "keys whole": {"placed": all_alike("whole, whole") | {"query": "batch, heads"}},
    "one KV head": {"placed": all_alike("whole, whole") | {"query": "batch, heads"}, "kv_heads": 1},
    "modifiers on all ranks": {"placed": all_alike("batch, heads"), "modified": True},
    "modifiers replicated": {
        "placed": all_alike("batch, heads") | dict.fromkeys(("sink", "bias", "alibi_slopes"), "whole, whole"),
        "modified": True,
    },
    "a sharded sink": {"placed": all_alike("whole, heads") | {"sink": "whole, batch"}, "modified": True},
    "packed": {"placed": all_alike("whole, packed heads"), "packed": True, "modified": True},
    "compiled": {"placed": all_alike("batch, heads"), "compiled": True},
}


@pytest.mark.parametrize("name", CASES)
def test_shards_are_the_whole_call_forward_and_backward(pool: Any, name: str) -> None:
    defaults = {"kv_heads": 2, "packed": False, "modified": False, "compiled": False}
    pool.results(compare, **(defaults | CASES[name]))


def alone_or_one_entry(rank: int, groups: Any) -> None:
    """Over a mesh dim of one rank everything is whole; a batch of 1 is sharded as the query's is."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    for sizes, kv_heads in (((1, 4), 4), ((4, 1), 1)):
        tensors = {name: t[:1] for name, t in call_tensors(kv_heads, False, False).items()}
        mesh = init_device_mesh("cpu", sizes)
        sharded = {name: distribute_tensor(t, mesh, placements_of("batch, heads")) for name, t in tensors.items()}
        torch.testing.assert_close(full(attention(**sharded)), attention(**tensors))


def test_a_mesh_dim_of_one_rank_and_a_batch_of_one(pool: Any) -> None:
    pool.results(alone_or_one_entry)


def explained(rank: int, groups: Any) -> tuple[str, Any]:
    tensors = distributed(call_tensors(2, False, False), all_alike("batch, heads"))
    module = FusedOnlineAttention(HEADS, DIM)
    assert module(*tensors.values()).placements == tensors["query"].placements
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        explain(**tensors, causal=True)
    return printed.getvalue().splitlines()[0], module.last_method_used


def test_explain_shows_the_part_of_a_rank_and_modules_take_them(pool: Any) -> None:
    for rank, (line, method) in enumerate(pool.results(explained)):
        assert f"dense B={2 - rank // 2} Tq=5 Tk=7 Hq=2 Hkv=1" in line and method is None


# Refusals


def refused(rank: int, groups: Any, placed: dict[str, str], kv_heads: int = 2, **options: Any) -> str:
    from torch.distributed.tensor import DTensor

    tensors = call_tensors(kv_heads, False, False)
    by_sum = [name for name in placed if "sum" in placed[name]]
    made = distributed(tensors, {n: p for n, p in placed.items() if n not in by_sum} | {"query": "whole, whole"})
    mesh = made["query"].device_mesh
    made |= {name: DTensor.from_local(tensors[name], mesh, placements_of(placed[name])) for name in by_sum}
    if "query" in placed and "query" not in by_sum:
        made["query"] = made["query"].redistribute(placements=placements_of(placed["query"]))
    messages = []
    for call in (attention, explain):
        with pytest.raises((ValueError, TypeError)) as caught:
            call(**made, **options)
        messages.append(f"{caught.type.__name__}: {caught.value}")
    assert messages[0] == messages[1]
    return messages[0]


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a sharded sequence": (
        {"placed": all_alike("rows, whole")},
        "ValueError: query: expected Shard(0) (by batch) or Shard(2) (by heads) or Replicate(); got Shard(dim=1). For "
        "a sharded sequence, pass the local shards, x.to_local(), to stream_attention.distributed.ring_attention",
    ),
    "keys of a sharded sequence": (
        {"placed": all_alike("whole, whole") | {"key": "rows, whole"}},
        "ValueError: key: expected Shard(0) (by batch)",
    ),
    "a sharded head dim": ({"placed": all_alike("whole, dim")}, "got Shard(dim=3). Use x.redistribute(placements=...)"),
    "a sum": ({"placed": all_alike("sum, whole")}, "got Partial(sum). Reduce it first: x.redistribute("),
    "keys by heads, queries by batch": (
        {"placed": all_alike("whole, heads") | {"query": "whole, batch"}},
        "ValueError: key: expected Shard(dim=0) or Replicate() with a query that is Shard(dim=0); got Shard(dim=2)",
    ),
    "keys sharded, queries not": (
        {"placed": all_alike("whole, heads") | {"query": "whole, whole"}},
        "ValueError: key: expected Replicate() with a query that is Replicate(); got Shard(dim=2)",
    ),
    "heads that ranks cannot share": (
        {"placed": all_alike("heads, heads")},
        "ValueError: query: expected head counts divisible by 4 ranks; got Hq=4 and Hkv=2",
    ),
    "a plain key": (
        {"placed": {"query": "whole, heads", "value": "whole, heads"}},
        "TypeError: key: expected a DTensor like the query; got Tensor. To make one, call DTensor.from_local(",
    ),
    "dropout": (
        {"placed": all_alike("whole, heads"), "dropout_p": 0.5, "seed": 1},
        "ValueError: dropout_p: expected 0.0 with DTensors; got 0.5. Each rank would generate its own mask",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_refuses(pool: Any, name: str) -> None:
    arguments, words = WRONG[name]
    for message in pool.results(refused, **arguments):
        assert words in message
