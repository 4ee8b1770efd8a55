// How the pairs of a row and an expert lie once they are sorted, as kernels/experts makes them.
#pragma once

#include "native.h"

constexpr int64_t GROUP_ROWS = 512;

// Rows that one expert is multiplied by: neighbours, once they are sorted, and among themselves in their own order.
struct Group {
    int32_t expert, begin, count;
};

// At most so many groups; those past the last have no rows.
INLINE int64_t max_groups(int64_t pairs, int64_t experts) { return std::min(pairs, experts) + pairs / GROUP_ROWS; }
