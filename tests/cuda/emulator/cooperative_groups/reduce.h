#pragma once

#include <cooperative_groups.h>

namespace cooperative_groups {

template <typename T>
struct plus {
    T operator()(T a, T b) const { return a + b; }
};
template <typename T>
struct greater {
    T operator()(T a, T b) const { return a > b ? a : b; }
};

template <unsigned SIZE, typename T, typename Op>
T reduce(const thread_block_tile<SIZE>&, T own, Op op) {
    const void* const* all = emulated::exchange(&own);
    const unsigned first = threadIdx.x % 32 / SIZE * SIZE;
    T result = *static_cast<const T*>(all[first]);
    for (unsigned lane = first + 1; lane < first + SIZE; ++lane) result = op(result, *static_cast<const T*>(all[lane]));
    emulated::exchange(nullptr);  // nobody leaves while another reads
    return result;
}

}  // namespace cooperative_groups
