// Shared by the CPU kernels: the calling convention, bfloat16 and rounding.
// Arithmetic is in float32; results are rounded once, when they are stored.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

// A recorded kernel call, which can be repeated at every step without Python. A kernel cuts its work into units that
// any thread may run in any order. For unit -1 it returns the number of units.
struct Op {
    int64_t (*kernel)(const Op &op, int64_t unit);
    const int64_t *count; // number of rows (or whatever the kernel counts) in this step
    void *at[10];
    int64_t size[8];
    double number[2];
    int64_t begins_beside; // not 0: neither this nor the previous op writes what the other reads or writes
    int64_t may_pause;     // not 0: a run may stop before it, to be resumed here
};

// The unit of the same op that this thread runs next, or -1 if that is not known: what it reads may be fetched ahead.
static thread_local int64_t next_unit = -1;

// A call that is not inlined prevents the loop around it from being vectorized.
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

// Rounds to nearest, ties to even; NaN stays NaN.
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

// Exports a kernel as NAME_f32 and NAME_bf16. In the expression for it, T is the dtype.
#define EXPORT(NAME, ...)                                                                                              \
    extern "C" int64_t NAME##_f32(const Op &op, int64_t unit) {                                                        \
        using T [[maybe_unused]] = float;                                                                              \
        return __VA_ARGS__(op, unit);                                                                                  \
    }                                                                                                                  \
    extern "C" int64_t NAME##_bf16(const Op &op, int64_t unit) {                                                       \
        using T [[maybe_unused]] = bfloat16;                                                                           \
        return __VA_ARGS__(op, unit);                                                                                  \
    }
