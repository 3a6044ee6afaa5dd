"""One sequence over several ranks: which rank has which rows, what is sent, and that the result is that of one device.

    python examples/ring_attention.py [--ranks 4] [--length 1024] [--heads 8] [--kv-heads 4] [--dim 32] [--device cuda]
    torchrun --standalone --nproc-per-node=4 examples/ring_attention.py

Started by python the ranks are virtual: all of them in this process, on one device, with the same code and the same
kernels. Started by torchrun they are processes: over NCCL if each has a GPU of its own, else over gloo. For comparison
every rank also computes everything alone.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stream_attention import ContiguousKV, attention
from stream_attention.distributed import (
    Processes,
    Recorder,
    VirtualRanks,
    initialize,
    position_ids,
    ring_attention,
    shard_sequence,
    tree_decode_attention,
    ulysses_attention,
    unshard_sequence,
)
from stream_attention_tools.cli.values import count, device


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=count, help="virtual ones, default 4; torchrun brings its own number")
    parser.add_argument("--length", type=count, default=1024, help="tokens of the whole sequence; default 1024")
    parser.add_argument("--heads", type=count, default=8, help="query heads; default 8")
    parser.add_argument("--kv-heads", type=count, default=4, help="default 4")
    parser.add_argument("--dim", type=count, default=32, help="of a head; default 32")
    parser.add_argument(
        "--device",
        type=device,
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="cpu, cuda or cuda:N; default: cuda if there is one",
    )
    options = parser.parse_args()
    launched = "RANK" in os.environ
    if launched and options.ranks is not None:
        parser.error(
            f"--ranks: expected none under torchrun, which starts {os.environ['WORLD_SIZE']}; got {options.ranks}"
        )
    if options.heads % options.kv_heads:
        parser.error(f"--kv-heads: expected a divisor of --heads {options.heads}; got {options.kv_heads}")

    recorder = Recorder()  # lists what is sent; optional
    group: Processes | VirtualRanks
    if launched:
        initialize()  # init_process_group, with this rank's GPU and a bounded timeout
        group = Processes(recorder=recorder)  # None would do: it is the default group
    else:
        group = VirtualRanks(options.ranks or 4, recorder=recorder)
    if options.heads < group.size:
        parser.error(f"--heads: expected at least the {group.size} ranks, which divide them; got {options.heads}")
    say: Callable[..., None] = print if 0 in group.ranks else lambda *words: None
    ranks = f"{group.size} {'processes' if launched else 'virtual'}"
    say(f"ranks      {ranks}; a sequence of {options.length} tokens, on {options.device}")

    # Causal work of a rank: a row at position i sees i + 1 keys.
    for layout in ("contiguous", "zigzag", "striped"):
        everyone = VirtualRanks(group.size)
        work = [int((rows + 1).sum()) for rows in position_ids(options.length, group=everyone, layout=layout)]
        say(f"{layout:10} the busiest rank has {max(work) * group.size / sum(work):.3f} of an even share")

    torch.manual_seed(0)  # so that every process draws the same numbers: each takes its shard of them
    dtype = torch.float32 if options.device == "cpu" else torch.bfloat16

    def tokens(heads: int) -> Tensor:
        return torch.randn(1, options.length, heads, options.dim, device=options.device, dtype=dtype).requires_grad_()

    query, key, value = tokens(options.heads), tokens(options.kv_heads), tokens(options.kv_heads)
    whole = attention(query, key, value, causal=True)
    grads = torch.autograd.grad(whole.float().square().sum(), (query, key, value))

    def shards(layout: Any) -> list[list[Tensor]]:
        """This process's shards of query, key and value; a real script never has the whole of them."""
        shards = [shard_sequence(t.detach(), group=group, layout=layout) for t in (query, key, value)]
        return [[t.requires_grad_() for t in (one if isinstance(one, list) else [one])] for one in shards]

    def same(local: list[Tensor], expected: Tensor, layout: Any) -> float:
        """The largest difference between shards and what one device has."""
        return difference(unshard_sequence(local, group=group, layout=layout)[0], expected)

    # Keys and values travel: N/P rows of each go from rank to rank, P - 1 times.
    number = value.element_size()
    everything = options.length * options.kv_heads * 2 * options.dim * number  # keys and values of the whole sequence
    local = shards("zigzag")
    recorder.entries.clear()
    outs = ring_attention(*local, group=group, layout="zigzag", causal=True, length=options.length)
    forward = recorder.bytes_sent(group.ranks[0])
    loss = torch.stack([out.float().square().sum() for out in outs]).sum()
    loss.backward()  # only this rank's rows: what the others' rows give comes with their keys
    backward = recorder.bytes_sent(group.ranks[0]) - forward
    say(f"ring       output off by {same(outs, whole, 'zigzag'):.1e}, sent {forward} bytes")
    worst = max(
        same([t.grad for t in mine if t.grad is not None], grad, "zigzag")
        for mine, grad in zip(local, grads, strict=True)
    )
    say(f"           gradients off by {worst:.1e}, sent {backward} bytes")
    if options.length % (2 * group.size) == 0:
        share = everything * (group.size - 1) // group.size
        say(f"           by the formula {share} and {share * (number + 4) // number}")

    # Heads travel: each rank has all rows of some heads while it computes.
    recorder.entries.clear()
    with torch.no_grad():
        outs = ulysses_attention(*shards("zigzag"), group=group, layout="zigzag", causal=True, length=options.length)
    sent = recorder.bytes_sent(group.ranks[0])
    say(f"ulysses    output off by {same(outs, whole, 'zigzag'):.1e}, sent {sent} bytes")

    # Dropout is a function of seed and position, so ranks draw the mask of one device.
    dropped = attention(query, key, value, causal=True, dropout_p=0.1, seed=7)
    with torch.no_grad():
        outs = ring_attention(*shards("zigzag"), group=group, layout="zigzag", causal=True, dropout_p=0.1, seed=7)
    say(f"dropout    output off by {same(outs, dropped, 'zigzag'):.1e}, with the mask of one device")

    # One new token against a cache in parts: only states travel, however long the cache is.
    _, keys, values = shards("contiguous")
    caches = [ContiguousKV(k.detach(), v.detach()) for k, v in zip(keys, values, strict=True)]
    recorder.entries.clear()
    out = tree_decode_attention(query.detach()[:, -1:], caches, group=group)[0]  # the same on every rank
    sent = recorder.bytes_sent(group.ranks[0])
    say(f"decode     output off by {difference(out, whole[:, -1:]):.1e}, sent {sent} bytes")
    if launched:
        dist.destroy_process_group()


def difference(a: Tensor, b: Tensor) -> float:
    return float((a.detach().float() - b.detach().float()).abs().max())


if __name__ == "__main__":
    main()
