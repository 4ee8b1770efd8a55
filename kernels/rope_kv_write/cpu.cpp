// Token by token: norms and rotates its heads and stores them, keys and values in the cache layout that
// paged_attention/cpu.cpp describes. See reference.py.
#include "../adapters.h"

namespace rope_kv_write {

constexpr int64_t UNIT_TOKENS = 8;

// Norms (if `norm` is not null) and rotates one head of `x` into `out`, in float32 rounded to T. Halves that are not
// whole lanes end in a scalar loop.
template <typename T, typename W>
static void rotate_head(const T *x, const W *norm, float eps, const T *cos, const T *sin, int64_t dim,
                        int64_t rotary_dim, float *wide,
                        T *out) {
#pragma omp simd
    for (int64_t i = 0; i < dim; i++)
        wide[i] = widen(x[i]);
    if (norm) {
        float squares = 0;
#pragma omp simd reduction(+ : squares)
        for (int64_t i = 0; i < dim; i++)
            squares += wide[i] * wide[i];
        const float scale = 1.0f / std::sqrt(squares / static_cast<float>(dim) + eps);
#pragma omp simd
        for (int64_t i = 0; i < dim; i++)
            wide[i] = rounded<T>(rounded<W>(wide[i] * scale) * widen(norm[i]));
    }
    const int64_t half = rotary_dim / 2;
    int64_t i = 0;
    for (; i + LANES <= half; i += LANES) {
        const Lanes first = load_lanes(wide + i), second = load_lanes(wide + half + i);
        store_lanes(rounded_lanes<T>(first * load_lanes(cos + i)) - rounded_lanes<T>(second * load_lanes(sin + i)),
                    out + i);
        store_lanes(rounded_lanes<T>(second * load_lanes(cos + half + i)) +
                        rounded_lanes<T>(first * load_lanes(sin + half + i)),
                    out + half + i);
    }
    for (; i < half; i++) {
        store(rounded<T>(wide[i] * widen(cos[i])) - rounded<T>(wide[i + half] * widen(sin[i])), out[i]);
        store(rounded<T>(wide[i + half] * widen(cos[i + half])) + rounded<T>(wide[i] * widen(sin[i + half])),
              out[i + half]);
    }
    for (i = rotary_dim; i < dim; i++)
        store(wide[i], out[i]);
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
    const int64_t tokens = *op.count;
    if (unit < 0)
        return ceil_div(tokens, UNIT_TOKENS);
    const int64_t heads = op.size[0], kv_heads = op.size[1], dim = op.size[2], block_tokens = op.size[3];
    const int64_t rotary_dim = op.size[6];
    const W *q_norm = static_cast<const W *>(op.at[2]), *k_norm = static_cast<const W *>(op.at[3]);
    const float eps = static_cast<float>(op.number[0]);
    thread_local std::vector<float> wide;
    thread_local std::vector<T> key;
    wide.resize(dim), key.resize(dim);
    OwnNorms<W> own{static_cast<const Segment *>(op.at[8]),
                    op.at[9] ? *static_cast<const int64_t *>(op.at[9]) : 0, op.size[7], dim};
    for (int64_t t = unit * UNIT_TOKENS; t < std::min(tokens, (unit + 1) * UNIT_TOKENS); t++) {
        const T *x = static_cast<const T *>(op.at[0]) + t * (heads + 2 * kv_heads) * dim;
        const T *cos = static_cast<const T *>(op.at[1]) + t * 2 * dim;
        const T *sin = cos + dim;
        T *q = static_cast<T *>(op.at[7]) + t * heads * dim;
        const W *own_q_norm = own.of(t, 0, q_norm), *own_k_norm = own.of(t, 1, k_norm);
        for (int64_t head = 0; head < heads; head++, x += dim)
            rotate_head(x, own_q_norm, eps, cos, sin, dim, rotary_dim, wide.data(), q + head * dim);
        const int64_t slot = static_cast<const int64_t *>(op.at[6])[t];
        const int64_t block = slot / block_tokens, offset = slot % block_tokens, column = offset % COLUMNS;
        const int64_t panels_at = block * op.size[4] + (offset - column) * dim;
        T *keys = static_cast<T *>(op.at[4]) + panels_at, *values = static_cast<T *>(op.at[5]) + panels_at;
        for (int64_t head = 0; head < kv_heads; head++, x += dim) {
            rotate_head(x, own_k_norm, eps, cos, sin, dim, rotary_dim, wide.data(), key.data());
            for (int64_t i = 0; i < dim; i++)
                keys[head * block_tokens * dim + in_panel<T>(i, column)] = key[i];
        }
        for (int64_t head = 0; head < kv_heads; head++, x += dim)
            for (int64_t i = 0; i < dim; i++)
                values[head * block_tokens * dim + i / COLUMNS * COLUMNS * COLUMNS +
                       in_panel<T>(column, i % COLUMNS)] = x[i];
    }
    return 0;
}

template <typename T> static int64_t kernel(const Op &op, int64_t unit) {
    return op.size[5] ? rotate<T, float>(op, unit) : rotate<T, T>(op, unit);
}

} // namespace rope_kv_write

extern "C" {
int64_t rope_kv_write_f32(const Op &op, int64_t unit) { return rope_kv_write::kernel<float>(op, unit); }
int64_t rope_kv_write_bf16(const Op &op, int64_t unit) { return rope_kv_write::kernel<bfloat16>(op, unit); }
}
