// Products with weights of few bits: levels in groups of inputs that share a scale. Levels are converted exactly to x's
// type in registers and multiplied by a tile of rows; the sums of a chunk of inputs are multiplied by the group's scales.
// For tile registers, and for many rows where converting takes longer than multiplying, a chunk of panels is converted in
// the nearest cache. With AVX2 alone, bfloat16 inputs become integers (level_pairs.h). See
// packed_linear_int4/reference.py and packed_logits_int8/reference.py.
#pragma once

#include "level_pairs.h"

#include <limits>

namespace levels {

// One bit of sign, two of exponent, one of fraction: twice the value is an integer.
INLINE Lanes e2m1(LaneBits bits) {
    const LaneBits exponent = bits >> 1 & 3u, is_normal = (LaneBits)(exponent > 0u) & 1u;
    const LaneBits twice = ((bits & 1u) | (is_normal << 1)) << (exponent - is_normal);
    const Lanes size = __builtin_convertvector((LaneNumbers)twice, Lanes) * 0.5f;
    return (Lanes)((LaneBits)size | (bits & 8u) << 28);
}

INLINE Lanes signed_byte(LaneBits word, int64_t k) {
    return __builtin_convertvector((LaneNumbers)(word << (24 - place<Levels::INT8>(k))) >> 24, Lanes);
}

// The numbers that the words of a group stand for, LANES columns at a time: the values of e2m1, bytes, or levels minus
// their columns' zero points. COUNT inputs are converted at once.
template <Levels LEVELS, typename T> struct Numbers {
    static constexpr int64_t COUNT = 1;
    Lanes zero = {};

    void subtract(const uint8_t *zeros) {
        LaneBytes bytes;
        std::memcpy(&bytes, zeros, sizeof bytes);
        zero = __builtin_convertvector(bytes, Lanes);
    }

    Lanes at(LaneBits word, int64_t k) const {
        if constexpr (LEVELS == Levels::INT8)
            return signed_byte(word, k);
        const LaneBits bits = word >> place<LEVELS>(k) & 15u;
        if constexpr (LEVELS == Levels::E2M1)
            return e2m1(bits);
        return __builtin_convertvector((LaneNumbers)bits, Lanes) - zero;
    }
};

#if defined(__AVX512BF16__)
// The bfloat16 bits of 5-bit two's complement integers: 0 to 15, then -16 to -1.
alignas(64) constexpr uint16_t NUMBERS[32] = {
    0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120,
    0x4130, 0x4140, 0x4150, 0x4160, 0x4170, 0xc180, 0xc170, 0xc160, 0xc150, 0xc140, 0xc130,
    0xc120, 0xc110, 0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80};

// The bfloat16 bits of the values of e2m1.
alignas(64) constexpr uint16_t E2M1_NUMBERS[32] = {0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0,
                                                   0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0};

template <Levels LEVELS> struct Numbers<LEVELS, bfloat16> {
    static constexpr int64_t COUNT = 2;
    __m512i zero = _mm512_setzero_si512();

    void subtract(const uint8_t *zeros) {
        const __m512i low = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(zeros)));
        zero = _mm512_or_si512(low, _mm512_slli_epi32(low, 16));
    }

    LaneBits at(LaneBits word, int64_t k) const {
        if constexpr (LEVELS == Levels::INT8) // Truncation is exact.
            return (LaneBits)signed_byte(word, k) >> 16 | ((LaneBits)signed_byte(word, k + 1) & 0xffff0000u);
        const __m512i numbers = _mm512_load_si512(LEVELS == Levels::E2M1 ? E2M1_NUMBERS : NUMBERS);
        const __m512i shifted = _mm512_srli_epi16((__m512i)word, static_cast<unsigned>(place<LEVELS>(k)));
        const __m512i index = _mm512_sub_epi16(_mm512_and_si512(shifted, _mm512_set1_epi16(15)), zero);
        return (LaneBits)_mm512_permutexvar_epi16(index, numbers);
    }
};
#elif defined(HAS_PAIR_PRODUCTS)
template <Levels LEVELS> struct Numbers<LEVELS, bfloat16> {
    static constexpr int64_t COUNT = 2;
    Numbers<LEVELS, float> single;

    void subtract(const uint8_t *zeros) { single.subtract(zeros); }

    LaneBits at(LaneBits word, int64_t k) const { // Truncation is exact.
        const uint16x8_t first = (uint16x8_t)single.at(word, k), second = (uint16x8_t)single.at(word, k + 1);
        return (LaneBits)vtrn2q_u16(first, second);
    }
};
#endif

