"""Use the attention in existing models: a stock encoder, a block of your own, torch.compile; and time it.

python examples/integration_example.py [--length 512] [--embed 256] [--heads 4] [--compile] [--device cuda]
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor, nn

from stream_attention import StreamAttention, StreamAttentionConfig, StreamMultiheadAttention
from stream_attention_tools.cli.values import count, device

PADDING = 5  # tokens at the end of every sequence


class Block(nn.Module):
    """A pre-norm decoder block around `StreamAttention`."""

    def __init__(self, config: StreamAttentionConfig) -> None:
        super().__init__()
        features = config.num_heads * config.head_dim
        self.norm1, self.norm2 = nn.LayerNorm(features), nn.LayerNorm(features)
        self.attend = StreamAttention(config)
        self.mlp = nn.Sequential(nn.Linear(features, 4 * features), nn.GELU(), nn.Linear(4 * features, features))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=count, default=512, help="tokens of a sequence; default 512")
    parser.add_argument("--batch", type=count, default=2, help="sequences; default 2")
    parser.add_argument("--embed", type=count, default=256, help="features of a token; default 256")
    parser.add_argument("--heads", type=count, default=4, help="which divide the features; default 4")
    parser.add_argument("--rounds", type=count, default=10, help="of the timing; default 10")
    parser.add_argument(
        "--compile", nargs="?", const="inductor", metavar="BACKEND", help="compile the block too; default inductor"
    )
    parser.add_argument(
        "--device",
        type=device,
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="cpu, cuda or cuda:N; default: cuda if there is one",
    )
    options = parser.parse_args()
    if options.embed % options.heads:
        parser.error(f"--heads: expected a divisor of --embed {options.embed}; got {options.heads}")
    if options.length <= PADDING:
        parser.error(f"--length: expected more than the {PADDING} tokens of padding; got {options.length}")
    if options.compile not in (None, *torch.compiler.list_backends(exclude_tags=())):
        parser.error(f"--compile: expected a backend of torch.compile; got {options.compile!r}")
    torch.manual_seed(0)
    x = torch.randn(options.batch, options.length, options.embed, device=options.device)
    padding = torch.arange(options.length, device=options.device).expand(options.batch, -1) >= options.length - PADDING

    print("1. A stock nn.TransformerEncoder, and a copy with its attention replaced and its weights kept.")
    layer = nn.TransformerEncoderLayer(options.embed, options.heads, 4 * options.embed, dropout=0.0, batch_first=True)
    stock = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False).to(options.device)
    ours = copy.deepcopy(stock)
    replaced = StreamAttention.replace_attention_in_model(ours, "self_attn")
    # In training mode: after eval() the stock layer asks no attention module, but a fused path of its own, unless
    # torch.backends.mha.set_fastpath_enabled(False).
    expected, found = (model(x, src_key_padding_mask=padding) for model in (stock, ours))
    print(f"   {replaced} modules replaced; largest difference of the outputs {difference(found, expected):.1e}")
    assert stock.state_dict().keys() == ours.state_dict().keys()
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)

    print("2. StreamMultiheadAttention instead of nn.MultiheadAttention, weights loaded from it.")
    theirs = nn.MultiheadAttention(options.embed, options.heads, batch_first=True, device=options.device)
    mine = StreamMultiheadAttention(options.embed, options.heads, batch_first=True, device=options.device)
    mine.load_state_dict(theirs.state_dict())
    expected, weights = theirs(x, x, x, key_padding_mask=padding)
    found, my_weights = mine(x, x, x, key_padding_mask=padding)
    print(f"   output {difference(found, expected):.1e}, weights {difference(my_weights, weights):.1e} apart")
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)

    print(f"3. Forward and backward of both, need_weights=False, median of {options.rounds} rounds in turn.")

    def step(module: nn.Module) -> None:
        module(x, x, x, need_weights=False)[0].sum().backward()

    times = timed({"nn.MultiheadAttention": lambda: step(theirs), "ours": lambda: step(mine)}, options)
    for name, milliseconds in times.items():
        print(f"   {name:22} {milliseconds:8.2f} ms")

    print("4. A block of your own, trained for a step.")
    config = StreamAttentionConfig(
        num_heads=options.heads, head_dim=options.embed // options.heads, dropout=0.1, use_fp16=False
    )
    block = Block(config).to(options.device)
    loss = (block(x) - x).square().mean()
    loss.backward()
    print(f"   loss {loss:.3f}, gradients in {sum(p.grad is not None for p in block.parameters())} parameters")

    if options.compile:
        print("5. The same block under torch.compile, in one graph.")
        block.eval()
        with torch.no_grad():
            found, expected = torch.compile(block, fullgraph=True, backend=options.compile)(x), block(x)
        print(f"   largest difference {difference(found, expected):.1e}")
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def timed(calls: dict[str, Callable[[], None]], options: argparse.Namespace) -> dict[str, float]:
    """Median milliseconds of each call, one after the other in every round."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(options.rounds):
        for name, call in calls.items():
            began = now(options.device)
            call()
            taken[name].append((now(options.device) - began) * 1e3)
    return {name: median(its) for name, its in taken.items()}


def now(device: str) -> float:
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter()


def difference(a: Tensor, b: Tensor) -> float:
    return float((a.detach() - b.detach()).abs().max())


if __name__ == "__main__":
    main()
