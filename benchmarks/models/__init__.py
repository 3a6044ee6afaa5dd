"""Whole models of transformers with our attention and with others: tokens per second, and memory."""
