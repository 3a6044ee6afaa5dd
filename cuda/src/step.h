// One launch of a kernel: local queries meet one run of keys, and their running state is carried on.
#pragma once

#include <cuda_runtime.h>

#include <cmath>

namespace flash {

// The running state of online softmax, per query: m, the maximum of the scores s, which are exponents of 2; l, the sum
// of 2^(s - m); acc, the sum of values so weighted. Any run of keys can be folded into it, in any order:
//     m' = max(m, m_run)    l' = 2^(m - m') l + l_run    acc' = 2^(m - m') acc + acc_run       out = acc / l
// where l_run and acc_run are sums of 2^(s - m'). The bf16 kernel's m may be up to 8 below the maximum (flash_bf16.cu).
struct State {
    float* m;    // [B, H, Tq]
    float* l;    // [B, H, Tq]
    float* acc;  // [B, Tq, H, D]
};

// 0: every copy ends, for the whole block, before the arithmetic beside it begins. The results are the same; the time
// says what overlapping them is worth (benchmarks/studies/double_buffer.py).
#ifndef FLASH_ATTN_DOUBLE_BUFFER
#define FLASH_ATTN_DOUBLE_BUFFER 1
#endif
constexpr bool DOUBLE_BUFFER = FLASH_ATTN_DOUBLE_BUFFER;

constexpr float LN_2 = 0.693147180559945309f;

// A row that has seen no key has maximum -inf, and -inf - -inf is NaN: such a row is shifted by 0.
__device__ __forceinline__ float shift_of(float row_max) { return row_max == -INFINITY ? 0.0f : row_max; }

struct Step {
    const void* q;  // [B, Tq, H, D]
    const void* k;  // [B, Tk, H, D]
    const void* v;  // [B, Tk, H, D]
    void* out;      // [B, Tq, H, D], written by the last step
    float* lse;     // [B, H, Tq] or null, written by the last step
    State state;    // read unless first, written unless last
    int batch, heads, q_len, k_len, dim;
    float scale_log2;  // scale * log2(e): scores become exponents of 2, for which the hardware has an instruction
    int offset;        // position of query 0 less that of key 0
    bool causal, first, last;
};

// What a kernel asks of the GPU that runs it.
struct KernelNeeds {
    const void* kernel;
    int shared_bytes;  // of a block
    int target;        // compiled for at least this chip: 80 is sm_80
};

KernelNeeds needs_fp32(int dim);
KernelNeeds needs_bf16(int dim);

void launch_fp32(const Step& step, cudaStream_t stream);  // flash_fp32.cu
void launch_bf16(const Step& step, cudaStream_t stream);  // flash_bf16.cu

}  // namespace flash
