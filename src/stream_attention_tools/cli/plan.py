"""python -m stream_attention.cli.plan --q BxTxHxD ...: which kernel would run for such a call, and why not another.

Nothing is allocated and nothing runs, so the shapes may be of any size and the GPU need not be here: --arch 90 plans
for one of compute capability 9.0.
"""

from __future__ import annotations

import argparse
import sys
from math import prod
from typing import Any, NoReturn

import torch
from torch import Tensor

from stream_attention.base.device import arch, num_sms
from stream_attention.ops.explain import print_plans, problems_of_call

from . import values
from .command import command

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
DTYPES |= {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}

GPUS = {
    80: ("an A100", 108),
    86: ("an RTX 3090", 82),
    89: ("an RTX 4090", 128),
    90: ("an H100 SXM or H200", 132),
    100: ("a B200", 148),
    120: ("an RTX 5090", 170),
}
"""Compute capability -> a GPU that has it, and its multiprocessors, the default of --processors."""


MOST_ELEMENTS = 1 << 59
"""A tensor of so many fp64 numbers has more bytes than its sizes can address."""


def _run(options: argparse.Namespace) -> int:
    place, words = _place(options)
    problems, backend = problems_of_call(*_tensors(options), **_arguments(options))
    print_plans([problem.replace(**place) for problem in problems], backend)
    print(f"device    {words}")
    return 0


def _place(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """The fields of a `Problem` about its device, and the device in words."""
    here = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
    imagined = options.arch is not None or options.processors is not None
    if imagined and options.device == "cpu":
        raise ValueError("--arch and --processors: expected with --device cuda; got --device cpu")
    if not imagined and (options.device == "cpu" or (options.device is None and here is None)):
        return {"device": torch.device("cpu")}, "the CPU"
    if here is None and options.arch is None:
        hint = "Say --arch 90 to plan for an H100 or H200 that is not here."
        raise ValueError(f"--device cuda: expected a GPU that torch finds here, or --arch; got neither. {hint}")
    if here is not None and not imagined:
        fields = {"device": here, "arch": arch(here), "num_sms": num_sms(here)}
        return fields, f"{torch.cuda.get_device_name(here)}, the GPU {here} of this machine"
    capability = arch(here) if here is not None and options.arch is None else options.arch
    count, words = gpu_in_words(capability, options.processors)
    return {"device": torch.device("cuda"), "arch": capability, "num_sms": count}, words


def gpu_in_words(capability: int, count: int | None) -> tuple[int, str]:
    """Multiprocessors of a GPU that need not be here, by default those of one in `GPUS`, and the GPU in words."""
    like = ""
    if count is None and capability in GPUS:
        name, count = GPUS[capability]
        like = f", as {name} has"
    elif count is None and capability >= min(GPUS):  # for older ones there is no kernel, and nobody asks
        raise ValueError(f"--processors: expected the multiprocessors of a GPU of --arch {capability}; got none")
    having = f" with {count} multiprocessors{like}" if count else ""
    return count or 0, f"a GPU of compute capability {capability / 10}{having}"


def _tensors(options: argparse.Namespace) -> tuple[Tensor, Tensor, Tensor]:
    kv = options.q if options.kv is None else options.kv
    value = kv if options.value_dim is None else (*kv[:-1], options.value_dim)
    query, key, value = (_meta(shape, DTYPES[options.dtype], options.backward) for shape in (options.q, kv, value))
    return query, key, value


def _arguments(options: argparse.Namespace) -> dict[str, Any]:
    """The keywords of `attention`, without those that were not given."""
    if options.precision and options.backward:
        raise ValueError(f"--backward: expected without --precision {options.precision}, which is for inference")
    dtype, backward = DTYPES[options.dtype], options.backward
    heads = options.q[-2:-1]
    names = ("causal", "window", "softcap", "scale", "return_lse", "precision", "backend")
    given: dict[str, Any] = {name: getattr(options, name) for name in names}
    given |= {"dropout_p": options.dropout, "deterministic": options.deterministic or None}
    if options.mask is not None:
        given["mask"] = _meta(options.mask, torch.bool)
    if options.bias is not None:
        shape, its_dtype = options.bias
        given["bias"] = _meta(shape, its_dtype or dtype, backward)
    if options.alibi:
        given["alibi_slopes"] = _meta(heads, torch.float32, backward)
    if options.sink:
        given["sink"] = _meta(heads, torch.float32, backward)
    return given


def _meta(shape: tuple[int, ...], dtype: torch.dtype, requires_grad: bool = False) -> Tensor:
    if prod(shape) >= MOST_ELEMENTS:
        raise ValueError(f"shape: expected fewer than 2**59 elements, the most torch can count; got {list(shape)}")
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=requires_grad)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """What begins with a minus is a flag to argparse, and it does not say so."""
        if message == "argument --window: expected one argument":
            message += "; one that begins with a minus is written with the = sign, --window=-1,0"
        super().error(message)


