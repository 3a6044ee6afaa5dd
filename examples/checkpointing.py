"""One training step with and without checkpoints: what is kept, what runs again, and that the gradients are the same.

python examples/checkpointing.py [--layers 8] [--length 1024] [--dim 256] [--heads 4] [--plot out.png] [--device cuda]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from stream_attention import attention
from stream_attention.utils.memory import (
    MemoryProfiler,
    estimate_attention_memory,
    gradient_checkpoint_sequential,
    stream_checkpoint_policy,
)
from stream_attention_tools.cli.values import count, device


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        x = x + self.out(attention(query, key, value, causal=True, deterministic=True).flatten(2))
        return x + self.mlp(self.norm2(x))


class Forwards(TorchDispatchMode):
    """Counts how often attention runs forward. What a checkpoint kept does not run again."""

    count = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += op is torch.ops.stream_attention.forward.default
        return op(*args, **(kwargs or {}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=count, default=8, help="transformer blocks; default 8")
    parser.add_argument("--length", type=count, default=1024, help="tokens; default 1024")
    parser.add_argument("--dim", type=count, default=256, help="of the model; default 256")
    parser.add_argument("--heads", type=count, default=4, help="default 4")
    parser.add_argument("--plot", type=Path, help="draw the memory of all steps into this file; needs matplotlib")
    parser.add_argument(
        "--device",
        type=device,
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="cpu, cuda or cuda:N; default: cuda if there is one",
    )
    options = parser.parse_args()
    if options.dim % options.heads:
        parser.error(f"--heads: expected a divisor of --dim {options.dim}; got {options.heads}")
    if options.plot is not None and not options.plot.parent.is_dir():
        parser.error(f"--plot: expected a file in a folder that is there; got {str(options.plot)!r}")

    profiler = MemoryProfiler(options.device)
    profiler.start()  # before anything is made: on a CPU, what is there already is not known to it
    torch.manual_seed(0)
    blocks = nn.Sequential(*(Block(options.dim, options.heads) for _ in range(options.layers))).to(options.device)
    x = torch.randn(1, options.length, options.dim, device=options.device)
    segments = max(1, round(options.layers**0.5))
    ways: dict[str, Callable[[Tensor], Tensor]] = {
        "nothing again": blocks,
        "everything again": partial(gradient_checkpoint_sequential, blocks, options.layers),
        f"{segments} segments": partial(gradient_checkpoint_sequential, blocks, segments),
        "all but attention": partial(
            gradient_checkpoint_sequential, blocks, options.layers, **stream_checkpoint_policy()
        ),
    }

    print(f"A step of {options.layers} blocks, {options.length} tokens, on {options.device}; memory in MiB.")
    print(f"{'what runs again':18} {'kept':>8} {'peak':>8} {'attention':>10} {'gradients':>10}")
    exact = None
    for name, way in ways.items():
        way(x).mean().backward()  # what is made once
        blocks.zero_grad(set_to_none=True)
        with Forwards() as forwards, profiler.region(name):
            with profiler.region("forward"):
                out = way(x)
            with profiler.region("backward"):
                out.square().mean().backward()
        del out
        grads = torch.cat([parameter.grad.flatten() for parameter in blocks.parameters() if parameter.grad is not None])
        exact = grads if exact is None else exact
        same = "the same" if torch.equal(grads, exact) else f"{(grads - exact).abs().max():.1e}"
        regions = {one["name"]: one for one in profiler.report()["regions"]}
        kept, peak = regions[f"{name}/forward"]["retained_mb"], regions[name]["peak_beyond_mb"]
        print(f"{name:18} {kept:8.1f} {peak:8.1f} {forwards.count:9}x {same:>10}")

    one = estimate_attention_memory(
        1, options.length, options.heads, options.dim // options.heads, dtype=x.dtype, device=options.device
    )
    print(f"Attention keeps {one.saved / 2**20:.2f} MiB a block, {options.layers * one.saved / 2**20:.1f} in all.")
    profiler.stop()
    if options.plot is not None:
        profiler.plot(options.plot)
        print(f"The picture: {options.plot}")


if __name__ == "__main__":
    main()
