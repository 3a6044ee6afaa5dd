"""Exercise of step 09: how many programs fit on one processor (SM) of an H200 at the same time?

What a processor has, and how it is handed out:

- 65,536 registers. A warp (32 threads) gets them in units of 256: those of a thread are rounded up to a multiple of 8.
- 228 KiB of shared memory. Of each program's share the system takes 1 KiB more than the program asked for.
- room for 64 warps, and for 32 programs.
"""


def programs_per_processor(registers: int, warps: int, shared_bytes: int) -> int:
    """How many programs of `warps` warps run side by side, if each thread has `registers` registers and each program
    asks for `shared_bytes` bytes of shared memory."""
    raise NotImplementedError("There are four limits; the smallest counts. Registers: how many does one program take?")
