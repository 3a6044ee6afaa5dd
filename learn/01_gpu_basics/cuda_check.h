// CUDA_CHECK(call) ends the program with the name of the call that failed, and why.
#pragma once

#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>

#define CUDA_CHECK(call)                                                                         \
    do {                                                                                         \
        const cudaError_t status = (call);                                                       \
        if (status != cudaSuccess) {                                                             \
            const char* why = cudaGetErrorString(status);                                        \
            std::fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, why);             \
            std::exit(1);                                                                        \
        }                                                                                        \
    } while (0)
