"""Flags and refusals that several commands share."""

from __future__ import annotations

import errno
import os
import sys
from argparse import ArgumentTypeError, BooleanOptionalAction, Namespace
from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from stream_attention_tools.files import check_writable

from ..bench import grid
from ..bench.grid import DTYPES
from ..bench.providers import Provider
from ..bench.suites import Cell
from ..cluster.traffic import Workload
from . import values
from .command import Refused

KV_HEADS = "KV heads, which divide the heads; default: as many"


def add_problem(group: Any, batch: int) -> None:
    """The flags of one problem; each is None unless it is given."""
    add = group.add_argument
    add("--batch", type=values.count, metavar="N", help=f"batch entries; default {batch}")
    add("--heads", type=values.count, metavar="N", help="query heads; default 8")
    add("--kv-heads", type=values.count, metavar="N", help=KV_HEADS)
    add("--dim", type=values.count, metavar="N", help="head dim; default 64")
    dtypes = f"{', '.join(DTYPES)}; default fp16 on cuda, fp32 on cpu"
    add("--dtype", type=_dtype, metavar="DTYPE", help=dtypes)
    causal = "a query sees the keys up to its own position, aligned to the last key; default: causal"
    add("--causal", action=BooleanOptionalAction, help=causal)
    add("--dropout", type=values.probability, metavar="P", help="dropout of the probabilities; default 0")


def _dtype(text: str) -> str:
    if text not in DTYPES:
        why = ", which the reference computes in: nothing is left to compare it with" if text == "fp64" else ""
        raise ArgumentTypeError(f"expected one of {', '.join(DTYPES)}; got {text}{why}")
    return text


def add_providers(parser: Any) -> None:
    who = "who computes, by the names of stream-attention-benchmark --list; one that cannot is an error. "
    default = "Default: ours and the strongest baseline there is"
    parser.add_argument("--providers", nargs="+", metavar="NAME", help=who + default)


def add_device(parser: Any) -> None:
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is one, else cpu")


def add_fa3(parser: Any) -> None:
    what = "folder with FlashAttention-3 packed as fa3.so.xz and libcudart.so.12; "
    without = "without it, flash_attn_interface is used where it is installed"
    parser.add_argument("--fa3", type=Path, metavar="DIR", help=what + without)


def add_workload(add: Callable[..., Any], length: str, rows: int, heads: int, dim: int) -> None:
    """The flags of a call over a sequence that ranks share, without its dtype."""
    add(length, type=values.count, default=rows, metavar="N", help="rows of the whole sequence; default %(default)s")
    add("--heads", type=values.count, default=heads, metavar="N", help="query heads; default %(default)s")
    add("--kv-heads", type=values.count, metavar="N", help=KV_HEADS)
    add("--dim", type=values.count, default=dim, metavar="N", help="head dim; default %(default)s")
    add("--batch", type=values.count, default=1, metavar="N", help="batch entries; default %(default)s")
    add("--causal", action=BooleanOptionalAction, default=True, help="default: causal")
    add("--backward", action="store_true", help="a training step: forward and backward")


def workload(options: Namespace, length: int, dtype: torch.dtype) -> Workload:
    """What the flags of `add_workload` say."""
    heads, kv_heads = options.heads, options.kv_heads or options.heads
    return Workload(length, heads, kv_heads, options.dim, options.batch, options.causal, dtype, options.backward)


def problem(options: Namespace, device: str) -> dict[str, Any]:
    """The flags of `add_problem` that were given, as fields of a `Grid`."""
    given = {name: getattr(options, name) for name in ("batch", "heads", "dim", "dtype", "causal", "dropout")}
    fields = {name: value for name, value in given.items() if value is not None}
    heads = fields.get("heads", 8)
    kv_heads = options.kv_heads or heads
    if heads % kv_heads:
        raise Refused(f"--kv-heads: expected a divisor of --heads {heads}; got {kv_heads}")
    fields.setdefault("dtype", "fp16" if device == "cuda" else "fp32")
    return fields | {"kv_heads": kv_heads, "device": device}


