"""Exercise of step 12: the slot and the phases of a ring.

A ring has `slots` slots, each with two mbarriers, `full` and `empty`. A barrier counts its phases: it starts in phase
0, and each time all arrivals are there it goes on to the next. `wait(barrier, parity)` returns when the phase of that
parity is over. So on a fresh barrier `wait(barrier, 0)` waits for the first turn, and `wait(barrier, 1)` returns at
once.

The producer, before it fills a slot for use number `use`:  wait(empty[slot], empty_parity)
The consumer, before it reads what was put there:            wait(full[slot], full_parity)
"""


def slot_and_parities(use: int, slots: int) -> tuple[int, int, int]:
    """`(slot, full_parity, empty_parity)` of use number `use`, counted from 0."""
    raise NotImplementedError("How many times was this slot used before? The first time, nobody has to empty it.")
