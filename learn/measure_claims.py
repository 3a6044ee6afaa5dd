"""The claims of the course that this one replaces, measured: memory and speed of standard and of streaming attention.

    python learn/measure_claims.py --device cpu --out benchmarks/results/cpu/claims.json     about half a minute
    python learn/measure_claims.py --device cuda --out benchmarks/results/h200/claims.json   on an H200, 70 GB of memory
    python learn/measure_claims.py --page                                                    writes learn/claims.md anew

Standard attention is softmax(q k^T * scale) v in plain torch, as a textbook has it: the whole matrix exists. Streaming
is `stream_attention.attention` with the backend that it picks.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stream_attention import attention, explain
from stream_attention_tools.bench.results import conditions, save
from stream_attention_tools.bench.timing import CLOCKS, Clock, Latency, interleaved, paired_ratio
from stream_attention_tools.files import write_file
from stream_attention_tools.testing.memory import peak_bytes

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "learn" / "claims.md"
FILES = {"cpu": ROOT / "benchmarks/results/cpu/claims.json", "cuda": ROOT / "benchmarks/results/h200/claims.json"}
DIM = 64
LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384)
TOKENS = 16384  # batch * length of the timed calls on a GPU
SPEED_CLAIMS = (("n < 1024", "comparable"), ("1024 < n < 4096", "2-3x"), ("n > 4096", "5-10x"))


def standard(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """`[B, T, H, D]`, with the matrix of all weights."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return (torch.softmax(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5, dim=-1) @ v).transpose(1, 2)


