// The mapping from a step's tokens to adapters, as the LoRA kernels read it.
#pragma once

#include "panels.h"

// One module of one adapter: `a` [rank, in] row-major, `b` [out, rank] in panels of even depth with the scaling folded
// in. A rank of 0 means no product. `gain` and `shift` [out], both or none, are applied to the output before the
// product is added.
struct Projection {
    const void *a, *b;
    int64_t rank;
    const float *gain, *shift;
};

// Tokens [start, end) of one adapter; the adapter's projections are ordered by layer and module.
struct Segment {
    int64_t start, end;
    const Projection *adapter;
};

constexpr int64_t BLOCK_TOKENS = 16;

struct TokenBlock {
    const Segment *segment;
    int64_t begin, end;
};

static inline int64_t num_token_blocks(const Segment *segments, int64_t count) {
    int64_t blocks = 0;
    for (int64_t i = 0; i < count; i++)
        blocks += ceil_div(segments[i].end - segments[i].start, BLOCK_TOKENS);
    return blocks;
}

// Block `number`, which is below `num_token_blocks`.
static inline TokenBlock token_block(const Segment *segment, int64_t number) {
    for (;; segment++) {
        const int64_t blocks = ceil_div(segment->end - segment->start, BLOCK_TOKENS);
        if (number < blocks)
            break;
        number -= blocks;
    }
    const int64_t begin = segment->start + number * BLOCK_TOKENS;
    return {segment, begin, std::min(segment->end, begin + BLOCK_TOKENS)};
}

// Cuts the pieces of every block's work into units: one piece each if there are few blocks, else enough that the cost
// of taking a unit is negligible.
struct Cut {
    int64_t blocks, pieces;
    int64_t size = blocks < 8 ? 1 : 16;

    int64_t units_of_block() const { return ceil_div(pieces, size); }
    int64_t num_units() const { return blocks * units_of_block(); }
    int64_t block(int64_t unit) const { return unit / units_of_block(); }
    int64_t begin(int64_t unit) const { return unit % units_of_block() * size; }
    int64_t end(int64_t unit) const { return std::min(pieces, begin(unit) + size); }
};
