// Int8 products: weights with a scale per output column, and rows of x quantized dynamically with a scale per row. See
// reference.py.
//
// A panel is 16 columns over the whole depth as in panels.h, with four steps of the depth adjacent; the depth is padded
// with zeros to a multiple of 64, the depth of a tile.
#include "../panels.h"

namespace packed_linear_int8 {

constexpr int64_t STEP = 4, TILE_DEPTH = 64;
constexpr int64_t UNIT_PANELS = 2, UNIT_ROWS = 256, BLOCK_ROWS = 32, UNIT_QUANTIZED = 4;

typedef int32_t Sums[BLOCK_ROWS][UNIT_PANELS * COLUMNS];

// at: x [rows, depth], q [rows, padded], scales [rows]; size: depth, padded. The scale of a row that is not finite is
// NaN.
template <typename T> static int64_t quantize(const Op &op, int64_t unit) {
    const int64_t rows = *op.count, depth = op.size[0], padded = op.size[1];
    if (unit < 0)
        return ceil_div(rows, UNIT_QUANTIZED);
    for (int64_t r = unit * UNIT_QUANTIZED; r < std::min(rows, (unit + 1) * UNIT_QUANTIZED); r++) {
        const T *x = static_cast<const T *>(op.at[0]) + r * depth;
        uint8_t *q = static_cast<uint8_t *>(op.at[1]) + r * padded;
        T rest[LANES] = {};
        const int64_t whole = depth / LANES * LANES;
        std::memcpy(rest, x + whole, (depth - whole) * sizeof(T));
        Lanes tops = {}, health = {};
        const auto see = [&](Lanes lanes) {
            const Lanes sizes = lanes < 0.0f ? -lanes : lanes;
            tops = sizes > tops ? sizes : tops;
            health += lanes * 0.0f;
        };
        for (int64_t i = 0; i < whole; i += LANES)
            see(load_lanes(x + i));
        see(load_lanes(rest));
        const float top = highest_of(tops), unhealthy = sum_of(health);
        static_cast<float *>(op.at[2])[r] = top / 127.0f + unhealthy;
        std::memset(q + whole, 0, padded - whole);
        if (!(unhealthy == 0.0f)) {
            std::memset(q, 0, whole);
            continue;
        }
        const float inverse = top > 0.0f ? 127.0f / top : 0.0f;
        const auto narrow = [&](Lanes lanes) {
            // Adding 1.5 * 2^23 rounds to an integer, which lies in the lowest byte.
            return __builtin_convertvector((LaneBits)(lanes * inverse + 12582912.0f), LaneBytes);
        };
        for (int64_t i = 0; i < whole; i += LANES) {
            const LaneBytes bytes = narrow(load_lanes(x + i));
            std::memcpy(q + i, &bytes, sizeof bytes);
        }
        const LaneBytes bytes = narrow(load_lanes(rest));
        std::memcpy(q + whole, &bytes, depth - whole);
    }
    return 0;
}

#if defined(__AMX_INT8__) && defined(__AMX_BF16__)
template <bool TWO>
static inline void multiply_tiles(const int8_t *q, int64_t stride, int64_t rows, const int8_t *first,
                                  const int8_t *second, int64_t depth, Sums &sums) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t k = 0; k < depth; k += TILE_DEPTH) {
        for (int64_t r = 0; r < COLUMNS; r++) {
            _mm_prefetch(reinterpret_cast<const char *>(first + (k + 2 * TILE_DEPTH) * COLUMNS + 64 * r), _MM_HINT_T0);
            _mm_prefetch(reinterpret_cast<const char *>(second + (k + 2 * TILE_DEPTH) * COLUMNS + 64 * r), _MM_HINT_T0);
        }
        _tile_loadd(4, q + k, stride);
        _tile_loadd(6, first + k * COLUMNS, 64);
        _tile_loadd(7, second + k * COLUMNS, 64);
        _tile_dpbssd(0, 4, 6);
        _tile_dpbssd(1, 4, 7);
        if constexpr (TWO) {
            _tile_loadd(5, q + TILE_ROWS * stride + k, stride);
            _tile_dpbssd(2, 5, 6);
            _tile_dpbssd(3, 5, 7);
        }
    }
    _tile_stored(0, sums[0], sizeof sums[0]);
    _tile_stored(1, sums[0] + COLUMNS, sizeof sums[0]);
    if constexpr (TWO) {
        _tile_stored(2, sums[TILE_ROWS], sizeof sums[0]);
        _tile_stored(3, sums[TILE_ROWS] + COLUMNS, sizeof sums[0]);
    }
}
#endif

