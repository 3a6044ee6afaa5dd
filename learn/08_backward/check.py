"""Checks exercise.py: sums over pairs of tiles, against autograd over the whole."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
import checking

Gradients = Callable[..., tuple[Tensor, Tensor, Tensor]]


def complaints(candidate: Gradients) -> Iterator[str]:
    generator = torch.Generator().manual_seed(1)
    for queries, keys, dim, scale, tile in ((4, 4, 8, 1.0, 4), (6, 8, 8, 0.5, 4), (9, 5, 16, 0.25, 3)):
        q, dout = torch.randn(2, queries, dim, generator=generator, dtype=torch.float64)
        k, v = torch.randn(2, keys, dim, generator=generator, dtype=torch.float64)
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        scores = leaves[0] @ leaves[1].T * scale
        out = torch.softmax(scores, dim=-1) @ leaves[2]
        wanted = torch.autograd.grad(out, leaves, dout)
        lse, delta = torch.logsumexp(scores, dim=-1).detach(), (dout * out).sum(-1).detach()
        sums = [torch.zeros_like(x) for x in (q, k, v)]
        where = f"{queries} queries, {keys} keys, scale {scale}, tiles of {tile}"
        for m in range(0, queries, tile):
            for n in range(0, keys, tile):
                rows, columns = slice(m, m + tile), slice(n, n + tile)
                parts = candidate(q[rows], k[columns], v[columns], dout[rows], lse[rows], delta[rows], scale)
                places = sums[0][rows], sums[1][columns], sums[2][columns]
                for name, part, place in zip(("dq", "dk", "dv"), parts, places, strict=True):
                    if part.shape != place.shape:
                        yield f"{where}: {name} has shape {tuple(part.shape)}; expected {tuple(place.shape)}"
                        return
                    place += part
        found = list(filter(None, map(compared, ("dq", "dk", "dv"), sums, wanted)))
        yield from (f"{where}: {sentence}" for sentence in found)
        if found:
            return


def compared(name: str, got: Tensor, wanted: Tensor) -> str:
    """What is wrong with a gradient, in words; nothing if it is right."""
    error = (got - wanted).abs().max().item()
    if error < 1e-9:
        return ""
    times = ((got * wanted).sum() / wanted.square().sum()).item()
    if (got - times * wanted).abs().max() < 1e-9:
        return f"{name} is {times:.4g} times what it should be; is the scale in it, and once?"
    return f"{name} is off by up to {error:.2g}, where autograd's largest is {wanted.abs().max().item():.2g}"


def main(argv: list[str] | None = None) -> int:
    return checking.run(__file__, "tile_gradients", complaints, argv)


if __name__ == "__main__":
    sys.exit(main())
