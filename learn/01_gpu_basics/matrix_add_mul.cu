// Matrices: addition in a grid of two dimensions, and multiplication twice: each thread alone, and by tiles in shared
// memory, which reads the slow memory TILE times less.
//
//     nvcc -o matrix_add_mul matrix_add_mul.cu && ./matrix_add_mul
#include <cstdio>
#include <vector>

#include "cuda_check.h"

constexpr int TILE = 16;  // a block is TILE x TILE threads, and computes as many elements

// x counts columns, so that the 32 threads of a warp touch neighbours in memory.
__global__ void matrix_add(const float* a, const float* b, float* out, int rows, int cols) {
    const int col = blockIdx.x * blockDim.x + threadIdx.x;
    const int row = blockIdx.y * blockDim.y + threadIdx.y;
    if (row < rows && col < cols) out[row * cols + col] = a[row * cols + col] + b[row * cols + col];
}

// out[m, n] = sum_k a[m, k] b[k, n]. Each thread reads a whole row and a whole column from global memory.
__global__ void matrix_mul_plain(const float* a, const float* b, float* out, int M, int N, int K) {
    const int n = blockIdx.x * blockDim.x + threadIdx.x;
    const int m = blockIdx.y * blockDim.y + threadIdx.y;
    if (m >= M || n >= N) return;
    float sum = 0.0f;
    for (int k = 0; k < K; ++k) sum += a[m * K + k] * b[k * N + n];
    out[m * N + n] = sum;
}

// The same sum, TILE terms at a time. The block's threads bring a tile of a and one of b into shared memory together,
// one number each, and then each reads it TILE times from there. No thread may leave early: all meet at the barriers.
__global__ void matrix_mul_tiled(const float* a, const float* b, float* out, int M, int N, int K) {
    __shared__ float tile_a[TILE][TILE], tile_b[TILE][TILE];
    const int n = blockIdx.x * TILE + threadIdx.x;
    const int m = blockIdx.y * TILE + threadIdx.y;
    float sum = 0.0f;
    for (int k0 = 0; k0 < K; k0 += TILE) {
        const int k_of_a = k0 + threadIdx.x, k_of_b = k0 + threadIdx.y;
        tile_a[threadIdx.y][threadIdx.x] = m < M && k_of_a < K ? a[m * K + k_of_a] : 0.0f;
        tile_b[threadIdx.y][threadIdx.x] = k_of_b < K && n < N ? b[k_of_b * N + n] : 0.0f;
        __syncthreads();  // the tile is there before anybody reads it
        for (int k = 0; k < TILE; ++k) sum += tile_a[threadIdx.y][k] * tile_b[k][threadIdx.x];
        __syncthreads();  // everybody has read it before anybody writes the next
    }
    if (m < M && n < N) out[m * N + n] = sum;
}

struct Device {  // an array on the GPU
    float* data;
    size_t count;
    explicit Device(size_t count) : count(count) { CUDA_CHECK(cudaMalloc(&data, count * sizeof(float))); }
    explicit Device(const std::vector<float>& from) : Device(from.size()) {
        CUDA_CHECK(cudaMemcpy(data, from.data(), count * sizeof(float), cudaMemcpyHostToDevice));
    }
    Device(const Device&) = delete;
    ~Device() { cudaFree(data); }
    std::vector<float> host() const {
        std::vector<float> copy(count);
        CUDA_CHECK(cudaMemcpy(copy.data(), data, count * sizeof(float), cudaMemcpyDeviceToHost));
        return copy;
    }
};

// How many elements are wrong. These are small whole numbers: no sum is rounded, so right is equal.
int wrong_elements(const char* name, const std::vector<float>& got, const std::vector<float>& expected) {
    int wrong = 0;
    for (size_t i = 0; i < got.size(); ++i) wrong += !(got[i] == expected[i]);  // NaN is wrong too
    std::printf("%-16s %d of %zu elements wrong\n", name, wrong, got.size());
    return wrong;
}

int main() {
    const int M = 100, N = 70, K = 130;  // none is a multiple of TILE
    std::vector<float> a(M * K), b(K * N), c(M * K), sum(M * K), product(M * N, 0.0f);
    for (int i = 0; i < M * K; ++i) a[i] = float(i % 5 - 2), c[i] = float(i % 3), sum[i] = a[i] + c[i];
    for (int i = 0; i < K * N; ++i) b[i] = float(i % 7 - 3);
    for (int m = 0; m < M; ++m)
        for (int k = 0; k < K; ++k)
            for (int n = 0; n < N; ++n) product[m * N + n] += a[m * K + k] * b[k * N + n];

    const dim3 block(TILE, TILE);
    const auto grid = [](int rows, int cols) { return dim3((cols + TILE - 1) / TILE, (rows + TILE - 1) / TILE); };
    const Device device_a(a), device_b(b), device_c(c), device_sum(M * K), plain(M * N), tiled(M * N);
    matrix_add<<<grid(M, K), block>>>(device_a.data, device_c.data, device_sum.data, M, K);
    matrix_mul_plain<<<grid(M, N), block>>>(device_a.data, device_b.data, plain.data, M, N, K);
    matrix_mul_tiled<<<grid(M, N), block>>>(device_a.data, device_b.data, tiled.data, M, N, K);
    CUDA_CHECK(cudaGetLastError());
    CUDA_CHECK(cudaDeviceSynchronize());

    const int wrong = wrong_elements("add", device_sum.host(), sum) +
                      wrong_elements("multiply, plain", plain.host(), product) +
                      wrong_elements("multiply, tiled", tiled.host(), product);
    return wrong != 0;
}
