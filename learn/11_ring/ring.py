"""Ring attention with processes on this machine: queries stay, keys and values go round, states are merged."""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

LAYOUTS = ("contiguous", "zigzag")


def rows_of(rank: int, ranks: int, length: int, layout: str) -> Tensor:
    """Positions of the tokens that a rank holds."""
    if layout == "contiguous":
        return torch.arange(length).chunk(ranks)[rank]
    pieces = torch.arange(length).chunk(2 * ranks)  # zigzag: one piece from the front, its mirror image from the back
    return torch.cat((pieces[rank], pieces[2 * ranks - 1 - rank]))


def attend(q: Tensor, k: Tensor, v: Tensor, q_pos: Tensor, k_pos: Tensor) -> tuple[Tensor, Tensor]:
    """The state (out, lse) of some queries over some keys; causal, by positions in the whole sequence."""
    scores = (q @ k.T * q.shape[1] ** -0.5).masked_fill(k_pos[None, :] > q_pos[:, None], float("-inf"))
    lse = torch.logsumexp(scores, dim=-1)
    safe = torch.where(lse == float("-inf"), 0.0, lse)
    return torch.exp(scores - safe[:, None]) @ v, lse


def merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Two states over different keys become one (step 04)."""
    total = torch.logaddexp(lse, more_lse)
    safe = torch.where(total == float("-inf"), 0.0, total)
    return out * torch.exp(lse - safe)[:, None] + more * torch.exp(more_lse - safe)[:, None], total


def ring_attention(q: Tensor, k: Tensor, v: Tensor, positions: list[Tensor]) -> tuple[Tensor, int, int]:
    """This rank's rows of causal attention over all ranks' keys, with the bytes it sent and the scores it needed."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    own = positions[rank]
    out, lse = torch.zeros_like(q), torch.full((q.shape[0],), float("-inf"))
    held, sent, work = torch.stack((k, v)), 0, 0
    for step in range(ranks):
        owner = (rank - step) % ranks  # whose keys are here now
        under_way = []
        if step + 1 < ranks:  # start the next shard before computing with this one
            coming = held.new_empty(2, len(positions[(owner - 1) % ranks]), k.shape[1])
            under_way = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, held, (rank + 1) % ranks),
                    dist.P2POp(dist.irecv, coming, (rank - 1) % ranks),
                ]
            )
            sent += held.numel() * held.element_size()
        out, lse = merge(out, lse, *attend(q, held[0], held[1], own, positions[owner]))
        work += int((positions[owner][None, :] <= own[:, None]).sum())
        for one in under_way:
            one.wait()
        if under_way:
            held = coming
    return out, sent, work


def rank_main(rank: int, ranks: int, length: int, dim: int, meeting: str, answers: Any) -> None:
    """What every process runs. All draw the same numbers and keep their rows, so that no file has to be shared."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
    )
    torch.manual_seed(0)
    q, k, v = torch.randn(3, length, dim)
    everywhere = torch.arange(length)
    exact = attend(q.double(), k.double(), v.double(), everywhere, everywhere)[0]
    for layout in LAYOUTS:
        positions = [rows_of(one, ranks, length, layout) for one in range(ranks)]
        own = positions[rank]
        out, sent, work = ring_attention(q[own], k[own], v[own], positions)
        error = (out.double() - exact[own]).abs().max().item()
        answers.put((layout, rank, len(own), sent, work, error))
    dist.destroy_process_group()


def run(ranks: int, length: int, dim: int) -> list[tuple[str, int, int, int, int, float]]:
    """Start the processes; for each layout and rank: rows, bytes sent, scores needed, largest error."""
    # A fork of this process has torch already. Elsewhere than on Linux fork is not safe, and spawn imports it anew.
    context: Any = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    answers = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        given = (ranks, length, dim, str(Path(folder, "meeting")), answers)
        processes = [context.Process(target=rank_main, args=(rank, *given), daemon=True) for rank in range(ranks)]
        for process in processes:
            process.start()
        found = [answers.get(timeout=120) for _ in range(ranks * len(LAYOUTS))]
        for process in processes:
            process.join()
    return sorted(found)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=3, help="processes, 2 or more")
    parser.add_argument("--length", type=int, default=240)
    parser.add_argument("--dim", type=int, default=16)
    flags = parser.parse_args(argv)
    if flags.length % (2 * flags.ranks):
        parser.error(f"--length: expected a multiple of twice the ranks, {2 * flags.ranks}; got {flags.length}")
    print(f"{flags.ranks} processes, {flags.length} tokens, head dim {flags.dim}, fp32, causal")
    print(f"{'layout':12}{'rank':>5}{'rows':>6}{'bytes sent':>12}{'scores needed':>15}")
    for layout, rank, rows, sent, work, error in run(flags.ranks, flags.length, flags.dim):
        right = "right" if error < 1e-5 else f"WRONG by {error:.1e}"
        print(f"{layout:12}{rank:5}{rows:6}{sent:12,}{work:15,}   {right}")
    others, shard = flags.ranks - 1, 2 * flags.length // flags.ranks * flags.dim * 4
    print(f"bytes by formula: (ranks - 1) shards of K and V = {others} x {shard:,} = {others * shard:,}")


if __name__ == "__main__":
    main()
