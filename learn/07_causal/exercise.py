"""Exercise of step 07: which tiles of keys does a tile of queries need under a sliding window?

A query at position p sees the keys p - left, ..., p (those that exist: 0 to k_len - 1). The queries of the tile stand
at first_pos, ..., last_pos. Keys are read in tiles of block_n: tile t holds the keys from t * block_n to before
(t + 1) * block_n, the last one only up to k_len.
"""


def tile_ranges(first_pos: int, last_pos: int, left: int, k_len: int, block_n: int) -> tuple[int, int, int, int]:
    """`(begin, whole_begin, whole_end, end)`.

    Tiles [begin, end) hold a key that some query sees; the others are not read. Tiles [whole_begin, whole_end) are full
    (block_n keys) and every query sees all of them, so they need no mask. If there is none, the two are equal. Always
    begin <= whole_begin <= whole_end <= end. The queries see at least one key, and first_pos >= 0.
    """
    raise NotImplementedError("Which keys does the first query see, and which the last? Who is strictest at each end?")
