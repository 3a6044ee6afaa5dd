"""The library ops inside PyTorch: opcheck, compile, export, checkpointing, torch.func, fake tensors, modes of autograd.

Numbers are those of fp64 throughout, so that agreement means agreement; precision is tested with the kernels.
"""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad, gradgradcheck
from torch.func import functional_call, grad, hessian, jacrev, jvp, vjp, vmap
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from stream_attention import (
    FusedOnlineAttention,
    StreamAttention,
    StreamAttentionConfig,
    StreamMultiheadAttention,
    attention,
    force_backend,
    varlen_attention,
)
from stream_attention.backends.eager import blocked as eager
from stream_attention.backends.reference import attention as reference
from stream_attention.base.problem import Inputs, Wanted
from stream_attention.dispatch.torch_ops import backward_op, forward_op
from stream_attention.ops.attention import prepare_attention
from stream_attention.ops.varlen import prepare_varlen

B, TQ, TK, HQ, HKV, D, DV = 2, 5, 7, 4, 2, 8, 6
OFFSETS_Q, OFFSETS_K = torch.tensor([0, 3, 4, 9]), torch.tensor([0, 5, 6, 13])  # one row more than they cover
PACKED = {"cu_seqlens_q": OFFSETS_Q, "cu_seqlens_k": OFFSETS_K, "max_seqlen_q": 5, "max_seqlen_k": 7}


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


def qkv(dtype: torch.dtype = torch.float64, batch: int = B, q_len: int = TQ, k_len: int = TK) -> list[Tensor]:
    shapes = (batch, q_len, HQ, D), (batch, k_len, HKV, D), (batch, k_len, HKV, DV)
    return [randn(*shape, seed=seed, dtype=dtype) for seed, shape in enumerate(shapes)]


def packed_qkv() -> list[Tensor]:
    return [randn(10, HQ, D), randn(14, HKV, D, seed=1), randn(14, HKV, DV, seed=2)]


