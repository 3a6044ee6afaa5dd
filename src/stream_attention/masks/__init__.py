"""Masks as data: which keys each query sees, in forms that kernels read and skip by.

`Mask` is the value, constructors make the common ones, and `&`, `|` and `~` combine them. docs/masks.md has a table.
"""

from .functions import from_block_mask, from_function
from .mask import Blocks, Mask, Sizes
from .parts import blocks, from_dense, intervals
from .positions import causal, window
from .sequences import documents, padding, prefix_lm
from .tile_states import tiles
from .trees import prefix_tree

__all__ = [
    "Blocks",
    "Mask",
    "Sizes",
    "blocks",
    "causal",
    "documents",
    "from_block_mask",
    "from_dense",
    "from_function",
    "intervals",
    "padding",
    "prefix_lm",
    "prefix_tree",
    "tiles",
    "window",
]
