"""Which tests of other projects are run, at which commits, and what of them is not, each with its reason."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

LONGEST = 257
"""The longest sequences on a CPU."""

MOST = 16
"""Parametrisations that are run of a test."""


class Deselected(NamedTuple):
    tests: str  # patterns of names
    reason: str
    where: Mapping[str, Callable[[Any], bool]] = {}  # only where these parameters have such values
    cpu_only: bool = False


class Suite(NamedTuple):
    repository: str
    commit: str
    folder: str  # below that of EXTERNAL_TESTS
    file: str
    helpers: str  # of helpers.py: what the tests import beside the functions
    installs: str
    also: tuple[str, ...] = ()  # files beside it, which it imports
    changed: tuple[tuple[str, str, str], ...] = ()  # pattern, replacement, reason
    deselected: tuple[Deselected, ...] = ()
    most: int = MOST
    cuda_is_cpu: bool = True  # whether "cuda" in the file is a CPU where there is no GPU


def given(value: Any) -> bool:
    return bool(value)


def absent(value: Any) -> bool:
    return not value


def one(value: Any) -> bool:
    return value == 1


def fp8(value: Any) -> bool:
    return value is torch.float8_e4m3fn


def long(value: Any) -> bool:
    return value > LONGEST


def ragged_top_left(value: Any) -> bool:
    """Of xformers' (operator, device, dtype, bias, B, Mq, Mkv, H, K, Kv), whose lengths are drawn."""
    return value[3].__name__ in ("BlockDiagonalCausalMask", "BlockDiagonalCausalLocalAttentionMask")


def differing(value: Any) -> bool:
    return value[5] != value[6] or value[8] != value[9]


def only_bmhk(value: Any) -> bool:
    return value[3].__name__ not in ("NoneType", "Tensor", "LowerTriangularMask")


LENGTHS = tuple(
    Deselected("*", f"lengths above {LONGEST} are left to a GPU", {name: long}, cpu_only=True)
    for name in ("seqlen", "seqlen_q", "seqlen_k", "MAX_T", "padding")
)
RACES = Deselected("*race_condition* *cluster*", "repeats calls to find races of a GPU", cpu_only=True)
ROTARY = Deselected(
    "test_flash_attn_kvcache",
    "the test skips it: a rotary embedding without new keys",
    {"new_kv": absent, "rotary_fraction": given},
)
FLASH = {
    "repository": "Dao-AILab/flash-attention",
    "commit": "0251105a2fb19d2957484b7f023cd8c115286ced",
    "folder": "flash-attention",
}

SUITES = {
    "flash_attn": Suite(
        **FLASH,
        file="tests/test_flash_attn.py",
        helpers="flash_attention",
        installs="flash_attn",
        deselected=(
            Deselected("*", "the probabilities of dropout are not returned", {"dropout_p": given}),
            Deselected("test_flash_attn_varlen_paged_kv_num_splits", "calls a private function of the library"),
            Deselected("test_flash_attn_generator_arg_must_be_none", "calls the library's extension itself"),
            Deselected(
                "test_flash_attn_kvcache_paged_block_table_bounds",
                "the same RuntimeError names cache_seqlens, which exceeds the pages, not block_table",
            ),
            ROTARY,
            Deselected(
                "test_flash_attn_kvcache",
                "the test skips it: a left padding in pages",
                {"has_leftpad": given, "paged_kv_block_size": given},
            ),
            RACES,
            *LENGTHS,
        ),
    ),
    "flash_attn_interface": Suite(
        **FLASH,
        file="hopper/test_flash_attn.py",
        helpers="flash_attention_3",
        installs="flash_attn_interface",
        also=("hopper/padding.py", "hopper/test_util.py"),
        changed=(
            (
                r"torch\.randint\(1, seqlen_k \* 2, \(1,\)\)\.item\(\), 0",
                "0",
                "attention_chunk: chunks are not supported",
            ),
        ),
        deselected=(
            Deselected("*", "qv: there is no second product of queries", {"has_qv": given}),
            Deselected("*", "FP8 tensors with scales of their own", {"dtype": fp8}),
            Deselected(
                "test_flash_attn_output test_flash_attn_varlen_output",
                "one key: dQ and dK are 0 in exact arithmetic, and the test allows no rounding",
                {"seqlen_k": one},
            ),
            Deselected("test_flash3_bw_compatibility", "compares the schemas of the library's own torch operators"),
            ROTARY,
            RACES,
            *LENGTHS,
        ),
    ),
    "sdpa": Suite(
        repository="pytorch/pytorch",
        commit="019d919cb7d8c8ccf9d3c538fad2d333779062fb",
        folder="pytorch",
        file="test/test_transformers.py",
        helpers="sdpa",
        installs="sdpa",
        cuda_is_cpu=False,
        deselected=(
            Deselected("TestSDPACudaOnly* TestSDPAXpuOnly* TestSDPAFailureModes*", "tests of torch's own kernels"),
            Deselected("*_script_* *_subclass_*", "TorchScript cannot compile a Python function in place of torch's"),
            Deselected(
                "*test_sdpa_export_unbacked_attn_mask*",
                "torch.export with sizes that depend on data: the checks of lengths compare them",
            ),
            Deselected(
                "*test_sdpa_backward_with_gradient*",
                "fills a gradient with random numbers in the order of the result's memory, here [B, T, H, D]",
            ),
        ),
    ),
    "xformers": Suite(
        repository="facebookresearch/xformers",
        commit="3da0fc922521aaecebc35e3938b5110bd5cb7195",
        folder="xformers",
        file="tests/test_mem_eff_attention.py",
        helpers="xformers",
        installs="xformers",
        also=("tests/__init__.py", "tests/utils.py"),
        deselected=(
            Deselected("test_lowlevel_api_shapes", "memory_efficient_attention_backward: autograd computes gradients"),
            Deselected(
                "test_unsupported_* test_flash_gqa_wrong_strides test_dispatch_* test_nans_in_padding",
                "which kernel of xformers is chosen, and what each refuses: op= names none here",
            ),
            Deselected(
                "test_forward",
                "the test skips it: tensors packed into one, of different shapes",
                {"packed": given, "opFW_device_dtype_biasT_B_Mq_Mkv_H_K_Kv": differing},
            ),
            Deselected("test_cuda_streams", "streams of a GPU", cpu_only=True),
            Deselected("test_*_ck test_ck_*", "kernels for AMD GPUs"),
            Deselected("*fp8* test_fav3*", "FP8 tensors with scales of their own"),
            Deselected(
                "test_paged_attention", "caches quantised to int4 in xformers' format", {"num_quant_groups": given}
            ),
            *(
                Deselected(
                    "test_paged_attention",
                    "the same ValueError, in other words: a padding that pages do not divide",
                    {"gappy": given, "MAX_T": length.__eq__, "page_size": length.__lt__},
                )
                for length in (64, 128)
            ),
            *(
                Deselected("test_*", "a top-left mask of sequences of different lengths", {name: ragged_top_left})
                for name in ("opFW_device_dtype_biasT_B_Mq_Mkv_H_K_Kv", "opBW_device_dtype_biasT_B_Mq_Mkv_H_K_Kv")
            ),
            *(
                Deselected(
                    "test_*",
                    "the test skips it: a bias that wants [B, T, H, D]",
                    {"fmt": lambda layout: layout == "BMK", name: only_bmhk},
                )
                for name in ("opFW_device_dtype_biasT_B_Mq_Mkv_H_K_Kv", "opBW_device_dtype_biasT_B_Mq_Mkv_H_K_Kv")
            ),
            *LENGTHS,
        ),
    ),
}
