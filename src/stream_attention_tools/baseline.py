"""FlashAttentionV3: the baseline. It runs other libraries' kernels alone, and tells which."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.backends import cuda
from torch.nn.attention import SDPBackend, sdpa_kernel

from stream_attention.base.device import arch
from stream_attention.base.errors import refuse
from stream_attention.base.problem import CallOptions, Inputs
from stream_attention.core._checks import check_four_dims, check_heads, check_length, copied_config
from stream_attention.core._masks import split_mask
from stream_attention.core.config import StreamAttentionConfig
from stream_attention.dispatch import validate
from stream_attention.ops.attention import in_autocast_dtype

from .module_tools import self_attention_figures


class Call(NamedTuple):
    """One call as the kernels read it. Where it is causal and masked, the mask is of both."""

    query: Tensor  # [B, Tq, Hq, D]
    key: Tensor
    value: Tensor
    mask: Tensor | None  # bool or floating, broadcastable to [B, Hq, Tq, Tk]
    causal: bool  # bottom-right; Tq <= Tk
    dropout_p: float

    @property
    def square(self) -> bool:
        return self.query.shape[1] == self.key.shape[1]

    @property
    def needs_grad(self) -> bool:
        return torch.is_grad_enabled() and any(t.requires_grad for t in self[:3])

    @property
    def key_of_choice(self) -> tuple[Any, ...]:
        """Everything that a kernel's `why_not` may depend on."""
        tensors = [(t.shape, t.stride(), t.dtype, t.device) for t in self[:4] if t is not None]
        return (*tensors, self.causal, self.dropout_p, self.needs_grad)


class Kernel(NamedTuple):
    name: str
    why_not: Callable[[Call], str]  # a sentence; empty if it can
    attend: Callable[[Call], Tensor]


