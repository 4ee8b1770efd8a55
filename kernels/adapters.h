// Which adapter each token of a step has, as the LoRA kernels read it.
#pragma once

#include "panels.h"

// One module of one adapter: `a` [rank, in] as it is, `b` [out, rank] in panels of even depth, its scaling multiplied in.
// A rank of 0 stands for no product. `gain` and `shift` [out], both or none, change the output before the product is added.
struct Projection {
    const void *a, *b;
    int64_t rank;
    const float *gain, *shift;
};

// Tokens [start, end) of one adapter; the adapter's projections lie by layer and module.
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

// The block with a number below `num_token_blocks`.
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

// How the pieces of every block's work are cut into units: a piece each where there are few blocks, else so many that to
// take a unit costs little beside it.
struct Cut {
    int64_t blocks, pieces;
    int64_t size = blocks < 8 ? 1 : 16;

    int64_t units_of_block() const { return ceil_div(pieces, size); }
    int64_t num_units() const { return blocks * units_of_block(); }
    int64_t block(int64_t unit) const { return unit / units_of_block(); }
    int64_t begin(int64_t unit) const { return unit % units_of_block() * size; }
    int64_t end(int64_t unit) const { return std::min(pieces, begin(unit) + size); }
};
