// Ranks that share a process and perhaps a GPU: every rank pulls its predecessor's shard with cudaMemcpyAsync.
//
// Events order what NCCL would order by itself. A pull must come after
//   1. the predecessor's shard has arrived there       `ready`, recorded behind its own last pull
//   2. the rank has computed with what it overwrites   `free`, given by the caller
//   3. the successor has pulled what it overwrites     `pulled` of the step before
// A stream can only wait for an event that the host has recorded already, hence a barrier of the host threads per step.
// What a rank posts it posts in turn in one of two slots: a neighbour may still be reading that of the step before.

#include "group.h"

namespace flash {
namespace {

class CopyTransport : public Transport {
public:
    CopyTransport(Team& team, int ranks) : team_(team), mail_(ranks) {
        team_.run([this](int rank) {
            for (Slot& slot : mail_[rank].slots) {
                CUDA_CHECK(cudaEventCreateWithFlags(&slot.ready, cudaEventDisableTiming));
                CUDA_CHECK(cudaEventCreateWithFlags(&slot.pulled, cudaEventDisableTiming));
            }
        });
    }

    ~CopyTransport() override {
        for (Mail& mail : mail_) {
            for (Slot& slot : mail.slots) {
                if (slot.ready) cudaEventDestroy(slot.ready);
                if (slot.pulled) cudaEventDestroy(slot.pulled);
            }
        }
    }

    void rotate(Rank& rank, const void* send, size_t, void* receive, size_t receive_bytes, cudaEvent_t free) override {
        const int size = static_cast<int>(mail_.size());
        Mail& own = mail_[rank.index];
        const int turn = own.turn, last = 1 - turn;
        const Slot& previous = mail_[(rank.index + size - 1) % size].slots[turn];
        const Slot& next = mail_[(rank.index + 1) % size].slots[last];
        own.slots[turn].send = send;
        CUDA_CHECK(cudaEventRecord(own.slots[turn].ready, rank.communicate));
        team_.barrier();
        CUDA_CHECK(cudaStreamWaitEvent(rank.communicate, previous.ready, 0));
        CUDA_CHECK(cudaStreamWaitEvent(rank.communicate, free, 0));
        CUDA_CHECK(cudaStreamWaitEvent(rank.communicate, next.pulled, 0));
        CUDA_CHECK(cudaMemcpyAsync(receive, previous.send, receive_bytes, cudaMemcpyDefault, rank.communicate));
        CUDA_CHECK(cudaEventRecord(own.slots[turn].pulled, rank.communicate));
        own.turn = last;
    }

    void gather(Rank& rank, const void* part, const std::vector<Block>& blocks) override {
        const Block& to = blocks[rank.index];
        if (to.width == 0) return;
        CUDA_CHECK(cudaMemcpy2DAsync(to.start, to.pitch, part, to.width, to.width, to.height, cudaMemcpyDefault,
                                     rank.compute));
    }

private:
    struct Slot {
        const void* send = nullptr;
        cudaEvent_t ready = nullptr, pulled = nullptr;
    };
    struct Mail {
        Slot slots[2];
        int turn = 0;
    };

    Team& team_;
    std::vector<Mail> mail_;
};

}  // namespace

std::unique_ptr<Transport> make_copy_transport(Team& team, int ranks) {
    return std::make_unique<CopyTransport>(team, ranks);
}

}  // namespace flash
