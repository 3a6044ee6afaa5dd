"""Attention over several ranks, on torch.distributed or on virtual ranks in one process."""

from .processes import Processes, initialize
from .query_shard import query_sharded_attention
from .ring import ring_attention
from .shard import position_ids, shard_sequence, shift_labels, unshard_sequence
from .star import shard_context, star_cache, star_context_attention
from .transport import CommunicationError, Recorder, VirtualRanks
from .tree import tree_decode_attention
from .ulysses import ulysses_attention

__all__ = [
    "CommunicationError",
    "Processes",
    "Recorder",
    "VirtualRanks",
    "initialize",
    "position_ids",
    "query_sharded_attention",
    "ring_attention",
    "shard_context",
    "shard_sequence",
    "shift_labels",
    "star_cache",
    "star_context_attention",
    "tree_decode_attention",
    "ulysses_attention",
    "unshard_sequence",
]
