"""Memory against length, for attention that writes its scores down and for attention that streams: measured here."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from stream_attention_tools.files import write_file
from stream_attention_tools.report import figures
from stream_attention_tools.report.figures import Plot, Point, Series

LENGTHS = (512, 1024, 2048, 4096, 8192)
HEAD_DIM = 64
NAMES = ("standard", "streaming")


def measure(lengths: Sequence[int] = LENGTHS) -> dict[str, Any]:
    """The most that torch holds beyond the inputs during a forward, and during a forward and backward."""
    import torch

    from stream_attention import __version__, attention
    from stream_attention_tools.testing import peak_bytes

    def standard(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        return (torch.softmax(query @ key.mT * HEAD_DIM**-0.5, -1) @ value).transpose(1, 2)

    ways: dict[str, Callable[..., torch.Tensor]] = dict(zip(NAMES, (standard, attention), strict=True))
    torch.set_num_threads(1)  # each thread has buffers of its own
    rows = []
    for length in lengths:
        for name, way in ways.items():
            inputs = [torch.randn(1, length, 1, HEAD_DIM) for _ in range(3)]
            wanting = [x.clone().requires_grad_() for x in inputs]
            ones = torch.ones(1, length, 1, HEAD_DIM)

            def forward(way: Any = way, inputs: Any = inputs) -> torch.Tensor:
                return way(*inputs)

            def training(way: Any = way, wanting: Any = wanting, ones: Any = ones) -> object:
                return torch.autograd.grad(way(*wanting), wanting, ones)

            forward(), training()  # what is cached for ever is not counted
            row = {"length": length, "way": name, "forward": peak_bytes(forward), "training": peak_bytes(training)}
            rows.append(row)
    return {
        "what": "bytes that torch holds at most beyond the inputs: forward; forward and backward, gradients included",
        "problem": {"B": 1, "H": 1, "D": HEAD_DIM, "dtype": "float32", "causal": False},
        "ways": {"standard": "softmax(Q K^T * D^-0.5) V in torch", "streaming": "stream_attention.attention"},
        "machine": {"device": "cpu", "threads": 1},
        "versions": {"torch": torch.__version__, "stream_attention": __version__},
        "date": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
        "command": "python -m tools.pictures --measure",
        "rows": rows,
    }


def write(path: Path) -> None:
    results = measure()
    rows = ",\n".join(f"    {json.dumps(row)}" for row in results.pop("rows"))
    write_file(path, f'{json.dumps(results, indent=2)[:-2]},\n  "rows": [\n{rows}\n  ]\n}}\n')


def draw(results: dict[str, Any], what: str) -> Plot:
    def series(name: str) -> Series:
        sizes = [(row["length"], row[what] / 2**20) for row in results["rows"] if row["way"] == name]
        return Series(name, [Point.exact(length, size) for length, size in sizes])

    title = {"forward": "Memory of a forward", "training": "Memory, forward and backward"}[what]
    return figures.lines(
        title,
        f"MiB beyond the inputs, one head of {results['problem']['D']}, fp32, on a CPU",
        [series(name) for name in NAMES],
        ("streaming", "standard"),
        (),
        "{:g}".format,
        top=1,
        log=True,
    )
