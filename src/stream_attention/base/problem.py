"""The parameters of one attention call, and the tensors it works on.

`Problem` is everything that a plan may depend on but for the `Request`, what the caller asks for: hashable values, so
plans are cached by them. `Inputs` are the tensors, already in the form kernels read. A kernel is a function of
(problem, inputs, config).

Legend used everywhere: B batch, Tq/Tk lengths, Hq/Hkv heads, D/Dv head dims.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar
from warnings import warn

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.functional import pad

from .device import allows_tf32, arch, num_sms

if TYPE_CHECKING:
    from typing import Self

    from .kv_layouts import KVCache
    from .kv_layouts.quantized_tensor import Coding

T = TypeVar("T")

AUTO = "auto"
"""The backend of a call that names none."""

UNBOUNDED = -1
"""A window side that hides nothing."""


class Inputs(NamedTuple):
    """The tensors of one call, as kernels read them. What is absent is None."""

    query: Tensor  # [B, Tq, Hq, D], packed: [Nq, Hq, D]
    key: Tensor  # [B, Tk, Hkv, D], packed: [Nk, Hkv, D]
    value: Tensor  # [B, Tk, Hkv, Dv], packed: [Nk, Hkv, Dv]
    mask: Tensor | None = None  # bool, 4-D, each dim 1 or that of [B, Hq, Tq, Tk]; True = attend
    bias: Tensor | None = None  # float, 4-D, likewise
    alibi_slopes: Tensor | None = None  # [B, Hq] or [1, Hq]
    sink: Tensor | None = None  # [Hq]
    seed: Tensor | None = None  # int64 [2] on the query's device: (seed, offset)
    cu_seqlens_q: Tensor | None = None  # int32 or int64 [B + 1], packed only
    cu_seqlens_k: Tensor | None = None
    # A mask as intervals: query i sees keys at positions from start to before end, and key j is seen by queries whose
    # label lies in its own interval. int32, each of the first two dims 1 or that of [B, Hq].
    query_bounds: Tensor | None = None  # [B, Hq, 3, Tq]: start, end, label
    key_bounds: Tensor | None = None  # [B, Hq, 2, Tk]: start, end; only with query_bounds


class CallOptions(NamedTuple):
    """The other arguments of a public function, as its caller gave them."""

    causal: bool = False
    window: tuple[int, int] | None = None
    softcap: float = 0.0
    scale: float | None = None
    dropout_p: float = 0.0
    seed: int | Tensor | None = None
    deterministic: bool | None = None
    return_lse: bool = False
    backend: str = AUTO
    precision: str | None = None
    rotate: bool = False

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Self:
        """Those among the arguments of a call."""
        return cls(**{name: arguments[name] for name in cls._fields if name in arguments})


class DecodeInputs(NamedTuple):
    """The tensors of a call on a cache, with what its results are written to."""

    query: Tensor  # [B, Tq, Hq, D]
    cache: KVCache
    tree: Tensor | None = None  # bool [B, Tq, Tq]
    alibi_slopes: Tensor | None = None  # [B, Hq] or [1, Hq]
    sink: Tensor | None = None  # [Hq]
    out: Tensor | None = None  # [B, Tq, Hq, Dv]; None: a new one
    return_lse: bool = False
    workspace: Tensor | None = None  # of `workspace_numbers` in gpu/decode_tuning.py; None: a new one


class PagedInputs(NamedTuple):
    """The tensors of a call of ragged queries on paged keys, with what its results are written to."""

    query: Tensor  # [Nq, Hq, D]
    key_pages: Tensor  # [P, page, Hkv, D]
    value_pages: Tensor  # [P, page, Hkv, Dv]
    cu_seqlens_q: Tensor  # int32 [B + 1]
    seqused_k: Tensor  # int32 [B]: keys of each request
    page_table: Tensor  # int32 [B, W], or with kv_indptr int32 or int64 [entries]
    kv_indptr: Tensor | None = None  # int32 [B + 1]: where each request's entries begin
    alibi_slopes: Tensor | None = None  # [B, Hq] or [1, Hq]
    sink: Tensor | None = None  # [Hq]
    causal: Tensor | None = None  # bool or int32 [B]: which requests are; None: all, or none
    tree_mask: Tensor | None = None  # bool: [q_b, q_b] of every request that has a tree, one behind the other
    tree_offsets: Tensor | None = None  # int32 or int64 [B + 1]: where each of these begins
    k_scale: Tensor | None = None  # fp32 [B or 1, Hkv or 1], of pages in e4m3
    v_scale: Tensor | None = None  # likewise
    out: Tensor | None = None  # [Nq, Hq, Dv]; None: a new one
    return_lse: bool = False


class PagedPlan(NamedTuple):
    """The work of a step, which `paged_plan` lists: for calls with the same offsets and lengths, as in other layers."""

    work: Tensor  # int32
    made_for: tuple[int, ...]  # sizes that such calls have; none: any


class Wanted(NamedTuple):
    """Which gradients a backward computes."""

    query: bool = True
    key: bool = True
    value: bool = True
    bias: bool = False
    alibi_slopes: bool = False
    sink: bool = False


class Gradients(NamedTuple):
    """What a backward returns, each of its input's shape; None where it was not wanted."""

    query: Tensor | None = None
    key: Tensor | None = None
    value: Tensor | None = None
    bias: Tensor | None = None
    alibi_slopes: Tensor | None = None
    sink: Tensor | None = None


