"""Text with something to learn in 200 steps, half of which attention alone can learn.

A text opens with one of four titles, and every title is a language: a fixed random chain in which a symbol is followed
by one of two, three times in four by the first. All languages have the same symbols and a title is written once. So a
model that reads one symbol at a time is left with about 1.95 nats: which of the two, and which title. The way from
there to 0.56 leads through attention: to the title, up to a whole context away, or to earlier places that tell the
languages apart.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

TITLES, SYMBOLS, CHOICES = 4, 252, 2
VOCABULARY = TITLES + SYMBOLS  # titles come first
FIRST = 0.75
LANGUAGES = 2026

WITH_ATTENTION = -FIRST * math.log(FIRST) - (1 - FIRST) * math.log(1 - FIRST)
WITHOUT_ATTENTION = WITH_ATTENTION + math.log(TITLES)
"""Nats a symbol that remain at best, but for the symbol after the title, which nothing foretells."""


def languages() -> Tensor:
    """The symbols that may follow a symbol under a title. [TITLES, SYMBOLS, CHOICES]"""
    generator = torch.Generator().manual_seed(LANGUAGES)
    ranked = torch.rand(SYMBOLS, SYMBOLS, generator=generator).argsort(1)[:, : TITLES * CHOICES]  # no symbol twice
    return TITLES + ranked.unflatten(1, (TITLES, CHOICES)).transpose(0, 1)


def text(sequences: int, length: int, seed: int) -> Tensor:
    """Texts `[sequences, length]`, always the same for a seed: they are drawn on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    follow = languages()
    written = torch.empty(length, sequences, dtype=torch.int64)
    written[0] = torch.randint(TITLES, (sequences,), generator=generator)
    written[1:2] = torch.randint(TITLES, VOCABULARY, (1, sequences), generator=generator)
    picked = (torch.rand(written.shape, generator=generator) >= FIRST).long()
    for n in range(2, length):
        written[n] = follow[written[0], written[n - 1] - TITLES, picked[n]]
    return written.T.contiguous()
