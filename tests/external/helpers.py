"""What other people's tests import beside the functions that they test, and where they find ours."""

from __future__ import annotations

import importlib
import os
import sys
from collections import defaultdict
from functools import wraps
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from tests.external.suites import Suite
from torch import Tensor

from stream_attention.compat import install, seqlen_info


def prepare(suite: Suite, folder: Path, device: str) -> None:
    """Install our functions for a suite's imports, until the process ends, and its helpers."""
    sys.path.insert(0, str(folder / "packages"))
    install(suite.installs, replace=True)
    globals()[suite.helpers](folder / suite.folder, device)


def _answer_for_a_gpu() -> None:
    """Tests ask a GPU for its capability and memory: Hopper's, whose parametrisations they then have."""
    torch.cuda.get_device_capability = lambda device=None: (9, 0)  # type: ignore[assignment]
    torch.cuda.get_device_properties = lambda device=None: SimpleNamespace(total_memory=2**37)  # type: ignore[assignment]
    torch.cuda.synchronize = lambda device=None: None  # type: ignore[assignment]


def flash_attention(folder: Path, device: str) -> None:
    """Its rotary embedding, and names of its interface that its tests import."""
    if device == "cpu":
        _answer_for_a_gpu()
    import flash_attn.flash_attn_interface as interface

    interface.USE_TRITON_ROCM = False
    interface._get_block_size_n = None  # used with dropout alone
    for package in ("flash_attn.layers", "flash_attn.ops", "flash_attn.ops.triton"):
        _module(package)
    _load("flash_attn.ops.triton.rotary", folder / "flash_attn/ops/triton/rotary.py")
    rotary = _load("flash_attn.layers.rotary", folder / "flash_attn/layers/rotary.py")
    if device == "cpu":
        in_torch = rotary.apply_rotary_emb_torch

        def apply_rotary_emb(
            x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, seqlen_offsets: Any = 0
        ) -> Tensor:
            """Its Triton kernel's result: its own function in torch, with offsets, in fp32, rounded once."""
            first = torch.as_tensor(seqlen_offsets).reshape(-1, 1).expand(x.shape[0], 1)
            at = first + torch.arange(x.shape[1])
            found: Tensor = in_torch(x.float(), cos[at].float(), sin[at].float(), interleaved)
            return found.to(x.dtype)

        rotary.apply_rotary_emb = apply_rotary_emb


def flash_attention_3(folder: Path, device: str) -> None:
    """The rotary embedding is FlashAttention-2's."""
    install("flash_attn", replace=True)
    flash_attention(folder, device)


def xformers(folder: Path, device: str) -> None:
    """Its operators, of which ours is the only one: calls that name one, `op=`, are of ours."""
    import xformers.ops as ops
    from xformers.ops import fmha

    _module("xformers._cpp_lib", _built_with_cuda=True)
    _load("xformers.ops.common", folder / "xformers/ops/common.py")
    fmha.common = common = _load("xformers.ops.fmha.common", folder / "xformers/ops/fmha/common.py")
    forward = _operator(common.AttentionFwOpBase, "FwOp")
    backward = _operator(common.AttentionBwOpBase, "BwOp", ("Padded", "Gappy"))  # nor has xformers a backward for them
    for kernel in ("ck", "ck_splitk", "cutlass", "cutlass_blackwell", "flash", "flash3", "triton_splitk"):
        theirs = {name: type(name, (forward,), {"OPERATOR": None}) for name in ("FwOp", *_SPLITS)}
        theirs |= {"BwOp": type("BwOp", (backward,), {"OPERATOR": None}), "InputsFp8": common.Inputs}
        theirs["FwOp_Map"] = defaultdict(lambda theirs=theirs["FwOp"]: theirs)
        setattr(fmha, kernel, _module(f"xformers.ops.fmha.{kernel}", **theirs))
    bias = fmha.attn_bias
    bias._SeqLenInfo = seqlen_info._SeqLenInfo
    for keys in ("PaddedKeys", "CausalWithOffsetPaddedKeys", "GappyKeys", "CausalWithOffsetGappyKeys"):
        getattr(bias, f"PagedBlockDiagonal{keys}Mask")._UNPAGED_TYPE = getattr(bias, f"BlockDiagonal{keys}Mask")
    _module("xformers.ops.fmha.dispatch", _dispatch_fw_priority_list=None)
    fmha.ALL_FW_OPS, fmha.ALL_BW_OPS, ops.fmha, ops.unbind = [forward], [backward], fmha, torch.unbind
    for name in ("Inputs", "AttentionOpBase", "AttentionFwOpBase", "AttentionBwOpBase"):
        setattr(fmha, name, getattr(common, name))
    for name in [name for name in vars(ops) if name.startswith("memory_efficient")]:
        without = _without_op(getattr(ops, name))
        setattr(ops, name, without)
        setattr(fmha, name, without)
    _load("xformers.attn_bias_utils", folder / "xformers/attn_bias_utils.py", device)


