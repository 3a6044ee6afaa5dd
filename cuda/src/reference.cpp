// The definition in fp64 on the host, one row at a time: s_j = scale q . k_j, out = sum_j exp(s_j - max) v_j / sum.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#include "problem.h"

using namespace flash;

namespace {

double number(const void* tensor, size_t index, flash_attn_dtype dtype) {
    if (dtype == FLASH_ATTN_FP32) return static_cast<const float*>(tensor)[index];
    const std::uint32_t bits = static_cast<std::uint32_t>(static_cast<const std::uint16_t*>(tensor)[index]) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

void row(const Problem& p, const void* q, const void* k, const void* v, int batch, int head, int i, double* out) {
    const auto index = [&](int seq, int position) {
        return ((static_cast<size_t>(batch) * seq + position) * p.heads + head) * p.dim;
    };
    const double scale = p.scale > 0.0f ? p.scale : 1.0 / std::sqrt(static_cast<double>(p.dim));
    const int seen = p.causal ? std::min(p.seq_k, i + p.seq_k - p.seq_q + 1) : p.seq_k;
    std::vector<double> query(p.dim), scores(std::max(seen, 0)), sums(p.dim, 0.0);
    for (int d = 0; d < p.dim; ++d) query[d] = scale * number(q, index(p.seq_q, i) + d, p.dtype);
    double highest = -INFINITY, sum = 0.0;
    for (int j = 0; j < seen; ++j) {
        double score = 0.0;
        for (int d = 0; d < p.dim; ++d) score += query[d] * number(k, index(p.seq_k, j) + d, p.dtype);
        scores[j] = score;
        highest = std::max(highest, score);
    }
    for (int j = 0; j < seen; ++j) {
        const double weight = std::exp(scores[j] - highest);
        sum += weight;
        for (int d = 0; d < p.dim; ++d) sums[d] += weight * number(v, index(p.seq_k, j) + d, p.dtype);
    }
    for (int d = 0; d < p.dim; ++d) out[index(p.seq_q, i) + d] = seen > 0 ? sums[d] / sum : 0.0;
}

}  // namespace

flash_attn_status flash_attn_reference(const flash_attn_problem* problem, const void* q, const void* k, const void* v,
                                       int every, double* out) {
    return guarded([&] {
        check(problem);
        expect_address("q", q), expect_address("k", k), expect_address("v", v), expect_address("out", out);
        if (every < 1) throw Refused("every: expected 1 or more; got " + std::to_string(every) + ".");
        const int rows = (problem->seq_q + every - 1) / every, heads = problem->heads;
        const long long tasks = static_cast<long long>(problem->batch) * heads * rows;
        std::atomic<long long> next{0};
        const auto work = [&] {
            for (long long task = next++; task < tasks; task = next++) {
                const int i = static_cast<int>(task % rows) * every, pair = static_cast<int>(task / rows);
                row(*problem, q, k, v, pair / heads, pair % heads, i, out);
            }
        };
        std::vector<std::thread> threads(std::max(1u, std::thread::hardware_concurrency()));
        for (auto& thread : threads) thread = std::thread(work);
        for (auto& thread : threads) thread.join();
    });
}
