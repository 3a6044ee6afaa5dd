"""CUDA graphs of calls: what a call takes on the device when the host does nothing for it but start a graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


@torch.no_grad()
def captured(calls: Sequence[Callable[[], object]], allowed: float) -> torch.cuda.CUDAGraph:
    """A CUDA graph of the calls, one after the other, as the layers of a model that decodes are.

    Its replay must write the results that the calls had before, wherever they are tensors, up to `allowed`; a
    RuntimeError says if it does not.
    """
    here, aside = torch.cuda.current_stream(), torch.cuda.Stream()
    aside.wait_stream(here)
    with torch.cuda.stream(aside):  # what is done once, as compiling, cannot be captured
        for _ in range(2):
            expected = [_first(call()) for call in calls]
        expected = [None if one is None else one.clone() for one in expected]
    here.wait_stream(aside)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            written = [_first(call()) for call in calls]
    finally:
        torch.cuda.set_stream(here)  # a capture that fails stays in its own
    for _ in range(2):  # the second finds what the first has left behind
        for one in written:
            if one is not None:
                one.fill_(torch.nan)
        graph.replay()
    torch.cuda.synchronize()
    for one, before in zip(written, expected, strict=True):
        if one is not None and before is not None and not float((one - before).abs().max()) <= allowed:
            raise RuntimeError(f"replayed, its result is off by {float((one - before).abs().max()):.2e}")
    return graph


def _first(returned: object) -> Tensor | None:
    """The output among what a call returns; some return the LSE too, some nothing."""
    if isinstance(returned, (tuple, list)):
        returned = returned[0]
    return returned if isinstance(returned, Tensor) else None
