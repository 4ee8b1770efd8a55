// t = x A^T for the tokens of each segment, each segment with its own adapter. A has the file's layout, [rank, in], and
// is read once per block of tokens. See reference.py.
#include "../lora_products.h"

namespace lora_shrink {

using lora::fetch;
using lora::shrink;

// at: x [tokens, in], segments, t [tokens, modules, max_rank]; size: in, first module, modules, max_rank, and the
// modules' widths.
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
        // Reading adapters from memory dominates, so B is prefetched for the expand that follows.
        const Projection &projection = projections[module];
        fetch(projection.b, projection.rank * op.size[4 + module] * sizeof(T));
        if (module + 1 < end)
            fetch(projections[module + 1].a, projections[module + 1].rank * width * sizeof(T));
        for (int64_t token = block.begin; token < block.end; token++) {
            const T *x = static_cast<const T *>(op.at[0]) + token * width, *a = static_cast<const T *>(projection.a);
            shrink(x, a, projection.rank, width, static_cast<T *>(op.at[2]) + (token * modules + module) * max_rank);
        }
    }
    return 0;
}

} // namespace lora_shrink

EXPORT(lora_shrink, lora_shrink::kernel<T>)
