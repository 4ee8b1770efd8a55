// Logits from a vocabulary in bytes, and its rows as embeddings; quantizing it, and its layout. See reference.py.
#include "../levels.h"

#include <limits>

namespace packed_logits_int8 {

constexpr int64_t STEP = levels::STEP<levels::Levels::INT8>, UNIT_ROWS = 4;

// The bit where input k of a word begins.
INLINE int64_t place(int64_t k) { return (k / 2 + k % 2 * 2) * 8; }

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
            const int8_t level = static_cast<int8_t>(words[k / STEP * COLUMNS] >> place(k % STEP));
            store(level * scales[k / group * COLUMNS], out[k]);
        }
    }
    return 0;
}

// Quantizes a group of `count` inputs of one output to levels[count]; returns the scale.
template <typename T> static inline float round_group(const T *weight, int64_t count, int8_t *levels) {
    constexpr float HIGHEST = 127.0f;
    float top = 0.0f, health = 0.0f;
#pragma omp simd reduction(max : top) reduction(+ : health)
    for (int64_t k = 0; k < count; k++) {
        const float size = std::fabs(widen(weight[k]));
        top = size > top ? size : top;
        health += size * 0.0f;
    }
    if (!(health == 0.0f)) {
        std::memset(levels, 0, count);
        return std::numeric_limits<float>::quiet_NaN();
    }
    const float scale = top / HIGHEST, step = scale == 0.0f ? 1.0f : scale;
#pragma omp simd
    for (int64_t k = 0; k < count; k++) {
        const float level = std::nearbyint(widen(weight[k]) / step);
        levels[k] = static_cast<int8_t>(level < -HIGHEST ? -HIGHEST : level > HIGHEST ? HIGHEST : level);
    }
    return scale;
}

// at: weight [out, in], panels, scales; size: in, group. count: outputs; a unit is a panel.
template <typename T> static int64_t lay_out(const Op &op, int64_t unit) {
    const int64_t out = *op.count, depth = op.size[0], group = op.size[1], num_groups = depth / group;
    if (unit < 0)
        return ceil_div(out, COLUMNS);
    const T *weight = static_cast<const T *>(op.at[0]) + unit * COLUMNS * depth;
    uint32_t *words = static_cast<uint32_t *>(op.at[1]) + unit * COLUMNS * (depth / STEP);
    float *scales = static_cast<float *>(op.at[2]) + unit * COLUMNS * num_groups;
    std::memset(words, 0, COLUMNS * (depth / STEP) * sizeof *words);
    std::memset(scales, 0, COLUMNS * num_groups * sizeof *scales);
    thread_local std::vector<int8_t> levels;
    levels.resize(std::max<size_t>(levels.size(), group));
    for (int64_t n = 0; n < std::min(COLUMNS, out - unit * COLUMNS); n++)
        for (int64_t g = 0; g < num_groups; g++) {
            scales[g * COLUMNS + n] = round_group(weight + n * depth + g * group, group, levels.data());
            for (int64_t k = 0; k < group; k++)
                words[(g * group + k) / STEP * COLUMNS + n] |=
                    static_cast<uint32_t>(static_cast<uint8_t>(levels[k])) << place(k % STEP);
        }
    return 0;
}

} // namespace packed_logits_int8

using levels::Levels;

extern "C" {
int64_t packed_logits_int8_f32(const Op &op, int64_t unit) {
    return levels::kernel<Levels::INT8, float, float>(op, unit);
}
int64_t packed_logits_int8_bf16(const Op &op, int64_t unit) {
    return levels::kernel<Levels::INT8, bfloat16, float>(op, unit);
}
int64_t embed_int8_f32(const Op &op, int64_t unit) { return packed_logits_int8::embed<float>(op, unit); }
int64_t embed_int8_bf16(const Op &op, int64_t unit) { return packed_logits_int8::embed<bfloat16>(op, unit); }
int64_t lay_out_logits_int8_f32(const Op &op, int64_t unit) { return packed_logits_int8::lay_out<float>(op, unit); }
int64_t lay_out_logits_int8_bf16(const Op &op, int64_t unit) {
    return packed_logits_int8::lay_out<bfloat16>(op, unit);
}
}
