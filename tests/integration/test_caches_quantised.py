"""A layer in few bits holds what `quantize_kv` makes of all its tokens, however they came, and is read as it is."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("transformers")

from stream_attention import ContiguousKV, attention, quantize_kv
from stream_attention.integration.placeholder import MAX_DECODE_QUERIES, read
from stream_attention.integration.quantized_layer import STEP, QuantisedLayer, QuantizeOptions

HEADS, DIM = 2, 16
INT8 = QuantizeOptions("int8", 8, 16, "channel", "token")
CODINGS = {
    "int8": INT8,
    "int4": QuantizeOptions("int4", 8, 16, "channel", "token"),
    "fp8": QuantizeOptions("fp8", 8, 16, "channel", "token"),
    "int4, a residual that is no whole blocks": QuantizeOptions("int4", 8, 5, "channel", "token"),
    "int8, no residual": QuantizeOptions("int8", 8, 0, "token", "channel"),
}
ARRIVALS = {
    "one by one": [20, *[1] * 45],
    "few at a time": [20, 3, 1, MAX_DECODE_QUERIES, 1, 7, 2],
    "many at a time": [20, 1, MAX_DECODE_QUERIES + 1, 1, 60, 5],
    "from one token": [1, *[1] * 30],
    "beyond its room": [20, STEP + 30, 1, 1],
}


def drawn(tokens: int, batch: int = 2, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Keys and values of a model's layer, `[B, Hkv, tokens, D]`."""
    generator = torch.Generator().manual_seed(seed)
    key, value = torch.randn(2, batch, HEADS, tokens, DIM, generator=generator)
    return key, value


def fed(layer: QuantisedLayer, tokens: tuple[Tensor, Tensor], sizes: list[int]) -> list[tuple[Tensor, Tensor]]:
    starts = [sum(sizes[:n]) for n in range(len(sizes))]
    return [
        layer.update(*(x[:, :, start : start + size] for x in tokens))
        for start, size in zip(starts, sizes, strict=True)
    ]


def held(layer: QuantisedLayer, row: int = 0) -> list[Tensor]:
    assert layer.kv is not None
    return [x[row] for x in layer.kv.tile(0, layer.rows[row])]


def whole(tokens: tuple[Tensor, Tensor], count: int, coding: QuantizeOptions, row: int = 0) -> list[Tensor]:
    """What the first tokens are once they were quantised together."""
    key, value = (x[row : row + 1, :, :count].transpose(1, 2) for x in tokens)
    return [x[0] for x in quantize_kv(ContiguousKV(key, value), **coding._asdict()).tile(0, count)]


# What it holds


@pytest.mark.parametrize("coding", CODINGS.values(), ids=CODINGS)
@pytest.mark.parametrize("sizes", ARRIVALS.values(), ids=ARRIVALS)
def test_it_holds_what_quantize_kv_makes_of_all_tokens(coding: QuantizeOptions, sizes: list[int]) -> None:
    tokens, layer = drawn(sum(sizes)), QuantisedLayer(None, coding)
    fed(layer, tokens, sizes)
    assert layer.get_seq_length() == sum(sizes)
    for row in range(2):
        for mine, expected in zip(held(layer, row), whole(tokens, sum(sizes), coding, row), strict=True):
            torch.testing.assert_close(mine, expected, rtol=0, atol=0)


