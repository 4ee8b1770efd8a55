// Products with 4-bit weights. For a chunk of inputs, the levels of two panels are unpacked exactly to x's type in the
// nearest cache, where all rows are multiplied by them; the sums are multiplied by the group's scales. See
// reference.py.
//
// Levels are integers with a zero point per group, or encode the 16 values of e2m1.
//
// Weights are quantized and laid out one panel at a time.
#include "../panels.h"

#include <limits>

namespace packed_linear_int4 {

constexpr int64_t STEP = 8, MAX_CHUNK = 128; // inputs per word, and inputs unpacked at once
constexpr int64_t UNIT_PANELS = 8, UNIT_ROWS = 128, BLOCK_ROWS = 32, PAIR = 2, WIDTH = PAIR * COLUMNS;

enum class Levels { WHOLE, E2M1 };

struct alignas(64) Sums {
    float of[BLOCK_ROWS][WIDTH];
};

INLINE void store_pair(Lanes even, Lanes odd, float *to) {
    store_lanes(even, to);
    store_lanes(odd, to + COLUMNS);
}

INLINE void store_pair(Lanes even, Lanes odd, bfloat16 *to) {
    // Truncation is exact for integers of 5 bits and for e2m1.
    const LaneBits pair = (LaneBits)even >> 16 | ((LaneBits)odd & 0xffff0000u);
    std::memcpy(to, &pair, sizeof pair);
}

// One bit of sign, two of exponent, one of fraction: twice the value is an integer.
INLINE Lanes e2m1(LaneBits bits) {
    const LaneBits exponent = bits >> 1 & 3u, is_normal = (LaneBits)(exponent > 0u) & 1u;
    const LaneBits twice = ((bits & 1u) | (is_normal << 1)) << (exponent - is_normal);
    const Lanes size = __builtin_convertvector((LaneNumbers)twice, Lanes) * 0.5f;
    return (Lanes)((LaneBits)size | (bits & 8u) << 28);
}

// Unpacks `count` inputs of a panel: the values of e2m1 levels, or levels minus their columns' zero points.
template <Levels LEVELS, typename T>
static inline void unpack(const uint32_t *words, const uint8_t *zeros, int64_t count, T *panel) {
    for (int64_t lane = 0; lane < COLUMNS; lane += LANES) {
        Lanes zero = {};
        if constexpr (LEVELS == Levels::WHOLE)
            for (int64_t i = 0; i < LANES; i++)
                zero[i] = zeros[lane + i];
        const auto number = [&](LaneBits bits) {
            if constexpr (LEVELS == Levels::E2M1)
                return e2m1(bits & 15u);
            else
                return __builtin_convertvector((LaneNumbers)(bits & 15u), Lanes) - zero;
        };
        for (int64_t k = 0; k < count; k += STEP) {
            LaneBits eights;
            std::memcpy(&eights, words + k / STEP * COLUMNS + lane, sizeof eights);
            for (int64_t pair = 0; pair < STEP / 2; pair++)
                store_pair(number(eights >> (4 * pair)), number(eights >> (4 * pair + 16)),
                           panel + (k + 2 * pair) * COLUMNS + lane * Depth<T>::step);
        }
    }
}

#if defined(__AVX512BW__)
// The bfloat16 bits of 5-bit two's complement integers: 0 to 15, then -16 to -1.
alignas(64) constexpr uint16_t NUMBERS[32] = {
    0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120,
    0x4130, 0x4140, 0x4150, 0x4160, 0x4170, 0xc180, 0xc170, 0xc160, 0xc150, 0xc140, 0xc130,
    0xc120, 0xc110, 0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80};

// The bfloat16 bits of the values of e2m1.
alignas(64) constexpr uint16_t E2M1_NUMBERS[32] = {0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0,
                                                   0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0};

template <Levels LEVELS>
static inline void unpack(const uint32_t *words, const uint8_t *zeros, int64_t count, bfloat16 *panel) {
    const __m512i numbers = _mm512_load_si512(LEVELS == Levels::E2M1 ? E2M1_NUMBERS : NUMBERS);
    const __m512i mask = _mm512_set1_epi16(15);
    __m512i zero = _mm512_setzero_si512();
    if constexpr (LEVELS == Levels::WHOLE) {
        const __m512i low = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(zeros)));
        zero = _mm512_or_si512(low, _mm512_slli_epi32(low, 16));
    }
    for (int64_t k = 0; k < count; k += STEP, words += COLUMNS, panel += STEP * COLUMNS) {
        _mm_prefetch(reinterpret_cast<const char *>(words + 32 * COLUMNS), _MM_HINT_T0);
        const __m512i eights = _mm512_loadu_si512(words);
        const __m512i shifted[] = {eights, _mm512_srli_epi16(eights, 4), _mm512_srli_epi16(eights, 8),
                                   _mm512_srli_epi16(eights, 12)};
        for (int64_t pair = 0; pair < STEP / 2; pair++) {
            const __m512i number = _mm512_sub_epi16(_mm512_and_si512(shifted[pair], mask), zero);
            _mm512_storeu_si512(panel + 2 * pair * COLUMNS, _mm512_permutexvar_epi16(number, numbers));
        }
    }
}
#endif

