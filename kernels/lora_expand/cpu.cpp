// y = y * gain + shift + t B^T for the tokens of each segment, with gain and shift if the adapter has them. A piece is
// some columns of a module. See reference.py.
#include "../lora_products.h"

namespace lora_expand {

using lora::expand;
using lora::PIECE_COLUMNS;

// at: t [tokens, modules, max_rank], segments, y [tokens, width]; size: width of y, first module, modules, max_rank,
// and the modules' widths, whose sum is that of y.
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

EXPORT(lora_expand, lora_expand::kernel<T, T>)
EXPORT(lora_logits, lora_expand::kernel<T, float>)
