"""A model of transformers that generates with a quantised cache, or with a cache of a bounded number of tokens.

The model is a small Llama with random weights: its text is meaningless, its memory use is not. Each cache generates the
same number of tokens; the first one, which keeps everything, is what the others are compared with.

python examples/long_generation.py [--prompt 512] [--new 256] [--budget 128] [--layers 4] [--device cuda]
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from torch import Tensor

from stream_attention_tools.cli.values import count, device

try:
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

    from stream_attention.integration.caches import StreamBoundedCache, StreamQuantizedCache
    from stream_attention.integration.hf import register
except ImportError:
    raise SystemExit("This example needs transformers: pip install transformers") from None

VOCABULARY = 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", type=count, default=512, help="tokens of the prompt; default 512")
    parser.add_argument("--new", type=count, default=256, help="tokens to generate; default 256")
    parser.add_argument("--budget", type=count, default=128, help="tokens that the bounded caches keep; default 128")
    parser.add_argument("--layers", type=count, default=4, help="default 4")
    parser.add_argument(
        "--device",
        type=device,
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="cpu, cuda or cuda:N; default: cuda if there is one",
    )
    options = parser.parse_args()
    if options.budget < 16:
        parser.error(f"--budget: expected at least 16; got {options.budget}")

    model = tiny_llama(options.layers, options.device)
    prompt = torch.randint(1, VOCABULARY, (1, options.prompt), device=options.device)
    budget = options.budget
    caches = {
        "everything, as it is": DynamicCache(config=model.config),
        "int8": StreamQuantizedCache(model, "int8", group=32, residual=64),
        "int4": StreamQuantizedCache(model, "int4", group=32, residual=64),
        f"{budget} tokens: first, latest, heavy": StreamBoundedCache(model, budget),
        f"{budget} tokens: first and latest": StreamBoundedCache(model, budget, heavy=None),
    }
    print(f"A prompt of {options.prompt} tokens and {options.new} more; {options.layers} layers, {model.dtype}.")
    print(f"{'cache':36} {'total':>6} {'stored':>6} {'MiB':>7} {'same tokens':>12} {'tokens/s':>9}")
    expected = None
    for name, cache in caches.items():
        began = time.perf_counter()
        text = generated(model, prompt, cache, options.new)
        seconds = time.perf_counter() - began
        expected = text if expected is None else expected
        same = (text == expected)[:, options.prompt :].float().mean()
        total, stored, mib = cache.get_seq_length(), tokens_of(cache), bytes_of(cache) / 2**20
        print(f"{name:36} {total:6} {stored:6} {mib:7.2f} {same:12.0%} {options.new / seconds:9.0f}")


def tiny_llama(layers: int, where: str) -> Any:
    register()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1 << 20,
        attn_implementation="stream_attention",
    )
    dtype = torch.bfloat16 if where.startswith("cuda") else torch.float32
    return LlamaForCausalLM(config).eval().to(where, dtype)


def generated(model: Any, prompt: Tensor, cache: Any, new: int) -> Tensor:
    with torch.no_grad():
        return model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            past_key_values=cache,
            max_new_tokens=new,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=VOCABULARY,  # which there is not: it goes on to the end
        ).cpu()


def tokens_of(cache: Any) -> int:
    return cache.get_seq_length() if isinstance(cache, DynamicCache) else cache.tokens


def bytes_of(cache: Any) -> int:
    if isinstance(cache, DynamicCache):
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    return cache.nbytes


if __name__ == "__main__":
    main()
