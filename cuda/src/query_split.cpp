// Query splitting: every rank has all keys and values and a share of the queries; rank 0 gathers the results.
//
// No communication while computing, but every GPU holds all of K and V: for few queries against many keys, or few GPUs.
// The ring (ring.cpp) holds 1/N of them.

#include "group.h"

namespace flash {
namespace {

class QuerySplit : public Group {
public:
    QuerySplit(const Problem& problem, int ranks, flash_attn_transport transport)
        : Group(problem, ranks, transport), parts_(ranks) {
        team_.run([this](int index) {
            Rank& rank = *ranks_[index];
            const size_t row = problem_.batch * row_bytes(problem_);
            const auto bytes = [&](size_t rows) { return static_cast<char*>(rank.allocate(rows * row)); };
            parts_[index] = {bytes(queries(index).length), bytes(problem_.seq_k), bytes(problem_.seq_k),
                             bytes(queries(index).length)};
            if (index == 0) gathered_ = size() > 1 ? bytes(problem_.seq_q) : parts_[0].out;
        });
        for (int rank = 0; rank < size(); ++rank)
            blocks_.push_back(block_of(problem_, gathered_, problem_.seq_q, queries(rank)));
    }

protected:
    void scatter(const void* q, const void* k, const void* v) override {
        for (int rank = 0; rank < size(); ++rank) {
            const Part& part = parts_[rank];
            place(part.q, q, problem_.seq_q, queries(rank));
            place(part.k, k, problem_.seq_k, {0, problem_.seq_k});
            place(part.v, v, problem_.seq_k, {0, problem_.seq_k});
        }
    }

    void collect(void* out) override { place(out, gathered_, problem_.seq_q, {0, problem_.seq_q}); }

    void enqueue(Rank& rank) override {
        const Part& part = parts_[rank.index];
        const Range own = queries(rank.index);
        if (own.length > 0) {
            Step step = step_of(problem_, own.length, problem_.seq_k, own.start + problem_.seq_k - problem_.seq_q);
            step.q = part.q, step.k = part.k, step.v = part.v, step.out = part.out;
            launch(problem_, step, rank.compute);
        }
        if (transport_) transport_->gather(rank, part.out, blocks_);
    }

private:
    struct Part {
        char *q, *k, *v, *out;
    };

    Range queries(int rank) const { return flash_attn_shard(problem_.seq_q, size(), rank); }

    std::vector<Part> parts_;
    char* gathered_ = nullptr;  // on rank 0
    std::vector<Block> blocks_;
};

}  // namespace

std::unique_ptr<Group> make_query_split(const Problem& problem, int ranks, flash_attn_transport transport) {
    return std::make_unique<QuerySplit>(problem, ranks, transport);
}

}  // namespace flash
