// y = y * gain + shift + t B^T for the tokens of each segment, gain and shift where the adapter has them. A unit is a block
// of tokens, a module and some columns. See reference.py.
#include "../adapters.h"

namespace lora_expand {

constexpr int64_t UNIT_PANELS = 16;

// at: t [tokens, modules, max_rank], segments, y [tokens, width]; size: width of y, first module, modules, max_rank, and
// the modules' widths, which add up to that of y.
template <typename T, typename Out> static int64_t kernel(const Op &op, int64_t unit) {
    constexpr int64_t step = Depth<T>::step;
    const int64_t width = op.size[0], first = op.size[1], modules = op.size[2], max_rank = op.size[3];
    const int64_t *widths = op.size + 4;
    const Segment *segments = static_cast<const Segment *>(op.at[1]);
    int64_t parts = 0;
    for (int64_t module = 0; module < modules; module++)
        parts += ceil_div(widths[module], UNIT_PANELS * COLUMNS);
    if (unit < 0)
        return num_token_blocks(segments, *op.count) * parts;
    const TokenBlock block = token_block(segments, unit / parts);
    int64_t module = 0, part = unit % parts, column = 0;
    for (; part >= ceil_div(widths[module], UNIT_PANELS * COLUMNS); module++) {
        part -= ceil_div(widths[module], UNIT_PANELS * COLUMNS);
        column += widths[module];
    }
    const Projection &projection = block.segment->adapter[first + module];
    if (!projection.rank && !projection.gain)
        return 0;
    const int64_t begin = part * UNIT_PANELS * COLUMNS;
    const int64_t end = std::min(widths[module], begin + UNIT_PANELS * COLUMNS);
    const int64_t depth = ceil_div(projection.rank, step) * step, rows = block.end - block.begin;
    const int64_t panels = ceil_div(end - begin, COLUMNS), panel_size = depth * COLUMNS;
    alignas(64) float sums[BLOCK_TOKENS][UNIT_PANELS * COLUMNS];
    const T *b = static_cast<const T *>(projection.b) + begin / COLUMNS * panel_size;
    if (projection.rank)
        multiply<false, true>(rows, static_cast<const T *>(op.at[0]) + (block.begin * modules + module) * max_rank,
                              modules * max_rank, Panels<T>{&b, 1, depth, panel_size}, panels, sums[0],
                              UNIT_PANELS * COLUMNS);
    else
        std::memset(sums, 0, sizeof sums);
    for (int64_t r = 0; r < rows; r++) {
        Out *y = static_cast<Out *>(op.at[2]) + (block.begin + r) * width + column + begin;
        int64_t n = 0;
        if (projection.gain)
            for (; n < end - begin; n++)
                store(widen(y[n]) * projection.gain[begin + n] + projection.shift[begin + n] + sums[r][n], y[n]);
        for (; n + LANES <= end - begin; n += LANES)
            store_lanes(load_lanes(y + n) + load_lanes(sums[r] + n), y + n);
        for (; n < end - begin; n++)
            store(widen(y[n]) + sums[r][n], y[n]);
    }
    return 0;
}

} // namespace lora_expand

extern "C" {
int64_t lora_expand_f32(const Op &op, int64_t unit) { return lora_expand::kernel<float, float>(op, unit); }
int64_t lora_expand_bf16(const Op &op, int64_t unit) { return lora_expand::kernel<bfloat16, bfloat16>(op, unit); }
int64_t lora_logits_f32(const Op &op, int64_t unit) { return lora_expand::kernel<float, float>(op, unit); }
int64_t lora_logits_bf16(const Op &op, int64_t unit) { return lora_expand::kernel<bfloat16, float>(op, unit); }
}
