"""What our masks say is what the matrix says that transformers makes for SDPA, in few numbers."""

from __future__ import annotations

import weakref
from inspect import signature
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")
from stream_attention.integration.forward import stream_attention_forward  # noqa: E402
from stream_attention.integration.hf import NAME, register  # noqa: E402
from stream_attention.integration.masks import SHORT, decoded, matrix  # noqa: E402

masking_utils = transformers.masking_utils
pytestmark = pytest.mark.xdist_group("transformers")

ARGUMENTS = signature(masking_utils.create_causal_mask).parameters
WINDOW = 4


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    register()


class Past:
    """A cache of which a mask function asks how long it is."""

    def __init__(self, tokens: int, slots: int | None = None) -> None:
        self.tokens, self.slots = tokens, slots
        self.is_compileable = slots is not None
        self.is_sliding = [False]

    def get_query_offset(self, layer_idx: int = 0) -> int | Tensor:
        return self.tokens if self.slots is None else torch.tensor(self.tokens)

    get_seq_length = get_query_offset  # as it is asked in older versions

    def get_mask_sizes(self, query: int | Tensor, layer: int) -> tuple[int, int]:
        new = query if isinstance(query, int) else len(query)
        return self.tokens + new if self.slots is None else self.slots, 0


def mask(
    implementation: str,
    q_len: int,
    attention_mask: Tensor | None = None,
    past: Past | None = None,
    position_ids: Tensor | None = None,
    batch: int = 2,
    kind: str = "causal",
    window: int = WINDOW,
    **others: Any,
) -> Tensor | None:
    config = transformers.MistralConfig(sliding_window=window)
    config._attn_implementation = implementation
    named = {"causal": "create_causal_mask", "window": "create_sliding_window_causal_mask"}
    make = getattr(masking_utils, named.get(kind, f"create_{kind}_mask"))
    said = {"attention_mask": attention_mask, "past_key_values": past, **others}
    said |= dict.fromkeys(("input_embeds", "inputs_embeds"), torch.zeros(batch, q_len, 1))
    said |= {"cache_position": torch.arange(q_len) + (past.tokens if past else 0), "position_ids": position_ids}
    known = signature(make).parameters
    assert set(others) <= set(known)
    return make(config, **{name: value for name, value in said.items() if name in known})


def as_matrix(mask: Tensor | None, q_len: int, k_len: int, batch: int = 2) -> Tensor:
    if mask is None:
        return torch.ones(q_len, k_len, dtype=torch.bool).tril(k_len - q_len).expand(batch, 1, -1, -1)
    whole = mask if mask.dtype is torch.bool else matrix(mask, batch, q_len, k_len)
    return whole.expand(batch, 1, q_len, k_len)


LEFT = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [1] * 8])
HOLES = torch.tensor([[0, 0, 1, 1, 0, 1, 1, 1], [1] * 8])
NOBODY = torch.tensor([[0] * 8, [1] * 8])
PACKED = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3], [0, 0, 1, 2, 3, 4, 5, 6]])
CASES: dict[str, dict[str, Any]] = {
    "nothing hidden": {"q_len": 8},
    "all ones": {"q_len": 8, "attention_mask": torch.ones(2, 8)},
    "left": {"q_len": 8, "attention_mask": LEFT},
    "right": {"q_len": 8, "attention_mask": LEFT.flip(1)},
    "both ends": {"q_len": 8, "attention_mask": LEFT * LEFT.flip(1)},
    "a row of padding": {"q_len": 8, "attention_mask": NOBODY},
    "left, long": {"q_len": 8 * SHORT, "attention_mask": LEFT.repeat_interleave(SHORT, 1)},
    "right, long": {"q_len": 8 * SHORT, "attention_mask": LEFT.flip(1).repeat_interleave(SHORT, 1)},
    "holes": {"q_len": 8, "attention_mask": HOLES},
    "packed": {"q_len": 8, "position_ids": PACKED},
    "one sequence a row": {"q_len": 8, "position_ids": torch.arange(8).expand(2, -1)},
    "after a cache": {"q_len": 3, "past": Past(5)},
    "after a padded cache": {"q_len": 3, "past": Past(5), "attention_mask": LEFT},
    "one token": {"q_len": 1, "past": Past(7)},
    "one token after padding": {"q_len": 1, "past": Past(7), "attention_mask": LEFT},
    "empty static cache": {"q_len": 8, "past": Past(0, 12)},
    "empty static cache, padded": {"q_len": 8, "past": Past(0, 12), "attention_mask": LEFT},
    "static cache": {"q_len": 3, "past": Past(5, 12), "attention_mask": LEFT},
    "static cache, one token": {"q_len": 1, "past": Past(7, 12)},
    "static cache, one token, all ones": {"q_len": 1, "past": Past(7, 12), "attention_mask": torch.ones(2, 8)},
    "static cache, one token, padded": {"q_len": 1, "past": Past(7, 12), "attention_mask": LEFT},
}


