// Instructions that C++ has no words for: asynchronous copies, the exponential, matrices and their products. The tests
// have a second version of this file, for CPUs (tests/cuda/emulator/).
#pragma once

#include <cuda_runtime.h>

namespace flash {

__device__ __forceinline__ unsigned shared_address(const void* pointer) {
    return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// Copies 16 bytes from global to shared memory, or writes zeros where `valid` is false (`from` is then not read).
// cp.async (sm_80) goes past the registers and returns at once; older chips load, then store.
__device__ __forceinline__ void copy_async(unsigned to, const void* from, bool valid) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0) : "memory");
#else
    const uint4 value = valid ? *static_cast<const uint4*>(from) : uint4{0, 0, 0, 0};
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(value.x), "r"(value.y), "r"(value.z),
                 "r"(value.w)
                 : "memory");
#endif
}

// Waits for this thread's own copies; a barrier must follow before others read them.
__device__ __forceinline__ void wait_for_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// 2^x in one instruction, at most 2 units in the last place off; 2^-inf = 0.
__device__ __forceinline__ float power_of_2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Before sm_80 these three do nothing, and forward.cpp refuses to run the kernel that uses them.
//
// Four 8 x 8 matrices; lane l gives the address of row l % 8 of matrix l / 8 and receives of each matrix the numbers
// 2 (l % 4), 2 (l % 4) + 1 of row l / 4.
__device__ __forceinline__ void load_matrices(unsigned (&to)[4], unsigned address) {
#if __CUDA_ARCH__ >= 800
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address));
#endif
}

// The same of the transposed matrices.
__device__ __forceinline__ void load_matrices_transposed(unsigned (&to)[4], unsigned address) {
#if __CUDA_ARCH__ >= 800
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address));
#endif
}

// c [16, 8] += a [16, 16] b [16, 8]. Lane l holds of c the columns 2 (l % 4), + 1 of the rows l / 4 and l / 4 + 8.
__device__ __forceinline__ void multiply(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
#if __CUDA_ARCH__ >= 800
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

}  // namespace flash
