"""Calls of lengths never seen are made from a template: what reaches the driver is what a call prepared anew sends it.

No GPU is needed: `pretend_gpu` takes the road of a Hopper GPU up to the driver, and keeps the parameters of launches.
"""

from __future__ import annotations

import gc
import inspect
import os
import random
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter has no driver; run without TRITON_INTERPRET=1", allow_module_level=True)
pytest.importorskip("triton")

from pretend_gpu import Launched, pretend_gpu
from stream_attention import UnsupportedProblem, attention, varlen_attention
from stream_attention.dispatch import launch_cache
from stream_attention.dispatch.call_key import are_aligned
from stream_attention.gpu import driver, launch
from stream_attention.ops import varlen
from stream_attention.ops.attention import prepare_attention

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def offsets_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU; random memory is no list of offsets."""
    monkeypatch.setattr(varlen, "longest", lambda name, offsets, rows, given: min(given, rows))


def empty(*shape: int, grad: bool = False) -> Tensor:
    return torch.empty(shape, dtype=BF16).requires_grad_(grad)


def dense(
    lengths: tuple[int, int], dims: tuple[int, ...] = (2, 8, 4, 64), by_head: bool = False, **options: Any
) -> Any:
    """`attention` of these lengths; `by_head`: tensors lie as [B, H, T, D]."""
    batch, heads, kv_heads, dim = dims
    grad = options.pop("grad", False)
    q_len, k_len = lengths

    def tensor(length: int, count: int) -> Tensor:
        made = empty(batch, count, length, dim).transpose(1, 2) if by_head else empty(batch, length, count, dim)
        return made.requires_grad_(grad)

    query, key, value = tensor(q_len, heads), tensor(k_len, kv_heads), tensor(k_len, kv_heads)
    compute = through_the_op if options.pop("op", False) else attention
    out = compute(query, key, value, **options)
    if grad:
        torch.autograd.grad(out, (query, key, value), torch.empty_like(out))
    return out


def through_the_op(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """As a graph of torch.compile calls it."""
    bound = inspect.signature(prepare_attention).bind_partial(query, key, value, **DEFAULTS | options)
    out: Tensor = torch.ops.stream_attention.forward(*prepare_attention(*bound.args))[0]
    return out


DEFAULTS = {
    name: parameter.default
    for name, parameter in inspect.signature(attention).parameters.items()
    if parameter.kind is inspect.Parameter.KEYWORD_ONLY
}


def packed(lengths: tuple[int, int], dims: tuple[int, ...] = (3, 8, 4, 64), **options: Any) -> Any:
    sequences, heads, kv_heads, dim = dims
    grad, (q_len, k_len), fewer = options.pop("grad", False), lengths, options.pop("fewer", 1)
    query, key, value = (
        empty(sequences * length - fewer, count, dim, grad=grad)
        for length, count in ((q_len, heads), (k_len, kv_heads), (k_len, kv_heads))
    )
    offsets = torch.zeros(sequences + 1, dtype=torch.int32)
    ends = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "max_seqlen_q": q_len, "max_seqlen_k": k_len}
    out = varlen_attention(query, key, value, **ends, **options)
    if grad:
        torch.autograd.grad(out, (query, key, value), torch.empty_like(out))
    return out


SLOPES, SINK = torch.ones(8), torch.ones(8)
SHORT, LONG = (1, 300), (1500, 3000)
CALLS: dict[str, tuple[Callable[..., Any], tuple[int, int], dict[str, Any]]] = {
    "plain, Triton": (dense, SHORT, {}),
    "causal, Triton": (dense, SHORT, {"causal": True}),
    "causal with gradients, Triton": (dense, SHORT, {"causal": True, "grad": True}),
    "plain, Hopper": (dense, LONG, {}),
    "causal, Hopper": (dense, LONG, {"causal": True}),
    "causal with gradients, Hopper": (dense, LONG, {"causal": True, "grad": True}),
    "D 128 with gradients": (dense, LONG, {"dims": (1, 8, 8, 128), "causal": True, "grad": True}),
    "D 256 with gradients": (dense, LONG, {"dims": (1, 8, 8, 256), "grad": True}),
    "a window": (dense, LONG, {"window": (500, 20), "grad": True}),
    "deterministic": (dense, LONG, {"deterministic": True, "grad": True}),
    "slopes, sink and softcap": (dense, LONG, {"alibi_slopes": SLOPES, "sink": SINK, "softcap": 9.0, "causal": True}),
    "slopes, sink and softcap, Triton": (dense, SHORT, {"alibi_slopes": SLOPES, "sink": SINK, "softcap": 9.0}),
    "heads before rows": (dense, LONG, {"by_head": True, "causal": True, "grad": True}),
    "heads before rows, Triton": (dense, SHORT, {"by_head": True, "causal": True, "grad": True}),
    "one batch entry": (dense, SHORT, {"dims": (1, 8, 4, 64), "causal": True, "grad": True}),
    "few queries": (lambda lengths, **options: dense((1 + lengths[0] % 4, 300 + lengths[1])), SHORT, {}),
    "few causal queries": (lambda lengths, **options: dense((3, 300 + lengths[1]), causal=True), LONG, {}),
    "packed, Triton": (packed, SHORT, {"causal": True}),
    "packed with gradients, Triton": (packed, SHORT, {"causal": True, "grad": True}),
    "packed, Hopper": (packed, LONG, {"causal": True}),
    "packed with gradients, Hopper": (packed, LONG, {"causal": True, "grad": True}),
    "packed, a window, D 128": (packed, LONG, {"window": (300, 0), "dims": (3, 8, 8, 128), "grad": True}),
    "with the LSE": (dense, LONG, {"return_lse": True}),
    "through the op": (dense, SHORT, {"op": True, "causal": True}),
    "through the op with gradients": (dense, LONG, {"op": True, "causal": True, "grad": True}),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_resized_call_launches_what_a_fresh_one_does(name: str) -> None:
    call, (low, high), options = CALLS[name]
    draw = random.Random(name)
    with pretend_gpu() as launches:

        def launched(lengths: tuple[int, int]) -> list[Launched]:
            launches.clear()
            call(lengths, **options)
            return launches[:]

        drawn = [(draw.randint(low, high), draw.randint(low, high)) for _ in range(15)]
        resized = [launched(lengths) for lengths in drawn][3:]  # of which the first ones are prepared, as templates
        for lengths, made in zip(drawn[3:], resized, strict=True):
            launch_cache.clear()
            fresh = launched(lengths)
            assert [one.kernel for one in made] == [one.kernel for one in fresh] != []
            differ = [(one.kernel, one.grid) for one, other in zip(made, fresh, strict=True) if one != other]
            assert not differ, (lengths, differ)


@pytest.mark.parametrize("call", [dense, packed])
def test_new_lengths_are_made_from_templates(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not prepared in full each time: that takes 20 times as long."""
    with pretend_gpu():
        for k_len in range(2000, 2100, 20):
            call((1900, k_len), causal=True, grad=True)
        monkeypatch.setattr(launch_cache, "prepare", None)
        monkeypatch.setattr(launch_cache, "prepare_backward", None)
        for k_len in range(2000, 2100, 7):
            call((1901, k_len), causal=True, grad=True)


