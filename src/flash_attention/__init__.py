"""The import path of the first prototype: `from flash_attention.kernels import flash_attention`."""

from .kernels import flash_attention

__all__ = ["flash_attention"]
