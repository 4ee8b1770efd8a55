// t = x A^T for the tokens of each segment, every segment with its own adapter. A lies as the file has it, rank rows as
// long as x: each is read once for a block of tokens. See reference.py.
#include "../adapters.h"

namespace lora_shrink {

// So many rows of A are multiplied side by side: sums that do not wait for each other.
constexpr int64_t MAX_RANKS = 8;

#if defined(__AVX512BF16__)
template <typename T> constexpr int64_t PIECE = 64 / sizeof(T);

INLINE LaneBits load_piece(const bfloat16 *from) { return load_panel(from, 0); }

INLINE void add_products(Lanes &sum, LaneBits x, const bfloat16 *a) {
    sum = (Lanes)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)load_piece(a));
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

// Multiply as many rows of A as are left, at most RANKS; returns how many.
template <typename T, int64_t RANKS = MAX_RANKS>
static inline int64_t multiply_next(int64_t ranks, const T *x, const T *a, int64_t width, T *out) {
    if constexpr (RANKS > 1)
        if (ranks < RANKS)
            return multiply_next<T, RANKS - 1>(ranks, x, a, width, out);
    multiply_ranks<T, RANKS>(x, a, width, out);
    return RANKS;
}

// Of a matrix, what is worth asking for before it is read; the processor finds the rest by itself.
constexpr int64_t FETCHED_BYTES = 1 << 14, LINE_BYTES = 64;

static inline void fetch(const void *from, int64_t bytes) {
    const char *line = static_cast<const char *>(from);
    for (const char *end = line + std::min(bytes, FETCHED_BYTES); line < end; line += LINE_BYTES)
        __builtin_prefetch(line, 0, 2);
}

// at: x [tokens, in], segments, t [tokens, modules, max_rank]; size: in, first module, modules, max_rank, and the modules'
// widths.
template <typename T> static int64_t kernel(const Op &op, int64_t unit) {
    const int64_t width = op.size[0], modules = op.size[2], max_rank = op.size[3];
    const Segment *segments = static_cast<const Segment *>(op.at[1]);
    const Cut cut{num_token_blocks(segments, *op.count), modules};
    if (unit < 0)
        return cut.num_units();
    const TokenBlock block = token_block(segments, cut.block(unit));
    const Projection *projections = block.segment->adapter + op.size[1];
    const int64_t begin = cut.begin(unit), end = cut.end(unit);
    fetch(projections[begin].a, projections[begin].rank * width * sizeof(T));
    for (int64_t module = begin; module < end; module++) {
        // Adapters come from memory, and there is little to do with them: B is for the expand that follows.
        const Projection &projection = projections[module];
        fetch(projection.b, projection.rank * op.size[4 + module] * sizeof(T));
        if (module + 1 < end)
            fetch(projections[module + 1].a, projections[module + 1].rank * width * sizeof(T));
        for (int64_t token = block.begin; token < block.end; token++) {
            const T *x = static_cast<const T *>(op.at[0]) + token * width, *a = static_cast<const T *>(projection.a);
            T *out = static_cast<T *>(op.at[2]) + (token * modules + module) * max_rank;
            for (int64_t rank = 0; rank < projection.rank;)
                rank += multiply_next(projection.rank - rank, x, a + rank * width, width, out + rank);
            // The depth of B's panels is even; what fills the last step must not be what another batch left there.
            if (projection.rank % Depth<T>::step)
                out[projection.rank] = T{};
        }
    }
    return 0;
}

} // namespace lora_shrink

extern "C" {
int64_t lora_shrink_f32(const Op &op, int64_t unit) { return lora_shrink::kernel<float>(op, unit); }
int64_t lora_shrink_bf16(const Op &op, int64_t unit) { return lora_shrink::kernel<bfloat16>(op, unit); }
}