class FlashAttentionV3(nn.Module):
    """The fastest attention that other libraries offer here: FlashAttention-3 if it is installed, else torch's SDPA.

    In order: FlashAttention-3 (the `flash_attn_interface` module, or its op `flash_attn_3::fwd` once loaded), SDPA's
    cuDNN kernel (from Hopper on), its flash kernel, its memory-efficient one, its dense one; on a CPU what SDPA does
    there. Which one ran is in `kernel` and why the ones before it did not is in `why_not`.

    Args:
        config: `num_heads` and `head_dim` of the inputs, `dropout` while training, `max_sequence_length`, and the
            dtype of `benchmark` on a GPU. None takes inputs of any size, and the defaults for `benchmark`.

    Attributes:
        kernel: the name of the kernel that computed the last call, None before: "FlashAttention-3", "SDPA cuDNN",
            "SDPA flash", "SDPA efficient", "SDPA math", "SDPA CPU" (or another device).
        why_not: for each kernel passed over in the last call, a sentence.

    >>> import torch
    >>> from stream_attention import FlashAttentionV3
    >>> baseline = FlashAttentionV3()
    >>> baseline(*torch.randn(3, 1, 10, 4, 16)).shape, baseline.kernel
    (torch.Size([1, 10, 4, 16]), 'SDPA CPU')
    """

    _place: Tensor

    def __init__(self, config: StreamAttentionConfig | None = None) -> None:
        super().__init__()
        self.config = None if config is None else copied_config(config, "a StreamAttentionConfig or None")
        if self.config is not None and not self.config.enable_flash_attention:
            refuse("config", "enable_flash_attention=True for a flash baseline", False)
        self.kernel: str | None = None
        self.why_not: dict[str, str] = {}
        self._chosen: tuple[tuple[Any, ...], Kernel] | None = None
        self.register_buffer("_place", torch.empty(0), persistent=False)

    @property
    def device(self) -> torch.device:
        """Where the module is, which `benchmark` draws its inputs on."""
        return self._place.device

    @validate.refuses_foreign
    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        causal: bool = True,
        attention_mask: Tensor | None = None,
        **foreign: Any,
    ) -> Tensor:
        """Attend.

        Args:
            query: `[B, Tq, Hq, D]`.
            key, value: `[B, Tk, Hkv, D]` and `[B, Tk, Hkv, Dv]`; Hkv divides Hq.
            causal: query i sees keys j <= i + Tk - Tq, as everywhere in this library, not as in SDPA.
            attention_mask: bool (True = attend), integers 0 and 1 (1 = attend) or floating (added to the scores);
                `[B, Tk]`, `[B, Tq, Tk]`, or four dims broadcastable to `[B, Hq, Tq, Tk]`. One mask
                `[Tq, Tk]` for the whole batch is `attention_mask[None]`. Where B = Tq > 1 two dims are refused, since
                they could be either: padding is `attention_mask[:, None, None]`.

        Returns:
            `[B, Tq, Hq, Dv]` in the query's dtype, under autocast in its dtype; 0 for a query that sees no key.

        Raises:
            ValueError, TypeError: a bad argument, before any work.
        """
        if foreign:
            validate.unexpected(FlashAttentionV3.forward, (), foreign)
        query, key, value = in_autocast_dtype(query, key, value)
        check_four_dims(query=query, key=key, value=value)
        if self.config is not None:
            check_heads(self.config.num_heads, self.config.head_dim, query, key)
            check_length(self.config, key.shape[1], where="")
        mask, bias = split_mask(attention_mask, query, key)
        dropout_p = self._dropout()
        validate.attention_tensors(Inputs(query, key, value, mask, bias))
        validate.options(CallOptions(causal, dropout_p=dropout_p), query)
        mask = bias.to(query.dtype) if bias is not None else mask
        masked = query.shape[1] - key.shape[1]  # rows that see no key
        if not causal or key.shape[1] == 0 or masked <= 0:
            return self._attend(query, key, value, mask, causal and key.shape[1] > 0, dropout_p)
        rows = mask[:, :, masked:] if mask is not None and mask.shape[2] > 1 else mask
        out = self._attend(query[:, masked:], key, value, rows, True, dropout_p)  # square
        return torch.cat((out.new_zeros(out.shape[0], masked, *out.shape[2:]), out), 1)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, dropout_p: float
    ) -> Tensor:
        """A checked call, with a mask of four dims; no more queries than keys where it is causal."""
        q_len, k_len = query.shape[1], key.shape[1]
        masked_rows = None
        if mask is not None:
            if causal:
                mask = _with_causal(mask, q_len, k_len)
            mask, masked_rows = _without_masked_rows(mask)
        one = Call(query, key, value, mask, causal and mask is None and q_len > 1, dropout_p)
        out = self._first(one).attend(one)
        return out if masked_rows is None else out.masked_fill(masked_rows.transpose(1, 2), 0.0)

    def explain(self) -> str:
        """Which kernel computed the last call, and why those before it did not."""
        if self.kernel is None:
            return "no call yet"
        return "\n".join([f"kernel  {self.kernel}", *(f"not     {name}: {why}" for name, why in self.why_not.items())])

    def benchmark(self, seq_len: int, batch_size: int = 1, warmup: int = 10, iterations: int = 100) -> dict[str, Any]:
        """Time causal self-attention on random inputs, forward only: `num_heads`, `head_dim` and, on a GPU, the dtype
        are those of the config, on a CPU it is fp32.

        Returns:
            `time_ms` (median), `tflops`, `bandwidth_gb_s` (query, key, value and output once each), `seq_len`,
            `batch_size`, `dtype`, `device` and `kernel`, the one that computed.
        """
        config = self.config or StreamAttentionConfig()
        dtype = torch.float16 if config.use_fp16 else torch.float32
        size = seq_len, batch_size, config.num_heads, config.head_dim
        figures = self_attention_figures(self, *size, self.device, dtype, warmup, iterations)
        return {**figures, "kernel": self.kernel}

    def _first(self, one: Call) -> Kernel:
        """The first kernel that can compute the call; why the ones before it cannot is kept."""
        key = one.key_of_choice
        if self._chosen is None or self._chosen[0] != key:  # the checks cost as much as a small kernel
            reasons = {}
            for kernel in (*KERNELS, _plain_sdpa(one.query.device.type)):
                reason = kernel.why_not(one)
                if not reason:
                    break
                reasons[kernel.name] = reason
            self._chosen, self.kernel, self.why_not = (key, kernel), kernel.name, reasons
        return self._chosen[1]

    def _dropout(self) -> float:
        return self.config.dropout if self.config is not None and self.training else 0.0


def _with_causal(mask: Tensor, q_len: int, k_len: int) -> Tensor:
    """A mask combined with the causal one, aligned bottom-right."""
    ahead = torch.ones(q_len, k_len, dtype=torch.bool, device=mask.device).triu(1 + k_len - q_len)
    return mask & ~ahead if mask.dtype is torch.bool else mask.masked_fill(ahead, -torch.inf)


def _without_masked_rows(mask: Tensor) -> tuple[Tensor, Tensor]:
    """A mask in which fully masked rows see all keys, and which rows `[B, H, Tq, 1]` these are: their softmax would be
    0 / 0, and NaN in every gradient."""
    if mask.dtype is torch.bool:
        masked = ~mask.any(-1, keepdim=True)
        return mask | masked, masked
    masked = (mask == -torch.inf).all(-1, keepdim=True)
    return mask.masked_fill(masked, 0.0), masked


