// A mixture of experts: routing, the products of each expert with its rows, and their weighted sum. See reference.py.
//
// Products are those of kernels/packed_linear*, one expert after the other in one op, each called as if it were alone.
// Only experts with rows are read. The number of units of an op depends on the number of rows alone: a late thread asks
// for it when others may have overwritten the routing for the next layer.
#include "../expert_groups.h"
#include "../lanes.h"

#include <limits>

#define DECLARE(NAME) extern "C" int64_t NAME##_f32(const Op &, int64_t), NAME##_bf16(const Op &, int64_t);
DECLARE(packed_linear)
DECLARE(packed_linear_int8)
DECLARE(packed_linear_int4)
DECLARE(packed_linear_mxfp4)

namespace experts {

constexpr int64_t UNIT_ROWS = 4, UNIT_WIDTH = 1024, TENSORS = 6;

// Byte strides between rows and between experts.
struct Stride {
    int64_t row, expert;
};

// shares[experts] = softmax of logits. If the row is not finite, neither is any share.
template <typename T> static inline void softmax(const T *logits, int64_t experts, float *shares) {
    float top = -std::numeric_limits<float>::infinity(), sum = 0.0f;
    for (int64_t e = 0; e < experts; e++)
        top = std::max(top, widen(logits[e]));
    for (int64_t begin = 0; begin < experts; begin += LANES) {
        const int64_t count = std::min(LANES, experts - begin);
        Lanes lanes = all_lanes(-std::numeric_limits<float>::infinity());
        for (int64_t i = 0; i < count; i++)
            lanes[i] = widen(logits[begin + i]);
        lanes = power_of_two((lanes - top) * LOG2_E);
        std::memcpy(shares + begin, &lanes, count * sizeof(float));
        sum += sum_of(lanes);
    }
    for (int64_t e = 0; e < experts; e++)
        shares[e] /= sum;
}

// at: logits [rows, experts], shares [rows, experts] as scratch, experts int32 [rows, chosen], weights [rows, chosen];
// size: experts, chosen, whether weights are normed.
template <typename T> static int64_t choose(const Op &op, int64_t unit) {
    const int64_t rows = *op.count, experts = op.size[0], chosen = op.size[1];
    if (unit < 0)
        return ceil_div(rows, UNIT_ROWS);
    for (int64_t row = unit * UNIT_ROWS; row < std::min(rows, (unit + 1) * UNIT_ROWS); row++) {
        float *shares = static_cast<float *>(op.at[1]) + row * experts;
        int32_t *names = static_cast<int32_t *>(op.at[2]) + row * chosen;
        float *weights = static_cast<float *>(op.at[3]) + row * chosen, sum = 0.0f;
        softmax(static_cast<const T *>(op.at[0]) + row * experts, experts, shares);
        for (int64_t k = 0; k < chosen; k++) {
            // The first maximum; if shares are NaN, the first expert not taken yet.
            constexpr float TAKEN = -1.0f;
            int64_t best = -1;
            for (int64_t e = 0; e < experts; e++)
                if (shares[e] != TAKEN && (best < 0 || shares[e] > shares[best]))
                    best = e;
            names[k] = static_cast<int32_t>(best);
            weights[k] = shares[best];
            sum += shares[best];
            shares[best] = TAKEN;
        }
        if (op.size[2])
            for (int64_t k = 0; k < chosen; k++)
                weights[k] /= sum;
    }
    return 0;
}

// at: experts int32 [rows, chosen], row of each pair int64 [pairs], place of each pair int32 [rows, chosen], groups,
// starts int32 [experts] as scratch; size: experts, chosen.
static int64_t sort(const Op &op, int64_t unit) {
    if (unit < 0)
        return 1;
    const int64_t experts = op.size[0], chosen = op.size[1], pairs = *op.count * chosen;
    const int32_t *names = static_cast<const int32_t *>(op.at[0]);
    int64_t *rows = static_cast<int64_t *>(op.at[1]);
    int32_t *places = static_cast<int32_t *>(op.at[2]), *starts = static_cast<int32_t *>(op.at[4]);
    Group *group = static_cast<Group *>(op.at[3]), *last = group + max_groups(pairs, experts);
    std::memset(starts, 0, experts * sizeof(int32_t));
    for (int64_t pair = 0; pair < pairs; pair++)
        starts[names[pair]]++;
    int32_t begin = 0;
    for (int32_t expert = 0; expert < experts; expert++) {
        const int32_t end = begin + starts[expert];
        starts[expert] = begin;
        for (; begin < end; begin += group++->count)
            *group = {expert, begin, std::min<int32_t>(GROUP_ROWS, end - begin)};
    }
    for (; group < last; group++)
        *group = {};
    for (int64_t pair = 0; pair < pairs; pair++) {
        const int32_t place = starts[names[pair]]++;
        places[pair] = place;
        rows[place] = pair / chosen;
    }
    return 0;
}

// Runs PRODUCT for each group, with the group's pairs as rows.
// at, size: those of PRODUCT, then at[6]: groups; at[7]: Stride [6] for the product's tensors; size[6]: experts.
template <int64_t (*PRODUCT)(const Op &, int64_t)> static int64_t grouped(const Op &op, int64_t unit) {
    int64_t rows = 1;
    Op one = op;
    one.count = &rows;
    // A product's units of the same rows are adjacent: each unit here takes the same panels for all rows of a group.
    const int64_t abreast = PRODUCT(one, -1);
    if (unit < 0)
        return abreast * max_groups(*op.count, op.size[6]);
    const Group &group = static_cast<const Group *>(op.at[6])[unit / abreast];
    const Stride *strides = static_cast<const Stride *>(op.at[7]);
    rows = group.count;
    for (int64_t i = 0; i < TENSORS; i++)
        if (one.at[i])
            one.at[i] = static_cast<char *>(op.at[i]) + group.begin * strides[i].row + group.expert * strides[i].expert;
    // A product knows the panels of its own matrix alone.
    next_unit = next_unit / abreast == unit / abreast ? next_unit % abreast : -1;
    const int64_t units = PRODUCT(one, -1);
    for (int64_t part = unit % abreast; part < units; part += abreast)
        PRODUCT(one, part);
    return 0;
}

// at: products [pairs, width], places int32 [rows, chosen], weights [rows, chosen], y [rows, width]; size: width,
// chosen.
template <typename T> static int64_t add(const Op &op, int64_t unit) {
    const int64_t width = op.size[0], chosen = op.size[1], parts = ceil_div(width, UNIT_WIDTH);
    if (unit < 0)
        return *op.count * parts;
    const int64_t row = unit / parts, begin = unit % parts * UNIT_WIDTH, end = std::min(width, begin + UNIT_WIDTH);
    const int32_t *places = static_cast<const int32_t *>(op.at[1]) + row * chosen;
    const float *weights = static_cast<const float *>(op.at[2]) + row * chosen;
    const T *products = static_cast<const T *>(op.at[0]);
    T *y = static_cast<T *>(op.at[3]) + row * width;
    int64_t i = begin;
    for (; i + LANES <= end; i += LANES) {
        Lanes sum = {};
        for (int64_t k = 0; k < chosen; k++)
            sum += weights[k] * load_lanes(products + places[k] * width + i);
        store_lanes(sum, y + i);
    }
    for (; i < end; i++) {
        float sum = 0.0f;
        for (int64_t k = 0; k < chosen; k++)
            sum += weights[k] * widen(products[places[k] * width + i]);
        store(sum, y[i]);
    }
    return 0;
}

} // namespace experts

EXPORT(choose_experts, experts::choose<T>)
EXPORT(sort_by_expert, experts::sort)
EXPORT(add_experts, experts::add<T>)
#define BY_DTYPE(NAME) (sizeof(T) == 4 ? NAME##_f32 : NAME##_bf16)
EXPORT(grouped_packed_linear, experts::grouped<BY_DTYPE(packed_linear)>)
EXPORT(grouped_packed_linear_int8, experts::grouped<BY_DTYPE(packed_linear_int8)>)
EXPORT(grouped_packed_linear_int4, experts::grouped<BY_DTYPE(packed_linear_int4)>)
EXPORT(grouped_packed_linear_mxfp4, experts::grouped<BY_DTYPE(packed_linear_mxfp4)>)
