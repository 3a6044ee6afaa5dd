// What a call states, checked; sizes that follow from it; how C calls report errors.
#pragma once

#include <cstddef>
#include <exception>
#include <new>
#include <string>

#include "cuda_check.h"
#include "flash_attn.h"
#include "step.h"

namespace flash {

using Problem = flash_attn_problem;
using Range = flash_attn_range;

// These throw Refused.
void expect(bool holds, const char* name, const char* expected, const std::string& got);
void expect_address(const char* name, const void* pointer);          // not null
void expect_aligned_address(const char* name, const void* pointer);  // and a multiple of 16 bytes
void check(const Problem* problem);
void check_device(const Problem& problem);  // the current GPU can run the problem's kernel

inline size_t element_bytes(const Problem& problem) { return problem.dtype == FLASH_ATTN_BF16 ? 2 : 4; }
// One position of one batch, all heads: the rows that shards are made of.
inline size_t row_bytes(const Problem& problem) {
    return static_cast<size_t>(problem.heads) * problem.dim * element_bytes(problem);
}

// The part of a step that does not change from launch to launch: everything but the tensors.
Step step_of(const Problem& problem, int q_len, int k_len, int offset);
void launch(const Problem& problem, const Step& step, cudaStream_t stream);

void remember_error(const std::string& message);

// Runs `body` behind a C function: exceptions become a status and words for flash_attn_last_error.
template <typename Body>
flash_attn_status guarded(Body&& body) {
    try {
        body();
        return FLASH_ATTN_OK;
    } catch (const Refused& error) {
        remember_error(error.what());
        return FLASH_ATTN_REFUSED;
    } catch (const std::bad_alloc&) {
        remember_error("out of memory on the host");
        return FLASH_ATTN_FAILED;
    } catch (const std::exception& error) {
        remember_error(error.what());
        return FLASH_ATTN_FAILED;
    }
}

}  // namespace flash
