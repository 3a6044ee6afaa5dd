"""What any implementation of the dropout rule (stream_attention/backends/reference/attention.py) must reproduce."""

from __future__ import annotations

DROPOUT_VECTORS: tuple[tuple[tuple[int, int, int, int, int], int], ...] = (
    ((0, 0, 0, 0, 0), 0xDE3CDB3D),
    ((0, 0, 0, 0, 1), 0x969DAD94),
    ((0, 0, 0, 1, 0), 0x4238E2D4),
    ((0, 0, 1, 0, 0), 0xB7918694),
    ((0, 1, 0, 0, 0), 0xE215E3F2),
    ((1, 0, 0, 0, 0), 0x6850203B),
    ((1234, 5678, 9, 10, 11), 0xB18FCFAE),
    ((2**32, 0, 0, 0, 0), 0xAEB072AD),
    ((0, 2**32, 0, 0, 0), 0x486E0870),
    ((2**63 - 1, 2**63 - 1, 7, 1, 2), 0x1B3D0729),
    ((-1, -1, 0, 0, 0), 0x3FA609C8),
    ((-(2**63), 3, 2, 1, 0), 0xA0B4AA39),
    ((0x0123456789ABCDEF, 0x0FEDCBA987654321, 31, 4095, 4096), 0x3003B552),
    ((42, 0, 127, 1048575, 131071), 0xEAB5EF87),
    ((42, 4, 2**31 - 1, 2**31 - 1, 2**31 - 1), 0xCC724E92),
    ((2024, 17, 65535, 2**32 - 1, 2**32 - 1), 0xF5903B76),
)
"""(seed, offset, b * Hq + h, i, j) -> `dropout_word`."""
