// A unit runs some columns of a head's state through all tokens of a row while they stay in the nearest cache; columns
// are independent of each other. Each token reads them twice and writes them once. See reference.py.
#include "../lanes.h"

namespace gated_delta {

constexpr int64_t MOST_KEYS = 256, WIDEST = 2;
// Independent partial sums, for instruction-level parallelism; divides key_dim.
constexpr int64_t SUMS = 4;

// scale * x / sqrt(|x|^2 + eps)
template <typename T> INLINE void normed(const T *x, int64_t size, float eps, float scale, float *out) {
    Lanes squares = {};
    for (int64_t i = 0; i < size; i += LANES) {
        const Lanes lanes = load_lanes(x + i);
        squares += lanes * lanes;
    }
    const float factor = scale / std::sqrt(sum_of(squares) + eps);
    for (int64_t i = 0; i < size; i += LANES)
        store_lanes(load_lanes(x + i) * factor, out + i);
}

// Columns [column, column + WIDE * LANES) of the state of one head of one row.
template <typename T, int64_t WIDE> INLINE void columns(const Op &op, int64_t row, int64_t head, int64_t column) {
    const int64_t num_tokens = op.size[0], heads = op.size[1], key_heads = op.size[2];
    const int64_t key_dim = op.size[3], value_dim = op.size[4];
    const float eps = static_cast<float>(op.number[0]), scale = static_cast<float>(op.number[1]);
    const int64_t first = row * num_tokens, key_head = head / (heads / key_heads);
    const T *q = static_cast<const T *>(op.at[0]) + first * op.size[5] + key_head * key_dim;
    const T *k = static_cast<const T *>(op.at[1]) + first * op.size[6] + key_head * key_dim;
    const T *v = static_cast<const T *>(op.at[2]) + first * op.size[7] + head * value_dim + column;
    const float *g = static_cast<const float *>(op.at[3]) + first * heads + head;
    const float *beta = static_cast<const float *>(op.at[4]) + first * heads + head;
    float *state = static_cast<float *>(op.at[5]) + (row * heads + head) * key_dim * value_dim + column;
    T *out = static_cast<T *>(op.at[6]) + (first * heads + head) * value_dim + column;
    // Copied, because at their stride in the state they would evict each other from the cache.
    Lanes held[MOST_KEYS][WIDE];
    alignas(64) float keys[MOST_KEYS], queries[MOST_KEYS];
    for (int64_t i = 0; i < key_dim; i++)
        for (int64_t w = 0; w < WIDE; w++)
            held[i][w] = load_lanes(state + i * value_dim + w * LANES);
    for (int64_t token = 0; token < num_tokens; token++) {
        normed(k, key_dim, eps, 1.0f, keys);
        normed(q, key_dim, eps, scale, queries);
        const float decay = std::exp(*g);
        Lanes told[SUMS][WIDE] = {}, read[SUMS][WIDE] = {}, delta[WIDE];
        for (int64_t i = 0; i < key_dim; i += SUMS)
            for (int64_t s = 0; s < SUMS; s++)
                for (int64_t w = 0; w < WIDE; w++)
                    told[s][w] += held[i + s][w] * keys[i + s];
        for (int64_t w = 0; w < WIDE; w++) {
            const Lanes sum = (told[0][w] + told[1][w]) + (told[2][w] + told[3][w]);
            delta[w] = (load_lanes(v + w * LANES) - sum * decay) * *beta;
        }
        for (int64_t i = 0; i < key_dim; i += SUMS)
            for (int64_t s = 0; s < SUMS; s++)
                for (int64_t w = 0; w < WIDE; w++) {
                    held[i + s][w] = held[i + s][w] * decay + delta[w] * keys[i + s];
                    read[s][w] += held[i + s][w] * queries[i + s];
                }
        for (int64_t w = 0; w < WIDE; w++)
            store_lanes((read[0][w] + read[1][w]) + (read[2][w] + read[3][w]), out + w * LANES);
        q += op.size[5], k += op.size[6], v += op.size[7];
        g += heads, beta += heads, out += heads * value_dim;
    }
    for (int64_t i = 0; i < key_dim; i++)
        for (int64_t w = 0; w < WIDE; w++)
            store_lanes(held[i][w], state + i * value_dim + w * LANES);
}

// at: q, k, v, g float32, beta float32, state float32, out, as in the reference; the heads of a token are contiguous in
// q, k and v. count: rows; size: tokens per row, heads, key_heads, key_dim (a multiple of 16, at most 256), value_dim
// (a multiple of 16), token strides of q, k and v; number: eps, scale of queries.
template <typename T> static int64_t kernel(const Op &op, int64_t unit) {
    const int64_t heads = op.size[1], value_dim = op.size[4], parts = ceil_div(value_dim, WIDEST * LANES);
    if (unit < 0)
        return *op.count * heads * parts;
    const int64_t column = unit % parts * WIDEST * LANES, head = unit / parts % heads, row = unit / parts / heads;
    if (column + WIDEST * LANES <= value_dim)
        columns<T, WIDEST>(op, row, head, column);
    else
        columns<T, 1>(op, row, head, column);
    return 0;
}

} // namespace gated_delta

EXPORT(gated_delta, gated_delta::kernel<T>)
