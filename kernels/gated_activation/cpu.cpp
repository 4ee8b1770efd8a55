// Each number read once, the product written once. See reference.py.
#include "../panels.h"

namespace gated_activation {

constexpr int64_t UNIT_WIDTH = 1024;

// at: gate_up [rows, 2 width], out [rows, width]; size: width.
template <typename T> static int64_t kernel(const Op &op, int64_t unit) {
    const int64_t width = op.size[0], parts = ceil_div(width, UNIT_WIDTH);
    if (unit < 0)
        return *op.count * parts;
    const int64_t row = unit / parts, begin = unit % parts * UNIT_WIDTH, end = std::min(width, begin + UNIT_WIDTH);
    const T *gate = static_cast<const T *>(op.at[0]) + 2 * row * width, *up = gate + width;
    T *out = static_cast<T *>(op.at[1]) + row * width;
    float gated[UNIT_WIDTH];
#pragma omp simd
    for (int64_t i = begin; i < end; i++) {
        const float a = widen(gate[i]);
        gated[i - begin] = a / (1.0f + exponential(-a));
    }
    int64_t i = begin;
    for (; i + LANES <= end; i += LANES)
        store_lanes(rounded_lanes<T>(load_lanes(gated + i - begin)) * load_lanes(up + i), out + i);
    for (; i < end; i++)
        store(rounded<T>(gated[i - begin]) * widen(up[i]), out[i]);
    return 0;
}

} // namespace gated_activation

extern "C" {
int64_t silu_and_multiply_f32(const Op &op, int64_t unit) { return gated_activation::kernel<float>(op, unit); }
int64_t silu_and_multiply_bf16(const Op &op, int64_t unit) { return gated_activation::kernel<bfloat16>(op, unit); }
}
