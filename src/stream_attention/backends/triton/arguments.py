"""What the kernels over tiles of a problem take alike, by the names of their parameters, and how they are bound."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...base.problem import Inputs, Problem
from ...gpu.arguments import (
    access,
    access_unit,
    broadcast_strides,
    flag_strides,
    line_strides,
    named,
    precision,
    score_params,
    slope_stride,
    tanh,
    tile_width,
)
from ...gpu.bounds import entry_strides
from ...gpu.launch import Kernel, Launch, Sizes
from .tuning import Tile, TritonConfig

_INPUTS = "q_ptr k_ptr v_ptr mask_ptr bias_ptr slopes_ptr sink_ptr seed_ptr cu_q_ptr cu_k_ptr "
_INPUTS += "query_bounds_ptr key_bounds_ptr"
_COMPUTED = "keys_seen_ptr queries_seen_ptr row_words_ptr col_words_ptr key_lists_ptr query_lists_ptr"
"""Parameters that point to `Inputs`, and to the results of a `Prepass`."""


def bind_tiles(
    kernel: Kernel,
    grid: int,
    tile: TritonConfig | Tile,
    problem: Problem,
    inputs: Inputs,
    computed: Sequence[Any],
    names: str,
    others: Sequence[Any],
    sizes: Sizes,
    max_registers: int | None = None,
    **own: Any,
) -> Launch:
    """A launch of a kernel, as a function of inputs, of what is `computed` before, and of `others`, tensors to which
    the parameters `names` point. `max_registers` are those of a thread; None leaves them to the compiler.

    Of what kernels take alike it is given what it has parameters for; its `own` arguments are all its own.
    """
    tensors = named(f"{_INPUTS} {_COMPUTED} {names}", (*inputs, *computed, *others))
    alike = tensors | sizes.arguments() | _problem_arguments(problem, inputs, computed)
    alike |= {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n}
    alike |= {"num_splits": tile.num_splits, "IS_SPLIT": tile.num_splits > 1}
    arguments = {name: value for name, value in alike.items() if name in kernel.names} | own
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages, "maxnreg": max_registers}
    return kernel.bind(grid, tuple(tensors.values()), options, **arguments)


def _problem_arguments(problem: Problem, inputs: Inputs, computed: Sequence[Any]) -> dict[str, Any]:
    """Those that follow from a problem and how its tensors lie, and not from lengths."""
    mask, bias = inputs.mask, inputs.bias
    keys_seen, queries_seen, row_words, col_words, *_ = computed
    return {
        **named("stride_mb stride_mh stride_mm stride_mn", broadcast_strides(mask, access_unit(mask))),
        **named("stride_bb stride_bh stride_bm stride_bn", broadcast_strides(bias, access_unit(bias))),
        **named("stride_fb stride_fh", flag_strides(keys_seen)),
        **named("stride_sb stride_sh", flag_strides(queries_seen)),
        **named("stride_rb stride_rh", line_strides(row_words, problem.packed)),
        **named("stride_cb stride_ch", line_strides(col_words, problem.packed)),
        **named("bounds_batch bounds_head", entry_strides(problem, inputs)),
        "q_stride": problem.q_stride,
        "k_stride": problem.k_stride,
        "stride_ab": slope_stride(inputs.alibi_slopes),
        "batches": problem.batch,
        "q_heads": problem.q_heads,
        "kv_heads": problem.kv_heads,
        **score_params(problem),
        "IS_PACKED": problem.packed,
        "GROUP": problem.group,
        "Q_STRIDE": problem.q_stride,
        "K_STRIDE": problem.k_stride,
        "D": problem.head_dim,
        "DV": problem.value_dim,
        "BLOCK_D": tile_width(problem.head_dim),
        "BLOCK_DV": tile_width(problem.value_dim),
        "MASK": access(mask),
        "BIAS": access(bias),
        "HAS_ALIBI": problem.alibi,
        "HAS_SOFTCAP": problem.softcap != 0.0,
        "HAS_DROPOUT": problem.dropout_p != 0.0,
        "PRECISION": precision(problem),
        "TANH": tanh(problem),
    }
