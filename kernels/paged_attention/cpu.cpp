// Attention over a cache whose blocks are laid out in panels like weights: 16 keys are one panel, their values are
// panels along the head's width, so that scores and weighted sums are ordinary products and nothing is gathered.
//
//     keys    [block][kv head][16 tokens ...][head_dim deep x 16]
//     values  [block][kv head][16 tokens ...][head_dim / 16 panels][16 deep x 16]
//
// A unit is some queries of one request and one kv head, with all query heads that share it. It reads the context once,
// keeping a running maximum (Milakov and Gimelshein, 2018, arXiv 1805.02867, algorithm 3). Keys and values lie in runs
// too short for a processor's own prefetching, so scoring fetches the values, and summing these the next keys. See
// reference.py.
#include "../panels.h"

namespace paged_attention {

constexpr int64_t CHUNK = 128; // positions scored at once, so that a unit's scores stay in the nearest cache
constexpr int64_t UNIT_ROWS = 32;

// Tokens of one request in a step: index of the first in the batch, its position, number of tokens, row of `tables`.
struct Row {
    int64_t token, position, count, table;
};

// Converts a row's scores to softmax weights relative to the highest score so far, and rescales earlier sums if that
// rises. Of `padded` scores (a multiple of LANES) the row sees the first `seen`, possibly none. Scaled scores are
// base-2 exponents.
template <typename T>
static inline void soften(const float *scores, T *weights, int64_t seen, int64_t padded, float scale, float &top,
                          float &total, float *sums, int64_t dim) {
    Lanes lanes[CHUNK / LANES], tops = all_lanes(-INFINITY), sum = {};
    for (int64_t i = 0; i < padded / LANES; i++) {
        lanes[i] = load_lanes(scores + i * LANES) * scale;
        if (seen < (i + 1) * LANES)
            lanes[i] = lane_numbers() < static_cast<int32_t>(seen - i * LANES) ? lanes[i] : all_lanes(-INFINITY);
        tops = lanes[i] > tops ? lanes[i] : tops;
    }
    const float highest = std::max(top, highest_of(tops));
    // Without any score, or with only NaN, there is no maximum to subtract.
    const float base = highest == -INFINITY ? 0.0f : highest;
    for (int64_t i = 0; i < padded / LANES; i++) {
        const Lanes powers = power_of_two(lanes[i] - base);
        sum += powers;
        store_lanes(powers, weights + i * LANES);
    }
    if (highest > top) {
        const float shrink = std::exp2(top - base);
        total *= shrink;
        for (int64_t i = 0; i < dim; i += LANES)
            store_lanes(load_lanes(sums + i) * shrink, sums + i);
        top = highest;
    }
    total += sum_of(sum);
}

// What a unit computes and reads: some queries of a row for one kv head, and the context from `begin` to `end`.
struct Unit {
    int64_t head, token, position, queries, begin, end;
    const int64_t *table;

    Unit(const Op &op, int64_t number, int64_t unit_queries) {
        const int64_t kv_heads = op.size[1], window = op.size[6];
        const Row *row = static_cast<const Row *>(op.at[3]);
        int64_t tile = number / kv_heads;
        for (; tile >= ceil_div(row->count, unit_queries); row++)
            tile -= ceil_div(row->count, unit_queries);
        const int64_t first = tile * unit_queries;
        head = number % kv_heads, token = row->token + first, position = row->position + first;
        queries = std::min(unit_queries, row->count - first);
        // From the first position that any query sees, rounded down to the start of a panel.
        begin = window ? std::max<int64_t>(0, position - window + 1) / COLUMNS * COLUMNS : 0;
        end = position + queries;
        table = static_cast<const int64_t *>(op.at[4]) + row->table * op.size[4];
    }

