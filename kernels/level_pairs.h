// Products of levels with bfloat16 inputs for processors with AVX2 alone: a chunk of a row's inputs becomes integers of
// 16 bits, and pairs of those are multiplied and added as fast as single float32. Sums of integers are exact.
//
// A chunk's scale is the power of two that its largest input needs. Inputs of at least a 128th of that lose nothing,
// smaller ones at most a 32,768th of it.
#pragma once

#include "level_words.h"

#include <limits>

#if defined(__AVX2__) && !defined(__AVX512F__)
#define HAS_LEVEL_PAIRS

namespace levels {

// sum += a * b, halves of words by halves, both products in one sum.
INLINE void add_pairs(LaneNumbers &sum, LaneBits a, LaneBits b) {
    LaneNumbers next = sum + (LaneNumbers)_mm256_madd_epi16((__m256i)a, (__m256i)b);
    // Otherwise compilers first add products to each other, of which more then wait than there are registers.
    asm("" : "+x"(next));
    sum = next;
}

// Twice the values of e2m1, plus 12: bytes without a sign, whose zero point is 12.
constexpr uint8_t E2M1_ZERO = 12;
alignas(16) constexpr uint8_t TWICE_E2M1[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

// The levels of inputs 2i and 2i + 1 in words, as halves of words.
template <Levels LEVELS> INLINE LaneBits level_pair(LaneBits words, int64_t i) {
    if constexpr (LEVELS == Levels::INT8) {
        typedef int16_t Halves __attribute__((vector_size(4 * LANES)));
        const Halves halves = (Halves)words;
        return (LaneBits)((i ? halves : halves << 8) >> 8);
    }
    const LaneBits bits = words >> place<LEVELS>(2 * i) & 0x000f000fu;
    if constexpr (LEVELS == Levels::INT4)
        return bits;
    const __m256i bytes = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i *>(TWICE_E2M1)));
    // The upper bit of a byte asks for a zero.
    return (LaneBits)_mm256_shuffle_epi8(bytes, (__m256i)(bits | 0x80008000u));
}

// Rows of inputs as integers, and the scale and the sum of each chunk of each row.
struct WholeRows {
    std::vector<int16_t> numbers;
    std::vector<float> scales;
    std::vector<int32_t> sums;
};

// The scale of a chunk that is not finite is NaN.
static inline void round_chunk(const bfloat16 *x, int64_t count, int16_t *whole, float &scale, int32_t &sum) {
    constexpr uint16_t SIZE = 0x7fff, INFINITE = 0x7f80;
    // The lowest exponent whose scale is no subnormal number. What is that small is rounded to 0.
    constexpr int32_t LOWEST = 15;
    uint16_t top = 0;
#pragma omp simd reduction(max : top)
    for (int64_t k = 0; k < count; k++) {
        const uint16_t size = x[k].bits & SIZE;
        top = size > top ? size : top;
    }
    sum = 0;
    if (top >= INFINITE) {
        scale = std::numeric_limits<float>::quiet_NaN();
        std::memset(whole, 0, count * sizeof *whole);
        return;
    }
    const int32_t exponent = std::max(top >> 7, LOWEST);
    const uint32_t scale_bits = static_cast<uint32_t>(exponent - 14) << 23, inverse_bits = (254u << 23) - scale_bits;
    float inverse;
    std::memcpy(&scale, &scale_bits, sizeof scale);
    std::memcpy(&inverse, &inverse_bits, sizeof inverse);
    int32_t of_all = 0;
#pragma omp simd reduction(+ : of_all)
    for (int64_t k = 0; k < count; k++) {
        // Adding 1.5 * 2^23 rounds to an integer, which lies in the lower half.
        const float shifted = widen(x[k]) * inverse + 12582912.0f;
        int32_t bits;
        std::memcpy(&bits, &shifted, sizeof bits);
        whole[k] = static_cast<int16_t>(bits);
        of_all += whole[k];
    }
    sum = of_all;
}

// Valid until the thread's next call.
static inline const WholeRows &round_rows(int64_t rows, const bfloat16 *x, int64_t depth, int64_t chunk) {
    thread_local WholeRows whole;
    const int64_t chunks = depth / chunk;
    whole.numbers.resize(std::max<size_t>(whole.numbers.size(), rows * depth));
    whole.scales.resize(std::max<size_t>(whole.scales.size(), rows * chunks));
    whole.sums.resize(std::max<size_t>(whole.sums.size(), rows * chunks));
    for (int64_t i = 0; i < rows * chunks; i++)
        round_chunk(x + i * chunk, chunk, whole.numbers.data() + i * chunk, whole.scales[i], whole.sums[i]);
    return whole;
}

