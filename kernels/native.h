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
    double number[2];
    int64_t begins_beside; // not 0: neither this nor the op before writes what the other reads or writes
    int64_t may_pause;     // not 0: a run may end before it, to be gone on with from here
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