def _flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--q", type=_shape, required=True, metavar="BxTqxHqxD", help="shape of the query, such as 1x4096x32x128")
    add("--kv", type=_shape, metavar="BxTkxHkvxD", help="shape of key and value; default: that of the query")
    add("--value-dim", type=values.count, metavar="DV", help="head dim of the value, where it is not that of the key")
    dtypes = "fp16, bf16 (the default), fp32 or fp64"
    add("--dtype", choices=tuple(DTYPES), default="bf16", metavar="DTYPE", help=dtypes)
    add("--precision", type=_precision, metavar="fp8", help="compute in FP8, of fp16 or bf16; default: that of --dtype")
    add("--device", choices=("cuda", "cpu"), help="default: cuda if torch finds a GPU or --arch is given")
    add("--arch", type=values.capability, metavar="CC", help="plan for a GPU of this compute capability: 90 is 9.0")
    add("--processors", type=values.count, metavar="N", help="how many multiprocessors it has")
    add("--causal", action="store_true", help="a query sees the keys up to its own position")
    add("--window", type=values.window, metavar="LEFT,RIGHT", help="-1 is unbounded; write --window=-1,0 with the =")
    add("--mask", type=_shape, metavar="SHAPE", help="a boolean mask, broadcastable to BxHqxTqxTk")
    add("--bias", type=_shape_and_dtype, metavar="SHAPE[:DTYPE]", help="an additive bias, broadcastable likewise")
    add("--alibi", action="store_true", help="ALiBi slopes, one per head")
    add("--sink", action="store_true", help="attention sinks, one per head")
    add("--softcap", type=float, default=0.0, metavar="C", help="scores s become C * tanh(s / C); default 0: not")
    add("--scale", type=float, metavar="S", help="default: D ** -0.5")
    add("--dropout", type=float, default=0.0, metavar="P", help="dropout of the probabilities; default 0")
    add("--deterministic", action="store_true", help="deterministic=True")
    add("--return-lse", action="store_true", help="the LSE is returned; with --backward a gradient comes through it")
    add("--backward", action="store_true", help="gradients are wanted: plan the backward too")
    add("--backend", default="auto", metavar="NAME", help="the backend that must do it; default: auto")


def _shape(text: str) -> tuple[int, ...]:
    words = text.lower().split("x")
    if not all(word.isdecimal() for word in words):
        raise argparse.ArgumentTypeError(f"expected sizes joined by x, such as 1x4096x32x128; got {text!r}")
    return tuple(map(int, words))


def _precision(text: str) -> str:
    if text != "fp8":
        raise argparse.ArgumentTypeError(f"expected fp8, or no --precision for that of --dtype; got {text!r}")
    return text


def _shape_and_dtype(text: str) -> tuple[tuple[int, ...], torch.dtype | None]:
    shape, colon, dtype = text.partition(":")
    if colon and dtype not in DTYPES:
        raise argparse.ArgumentTypeError(f"expected SHAPE or SHAPE:DTYPE with one of {', '.join(DTYPES)}; got {text!r}")
    return _shape(shape), DTYPES.get(dtype)


main = command(
    "python -m stream_attention.cli.plan", __doc__, _flags, _run, refused=(ValueError, TypeError), parser=_Parser
)

if __name__ == "__main__":
    sys.exit(main())