// A tile's sums stay in registers, next to zero points and a word's numbers. Few rows take several panels at once:
// each sum waits for its previous addition.
#if defined(__AVX512F__)
constexpr int64_t FEW_ROWS = 4, FEW_ROWS_PANELS = 4;
#else
constexpr int64_t FEW_ROWS = 1, FEW_ROWS_PANELS = 2;
#endif

// totals[ROWS][PANELS * 16] = x[ROWS][depth] * panels.
template <Levels LEVELS, typename T, int64_t ROWS, int64_t PANELS>
static inline void multiply_tile(const Factor<T> *x, int64_t x_stride, const Weights<LEVELS> &weights, float *totals) {
    constexpr int64_t parts = PANELS * PANEL_LANES, COUNT = Numbers<LEVELS, T>::COUNT;
    const int64_t size = weights.panel_words(), chunk = std::min(weights.group, MAX_CHUNK);
    // As in panels.h: what comes next is fetched in one stream.
    const uint32_t *fetched = weights.next ? weights.next : weights.words + AHEAD_BYTES / sizeof(uint32_t);
    const int64_t pace = weights.next ? PANELS : 1, gap = weights.next ? COLUMNS : size;
    for (int64_t r = 0; r < ROWS; r++)
        std::memset(totals + r * UNIT_COLUMNS, 0, PANELS * COLUMNS * sizeof *totals);
    for (int64_t start = 0; start < weights.depth; start += chunk) {
        Lanes sums[ROWS][parts] = {};
        Numbers<LEVELS, T> numbers[parts];
        const auto in_group = [&](int64_t p) {
            return p / PANEL_LANES * weights.panel_groups() + start / weights.group * COLUMNS + p % PANEL_LANES * LANES;
        };
        if constexpr (LEVELS == Levels::INT4)
            for (int64_t p = 0; p < parts; p++)
                numbers[p].subtract(weights.zeros + in_group(p));
        for (int64_t k = start; k < start + chunk; k += STEP<LEVELS>)
            for (int64_t p = 0; p < parts; p++) {
                const int64_t panel = p / PANEL_LANES, lane = p % PANEL_LANES * LANES, row = k / STEP<LEVELS> * COLUMNS;
                if (lane == 0)
                    __builtin_prefetch(fetched + panel * gap + row * pace);
                LaneBits word;
                std::memcpy(&word, weights.words + panel * size + row + lane, sizeof word);
                for (int64_t i = 0; i < STEP<LEVELS>; i += COUNT) {
                    const auto columns = numbers[p].at(word, i);
                    for (int64_t r = 0; r < ROWS; r++)
                        multiply_add(sums[r][p], x + r * x_stride + k + i, columns);
                }
            }
        for (int64_t p = 0; p < parts; p++) {
            const Lanes scale = load_lanes(weights.scales + in_group(p));
            for (int64_t r = 0; r < ROWS; r++) {
                float *total = totals + r * UNIT_COLUMNS + p * LANES;
                store_lanes(load_lanes(total) + sums[r][p] * scale, total);
            }
        }
    }
}

// totals[at most MAX_TILE_ROWS][64] = x[rows][depth] * at most UNIT_PANELS panels.
template <Levels LEVELS, typename T>
static inline void multiply_rows(int64_t rows, const T *x, int64_t panels, const Weights<LEVELS> &weights, float *totals) {
    int64_t stride = weights.depth;
    const Factor<T> *factors = factors_of<T>(rows, x, stride, weights.depth);
    with_rows<MAX_TILE_ROWS<T>>(rows, [&]<int64_t ROWS>() {
        constexpr int64_t AT_ONCE = ROWS <= FEW_ROWS ? FEW_ROWS_PANELS : 1;
        int64_t p = 0;
        for (; p + AT_ONCE <= panels; p += AT_ONCE)
            multiply_tile<LEVELS, T, ROWS, AT_ONCE>(factors, stride, weights.from(p), totals + p * COLUMNS);
        for (; p < panels; p++)
            multiply_tile<LEVELS, T, ROWS, 1>(factors, stride, weights.from(p), totals + p * COLUMNS);
    });
}

