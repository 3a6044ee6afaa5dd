// CUDA on a CPU, as much of it as cuda/src uses: kernels run thread by thread, streams in a random order.
//
// - Threads of a block are fibers. They change at barriers and warp operations alone, in a shuffled order.
// - Asynchronous copies of a kernel happen at once or as late as allowed: a barrier or a wait that is missing shows in
//   one of the two. Shared and device memory begin as NaN.
// - What streams are given is done when somebody waits, piece by piece, in a random order that lets some streams run
//   far ahead. A missing event between two streams shows for some seed.
//
// - Copies that CUDA does not wait for are pieces of the default stream: between two places of the device, and from the
//   host, whose memory has been read when they return.
//
// `emulator_settle(seed, late)` chooses; `emulator_chip` and `emulator_fail` say what is wrong with the device. One
// device; every time is 1 ms; launches on the default stream wait.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)

using std::max;
using std::min;

struct dim3 {
    unsigned x = 1, y = 1, z = 1;
    dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};

namespace emulated {

struct Place {
    dim3 grid, block, thread;
};
const Place& place();                          // of the running thread
void* shared_memory();                         // of the running block, aligned to 1024
const void* const* exchange(const void* own);  // every lane of the warp gives an address and sees those of all 32

}  // namespace emulated

#define gridDim (emulated::place().grid)
#define blockIdx (emulated::place().block)
#define threadIdx (emulated::place().thread)

void __syncthreads();
inline bool __any_sync(unsigned, bool own) {
    const void* const* all = emulated::exchange(&own);
    bool any = false;
    for (int lane = 0; lane < 32; ++lane) any |= *static_cast<const bool*>(all[lane]);
    emulated::exchange(nullptr);  // nobody leaves while another reads
    return any;
}

enum cudaError_t {
    cudaSuccess,
    cudaErrorInvalidValue,
    cudaErrorInsufficientDriver,
    cudaErrorInvalidDeviceFunction,
    cudaErrorNoKernelImageForDevice
};
enum cudaDeviceAttr {
    cudaDevAttrComputeCapabilityMajor,
    cudaDevAttrComputeCapabilityMinor,
    cudaDevAttrMaxSharedMemoryPerBlockOptin
};
struct cudaFuncAttributes {
    int ptxVersion;
};
enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost, cudaMemcpyDefault };
enum { cudaStreamNonBlocking = 1, cudaEventDisableTiming = 2, cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
using cudaStream_t = struct EmulatedStream*;
using cudaEvent_t = struct EmulatedEvent*;

const char* cudaGetErrorString(cudaError_t);
cudaError_t cudaGetLastError();
cudaError_t cudaGetDeviceCount(int* count);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaGetDevice(int* device);
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int device);
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* kernel);
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest);
cudaError_t cudaMalloc(void** pointer, size_t bytes);
cudaError_t cudaFree(void* pointer);
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind);
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream);
cudaError_t cudaMemcpy2D(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height,
                         cudaMemcpyKind);
cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                              size_t height, cudaMemcpyKind, cudaStream_t stream);
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags);
cudaError_t cudaEventCreate(cudaEvent_t* event);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream = nullptr);
cudaError_t cudaEventSynchronize(cudaEvent_t event);
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t stop);
template <typename Kernel>
cudaError_t cudaFuncSetAttribute(Kernel*, int, int) {
    return cudaSuccess;
}

namespace emulated {

void launch(dim3 grid, unsigned threads, size_t shared_bytes, cudaStream_t stream, std::function<void()> kernel);

}  // namespace emulated
