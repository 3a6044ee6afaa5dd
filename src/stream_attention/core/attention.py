"""StreamAttention: self-attention with projections and a cache, or attention on explicit queries, keys and values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from ..base.errors import refuse
from ..dispatch.validate import DTYPES, flags, hint_about, refuses_foreign, unexpected
from ._checks import appended, check_length, copied_config
from ._instruments import instruments
from .config import StreamAttentionConfig
from .fused_online_attention import FusedOnlineAttention
from .multihead_attention import StreamMultiheadAttention

GPUS = ("cuda",)
"""Devices where `use_fp16` chooses the dtype of parameters."""

KeyValue = tuple[Tensor, Tensor]


class StreamAttention(nn.Module):
    """Attention for a transformer block, in one streaming pass over the keys, forward and backward.

    `attend(hidden_states)` projects, attends causally and projects back. `attend(query, key, value)` attends only.
    `StreamAttentionConfig` documents the fields of the config.

    Calls compute in the dtype of their input, in which parameters are read; under autocast in its dtype. Moving the
    module to a CUDA device makes fp32 parameters fp16 unless `use_fp16=False` or the move names a dtype, as
    `.to("cuda", torch.float32)` does; `.float()` and the like after that take effect.

    Attributes:
        config: a copy of the config.
        attention: the `FusedOnlineAttention` inside; `attention.device` is where the module is.
        q_proj, k_proj, v_proj, out_proj: the projections, or None without `use_qkv_projections`.
        layer_norm: of the hidden states, or None without `use_layer_norm`.
        last_speedup_achieved: of the longest sequence of the last `benchmark_speedup`; None before.

    >>> import torch
    >>> from stream_attention import StreamAttention, StreamAttentionConfig
    >>> attend = StreamAttention(StreamAttentionConfig(num_heads=4, head_dim=16))
    >>> attend(torch.randn(2, 10, 64)).shape
    torch.Size([2, 10, 64])
    >>> attend(*torch.randn(3, 2, 10, 4, 16), causal=False).shape
    torch.Size([2, 10, 4, 16])
    """

    q_proj: nn.Linear | None
    k_proj: nn.Linear | None
    v_proj: nn.Linear | None
    out_proj: nn.Linear | None
    layer_norm: nn.LayerNorm | None

    def __init__(self, config: StreamAttentionConfig) -> None:
        super().__init__()
        self.config = config = copied_config(config)
        features = config.num_heads * config.head_dim
        dtype = torch.float16 if config.use_fp16 else torch.float32
        options: dict[str, Any] = {"dropout": config.dropout, "dtype": dtype, "backend": config.backend}
        self.attention = FusedOnlineAttention(config.num_heads, config.head_dim, **options)
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            bias = config.qkv_bias or name == "out_proj"
            setattr(self, name, nn.Linear(features, features, bias=bias) if config.use_qkv_projections else None)
        self.layer_norm = nn.LayerNorm(features) if config.use_layer_norm else None
        self.last_speedup_achieved: float | None = None
        for parameter in self.parameters():  # created on a GPU, for example under torch.device("cuda")
            parameter.data = self._narrowed(parameter.data)

    @property
    def last_method_used(self) -> str | None:
        """The backend that computed the last call; None before the first one and after a call inside torch.compile,
        which is planned when the compiled code runs."""
        return self.attention.last_method_used

    def set_distributed(self, enabled: bool, process_group: Any = None) -> None:
        """Divide the queries of every call among the ranks of a group: see `FusedOnlineAttention.set_distributed`.

        Raises ValueError with `enable_distributed=False` in the config.
        """
        if enabled and not self.config.enable_distributed:
            hint = "Make the module from StreamAttentionConfig(enable_distributed=True)"
            refuse("enabled", "False with enable_distributed=False", enabled, hint)
        self.attention.set_distributed(enabled, process_group)

    @refuses_foreign
    def forward(
        self,
        *args: Any,
        hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: None = None,
        past_key_value: KeyValue | None = None,
        use_cache: bool = False,
        output_attentions: bool = False,
        query: Tensor | None = None,
        key: Tensor | None = None,
        value: Tensor | None = None,
        causal: bool | None = None,
        **foreign: Any,
    ) -> Any:
        """Attend: one positional tensor is `hidden_states`, three are `query`, `key` and `value`; a fourth argument is
        `causal`.

        Args:
            hidden_states: `[B, T, num_heads * head_dim]`.
            attention_mask: bool (True = attend), integers 0 and 1 (1 = attend) or floating (added to the scores);
                `[B, Tk]`, `[B, Tq, Tk]`, or four dims broadcastable to `[B, Hq, Tq, Tk]`. Tk counts the cache too. One
                mask `[Tq, Tk]` for the whole batch is `attention_mask[None]`. Where B = Tq > 1 two dims are refused,
                since they could be either: padding is `attention_mask[:, None, None]`.
            position_ids: refused: there is no position embedding here to apply them to.
            past_key_value: keys and values `[B, T, Hkv, D]` that precede those of this call.
            use_cache: also return the keys and values, those of `past_key_value` included.
            output_attentions: True is refused: the weights are not materialised.
            query: `[B, Tq, num_heads, head_dim]`.
            key, value: `[B, Tk, Hkv, head_dim]` and `[B, Tk, Hkv, Dv]`; Hkv divides `num_heads`.
            causal: None is True. Query i sees keys j <= i + Tk - Tq: the last query sees every key, so a call for new
                tokens with their cache computes what a call for all tokens would.

        Returns:
            `[B, T, num_heads * head_dim]` of hidden states, or `[B, Tq, num_heads, Dv]` of explicit queries; with
            `use_cache`, that and `(key, value)`.

        Raises:
            ValueError, TypeError: a bad argument, before any work.
            UnsupportedProblem: tiles are forced and the Triton kernel cannot compute this; the message says why.
        """
        if foreign:
            unexpected(StreamAttention.forward, (), foreign)
        if len(args) == 4:
            if causal is not None:
                refuse("causal", "it once", "the fourth argument and a keyword", error=TypeError)
            causal = args[3]
        causal = True if causal is None else causal
        flags(use_cache=use_cache, output_attentions=output_attentions, causal=causal)
        inputs = self._inputs(args[:3] if len(args) == 4 else args, hidden_states, (query, key, value))
        if position_ids is not None:
            refuse("position_ids", "None: there is no position embedding here", "a value", "Pass rotated query and key")
        if output_attentions:
            hint = "StreamMultiheadAttention returns them (need_weights=True)"
            refuse("output_attentions", "False: weights are not materialised", output_attentions, hint)
        dropout_p = self.attention.dropout_of_call()
        seed = self.attention.next_seed(dropout_p)  # drawn here, so that a recomputed call has the same mask
        options = {"causal": causal, "dropout_p": dropout_p, "seed": seed}
        arguments = inputs, past_key_value, attention_mask, options
        if self.config.gradient_checkpointing and self.training and torch.is_grad_enabled():
            out, keys, values, call = checkpoint(self._compute, *arguments, use_reentrant=False)
        else:
            out, keys, values, call = self._compute(*arguments)
        self.attention.computed(call, seed)
        return (out, (keys, values)) if use_cache else out

    def _inputs(
        self, args: tuple[Any, ...], hidden_states: Tensor | None, qkv: tuple[Tensor | None, ...]
    ) -> tuple[Tensor, ...]:
        """(hidden_states,) or (query, key, value), however they were passed."""
        explicit = [t for t in qkv if t is not None]
        given = [*args, *([hidden_states] if hidden_states is not None else []), *explicit]
        one_way = (len(args) > 0) + (hidden_states is not None) + (len(explicit) > 0) == 1
        features = self.config.num_heads * self.config.head_dim
        dims = [t.dim() if isinstance(t, Tensor) else None for t in given]
        if not one_way or len(given) not in (1, 3) or (explicit and len(given) != 3) or dims not in ([3], [4, 4, 4]):
            shapes = [list(t.shape) if isinstance(t, Tensor) else type(t).__name__ for t in given]
            hint = hint_about(given[0]) if given else ""
            if dims == [3, 3, 3]:
                hint = "StreamMultiheadAttention takes query, key and value of three dims"
            refuse("inputs", "hidden states [B, T, H * D], or query, key and value [B, T, H, D]", shapes, hint)
        if len(given) == 1 and given[0].shape[-1] != features:
            refuse("hidden_states", f"[B, T, num_heads * head_dim = {features}]", list(given[0].shape))
        if len(given) == 1 and given[0].dtype not in DTYPES:
            expected = "dtype float16, bfloat16, float32 or float64"
            refuse("hidden_states", expected, given[0].dtype, error=TypeError)
        return tuple(given)

    def _compute(
        self, inputs: tuple[Tensor, ...], past: KeyValue | None, attention_mask: Tensor | None, options: dict[str, Any]
    ) -> tuple[Tensor, Tensor, Tensor, Any]:
        """The output, its keys and values, and what `attention` records of the call."""
        from_hidden_states = len(inputs) == 1
        query, key, value = self._heads(*inputs) if from_hidden_states else inputs
        if past is not None:
            key, value = appended("past_key_value", past, (key, value), "Pass what use_cache=True returned.")
        check_length(self.config, key.shape[1], where=", the cache included")
        out, call = self.attention.attend(query, key, value, attention_mask, **options)
        if from_hidden_states:
            out = out.flatten(-2)
            out = out if self.out_proj is None else _in_dtype_of(out, self.out_proj)
        return out, key, value, call

    def _heads(self, hidden_states: Tensor) -> tuple[Tensor, ...]:
        """Query, key and value of hidden states, `[B, T, num_heads, head_dim]` each."""
        if self.layer_norm is not None:
            hidden_states = _in_dtype_of(hidden_states, self.layer_norm)
        projections = self.q_proj, self.k_proj, self.v_proj
        flat = (hidden_states if one is None else _in_dtype_of(hidden_states, one) for one in projections)
        return tuple(t.unflatten(-1, (self.config.num_heads, self.config.head_dim)) for t in flat)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> StreamAttention:
        def move(tensor: Tensor) -> Tensor:
            now = fn(tensor)
            moved = tensor.device.type not in GPUS and now.device.type in GPUS
            return self._narrowed(now) if moved and not _names_a_dtype(fn, tensor) else now

        return super()._apply(move, recurse)

    def _narrowed(self, now: Tensor) -> Tensor:
        """A parameter whose dtype the user did not choose: in fp16 if it is fp32 and on a GPU."""
        wide = now.dtype is torch.float32 and now.device.type in GPUS
        return now.to(torch.float16) if self.config.use_fp16 and wide else now

    @staticmethod
    def replace_attention_in_model(model: nn.Module, module_name_pattern: str = "self_attn") -> int:
        """Put `StreamMultiheadAttention` in the place of each `nn.MultiheadAttention` inside `model` whose qualified
        name contains `module_name_pattern`; it shares the old module's parameters. Returns how many were replaced.

        Raises ValueError if there is none, and says what has such a name but is something else.
        """
        named = [
            (name, module)
            for name, module in model.named_modules(remove_duplicate=False)
            if name and module_name_pattern in name
        ]
        replaced: dict[nn.Module, StreamMultiheadAttention] = {}
        for name, module in named:
            if type(module) is nn.MultiheadAttention:
                replaced.setdefault(module, StreamMultiheadAttention.from_torch(module))
                model.set_submodule(name, replaced[module])
        if not replaced:
            others = ", ".join(f"{name} ({type(module).__name__})" for name, module in named) or "nothing of that name"
            refuse("model", f"an nn.MultiheadAttention inside it, with {module_name_pattern!r} in its name", others)
        return len(replaced)

    def benchmark_speedup(
        self, seq_lengths: Sequence[int] = (512, 1024, 2048, 4096), batch_size: int = 1
    ) -> dict[int, dict[str, float]]:
        """Time causal self-attention on random inputs against standard attention, which materialises softmax(QK^T).

        Both run here, in turn, forward only and without dropout or projections, on the module's device: in fp32 on a
        CPU, else in fp16 if `use_fp16`. Medians of up to 50 rounds, or of what fits in two seconds, three at least.

        Returns:
            By length: `stream_time_ms`, `standard_time_ms`, `speedup` (standard by stream), and of the streaming pass
            `tflops` and `bandwidth_gb_s` (query, key, value and output once each).
        """
        results: dict[int, dict[str, float]] = instruments().speedups(self, seq_lengths, batch_size)
        self.last_speedup_achieved = results[max(results)]["speedup"]
        return results


def build_stream_attention(config: StreamAttentionConfig) -> StreamAttention:
    """A `StreamAttention` from its config."""
    return StreamAttention(config)


@overload
def create_stream_attention(config: StreamAttentionConfig) -> StreamAttention: ...


@overload
def create_stream_attention(
    embed_dim: int,
    num_heads: int,
    dropout: float = 0.0,
    bias: bool = True,
    batch_first: bool = False,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> StreamMultiheadAttention: ...


def create_stream_attention(*args: Any, **options: Any) -> StreamAttention | StreamMultiheadAttention:
    """`create_stream_attention(config)` is a `StreamAttention`; `create_stream_attention(embed_dim, num_heads,
    dropout=0.0, bias=True, batch_first=False, device=None, dtype=None)` is a `StreamMultiheadAttention`."""
    name = "create_stream_attention"
    if "config" in options or any(isinstance(argument, StreamAttentionConfig) for argument in args):
        if len(args) + len(options) != 1:
            others = [type(argument).__name__ for argument in args] + sorted(options)
            refuse(name, "a config alone", ", ".join(others), error=TypeError)
        return StreamAttention(*args, **options)
    if (not args and "embed_dim" not in options) or (len(args) < 2 and "num_heads" not in options):
        positional = [f"{argument!r} ({type(argument).__name__})" for argument in args]
        found = ", ".join(positional + sorted(options)) if args else "neither"
        refuse(name, "a config, or embed_dim and num_heads", found, error=TypeError)
    names = ("embed_dim", "num_heads", "dropout", "bias", "batch_first", "device", "dtype")
    unknown = set(options) - set(names)
    if unknown or len(args) > len(names):
        expected = f"arguments among config, {', '.join(names)}"
        refuse(name, expected, sorted(unknown) or len(args), error=TypeError)
    return StreamMultiheadAttention(**dict(zip(names, args, strict=False)), **options)


def _names_a_dtype(fn: Callable[[Tensor], Tensor], like: Tensor) -> bool:
    """Whether `fn`, which `.to()` and the like apply to every parameter, also converts. Tested on an fp64 tensor, since
    a conversion to fp32 does not change one in fp32."""
    return fn(like.new_empty(0, dtype=torch.float64)).dtype is not torch.float64


def _in_dtype_of(x: Tensor, layer: nn.Module) -> Tensor:
    """`layer(x)` with its parameters in the dtype of x. Where autocast is on, it chooses the dtype."""
    device = x.device.type
    if device != "meta" and torch.is_autocast_enabled(device):
        return layer(x)
    cast = {
        name: parameter.to(x.dtype)
        for name, parameter in layer.named_parameters()
        if parameter.is_floating_point() and parameter.dtype is not x.dtype
    }
    return functional_call(layer, cast, (x,)) if cast else layer(x)
