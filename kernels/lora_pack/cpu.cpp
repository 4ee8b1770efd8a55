// Converts an adapter's matrices from their file's layout and dtype to those of the products, in one pass over each. A
// unit is a matrix. See reference.py.
#include "../panels.h"

namespace lora_pack {

struct float16 {
    uint16_t bits;
};

static inline float widen(float16 x) {
    const uint32_t magnitude = (x.bits & 0x7fffu) << 13, sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
    float wide;
    std::memcpy(&wide, &magnitude, sizeof wide);
    wide *= 0x1p112f; // rebias the exponent; exact, even for subnormals
    uint32_t bits;
    std::memcpy(&bits, &wide, sizeof bits);
    if (magnitude >= 0x7c00u << 13)
        bits |= 0x7f800000u; // infinity and NaN
    bits |= sign;
    std::memcpy(&wide, &bits, sizeof wide);
    return wide;
}

using ::widen;

// Mirrors `Matrix` of packing.py.
struct Matrix {
    const void *from;
    int64_t dtype, rows, columns, form;
    const float *gain;
    int64_t to;
    double factor;
};

template <typename From, typename T> static void pack(const Matrix &matrix, T *to) {
    const From *from = static_cast<const From *>(matrix.from);
    const int64_t rows = matrix.rows, columns = matrix.columns;
    if (matrix.form == 0) {
        for (int64_t i = 0; i < rows * columns; i++)
            store(widen(from[i]), to[i]);
        return;
    }
    if (matrix.form == 1) {
        for (int64_t row = 0; row < rows; row++)
            for (int64_t column = 0; column < columns; column++)
                store(widen(from[row * columns + column]), to[column * rows + row]);
        return;
    }
    constexpr int64_t step = Depth<T>::step;
    const int64_t depth = ceil_div(columns, step) * step;
    const float factor = static_cast<float>(matrix.factor);
    // Columns past the last, and the padding that makes an odd depth even, are zero.
    if (rows % COLUMNS)
        std::fill_n(to + rows / COLUMNS * COLUMNS * depth, COLUMNS * depth, T{});
    for (int64_t row = 0; row < rows; row++, from += columns) {
        const float gain = matrix.gain ? matrix.gain[row] : 1.0f;
        T *panel = to + row / COLUMNS * COLUMNS * depth;
        for (int64_t k = 0; k < columns; k++)
            store(widen(from[k]) * factor * gain, panel[in_panel<T>(k, row % COLUMNS)]);
        if (columns < depth)
            panel[in_panel<T>(columns, row % COLUMNS)] = T{};
    }
}

// at: matrices, flat.
template <typename T> static int64_t kernel(const Op &op, int64_t unit) {
    if (unit < 0)
        return *op.count;
    const Matrix &matrix = static_cast<const Matrix *>(op.at[0])[unit];
    T *to = static_cast<T *>(op.at[1]) + matrix.to;
    if (matrix.dtype == 0)
        pack<float>(matrix, to);
    else if (matrix.dtype == 1)
        pack<float16>(matrix, to);
    else
        pack<bfloat16>(matrix, to);
    return 0;
}

} // namespace lora_pack

EXPORT(lora_pack, lora_pack::kernel<T>)
