"""Who computes a cell: our backends, and the peers they are compared with, one small class each.

To add one: a `Provider` in the file of its family, and its line in `by_name`.
"""

from __future__ import annotations

from pathlib import Path

from torch.nn.attention import SDPBackend

from .base import Provider
from .decode import Append, Decode, Paged, Quantized
from .flash_attention import FlashAttention2, FlashAttention3, FlashAttention4, Xformers
from .fp8 import Fp8, Fp8Kernel
from .ours import Blocked, Ours, Plain
from .torch_attention import Dense, Flex, Sdpa

__all__ = ["Ours", "Provider", "Sdpa", "by_name"]


def by_name(fa3: Path | None = None) -> dict[str, Provider]:
    """Every provider a cell may name. `fa3` is a folder with a packed FlashAttention-3."""
    providers: list[Provider] = [
        Ours("stream", "auto"),
        *(Ours(name) for name in ("gluon", "triton", "eager", "reference")),
        *(Ours(f"{name} deterministic", name, deterministic=True) for name in ("gluon", "triton")),
        Ours("stream deterministic", "auto", deterministic=True),
        Plain(),
        *(Plain(name) for name in ("gluon", "triton")),
        Blocked(),
        Ours("bf16", "auto"),
        Fp8(),
        Fp8("e4m3 rotated", rotate=True),
        Fp8Kernel(),
        Decode("decode", "rows"),
        *(Paged(page) for page in (16, 64, 256)),
        *(Quantized(format) for format in ("fp8", "int8", "int4")),
        Decode("batch invariant", "rows", batch_invariant=True),
        Append("append"),
        Append("append rotary", rotary=True),
        Dense(),
        Sdpa(),
        Sdpa("sdpa flash", SDPBackend.FLASH_ATTENTION, "SDPA-flash"),
        Sdpa("sdpa cudnn", SDPBackend.CUDNN_ATTENTION, "cuDNN"),
        Sdpa("sdpa efficient", SDPBackend.EFFICIENT_ATTENTION, "SDPA-efficient"),
        Sdpa("sdpa math", SDPBackend.MATH, "SDPA-math"),
        Flex(),
        FlashAttention2(),
        FlashAttention3(fa3),
        FlashAttention4(),
        Xformers(),
    ]
    return {provider.name: provider for provider in providers}
