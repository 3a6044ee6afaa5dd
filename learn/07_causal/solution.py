"""A solution of step 07's exercise."""


def tile_ranges(first_pos: int, last_pos: int, left: int, k_len: int, block_n: int) -> tuple[int, int, int, int]:
    """Some query sees [first_pos - left, last_pos]; every query sees [last_pos - left, first_pos]."""
    key_begin, key_end = max(first_pos - left, 0), min(last_pos + 1, k_len)
    whole_key_begin, whole_key_end = max(last_pos - left, 0), min(first_pos + 1, k_len)
    begin, end = key_begin // block_n, -(-key_end // block_n)
    whole_begin = min(-(-whole_key_begin // block_n), end)
    whole_end = max(whole_key_end // block_n, whole_begin)
    return begin, whole_begin, whole_end, end
