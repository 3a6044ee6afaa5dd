"""A solution of step 10's exercise."""


def split_ranges(keys: int, splits: int, block: int) -> list[tuple[int, int]]:
    """Everybody takes ceil(tiles / splits) tiles, until there are none."""
    tiles = -(-keys // block)
    step = -(-tiles // splits) * block
    return [(min(split * step, keys), min((split + 1) * step, keys)) for split in range(splits)]
