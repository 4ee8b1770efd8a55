// The two LoRA products for adjacent rows, used by kernels/lora_shrink, lora_expand and lora_experts.
#pragma once

#include "adapters.h"

namespace lora {

// Rows of A multiplied at once, as independent sums.
constexpr int64_t MAX_RANKS = 8;

#if defined(HAS_PAIR_PRODUCTS)
template <typename T> constexpr int64_t PIECE = sizeof(Lanes) / sizeof(T);

INLINE LaneBits load_piece(const bfloat16 *from) { return load_panel(from, 0); }

INLINE void add_products(Lanes &sum, LaneBits x, const bfloat16 *a) {
    sum = add_pair_products(sum, x, load_piece(a));
}
#else
template <typename T> constexpr int64_t PIECE = LANES;

INLINE Lanes load_piece(const bfloat16 *from) { return load_lanes(from); }

INLINE void add_products(Lanes &sum, Lanes x, const bfloat16 *a) { sum += x * load_lanes(a); }
#endif

INLINE Lanes load_piece(const float *from) { return load_lanes(from); }

INLINE void add_products(Lanes &sum, Lanes x, const float *a) { sum += x * load_lanes(a); }

// out[RANKS] = a[RANKS][width] x
template <typename T, int64_t RANKS> static inline void multiply_ranks(const T *x, const T *a, int64_t width, T *out) {
    Lanes sums[RANKS] = {};
    int64_t i = 0;
    for (; i + PIECE<T> <= width; i += PIECE<T>) {
        const auto piece = load_piece(x + i);
        for (int64_t r = 0; r < RANKS; r++)
            add_products(sums[r], piece, a + r * width + i);
    }
    for (int64_t r = 0; r < RANKS; r++) {
        float sum = sum_of(sums[r]);
        for (int64_t j = i; j < width; j++)
            sum += widen(x[j]) * widen(a[r * width + j]);
        store(sum, out[r]);
    }
}

// Multiplies as many rows of A as are left, at most RANKS; returns how many.
template <typename T, int64_t RANKS = MAX_RANKS>
static inline int64_t multiply_next(int64_t ranks, const T *x, const T *a, int64_t width, T *out) {
    if constexpr (RANKS > 1)
        if (ranks < RANKS)
            return multiply_next<T, RANKS - 1>(ranks, x, a, width, out);
    multiply_ranks<T, RANKS>(x, a, width, out);
    return RANKS;
}

// out[rank] = a[rank][width] x
template <typename T> static void shrink(const T *x, const T *a, int64_t rank, int64_t width, T *out) {
    for (int64_t done = 0; done < rank;)
        done += multiply_next(rank - done, x, a + done * width, width, out + done);
    // The depth of B's panels is even, so the padding of an odd rank must not keep values of an earlier batch.
    if (rank % Depth<T>::step)
        out[rank] = T{};
}

// The part of a matrix worth prefetching; the hardware prefetcher fetches the rest.
constexpr int64_t FETCHED_BYTES = 1 << 14;

static inline void fetch(const void *from, int64_t bytes) {
    const char *line = static_cast<const char *>(from);
    for (const char *end = line + std::min(bytes, FETCHED_BYTES); line < end; line += LINE_BYTES)
        __builtin_prefetch(line, 0, 2);
}

constexpr int64_t PIECE_PANELS = 16, PIECE_COLUMNS = PIECE_PANELS * COLUMNS;

// Adds columns [begin, end) of one module's product to `y` with row stride `width`, from `t` with row stride
// `t_stride`.
template <typename T, typename Out>
static void expand(const Projection &projection, int64_t rows, const T *t, int64_t t_stride, int64_t begin, int64_t end,
                   Out *y, int64_t width) {
    if (!projection.rank && !projection.gain)
        return;
    constexpr int64_t step = Depth<T>::step;
    const int64_t depth = ceil_div(projection.rank, step) * step, panel_size = depth * COLUMNS;
    alignas(64) float sums[BLOCK_TOKENS][PIECE_COLUMNS];
    const T *b = static_cast<const T *>(projection.b) + begin / COLUMNS * panel_size;
    if (projection.rank)
        multiply<false, true>(rows, t, t_stride, Panels<T>{&b, 1, depth, panel_size}, ceil_div(end - begin, COLUMNS),
                              sums[0], PIECE_COLUMNS);
    else
        std::memset(sums, 0, sizeof sums);
    for (int64_t r = 0; r < rows; r++, y += width) {
        int64_t n = 0;
        if (projection.gain)
            for (; n < end - begin; n++)
                store(widen(y[n]) * projection.gain[begin + n] + projection.shift[begin + n] + sums[r][n], y[n]);
        for (; n + LANES <= end - begin; n += LANES)
            store_lanes(load_lanes(y + n) + load_lanes(sums[r] + n), y + n);
        for (; n < end - begin; n++)
            store(widen(y[n]) + sums[r][n], y[n]);
    }
}

} // namespace lora
