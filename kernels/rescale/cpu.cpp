// Each element is read and written once. See reference.py.
#include "../lanes.h"

namespace rescale {

constexpr int64_t UNIT_WIDTH = 4096;

INLINE Lanes rescaled(Lanes x, float factor, float softcap) {
    return softcap == 0.0f ? x * factor : capped(x, factor, softcap);
}

// at: x [rows, width]; size: width; number: factor, softcap or 0.
template <typename T> static int64_t kernel(const Op &op, int64_t unit) {
    const int64_t width = op.size[0], parts = ceil_div(width, UNIT_WIDTH);
    if (unit < 0)
        return *op.count * parts;
    const int64_t begin = unit % parts * UNIT_WIDTH, end = std::min(width, begin + UNIT_WIDTH);
    const float factor = static_cast<float>(op.number[0]), softcap = static_cast<float>(op.number[1]);
    T *x = static_cast<T *>(op.at[0]) + unit / parts * width;
    int64_t i = begin;
    for (; i + LANES <= end; i += LANES)
        store_lanes(rescaled(load_lanes(x + i), factor, softcap), x + i);
    if (i < end) {
        T rest[LANES] = {};
        std::memcpy(rest, x + i, (end - i) * sizeof(T));
        store_lanes(rescaled(load_lanes(rest), factor, softcap), rest);
        std::memcpy(x + i, rest, (end - i) * sizeof(T));
    }
    return 0;
}

} // namespace rescale

EXPORT(rescale, rescale::kernel<T>)