def streaming(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(q, k, v)


WAYS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {"standard": standard, "streaming": streaming}


def inputs(device: str, dtype: torch.dtype, batch: int, length: int, heads: int) -> tuple[Tensor, ...]:
    made = torch.randn(3, batch, length, heads, DIM, device=device, dtype=dtype)
    return tuple(made)


def check(q: Tensor, k: Tensor, v: Tensor) -> dict[str, float]:
    """Largest error of each way against fp64, on 64 rows of the first head."""
    exact = standard(*(x[:1, :, :1].double() for x in (q[:, :64], k, v)))
    return {name: (way(q, k, v)[:1, :64, :1].double() - exact).abs().max().item() for name, way in WAYS.items()}


def memory(device: str, length: int = 4096) -> list[dict[str, Any]]:
    """What one head needs beyond its inputs."""
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        q, k, v = inputs(device, dtype, 1, length, 1)
        peaks = {}
        for name, way in WAYS.items():
            way(q, k, v)  # what is kept for ever is not counted
            peaks[name] = peak_bytes(partial(way, q, k, v), device)
        rows.append(
            {
                "length": length,
                "dtype": str(dtype)[6:],
                "qkv_bytes": 3 * q.numel() * q.element_size(),
                "matrix_bytes": length * length * q.element_size(),
                "peak_bytes": peaks,
            }
        )
    return rows


def call(way: Callable[..., Tensor], leaves: tuple[Tensor, ...], grad: Tensor, number: int) -> None:
    """One call, with its backward if gradients are wanted."""
    out = way(*leaves)
    if out.requires_grad:
        torch.autograd.grad(out, leaves, grad)


def backend_of(leaves: tuple[Tensor, ...]) -> str:
    """What `explain` says runs, such as "gluon: 3 warpgroups of ..."."""
    said = StringIO()
    with redirect_stdout(said):
        explain(*leaves)
    return (
        next(line for line in said.getvalue().splitlines() if line.startswith("backend"))
        .removeprefix("backend")
        .strip()
    )


def speed(device: str) -> list[dict[str, Any]]:
    """Both ways in turn, forward, and on a GPU also with the backward."""
    gpu = device == "cuda"
    dtype, clock = (torch.bfloat16, "events") if gpu else (torch.float32, "cpu")
    rows = []
    for length in LENGTHS if gpu else LENGTHS[:-1]:
        batch, heads = (TOKENS // length, 32) if gpu else (1, 2)
        for direction in ("forward", "forward+backward") if gpu else ("forward",):
            leaves = inputs(device, dtype, batch, length, heads)
            row: dict[str, Any] = {"length": length, "direction": direction, "batch": batch, "heads": heads}
            row |= {"dtype": str(dtype)[6:], "errors": check(*leaves), "ran": backend_of(leaves)}
            assert max(row["errors"].values()) < (0.02 if gpu else 1e-5), f"wrong, so not timed: {row}"
            leaves = tuple(x.requires_grad_(direction != "forward") for x in leaves)
            calls = {name: partial(call, way, leaves, torch.randn_like(leaves[0])) for name, way in WAYS.items()}
            times = interleaved(calls, clock, repeats=12 if gpu else 25, warmup=2, budget_s=4.0)  # type: ignore[arg-type]
            row["ms"] = {name: Latency.of(its).median for name, its in times.items()}
            row["speedup"] = 1 / paired_ratio(times["streaming"], times["standard"])
            rows.append(row)
            print(f"{length:6} {direction:17} {row['speedup']:.2f}x", flush=True)
    return rows


def measure(device: str, out: Path) -> None:
    if device == "cpu":
        torch.set_num_threads(1)  # CPU time of one thread: a busy machine hardly changes it
    torch.manual_seed(0)
    clock: Clock = "events" if device == "cuda" else "cpu"
    found = {"suite": "claims", **conditions(device), "timing": CLOCKS[clock]}
    found |= {"memory": memory(device), "speed": speed(device)}
    save(found, out)
    print(f"written: {out}")


def megabytes(count: float) -> str:
    return f"{count / 1e6:.1f} MB"


def results() -> dict[str, dict[str, Any]]:
    return {device: json.loads(file.read_text()) for device, file in FILES.items() if file.exists()}


def where(device: str, found: dict[str, Any]) -> str:
    commit = (found["commit"]["hash"] or "unknown")[:12] + (" with changes" if found["commit"]["dirty"] else "")
    threads = f", {found['machine']['threads']} thread" if device == "cpu" else ""
    name = FILES[device].relative_to(ROOT).as_posix()
    versions = f"torch {found['versions']['torch']}, {found['date'][:10]}, commit {commit}"
    return f"[`{name}`](../{name}): {found['machine']['name']}{threads}, {versions}; {found['timing']}."


def memory_table() -> str:
    lines = ["| at n = 4096, d = 64, one head | claimed | " + " | ".join(_titles("memory")) + " |"]
    lines.append("|---" * (2 + len(_titles("memory"))) + "|")
    claims = {
        "the matrix of weights": ("~67 MB", lambda row: megabytes(row["matrix_bytes"])),
        "Q, K and V": ("~1 MB", lambda row: megabytes(row["qkv_bytes"])),
        "most that standard attention held beyond them": ("", lambda row: megabytes(row["peak_bytes"]["standard"])),
        "most that streaming attention held beyond them": ("", lambda row: megabytes(row["peak_bytes"]["streaming"])),
    }
    found = results()
    for name, (claimed, cell) in claims.items():
        cells = []
        for device in FILES:
            for place in range(2):
                cells.append(cell(found[device]["memory"][place]) if device in found else "not measured yet")
        lines.append(f"| {name} | {claimed} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _titles(kind: str) -> list[str]:
    machines = {"cpu": "CPU", "cuda": "H200"}
    if kind == "memory":
        return [f"{machine}, {dtype}" for machine in machines.values() for dtype in ("fp32", "bf16")]
    return ["CPU, fp32, forward", "H200, bf16, forward", "H200, bf16, forward+backward"]


def speed_table() -> str:
    lines = ["| n | claimed | " + " | ".join(_titles("speed")) + " |", "|---" * 5 + "|"]
    found = results()
    for length in LENGTHS:
        claimed = SPEED_CLAIMS[0 if length < 1024 else 1 if length <= 4096 else 2][1]
        cells = []
        for device, direction in (("cpu", "forward"), ("cuda", "forward"), ("cuda", "forward+backward")):
            rows = [
                row["speedup"]
                for row in found.get(device, {}).get("speed", ())
                if (row["length"], row["direction"]) == (length, direction)
            ]
            cells.append(f"{rows[0]:.1f}x" if rows else "" if device in found else "not measured yet")
        lines.append(f"| {length} | {claimed} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def page(text: str) -> str:
    """The page with its tables as the results files have them."""
    found = results()
    tables = {
        "memory": memory_table(),
        "speed": speed_table(),
        "where": "\n".join(f"- {where(device, its)}" for device, its in found.items()),
    }
    for name, table in tables.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
        before, _, rest = text.partition(begin)
        text = before + begin + table + "\n" + end + rest.partition(end)[2]
    return text


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="the results file (default: that of the device)")
    parser.add_argument("--page", action="store_true", help="measure nothing; write the tables of claims.md anew")
    flags = parser.parse_args(argv)
    if flags.page:
        write_file(PAGE, page(PAGE.read_text()))
    else:
        measure(flags.device, flags.out or FILES[flags.device])


if __name__ == "__main__":
    main()
