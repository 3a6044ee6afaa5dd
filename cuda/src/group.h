// What the strategies for many GPUs share: ranks with their streams and memory, a transport between them, the clock.
#pragma once

#include <memory>
#include <vector>

#include "problem.h"
#include "team.h"

namespace flash {

// A rank's own things on its device. Made and used by the rank's own thread.
struct Rank {
    Rank(int index, int device);
    ~Rank();
    Rank(const Rank&) = delete;
    Rank& operator=(const Rank&) = delete;

    void* allocate(size_t bytes);  // freed with the rank, counted in `bytes`

    const int index, device;
    cudaStream_t compute = nullptr, communicate = nullptr;
    cudaEvent_t started = nullptr, finished = nullptr;
    size_t bytes = 0;

private:
    std::vector<void*> allocations_;
};

// `height` pieces of `width` bytes, `pitch` bytes apart: a run of positions in every batch of a tensor.
struct Block {
    char* start;
    size_t pitch, width, height;
};

// The run `positions` of a tensor [B, seq, H, D] that begins at `tensor`.
Block block_of(const Problem& problem, void* tensor, int seq, Range positions);
// Same width and height; host or device. On the default stream, for which the ranks' streams do not wait: to the GPU
// CUDA may return before the copy is done.
void copy_blocks(const Block& to, const Block& from);

// How data travels. Every rank's own thread calls these, all ranks in the same order.
class Transport {
public:
    virtual ~Transport() = default;
    // The rank's `send` goes to the next rank, and `receive` takes what the one before it sends, on `communicate`.
    // `receive` is not written before `free` has happened.
    virtual void rotate(Rank& rank, const void* send, size_t send_bytes, void* receive, size_t receive_bytes,
                        cudaEvent_t free) = 0;
    // Every rank's `part` (packed) becomes its block of rank 0's result, on `compute`.
    virtual void gather(Rank& rank, const void* part, const std::vector<Block>& blocks) = 0;
    // Something failed: do not wait for communication that may never end. Nothing else is asked of it afterwards.
    virtual void abandon() {}
};

std::unique_ptr<Transport> make_nccl_transport(const std::vector<int>& devices);  // transport_nccl.cpp
std::unique_ptr<Transport> make_copy_transport(Team& team, int ranks);            // transport_copy.cpp

class Group {
public:
    Group(const Problem& problem, int ranks, flash_attn_transport transport);
    virtual ~Group();

    void load(const void* q, const void* k, const void* v);  // waits, as do the next two
    float forward();                                         // milliseconds
    void store(void* out);
    size_t bytes_per_gpu() const;

protected:
    // By `copy_blocks`, from the whole tensors and to one.
    virtual void scatter(const void* q, const void* k, const void* v) = 0;
    virtual void collect(void* out) = 0;

    // The rank's work, put into its streams; `compute` is last. Runs on the rank's own thread.
    virtual void enqueue(Rank& rank) = 0;

    // Packs the run `positions` of `tensor` [B, seq, H, D].
    void place(void* packed, const void* tensor, int seq, Range positions) const;

    int size() const { return static_cast<int>(ranks_.size()); }

    const Problem problem_;
    Team team_;
    std::vector<std::unique_ptr<Rank>> ranks_;
    std::unique_ptr<Transport> transport_;  // none for a single rank: it never communicates
};

// ring.cpp, query_split.cpp
std::unique_ptr<Group> make_ring(const Problem& problem, int ranks, flash_attn_transport transport);
std::unique_ptr<Group> make_query_split(const Problem& problem, int ranks, flash_attn_transport transport);

}  // namespace flash
