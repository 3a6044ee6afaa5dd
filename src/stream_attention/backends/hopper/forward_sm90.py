"""The streaming forward for Hopper (sm_90), in Gluon: what its Triton twin computes, with the machine made explicit.

For a tile of queries, with running max m, sum l and accumulator o (scores in log2 units):

    m' = max(m, max_j s_j)      l' = l 2^(m - m') + sum_j 2^(s_j - m')      o' = o 2^(m - m') + sum_j 2^(s_j - m') v_j

Explicit here, and left to the compiler in backends/triton/forward.py:

- Roles. One producer warp copies tiles of Q, K and V into rings of shared memory by TMA (pipeline.py); two or three
  consumer warpgroups of 64 query rows each compute. The producer gives its registers to them.
- Overlap. A consumer issues the product Q K of one block, then the product P V of the block before, and takes the
  maxima of the first while the second runs. Its exponentials run beside the products of the other consumers: taken
  after the wait for P V, the assembler mixes the rescaling and the conversion of P in between, which else
  follow them and leave the matrix units idle (docs/performance.md: 3-6 %).
- Edges. Blocks go from the right to the left, so that those that are cut by the causal edge or the end of the keys come
  first. Where that is one block, as in causal calls of aligned lengths, the loop over the others has no code for edges.
- Tile scheduler. A program stays on its SM and takes tile after tile (scheduler.py).
- What is masked. TMA reads rows that do not exist as zeros, per batch entry. Rows of V that exist and that no query
  sees (in a pack those of the next sequence, else those outside every window) are cleared by the consumers: p is 0
  there, and 0 times NaN would be NaN.

Grid: one program per SM, or fewer. Reads Q, K, V through 4-D descriptors [B, T, H, D] with their own strides;
writes O through one, or from registers (fp32 states, the ends of packed sequences), and the LSE. A state may be joined
to that of other keys where it lies: the producer copies that into shared memory while the tile is computed, and the sum
leaves from there while the next one is. So a shard of a ring costs no pass over its rows.
Not here: mask and bias, strided positions, few queries against many keys: the Triton kernel has them (`why_not`).
Parity with the reference: tests/backends/hopper/test_forward_gpu.py.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...base.problem import Forward, Inputs, Problem
from ...gpu.arguments import UNIT, line_strides, named, row_strides
from ...gpu.launch import Kernel, Launch, Sizes
from ...gpu.prepass import Prepass
from ...gpu.scratch import Outputs, Sample, empty
from ...gpu.tail import bind_start, resized_start, start_sizes_of_pack
from ...gpu.tile_list import most_tiles, words_of
from .forward_consumer import consume
from .launch import forward_sizes, heads_together, jit, rows_descriptor, score_arguments
from .parameters import Epilogue, ScoreMod, SeqlenInfo
from .pipeline import load_rows, make_pipelines, make_ring
from .scheduler import TileList, TileScheduler, fetch_next, make_channel, resolve
from .tiles import ROWS
from .tuning import GluonConfig, joining, loads_masked_kv, tile_widths
from .versions import COMPILE_OPTIONS, as_tile_of, tma_load

JOINED_WIDTH = 128
"""Columns of values up to which a tile and the state that it joins fit into registers together."""


@gluon.jit
def _load_pairs(first, last, k_iter, v_iter, pipelines, k_desc, v_desc, entry, row, kv_head):
    """Blocks `first` to before `last` of K, and of V those before them; `row` is that of block 0."""
    BLOCK_N: gl.constexpr = k_desc.block_type.shape[1]
    for j in range(first, last):
        load_rows(pipelines.keys, k_desc, k_iter + j, entry, row - j * BLOCK_N, kv_head)
        load_rows(pipelines.values, v_desc, v_iter + j - 1, entry, row - (j - 1) * BLOCK_N, kv_head)


@gluon.jit
def _producer(seqlen, epilogue, scheduler, counter, channel, pipelines, states, q_desc, k_desc, v_desc):
    """Copy tile after tile, in the order in which consumers let go of slots: K0 Q K1 V0 K2 V1 ...

    States that are joined come in the middle of a tile, when everybody is done with those of the tile before and nobody
    waits for them. One that takes a slot of keys comes behind the last of them.
    """
    WARPGROUPS: gl.constexpr = pipelines.CONFIG.warpgroups
    TILE_ROWS: gl.constexpr = WARPGROUPS * ROWS
    BLOCK_N: gl.constexpr = k_desc.block_type.shape[1]
    BORROWED: gl.constexpr = epilogue.borrowed(WARPGROUPS)
    SKIPPED: gl.constexpr = (TILE_ROWS - ROWS + BLOCK_N - 1) // BLOCK_N  # blocks of a tile that not all see, at most
    AHEAD: gl.constexpr = 2  # blocks before the end at which the next tile is fetched
    queries = pipelines.queries
    keys = pipelines.keys
    values = pipelines.values
    kv_iter = 0  # slots of K and V filled so far
    tile_iter = 0  # tiles
    tile = gl.program_id(0)
    tiles = scheduler.count()
    while tile < tiles:
        work = scheduler.work_tile(seqlen, tile, tiles)
        first = work.index * TILE_ROWS
        channel.send(tile_iter, work)
        kv_head = work.head // seqlen.group
        entry = seqlen.entry(work)
        offset = seqlen.offset_of(work)
        low, high = seqlen.blocks(first, first + (TILE_ROWS - 1), work.k_len, offset, BLOCK_N)
        blocks = high - low
        row = work.k_first + (high - 1) * BLOCK_N  # of the last block
        k_iter = kv_iter + tile_iter * BORROWED
        load_rows(keys, k_desc, k_iter, entry, row, kv_head)
        queries.wait_empty(tile_iter)
        landing = queries.expect(tile_iter, WARPGROUPS * q_desc.block_type.nbytes)
        place = queries.place(tile_iter)
        for w in gl.static_range(WARPGROUPS):
            q_row = work.q_first + first + w * ROWS
            tma_load(q_desc, [entry, q_row, work.head, 0], landing, queries.tiles.index(place + w))
        near_end = gl.maximum(blocks - AHEAD, 1)
        loaded = 1
        if epilogue.STATES > 0:
            # Not before the keys that a consumer waits for until it lets go of the state of the tile before.
            middle = gl.minimum(gl.maximum(blocks // 2, SKIPPED + 1), blocks)
            near_end = gl.maximum(near_end, middle)
            _load_pairs(1, middle, k_iter, kv_iter, pipelines, k_desc, v_desc, entry, row, kv_head)
            states.wait_empty(tile_iter)
            landing = states.expect(tile_iter, epilogue.STATES * epilogue.o_desc.block_type.nbytes)
            for w in gl.static_range(epilogue.STATES):
                tma_load(epilogue.o_desc, [entry, first + w * ROWS, work.head, 0], landing, states.tiles.index(w))
            loaded = middle
        _load_pairs(loaded, near_end, k_iter, kv_iter, pipelines, k_desc, v_desc, entry, row, kv_head)
        pending_tile = fetch_next(counter)
        _load_pairs(near_end, blocks, k_iter, kv_iter, pipelines, k_desc, v_desc, entry, row, kv_head)
        if BORROWED > 0:
            keys.wait_empty(k_iter + blocks)
            landing = keys.expect(k_iter + blocks, epilogue.o_desc.block_type.nbytes)
            place = as_tile_of(epilogue.o_desc, keys.tiles.index(keys.place(k_iter + blocks)))
            tma_load(epilogue.o_desc, [entry, first + epilogue.STATES * ROWS, work.head, 0], landing, place)
        load_rows(values, v_desc, kv_iter + blocks - 1, entry, work.k_first + low * BLOCK_N, kv_head)
        kv_iter += blocks
        tile_iter += 1
        tile = resolve(pending_tile)
    channel.close(tile_iter)


@jit
def _forward_kernel(
    q_desc, k_desc, v_desc, o_desc, out_ptr, lse_ptr, sink_ptr, slopes_ptr, row_words_ptr, col_words_ptr,
    cu_q_ptr, cu_k_ptr, counter_ptr,
    write_lse: gl.int32, batch_heads: gl.int32, tiles_m: gl.int32, head_group: gl.int32, tiles: gl.int32,
    q_heads: gl.int32, group: gl.int32, q_len: gl.int32, k_len: gl.int32, offset: gl.int32,
    left: gl.int32, right: gl.int32, q_rows: gl.int32, k_rows: gl.int32,
    stride_ob: gl.int64, stride_om: gl.int64, stride_oh: gl.int64, stride_lb: gl.int64, stride_lh: gl.int64,
    stride_ab: gl.int64, stride_rb: gl.int64, stride_rh: gl.int64, stride_cb: gl.int64, stride_ch: gl.int64,
    dropout_threshold: gl.uint32, scale, softcap, dropout_scale,
    CONFIG: gl.constexpr, DV: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, HAS_ALIBI: gl.constexpr,
    HAS_SINK: gl.constexpr, HAS_SOFTCAP: gl.constexpr, HAS_DROPOUT: gl.constexpr, IS_PACKED: gl.constexpr,
    MASKS_BEYOND_FIRST_BLOCK: gl.constexpr, LOADS_MASKED_KV: gl.constexpr, SCALE_LATE: gl.constexpr,
    TANH: gl.constexpr, STATES: gl.constexpr,
):  # fmt: skip
    WARPGROUPS: gl.constexpr = CONFIG.warpgroups
    pipelines = make_pipelines(CONFIG, q_desc, k_desc, v_desc)
    states = pipelines.queries
    if STATES > 0:
        states = make_ring(o_desc, 1, STATES, STATES)
    channel = make_channel(WARPGROUPS)
    if IS_PACKED:
        scheduler = TileList(counter_ptr, q_heads, head_group)
    else:
        scheduler = TileScheduler(batch_heads, tiles_m, head_group, tiles)  # type: ignore[assignment]
    seqlen = SeqlenInfo(
        q_heads, group, q_len, k_len, offset, left, right, cu_q_ptr, cu_k_ptr, q_rows, k_rows,
        HAS_LEFT, HAS_RIGHT, IS_PACKED, MASKS_BEYOND_FIRST_BLOCK, LOADS_MASKED_KV,
    )  # fmt: skip
    score_mod = ScoreMod(
        scale, softcap, slopes_ptr, stride_ab, row_words_ptr, stride_rb, stride_rh, col_words_ptr, stride_cb, stride_ch,
        dropout_threshold, HAS_SOFTCAP, HAS_ALIBI, HAS_DROPOUT, TANH, SCALE_LATE,
    )  # fmt: skip
    epilogue = Epilogue(
        o_desc, out_ptr, stride_ob, stride_om, stride_oh, lse_ptr, stride_lb, stride_lh, write_lse, sink_ptr,
        dropout_scale, DV, HAS_SINK, STATES,
    )  # fmt: skip
    # A tuple bound to a variable would turn its constants into tensors, so the roles are spelt here.
    gl.warp_specialize(
        [
            (consume, (w, seqlen, score_mod, epilogue, channel, pipelines, states))
            for w in (0, 1, 2)[:WARPGROUPS]
        ] + [(_producer, (
            seqlen, epilogue, scheduler, counter_ptr, channel, pipelines, states, q_desc, k_desc, v_desc,
        ))],
        [4] * (WARPGROUPS - 1) + [1],
        [CONFIG.consumer_registers] * (WARPGROUPS - 1) + [CONFIG.producer_registers],
    )  # fmt: skip


def prepare(problem: Problem, inputs: Inputs, config: GluonConfig) -> Forward:
    """The forward of calls whose tensors lie as these `inputs` do, as a function of their inputs: `(out, lse)`."""
    outputs = Outputs.of(problem, inputs.query.shape[-3], clears_tail=True)
    before, (out, lse) = Prepass.of(problem, inputs), outputs.samples()
    start, counter = None, _COUNTER
    if problem.packed:
        counter = Sample((words_of(most_tiles(inputs.query.shape[0], problem.batch, config.tile)),), torch.int32)
        start = bind_start(problem, inputs, config.tile, out, lse, counter)
    launch = _bind(problem, inputs, config, before, out, lse, counter)
    return _Forward(outputs, before, start, launch, _PackSizes(problem, config))


_COUNTER = Sample((1,), torch.int32)


class _PackSizes:
    """What depends on how many rows a pack has."""

    def __init__(self, problem: Problem, config: GluonConfig) -> None:
        self._batch, self._tile = problem.batch, config.tile
        self._together = heads_together(problem, problem.q_heads, _cached(problem))

    def words(self, rows: int) -> int:
        """Of the list of tiles."""
        return words_of(most_tiles(rows, self._batch, self._tile))

    def of(self, rows: int, k_rows: int) -> tuple[Sizes, Sizes]:
        """Of the launch before, and of the kernel."""
        described = {"q_desc": rows, "k_desc": k_rows, "v_desc": k_rows, "o_desc": rows}
        numbers = rows, k_rows, rows, self._together(k_rows)
        start = start_sizes_of_pack(rows, k_rows, most_tiles(rows, self._batch, self._tile))
        return start, Sizes("q_rows k_rows stride_lh head_group", numbers, {}, described)


class _Forward:
    def __init__(
        self, outputs: Outputs, before: Prepass, start: Launch | None, launch: Launch, pack: _PackSizes
    ) -> None:
        self._outputs, self._before, self._start, self._launch = outputs, before, start, launch
        self._pack = pack
        self.takes_any_rows = start is not None and not before.steps and not outputs.has_unwritten_rows
        self._without_lse: tuple[Launch | None, Launch] | None = None

    def __call__(self, inputs: Inputs, with_lse: bool) -> tuple[Tensor, Tensor | None]:
        outputs, start, launch, query = self._outputs, self._start, self._launch, inputs.query
        is_compiled = launch.is_compiled and (start is None or start.is_compiled)
        with_lse, sizes, start_sizes = with_lse or not is_compiled, None, None
        if self.takes_any_rows:
            start_sizes, sizes = self._pack.of(query.shape[0], inputs.key.shape[0])
            out, lse = outputs.allocate_pack(query, with_lse)
        else:
            out, lse = outputs.allocate(query, is_compiled, with_lse)
        computed = self._before.run(inputs)
        if not with_lse:
            both = self._without_lse or (start and start.replaced("write_lse", 0), launch.replaced("write_lse", 0))
            start, launch = self._without_lse = both
        to_lse = 0 if lse is None else lse
        if start is None:
            counter = _COUNTER.filled(query, 0.0, is_compiled)  # may be freed once the launch is queued
        else:
            counter = empty(query, (self._pack.words(query.shape[0]),), (1,), torch.int32)
            start(inputs.cu_seqlens_q, inputs.cu_seqlens_k, out, to_lse, counter, sizes=start_sizes)
        launch(*inputs, *computed, out, to_lse, counter, sizes=sizes)
        return out, lse

    def resized(self, problem: Problem, inputs: Inputs, config: GluonConfig) -> Forward | None:
        """The same call on tensors of other lengths; None if a constexpr would differ, or something is computed before
        the kernel."""
        if self._before.steps:
            return None
        outputs = self._outputs.resized(inputs.query.shape[-3])
        o_desc, strides = outputs.out if config.by_tma else inputs.query, outputs.strides(problem.packed)
        launch, start = self._launch.resized(*_sizes(problem, inputs, config, o_desc, strides)), self._start
        if start is not None:
            start = resized_start(start, problem, config.tile, inputs.query.shape[0], inputs.key.shape[0])
        pack = _PackSizes(problem, config)
        return None if launch is None else _Forward(outputs, self._before, start, launch, pack)


def prepare_into(
    problem: Problem, inputs: Inputs, config: GluonConfig, out: Tensor, lse: Tensor, resumes: bool
) -> Callable[[Inputs, Tensor, Tensor], None] | None:
    """The forward of a partial problem that writes its state where `out [B, Tq, Hq, Dv]` and `lse [B, Hq, Tq]` lie,
    fp32, rows of larger tensors, or merges it into the state of other keys that is there; None if it cannot."""
    if problem.empty or (resumes and tile_widths(problem)[1] > JOINED_WIDTH):
        return None
    config, states = joining(problem, config) if resumes else (config, 0)
    before = Prepass.of(problem, inputs)
    launch = _bind(problem, inputs, config, before, out, lse, _COUNTER, states)

    def run(inputs: Inputs, out: Tensor, lse: Tensor) -> None:
        counter = _COUNTER.filled(lse, 0.0, launch.is_compiled)
        launch(*inputs, *before.run(inputs), out, lse, counter)

    return run


def _sizes(
    problem: Problem, inputs: Inputs, config: GluonConfig, o_desc: Any, strides: tuple[int, ...]
) -> tuple[int, Sizes]:
    """The grid and the arguments that depend on lengths."""
    query, key, value = inputs[:3]
    described = {"q_desc": query, "k_desc": key, "v_desc": value, "o_desc": o_desc}
    rows = query.shape[-3], key.shape[-3]
    grid, sizes = forward_sizes(problem, config, rows, _cached(problem), strides, described, listed=True)
    sizes.constants["LOADS_MASKED_KV"] = problem.packed or loads_masked_kv(problem)
    return grid, sizes


def _cached(problem: Problem) -> int:
    """Elements of keys and values that are worked on together."""
    return (8 if problem.kv.k_len <= 1024 else 16) << 20  # 16 MB: 7 % faster at 512 keys of D 128, slower from 2k on


def _bind(
    problem: Problem,
    inputs: Inputs,
    config: GluonConfig,
    before: Prepass,
    out: Any,
    lse: Any,
    counter: Any,
    states: int = 0,
) -> Launch:
    """The kernel as a function of inputs, of what is computed before, of results and a counter of tiles, which is 0;
    for a pack the list of them.

    Where there is no tensor, the LSE stands in for it, unread."""
    sink, packed = inputs.sink, problem.packed
    by_tma = config.by_tma or states > 0
    strides = *row_strides(out, packed, UNIT), *line_strides(lse, packed)
    grid, sizes = _sizes(problem, inputs, config, out if by_tma else inputs.query, strides)
    dim, value_dim = tile_widths(problem)
    boxes = {
        "q_desc": (ROWS.value, dim),
        "o_desc": (ROWS.value, value_dim if by_tma else dim),
        "k_desc": (config.block_n, dim),
        "v_desc": (config.block_n, value_dim),
    }
    return _kernel.bind(
        grid,
        (*inputs, *before.samples, out, lse, counter),
        {"num_warps": 4},
        described=sizes.described,
        **sizes.arguments() | {name: rows_descriptor(sizes.described[name], *box) for name, box in boxes.items()},
        **named("out_ptr lse_ptr sink_ptr counter_ptr", (out, lse, lse if sink is None else sink, counter)),
        write_lse=1,
        q_heads=problem.q_heads,
        CONFIG=config,
        DV=problem.value_dim,
        HAS_SINK=sink is not None,
        STATES=states,
        **score_arguments(problem, inputs, before, lse),
    )


_kernel = Kernel(_forward_kernel, **COMPILE_OPTIONS)
