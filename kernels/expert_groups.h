// The layout of (row, expert) pairs sorted by expert, as kernels/experts makes it.
#pragma once

#include "native.h"

constexpr int64_t GROUP_ROWS = 512;

// Adjacent sorted pairs of one expert, in row order.
struct Group {
    int32_t expert, begin, count;
};

// The maximum number of groups; those past the last have no rows.
INLINE int64_t max_groups(int64_t pairs, int64_t experts) { return std::min(pairs, experts) + pairs / GROUP_ROWS; }
