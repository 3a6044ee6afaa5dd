// cuda/src/hardware.cuh for CPUs: the same functions by what their instructions are documented to do.
#pragma once

#include <cuda_bf16.h>

#include <cstdlib>

namespace flash {

constexpr unsigned BASE = 0x400;  // shared memory does not begin at address 0

inline unsigned shared_address(const void* pointer) {
    return BASE + static_cast<unsigned>(static_cast<const char*>(pointer) -
                                        static_cast<const char*>(emulated::shared_memory()));
}

inline char* shared_pointer(unsigned address) { return static_cast<char*>(emulated::shared_memory()) + address - BASE; }

void copy_async(unsigned to, const void* from, bool valid);  // emulator.cpp
void wait_for_copies();

inline float power_of_2(float x) { return std::exp2(x); }

// The 8 rows of a matrix are read together: they must lie in 8 different columns of 16 bytes of a line of 128.
inline void expect_no_bank_conflict(const void* const* all) {
    for (unsigned matrix = 0; matrix < 4; ++matrix) {
        unsigned columns = 0;
        for (unsigned row = 0; row < 8; ++row)
            columns |= 1u << (*static_cast<const unsigned*>(all[8 * matrix + row]) / 16 % 8);
        if (columns != 0xff) std::abort();
    }
}

inline void load_matrices(unsigned (&to)[4], unsigned address) {
    const void* const* all = emulated::exchange(&address);
    expect_no_bank_conflict(all);
    const unsigned lane = threadIdx.x % 32;
    for (unsigned matrix = 0; matrix < 4; ++matrix) {
        const char* row = shared_pointer(*static_cast<const unsigned*>(all[8 * matrix + lane / 4]));
        std::memcpy(&to[matrix], row + 4 * (lane % 4), 4);
    }
    emulated::exchange(nullptr);
}

inline void load_matrices_transposed(unsigned (&to)[4], unsigned address) {
    const void* const* all = emulated::exchange(&address);
    expect_no_bank_conflict(all);
    const unsigned lane = threadIdx.x % 32;
    for (unsigned matrix = 0; matrix < 4; ++matrix) {
        std::uint16_t pair[2];
        for (unsigned e = 0; e < 2; ++e) {  // element (row 2 (l % 4) + e, column l / 4) of the stored matrix
            const char* row = shared_pointer(*static_cast<const unsigned*>(all[8 * matrix + 2 * (lane % 4) + e]));
            std::memcpy(&pair[e], row + 2 * (lane / 4), 2);
        }
        std::memcpy(&to[matrix], pair, 4);
    }
    emulated::exchange(nullptr);
}

// mma.m16n8k16, with g = lane / 4 and t = lane % 4. Of a: a0 (g, 2t..), a1 (g + 8, 2t..), a2 (g, 2t + 8..), a3 (g + 8,
// 2t + 8..). Of b: b0 (2t.., g), b1 (2t + 8.., g). Of c: c0, c1 (g, 2t..), c2, c3 (g + 8, 2t..).
inline void multiply(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    struct Operands {
        unsigned a[4], b[2];
    } own{{a[0], a[1], a[2], a[3]}, {b0, b1}};
    const void* const* all = emulated::exchange(&own);
    const auto half = [](unsigned word, unsigned e) {
        return to_float({static_cast<std::uint16_t>(word >> 16 * e)});
    };
    const unsigned lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    for (unsigned e = 0; e < 4; ++e) {
        const unsigned high = e / 2, column = 2 * t + e % 2;
        for (unsigned k = 0; k < 16; ++k) {
            const auto& of_a = *static_cast<const Operands*>(all[4 * g + k % 8 / 2]);
            const auto& of_b = *static_cast<const Operands*>(all[4 * column + k % 8 / 2]);
            c[e] += half(of_a.a[high + k / 8 * 2], k % 2) * half(of_b.b[k / 8], k % 2);
        }
    }
    emulated::exchange(nullptr);
}

}  // namespace flash
