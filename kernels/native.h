// What the CPU kernels share: how one is called, bfloat16 as it lies in memory, and rounding.
// Arithmetic is in float32; a number is rounded once, as it is stored.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

// One call of a kernel, written down so that it can be made again at every step without Python. A kernel cuts its work
// into units that any thread may do in any order. Asked for unit -1, it says how many there are.
struct Op {
    int64_t (*kernel)(const Op &op, int64_t unit);
    const int64_t *count; // how many rows (or whatever the kernel counts) this step has
    void *at[10];
    int64_t size[8];
    double number;
};

// Called rather than inlined, what stands in a loop keeps the loop from being vectorised.
#define INLINE static inline __attribute__((always_inline))

INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct bfloat16 {
    uint16_t bits;
};

INLINE float widen(float x) { return x; }

INLINE float widen(bfloat16 x) {
    const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
    float wide;
    std::memcpy(&wide, &bits, sizeof wide);
    return wide;
}

INLINE void store(float x, float &out) { out = x; }

// Round to nearest, ties to even; NaN stays NaN.
INLINE void store(float x, bfloat16 &out) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const uint32_t quiet = (bits >> 16) | 0x40;
    out.bits = static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? quiet : rounded);
}

template <typename T> INLINE float rounded(float x) {
    T narrow;
    store(x, narrow);
    return widen(narrow);
}

// e^x by 2^n * p(f), |f| <= 0.5: a Cephes polynomial, 2 ulp, written so that compilers vectorise it. What lies
// outside of the normal numbers is 0 or infinite; NaN stays NaN.
INLINE float exponential(float x) {
    const float clamped = x < -87.3f ? -87.3f : (x > 88.7f ? 88.7f : x);
    constexpr float ROUNDER = 12582912.0f; // 1.5 * 2^23: what is added to it loses its fraction
    const float n = (clamped * 1.44269504088896341f + ROUNDER) - ROUNDER;
    const float f = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * f + 1.3981999507e-3f;
    p = p * f + 8.3334519073e-3f;
    p = p * f + 4.1665795894e-2f;
    p = p * f + 1.6666665459e-1f;
    p = p * f + 5.0000001201e-1f;
    p = p * f * f + f + 1.0f;
    // In two factors: 2^128 has no float of its own.
    const int32_t half = static_cast<int32_t>(n) / 2, rest = static_cast<int32_t>(n) - half;
    const int32_t low = (half + 127) << 23, high = (rest + 127) << 23;
    float a, b;
    std::memcpy(&a, &low, sizeof a);
    std::memcpy(&b, &high, sizeof b);
    const float finite = x < -87.3f ? 0.0f : p * a * b;
    const float result = x > 88.7f ? INFINITY : finite;
    return x == x ? result : x;
}