// totals[ROWS][16] += a chunk of the rows' inputs, from `start` on, by a panel's levels: pairs(lanes, word, pair in it).
template <Levels LEVELS, int64_t ROWS, typename Pairs>
static inline void add_chunk(const WholeRows &rows, int64_t row, const Weights<LEVELS> &weights, int64_t start,
                             int64_t chunk, float *totals, const Pairs &pairs) {
    constexpr int64_t PAIRS = STEP<LEVELS> / 2;
    LaneNumbers sums[ROWS][PANEL_LANES] = {};
    const int16_t *x = rows.numbers.data() + row * weights.depth + start;
    for (int64_t word = 0; word < chunk / STEP<LEVELS>; word++)
        for (int64_t i = 0; i < PAIRS; i++) {
            LaneBits columns[PANEL_LANES];
            for (int64_t p = 0; p < PANEL_LANES; p++)
                columns[p] = pairs(p, word, i);
            for (int64_t r = 0; r < ROWS; r++) {
                uint32_t two;
                std::memcpy(&two, x + r * weights.depth + word * STEP<LEVELS> + 2 * i, sizeof two);
                const LaneBits pair = LaneBits{} + two;
                for (int64_t p = 0; p < PANEL_LANES; p++)
                    add_pairs(sums[r][p], columns[p], pair);
            }
        }
    const int64_t chunks = weights.depth / chunk, group = start / weights.group * COLUMNS;
    for (int64_t p = 0; p < PANEL_LANES; p++) {
        const int64_t at = group + p * LANES;
        const Lanes scale = load_lanes(weights.scales + at) * (LEVELS == Levels::E2M1 ? 0.5f : 1.0f);
        LaneBytes zeros = {};
        if constexpr (LEVELS == Levels::INT4)
            std::memcpy(&zeros, weights.zeros + at, sizeof zeros);
        if constexpr (LEVELS == Levels::E2M1)
            zeros += E2M1_ZERO;
        const LaneNumbers zero = __builtin_convertvector(zeros, LaneNumbers);
        for (int64_t r = 0; r < ROWS; r++) {
            const int64_t in_row = (row + r) * chunks + start / chunk;
            const LaneNumbers sum = sums[r][p] - zero * rows.sums[in_row];
            float *total = totals + (row + r) * UNIT_COLUMNS + p * LANES;
            store_lanes(load_lanes(total) + __builtin_convertvector(sum, Lanes) * (scale * rows.scales[in_row]), total);
        }
    }
}

// totals[rows][64] = x[rows][depth] * at most UNIT_PANELS panels. For more rows than a tile has, a chunk's levels are
// converted once, in the nearest cache.
template <Levels LEVELS>
static void multiply_whole(int64_t rows, const bfloat16 *x, int64_t panels, const Weights<LEVELS> &all, float *totals) {
    constexpr int64_t MAX_ROWS = MAX_TILE_ROWS<bfloat16>, PAIRS = STEP<LEVELS> / 2;
    const int64_t chunk = std::min(all.group, MAX_CHUNK), num_words = chunk / STEP<LEVELS>;
    const WholeRows &whole = round_rows(rows, x, all.depth, chunk);
    for (int64_t r = 0; r < rows; r++)
        std::memset(totals + r * UNIT_COLUMNS, 0, panels * COLUMNS * sizeof *totals);
    alignas(64) uint32_t converted[MAX_CHUNK / 2 * COLUMNS];
    for (int64_t panel = 0; panel < panels; panel++) {
        const Weights<LEVELS> weights = all.from(panel);
        for (int64_t start = 0; start < all.depth; start += chunk) {
            const uint32_t *words = weights.words + start / STEP<LEVELS> * COLUMNS;
            const uint32_t *next = weights.next ? weights.next + (words - weights.words) : words + AHEAD_BYTES / 4;
            const auto convert = [&](int64_t p, int64_t word, int64_t i) {
                if (p == 0 && i == 0)
                    __builtin_prefetch(next + word * COLUMNS);
                LaneBits held;
                std::memcpy(&held, words + word * COLUMNS + p * LANES, sizeof held);
                return level_pair<LEVELS>(held, i);
            };
            float *to = totals + panel * COLUMNS;
            if (rows <= MAX_ROWS) {
                with_rows<MAX_ROWS>(rows, [&]<int64_t ROWS>() {
                    add_chunk<LEVELS, ROWS>(whole, 0, weights, start, chunk, to, convert);
                });
                continue;
            }
            for (int64_t word = 0; word < num_words; word++)
                for (int64_t p = 0; p < PANEL_LANES; p++)
                    for (int64_t i = 0; i < PAIRS; i++) {
                        const LaneBits pair = convert(p, word, i);
                        std::memcpy(converted + (word * PAIRS + i) * COLUMNS + p * LANES, &pair, sizeof pair);
                    }
            const auto load = [&](int64_t p, int64_t word, int64_t i) {
                LaneBits pair;
                std::memcpy(&pair, converted + (word * PAIRS + i) * COLUMNS + p * LANES, sizeof pair);
                return pair;
            };
            for (int64_t row = 0; row < rows; row += MAX_ROWS)
                with_rows<MAX_ROWS>(rows - row, [&]<int64_t ROWS>() {
                    add_chunk<LEVELS, ROWS>(whole, row, weights, start, chunk, to, load);
                });
        }
    }
}

} // namespace levels
#endif
