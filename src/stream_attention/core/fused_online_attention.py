"""FusedOnlineAttention: `attention` as a module without parameters, with a dropout stream and a benchmark."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..base.device import arch, num_sms
from ..base.errors import refuse
from ..base.problem import tma_compatible
from ..dispatch import validate
from ..dispatch.plan import Plan, check_backend, plan, requested
from ..ops.attention import attention
from ..ops.explain import problems_of_call
from ._checks import check_heads
from ._instruments import instruments
from ._masks import split_mask
from .config import PLANNED, StreamAttentionConfig


class _Call(NamedTuple):
    """What the plan of a call depends on. Kept instead of the plan, which costs more than a short kernel."""

    tensors: dict[str, tuple[torch.Size, torch.dtype]]  # that were passed, by name; under autocast in its dtype
    device: torch.device
    options: dict[str, Any]
    tma_compatible: bool  # as `Problem` has it

    def planned(self) -> Plan:
        tensors = {
            name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in self.tensors.items()
        }
        (problem,), backend = problems_of_call(**tensors, **self.options)
        here = self.device
        facts = {"device": here, "arch": arch(here), "num_sms": num_sms(here), "tma_compatible": self.tma_compatible}
        return plan(problem.replace(**facts), backend)


class FusedOnlineAttention(nn.Module):
    """Exact attention in one streaming pass over the keys, forward and backward, on explicit queries, keys and values.

    Args:
        num_heads, head_dim: of the queries; other inputs are refused. Keys and values may have fewer heads that divide
            `num_heads` (grouped queries).
        tile_size_q, tile_size_k, num_warps, num_stages: at their defaults planned; any other value forces the Triton
            kernel with it, in the forward. See `StreamAttentionConfig`.
        dropout: of the attention weights, while training.
        scale: of the scores; None is head_dim ** -0.5, and 0.0 is a legal scale.
        device: where the module is, which `benchmark` draws its inputs on; `.to()` and `.cuda()` move it.
        dtype: what `benchmark` draws its inputs in on a GPU; `.to()` changes it. A call computes in the dtype of its
            inputs.
        backend: of `stream_attention.attention`; not together with forced tiles.

    `set_distributed` divides the queries of every call among the ranks of a process group.

    There are no parameters and nothing in the state dict. Nor is the dropout stream of `set_deterministic` a buffer:
    under DistributedDataParallel each process keeps its own, for which it gives its own seed.

    >>> import torch
    >>> from stream_attention import FusedOnlineAttention
    >>> attend = FusedOnlineAttention(num_heads=4, head_dim=32)
    >>> out, lse = attend(*torch.randn(3, 2, 100, 4, 32), return_lse=True)
    >>> out.shape, lse.shape
    (torch.Size([2, 100, 4, 32]), torch.Size([2, 4, 100]))
    """

    _place: Tensor

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        tile_size_q: int = 128,
        tile_size_k: int = 64,
        dropout: float = 0.0,
        scale: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float16,
        *,
        num_warps: int = 4,
        num_stages: int = 2,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        tiles: dict[str, Any] = dict(zip(PLANNED, (tile_size_q, tile_size_k, num_warps, num_stages), strict=True))
        config = StreamAttentionConfig(num_heads=num_heads, head_dim=head_dim, dropout=dropout, **tiles)  # checks them
        validate.real("scale", 0.0 if scale is None else scale)
        if dtype not in validate.DTYPES:
            refuse("dtype", "float16, bfloat16, float32 or float64", dtype, error=TypeError)
        if check_backend(backend) == "auto":
            backend = config.backend
        elif config.backend != "auto":
            refuse("backend", "'auto' where tiles are forced", f"{backend!r} beside {tiles}")
        self.num_heads, self.head_dim = num_heads, head_dim
        self.tile_size_q, self.tile_size_k, self.num_warps, self.num_stages = tiles.values()
        self.dropout, self.scale, self.backend = float(dropout), None if scale is None else float(scale), backend
        self.deterministic: bool | None = None
        self._last: _Call | None = None
        self._seed = 0
        self._stream: Tensor | None = None  # (seed, offset) of the next mask, int64
        self.distributed, self.process_group = False, None
        self.register_buffer("_place", torch.empty(0, device=device, dtype=dtype), persistent=False)

    @property
    def device(self) -> torch.device:
        """Where the module is."""
        return self._place.device

    @property
    def dtype(self) -> torch.dtype:
        """What `benchmark` draws its inputs in on a GPU."""
        return self._place.dtype

    @property
    def last_method_used(self) -> str | None:
        """The backend that computed the last call; None before the first one, after a call inside torch.compile, which
        is planned when the compiled code runs, and after one that ranks computed together, each its own part."""
        return self._last.planned().backend if self._last else None

    def set_deterministic(self, enabled: bool, seed: int | None = None) -> None:
        """Make calls reproducible: `deterministic=True` where they leave it None, and dropout from a stream of `seed`.

        Each call with dropout takes the next mask of the stream, a refused one none; setting the same seed again
        restarts it. The stream is on the module's device and advances without a host synchronisation. It is for one
        thread at a time: calls from two may get the same mask. `seed` defaults to the low 32 bits of
        `torch.initial_seed()`. False restores torch's own settings and generators.
        """
        validate.flags(enabled=enabled)
        validate.seed_number(seed)
        if seed is not None and not enabled:
            refuse("seed", "None with enabled=False", seed)
        self.deterministic = True if enabled else None
        if not enabled:
            self._stream = None
            return
        self._seed = torch.initial_seed() & 0xFFFFFFFF if seed is None else seed
        self._start_stream()

    def set_distributed(self, enabled: bool, process_group: Any = None) -> None:
        """Divide the queries of every call among the ranks of a group, each of which gets the whole result.

        Every rank makes the same calls with the same tensors, and every rank has the gradients of one device, if all
        compute the same loss. Not for ranks with batches of their own, as under DistributedDataParallel: their rows
        would be mixed. Rank 0's dropout is everyone's. Memory is not divided: `RingAttention` does that.

        Args:
            enabled: False goes back to this process alone.
            process_group: as `group` of `stream_attention.distributed.ring_attention`; None is the default group, which
                `stream_attention.distributed.initialize()` makes under torchrun. Checked when a call is made.
        """
        validate.flags(enabled=enabled)
        if process_group is not None and not enabled:
            refuse("process_group", "None with enabled=False", type(process_group).__name__)
        self.distributed, self.process_group = enabled, process_group

    def _start_stream(self) -> None:
        with torch.inference_mode(False):  # calls outside of inference mode must be able to advance it
            self._stream = torch.tensor([self._seed, 0], dtype=torch.int64, device=self.device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FusedOnlineAttention:
        super()._apply(fn, recurse)
        if self._stream is not None and self._stream.device != self.device:
            if self._stream.is_meta:  # which has no offset to continue from
                self._start_stream()
            else:
                with torch.inference_mode(False):
                    self._stream = self._stream.to(self.device)
        return self

    @validate.refuses_foreign
    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        causal: bool = True,
        return_lse: bool = False,
        attention_mask: Tensor | None = None,
        dropout_p: float | None = None,
        alibi_slopes: Tensor | None = None,
        deterministic: bool | None = None,
        **foreign: Any,
    ) -> Any:
        """Attend.

        Args:
            query: `[B, Tq, Hq, D]`.
            key, value: `[B, Tk, Hkv, D]` and `[B, Tk, Hkv, Dv]`.
            causal: query i sees keys j <= i + Tk - Tq: the last query sees every key.
            return_lse: also return the log of the softmax denominator, fp32 (fp64 of fp64 inputs), `[B, Hq, Tq]`.
            attention_mask: bool (True = attend), integers 0 and 1 (1 = attend) or floating (added to the scores);
                `[B, Tk]`, `[B, Tq, Tk]`, or four dims broadcastable to `[B, Hq, Tq, Tk]`. One mask
                `[Tq, Tk]` for the whole batch is `attention_mask[None]`. Where B = Tq > 1 two dims are refused, since
                they could be either: padding is `attention_mask[:, None, None]`.
            dropout_p: None is the module's dropout while training and 0 otherwise; a number applies as it is.
            alibi_slopes: `[Hq]` or `[B, Hq]`: adds -slope * |i + Tk - Tq - j|.
            deterministic: bit-equal from run to run; None as `set_deterministic` says, else as torch does.

        Returns:
            `[B, Tq, Hq, Dv]` in the query's dtype, or `(out, lse)`.

        Raises:
            ValueError, TypeError: a bad argument, before any work.
            UnsupportedProblem: tiles are forced and the Triton kernel cannot compute this; the message says why.
        """
        if foreign:
            validate.unexpected(FusedOnlineAttention.forward, (), foreign)
        dropout_p = self.dropout_of_call() if dropout_p is None else dropout_p
        seed = self.next_seed(dropout_p)
        options = {"causal": causal, "return_lse": return_lse, "deterministic": deterministic}
        modifiers = {"dropout_p": dropout_p, "seed": seed, "alibi_slopes": alibi_slopes}
        result, call = self.attend(query, key, value, attention_mask, **options, **modifiers)
        self.computed(call, seed)
        return result

    def dropout_of_call(self) -> float:
        """The dropout of a call that does not pass one."""
        return self.dropout if self.training else 0.0

    def next_seed(self, dropout_p: float) -> Tensor | None:
        """(seed, offset) of the next mask of the stream; None without dropout or without a stream.

        The same until `computed`: a refused call takes none.

        Raises RuntimeError where a checkpoint recomputes a call: the stream has advanced since.
        """
        if self._stream is None or not dropout_p:
            return None
        if not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1:
            raise RuntimeError(
                "set_deterministic: expected no call inside a backward; got one from a checkpoint, which would draw "
                "another dropout mask than the call it repeats. "
                "Use StreamAttentionConfig(gradient_checkpointing=True), or torch's own generator, which a checkpoint "
                "rewinds: set_deterministic(False)"
            )
        return self._stream.clone()

    def computed(self, call: _Call | None, seed: Tensor | None) -> None:
        """Record a computed call, and advance the stream if the call took `seed` from it.

        Separate from `attend`, which a checkpoint repeats.
        """
        self._last = call
        if self._stream is not None and seed is not None:
            self._stream[1:].add_(1)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> tuple[Any, _Call | None]:
        """`out` or `(out, lse)`, with every choice made, and the argument of `computed`, None where there is not one
        plan: what `forward` and `StreamAttention` share. `options` are keywords of `attention`."""
        check_heads(self.num_heads, self.head_dim, query, key)
        options["mask"], options["bias"] = split_mask(attention_mask, query, key)
        options["scale"], options["backend"] = self.scale, self.backend
        if options.get("deterministic") is None:
            options["deterministic"] = self.deterministic
        result = self._op()(query, key, value, **options)
        more = query.is_nested or hasattr(query, "device_mesh")  # a pack, or ranks that each have a part
        if torch.compiler.is_compiling() or self.distributed or more:
            return result, None
        out = result if isinstance(result, Tensor) else result[0]
        dtype = out.dtype
        tensors = {"query": (query.shape, dtype), "key": (key.shape, dtype), "value": (value.shape, dtype)}
        for name in ("mask", "bias", "alibi_slopes", "seed"):
            if (given := options.pop(name, None)) is not None and name != "seed":
                tensors[name] = given.shape, given.dtype
        options["backend"] = requested(self.backend)
        by_tma = tma_compatible(query) and tma_compatible(key) and tma_compatible(value)
        return result, _Call(tensors, out.device, options, by_tma)

    def _op(self) -> Callable[..., Any]:
        """What computes: `attention`, or all ranks together."""
        if not self.distributed:
            return attention
        if torch.compiler.is_compiling():
            hint = "Call set_distributed(False) first, or put the call behind torch.compiler.disable"
            refuse("set_distributed", "calls outside torch.compile", "one inside", hint)
        from ..distributed.query_shard import query_sharded_attention

        return partial(query_sharded_attention, group=self.process_group)

    def benchmark(self, seq_len: int, batch_size: int = 1, warmup: int = 10, iterations: int = 100) -> dict[str, Any]:
        """Time causal self-attention on random inputs, forward only, as the module would compute it now.

        Inputs are drawn on the module's device, in its dtype on a GPU and in fp32 on a CPU. Dropout applies as it does
        to a call: while training.

        Returns:
            `time_ms` (median), `tflops`, `bandwidth_gb_s` (query, key, value and output once each), `seq_len`,
            `batch_size`, `dtype`, `device` and `backend`, the one that computed.
        """
        size = seq_len, batch_size, self.num_heads, self.head_dim
        figures = instruments().self_attention_figures(self, *size, self.device, self.dtype, warmup, iterations)
        return {**figures, "backend": self.last_method_used}

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, head_dim={self.head_dim}, dropout={self.dropout}, backend={self.backend!r}"


def __getattr__(name: str) -> bool:
    """`TRITON_AVAILABLE`: Triton is installed, checked when it is read, since importing this package needs torch alone.
    Whether Triton can compute a call is another question, which `stream_attention.explain` answers."""
    if name == "TRITON_AVAILABLE":
        return find_spec("triton") is not None
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def create_fused_online_attention(num_heads: int, head_dim: int, **options: Any) -> FusedOnlineAttention:
    """A `FusedOnlineAttention`; `options` are its other arguments."""
    return FusedOnlineAttention(num_heads, head_dim, **options)
