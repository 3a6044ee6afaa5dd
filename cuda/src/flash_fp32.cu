// Attention in fp32: online softmax over tiles of keys in shared memory, products by register-blocked FFMA.
//
// For a block of 128 queries, key tiles are met one after the other:
//     S = Q K^T                                   [128, KEYS], in registers
//     m' = max(m, rowmax(S))                      scores times scale * log2(e), so that exp is a power of 2
//     P = 2^(S - m')                              to shared memory
//     l = 2^(m - m') l + rowsum(P)
//     O = 2^(m - m') O + P V                      [128, D], in registers
// and out = O / l at the end. Reads Q once, K and V once per block of queries, writes out and lse (or the state).
//
// Double buffering: there is one buffer for K and one for V. While S is computed from K, V of this tile arrives; while
// P V is computed from V, K of the next tile arrives (cp.async, hardware.cuh). Two barriers per tile.
//
// Where the time goes: a thread owns an 8 x KEYS/8 block of S and an 8 x D/8 block of O. Up to D 64 the first is 8 x 8:
// per 4 steps of the inner dimension a thread loads 8 + 8 float4 from shared memory for 256 FFMA, 16 FFMA per load.
// That is what an SM needs to keep its 128 lanes busy when it can read 128 bytes of shared memory per clock. At D 128
// the registers leave 8 x 4 of S, 10.7 FFMA per load; P V makes up for it with 21.3.
//
// Threads of a warp: 4 (y) x 8 (x). Thread (y, x) owns rows y, y + 4, ..., y + 28 of the warp's 32, and of every 32
// keys or dims the four from 4 x on. The 8 threads of a row reduce with cooperative groups.
//
// Banks: 8 threads that read one float4 each are served together if these lie in 8 different columns of 16 bytes. Rows
// are a multiple of 128 bytes, so plain rows would collide; the chunks of a row are therefore permuted by XOR with a
// number that differs between the rows read together (`swizzle`).
//
// Grid: (blocks of queries, heads, batch), 128 threads, 2 blocks per SM where shared memory has room for both
// (cuda/README.md). Not here: backward, dropout, bias.

#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>

#include "cuda_check.h"
#include "hardware.cuh"
#include "step.h"

namespace cg = cooperative_groups;

