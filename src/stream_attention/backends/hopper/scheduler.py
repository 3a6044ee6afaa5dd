"""Which tile a program computes next.

Programs stay on their SM and take tile after tile. The producer warp fetches the number of the next one from a
counter in global memory, which is set before the launch, and tells the consumers through shared memory where that
is. It fetches when a tile is almost loaded: a program that fetches with a long tile before it keeps the next from those
that have none, which cost 9 % of a launch with few tiles for each (causal, D 256).

Tiles that see many keys come first (causal: the last rows), so that the end of the launch is made of short ones, and
heads are taken in groups whose keys and values stay in the L2 cache together. Where all tiles see the same keys a group
is one head, and its tiles read the same keys at the same time. Those of a pack are listed (gpu/tile_list.py).
"""

# No `from __future__ import annotations`: aggregates check the types of their fields by these very annotations.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ...gpu.tile_list import HEADER as LIST_HEADER
from ...gpu.tile_list import WORDS as LIST_WORDS
from .tiles import run_asm
from .versions import aggregate


@aggregate
class TileScheduler:
    """The numbering of tiles: `tiles_m` of queries for each of `batch_heads` = batch * heads."""

    batch_heads: gl.tensor
    tiles_m: gl.tensor
    group: gl.tensor  # lines that are worked on together, the last queries of all of them first
    tiles: gl.tensor  # in all

    @gluon.jit
    def place(self, tile):
        """(line, number of the tile of queries) of a tile."""
        section = tile // (self.group * self.tiles_m)
        rest = tile - section * (self.group * self.tiles_m)
        size = gl.minimum(self.group, self.batch_heads - section * self.group)
        row = rest // size
        return section * self.group + (rest - row * size), self.tiles_m - 1 - row

    @gluon.jit
    def count(self):
        """How many there are in all."""
        return self.tiles

    @gluon.jit
    def work_tile(self, seqlen, tile, tiles):
        """The tile with a number, of so many."""
        line, index = self.place(tile)
        return seqlen.work_tile(index, line)


_LIST_HEADER = gl.constexpr(LIST_HEADER)
_LIST_WORDS = gl.constexpr(LIST_WORDS)


@aggregate
class TileList:
    """The tiles of a pack, longest first, for each of `heads`."""

    pointer: gl.tensor
    heads: gl.tensor
    group: gl.tensor  # heads that are worked on together, the longest tiles of all of them first

    @gluon.jit
    def count(self):
        """How many there are in all."""
        return gl.load(self.pointer + 1) * self.heads

    @gluon.jit
    def work_tile(self, seqlen, tile, tiles):
        """The tile with a number, of so many."""
        of_head = tiles // self.heads
        section = tile // (self.group * of_head)
        rest = tile - section * (self.group * of_head)
        size = gl.minimum(self.group, self.heads - section * self.group)
        place = rest // size
        head = section * self.group + (rest - place * size)
        words = self.pointer + _LIST_HEADER + place * _LIST_WORDS
        q_first, q_len = gl.load(words + 2), gl.load(words + 3)
        return WorkTile(
            gl.load(words), gl.load(words + 1), head, q_first, q_len, gl.load(words + 4), gl.load(words + 5)
        )


@gluon.jit
def fetch_next(counter):
    """Producer: ask for the number of a tile. The answer is on its way until `resolve` reads it."""
    asm: gl.constexpr = (
        "{ .reg .pred p; .reg .b32 l; mov.u32 l, %laneid; setp.eq.u32 p, l, 0; mov.b32 $0, 0; "
        "@p atom.global.relaxed.gpu.add.u32 $0, [$1], 1; }"
    )
    return run_asm(asm, "=&r,l", [counter.to(gl.int64)])


@gluon.jit
def resolve(pending_tile):
    """Producer: the number that was asked for. The first tiles are taken without asking."""
    return of_lane_0(pending_tile) + gl.num_programs(0)


@aggregate
class WorkTile:
    """Where a tile is."""

    index: gl.tensor  # of the tile of queries, in the backward of keys; -1: there are no more; FP8 marks some
    batch: gl.tensor
    head: gl.tensor  # of queries, in the backward of keys
    q_first: gl.tensor  # first row and length of the queries ...
    q_len: gl.tensor
    k_first: gl.tensor  # ... and of the keys
    k_len: gl.tensor

    @gluon.jit
    def is_valid(self):
        return self.index >= 0


WORDS = gl.constexpr(7)


@aggregate
class WorkTileChannel:
    """Two slots through which the producer tells the consumers their next tile, in `WORDS` numbers."""

    words: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.jit
    def send(self, k, work, mark=0):
        """Producer: the k-th message. `mark` is added to the tile's index."""
        words = (work.index + mark, work.batch, work.head, work.q_first, work.q_len, work.k_first, work.k_len)
        slot = k % 2
        mbarrier.wait(self.empty.index(slot), ((k // 2) & 1) ^ 1)
        for word in gl.static_range(WORDS):
            self._write(slot, word, words[word])
        mbarrier.arrive(self.full.index(slot), count=1)

    @gluon.jit
    def close(self, k):
        """Producer: the k-th message is that there are no more tiles."""
        zero = k * 0
        self.send(k, WorkTile(zero - 1, zero, zero, zero, zero, zero, zero))

    @gluon.jit
    def receive(self, k, WARPS: gl.constexpr = 4):
        """Consumer, of so many warps: the k-th message."""
        slot = k % 2
        mbarrier.wait(self.full.index(slot), (k // 2) & 1)
        words = ()
        for word in gl.static_range(WORDS):
            words = words + (self._read(WARPS, slot, word),)  # type: ignore[assignment]
        mbarrier.arrive(self.empty.index(slot), count=1)
        return WorkTile(*words)  # type: ignore[call-arg]

    @gluon.jit
    def _write(self, slot, word: gl.constexpr, value):
        place = self.words.index(slot * WORDS + word)
        place.store(gl.full([1], value, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))

    @gluon.jit
    def _read(self, WARPS: gl.constexpr, slot, word: gl.constexpr):
        value = self.words.index(slot * WORDS + word).load(gl.BlockedLayout([1], [32], [WARPS], [0]))
        return of_lane_0(gl.sum(value, 0))


@gluon.jit
def make_channel(CONSUMERS: gl.constexpr):
    words = gl.allocate_shared_memory(gl.int32, [2 * WORDS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(2):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=CONSUMERS)
    return WorkTileChannel(words, full, empty)


@gluon.jit
def of_lane_0(x):
    """The value of lane 0; that it is everybody's, where it is, the compiler cannot know."""
    return run_asm("shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;", "=r,r", [x])
