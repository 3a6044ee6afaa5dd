// One GPU: checks, then one launch. Also what every C function needs: the checks and the last error.

#include <cmath>
#include <cstdint>

#include "problem.h"

namespace flash {
namespace {

thread_local std::string last_error;

void expect(bool holds, const char* name, const char* expected, const std::string& got) {
    if (!holds) throw Refused(std::string(name) + ": expected " + expected + "; got " + got + ".");
}

}  // namespace

void remember_error(const std::string& message) { last_error = message; }

void check(const Problem& p) {
    expect(p.batch >= 1 && p.batch <= 65535, "batch", "1 to 65535", std::to_string(p.batch));
    expect(p.heads >= 1 && p.heads <= 65535, "heads", "1 to 65535", std::to_string(p.heads));
    expect(p.seq_q >= 1 && p.seq_q <= 1 << 30, "seq_q", "1 to 2^30", std::to_string(p.seq_q));
    expect(p.seq_k >= 1 && p.seq_k <= 1 << 30, "seq_k", "1 to 2^30", std::to_string(p.seq_k));
    expect(p.dim >= 8 && p.dim <= 128 && p.dim % 8 == 0, "dim", "a multiple of 8 from 8 to 128", std::to_string(p.dim));
    expect(p.scale >= 0.0f && std::isfinite(p.scale), "scale", "a positive number, or 0 for 1 / sqrt(dim)",
           std::to_string(p.scale));
    expect(p.dtype == FLASH_ATTN_FP32 || p.dtype == FLASH_ATTN_BF16, "dtype", "FLASH_ATTN_FP32 or FLASH_ATTN_BF16",
           std::to_string(p.dtype));
}

void check_pointer(const char* name, const void* pointer) {
    expect(pointer != nullptr, name, "an address", "NULL");
    expect(reinterpret_cast<std::uintptr_t>(pointer) % 16 == 0, name, "an address that is a multiple of 16",
           std::to_string(reinterpret_cast<std::uintptr_t>(pointer) % 16) + " more");
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
        check(*problem);
        check_pointer("q", q), check_pointer("k", k), check_pointer("v", v), check_pointer("out", out);
        Step step = step_of(*problem, problem->seq_q, problem->seq_k, problem->seq_k - problem->seq_q);
        step.q = q, step.k = k, step.v = v, step.out = out, step.lse = lse;
        launch(*problem, step, static_cast<cudaStream_t>(stream));
    });
}
