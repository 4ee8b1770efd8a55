// A unit is some rows, each read once for its gate and once for the sum. See reference.py.
#include "../lanes.h"

namespace gated_sum {

constexpr int64_t UNIT_ROWS = 4;

// at: y, x [rows, width], gate [width], delta [rows, width]; size: width.
template <typename T> static int64_t kernel(const Op &op, int64_t unit) {
    const int64_t rows = *op.count, width = op.size[0], whole = width / LANES * LANES;
    if (unit < 0)
        return ceil_div(rows, UNIT_ROWS);
    const T *gate = static_cast<const T *>(op.at[2]);
    for (int64_t row = unit * UNIT_ROWS; row < std::min(rows, (unit + 1) * UNIT_ROWS); row++) {
        T *y = static_cast<T *>(op.at[0]) + row * width;
        const T *x = static_cast<const T *>(op.at[1]) + row * width;
        const T *delta = static_cast<const T *>(op.at[3]) + row * width;
        Lanes products = {};
        for (int64_t i = 0; i < whole; i += LANES)
            products += load_lanes(x + i) * load_lanes(gate + i);
        float opening = sum_of(products);
        for (int64_t i = whole; i < width; i++)
            opening += widen(x[i]) * widen(gate[i]);
        const float share = 1.0f / (1.0f + power_of_two(all_lanes(opening * -LOG2_E))[0]);
        for (int64_t i = 0; i < whole; i += LANES)
            store_lanes(load_lanes(y + i) + share * load_lanes(delta + i), y + i);
        for (int64_t i = whole; i < width; i++)
            store(widen(y[i]) + share * widen(delta[i]), y[i]);
    }
    return 0;
}

} // namespace gated_sum

EXPORT(add_gated, gated_sum::kernel<T>)