def modifiers(dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """Every tensor a dense call can take beside query, key and value, and the options with them."""
    return {
        "causal": True,
        "window": (4, -1),
        "mask": torch.rand(B, 1, TQ, TK, generator=torch.Generator().manual_seed(3)) > 0.2,
        "bias": randn(1, HQ, TQ, TK, seed=4, dtype=dtype),
        "alibi_slopes": randn(HQ, seed=5, dtype=dtype),
        "sink": randn(HQ, seed=6, dtype=dtype),
        "softcap": 4.0,
        "scale": 0.3,
        "dropout_p": 0.3,
        "seed": 7,
    }


def op_arguments(tensors: list[Tensor], **options: Any) -> tuple[Any, ...]:
    """The flat arguments that a call passes to the op."""
    op, prepare = (varlen_attention, prepare_varlen) if "cu_seqlens_q" in options else (attention, prepare_attention)
    bound = inspect.signature(op).bind(*tensors, **options)
    bound.apply_defaults()
    return prepare(**bound.arguments)


def detached(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(a.detach() if isinstance(a, Tensor) else a for a in arguments)


def leaves_of(*containers: Any) -> list[Tensor]:
    """The tensors that require a gradient, from lists and dicts of arguments."""
    values = [v for c in containers for v in (c.values() if isinstance(c, dict) else c)]
    return [v for v in values if isinstance(v, Tensor) and v.requires_grad]


def out_and_grads(compute: Callable[[], Any], leaves: list[Tensor]) -> tuple[Any, ...]:
    """What `compute` returns and the gradients of a loss in which every element counts differently."""
    out = compute()
    outs = out if isinstance(out, tuple) else (out,)
    loss = sum((o * torch.linspace(-1, 1, o.numel(), dtype=o.dtype).view(o.shape)).sum() for o in outs)
    assert isinstance(loss, Tensor)
    return *(o.detach() for o in outs), *torch.autograd.grad(loss, leaves)


def assert_same(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-12, equal_nan=False)


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each forward that the eager kernels really compute."""
    calls: list[int] = []
    compute = eager.forward

    def counted(*args: Any) -> Any:
        calls.append(1)
        return compute(*args)

    monkeypatch.setattr(eager, "forward", counted)
    return calls


@pytest.fixture
def backwards(monkeypatch: pytest.MonkeyPatch) -> list[inspect.BoundArguments]:
    """The arguments of each backward that the eager kernels compute."""
    calls: list[inspect.BoundArguments] = []
    compute = eager.backward

    def recorded(*args: Any) -> Any:
        calls.append(inspect.signature(compute).bind(*args))
        return compute(*args)

    monkeypatch.setattr(eager, "backward", recorded)
    return calls


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


# What the ops promise PyTorch

OPCHECK_CASES: dict[str, Callable[[], tuple[Any, ...]]] = {
    "plain": lambda: op_arguments(qkv()),
    "torch's flash op": lambda: op_arguments([randn(B, TQ, HQ, D, seed=n, dtype=torch.float32) for n in range(3)]),
    "all modifiers": lambda: op_arguments(qkv(), **modifiers()),
    "heads first in memory": lambda: op_arguments(
        [randn(B, HQ, TQ, D, seed=n).detach().transpose(1, 2).requires_grad_() for n in range(3)], sink=randn(HQ)
    ),
    "heads first in memory, torch's flash op": lambda: op_arguments(
        [randn(B, HQ, TQ, D, seed=n).detach().transpose(1, 2).requires_grad_() for n in range(3)]
    ),
    "bf16 with an fp32 bias": lambda: op_arguments(qkv(torch.bfloat16), bias=randn(TQ, TK, dtype=torch.float32)),
    "packed, dropout": lambda: op_arguments(packed_qkv(), **PACKED, causal=True, sink=randn(HQ), dropout_p=0.2, seed=1),
    "no batch": lambda: op_arguments(qkv(batch=0)),
    "no queries": lambda: op_arguments(qkv(q_len=0)),
    "no keys": lambda: op_arguments(qkv(k_len=0)),
}


@pytest.mark.parametrize("case", OPCHECK_CASES)
def test_opcheck_forward(case: str) -> None:
    torch.library.opcheck(forward_op, OPCHECK_CASES[case]())


@pytest.mark.parametrize("case", OPCHECK_CASES)
def test_opcheck_backward(case: str) -> None:
    arguments = OPCHECK_CASES[case]()
    out, lse = (t.detach() for t in forward_op(*arguments))
    tensors = Inputs(*arguments[: len(Inputs._fields)])
    wanted = [getattr(tensors, name) is not None for name in Wanted._fields]
    # The last test of opcheck differentiates what requires a gradient, and this op has no gradient: hence detached.
    torch.library.opcheck(backward_op, (torch.randn_like(out), None, out, lse, wanted, *detached(arguments)))
    torch.library.opcheck(backward_op, (None, torch.randn_like(lse), out, lse, wanted, *detached(arguments)))


def test_gradients_nobody_wants_have_no_size() -> None:
    arguments = detached(op_arguments(qkv(), **modifiers()))
    out, lse = forward_op(*arguments)
    for index in range(len(Wanted._fields)):
        wanted = [n == index for n in range(len(Wanted._fields))]
        grads = backward_op(torch.ones_like(out), None, out, lse, wanted, *arguments)
        assert [g.numel() > 0 for g in grads] == wanted


def test_saved_for_the_backward_are_the_inputs_the_output_and_the_lse() -> None:
    saved: list[tuple[int, ...]] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tuple(tensor.shape))
        return tensor

    query, key, value = qkv(q_len=64, k_len=64)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward_op(*op_arguments([query, key, value], causal=True, sink=randn(HQ), dropout_p=0.1, seed=1))
    inputs = [tuple(t.shape) for t in (query, key, value)]
    assert sorted(saved) == sorted([*inputs, (HQ,), (2,), (B, 64, HQ, DV), (B, HQ, 64)])


# Gradients


@pytest.mark.parametrize(
    "names", [["query"], ["key"], ["value"], ["bias"], ["alibi_slopes"], ["sink"], ["key", "sink"]]
)
def test_a_subset_of_the_gradients_is_the_same_as_in_all_of_them(names: list[str]) -> None:
    tensors = dict(zip(("query", "key", "value"), qkv(), strict=True))
    options = modifiers()
    everything = {**tensors, **options}
    all_names = [name for name in everything if name in Wanted._fields]
    both = {}
    for which in (names, all_names):
        chosen = {
            name: arg.detach().requires_grad_(name in which) if name in Wanted._fields else arg
            for name, arg in everything.items()
        }
        grads = out_and_grads(partial(attention, **chosen), leaves_of(chosen))[1:]
        both[len(which)] = dict(zip([name for name in all_names if name in which], grads, strict=True))
    for name in names:
        assert_same(both[len(names)][name], both[len(all_names)][name])


@pytest.mark.parametrize("use", ["out", "lse", "both"])
@pytest.mark.parametrize("case", ["torch's flash op", "plain", "all modifiers"])
def test_the_backward_through_either_result(use: str, case: str) -> None:
    tensors = [randn(B, TQ, HQ, D, seed=n) for n in range(3)] if case == "torch's flash op" else qkv()
    options = modifiers() if case == "all modifiers" else {}
    # No value is behind the LSE: its gradient is asked for where there is one.
    leaves = [t for t in leaves_of(tensors, options) if use != "lse" or t is not tensors[2]]
    pick = {"out": lambda r: r[0], "lse": lambda r: r[1], "both": lambda r: r}[use]
    actual = out_and_grads(lambda: pick(attention(*tensors, **options, return_lse=True)), leaves)
    assert_same(actual, out_and_grads(lambda: pick(reference.attention(*tensors, **options)), leaves))


def test_kernels_get_gradients_to_their_liking_and_are_asked_for_no_more(
    backwards: list[inspect.BoundArguments],
) -> None:
    query, key, value = (randn(B, TQ, HQ, D, seed=n) for n in range(3))
    attention(query, key.detach(), value).sum().backward()  # a gradient expanded from one number, none for the LSE
    (call,) = backwards
    assert call.arguments["saved"].grad_out.stride(-1) == 1
    assert call.arguments["saved"].grad_lse is None and not call.arguments["problem"].lse_grad
    assert call.arguments["config"].path == "flash"
    assert call.arguments["wanted"] == Wanted(query=True, key=False, value=True)


def test_the_lse_alone_gives_values_no_gradient() -> None:
    query, key, value = qkv()
    _, lse = attention(query, key, value, return_lse=True)
    (d_value,) = torch.autograd.grad(lse.sum(), value)
    assert d_value.shape == value.shape and (d_value == 0).all()


@pytest.mark.parametrize(
    "strided",
    [
        pytest.param(lambda g: g[..., :1].expand_as(g), id="expanded in the last dim"),
        pytest.param(lambda g: g[:1, :1, :1, :1].expand_as(g), id="expanded in every dim, as by sum()"),
        pytest.param(lambda g: g.mT.contiguous().mT, id="last dim not contiguous"),
        pytest.param(lambda g: g.transpose(1, 2).contiguous().transpose(1, 2), id="heads first"),
    ],
)
@pytest.mark.parametrize("options", [{}, {"causal": True, "sink": randn(HQ)}], ids=["flash", "blocked"])
def test_gradients_arrive_in_any_layout(strided: Callable[[Tensor], Tensor], options: dict[str, Any]) -> None:
    query, key, value = (randn(B, TQ, HQ, D, seed=n) for n in range(3))
    layout = strided(torch.randn(B, TQ, HQ, D, dtype=torch.float64))
    assert not layout.is_contiguous()
    lse_layout = torch.randn(TQ, HQ, B, dtype=torch.float64).permute(2, 1, 0)
    results = attention(query, key, value, **options, return_lse=True)
    for outputs, grads in ((results[:1], [layout]), (results, [layout, lse_layout])):
        actual = torch.autograd.grad(outputs, (query, key, value), grads, retain_graph=True)
        dense = [g.contiguous() for g in grads]
        assert_same(actual, torch.autograd.grad(outputs, (query, key, value), dense, retain_graph=True))


def test_a_tensor_used_as_query_key_and_value_gets_the_sum_of_their_gradients() -> None:
    x = randn(B, TQ, HQ, D)
    actual = out_and_grads(lambda: attention(x, x, x, causal=True), [x])
    assert_same(actual, out_and_grads(lambda: reference.attention(x, x, x, causal=True)[0], [x]))


def test_no_graph_is_built_where_no_gradient_is_wanted() -> None:
    query, key, value = qkv()
    with torch.no_grad():
        assert not attention(query, key, value).requires_grad
    assert not attention(query.detach(), key.detach(), value.detach()).requires_grad
    with torch.inference_mode():
        out = attention(query, key, value)
    assert out.is_inference()
    assert_same(out.clone(), attention(query, key, value).detach())


def test_integer_and_boolean_inputs_get_no_gradient() -> None:
    query, key, value = (t.detach() for t in qkv())
    out = attention(
        query, key, value, mask=torch.ones(TQ, TK, dtype=torch.bool), dropout_p=0.1, seed=torch.tensor([1, 2])
    )
    assert not out.requires_grad


IN_PLACE: dict[str, Callable[[Tensor], Any]] = {
    "mul_": lambda out: out.mul_(2),
    "add_": lambda out: out.add_(1),
    "a view": lambda out: out[0].zero_(),
    "an assignment": lambda out: out.__setitem__(0, 0.0),
}


@pytest.mark.parametrize("result", ["out", "lse"])
@pytest.mark.parametrize("change", IN_PLACE)
@pytest.mark.parametrize("options", [{}, {"softcap": 4.0}], ids=["torch's CPU op", "the blocked pass"])
def test_a_result_that_was_changed_in_place_is_refused_by_the_backward_as_sdpas_is(
    change: str, result: str, options: dict[str, Any]
) -> None:
    query, key, value = (randn(B, TQ, HQ, D, seed=seed, dtype=torch.float32) for seed in range(3))
    out, lse = attention(query, key, value, return_lse=True, **options)
    changed = out if result == "out" else lse
    IN_PLACE[change](changed)  # legal as long as nobody wants the gradient
    words = "one of the variables needed for gradient computation has been modified by an inplace operation"
    with pytest.raises(RuntimeError, match=words):
        changed.sum().backward()
    after = attention(query, key, value, **options) * 1.0  # a copy may be changed
    IN_PLACE[change](after)
    after.sum().backward()
    assert query.grad is not None


# Second derivatives and forward mode


def test_a_second_derivative_is_refused_with_the_way_out() -> None:
    query, key, value = qkv()
    (first,) = torch.autograd.grad(attention(query, key, value).square().sum(), query, create_graph=True)
    with pytest.raises(NotImplementedError, match=r'no second derivative .* Pass backend="reference"'):
        first.sum().backward()


def test_create_graph_alone_changes_nothing() -> None:
    query, key, value = qkv()
    loss = attention(query, key, value).square().sum()
    assert_same(
        torch.autograd.grad(loss, query, create_graph=True)[0].detach(),
        torch.autograd.grad(loss, query, retain_graph=True)[0],
    )


def test_second_derivatives_of_the_reference_backend() -> None:
    tensors = [randn(1, 2, 2, 2, seed=1), randn(1, 3, 1, 2, seed=2), randn(1, 3, 1, 2, seed=3)]
    assert gradgradcheck(lambda *t: attention(*t, causal=True, softcap=2.0, backend="reference"), tensors)


def test_forward_mode_is_refused_and_never_silently_zero() -> None:
    query, key, value = (t.detach() for t in qkv())
    with pytest.raises(NotImplementedError, match=r'no forward-mode derivative .* Pass backend="reference"'):
        jvp(lambda q: attention(q, key, value), (query,), (torch.ones_like(query),))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(value, torch.ones_like(value))
        with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            attention(query, key, dual)
        with torch.no_grad(), pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            attention(query, key, dual)
        assert_same(attention(query, key, value), reference.attention(query, key, value)[0])  # nothing dual: as ever
    with pytest.raises(NotImplementedError, match="derivative on the streaming backends"):
        hessian(lambda q: attention(q, key, value).sum())(query)


def test_forward_mode_of_the_reference_backend() -> None:
    query, key, value = (t.detach() for t in qkv())
    direction = torch.randn_like(query)
    out, tangent = jvp(lambda q: attention(q, key, value, backend="reference"), (query,), (direction,))
    step = 1e-6
    ahead, behind = (attention(query + sign * step * direction, key, value) for sign in (1, -1))
    torch.testing.assert_close(tangent, (ahead - behind) / (2 * step), rtol=1e-6, atol=1e-8)
    assert_same(out, attention(query, key, value))


# torch.func


@pytest.mark.parametrize("options", [{}, modifiers()], ids=["plain", "all modifiers"])
def test_func_grad_and_vjp_are_autograd(options: dict[str, Any]) -> None:
    query, key, value = qkv()
    options = {name: v.detach() if isinstance(v, Tensor) else v for name, v in options.items()}
    expected = torch.autograd.grad(attention(query, key, value, **options).square().sum(), (query, key, value))
    tensors = [t.detach() for t in (query, key, value)]

    def loss(*tensors: Tensor) -> Tensor:
        return attention(*tensors, **options).square().sum()

    assert_same(grad(loss, argnums=(0, 1, 2))(*tensors), expected)
    total, pull = vjp(loss, *tensors)
    assert_same(pull(torch.ones_like(total)), expected)
    assert_same(grad(loss)(query, key, value).detach(), expected[0])  # tensors of the outer graph, too


def test_func_grad_of_packed_sequences() -> None:
    tensors = packed_qkv()
    expected = torch.autograd.grad(varlen_attention(*tensors, **PACKED, causal=True).square().sum(), tensors)
    packed = partial(varlen_attention, **PACKED, causal=True)
    actual = grad(lambda *t: packed(*t).square().sum(), argnums=(0, 1, 2))(*(t.detach() for t in tensors))
    assert_same(actual, expected)


def test_an_outer_level_sees_through_an_inner_one() -> None:
    query, key, value = (t.detach() for t in qkv())

    def loss(key: Tensor) -> Tensor:
        out, _ = vjp(lambda q: attention(q, key, value), query)
        return out.square().sum()

    expected = grad(lambda k: reference.attention(query, k, value)[0].square().sum())(key)
    assert_same(grad(loss)(key), expected)


def test_functional_call() -> None:
    class SelfAttention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(D, 3 * D, dtype=torch.float64)

        def forward(self, x: Tensor) -> Tensor:
            return attention(*self.project(x).chunk(3, dim=-1), causal=True)

    module, x = SelfAttention(), randn(B, TQ, HQ, D).detach()
    parameters = {name: p.detach() for name, p in module.named_parameters()}
    grads = grad(lambda ps: functional_call(module, ps, (x,)).square().sum())(parameters)
    module(x).square().sum().backward()
    for name, parameter in module.named_parameters():
        assert_same(grads[name], parameter.grad)


VMAP_CASES: dict[str, tuple[dict[str, int | None], dict[str, Any]]] = {
    # name -> (where each tensor argument is mapped, None for a tensor they share), options
    "folded into the batch": ({"query": 0, "key": 0, "value": 0}, {"causal": True}),
    "shared keys": ({"query": 0, "key": None, "value": None}, {}),
    "shared queries, keys mapped in the middle": ({"query": None, "key": 1, "value": 2}, {"window": (2, 1)}),
    "a mapped bias": ({"query": 0, "key": None, "value": 0, "bias": 0}, {"softcap": 3.0}),
    "a shared bias": ({"query": 0, "key": 0, "value": 0, "bias": None}, {}),
    "mapped sinks": ({"query": None, "key": None, "value": None, "sink": 0}, {}),
    "shared sinks and slopes": ({"query": 0, "key": 0, "value": 0, "sink": None, "alibi_slopes": None}, {}),
    "dropout, the same for all": ({"query": 0, "key": 0, "value": 0}, {"dropout_p": 0.4, "seed": 3}),
    "dropout, a seed for each": ({"query": 0, "key": 0, "value": None, "seed": 0}, {"dropout_p": 0.4}),
}


@pytest.mark.parametrize("case", VMAP_CASES)
def test_vmap_is_a_loop_over_the_calls(case: str) -> None:
    places, options = VMAP_CASES[case]
    one = {**dict(zip(("query", "key", "value"), qkv(), strict=True)), **modifiers(), "seed": torch.tensor([3, 4])}
    examples = [
        {name: one[name] if place is None else _vary(one[name], n) for name, place in places.items()} for n in range(3)
    ]
    mapped = {
        name: one[name].detach() if place is None else torch.stack([e[name] for e in examples], place)
        for name, place in places.items()
    }

    def loss(tensors: dict[str, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        out, lse = attention(**tensors, **options, return_lse=True)
        return out.square().sum() + lse.sin().sum(), (out, lse)

    floats = {name: t for name, t in mapped.items() if t.is_floating_point()}
    rest = {name: t for name, t in mapped.items() if name not in floats}

    def grads(floats: dict[str, Tensor], rest: dict[str, Tensor]) -> tuple[dict[str, Tensor], tuple[Tensor, Tensor]]:
        return grad(lambda f: loss({**f, **rest}), has_aux=True)(floats)

    in_dims = tuple({name: places[name] for name in group} for group in (floats, rest))
    actual_grads, actual = vmap(grads, in_dims=in_dims)(floats, rest)
    for n, example in enumerate(examples):
        alone = {name: t.detach().requires_grad_(t.is_floating_point()) for name, t in example.items()}
        total, expected = loss(alone)
        assert_same((actual[0][n], actual[1][n]), tuple(t.detach() for t in expected))
        its_grads = torch.autograd.grad(total, [alone[name] for name in floats])
        assert_same([actual_grads[name][n] for name in floats], list(its_grads))


def _vary(tensor: Tensor, n: int) -> Tensor:
    return tensor.detach() + n if tensor.dtype is torch.int64 else tensor.detach() * (1 + n / 2)


def test_vmap_outside_of_grad_and_inside_of_vmap() -> None:
    queries = torch.stack([randn(B, TQ, HQ, D, seed=n) for n in range(6)]).detach().unflatten(0, (2, 3))
    _, key, value = (t.detach() for t in qkv())
    twice = vmap(vmap(lambda q: attention(q, key, value, causal=True)))
    expected = torch.stack([attention(q, key, value, causal=True) for q in queries.flatten(0, 1)])
    assert_same(twice(queries).flatten(0, 1), expected)
    actual = grad(lambda k: vmap(lambda q: attention(q, k, value))(queries[0]).square().sum())(key)
    assert_same(actual, grad(lambda k: sum(attention(q, k, value).square().sum() for q in queries[0]))(key))


def test_vmap_of_packed_sequences() -> None:
    query, key, value = (t.detach() for t in packed_qkv())
    actual = vmap(lambda q: varlen_attention(q, key, value, **PACKED))(torch.stack([query, 2 * query]))
    assert_same(actual, torch.stack([varlen_attention(q, key, value, **PACKED) for q in (query, 2 * query)]))


def test_vmap_draws_its_seeds_as_torch_is_told_to() -> None:
    query, key, value = (t.detach() for t in qkv())
    same_inputs = torch.stack([query, query])
    mapped = {
        randomness: vmap(lambda q: attention(q, key, value, dropout_p=0.5), randomness=randomness)
        for randomness in ("error", "same", "different")
    }
    with pytest.raises(RuntimeError, match="randomness"):
        mapped["error"](same_inputs)
    first, second = mapped["same"](same_inputs)
    assert torch.equal(first, second)
    first, second = mapped["different"](same_inputs)
    assert not torch.equal(first, second)


def test_jacobians_by_rows_are_those_of_the_reference() -> None:
    query, key, value = (t.detach() for t in qkv(batch=1, q_len=2, k_len=3))
    actual = jacrev(lambda q: attention(q, key, value, causal=True))(query)
    assert_same(actual, jacrev(lambda q: attention(q, key, value, causal=True, backend="reference"))(query))


# Checkpointing


def test_selective_checkpointing_runs_the_forward_once(forwards: list[int]) -> None:
    def save_attention(_ctx: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        is_ours = op is torch.ops.stream_attention.forward.default
        return CheckpointPolicy.MUST_SAVE if is_ours else CheckpointPolicy.PREFER_RECOMPUTE

    def block(*tensors: Tensor) -> Tensor:
        return attention(*(t.sin() for t in tensors), causal=True).cos()

    tensors = qkv()
    expected = out_and_grads(lambda: block(*tensors), tensors)
    counts = {}
    selective = {"context_fn": partial(create_selective_checkpoint_contexts, save_attention)}
    for name, how in (("selective", selective), ("ordinary", {})):
        forwards.clear()
        assert_same(
            out_and_grads(lambda how=how: checkpoint(block, *tensors, use_reentrant=False, **how), tensors), expected
        )
        counts[name] = len(forwards)
    assert counts == {"selective": 1, "ordinary": 2}


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_ordinary_checkpointing_replays_dropout_that_drew_its_own_seed(use_reentrant: bool) -> None:
    tensors = qkv()

    def block(*tensors: Tensor) -> Tensor:
        return attention(*tensors, dropout_p=0.5)

    def run(compute: Callable[..., Tensor], seed: int) -> list[Tensor]:
        torch.manual_seed(seed)
        leaves = [t.detach().requires_grad_() for t in tensors]
        compute(*leaves).square().sum().backward()
        return [leaf.grad for leaf in leaves]

    expected = run(block, seed=0)
    replayed = run(partial(checkpoint, block, use_reentrant=use_reentrant, preserve_rng_state=True), seed=0)
    assert all(torch.equal(a, b) for a, b in zip(replayed, expected, strict=True))
    assert not torch.equal(run(block, seed=1)[0], expected[0])


# torch.compile and export

COMPILE_CASES: dict[str, tuple[Callable[[], list[Tensor]], dict[str, Any]]] = {
    "causal": (qkv, {"causal": True}),
    "all modifiers": (qkv, {**modifiers(), "return_lse": True}),
    "packed": (packed_qkv, {**PACKED, "causal": True, "window": (3, 0), "return_lse": True}),
}


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("case", COMPILE_CASES)
def test_compiled_in_one_graph_it_computes_the_same(case: str, dynamic: bool) -> None:
    tensors, options = COMPILE_CASES[case][0](), COMPILE_CASES[case][1]
    op = varlen_attention if case == "packed" else attention
    compiled = torch.compile(op, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    leaves = leaves_of(tensors, options)
    lse_is_finite = case != "packed"  # rows past the last offset have lse -inf, and 0 * inf is NaN
    pick = (lambda r: r) if lse_is_finite else (lambda r: r[0])
    actual = out_and_grads(lambda: pick(compiled(*tensors, **options)), leaves)
    assert_same(actual, out_and_grads(lambda: pick(op(*tensors, **options)), leaves))


@pytest.mark.usefixtures("fresh_compiler")
def test_dynamic_shapes_compile_once() -> None:
    graphs: list[torch.fx.GraphModule] = []

    def record(graph: torch.fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(attention, fullgraph=True, backend=record, dynamic=True)
    for batch, q_len, k_len in ((3, 5, 7), (5, 6, 9), (7, 9, 11)):
        tensors = qkv(batch=batch, q_len=q_len, k_len=k_len)
        assert_same(compiled(*tensors, causal=True), attention(*tensors, causal=True))
    assert len(graphs) == 1


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor compiles its CPU code with g++")
def test_inductor() -> None:
    tensors = qkv()

    def block(*tensors: Tensor) -> Tensor:
        return attention(*tensors, causal=True).sin()

    compiled = torch.compile(block, fullgraph=True)
    assert_same(out_and_grads(lambda: compiled(*tensors), tensors), out_and_grads(lambda: block(*tensors), tensors))


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_dropout_draws_from_torchs_generator() -> None:
    tensors = qkv()
    compiled = torch.compile(partial(attention, dropout_p=0.5), fullgraph=True, backend="aot_eager")
    torch.manual_seed(0)
    first, second = out_and_grads(lambda: compiled(*tensors), tensors), compiled(*tensors)
    torch.manual_seed(0)
    assert_same(first, out_and_grads(lambda: attention(*tensors, dropout_p=0.5), tensors))
    assert not torch.equal(first[0], second)


@pytest.mark.usefixtures("fresh_compiler")
def test_a_change_of_the_forced_backend_recompiles() -> None:
    backends: list[list[str]] = []

    def record(graph: torch.fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
        backends.append([node.args[-1] for node in graph.graph.nodes if node.target is forward_op])
        return graph.forward

    compiled = torch.compile(attention, fullgraph=True, backend=record)
    tensors = qkv()
    expected = attention(*tensors)
    for name in ("auto", "eager", "reference", "auto"):
        with force_backend(name):
            assert_same(compiled(*tensors), expected)
    assert backends == [["auto"], ["eager"], []]  # the reference is plain torch: no op of ours


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_under_autocast() -> None:
    tensors = qkv(torch.float32)
    mask = modifiers()["mask"]
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16):
        actual = out_and_grads(lambda: compiled(*tensors, mask=mask), tensors)
        expected = out_and_grads(lambda: attention(*tensors, mask=mask), tensors)
    assert actual[0].dtype is torch.bfloat16 and actual[1].dtype is torch.float32
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_export_keeps_the_op_and_its_dynamic_lengths() -> None:
    class Causal(nn.Module):
        def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return attention(query, key, value, causal=True)

    tensors = tuple(t.detach() for t in qkv())
    lengths = {0: torch.export.Dim("batch"), 1: torch.export.Dim("k_len")}
    queries = {0: lengths[0], 1: torch.export.Dim("q_len")}
    exported = torch.export.export(Causal(), tensors, dynamic_shapes=(queries, lengths, lengths))
    assert [node.target for node in exported.graph.nodes if node.target is forward_op] == [forward_op]
    longer = [t.detach() for t in qkv(batch=3, q_len=6, k_len=9)]
    assert_same(exported.module()(*longer), attention(*longer, causal=True))


# Autocast


@pytest.mark.parametrize("options", [{}, modifiers(torch.float32)], ids=["plain", "all modifiers"])
def test_autocast_casts_the_inputs_and_leaves_the_kernels_alone(options: dict[str, Any]) -> None:
    tensors = qkv(torch.float32)
    leaves = leaves_of(tensors, options)
    with torch.autocast("cpu", torch.bfloat16):
        actual = out_and_grads(lambda: attention(*tensors, **options), leaves)  # the backward is under autocast, too
    expected = out_and_grads(lambda: attention(*(t.bfloat16() for t in tensors), **options), leaves)
    assert actual[0].dtype is torch.bfloat16
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


# Tensors without values


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_meta_tensors_give_the_shapes_and_dtypes_of_real_ones(dtype: torch.dtype) -> None:
    for op, tensors, options in (
        (attention, qkv(dtype), {"causal": True, "return_lse": True}),
        (
            varlen_attention,
            [t.detach().to(dtype).requires_grad_() for t in packed_qkv()],
            {**PACKED, "return_lse": True},
        ),
    ):
        on_meta = {name: v.to("meta") if isinstance(v, Tensor) else v for name, v in options.items()}
        meta_tensors = [t.detach().to("meta").requires_grad_() for t in tensors]
        real, meta = op(*tensors, **options), op(*meta_tensors, **on_meta)
        for a, b in zip(real, meta, strict=True):
            assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())
        grads = torch.autograd.grad(meta[0].sum(), meta_tensors)
        assert [(g.shape, g.dtype, g.device.type) for g in grads] == [(t.shape, dtype, "meta") for t in tensors]


def test_fake_tensors_run_forward_and_backward_and_compute_nothing(forwards: list[int]) -> None:
    with FakeTensorMode() as mode:
        tensors = [
            torch.empty(s, requires_grad=True) for s in ((2, 1 << 20, 8, 64), (2, 1 << 20, 2, 64), (2, 1 << 20, 2, 32))
        ]
        out, lse = attention(*tensors, causal=True, dropout_p=0.1, seed=3, return_lse=True)
        (out.sum() + lse.sum()).backward()
    assert out.fake_mode is mode and out.shape == (2, 1 << 20, 8, 32) and lse.shape == (2, 8, 1 << 20)
    assert [t.grad.shape for t in tensors] == [t.shape for t in tensors]
    assert forwards == []


# Refusals


@pytest.mark.parametrize(
    "call",
    [
        attention,
        partial(attention, return_lse=True, mask=torch.ones(1, dtype=torch.bool)),
        partial(varlen_attention, **PACKED),
        FusedOnlineAttention(HQ, D),
        StreamMultiheadAttention(HQ * D, HQ),
        StreamAttention(StreamAttentionConfig(num_heads=HQ, head_dim=D)),
    ],
    ids=["attention", "with a mask", "packed", "FusedOnlineAttention", "StreamMultiheadAttention", "StreamAttention"],
)
def test_symbolic_tracing_is_refused_with_the_way_out(call: Any) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.call = call

        def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Any:
            return self.call(query, key, value)

    words = r"Proxy.*\. torch.fx.symbolic_trace is not supported: use torch.export, or torch.fx.wrap"
    with pytest.raises((TypeError, ValueError), match=words):
        torch.fx.symbolic_trace(Model())


@torch.fx.wrap
def wrapped(query: Tensor, key: Tensor, value: Tensor) -> Any:
    return attention(query, key, value, causal=True)


def test_a_wrapped_call_is_a_leaf_of_a_symbolic_trace() -> None:
    class Model(nn.Module):
        def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Any:
            return wrapped(query, key, value) * 2

    tensors = qkv()
    assert torch.equal(torch.fx.symbolic_trace(Model())(*tensors), 2 * attention(*tensors, causal=True))


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch is built without distributed")
def test_dtensors_beside_plain_tensors_are_refused() -> None:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, distribute_tensor

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        query, key, value = (t.detach() for t in qkv())
        sharded = distribute_tensor(query, DeviceMesh("cpu", [0]), [Shard(2)])
        with pytest.raises(TypeError, match="key: expected a DTensor like the query; got Tensor"):
            attention(sharded, key, value)
        with pytest.raises(TypeError, match=r"key: expected a plain tensor; got a DTensor.*to_local"):
            attention(query, sharded, value)
    finally:
        torch.distributed.destroy_process_group()
