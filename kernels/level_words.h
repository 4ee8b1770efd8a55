// Levels as they lie in memory: words of inputs in panels, beside a scale, and of integers a zero point, for each group.
#pragma once

#include "panels.h"

namespace levels {

// Integers of 4 bits with a zero point per group; the 16 values of e2m1; signed bytes.
enum class Levels { INT4, E2M1, INT8 };

template <Levels LEVELS> constexpr int64_t STEP = LEVELS == Levels::INT8 ? 4 : 8; // inputs per word of 32 bits
constexpr int64_t MAX_CHUNK = 128;                                                // inputs of one sum at most

// The bit of a word where input k < STEP begins: even inputs are in the lower half, so that pairs convert to bfloat16.
template <Levels LEVELS> INLINE int64_t place(int64_t k) { return k / 2 * (32 / STEP<LEVELS>) + k % 2 * 16; }

constexpr int64_t UNIT_PANELS = 4, UNIT_ROWS = 128, UNIT_COLUMNS = UNIT_PANELS * COLUMNS;

// Panels of words [depth / STEP][16] one after the other, each with scales and zero points [groups][16].
template <Levels LEVELS> struct Weights {
    const uint32_t *words, *next; // the words and, if known, those that this thread multiplies next
    const float *scales;
    const uint8_t *zeros; // of INT4 only
    int64_t depth, group;

    int64_t panel_words() const { return depth / STEP<LEVELS> * COLUMNS; }
    int64_t panel_groups() const { return depth / group * COLUMNS; }

    Weights from(int64_t panel) const {
        const int64_t groups = panel * panel_groups(), at = panel * panel_words();
        return {words + at, next ? next + at : nullptr, scales + groups, zeros ? zeros + groups : nullptr, depth, group};
    }
};

} // namespace levels
