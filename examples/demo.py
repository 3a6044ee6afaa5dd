"""make demo: exact attention on this machine's CPU, checked against fp64, timed beside torch, drawn in out/demo.png.

python examples/demo.py [--out out/demo.png] [--longest 8192]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from stream_attention import attention, explain
from stream_attention.backends.reference import attention as reference
from stream_attention_tools.files import check_writable, save_figure
from stream_attention_tools.testing.inputs import Case, make
from stream_attention_tools.testing.memory import peak_bytes
from stream_attention_tools.testing.tolerance import check_case

PICTURE = Path("out/demo.png")
LENGTHS = (256, 512, 1024, 2048, 4096, 8192)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

SHAPE = {"B": 1, "Tq": 256, "Tk": 256, "Hq": 8, "Hkv": 8, "D": 64, "Dv": 64}
CASES = {
    "causal": Case(**SHAPE, causal=True),
    "causal, 8 heads on 2 KV heads": Case(**SHAPE | {"Hkv": 2}, causal=True),
    "sliding window + sink": Case(**SHAPE, causal=True, window=(64, 0), sink=True),
    "mask + softcap, bf16": Case(**SHAPE, mask=(1, 1, 256, 256), softcap=20.0, dtype=torch.bfloat16),
    "everything at once, bf16": Case(
        **SHAPE | {"Tq": 200, "Hkv": 2, "Dv": 32},
        dtype=torch.bfloat16,
        causal=True,
        window=(128, 0),
        bias=(8, 1, 256),
        alibi="H",
        sink=True,
        softcap=20.0,
        dropout_p=0.1,
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=picture, default=PICTURE, metavar="FILE", help=f"the picture; default {PICTURE}")
    parser.add_argument(
        "--longest", type=int, choices=LENGTHS, default=LENGTHS[-1], help="where part 3 ends; default %(default)s"
    )
    options = parser.parse_args()
    torch.manual_seed(0)
    print("1. One call: causal, 8 query heads on 2 KV heads, ALiBi, dropout; forward and backward.\n")
    query = torch.randn(1, 1024, 8, 64, requires_grad=True)
    key, value = torch.randn(2, 1, 1024, 2, 64).unbind()
    slopes = 2.0 ** -torch.arange(1.0, 9.0)
    out = attention(query, key, value, causal=True, alibi_slopes=slopes, dropout_p=0.1, seed=7)
    out.square().mean().backward()
    print(f"out {list(out.shape)}, gradient {list(query.grad.shape)}. Why it ran as it ran:")
    explain(query.detach(), key, value, causal=True, alibi_slopes=slopes, dropout_p=0.1, seed=7)

    print("\n2. Errors against fp64. Allowed is twice the error of plain torch in the same dtype, plus rounding.")
    print("   The LSE and all gradients are checked likewise; 'worst' is the largest share used of what is allowed.\n")
    show("problem", "error", "plain torch", "allowed", "worst", "time", "SDPA")
    for name, case in CASES.items():
        report = check_case(case)  # raises if anything is wrong by more than it may be
        query, key, value, arguments = make(case)
        plain = {name: given for name, given in arguments.items() if name != "deterministic"}
        exact = reference.attention(query, key, value, **plain)[0]
        eager = reference.attention(query, key, value, **plain, compute_dtype=case.dtype)[0]
        show(
            name,
            f"{report.errors['out']:.1e}",
            f"{float((eager.double() - exact).abs().max()):.1e}",
            f"{report.bounds['out']:.1e}",
            f"{report.worst:.0%}",
            f"{best_ms(lambda q=query, k=key, v=value, o=arguments: attention(q, k, v, **o)):.2f} ms",
            sdpa_time(case, query, key, value),
        )

    print("\n3. Longer sequences, causal + ALiBi, one head of 64: streamed, and dense by plain torch.\n")
    show("length", "error", "torch error", "memory", "torch memory")
    measured: dict[str, list[Growth]] = {name: [] for name in DTYPES}
    for name, dtype in DTYPES.items():
        for length in LENGTHS[: LENGTHS.index(options.longest) + 1]:
            one = grow(length, dtype)
            measured[name].append(one)
            show(f"{length} {name}", f"{one.error:.1e}", f"{one.dense_error:.1e}", mib(one.bytes), mib(one.dense_bytes))
    draw(measured, options.out)
    print("Next: `make test` tests it, `make bench-cpu` measures this machine, docs/api.md says what else it takes.")


def picture(text: str) -> Path:
    path = Path(text)
    try:
        check_writable(path)
    except OSError as error:
        raise argparse.ArgumentTypeError(
            f"expected a file that can be written; got {text!r}: {error.strerror}"
        ) from None
    return path


class Growth(NamedTuple):
    """Error against fp64 and peak memory at one length, streamed and dense."""

    length: int
    error: float
    dense_error: float
    bytes: int
    dense_bytes: int


def grow(length: int, dtype: torch.dtype) -> Growth:
    """Compare the streamed with the dense computation at one length."""
    query, key, value = torch.randn(3, 1, length, 1, 64).to(dtype)
    slopes = torch.tensor([0.0625])
    rows = torch.randperm(length)[:128]  # fp64 on some rows of a long sequence says as much as on all
    exact = reference.attention(query[:, rows], key, value, causal=True, alibi_slopes=slopes, q_positions=rows)[0]

    def measure(call: Callable[[], Tensor]) -> tuple[float, int]:
        results: list[Tensor] = []
        size = peak_bytes(lambda: results.append(call()))
        return float((results[0][:, rows].double() - exact).abs().max()), size

    error, size = measure(lambda: attention(query, key, value, causal=True, alibi_slopes=slopes))
    dense_error, dense_size = measure(lambda: dense_attention(query, key, value, slopes))
    return Growth(length, error, dense_error, size, dense_size)


def dense_attention(query: Tensor, key: Tensor, value: Tensor, slopes: Tensor) -> Tensor:
    """What one writes without a library: every score exists at once."""
    query, key, value = (t.transpose(1, 2) for t in (query, key, value))
    positions = torch.arange(query.shape[2])
    ahead = positions[:, None] - positions
    scores = query @ key.mT * query.shape[-1] ** -0.5 - (slopes[:, None, None] * ahead.abs()).to(query.dtype)
    return (torch.softmax(scores.masked_fill(ahead < 0, -torch.inf), -1) @ value).transpose(1, 2)


def sdpa_time(case: Case, query: Tensor, key: Tensor, value: Tensor) -> str:
    """torch's own time where it does the same problem."""
    if case.window or case.mask or case.bias or case.alibi or case.sink or case.softcap or case.dropout_p:
        return "cannot"
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    call = lambda: F.scaled_dot_product_attention(q, k, v, is_causal=case.causal, enable_gqa=True)  # noqa: E731
    return f"{best_ms(call):.2f} ms"


