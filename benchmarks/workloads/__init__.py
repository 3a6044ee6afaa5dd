"""Twelve batches of serving engines on paged keys, beside FlashAttention-3."""
