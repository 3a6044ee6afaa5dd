"""StreamMultiheadAttention: `torch.nn.MultiheadAttention` with the fused op underneath."""

from __future__ import annotations

import copy
from numbers import Integral, Real
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..base.errors import refuse
from ..dispatch.validate import is_tensor
from ..ops.attention import attention, in_autocast_dtype


class StreamMultiheadAttention(nn.MultiheadAttention):
    """A drop-in for `torch.nn.MultiheadAttention`: same constructor, initialisation, state dict, masks and results.

    It keeps that module's conventions, not those of `attention`: in a boolean mask True masks a key, float masks are
    added to the scores, and weights are returned unless `need_weights=False`. Only that call is fused and takes O(N)
    memory; with weights everything is computed densely, in O(Tq x Tk), so that output and weights have the same dropout
    mask and both are differentiable.

    Differences from torch's module:

    - A query that sees no key gets weights 0 and the output `out_proj.bias`; torch gives NaN, with weights at least.
    - A masked key or value, even NaN, does not reach an output.
    - The dropout mask differs; like torch's it follows `torch.manual_seed`.
    - `is_causal` without `attn_mask` is always refused; torch's inference fast path ignores it.
    - Masks may differ in dtype from each other and, where floats, from the query.
    - The fused call has no second derivative; the one with weights has.
    - `torch.jit.script` cannot compile it; `torch.compile` and `torch.export` can.
    - Bad arguments raise what torch raises (AssertionError, RuntimeError), with other words, before any work.

    Nested tensors and `torch.jit.trace` take torch's own forward. So does, without asking this module, the inference
    fast path of `nn.TransformerEncoderLayer`, unless `torch.backends.mha.set_fastpath_enabled(False)`.

    >>> import torch
    >>> from stream_attention.core.multihead_attention import StreamMultiheadAttention
    >>> attend = StreamMultiheadAttention(64, 4, batch_first=True)
    >>> x, padding = torch.randn(2, 10, 64), torch.arange(10) >= torch.tensor([[10], [7]])
    >>> out, weights = attend(x, x, x, key_padding_mask=padding)
    >>> out.shape, weights.shape
    (torch.Size([2, 10, 64]), torch.Size([2, 10, 10]))
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        _number("embed_dim", embed_dim)
        _number("num_heads", num_heads)
        for name, size in (("kdim", kdim), ("vdim", vdim)):
            if size is not None:
                _number(name, size)
        if embed_dim % num_heads:
            refuse("embed_dim", f"a multiple of num_heads={num_heads}", embed_dim, error=AssertionError)
        _number("dropout", dropout, Real, "a number", least=0)
        if not dropout <= 1:
            refuse("dropout", "a probability in [0, 1]", dropout)
        super().__init__(
            embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype
        )

    @classmethod
    def from_torch(cls, module: nn.MultiheadAttention) -> StreamMultiheadAttention:
        """The same module on the fused op: it shares the parameters and `out_proj` of `module`, and has its hooks.

        Raises:
            TypeError: `module` is not exactly an `nn.MultiheadAttention`, or its forward was replaced: the changes of a
                subclass, a parametrisation or another library would be lost.
        """
        if type(module) not in (nn.MultiheadAttention, StreamMultiheadAttention):
            expected = "a torch.nn.MultiheadAttention itself, no subclass"
            refuse("module", expected, type(module).__name__, error=TypeError)
        state = module.__getstate__()
        if "forward" in state:
            refuse("module", "the forward of its class", "one that was replaced on the instance", error=TypeError)
        shared = cls.__new__(cls)
        shared.__dict__.update({k: copy.copy(v) if isinstance(v, (dict, set)) else v for k, v in state.items()})
        return shared

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of `query` over `key` and `value`, as `nn.MultiheadAttention.forward` defines it.

        Args:
            query: `[Tq, B, embed_dim]`, `[B, Tq, embed_dim]` if `batch_first`, or unbatched `[Tq, embed_dim]`; in the
                dtype of the parameters, as torch wants it, or under autocast.
            key: likewise with Tk and `kdim`.
            value: likewise with Tk and `vdim`.
            key_padding_mask: `[B, Tk]`, or `[Tk]` unbatched. Bool: True masks the key. Float: added to the scores.
            need_weights: also return the weights, which costs O(Tq x Tk) memory.
            attn_mask: `[Tq, Tk]` or `[B * num_heads, Tq, Tk]`, bool or float likewise.
            average_attn_weights: weights `[B, Tq, Tk]`, the mean over the heads, or `[B, num_heads, Tq, Tk]`.
            is_causal: a hint that `attn_mask`, which must be passed too, is causal (top-left). As in torch it replaces
                the mask if there is no `key_padding_mask` and `need_weights=False`, and has no effect otherwise. Keys
                of `add_bias_kv` and `add_zero_attn` come last, so the hint masks them, and the mask does not.

        Returns:
            The output, in the layout of the query, and the weights or None.

        Raises:
            AssertionError, RuntimeError: a bad argument, as in torch; the message names it with expected and actual.
            TypeError: no tensor.
        """
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            is_tensor(name, tensor)
        tracing = torch.jit.is_tracing()  # type: ignore[attr-defined]
        if tracing or query.is_nested or key.is_nested or value.is_nested:
            return super().forward(
                query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            )
        by_hint = is_causal and key_padding_mask is None and not need_weights
        self._check(query, key, value, key_padding_mask, attn_mask, is_causal, by_hint)

        q, k, v = (self._split_heads(x) for x in self._project(query, key, value))
        k, v = self._with_extra_keys(k, v)
        mask, bias = (None, None) if by_hint else self._masks(q, key_padding_mask, attn_mask)
        dropout_p = self.dropout if self.training else 0.0

        weights = None
        if need_weights:
            heads, weights = _attention_with_weights(q, k, v, mask, bias, dropout_p)
            weights = weights.mean(1) if average_attn_weights else weights
            weights = weights if query.dim() == 3 else weights.squeeze(0)
        else:
            if dropout_p == 1.0:  # legal in torch: nothing is left
                v, dropout_p = F.dropout(v, 1.0), 0.0
            if by_hint:  # top-left, where `attention` is bottom-right: no query sees a key beyond the Tq-th
                k, v = k[:, : q.shape[1]], v[:, : q.shape[1]]
            window = (-1, q.shape[1] - k.shape[1]) if by_hint else None
            heads = attention(q, k, v, window=window, mask=mask, bias=bias, dropout_p=dropout_p)
        joined = heads.flatten(-2)  # [B, Tq, embed_dim]
        if query.dim() == 2:
            joined = joined.squeeze(0)
        elif not self.batch_first:
            joined = joined.transpose(0, 1)
        return F.linear(joined, self.out_proj.weight, self.out_proj.bias), weights

    def _check(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None,
        attn_mask: Tensor | None,
        is_causal: bool,
        by_hint: bool,
    ) -> None:
        if query.dim() not in (2, 3):
            refuse("query", "2 dims, or 3 with a batch", list(query.shape), error=AssertionError)
        parameters = self.out_proj.weight
        alike = self._qkv_same_embed_dim and key.shape == value.shape  # torch then raises in the matrix product
        sizes = {"query": (query, self.embed_dim), "key": (key, self.kdim), "value": (value, self.vdim)}
        for name, (tensor, features) in sizes.items():
            if tensor.dim() != query.dim() or tensor.shape[-1] != features:
                words = f"{query.dim()} dims as in the query, the last of size {features}"
                multiplied = alike and name == "key" and tensor.dim() == query.dim()
                refuse(name, words, list(tensor.shape), error=RuntimeError if multiplied else AssertionError)
            if tensor.dtype is not parameters.dtype and _multiplied(tensor) is not _multiplied(parameters):
                hint = f"Convert it, or the module: .to({tensor.dtype})" if tensor.is_floating_point() else ""
                refuse(name, f"the parameters' dtype {parameters.dtype}", tensor.dtype, hint, RuntimeError)
        if key.shape[:-1] != value.shape[:-1]:
            words = f"the key's length and batch {list(key.shape[:-1])}"
            refuse("value", words, list(value.shape[:-1]), error=AssertionError)
        batch_dim = 0 if self.batch_first else 1
        batch = query.shape[batch_dim] if query.dim() == 3 else 1
        if query.dim() == 3 and key.shape[batch_dim] != batch:
            hint = f"The layout is {'[B, T, E]' if self.batch_first else '[T, B, E]'}."
            refuse("key", f"the query's batch size {batch}", list(key.shape), hint, RuntimeError)
        q_len, k_len = (x.shape[1 - batch_dim] if x.dim() == 3 else x.shape[0] for x in (query, key))

        for name, mask in (("key_padding_mask", key_padding_mask), ("attn_mask", attn_mask)):
            if mask is not None:
                is_tensor(name, mask)
            if mask is not None and mask.dtype is not torch.bool and not mask.is_floating_point():
                refuse(name, "a bool (True = masked) or floating dtype", mask.dtype, error=AssertionError)
        if key_padding_mask is not None:
            shape = [batch, k_len] if query.dim() == 3 else [k_len]
            if list(key_padding_mask.shape) != shape:
                refuse("key_padding_mask", f"shape {shape}", list(key_padding_mask.shape), error=AssertionError)
        if attn_mask is not None:
            shapes = [q_len, k_len], [batch * self.num_heads, q_len, k_len]
            wrong = list(attn_mask.shape)
            asserted = len(wrong) not in (2, 3) or (query.dim() == 2 and len(wrong) == 3)
            if wrong not in shapes and (asserted or not by_hint):
                error = AssertionError if asserted else RuntimeError
                refuse("attn_mask", f"shape {shapes[0]} or {shapes[1]}", wrong, error=error)
        if is_causal and attn_mask is None:
            hint = "It is a hint about that mask: pass nn.Transformer.generate_square_subsequent_mask(T) too."
            refuse("is_causal", "an attn_mask beside it", None, hint, RuntimeError)

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """The projections, each in the layout of its input and `embed_dim` wide. The bias may have another dtype."""
        first = self.in_proj_weight if self._qkv_same_embed_dim else self.q_proj_weight
        bias = None if self.in_proj_bias is None else self.in_proj_bias.to(first.dtype)
        if self._qkv_same_embed_dim:
            if query is key and key is value:
                return F.linear(query, self.in_proj_weight, bias).chunk(3, -1)
            weights = self.in_proj_weight.chunk(3)
        else:
            weights = self.q_proj_weight, self.k_proj_weight, self.v_proj_weight
        biases = (None, None, None) if bias is None else bias.chunk(3)
        return tuple(F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True))

    def _split_heads(self, x: Tensor) -> Tensor:
        """`[B, T, num_heads, head_dim]` of a projection, whatever its layout; a view."""
        if x.dim() == 2:
            x = x.unsqueeze(0)
        elif not self.batch_first:
            x = x.transpose(0, 1)
        return x.unflatten(-1, (self.num_heads, self.head_dim))

    def _with_extra_keys(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values followed by those of `add_bias_kv` and `add_zero_attn`."""
        if self.bias_k is not None and self.bias_v is not None:
            rows = (self.bias_k, key), (self.bias_v, value)  # [1, 1, embed_dim] each
            key, value = (
                torch.cat((x, row.unflatten(-1, x.shape[2:]).expand(x.shape[0], -1, -1, -1)), 1) for row, x in rows
            )
        if self.add_zero_attn:
            key, value = (F.pad(x, (0, 0, 0, 0, 0, 1)) for x in (key, value))
        return key, value

    def _masks(
        self, query: Tensor, key_padding_mask: Tensor | None, attn_mask: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """The masks as `mask` and `bias` of `attention`, not expanded.

        Two float masks are summed, to at most `[B, num_heads, Tq, Tk]`: there is one `bias`.
        """
        given = []
        if attn_mask is not None:
            batch_and_heads = query.shape[0], self.num_heads
            given.append(attn_mask[None, None] if attn_mask.dim() == 2 else attn_mask.unflatten(0, batch_and_heads))
        if key_padding_mask is not None:
            given.append(key_padding_mask.view(query.shape[0], 1, 1, key_padding_mask.shape[-1]))
        extra_keys = (self.bias_k is not None) + self.add_zero_attn
        mask: Tensor | None = None
        bias: Tensor | None = None
        for one in given:
            one = F.pad(one, (0, extra_keys)) if extra_keys else one
            if one.dtype is not torch.bool:
                bias = one if bias is None else bias + one
            elif mask is None:
                mask = ~one
            else:  # a second boolean: `mask & ~one` would be expanded, a bias beside the mask is not
                bias = torch.where(one, -torch.inf, query.new_zeros(()))
        return mask, bias


def _multiplied(tensor: Tensor) -> torch.dtype:
    """The dtype in which a linear layer multiplies a tensor: its own, or autocast's."""
    return in_autocast_dtype(tensor.new_empty(0))[0].dtype


def _attention_with_weights(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, bias: Tensor | None, dropout_p: float
) -> tuple[Tensor, Tensor]:
    """Dense attention on `[B, T, H, D]`, and its weights `[B, H, Tq, Tk]` after dropout."""
    q, k, v = (x.transpose(1, 2) for x in (query * query.shape[-1] ** -0.5, key, value))
    if mask is None and bias is None:
        weights = (q @ k.mT).softmax(-1)
    else:
        added = q.new_zeros(()) if bias is None else bias.to(q.dtype)
        added = added if mask is None else torch.where(mask, added, -torch.inf)
        masked = added == -torch.inf
        rows, columns = masked.all(-1, keepdim=True), masked.all(-2).unsqueeze(-1)
        k, v = k.masked_fill(columns, 0.0), v.masked_fill(columns, 0.0)  # padding may be NaN, and 0 * NaN is NaN
        added = added.masked_fill(rows, 0.0).expand(*q.shape[:2], -1, -1)
        scores = torch.baddbmm(*(x.flatten(0, 1) for x in (added, q, k.mT)))  # rounds once, @ and + would round twice
        weights = scores.unflatten(0, q.shape[:2]).softmax(-1).masked_fill(rows, 0.0)
    weights = F.dropout(weights, dropout_p)
    return (weights @ v).transpose(1, 2), weights


def _number(name: str, number: Any, kind: type[Any] = Integral, words: str = "an int", least: int = 1) -> None:
    """Refuse another type; NumPy's numbers are accepted, as in torch."""
    if not isinstance(number, kind) or isinstance(number, bool):
        refuse(name, words, f"{number!r} ({type(number).__name__})", error=TypeError)
    if number < least:
        refuse(name, f"at least {least}", number)
