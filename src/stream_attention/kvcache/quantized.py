"""quantized: every token is kept, in fewer bits."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..base.errors import check_int, refuse
from .compression_spec import CompressionSpec
from .compressor import CompressionStats, KVCompressor, Stored
from .quantize import ALONG, BITS, QuantizedTensor, check_granularity, quantize, quantized_nbytes
from .select import best


class QuantizedCompressor(KVCompressor):
    """Stores keys and values in `bits`: 8, 4 or 2, or the name of a format: "int8", "int4", "int2", "fp8" (e4m3).

    `bits=None` is the widest integer format that reaches the ratio. A scale is shared by `group` tokens of a channel
    (`keys="channel"`, as a few channels of keys are large in all tokens) or by `group` channels of a token
    (`values="token"`).
    """

    def __init__(
        self, bits: int | str | None = 4, *, group: int = 64, keys: str = "channel", values: str = "token"
    ) -> None:
        name = f"int{bits}" if isinstance(bits, int) and not isinstance(bits, bool) else bits
        if name is not None and name not in BITS:
            refuse("bits", f"8, 4, 2, None or one of {', '.join(BITS)}", repr(bits))
        self.format = name
        self.group = check_int("group", group, 1)
        check_granularity(keys, values)
        self._dims = ALONG[keys], ALONG[values]

    def compress(
        self, keys: Tensor, values: Tensor, compression_ratio: float | None = None, **options: Any
    ) -> tuple[Stored, Stored, CompressionStats]:
        """As `KVCompressor.compress`, with every real token kept.

        `compression_ratio` is how many times fewer bytes at least; None: that of the format. More than the format
        reaches is refused; `stats.compression_ratio` is the ratio reached.
        """
        return super().compress(keys, values, 1.0 if compression_ratio is None else compression_ratio, **options)

    def _choose(self, spec: CompressionSpec) -> Tensor | None:
        self._format_for(spec)
        if spec.real is None:
            return None
        batch, length, heads, _ = spec.keys.shape
        return best(spec.keys.new_zeros(batch, heads, length), spec._replace(ratio=1.0), "each")

    def _store(
        self, keys: Tensor, values: Tensor, valid: Tensor | None, spec: CompressionSpec
    ) -> tuple[Stored, Stored]:
        return self.stored(keys, values, valid, self._format_for(spec))

    def stored(
        self, keys: Tensor, values: Tensor, valid: Tensor | None, format: str
    ) -> tuple[QuantizedTensor, QuantizedTensor]:
        key, value = (
            quantize(x, format, dim, self.group, valid) for x, dim in zip((keys, values), self._dims, strict=True)
        )
        return key, value

    def _format_for(self, spec: CompressionSpec) -> str:
        """The format that reaches the ratio."""
        formats = [self.format] if self.format else ["int8", "int4", "int2"]
        ratio = 1.0
        for format in formats:
            sizes = (
                quantized_nbytes(x, format, dim, self.group)
                for x, dim in zip((spec.keys, spec.values), self._dims, strict=True)
            )
            ratio = spec.nbytes / max(1, sum(sizes))
            if ratio >= spec.ratio or spec.ratio == 1.0:
                return format
        given = f"{formats[-1]} in groups of {self.group}"
        hint = 'Use fewer bits, larger groups, or "hybrid", which also drops tokens.'
        refuse("compression_ratio", f"at most {ratio:.2f} ({given})", spec.ratio, hint)

    def _described(self, spec: CompressionSpec) -> str:
        return f"quantized ({self._format_for(spec)})"