#if defined(__AMX_BF16__)
// totals[rows][stride] = x[rows][depth] * two panels, by tile registers. Numbers are converted in the nearest cache.
template <Levels LEVELS>
static inline void multiply_pair(int64_t rows, const bfloat16 *x, const Weights<LEVELS> &weights, float *totals) {
    const int64_t chunk = std::min(weights.group, MAX_CHUNK), width = 2 * COLUMNS;
    alignas(64) bfloat16 numbers[2 * MAX_CHUNK * COLUMNS];
    alignas(64) float sums[2 * TILE_ROWS * width];
    const bfloat16 *segment = numbers;
    for (int64_t r = 0; r < rows; r++)
        std::memset(totals + r * UNIT_COLUMNS, 0, width * sizeof *totals);
    for (int64_t start = 0; start < weights.depth; start += chunk) {
        const int64_t in_group = start / weights.group * COLUMNS;
        for (int64_t p = 0; p < 2; p++) {
            const Weights<LEVELS> panel = weights.from(p);
            Numbers<LEVELS, bfloat16> of_group;
            if constexpr (LEVELS == Levels::INT4)
                of_group.subtract(panel.zeros + in_group);
            for (int64_t k = 0; k < chunk; k += STEP<LEVELS>) {
                const uint32_t *words = panel.words + (start + k) / STEP<LEVELS> * COLUMNS;
                _mm_prefetch(reinterpret_cast<const char *>(words + 32 * COLUMNS), _MM_HINT_T0);
                LaneBits word;
                std::memcpy(&word, words, sizeof word);
                for (int64_t i = 0; i < STEP<LEVELS>; i += 2) {
                    const LaneBits two = of_group.at(word, i);
                    std::memcpy(numbers + (p * chunk + k + i) * COLUMNS, &two, sizeof two);
                }
            }
        }
        for (int64_t block = 0; block < rows; block += 2 * TILE_ROWS) {
            const int64_t some = std::min(2 * TILE_ROWS, rows - block);
            multiply_amx<false, false>(some, x + block * weights.depth + start, weights.depth,
                                       Panels<bfloat16>{&segment, 1, chunk, chunk * COLUMNS}, 2, sums, width);
            for (int64_t n = 0; n < width; n += LANES) {
                const Weights<LEVELS> panel = weights.from(n / COLUMNS);
                const Lanes scale = load_lanes(panel.scales + in_group + n % COLUMNS);
                for (int64_t r = 0; r < some; r++) {
                    float *total = totals + (block + r) * UNIT_COLUMNS + n;
                    store_lanes(load_lanes(total) + load_lanes(sums + r * width + n) * scale, total);
                }
            }
        }
    }
}
#endif

