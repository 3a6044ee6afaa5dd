"""Train a small GPT with our attention and with torch's SDPA, from the same weights on the same text, and compare.

    PYTHONPATH=src python -m benchmarks.training.train --device cuda --json-out benchmarks/results/h200/training.json

Three trainings take their steps in turn: ours with seed 0, SDPA with seed 0, SDPA with seed 1 (other weights, other
text), and with --deterministic a fourth, ours with deterministic gradients and seed 0. Equal curves are not asked for:
sums round differently, and training magnifies that. The difference must be within what another seed makes, as
`verdict.py` says. The exit code is 1 where it is not.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from stream_attention.dispatch.plan import plan
from stream_attention.ops.explain import problems_of_call
from stream_attention_tools.bench.progress import progress
from stream_attention_tools.bench.results import aligned, conditions, save
from stream_attention_tools.bench.timing import CLOCKS, Latency, paired_ratio

from . import verdict
from .gpt import GPT, Attend, Size, ours, ours_deterministic, sdpa
from .text import CLASSES, VOCABULARY, WITH_ATTENTION, WITHOUT_ATTENTION, text

STEPS, BATCH = 200, 8
RATE, RATE_WARMUP = 1e-3, 20
UNTIMED = 20  # first steps: kernels are compiled, memory is found
TOLD_EVERY = 25
NAMES: dict[Attend, str] = {ours: "ours", ours_deterministic: "ours deterministic", sdpa: "sdpa"}


class Training:
    """One model on its way: its text, its losses, and what its steps took."""

    def __init__(self, attend: Attend, seed: int, size: Size, steps: int, batch: int, device: str) -> None:
        self.attend, self.device = attend, device
        self.name = f"{NAMES[attend]}, seed {seed}"
        self.seed = seed
        self.text = text(steps * batch, size.context + 1, seed).unflatten(0, (steps, batch)).to(device)
        self.model = GPT(size, seed).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), RATE, (0.9, 0.95), weight_decay=0.1, fused=True)
        self.losses = torch.full((steps,), torch.nan, device=device)
        self.ms: list[Callable[[], float]] = []
        self.peaks: list[int] = []

    def loss(self, step: int, attend: Attend) -> Tensor:
        """bf16 products on a GPU, fp32 on a CPU."""
        with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
            return self.model(self.text[step], attend)

    def step(self, step: int) -> None:
        """The next step, without waiting for the GPU: the host runs ahead."""
        for group in self.optimizer.param_groups:
            group["lr"] = RATE * min(1, (step + 1) / RATE_WARMUP)
        loss = self.loss(step, self.attend)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()  # between steps nothing stands but weights and optimiser state
        self.losses[step] = loss.detach()

    def measured_step(self, step: int) -> None:
        if self.device == "cpu":
            began = time.perf_counter()
            self.step(step)
            taken = (time.perf_counter() - began) * 1e3
            self.ms.append(lambda: taken)
            return
        standing = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        self.step(step)
        ended.record()
        self.ms.append(lambda: begun.elapsed_time(ended))
        self.peaks.append(torch.cuda.max_memory_allocated() - standing)

    def timed(self) -> list[float]:
        """Milliseconds of the steps that count."""
        return [ms() for ms in self.ms[UNTIMED if len(self.ms) > UNTIMED else 0 :]]

    def entry(self) -> dict[str, Any]:
        taken = Latency.of(self.timed())
        return {
            "name": self.name,
            "seed": self.seed,
            "plan": plan_of(self),
            "losses": [round(loss, 6) for loss in self.losses.tolist()],
            "median_ms": taken.median,
            "p20_ms": taken.p20,
            "p80_ms": taken.p80,
            "timed_steps": taken.repeats,
            "peak_bytes": max(self.peaks[1:], default=None),  # the first step also makes Adam's state
        }


def plan_of(training: Training) -> dict[str, str]:
    """Which kernels attend, forward and backward: what is asked is a call that the model itself makes."""
    found: dict[str, str] = {}

    def look(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if training.attend is sdpa:
            across = (query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))
            kernel = SDPBackend(torch._fused_sdp_choice(*across, is_causal=True)).name
            found.update(forward=kernel, backward=kernel)
        else:
            deterministic = True if training.attend is ours_deterministic else None
            problems, backend = problems_of_call(query, key, value, causal=True, deterministic=deterministic)
            chosen = (plan(problem, backend) for problem in problems)
            found.update(zip(("forward", "backward"), (f"{one.backend}: {one.config}" for one in chosen), strict=True))
        return value

    training.loss(0, look)
    return found


def train(size: Size, steps: int, batch: int, device: str, deterministic: bool = False) -> dict[str, Any]:
    """A results file: conditions, then the trainings, and the verdict on ours."""
    asked = [(ours, 0), (sdpa, 0), (sdpa, 1)] + ([(ours_deterministic, 0)] if deterministic else [])
    trainings = [Training(attend, seed, size, steps, batch, device) for attend, seed in asked]
    with progress(-(-steps // TOLD_EVERY)) as shown:
        for step in range(steps):
            turn = step % len(trainings)  # nobody always runs after the same neighbour
            for one in trainings[turn:] + trainings[:turn]:
                shown.now(f"step {step + 1} of {steps}")
                one.measured_step(step)
            if (step + 1) % TOLD_EVERY == 0 or step + 1 == steps:
                losses = "  ".join(
                    f"{one.name} {one.losses[step].item():.4f}" for one in trainings
                )  # waits for the GPU
                shown.done(f"step {step + 1:4} of {steps}  loss: {losses}")
    entries = [one.entry() for one in trainings]
    first, peer, other, *rest = trainings
    judged = {one.name: verdict.judge(*(each.losses.tolist() for each in (one, peer, other))) for one in (first, *rest)}
    return {
        "suite": "training",
        **conditions(device),
        "conditions": told(size, steps, batch, device, sum(p.numel() for p in first.model.parameters())),
        "runs": entries,
        "step_time_by_sdpa": {one.name: paired_ratio(one.timed(), peer.timed()) for one in (first, *rest)},
        "verdict": {
            name: None if one is None else {**one._asdict(), "share": one.share} for name, one in judged.items()
        },
    }


def told(size: Size, steps: int, batch: int, device: str, parameters: int) -> dict[str, Any]:
    return {
        "model": f"GPT, {size.layers} layers, {size.heads} heads of {size.head_dim}, context {size.context}",
        **size._asdict(),
        "heads": size.heads,
        "head_dim": size.head_dim,
        "parameters": parameters,
        "batch": batch,
        "steps": steps,
        "dtype": "fp32 parameters under bf16 autocast" if device == "cuda" else "fp32",
        "optimizer": f"AdamW, rate {RATE:g} after {RATE_WARMUP} steps, gradients clipped at 1",
        "text": "chains by rules that marks at the start announce: benchmarks/training/text.py",
        "nats_with_attention": WITH_ATTENTION,
        "nats_without_attention": WITHOUT_ATTENTION,
        "timing": f"{CLOCKS['events' if device == 'cuda' else 'wall']}, a whole step, medians after step {UNTIMED}",
        "order": "a step of each training in turn, in rotating order",
        "step_time_by_sdpa": "median over the rounds of our time by that of sdpa, seed 0",
        "peak_bytes": "most that a step holds beyond weights and optimiser state",
        "verdict": f"losses smoothed over {verdict.SMOOTHED_OVER} steps; at every step after {verdict.AFTER}, "
        f"|ours - sdpa seed 0| <= max |sdpa seed 1 - sdpa seed 0| within {verdict.WITHIN} steps; share is of that",
    }


def table(results: dict[str, Any]) -> list[list[str]]:
    """Headings, then a row per training."""
    rows = [["training", "loss, last 10", "step ms", "by sdpa", "peak GiB", "forward", "backward", "verdict"]]
    for run in results["runs"]:
        name, last, peak = run["name"], run["losses"][-10:], run["peak_bytes"]
        ratio = results["step_time_by_sdpa"].get(name)
        rows.append(
            [
                name,
                f"{sum(last) / len(last):.4f}",
                f"{run['median_ms']:.2f}",
                "" if ratio is None else f"{ratio:.3f}",
                "" if peak is None else f"{peak / 2**30:.2f}",
                *(run["plan"][direction].partition(":")[0] for direction in ("forward", "backward")),
                _said(results["verdict"][name]) if name in results["verdict"] else "",
            ]
        )
    return rows


def _said(judged: dict[str, Any] | None) -> str:
    if judged is None:
        return f"none: {verdict.AFTER} steps or fewer"
    where = f"{judged['share']:.2f} of the spread at step {judged['worst_step']}"
    return f"{'within' if judged['within'] else 'OUTSIDE'}, at most {where}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.training.train", description="Train a small GPT with our attention and with SDPA."
    )
    standard = Size(VOCABULARY)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=STEPS, help="default: %(default)s")
    parser.add_argument("--batch", type=int, default=BATCH, help="sequences of a step; default: %(default)s")
    parser.add_argument("--context", type=int, default=standard.context, help="default: %(default)s")
    parser.add_argument("--width", type=int, default=standard.width, help="default: %(default)s, heads of 128")
    parser.add_argument("--layers", type=int, default=standard.layers, help="default: %(default)s")
    parser.add_argument("--deterministic", action="store_true", help="also ours with deterministic gradients")
    parser.add_argument("--json-out", type=Path, help="write the results to this file")
    parser.add_argument("--plot-out", type=Path, help="draw the curves into this .png or .svg; needs matplotlib")
    options = parser.parse_args(arguments)
    for name, least in (("steps", 1), ("batch", 1), ("context", CLASSES), ("layers", 1)):
        if getattr(options, name) < least:
            parser.error(f"--{name}: expected at least {least}; got {getattr(options, name)}.")
    size = Size(VOCABULARY, options.context, options.width, options.layers)
    if options.width < 4 or options.width % size.head_dim or size.head_dim % 2:
        parser.error(f"--width: expected a multiple of 128, or of 4 below 256; got {options.width}.")
    if options.plot_out and options.plot_out.suffix not in (".png", ".svg"):
        parser.error(f"--plot-out: expected a name ending in .png or .svg; got {options.plot_out}.")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: expected a GPU that torch sees, or cpu; got cuda.")
    results = train(size, options.steps, options.batch, options.device, options.deterministic)
    print(aligned(table(results)))
    if options.json_out:
        save(results, options.json_out)
    if options.plot_out:
        from .plot import draw

        draw(results, options.plot_out)
    return int(any(one is not None and not one["within"] for one in results["verdict"].values()))


if __name__ == "__main__":
    sys.exit(main())
