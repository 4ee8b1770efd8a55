// Logits from a vocabulary in bytes, and its rows as embeddings; quantizing it, and its layout. See reference.py.
#include "../levels.h"

using levels::Levels;

namespace packed_logits_int8 {

constexpr int64_t STEP = levels::STEP<Levels::INT8>, UNIT_ROWS = 4;

// at: panels, scales, ids [rows], out [rows, width]; size: width, group.
template <typename T> static int64_t embed(const Op &op, int64_t unit) {
    const int64_t rows = *op.count, width = op.size[0], group = op.size[1];
    if (unit < 0)
        return ceil_div(rows, UNIT_ROWS);
    for (int64_t row = unit * UNIT_ROWS; row < std::min(rows, (unit + 1) * UNIT_ROWS); row++) {
        const int64_t id = static_cast<const int64_t *>(op.at[2])[row], panel = id / COLUMNS, column = id % COLUMNS;
        const uint32_t *words = static_cast<const uint32_t *>(op.at[0]) + panel * COLUMNS * (width / STEP) + column;
        const float *scales = static_cast<const float *>(op.at[1]) + panel * COLUMNS * (width / group) + column;
        T *out = static_cast<T *>(op.at[3]) + row * width;
        for (int64_t k = 0; k < width; k++) {
            const int8_t level = static_cast<int8_t>(words[k / STEP * COLUMNS] >> levels::place<Levels::INT8>(k % STEP));
            store(level * scales[k / group * COLUMNS], out[k]);
        }
    }
    return 0;
}

// Quantizes a group of `count` inputs of one output to levels[count], as two's complement, and its scale.
template <typename T>
static inline void round_group(const T *weight, int64_t count, uint8_t *levels, float &scale, uint8_t &) {
    constexpr float HIGHEST = 127.0f;
    float top = 0.0f;
#pragma omp simd reduction(max : top)
    for (int64_t k = 0; k < count; k++) {
        const float size = std::fabs(widen(weight[k]));
        top = size > top ? size : top;
    }
    scale = top / HIGHEST;
    const float step = scale == 0.0f ? 1.0f : scale;
#pragma omp simd
    for (int64_t k = 0; k < count; k++) {
        const float level = std::nearbyint(widen(weight[k]) / step);
        levels[k] = static_cast<uint8_t>(
            static_cast<int32_t>(level < -HIGHEST ? -HIGHEST : level > HIGHEST ? HIGHEST : level));
    }
}

} // namespace packed_logits_int8

EXPORT(packed_logits_int8, levels::kernel<Levels::INT8, T, float>)
EXPORT(embed_int8, packed_logits_int8::embed<T>)
EXPORT(lay_out_logits_int8, levels::lay_out<Levels::INT8, T, packed_logits_int8::round_group<T>>)