// totals[rows][at most TILE_PANELS * 16] = x[rows][depth] * panels. Numbers are converted once for all tiles of rows, in
// the nearest cache.
template <Levels LEVELS, typename N>
static inline void multiply_converted(int64_t rows, const N *x, int64_t stride, int64_t panels,
                                      const Weights<LEVELS> &weights, float *totals) {
    constexpr int64_t COUNT = Numbers<LEVELS, N>::COUNT;
    const int64_t chunk = std::min(weights.group, MAX_CHUNK), width = panels * COLUMNS;
    alignas(64) N numbers[TILE_PANELS * MAX_CHUNK * COLUMNS];
    alignas(64) float sums[UNIT_ROWS * TILE_PANELS * COLUMNS];
    const N *segment = numbers;
    for (int64_t r = 0; r < rows; r++)
        std::memset(totals + r * UNIT_COLUMNS, 0, width * sizeof *totals);
    for (int64_t start = 0; start < weights.depth; start += chunk) {
        for (int64_t n = 0; n < width; n += LANES) {
            const Weights<LEVELS> panel = weights.from(n / COLUMNS);
            const int64_t lane = n % COLUMNS;
            Numbers<LEVELS, N> of_group;
            if constexpr (LEVELS == Levels::INT4)
                of_group.subtract(panel.zeros + start / weights.group * COLUMNS + lane);
            N *to = numbers + n / COLUMNS * chunk * COLUMNS + lane * COUNT;
            for (int64_t k = 0; k < chunk; k += STEP<LEVELS>) {
                const uint32_t *words = panel.words + (start + k) / STEP<LEVELS> * COLUMNS + lane;
                if (lane == 0)
                    __builtin_prefetch(words + AHEAD_BYTES / sizeof *words);
                LaneBits word;
                std::memcpy(&word, words, sizeof word);
                for (int64_t i = 0; i < STEP<LEVELS>; i += COUNT) {
                    const auto lanes = of_group.at(word, i);
                    std::memcpy(to + (k + i) * COLUMNS, &lanes, sizeof lanes);
                }
            }
        }
        ::multiply<false, false>(rows, x + start, stride, Panels<N>{&segment, 1, chunk, chunk * COLUMNS}, panels, sums,
                                 width);
        for (int64_t n = 0; n < width; n += LANES) {
            const float *scales = weights.from(n / COLUMNS).scales + start / weights.group * COLUMNS;
            const Lanes scale = load_lanes(scales + n % COLUMNS);
            for (int64_t r = 0; r < rows; r++) {
                float *total = totals + r * UNIT_COLUMNS + n;
                store_lanes(load_lanes(total) + load_lanes(sums + r * width + n) * scale, total);
            }
        }
    }
}

// totals[rows][64] = x[rows][depth] * at most UNIT_PANELS panels.
template <Levels LEVELS, typename T>
static void multiply(int64_t rows, const T *x, int64_t panels, const Weights<LEVELS> &weights, float *totals) {
#if defined(HAS_LEVEL_PAIRS)
    if constexpr (sizeof(T) == 2)
        return multiply_whole<LEVELS>(rows, x, panels, weights, totals);
#endif
    int64_t first = 0;
#if defined(__AMX_BF16__)
    if constexpr (sizeof(T) == 2)
        if (may_use_tiles)
            for (; first + 2 <= panels; first += 2)
                multiply_pair<LEVELS>(rows, x, weights.from(first), totals + first * COLUMNS);
#endif
#if defined(__AVX512BF16__)
    constexpr bool CONVERTS = sizeof(T) == sizeof(float);
#else
    constexpr bool CONVERTS = true;
#endif
    if constexpr (CONVERTS)
        if (rows > MAX_TILE_ROWS<T>) {
            int64_t stride = weights.depth;
            const Factor<T> *factors = factors_of<T>(rows, x, stride, weights.depth);
            for (; first < panels; first += TILE_PANELS)
                multiply_converted<LEVELS>(rows, factors, stride, std::min(panels - first, TILE_PANELS),
                                           weights.from(first), totals + first * COLUMNS);
        }
    for (int64_t r = 0; r < rows && first < panels; r += MAX_TILE_ROWS<T>)
        multiply_rows<LEVELS>(std::min(rows - r, MAX_TILE_ROWS<T>), x + r * weights.depth, panels - first,
                              weights.from(first), totals + r * UNIT_COLUMNS + first * COLUMNS);
}