_SPLITS = ("FwOp_S1", "FwOp_S2", "FwOp_S4", "FwOp_S8", "FwOp_S32", "FwOp_KVSplit")


def _operator(base: Any, name: str, without: tuple[str, ...] = ()) -> Any:
    biases = importlib.import_module("xformers.ops.fmha.attn_bias")
    names = [bias for bias in biases.__all__ if bias.endswith(("Mask", "Bias")) and bias != "AttentionBias"]
    every = [getattr(biases, bias) for bias in names if not any(word in bias for word in without)]

    def reasons(cls: Any, inputs: Any) -> list[str]:
        """Of the base: bfloat16 is refused there but on a GPU, where ours takes it everywhere."""
        return [reason for reason in base.not_supported_reasons.__func__(cls, inputs) if "bf16" not in reason]

    return type(
        name,
        (base,),
        {
            "OPERATOR": install,
            "not_supported_reasons": classmethod(reasons),
            "NAME": f"ours{name}",
            "SUPPORTED_DEVICES": {"cpu", "cuda"},
            "SUPPORTED_DTYPES": {torch.float, torch.half, torch.bfloat16},
            "SUPPORTED_MAX_K": 512,
            "SUPPORTED_ATTN_BIAS_TYPES": (type(None), Tensor, *every),
            "SUPPORTS_DROPOUT": True,
            "SUPPORTS_CUSTOM_SCALE": True,
            "SUPPORTS_DIFFERENT_VALUE_EMBED": True,
            "SUPPORTS_BMGHK": True,
            "SUPPORTS_ATTN_BIAS_GRAD": True,
            "_TEST_BATCH_SIZES": [1, 3],
        },
    )


def _without_op(function: Any) -> Any:
    @wraps(function)
    def without(*arguments: Any, op: Any = None, **options: Any) -> Any:
        return function(*arguments, **options)

    return without


def sdpa(folder: Path, device: str) -> None:
    """Tests compare a kernel with torch's own mathematics, which `sdpa_kernel` chooses: there ours stands aside."""
    ours, theirs = torch.nn.functional.scaled_dot_product_attention, torch._C._nn.scaled_dot_product_attention
    cuda = torch.backends.cuda

    def scaled_dot_product_attention(*arguments: Any, **options: Any) -> Tensor:
        fused = cuda.flash_sdp_enabled() or cuda.mem_efficient_sdp_enabled() or cuda.cudnn_sdp_enabled()
        alone = any(
            name in os.environ["PYTEST_CURRENT_TEST"] for name in ("math_gradcheck", "math_with_negative_scale")
        )
        return (ours if fused or alone else theirs)(*arguments, **options)

    torch.nn.functional.scaled_dot_product_attention = scaled_dot_product_attention  # type: ignore[assignment]


def _module(name: str, **names: Any) -> Any:
    module = sys.modules[name] = ModuleType(name)
    module.__dict__.update(names)
    return module


def _load(name: str, path: Path, device: str = "cuda") -> Any:
    module = _module(name, __file__=str(path), __package__=name.rpartition(".")[0])
    exec(compile(for_device(path.read_text(), device), str(path), "exec"), module.__dict__)
    return module


def for_device(text: str, device: str) -> str:
    """A file of theirs, in which "cuda" is the name of the device that there is."""
    return text.replace('"cuda"', f'"{device}"')
