"""What `stream_attention.serving.vllm` uses of vLLM 0.32, where that is not installed: names, signatures and defaults.

Only enough to make its classes. What they inherit there is tested with vLLM itself (test_vllm_engine.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, StrEnum
from types import ModuleType, SimpleNamespace
from typing import Any

import torch


class AttentionType(StrEnum):
    DECODER = "decoder"
    ENCODER_ONLY = "encoder_only"


class AttentionCGSupport(Enum):
    ALWAYS = 3
    UNIFORM_BATCH = 2
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    NEVER = 0


@dataclass(frozen=True)
class MultipleOf:
    base: int


class AttentionBackend:
    pass


class AttentionImpl:
    pass


class AttentionMetadataBuilder:
    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        self.kv_cache_spec, self.layer_names, self.vllm_config, self.device = (
            kv_cache_spec, layer_names, vllm_config, device,
        )  # fmt: skip


@dataclass
class CommonAttentionMetadata:
    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: torch.Tensor
    slot_mapping: torch.Tensor
    causal: bool | torch.Tensor = True


class Registry:
    """`AttentionBackendEnum` as far as a plugin sees it: members that are added while it runs."""

    def __init__(self) -> None:
        self.__members__: dict[str, str] = {"CPU_ATTN": "its own"}

    def register(self, name: str, path: str) -> None:
        if name in self.__members__:
            raise ValueError(f"Backend {name} already exists")
        self.__members__[name] = path


def modules() -> dict[str, ModuleType]:
    """By name, the modules that are imported of it."""
    registry = Registry()
    platform = SimpleNamespace(device_type="cpu", device_name="cpu", is_cuda=lambda: False)
    contents: dict[str, dict[str, Any]] = {
        "vllm": {"__version__": "0.32.0"},
        "vllm.envs": {"VLLM_BATCH_INVARIANT": False},
        "vllm.platforms": {"current_platform": platform},
        "vllm.v1": {},
        "vllm.v1.attention": {},
        "vllm.v1.attention.backend": {
            one.__name__: one
            for one in (
                AttentionBackend,
                AttentionCGSupport,
                AttentionImpl,
                AttentionMetadataBuilder,
                AttentionType,
                CommonAttentionMetadata,
                MultipleOf,
            )
        },
        "vllm.v1.attention.backends": {},
        "vllm.v1.attention.backends.registry": {
            "AttentionBackendEnum": registry,
            "register_backend": registry.register,
        },
    }
    made = {}
    for name, its in contents.items():
        module = ModuleType(name)
        module.__dict__.update(its)
        module.__path__ = []
        made[name] = module
    for name, module in made.items():
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(made[parent], child, module)
    return made