def test_lengths_that_take_turns_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of layers that attend to their own tokens and to others'."""
    with pretend_gpu():
        for lengths in [(1900, 1900), (1900, 2000), *[(1901, 1901), (1901, 2001), (1901, 2002)] * 2]:
            dense(lengths, causal=True, grad=True)
        assert launch_cache.size() == 4
        monkeypatch.setattr(launch_cache._Templates, "resized", None)
        monkeypatch.setattr(launch_cache._Templates, "backward", None)
        for lengths in [(1901, 1901), (1901, 2001), (1901, 2002)] * 2:
            dense(lengths, causal=True, grad=True)


def test_packs_of_other_rows_are_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row counts are written by each launch, and the longest sequences are planned rounded: nothing is made anew."""
    with pretend_gpu() as launches:
        for grad in (False, True):
            for longest in (100, 1900):
                packed((longest, longest), causal=True, grad=grad)
            kept = launch_cache.size()
            with monkeypatch.context() as patch:
                patch.setattr(launch_cache, "prepare", None)
                patch.setattr(launch_cache._Templates, "resized", None)
                patch.setattr(launch_cache._Templates, "backward", None)
                for longest in (65, 101, 128, 1793, 1899, 1920):
                    launches.clear()
                    packed((longest, longest), causal=True, grad=grad)
                    assert launches
            assert launch_cache.size() == kept


@pytest.mark.parametrize("longest", [100, 1900])
@pytest.mark.parametrize("grad", [False, True])
def test_packs_that_share_a_call_launch_what_fresh_ones_do(grad: bool, longest: int) -> None:
    """Rows are read and written by TMA too: a tensor map with the rows of an earlier pack would cut off the others."""
    with pretend_gpu() as launches:

        def launched(fewer: int) -> list[Launched]:
            launches.clear()
            packed((longest, longest), causal=True, grad=grad, fewer=fewer)
            return launches[:]

        shared = [launched(fewer) for fewer in (90, 1, 50)]
        assert launch_cache.size() == 1
        launch_cache.clear()
        assert launched(50) == shared[-1] != []


@pytest.mark.parametrize("longest", [100, 1900])
def test_a_pack_with_too_few_values_is_refused_beside_one_that_is_kept(longest: int) -> None:
    offsets = torch.zeros(4, dtype=torch.int32)
    ends = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "max_seqlen_q": longest, "max_seqlen_k": longest}
    with pretend_gpu():
        packed((longest, longest), causal=True)
        query, key, value = (empty(rows, heads, 64) for rows, heads in ((longest, 8), (longest, 4), (longest - 1, 4)))
        with pytest.raises(ValueError, match="value"):
            varlen_attention(query, key, value, **ends, causal=True)


def test_a_pack_is_refused_in_the_same_words_with_and_without_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients are refused in the forward, which plans a pack by its length as plans round it."""
    sink, words = torch.ones(8, requires_grad=True), []
    with pretend_gpu():
        for enabled in (True, False):
            monkeypatch.setattr(launch_cache, "ENABLED", enabled)
            with pytest.raises(UnsupportedProblem, match=r"packed B=3 Tq<=256 Tk<=256 .*does not compute") as refused:
                packed((170, 170), sink=sink, backend="gluon", grad=True)
            words.append(str(refused.value))
    assert words[0] == words[1]