def best_ms(call: Callable[[], object], repeats: int = 7) -> float:
    def once() -> float:
        began = time.perf_counter()
        call()
        return (time.perf_counter() - began) * 1e3

    return min(once() for _ in range(repeats))


def draw(measured: dict[str, list[Growth]], path: Path) -> None:
    """Two panels over the length: error against fp64, and peak memory."""
    try:
        import matplotlib
    except ImportError:
        print("(matplotlib is not installed: no picture)")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import FixedLocator, NullLocator

    lengths = [row.length for row in measured["fp32"]]
    ours, theirs = "#0b6e8f", "#c8553d"
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.8), layout="constrained")
    for name, marker in (("bf16", "s"), ("fp32", "o")):
        rows = measured[name]
        dense = {"color": theirs, "lw": 2, "ls": "--", "marker": marker}
        left.plot(lengths, [row.dense_error for row in rows], **dense, label=f"dense eager, {name}")
        left.plot(
            lengths, [row.error for row in rows], color=ours, lw=2, marker=marker, label=f"StreamAttention, {name}"
        )
    left.set_title("Largest error against fp64")
    left.legend(frameon=False, loc="center right")
    rows = measured["fp32"]
    right.plot(
        lengths, [row.dense_bytes / 2**20 for row in rows], color=theirs, lw=2, ls="--", marker="o", label="dense eager"
    )
    right.plot(lengths, [row.bytes / 2**20 for row in rows], color=ours, lw=2, marker="o", label="StreamAttention")
    right.set_title("Peak memory of a call, MiB (fp32)")
    right.legend(frameon=False, loc="upper left")
    last = rows[-1]
    right.annotate(
        f"{last.dense_bytes / last.bytes:.0f}× less",
        (last.length, last.bytes / 2**20),
        (-6, 10),
        textcoords="offset points",
        ha="right",
        color=ours,
    )
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.xaxis.set_major_locator(FixedLocator(lengths))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xticklabels([str(length) for length in lengths])
        axes.set_xlabel("sequence length")
        axes.grid(True, which="major", alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"attention(causal=True, alibi_slopes=...), one head of 64, CPU, torch {torch.__version__}")
    save_figure(figure, path, dpi=130)
    print(f"\nThe picture: {path}")


def mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"


def show(first: str, *rest: str) -> None:
    print(f"   {first:32}" + "".join(f"{word:>13}" for word in rest).rstrip(), flush=True)


if __name__ == "__main__":
    main()
