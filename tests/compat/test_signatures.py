"""Names, order and defaults of arguments are those of the libraries, as recorded here from their sources.

FlashAttention-2: flash_attn/flash_attn_interface.py and bert_padding.py of version 2.8.4. FlashAttention-3:
hopper/flash_attn_interface.py of commit 0251105. torch: native_functions.yaml of 2.13. xformers: ops/fmha of v0.0.33.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest

_FA2 = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, "
    "deterministic=False, return_attn_probs=False"
)
_PACK = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
_SCALES = "q_descale=None, k_descale=None, v_descale=None"
_FA3 = (
    f"softmax_scale=None, causal=False, qv=None, {_SCALES}, window_size=(-1, -1), attention_chunk=0, softcap=0.0, "
    "num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False"
)
_XFORMERS = "query, key, value, attn_bias=None, p=0.0, scale=None, *, op=None, output_dtype=None"
SIGNATURES = {
    "flash_attn": {
        "flash_attn_func": f"q, k, v, {_FA2}",
        "flash_attn_kvpacked_func": f"q, kv, {_FA2}",
        "flash_attn_qkvpacked_func": f"qkv, {_FA2}",
        "flash_attn_varlen_func": f"q, k, v, {_PACK}, {_FA2}, block_table=None",
        "flash_attn_varlen_kvpacked_func": f"q, kv, {_PACK}, {_FA2}",
        "flash_attn_varlen_qkvpacked_func": f"qkv, cu_seqlens, max_seqlen, {_FA2}",
        "flash_attn_with_kvcache": "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, "
        "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, "
        "causal=False, window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0, "
        "return_softmax_lse=False",
    },
    "bert_padding": {
        "index_first_axis": "input, indices",
        "index_first_axis_residual": "input, indices",
        "index_put_first_axis": "values, indices, first_axis_dim",
        "pad_input": "hidden_states, indices, batch, seqlen",
        "unpad_input": "hidden_states, attention_mask, unused_mask=None",
        "unpad_input_for_concatenated_sequences": "hidden_states, attention_mask_in_length",
    },
    "flash_attn_interface": {
        "flash_attn_combine": "out_partial, lse_partial, out=None, out_dtype=None",
        "flash_attn_func": f"q, k, v, {_FA3}",
        "flash_attn_qkvpacked_func": f"qkv, softmax_scale=None, causal=False, {_SCALES}, window_size=(-1, -1), "
        "attention_chunk=0, softcap=0.0, deterministic=False, num_heads_q=None, sm_margin=0, return_attn_probs=False",
        "flash_attn_varlen_func": f"q, k, v, {_PACK}, seqused_q=None, seqused_k=None, {_FA3}",
        "flash_attn_with_kvcache": "q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, "
        "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, "
        f"cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None, {_SCALES}, softmax_scale=None, "
        "causal=False, window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True, "
        "scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False",
        "get_scheduler_metadata": "batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, "
        "cache_seqlens, qkv_dtype=torch.bfloat16, headdim_v=None, cu_seqlens_q=None, cu_seqlens_k_new=None, "
        "cache_leftpad=None, page_size=None, max_seqlen_k_new=0, causal=False, window_size=(-1, -1), "
        "attention_chunk=0, has_softcap=False, num_splits=0, pack_gqa=None, sm_margin=0",
    },
    "sdpa": {
        "scaled_dot_product_attention": "query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, "
        "scale=None, enable_gqa=False"
    },
    "flex": {
        "flex_attention": "query, key, value, score_mod=None, block_mask=None, scale=None, enable_gqa=False, "
        "return_lse=False, kernel_options=None, *, return_aux=None"
    },
    "xformers": {
        "memory_efficient_attention": _XFORMERS,
        "memory_efficient_attention_forward": _XFORMERS,
        "memory_efficient_attention_forward_requires_grad": _XFORMERS,
        "memory_efficient_attention_partial": _XFORMERS,
        "merge_attentions": "attn_split, lse_split, write_lse=True, output_dtype=None",
    },
}
_Q_K = "q_seqlen, kv_seqlen"
_PADDED = "q_seqlen, kv_padding, kv_seqlen"
CLASSES = {
    "LowerTriangularMask": ("device=None", None),
    "LowerTriangularMaskWithTensorBias": ("bias", None),
    "LowerTriangularFromBottomRightMask": ("", None),
    "LowerTriangularFromBottomRightLocalAttentionMask": ("_window_size", None),
    "LocalAttentionFromBottomRightMask": ("window_left, window_right", None),
    "BlockDiagonalMask": ("q_seqinfo, k_seqinfo, _batch_sizes=None", f"{_Q_K}=None, *, device=None"),
    "BlockDiagonalCausalMask": ("q_seqinfo, k_seqinfo, _batch_sizes=None", f"{_Q_K}=None, *, device=None"),
    "BlockDiagonalCausalFromBottomRightMask": (
        "q_seqinfo, k_seqinfo, _batch_sizes=None",
        f"{_Q_K}=None, *, device=None",
    ),
    "BlockDiagonalCausalLocalAttentionMask": (
        "q_seqinfo, k_seqinfo, _batch_sizes=None, _window_size=0",
        f"{_Q_K}=None, *, device=None",
    ),
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask": (
        "q_seqinfo, k_seqinfo, _batch_sizes=None, _window_size=0",
        f"{_Q_K}=None, *, device=None",
    ),
    "BlockDiagonalPaddedKeysMask": ("q_seqinfo, k_seqinfo", f"{_PADDED}, causal_diagonal=None, *, device=None"),
    "BlockDiagonalCausalWithOffsetPaddedKeysMask": (
        "q_seqinfo, k_seqinfo, causal_diagonal=None",
        f"{_PADDED}, causal_diagonal=None, *, device=None",
    ),
    "BlockDiagonalLocalAttentionPaddedKeysMask": ("q_seqinfo, k_seqinfo, window_left, window_right", None),
    "BlockDiagonalCausalLocalAttentionPaddedKeysMask": ("q_seqinfo, k_seqinfo, _window_size", None),
    "PagedBlockDiagonalPaddedKeysMask": (
        "q_seqinfo, k_seqinfo, block_tables, page_size",
        f"{_Q_K}, block_tables, page_size, *, device=None",
    ),
    "PagedBlockDiagonalCausalWithOffsetPaddedKeysMask": (
        "q_seqinfo, k_seqinfo, block_tables, page_size",
        f"{_Q_K}, block_tables, page_size, *, device=None",
    ),
    "BlockDiagonalGappyKeysMask": ("q_seqinfo, k_seqinfo", "q_seqlen, kv_seqstarts, kv_seqlen, *, device=None"),
    "BlockDiagonalCausalWithOffsetGappyKeysMask": (
        "q_seqinfo, k_seqinfo",
        "q_seqlen, kv_seqstarts, kv_seqlen, *, device=None",
    ),
    "PagedBlockDiagonalGappyKeysMask": (
        "q_seqinfo, k_seqinfo, block_tables, page_size",
        "q_seqlen, kv_seqstarts, kv_seqlen, block_tables, page_size, *, device=None",
    ),
    "PagedBlockDiagonalCausalWithOffsetGappyKeysMask": (
        "q_seqinfo, k_seqinfo, block_tables, page_size",
        "q_seqlen, kv_seqstarts, kv_seqlen, block_tables, page_size, *, device=None",
    ),
}
"""Class -> how it is made, and its `from_seqlens`."""


def ours(module: str) -> Any:
    return importlib.import_module(f"stream_attention.compat.{module}")


def shown(function: Any) -> str:
    """Arguments without annotations."""
    signature = inspect.signature(function)
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))[1:-1]


@pytest.mark.parametrize(
    ("module", "name", "recorded"),
    [(module, name, recorded) for module, rows in SIGNATURES.items() for name, recorded in rows.items()],
)
def test_the_arguments_of_a_function_are_the_librarys(module: str, name: str, recorded: str) -> None:
    assert shown(getattr(ours(module), name)) == recorded


@pytest.mark.parametrize("name", CLASSES)
def test_a_bias_class_is_made_as_the_librarys(name: str) -> None:
    made, from_seqlens = CLASSES[name]
    cls = getattr(ours("attn_bias"), name)
    assert ("" if cls.__init__ is object.__init__ else shown(cls)) == made
    if from_seqlens is not None:
        assert shown(cls.from_seqlens) == from_seqlens


def test_every_public_name_is_recorded() -> None:
    for module, rows in SIGNATURES.items():
        public = {name: getattr(ours(module), name) for name in ours(module).__all__}
        functions = {name: one for name, one in public.items() if inspect.isfunction(one)}
        own = [name for name, one in functions.items() if not one.__module__.startswith("torch.")]
        assert sorted(own) == sorted(rows)
    classes = set(ours("attn_bias").__all__)
    assert classes - set(CLASSES) == {"AttentionBias", "VARLEN_BIASES"} and set(CLASSES) <= classes
