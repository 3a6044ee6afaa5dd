#include <cuda_runtime.h>
#include <ucontext.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <vector>

#include "hardware.cuh"

namespace {

constexpr int WARP = 32;
constexpr size_t STACK = 256 << 10;

std::mt19937 random_numbers;
bool copies_are_late = false;

struct Warp {
    const void* given[2][WARP];  // in turn: a fast lane may already be in the next exchange
    int arrived[2] = {};
};

struct Fiber {
    ucontext_t context;
    std::unique_ptr<char[]> stack{new char[STACK]};
    emulated::Place place;
    bool done = false;
    int turn = 0;     // of the warp's exchanges
    int barriers = 0;  // passed
    struct Copy {
        unsigned to;
        const void* from;
        bool valid;
    };
    std::vector<Copy> copies;
};

struct Block {
    std::vector<Fiber> fibers;
    std::vector<Warp> warps;
    std::unique_ptr<char[]> memory;
    char* shared = nullptr;
    size_t shared_bytes = 0;
    int at_barrier = 0, barriers = 0;
    Fiber* running = nullptr;
    ucontext_t scheduler;
    const std::function<void()>* kernel = nullptr;
};

thread_local Block* block = nullptr;

void yield() { swapcontext(&block->running->context, &block->scheduler); }

void enter() {
    (*block->kernel)();
    block->running->done = true;
    yield();
}

void run_block(dim3 grid, dim3 index, unsigned threads, size_t shared_bytes, const std::function<void()>& kernel) {
    Block own;
    block = &own;
    own.kernel = &kernel;
    own.memory.reset(new char[shared_bytes + 1024]);
    own.shared = own.memory.get() + (1024 - reinterpret_cast<std::uintptr_t>(own.memory.get()) % 1024);
    own.shared_bytes = shared_bytes;
    std::memset(own.shared, 0xff, shared_bytes);
    own.fibers = std::vector<Fiber>(threads);
    own.warps = std::vector<Warp>(threads / WARP);
    std::vector<int> order(threads);
    for (unsigned thread = 0; thread < threads; ++thread) {
        Fiber& fiber = own.fibers[thread];
        order[thread] = static_cast<int>(thread);
        fiber.place = {grid, index, dim3(thread, 0, 0)};
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.get();
        fiber.context.uc_stack.ss_size = STACK;
        makecontext(&fiber.context, enter, 0);
    }
    for (bool busy = true; busy;) {
        busy = false;
        std::shuffle(order.begin(), order.end(), random_numbers);
        for (int thread : order) {
            if (own.fibers[thread].done) continue;
            busy = true;
            own.running = &own.fibers[thread];
            swapcontext(&own.scheduler, &own.running->context);
        }
    }
    block = nullptr;
}

void do_copy(const Fiber::Copy& copy) {
    if (copy.to % 16 != 0 || reinterpret_cast<std::uintptr_t>(copy.from) % 16 != 0 ||
        copy.to - flash::BASE + 16 > block->shared_bytes)
        std::abort();
    copy.valid ? std::memcpy(flash::shared_pointer(copy.to), copy.from, 16)
               : std::memset(flash::shared_pointer(copy.to), 0, 16);
}

}  // namespace

namespace emulated {

const Place& place() { return block->running->place; }
void* shared_memory() { return block->shared; }

const void* const* exchange(const void* own) {
    Fiber& fiber = *block->running;
    const unsigned thread = fiber.place.thread.x;
    Warp& warp = block->warps[thread / WARP];
    const int turn = fiber.turn;
    fiber.turn = 1 - turn;
    warp.given[turn][thread % WARP] = own;
    if (++warp.arrived[turn] == WARP) warp.arrived[1 - turn] = 0;
    while (warp.arrived[turn] < WARP) yield();
    return warp.given[turn];
}

}  // namespace emulated

void __syncthreads() {
    Fiber& fiber = *block->running;
    ++fiber.barriers;
    if (++block->at_barrier == static_cast<int>(block->fibers.size())) {
        block->at_barrier = 0;
        ++block->barriers;
    }
    while (block->barriers < fiber.barriers) yield();
}

