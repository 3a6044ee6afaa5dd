"""Functions of other attention libraries with their names, arguments and conventions, computed by this one.

`flash_attn` (FlashAttention-2), `flash_attn_interface` (FlashAttention-3), `sdpa` and `flex` (torch) and `xformers` are
modules to import from; `install(name)` makes imports of the library itself find them.
"""

from .imports import Installed, install

__all__ = ["Installed", "install"]
