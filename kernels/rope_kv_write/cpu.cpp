// Norms and rotates the heads of tokens and stores them, keys and values in the cache layout that
// paged_attention/cpu.cpp describes. See reference.py.
#include "../adapters.h"

namespace rope_kv_write {

// Threads that write to the same panel slow each other down: a unit is a whole one, unless tokens are few.
constexpr int64_t UNIT_TOKENS = COLUMNS, FEW_TOKENS = 128, UNIT_FEW_TOKENS = 4;

// Norms a head, whose dim is a multiple of 16, in float32; rounded to W before its product with the norm, then to T.
template <typename T, typename W>
static void norm_head(const T *x, const W *norm, float eps, int64_t dim, T *out) {
    Lanes squares = {};
    for (int64_t i = 0; i < dim; i += LANES)
        squares += load_lanes(x + i) * load_lanes(x + i);
    const float scale = 1.0f / std::sqrt(sum_of(squares) / static_cast<float>(dim) + eps);
    for (int64_t i = 0; i < dim; i += LANES)
        store_lanes(rounded_lanes<W>(load_lanes(x + i) * scale) * load_lanes(norm + i), out + i);
}

// Rotates a head, in float32 rounded to T. Halves that are not whole lanes end in a scalar loop.
template <typename T>
static void rotate_head(const T *x, const T *cos, const T *sin, int64_t dim, int64_t rotary_dim, T *out) {
    const int64_t half = rotary_dim / 2;
    int64_t i = 0;
    for (; i + LANES <= half; i += LANES) {
        const Lanes first = load_lanes(x + i), second = load_lanes(x + half + i);
        store_lanes(rounded_lanes<T>(first * load_lanes(cos + i)) - rounded_lanes<T>(second * load_lanes(sin + i)),
                    out + i);
        store_lanes(rounded_lanes<T>(second * load_lanes(cos + half + i)) +
                        rounded_lanes<T>(first * load_lanes(sin + half + i)),
                    out + half + i);
    }
    for (; i < half; i++) {
        const float first = widen(x[i]), second = widen(x[half + i]);
        store(rounded<T>(first * widen(cos[i])) - rounded<T>(second * widen(sin[i])), out[i]);
        store(rounded<T>(second * widen(cos[half + i])) + rounded<T>(first * widen(sin[half + i])), out[half + i]);
    }
    std::copy(x + rotary_dim, x + dim, out + rotary_dim);
}

// Stores keys [count, dim] as columns of a panel: its rows are 16 words, each of one step of the depth.
template <typename T> static void store_keys(const T *keys, int64_t count, int64_t dim, T *panel) {
    constexpr int64_t step = Depth<T>::step;
    for (int64_t k = 0; k < dim; k += step, panel += COLUMNS * step)
        for (int64_t n = 0; n < count; n++)
            std::memcpy(panel + n * step, keys + n * dim + k, step * sizeof(T));
}

// Stores values [count, dim], `stride` apart, as rows of panels from `row` on; each panel has 16 of dim columns.
template <typename T>
static void store_values(const T *x, int64_t stride, int64_t count, int64_t dim, int64_t row, T *panels) {
    constexpr int64_t step = Depth<T>::step;
    for (int64_t i = 0; i < dim; i += COLUMNS, panels += COLUMNS * COLUMNS) {
        for (int64_t n = 0, rows; n < count; n += rows) {
            // All rows of one step together, if there are as many.
            rows = (row + n) % step == 0 && n + step <= count ? step : 1;
            const T *from = x + n * stride + i;
            T *to = panels + in_panel<T>(row + n, 0);
            for (int64_t c = 0; c < COLUMNS; c++)
                for (int64_t r = 0; r < rows; r++)
                    to[c * step + r] = from[r * stride + c];
        }
    }
}

// The norm weights of tokens, asked for in token order: the base's, multiplied by the gains of the token's adapter, if
// any.
template <typename W> struct OwnNorms {
    const Segment *segment;
    int64_t left, first, dim;
    std::vector<W> made[2] = {};
    const Segment *made_for[2] = {};

    const W *of(int64_t token, int64_t which, const W *base) {
        for (; left && segment->end <= token; segment++)
            left--;
        const float *gain = left && segment->start <= token ? segment->adapter[first + which].gain : nullptr;
        if (!gain)
            return base;
        if (made_for[which] != segment) {
            made[which].resize(dim), made_for[which] = segment;
            for (int64_t i = 0; i < dim; i++)
                store(widen(base[i]) * gain[i], made[which][i]);
        }
        return made[which].data();
    }
};

// at: qkv [tokens, (heads + 2 kv_heads) dim], cos_sin [tokens, 2, dim], norm of q or null, norm of k or null, keys,
// values, slots, q [tokens, heads, dim], adapter segments and their number, or null; size: heads, kv_heads, dim,
// block_tokens, block stride of the cache in elements, whether norms are float32, how many of dim rotate, index of the
// adapter's projection with the gains of the norm of q, followed by that of k; number: eps.
template <typename T, typename W> static int64_t rotate(const Op &op, int64_t unit) {
    const int64_t tokens = *op.count, unit_tokens = tokens < FEW_TOKENS ? UNIT_FEW_TOKENS : UNIT_TOKENS;
    if (unit < 0)
        return ceil_div(tokens, unit_tokens);
    const int64_t heads = op.size[0], kv_heads = op.size[1], dim = op.size[2], block_tokens = op.size[3];
    const int64_t rotary_dim = op.size[6], stride = (heads + 2 * kv_heads) * dim;
    const W *q_norm = static_cast<const W *>(op.at[2]), *k_norm = static_cast<const W *>(op.at[3]);
    const float eps = static_cast<float>(op.number[0]);
    const int64_t *slots = static_cast<const int64_t *>(op.at[6]);
    thread_local std::vector<T> normed, keys; // [dim], [kv_heads, COLUMNS, dim]
    normed.resize(dim), keys.resize(kv_heads * COLUMNS * dim);
    OwnNorms<W> own{static_cast<const Segment *>(op.at[8]),
                    op.at[9] ? *static_cast<const int64_t *>(op.at[9]) : 0, op.size[7], dim};
    const int64_t end = std::min(tokens, (unit + 1) * unit_tokens);
    for (int64_t t = unit * unit_tokens, count; t < end; t += count) {
        // As many tokens as lie side by side in a panel are stored together.
        const int64_t column = slots[t] % COLUMNS;
        for (count = 1; t + count < end && column + count < COLUMNS && slots[t + count] == slots[t] + count;)
            count++;
        const T *x = static_cast<const T *>(op.at[0]) + t * stride, *v = x + (heads + kv_heads) * dim;
        for (int64_t n = 0; n < count; n++, x += stride) {
            const T *cos = static_cast<const T *>(op.at[1]) + (t + n) * 2 * dim, *sin = cos + dim;
            T *q = static_cast<T *>(op.at[7]) + (t + n) * heads * dim;
            const W *norms[2] = {own.of(t + n, 0, q_norm), own.of(t + n, 1, k_norm)};
            for (int64_t head = 0; head < heads + kv_heads; head++) {
                const W *norm = norms[head >= heads];
                T *out = head < heads ? q + head * dim : keys.data() + ((head - heads) * COLUMNS + n) * dim;
                if (norm)
                    norm_head(x + head * dim, norm, eps, dim, normed.data());
                rotate_head(norm ? normed.data() : x + head * dim, cos, sin, dim, rotary_dim, out);
            }
        }
        const int64_t block = slots[t] / block_tokens, offset = slots[t] % block_tokens;
        const int64_t at = block * op.size[4] + (offset - column) * dim;
        for (int64_t head = 0; head < kv_heads; head++) {
            const int64_t of_head = at + head * block_tokens * dim;
            store_keys(keys.data() + head * COLUMNS * dim, count, dim,
                       static_cast<T *>(op.at[4]) + of_head + in_panel<T>(0, column));
            store_values(v + head * dim, stride, count, dim, column, static_cast<T *>(op.at[5]) + of_head);
        }
    }
    return 0;
}

template <typename T> static int64_t kernel(const Op &op, int64_t unit) {
    return op.size[5] ? rotate<T, float>(op, unit) : rotate<T, T>(op, unit);
}

} // namespace rope_kv_write

EXPORT(rope_kv_write, rope_kv_write::kernel<T>)