void flash::copy_async(unsigned to, const void* from, bool valid) {
    const Fiber::Copy copy{to, from, valid};
    copies_are_late ? block->running->copies.push_back(copy) : do_copy(copy);
}

void flash::wait_for_copies() {
    for (const auto& copy : block->running->copies) do_copy(copy);
    block->running->copies.clear();
}

extern "C" void emulator_settle(unsigned seed, int late) {
    random_numbers.seed(seed);
    copies_are_late = late != 0;
}

// Streams. One lock for all: pieces are done while somebody waits.

struct EmulatedEvent {
    int recorded = 0, happened = 0;
};

namespace {

struct Piece {
    std::function<void()> work;
    EmulatedEvent* wait = nullptr;  // not before its recording `number` has happened
    EmulatedEvent* record = nullptr;
    int number = 0;
};

}  // namespace

struct EmulatedStream {
    std::deque<Piece> pieces;
    std::uint_fast32_t rank = 0;  // the highest goes first, until the ranks change: some streams run far ahead
};

namespace {

std::mutex lock;
EmulatedStream default_stream;
std::vector<EmulatedStream*> streams{&default_stream};
std::vector<std::unique_ptr<EmulatedEvent>> destroyed;  // a piece may still wait for it
std::map<const char*, size_t> allocations;

struct Chip {
    int version = 90, code = 90, shared_bytes = 227 << 10;  // what it is, what it runs is compiled for; of a block
} chip;
std::atomic<int> copies_until_failure{-1};

bool on_device(const void* pointer) {
    const std::lock_guard<std::mutex> guard(lock);
    const char* const address = static_cast<const char*>(pointer);
    const auto after = allocations.upper_bound(address);
    return after != allocations.begin() && address < std::prev(after)->first + std::prev(after)->second;
}

EmulatedStream* of(cudaStream_t stream) { return stream ? stream : &default_stream; }

cudaError_t give(cudaStream_t stream, Piece piece) {
    const std::lock_guard<std::mutex> guard(lock);
    of(stream)->pieces.push_back(std::move(piece));
    return cudaSuccess;
}

// One piece of the first stream that has one which may run; false if there is none.
bool advance() {
    EmulatedStream* chosen = nullptr;
    for (EmulatedStream* stream : streams) {
        if (stream->rank == 0 || random_numbers() % 32 == 0) stream->rank = random_numbers() | 1u;
        if (stream->pieces.empty()) continue;
        const Piece& next = stream->pieces.front();
        const bool able = next.wait == nullptr || next.wait->happened >= next.number;
        if (able && (chosen == nullptr || stream->rank > chosen->rank)) chosen = stream;
    }
    if (chosen == nullptr) return false;
    const Piece piece = std::move(chosen->pieces.front());
    chosen->pieces.pop_front();
    if (piece.work) piece.work();
    if (piece.record) piece.record->happened = piece.number;
    return true;
}

void copy_rows(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height) {
    for (size_t row = 0; row < height; ++row)
        std::memcpy(static_cast<char*>(to) + row * to_pitch, static_cast<const char*>(from) + row * from_pitch, width);
}

}  // namespace

void emulated::launch(dim3 grid, unsigned threads, size_t shared_bytes, cudaStream_t stream,
                      std::function<void()> kernel) {
    give(stream, {[=] {
             for (unsigned z = 0; z < grid.z; ++z)
                 for (unsigned y = 0; y < grid.y; ++y)
                     for (unsigned x = 0; x < grid.x; ++x)
                         run_block(grid, dim3(x, y, z), threads, shared_bytes, kernel);
         }});
    if (stream == nullptr) cudaStreamSynchronize(nullptr);  // single-GPU tests have nobody who waits
}

// sm_`version` that runs code compiled for sm_`code` (0: there is none), with so much shared memory for a block.
extern "C" void emulator_chip(int version, int code, int shared_bytes) { chip = {version, code, shared_bytes}; }

// After `copies` more, a copy between ranks fails; -1: none does.
extern "C" void emulator_fail(int copies) { copies_until_failure = copies; }

