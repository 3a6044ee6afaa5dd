"""Attention with masks as data, beside the same masks as matrices, packed sequences, FlexAttention and SDPA."""
