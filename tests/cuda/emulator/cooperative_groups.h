// Tiles of a warp, for the emulator: reductions that every lane of the warp takes part in.
#pragma once

#include <cuda_runtime.h>

namespace cooperative_groups {

struct thread_block {};
inline thread_block this_thread_block() { return {}; }

template <unsigned SIZE>
struct thread_block_tile {
    unsigned thread_rank() const { return threadIdx.x % SIZE; }
    unsigned meta_group_rank() const { return threadIdx.x / SIZE; }
};

template <unsigned SIZE>
thread_block_tile<SIZE> tiled_partition(thread_block) {
    return {};
}

}  // namespace cooperative_groups