@pytest.mark.parametrize("sizes", ARRIVALS.values(), ids=ARRIVALS)
def test_padding_is_not_held_and_rows_are_as_they_would_be_alone(sizes: list[int]) -> None:
    pads = [0, sizes[0] // 2]
    tokens, mask = drawn(sum(sizes)), torch.arange(sizes[0]) >= torch.tensor(pads)[:, None]
    layer = QuantisedLayer(mask, INT8)
    fed(layer, tokens, sizes)
    assert layer.rows == [sum(sizes) - pad for pad in pads] and layer.get_seq_length() == sum(sizes)
    for row, pad in enumerate(pads):
        real = tokens[0][:, :, pad:], tokens[1][:, :, pad:]
        for mine, expected in zip(held(layer, row), whole(real, layer.rows[row], INT8, row), strict=True):
            torch.testing.assert_close(mine, expected, rtol=0, atol=0)


def test_its_bytes_are_those_of_its_tensors_and_few() -> None:
    tokens = drawn(4096, batch=1)
    layer = QuantisedLayer(None, QuantizeOptions("int4", 64, 128, "channel", "token"))
    assert layer.nbytes == 0
    layer.update(*(x.half() for x in tokens))
    kv = layer.kv
    assert kv is not None
    parts = [kv.key.codes, kv.key.scale, kv.key.zero, kv.value.codes, kv.value.scale, kv.value.zero]
    parts += [kv.key_window, kv.value_window, kv.lengths, layer.ring.page_table]
    assert layer.nbytes == sum(0 if part is None else part.nbytes for part in parts)
    assert layer.nbytes < 0.6 * sum(x.half().nbytes for x in tokens)  # of few dims, that is; with room for more


@pytest.mark.parametrize("format", ["int4", "int8", "fp8"])
def test_it_lies_as_kernels_like_it_also_when_it_was_grown_or_its_rows_were_chosen(format: str) -> None:
    layer = QuantisedLayer(None, QuantizeOptions(format, 64, 128, "channel", "token"))
    for tokens in (300, STEP, 1):
        layer.update(*torch.randn(2, 1, 2, tokens, 64).half())
        assert layer.kv is not None and layer.kv.coding.aligned and layer.kv.coding.in_order
    layer.batch_repeat_interleave(2)
    assert layer.kv.coding.aligned and layer.kv.coding.in_order


# What the model gets


def test_the_first_tokens_come_back_as_they_are() -> None:
    key, value = drawn(20)
    keys, values = QuantisedLayer(None, INT8).update(key, value)
    assert keys is key and values is value


def test_a_later_token_gets_hollow_keys_of_all_that_was_seen() -> None:
    layer = QuantisedLayer(None, INT8)
    (_, (keys, values)) = fed(layer, drawn(21), [20, 1])
    assert keys.shape == values.shape == (2, HEADS, 21, DIM)
    assert keys.isnan().all() and keys.untyped_storage().nbytes() == keys.itemsize
    assert layer.get_mask_sizes(4) == (25, 0) == layer.get_mask_sizes(torch.arange(21, 25))


@pytest.mark.parametrize("new", [1, 3, MAX_DECODE_QUERIES])
def test_what_is_read_is_what_is_held(new: int) -> None:
    layer, query = QuantisedLayer(None, INT8), torch.randn(2, new, 4, DIM)
    _, (keys, _) = fed(layer, drawn(60 + new), [60, new])
    out = read(query, keys, None, scale=0.3, softcap=20.0)
    assert layer.kv is not None and out is not None
    expected = attention(query, *layer.kv.tile(0, 60 + new), causal=True, scale=0.3, softcap=20.0)
    torch.testing.assert_close(out, expected)


def test_many_tokens_see_themselves_as_they_are_and_the_rest_out_of_codes() -> None:
    tokens = drawn(100)
    mask = torch.arange(60) >= torch.tensor([[0], [9]])
    layer = QuantisedLayer(mask, INT8)
    fed(layer, tokens, [60])
    before = [held(layer, row) for row in range(2)]
    made = layer.update(*(x[:, :, 60:] for x in tokens))
    for mine, given, side in zip(made, tokens, (0, 1), strict=True):
        torch.testing.assert_close(mine[:, :, 60:], given[:, :, 60:], rtol=0, atol=0)
        for row, pad in enumerate((0, 9)):
            torch.testing.assert_close(mine[row, :, pad:60], before[row][side].transpose(0, 1), rtol=0, atol=0)


def test_ordinary_keys_are_left_to_the_caller() -> None:
    assert read(torch.randn(2, 1, 4, DIM), drawn(3)[0], None) is None


# What it costs


class Counted(TorchDispatchMode):
    """Counts operations that are not views."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[func.__name__.partition(".")[0]] += not func.is_view
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("pad", "most"), [(0, 3), (5, 50)])
def test_a_token_alone_is_a_copy_into_the_window(pad: int, most: int) -> None:
    """Quantising a block is left for the token that completes it."""
    layer, tokens = QuantisedLayer(torch.arange(23) >= torch.tensor([[0], [pad]]), INT8), drawn(1)
    layer.update(*drawn(23))
    counts = []
    for _ in range(9):
        with Counted() as counted:
            layer.update(*tokens)
        counts.append((counted.names.total(), counted.names["amax"]))
    due = [0, 8] if pad == 0 else [0, 5, 8]  # rows of 24 and 32 tokens have a new block
    assert [n for n, (_, amax) in enumerate(counts) if amax] == due
    assert max(total for total, amax in counts if not amax) <= most


# What transformers may do with it


@pytest.mark.parametrize("count", [1, 5, 30])
def test_cropping_leaves_the_earlier_tokens_as_they_were_read(count: int) -> None:
    tokens, layer = drawn(70), QuantisedLayer(None, CODINGS["int4"])
    fed(layer, tokens, [50])
    before = held(layer)
    layer.crop(-count)
    assert layer.get_seq_length() == 50 - count
    for mine, expected in zip(held(layer), before, strict=True):
        torch.testing.assert_close(mine, expected[: 50 - count], rtol=0, atol=0)
    fed(layer, (tokens[0][:, :, 50:], tokens[1][:, :, 50:]), [1] * 20)
    for mine, expected in zip(held(layer), tokens, strict=True):
        torch.testing.assert_close(mine[-16:], expected[0, :, 54:70].transpose(0, 1), rtol=0, atol=0)


def test_a_positive_crop_is_what_remains() -> None:
    layer = QuantisedLayer(None, INT8)
    fed(layer, drawn(50), [50])
    layer.crop(60)
    assert layer.get_seq_length() == 50
    layer.crop(45)
    layer.crop(0)
    assert layer.get_seq_length() == 45 == layer.rows[0]


@pytest.mark.parametrize("padded", [False, True])
def test_rows_are_chosen_and_repeated(padded: bool) -> None:
    mask = torch.arange(40) >= torch.tensor([[0], [7 * padded]])
    tokens, layer = drawn(41), QuantisedLayer(mask, CODINGS["int4"])
    fed(layer, tokens, [40])
    rows = [held(layer, row) for row in range(2)]
    layer.batch_repeat_interleave(2)
    layer.reorder_cache(torch.tensor([3, 0, 2]))
    for row, was in enumerate((1, 0, 1)):
        for mine, expected in zip(held(layer, row), rows[was], strict=True):
            torch.testing.assert_close(mine, expected, rtol=0, atol=0)
    layer.update(*(x[[1, 0, 1], :, 40:] for x in tokens))
    assert layer.rows == [row + 1 for row in (40 - 7 * padded, 40, 40 - 7 * padded)]


def test_a_copy_goes_its_own_way() -> None:
    """`copy.deepcopy` of the cache of a shared prompt is how transformers' documentation reuses it."""
    layer, tokens = QuantisedLayer(None, INT8), drawn(30)
    fed(layer, tokens, [20])
    other = copy.deepcopy(layer)
    fed(other, (tokens[0][:, :, 20:], tokens[1][:, :, 20:]), [1] * 10)
    for mine, expected in zip(held(other), whole(tokens, 30, INT8), strict=True):
        torch.testing.assert_close(mine, expected, rtol=0, atol=0)
    for mine, expected in zip(held(layer), whole(tokens, 20, INT8), strict=True):
        torch.testing.assert_close(mine, expected, rtol=0, atol=0)


def test_a_reset_forgets_everything() -> None:
    layer = QuantisedLayer(torch.ones(2, 20, dtype=torch.bool), INT8)
    fed(layer, drawn(21), [20, 1])
    layer.reset()
    assert layer.get_seq_length() == layer.nbytes == 0 and layer.padding is None
    tokens = drawn(30, batch=3, seed=1)
    fed(layer, tokens, [30])
    torch.testing.assert_close(held(layer, 2)[0], whole(tokens, 30, INT8, 2)[0], rtol=0, atol=0)


# Refusals


def test_gradients_other_batches_and_too_much_are_refused() -> None:
    layer = QuantisedLayer(None, INT8)
    key, value = drawn(20)
    with pytest.raises(ValueError, match="expected tensors without a gradient; got a gradient"):
        layer.update(key.clone().requires_grad_(), value)
    layer.update(key, value)
    with pytest.raises(ValueError, match="expected the 2 rows of the cache; got 3"):
        layer.update(*drawn(1, batch=3))
    with pytest.raises(ValueError, match="crop: expected at most the 20 tokens of every row; got 21"):
        layer.crop(-21)
    with pytest.raises(ValueError, match="stays on its device"):
        layer.offload()


def test_padding_that_the_layer_cannot_know_is_refused() -> None:
    with pytest.raises(ValueError, match="mask of the 2 rows of the prompt, or of a part of them; got 3"):
        QuantisedLayer(torch.ones(3, 20, dtype=torch.bool), INT8).update(*drawn(20))
    late = torch.arange(20) >= torch.tensor([[0], [12]])
    with pytest.raises(ValueError, match="first call with 12 to 20 tokens, all padding among them; got 8"):
        QuantisedLayer(late, INT8).update(*drawn(8))
    layer, query = QuantisedLayer(None, INT8), torch.randn(2, 1, 4, DIM)
    _, (keys, _) = fed(layer, drawn(21), [20, 1])
    with pytest.raises(ValueError, match="expected None, or a cache constructed with the prompt's padding"):
        read(query, keys, torch.ones(2, 21, dtype=torch.bool))


def test_padding_among_later_tokens_is_refused() -> None:
    layer, query = QuantisedLayer(torch.ones(2, 20, dtype=torch.bool), INT8), torch.randn(2, 4, 4, DIM)
    _, (keys, _) = fed(layer, drawn(24), [20, 4])
    mask = torch.ones(2, 24, dtype=torch.bool)
    assert read(query, keys, mask) is not None
    mask[1, 21] = False
    with pytest.raises(ValueError, match="at the beginning of the prompt only; got padding after it"):
        read(query, keys, mask)
    with pytest.raises(ValueError, match=r"expected shape \[B, tokens so far\]"):
        read(query, keys, torch.ones(2, 1, 4, 24, dtype=torch.bool))
