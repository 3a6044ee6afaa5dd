#pragma once

#include <cuda_runtime.h>

#include <cstring>

struct __nv_bfloat16 {
    std::uint16_t bits;
};
struct __nv_bfloat162 {
    __nv_bfloat16 x, y;
};

inline float to_float(__nv_bfloat16 half) {
    const std::uint32_t bits = static_cast<std::uint32_t>(half.bits) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

inline __nv_bfloat16 nearest(float value) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, 4);
    if (std::isnan(value)) return {0x7fff};
    return {static_cast<std::uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

inline __nv_bfloat162 __floats2bfloat162_rn(float low, float high) { return {nearest(low), nearest(high)}; }
