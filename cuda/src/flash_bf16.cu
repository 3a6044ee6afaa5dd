// Attention in bf16 with fp32 sums: the same online softmax (flash_fp32.cu), products by tensor cores.
//
// For a block of 128 queries, tiles of 64 keys:
//     S = Q K^T                      mma.sync m16n8k16, fp32 in registers
//     m = max(m, rowmax(S))          only when it grows by more than 8, see below
//     P = 2^(S - m), to bf16         stays in registers: what one product returns is laid out as the next one reads it
//     l = l + rowsum(P)
//     O = O + P V                    mma.sync, fp32 in registers
// and out = O / l at the end. Reads bf16, writes bf16 out and fp32 lse (or the fp32 state).
//
// The lazy maximum: m need not be the maximum, it only has to keep 2^(S - m) inside fp32. So it may lag behind by 8,
// a factor of 2^8, and O and l are rescaled when a row of the warp exceeds that: a few times per row instead of once
// per tile. Nothing is approximated: whatever m is, it cancels in O / l.
//
// Double buffering: K and V have two stages each. While one tile is computed, the next one arrives (cp.async), and
// there is one barrier per tile: it says that the tile is here and that nobody reads the one before it any more.
//
// Where the time goes: a warp owns 32 queries, two products high, so that every 16 x 16 piece of K or V that it loads
// (ldmatrix.x4, 512 bytes) feeds four mma.sync. With 16 queries it would feed two, and shared memory (128 bytes per
// clock) would be slower than the tensor cores. With D = 128 the registers are S 64 and O 128, so Q is loaded anew for
// every tile; with less it stays in registers.
//
// Banks: ldmatrix reads 8 rows of 16 bytes at a time, which must lie in 8 different columns of 16 bytes of a 128-byte
// line. Chunk c of row r is therefore stored at c XOR r mod 8 (`swizzle`).
//
// Grid: (blocks of queries, heads, batch), 128 threads, 2 blocks per SM where shared memory has room for both
// (cuda/README.md). Not here: backward, dropout, bias.

#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>
#include <cuda_bf16.h>

#include "cuda_check.h"
#include "hardware.cuh"
#include "step.h"

namespace cg = cooperative_groups;

