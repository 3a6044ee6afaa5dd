"""Count what a cold public call runs: files, functions and lines of `stream_attention`, printed as a Markdown table.

    python -m stream_attention_tools.walk [--device cuda]

A call is cold when the launch cache and every memoised function are empty; its modules are imported already. A turn
back is a switch to a file that was entered before. Loops count each time a line runs. On a GPU the backward runs in a
thread of autograd's, which is not counted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor

import stream_attention
from stream_attention import ContiguousKV, PagedKV, attention, decode_attention, quantize_kv, varlen_attention
from stream_attention.dispatch import launch_cache

PACKAGE = f"{Path(stream_attention.__file__).parent}/"
COLD_LENGTH, WARM_LENGTH, HEADS, DIM, PAGE = 256, 192, 4, 64, 64

Call = Callable[[], object]


class Walk(NamedTuple):
    files: int
    functions: int
    lines: int
    turns_back: int


def walk(call: Call) -> Walk:
    """Make a call, and count what it runs of `stream_attention` in this thread."""
    functions: set[CodeType] = set()
    files: list[str] = []  # as they are entered, also again
    lines = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal lines
        if not (file := frame.f_code.co_filename).startswith(PACKAGE):
            return None
        functions.add(frame.f_code)
        if event == "line":
            lines += 1
            if not files or files[-1] != file:
                files.append(file)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return Walk(len(set(files)), len(functions), lines, len(files) - len(set(files)))


def forget() -> None:
    """Empty the launch cache and every `lru_cache` of the package."""
    launch_cache.clear()
    for module in [module for name, module in sys.modules.items() if name.startswith("stream_attention.")]:
        for value in vars(module).values():
            if callable(clear := getattr(value, "cache_clear", None)):
                clear()


def calls(device: str) -> dict[str, Callable[[int], Call]]:
    """By name, what prepares the call for sequences of so many tokens; preparing it is not counted."""

    def tensors(*shape: int, gradients: bool = False) -> list[Tensor]:
        return [torch.randn(*shape, device=device, requires_grad=gradients) for _ in range(3)]

    def packed(length: int) -> Call:
        offsets = torch.tensor([0, length // 2, length], dtype=torch.int32, device=device)
        return lambda: varlen_attention(*tensors(length, HEADS, DIM), cu_seqlens_q=offsets, cu_seqlens_k=offsets)

    def contiguous(length: int) -> Call:
        query, key, value = tensors(2, length, HEADS, DIM)
        return lambda: decode_attention(query[:, :1], ContiguousKV(key, value))

    def paged(length: int) -> Call:
        query, key, value = tensors(2 * length // PAGE, PAGE, HEADS, DIM)
        table = torch.arange(2 * length // PAGE, dtype=torch.int32, device=device).view(2, -1)
        cache = quantize_kv(PagedKV(key, value, table, torch.full_like(table[:, 0], length)), "int4")
        return lambda: decode_attention(query[:2, :1], cache)

    def training(length: int) -> Call:
        return lambda: attention(*tensors(1, length, HEADS, DIM, gradients=True), causal=True).sum().backward()

    found: dict[str, Callable[[int], Call]] = {
        "attention": lambda length: lambda: attention(*tensors(1, length, HEADS, DIM), causal=True),
        "attention, forward and backward": training,
        "varlen_attention": packed,
        "decode_attention, ContiguousKV": contiguous,
        "decode_attention, paged int4 QuantizedKV": paged,
    }
    step = "Hugging Face, a decode step of one layer"
    return found | ({step: lambda length: _model_step(length, device)} if find_spec("transformers") else {})


def _model_step(length: int, device: str) -> Call:
    from transformers import AutoModelForCausalLM, LlamaConfig

    from stream_attention.integration.hf import register

    register()
    sizes = {"hidden_size": HEADS * DIM, "num_attention_heads": HEADS, "num_hidden_layers": 1}
    config = LlamaConfig(vocab_size=100, intermediate_size=64, pad_token_id=0, **sizes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="stream_attention").eval().to(device)
    ids = torch.ones(1, length + 1, dtype=torch.long, device=device)
    with torch.no_grad():
        cache = model(ids[:, :length], use_cache=True).past_key_values
    return torch.no_grad()(lambda: model(ids[:, length:], past_key_values=cache))


def table(device: str = "cpu") -> dict[str, Walk]:
    """The walk of every call. A call of another length goes first, so that nothing is imported in the one counted."""
    found = {}
    for name, prepare in calls(device).items():
        prepare(WARM_LENGTH)()
        call = prepare(COLD_LENGTH)
        forget()
        found[name] = walk(call)
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m stream_attention_tools.walk", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--device", default="cpu", help="where the tensors are; default: cpu")
    device = parser.parse_args(argv).device
    print(f"| cold call on {device} | files | functions | lines run | turns back |\n|---|---|---|---|---|")
    for name, one in table(device).items():
        print(f"| {name} | {' | '.join(f'{count:,}' for count in one)} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
