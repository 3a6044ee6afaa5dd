"""Our attention in vLLM: `vllm serve MODEL --attention-backend STREAM_ATTENTION`.

vLLM imports this file when a model is loaded with that name (`vllm_plugin`), asks `StreamAttentionBackend` whether it
can serve the model, makes a `StreamAttentionImpl` for each layer and a `StreamAttentionMetadataBuilder` for each group
of layers, and calls, in every step of the engine,

    builder.build(...)  ->  Step           once for a group of layers
    impl.do_kv_cache_update(...)           in each layer: write_kv, to slots that vLLM's scheduler chose
    impl.forward(...)                      in each layer: paged_attention, of all requests in one call

A layer's cache is `[P, Hkv, page, 2 * D]` in vLLM, K before V in each row, whatever the order in memory: our pages
`[P, page, Hkv, D]` are two views of it.
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
import vllm
from torch import Tensor
from vllm import envs
from vllm.platforms import current_platform
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    MultipleOf,
)

from ..base.errors import UnsupportedProblem, refuse
from ..base.fp8_layout import E4M3
from ..base.problem import PagedPlan
from ..dispatch.validate_paged import MOST_TOKENS
from ..ops.paged import paged_attention, paged_plan
from ..ops.write_kv import write_kv
from .limits import why_not
from .vllm_plugin import NAME

RELEASES = ("0.32",)
"""The releases of vLLM that this file ran in."""

PAGE_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "fp8": E4M3, "fp8_e4m3": E4M3}
"""vLLM's `kv_cache_dtype` -> dtype of pages; "auto" is that of the model."""

_UNUSED = {"use_alibi_sqrt": False, "chunk_lookback": -1}
"""Arguments of models that we do not support -> the value with which they ask for nothing."""


def _warn_if_not_run(version: str) -> None:
    if ".".join(version.split(".")[:2]) not in RELEASES:
        warnings.warn(
            f"stream_attention.serving.vllm: run with vLLM {', '.join(RELEASES)}; this is {version}. "
            "Compare its outputs with those of another --attention-backend first.",
            RuntimeWarning,
            stacklevel=2,
        )


_warn_if_not_run(vllm.__version__)