// totals[ceil(rows / 32)][32 rows][two panels].
template <Levels LEVELS, typename T>
static inline void multiply_pair(int64_t rows, const T *x, int64_t depth, int64_t group,
                                 const uint32_t *words, const float *scales, const uint8_t *zeros, int64_t panels,
                                 Sums *totals) {
    const int64_t num_groups = depth / group, chunk = std::min(group, MAX_CHUNK);
    alignas(64) T unpacked[PAIR * MAX_CHUNK * COLUMNS];
    const T *segment = unpacked;
    Sums sums;
    std::memset(totals, 0, ceil_div(rows, BLOCK_ROWS) * sizeof(Sums));
    for (int64_t start = 0; start < depth; start += chunk) {
        const int64_t at = start / group * COLUMNS;
        for (int64_t p = 0; p < panels; p++)
            unpack<LEVELS>(words + (p * depth + start) / STEP * COLUMNS,
                           zeros ? zeros + p * num_groups * COLUMNS + at : nullptr, chunk,
                           unpacked + p * chunk * COLUMNS);
        for (int64_t block = 0; block < rows; block += BLOCK_ROWS) {
            const int64_t some = std::min(BLOCK_ROWS, rows - block);
            multiply<false, false, T>(some, x + block * depth + start, depth,
                                      Panels<T>{&segment, 1, chunk, chunk * COLUMNS}, panels, sums.of[0], WIDTH);
            Sums &total = totals[block / BLOCK_ROWS];
            for (int64_t n = 0; n < panels * COLUMNS; n += LANES) {
                const Lanes scale = load_lanes(scales + n / COLUMNS * num_groups * COLUMNS + at + n % COLUMNS);
                for (int64_t r = 0; r < some; r++)
                    store_lanes(load_lanes(total.of[r] + n) + load_lanes(sums.of[r] + n) * scale, total.of[r] + n);
            }
        }
    }
}

// at: x [rows, in], panels, scales, zero points (for integer levels only), bias [out] or null, y [rows, out]; scales
// and zero points as in `beside_panels`. size: in, out, group.
template <typename T, Levels LEVELS = Levels::WHOLE> static int64_t kernel(const Op &op, int64_t unit) {
    const int64_t rows = *op.count, depth = op.size[0], out = op.size[1], group = op.size[2];
    const int64_t num_panels = ceil_div(out, COLUMNS), panel_units = ceil_div(num_panels, UNIT_PANELS);
    if (unit < 0)
        return panel_units * ceil_div(rows, UNIT_ROWS);
    const int64_t begin = unit / panel_units * UNIT_ROWS, count = std::min(rows - begin, UNIT_ROWS);
    const int64_t first = unit % panel_units * UNIT_PANELS, last = std::min(first + UNIT_PANELS, num_panels);
    const int64_t num_groups = depth / group;
    constexpr int64_t BIAS = LEVELS == Levels::WHOLE ? 4 : 3;
    const T *x = static_cast<const T *>(op.at[0]) + begin * depth, *bias = static_cast<const T *>(op.at[BIAS]);
    const uint8_t *zeros = LEVELS == Levels::WHOLE ? static_cast<const uint8_t *>(op.at[3]) : nullptr;
    Sums totals[UNIT_ROWS / BLOCK_ROWS];
    for (int64_t panel = first; panel < last; panel += PAIR) {
        const int64_t column = panel * COLUMNS, panels = std::min(PAIR, last - panel);
        multiply_pair<LEVELS>(count, x, depth, group,
                              static_cast<const uint32_t *>(op.at[1]) + column * (depth / STEP),
                              static_cast<const float *>(op.at[2]) + column * num_groups,
                              zeros ? zeros + column * num_groups : nullptr, panels, totals);
        for (int64_t r = 0; r < count; r++) {
            const float *total = totals[r / BLOCK_ROWS].of[r % BLOCK_ROWS];
            T *y = static_cast<T *>(op.at[BIAS + 1]) + (begin + r) * out + column;
            for (int64_t n = 0; n < std::min(panels * COLUMNS, out - column); n++)
                store(total[n] + (bias ? widen(bias[column + n]) : 0.0f), y[n]);
        }
    }
    return 0;
}

