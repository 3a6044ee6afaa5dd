"""Train a tiny causal transformer on associative recall, with attention and, for comparison, without.

    python examples/train_transformer_block.py [--pairs 8] [--steps 300] [--device cuda]

A sequence is `key value key value ...` and then its keys again in another order; after each of these the model must
predict the value that followed it. Pairs are random in each sequence, so nothing can be memorised: a model without
attention can only guess. ALiBi slopes are the model's only position information.
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stream_attention import attention
from stream_attention_tools.cli.values import count, device


class Block(nn.Module):
    """A pre-norm transformer block; `attends=False` leaves the attention out."""

    slopes: Tensor

    def __init__(self, dim: int, heads: int, attends: bool) -> None:
        super().__init__()
        self.heads, self.attends = heads, attends
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        # From heads that see their neighbourhood to one that sees everything alike.
        self.register_buffer("slopes", torch.cat([2.0 ** -torch.arange(float(heads - 1)), torch.zeros(1)]))

    def forward(self, x: Tensor) -> Tensor:
        if self.attends:
            query, key, value = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
            x = x + self.out(attention(query, key, value, causal=True, alibi_slopes=self.slopes).flatten(2))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    def __init__(self, tokens: int, dim: int, heads: int, layers: int, attends: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(tokens, dim)
        self.blocks = nn.Sequential(*(Block(dim, heads, attends) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, tokens)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embed(tokens))))


def draw(batch: int, pairs: int, kinds: int, device: str) -> tuple[Tensor, Tensor]:
    """Sequences `[batch, 3 * pairs]`, and the value that belongs behind each of the last `pairs` tokens."""
    keys = torch.rand(batch, kinds, device=device).argsort(1)[:, :pairs]
    values = torch.randint(kinds, (batch, pairs), device=device)
    asked = torch.rand(batch, pairs, device=device).argsort(1)
    context = torch.stack([keys, values + kinds], 2).flatten(1)
    return torch.cat([context, keys.gather(1, asked)], 1), values.gather(1, asked) + kinds


def train(attends: bool, options: argparse.Namespace) -> float:
    """Train one model and return its accuracy on sequences that are not in the training data."""
    torch.manual_seed(options.seed)
    kinds, pairs, device = 2 * options.pairs, options.pairs, options.device
    model = Model(2 * kinds, options.dim, options.heads, layers=2, attends=attends).to(device)
    optimiser = torch.optim.AdamW(model.parameters(), lr=options.lr)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, options.lr, options.steps, pct_start=0.1)
    began = time.perf_counter()
    for step in range(1, options.steps + 1):
        tokens, targets = draw(options.batch, pairs, kinds, device)
        logits = model(tokens)[:, -pairs:]
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
        if step % max(1, options.steps // 10) == 0:
            right = (logits.argmax(-1) == targets).float().mean()
            print(
                f"  step {step:4}  loss {loss:.3f}  accuracy {right:.3f}  {time.perf_counter() - began:.0f} s",
                flush=True,
            )
    with torch.no_grad():
        tokens, targets = draw(512, pairs, kinds, device)
        return float((model(tokens)[:, -pairs:].argmax(-1) == targets).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--pairs", type=count, default=8, help="pairs to remember, of twice as many kinds of keys and values; default 8"
    )
    parser.add_argument("--steps", type=count, default=300, help="of each training; default 300")
    parser.add_argument("--batch", type=count, default=64, help="sequences of a step; default 64")
    parser.add_argument("--dim", type=count, default=64, help="features of a token; default 64")
    parser.add_argument("--heads", type=count, default=4, help="which divide the features; default 4")
    parser.add_argument("--lr", type=float, default=3e-3, help="learning rate at its peak; default 0.003")
    parser.add_argument("--seed", type=int, default=0, help="of weights and sequences; default 0")
    parser.add_argument("--device", type=device, default="cpu", help="cpu, the default, cuda or cuda:N")
    options = parser.parse_args()
    if options.dim % options.heads:
        parser.error(f"--heads: expected a divisor of --dim {options.dim}; got {options.heads}")
    if not options.lr > 0:
        parser.error(f"--lr: expected more than 0; got {options.lr:g}")
    chance = 1 / (2 * options.pairs)
    print(f"With attention (chance is {chance:.3f}):")
    accuracy = train(True, options)
    print("The same model without attention:")
    blind = train(False, options)
    print(f"accuracy with attention {accuracy:.3f}, without {blind:.3f}, chance {chance:.3f}")
    if accuracy <= 0.95:
        raise SystemExit("it did not learn to recall; more --steps?")
    if blind > 3 * chance:
        raise SystemExit("the task can be done without attention: it shows nothing")


if __name__ == "__main__":
    main()
