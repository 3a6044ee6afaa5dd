"""The arguments that decode kernels share, and how the kernel that computes and the one that merges are bound."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..base.kv_layouts import QuantizedKV
from ..base.kv_layouts.quantized_tensor import TOKENS, QuantizedTensor
from ..base.problem import UNBOUNDED, Inputs, Problem
from .arguments import FAR, QKV_STRIDES, UNIT, is_aligned, named, qkv_strides, scale_of, slope_stride, tanh, tile_width
from .decode_tiles import merge_kernel
from .decode_tuning import DecodeConfig, batch_heads, block_r, rows, tiles_r
from .launch import Kernel, Launch, Sizes

_OUT_STRIDES = "stride_ob stride_om stride_oh stride_od"


class DecodeCall(NamedTuple):
    """One call: its problem and its tensors, but for the cache."""

    problem: Problem
    config: DecodeConfig
    query: Tensor
    lengths: Tensor | None
    tree: Tensor | None
    slopes: Tensor | None  # [B or 1, Hq]
    sink: Tensor | None
    out: Tensor
    lse: Tensor | None
    workspace: Tensor | None  # None: one split

    @property
    def early(self) -> bool:
        """Whether kernels are launched before those ahead of them end (decode_tiles.py)."""
        return self.problem.arch >= 90

    @property
    def options(self) -> dict[str, Any]:
        """Triton's, of the kernel that computes."""
        return {"num_warps": self.config.num_warps, "num_stages": self.config.num_stages, **self._launched_early}

    @property
    def _launched_early(self) -> dict[str, Any]:
        return {"launch_pdl": True} if self.early else {}

    @property
    def by_length(self) -> bool:
        """Whether rows have as many splits as their lengths need. Without lengths all rows are alike."""
        return self.config.at_a_time > 0 and self.lengths is not None

    @property
    def grid(self) -> int:
        splits = self.config.num_splits + self.by_length
        return batch_heads(self.problem) * splits * tiles_r(self.problem)

    def arguments(self, table: Tensor | None) -> dict[str, Any]:
        """Of the kernel that computes, those that depend neither on the format of the cache nor on lengths."""
        problem = self.problem
        return {
            "q_ptr": self.query,
            "table_ptr": table,
            "lengths_ptr": self.lengths,
            "tree_ptr": self.tree,
            "slopes_ptr": self.slopes,
            "sink_ptr": self.sink,
            "out_ptr": self.out,
            "lse_ptr": self.lse,
            "workspace_ptr": self.workspace,
            "stride_tb": 0 if table is None else table.stride(0),
            **named("stride_rb stride_rm", (0, 0) if self.tree is None else self.tree.stride()[:2]),
            "stride_ab": slope_stride(self.slopes),
            "batch": problem.batch,
            "kv_heads": problem.kv_heads,
            "scale": scale_of(problem),
            "softcap": problem.softcap,
            "GROUP": problem.group,
            "D": problem.head_dim,
            "DV": problem.value_dim,
            "BLOCK_DV": tile_width(problem.value_dim),
            "PAGE": problem.page,
            "HAS_SOFTCAP": problem.softcap != 0.0,
            "EARLY": self.early,
            "TANH": tanh(problem),
        }

    def sizes(self, pages: int) -> Sizes:
        """Those that depend on lengths."""
        problem, config, (left, right) = self.problem, self.config, self.problem.window
        splits = config.num_splits, config.split_keys
        numbers = problem.kv.k_len, pages, problem.shape.q_len, *splits, min(left, FAR), min(right, FAR)
        constants = {
            "BLOCK_R": block_r(problem),
            "BLOCK_N": config.block_n,
            "HAS_LEFT": left != UNBOUNDED,
            "HAS_RIGHT": right != UNBOUNDED,
            "IS_SPLIT": config.num_splits > 1,
        }
        names = f"{_OUT_STRIDES} capacity pages q_len num_splits split_keys left right"
        return Sizes(names, (*self.out.stride(), *numbers), constants, {})

    def row_sizes(self, *stored: Any) -> Sizes:
        """Those of a kernel that reads keys and values `[B, T, Hkv, D]`, or `[pages, page, Hkv, D]`, as they are."""
        key, value, *_ = stored
        aligned = is_aligned(self.query, key, value)
        strides = qkv_strides(Inputs(self.query, key, value), False, UNIT if aligned else 1)
        names, numbers, constants, _ = self.sizes(key.shape[0])
        constants |= {"ALIGNED": aligned, "BY_LENGTH": self.by_length}
        numbers = *strides, *numbers, self.config.at_a_time
        return Sizes(f"{QKV_STRIDES} {names} at_a_time", numbers, constants, {})

    @property
    def merge_grid(self) -> int:
        return batch_heads(self.problem) * rows(self.problem)

    def merge_sizes(self) -> Sizes:
        """Arguments of the kernel that merges parts which depend on lengths."""
        problem, config, left = self.problem, self.config, self.problem.left
        lengths, blocks, is_cut = (0, 0, 0), (0, 0), False  # on which the merge of rows that are alike does not depend
        if self.by_length:
            lengths = problem.k_len, min(left, FAR), config.at_a_time
            blocks, is_cut = (config.block_n, block_r(problem)), left != UNBOUNDED
        constants = {"BY_LENGTH": self.by_length, "HAS_LEFT": is_cut} | named("BLOCK_N BLOCK_R", blocks)
        numbers = *self.out.stride(), problem.q_len, config.num_splits, *lengths
        return Sizes(f"{_OUT_STRIDES} q_len num_splits capacity left at_a_time", numbers, constants, {})

    def resized(self, launch: Launch, merge: Launch | None, sizes: Sizes) -> tuple[Launch, Launch | None] | None:
        """The launches of a call of other lengths as those of this one, which has these `sizes`; None where other
        kernels compute it."""
        if launch.options != self.options or (merge is None) != (self.workspace is None):
            return None
        resized = launch.resized(self.grid, sizes)
        merging = None if merge is None else merge.resized(self.merge_grid, self.merge_sizes())
        if resized is None or (merging is None and merge is not None):
            return None
        return resized, merging

    def bind(self, kernel: Kernel, arguments: dict[str, Any]) -> tuple[Launch, Launch | None]:
        """The kernel that computes and, if keys are in splits, the one that merges, a function of workspace, lengths,
        sink, out and lse."""
        launch = kernel.bind_addresses(self.grid, self.options, **arguments)
        return launch, None if self.workspace is None else self._bind_merge()

    def _bind_merge(self) -> Launch:
        problem, width = self.problem, tile_width(self.problem.value_dim)
        return merge_kernel.bind_addresses(
            self.merge_grid,
            {"num_warps": 4, **self._launched_early},
            self.query.device,
            workspace_ptr=self.workspace,
            lengths_ptr=self.lengths if self.by_length else None,
            sink_ptr=self.sink,
            out_ptr=self.out,
            lse_ptr=self.lse,
            **self.merge_sizes().arguments(),
            batch=problem.batch,
            kv_heads=problem.kv_heads,
            GROUP=problem.group,
            DV=problem.value_dim,
            BLOCK_DV=width,
            AT_ONCE=min(32, 4096 // width),
            EARLY=self.early,
        )


def side_by_side(t: Tensor | None) -> Tensor | None:
    """A tensor whose last dim is contiguous: itself, if it is."""
    return t if t is None or t.shape[-1] == 1 or t.stride(-1) == 1 else t.contiguous()


def quantized_arguments(call: DecodeCall, cache: QuantizedKV) -> dict[str, Any]:
    """Arguments that kernels of a quantised cache share."""
    key, value = (side.codes.view(torch.int16) for side in (cache.key, cache.value))
    return {
        **call.arguments(side_by_side(cache.page_table)),
        **call.sizes(key.shape[0]).arguments(),
        "k_ptr": key,
        "k_scale_ptr": cache.key.scale,
        "k_zero_ptr": cache.key.zero,
        "v_ptr": value,
        "v_scale_ptr": cache.value.scale,
        "v_zero_ptr": cache.value.zero,
        "k_window_ptr": cache.key_window,
        "v_window_ptr": cache.value_window,
        "residual": cache.residual,
        "slots": cache.key_window.shape[1],
        "FORMAT": cache.coding.format,
        "TOKENS": cache.coding.group,
        # Whether every row sees all codes.
        "ALL_VISIBLE": cache.residual >= call.problem.q_len and call.problem.left == UNBOUNDED,
    }


def scale_rows(side: QuantizedTensor) -> list[Tensor]:
    """Scales and zeros, if there are any, as `[rows or pages, blocks of tokens or groups of channels, heads, those that
    lie side by side]`."""
    both = [side.scale] if side.zero is None else [side.scale, side.zero]
    return both if side.dim == TOKENS else [t.transpose(1, 3) for t in both]
