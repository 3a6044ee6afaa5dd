"""How a sequence is divided among ranks.

- `contiguous`: rank r has the r-th stretch. The only layout of shards whose lengths are arbitrary.
- `zigzag`: the sequence in 2P chunks, rank r has chunks r and 2P-1-r, so that every rank has the same causal work.
- `striped`: rank r has positions r, r + P, r + 2P, ...

Nothing has to be divisible: chunk c of n begins at `c * length // n`. A rank's shard is a few `Run`s of positions, and
all that attention needs to know of a shard are its runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from ..base.errors import check_int, refuse
from .agreement import agreed
from .autograd import differentiable
from .graph_break import graph_break
from .processes import Group, transport_of
from .transport import Strategy, VirtualRanks, all_gather, reduce_scatter, unwrap_ranks

Layout = Literal["contiguous", "zigzag", "striped"]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)


class Run(NamedTuple):
    """Rows of a shard with evenly spaced positions: row `first + i` has position `start + i * stride`."""

    first: int
    length: int
    start: int
    stride: int = 1
    sequence: int = 0  # index of the packed sequence; positions count within it

    @property
    def rows(self) -> slice:
        return slice(self.first, self.first + self.length)

    @property
    def last(self) -> int:
        """The position of its last row."""
        return self.start + (self.length - 1) * self.stride


def by_position(shards: Mapping[int, Iterable[Run]]) -> list[tuple[int, Run, Run]]:
    """The runs of several owners' shards, concatenated in the order of positions: the owner, the run in its shard, and
    the run in the concatenation."""
    found = [(owner, run) for owner, runs in shards.items() for run in runs]
    found.sort(key=lambda place: (place[1].sequence, place[1].start))
    firsts = accumulate((run.length for _, run in found), initial=0)
    return [(owner, run, run._replace(first=first)) for (owner, run), first in zip(found, firsts, strict=False)]


def check_layout(layout: Any) -> None:
    if layout not in LAYOUTS:
        refuse("layout", " or ".join(repr(name) for name in LAYOUTS), repr(layout))


def runs_of(layout: Layout, length: int, size: int, rank: int) -> tuple[Run, ...]:
    """The shard of `rank` in a sequence divided among `size` ranks, empty runs left out.

    >>> runs_of("zigzag", 16, 4, 1)
    (Run(first=0, length=2, start=2, stride=1, sequence=0), Run(first=2, length=2, start=12, stride=1, sequence=0))
    """
    if layout == "striped":
        return _without_empty([Run(0, len(range(rank, length, size)), rank, size)])
    chunks = [rank] if layout == "contiguous" else [rank, 2 * size - 1 - rank]
    count = size if layout == "contiguous" else 2 * size
    bounds = [(chunk * length // count, (chunk + 1) * length // count) for chunk in chunks]
    if len(bounds) == 2 and bounds[0][1] == bounds[1][0]:
        bounds = [(bounds[0][0], bounds[1][1])]  # neighbours: the last rank's chunks meet in the middle
    firsts = accumulate((end - begin for begin, end in bounds), initial=0)
    return _without_empty([Run(first, end - begin, begin) for first, (begin, end) in zip(firsts, bounds, strict=False)])


def runs_of_all(layout: Layout, lengths: Sequence[int]) -> list[tuple[Run, ...]]:
    """Every rank's runs, from the lengths of their shards, which outside `contiguous` are those of `runs_of`."""
    size, total = len(lengths), sum(lengths)
    if layout == "contiguous":
        return [_without_empty([Run(0, n, end - n)]) for n, end in zip(lengths, accumulate(lengths), strict=True)]
    expected = [shard_length(layout, total, size, rank) for rank in range(size)]
    if list(lengths) != expected:
        hint = 'shard_sequence divides a sequence so; shards of other lengths are layout="contiguous".'
        refuse("shards", f"lengths {expected} for {total} positions in {layout} layout", list(lengths), hint)
    return [runs_of(layout, total, size, rank) for rank in range(size)]


def shard_length(layout: Layout, length: int, size: int, rank: int) -> int:
    return sum(run.length for run in runs_of(layout, length, size, rank))


