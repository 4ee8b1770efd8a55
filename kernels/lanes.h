// A vector of as many float32 as a register holds, the unit of all vector work. Compilers keep wider vectors in memory
// and write them back after every operation.
#pragma once

#include "native.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif
#if defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
constexpr int64_t LANES = 16;
#elif defined(__AVX__)
constexpr int64_t LANES = 8;
#else
constexpr int64_t LANES = 4;
#endif

typedef float Lanes __attribute__((vector_size(4 * LANES)));
typedef uint32_t LaneBits __attribute__((vector_size(4 * LANES)));
typedef int32_t LaneNumbers __attribute__((vector_size(4 * LANES)));
typedef uint16_t HalfLaneBits __attribute__((vector_size(2 * LANES)));
typedef uint8_t LaneBytes __attribute__((vector_size(LANES)));

INLINE Lanes load_lanes(const float *from) {
    Lanes lanes;
    std::memcpy(&lanes, from, sizeof lanes);
    return lanes;
}

INLINE Lanes load_lanes(const bfloat16 *from) {
    HalfLaneBits bits;
    std::memcpy(&bits, from, sizeof bits);
    return (Lanes)(__builtin_convertvector(bits, LaneBits) << 16);
}

INLINE void store_lanes(Lanes lanes, float *to) { std::memcpy(to, &lanes, sizeof lanes); }

// As `store`, except that the rounding instruction of x86 flushes subnormals to zero.
INLINE void store_lanes(Lanes lanes, bfloat16 *to) {
#if defined(__AVX512BF16__)
    const __m256bh bits = _mm512_cvtneps_pbh((__m512)lanes);
    std::memcpy(to, &bits, sizeof bits);
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    const bfloat16x4_t bits = vcvt_bf16_f32((float32x4_t)lanes);
    std::memcpy(to, &bits, sizeof bits);
#else
    const LaneBits bits = (LaneBits)lanes, upper = bits >> 16, rounded = (bits + 0x7fffu + (upper & 1u)) >> 16;
    const HalfLaneBits narrow = __builtin_convertvector(lanes == lanes ? rounded : upper | 0x40u, HalfLaneBits);
    std::memcpy(to, &narrow, sizeof narrow);
#endif
}

template <typename T> INLINE Lanes rounded_lanes(Lanes lanes) {
    T narrow[LANES];
    store_lanes(lanes, narrow);
    return load_lanes(narrow);
}

// Broadcasts a number to all lanes.
INLINE Lanes all_lanes(float x) { return Lanes{} + x; }

// sum + a[0] * b[0] + a[1] * b[1] of pairs of bfloat16, one in each lane.
#if defined(__AVX512BF16__)
#define HAS_PAIR_PRODUCTS
INLINE Lanes add_pair_products(Lanes sum, LaneBits a, LaneBits b) {
    return (Lanes)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
}
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define HAS_PAIR_PRODUCTS
INLINE Lanes add_pair_products(Lanes sum, LaneBits a, LaneBits b) {
    return (Lanes)vbfdotq_f32((float32x4_t)sum, (bfloat16x8_t)a, (bfloat16x8_t)b);
}
#endif

// 2^f for f in [-1/2, 1/2], within 1 ulp.
INLINE Lanes power_of_fraction(Lanes f) {
    Lanes p = f * 1.53458118e-4f + 1.33999312e-3f;
    p = p * f + 9.61848896e-3f;
    p = p * f + 5.55032878e-2f;
    p = p * f + 2.40226469e-1f;
    p = p * f + 6.93147206e-1f;
    return p * f + 1.0f;
}

// 2^x within 1 ulp: a minimax polynomial of the fraction, times the integer part as an exponent. Results below 2^-126
// are 0, from 2^128 on infinite; NaN stays NaN.
INLINE Lanes power_of_two(Lanes x) {
#if defined(__AVX512DQ__)
    const __m512 f = _mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 p = (__m512)power_of_fraction((Lanes)f);
    // Without the mask, subnormal results, which are slow.
    const __mmask16 is_normal = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
    return (Lanes)_mm512_maskz_scalef_ps(is_normal, p, (__m512)(x - (Lanes)f));
#else
    x = x < -127.0f ? all_lanes(-127.0f) : x;
    x = x > 128.0f ? all_lanes(128.0f) : x;
    // 1.5 * 2^23: adding it rounds to an integer, which is then in the lowest bits.
    constexpr float ROUNDER = 12582912.0f;
    const Lanes shifted = x + ROUNDER;
    // Exponent fields 0 and 255 give zero and infinity.
    return power_of_fraction(x - (shifted - ROUNDER)) * (Lanes)(((LaneBits)shifted + 127u) << 23);
#endif
}

INLINE LaneNumbers lane_numbers() {
    constexpr int32_t numbers[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    LaneNumbers lanes;
    std::memcpy(&lanes, numbers, sizeof lanes);
    return lanes;
}

constexpr float LOG2_E = 1.44269504088896341f;

// softcap * tanh(factor * x / softcap), using tanh u = 1 - 2 / (1 + e^2u).
INLINE Lanes capped(Lanes x, float factor, float softcap) {
    return softcap - 2.0f * softcap / (1.0f + power_of_two(x * (2.0f * LOG2_E * factor / softcap)));
}

INLINE float sum_of(Lanes lanes) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)lanes);
#else
    float sums[LANES];
    std::memcpy(sums, &lanes, sizeof sums);
    for (int64_t half = LANES / 2; half; half /= 2)
        for (int64_t i = 0; i < half; i++)
            sums[i] += sums[i + half];
    return sums[0];
#endif
}

INLINE float highest_of(Lanes lanes) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)lanes);
#else
    float tops[LANES];
    std::memcpy(tops, &lanes, sizeof tops);
    for (int64_t half = LANES / 2; half; half /= 2)
        for (int64_t i = 0; i < half; i++)
            tops[i] = tops[i + half] > tops[i] ? tops[i + half] : tops[i];
    return tops[0];
#endif
}
