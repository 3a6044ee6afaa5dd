// As much of CUDA as learn/01_gpu_basics uses, on a CPU: the threads of a block are threads, blocks come one by one.
//
// The test replaces `f<<<grid, block>>>(...)` by `launch(grid, block, [&] { f(...); })`. A static array is shared by a
// block's threads, as there is one block at a time; it and device memory begin as NaN.
#pragma once

#include <barrier>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#define __global__
#define __shared__ static

struct dim3 {
    unsigned x = 1, y = 1, z = 1;
    dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
inline dim3 gridDim, blockDim;
inline thread_local dim3 blockIdx, threadIdx;
inline std::unique_ptr<std::barrier<>> everybody;

inline void __syncthreads() { everybody->arrive_and_wait(); }

template <typename Kernel>
void launch(dim3 grid, dim3 block, Kernel kernel) {
    gridDim = grid, blockDim = block;
    everybody = std::make_unique<std::barrier<>>(block.x * block.y);
    std::vector<std::thread> threads;
    for (unsigned t = 0; t < block.x * block.y; ++t)
        threads.emplace_back([=] {
            threadIdx = dim3(t % block.x, t / block.x);
            for (unsigned b = 0; b < grid.x * grid.y; ++b) {
                blockIdx = dim3(b % grid.x, b / grid.x);
                kernel();
                everybody->arrive_and_wait();
            }
        });
    for (std::thread& thread : threads) thread.join();
}

enum cudaError_t { cudaSuccess };
enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost };
inline const char* cudaGetErrorString(cudaError_t) { return "no error"; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
inline cudaError_t cudaMalloc(float** pointer, size_t bytes) {
    *pointer = static_cast<float*>(std::malloc(bytes));
    std::memset(*pointer, 0xff, bytes);
    return cudaSuccess;
}
inline cudaError_t cudaFree(float* pointer) {
    std::free(pointer);
    return cudaSuccess;
}
inline cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
    std::memcpy(to, from, bytes);
    return cudaSuccess;
}