def device(asked: str | None) -> str:
    if asked == "cuda" and not torch.cuda.is_available():
        raise Refused("--device cuda: torch finds no CUDA device here")
    return asked or ("cuda" if torch.cuda.is_available() else "cpu")


def fa3_folder(folder: Path | None, device: str) -> Path | None:
    if folder is None:
        return None
    if device != "cuda":
        raise Refused("--fa3: FlashAttention-3 runs on Hopper GPUs, and the device is the cpu")
    for name in ("fa3.so.xz", "libcudart.so.12"):
        if not (folder / name).is_file():
            raise Refused(f"--fa3: expected a folder with fa3.so.xz and libcudart.so.12; {folder} has no {name}")
    return folder


def named(names: Iterable[str], providers: dict[str, Provider]) -> list[str]:
    """Providers by name, where "sdpa-flash" is as good as "sdpa flash"."""
    found = []
    for name in names:
        plain = name.lower().replace("-", " ").replace("_", " ")
        if plain not in providers:
            known = ", ".join(known.replace(" ", "-") for known in providers)
            raise Refused(f"--providers: expected some of {known}; got {name}")
        found.append(plain)
    return list(dict.fromkeys(found))


def cells_with(asked: Sequence[str], providers: dict[str, Provider], problems: grid.Grid) -> list[Cell]:
    """A grid's cells with the providers that --providers names; one that cannot compute a cell is refused."""
    names = named(asked, providers)
    cells = problems.cells(*grid.split(names, providers))
    for name in names:
        if (reason := grid.why_not_all(name, providers, cells)) is not None:
            raise Refused(f"--providers {name.replace(' ', '-')}: {reason}")
    return cells


def given(options: Namespace, names: Iterable[str]) -> str:
    """The flags among `names` that were given, as they are written."""
    return ", ".join(f"--{name.replace('_', '-')}" for name in names if getattr(options, name) is not None)


def writable_file(flag: str, path: Path | None) -> None:
    """Refuse a file that could not be written; folders around it are made."""
    if path is None:
        return
    try:
        check_writable(path)
    except OSError as error:
        raise Refused(f"{flag} {path} cannot be written: {error.strerror}") from None


def writable_folder(flag: str, folder: Path | None, name: str) -> None:
    """Make a folder for plots and those around it; refuse it where a file of this name could not be written into it."""
    if folder is not None and find_spec("matplotlib") is None:
        raise Refused(f"{flag}: expected matplotlib, which draws; got none. Type: pip install matplotlib")
    if folder is not None and folder.exists() and not folder.is_dir():
        raise Refused(f"{flag} {folder} cannot be written: {os.strerror(errno.ENOTDIR)}")
    writable_file(flag, None if folder is None else folder / name)


def write_error(write: Callable[..., object], *arguments: Any) -> str | None:
    """Write a file, and return why that failed: what was measured is printed all the same, and the old file stays."""
    try:
        write(*arguments)
    except OSError as error:
        return error.strerror or str(error)
    return None


def report_unwritten(outcomes: dict[Path, str | None]) -> bool:
    """Print which files could not be written, below what was printed; return whether there are any."""
    failed = {path: why for path, why in outcomes.items() if why is not None}
    sys.stdout.flush()
    for path, why in failed.items():
        print(f"{path} cannot be written: {why}; what was there before is as it was", file=sys.stderr)
    return bool(failed)


def apart(files: dict[str, Path | None]) -> None:
    """Refuse two flags that name one file, or a file where the other needs a folder."""
    known: dict[Path, str] = {}
    for flag, path in files.items():
        if path is None:
            continue
        where = path.resolve()
        for other, its in known.items():
            if where == other or where in other.parents or other in where.parents:
                raise Refused(f"{flag}: expected a file apart from that of {its}; got {path} beside {other}")
        known[where] = flag
