"""A solution of step 12's exercise."""


def slot_and_parities(use: int, slots: int) -> tuple[int, int, int]:
    """Use number `use` takes slot `use % slots` for the (use // slots)-th time."""
    full_parity = (use // slots) & 1
    return use % slots, full_parity, full_parity ^ 1  # the first time, the phase of parity 1 counts as over
