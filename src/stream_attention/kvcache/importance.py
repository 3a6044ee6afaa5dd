"""importance: tokens with the most attention are kept."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ..base.errors import refuse
from ..ops.mass import attention_mass
from .compression_spec import CompressionSpec
from .compressor import KVCompressor
from .key_norm import norms
from .select import Heads, best, checked_heads

SCORES = ("auto", "attention_sum", "key_norm", "value_norm")


class ImportanceBasedCompressor(KVCompressor):
    """Keeps the tokens of the highest score, which is by `method`

    - "attention_sum": the attention that the token received, from `query`, from `mass`, from earlier
      `update_attention_scores`, or from all of these together;
    - "key_norm": minus the norm of its key, see `KeyNormCompressor`;
    - "value_norm": the norm of its value;
    - "auto": "attention_sum" where attention was passed, else "key_norm". The stats name the one used.
    """

    def __init__(self, method: str = "auto", *, heads: Heads = "each") -> None:
        if method not in SCORES:
            refuse("method", f"one of {', '.join(SCORES)}", repr(method))
        self.method, self.heads = method, checked_heads(heads)
        self.uses_query = method in ("auto", "attention_sum")
        self._received: Tensor | None = None  # [B, Hq, T], since the last compression

    def update_attention_scores(self, weights: Tensor) -> None:
        """Add the attention weights of some queries, `[B, Hq, Tq, T]`, to the scores of the next compression.

        T may grow from call to call. Prefer `query`, which needs no weights in memory.
        """
        if not self.uses_query:
            hint = 'Make it with method="attention_sum" to use them.'
            refuse("weights", f"none for the method {self.method}, which does not use attention", "a value", hint)
        if not isinstance(weights, Tensor) or weights.dim() != 4 or not weights.dtype.is_floating_point:
            shape = list(weights.shape) if isinstance(weights, Tensor) else type(weights).__name__
            refuse("weights", "a floating tensor [B, Hq, Tq, T]", shape)
        received = weights.detach().to(torch.promote_types(weights.dtype, torch.float32)).sum(2)
        if self._received is not None:
            earlier, grown = self._received, received.shape[-1] - self._received.shape[-1]
            if received.shape[:2] != earlier.shape[:2] or grown < 0:
                expected = f"[B, Hq] = {list(earlier.shape[:2])}, T from {earlier.shape[-1]}"
                refuse("weights", expected, list(weights.shape))
            received = received + F.pad(earlier, (0, grown))
        self._received = received

    def _choose(self, spec: CompressionSpec) -> Tensor:
        return best(self.scores(spec), spec, self.heads)

    def _described(self, spec: CompressionSpec) -> str:
        return f"importance ({self._score(spec)})"

    def _score(self, spec: CompressionSpec) -> str:
        known = spec.votes or self._received is not None
        return self.method if self.method != "auto" else "attention_sum" if known else "key_norm"

    def scores(self, spec: CompressionSpec) -> Tensor:
        """The score of each token, `[B, Hkv, T]`. Attention that was added before is reset by this call."""
        score = self._score(spec)
        if score == "key_norm":
            return -norms(spec.keys)
        if score == "value_norm":
            return norms(spec.values)
        batch, length, kv_heads, _ = spec.keys.shape
        received, self._received = self._received, None
        if received is None:
            return votes(spec)
        if received.shape[0] != batch or received.shape[1] % kv_heads or received.shape[2] != length:
            expected = f"weights of [B={batch}, Hq, Tq, T={length}] before this"
            refuse("update_attention_scores", expected, f"[B, Hq, T] = {list(received.shape)}")
        received = received.unflatten(1, (kv_heads, -1)).sum(2)
        return received + votes(spec) if spec.votes else received


def votes(spec: CompressionSpec, last: int | None = None) -> Tensor:
    """The attention that each key received, `[B, Hkv, T]`, from real queries, or from the `last` real ones of a row.

    A `mass` from the caller is used unchanged.
    """
    if spec.mass is not None:
        return spec.mass.to(torch.promote_types(spec.mass.dtype, torch.float32))
    query, keys, real = spec.query, spec.keys, spec.real
    if query is None:
        refuse("query", "query or mass", None, 'The methods "key_norm" and "streaming" need neither.')
    mass = partial(attention_mass, query, keys, causal=spec.causal, scale=spec.scale)
    if real is None:
        return mass(window_queries=last)
    outside = query.shape[1] - keys.shape[1]  # queries before the first slot
    voting = F.pad(real[:, max(0, -outside) :], (max(0, outside), 0))  # [B, Tq]
    if last is not None:
        voting = voting & (from_end(voting) < last)
    silent = ~voting.any(1) & real.any(1)
    if silent.any():
        row = int(silent.nonzero()[0])
        hint = "The last query is at the last slot; if yours is not, pass mass=attention_mass(...)."
        refuse("query", "a query on a token that is not padding in every row", f"none in row {row}", hint)
    return mass(mask=real[:, None, None, :], row_weights=voting.to(torch.float32))


def from_end(real: Tensor) -> Tensor:
    """How many real tokens of `[B, T]` come after each one."""
    return real.flip(1).cumsum(1).flip(1) - real.long()