def _fa3_why_not(one: Call) -> str:
    device, dtype, dim = one.query.device, one.query.dtype, one.query.shape[-1]
    if find_spec("flash_attn_interface") is None and _fa3_op() is None:
        return "it is not installed (module flash_attn_interface)"
    reasons = (
        (device.type != "cuda" or arch(device) != 90, "it runs on Hopper GPUs (sm_90)"),
        (dtype not in (torch.float16, torch.bfloat16), f"it takes float16 and bfloat16, not {dtype}"),
        (one.mask is not None, "it takes no mask"),
        (one.dropout_p > 0, "it has no dropout"),
        (dim > 256 or dim % 8 != 0, f"it takes head dims that are multiples of 8 up to 256, not {dim}"),
        (one.value.shape[-1] != dim, "it is used for D = Dv alone"),
        (one.needs_grad and find_spec("flash_attn_interface") is None, "only its forward op is loaded"),
    )
    return "; ".join(reason for applies, reason in reasons if applies)


def _fa3_op() -> Any:
    """FlashAttention-3's forward op, if something has loaded its library."""
    return getattr(torch.ops.flash_attn_3, "fwd", None)


def _fa3(one: Call) -> Tensor:
    if find_spec("flash_attn_interface") is not None:
        result = import_module("flash_attn_interface").flash_attn_func(one.query, one.key, one.value, causal=one.causal)
    else:
        result = _fa3_op()(one.query, one.key, one.value, is_causal=one.causal)
    return result[0] if isinstance(result, (tuple, list)) else result  # versions differ in whether an LSE comes along


def _sdpa(one: Call, backend: SDPBackend | None = None) -> Tensor:
    mask, is_causal = one.mask, one.causal and one.square
    if one.causal and not one.square:  # is_causal is top-left
        if backend is SDPBackend.FLASH_ATTENTION:
            from torch.nn.attention.bias import causal_lower_right  # imports all of torch.compile

            mask = causal_lower_right(one.query.shape[1], one.key.shape[1])
        else:
            visible = torch.ones((), dtype=torch.bool, device=one.query.device)
            mask = _with_causal(visible, one.query.shape[1], one.key.shape[1])
    query, key, value = (t.transpose(1, 2) for t in one[:3])
    with nullcontext() if backend is None else sdpa_kernel(backend):
        grouped = one.query.shape[2] != one.key.shape[2]
        out = F.scaled_dot_product_attention(query, key, value, mask, one.dropout_p, is_causal, enable_gqa=grouped)
    return out.transpose(1, 2)


def _sdpa_why_not(can_use: Callable[[Any, bool], bool], least_arch: int, has_lower_right: bool) -> Any:
    """Why one of SDPA's CUDA kernels cannot compute a call: torch's own warnings."""

    def why_not(one: Call) -> str:
        device = one.query.device
        if reason := _math_why_not(one):
            return reason
        if arch(device) < least_arch:
            return f"it is used from compute capability {least_arch / 10} on"
        mask, is_causal = one.mask, one.causal
        if one.causal and not one.square:
            is_causal = False
            if not has_lower_right:
                mask = torch.ones(one.query.shape[1], one.key.shape[1], dtype=torch.bool, device=device)
        query, key, value = (t.transpose(1, 2) for t in one[:3])
        grouped = query.shape[1] != key.shape[1]
        stated: Any = cuda.SDPAParams  # its stub lacks the last argument
        parameters = stated(query, key, value, mask, one.dropout_p, is_causal, grouped)
        if can_use(parameters, False):
            return ""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            can_use(parameters, True)
        return "; ".join(str(warning.message).partition(" (Triggered")[0] for warning in caught) or "torch refuses it"

    return why_not


def _math_why_not(one: Call) -> str:
    return "" if one.query.device.type == "cuda" else f"it runs on CUDA devices, not on {one.query.device.type}"


def _plain_sdpa(device: str) -> Kernel:
    name = {"cpu": "CPU", "mps": "MPS"}.get(device, device)
    return Kernel(f"SDPA {name}", lambda one: "", _sdpa)


def _sdpa_kernel(name: str, backend: SDPBackend, *conditions: Any) -> Kernel:
    return Kernel(f"SDPA {name}", _sdpa_why_not(*conditions), lambda one: _sdpa(one, backend))


KERNELS = (
    Kernel("FlashAttention-3", _fa3_why_not, _fa3),
    _sdpa_kernel("cuDNN", SDPBackend.CUDNN_ATTENTION, cuda.can_use_cudnn_attention, 90, False),
    _sdpa_kernel("flash", SDPBackend.FLASH_ATTENTION, cuda.can_use_flash_attention, 80, True),
    _sdpa_kernel("efficient", SDPBackend.EFFICIENT_ATTENTION, cuda.can_use_efficient_attention, 50, False),
    Kernel("SDPA math", _math_why_not, lambda one: _sdpa(one, SDPBackend.MATH)),
)
"""In order of preference."""
