"""Writing tokens to slots of a paged cache: each call against a loop over its tokens.

Torch operations write here; the files beside test_append_gpu.py run the kernel.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from write_kv_cases import ORDERS, Case, bits, check, draw_case, expected, filled, in_one

from stream_attention import PagedKV, write_kv
from stream_attention.base.fp8_layout import E4M3

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
HEADS, DIM, VALUE_DIM, PAGE = 2, 8, 4, 4


def tokens(n: int, dtype: torch.dtype = F32) -> tuple[Tensor, Tensor]:
    return filled((n, HEADS, DIM), dtype), filled((n, HEADS, VALUE_DIM), dtype, 1)


def pages(count: int = 3, dtype: torch.dtype = F32) -> tuple[Tensor, Tensor]:
    return torch.zeros(count, PAGE, HEADS, DIM).to(dtype), torch.zeros(count, PAGE, HEADS, VALUE_DIM).to(dtype)


# Semantics


def test_a_slot_is_a_token_of_a_page_and_a_negative_one_is_none() -> None:
    for integers in (torch.int32, torch.int64):
        key, value = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(4, 1, 1), torch.tensor([5.0, 6.0, 7.0, 8.0]).view(4, 1, 1)
        stores = torch.zeros(2, 3, 1, 1), torch.zeros(2, 3, 1, 1)
        assert write_kv(key, value, *stores, torch.tensor([4, -1, 0], dtype=integers)) is None  # the last is padding
        assert stores[0].squeeze().tolist() == [[3, 0, 0], [0, 1, 0]]
        assert stores[1].squeeze().tolist() == [[7, 0, 0], [0, 5, 0]]


def test_pages_of_one_token_need_no_dim() -> None:
    key, value = tokens(3)
    stores, slots = (torch.zeros(9, HEADS, DIM), torch.zeros(9, HEADS, VALUE_DIM)), torch.tensor([8, 0, -5])
    write_kv(key, value, *stores, slots)
    for store, new in zip(stores, (key, value), strict=True):
        assert torch.equal(store[[8, 0]], new[:2]) and not store[1:8].any()


def test_what_is_written_is_what_a_paged_cache_reads() -> None:
    key, value = tokens(6)
    table, lengths = torch.tensor([[2, 0]], dtype=torch.int32), torch.tensor([6], dtype=torch.int32)
    cache = PagedKV(*pages(), table, lengths)
    write_kv(key, value, cache.key_pages, cache.value_pages, torch.tensor([8, 9, 10, 11, 0, 1]))
    for read, new in zip(cache.tile(0, 6), (key, value), strict=True):
        assert torch.equal(read[0], new)


def test_e4m3_is_scaled_rounded_and_saturated() -> None:
    numbers = [1.0, -3.0, 895.0, 1e30, -torch.inf, torch.nan, 17.0, 19.0]  # 8.5 and 9.5 are between 8, 9 and 10
    key = torch.tensor(numbers).view(1, 1, 8)
    for scale in (2, 2.0, torch.tensor(2.0), torch.tensor([2.0])):
        stores = [torch.zeros(1, 1, 1, 8).to(E4M3) for _ in range(2)]
        write_kv(key, key, *stores, torch.tensor([0]), k_scale=scale)
        scaled, plain = (store.float().flatten().tolist() for store in stores)
        assert scaled[:5] == [0.5, -1.5, 448.0, 448.0, -448.0] and scaled[5] != scaled[5] and scaled[6:] == [8.0, 10.0]
        assert plain[:5] == [1.0, -3.0, 448.0, 448.0, -448.0] and plain[5] != plain[5] and plain[6:] == [16.0, 20.0]


def test_every_head_has_its_scale() -> None:
    key = torch.full((1, 2, 8), 6.0)
    stores = [torch.zeros(1, 2, 8).to(E4M3) for _ in range(2)]
    write_kv(key, key, *stores, torch.tensor([0]), k_scale=torch.tensor([2.0, 3.0]), v_scale=torch.tensor([1.0, 0.5]))
    assert [store[0, :, 0].tolist() for store in stores] == [[3.0, 2.0], [6.0, 12.0]]


# Agreement, token by token


@pytest.mark.parametrize("seed", range(10))
def test_random_calls(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(30):
        check(draw_case(draw), by_torch=True)


@pytest.mark.parametrize("stored", [BF16, E4M3], ids=str)
@pytest.mark.parametrize("page", [1, 16, 256])
@pytest.mark.parametrize("order", ORDERS)
def test_layouts_of_vllm(order: str, page: int, stored: torch.dtype) -> None:
    stores = in_one(order, {"L": 3, "B": 5, "H": 2, "N": page}, (64, 64), stored)
    slots = torch.tensor([5 * page - 1, -1, 0, page, 2 * page - 1 if page > 1 else 3])
    check(Case(*filled((2, 9, 2, 64), BF16), *stores, slots), by_torch=True)


def test_every_number_becomes_the_nearest_of_e4m3() -> None:
    """Ties go to the even code; numbers from 448 on to 448."""
    numbers = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(BF16)
    numbers = numbers.nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf).view(-1, 1, 128)
    codes = torch.arange(127, dtype=torch.uint8).view(E4M3).double()  # those of positive numbers, in order
    for scale in (1.0, 0.3):
        stores = [torch.zeros(len(numbers), 1, 128).to(E4M3) for _ in range(2)]
        write_kv(numbers, numbers, *stores, torch.arange(len(numbers)), k_scale=scale)
        exact = (numbers.double() / torch.tensor(scale).double()).flatten()
        size = exact.abs().clamp(max=448)
        above = torch.searchsorted(codes, size).clamp(max=126)
        below = (above - 1).clamp(min=0)
        is_above = (codes[above] - size) < (size - codes[below])
        is_tie = (codes[above] - size) == (size - codes[below])
        nearest = torch.where(is_above | (is_tie & (above % 2 == 0)), above, below) + 128 * exact.signbit().int()
        assert torch.equal(bits(stores[0]).flatten().int(), nearest.int())


def test_nothing_to_write_and_nowhere_to_write_it() -> None:
    none = torch.tensor([], dtype=torch.int32)
    for rows in (0, 3):
        stores = pages()
        write_kv(*tokens(rows), *stores, none)
        assert not any(store.any() for store in stores)
    write_kv(*tokens(2), *pages(0), torch.tensor([-1, -1]))
    write_kv(*tokens(2), *pages(0), torch.tensor([-1, 7]), validate=False)


def test_writing_is_an_operation_in_place() -> None:
    """Autograd knows that what it saved of the pages has been written to since."""
    stores = pages()
    versions = [store._version for store in stores]
    write_kv(*tokens(1), *stores, torch.tensor([0]))
    assert all(store._version > version for store, version in zip(stores, versions, strict=True))


# Slots beyond the pages


def test_slots_beyond_the_pages_are_refused_if_they_are_looked_at() -> None:
    case = Case(*tokens(3), *pages(), torch.tensor([1, 12, -1]))
    for asked in ({}, {"validate": True}):
        with pytest.raises(ValueError, match=r"slots: expected below 12, or negative to skip a token; got 12 at \[1\]"):
            case.write(**asked)
    assert not case.key_pages.any()
    with pytest.raises(TypeError, match="validate: expected True, False or None; got 1"):
        case.write(validate=1)
    check(case, by_torch=True)  # without a look they are skipped


# Refusals

Arguments = dict[str, Any]


def changed(**by: Callable[[Arguments], Any]) -> Callable[[Arguments], Arguments]:
    return lambda given: given | {name: change(given) for name, change in by.items()}


def in_e4m3(**by: Any) -> Callable[[Arguments], Arguments]:
    return lambda given: given | {name: given[name].to(E4M3) for name in ("key_pages", "value_pages")} | by


def in_inference(t: Tensor) -> Tensor:
    with torch.inference_mode():
        return t.clone()


REFUSED: dict[str, tuple[Callable[[Arguments], Arguments], type[Exception], str]] = {
    "no tensor": (changed(key=lambda _: None), TypeError, "key: expected a torch.Tensor; got NoneType"),
    "pages no tensor": (changed(value_pages=lambda _: []), TypeError, "value_pages: expected a torch.Tensor; got list"),
    "a batch": (changed(key=lambda g: g["key"][None]), ValueError, r"key: expected shape \[N, Hkv, D\]"),
    "integers": (changed(key=lambda g: g["key"].long()), TypeError, "key: expected a floating dtype"),
    "no heads": (changed(key=lambda g: g["key"][:, :0]), ValueError, "key: expected at least one head"),
    "dtypes": (changed(value=lambda g: g["value"].half()), TypeError, "value: expected the key's dtype torch.float32"),
    "heads": (changed(value=lambda g: g["value"][:, :1]), ValueError, r"value: expected the key's heads, \[N, 2, Dv\]"),
    "every other channel": (
        changed(key=lambda g: torch.zeros(3, HEADS, 2 * DIM)[..., ::2]),
        ValueError,
        "key: expected a contiguous last dim; got strides",
    ),
    "pages by channels": (
        changed(key_pages=lambda g: torch.zeros(3, PAGE, DIM, HEADS).mT),
        ValueError,
        "key_pages: expected a contiguous last dim",
    ),
    "whole rows of a packed cache": (
        changed(key_pages=lambda g: torch.zeros(3, PAGE, HEADS, DIM + VALUE_DIM)),
        ValueError,
        r"key_pages: expected shape \[P, page, 2, 8\]; got \[3, 4, 2, 12\]",
    ),
    "pages with heads first": (
        changed(key_pages=lambda g: g["key_pages"].transpose(1, 2)),
        ValueError,
        r"key_pages: expected shape \[P, page, 2, 8\]; got \[3, 2, 4, 8\]",
    ),
    "tokens of other pages": (
        changed(value_pages=lambda g: torch.zeros(3, PAGE + 1, HEADS, VALUE_DIM)),
        ValueError,
        r"value_pages: expected shape \[3, 4, 2\] \+ \[Dv\], as key_pages",
    ),
    "pages without tokens": (
        changed(key_pages=lambda g: g["key_pages"][:, :0]),
        ValueError,
        r"key_pages: expected shape \[P, page, 2, 8\]; got \[3, 0, 2, 8\]",
    ),
    "a flat pool of other heads": (
        changed(key_pages=lambda g: torch.zeros(9, HEADS + 1, DIM)),
        ValueError,
        r"key_pages: expected shape \[slots, 2, 8\]",
    ),
    "bytes": (
        changed(key_pages=lambda g: g["key_pages"].to(torch.uint8)),
        TypeError,
        r"key_pages: expected the key's .* got torch.uint8. To write e4m3, pass pages.view\(torch.float8_e4m3fn\)",
    ),
    "another dtype": (changed(key_pages=lambda g: g["key_pages"].half()), TypeError, "key_pages: expected the key's"),
    "values in e4m3 alone": (
        changed(value_pages=lambda g: g["value_pages"].to(E4M3)),
        TypeError,
        "value_pages: expected the dtype of key_pages, torch.float32",
    ),
    "another device": (
        changed(key_pages=lambda g: g["key_pages"].to("meta")),
        ValueError,
        "key_pages: expected the key",
    ),
    "slots elsewhere": (changed(slots=lambda g: g["slots"].to("meta")), ValueError, "slots: expected the key's device"),
    "slots as floats": (changed(slots=lambda g: g["slots"].float()), TypeError, "slots: expected dtype torch.int32 or"),
    "slots of a batch": (changed(slots=lambda g: g["slots"][None]), ValueError, r"slots: expected shape \[N\]"),
    "one slot": (changed(slots=lambda g: g["slots"][0]), ValueError, r"slots: expected shape \[N\]; got \[\]"),
    "fewer keys": (changed(key=lambda g: g["key"][1:]), ValueError, "key: expected a token for each of the 3 slots"),
    "fewer values": (changed(value=lambda g: g["value"][1:]), ValueError, "value: expected a token for each of the 3"),
    "a scale of nothing": (
        lambda g: g | {"k_scale": 1.0},
        ValueError,
        "k_scale: expected None for pages in torch.float32",
    ),
    "scale 0": (in_e4m3(k_scale=0.0), ValueError, "k_scale: expected from 1.2e-38 to 2.3e"),
    "a negative scale": (in_e4m3(v_scale=-1.0), ValueError, "v_scale: expected from 1.2e-38 to 2.3e"),
    "scale NaN": (in_e4m3(k_scale=float("nan")), ValueError, "k_scale: expected a finite number"),
    "a scale as text": (in_e4m3(k_scale="1"), TypeError, "k_scale: expected a number"),
    "a scale in bf16": (
        in_e4m3(k_scale=torch.ones((), dtype=BF16)),
        TypeError,
        "k_scale: expected dtype torch.float32",
    ),
    "scales of others": (
        in_e4m3(v_scale=torch.ones(3)),
        ValueError,
        r"v_scale: expected shape \[\] or \[Hkv=2\]; got \[3\]",
    ),
    "a gradient": (
        changed(key=lambda g: g["key"].clone().requires_grad_()),
        ValueError,
        "key: expected requires_grad=False; .* write_kv is not differentiable",
    ),
    "a gradient of pages": (
        changed(value_pages=lambda g: g["value_pages"].clone().requires_grad_()),
        ValueError,
        "value_pages: expected requires_grad=False",
    ),
    "expanded pages": (
        changed(key_pages=lambda g: g["key_pages"][:1].expand(3, -1, -1, -1)),
        ValueError,
        "key_pages: expected no overlapping elements",
    ),
    "pages of inference mode": (
        changed(key_pages=lambda g: in_inference(g["key_pages"])),
        ValueError,
        "key_pages: expected a writable tensor; got one made under torch.inference_mode",
    ),
    "keys of the pages": (
        changed(key=lambda g: g["key_pages"][0, :3]),
        ValueError,
        "key: expected memory apart from key_pages; got overlapping memory. Pass a copy",
    ),
    "keys where values are": (
        changed(
            key_pages=lambda g: g["wide"][..., :DIM], value_pages=lambda g: g["wide"][..., DIM - 1 :][..., :VALUE_DIM]
        ),
        ValueError,
        "value_pages: expected memory apart from key_pages",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    change, error, words = REFUSED[name]
    (key, value), (key_pages, value_pages) = tokens(3), pages()
    given = {"key": key, "value": value, "key_pages": key_pages, "value_pages": value_pages}
    given |= {"slots": torch.tensor([3, 1, 2]), "wide": torch.zeros(3, PAGE, HEADS, 2 * DIM)}
    bad = change(given)
    for one in (given, bad):
        del one["wide"]
    write_kv(**given)  # what a call that is known skips must not be skipped for the next
    key_pages.zero_()
    with pytest.raises(error, match=words):
        write_kv(**bad)
    assert not key_pages.any()


def test_memory_that_lies_in_turns_does_not_overlap() -> None:
    pool = torch.zeros(4, 2, PAGE, HEADS, DIM)
    new = filled((2, 3, HEADS, DIM), F32)
    for stores in (pool.unbind(1), pool.flip(1).unbind(1), pool.view(4, PAGE, HEADS, 2 * DIM).split(DIM, -1)):
        check(Case(*new, *stores, torch.tensor([0, 5, 15])), by_torch=True)


# Inside PyTorch


@pytest.mark.parametrize("stored", [BF16, E4M3], ids=str)
def test_it_compiles_whole_and_in_place(stored: torch.dtype) -> None:
    def layer(new: Tensor, pool: Tensor, slots: Tensor, scale: Any) -> Tensor:
        key, value = (2 * new).unbind()
        stores = pool.transpose(1, 2).split(DIM, -1)
        write_kv(key, value, *stores, slots, k_scale=scale, v_scale=scale)
        return stores[0].float().nan_to_num().sum() + key.sum()

    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for n in (3, 4, 5):
        pool = filled((4, HEADS, PAGE, 2 * DIM), stored)
        new, slots = filled((2, n, HEADS, DIM), BF16, n), torch.tensor([0, -1, 15, 6, 9])[:n]
        scales = (None,) if stored is BF16 else (None, torch.tensor([0.5, 0.3]), 0.3)
        for scale in scales:
            one, other = pool.clone(), pool.clone()
            results = layer(new, one, slots, scale), compiled(new, other, slots, scale)
            assert (
                torch.equal(*results) and torch.equal(bits(one), bits(other)) and not torch.equal(bits(one), bits(pool))
            )
    torch.compiler.reset()


def test_it_is_a_library_op() -> None:
    op = torch.ops.stream_attention.write_kv.default
    stores = torch.zeros(3, PAGE, HEADS, DIM + VALUE_DIM).split((DIM, VALUE_DIM), -1)
    torch.library.opcheck(op, (*tokens(3), *stores, torch.tensor([3, -1, 2]), None, None))
    seen: list[Any] = []

    class Mode(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    case = Case(*tokens(2), *pages(dtype=E4M3), torch.tensor([3, 4]), 0.5, torch.tensor(2.0))
    wanted = expected(case)
    with Mode():
        case.write(validate=False)
    assert op in seen
    for got, want in zip(case[2:4], wanted[2:4], strict=True):
        assert torch.equal(bits(got), bits(want))


def test_fake_tensors_are_checked_and_not_written() -> None:
    with FakeTensorMode():
        key, value = torch.empty(3, HEADS, DIM), torch.empty(3, HEADS, VALUE_DIM)
        stores = torch.empty(3, PAGE, HEADS, DIM), torch.empty(3, PAGE, HEADS, VALUE_DIM)
        write_kv(key, value, *stores, torch.empty(3, dtype=torch.int64))
        with pytest.raises(ValueError, match="value: expected the key's heads"):
            write_kv(key, value[:, :1], *stores, torch.empty(3, dtype=torch.int64))


def test_an_engine_writes_in_inference_mode() -> None:
    with torch.inference_mode():
        case = Case(*tokens(3), *pages(), torch.tensor([3, -1, 2]))
        for _ in range(2):
            check(case, by_torch=True)
    parameters = Case(torch.nn.Parameter(case.key.clone()), *case[1:4], case.slots)
    with torch.no_grad(), pytest.raises(ValueError, match="key_pages: expected a writable tensor"):
        parameters.write()
