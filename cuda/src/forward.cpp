// One GPU: checks, then one launch. Also what every C function needs: the checks and the last error.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <set>
#include <utility>

#include "problem.h"

namespace flash {
namespace {

thread_local std::string last_error;

int attribute(cudaDeviceAttr which, int device) {
    int value = 0;
    CUDA_CHECK(cudaDeviceGetAttribute(&value, which, device));
    return value;
}

}  // namespace

void remember_error(const std::string& message) { last_error = message; }

void expect(bool holds, const char* name, const char* expected, const std::string& got) {
    if (!holds) throw Refused(std::string(name) + ": expected " + expected + "; got " + got + ".");
}

void expect_address(const char* name, const void* pointer) {
    expect(pointer != nullptr, name, "an address", "NULL");
}

void expect_aligned_address(const char* name, const void* pointer) {
    expect_address(name, pointer);
    expect(reinterpret_cast<std::uintptr_t>(pointer) % 16 == 0, name, "an address that is a multiple of 16",
           std::to_string(reinterpret_cast<std::uintptr_t>(pointer) % 16) + " more");
}

void check(const Problem* problem) {
    expect_address("problem", problem);
    const Problem& p = *problem;
    expect(p.batch >= 1 && p.batch <= 65535, "batch", "1 to 65535", std::to_string(p.batch));
    expect(p.heads >= 1 && p.heads <= 65535, "heads", "1 to 65535", std::to_string(p.heads));
    expect(p.seq_q >= 1 && p.seq_q <= 1 << 30, "seq_q", "1 to 2^30", std::to_string(p.seq_q));
    expect(p.seq_k >= 1 && p.seq_k <= 1 << 30, "seq_k", "1 to 2^30", std::to_string(p.seq_k));
    expect(p.dim >= 8 && p.dim <= 128 && p.dim % 8 == 0, "dim", "a multiple of 8 from 8 to 128", std::to_string(p.dim));
    expect(p.scale >= 0.0f && std::isfinite(p.scale), "scale", "a positive number, or 0 for 1 / sqrt(dim)",
           std::to_string(p.scale));
    expect(p.dtype == FLASH_ATTN_FP32 || p.dtype == FLASH_ATTN_BF16, "dtype", "FLASH_ATTN_FP32 or FLASH_ATTN_BF16",
           std::to_string(p.dtype));
    const double rows = 1.0 * p.batch * p.heads * std::max(p.seq_q, p.seq_k);
    // So that 64 bits count the bytes.
    expect(rows <= 0x1p50, "batch * heads * seq", "at most 2^50", std::to_string(static_cast<long long>(rows)));
}

// Looked at once per thread and GPU: a launch should not take longer for it.
void check_device(const Problem& problem) {
    const KernelNeeds needs = problem.dtype == FLASH_ATTN_BF16 ? needs_bf16(problem.dim) : needs_fp32(problem.dim);
    int device = 0;
    CUDA_CHECK(cudaGetDevice(&device));
    thread_local std::set<std::pair<const void*, int>> fit;
    if (fit.count({needs.kernel, device}) > 0) return;

    const std::string chip = "sm_" + std::to_string(attribute(cudaDevAttrComputeCapabilityMajor, device)) +
                             std::to_string(attribute(cudaDevAttrComputeCapabilityMinor, device));
    const int kilobytes = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device) / 1024;
    if (needs.shared_bytes > kilobytes * 1024)
        throw Refused("device: expected " + std::to_string(needs.shared_bytes / 1024) +
                      " KB of shared memory for a block with this dtype and dim; got " + std::to_string(kilobytes) +
                      " KB (" + chip + ").");
    cudaFuncAttributes code{};
    const cudaError_t found = cudaFuncGetAttributes(&code, needs.kernel);
    if (found == cudaErrorNoKernelImageForDevice || found == cudaErrorInvalidDeviceFunction) {
        cudaGetLastError();  // said here: the next call should not say it again
        throw Refused("device: expected a chip that this was built for; got " + chip +
                      ". Build with -DCMAKE_CUDA_ARCHITECTURES.");
    }
    CUDA_CHECK(found);
    // Not the chip's version: a newer chip may run what was compiled for an older one, whose instructions are missing.
    if (code.ptxVersion < needs.target)
        throw Refused("dtype: bf16 expects a build for sm_" + std::to_string(needs.target) + " or later; got sm_" +
                      std::to_string(code.ptxVersion) + " code on " + chip + ".");
    fit.insert({needs.kernel, device});
}

Step step_of(const Problem& problem, int q_len, int k_len, int offset) {
    const double scale = problem.scale > 0.0f ? problem.scale : 1.0 / std::sqrt(static_cast<double>(problem.dim));
    Step step{};
    step.batch = problem.batch, step.heads = problem.heads, step.dim = problem.dim;
    step.q_len = q_len, step.k_len = k_len, step.offset = offset;
    step.causal = problem.causal != 0;
    step.scale_log2 = static_cast<float>(scale * 1.4426950408889634);  // log2(e)
    step.first = step.last = true;
    return step;
}

void launch(const Problem& problem, const Step& step, cudaStream_t stream) {
    problem.dtype == FLASH_ATTN_BF16 ? launch_bf16(step, stream) : launch_fp32(step, stream);
}

}  // namespace flash

using namespace flash;

const char* flash_attn_last_error(void) { return last_error.c_str(); }

flash_attn_status flash_attn_forward(const flash_attn_problem* problem, const void* q, const void* k, const void* v,
                                     void* out, float* lse, void* stream) {
    return guarded([&] {
        check(problem);
        expect_aligned_address("q", q), expect_aligned_address("k", k), expect_aligned_address("v", v);
        expect_aligned_address("out", out);
        check_device(*problem);
        Step step = step_of(*problem, problem->seq_q, problem->seq_k, problem->seq_k - problem->seq_q);
        step.q = q, step.k = k, step.v = v, step.out = out, step.lse = lse;
        launch(*problem, step, static_cast<cudaStream_t>(stream));
    });
}
