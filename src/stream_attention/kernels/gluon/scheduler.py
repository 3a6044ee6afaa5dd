"""Which tile a program computes next.

Programs stay on their processor and take tile after tile. In the static order program p takes p, p + P, p + 2P ...; in
the dynamic one the producer warp draws the next number from a counter in global memory, which starts at zero with the
launch, and hands it to the consumers through shared memory.

Tiles that see many keys come first (causal: the last rows), so that the end of the launch is made of short ones, and
heads are taken in groups whose keys and values stay in the L2 cache together.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.core import _aggregate as aggregate


@aggregate
class Order:
    """The numbering of tiles: `tiles_m` of queries for each of `lines` = batch * heads."""

    lines: gl.tensor
    tiles_m: gl.tensor
    group: gl.tensor  # lines whose keys and values fit the L2 cache together
    tiles: gl.tensor  # in all
    LONGEST_FIRST: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, lines, tiles_m, group, tiles, LONGEST_FIRST):
        self.lines = lines
        self.tiles_m = tiles_m
        self.group = group
        self.tiles = tiles
        self.LONGEST_FIRST = gl.constexpr(LONGEST_FIRST)

    @gluon.jit
    def place(self, tile):
        """(line, number of the tile of queries) of a tile."""
        if self.LONGEST_FIRST:
            section = tile // (self.group * self.tiles_m)
            rest = tile - section * (self.group * self.tiles_m)
            size = gl.minimum(self.group, self.lines - section * self.group)
            row = rest // size
            return section * self.group + (rest - row * size), self.tiles_m - 1 - row
        else:
            line = tile // self.tiles_m
            return line, tile - line * self.tiles_m


@aggregate
class Mailbox:
    """Two slots through which the producer tells the consumers their next tile."""

    numbers: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    counter: gl.tensor  # in global memory
    DYNAMIC: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, numbers, full, empty, counter, DYNAMIC):
        self.numbers = numbers
        self.full = full
        self.empty = empty
        self.counter = counter
        self.DYNAMIC = gl.constexpr(DYNAMIC)

    @gluon.jit
    def draw(self, tile):
        """Producer: the tile after `tile`."""
        if self.DYNAMIC:
            return _next_number(self.counter) + gl.num_programs(0)
        else:
            return tile + gl.num_programs(0)

    @gluon.jit
    def send(self, tile, k):
        """Producer: `tile` is the k-th after the first."""
        if self.DYNAMIC:
            slot = k % 2
            mbarrier.wait(self.empty.index(slot), ((k // 2) & 1) ^ 1)
            self.numbers.index(slot).store(gl.full([1], tile, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))
            mbarrier.arrive(self.full.index(slot), count=1)

    @gluon.jit
    def receive(self, tile, k):
        """Consumer: the tile after `tile`, which is the k-th after the first."""
        if self.DYNAMIC:
            slot = k % 2
            mbarrier.wait(self.full.index(slot), (k // 2) & 1)
            number = self.numbers.index(slot).load(gl.BlockedLayout([1], [32], [4], [0]))
            after = _warp_uniform(gl.sum(number, 0))
            mbarrier.arrive(self.empty.index(slot), count=1)
            return after
        else:
            return tile + gl.num_programs(0)


@gluon.jit
def make_mailbox(counter, CONSUMERS: gl.constexpr, DYNAMIC: gl.constexpr):
    numbers = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(2):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=CONSUMERS)
    return Mailbox(numbers, full, empty, counter, DYNAMIC)


@gluon.jit
def _next_number(counter):
    """One warp: lane 0 adds one, everybody gets the value before it."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 l, t; mov.u32 l, %laneid; setp.eq.u32 p, l, 0; mov.b32 t, 0; "
        "@p atom.global.relaxed.gpu.add.u32 t, [$1], 1; shfl.sync.idx.b32 $0, t, 0, 31, 0xffffffff; }",
        "=r,l",
        [counter.to(gl.int64)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _warp_uniform(x):
    """The value of lane 0, which the compiler cannot know to be everybody's."""
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1
    )
