// y = x W^T + b, W in panels. A unit is a few panels and some rows: with few rows the weights stream through once; with
// many, the panels stay in the nearest cache while the rows go by. See reference.py.
#include "../panels.h"

namespace packed_linear {

#if defined(__AVX512F__) && !defined(__AMX_BF16__)
constexpr int64_t UNIT_PANELS = TILE_PANELS; // while it is multiplied, the thread's next unit is prefetched
#else
constexpr int64_t UNIT_PANELS = 4;
#endif
constexpr int64_t UNIT_ROWS = 512, BLOCK_ROWS = 32;

// at: x [rows, in], panels, bias [out] or null, y [rows, out]; size: in, out.
template <typename T, typename Out> static int64_t kernel(const Op &op, int64_t unit) {
    const int64_t rows = *op.count, depth = op.size[0], out = op.size[1];
    const int64_t num_panels = ceil_div(out, COLUMNS), panel_units = ceil_div(num_panels, UNIT_PANELS);
    if (unit < 0)
        return panel_units * ceil_div(rows, UNIT_ROWS);
    const T *x = static_cast<const T *>(op.at[0]), *bias = static_cast<const T *>(op.at[2]);
    Out *y = static_cast<Out *>(op.at[3]);
    const int64_t panel = unit % panel_units * UNIT_PANELS, panels = std::min(UNIT_PANELS, num_panels - panel);
    const int64_t panel_size = depth * COLUMNS, column = panel * COLUMNS;
    const int64_t columns = std::min(panels * COLUMNS, out - column);
    const T *all_weights = static_cast<const T *>(op.at[1]), *weights = all_weights + panel * panel_size;
    const T *next = next_panels(all_weights, panel_units, UNIT_PANELS * panel_size);
    const int64_t begin = unit / panel_units * UNIT_ROWS, end = std::min(rows, begin + UNIT_ROWS);
    alignas(64) float sums[BLOCK_ROWS][UNIT_PANELS * COLUMNS];
    for (int64_t block = begin; block < end; block += BLOCK_ROWS) {
        const int64_t count = std::min(BLOCK_ROWS, end - block);
        // The first block brings the panels into the cache.
        (block == begin ? multiply<false, true, T, T> : multiply<false, false, T, T>)(
            count, x + block * depth, depth, Panels<T>{&weights, 1, depth, panel_size, next ? &next : nullptr},
            panels, sums[0], UNIT_PANELS * COLUMNS);
        for (int64_t r = 0; r < count; r++) {
            Out *row = y + (block + r) * out + column;
            if (bias)
                for (int64_t n = 0; n < columns; n++)
                    sums[r][n] += widen(bias[column + n]);
            int64_t n = 0;
            for (; n + LANES <= columns; n += LANES)
                store_lanes(load_lanes(sums[r] + n), row + n);
            for (; n < columns; n++)
                store(sums[r][n], row[n]);
        }
    }
    return 0;
}

} // namespace packed_linear

EXPORT(packed_linear, packed_linear::kernel<T, T>)
EXPORT(packed_logits, packed_linear::kernel<T, float>)