Forward = Callable[[Inputs, bool], tuple[Tensor, Tensor | None]]
"""A prepared forward: of inputs, and of whether the LSE is wanted; it may come all the same."""

Results = tuple[Tensor, Tensor, Tensor, Tensor | None]
"""What a backward reads beside the inputs: out, lse and their gradients; that of the LSE may be None."""

Backward = Callable[..., Gradients]
"""A prepared backward: of inputs and `Results`."""


class Shape(NamedTuple):
    """Sizes of the tensors, but for the length of the keys."""

    batch: int  # packed: how many sequences
    q_len: int  # packed: the longest
    q_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int


class KV(NamedTuple):
    """How keys and values lie. One type for all layouts: NamedTuples of two types are equal where their fields are."""

    layout: Literal["dense", "packed", "cache"]
    k_len: int  # packed: the longest; of a cache: what a row can hold
    page: int = 0  # tokens of a page of a cache; 0: none
    coding: Coding | None = None  # of a quantised cache
    ragged: bool = False  # requests have as many queries each as offsets say; q_len is the most
    e4m3: bool = False  # of pages: not in the query's dtype
    causal_by_request: bool = False  # only those are that have no tree, and that a tensor, if there is one, names


class Operands(NamedTuple):
    """How query, key and value enter the products."""

    dtype: torch.dtype
    tma_compatible: bool = True  # rows of query, key and value start on 16 bytes and lie whole 16 bytes apart
    tf32: bool = False  # fp32 products may be rounded to TF32, as torch.backends.cuda.matmul allows
    fp8: bool = False  # quantised to e4m3 with block-wise scales; `dtype` is that of the inputs


class Hardware(NamedTuple):
    device: torch.device
    arch: int = 0  # compute capability of a CUDA device: 90 is 9.0
    num_sms: int = 0  # streaming multiprocessors


class Window(NamedTuple):
    left: int = UNBOUNDED  # a key is visible from this many positions before the query ...
    right: int = UNBOUNDED  # ... to this many after it; causal is right = 0


class Positions(NamedTuple):
    """Where the rows of a shard stand in the whole call; see `Problem`."""

    q_start: int = 0
    q_stride: int = 1
    k_start: int = 0
    k_stride: int = 1
    q_base: int = 0