def within_sequences(runs: Sequence[Run], offsets: Sequence[int]) -> tuple[Run, ...]:
    """Runs of packed sequences: split where one ends, positions counted in each. Rows past the last belong to none."""
    pieces = []
    for run in runs:
        for sequence, (begin, end) in enumerate(pairwise(offsets)):
            # Rows i of the run with begin <= start + i * stride < end.
            i, stop = (min(max(0, -((run.start - edge) // run.stride)), run.length) for edge in (begin, end))
            position = run.start + i * run.stride - begin
            pieces.append(Run(run.first + i, stop - i, position, run.stride, sequence))
    return _without_empty(pieces)


def _without_empty(runs: Sequence[Run]) -> tuple[Run, ...]:
    return tuple(run for run in runs if run.length > 0)


def positions_of(runs: Sequence[Run], device: torch.device | None = None) -> Tensor:
    """The positions of a shard's rows, int64."""
    parts = [torch.arange(run.length, device=device) * run.stride + run.start for run in runs]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device=device)


def order_of(shards: Iterable[Sequence[Run]], device: torch.device) -> Tensor:
    """The row of each position in shards that are concatenated."""
    return torch.argsort(torch.cat([positions_of(runs, device) for runs in shards]))


def parts_of(sequence: Tensor, runs: Iterable[Run], dim: int) -> list[Tensor]:
    """Views of the rows of runs, at least one."""
    parts = [sequence[(slice(None),) * dim + (slice(run.start, run.last + 1, run.stride),)] for run in runs]
    return parts or [sequence.narrow(dim, 0, 0)]


def shard_sequence(sequence: Tensor, *, group: Group = None, layout: Layout = "contiguous", dim: int = 1) -> Any:
    """This rank's shard of a sequence that every rank has whole; differentiable, no communication.

    Args:
        sequence: any tensor with the sequence in `dim`: tokens, hidden states, labels (shifted before they are
            sharded: `shift_labels`), queries. Any length, also below the number of ranks.
        group: as in `ring_attention`. With `VirtualRanks` a list, one shard per rank.
        layout: "contiguous", "zigzag" (causal attention in balance) or "striped".

    >>> from stream_attention.distributed import VirtualRanks
    >>> [shard.tolist() for shard in shard_sequence(torch.arange(7), group=VirtualRanks(2), layout="zigzag", dim=0)]
    [[0, 5, 6], [1, 2, 3, 4]]
    """
    check_layout(layout)
    return take_runs(sequence, group, dim, lambda length, size, rank: runs_of(layout, length, size, rank))


def take_runs(sequence: Tensor, group: Group, dim: int, runs: Callable[[int, int, int], Iterable[Run]]) -> Any:
    """The rows of `runs(length, size, rank)` of a sequence; with `VirtualRanks` a list."""
    transport = transport_of(group)
    dim = check_dim("sequence", sequence, dim)
    length, size = sequence.shape[dim], transport.size
    shards = [torch.cat(parts_of(sequence, runs(length, size, rank), dim), dim) for rank in transport.ranks]
    return unwrap_ranks(shards, isinstance(group, VirtualRanks))


@graph_break
def unshard_sequence(shard: Any, *, group: Group = None, layout: Layout = "contiguous", dim: int = 1) -> Any:
    """The whole sequence, on every rank, from the ranks' shards; the inverse of `shard_sequence`.

    Differentiable: as every rank has the whole, a shard's gradient is the sum of all ranks' gradients of it. `shard` is
    a tensor, or with `VirtualRanks` the list of all ranks' shards, and then so is the result.
    """
    check_layout(layout)
    transport = transport_of(group)
    shards = check_shards("shard", shard, transport.ranks)
    device = shards[0].device
    local = [one.movedim(check_dim("shard", one, dim), 0).contiguous() for one in shards]
    wanted = torch.is_grad_enabled() and any(one.requires_grad for one in shards)
    common = {"layout": layout, "gradients wanted": wanted}
    ranks = [(one.shape[:1], {"rest of the shape": list(one.shape[1:]), "dtype": one.dtype, **common}) for one in local]
    lengths = [n for (n,) in agreed("unshard_sequence", transport, device, ranks)]
    order = order_of(runs_of_all(layout, lengths), device)

    def forward(rank: int, mine: Tensor) -> Strategy[tuple[Tensor, ...]]:
        everyones = yield from all_gather(rank, mine, [(n, *mine.shape[1:]) for n in lengths])
        return (torch.cat(everyones)[order],)

    def backward(rank: int, inputs: Any, outputs: Any, grads: Any) -> Strategy[tuple[Tensor, ...]]:
        parts = torch.empty_like(grads[0]).index_copy_(0, order, grads[0]).split(lengths)
        return ((yield from reduce_scatter(rank, parts)),)

    wholes = [out.movedim(0, dim) for (out,) in differentiable(transport, forward, backward, [(x,) for x in local])]
    return unwrap_ranks(wholes, not isinstance(shard, Tensor))


def position_ids(
    length: int,
    *,
    group: Group = None,
    layout: Layout = "contiguous",
    cu_seqlens: Tensor | Sequence[int] | None = None,
    device: torch.device | str | None = None,
) -> Any:
    """The positions of this rank's rows in the sequence, int64, for rotary embeddings; with `VirtualRanks` a list.

    With `cu_seqlens` positions count within each packed sequence; rows past the last count on from its end.
    """
    check_int("length", length, 0, ValueError)
    whole = torch.arange(length, device=device)
    if cu_seqlens is not None:
        begins = torch.tensor(offsets_of(cu_seqlens, length)[:-1] or [0], device=device)
        whole = whole - begins[torch.bucketize(whole, begins, right=True) - 1]
    return shard_sequence(whole, group=group, layout=layout, dim=0)


def shift_labels(
    labels: Tensor, *, cu_seqlens: Tensor | Sequence[int] | None = None, dim: int = -1, ignore_index: int = -100
) -> Tensor:
    """Labels as the next token of the whole sequence, to be sharded after: a shard cannot see its neighbour's first.

    The last token of the sequence, with `cu_seqlens` of every packed one, predicts nothing: `ignore_index`.

    >>> shift_labels(torch.tensor([5, 6, 7, 8]), cu_seqlens=[0, 2, 4]).tolist()
    [6, -100, 8, -100]
    """
    dim = check_dim("labels", labels, dim)
    labels = labels.movedim(dim, -1)
    shifted = torch.full_like(labels, ignore_index)
    shifted[..., :-1] = labels[..., 1:]
    if cu_seqlens is not None:
        ends = [end - 1 for end in offsets_of(cu_seqlens, labels.shape[-1]) if end > 0]
        shifted[..., ends] = ignore_index
    return shifted.movedim(-1, dim)


def offsets_of(cu_seqlens: Tensor | Sequence[int], length: int | None = None) -> list[int]:
    """Cumulative lengths as ints, of a sequence of `length` if that is known; synchronises with an accelerator."""
    offsets = cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else list(cu_seqlens)
    if not offsets or offsets[0] != 0 or any(late < early for early, late in pairwise(offsets)):
        refuse("cu_seqlens", "0 first, and no value below the one before it", offsets)
    if length is not None and offsets[-1] > length:
        refuse("cu_seqlens", f"a last value of at most the {length} rows", offsets[-1])
    return offsets


def check_shards(name: str, given: Any, ranks: Sequence[int], optional: bool = False) -> list[Any]:
    """A tensor, or the list of all virtual ranks' tensors, as the list of this process's shards; if `optional`, a None
    for each."""
    if optional and given is None:
        return [None] * len(ranks)
    shards = [given] if isinstance(given, Tensor) else given
    if not isinstance(shards, (list, tuple)) or not all(isinstance(one, Tensor) for one in shards):
        refuse(name, "a torch.Tensor, or a list of one per virtual rank", type(given).__name__, error=TypeError)
    if len(shards) != len(ranks):
        hint = "A list, of all ranks' tensors, needs group=VirtualRanks(...)." if len(ranks) == 1 else ""
        refuse(name, f"one tensor for each of the {len(ranks)} ranks of this process", f"{len(shards)}", hint)
    if any(torch._C._functorch.is_functorch_wrapped_tensor(one) for one in shards):
        refuse(name, "a tensor outside of torch.func", "one of vmap, grad, ...", "Use autograd: .backward().")
    return list(shards)


def check_dim(name: str, tensor: Any, dim: int) -> int:
    """`dim`, counted from the first."""
    if not isinstance(tensor, Tensor):
        refuse(name, "a torch.Tensor", type(tensor).__name__, error=TypeError)
    if not -tensor.dim() <= dim < tensor.dim():
        refuse("dim", f"a dim of a tensor of shape {list(tensor.shape)}", dim)
    return dim % tensor.dim()