namespace flash {
namespace {

constexpr int ROWS = 128;     // queries of a block
constexpr int THREADS = 128;  // 4 warps of 32 rows
constexpr int OWN = 8;        // rows of a thread

template <int D>
struct Tile {
    static constexpr int KEYS = D <= 64 ? 64 : 32;  // O takes D registers of a thread, S takes KEYS
    static constexpr int Q = ROWS * D, K = KEYS * D, V = KEYS * D, P = ROWS * KEYS;
    static constexpr int BYTES = (Q + K + V + P) * static_cast<int>(sizeof(float));
};

// Where chunk `chunk` (4 floats) of row `row` lies in a tile of WIDTH floats per row.
template <int WIDTH>
__device__ __forceinline__ int swizzle(int row, int chunk, int flip) {
    return row * WIDTH + ((chunk ^ flip) << 2);
}

// What to permute by: different numbers for the rows that are read together. Those of Q and P are y = 0..3, those of K
// are 4 x + e for x = 0..7.
__device__ __forceinline__ int flip_query(int row) { return row & 7; }
__device__ __forceinline__ int flip_key(int row) { return (row >> 2) & 7; }
__device__ __forceinline__ int flip_value(int) { return 0; }  // 8 threads read 128 bytes in a row: nothing to avoid

template <int COUNT, int D, typename Flip>
__device__ __forceinline__ void load_tile(float* tile, const float* from, long long stride, int rows, int dim,
                                          Flip flip) {
    constexpr int CHUNKS = D / 4, STRIDE = THREADS / CHUNKS;  // a thread copies one column of every STRIDE-th row
    const int first = threadIdx.x / CHUNKS, chunk = threadIdx.x % CHUNKS;
    const bool inside = chunk * 4 < dim;
    const float* source = from + first * stride + chunk * 4;
#pragma unroll
    for (int i = 0; i < COUNT / STRIDE; ++i, source += STRIDE * stride) {
        const int row = first + i * STRIDE;
        copy_async(shared_address(tile + swizzle<D>(row, chunk, flip(row))), source, inside && row < rows);
    }
}

__device__ __forceinline__ float4 load4(const float* pointer) { return *reinterpret_cast<const float4*>(pointer); }

// s[i][j] += q_i . k_j for the thread's 8 rows and KEYS / 8 keys.
template <int D, int KEYS>
__device__ __forceinline__ void multiply_q_k(float (&s)[OWN][KEYS / 8], const float* q_tile, const float* k_tile,
                                             int row, int x) {
#pragma unroll 1
    for (int chunk = 0; chunk < D / 4; ++chunk) {
        float4 k[KEYS / 8];
#pragma unroll
        for (int j = 0; j < KEYS / 8; ++j) k[j] = load4(k_tile + swizzle<D>(j / 4 * 32 + 4 * x + j % 4, chunk, x));
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            const float4 q = load4(q_tile + swizzle<D>(row + 4 * i, chunk, flip_query(row + 4 * i)));
#pragma unroll
            for (int j = 0; j < KEYS / 8; ++j) {
                s[i][j] = fmaf(q.x, k[j].x, s[i][j]);
                s[i][j] = fmaf(q.y, k[j].y, s[i][j]);
                s[i][j] = fmaf(q.z, k[j].z, s[i][j]);
                s[i][j] = fmaf(q.w, k[j].w, s[i][j]);
            }
        }
    }
}

// acc[i][d] += sum over keys of p[i][key] * v[key][d] for the thread's 8 rows and D / 8 dims.
template <int D, int KEYS>
__device__ __forceinline__ void multiply_p_v(float (&acc)[OWN][D / 8], const float* p_tile, const float* v_tile,
                                             int row, int x) {
#pragma unroll(D <= 64 ? 2 : 1)
    for (int chunk = 0; chunk < KEYS / 4; ++chunk) {
        float4 p[OWN];
#pragma unroll
        for (int i = 0; i < OWN; ++i) p[i] = load4(p_tile + swizzle<KEYS>(row + 4 * i, chunk, flip_query(row + 4 * i)));
#pragma unroll
        for (int e = 0; e < 4; ++e) {
#pragma unroll
            for (int part = 0; part < D / 32; ++part) {
                const float4 v = load4(v_tile + swizzle<D>(4 * chunk + e, 8 * part + x, 0));
#pragma unroll
                for (int i = 0; i < OWN; ++i) {
                    const float weight = e == 0 ? p[i].x : e == 1 ? p[i].y : e == 2 ? p[i].z : p[i].w;
                    acc[i][4 * part + 0] = fmaf(weight, v.x, acc[i][4 * part + 0]);
                    acc[i][4 * part + 1] = fmaf(weight, v.y, acc[i][4 * part + 1]);
                    acc[i][4 * part + 2] = fmaf(weight, v.z, acc[i][4 * part + 2]);
                    acc[i][4 * part + 3] = fmaf(weight, v.w, acc[i][4 * part + 3]);
                }
            }
        }
    }
}

template <int D>
__global__ void __launch_bounds__(THREADS, 2) flash_fp32_kernel(const Step step) {
    constexpr int KEYS = Tile<D>::KEYS;
    extern __shared__ __align__(128) float shared[];
    float* const q_tile = shared;
    float* const k_tile = q_tile + Tile<D>::Q;
    float* const v_tile = k_tile + Tile<D>::K;
    float* const p_tile = v_tile + Tile<D>::V;

    // Where am I. Causal blocks that see most keys start first.
    const int block = step.causal ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
    const int head = blockIdx.y, batch = blockIdx.z;
    const int first_row = block * ROWS;
    const int rows = min(ROWS, step.q_len - first_row);
    const auto octet = cg::tiled_partition<8>(cg::this_thread_block());
    const int x = octet.thread_rank();
    const int row = threadIdx.x / 32 * 32 + octet.meta_group_rank() % 4;  // the first of the thread's rows

    const long long stride = static_cast<long long>(step.heads) * step.dim;
    const long long q_start = (static_cast<long long>(batch) * step.q_len + first_row) * stride + head * step.dim;
    const long long k_start = static_cast<long long>(batch) * step.k_len * stride + head * step.dim;
    const float* const k = static_cast<const float*>(step.k);
    const float* const v = static_cast<const float*>(step.v);
    const long long row_start = (static_cast<long long>(batch) * step.heads + head) * step.q_len + first_row;

    // Load Q, and K of the first tile.
    const int visible = step.causal ? min(step.k_len, first_row + rows + step.offset) : step.k_len;
    load_tile<ROWS, D>(q_tile, static_cast<const float*>(step.q) + q_start, stride, rows, step.dim, flip_query);
    if (visible > 0) load_tile<KEYS, D>(k_tile, k + k_start, stride, step.k_len, step.dim, flip_key);

    // Initial state. A row's sum is spread over its 8 threads until the end.
    float row_max[OWN], row_sum[OWN], acc[OWN][D / 8];
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        const bool carried = !step.first && row + 4 * i < rows;
        row_max[i] = carried ? step.state.m[row_start + row + 4 * i] : -INFINITY;
        row_sum[i] = carried && x == 0 ? step.state.l[row_start + row + 4 * i] : 0.0f;
#pragma unroll
        for (int part = 0; part < D / 32; ++part) {
            const int dim = 32 * part + 4 * x;
            float4 value{0.0f, 0.0f, 0.0f, 0.0f};
            if (carried && dim < step.dim) value = load4(step.state.acc + q_start + (row + 4 * i) * stride + dim);
            acc[i][4 * part + 0] = value.x, acc[i][4 * part + 1] = value.y;
            acc[i][4 * part + 2] = value.z, acc[i][4 * part + 3] = value.w;
        }
    }

