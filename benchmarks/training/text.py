"""Text with something to learn in 200 steps, much of which attention alone can learn, and from afar.

The symbols are of 16 classes. A text opens with 16 marks, one for each class, which says by which of four rules the
symbols of that class are followed in this text; then it is a random chain, in which a rule leaves a symbol two
successors, the first three times in four. The rules' successors are fixed and all different. So a model that reads one
symbol at a time is left with 1.95 nats: which of the two, and which rule. The way from there to 0.56 leads through
attention: to the mark of the symbol's class, up to a whole context away, since what stands near by tells little of the
other classes.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

CLASSES, RULES, SUCCESSORS = 16, 4, 2
VOCABULARY = 256
MARKS = CLASSES * RULES  # they come first in the vocabulary, the symbols after them
SYMBOLS = VOCABULARY - MARKS
FIRST = 0.75
LANGUAGE = 2026

WITH_ATTENTION = -FIRST * math.log(FIRST) - (1 - FIRST) * math.log(1 - FIRST)
WITHOUT_ATTENTION = WITH_ATTENTION + math.log(RULES)
"""Nats a symbol that remain at best, once the marks are written."""


def language() -> Tensor:
    """The symbols that may follow a symbol under a rule. [RULES, SYMBOLS, SUCCESSORS]"""
    generator = torch.Generator().manual_seed(LANGUAGE)
    ranked = torch.rand(SYMBOLS, SYMBOLS, generator=generator).argsort(1)[:, : RULES * SUCCESSORS]  # no symbol twice
    return MARKS + ranked.unflatten(1, (RULES, SUCCESSORS)).transpose(0, 1)


def text(sequences: int, length: int, seed: int) -> Tensor:
    """Texts `[sequences, length]`, always the same for a seed: they are drawn on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    rules = torch.randint(RULES, (CLASSES, sequences), generator=generator)
    marks = torch.arange(CLASSES)[:, None] * RULES + rules
    symbol = torch.randint(SYMBOLS, (sequences,), generator=generator)
    rank = (torch.rand(length, sequences, generator=generator) >= FIRST).long()
    follow, each = language() - MARKS, torch.arange(sequences)
    symbols = []
    for n in range(length - CLASSES):
        symbols.append(symbol)
        symbol = follow[rules[symbol % CLASSES, each], symbol, rank[n]]
    return torch.cat((marks, MARKS + torch.stack(symbols))).T.contiguous()
