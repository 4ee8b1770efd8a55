// y += (x A^T) B^T for (row, expert) pairs sorted by expert, with the matrices that the row's adapter has for the
// expert. The sort is stable, so that an expert's rows of one adapter are adjacent. See reference.py.
#include "../expert_groups.h"
#include "../lora_products.h"

namespace lora_experts {

// Products of an adapter for an expert: gate, or gate and up together; up; down.
constexpr int64_t PRODUCTS = 3;

// As `Projection`; `b` has `width` rows. A rank of 0 means no product.
struct ExpertProjection {
    const void *a, *b;
    int64_t rank, width;
};

// Tokens [start, end) of one adapter; its projections are ordered by layer, expert and product.
struct ExpertSegment {
    int64_t start, end;
    const ExpertProjection *adapter;
};

struct Pairs {
    const int64_t *rows;
    const Group *groups;
    const ExpertSegment *segments;
    int64_t num_segments, count;

    explicit Pairs(const Op &op)
        : rows(static_cast<const int64_t *>(op.at[1])), groups(static_cast<const Group *>(op.at[2])),
          segments(static_cast<const ExpertSegment *>(op.at[3])), num_segments(*op.count),
          count(*static_cast<const int64_t *>(op.at[4])) {}

    // Few pairs seldom share an expert, and a block each occupies more threads; many pairs share experts.
    int64_t block_size() const { return count <= 64 ? 1 : BLOCK_TOKENS; }
    int64_t num_blocks() const { return ceil_div(count, block_size()); }

    // Calls visit(begin, end, projections of the expert) for adjacent pairs in a block with the same expert and
    // adapter.
    template <typename Visit> void visit_block(int64_t block, Visit visit) const {
        const Group *group = groups;
        const int64_t block_end = std::min(count, (block + 1) * block_size());
        for (int64_t pair = block * block_size(), end; pair < block_end; pair = end) {
            while (group->begin + group->count <= pair)
                group++;
            const int64_t group_end = std::min<int64_t>(block_end, group->begin + group->count);
            const ExpertSegment *segment = segments, *last = segments + num_segments;
            while (segment < last && segment->end <= rows[pair])
                segment++;
            end = pair + 1;
            if (segment == last || rows[pair] < segment->start)
                continue;
            while (end < group_end && rows[end] < segment->end)
                end++;
            visit(pair, end, segment->adapter + group->expert * PRODUCTS);
        }
    }
};

// at: x [rows or pairs, in], row of each pair int64 [pairs], groups, segments, number of pairs, t [pairs, products,
// max_rank]; size: in, index of the layer's first projection, products, max_rank, whether x has a row per pair.
template <typename T> static int64_t shrink(const Op &op, int64_t unit) {
    const int64_t width = op.size[0], products = op.size[2], max_rank = op.size[3];
    const Pairs pairs(op);
    const Cut cut{pairs.num_blocks(), products};
    if (unit < 0)
        return cut.num_units();
    const T *x = static_cast<const T *>(op.at[0]);
    T *t = static_cast<T *>(op.at[5]);
    pairs.visit_block(cut.block(unit), [&](int64_t begin, int64_t end, const ExpertProjection *projections) {
        for (int64_t product = cut.begin(unit); product < cut.end(unit); product++) {
            const ExpertProjection &projection = projections[op.size[1] + product];
            lora::fetch(projection.b, projection.rank * projection.width * sizeof(T));
            for (int64_t pair = begin; pair < end; pair++)
                lora::shrink(x + (op.size[4] ? pair : pairs.rows[pair]) * width, static_cast<const T *>(projection.a),
                             projection.rank, width, t + (pair * products + product) * max_rank);
        }
    });
    return 0;
}

// at: t [pairs, products, max_rank], row of each pair, groups, segments and number of pairs as above, y [pairs, width];
// size: width of y, index of the layer's first projection, products, max_rank. A second product begins in the middle of
// y.
template <typename T> static int64_t expand(const Op &op, int64_t unit) {
    const int64_t width = op.size[0], products = op.size[2], max_rank = op.size[3];
    const Pairs pairs(op);
    const Cut cut{pairs.num_blocks(), ceil_div(width, lora::PIECE_COLUMNS)};
    if (unit < 0)
        return cut.num_units();
    const T *t = static_cast<const T *>(op.at[0]);
    T *y = static_cast<T *>(op.at[5]);
    pairs.visit_block(cut.block(unit), [&](int64_t first, int64_t last, const ExpertProjection *projections) {
        for (int64_t product = 0; product < products; product++) {
            const ExpertProjection &own = projections[op.size[1] + product];
            const Projection projection{own.a, own.b, own.rank, nullptr, nullptr};
            const int64_t end = std::min(own.width, cut.end(unit) * lora::PIECE_COLUMNS);
            for (int64_t begin = cut.begin(unit) * lora::PIECE_COLUMNS; begin < end; begin += lora::PIECE_COLUMNS)
                lora::expand(projection, last - first, t + (first * products + product) * max_rank, products * max_rank,
                             begin, std::min(end, begin + lora::PIECE_COLUMNS),
                             y + first * width + product * (width / 2) + begin, width);
        }
    });
    return 0;
}

} // namespace lora_experts

EXPORT(expert_shrink, lora_experts::shrink<T>)
EXPORT(expert_expand, lora_experts::expand<T>)