    // Stream the tiles.
    for (int start = 0; start < visible; start += KEYS) {
        wait_for_copies();
        __syncthreads();  // K is here, and nobody reads V of the last tile any more
        load_tile<KEYS, D>(v_tile, v + k_start + start * stride, stride, step.k_len - start, step.dim, flip_value);
        if (!DOUBLE_BUFFER) {
            wait_for_copies();
            __syncthreads();
        }

        float s[OWN][KEYS / 8] = {};
        multiply_q_k<D, KEYS>(s, q_tile, k_tile, row, x);

        if (start + KEYS > step.k_len || (step.causal && start + KEYS - 1 > first_row + step.offset)) {
#pragma unroll
            for (int i = 0; i < OWN; ++i) {
                const int seen = first_row + row + 4 * i + step.offset + 1;
                const int end = step.causal ? min(step.k_len, seen) : step.k_len;
#pragma unroll
                for (int j = 0; j < KEYS / 8; ++j)
                    if (start + j / 4 * 32 + 4 * x + j % 4 >= end) s[i][j] = -INFINITY;
            }
        }

#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            float tile_max = s[i][0];
#pragma unroll
            for (int j = 1; j < KEYS / 8; ++j) tile_max = fmaxf(tile_max, s[i][j]);
            tile_max = cg::reduce(octet, tile_max, cg::greater<float>());
            const float new_max = fmaxf(row_max[i], tile_max * step.scale_log2);
            const float shift = shift_of(new_max);
            const float decay = power_of_2(row_max[i] - shift);
            row_max[i] = new_max;

            float sum = 0.0f;
#pragma unroll
            for (int j = 0; j < KEYS / 8; ++j) {
                s[i][j] = power_of_2(fmaf(s[i][j], step.scale_log2, -shift));
                sum += s[i][j];
            }
            row_sum[i] = fmaf(row_sum[i], decay, sum);
#pragma unroll
            for (int d = 0; d < D / 8; ++d) acc[i][d] *= decay;
#pragma unroll
            for (int part = 0; part < KEYS / 32; ++part) {
                const int place = swizzle<KEYS>(row + 4 * i, 8 * part + x, flip_query(row + 4 * i));
                *reinterpret_cast<float4*>(p_tile + place) =
                    float4{s[i][4 * part], s[i][4 * part + 1], s[i][4 * part + 2], s[i][4 * part + 3]};
            }
        }

        wait_for_copies();
        __syncthreads();  // V and P are here, and nobody reads K of this tile any more
        const int next = start + KEYS;
        if (next < visible)
            load_tile<KEYS, D>(k_tile, k + k_start + next * stride, stride, step.k_len - next, step.dim, flip_key);
        if (!DOUBLE_BUFFER) {
            wait_for_copies();
            __syncthreads();
        }
        multiply_p_v<D, KEYS>(acc, p_tile, v_tile, row, x);
    }
    wait_for_copies();

    // Finish and store.
    float* const to = step.last ? static_cast<float*>(step.out) : step.state.acc;
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        const float sum = cg::reduce(octet, row_sum[i], cg::plus<float>());
        if (row + 4 * i >= rows) continue;
        const float factor = !step.last ? 1.0f : sum == 0.0f ? 0.0f : 1.0f / sum;  // NaN stays NaN
#pragma unroll
        for (int part = 0; part < D / 32; ++part) {
            const int dim = 32 * part + 4 * x;
            if (dim < step.dim)
                *reinterpret_cast<float4*>(to + q_start + (row + 4 * i) * stride + dim) =
                    float4{acc[i][4 * part] * factor, acc[i][4 * part + 1] * factor, acc[i][4 * part + 2] * factor,
                           acc[i][4 * part + 3] * factor};
        }
        if (x != 0) continue;
        if (!step.last) {
            step.state.m[row_start + row + 4 * i] = row_max[i];
            step.state.l[row_start + row + 4 * i] = sum;
        } else if (step.lse != nullptr) {
            step.lse[row_start + row + 4 * i] = sum == 0.0f ? -INFINITY : LN_2 * row_max[i] + logf(sum);
        }
    }
}

template <int D>
void launch(const Step& step, cudaStream_t stream) {
    CUDA_CHECK(cudaFuncSetAttribute(flash_fp32_kernel<D>, cudaFuncAttributeMaxDynamicSharedMemorySize, Tile<D>::BYTES));
    const dim3 grid((step.q_len + ROWS - 1) / ROWS, step.heads, step.batch);
    flash_fp32_kernel<D><<<grid, THREADS, Tile<D>::BYTES, stream>>>(step);
    CUDA_CHECK(cudaGetLastError());
}

template <int D>
KernelNeeds needs() {
    return {reinterpret_cast<const void*>(flash_fp32_kernel<D>), Tile<D>::BYTES, 0};
}

}  // namespace

KernelNeeds needs_fp32(int dim) { return dim <= 32 ? needs<32>() : dim <= 64 ? needs<64>() : needs<128>(); }

void launch_fp32(const Step& step, cudaStream_t stream) {
    if (step.dim <= 32) return launch<32>(step, stream);
    if (step.dim <= 64) return launch<64>(step, stream);
    return launch<128>(step, stream);
}

}  // namespace flash