@pytest.mark.parametrize("kind", ["causal", "window"])
@pytest.mark.parametrize("name", CASES)
def test_every_query_sees_what_it_sees_by_the_matrix(name: str, kind: str) -> None:
    """Padded queries too, also those that see nothing."""
    case = CASES[name]
    eager = mask("eager", kind=kind, **case)
    assert eager is not None
    k_len = eager.shape[-1]
    ours = as_matrix(mask(NAME, kind=kind, **case), case["q_len"], k_len)
    assert torch.equal(ours, (eager == 0).expand_as(ours))


@pytest.mark.parametrize("attention_mask", [None, torch.ones(2, 8), LEFT, HOLES])
@pytest.mark.parametrize("kind", ["bidirectional", "bidirectional_sliding_window"])
def test_both_ways(kind: str, attention_mask: Tensor | None) -> None:
    if not hasattr(masking_utils, f"create_{kind}_mask"):
        pytest.skip("an older transformers makes them elsewhere")
    eager = mask("eager", 8, attention_mask, kind=kind)
    ours = mask(NAME, 8, attention_mask, kind=kind)
    if eager is None:
        assert ours is None
        return
    assert ours is not None and torch.equal(as_matrix(ours, 8, 8), (eager == 0).expand(2, 1, 8, 8))


# Padding on the left and on the right, which is computed by sequences


def attended(read: Tensor, length: int, **options: Any) -> Tensor:
    """The weights by which every query attends, `[B, T, T]`: values that are an identity matrix give them."""
    query, key = torch.linspace(-2, 3, 2 * len(read) * 2 * length * 8).sin().view(2, len(read), 2, length, 8)
    value = torch.eye(length).expand(len(read), 2, -1, -1)
    return stream_attention_forward(torch.nn.Module(), query, key, value, read, **options)[0][:, :, 0]


@pytest.mark.parametrize("window", [0, 1, 2, 21, 39, 40, 75, 127])
def test_by_sequences_a_query_attends_to_what_the_matrix_says(window: int) -> None:
    """Every run of tokens that a row may have, in steps of 20, in batches that mix them; long and short windows."""
    length, step = SHORT + 12, 20
    runs = [(begin, end) for begin in range(0, length, step) for end in range(begin, length + 1, step)]
    order = torch.randperm(len(runs), generator=torch.Generator().manual_seed(window)).tolist()
    at = torch.arange(length)
    for first in range(0, len(runs), 5):
        batch = [runs[i] for i in order[first : first + 5]]
        padding = torch.stack([(at >= begin) & (at < end) for begin, end in batch])
        said = {"batch": len(batch), "kind": "window" if window else "causal", "window": window or None}
        ours = mask(NAME, length, padding, **said)
        assert ours is not None and decoded(ours).unpadded is not None
        expected = as_matrix(mask("sdpa", length, padding, **said), length, length, len(batch))[:, 0]
        weights = attended(ours, length)
        assert torch.equal(weights > 0, expected)
        torch.testing.assert_close(weights.sum(-1), expected.any(-1).float())
        assert torch.equal(weights, attended(ours.clone(), length))
        with_bias = attended(ours, length, position_bias=torch.zeros(1, 2, length, length))
        torch.testing.assert_close(weights, with_bias)


def test_padding_is_in_no_sequence_of_tokens() -> None:
    padding = torch.ones(3, 300, dtype=torch.bool)
    padding[0, :290], padding[1, 200:] = False, False
    unpadded = decoded(mask(NAME, 300, padding, batch=3)).unpadded
    assert unpadded is not None and unpadded.right is not None
    assert unpadded.queries.cu_seqlens.tolist() == [0, 290, 290, 300, 500, 600, 600, 900]
    assert unpadded.keys.cu_seqlens.tolist() == [0, 0, 290, 300, 500, 500, 600, 900]
    assert (unpadded.queries.longest, unpadded.keys.longest) == (300, 300)
    right = unpadded.right
    assert right.queries.cu_seqlens.tolist() == [0, 0, 100] and right.keys.cu_seqlens.tolist() == [0, 300, 500]
    assert torch.equal(right.into, torch.arange(500, 600)) and right.kept is None


