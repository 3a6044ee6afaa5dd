"""Checkpointing that keeps attention: what runs how often, gradients bit for bit, memory kept, also when compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from stream_attention import StreamAttention, StreamAttentionConfig, attention, varlen_attention
from stream_attention.utils.memory import (
    MemoryProfiler,
    gradient_checkpoint_sequential,
    save_attention,
    stream_checkpoint_policy,
)

ATTENTION = torch.ops.stream_attention.forward.default
PRODUCT = torch.ops.aten.addmm.default
MIB = 1 << 20


class Counted(TorchDispatchMode):
    """How often ops ran. What a checkpoint hands back from what it kept does not run."""

    def __init__(self) -> None:
        super().__init__()
        self.runs: dict[Any, int] = {}

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.runs[op] = self.runs.get(op, 0) + 1
        return op(*args, **(kwargs or {}))

    def __getitem__(self, op: Any) -> int:
        return self.runs.get(op, 0)


class Block(nn.Module):
    """Three products by weights, two of them before the attention, which has four heads on two."""

    def __init__(self, call: Callable[[Tensor, Tensor, Tensor], Tensor] = attention) -> None:
        super().__init__()
        self.q, self.kv, self.out, self.call = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32), call

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        key, value = self.kv(x).view(batch, length, 2, 2, 8).unbind(2)
        out = self.call(self.q(x).view(batch, length, 4, 8), key, value)
        return x + self.out(F.gelu(out.flatten(2)))


def packed(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    offsets = torch.arange(3, dtype=torch.int32) * query.shape[1]
    rows = (t.flatten(0, 1) for t in (query, key, value))
    return varlen_attention(*rows, cu_seqlens_q=offsets, cu_seqlens_k=offsets).view_as(query)


CALLS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "causal": partial(attention, causal=True),
    "tiles": partial(attention, softcap=3.0),
    "dropout drawn anew": partial(attention, dropout_p=0.3),  # its seed is drawn again, as it was
    "lse": lambda *qkv: attention(*qkv, return_lse=True)[1].transpose(1, 2).unsqueeze(-1).expand(-1, -1, -1, 8),
    "packed": packed,
}


def trained(block: nn.Module, call: Callable[[Tensor], Any], x: Tensor) -> tuple[Counted, list[Tensor]]:
    """What ran in a step, and its gradients."""
    block.zero_grad(set_to_none=True)
    x = x.detach().requires_grad_()
    torch.manual_seed(5)
    with Counted() as counted:
        call(x).square().sum().backward()
    grads = [parameter.grad for parameter in block.parameters()] + [x.grad]
    assert all(grad is not None for grad in grads)
    return counted, [grad for grad in grads if grad is not None]


def same(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


# The policy


@pytest.mark.parametrize("name", CALLS)
def test_attention_runs_once_and_the_rest_again(name: str) -> None:
    block, x = Block(CALLS[name]), torch.randn(2, 24, 32)
    plain, wanted = trained(block, block, x)
    whole, _ = trained(block, lambda x: checkpoint(block, x, use_reentrant=False), x)
    ours, grads = trained(block, lambda x: checkpoint(block, x, **stream_checkpoint_policy()), x)
    assert [one[ATTENTION] for one in (plain, whole, ours)] == [1, 2, 1]
    assert [one[PRODUCT] for one in (plain, whole, ours)] == [3, 5, 5]  # the last is not needed again
    assert same(grads, wanted)


def test_what_is_kept_is_the_output_and_the_lse() -> None:
    """In bytes: nothing is kept by a checkpoint but the input, and by ours these two besides."""
    block, x = Block(), torch.randn(2, 64, 32, requires_grad=True)
    retained = {}
    with MemoryProfiler("cpu") as profiler:
        for name, call in {
            "plain": block,
            "whole": partial(checkpoint, block, use_reentrant=False),
            "ours": partial(checkpoint, block, **stream_checkpoint_policy()),
        }.items():
            call(x).sum().backward()  # what is made once
            with profiler.region(name):
                kept = call(x)
            retained[name] = round(profiler.report()["regions"][-1]["retained_mb"] * MIB)
            del kept
    output, lse = x.nbytes, 2 * 4 * 64 * 4
    assert retained["ours"] - retained["whole"] == output + lse
    assert retained["plain"] > 2 * retained["ours"]


def test_a_module_may_be_checkpointed() -> None:
    module = StreamAttention(StreamAttentionConfig(num_heads=4, head_dim=8, use_fp16=False))
    x = torch.randn(2, 16, 32)
    plain, wanted = trained(module, module, x)
    ours, grads = trained(module, lambda x: checkpoint(module, x, **stream_checkpoint_policy()), x)
    assert plain[ATTENTION] == ours[ATTENTION] == 1 and same(grads, wanted)


def test_other_ops_are_kept_where_they_are_named() -> None:
    block, x = Block(), torch.randn(2, 16, 32)
    _, wanted = trained(block, block, x)
    ours, grads = trained(block, lambda x: checkpoint(block, x, **stream_checkpoint_policy(also=[PRODUCT])), x)
    assert (ours[ATTENTION], ours[PRODUCT]) == (1, 3) and same(grads, wanted)


def test_another_policy_may_ask_ours() -> None:
    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op is torch.ops.aten.gelu.default:
            return CheckpointPolicy.MUST_SAVE
        return save_attention(ctx, op, *args, **kwargs)

    block, x = Block(), torch.randn(2, 16, 32)
    contexts = partial(create_selective_checkpoint_contexts, policy)
    ours, _ = trained(block, lambda x: checkpoint(block, x, use_reentrant=False, context_fn=contexts), x)
    assert (ours[ATTENTION], ours[torch.ops.aten.gelu.default], ours[PRODUCT]) == (1, 1, 5)


def test_what_is_kept_may_not_be_written_to() -> None:
    block = Block(lambda *qkv: attention(*qkv).detach().mul_(2.0))
    x = torch.randn(2, 16, 32, requires_grad=True)
    with pytest.raises(RuntimeError, match="mutated"):
        checkpoint(block, x, **stream_checkpoint_policy()).sum().backward()


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_the_policy_holds_under_torch_compile(dropout: float) -> None:
    """By the graphs that AOT autograd makes, with the partitioner of the default backend."""
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd

    graphs: dict[str, torch.fx.Graph] = {}

    def keeping(name: str) -> Callable[..., Any]:
        def take(module: torch.fx.GraphModule, inputs: Any) -> Any:
            graphs[name] = module.graph
            return make_boxed_func(module.forward)

        return take

    def runs(name: str, op: Any) -> int:
        return sum(node.target is op for node in graphs[name].nodes)

    backend = aot_autograd(
        fw_compiler=keeping("forward"),
        bw_compiler=keeping("backward"),
        partition_fn=min_cut_rematerialization_partition,
    )
    block, x = Block(partial(attention, dropout_p=dropout)), torch.randn(2, 16, 32)
    _, wanted = trained(block, block, x)
    for options, again in ((stream_checkpoint_policy(), 0), ({"use_reentrant": False}, 1)):
        torch._dynamo.reset()
        call = partial(gradient_checkpoint_sequential, [block], 1, **options)
        compiled = torch.compile(call, backend=backend, fullgraph=True)
        block.zero_grad(set_to_none=True)
        torch.manual_seed(5)
        compiled(x.requires_grad_()).square().sum().backward()
        assert same([parameter.grad for parameter in block.parameters()], wanted[:-1])  # type: ignore[arg-type]
        assert (runs("forward", ATTENTION), runs("backward", ATTENTION)) == (1, again)
        assert (runs("forward", PRODUCT), runs("backward", PRODUCT)) == (3, 2)
    torch._dynamo.reset()


# Sequences


@pytest.mark.parametrize("segments", [1, 2, 3, 5])
def test_segments_give_the_gradients_of_plain_calls(segments: int) -> None:
    layers, x = nn.Sequential(*(Block(CALLS["dropout drawn anew"]) for _ in range(5))), torch.randn(2, 8, 32)
    plain, wanted = trained(layers, layers, x)
    ours, grads = trained(layers, lambda x: gradient_checkpoint_sequential(layers, segments, x), x)
    assert (plain[ATTENTION], ours[ATTENTION]) == (5, 10) and same(grads, wanted)


def test_segments_keep_attention_by_the_policy() -> None:
    layers, x = nn.ModuleList(Block() for _ in range(4)), torch.randn(2, 8, 32)
    _, wanted = trained(layers, lambda x: gradient_checkpoint_sequential(layers, 1, x), x)
    call = partial(gradient_checkpoint_sequential, layers, 2, **stream_checkpoint_policy())
    ours, grads = trained(layers, call, x)
    assert ours[ATTENTION] == 4 and ours[PRODUCT] > 20 and same(grads, wanted)


def test_functions_are_divided_evenly_and_pass_tuples_on_as_arguments() -> None:
    seen: list[int] = []

    def step(index: int, *values: Tensor) -> tuple[Tensor, ...]:
        seen.append(index)
        return tuple(value.sin() * (index + 1) for value in reversed(values))

    x, y = torch.rand(2, requires_grad=True), torch.rand(2)
    functions = [partial(step, index) for index in range(5)]
    wanted: tuple[Tensor, ...] = (x, y)
    for function in functions:
        wanted = function(*wanted)
    seen.clear()
    a, b = gradient_checkpoint_sequential(functions, 2, x, y)
    assert torch.equal(a, wanted[0]) and torch.equal(b, wanted[1])
    assert torch.equal(
        *(torch.autograd.grad(sum(one), x)[0] for one in ((a.sum(), b.sum()), (w.sum() for w in wanted)))
    )
    assert seen == [0, 1, 2, 3, 4, 2, 3, 4, 0, 1]  # again from the end, by segments


def test_options_reach_torch() -> None:
    """Told not to draw the same numbers again, dropout's seed is another one in the backward."""
    layers, x = nn.Sequential(Block(CALLS["dropout drawn anew"])), torch.randn(1, 8, 32)
    _, wanted = trained(layers, layers, x)
    call = partial(gradient_checkpoint_sequential, layers, 1)
    assert same(trained(layers, partial(call, preserve_rng_state=True), x)[1], wanted)
    assert not same(trained(layers, partial(call, preserve_rng_state=False), x)[1], wanted)


