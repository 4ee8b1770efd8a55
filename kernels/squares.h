// Tiles by the matrix instructions of 64-bit ARM. Each multiplies two rows by two columns over two words of the depth: a
// word is a pair of bfloat16 or four int8, and the four sums are one register. Those of bfloat16 are the numbers that
// `add_pair_products` computes from one word after the other, so that results do not depend on how many rows there are.
#pragma once

#include "lanes.h"

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC) || defined(__ARM_FEATURE_MATMUL_INT8)

namespace squares {

constexpr int64_t COLUMN_PAIRS = 8, WORD_BYTES = 4, PANEL_BYTES = 64; // the last is of 16 columns, one word each

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
INLINE Lanes multiply_add(Lanes sums, LaneBits rows, LaneBits columns) {
    return (Lanes)vbfmmlaq_f32((float32x4_t)sums, (bfloat16x8_t)rows, (bfloat16x8_t)columns);
}
#endif

#if defined(__ARM_FEATURE_MATMUL_INT8)
INLINE LaneNumbers multiply_add(LaneNumbers sums, LaneBits rows, LaneBits columns) {
    return (LaneNumbers)vmmlaq_s32((int32x4_t)sums, (int8x16_t)rows, (int8x16_t)columns);
}
#endif

// The sums of ROWS rows by a panel; of an odd number, the last row is computed twice.
template <typename Sums, int64_t ROWS> using Tile = Sums[(ROWS + 1) / 2][COLUMN_PAIRS];

// The second row of a pair, given its first.
template <int64_t ROWS> INLINE int64_t beside(int64_t row) { return std::min(row + 1, ROWS - 1); }

// Reads c[ROWS][16].
template <int64_t ROWS, typename Sums, typename Number>
INLINE void load(Tile<Sums, ROWS> &tile, const Number *c, int64_t stride) {
    for (int64_t r = 0; r < ROWS; r += 2)
        for (int64_t j = 0; j < COLUMN_PAIRS; j += 2) {
            uint64x2_t first, second;
            std::memcpy(&first, c + r * stride + 2 * j, sizeof first);
            std::memcpy(&second, c + beside<ROWS>(r) * stride + 2 * j, sizeof second);
            tile[r / 2][j] = (Sums)vzip1q_u64(first, second);
            tile[r / 2][j + 1] = (Sums)vzip2q_u64(first, second);
        }
}

// Writes c[ROWS][16].
template <int64_t ROWS, typename Sums, typename Number>
INLINE void store(const Tile<Sums, ROWS> &tile, Number *c, int64_t stride) {
    for (int64_t r = 0; r < ROWS; r++)
        for (int64_t j = 0; j < COLUMN_PAIRS; j += 2) {
            const uint64x2_t left = (uint64x2_t)tile[r / 2][j], right = (uint64x2_t)tile[r / 2][j + 1];
            const uint64x2_t row = r % 2 ? vzip2q_u64(left, right) : vzip1q_u64(left, right);
            std::memcpy(c + r * stride + 2 * j, &row, sizeof row);
        }
}

// Adds the products of WORDS words, one or two, of each row, and of a panel.
template <int64_t ROWS, int64_t WORDS, typename Sums, typename T>
INLINE void multiply_words(Tile<Sums, ROWS> &tile, const T *rows, int64_t stride, const T *panel) {
    LaneBits pairs[(ROWS + 1) / 2];
    for (int64_t r = 0; r < ROWS; r += 2) {
        uint32x2_t of_first = {}, of_second = {};
        std::memcpy(&of_first, rows + r * stride, WORDS * WORD_BYTES);
        std::memcpy(&of_second, rows + beside<ROWS>(r) * stride, WORDS * WORD_BYTES);
        pairs[r / 2] = (LaneBits)vcombine_u32(of_first, of_second);
    }
    const char *first_word = reinterpret_cast<const char *>(panel);
    for (int64_t j = 0; j < COLUMN_PAIRS; j += 2) {
        LaneBits first, second = {};
        std::memcpy(&first, first_word + 2 * j * WORD_BYTES, sizeof first);
        if constexpr (WORDS == 2)
            std::memcpy(&second, first_word + PANEL_BYTES + 2 * j * WORD_BYTES, sizeof second);
        const LaneBits left = (LaneBits)vzip1q_u32((uint32x4_t)first, (uint32x4_t)second);
        const LaneBits right = (LaneBits)vzip2q_u32((uint32x4_t)first, (uint32x4_t)second);
        for (int64_t r = 0; r < ROWS; r += 2) {
            tile[r / 2][j] = multiply_add(tile[r / 2][j], pairs[r / 2], left);
            tile[r / 2][j + 1] = multiply_add(tile[r / 2][j + 1], pairs[r / 2], right);
        }
        // Otherwise compilers load all columns first, which leaves too few registers for the sums.
        asm volatile("" : "+r"(first_word));
    }
}

} // namespace squares

#endif
