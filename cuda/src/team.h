// One host thread per rank, kept for the life of a group: `run` has each of them do the same function and waits.
//
// A rank that fails must not leave the others waiting for it: its exception breaks the barrier, the others leave it by
// an exception of their own, and `run` throws what the first one threw.
#pragma once

#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <vector>

namespace flash {

class Team {
public:
    explicit Team(int size) : size_(size) {
        for (int rank = 0; rank < size; ++rank) threads_.emplace_back([this, rank] { serve(rank); });
    }

    ~Team() {
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            closing_ = true;
        }
        changed_.notify_all();
        for (auto& thread : threads_) thread.join();
    }

    Team(const Team&) = delete;
    Team& operator=(const Team&) = delete;

    void run(const std::function<void(int)>& task) {
        std::unique_lock<std::mutex> lock(mutex_);
        task_ = task;
        failure_ = nullptr;
        broken_ = false;
        waiting_ = 0;
        busy_ = size_;
        ++round_;
        changed_.notify_all();
        changed_.wait(lock, [this] { return busy_ == 0; });
        if (failure_) std::rethrow_exception(failure_);
    }

    // Called within `run` by every rank: returns when all of them have called it.
    void barrier() {
        std::unique_lock<std::mutex> lock(mutex_);
        const int generation = generation_;
        if (++waiting_ == size_) {
            waiting_ = 0;
            ++generation_;
            changed_.notify_all();
        } else {
            changed_.wait(lock, [&] { return generation_ != generation || broken_; });
        }
        if (broken_ && generation_ == generation) throw std::runtime_error("another rank failed");
    }

private:
    void serve(int rank) {
        std::unique_lock<std::mutex> lock(mutex_);
        for (int round = 0;;) {
            changed_.wait(lock, [&] { return closing_ || round_ != round; });
            if (closing_) return;
            round = round_;
            lock.unlock();
            std::exception_ptr failure;
            try {
                task_(rank);
            } catch (...) {
                failure = std::current_exception();
            }
            lock.lock();
            if (failure && !failure_) failure_ = failure;
            if (failure) broken_ = true;
            --busy_;
            changed_.notify_all();
        }
    }

    const int size_;
    std::mutex mutex_;
    std::condition_variable changed_;
    std::function<void(int)> task_;
    std::exception_ptr failure_;
    int round_ = 0, busy_ = 0, waiting_ = 0, generation_ = 0;
    bool broken_ = false, closing_ = false;
    std::vector<std::thread> threads_;
};

}  // namespace flash
