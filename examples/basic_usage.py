"""The modules and the op: hidden states, explicit queries, keys and values, a cache, a mask, the LSE, gradients.

python examples/basic_usage.py [--length 1024] [--heads 8] [--dim 64] [--device cuda]
"""

from __future__ import annotations

import argparse

import torch

from stream_attention import (
    FusedOnlineAttention,
    StreamAttention,
    StreamAttentionConfig,
    attention,
    explain,
    merge_states,
)
from stream_attention_tools.cli.values import count, device

SHORTEST = 16  # some of it is cached, and half of it padding


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=count, default=1024, help="tokens of a sequence; default 1024")
    parser.add_argument("--heads", type=count, default=8, help="default 8")
    parser.add_argument("--dim", type=count, default=64, help="of a head; default 64")
    parser.add_argument(
        "--device",
        type=device,
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="cpu, cuda or cuda:N; default: cuda if there is one",
    )
    options = parser.parse_args()
    if options.length < SHORTEST:
        parser.error(f"--length: expected at least {SHORTEST}; got {options.length}")
    torch.manual_seed(0)

    config = StreamAttentionConfig(num_heads=options.heads, head_dim=options.dim)
    attend = StreamAttention(config).to(options.device)
    dtype = torch.float16 if attend.attention.device.type == "cuda" else torch.float32
    features = config.num_heads * config.head_dim

    print("1. Hidden states in, hidden states out: projections, causal attention, projection back.")
    x = torch.randn(2, options.length, features, device=options.device, dtype=dtype)
    with torch.no_grad():
        whole = attend(x)
    print(f"   {list(x.shape)} -> {list(whole.shape)}, computed by {attend.last_method_used}")

    print("2. With a cache: all but the last eight tokens first, then those one by one.")
    with torch.no_grad():
        out, cache = attend(x[:, :-8], use_cache=True)
        steps = [out]
        for token in x[:, -8:].split(1, dim=1):
            out, cache = attend(token, past_key_value=cache, use_cache=True)
            steps.append(out)
    print(f"   largest difference from the whole: {difference(torch.cat(steps, 1), whole):.1e}")

    print("3. Explicit queries, keys and values [B, T, H, D], with a padding mask (True = attend).")
    shape = (2, options.length, options.heads, options.dim)
    query, key, value = (torch.randn(shape, device=options.device, dtype=dtype) for _ in range(3))
    padding = torch.arange(options.length, device=options.device) < torch.tensor(
        [[options.length], [options.length // 2]], device=options.device
    )
    masked = attend(query, key, value, attention_mask=padding, causal=False)
    cut = options.length // 2
    alone = attend(query[1:], key[1:, :cut], value[1:, :cut], causal=False)
    print(f"   the padded sequence against the same without padding: {difference(masked[1:], alone):.1e}")

    print("4. The log-sum-exp of each row, and what it is for: attention over parts of the keys, merged.")
    fused = FusedOnlineAttention(options.heads, options.dim)
    out, lse = fused(query, key, value, causal=False, return_lse=True)
    parts = [
        fused(query, k, v, causal=False, return_lse=True)
        for k, v in zip(key.split(cut, 1), value.split(cut, 1), strict=True)
    ]
    merged, _ = merge_states([part.float() for part, _ in parts], [its for _, its in parts])
    print(f"   lse {list(lse.shape)} {lse.dtype}; {len(parts)} parts merged: {difference(merged, out):.1e}")

    print("5. The op underneath, with everything else it takes, and gradients.")
    query.requires_grad_()
    slopes = 2.0 ** -torch.arange(1.0, options.heads + 1, device=options.device)
    arguments = {
        "causal": True,
        "window": (options.length // 4, 0),
        "alibi_slopes": slopes,
        "dropout_p": 0.1,
        "seed": 7,
    }
    attention(query, key, value, **arguments).float().square().mean().backward()
    print(f"   gradient {list(query.grad.shape)}, norm {float(query.grad.float().norm()):.3g}. What ran, and why:")
    explain(query, key, value, **arguments)


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.detach().float() - b.detach().float()).abs().max())


if __name__ == "__main__":
    main()
