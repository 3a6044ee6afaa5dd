"""Train the recall model and write its weights.

    python -m benchmarks.recall.train

Once, on one core, in four minutes. The same seed, torch, machine and threads give the same weights; elsewhere sums
round differently, so the file is kept and not made anew. Its metadata says how it came about.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

from stream_attention_tools.bench.results import conditions

from .model import Recall, accuracy, draw, loss
from .weights import WEIGHTS, save

SHORT, LONG = 32, 96
BATCH = 64
RATE = 2e-3
WARMUP = 50
SEED = 8


def pairs_at(done: float) -> int:
    """How long a context is after this share of the training: short for a quarter, full from a half on."""
    return round(SHORT + (LONG - SHORT) * min(max(4 * done - 1, 0), 1))


def rate_at(step: int, steps: int) -> float:
    """A warm-up, a plateau, and a straight line to zero over the last third."""
    return RATE * min(1, (step + 1) / WARMUP, 3 * (steps - step) / steps)


def train(steps: int, seed: int = SEED) -> tuple[Recall, float]:
    """The model after so many steps, and its accuracy on contexts it was not trained with."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = Recall()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    began = time.perf_counter()
    for step in range(steps):
        length = pairs_at(step / steps)
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step, steps)
        pairs = draw(BATCH, length, length, generator)
        logits = model(pairs)
        error = loss(logits, pairs.answers)
        optimizer.zero_grad()
        error.backward()
        optimizer.step()
        if (step + 1) % 50 == 0 or step + 1 == steps:
            right, taken = accuracy(logits, pairs.answers), time.perf_counter() - began
            line = (
                f"step {step + 1}/{steps}  {length} pairs  loss {error.item():.4f}  accuracy {right:.4f}  {taken:.0f} s"
            )
            print(line, file=sys.stderr, flush=True)
    with torch.no_grad():
        pairs = draw(BATCH, LONG, LONG, generator)
        return model, accuracy(model(pairs), pairs.answers)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recall.train", description="Train the recall model.")
    parser.add_argument("--steps", type=int, default=1600, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=SEED, help="default: %(default)s")
    parser.add_argument("--threads", type=int, default=1, help="of torch; default: %(default)s")
    parser.add_argument("--out", type=Path, default=WEIGHTS, help="default: %(default)s")
    options = parser.parse_args(arguments)
    if options.steps < 1 or options.threads < 1:
        parser.error(f"--steps and --threads: expected at least 1; got {options.steps} and {options.threads}.")
    torch.set_num_threads(options.threads)
    began = time.perf_counter()
    model, right = train(options.steps, options.seed)
    here = conditions("cpu")
    told = {
        "task": f"which of the values stood beside a key; contexts of {SHORT} to {LONG} pairs",
        "made by": "python -m benchmarks.recall.train",
        "steps": str(options.steps),
        "seed": str(options.seed),
        "batch": str(BATCH),
        "optimizer": f"AdamW, rate {RATE:g}",
        "accuracy": f"{right:.4f} at {LONG} pairs, whole cache",
        "seconds": f"{time.perf_counter() - began:.0f}",
        "threads": str(options.threads),
        "torch": here["versions"]["torch"],
        "machine": here["machine"]["name"],
        "date": here["date"],
    }
    save(model.state_dict(), told, options.out)
    print(f"accuracy {right:.4f} at {LONG} pairs; wrote {options.out}")


if __name__ == "__main__":
    main()
