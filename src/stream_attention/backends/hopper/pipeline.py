"""Rings of tiles in shared memory: a producer warp fills them by TMA, consumer warpgroups empty them.

A slot has two mbarriers. `full` flips when the bytes that were announced have landed, `empty` when every consumer has
arrived. Use number i of a ring of n slots takes slot i % n for the (i // n)-th time, and that count's last bit is the
phase both sides wait for, so nobody keeps state but the number of uses.
"""

# No `from __future__ import annotations`: aggregates check the types of their fields by these very annotations.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .tiles import run_asm
from .versions import aggregate, tma_load


@aggregate
class Ring:
    """`SLOTS` slots of one or more tiles each, with their barriers."""

    tiles: gl.shared_memory_descriptor  # [SLOTS * tiles per slot, *tile]
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    SLOTS: gl.constexpr

    @gluon.jit
    def place(self, iteration, TILE: gl.constexpr = 0):
        """The number of a tile of a slot, among all tiles."""
        TILES: gl.constexpr = self.tiles.shape[0] // self.SLOTS
        return (iteration % self.SLOTS) * TILES + TILE

    @gluon.jit
    def matrix(self, place):
        """A tile as rows and columns."""
        return self.tiles.index(place).reshape([self.tiles.shape[2], self.tiles.shape[-1]])

    @gluon.jit
    def tile(self, iteration, TILE: gl.constexpr = 0):
        return self.matrix(self.place(iteration, TILE))

    @gluon.jit
    def wait_full(self, iteration, pred=True):
        mbarrier.wait(self.full.index(iteration % self.SLOTS), (iteration // self.SLOTS) & 1, pred=pred)

    @gluon.jit
    def release(self, iteration, pred=True):
        """One consumer has no more use for the slot."""
        mbarrier.arrive(self.empty.index(iteration % self.SLOTS), count=1, pred=pred)

    @gluon.jit
    def skip(self, iteration):
        """One consumer has no use for the slot."""
        self.wait_full(iteration)
        self.release(iteration)

    @gluon.jit
    def wait_empty(self, iteration):
        mbarrier.wait(self.empty.index(iteration % self.SLOTS), ((iteration // self.SLOTS) & 1) ^ 1)

    @gluon.jit
    def expect(self, iteration, nbytes: gl.constexpr):
        """Announce what will land in the slot; returns the barrier that counts it."""
        barrier = self.full.index(iteration % self.SLOTS)
        mbarrier.expect(barrier, nbytes)
        return barrier


@gluon.jit
def make_ring(desc, SLOTS: gl.constexpr, TILES: gl.constexpr, CONSUMERS: gl.constexpr):
    """A ring whose slots hold `TILES` tiles of a descriptor, each emptied by `CONSUMERS` warpgroups."""
    tiles = gl.allocate_shared_memory(desc.dtype, [SLOTS * TILES] + desc.block_type.shape, desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=CONSUMERS)
    return Ring(tiles, full, empty, SLOTS)


@gluon.jit
def load_rows(ring, desc, iteration, batch, row, head):
    """Fill a slot with rows of one head, as soon as it is empty. Rows that do not exist come as zeros."""
    ring.wait_empty(iteration)
    barrier = ring.expect(iteration, desc.block_type.nbytes)
    tma_load(desc, [batch, row, head, 0], barrier, ring.tiles.index(ring.place(iteration)))


@aggregate
class Pipelines:
    """The rings of a forward, and how it is configured."""

    CONFIG: gl.constexpr
    queries: Ring
    keys: Ring
    values: Ring


@gluon.jit
def make_pipelines(CONFIG: gl.constexpr, q_desc, k_desc, v_desc):
    WARPGROUPS: gl.constexpr = CONFIG.warpgroups
    queries = make_ring(q_desc, CONFIG.q_slots, WARPGROUPS, WARPGROUPS)
    keys = make_ring(k_desc, CONFIG.k_slots, 1, WARPGROUPS)
    values = make_ring(v_desc, CONFIG.v_slots, 1, WARPGROUPS)
    return Pipelines(CONFIG, queries, keys, values)


# Named barriers. Triton takes 0 for the first role and the next ones for the others; 8 and up are nobody's.


@gluon.constexpr_function
def _on_barrier(instruction, barrier, threads):
    return f"{instruction} {barrier}, {threads}; mov.b32 $0, 0;"


@gluon.jit
def _named_barrier(INSTRUCTION: gl.constexpr, barrier, THREADS: gl.constexpr):
    """`barrier` may be known at run time only."""
    if isinstance(barrier, gl.tensor):
        run_asm(_on_barrier(INSTRUCTION, "$1", THREADS), "=r,r", [barrier])
    else:
        run_asm(_on_barrier(INSTRUCTION, barrier, THREADS), "=r", [])


@gluon.jit
def sync(barrier, THREADS: gl.constexpr):
    """Arrive at a named barrier, and wait until so many threads have."""
    _named_barrier("bar.sync", barrier, THREADS)


@gluon.jit
def arrive(barrier, THREADS: gl.constexpr):
    """Arrive at a named barrier, without waiting."""
    _named_barrier("bar.arrive", barrier, THREADS)


TURN = gl.constexpr(8)


@gluon.jit
def take_turn(WARPGROUP: gl.constexpr):
    """Wait until the warpgroup before has passed the turn on."""
    sync(TURN + WARPGROUP, 256)


@gluon.jit
def pass_turn(WARPGROUP: gl.constexpr):
    """It is this warpgroup's turn."""
    arrive(TURN + WARPGROUP, 256)