// A tile's sums stay in registers, as in panels.h.
#if defined(__AVX512VNNI__)
constexpr int64_t MAX_ROWS = 12, TILE_PANELS_INT8 = 2;
#elif defined(__ARM_FEATURE_MATMUL_INT8)
constexpr int64_t MAX_ROWS = 6, TILE_PANELS_INT8 = 1;
#elif defined(__ARM_FEATURE_DOTPROD)
constexpr int64_t MAX_ROWS = 5, TILE_PANELS_INT8 = 1;
#else
constexpr int64_t MAX_ROWS = 4, TILE_PANELS_INT8 = 1;
#endif

// Multiplies ROWS rows by PANELS panels, which are read once for all of them. FETCHED panels are prefetched from `next`
// on, or if that is null as far ahead as weights are.
template <int64_t ROWS, int64_t PANELS, int64_t FETCHED>
static inline void multiply_tile(const int8_t *q, int64_t stride, const int8_t *panel, const int8_t *next,
                                 int64_t depth, int32_t *sums) {
    LaneNumbers rows[ROWS][PANELS * PANEL_LANES] = {};
    const int64_t size = depth * COLUMNS;
    // As in panels.h: in one stream.
    const int64_t pace = next ? FETCHED * COLUMNS : COLUMNS, gap = next ? LINE_BYTES : size;
    const int8_t *fetched = next ? next : panel + AHEAD_BYTES;
#if defined(__AVX512VNNI__)
    // One operand of the instruction is unsigned: 128 is added to x, and 128 times the panel is subtracted at the end.
    constexpr uint32_t OFFSET = 0x80808080u;
    __m512i excess[PANELS] = {};
    for (int64_t k = 0; k < depth; k += STEP) {
        __m512i columns[PANELS];
        for (int64_t p = 0; p < PANELS; p++) {
            columns[p] = _mm512_loadu_si512(panel + p * size + k * COLUMNS);
            if (p < FETCHED)
                __builtin_prefetch(fetched + p * gap + k * pace);
            excess[p] = _mm512_dpbusd_epi32(excess[p], _mm512_set1_epi32(static_cast<int32_t>(OFFSET)), columns[p]);
        }
        for (int64_t r = 0; r < ROWS; r++) {
            uint32_t four;
            std::memcpy(&four, q + r * stride + k, sizeof four);
            const __m512i spread = _mm512_set1_epi32(static_cast<int32_t>(four ^ OFFSET));
            for (int64_t p = 0; p < PANELS; p++)
                rows[r][p] = (LaneNumbers)_mm512_dpbusd_epi32((__m512i)rows[r][p], spread, columns[p]);
        }
    }
    for (int64_t r = 0; r < ROWS; r++)
        for (int64_t p = 0; p < PANELS; p++)
            rows[r][p] -= (LaneNumbers)excess[p];
#else
    for (int64_t k = 0; k < depth; k += STEP) {
        LaneBits columns[PANELS * PANEL_LANES];
        for (int64_t p = 0; p < PANELS * PANEL_LANES; p++) {
            const int64_t at = p / PANEL_LANES * size + p % PANEL_LANES * LANES * STEP;
            std::memcpy(columns + p, panel + at + k * COLUMNS, sizeof columns[p]);
        }
        for (int64_t p = 0; p < FETCHED; p++)
            __builtin_prefetch(fetched + p * gap + k * pace);
        for (int64_t r = 0; r < ROWS; r++) {
#if defined(__AVX2__) && !defined(__AVX512F__)
            // One operand of the first instruction is unsigned: the columns' signs are moved to x. Two products of at
            // most 128 * 127 fit in the 16 bits of their sum.
            int32_t four;
            std::memcpy(&four, q + r * stride + k, sizeof four);
            for (int64_t p = 0; p < PANELS * PANEL_LANES; p++) {
                const __m256i column = (__m256i)columns[p], x = _mm256_sign_epi8(_mm256_set1_epi32(four), column);
                const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(column), x);
                rows[r][p] += (LaneNumbers)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
            }
#elif defined(__ARM_FEATURE_DOTPROD)
            int32_t four;
            std::memcpy(&four, q + r * stride + k, sizeof four);
            const int8x16_t spread = (int8x16_t)vdupq_n_s32(four);
            for (int64_t p = 0; p < PANELS * PANEL_LANES; p++)
                rows[r][p] = (LaneNumbers)vdotq_s32((int32x4_t)rows[r][p], (int8x16_t)columns[p], spread);
#else
            for (int64_t i = 0; i < STEP; i++)
                for (int64_t p = 0; p < PANELS * PANEL_LANES; p++)
                    rows[r][p] += q[r * stride + k + i] * ((LaneNumbers)(columns[p] << (24 - 8 * i)) >> 24);
#endif
        }
    }
#endif
    // One by one: an array whose address is taken would be kept in memory.
    for (int64_t r = 0; r < ROWS; r++)
        for (int64_t p = 0; p < PANELS * PANEL_LANES; p++) {
            const LaneNumbers lanes = rows[r][p];
            std::memcpy(sums + r * UNIT_PANELS * COLUMNS + p * LANES, &lanes, sizeof lanes);
        }
}