    // The offset in the cache, in elements, of the panel that begins at a position.
    int64_t panel_at(const Op &op, int64_t at) const {
        const int64_t dim = op.size[2], block_tokens = op.size[3];
        return table[at / block_tokens] * op.size[5] + (head * block_tokens + at % block_tokens) * dim;
    }
};

// at: q [tokens, heads, dim], keys, values, rows [count], tables [any, table_width], out as q, sinks float [heads] or
// null; size: heads, kv_heads, dim, block_tokens, table_width, block stride in elements, window or 0; number: scale,
// softcap or 0.
template <typename T> static int64_t kernel(const Op &op, int64_t unit) {
    const int64_t heads = op.size[0], kv_heads = op.size[1], dim = op.size[2];
    const int64_t group = heads / kv_heads, unit_queries = std::max<int64_t>(1, UNIT_ROWS / group);
    const Row *row_of = static_cast<const Row *>(op.at[3]);
    if (unit < 0) {
        int64_t tiles = 0;
        for (int64_t i = 0; i < *op.count; i++)
            tiles += ceil_div(row_of[i].count, unit_queries);
        return tiles * kv_heads;
    }
    const Unit own(op, unit, unit_queries);
    Unit next = own;
    if (next_unit >= 0)
        next = Unit(op, next_unit, unit_queries);
    else
        next.end = 0;
    const auto [head, token, position, queries, begin, end, table] = own;
    const int64_t rows = queries * group, window = op.size[6];
    const T *keys = static_cast<const T *>(op.at[1]), *values = static_cast<const T *>(op.at[2]);
    const float *sinks = static_cast<const float *>(op.at[6]);
    const float scale = static_cast<float>(op.number[0]), softcap = static_cast<float>(op.number[1]);

    thread_local std::vector<float> floats;
    thread_local std::vector<Factor<T>> factors;
    floats.assign(rows * (CHUNK + dim + 2), 0.0f);
    factors.resize(rows * (CHUNK + dim));
    float *scores = floats.data(), *sums = scores + rows * CHUNK, *tops = sums + rows * dim, *totals = tops + rows;
    Factor<T> *q = factors.data(), *weights = q + rows * dim;
    // Row r is query r / group of query head r % group.
    for (int64_t r = 0; r < rows; r++) {
        const int64_t of_row = ((token + r / group) * heads + head * group + r % group) * dim;
        // Once: each product would widen it again.
        copy_factors(static_cast<const T *>(op.at[0]) + of_row, dim, q + r * dim);
        // The softmax starts from the sink: one more score, with a value of zeros.
        tops[r] = sinks ? LOG2_E * sinks[head * group + r % group] : -INFINITY;
        totals[r] = sinks ? 1.0f : 0.0f;
    }
    // Keys are fetched up to here, and beyond the end those that the next unit reads first.
    const int64_t padded_end = ceil_div(end, COLUMNS) * COLUMNS;
    int64_t fetched = std::min(begin + CHUNK, padded_end);
    for (int64_t start = begin; start < end; start += CHUNK) {
        const int64_t count = std::min(CHUNK, end - start), num_panels = ceil_div(count, COLUMNS);
        const T *keys_at[CHUNK / COLUMNS], *values_at[CHUNK / COLUMNS], *next_keys_at[CHUNK / COLUMNS];
        for (int64_t i = 0; i < num_panels; i++) {
            const int64_t offset = own.panel_at(op, start + i * COLUMNS);
            keys_at[i] = keys + offset, values_at[i] = values + offset;
            const int64_t of_next = next.begin + fetched - padded_end;
            next_keys_at[i] = fetched < end       ? keys + own.panel_at(op, fetched)
                              : of_next < next.end ? keys + next.panel_at(op, of_next)
                                                   : keys_at[i];
            fetched += COLUMNS;
        }
        for (int64_t i = 0; i < num_panels; i += 2) {
            // Two panels at a time, with the distance between them as the stride.
            const int64_t panels = std::min<int64_t>(2, num_panels - i);
            const int64_t stride = panels == 2 ? keys_at[i + 1] - keys_at[i] : 0;
            multiply<false, true>(rows, q, dim, Panels<T>{keys_at + i, 1, dim, stride, values_at + i}, panels,
                                  scores + i * COLUMNS, CHUNK);
        }
        for (int64_t r = 0; r < rows; r++) {
            const int64_t past = position + r / group + 1 - start, seen = std::min(count, past);
            float *scored = scores + r * CHUNK;
            if (softcap > 0.0f)
                for (int64_t i = 0; i < num_panels * COLUMNS; i += LANES)
                    store_lanes(capped(load_lanes(scored + i), scale, softcap), scored + i);
            if (window && past > window)
                std::fill_n(scored, std::min(count, past - window), -INFINITY);
            soften(scored, weights + r * CHUNK, seen, num_panels * COLUMNS, softcap > 0.0f ? LOG2_E : LOG2_E * scale,
                   tops[r], totals[r], sums + r * dim, dim);
        }
        multiply<true, true>(rows, weights, CHUNK,
                             Panels<T>{values_at, num_panels, COLUMNS, COLUMNS * COLUMNS, next_keys_at}, dim / COLUMNS,
                             sums, dim);
    }
    for (int64_t r = 0; r < rows; r++) {
        T *out = static_cast<T *>(op.at[5]) + ((token + r / group) * heads + head * group + r % group) * dim;
        const float inverse = 1.0f / totals[r];
        for (int64_t i = 0; i < dim; i += LANES)
            store_lanes(load_lanes(sums + r * dim + i) * inverse, out + i);
    }
    return 0;
}

} // namespace paged_attention

EXPORT(paged_attention, paged_attention::kernel<T>)
