"""Flags and refusals that the benchmark and the accuracy command share."""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from stream_attention.files import check_writable

from ..bench.grid import DTYPES
from ..bench.providers import Provider
from . import values


class Refused(Exception):
    """A command line that cannot be run; the message says why, and the exit code is 2."""


def exit_code(prog: str, run: Callable[[], int]) -> int:
    """What a command returns: its own exit code, 2 where it was refused, 130 where it was interrupted."""
    try:
        return run()
    except Refused as refused:
        print(f"{prog}: {refused}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{prog}: interrupted; its files are complete or unchanged", file=sys.stderr)
        return 130


def about(docstring: str | None) -> str:
    """A command's description: its module's docstring without its name."""
    text = (docstring or "").split(": ", 1)[1]
    return text[0].upper() + text[1:]


def add_problem(group: Any, batch: int) -> None:
    """The flags of one problem; each is None unless it is said."""
    group.add_argument("--batch", type=values.count, metavar="N", help=f"batch entries; default {batch}")
    group.add_argument("--heads", type=values.count, metavar="N", help="query heads; default 8")
    group.add_argument(
        "--kv-heads", type=values.count, metavar="N", help="KV heads, which divide the heads; default: as many"
    )
    group.add_argument("--dim", type=values.count, metavar="N", help="head dim; default 64")
    group.add_argument(
        "--dtype", type=_dtype, metavar="DTYPE", help=f"{', '.join(DTYPES)}; default fp16 on cuda, fp32 on cpu"
    )
    group.add_argument(
        "--causal",
        action=argparse.BooleanOptionalAction,
        help="a query sees the keys up to its own position, aligned to the last key; default: causal",
    )
    group.add_argument(
        "--dropout", type=values.probability, metavar="P", help="dropout of the probabilities; default 0"
    )


def _dtype(text: str) -> str:
    if text not in DTYPES:
        why = ", which the reference computes in: nothing is left to compare it with" if text == "fp64" else ""
        raise argparse.ArgumentTypeError(f"expected one of {', '.join(DTYPES)}; got {text}{why}")
    return text


def add_providers(parser: Any) -> None:
    parser.add_argument(
        "--providers",
        nargs="+",
        metavar="NAME",
        help="who computes, by the names of stream-attention-benchmark --list; one that cannot is an error. "
        "Default: ours and the strongest baseline there is",
    )


def add_device(parser: Any) -> None:
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is one, else cpu")


def add_fa3(parser: Any) -> None:
    parser.add_argument(
        "--fa3",
        type=Path,
        metavar="DIR",
        help="folder with FlashAttention-3 packed as fa3.so.xz and libcudart.so.12; "
        "without it, flash_attn_interface is used where it is installed",
    )


def problem(options: argparse.Namespace, device: str) -> dict[str, Any]:
    """What the flags of `add_problem` say, without those that were not said, as fields of a `Grid`."""
    said = {name: getattr(options, name) for name in ("batch", "heads", "dim", "dtype", "causal", "dropout")}
    fields = {name: value for name, value in said.items() if value is not None}
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


def writable_file(flag: str, path: Path | None) -> None:
    """Refuse a file that could not be written; folders around it are made."""
    if path is None:
        return
    try:
        check_writable(path)
    except OSError as error:
        raise Refused(f"{flag} {path} cannot be written: {error.strerror}") from None


def writable_folder(flag: str, folder: Path | None, name: str) -> None:
    """Make a folder and those around it, and refuse it where a file of this name could not be written into it."""
    if folder is not None and folder.exists() and not folder.is_dir():
        raise Refused(f"{flag} {folder} cannot be written: {os.strerror(errno.ENOTDIR)}")
    writable_file(flag, None if folder is None else folder / name)


def written(write: Callable[..., object], *arguments: Any) -> str | None:
    """Write a file; why that failed, if it did: what was measured is printed all the same, and the old file stays."""
    try:
        write(*arguments)
    except OSError as error:
        return error.strerror or str(error)
    return None


def report_unwritten(outcomes: dict[Path, str | None]) -> bool:
    """Say below what was printed which files could not be written; whether there are any."""
    failed = {path: why for path, why in outcomes.items() if why is not None}
    sys.stdout.flush()
    for path, why in failed.items():
        print(f"{path} cannot be written: {why}; what was there before is as it was", file=sys.stderr)
    return bool(failed)


def apart(files: dict[str, Path | None]) -> None:
    """Refuse two flags that name one file, or a file where the other needs a folder."""
    seen: dict[Path, str] = {}
    for flag, path in files.items():
        if path is None:
            continue
        where = path.resolve()
        for other, its in seen.items():
            if where == other or where in other.parents or other in where.parents:
                raise Refused(f"{flag}: expected a file apart from that of {its}; got {path} beside {other}")
        seen[where] = flag
