// Products with 4-bit weights, as integers or e2m1; quantizing to integers, and their layout. See reference.py.
#include "../levels.h"

using levels::Levels;

namespace packed_linear_int4 {

// Quantizes a group of `count` inputs of one output to levels[count], scale and zero point.
template <typename T>
static inline void round_group(const T *weight, int64_t count, uint8_t *levels, float &scale, uint8_t &zero) {
    constexpr float HIGHEST = 15.0f;
    float low = 0.0f, high = 0.0f;
#pragma omp simd reduction(min : low) reduction(max : high)
    for (int64_t k = 0; k < count; k++) {
        const float w = widen(weight[k]);
        low = w < low ? w : low;
        high = w > high ? w : high;
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

} // namespace packed_linear_int4

EXPORT(packed_linear_int4, levels::kernel<Levels::INT4, T, T>)
EXPORT(packed_linear_mxfp4, levels::kernel<Levels::E2M1, T, T>)
EXPORT(lay_out_int4, levels::lay_out<Levels::INT4, T, packed_linear_int4::round_group<T>>)
