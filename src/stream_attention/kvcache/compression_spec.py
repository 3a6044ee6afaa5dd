"""One call of `compress`, checked, in the form the methods read."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..base.errors import refuse
from ..dispatch.validate import DTYPES, real, tensor_beside


class CompressionSpec(NamedTuple):
    """The arguments of one call of `compress`."""

    keys: Tensor  # [B, T, Hkv, D]
    values: Tensor  # [B, T, Hkv, Dv]
    ratio: float
    lengths: list[int]  # real tokens of each row
    real: Tensor | None  # bool [B, T], True = a real token; None: all are
    query: Tensor | None  # [B, Tq, Hq, D]
    mass: Tensor | None  # [B, Hkv, T]
    causal: bool
    scale: float | None

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    @property
    def votes(self) -> bool:
        """Whether attention was passed to choose tokens by."""
        return self.query is not None or self.mass is not None

    @property
    def is_real(self) -> Tensor:
        """`real` as a tensor always, bool `[B, T]`."""
        return self.keys.new_ones(self.keys.shape[:2], dtype=torch.bool) if self.real is None else self.real

    def budgets(self) -> list[int]:
        """How many tokens each row keeps: its share of its real ones, rounded down, but one if it has any."""
        return [min(n, max(1, int(n / self.ratio + 1e-6))) for n in self.lengths]


def checked(spec: CompressionSpec, lengths: Tensor | None, votes: bool) -> CompressionSpec:
    """Check a call of `compress` of a method that uses `query` and `mass`, or does not (`votes`).

    `spec` is as the caller gave it: `real` is the `key_mask`, and its `lengths` are not known yet. `attention_mass`
    checks `causal`, `scale` and the dtype and heads of `query`.
    """
    keys, values, ratio, _, key_mask, query, mass, causal, scale = spec
    for name, tensor, shape in (("keys", keys, "[B, T, Hkv, D]"), ("values", values, "[B, T, Hkv, Dv]")):
        _check(name, tensor, keys, DTYPES, "dtype float16, bfloat16, float32 or float64")
        if tensor.dim() != 4 or min(tensor.shape[2:]) < 1:
            refuse(name, f"shape {shape}", list(tensor.shape))
    if values.shape[:3] != keys.shape[:3]:
        refuse("values", f"the keys' batch, length and heads, {list(keys.shape[:3])} + [Dv]", list(values.shape))
    real("compression_ratio", ratio)
    if ratio < 1:
        refuse("compression_ratio", "at least 1", ratio, "It is how many times smaller the result is.")

    batch, length, heads, _ = keys.shape
    if not votes and (query is not None or mass is not None):
        given = "query" if query is not None else "mass"
        refuse(given, "None", "a value", "This method does not use attention (uses_query is False).")
    if query is not None and mass is not None:
        refuse("mass", "None when query is given", "a value", "Pass one of them.")
    if query is not None:
        _check("query", query, keys)
        if query.dim() != 4 or query.shape[0] != batch:
            refuse("query", f"shape [B={batch}, Tq, Hq, D]", list(query.shape))
    elif scale is not None or causal is not True:
        refuse("scale and causal", "the defaults without a query", f"{scale} and {causal}")
    if mass is not None:
        _check("mass", mass, keys)
        if not mass.dtype.is_floating_point:
            refuse("mass", "a floating dtype", mass.dtype, error=TypeError)
        _check_shape("mass", mass, "[B, Hkv, T]", [batch, heads, length])

    if lengths is not None and key_mask is not None:
        refuse("key_mask", "None when lengths is given", "a value")
    tokens, counts = key_mask, [length] * batch
    if lengths is not None:
        _check("lengths", lengths, keys, (torch.int32, torch.int64), "dtype torch.int32 or torch.int64")
        if lengths.shape != (batch,):
            refuse("lengths", f"shape [B={batch}]", list(lengths.shape))
        counts = lengths.tolist()
        if any(not 0 <= n <= length for n in counts):
            refuse("lengths", f"from 0 to the {length} slots of a row", counts)
        tokens = torch.arange(length, device=keys.device) < lengths[:, None]
    elif key_mask is not None:
        _check("key_mask", key_mask, keys, (torch.bool,), "dtype torch.bool (True = a real token)")
        _check_shape("key_mask", key_mask, "[B, T]", [batch, length])
        counts = key_mask.sum(1).tolist()
    if counts == [length] * batch:
        tokens = None
    return spec._replace(ratio=float(ratio), lengths=counts, real=tokens)


def _check(name: str, tensor: Any, keys: Tensor, dtypes: Collection[torch.dtype] = (), expected: str = "") -> None:
    """Refuse what is no tensor on the keys' device, or of another dtype, where `dtypes` are named."""
    tensor_beside(name, tensor, keys, "key")
    if dtypes and tensor.dtype not in dtypes:
        refuse(name, expected, tensor.dtype, error=TypeError)


def _check_shape(name: str, tensor: Tensor, dims: str, shape: list[int]) -> None:
    if list(tensor.shape) != shape:
        refuse(name, f"shape {dims} = {shape}", list(tensor.shape))
