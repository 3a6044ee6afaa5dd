"""Who computes a cell: our backends, and the peers they are compared with, one small class each.

`why_not` says in a sentence why a provider cannot compute a case here (None: it can); `attend` computes it, layout
`[B, T, H, D]` in and out. A peer gets transposed views of the same memory: nobody's tensors are copied for them.
"""

from __future__ import annotations

import ctypes
import lzma
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..backends import BY_NAME
from ..errors import UnsupportedProblem
from ..ops.attention import attention, prepare_attention
from ..ops.library import problem_of, run_forward
from ..plan import Plan, plan
from ..testing.inputs import Case
from ..tuning import eager as eager_tuning
from .cells import Cell, Tensors, draw, shortened


class Provider:
    name = ""

    def why_not(self, cell: Cell) -> str | None:
        raise NotImplementedError

    def attend(self, x: Tensors) -> Tensor:
        raise NotImplementedError

    def case(self, case: Case) -> Case:
        """The problem that is really computed."""
        return case


class Ours(Provider):
    """`attention` on one backend, or on the one it plans by itself ("auto")."""

    def __init__(self, name: str) -> None:
        self.name = self.backend = name

    def why_not(self, cell: Cell) -> str | None:
        if self.backend != "auto" and self.backend not in BY_NAME:
            return f"this version has no {self.backend} backend"
        try:
            planned = plan(_problem(shortened(cell.case, rows=128, batch=1)), self.backend)
            if cell.direction != "forward":
                plan(planned.problem._replace(backward=True), self.backend)
        except UnsupportedProblem as refused:
            return str(refused)
        return None

    def attend(self, x: Tensors) -> Tensor:
        return attention(x.query, x.key, x.value, **x.options, backend=self.backend)


class Deterministic(Ours):
    """`attention` on one backend with `deterministic=True`."""

    def __init__(self, backend: str) -> None:
        super().__init__(backend)
        self.name = f"{backend} deterministic"

    def attend(self, x: Tensors) -> Tensor:
        return attention(x.query, x.key, x.value, **x.options, deterministic=True, backend=self.backend)


class Plain(Ours):
    """`attention` without the cell's modifiers: what they cost is measured against it."""

    def __init__(self) -> None:
        super().__init__("auto")
        self.name = "plain"

    def case(self, case: Case) -> Case:
        kept = {"B", "Tq", "Tk", "Hq", "D", "Dv", "dtype", "device", "causal", "seed"}
        return Case(**{name: value for name, value in vars(case).items() if name in kept}, Hkv=case.Hq)


class Blocked(Provider):
    """The eager backend's blocked pass, also where it would call torch's flash op."""

    name = "blocked"

    def why_not(self, cell: Cell) -> str | None:
        return None if cell.direction == "forward" else "forced by hand, it bypasses autograd: forward only"

    def attend(self, x: Tensors) -> Tensor:
        arguments = _arguments(x)
        problem, inputs, _ = problem_of(arguments)
        return run_forward(Plan(problem, "eager", eager_tuning.blocked(problem)), inputs)[0]


class Dense(Provider):
    """Matmul, softmax, matmul, holding Tq x Tk: what one writes without a library, in the dtype of the inputs."""

    name = "dense"

    def why_not(self, cell: Cell) -> str | None:
        case = cell.case
        return "sink and dropout are not written out here" if case.sink or case.dropout_p else None

    def attend(self, x: Tensors) -> Tensor:
        query, key, value = (t.transpose(1, 2) for t in (x.query, x.key, x.value))
        q_len, k_len, group = query.shape[2], key.shape[2], query.shape[1] // key.shape[1]
        if group > 1:
            key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        options = x.options
        scores = query @ key.mT * options.get("scale", query.shape[-1] ** -0.5)
        if softcap := options.get("softcap"):
            scores = torch.tanh(scores / softcap) * softcap
        if (bias := options.get("bias")) is not None:
            scores = scores + bias
        ahead = torch.arange(k_len - q_len, k_len, device=query.device)[:, None] - torch.arange(
            k_len, device=query.device
        )
        if (slopes := options.get("alibi_slopes")) is not None:
            scores = scores - (slopes[..., None, None] * ahead.abs()).to(scores.dtype)
        if options["causal"]:
            scores = scores.masked_fill(ahead < 0, -torch.inf)
        if window := options.get("window"):
            left, right = window
            hidden = (ahead > left if left >= 0 else False) | (ahead < -right if right >= 0 else torch.tensor(False))
            scores = scores.masked_fill(hidden.to(query.device), -torch.inf)
        if (mask := options.get("mask")) is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        return (torch.softmax(scores, -1) @ value).transpose(1, 2)


