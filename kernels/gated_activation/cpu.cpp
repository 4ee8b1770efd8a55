// Each element is read once, each result written once. See reference.py.
#include "../lanes.h"

namespace gated_activation {

constexpr int64_t UNIT_WIDTH = 1024;

enum class Activation { SILU, GELU, CLAMPED };

template <typename T, Activation ACTIVATION> INLINE Lanes gate(Lanes gate, Lanes up) {
    if constexpr (ACTIVATION == Activation::CLAMPED) {
        constexpr float LIMIT = 7.0f;
        gate = gate > LIMIT ? all_lanes(LIMIT) : gate;
        up = up > LIMIT ? all_lanes(LIMIT) : up;
        up = (up < -LIMIT ? all_lanes(-LIMIT) : up) + 1.0f;
    }
    Lanes steep = gate;
    if constexpr (ACTIVATION == Activation::CLAMPED)
        steep = 1.702f * gate;
    if constexpr (ACTIVATION == Activation::GELU)
        steep = 1.5957691216057308f * (gate + 0.044715f * gate * gate * gate);
    return rounded_lanes<T>(gate / (1.0f + power_of_two(steep * -LOG2_E))) * up;
}

// at: gate_up [rows, 2 width], out [rows, width]; size: width.
template <typename T, Activation ACTIVATION> static int64_t kernel(const Op &op, int64_t unit) {
    const int64_t width = op.size[0], parts = ceil_div(width, UNIT_WIDTH);
    if (unit < 0)
        return *op.count * parts;
    const int64_t row = unit / parts, begin = unit % parts * UNIT_WIDTH, end = std::min(width, begin + UNIT_WIDTH);
    const T *gates = static_cast<const T *>(op.at[0]) + 2 * row * width, *up = gates + width;
    T *out = static_cast<T *>(op.at[1]) + row * width;
    int64_t i = begin;
    for (; i + LANES <= end; i += LANES)
        store_lanes(gate<T, ACTIVATION>(load_lanes(gates + i), load_lanes(up + i)), out + i);
    if (i < end) {
        T rest[3][LANES] = {};
        const int64_t num_bytes = (end - i) * sizeof(T);
        std::memcpy(rest[0], gates + i, num_bytes);
        std::memcpy(rest[1], up + i, num_bytes);
        store_lanes(gate<T, ACTIVATION>(load_lanes(rest[0]), load_lanes(rest[1])), rest[2]);
        std::memcpy(out + i, rest[2], num_bytes);
    }
    return 0;
}

} // namespace gated_activation

using gated_activation::Activation;

EXPORT(silu_and_multiply, gated_activation::kernel<T, Activation::SILU>)
EXPORT(gelu_and_multiply, gated_activation::kernel<T, Activation::GELU>)
EXPORT(clamped_and_multiply, gated_activation::kernel<T, Activation::CLAMPED>)