def test_a_compiled_layer_reads_a_mask_that_was_made_outside() -> None:
    padding = torch.ones(2, SHORT, dtype=torch.bool)
    padding[0, 50:], padding[1, :30] = False, False
    ours = mask(NAME, SHORT, padding)
    assert ours is not None and decoded(ours).unpadded is not None
    compiled = torch.compile(attended, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(ours, SHORT), attended(ours, SHORT))


@pytest.mark.parametrize("case", ["short", "between tokens", "after a cache"])
def test_what_stays_a_mask(case: str) -> None:
    length, past = (SHORT - 1, None) if case == "short" else (SHORT, Past(3) if case == "after a cache" else None)
    padding = torch.ones(2, length + (3 if past else 0), dtype=torch.bool)
    padding[0, :9] = False
    if case == "between tokens":
        padding[1, 7] = False
    ours = mask(NAME, length, padding, past=past)
    assert ours is not None and decoded(ours).unpadded is None and torch.equal(decoded(ours).padding, padding)


# In few numbers


@pytest.mark.parametrize("kind", ["causal", "window"])
@pytest.mark.parametrize("said", ["nothing", "padding", "packed", "static"])
def test_a_mask_of_many_tokens_is_small(kind: str, said: str) -> None:
    """Of 2 x 8192 x 8192 bytes as a matrix: nothing, or a byte for each token where some are padding."""
    n, numbers = 1 << 13, 0
    padding = torch.ones(2, n, dtype=torch.bool)
    padding[0, :100] = False
    positions = torch.cat([torch.arange(n // 2)] * 2).expand(2, -1)
    case = {
        "nothing": {},
        "padding": {"attention_mask": padding},
        "packed": {"position_ids": positions},
        "static": {"past": Past(0, 2 * n)},
    }[said]
    made = mask(NAME, n, kind=kind, **case)
    if made is not None:
        numbers = made.untyped_storage().nbytes()
    assert numbers <= (2 * n if said == "padding" else 256)


def test_what_the_host_must_know_is_in_the_shape() -> None:
    whole = mask(NAME, 8)
    assert whole is None
    windowed = mask(NAME, 8, kind="window")
    assert windowed is not None and decoded(windowed)[:3] == (WINDOW, False, 8) and decoded(windowed).padding is None
    static = mask(NAME, 8, past=Past(0, 12))
    assert static is not None and decoded(static)[:3] == (0, False, 8) and decoded(static).slots == 12
    step = mask(NAME, 1, past=Past(7, 12), kind="window")
    assert step is not None and step.shape == (2, 1 + WINDOW, 1, 1) and decoded(step)[0].tolist() == [8, 8]
    cut = mask(NAME, 8, position_ids=PACKED)
    assert cut is not None and decoded(cut).cu_seqlens.tolist() == [0, 4, 8, 9, 16] and decoded(cut).longest == 7
    holes = mask(NAME, 8, HOLES)
    assert holes is not None and torch.equal(decoded(holes).padding, HOLES.bool())


@pytest.mark.parametrize("kind", ["causal", "window"])
def test_what_a_mask_says_at_once_is_what_its_numbers_say(kind: str) -> None:
    readers = {torch.uint8: decoded, torch.int32: decoded, torch.int64: decoded}
    made = [mask(NAME, kind=kind, **case) for case in CASES.values()]
    ours = [one for one in made if one is not None and one.dtype in readers]
    assert {one.dtype for one in ours} == set(readers)
    for one in ours:
        read = readers[one.dtype]
        at_once, by_numbers = read(one), read(one.clone())
        assert at_once is read(one) and type(at_once) is type(by_numbers)
        assert str(at_once) == str(by_numbers)


def test_a_mask_that_says_what_it_says_is_not_kept_by_that() -> None:
    for case in CASES.values():
        made = mask(NAME, **case)
        watched = None if made is None else weakref.ref(made)
        del made
        assert watched is None or watched() is None


# What only a matrix says


def test_overlays_of_a_model_are_made_a_matrix() -> None:
    def far(batch: Any, head: Any, q: Any, k: Any) -> Any:
        return (q - k) % 2 == 0

    expected = mask("sdpa", 8, and_mask_function=far)
    made = mask(NAME, 8, and_mask_function=far)
    assert made is not None and expected is not None and torch.equal(made, expected)


@pytest.mark.skipif("allow_is_causal_skip" not in ARGUMENTS, reason="an older transformers has no such argument")
def test_a_model_that_computes_with_its_mask_gets_a_matrix() -> None:
    made = mask(NAME, 8, allow_is_causal_skip=False)
    assert made is not None and made.dtype is torch.bool and made.shape == (2, 1, 8, 8)