class Sdpa(Provider):
    """torch's scaled_dot_product_attention: the kernel it picks, or one of its kernels by name."""

    def __init__(self, name: str = "sdpa", kernel: SDPBackend | None = None) -> None:
        self.name, self.kernel = name, kernel

    def why_not(self, cell: Cell) -> str | None:
        case = cell.case
        modified = case.window or case.bias or case.alibi or case.sink or case.softcap or case.dropout_p
        if modified:
            return "SDPA has no window, ALiBi, sink or softcap, and draws another dropout mask"
        if case.causal and case.Tq not in (1, case.Tk):
            return "SDPA aligns causal top-left"
        if self.kernel is not None and case.device != "cuda":
            return "a CUDA kernel"
        if self.kernel is not None:
            return _tried(lambda: self.attend(draw(shortened(cell.case, rows=128, batch=1))))
        return None

    def attend(self, x: Tensors) -> Tensor:
        if self.kernel is None:
            return self._call(x)
        with sdpa_kernel(self.kernel):
            return self._call(x)

    def _call(self, x: Tensors) -> Tensor:
        query, key, value = (t.transpose(1, 2) for t in (x.query, x.key, x.value))
        out = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=x.options.get("mask"),
            is_causal=x.options["causal"] and query.shape[2] > 1,
            scale=x.options.get("scale"),
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return out.transpose(1, 2)


class FlashAttention3(Provider):
    """FlashAttention-3 from a folder with its packed extension, `fa3.so.xz`, and the CUDA runtime it needs."""

    name = "fa3"

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._ops: Any = None

    def why_not(self, cell: Cell) -> str | None:
        case = cell.case
        if self.folder is None:
            return "no --fa3 PATH was given"
        if case.device != "cuda" or torch.cuda.get_device_capability() != (9, 0):
            return "it runs on Hopper (sm_90) alone"
        if case.mask or case.bias or case.alibi or case.sink or case.softcap or case.dropout_p or case.window:
            return "it is called here without modifiers"
        return _tried(self._load)

    def attend(self, x: Tensors) -> Tensor:
        return _FlashAttention3.apply(x.query, x.key, x.value, x.options["causal"], self._ops)

    def _load(self) -> None:
        if self._ops is not None:
            return
        assert self.folder is not None
        # One folder for the process: a library that is loaded must stay where it is.
        unpacked = Path(tempfile.mkdtemp(prefix="fa3-")) / "fa3.so"
        with lzma.open(self.folder / "fa3.so.xz") as packed, unpacked.open("wb") as plain:
            shutil.copyfileobj(packed, plain)
        ctypes.CDLL(str(self.folder / "libcudart.so.12"), mode=ctypes.RTLD_GLOBAL)
        torch.ops.load_library(str(unpacked))
        self._ops = torch.ops.flash_attn_3


class _FlashAttention3(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, causal: bool, ops: Any) -> Tensor:
        out, lse, *_ = ops.fwd(query, key, value, is_causal=causal)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.causal, ctx.ops = causal, ops
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        results = tuple(torch.empty_like(t) for t in (query, key, value))
        ctx.ops.bwd(grads[0], query, key, value, out, lse, *results, is_causal=ctx.causal, deterministic=False)
        return (*results, None, None)


def by_name(fa3: Path | None = None) -> dict[str, Provider]:
    """Every provider a cell may name."""
    providers: list[Provider] = [
        *(Ours(name) for name in ("auto", "gluon", "triton", "eager")),
        Plain(),
        Blocked(),
        Deterministic("triton"),
        Dense(),
        Sdpa(),
        Sdpa("sdpa flash", SDPBackend.FLASH_ATTENTION),
        Sdpa("sdpa cudnn", SDPBackend.CUDNN_ATTENTION),
        Sdpa("sdpa math", SDPBackend.MATH),
        FlashAttention3(fa3),
    ]
    return {provider.name: provider for provider in providers}


def _arguments(x: Tensors) -> tuple[Any, ...]:
    absent: dict[str, Any] = dict.fromkeys(
        ("window", "mask", "bias", "alibi_slopes", "sink", "scale", "seed", "deterministic")
    )
    defaults = {"softcap": 0.0, "dropout_p": 0.0, "return_lse": True, "backend": "auto"}
    return prepare_attention(x.query, x.key, x.value, **(absent | defaults | x.options))


def _problem(case: Case) -> Any:
    return problem_of(_arguments(draw(case)))[0]


def _tried(attempt: Callable[[], Any]) -> str | None:
    """Why an attempt failed, in the first line of its exception; None if it did not."""
    try:
        attempt()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return None
