// Who has what: balanced shards of a sequence, and what each rank of a ring meets in each step.
//
// Rank r starts with its own keys and then receives from rank r - 1, so in step s it holds shard (r - s) mod N. Causal
// shards that lie wholly after a rank's queries are passed on and not computed: with as many queries as keys rank 0
// computes one step, rank N - 1 all N. (A zigzag order would balance that; it is in the Python package's distributed/.)

#include <algorithm>

#include "problem.h"

using namespace flash;

flash_attn_range flash_attn_shard(int total, int ranks, int rank) {
    if (total < 0 || rank < 0 || rank >= ranks) return {0, 0};
    const int each = total / ranks, longer = total % ranks;
    return {rank * each + std::min(rank, longer), each + (rank < longer ? 1 : 0)};
}

namespace {

flash_attn_ring_step step_without_order(const Problem& problem, int ranks, int rank, int step) {
    const Range queries = flash_attn_shard(problem.seq_q, ranks, rank);
    flash_attn_ring_step result{};
    result.shard = (rank - step + ranks) % ranks;
    result.keys = flash_attn_shard(problem.seq_k, ranks, result.shard);
    result.offset = queries.start + problem.seq_k - problem.seq_q - result.keys.start;
    const bool visible = !problem.causal || queries.length - 1 + result.offset >= 0;
    result.computes = queries.length > 0 && result.keys.length > 0 && visible;
    return result;
}

}  // namespace

flash_attn_ring_step flash_attn_schedule(const flash_attn_problem* problem, int ranks, int rank, int step) {
    if (problem == nullptr || rank < 0 || rank >= ranks || step < 0 || step >= ranks) return {-1, {0, 0}, 0, 0, 0, 0};
    int first = ranks, last = -1;
    for (int s = 0; s < ranks; ++s) {
        if (!step_without_order(*problem, ranks, rank, s).computes) continue;
        first = std::min(first, s);
        last = s;
    }
    flash_attn_ring_step result = step_without_order(*problem, ranks, rank, step);
    if (last < 0 && step == 0 && flash_attn_shard(problem->seq_q, ranks, rank).length > 0) {
        first = last = 0;  // queries that see nothing: one launch writes their zeros
        result.computes = 1;
    }
    result.first = result.computes && step == first;
    result.last = result.computes && step == last;
    return result;
}
