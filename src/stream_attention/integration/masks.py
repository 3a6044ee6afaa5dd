"""Masks of a transformers model, without a Tq x Tk matrix wherever a smaller description suffices.

transformers calls a mask function once per forward and kind of layer, and passes its result through the model's code to
every layer. There it must be None or a 4-D tensor: only these are passed on unchanged, moved to the device of a layer,
and accepted by a compiled forward. So the shape of a mask encodes what the host needs to know, and our three formats
have dtypes that no other mask has:

    None                              the module's own: causal, aligned bottom-right, or all keys visible
    bool or float [B, H, Tq, Tk]      a full mask: True = attend, or added to the scores; any dim may be 1
    uint8 [B or 0, 1 + W, S, n]       the first n keys are filled; 1 = a token, 0 = padding, and no rows at all where
                                      there is no padding; W keys are visible, the own included (0: all). S - 1 is a
                                      `Kind` + 3 times the slots of a static cache after the n
    int64 [1, 1 + W, longest, m + 1]  m sequences, with these offsets in the flattened batch; causal in each: packed
                                      `position_ids`
    int32 [B, 1 + W, 1, 1]            filled keys of a static cache, known to the device only: for a few queries that
                                      are the last of them, causal

Other masks (overlays of a model's own, chunked attention, padding in a static cache) are the matrix that transformers
makes for SDPA.

Padded queries mean what they mean with SDPA: one on the right attends to the tokens of its row within the window; one
that sees no key gives 0. Where there is no padding between tokens (`Kind.UNPADDED`), sequences without the padding are
equivalent (`Unpadded`), and faster than a mask unless rows are short.

Where the host may read tensors it does so once here, not in every layer, and not at all without a padding mask and a
static cache. Compiled graphs and CUDA graphs are captured without reading them.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from enum import IntEnum
from functools import cache
from inspect import signature
from itertools import chain, pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import masking_utils

from ..base.errors import refuse
from .placeholder import MAX_DECODE_QUERIES, checked_once

MODELS_ASK = "allow_is_causal_skip" in signature(masking_utils.create_causal_mask).parameters
"""Whether a model may request a matrix, to compute with it; else only a static cache does, in any step."""


SHORT = 128
"""Shorter rows are faster with a mask: 4 rows with 8 heads of 32, 25 % padding, on one core of an AMD EPYC take 1.5 ms
at 64 tokens and 2.0 ms as sequences; at 128 it is 3.1 and 2.8 ms, at 256 7.7 and 5.4 ms (2026-11)."""


class Kind(IntEnum):
    """Which keys a uint8 mask leaves visible, padding apart."""

    CAUSAL = 0  # aligned bottom-right within the n keys
    BOTH_SIDES = 1  # W keys to each side
    UNPADDED = 2  # causal, as many queries as keys, and no padding between the tokens of a row


class Visible(NamedTuple):
    """A decoded uint8 mask."""

    window: int  # visible keys, the own included, or keys on each side; 0: all
    both_sides: bool  # else causal
    filled: int  # keys that are filled
    slots: int  # keys of the layer, filled or not
    padding: Tensor | None  # bool [B, filled], True = a token
    unpadded: Unpadded | None  # None where there is padding between tokens, or the host may not read the mask


class Side(NamedTuple):
    """Queries or keys of a `varlen_attention`."""

    cu_seqlens: Tensor  # [sequences + 1]
    longest: int


class RightPadding(NamedTuple):
    """Padded queries that see tokens: all of their row, or those within a window."""

    rows: Tensor  # of the flattened batch; with a window more rows follow, so that all sequences have one length
    queries: Side
    keys: Side
    window: tuple[int, int] | None
    kept: Tensor | None  # which of them are padded queries; None: all
    into: Tensor  # their indices in the flattened batch


class Unpadded(NamedTuple):
    """The flattened batch as sequences of tokens, causal. Padded queries have no keys there, padded keys no queries."""

    queries: Side
    keys: Side
    right: RightPadding | None


class Packed(NamedTuple):
    """A decoded int64 mask."""

    cu_seqlens: Tensor  # [sequences + 1]
    longest: int
    window: int  # visible keys, the own included; 0: all


class Filled(NamedTuple):
    """A decoded int32 mask."""

    lengths: Tensor  # int32 [B], filled keys
    window: int  # visible keys, the own included; 0: all


def decoded(mask: Tensor) -> Any:
    """What a mask of ours says: `Visible` of uint8, `Packed` of int64, `Filled` of int32.

    It is an attribute of the mask, unless that was moved to another device, or a compiled graph made it: every layer of
    a step decodes the same one, and each view costs the host microseconds. Its tensors are those that the mask is a
    view of, never views of the mask, which would be a reference cycle."""
    if not torch.compiler.is_compiling() and (known := getattr(mask, "stream_decoded", None)) is not None:
        return known
    batch, window, rows, last = mask.shape
    if mask.dtype is torch.int64:
        return Packed(mask[0, 0, 0], rows, window - 1)
    if mask.dtype is torch.int32:
        return Filled(mask[:, 0, 0, 0].contiguous(), window - 1)
    unfilled, kind = divmod(rows - 1, len(Kind))
    padding = mask[:, 0, 0].view(torch.bool) if batch else None
    unpadded = None
    if kind == Kind.UNPADDED and padding is not None and not _host_may_not_read(mask.device):
        unpadded = _unpadded(padding, window - 1)
    return Visible(window - 1, kind == Kind.BOTH_SIDES, last, last + unfilled, padding, unpadded)


def _with_decoded(mask: Tensor, what: Visible | Packed | Filled) -> Tensor:
    if not torch.compiler.is_compiling():
        mask.stream_decoded = what  # type: ignore[attr-defined]
    return mask


def matrix(mask: Tensor, batch: int, q_len: int, k_len: int) -> Tensor:
    """A mask of ours as bool `[B or 1, 1, Tq, Tk]`, for attention that reads no other."""
    window, both_sides, first = mask.shape[1] - 1, False, torch.zeros((), dtype=torch.int64, device=mask.device)
    there = torch.ones(1, 1, 1, k_len, dtype=torch.bool, device=mask.device)
    if mask.dtype is torch.int64:
        tokens = torch.arange(batch * q_len, device=mask.device)
        of = torch.searchsorted(decoded(mask).cu_seqlens, tokens, right=True).view(batch, 1, q_len)
        there = F.pad(of.unsqueeze(-1) == of.unsqueeze(-2), (0, k_len - q_len))
    elif mask.dtype is torch.int32:
        first = decoded(mask).lengths.view(-1, 1, 1) - q_len
    else:
        _, both_sides, count, _, padding, _ = decoded(mask)
        first = first + (count - q_len)
        there = F.pad(there[..., :count] if padding is None else padding[:, None, None], (0, k_len - count))
    queries = first + torch.arange(q_len, device=mask.device)  # [Tq] or [B, 1, Tq]
    distance = queries.unsqueeze(-1) - torch.arange(k_len, device=mask.device)
    if both_sides:
        return there & (distance.abs() <= window)
    near = distance >= 0
    return there & (near & (distance < window) if window else near)


def stream_mask(**call: Any) -> Tensor | None:
    """The registered mask function: its call differ by version of transformers, always by keyword."""
    readable = not _host_may_not_read(_device(call))
    if readable and (own := _own_attention(type(call["config"]))) is not None:  # type: ignore[arg-type]
        hint = f"{own} computes its own attention: load the model with that attn_implementation."
        refuse("attn_implementation", '"eager", or another that the model supports', '"stream_attention"', hint)
    given, rows = call["attention_mask"], call["batch_size"]
    if given is not None and (given.dim() != 2 or given.shape[0] != rows):
        refuse("attention_mask", f"a row for each of the {rows} of the batch", list(given.shape))
    pattern = _pattern(call, readable)
    if pattern is None:
        return _sdpa_matrix(call)
    return (_causal if pattern.causal else _both_ways)(call, pattern, readable)


def _causal(call: dict[str, Any], pattern: _Pattern, readable: bool) -> Tensor | None:
    attention_mask, positions = call["attention_mask"], call.get("cache_position")
    q_len, q_start = _queries(call)
    k_len, k_start = call["kv_length"], call["kv_offset"]
    whole = pattern.sequences is None and not call["allow_is_causal_skip"]
    static = isinstance(q_start, Tensor) and not isinstance(k_start, Tensor) and (positions is None or whole)
    if static and q_len <= MAX_DECODE_QUERIES and (q_len == 1 or not readable):  # one shape in every step
        if k_start == 0 and _no_padding(attention_mask, q_start + q_len, readable):
            return _filled_mask(q_start + q_len, pattern.window, call["batch_size"])
        return _sdpa_matrix(call)
    if whole and (q_len == 1 or MODELS_ASK):
        return _sdpa_matrix(call)
    if not readable and (pattern.sequences is not None or isinstance(q_start, Tensor) or isinstance(k_start, Tensor)):
        return _sdpa_matrix(call)
    q_start, k_start = int(q_start), int(k_start)
    count = q_start + q_len - k_start
    if count > k_len:
        return _sdpa_matrix(call)
    window = pattern.window if pattern.window < count else 0
    if pattern.sequences is not None:
        offsets = _offsets_of(pattern.sequences)
        if len(offsets) > pattern.sequences.shape[0] + 1:
            return _packed_mask(offsets, window, pattern.sequences.device)
    padding = _padding(attention_mask, k_start, count, readable)
    if padding is None:
        known = not readable or _knows_causal(type(call["config"]))  # type: ignore[arg-type]
        plain = count == k_len and not window and known
        return None if plain else _visible_mask(None, window, Kind.CAUSAL, count, call)
    unpadded = _unpadded(padding, window) if readable and SHORT <= q_len == count else None
    kind = Kind.CAUSAL if unpadded is None else Kind.UNPADDED
    return _visible_mask(padding, window, kind, count, call, unpadded)


def _both_ways(call: dict[str, Any], pattern: _Pattern, readable: bool) -> Tensor | None:
    """Bidirectional: padding or a window mask keys."""
    if not call.get("allow_is_bidirectional_skip", False):
        return _sdpa_matrix(call)
    q_len, q_start = _queries(call)
    k_len, k_start = call["kv_length"], call["kv_offset"]
    padding = _padding(call["attention_mask"], k_start, k_len, readable)
    if not 0 < pattern.window < k_len - 1:
        return None if padding is None else padding[:, None, None]
    if (not readable and isinstance(q_start, Tensor)) or int(q_start) + q_len != k_start + k_len:
        return _sdpa_matrix(call)
    return _visible_mask(padding, pattern.window, Kind.BOTH_SIDES, k_len, call)


def _queries(call: dict[str, Any]) -> tuple[int, Any]:
    """The number of queries and the position of the first, which before transformers 5.4 is in a tensor."""
    positions = call.get("cache_position")
    return (call["q_length"], call["q_offset"]) if positions is None else (positions.shape[0], positions[0])


@cache
def _knows_causal(config: type) -> bool:
    """Whether attention modules of a model have `is_causal`: all that support SDPA do."""
    name, found = _modeling(config)
    own = (one for one in found.values() if getattr(one, "__module__", None) == name)
    return all(getattr(one, "_supports_sdpa", True) for one in own)


@cache
def _own_attention(config: type) -> str | None:
    """The attention class of a model that does not use the attention interface: transformers accepts our name for it
    all the same, and the model would misread the mask."""
    name, found = _modeling(config)
    if "ALL_ATTENTION_FUNCTIONS" in found:
        return None
    own = (one for one in found.values() if isinstance(one, type) and issubclass(one, nn.Module))
    return next((one.__name__ for one in own if "Attention" in one.__name__ and one.__module__ == name), None)


def _modeling(config: type) -> tuple[str, Mapping[str, Any]]:
    """The module with the code of a model, and what is in it."""
    name = config.__module__.replace(".configuration_", ".modeling_")
    return name, vars(sys.modules.get(name, object))


def _device(call: dict[str, Any]) -> torch.device:
    given = next(call[name] for name in ("attention_mask", "cache_position", "device") if call.get(name) is not None)
    return given.device if isinstance(given, Tensor) else torch.device(given)


def _host_may_not_read(device: torch.device) -> bool:
    """Whether the host may not read tensors: a graph is being compiled or captured."""
    return torch.compiler.is_compiling() or (device.type == "cuda" and torch.cuda.is_current_stream_capturing())


class _Pattern(NamedTuple):
    causal: bool
    window: int  # as the overlay counts; 0: none
    sequences: Tensor | None  # [B, T], the index of each token's sequence


def _pattern(call: dict[str, Any], readable: bool) -> _Pattern | None:
    """The overlays of the mask function; None where one of them is unknown."""
    function = call["mask_function"]
    if function is masking_utils.causal_mask_function:
        return _Pattern(True, 0, None)
    if function is getattr(masking_utils, "bidirectional_mask_function", None):
        return _Pattern(False, 0, None)
    if readable:
        return _from_closures(function)
    config, size = call["config"], call.get("local_size")
    # Dynamo reads no closures: it is a window if it can be nothing else.
    plain = call["allow_is_causal_skip"] and not call.get("use_vmap", False)
    chunked = getattr(config, "attention_chunk_size", None) is not None
    return _Pattern(True, size, None) if plain and size is not None and not chunked else None


def _from_closures(function: Any) -> _Pattern | None:
    causal, window, sequences = None, 0, None
    for one in _conjuncts(function):
        maker = one.__qualname__.partition(".")[0] if one.__module__ == masking_utils.__name__ else ""
        contents = [cell.cell_contents for cell in one.__closure__ or ()]
        if one is masking_utils.causal_mask_function:
            causal = True
        elif maker == "bidirectional_mask_function":
            causal = False
        elif maker in ("sliding_window_overlay", "sliding_window_bidirectional_overlay"):
            (window,) = contents
        elif maker == "packed_sequence_mask_function":
            (sequences,) = contents
        else:
            return None
    return None if causal is None else _Pattern(causal, window, sequences)


def _conjuncts(function: Any) -> list[Any]:
    if function.__module__ != masking_utils.__name__ or not function.__qualname__.startswith("and_masks."):
        return [function]
    (functions,) = (cell.cell_contents for cell in function.__closure__)
    return list(chain.from_iterable(map(_conjuncts, functions)))


def _sdpa_matrix(call: dict[str, Any]) -> Tensor:
    whole = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    return masking_utils.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](**call | whole)


def _padding(attention_mask: Tensor | None, start: int, count: int, readable: bool) -> Tensor | None:
    """bool `[B, count]` of the keys from `start` on; None where it is known that all are tokens."""
    if attention_mask is None:
        return None
    padding = attention_mask[:, start : start + count]
    if padding.shape[1] < count:  # missing columns are masked
        padding = F.pad(padding, (0, count - padding.shape[1]))
    return None if readable and bool(padding.all()) else padding


def _no_padding(attention_mask: Tensor | None, count: Tensor, readable: bool) -> bool:
    """Whether it is known that the first `count` keys are tokens."""
    if attention_mask is None:
        return True
    return readable and bool(attention_mask.all() & (count <= attention_mask.shape[1]))


def _filled_mask(count: Tensor, window: int, batch: int) -> Tensor:
    lengths = count.to(torch.int32).expand(batch).contiguous()
    return _with_decoded(lengths[:, None, None, None].expand(-1, 1 + window, -1, -1), Filled(lengths, window))


def _visible_mask(
    padding: Tensor | None, window: int, kind: Kind, count: int, call: dict[str, Any], unpadded: Unpadded | None = None
) -> Tensor:
    slots = call["kv_length"]
    shape = 1 + window, 1 + kind + len(Kind) * (slots - count)
    both_sides = kind == Kind.BOTH_SIDES
    if padding is None:
        mask = torch.empty(0, *shape, count, dtype=torch.uint8, device=_device(call))
        return _with_decoded(mask, Visible(window, both_sides, count, slots, None, None))
    padding = padding.contiguous()
    mask = padding.view(torch.uint8)[:, None, None].expand(-1, *shape, -1)
    return _with_decoded(mask, Visible(window, both_sides, count, slots, checked_once(padding), unpadded))


def _packed_mask(offsets: list[int], window: int, device: torch.device) -> Tensor:
    longest, cu_seqlens = _longest(offsets), torch.tensor(offsets, device=device)
    return _with_decoded(cu_seqlens.expand(1, 1 + window, longest, -1), Packed(cu_seqlens, longest, window))


def _offsets_of(sequences: Tensor) -> list[int]:
    """Where sequences begin in the flattened batch, and the end."""
    begins = torch.ones_like(sequences, dtype=torch.bool)
    begins[:, 1:] = sequences[:, 1:] != sequences[:, :-1]
    return [*begins.flatten().nonzero().flatten().tolist(), sequences.numel()]


def _unpadded(padding: Tensor, window: int) -> Unpadded | None:
    """The sequences of a batch whose tokens are True in `padding`, bool `[B, T]`; None if there is padding between."""
    length = padding.shape[1]
    first = padding.int().argmax(1)
    last = length - padding.flip(1).int().argmax(1)
    runs = []  # of tokens, in the flattened batch: first, end, and the end of their row
    for row, (begin, end, count) in enumerate(torch.stack([first, last, padding.sum(1)], 1).tolist()):
        if count not in (0, end - begin):
            return None
        if count:
            runs.append((row * length + begin, row * length + end, (row + 1) * length))
    queries, keys = [0], [0]
    for begin, end, _ in runs:
        if begin > queries[-1]:
            queries += [begin, begin]
            keys += [keys[-1], begin]
        queries.append(end)
        keys.append(end)
    # Rows after the last sequence belong to none, and give 0 too.
    right = _right_padding(runs, window, padding.device)
    cu_seqlens_q, cu_seqlens_k = _on(padding.device, queries, keys)
    return Unpadded(Side(cu_seqlens_q, _longest(queries)), Side(cu_seqlens_k, _longest(keys)), right)


def _right_padding(runs: list[tuple[int, int, int]], window: int, device: torch.device) -> RightPadding | None:
    """Query i after L tokens sees the keys from i + L - (W - 1) on. In a sequence of n queries, bottom-right alignment
    has it at i + L - n, so the window is W - 1 - n keys to its left, if all sequences have the same n."""
    padded = [(begin, end, stop) for begin, end, stop in runs if end < stop]
    counts = [stop - end if window == 0 else min(stop - end, window - 1) for _, end, stop in padded]
    most = max(counts, default=0)
    if most == 0:
        return None
    queries, keys = [0], [0]
    for (begin, end, _), count in zip(padded, counts, strict=True):
        first = begin if window == 0 else max(begin, end - (window - 1))
        if first > keys[-1]:
            queries.append(queries[-1])
            keys.append(first)
        queries.append(queries[-1] + (count if window == 0 else most))
        keys.append(end)
    at = torch.arange(most)
    rows = torch.tensor([end for _, end, _ in padded]).unsqueeze(1) + at  # [padded rows of the batch, most]
    padding = at < torch.tensor(counts).unsqueeze(1)
    indices: list[Any] = [queries, keys, rows[padding]]
    if window:
        inside = rows.clamp(max=runs[-1][2] - 1)  # other rows are ignored
        indices += [inside.flatten(), padding.flatten().nonzero().flatten()]
    cu_seqlens_q, cu_seqlens_k, into, *under_window = _on(device, *indices)
    sides = Side(cu_seqlens_q, _longest(queries)), Side(cu_seqlens_k, _longest(keys))
    if not under_window:
        return RightPadding(into, *sides, None, None, into)
    return RightPadding(under_window[0], *sides, (window - 1 - most, -1), under_window[1], into)


def _longest(offsets: list[int]) -> int:
    return max((after - before for before, after in pairwise(offsets)), default=0)


def _on(device: torch.device, *indices: list[int] | Tensor) -> tuple[Tensor, ...]:
    """Each as a tensor on the device, moved there in one copy."""
    parts = [torch.as_tensor(one) for one in indices]
    return torch.cat(parts).to(device).split([len(part) for part in parts])
