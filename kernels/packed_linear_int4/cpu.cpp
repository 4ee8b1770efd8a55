// Products with 4-bit weights, as integers or e2m1; quantizing to integers, and their layout. See reference.py.
#include "../levels.h"

#include <limits>

namespace packed_linear_int4 {

constexpr int64_t STEP = levels::STEP<levels::Levels::INT4>;

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

using levels::Levels;

extern "C" {
int64_t packed_linear_int4_f32(const Op &op, int64_t unit) {
    return levels::kernel<Levels::INT4, float, float>(op, unit);
}
int64_t packed_linear_int4_bf16(const Op &op, int64_t unit) {
    return levels::kernel<Levels::INT4, bfloat16, bfloat16>(op, unit);
}
int64_t packed_linear_mxfp4_f32(const Op &op, int64_t unit) {
    return levels::kernel<Levels::E2M1, float, float>(op, unit);
}
int64_t packed_linear_mxfp4_bf16(const Op &op, int64_t unit) {
    return levels::kernel<Levels::E2M1, bfloat16, bfloat16>(op, unit);
}
int64_t lay_out_int4_f32(const Op &op, int64_t unit) { return packed_linear_int4::lay_out<float>(op, unit); }
int64_t lay_out_int4_bf16(const Op &op, int64_t unit) { return packed_linear_int4::lay_out<bfloat16>(op, unit); }
}