def test_tensor_maps_are_written_where_the_driver_would_write_them() -> None:
    with pretend_gpu():
        for rank in (1, 2, 3, 4):
            assert driver.map_words(rank) is not None


def test_where_sizes_are_no_words_of_a_map_triton_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes of descriptors are written into the words of a map, so a driver whose maps have none is not asked."""
    maps, signature = [{"block_size": [1, 64], "swizzle": 3}], {"q_desc": "tensordesc<bf16[1, 64]>"}
    plain = {"global_scratch_size": 0, "profile_scratch_size": 0, "num_ctas": 1, "launch_cooperative_grid": False}
    metadata = SimpleNamespace(**plain, tensordesc_meta=maps)
    compiled = SimpleNamespace(metadata=metadata, src=SimpleNamespace(signature=signature), function=5)
    with pretend_gpu():
        offsets = launch.Parameters(signature, maps).offsets
        monkeypatch.setattr(driver, "parameters_of", lambda function: offsets)
        assert launch._parameters_of(compiled) is not None
        with monkeypatch.context() as patch:
            patch.setattr(driver, "map_words", lambda rank: None)
            assert launch._parameters_of(compiled) is None


def test_strides_that_a_word_of_a_tensor_map_does_not_hold_are_not_written() -> None:
    """They count 16 bytes, in 36 bits."""
    for stride in (512, (1 << 33) - 8):
        assert are_aligned((stride, 512, 64, 1)) and stride * 8 >> 4 < 1 << 32
    for stride in (1 << 33, 0, 12, -512):
        assert not are_aligned((stride, 512, 64, 1))


def test_tensors_of_unequal_rank_are_refused_whatever_their_sizes() -> None:
    """Those of this call, one after another, are those of a family that has a template."""
    with pretend_gpu():
        dense((300, 300), (8, 8, 8, 64), scale=0.5)
        query, key, value = empty(8, 8, 5, 64, 8), empty(5, 8, 64), empty(8, 5, 8, 64)
        with pytest.raises(ValueError, match="query"):
            attention(query, key, value, scale=0.5)


@pytest.mark.parametrize("kind", ["dense", "packed", "fp8"])
def test_calls_of_new_lengths_keep_no_tensor(kind: str) -> None:
    """What is made from a template is kept by its lengths; tensors of a training step must not be."""
    alive: list[Any] = []

    def call(length: int) -> None:
        shape = (2 * length, 8, 64) if kind == "packed" else (2, length, 8, 64)
        tensors = [empty(*shape, grad=kind != "fp8") for _ in range(3)]
        alive.extend(map(weakref.ref, tensors))
        if kind == "packed":
            offsets = torch.zeros(3, dtype=torch.int32)
            ends = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "max_seqlen_q": length, "max_seqlen_k": length}
            out = varlen_attention(*tensors, **ends, causal=True, backend="gluon")
        else:
            out = attention(*tensors, causal=True, backend="gluon", precision="fp8" if kind == "fp8" else None)
        if kind != "fp8":
            torch.autograd.grad(out, tensors, torch.empty_like(out))

    with pretend_gpu(keep_launches=False):
        for length in (2048, 1920, 1800, 1800, 1800, 1796):
            call(length)
        gc.collect()
        assert launch_cache.size() >= 2
        assert not [one for one in alive if one() is not None]


def test_a_window_side_beyond_64_bits_is_one_that_the_op_holds() -> None:
    """A backward that is to be differentiated goes through the op, whose integers have 64 bits."""
    with pretend_gpu():
        for k_len in (2000, 2001, 2002):
            query, key, value = empty(2, 1900, 8, 64, grad=True), empty(2, k_len, 4, 64), empty(2, k_len, 4, 64)
            out = attention(query, key, value, window=(1 << 70, 0))
            torch.autograd.grad(out, query, torch.empty_like(out), create_graph=True)


def test_an_lse_that_hooks_lay_out_anew_is_copied() -> None:
    """Kernels read a contiguous one, also in a backward that is made from a template."""
    laid: list[Tensor] = []

    def by_batch(t: Tensor) -> Tensor:
        if t.dim() == 3:
            t = t.transpose(0, 1).contiguous().transpose(0, 1)
            laid.append(t)
        return t

    with pretend_gpu() as launches:
        dense((200, 200), causal=True, grad=True)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, by_batch):
            dense((201, 201), causal=True, grad=True)
        assert laid[0].data_ptr() not in [at for one in launches for at in one.addresses]


def test_a_pack_without_keys_is_no_template(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its results are filled, which those of other packs need not be."""
    filled: list[Any] = []
    monkeypatch.setattr(driver, "fill_words", lambda *arguments: filled.append(arguments))
    with pretend_gpu():
        packed((200, 0), fewer=-9, causal=True)
        assert filled
        filled.clear()
        packed((200, 100), causal=True)
        assert not filled


