// Errors that name the call: CUDA_CHECK(cudaMalloc(&p, n)) throws "cudaMalloc(&p, n): out of memory (ring.cpp:40)".
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

namespace flash {

// The caller's arguments are wrong: said before any work. Everything else that fails is a std::runtime_error.
struct Refused : std::invalid_argument {
    using std::invalid_argument::invalid_argument;
};

[[noreturn]] inline void fail(const char* call, const std::string& reason, const char* file, int line) {
    const std::string path(file);
    throw std::runtime_error(std::string(call) + ": " + reason + " (" + path.substr(path.find_last_of('/') + 1) + ":" +
                             std::to_string(line) + ")");
}

inline std::string in_words(cudaError_t status) {
    const std::string words = cudaGetErrorString(status);
    // What CUDA says where there is no driver at all, too.
    return status == cudaErrorInsufficientDriver ? words + "; no GPU is here, or its driver is older than this CUDA"
                                                 : words;
}

}  // namespace flash

#define CUDA_CHECK(call)                                                                        \
    do {                                                                                        \
        const cudaError_t cuda_check_status = (call);                                           \
        if (cuda_check_status != cudaSuccess)                                                   \
            flash::fail(#call, flash::in_words(cuda_check_status), __FILE__, __LINE__);         \
    } while (0)

// For files that include nccl.h.
#define NCCL_CHECK(call)                                                                        \
    do {                                                                                        \
        const ncclResult_t nccl_check_status = (call);                                          \
        if (nccl_check_status != ncclSuccess)                                                   \
            flash::fail(#call, ncclGetErrorString(nccl_check_status), __FILE__, __LINE__);      \
    } while (0)