class Scores(NamedTuple):
    """What is done to scores and probabilities, beside the window."""

    scale: float = 1.0
    softcap: float = 0.0
    mask: bool = False
    bias: torch.dtype | None = None
    alibi: bool = False
    sink: bool = False
    dropout_p: float = 0.0
    batch_start: int = 0  # index of batch entry 0 in the whole call, for dropout
    value_scale: float = 1.0  # values are this times what is stored
    bounds: bool = False  # the mask, or a part of it, is given as intervals; `mask` holds too
    function: str = ""  # the name of a function of scores and indices


class Direction(NamedTuple):
    """Which results are wanted: of the forward, or gradients."""

    backward: bool = False  # the problem is the gradient of the call
    lse_grad: bool = False  # backward only: a gradient arrives through the LSE too
    row_grad: bool = False  # backward only: gradients that are sums over rows are wanted: of ALiBi slopes or sinks
    partial: bool = False  # one of several shards: emit the output and the gradients in state_dtype, to be summed
    deterministic: bool = False


class _Parts(NamedTuple):
    shape: Shape
    kv: KV
    operands: Operands
    hardware: Hardware
    window: Window = Window()
    positions: Positions = Positions()
    scores: Scores = Scores()
    direction: Direction = Direction()


_KINDS: tuple[Any, ...] = (Shape, KV, Operands, Hardware, Window, Positions, Scores, Direction)
_PLACES = {name: (part, at) for part, kind in enumerate(_KINDS) for at, name in enumerate(kind._fields)}
"""Of each field the part that has it, and its place there."""

_RENAMED = {"processors": "num_sms", "addressable": "tma_compatible"}
"""Old names of fields, which `Problem.replace` still takes."""

_read: Any = property


def _fields_of(kind: type[T], part: str, *names: str) -> tuple[T, ...]:
    """Properties that read fields of one part, all if none is named. To a type checker they are of this kind."""
    names = names or _KINDS[_Parts._fields.index(part)]._fields
    return tuple(_read(attrgetter(f"{part}.{name}")) for name in names)


