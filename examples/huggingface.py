"""A small Llama of random weights, with attention as it was and with ours: a padded batch, generation, a training step.

python examples/huggingface.py [--layers 2] [--heads 8] [--kv-heads 2] [--dim 32] [--length 128] [--device cuda]
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from torch import Tensor

from stream_attention import StreamAttentionConfig
from stream_attention.integration.hf import replace_llama_attention
from stream_attention_tools.cli.values import count, device

VOCABULARY, NEW = 512, 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=count, default=2, help="of the model; default 2")
    parser.add_argument("--heads", type=count, default=8, help="query heads; default 8")
    parser.add_argument("--kv-heads", type=count, default=2, help="default 2")
    parser.add_argument("--dim", type=count, default=32, help="of a head, an even number; default 32")
    parser.add_argument("--length", type=count, default=128, help="tokens of the longest prompt; default 128")
    parser.add_argument(
        "--device",
        type=device,
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="cpu, cuda or cuda:N; default: cuda if there is one",
    )
    options = parser.parse_args()
    if options.heads % options.kv_heads:
        parser.error(f"--kv-heads: expected a divisor of --heads {options.heads}; got {options.kv_heads}")
    if options.dim % 2:
        parser.error(f"--dim: expected an even number, as rotary embeddings turn pairs; got {options.dim}")
    try:
        model = llama(options)
    except ImportError:
        parser.error("transformers is not installed: pip install transformers")

    ids = torch.randint(1, VOCABULARY, (2, options.length), device=options.device)
    mask = torch.ones_like(ids)
    mask[0, : options.length // 2] = 0  # the first prompt is half as long; padding stands in front
    before = results(model, ids, mask)
    replaced = replace_llama_attention(model, StreamAttentionConfig(num_heads=options.heads, head_dim=options.dim))
    print(f"Replaced {replaced} attention modules, {str(model.dtype).removeprefix('torch.')} on {options.device}.")
    after = results(model, ids, mask)
    replaced.undo()

    for name, ours in after.items():
        if name == "tokens":
            same = (before[name] == ours)[:, options.length :].float().mean().item()
            print(f"tokens       {same:.0%} of {NEW} x 2 that were generated are the same")
        else:
            off = (before[name] - ours).abs().max() / before[name].abs().max()
            print(f"{name:12} differ by {off:.1e} of the largest")
    print(f"The model has its attention again: {model.config._attn_implementation}.")


def llama(options: argparse.Namespace) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    width = options.heads * options.dim
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        num_key_value_heads=options.kv_heads,
        max_position_embeddings=options.length + NEW,
        initializer_range=0.1,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config).to(options.device).eval()
    return model if options.device == "cpu" else model.bfloat16()


def results(model: Any, ids: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Logits at tokens, tokens that follow, and gradients."""
    began = time.perf_counter()
    with torch.no_grad():
        logits = model(ids, attention_mask=mask).logits[mask.bool()].float()
    tokens = model.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False)
    model.train()
    model.zero_grad()
    labels = ids.masked_fill(mask.cumsum(1) <= 1, -100)  # the first token too, which padding would predict
    model(ids, attention_mask=mask, labels=labels).loss.backward()
    model.eval()
    gradients = torch.cat([parameter.grad.flatten().float() for parameter in model.parameters()])
    print(f"{model.config._attn_implementation:17} {time.perf_counter() - began:.2f} s")
    return {"logits": logits, "tokens": tokens, "gradients": gradients}


if __name__ == "__main__":
    main()