// Quantizes a group of `count` inputs of one output to levels[count], scale and zero point.
template <typename T>
static inline void round_group(const T *weight, int64_t count, uint8_t *levels, float &scale, uint8_t &zero) {
    constexpr float HIGHEST = 15.0f;
    float low = 0.0f, high = 0.0f, health = 0.0f;
#pragma omp simd reduction(min : low) reduction(max : high) reduction(+ : health)
    for (int64_t k = 0; k < count; k++) {
        const float w = widen(weight[k]);
        low = w < low ? w : low;
        high = w > high ? w : high;
        health += w * 0.0f;
    }
    if (!(health == 0.0f)) {
        scale = std::numeric_limits<float>::quiet_NaN(), zero = 0;
        std::memset(levels, 0, count);
        return;
    }
    scale = (high - low) / HIGHEST;
    const float step = scale == 0.0f ? 1.0f : scale;
    const float from = std::min(std::nearbyint(-low / step), HIGHEST);
    zero = static_cast<uint8_t>(from);
#pragma omp simd
    for (int64_t k = 0; k < count; k++) {
        const float level = std::nearbyint(widen(weight[k]) / step + from);
        levels[k] = static_cast<uint8_t>(static_cast<int32_t>(level < 0.0f ? 0.0f : level > HIGHEST ? HIGHEST : level));
    }
}

// at: weight [out, in], panels, scales, zero points; size: in, group. count: outputs; a unit is a panel.
template <typename T> static int64_t lay_out(const Op &op, int64_t unit) {
    const int64_t out = *op.count, depth = op.size[0], group = op.size[1], num_groups = depth / group;
    if (unit < 0)
        return ceil_div(out, COLUMNS);
    const T *weight = static_cast<const T *>(op.at[0]) + unit * COLUMNS * depth;
    uint32_t *words = static_cast<uint32_t *>(op.at[1]) + unit * COLUMNS * (depth / STEP);
    float *scales = static_cast<float *>(op.at[2]) + unit * COLUMNS * num_groups;
    uint8_t *zeros = static_cast<uint8_t *>(op.at[3]) + unit * COLUMNS * num_groups;
    const int64_t columns = std::min(COLUMNS, out - unit * COLUMNS);
    std::memset(words, 0, COLUMNS * (depth / STEP) * sizeof *words);
    std::memset(scales, 0, COLUMNS * num_groups * sizeof *scales);
    std::memset(zeros, 0, COLUMNS * num_groups);
    thread_local std::vector<uint8_t> levels;
    levels.resize(std::max<size_t>(levels.size(), group));
    for (int64_t n = 0; n < columns; n++)
        for (int64_t g = 0; g < num_groups; g++) {
            const int64_t at = g * COLUMNS + n;
            round_group(weight + n * depth + g * group, group, levels.data(), scales[at], zeros[at]);
            for (int64_t k = 0; k < group; k += STEP) {
                uint32_t word = 0;
                for (int64_t pair = 0; pair < STEP / 2; pair++)
                    word |= static_cast<uint32_t>(levels[k + 2 * pair]) << (4 * pair) |
                            static_cast<uint32_t>(levels[k + 2 * pair + 1]) << (4 * pair + 16);
                words[(g * group + k) / STEP * COLUMNS + n] = word;
            }
        }
    return 0;
}

} // namespace packed_linear_int4

extern "C" {
int64_t packed_linear_int4_f32(const Op &op, int64_t unit) { return packed_linear_int4::kernel<float>(op, unit); }
int64_t packed_linear_int4_bf16(const Op &op, int64_t unit) { return packed_linear_int4::kernel<bfloat16>(op, unit); }
int64_t packed_linear_mxfp4_f32(const Op &op, int64_t unit) {
    return packed_linear_int4::kernel<float, packed_linear_int4::Levels::E2M1>(op, unit);
}
int64_t packed_linear_mxfp4_bf16(const Op &op, int64_t unit) {
    return packed_linear_int4::kernel<bfloat16, packed_linear_int4::Levels::E2M1>(op, unit);
}
int64_t lay_out_int4_f32(const Op &op, int64_t unit) { return packed_linear_int4::lay_out<float>(op, unit); }
int64_t lay_out_int4_bf16(const Op &op, int64_t unit) { return packed_linear_int4::lay_out<bfloat16>(op, unit); }
}