namespace flash {
namespace {

constexpr int ROWS = 128;     // queries of a block
constexpr int KEYS = 64;      // of a tile
constexpr int THREADS = 128;  // 4 warps of 32 rows
constexpr int HIGH = 2;       // products of 16 rows that a warp's rows make
constexpr float LAG = 8.0f;   // in powers of 2: by how much a maximum may exceed the one that is subtracted

template <int D>
struct Tile {
    static constexpr bool KEEP_Q = D <= 64;  // in registers
    static constexpr int STAGE = 2 * KEYS * D * 2;  // bytes of K and V
    static constexpr int Q = ROWS * D * 2;
    static constexpr int BYTES = Q + 2 * STAGE;
};

// Bytes from the start of a tile to chunk `chunk` (8 numbers, 16 bytes) of row `row`.
template <int D>
__device__ __forceinline__ unsigned swizzle(int row, int chunk) {
    const int flip = D >= 64 ? row & 7 : (row >> 1) & 3;  // D = 32: a line of 128 bytes holds two rows of four chunks
    return row * (D * 2) + ((chunk ^ flip) << 4);
}

template <int COUNT, int D>
__device__ __forceinline__ void load_tile(unsigned tile, const __nv_bfloat16* from, long long stride, int rows,
                                          int dim) {
    constexpr int CHUNKS = D / 8, STRIDE = THREADS / CHUNKS;  // a thread copies one column of every STRIDE-th row
    const int first = threadIdx.x / CHUNKS, chunk = threadIdx.x % CHUNKS;
    const bool inside = chunk * 8 < dim;
    const __nv_bfloat16* source = from + first * stride + chunk * 8;
#pragma unroll
    for (int i = 0; i < COUNT / STRIDE; ++i, source += STRIDE * stride) {
        const int row = first + i * STRIDE;
        copy_async(tile + swizzle<D>(row, chunk), source, inside && row < rows);
    }
}

__device__ __forceinline__ unsigned pack(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const unsigned*>(&pair);
}

template <int D>
__global__ void __launch_bounds__(THREADS, 2) flash_bf16_kernel(const Step step) {
    constexpr bool KEEP_Q = Tile<D>::KEEP_Q;
    extern __shared__ __align__(1024) unsigned char shared[];
    const unsigned q_tile = shared_address(shared);
    const unsigned stages = q_tile + Tile<D>::Q;  // two of [K, V]

    // Where am I. Causal blocks that see most keys start first.
    const int block = step.causal ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
    const int head = blockIdx.y, batch = blockIdx.z;
    const int first_row = block * ROWS;
    const int rows = min(ROWS, step.q_len - first_row);
    const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * 32;
    const auto quad = cg::tiled_partition<4>(cg::this_thread_block());  // the lanes that share rows of a product
    // Rows of a lane in the block: own_row + 8 r, r = 0..3; its columns of every 8: own_column, own_column + 1.
    const int own_row = warp_row + lane / 4, own_column = 2 * (lane % 4);

    const long long stride = static_cast<long long>(step.heads) * step.dim;
    const long long q_start = (static_cast<long long>(batch) * step.q_len + first_row) * stride + head * step.dim;
    const long long k_start = static_cast<long long>(batch) * step.k_len * stride + head * step.dim;
    const __nv_bfloat16* const k = static_cast<const __nv_bfloat16*>(step.k) + k_start;
    const __nv_bfloat16* const v = static_cast<const __nv_bfloat16*>(step.v) + k_start;
    const long long row_start = (static_cast<long long>(batch) * step.heads + head) * step.q_len + first_row;

    // Load Q and the first tile.
    const int visible = step.causal ? min(step.k_len, first_row + rows + step.offset) : step.k_len;
    load_tile<ROWS, D>(q_tile, static_cast<const __nv_bfloat16*>(step.q) + q_start, stride, rows, step.dim);
    if (visible > 0) {
        load_tile<KEYS, D>(stages, k, stride, step.k_len, step.dim);
        load_tile<KEYS, D>(stages + Tile<D>::STAGE / 2, v, stride, step.k_len, step.dim);
    }

    // Initial state. A row's sum is spread over its 4 lanes until the end.
    float row_max[2 * HIGH], row_sum[2 * HIGH], acc[HIGH][D / 8][4];
#pragma unroll
    for (int r = 0; r < 2 * HIGH; ++r) {
        const int row = own_row + 8 * r;
        const bool carried = !step.first && row < rows;
        row_max[r] = carried ? step.state.m[row_start + row] : -INFINITY;
        row_sum[r] = carried && lane % 4 == 0 ? step.state.l[row_start + row] : 0.0f;
#pragma unroll
        for (int n = 0; n < D / 8; ++n) {
            const int dim = 8 * n + own_column;
            float2 value{0.0f, 0.0f};
            if (carried && dim < step.dim)
                value = *reinterpret_cast<const float2*>(step.state.acc + q_start + row * stride + dim);
            acc[r / 2][n][r % 2 * 2] = value.x, acc[r / 2][n][r % 2 * 2 + 1] = value.y;
        }
    }

    // Where a lane's rows of ldmatrix begin. Moving by 16 numbers along a row flips bits of the chunk: an XOR.
    const unsigned q_lane = q_tile + swizzle<D>(warp_row + lane % 16, lane / 16);   // 16 rows x 2 chunks
    const unsigned k_lane = swizzle<D>(lane / 16 * 8 + lane % 8, lane / 8 % 2);     // 8 keys x 2 chunks, twice
    const unsigned v_lane = swizzle<D>(lane % 16, lane / 16) + Tile<D>::STAGE / 2;  // 16 keys x 2 chunks
    constexpr int ROW_BYTES = D * 2;

    unsigned q_kept[KEEP_Q ? D / 16 : 1][HIGH][4];

    // Stream the tiles.
    unsigned stage = stages;
    for (int start = 0; start < visible; start += KEYS) {
        wait_for_copies();
        __syncthreads();  // this tile is here, and nobody reads the one before it any more
        const int next = start + KEYS;
        if (next < visible) {
            const unsigned other = stages + (stage == stages ? Tile<D>::STAGE : 0);
            load_tile<KEYS, D>(other, k + next * stride, stride, step.k_len - next, step.dim);
            load_tile<KEYS, D>(other + Tile<D>::STAGE / 2, v + next * stride, stride, step.k_len - next, step.dim);
        }
        if (!DOUBLE_BUFFER) {
            wait_for_copies();
            __syncthreads();
        }
        if (KEEP_Q && start == 0) {
#pragma unroll
            for (int kk = 0; kk < (KEEP_Q ? D / 16 : 0); ++kk)
#pragma unroll
                for (int h = 0; h < HIGH; ++h)
                    load_matrices(q_kept[kk][h], (q_lane + h * 16 * ROW_BYTES) ^ (kk << 5));
        }

        // S = Q K^T: [32, 64] of a warp.
        float s[HIGH][KEYS / 8][4] = {};
#pragma unroll
        for (int kk = 0; kk < D / 16; ++kk) {
            unsigned q[HIGH][4];
#pragma unroll
            for (int h = 0; h < HIGH; ++h) {
                if (KEEP_Q) {
#pragma unroll
                    for (int e = 0; e < 4; ++e) q[h][e] = q_kept[KEEP_Q ? kk : 0][h][e];
                } else {
                    load_matrices(q[h], (q_lane + h * 16 * ROW_BYTES) ^ (kk << 5));
                }
            }
#pragma unroll
            for (int n = 0; n < KEYS / 16; ++n) {
                unsigned keys[4];
                load_matrices(keys, ((stage + k_lane) ^ (kk << 5)) + n * 16 * ROW_BYTES);
#pragma unroll
                for (int h = 0; h < HIGH; ++h) {
                    multiply(s[h][2 * n], q[h], keys[0], keys[1]);
                    multiply(s[h][2 * n + 1], q[h], keys[2], keys[3]);
                }
            }
        }

        if (start + KEYS > step.k_len || (step.causal && start + KEYS - 1 > first_row + step.offset)) {
#pragma unroll
            for (int r = 0; r < 2 * HIGH; ++r) {
                const int seen = first_row + own_row + 8 * r + step.offset + 1;
                const int end = step.causal ? min(step.k_len, seen) : step.k_len;
#pragma unroll
                for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
                    for (int e = 0; e < 2; ++e)
                        if (start + 8 * n + own_column + e >= end) s[r / 2][n][r % 2 * 2 + e] = -INFINITY;
            }
        }

        // The maximum, and the rescaling where it has to move.
        float new_max[2 * HIGH];
        bool exceeds = false;
#pragma unroll
        for (int r = 0; r < 2 * HIGH; ++r) {
            float tile_max = s[r / 2][0][r % 2 * 2];
#pragma unroll
            for (int n = 0; n < KEYS / 8; ++n)
                tile_max = fmaxf(tile_max, fmaxf(s[r / 2][n][r % 2 * 2], s[r / 2][n][r % 2 * 2 + 1]));
            new_max[r] = tile_max * step.scale_log2;
            exceeds |= new_max[r] > row_max[r] + LAG;
        }
        if (__any_sync(0xffffffffu, exceeds)) {
#pragma unroll
            for (int r = 0; r < 2 * HIGH; ++r) {
                const float highest = fmaxf(row_max[r], cg::reduce(quad, new_max[r], cg::greater<float>()));
                const float decay = power_of_2(row_max[r] - shift_of(highest));
                row_max[r] = highest;
                row_sum[r] *= decay;
#pragma unroll
                for (int n = 0; n < D / 8; ++n) {
                    acc[r / 2][n][r % 2 * 2] *= decay;
                    acc[r / 2][n][r % 2 * 2 + 1] *= decay;
                }
            }
        }

        // P = 2^(S - m) and O += P V, 16 keys at a time: exponentials of one piece run beside the products of another.
        float shift[2 * HIGH];
#pragma unroll
        for (int r = 0; r < 2 * HIGH; ++r) shift[r] = shift_of(row_max[r]);
#pragma unroll
        for (int kk = 0; kk < KEYS / 16; ++kk) {
            unsigned p[HIGH][4];
#pragma unroll
            for (int h = 0; h < HIGH; ++h) {
#pragma unroll
                for (int e = 0; e < 4; ++e) {  // p[e]: columns 0..7 or 8..15 (e / 2), rows 0..7 or 8..15 (e % 2)
                    const int r = 2 * h + e % 2;
                    const float(&scores)[4] = s[h][2 * kk + e / 2];
                    const float low = power_of_2(fmaf(scores[e % 2 * 2], step.scale_log2, -shift[r]));
                    const float high = power_of_2(fmaf(scores[e % 2 * 2 + 1], step.scale_log2, -shift[r]));
                    row_sum[r] += low + high;
                    p[h][e] = pack(low, high);
                }
            }
#pragma unroll
            for (int n = 0; n < D / 16; ++n) {
                unsigned values[4];
                load_matrices_transposed(values, ((stage + v_lane) ^ (n << 5)) + kk * 16 * ROW_BYTES);
#pragma unroll
                for (int h = 0; h < HIGH; ++h) {
                    multiply(acc[h][2 * n], p[h], values[0], values[1]);
                    multiply(acc[h][2 * n + 1], p[h], values[2], values[3]);
                }
            }
        }
        stage = stages + (stage == stages ? Tile<D>::STAGE : 0);
    }
    wait_for_copies();

    // Finish and store.
#pragma unroll
    for (int r = 0; r < 2 * HIGH; ++r) {
        const int row = own_row + 8 * r;
        const float sum = cg::reduce(quad, row_sum[r], cg::plus<float>());
        if (row >= rows) continue;
        const float factor = !step.last ? 1.0f : sum == 0.0f ? 0.0f : 1.0f / sum;  // NaN stays NaN
        const long long at = q_start + row * stride;
#pragma unroll
        for (int n = 0; n < D / 8; ++n) {
            const int dim = 8 * n + own_column;
            const float low = acc[r / 2][n][r % 2 * 2] * factor, high = acc[r / 2][n][r % 2 * 2 + 1] * factor;
            if (dim >= step.dim) continue;
            if (step.last)
                *reinterpret_cast<unsigned*>(static_cast<__nv_bfloat16*>(step.out) + at + dim) = pack(low, high);
            else
                *reinterpret_cast<float2*>(step.state.acc + at + dim) = float2{low, high};
        }
        if (lane % 4 != 0) continue;
        if (!step.last) {
            step.state.m[row_start + row] = row_max[r];
            step.state.l[row_start + row] = sum;
        } else if (step.lse != nullptr) {
            step.lse[row_start + row] = sum == 0.0f ? -INFINITY : LN_2 * row_max[r] + logf(sum);
        }
    }
}

template <int D>
void launch(const Step& step, cudaStream_t stream) {
    CUDA_CHECK(cudaFuncSetAttribute(flash_bf16_kernel<D>, cudaFuncAttributeMaxDynamicSharedMemorySize, Tile<D>::BYTES));
    const dim3 grid((step.q_len + ROWS - 1) / ROWS, step.heads, step.batch);
    flash_bf16_kernel<D><<<grid, THREADS, Tile<D>::BYTES, stream>>>(step);
    CUDA_CHECK(cudaGetLastError());
}

template <int D>
KernelNeeds needs() {
    return {reinterpret_cast<const void*>(flash_bf16_kernel<D>), Tile<D>::BYTES, 80};
}

}  // namespace

KernelNeeds needs_bf16(int dim) { return dim <= 32 ? needs<32>() : dim <= 64 ? needs<64>() : needs<128>(); }

void launch_bf16(const Step& step, cudaStream_t stream) {
    if (step.dim <= 32) return launch<32>(step, stream);
    if (step.dim <= 64) return launch<64>(step, stream);
    return launch<128>(step, stream);
}

}  // namespace flash
