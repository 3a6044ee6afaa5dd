"""vLLM's engine on a CPU with our attention, with its own, and with a wrong one: which tokens differ.

    VLLM_TARGET_DEVICE=cpu python -m benchmarks.serving.vllm_engine --out benchmarks/results/cpu/serving_vllm.json

Needs the environment that `make test-serving` builds. A small Llama is trained first, some minutes on two cores, to
continue a sequence that repeats itself: each token is found by attention alone, so a wrong attention says other tokens.
Then each backend generates, in a process of its own, from the same prompts, which arrive in chunks while others decode,
and some of which share their first tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from stream_attention_tools.files import write_file

VOCABULARY, PERIOD = 64, 40
MODEL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
ENOUGH = 0.999
"""The share of tokens that a trained model gets right."""
MOST_STEPS = 400

ENGINE = {
    "dtype": "float32",
    "block_size": 32,
    "max_model_len": 256,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "enable_chunked_prefill": True,
    "enable_prefix_caching": True,
    "enforce_eager": True,
    "skip_tokenizer_init": True,
    "disable_log_stats": True,
    "seed": 0,
}
NEW_TOKENS = 32
LENGTHS = (45, 64, 65, 96, 100, 130, 161, 190)
BACKENDS = {
    "own": "",
    "stream_attention": "benchmarks.serving.vllm_backends.OnCpu",
    "wrong": "benchmarks.serving.vllm_backends.Wrong",
}
ENVIRONMENT = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the override is of this process
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def train(folder: Path) -> dict[str, Any]:
    """Train the model until attention decides its tokens, and write it into a folder."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**MODEL))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(1, MOST_STEPS + 1):
        tokens = torch.randint(1, VOCABULARY, (8, PERIOD)).repeat(1, 4)[:, : 3 * PERIOD + 1]
        logits, labels = model(tokens).logits[:, PERIOD - 1 : -1], tokens[:, PERIOD:]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        right = (logits.argmax(-1) == labels).double().mean().item()
        if right >= ENOUGH:
            model.save_pretrained(folder)
            return {"steps": step, "loss": round(loss.item(), 4), "right": round(right, 4)}
    raise RuntimeError(f"the model got {right:.3f} of its tokens right after {MOST_STEPS} steps, not {ENOUGH}")


def prompts() -> list[list[int]]:
    """Sequences that repeat themselves; every second one begins as the others of these do."""

    def repeating(seed: int, length: int) -> list[int]:
        rng = random.Random(seed)
        part = [rng.randrange(1, VOCABULARY) for _ in range(PERIOD)]
        return (part * (length // PERIOD + 1))[:length]

    return [repeating(0 if n % 2 else n + 1, length) for n, length in enumerate(LENGTHS)]


def generate(model: Path, backend: str, out: Path) -> None:
    """Generate with one backend, in this process, and write what came."""
    from vllm import LLM, SamplingParams
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if BACKENDS[backend]:
        register_backend(AttentionBackendEnum.CPU_ATTN, BACKENDS[backend])
    engine = LLM(model=str(model), **ENGINE)
    asked = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, logprobs=1, ignore_eos=True, detokenize=False)
    began = time.perf_counter()
    answers = engine.generate([{"prompt_token_ids": one} for one in prompts()], asked, use_tqdm=False)
    record: dict[str, Any] = {"seconds": round(time.perf_counter() - began, 2)}
    record["cached_tokens"] = sum(answer.num_cached_tokens or 0 for answer in answers)
    record["tokens"] = [list(answer.outputs[0].token_ids) for answer in answers]
    record["logprobs"] = [
        [
            each[token].logprob
            for token, each in zip(answer.outputs[0].token_ids, answer.outputs[0].logprobs, strict=True)
        ]
        for answer in answers
    ]
    if BACKENDS[backend]:
        from benchmarks.serving.vllm_backends import COUNTS

        record["counts"] = COUNTS
    write_file(out, json.dumps(record))


def run(model: Path, backend: str) -> dict[str, Any]:
    """What one backend generates, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out.json")
        command = [sys.executable, "-m", "benchmarks.serving.vllm_engine", "--generate", backend]
        done = subprocess.run(
            [*command, "--model", str(model), "--out", str(out)],
            env={**os.environ, **ENVIRONMENT},
            capture_output=True,
            text=True,
            timeout=600,
        )
        if done.returncode:
            raise RuntimeError(f"{backend}: the engine ended with {done.returncode}\n{done.stderr[-4000:]}")
        return json.loads(out.read_text())


def compare(own: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """How far two backends agree, by tokens, and by log-probabilities as long as the tokens before are the same."""
    pairs = [list(zip(a, b, strict=True)) for a, b in zip(own["tokens"], other["tokens"], strict=True)]
    equal = [next((n for n, (a, b) in enumerate(pair) if a != b), len(pair)) for pair in pairs]
    gaps = [
        abs(a - b)
        for mine, its, count in zip(own["logprobs"], other["logprobs"], equal, strict=True)
        for a, b in zip(mine[:count], its[:count], strict=True)
    ]
    return {
        "outputs_equal": sum(count == len(pair) for count, pair in zip(equal, pairs, strict=True)),
        "outputs": len(pairs),
        "tokens_equal": sum(a == b for pair in pairs for a, b in pair),
        "tokens": sum(map(len, pairs)),
        "largest_logprob_gap": max(gaps, default=None),
    }


def measure() -> dict[str, Any]:
    """Train, generate with each backend, and compare."""
    from stream_attention_tools.bench.results import conditions, installed_version

    with tempfile.TemporaryDirectory() as folder:
        trained = train(Path(folder))
        found = {backend: run(Path(folder), backend) for backend in BACKENDS}
    own = found.pop("own")
    cached = {"lengths": LENGTHS, "new_tokens": NEW_TOKENS, "cached_tokens": own["cached_tokens"]}
    record = {"suite": "serving_vllm", **conditions("cpu")}
    record["versions"] |= {name: installed_version(name) for name in ("vllm-cpu", "transformers")}
    record["conditions"] = {"engine": ENGINE, "model": MODEL | trained, "prompts": cached}
    record["against_own"] = {name: compare(own, its) | its["counts"] for name, its in found.items()}
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--generate", choices=BACKENDS, help="one backend alone, in this process, of --model")
    parser.add_argument("--model", type=Path)
    options = parser.parse_args()
    if options.generate:
        return generate(options.model, options.generate, options.out)
    from stream_attention_tools.bench.results import save

    record = measure()
    save(record, options.out)
    print(json.dumps(record["against_own"], indent=1))


if __name__ == "__main__":
    main()