extern "C" void* emulator_allocate(size_t bytes) {
    void* pointer = nullptr;
    cudaMalloc(&pointer, bytes);
    return pointer;
}
extern "C" void emulator_free(void* pointer) { cudaFree(pointer); }

const char* cudaGetErrorString(cudaError_t) { return "emulated error"; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaGetDeviceCount(int* count) {
    *count = 1;
    return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) { return device == 0 ? cudaSuccess : cudaErrorInvalidValue; }
cudaError_t cudaGetDevice(int* device) {
    *device = 0;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int) {
    *value = which == cudaDevAttrMaxSharedMemoryPerBlockOptin ? chip.shared_bytes
             : which == cudaDevAttrComputeCapabilityMajor     ? chip.version / 10
                                                              : chip.version % 10;
    return cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
    attributes->ptxVersion = chip.code;
    return chip.code > 0 ? cudaSuccess : cudaErrorNoKernelImageForDevice;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
    *least = *greatest = 0;
    return cudaSuccess;
}
cudaError_t cudaMalloc(void** pointer, size_t bytes) {
    *pointer = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
    std::memset(*pointer, 0xff, bytes);
    const std::lock_guard<std::mutex> guard(lock);
    allocations[static_cast<char*>(*pointer)] = bytes;
    return cudaSuccess;
}
cudaError_t cudaFree(void* pointer) {  // waits for the device
    const std::lock_guard<std::mutex> guard(lock);
    while (advance()) {}
    allocations.erase(static_cast<char*>(pointer));
    std::free(pointer);
    return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
    return cudaMemcpy2D(to, bytes, from, bytes, bytes, 1, kind);
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
    if (copies_until_failure >= 0 && copies_until_failure-- == 0) return cudaErrorInvalidValue;
    return give(stream, {[=] { std::memcpy(to, from, bytes); }});
}
cudaError_t cudaMemcpy2D(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height,
                         cudaMemcpyKind) {
    if (!on_device(to)) {
        give(nullptr, {[=] { copy_rows(to, to_pitch, from, from_pitch, width, height); }});
        return cudaStreamSynchronize(nullptr);
    }
    if (on_device(from)) return give(nullptr, {[=] { copy_rows(to, to_pitch, from, from_pitch, width, height); }});
    const auto staged = std::make_shared<std::vector<char>>(width * height);
    copy_rows(staged->data(), width, from, from_pitch, width, height);
    return give(nullptr, {[=] { copy_rows(to, to_pitch, staged->data(), width, width, height); }});
}
cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                              size_t height, cudaMemcpyKind, cudaStream_t stream) {
    return give(stream, {[=] { copy_rows(to, to_pitch, from, from_pitch, width, height); }});
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
    const std::lock_guard<std::mutex> guard(lock);
    streams.push_back(*stream = new EmulatedStream);
    return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    const std::lock_guard<std::mutex> guard(lock);
    streams.erase(std::remove(streams.begin(), streams.end(), stream), streams.end());
    delete stream;
    return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    const std::lock_guard<std::mutex> guard(lock);
    while (!of(stream)->pieces.empty())
        if (!advance()) std::abort();  // every stream waits for another
    return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
    Piece piece;
    {
        const std::lock_guard<std::mutex> guard(lock);
        piece.wait = event;
        piece.number = event->recorded;
    }
    return give(stream, std::move(piece));
}
cudaError_t cudaEventCreate(cudaEvent_t* event) {
    *event = new EmulatedEvent;
    return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) { return cudaEventCreate(event); }
cudaError_t cudaEventDestroy(cudaEvent_t event) {
    const std::lock_guard<std::mutex> guard(lock);
    destroyed.emplace_back(event);
    return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    Piece piece;
    {
        const std::lock_guard<std::mutex> guard(lock);
        piece.record = event;
        piece.number = ++event->recorded;
    }
    return give(stream, std::move(piece));
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    const std::lock_guard<std::mutex> guard(lock);
    while (event->happened < event->recorded)
        if (!advance()) std::abort();
    return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t, cudaEvent_t) {
    *milliseconds = 1.0f;
    return cudaSuccess;
}
