"""The launch cache with the Triton kernels on a CPU. Run with TRITON_INTERPRET=1; a GPU runs test_launch_cache_gpu.py.

The cases are those of test_launch_cache.py, fewer of them: a call takes 20 to 300 ms here.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from launch_cases import CALLS, DENSE, GROUPS, Sizes, difference, expected, run, stale
from torch import Tensor

from stream_attention import attention
from stream_attention.backends.installed import interpreting
from stream_attention.dispatch import launch_cache

pytestmark = pytest.mark.skipif(not interpreting(), reason="TRITON_INTERPRET=1 is not set: `make test` runs these")

SIZES = Sizes(D=16, Dv=16, dtype=torch.float16, backend="triton", fp8_backend="triton", group=16)
MANY_KEYS = replace(SIZES, Tq=1, Tk=600, capacity=640)
"""Few queries against many keys: two launches, the second of which merges the splits."""

VARIED: dict[str, tuple[str, ...]] = {
    "plain, no gradients": GROUPS,
    "plain": ("gradients",),
    "packed, no gradients": ("sizes", "refusals"),
    "decode": GROUPS,
    "decode, modifiers": ("refusals",),
    "decode, paged": ("sizes", "refusals"),
    "decode, out given": ("refusals",),
    "fp8, codes": ("sizes", "refusals"),
    "append": GROUPS,
    "append, three tokens in pages": ("sizes", "refusals"),
    "write_kv": GROUPS,
    "write_kv in e4m3": GROUPS,
}
WRITTEN = ["append", "append, three tokens in pages", "write_kv", "write_kv in e4m3"]
CACHED = [*DENSE, "packed", "packed, no gradients", "fp8", "fp8, codes", *WRITTEN, "FusedOnlineAttention"]
"""Caches keep the launches of their calls themselves."""


@pytest.fixture(autouse=True)
def _empty() -> Iterator[None]:
    launch_cache.clear()
    yield
    launch_cache.clear()


@pytest.mark.parametrize(("name", "group"), [(name, group) for name, groups in VARIED.items() for group in groups])
def test_no_stale_launch_after_a_change_of(name: str, group: str) -> None:
    assert stale(name, group, SIZES, quick=True) == []


@pytest.mark.parametrize("name", ["all modifiers", "packed"])
def test_no_stale_backward_after_a_change_of_the_gradient(name: str) -> None:
    changes = ("none wanted", "query alone", "through both", "a gradient as of sum()", "a negated gradient")
    assert stale(name, "gradients", SIZES, lambda change: change in changes, quick=True) == []


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("mask, no gradients", "mask"),
        ("packed, no gradients", "query"),
        ("packed, no gradients", "cu_seqlens_q"),
        ("decode, paged", "key"),
        ("decode, paged", "page_table"),
        ("decode, out given", "out"),
        ("fp8, codes", "query"),
        ("append, three tokens in pages", "key"),
        ("append, three tokens in pages", "page_table"),
    ],
)
def test_no_stale_launch_after_a_change_of_how_a_tensor_lies(name: str, tensor: str) -> None:
    assert stale(name, "layouts", SIZES, lambda change: change.startswith(tensor), quick=True) == []


@pytest.mark.parametrize("name", ["plain, no gradients", "packed, no gradients", "bias", "fp8, codes"])
def test_no_stale_launch_after_a_change_of_state(name: str) -> None:
    changes = ("autocast to bfloat16", "torch.use_deterministic_algorithms", "forced eager", "inference mode")
    assert stale(name, "states", SIZES, lambda change: change in changes, quick=True) == []


def test_no_stale_launch_after_a_change_of_the_precision_of_float32_products() -> None:
    """Triton's products of float32 follow torch's switch when a launch is prepared."""
    changes = ("float32 products in medium precision", "float32 products in high precision", "no_grad")
    single = replace(SIZES, dtype=torch.float32)
    assert stale("plain, no gradients", "states", single, lambda change: change in changes, quick=True) == []


def test_no_stale_launch_of_split_keys() -> None:
    changes = ("more keys", "another batch", "more query heads", "one key head")
    assert stale("plain, no gradients", "sizes", MANY_KEYS, lambda change: change in changes, quick=True) == []


@pytest.mark.parametrize("name", CACHED)
def test_a_repeated_call_is_in_the_cache_and_adds_nothing(name: str) -> None:
    assert not run(CALLS[name](SIZES, 0)).error
    entries = launch_cache.size()
    assert entries > 0
    assert difference(run(CALLS[name](SIZES, 1)), expected(CALLS[name](SIZES, 1))) == ""
    assert launch_cache.size() == entries


@pytest.mark.parametrize("sizes", [SIZES, MANY_KEYS], ids=["whole", "split"])
@pytest.mark.parametrize("name", ["plain", "mask, no gradients", "packed, no gradients", "fp8", "fp8, codes", "append"])
def test_the_cache_keeps_no_tensor_and_no_memory(name: str, sizes: Sizes) -> None:
    watched: list[weakref.ref[Any]] = []

    def once(seed: int) -> None:
        call = CALLS[name](sizes, seed)
        outcome = run(call)
        assert not outcome.error
        for t in (*call.tensors.values(), *outcome.tensors):
            if isinstance(t, Tensor):
                watched.extend((weakref.ref(t), weakref.ref(t.untyped_storage())))

    once(0)
    once(1)
    assert launch_cache.size() > 0
    gc.collect()
    assert [reference() for reference in watched if reference() is not None] == []


def test_lengths_that_alternate_between_two_kernels_are_prepared_once_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare, lengths = launch_cache.prepare, []

    def counted(arguments: Any) -> launch_cache.PreparedCall:
        lengths.append(arguments[0].shape[1])
        return prepare(arguments)

    rows = torch.randn(3, 1, 96, 2, 16, dtype=torch.float16)
    for length in (40, 90, 41, 91, 42, 92):  # the left side of the window hides nothing from the short ones
        query, key, value = rows[:, :, :length]
        options: dict[str, Any] = {"window": (64, 0), "backend": "triton"}
        with monkeypatch.context() as patched:
            patched.setattr(launch_cache, "prepare", counted)
            out = attention(query, key, value, **options)
        with monkeypatch.context() as patched:
            patched.setattr(launch_cache, "ENABLED", False)
            assert torch.equal(out, attention(query, key, value, **options))
    assert lengths == [40, 90]