class Problem(_Parts):
    """The frozen parameters of one call, on tensors or on a cache: each part is a value, and so is the whole.

    Query row i stands at position `q_start + i * q_stride`, key j at `k_start + j * k_stride`; `q_base` is the position
    of row 0 of the whole call. Causal, window and ALiBi are functions of these positions, and dropout of (query
    position - q_base, key position), so they mean the same on any shard of a call. Packed sequences stand bottom-right
    one by one, and so do the rows of a cache, each at its own length.

    Every field is read, and changed by `replace`, under its own name, whatever part it is in.
    """

    __slots__ = ()

    batch, q_len, q_heads, kv_heads, head_dim, value_dim = _fields_of(int, "shape")
    k_len, page = _fields_of(int, "kv", "k_len", "page")
    coding: Coding | None = _read(attrgetter("kv.coding"))
    packed: bool = _read(lambda self: self.kv.layout == "packed")
    cached: bool = _read(lambda self: self.kv.layout == "cache")
    ragged, e4m3, causal_by_request = _fields_of(bool, "kv", "ragged", "e4m3", "causal_by_request")
    dtype: torch.dtype = _read(attrgetter("operands.dtype"))
    tma_compatible, tf32, fp8 = _fields_of(bool, "operands", "tma_compatible", "tf32", "fp8")
    device: torch.device = _read(attrgetter("hardware.device"))
    arch, num_sms = _fields_of(int, "hardware", "arch", "num_sms")
    left, right = _fields_of(int, "window")
    q_start, q_stride, k_start, k_stride, q_base = _fields_of(int, "positions")
    scale, softcap, dropout_p = _fields_of(float, "scores", "scale", "softcap", "dropout_p")
    mask, alibi, sink, bounds = _fields_of(bool, "scores", "mask", "alibi", "sink", "bounds")
    bias: torch.dtype | None = _read(attrgetter("scores.bias"))
    batch_start: int = _read(attrgetter("scores.batch_start"))
    value_scale: float = _read(attrgetter("scores.value_scale"))
    function: str = _read(attrgetter("scores.function"))
    backward, lse_grad, row_grad, partial, deterministic = _fields_of(bool, "direction")
    kind: str = _read(
        lambda self: "paged" if self.ragged else "decode" if self.cached else "backward" if self.backward else "forward"
    )
    group: int = _read(lambda self: self.q_heads // max(self.kv_heads, 1))  # query heads per KV head
    out_dtype: torch.dtype = _read(lambda self: self.state_dtype if self.partial else self.dtype)

    def replace(self, **fields: Any) -> Problem:
        """The same problem but for these fields: `problem.replace(q_len=1, arch=90)`."""
        parts: list[Any] = list(self)
        changed: dict[int, list[Any]] = {}
        for name, value in fields.items():
            if name in _RENAMED:
                warn(f"{name} is deprecated; use {_RENAMED[name]}", DeprecationWarning, stacklevel=2)
                name = _RENAMED[name]
            part, at = _PLACES[name]
            changed.setdefault(part, list(parts[part]))[at] = value
        for part, values in changed.items():
            parts[part] = _KINDS[part]._make(values)
        return Problem._make(parts)

    def _replace(self, **fields: Any) -> Problem:
        """The old name of `replace`."""
        warn("Problem._replace is deprecated; use Problem.replace", DeprecationWarning, stacklevel=2)
        return self.replace(**fields)

    @property
    def state_dtype(self) -> torch.dtype:
        """Dtype of the LSE, of partial outputs and of everything that is summed."""
        return torch.float64 if self.dtype is torch.float64 else torch.float32

    @property
    def last_position(self) -> int:
        """The largest position of a query or a key."""
        last_query = self.q_start + (self.q_len - 1) * self.q_stride
        return max(last_query, self.k_start + (self.k_len - 1) * self.k_stride)

    @property
    def empty(self) -> bool:
        """There is no score to compute."""
        return min(self.batch, self.q_len, self.k_len, self.q_heads) <= 0

    def __str__(self) -> str:
        sides, is_ = tuple(self.window), "<=" if self.packed else "="  # of a pack the longest, as plans round it
        is_most = "<=" if self.ragged else is_
        sizes = f"B={self.batch} Tq{is_most}{self.q_len}"
        dims = f"Hq={self.q_heads} Hkv={self.kv_heads} D={self.head_dim} Dv={self.value_dim} {dtype_name(self.dtype)}"
        if self.cached:
            kind = f"pages of {self.page}" if self.page else "contiguous"
            quantised = f"quantised to {self.coding.format}, " if self.coding else "in e4m3, " if self.e4m3 else ""
            return f"{sizes} {dims} on {self.device}, {kind}, {quantised}up to {self.k_len} keys"
        features = [
            "causal" if sides == (UNBOUNDED, 0) else f"window={sides}" if sides != (UNBOUNDED, UNBOUNDED) else "",
            "mask by intervals" if self.bounds else "mask" if self.mask else "",
            f"bias={dtype_name(self.bias)}" if self.bias else "",
            "alibi" if self.alibi else "",
            "sink" if self.sink else "",
            f"softcap={self.softcap:g}" if self.softcap else "",
            f"score_mod={self.function}" if self.function else "",
            f"dropout={self.dropout_p:g}" if self.dropout_p else "",
            "deterministic" if self.deterministic else "",
            "in fp8" if self.fp8 else "",
        ]
        return (
            f"{self.kv.layout} {sizes} Tk{is_}{self.k_len} {dims} on {self.device} "
            f"scale={self.scale:g} {' '.join(filter(None, features))}"
        ).rstrip()


class Request(NamedTuple):
    """What a caller asks for, beside the problem."""

    backend: str = AUTO
    forced: tuple[tuple[str, int], ...] = ()  # fields of a forward's configuration, of a backend that is named
    num_splits: int | None = None  # parts that the keys of a cache are computed in
    batch_invariant: bool = False  # of a call on a cache: a row has the same bits in any batch


def hardware_of(device: torch.device) -> Hardware:
    """What plans look at of a device that is here."""
    return Hardware(device, arch(device), num_sms(device))


def gradient_of(problem: Problem, inputs: Inputs, lse_grad: bool = False) -> Problem:
    """The backward of a forward problem whose gradients are those that `inputs` require."""
    row_grad = any(t is not None and t.requires_grad for t in (inputs.alibi_slopes, inputs.sink))
    return problem.replace(backward=True, lse_grad=lse_grad, row_grad=row_grad)


def tma_compatible(t: Tensor) -> bool:
    """Whether TMA can read rows of `[..., T, H, D]` where they lie. Asked on GPUs that have it alone: looking costs."""
    if t.device.type != "cuda" or arch(t.device) < 90:
        return True
    return aligned(t) and all(size == 1 or stride > 0 for size, stride in zip(t.shape, t.stride(), strict=True))


def aligned(t: Tensor, inner: int = -1) -> bool:
    """Whether rows along the dim `inner`, the last by default, start on 16 bytes, and whole 16 bytes apart."""
    steps = [stride if size > 1 else 0 for size, stride in zip(t.shape, t.stride(), strict=True)]
    del steps[inner]
    return t.numel() == 0 or (_address(t) % 16 == 0 and all(step * t.itemsize % 16 == 0 for step in steps))


def padded_to(t: Tensor, dim: int) -> Tensor:
    """`t` with zeros behind its last dim, up to `dim`: scores stay as they are, and outputs get columns of zeros."""
    return t if t.shape[-1] == dim else pad(t, (0, dim - t.shape[-1]))


def distinct(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """The same tensors, each an object of its own. A prepared launch tells by the object which tensor an argument is;
    two that are one object now may be two in a later call."""
    seen: set[int] = set()
    apart = []
    for t in tensors:
        if t is not None and id(t) in seen:
            t = t.detach()
        seen.add(id(t))
        apart.append(t)
    return tuple(apart)


def _address(t: Tensor) -> int:
    """Where a tensor begins; 0, aligned as allocations are, for one without memory: fake, or inside torch.func."""
    if isinstance(t, FakeTensor) or torch._C._functorch.is_functorch_wrapped_tensor(t):
        return 0
    return t.data_ptr()


def dtype_name(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")


def sides_of(causal: bool, window: tuple[int, int] | None) -> Window:
    """Causal and window as one window."""
    left, right = window or Window()
    if causal:
        right = 0 if right == UNBOUNDED else min(right, 0)
    return Window(left, right)


def _window(q_len: int, k_len: int, positions: Positions, sides: Window, packed: bool) -> Window:
    """The sides of the window. A side that hides nothing is no side: one query against a cache is not causal any
    more."""
    left, right = sides
    if packed or not q_len or not k_len:
        return sides
    q_start, q_stride, k_start, k_stride, _ = positions
    if right != UNBOUNDED and k_start + (k_len - 1) * k_stride <= q_start + right:
        right = UNBOUNDED
    if left != UNBOUNDED and k_start >= q_start + (q_len - 1) * q_stride - left:
        left = UNBOUNDED
    return Window(left, right)


def resized(problem: Problem, q_len: int, k_len: int, causal: bool, left: int, right: int) -> Problem:
    """The problem of tensors which differ from those of `problem` in lengths alone; other arguments are the op's."""
    (batch, _, *sizes), (layout, *_), operands, hardware, _, _, scores, direction = problem
    positions = Positions(k_len - q_len, q_base=k_len - q_len)
    window = _window(q_len, k_len, positions, sides_of(causal, (left, right)), layout == "packed")
    shape, kv = Shape(batch, q_len, *sizes), KV(layout, k_len)
    return Problem(shape, kv, operands, hardware, window, positions, scores, direction)


def state_problem(
    inputs: Inputs,
    q_len: int,
    k_len: int,
    causal: bool,
    window: tuple[int, int],
    softcap: float,
    scale: float,
    dropout_p: float,
    deterministic: bool,
    *,
    positions: Positions | None = None,
    batch_start: int = 0,
    partial: bool = False,
) -> Problem:
    """State the problem that `inputs` pose. `q_len` and `k_len` are the longest sequences where inputs are packed.

    `positions` None aligns the last query with the last key.
    """
    query, key, value, mask, bias, alibi_slopes, sink, _, cu_seqlens_q, _, bounds, _ = inputs
    batch, packed = query.shape[0], cu_seqlens_q is not None
    if cu_seqlens_q is not None:
        batch = cu_seqlens_q.shape[0] - 1
    else:
        q_len, k_len = query.shape[1], key.shape[1]
    offset = k_len - q_len
    positions = positions or Positions(offset, q_base=offset)
    tma = all(tma_compatible(t) for t in (query, key, value))
    tf32 = query.dtype is torch.float32 and allows_tf32()
    bias_dtype = None if bias is None else bias.dtype
    masks = mask is not None or bounds is not None
    given = masks, bias_dtype, alibi_slopes is not None, sink is not None
    return Problem(
        Shape(batch, q_len, query.shape[-2], key.shape[-2], query.shape[-1], value.shape[-1]),
        KV("packed" if packed else "dense", k_len),
        Operands(query.dtype, tma, tf32),
        hardware_of(query.device),
        _window(q_len, k_len, positions, sides_of(causal, window), packed),
        positions,
        Scores(float(scale), float(softcap), *given, float(dropout_p), batch_start, bounds=bounds is not None),
        Direction(partial=partial, deterministic=deterministic),
    )


def decode_problem(query: Tensor, cache: KVCache, **asked: Any) -> Problem:
    """What a call on a cache has to compute; `asked` are the window and the scores of its problem."""
    batch, q_len, q_heads, head_dim = query.shape
    capacity = cache.capacity
    return Problem(
        Shape(batch, q_len, q_heads, cache.kv_heads, head_dim, cache.value_dim),
        KV("cache", capacity, cache.page_size, cache.coding),
        Operands(query.dtype),
        hardware_of(query.device),
        positions=Positions(capacity - q_len, q_base=capacity - q_len),  # of a row that is full
        **asked,
    )


def paged_problem(
    inputs: PagedInputs,
    q_len: int,
    k_len: int,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    **asked: Any,
) -> Problem:
    """What a call of ragged queries on paged keys has to compute: at most so many queries and keys of a request.

    Where some requests may not be causal, `window` is that of those, and kernels look at each.
    """
    query, key, value = inputs[:3]
    batch, page = inputs.seqused_k.shape[0], key.shape[1]
    differ = inputs.causal is not None or inputs.tree_mask is not None
    e4m3 = key.dtype is not query.dtype
    return Problem(
        Shape(batch, q_len, query.shape[1], key.shape[2], query.shape[2], value.shape[3]),
        KV("cache", k_len, page, ragged=True, e4m3=e4m3, causal_by_request=causal and differ),
        Operands(query.dtype),
        hardware_of(query.device),
        sides_of(causal and not differ, window),
        **asked,
    )


def resized_decode(problem: Problem, q_len: int, capacity: int) -> Problem:
    """What a call on a cache has to compute that differs from `problem` in lengths alone."""
    (batch, _, *sizes), (layout, _, page, coding, *_), operands, hardware, window, _, scores, direction = problem
    positions = Positions(capacity - q_len, q_base=capacity - q_len)
    shape, kv = Shape(batch, q_len, *sizes), KV(layout, capacity, page, coding)
    return Problem(shape, kv, operands, hardware, window, positions, scores, direction)
