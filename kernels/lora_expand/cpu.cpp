// y = y * gain + shift + t B^T for the tokens of each segment, gain and shift where the adapter has them. A piece is
// some columns of a module. See reference.py.
#include "../adapters.h"

namespace lora_expand {

constexpr int64_t PIECE_PANELS = 16, PIECE_COLUMNS = PIECE_PANELS * COLUMNS;

// Columns [begin, end) of one module, from `t`, which lies `t_stride` apart, into `y`, whose rows are `width` apart.
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

// at: t [tokens, modules, max_rank], segments, y [tokens, width]; size: width of y, first module, modules, max_rank, and
// the modules' widths, which add up to that of y.
template <typename T, typename Out> static int64_t kernel(const Op &op, int64_t unit) {
    const int64_t width = op.size[0], first = op.size[1], modules = op.size[2], max_rank = op.size[3];
    const int64_t *widths = op.size + 4;
    const Segment *segments = static_cast<const Segment *>(op.at[1]);
    int64_t pieces = 0;
    for (int64_t module = 0; module < modules; module++)
        pieces += ceil_div(widths[module], PIECE_COLUMNS);
    const Cut cut{num_token_blocks(segments, *op.count), pieces};
    if (unit < 0)
        return cut.num_units();
    const TokenBlock block = token_block(segments, cut.block(unit));
    const int64_t first_piece = cut.begin(unit), end_piece = cut.end(unit);
    const T *t = static_cast<const T *>(op.at[0]) + block.begin * modules * max_rank;
    Out *y = static_cast<Out *>(op.at[2]) + block.begin * width;
    for (int64_t module = 0, piece = 0; module < modules; y += widths[module++])
        for (int64_t begin = 0; begin < widths[module]; begin += PIECE_COLUMNS, piece++)
            if (piece >= first_piece && piece < end_piece)
                expand(block.segment->adapter[first + module], block.end - block.begin, t + module * max_rank,
                       modules * max_rank, begin, std::min(widths[module], begin + PIECE_COLUMNS), y + begin, width);
    return 0;
}

} // namespace lora_expand

extern "C" {
int64_t lora_expand_f32(const Op &op, int64_t unit) { return lora_expand::kernel<float, float>(op, unit); }
int64_t lora_expand_bf16(const Op &op, int64_t unit) { return lora_expand::kernel<bfloat16, bfloat16>(op, unit); }
int64_t lora_logits_f32(const Op &op, int64_t unit) { return lora_expand::kernel<float, float>(op, unit); }
int64_t lora_logits_bf16(const Op &op, int64_t unit) { return lora_expand::kernel<bfloat16, float>(op, unit); }
}
