"""Exercise of step 10: which keys does each split take?"""


def split_ranges(keys: int, splits: int, block: int) -> list[tuple[int, int]]:
    """For each of `splits` programs the keys `(begin, end)` that it reads, end excluded.

    Together the ranges are 0 to `keys`, in order, each key once. A range begins at a whole tile (a multiple of
    `block`). The longest has as few tiles as possible: ceil(tiles / splits). A program that is left over has an empty
    range, begin == end == keys.
    """
    raise NotImplementedError("Count in tiles first, then in keys; the last tile may be cut by the end of the keys.")
