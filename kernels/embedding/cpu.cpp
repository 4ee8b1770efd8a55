// Row lookup, from a matrix in panels (the embedding, which tied models share with the output matrix) or a plain one.
#include "../panels.h"

namespace embedding {

constexpr int64_t UNIT_ROWS = 4;

// at: panels of [vocab, width], ids [rows], out [rows, width]; size: width.
template <typename T> static int64_t embed(const Op &op, int64_t unit) {
    const int64_t rows = *op.count, width = op.size[0];
    if (unit < 0)
        return ceil_div(rows, UNIT_ROWS);
    for (int64_t row = unit * UNIT_ROWS; row < std::min(rows, (unit + 1) * UNIT_ROWS); row++) {
        const int64_t id = static_cast<const int64_t *>(op.at[1])[row];
        const T *panel = static_cast<const T *>(op.at[0]) + id / COLUMNS * COLUMNS * width;
        T *out = static_cast<T *>(op.at[2]) + row * width;
        for (int64_t i = 0; i < width; i++)
            out[i] = panel[in_panel<T>(i, id % COLUMNS)];
    }
    return 0;
}

// at: x [any, width], indices [rows], out [rows, width]; size: width.
template <typename T> static int64_t take(const Op &op, int64_t unit) {
    const int64_t rows = *op.count, width = op.size[0];
    if (unit < 0)
        return ceil_div(rows, UNIT_ROWS);
    for (int64_t row = unit * UNIT_ROWS; row < std::min(rows, (unit + 1) * UNIT_ROWS); row++)
        std::memcpy(static_cast<T *>(op.at[2]) + row * width,
                    static_cast<const T *>(op.at[0]) + static_cast<const int64_t *>(op.at[1])[row] * width,
                    width * sizeof(T));
    return 0;
}

} // namespace embedding

EXPORT(embed, embedding::embed<T>)
EXPORT(take_rows, embedding::take<T>)