// at: x [rows, in], panels, scales, zero points (for INT4 only), bias [out] or null, y [rows, out]; scales and zero
// points as in `beside_panels`. size: in, out, group.
template <Levels LEVELS, typename T, typename Out> static int64_t kernel(const Op &op, int64_t unit) {
    const int64_t rows = *op.count, depth = op.size[0], out = op.size[1], group = op.size[2];
    const int64_t num_panels = ceil_div(out, COLUMNS), panel_units = ceil_div(num_panels, UNIT_PANELS);
    if (unit < 0)
        return panel_units * ceil_div(rows, UNIT_ROWS);
    const int64_t begin = unit / panel_units * UNIT_ROWS, count = std::min(rows - begin, UNIT_ROWS);
    const int64_t panel = unit % panel_units * UNIT_PANELS, panels = std::min(UNIT_PANELS, num_panels - panel);
    const int64_t column = panel * COLUMNS, columns = std::min(panels * COLUMNS, out - column);
    constexpr int64_t BIAS = LEVELS == Levels::INT4 ? 4 : 3;
    const uint32_t *words = static_cast<const uint32_t *>(op.at[1]);
    const uint8_t *zeros = LEVELS == Levels::INT4 ? static_cast<const uint8_t *>(op.at[3]) : nullptr;
    const Weights<LEVELS> first{words, nullptr, static_cast<const float *>(op.at[2]), zeros, depth, group};
    Weights<LEVELS> weights = first.from(panel);
    weights.next = next_panels(words, panel_units, UNIT_PANELS * first.panel_words());
    alignas(64) float totals[UNIT_ROWS * UNIT_COLUMNS];
    multiply<LEVELS>(count, static_cast<const T *>(op.at[0]) + begin * depth, panels, weights, totals);
    const T *bias = op.at[BIAS] ? static_cast<const T *>(op.at[BIAS]) + column : nullptr;
    for (int64_t r = 0; r < count; r++) {
        Out *y = static_cast<Out *>(op.at[BIAS + 1]) + (begin + r) * out + column;
        for (int64_t n = 0; n < columns; n++)
            store(totals[r * UNIT_COLUMNS + n] + (bias ? widen(bias[n]) : 0.0f), y[n]);
    }
    return 0;
}

template <typename T> static inline bool are_finite(const T *numbers, int64_t count) {
    float health = 0.0f;
#pragma omp simd reduction(+ : health)
    for (int64_t k = 0; k < count; k++)
        health += widen(numbers[k]) * 0.0f;
    return health == 0.0f;
}

// at: weight [out, in], panels, scales, zero points (for INT4 only); size: in, group. count: outputs; a unit is a panel.
// ROUND(weights, count, levels, scale, zero) quantizes a group of inputs of one output; the scale of a group that is not
// finite is NaN.
template <Levels LEVELS, typename T, void (*ROUND)(const T *, int64_t, uint8_t *, float &, uint8_t &)>
static inline int64_t lay_out(const Op &op, int64_t unit) {
    const int64_t out = *op.count, depth = op.size[0], group = op.size[1], num_groups = depth / group;
    if (unit < 0)
        return ceil_div(out, COLUMNS);
    const int64_t panel_words = depth / STEP<LEVELS> * COLUMNS, panel_groups = num_groups * COLUMNS;
    const T *weight = static_cast<const T *>(op.at[0]) + unit * COLUMNS * depth;
    uint32_t *words = static_cast<uint32_t *>(op.at[1]) + unit * panel_words;
    float *scales = static_cast<float *>(op.at[2]) + unit * panel_groups;
    uint8_t *zeros = LEVELS == Levels::INT4 ? static_cast<uint8_t *>(op.at[3]) + unit * panel_groups : nullptr;
    std::memset(words, 0, panel_words * sizeof *words);
    std::memset(scales, 0, panel_groups * sizeof *scales);
    if (zeros)
        std::memset(zeros, 0, panel_groups);
    thread_local std::vector<uint8_t> levels;
    levels.resize(std::max<size_t>(levels.size(), group));
    for (int64_t n = 0; n < std::min(COLUMNS, out - unit * COLUMNS); n++)
        for (int64_t g = 0; g < num_groups; g++) {
            const T *of_group = weight + n * depth + g * group;
            float &scale = scales[g * COLUMNS + n];
            if (!are_finite(of_group, group)) {
                scale = std::numeric_limits<float>::quiet_NaN();
                continue;
            }
            uint8_t zero = 0;
            ROUND(of_group, group, levels.data(), scale, zero);
            if (zeros)
                zeros[g * COLUMNS + n] = zero;
            for (int64_t k = 0; k < group; k++)
                words[(g * group + k) / STEP<LEVELS> * COLUMNS + n] |= static_cast<uint32_t>(levels[k])
                                                                       << place<LEVELS>(k % STEP<LEVELS>);
        }
    return 0;
}

} // namespace levels
