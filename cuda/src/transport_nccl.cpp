// Ranks on GPUs of their own: NCCL's point-to-point calls, each from its rank's thread. Compiled and linked with NCCL
// where CMake finds it; not run with two GPUs here.

#include "group.h"

#ifdef FLASH_ATTN_HAS_NCCL

#include <nccl.h>

namespace flash {
namespace {

class NcclTransport : public Transport {
public:
    explicit NcclTransport(const std::vector<int>& devices) : communicators_(devices.size()) {
        NCCL_CHECK(ncclCommInitAll(communicators_.data(), static_cast<int>(devices.size()), devices.data()));
    }

    ~NcclTransport() override {
        for (ncclComm_t communicator : communicators_) ncclCommDestroy(communicator);
    }

    void rotate(Rank& rank, const void* send, size_t send_bytes, void* receive, size_t receive_bytes,
                cudaEvent_t free) override {
        const int size = static_cast<int>(communicators_.size());
        const ncclComm_t communicator = communicators_[rank.index];
        CUDA_CHECK(cudaStreamWaitEvent(rank.communicate, free, 0));
        NCCL_CHECK(ncclGroupStart());
        NCCL_CHECK(ncclSend(send, send_bytes, ncclInt8, (rank.index + 1) % size, communicator, rank.communicate));
        NCCL_CHECK(ncclRecv(receive, receive_bytes, ncclInt8, (rank.index + size - 1) % size, communicator,
                            rank.communicate));
        NCCL_CHECK(ncclGroupEnd());
    }

    void gather(Rank& rank, const void* part, const std::vector<Block>& blocks) override {
        const ncclComm_t communicator = communicators_[rank.index];
        const Block& own = blocks[rank.index];
        NCCL_CHECK(ncclGroupStart());
        for (size_t batch = 0; batch < own.height; ++batch)
            NCCL_CHECK(ncclSend(static_cast<const char*>(part) + batch * own.width, own.width, ncclInt8, 0,
                                communicator, rank.compute));
        for (size_t from = 0; rank.index == 0 && from < blocks.size(); ++from)
            for (size_t batch = 0; batch < own.height; ++batch)
                NCCL_CHECK(ncclRecv(blocks[from].start + batch * blocks[from].pitch, blocks[from].width, ncclInt8,
                                    static_cast<int>(from), communicator, rank.compute));
        NCCL_CHECK(ncclGroupEnd());
    }

    void abandon() override {
        for (ncclComm_t communicator : communicators_) ncclCommAbort(communicator);
        communicators_.clear();
    }

private:
    std::vector<ncclComm_t> communicators_;
};

}  // namespace

std::unique_ptr<Transport> make_nccl_transport(const std::vector<int>& devices) {
    return std::make_unique<NcclTransport>(devices);
}

}  // namespace flash

#else

namespace flash {

std::unique_ptr<Transport> make_nccl_transport(const std::vector<int>&) {
    throw Refused("transport: built without NCCL. The copy transport runs any number of ranks on the GPUs there are.");
}

}  // namespace flash

#endif
