"""The kernels of steps 06 and 12 on an H200, beside SDPA and the kernels of this library.

    python learn/measure_lessons.py --out benchmarks/results/h200/lessons.json    on a Hopper GPU, about half a minute
    python learn/measure_lessons.py --page                                        writes the tables of the texts anew

Everybody is compared with fp64 first, on 64 queries of one head, and then runs in turn with the others.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import measured
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from stream_attention import attention
from stream_attention_tools.bench.results import conditions, save
from stream_attention_tools.bench.timing import CLOCKS, Latency, interleaved
from stream_attention_tools.files import write_file

LEARN = Path(__file__).resolve().parent
FILE = measured.H200 / "lessons.json"
PAGES = {"06": LEARN / "06_flash_forward" / "README.md", "12": LEARN / "12_hopper" / "README.md"}
TOKENS, HEADS, DIM, LENGTHS = 16384, 16, 128, (512, 2048, 8192)
"""Of step 06: as in benchmarks/results/h200/forward.json."""
HOPPER_LENGTHS, HOPPER_DIM = (16384, 65536), 64
"""Of step 12, whose kernel has one head."""
ALLOWED = 0.02  # of bf16, against fp64


def step(name: str, file: str) -> ModuleType:
    """A program of a step, which finds its neighbours in its own folder."""
    folder = LEARN / name
    sys.path.insert(0, str(folder))
    spec = importlib.util.spec_from_file_location(f"lesson_{file}", folder / f"{file}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)


def timed(ways: dict[str, Callable[[], Tensor]], inputs: tuple[Tensor, ...], repeats: int) -> dict[str, Any]:
    """Error, milliseconds and TFLOP/s of each way to compute attention of `[B, T, H, D]`."""
    q, k, v = (x[0, :, 0].double() for x in inputs)
    exact = torch.softmax(q[:64] @ k.T * q.shape[-1] ** -0.5, -1) @ v
    batch, length, heads, dim = inputs[0].shape
    found: dict[str, Any] = {"length": length, "batch": batch, "heads": heads, "dim": dim, "errors": {}}
    for name, way in ways.items():
        got = way()
        got = got[0, :64, 0] if got.dim() == 4 else got[:64]
        found["errors"][name] = (got.double() - exact).abs().max().item()
        assert found["errors"][name] < ALLOWED, f"wrong, so not timed: {name}, {found}"
    calls = {name: (lambda n, way=way: way()) for name, way in ways.items()}
    samples = interleaved(calls, "events" if inputs[0].is_cuda else "wall", repeats, warmup=3)
    found["ms"] = {name: Latency.of(its).median for name, its in samples.items()}
    flop = 4 * batch * heads * length * length * dim
    return found | {"tflops": {name: flop / ms / 1e9 for name, ms in found["ms"].items()}}


def flash_forward(repeats: int) -> list[dict[str, Any]]:
    flash = step("06_flash_forward", "flash")
    rows = []
    for length in LENGTHS:
        inputs = tuple(torch.randn(3, TOKENS // length, length, HEADS, DIM, device="cuda", dtype=torch.bfloat16))
        ways = {
            "this kernel": lambda x=inputs: flash.flash_attention(*x, 128, 64)[0],
            "triton": lambda x=inputs: attention(*x, backend="triton"),
            "sdpa flash": lambda x=inputs: sdpa(*x),
        }
        rows.append(timed(ways, inputs, repeats))
    return rows


def hopper(repeats: int) -> list[dict[str, Any]]:
    gluon = step("12_hopper", "flash_gluon")
    rows = []
    for length in HOPPER_LENGTHS:
        inputs = tuple(torch.randn(3, 1, length, 1, HOPPER_DIM, device="cuda", dtype=torch.bfloat16))
        q, k, v = (x[0, :, 0] for x in inputs)
        ways = {order: lambda o=order, x=(q, k, v): gluon.attention(*x, o) for order in gluon.ORDERS}
        ways |= {name: lambda b=name, x=inputs: attention(*x, backend=b) for name in ("triton", "gluon")}
        rows.append(timed(ways, inputs, repeats))
    return rows


def measure(out: Path, repeats: int = 25) -> None:
    torch.manual_seed(0)
    found = {"suite": "lessons", **conditions("cuda"), "timing": CLOCKS["events"], "repeats": repeats}
    found |= {"06": flash_forward(repeats), "12": hopper(repeats)}
    save(found, out)
    print("\n\n".join(tables(found).values()))


def tables(found: dict[str, Any]) -> dict[str, str]:
    """What stands in the text of each step."""
    where = f"{found['machine']['name']}, torch {found['versions']['torch']}, {found['date'][:10]}"
    file = "[`lessons.json`](../../benchmarks/results/h200/lessons.json)"
    first = [
        f"Measured so ({file}: {where}; bf16, {HEADS} heads of {DIM}, 16k tokens in all, no mask), in milliseconds:",
        "",
        "| length | this kernel | `triton` of this library | SDPA's flash kernel |",
        "|---|---|---|---|",
    ]
    for row in found["06"]:
        ms = (row["ms"][name] for name in ("this kernel", "triton", "sdpa flash"))
        first.append(f"| {row['length']} | {' | '.join(f'{one:.3f}' for one in ms)} |")
    names = list(found["12"][0]["tflops"])
    second = [
        f"Its speed ({file}: {where}; bf16, one head of {HOPPER_DIM}, no mask), in TFLOP/s; the last two are the",
        "kernels of this library on the same problem:",
        "",
        f"| length | {' | '.join(f'`{one}`' if one in ('triton', 'gluon') else one for one in names)} |",
        f"|{'---|' * (1 + len(names))}",
    ]
    for row in found["12"]:
        speeds = (f"{row['tflops'][name]:.0f}" for name in names)
        second.append(f"| {row['length']} | {' | '.join(speeds)} |")
    return {"06": "\n".join(first), "12": "\n".join(second)}


def page(text: str, table: str) -> str:
    """A text with its figures as the results file has them."""
    begin, end = "<!-- measured -->\n", "<!-- /measured -->"
    before, marked, rest = text.partition(begin)
    assert marked, "the text has no place for what was measured"
    return before + begin + table + ("\n" if table else "") + end + rest.partition(end)[2]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=FILE, help="the results file")
    parser.add_argument("--page", action="store_true", help="measure nothing; write the tables of the texts anew")
    flags = parser.parse_args(argv)
    if not flags.page:
        return measure(flags.out)
    for name, table in tables(measured.results("lessons")).items():
        write_file(PAGES[name], page(PAGES[name].read_text(), table))
    return None


if __name__ == "__main__":
    main()
