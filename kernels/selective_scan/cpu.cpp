// A unit runs some rows of a head's state through all tokens of a row of the batch; a state's rows are independent of
// each other. Few tokens use the state where it lies. Many have it transposed, so that outputs are sums of registers and
// not of their lanes, and run in blocks: a tile of the state stays in registers throughout a block and decays once, at
// its start, because within a block inputs grow by what the state should have decayed by. See reference.py.
#include "../lanes.h"

#include <utility>

namespace selective_scan {

// A tile of the state and its inputs and outputs stay in registers: 32 with AVX512 and NEON, else 16.
#if defined(__AVX__) && !defined(__AVX512F__)
constexpr int64_t WIDEST = 2;
#else
constexpr int64_t WIDEST = 4;
#endif
constexpr int64_t MOST_STATES = 256, DEEP = 4, BLOCK = 32;
// With fewer tokens, transposing takes longer than it saves.
constexpr int64_t MANY_TOKENS = 10;
// By how much inputs may grow within a block, as a logarithm: far less than would overflow.
constexpr float MOST_GROWTH = 20.0f;
// At a stride of a power of two, rows of b and c would evict each other from the cache.
constexpr int64_t ROOM = MOST_STATES + 16;

// Some rows of the state of one head of one row of the batch, and what they read and write; see `kernel`.
template <typename T> struct Part {
    int64_t num_tokens, heads, state_dim, x_stride, b_stride, c_stride, out_stride;
    const T *x, *b, *c;
    const float *dt;
    float a, d;
    float *state;
    T *out;
};

template <typename T> INLINE void widened(const T *from, int64_t size, float *to) {
    for (int64_t i = 0; i < size; i += LANES)
        store_lanes(load_lanes(from + i), to + i);
}

template <typename T> INLINE void few_tokens(Part<T> part, int64_t num_rows) {
    constexpr int64_t ROWS = 4;
    alignas(64) float b[MOST_STATES], c[MOST_STATES], x[WIDEST * LANES], y[WIDEST * LANES];
    for (int64_t token = 0; token < part.num_tokens; token++) {
        widened(part.b, part.state_dim, b);
        widened(part.c, part.state_dim, c);
        widened(part.x, num_rows, x);
        const float decay = std::exp(part.a * *part.dt);
        for (int64_t row = 0; row < num_rows; row += ROWS) {
            float *state = part.state + row * part.state_dim;
            Lanes sums[ROWS] = {}, inputs[ROWS];
            for (int64_t r = 0; r < ROWS; r++)
                inputs[r] = all_lanes(x[row + r] * *part.dt);
            for (int64_t i = 0; i < part.state_dim; i += LANES) {
                const Lanes b_lanes = load_lanes(b + i), c_lanes = load_lanes(c + i);
                for (int64_t r = 0; r < ROWS; r++) {
                    float *at = state + r * part.state_dim + i;
                    const Lanes lanes = load_lanes(at) * decay + inputs[r] * b_lanes;
                    store_lanes(lanes, at);
                    sums[r] += lanes * c_lanes;
                }
            }
            for (int64_t r = 0; r < ROWS; r++)
                y[row + r] = sum_of(sums[r]);
        }
        for (int64_t row = 0; row < num_rows; row += LANES)
            store_lanes(load_lanes(y + row) + load_lanes(x + row) * part.d, part.out + row);
        part.x += part.x_stride, part.b += part.b_stride, part.c += part.c_stride;
        part.dt += part.heads, part.out += part.out_stride;
    }
}

// Swaps the lanes of `upper` whose number has the bit APART with those of `lower` whose number has not.
template <int64_t APART, std::size_t... I>
INLINE void exchange(Lanes &upper, Lanes &lower, std::index_sequence<I...>) {
    const Lanes a = upper, b = lower;
#if defined(__clang__)
    upper = __builtin_shufflevector(a, b, (I & APART ? LANES + I - APART : I)...);
    lower = __builtin_shufflevector(a, b, (I & APART ? LANES + I : I + APART)...);
#else
    upper = __builtin_shuffle(a, b, LaneNumbers{(I & APART ? LANES + I - APART : I)...});
    lower = __builtin_shuffle(a, b, LaneNumbers{(I & APART ? LANES + I : I + APART)...});
#endif
}

template <int64_t APART = 1> INLINE void transpose(Lanes (&square)[LANES]) {
    for (int64_t i = 0; i < LANES; i++)
        if (!(i & APART))
            exchange<APART>(square[i], square[i + APART], std::make_index_sequence<LANES>());
    if constexpr (2 * APART < LANES)
        transpose<2 * APART>(square);
}

// WIDE * LANES rows of a state, transposed.
template <int64_t WIDE> using Held = Lanes[MOST_STATES][WIDE];

template <int64_t WIDE> INLINE void take(const float *state, int64_t state_dim, Held<WIDE> &held) {
    for (int64_t i = 0; i < state_dim; i += LANES)
        for (int64_t w = 0; w < WIDE; w++) {
            Lanes square[LANES];
            for (int64_t j = 0; j < LANES; j++)
                square[j] = load_lanes(state + (w * LANES + j) * state_dim + i);
            transpose(square);
            for (int64_t j = 0; j < LANES; j++)
                held[i + j][w] = square[j];
        }
}

template <int64_t WIDE> INLINE void put_back(const Held<WIDE> &held, float factor, float *state, int64_t state_dim) {
    for (int64_t i = 0; i < state_dim; i += LANES)
        for (int64_t w = 0; w < WIDE; w++) {
            Lanes square[LANES];
            for (int64_t j = 0; j < LANES; j++)
                square[j] = held[i + j][w] * factor;
            transpose(square);
            for (int64_t j = 0; j < LANES; j++)
                store_lanes(square[j], state + (w * LANES + j) * state_dim + i);
        }
}

// What a block of tokens reads in float32, and its outputs before the decay. `decay` is since the block's first token.
template <int64_t WIDE> struct Tokens {
    int64_t count;
    float decay[BLOCK];
    Lanes inputs[BLOCK][WIDE], sums[BLOCK][WIDE];
    alignas(64) float b[BLOCK][ROOM], c[BLOCK][ROOM];
};

template <typename T, int64_t WIDE> INLINE void begin(const Part<T> &part, int64_t most, Tokens<WIDE> &tokens) {
    float total = 0.0f;
    for (tokens.count = 0; tokens.count < most; tokens.count++) {
        const int64_t t = tokens.count;
        const float dt = part.dt[t * part.heads];
        total += t ? part.a * dt : 0.0f;
        // A block has at least one token; a NaN ends it, too.
        if (t && !(std::abs(total) <= MOST_GROWTH))
            break;
        tokens.decay[t] = std::exp(total);
        for (int64_t w = 0; w < WIDE; w++) {
            tokens.inputs[t][w] = load_lanes(part.x + t * part.x_stride + w * LANES) * (dt / tokens.decay[t]);
            tokens.sums[t][w] = Lanes{};
        }
        widened(part.b + t * part.b_stride, part.state_dim, tokens.b[t]);
        widened(part.c + t * part.c_stride, part.state_dim, tokens.c[t]);
    }
}

// DEEP columns of the state through a block of tokens, after a decay.
template <int64_t WIDE> INLINE void run(Lanes (*held)[WIDE], float decay, int64_t column, Tokens<WIDE> &tokens) {
    Lanes tile[DEEP][WIDE];
    for (int64_t i = 0; i < DEEP; i++)
        for (int64_t w = 0; w < WIDE; w++)
            tile[i][w] = held[i][w] * decay;
    for (int64_t t = 0; t < tokens.count; t++) {
        const float *b = tokens.b[t] + column, *c = tokens.c[t] + column;
        Lanes sums[WIDE];
        for (int64_t w = 0; w < WIDE; w++)
            sums[w] = tokens.sums[t][w];
        for (int64_t i = 0; i < DEEP; i++)
            for (int64_t w = 0; w < WIDE; w++) {
                tile[i][w] += tokens.inputs[t][w] * b[i];
                sums[w] += tile[i][w] * c[i];
            }
        for (int64_t w = 0; w < WIDE; w++)
            tokens.sums[t][w] = sums[w];
    }
    for (int64_t i = 0; i < DEEP; i++)
        for (int64_t w = 0; w < WIDE; w++)
            held[i][w] = tile[i][w];
}

template <typename T, int64_t WIDE> INLINE void many_tokens(Part<T> part) {
    Held<WIDE> held;
    Tokens<WIDE> tokens;
    take<WIDE>(part.state, part.state_dim, held);
    float owed = 1.0f; // decay that `held` has yet to suffer
    for (int64_t done = 0; done < part.num_tokens; done += tokens.count) {
        begin(part, std::min(BLOCK, part.num_tokens - done), tokens);
        const float decay = owed * std::exp(part.a * *part.dt);
        for (int64_t i = 0; i < part.state_dim; i += DEEP)
            run<WIDE>(held + i, decay, i, tokens);
        owed = tokens.decay[tokens.count - 1];
        for (int64_t t = 0; t < tokens.count; t++) {
            for (int64_t w = 0; w < WIDE; w++)
                store_lanes(tokens.sums[t][w] * tokens.decay[t] + load_lanes(part.x + w * LANES) * part.d,
                            part.out + w * LANES);
            part.x += part.x_stride, part.out += part.out_stride;
        }
        part.b += tokens.count * part.b_stride, part.c += tokens.count * part.c_stride;
        part.dt += tokens.count * part.heads;
    }
    put_back<WIDE>(held, owed, part.state, part.state_dim);
}

template <typename T, int64_t WIDE = WIDEST> INLINE void many_tokens(const Part<T> &part, int64_t width) {
    if (width == WIDE)
        many_tokens<T, WIDE>(part);
    else if constexpr (WIDE > 1)
        many_tokens<T, WIDE - 1>(part, width);
}

// at: x, dt float32, a float32, b, c, d float32 or null, state float32, y, as in the reference; the numbers of a token
// are contiguous in x, b and c. count: rows; size: tokens per row, heads, head_dim (a multiple of 16), groups, state_dim
// (a multiple of 16, at most 256), token strides of x, b and c.
template <typename T> static int64_t kernel(const Op &op, int64_t unit) {
    const int64_t num_tokens = op.size[0], heads = op.size[1], head_dim = op.size[2], state_dim = op.size[4];
    const int64_t parts = ceil_div(head_dim, WIDEST * LANES);
    if (unit < 0)
        return *op.count * heads * parts;
    const int64_t first = unit % parts * WIDEST * LANES, head = unit / parts % heads, row = unit / parts / heads;
    const int64_t num_rows = std::min(WIDEST * LANES, head_dim - first), group = head / (heads / op.size[3]);
    const int64_t token = row * num_tokens;
    const float *d = static_cast<const float *>(op.at[5]);
    const Part<T> part = {
        .num_tokens = num_tokens,
        .heads = heads,
        .state_dim = state_dim,
        .x_stride = op.size[5],
        .b_stride = op.size[6],
        .c_stride = op.size[7],
        .out_stride = heads * head_dim,
        .x = static_cast<const T *>(op.at[0]) + token * op.size[5] + head * head_dim + first,
        .b = static_cast<const T *>(op.at[3]) + token * op.size[6] + group * state_dim,
        .c = static_cast<const T *>(op.at[4]) + token * op.size[7] + group * state_dim,
        .dt = static_cast<const float *>(op.at[1]) + token * heads + head,
        .a = static_cast<const float *>(op.at[2])[head],
        .d = d ? d[head] : 0.0f,
        .state = static_cast<float *>(op.at[6]) + ((row * heads + head) * head_dim + first) * state_dim,
        .out = static_cast<T *>(op.at[7]) + (token * heads + head) * head_dim + first,
    };
    if (num_tokens < MANY_TOKENS)
        few_tokens(part, num_rows);
    else
        many_tokens(part, num_rows / LANES);
    return 0;
}

} // namespace selective_scan

EXPORT(selective_scan, selective_scan::kernel<T>)