@dataclass
class Step:
    """What the layers of a group share in one step of the engine: `attn_metadata` of `StreamAttentionImpl.forward`."""

    query_start_loc: Tensor  # int32 [B + 1]
    seq_lens: Tensor  # int32 [B], new tokens counted
    block_table: Tensor  # int32 [B, W]
    slot_mapping: Tensor  # int64 [Nq], which vLLM passes to do_kv_cache_update beside this
    max_query_len: int
    causal: bool | Tensor  # a tensor [B] says it of each request
    plans: dict[Hashable, PagedPlan] = field(default_factory=dict)
    """The work of this step, which the first layer of a kind lists."""

    def plan(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> PagedPlan:
        """The work of layers such as this one, listed once a step, and once in a graph that is captured."""
        # A list that was made before a capture is no part of the graph, which would read it in every replay.
        capturing = query.is_cuda and torch.cuda.is_current_stream_capturing()
        kind = query.shape, query.dtype, key.shape, key.dtype, value.shape[3], options["window"], capturing
        found = self.plans.get(kind)
        if found is None:
            found = self.plans[kind] = paged_plan(query, key, value, self.query_start_loc, self.seq_lens, **options)
        return found


class StreamAttentionMetadataBuilder(AttentionMetadataBuilder):
    """Makes the `Step` of a group of layers. Copies nothing: tensors are those that vLLM's graphs read."""

    # Tiles are chosen by the longest query, which a captured graph keeps: batches of one query length are safe.
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    supports_update_block_table: bool = True

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Step:
        """The step of a batch; `common_prefix_len` is always 0 in vLLM 0.32."""
        common = common_attn_metadata
        return Step(
            common.query_start_loc,
            common.seq_lens,
            common.block_table_tensor,
            common.slot_mapping,
            common.max_query_len,
            common.causal,
        )

    def update_block_table(self, metadata: Step, blk_table: Tensor, slot_mapping: Tensor) -> Step:
        """The same step for another group of layers, which has other pages."""
        return replace(metadata, block_table=blk_table, slot_mapping=slot_mapping, plans={})


class StreamAttentionImpl(AttentionImpl):
    """One layer's attention."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
        **others: Any,
    ) -> None:
        asked = [name for name, value in others.items() if value is not None and value != _UNUSED.get(name)]
        if asked:
            raise UnsupportedProblem(
                f"{NAME} does not support {', '.join(asked)}, which this model uses. "
                "Type: --attention-backend TRITON_ATTN"
            )
        if attn_type != AttentionType.DECODER:
            raise UnsupportedProblem(f"{NAME} supports decoder attention only; got {attn_type}")
        if sinks is not None and sinks.shape != (num_heads,):
            refuse("sinks", f"shape [Hq={num_heads}]", list(sinks.shape))
        self.num_heads, self.head_size, self.num_kv_heads = num_heads, head_size, num_kv_heads or num_heads
        self.kv_cache_dtype, self.attn_type, self.sinks = kv_cache_dtype, attn_type, sinks
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.scale, self.logits_soft_cap = float(scale), float(logits_soft_cap or 0.0)
        self.alibi_slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        self.sliding_window = sliding_window
        # vLLM counts the query itself. The right side is that of requests that are not causal.
        self.window = None if sliding_window is None else (sliding_window - 1, sliding_window - 1)
        self.batch_invariant = bool(envs.VLLM_BATCH_INVARIANT)

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write new keys and values to their slots; those of padding are negative, and skipped."""
        key_pages, value_pages = self._pages(kv_cache)
        write_kv(key, value, key_pages, value_pages, slot_mapping, **self._scales(layer, key_pages))

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
        attn_metadata: Step | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attention of all new tokens `[Nq, Hq, D]` into `output`, in the same order.

        Keys and values are read from `kv_cache`, where `do_kv_cache_update`, or the layer that shares it, wrote them.
        """
        if output_scale is not None or output_block_scale is not None:
            raise UnsupportedProblem(f"{NAME} does not quantise its output; leave the fusion pass for it off")
        if attn_metadata is None:  # vLLM measures memory; there is no cache yet
            return output.fill_(0)
        step = attn_metadata
        key_pages, value_pages = self._pages(kv_cache)
        shared: dict[str, Any] = {
            "page_table": step.block_table,
            "max_seqlen_q": step.max_query_len,
            "window": self.window,
            "batch_invariant": self.batch_invariant,
        }
        plan = step.plan(query, key_pages, value_pages, **shared)
        paged_attention(
            query,
            key_pages,
            value_pages,
            step.query_start_loc,
            step.seq_lens,
            **shared,
            **self._scales(layer, key_pages),
            causal=step.causal,
            alibi_slopes=self.alibi_slopes,
            sink=self.sinks,
            softcap=self.logits_soft_cap,
            scale=self.scale,
            out=output,
            plan=plan,
        )
        return output

    def _pages(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Pages of keys and of values, `[P, page, Hkv, D]`, of a cache `[P, Hkv, page, 2 * D]`."""
        if kv_cache.dtype is torch.uint8:  # how vLLM stores e4m3
            kv_cache = kv_cache.view(E4M3)
        by_token = kv_cache.transpose(1, 2)
        return by_token[..., : self.head_size], by_token[..., self.head_size :]

    def _scales(self, layer: Any, pages: Tensor) -> dict[str, Any]:
        """What e4m3 keys and values are multiplied by: a number for all heads, or one for each."""
        return {"k_scale": layer._k_scale, "v_scale": layer._v_scale} if pages.dtype is E4M3 else {}


class StreamAttentionBackend(AttentionBackend):
    """What vLLM may use us for. It refuses a model with the reasons when it loads it, not at the first request."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", *PAGE_DTYPES]
    forward_includes_kv_cache_update: bool = False

    @staticmethod
    def get_name() -> str:
        return NAME

    @staticmethod
    def get_impl_cls() -> type[StreamAttentionImpl]:
        return StreamAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[StreamAttentionMetadataBuilder]:
        return StreamAttentionMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        """Pages of any multiple of 16 tokens; vLLM splits those of hybrid models that are larger than ours may be."""
        if kv_cache_spec is None or kv_cache_spec.block_size <= MOST_TOKENS:
            return [MultipleOf(16)]
        return [1 << n for n in range(4, MOST_TOKENS.bit_length())]

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        device_capability: Any,
    ) -> str | None:
        """Why our kernels cannot serve such a model on this device, which vLLM adds to its own reasons."""
        if not (current_platform.is_cuda() or current_platform.device_type == "cpu"):
            return f"supports NVIDIA GPUs and CPUs; got {current_platform.device_name}"
        if kv_cache_dtype in (None, "auto"):
            page_dtype = dtype
        elif kv_cache_dtype in PAGE_DTYPES:
            page_dtype = PAGE_DTYPES[kv_cache_dtype]
        else:
            return f"supports kv_cache_dtype {', '.join(cls.supported_kv_cache_dtypes)}; got {kv_cache_dtype}"
        arch = 0 if device_capability is None else device_capability.to_int()
        reasons = why_not(
            head_size,
            dtype,
            page_dtype=page_dtype,
            sink=has_sink,
            device_type=current_platform.device_type,
            arch=arch,
        )
        return "; ".join(reasons) or None
