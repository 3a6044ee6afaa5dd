"""A solution of step 09's exercise."""


def programs_per_processor(registers: int, warps: int, shared_bytes: int) -> int:
    """The smallest of the four limits."""
    registers_of_a_warp = -(-registers // 8) * 8 * 32
    return min(
        65536 // (registers_of_a_warp * warps),
        228 * 1024 // (shared_bytes + 1024),
        64 // warps,
        32,
    )
