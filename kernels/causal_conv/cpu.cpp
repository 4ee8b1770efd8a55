// A unit runs some channels through all tokens of a row, keeping their last inputs in registers or the nearest cache;
// each element is read and written once. See reference.py.
#include "../lanes.h"

namespace causal_conv {

// Channels per unit: two cache lines of bfloat16.
constexpr int64_t CHANNELS = 64, MOST_WIDTH = 8;

INLINE Lanes silu(Lanes x) { return x / (1.0f + power_of_two(x * -LOG2_E)); }

template <typename T> INLINE Lanes column(const T *from, int64_t width, int64_t j) {
    float lanes[LANES];
    for (int64_t i = 0; i < LANES; i++)
        lanes[i] = widen(from[i * width + j]);
    return load_lanes(lanes);
}

// at: x, state or null, weight, bias or null, y. count: rows; size: tokens per row, channels (a multiple of 16), width
// (at most 8), token stride of x, whether SiLU follows.
template <typename T> static int64_t kernel(const Op &op, int64_t unit) {
    const int64_t num_tokens = op.size[0], channels = op.size[1], width = op.size[2];
    const bool is_activated = op.size[4] != 0;
    const int64_t parts = ceil_div(channels, CHANNELS);
    if (unit < 0)
        return *op.count * parts;
    const int64_t row = unit / parts, first = unit % parts * CHANNELS;
    const int64_t chunks = std::min(CHANNELS, channels - first) / LANES;
    const T *x = static_cast<const T *>(op.at[0]) + row * num_tokens * op.size[3] + first;
    T *state = op.at[1] ? static_cast<T *>(op.at[1]) + (row * channels + first) * width : nullptr;
    const T *weight = static_cast<const T *>(op.at[2]) + first * width;
    const T *bias = op.at[3] ? static_cast<const T *>(op.at[3]) + first : nullptr;
    T *y = static_cast<T *>(op.at[4]) + row * num_tokens * channels + first;
    Lanes weights[CHANNELS / LANES][MOST_WIDTH], last[CHANNELS / LANES][MOST_WIDTH], biases[CHANNELS / LANES];
    for (int64_t c = 0; c < chunks; c++) {
        biases[c] = bias ? load_lanes(bias + c * LANES) : Lanes{};
        for (int64_t j = 0; j < width; j++) {
            weights[c][j] = column(weight + c * LANES * width, width, j);
            last[c][j] = state ? column(state + c * LANES * width, width, j) : Lanes{};
        }
    }
    for (int64_t token = 0; token < num_tokens; token++, x += op.size[3], y += channels)
        for (int64_t c = 0; c < chunks; c++) {
            Lanes sum = biases[c];
            for (int64_t j = 0; j + 1 < width; j++) {
                last[c][j] = last[c][j + 1];
                sum += last[c][j] * weights[c][j];
            }
            last[c][width - 1] = load_lanes(x + c * LANES);
            sum += last[c][width - 1] * weights[c][width - 1];
            store_lanes(is_activated ? silu(sum) : sum, y + c * LANES);
        }
    for (int64_t i = 0; state && i < chunks * LANES; i++)
        for (int64_t j = 0; j < width; j++)
            store(last[i / LANES][j][i % LANES], state[i * width + j]);
    return 0;
}

} // namespace causal_conv

EXPORT(causal_conv, causal_conv::kernel<T>)
