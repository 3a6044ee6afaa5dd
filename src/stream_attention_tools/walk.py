"""Count what a cold public call runs: files, functions and lines of `stream_attention`, printed as a Markdown table.

    python -m stream_attention_tools.walk [--device cuda]

A call is cold when the launch cache and every memoised function are empty; its modules are imported already. A turn
back is a switch to a file that was entered before. Loops count each time a line runs. On a GPU the backward runs in a
thread of autograd's, which is not counted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch

import stream_attention
from stream_attention import ContiguousKV, PagedKV, attention, decode_attention, quantize_kv, varlen_attention
from stream_attention.ops import launch_cache

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
    files: set[str] = set()
    here, lines, turns_back = "", 0, 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal here, lines, turns_back
        file = frame.f_code.co_filename
        if not file.startswith(PACKAGE):
            return None
        functions.add(frame.f_code)
        lines += event == "line"
        if event == "line" and file != here:
            turns_back += file in files
            files.add(file)
            here = file
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return Walk(len(files), len(functions), lines, turns_back)


def forget() -> None:
    """Empty the launch cache and every `lru_cache` of the package."""
    launch_cache.clear()
    for name, module in list(sys.modules.items()):
        if name.startswith("stream_attention."):
            for value in vars(module).values():
                if callable(clear := getattr(value, "cache_clear", None)):
                    clear()


def calls(device: str) -> Iterator[tuple[str, Callable[[int], Call]]]:
    """By name, what makes the call for sequences of so many tokens; making it is not counted."""

    def tensors(*shape: int, gradients: bool = False) -> list[torch.Tensor]:
        return [torch.randn(*shape, device=device, requires_grad=gradients) for _ in range(3)]

    def packed(length: int) -> Call:
        offsets = torch.tensor([0, length // 2, length], dtype=torch.int32, device=device)
        return lambda: varlen_attention(*tensors(length, HEADS, DIM), cu_seqlens_q=offsets, cu_seqlens_k=offsets)

    def contiguous(length: int) -> Call:
        query, key, value = tensors(2, length, HEADS, DIM)
        return lambda: decode_attention(query[:, :1], ContiguousKV(key, value))

    def paged(length: int) -> Call:
        query, *pages = tensors(2 * length // PAGE, PAGE, HEADS, DIM)
        table = torch.arange(2 * length // PAGE, dtype=torch.int32, device=device).view(2, -1)
        lengths = torch.full((2,), length, dtype=torch.int32, device=device)
        cache = quantize_kv(PagedKV(pages[0], pages[1], table, lengths), "int4")
        return lambda: decode_attention(query[:2, :1], cache)

    yield "attention", lambda n: lambda: attention(*tensors(1, n, HEADS, DIM), causal=True)
    yield (
        "attention, forward and backward",
        lambda n: lambda: attention(*tensors(1, n, HEADS, DIM, gradients=True), causal=True).sum().backward(),
    )
    yield "varlen_attention", packed
    yield "decode_attention, ContiguousKV", contiguous
    yield "decode_attention, paged int4 QuantizedKV", paged
    if find_spec("transformers") is not None:
        yield "Hugging Face, a decode step of one layer", lambda length: _model_step(length, device)


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


def table(device: str = "cpu") -> list[tuple[str, Walk]]:
    """The walk of every call. A call of other lengths goes first, so that nothing is imported in the one counted."""
    found = []
    for name, prepare in calls(device):
        prepare(WARM_LENGTH)()
        call = prepare(COLD_LENGTH)
        forget()
        found.append((name, walk(call)))
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m stream_attention_tools.walk", description=(__doc__ or ""))
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--device", default="cpu", help="where the tensors are; default: cpu")
    device = parser.parse_args(argv).device
    print(f"| cold call on {device} | files | functions | lines run | turns back |\n|---|---|---|---|---|")
    for name, one in table(device):
        print(f"| {name} | {' | '.join(f'{count:,}' for count in one)} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
