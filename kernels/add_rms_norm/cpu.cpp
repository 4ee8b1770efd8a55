// Row by row: reads x and delta once, writes x and h once. See reference.py.
#include "../lanes.h"

namespace add_rms_norm {

constexpr int64_t UNIT_ROWS = 4;

// at: x [rows, width], delta as x or null, weight [width] or null for the sum alone, h as x; size: width, whether the
// weight is float32, row stride of x and h in elements; number: eps.
template <typename T, typename W> static int64_t norm(const Op &op, int64_t unit) {
    const int64_t rows = *op.count, width = op.size[0], stride = op.size[2];
    if (unit < 0)
        return ceil_div(rows, UNIT_ROWS);
    const W *weight = static_cast<const W *>(op.at[2]);
    for (int64_t row = unit * UNIT_ROWS; row < std::min(rows, (unit + 1) * UNIT_ROWS); row++) {
        T *x = static_cast<T *>(op.at[0]) + row * stride, *h = static_cast<T *>(op.at[3]) + row * stride;
        const T *delta = op.at[1] ? static_cast<const T *>(op.at[1]) + row * stride : nullptr;
        Lanes lane_squares = {};
        int64_t i = 0;
        for (; i + LANES <= width; i += LANES) {
            Lanes lanes = load_lanes(x + i);
            if (delta) {
                lanes = rounded_lanes<T>(lanes + load_lanes(delta + i));
                store_lanes(lanes, x + i);
            }
            lane_squares += lanes * lanes;
        }
        float squares = sum_of(lane_squares);
        for (; i < width; i++) {
            if (delta)
                store(widen(x[i]) + widen(delta[i]), x[i]);
            squares += widen(x[i]) * widen(x[i]);
        }
        if (!weight)
            continue;
        const float scale = 1.0f / std::sqrt(squares / static_cast<float>(width) + static_cast<float>(op.number[0]));
        for (i = 0; i + LANES <= width; i += LANES)
            store_lanes(rounded_lanes<W>(load_lanes(x + i) * scale) * load_lanes(weight + i), h + i);
        for (; i < width; i++)
            store(rounded<W>(widen(x[i]) * scale) * widen(weight[i]), h[i]);
    }
    return 0;
}

template <typename T> static int64_t kernel(const Op &op, int64_t unit) {
    return op.size[1] ? norm<T, float>(op, unit) : norm<T, T>(op, unit);
}

} // namespace add_rms_norm

EXPORT(add_rms_norm, add_rms_norm::kernel<T>)
