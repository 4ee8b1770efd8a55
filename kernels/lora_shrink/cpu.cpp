// t = x A^T for the tokens of each segment, every segment with its own adapter. A lies as the file has it, rank rows as
// long as x: each is read once for a block of tokens. See reference.py.
#include "../adapters.h"

namespace lora_shrink {

static inline float dot(const float *a, const float *b, int64_t count) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < count; i++)
        sum += a[i] * b[i];
    return sum;
}

static inline float dot(const bfloat16 *a, const bfloat16 *b, int64_t count) {
    float sum = 0;
    int64_t i = 0;
#if defined(__AVX512BF16__)
    __m512 sums[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
    for (; i + 64 <= count; i += 64)
        for (int64_t j = 0; j < 2; j++)
            sums[j] = _mm512_dpbf16_ps(sums[j], (__m512bh)_mm512_loadu_si512(a + i + 32 * j),
                                       (__m512bh)_mm512_loadu_si512(b + i + 32 * j));
    sum = _mm512_reduce_add_ps(_mm512_add_ps(sums[0], sums[1]));
#endif
#pragma omp simd reduction(+ : sum)
    for (int64_t j = i; j < count; j++)
        sum += widen(a[j]) * widen(b[j]);
    return sum;
}

// at: x [tokens, in], segments, t [tokens, modules, max_rank]; size: in, first module, modules, max_rank.
template <typename T> static int64_t kernel(const Op &op, int64_t unit) {
    const int64_t width = op.size[0], first = op.size[1], modules = op.size[2], max_rank = op.size[3];
    const Segment *segments = static_cast<const Segment *>(op.at[1]);
    if (unit < 0)
        return num_token_blocks(segments, *op.count) * modules;
    const TokenBlock block = token_block(segments, unit / modules);
    const int64_t module = unit % modules;
    const Projection &projection = block.segment->adapter[first + module];
    const T *a = static_cast<const T *>(projection.a);
    for (int64_t rank = 0; rank < projection.rank; rank++, a += width)
        for (int64_t token = block.begin; token < block.end; token++)
            store(dot(static_cast<const T *>(op.at[0]) + token * width, a, width),
                  static_cast<T *>(op.at[2])[(token * modules + module) * max_rank + rank]);
    // The depth of B's panels is even; what fills the last step must not be what another batch left there.
    if (projection.rank % Depth<T>::step)
        for (int64_t token = block.begin; token < block.end; token++)
            static_cast<T *>(op.at[2])[(token * modules + module) * max_rank + projection.rank] = T{};
    return 0;
}

} // namespace lora_shrink

extern "C" {
int64_t lora_shrink_f32(const Op &op, int64_t unit) { return lora_shrink::kernel<float>(op, unit); }
int64_t lora_shrink_bf16(const Op &op, int64_t unit) { return lora_shrink::kernel<bfloat16>(op, unit); }
}
