// Ring attention: every rank has a shard of the queries and of the keys and values; the latter go round.
//
//     step 0      compute with the own shard     | receive the shard of rank r - 1
//     step s      compute with shard r - s       | receive shard r - s - 1
//     step N - 1  compute with the last          |
//
// Computing and communicating have a stream each. Two buffers alternate: while one is computed with (and sent on), the
// other is filled. The own shard is only read, so a forward can be repeated. Between steps the running state (m, l,
// acc) of a rank's queries lies in fp32 in memory (step.h): the first step does not read it, the last one writes the
// output instead. Lengths need not divide by the number of ranks.

#include "group.h"

namespace flash {
namespace {

class Ring : public Group {
public:
    Ring(const Problem& problem, int ranks, flash_attn_transport transport)
        : Group(problem, ranks, transport), shards_(ranks) {
        team_.run([this](int index) { allocate(*ranks_[index], shards_[index]); });
    }

    ~Ring() override {
        for (auto& shard : shards_)
            for (auto* events : {&shard.computed, &shard.arrived})
                for (cudaEvent_t event : *events) cudaEventDestroy(event);
    }

protected:
    void scatter(const void* q, const void* k, const void* v) override {
        for (int rank = 0; rank < size(); ++rank) {
            const Range queries = flash_attn_shard(problem_.seq_q, size(), rank);
            const Range keys = flash_attn_shard(problem_.seq_k, size(), rank);
            place(shards_[rank].q, q, problem_.seq_q, queries);
            place(shards_[rank].own, k, problem_.seq_k, keys);
            place(shards_[rank].own + kv_bytes(keys) / 2, v, problem_.seq_k, keys);
        }
    }

    void collect(void* out) override {
        for (int rank = 0; rank < size(); ++rank) {
            const Range queries = flash_attn_shard(problem_.seq_q, size(), rank);
            copy_blocks(block_of(problem_, out, problem_.seq_q, queries),
                        block_of(problem_, shards_[rank].out, queries.length, {0, queries.length}));
        }
    }

    void enqueue(Rank& rank) override {
        Shard& shard = shards_[rank.index];
        for (int s = 0; s < size(); ++s) {
            const flash_attn_ring_step now = flash_attn_schedule(&problem_, size(), rank.index, s);
            char* const current = s == 0 ? shard.own : shard.buffers[s % 2];
            if (s + 1 < size()) {
                const flash_attn_ring_step next = flash_attn_schedule(&problem_, size(), rank.index, s + 1);
                // What is filled now was computed with in step s - 1; before step 2 nobody has used it.
                const cudaEvent_t free = s < 2 ? rank.started : shard.computed[s - 1];
                transport_->rotate(rank, current, kv_bytes(now.keys), shard.buffers[(s + 1) % 2], kv_bytes(next.keys),
                                   free);
                CUDA_CHECK(cudaEventRecord(shard.arrived[s + 1], rank.communicate));
            }
            if (s > 0) CUDA_CHECK(cudaStreamWaitEvent(rank.compute, shard.arrived[s], 0));
            if (now.computes) compute(rank, shard, now, current);
            CUDA_CHECK(cudaEventRecord(shard.computed[s], rank.compute));
        }
    }

private:
    struct Shard {
        char *q, *out, *own, *buffers[2];  // own and buffers: K [B, T, H, D], then V
        State state;
        std::vector<cudaEvent_t> computed, arrived;  // of each step
    };

    size_t kv_bytes(Range keys) const { return 2 * problem_.batch * row_bytes(problem_) * keys.length; }

    void allocate(Rank& rank, Shard& shard) {
        const Range queries = flash_attn_shard(problem_.seq_q, size(), rank.index);
        const size_t rows = static_cast<size_t>(problem_.batch) * queries.length;
        const size_t longest = kv_bytes(flash_attn_shard(problem_.seq_k, size(), 0));
        const auto bytes = [&](size_t count) { return static_cast<char*>(rank.allocate(count)); };
        const auto floats = [&](size_t count) { return static_cast<float*>(rank.allocate(count * sizeof(float))); };
        shard.q = bytes(rows * row_bytes(problem_));
        shard.out = bytes(rows * row_bytes(problem_));
        shard.own = bytes(kv_bytes(flash_attn_shard(problem_.seq_k, size(), rank.index)));
        if (size() > 1) {  // a single rank has nothing to receive and no state to carry
            shard.buffers[1] = bytes(longest);
            shard.buffers[0] = size() > 2 ? bytes(longest) : nullptr;
            shard.state = {floats(rows * problem_.heads), floats(rows * problem_.heads),
                           floats(rows * problem_.heads * problem_.dim)};
        }
        for (auto* events : {&shard.computed, &shard.arrived}) {
            for (int s = 0; s < size(); ++s) {
                events->push_back(nullptr);
                CUDA_CHECK(cudaEventCreateWithFlags(&events->back(), cudaEventDisableTiming));
            }
        }
    }

    void compute(Rank& rank, Shard& shard, const flash_attn_ring_step& now, const char* keys) {
        const Range queries = flash_attn_shard(problem_.seq_q, size(), rank.index);
        Step step = step_of(problem_, queries.length, now.keys.length, now.offset);
        step.q = shard.q, step.k = keys, step.v = keys + kv_bytes(now.keys) / 2;
        step.out = shard.out, step.state = shard.state;
        step.first = now.first, step.last = now.last;
        launch(problem_, step, rank.compute);
    }

    std::vector<Shard> shards_;
};

}  // namespace

std::unique_ptr<Group> make_ring(const Problem& problem, int ranks, flash_attn_transport transport) {
    return std::make_unique<Ring>(problem, ranks, transport);
}

}  // namespace flash
