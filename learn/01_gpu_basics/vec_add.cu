// Vector addition: one thread adds one pair of numbers.
//
//     nvcc -o vec_add vec_add.cu && ./vec_add [length]
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "cuda_check.h"

constexpr int THREADS = 256;  // per block: a multiple of 32, the size of a warp

__global__ void vec_add(const float* x, const float* y, float* out, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = x[i] + y[i];  // the last block may reach past the end
}

int main(int argc, char** argv) {
    const int n = argc > 1 ? std::atoi(argv[1]) : 1000003;
    if (n < 1 || n > 1 << 29) {
        std::fprintf(stderr, "length: expected 1 to %d; got %s\n", 1 << 29, argv[1]);
        return 2;
    }
    std::vector<float> x(n), y(n), out(n);
    for (int i = 0; i < n; ++i) {
        x[i] = float(i % 1000);
        y[i] = 0.5f * float(i % 7);
    }

    // The GPU has its own memory: room there, a copy in, a launch, a copy back.
    const size_t bytes = n * sizeof(float);
    float *device_x, *device_y, *device_out;
    CUDA_CHECK(cudaMalloc(&device_x, bytes));
    CUDA_CHECK(cudaMalloc(&device_y, bytes));
    CUDA_CHECK(cudaMalloc(&device_out, bytes));
    CUDA_CHECK(cudaMemcpy(device_x, x.data(), bytes, cudaMemcpyHostToDevice));
    CUDA_CHECK(cudaMemcpy(device_y, y.data(), bytes, cudaMemcpyHostToDevice));

    const int blocks = (n + THREADS - 1) / THREADS;  // ceiling division: the last block may be partly idle
    vec_add<<<blocks, THREADS>>>(device_x, device_y, device_out, n);
    CUDA_CHECK(cudaGetLastError());  // a launch returns nothing: a bad one is reported here
    CUDA_CHECK(cudaMemcpy(out.data(), device_out, bytes, cudaMemcpyDeviceToHost));  // waits for the kernel

    int wrong = 0;
    for (int i = 0; i < n; ++i) wrong += out[i] != x[i] + y[i];
    std::printf("%d elements, %d blocks of %d threads, %d threads idle, %d wrong\n", n, blocks, THREADS,
                blocks * THREADS - n, wrong);
    CUDA_CHECK(cudaFree(device_x));
    CUDA_CHECK(cudaFree(device_y));
    CUDA_CHECK(cudaFree(device_out));
    return wrong != 0;
}