def test_without_gradients_nothing_is_kept_or_repeated() -> None:
    layers, x = nn.Sequential(Block(), Block()), torch.randn(1, 8, 32)
    with torch.no_grad(), Counted() as counted:
        out = gradient_checkpoint_sequential(layers, 2, x)
    assert counted[ATTENTION] == 2 and not out.requires_grad and torch.equal(out, layers(x).detach())


# Refusals


def test_bad_calls_are_refused_before_anything_runs() -> None:
    def never(x: Tensor) -> Tensor:
        raise AssertionError("it ran")

    x = torch.ones(1)
    for segments in (0, 3):
        with pytest.raises(ValueError, match=f"segments: expected 1 to the number of functions, 2; got {segments}"):
            gradient_checkpoint_sequential([never, never], segments, x)
    with pytest.raises(TypeError, match=r"segments: expected an int; got 2.0 \(float\)"):
        gradient_checkpoint_sequential([never, never], 2.0, x)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="functions: expected callables; got int"):
        gradient_checkpoint_sequential([never, 1], 1, x)  # type: ignore[list-item]
    with pytest.raises(TypeError, match=r"mask: expected options of torch's checkpoint.*functools\.partial"):
        gradient_checkpoint_sequential([never], 1, x, mask=None)
    with pytest.raises(TypeError, match="also: expected torch ops with their overload"):
        stream_checkpoint_policy(also=[torch.ops.aten.mm])  # type: ignore[list-item]
