// Groups of ranks: set-up, the clock around a forward, and the C functions.

#include "group.h"

#include <algorithm>

namespace flash {

Rank::Rank(int index, int device) : index(index), device(device) {
    int least, greatest;
    CUDA_CHECK(cudaSetDevice(device));
    CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    CUDA_CHECK(cudaStreamCreateWithPriority(&compute, cudaStreamNonBlocking, least));
    CUDA_CHECK(cudaStreamCreateWithPriority(&communicate, cudaStreamNonBlocking, greatest));  // others wait for it
    CUDA_CHECK(cudaEventCreate(&started));
    CUDA_CHECK(cudaEventCreate(&finished));
}

// Destructors do not throw: what fails here has failed before, and was said then.
Rank::~Rank() {
    for (void* allocation : allocations_) cudaFree(allocation);
    if (started) cudaEventDestroy(started);
    if (finished) cudaEventDestroy(finished);
    if (compute) cudaStreamDestroy(compute);
    if (communicate) cudaStreamDestroy(communicate);
}

void* Rank::allocate(size_t count) {
    void* allocation = nullptr;
    CUDA_CHECK(cudaMalloc(&allocation, std::max<size_t>(count, 16)));  // a shard may be empty
    allocations_.push_back(allocation);
    bytes += count;
    return allocation;
}

Block block_of(const Problem& problem, void* tensor, int seq, Range positions) {
    const size_t row = row_bytes(problem);
    return {static_cast<char*>(tensor) + positions.start * row, seq * row, positions.length * row,
            static_cast<size_t>(problem.batch)};
}

void copy_blocks(const Block& to, const Block& from) {
    if (from.width == 0) return;
    CUDA_CHECK(cudaMemcpy2D(to.start, to.pitch, from.start, from.pitch, from.width, from.height, cudaMemcpyDefault));
}

Group::Group(const Problem& problem, int ranks, flash_attn_transport transport)
    : problem_(problem), team_(ranks), ranks_(ranks) {
    int present = 0;
    CUDA_CHECK(cudaGetDeviceCount(&present));
    if (transport == FLASH_ATTN_NCCL && ranks > present)
        throw Refused("ranks: expected at most one per GPU, of which there are " + std::to_string(present) + "; got " +
                      std::to_string(ranks) + ". The copy transport runs any number of ranks on the GPUs there are.");
    std::vector<int> devices(ranks);
    for (int rank = 0; rank < ranks; ++rank) devices[rank] = rank % present;
    team_.run([&](int rank) {
        ranks_[rank] = std::make_unique<Rank>(rank, devices[rank]);
        check_device(problem_);
    });
    if (ranks > 1)
        transport_ = transport == FLASH_ATTN_NCCL ? make_nccl_transport(devices) : make_copy_transport(team_, ranks);
}

Group::~Group() {
    transport_.reset();
    team_.run([this](int rank) { ranks_[rank].reset(); });  // on its own thread: the caller's device stays current
}

void Group::place(void* packed, const void* tensor, int seq, Range positions) const {
    copy_blocks(block_of(problem_, packed, positions.length, {0, positions.length}),
                block_of(problem_, const_cast<void*>(tensor), seq, positions));
}

void Group::load(const void* q, const void* k, const void* v) {
    scatter(q, k, v);
    CUDA_CHECK(cudaStreamSynchronize(nullptr));
}

void Group::store(void* out) {
    collect(out);
    CUDA_CHECK(cudaStreamSynchronize(nullptr));
}

float Group::forward() {
    try {
        team_.run([this](int index) {
            Rank& rank = *ranks_[index];
            team_.barrier();  // so that ranks start together
            CUDA_CHECK(cudaEventRecord(rank.started, rank.compute));
            enqueue(rank);
            CUDA_CHECK(cudaEventRecord(rank.finished, rank.compute));
            team_.barrier();  // nobody waits for its GPU before all have given theirs its work
            CUDA_CHECK(cudaStreamSynchronize(rank.compute));
        });
    } catch (...) {
        if (transport_) transport_->abandon();
        throw;
    }
    float longest = 0.0f;  // of any GPU: from the first start to the last finish on it
    for (const auto& one : ranks_) {
        for (const auto& other : ranks_) {
            if (one->device != other->device) continue;
            float milliseconds;
            CUDA_CHECK(cudaEventElapsedTime(&milliseconds, one->started, other->finished));
            longest = std::max(longest, milliseconds);
        }
    }
    return longest;
}

size_t Group::bytes_per_gpu() const {
    std::vector<size_t> sums;
    for (const auto& rank : ranks_) {
        if (sums.size() <= static_cast<size_t>(rank->device)) sums.resize(rank->device + 1);
        sums[rank->device] += rank->bytes;
    }
    return *std::max_element(sums.begin(), sums.end());
}

}  // namespace flash

using namespace flash;

struct flash_attn_group {
    std::unique_ptr<Group> group;
    bool failed = false;
};

namespace {

// What failed half-way has left ranks that no longer agree, or no communicator: nothing but destroying it may follow.
template <typename Body>
flash_attn_status guarded_with(flash_attn_group* group, Body&& body) {
    const flash_attn_status status = guarded([&] {
        expect_address("group", group);
        expect(!group->failed, "group", "one that has not failed", "one that has and can only be destroyed");
        body(*group->group);
    });
    if (status == FLASH_ATTN_FAILED) group->failed = true;
    return status;
}

}  // namespace

flash_attn_status flash_attn_group_create(const flash_attn_problem* problem, int ranks, flash_attn_strategy strategy,
                                          flash_attn_transport transport, flash_attn_group** group) {
    return guarded([&] {
        check(problem);
        expect_address("group", group);
        expect(strategy == FLASH_ATTN_RING || strategy == FLASH_ATTN_QUERIES, "strategy",
               "FLASH_ATTN_RING or FLASH_ATTN_QUERIES", std::to_string(strategy));
        expect(transport == FLASH_ATTN_NCCL || transport == FLASH_ATTN_COPY, "transport",
               "FLASH_ATTN_NCCL or FLASH_ATTN_COPY", std::to_string(transport));
        if (ranks < 1 || ranks > 64) throw Refused("ranks: expected 1 to 64; got " + std::to_string(ranks) + ".");
        auto made = strategy == FLASH_ATTN_RING ? make_ring(*problem, ranks, transport)
                                                : make_query_split(*problem, ranks, transport);
        *group = new flash_attn_group{std::move(made)};
    });
}

flash_attn_status flash_attn_group_load(flash_attn_group* group, const void* q, const void* k, const void* v) {
    return guarded_with(group, [&](Group& ranks) {
        expect_address("q", q), expect_address("k", k), expect_address("v", v);
        ranks.load(q, k, v);
    });
}

flash_attn_status flash_attn_group_forward(flash_attn_group* group, float* milliseconds) {
    return guarded_with(group, [&](Group& ranks) {
        const float elapsed = ranks.forward();
        if (milliseconds != nullptr) *milliseconds = elapsed;
    });
}

flash_attn_status flash_attn_group_store(flash_attn_group* group, void* out) {
    return guarded_with(group, [&](Group& ranks) {
        expect_address("out", out);
        ranks.store(out);
    });
}

size_t flash_attn_group_bytes_per_gpu(const flash_attn_group* group) {
    return group == nullptr ? 0 : group->group->bytes_per_gpu();
}

void flash_attn_group_destroy(flash_attn_group* group) { delete group; }
