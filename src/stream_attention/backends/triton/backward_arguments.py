"""What the kernels of the backward take alike: tensors, strides and constexprs, by the names of their parameters."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...base.problem import Inputs, Problem
from ...gpu.arguments import (
    UNIT,
    access,
    access_unit,
    broadcast_strides,
    common_sizes,
    flag_strides,
    named,
    precision,
    row_strides,
    score_params,
    slope_stride,
    tanh,
    tile_width,
)
from ...gpu.launch import Sizes
from ...gpu.prepass import Prepass
from ...gpu.rows import PAD, Rows, padded_rows
from .tuning import Tile


def shared_arguments(
    problem: Problem, inputs: Inputs, tile: Tile, before: Prepass, grad_out: Tensor, rows: Rows
) -> dict[str, Any]:
    """Of the kernels by queries and by keys, what does not depend on lengths."""
    query, key, value, mask, bias, slopes, _, _, cu_q, cu_k = inputs
    keys_seen, queries_seen, row_words, col_words = before.samples
    return {
        "q_ptr": query,
        "k_ptr": key,
        "v_ptr": value,
        "mask_ptr": mask,
        "bias_ptr": bias,
        "keys_seen_ptr": keys_seen,
        "queries_seen_ptr": queries_seen,
        "slopes_ptr": slopes,
        "row_words_ptr": row_words,
        "col_words_ptr": col_words,
        "cu_q_ptr": cu_q,
        "cu_k_ptr": cu_k,
        "grad_out_ptr": grad_out,
        "rows_lse_ptr": rows.lse,
        "rows_delta_ptr": rows.delta,
        **named("stride_mb stride_mh stride_mm stride_mn", broadcast_strides(mask, access_unit(mask))),
        **named("stride_bb stride_bh stride_bm stride_bn", broadcast_strides(bias, access_unit(bias))),
        **named("stride_fb stride_fh", flag_strides(keys_seen)),
        **named("stride_sb stride_sh", flag_strides(queries_seen)),
        "stride_ab": slope_stride(slopes),
        "batches": problem.batch,
        "num_splits": tile.num_splits,
        **score_params(problem),
        **backward_constants(problem, inputs, tile),
        "IS_PACKED": problem.packed,
        "IS_SPLIT": tile.num_splits > 1,
    }


def shared_sizes(problem: Problem, inputs: Inputs, grad_out: Tensor, aligned: bool, out: Tensor | None = None) -> Sizes:
    """Of the same kernels, what depends on lengths; that of one which reads `out` too."""
    packed, unit = problem.packed, UNIT if aligned else 1
    numbers = (padded_rows(problem, inputs.query) // PAD.value, *row_strides(grad_out, packed, unit))
    if out is None:
        return common_sizes(problem, inputs, aligned, _SHARED, numbers)
    return common_sizes(problem, inputs, aligned, _WITH_OUT, (*numbers, *row_strides(out, packed, unit)))


_SHARED = "row_tiles stride_gb stride_gm stride_gh"
_WITH_OUT = f"{_SHARED} stride_ob stride_om stride_oh"


def backward_constants(problem: Problem, inputs: Inputs, tile: Tile) -> dict[str, Any]:
    """The constexprs that the kernels of the backward share."""
    return {
        "GROUP": problem.group,
        "Q_STRIDE": problem.q_stride,
        "K_STRIDE": problem.k_stride,
        "D": problem.head_dim,
        "DV": problem.value_dim,
        "BLOCK_D": tile_width(problem.head_dim),
        "BLOCK_DV": tile_width(problem.value_dim),
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "MASK": access(inputs.mask),
        "BIAS": access(inputs.bias),
        "HAS_ALIBI": problem.alibi,
        "HAS_SOFTCAP": problem.softcap != 0.0,
        "HAS_DROPOUT": problem.dropout_p != 0.0,
        "PRECISION": precision(problem),
        "TANH": tanh(problem),
    }