def kernels(launches: list[Launched]) -> dict[str, int]:
    """The compiled form of each kernel that was launched: dtypes of pointers tell forms apart."""
    return {one.kernel: one.function for one in launches}


@pytest.mark.parametrize("length", [200, 201], ids=["kept", "from a template"])
@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=["the LSE", "inputs and output"])
def test_what_hooks_save_in_another_dtype_is_read_as_that(length: int, dtype: torch.dtype) -> None:
    """A kernel for fp32 would read beyond the end of what was saved in half of its bytes."""

    def narrow(t: Tensor) -> Tensor:
        return t.half() if t.dtype is dtype else t

    with pretend_gpu() as launches:
        dense((200, 200), causal=True, grad=True)
        ordinary = kernels(launches)
        with torch.autograd.graph.saved_tensors_hooks(narrow, lambda t: t):
            dense((length, length), causal=True, grad=True)
        assert kernels(launches)["_query_kernel"] != ordinary["_query_kernel"]


def test_a_gradient_of_another_dtype_is_read_as_that() -> None:
    def backward(length: int, dtype: torch.dtype) -> None:
        query, wanted = empty(2, length, 8, 64), [True] * 3 + [False] * 3
        arguments = prepare_attention(query, query, query, **DEFAULTS)
        out, lse = torch.ops.stream_attention.forward(*arguments)
        torch.ops.stream_attention.backward(out.to(dtype), None, out, lse, wanted, *arguments)

    with pretend_gpu() as launches:
        backward(200, BF16)
        ordinary = kernels(launches)
        backward(201, BF16)
        assert kernels(launches) == ordinary
        backward(202, torch.float32)
        found = kernels(launches)
        assert found["_query_kernel"] != ordinary["_query_kernel"] and found["_key_kernel"] != ordinary["_key_kernel"]


def test_a_cleared_cache_has_no_call_though_a_thread_puts_a_family_back() -> None:
    with pretend_gpu():
        dense((300, 300))
        (family,) = launch_cache._families.values()
        launch_cache.clear()
        assert not family.calls and family.template is None
