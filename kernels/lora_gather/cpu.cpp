// out = rows of each segment's own matrix [vocab, rank], looked up by token id. See reference.py.
#include "../adapters.h"

namespace lora_gather {

// at: ids [tokens], segments, out [tokens, stride]; size: index of the projection whose `a` is the matrix, stride.
template <typename T> static int64_t kernel(const Op &op, int64_t unit) {
    const int64_t first = op.size[0], stride = op.size[1];
    const Segment *segments = static_cast<const Segment *>(op.at[1]);
    if (unit < 0)
        return num_token_blocks(segments, *op.count);
    const TokenBlock block = token_block(segments, unit);
    const Projection &projection = block.segment->adapter[first];
    for (int64_t token = block.begin; token < block.end; token++) {
        const int64_t id = static_cast<const int64_t *>(op.at[0])[token], rank = projection.rank;
        T *out = static_cast<T *>(op.at[2]) + token * stride;
        if (rank)
            std::memcpy(out, static_cast<const T *>(projection.a) + id * rank, rank * sizeof(T));
        // Zeroes the padding of an odd rank for the expand that follows, as a shrink does.
        if (rank % Depth<T>::step)
            out[rank] = T{};
    }
    return 0;
}

} // namespace lora_gather

EXPORT(lora_gather, lora_gather::kernel<T>)