#if defined(__ARM_FEATURE_MATMUL_INT8)
// The same for one panel, by matrix instructions.
template <int64_t ROWS, int64_t FETCHED>
static inline void multiply_squares(const int8_t *q, int64_t stride, const int8_t *panel, const int8_t *next,
                                    int64_t depth, int32_t *sums) {
    squares::Tile<LaneNumbers, ROWS> tile = {};
    const int8_t *fetched = next ? next : panel + AHEAD_BYTES;
    for (int64_t k = 0; k < depth; k += 2 * STEP) {
        if constexpr (FETCHED > 0) {
            __builtin_prefetch(fetched + k * COLUMNS);
            __builtin_prefetch(fetched + (k + STEP) * COLUMNS);
        }
        squares::multiply_words<ROWS, 2>(tile, q + k, stride, panel + k * COLUMNS);
    }
    squares::store<ROWS>(tile, sums, UNIT_PANELS * COLUMNS);
}
#endif

template <bool FAR>
static void multiply(int64_t rows, const int8_t *q, const int8_t *panels, const int8_t *next, int64_t num_panels,
                     int64_t depth, Sums &sums) {
#if defined(__AMX_INT8__) && defined(__AMX_BF16__)
    if (may_use_tiles && num_panels == UNIT_PANELS) {
        // 64 int8 take as many bytes as 32 bfloat16.
        shape_tiles(std::min(rows, TILE_ROWS), std::max<int64_t>(rows - TILE_ROWS, 1), 32);
        const int8_t *second = panels + depth * COLUMNS;
        (rows > TILE_ROWS ? multiply_tiles<true> : multiply_tiles<false>)(q, depth, rows, panels, second, depth, sums);
        return;
    }
#endif
    for_tiles<MAX_ROWS, TILE_PANELS_INT8, FAR>(
        rows, num_panels, next != nullptr,
        [&]<int64_t ROWS, int64_t PANELS, int64_t FETCHED>(int64_t row, int64_t panel, int64_t fetched) {
            const int64_t size = depth * COLUMNS;
            const int8_t *some = q + row * depth, *of_panel = panels + panel * size;
            const int8_t *then = next ? next + fetched * size : nullptr;
            int32_t *to = sums[row] + panel * COLUMNS;
#if defined(__ARM_FEATURE_MATMUL_INT8)
            if constexpr (ROWS > 1)
                return multiply_squares<ROWS, FETCHED>(some, depth, of_panel, then, depth, to);
#endif
            multiply_tile<ROWS, PANELS, FETCHED>(some, depth, of_panel, then, depth, to);
        });
}

// at: q [rows, padded], scales [rows], panels, scales of columns [out], bias [out] or null, y [rows, out];
// size: padded, out.
template <typename T> static int64_t kernel(const Op &op, int64_t unit) {
    const int64_t rows = *op.count, depth = op.size[0], out = op.size[1];
    const int64_t num_panels = ceil_div(out, COLUMNS), panel_units = ceil_div(num_panels, UNIT_PANELS);
    if (unit < 0)
        return panel_units * ceil_div(rows, UNIT_ROWS);
    const int64_t panel = unit % panel_units * UNIT_PANELS, panels = std::min(UNIT_PANELS, num_panels - panel);
    const int64_t column = panel * COLUMNS, columns = std::min(panels * COLUMNS, out - column);
    const int8_t *q = static_cast<const int8_t *>(op.at[0]), *weights = static_cast<const int8_t *>(op.at[2]);
    const int8_t *next = next_panels(weights, panel_units, UNIT_PANELS * COLUMNS * depth);
    const float *row_scales = static_cast<const float *>(op.at[1]);
    const float *column_scales = static_cast<const float *>(op.at[3]) + column;
    const T *bias = op.at[4] ? static_cast<const T *>(op.at[4]) + column : nullptr;
    const int64_t begin = unit / panel_units * UNIT_ROWS, end = std::min(rows, begin + UNIT_ROWS);
    alignas(64) Sums sums;
    for (int64_t block = begin; block < end; block += BLOCK_ROWS) {
        const int64_t count = std::min(BLOCK_ROWS, end - block);
        (block == begin ? multiply<true> : multiply<false>)(
            count, q + block * depth, weights + column * depth, next, panels, depth, sums);
        for (int64_t r = 0; r < count; r++) {
            const float scale = row_scales[block + r];
            T *y = static_cast<T *>(op.at[5]) + (block + r) * out + column;
            for (int64_t n = 0; n < columns; n++)
                store(static_cast<float>(sums[r][n]) * scale * column_scales[n] + (bias ? widen(bias[n]) : 0.0f), y[n]);
        }
    }
    return 0;
}

} // namespace packed_linear_int8

EXPORT(quantize_rows, packed_linear_int8::quantize<T>)
EXPORT(packed_linear_int8, packed_linear_int8::kernel<T>)
