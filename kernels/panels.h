// Products with a matrix laid out in panels: the loop behind most CPU arithmetic.
//
// A panel is 16 output columns over the whole depth, in reading order:
//     float32    [depth][16]
//     bfloat16   [depth / 2][16][2]    two depth elements adjacent, as the dot product instructions take them
//
// Weights are laid out this way at load, keys and values when they are written to the cache. The products use tile
// registers (AMX) or matrix instructions (ARM) if the processor has them, else bfloat16 dot products, else plain
// vectors.
#pragma once

#include "squares.h"

constexpr int64_t COLUMNS = 16, PANEL_LANES = COLUMNS / LANES; // of a panel

// A tile's sums and operands stay in registers: 32 with AVX512 and NEON, else 16.
#if defined(__AVX512F__)
template <typename T> constexpr int64_t MAX_TILE_ROWS = 12;
constexpr int64_t TILE_PANELS = 2;
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
template <typename T> constexpr int64_t MAX_TILE_ROWS = 6;
constexpr int64_t TILE_PANELS = 1;
#else
template <typename T> constexpr int64_t MAX_TILE_ROWS = sizeof(T) == 4 ? 6 : 5;
constexpr int64_t TILE_PANELS = 1;
#endif

template <typename T> struct Depth;
template <> struct Depth<float> {
    static constexpr int64_t step = 1;
};
template <> struct Depth<bfloat16> {
    static constexpr int64_t step = 2;
};

// The index of element (depth k, column n < 16) in a panel.
template <typename T> INLINE int64_t in_panel(int64_t k, int64_t n) {
    constexpr int64_t step = Depth<T>::step;
    return (k / step * COLUMNS + n) * step + k % step;
}

// A step of the depth is multiplied in turns, each with its own factor of a row and its own lanes of a panel.
#if defined(HAS_PAIR_PRODUCTS)
template <typename T> using Factor = T;
template <typename T> constexpr int64_t TURNS = 1;

INLINE LaneBits load_panel(const bfloat16 *panel, int64_t) {
    LaneBits bits;
    std::memcpy(&bits, panel, sizeof bits);
    return bits;
}

INLINE void multiply_add(Lanes &sum, const bfloat16 *a, LaneBits panel) {
    uint32_t pair;
    std::memcpy(&pair, a, sizeof pair);
    sum = add_pair_products(sum, LaneBits{} + pair, panel);
}
#else
// Without bfloat16 instructions, rows are widened once for all panels.
template <typename T> using Factor = float;
template <typename T> constexpr int64_t TURNS = Depth<T>::step;

INLINE Lanes load_panel(const bfloat16 *panel, int64_t turn) {
    LaneBits bits;
    std::memcpy(&bits, panel, sizeof bits);
    return (Lanes)(turn ? bits & 0xffff0000u : bits << 16);
}
#endif

INLINE Lanes load_panel(const float *panel, int64_t) { return load_lanes(panel); }

INLINE void multiply_add(Lanes &sum, const float *a, Lanes panel) { sum += *a * panel; }

// Copies numbers as the products take them.
template <typename T> INLINE void copy_factors(const T *from, int64_t count, Factor<T> *to) {
    if constexpr (sizeof(T) == sizeof(Factor<T>)) {
        std::memcpy(to, from, count * sizeof *to);
    } else {
#pragma omp simd
        for (int64_t i = 0; i < count; i++)
            to[i] = widen(from[i]);
    }
}

// Returns a[rows][depth] as the products take it, which it may be already, and sets a_stride to its stride; valid until
// the thread's next call.
template <typename T, typename A>
static inline const Factor<T> *factors_of(int64_t rows, const A *a, int64_t &a_stride, int64_t depth) {
    if constexpr (sizeof(A) == sizeof(Factor<T>)) {
        return a;
    } else {
        thread_local std::vector<float> wide;
        wide.resize(std::max<size_t>(wide.size(), rows * depth));
        for (int64_t r = 0; r < rows; r++)
            copy_factors(a + r * a_stride, depth, wide.data() + r * depth);
        a_stride = depth;
        return wide.data();
    }
}

// Adjacent panels whose depth is split into segments anywhere in memory, such as cache blocks. Weights are one segment.
template <typename T> struct Panels {
    const T *const *segments;
    int64_t num_segments, depth; // the depth of one segment, a multiple of the panels' step
    int64_t stride;              // between panels of a segment
    // What is multiplied after each segment and laid out like it, to be prefetched; if null, what follows in memory is.
    const T *const *next = nullptr;
};

// What follows is prefetched so far ahead: processors do it by themselves, but not across 4 KiB pages.
constexpr int64_t AHEAD_BYTES = 4096, LINE_BYTES = 64;

// At most so many bytes are prefetched as what comes next: the second cache holds them and those in use.
constexpr int64_t NEXT_BYTES = 1 << 18;

// Whether this process may use tile registers; a thread pool requests them from the OS kernel when it is created.
static bool may_use_tiles = false;

// The panels of the unit that this thread runs next, of `units` units with as many elements each; null if it is not
// known or they are too many. Tile registers are fed by what follows.
template <typename T> INLINE const T *next_panels(const T *matrix, int64_t units, int64_t unit_size) {
    const bool is_known = next_unit >= 0 && unit_size * static_cast<int64_t>(sizeof(T)) <= NEXT_BYTES && !may_use_tiles;
    return is_known ? matrix + next_unit % units * unit_size : nullptr;
}

// c[ROWS][PANELS * 16] = (c, or 0) + a[ROWS][all depth] * panels from `first_panel` on. What is next for FETCHED panels
// from `fetched` on is prefetched.
template <typename T, int64_t ROWS, int64_t PANELS, int64_t FETCHED>
static inline void multiply_tile(const Factor<T> *a, int64_t a_stride, const Panels<T> &panels, int64_t first_panel,
                                 int64_t fetched, bool add, float *c, int64_t c_stride) {
    constexpr int64_t step = Depth<T>::step, parts = PANELS * PANEL_LANES;
    Lanes sums[ROWS][parts] = {};
    if (add)
        for (int64_t r = 0; r < ROWS; r++)
            for (int64_t p = 0; p < parts; p++)
                sums[r][p] = load_lanes(c + r * c_stride + p * LANES);
    // Panels that come next and lie side by side are fetched in one stream, which is faster than two.
    const bool in_one = panels.next && panels.stride == panels.depth * COLUMNS;
    const int64_t pace = in_one ? FETCHED * COLUMNS : COLUMNS, gap = in_one ? COLUMNS * step : panels.stride;
    for (int64_t segment = 0; segment < panels.num_segments; segment++, a += panels.depth) {
        const T *panel = panels.segments[segment] + first_panel * panels.stride;
        const T *next = nullptr;
        if constexpr (FETCHED > 0)
            next = panels.next ? panels.next[segment] + fetched * panels.stride : panel + AHEAD_BYTES / sizeof(T);
        for (int64_t k = 0; k < panels.depth; k += step)
            for (int64_t turn = 0; turn < TURNS<T>; turn++) {
                decltype(load_panel(panel, turn)) columns[parts];
                for (int64_t p = 0; p < parts; p++) {
                    const int64_t of_panel = p / PANEL_LANES, at = p % PANEL_LANES * LANES * step;
                    columns[p] = load_panel(panel + of_panel * panels.stride + at + k * COLUMNS, turn);
                    if (p < FETCHED * PANEL_LANES && turn == 0 && p * LANES * step * sizeof(T) % LINE_BYTES == 0)
                        __builtin_prefetch(next + of_panel * gap + at + k * pace);
                }
                for (int64_t r = 0; r < ROWS; r++)
                    for (int64_t p = 0; p < parts; p++)
                        multiply_add(sums[r][p], a + r * a_stride + k + turn, columns[p]);
            }
    }
    for (int64_t r = 0; r < ROWS; r++)
        for (int64_t p = 0; p < parts; p++)
            store_lanes(sums[r][p], c + r * c_stride + p * LANES);
}

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
// The same for one panel, by matrix instructions.
template <int64_t ROWS, int64_t FETCHED>
static inline void multiply_squares(const bfloat16 *a, int64_t a_stride, const Panels<bfloat16> &panels,
                                    int64_t first_panel, int64_t fetched, bool add, float *c, int64_t c_stride) {
    squares::Tile<Lanes, ROWS> tile = {};
    if (add)
        squares::load<ROWS>(tile, c, c_stride);
    for (int64_t segment = 0; segment < panels.num_segments; segment++, a += panels.depth) {
        const bfloat16 *panel = panels.segments[segment] + first_panel * panels.stride;
        const bfloat16 *next =
            panels.next ? panels.next[segment] + fetched * panels.stride : panel + AHEAD_BYTES / sizeof *panel;
        int64_t k = 0;
        for (; k + 4 <= panels.depth; k += 4) {
            if constexpr (FETCHED > 0) {
                __builtin_prefetch(next + k * COLUMNS);
                __builtin_prefetch(next + (k + 2) * COLUMNS);
            }
            squares::multiply_words<ROWS, 2>(tile, a + k, a_stride, panel + k * COLUMNS);
        }
        if (k < panels.depth)
            squares::multiply_words<ROWS, 1>(tile, a + k, a_stride, panel + k * COLUMNS);
    }
    squares::store<ROWS>(tile, c, c_stride);
}
#endif

// Calls tile<ROWS>() with as many rows as there are, at most MAX_ROWS.
template <int64_t MAX_ROWS, typename Tile> INLINE void with_rows(int64_t rows, const Tile &tile) {
    if constexpr (MAX_ROWS > 0) {
        if (rows >= MAX_ROWS)
            tile.template operator()<MAX_ROWS>();
        else
            with_rows<MAX_ROWS - 1>(rows, tile);
    }
}

// Calls tile<ROWS, PANELS, FETCHED>(row, panel, fetched) for all rows and panels, at most MAX_ROWS and MAX_PANELS at a
// time. Where panels are FAR, FETCHED are to be prefetched, from `fetched` on: by the first rows, which bring them into
// the cache, or where the panels that come next are known by the first and the second rows, a half each, so that memory
// and products share the time.
template <int64_t MAX_ROWS, int64_t MAX_PANELS, bool FAR, typename Tile>
static inline void for_tiles(int64_t rows, int64_t num_panels, bool has_next, const Tile &tile) {
    const bool in_halves = has_next && rows > MAX_ROWS;
    for (int64_t p = 0; p < num_panels; p += MAX_PANELS)
        for (int64_t r = 0; r < rows; r += MAX_ROWS) {
            const int64_t pass = r / MAX_ROWS, fetched = in_halves ? p + pass : p;
            const auto multiply_some = [&]<int64_t PANELS, int64_t FETCHED>() {
                with_rows<MAX_ROWS>(rows - r, [&]<int64_t ROWS>() {
                    tile.template operator()<ROWS, PANELS, FETCHED>(r, p, fetched);
                });
            };
            const bool fetches = FAR && pass < (in_halves ? MAX_PANELS : 1);
            if (p + MAX_PANELS > num_panels)
                fetches ? multiply_some.template operator()<1, FAR>() : multiply_some.template operator()<1, 0>();
            else if (!fetches)
                multiply_some.template operator()<MAX_PANELS, 0>();
            else if (in_halves)
                multiply_some.template operator()<MAX_PANELS, FAR>();
            else
                multiply_some.template operator()<MAX_PANELS, FAR * MAX_PANELS>();
        }
}

#if defined(__AMX_BF16__)
struct alignas(64) TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {};
};

constexpr int64_t TILE_ROWS = 16;

// The current shape of this thread's tiles; no rows if they are not in use.
struct TileShape {
    int64_t first_rows = 0, second_rows = 0, depth = 0;
    bool operator==(const TileShape &) const = default;
};
static thread_local TileShape tile_shape;

// Tiles 0 to 3 are sums (two of rows by two of columns), 4 and 5 rows of a, 6 and 7 panels.
static inline void shape_tiles(int64_t first_rows, int64_t second_rows, int64_t tile_depth) {
    const TileShape wanted{first_rows, second_rows, tile_depth};
    if (tile_shape == wanted)
        return;
    tile_shape = wanted;
    TileShapes shapes;
    shapes.rows[0] = shapes.rows[1] = shapes.rows[4] = static_cast<uint8_t>(first_rows);
    shapes.rows[2] = shapes.rows[3] = shapes.rows[5] = static_cast<uint8_t>(second_rows);
    shapes.row_bytes[4] = shapes.row_bytes[5] = static_cast<uint16_t>(2 * tile_depth);
    shapes.rows[6] = shapes.rows[7] = static_cast<uint8_t>(tile_depth / 2);
    // Not the intrinsic: GCC's declares only the first eight bytes as read, and the optimizer drops the others.
    asm volatile("ldtilecfg %0" ::"m"(shapes));
}

INLINE void prefetch_rows(const bfloat16 *from, int64_t stride, int64_t rows) {
    for (int64_t r = 0; r < rows; r++)
        _mm_prefetch(reinterpret_cast<const char *>(from + r * stride), _MM_HINT_T0);
}

// c[rows][32] (+)= a * two panels, in the tiles' current shape: at most 16 rows, or 32 with TWO. FAR is for panels that
// come from memory: for cached panels, prefetching costs more than it saves.
template <bool TWO, bool ADD, bool FAR>
static inline void multiply_tiles(const bfloat16 *a, int64_t a_stride, const Panels<bfloat16> &panels,
                                  int64_t first_panel, int64_t tile_depth, float *c, int64_t c_stride) {
    const int64_t c_bytes = c_stride * 4, a_bytes = a_stride * 2, offset = first_panel * panels.stride;
    float *c_second = c + TILE_ROWS * c_stride;
    if constexpr (ADD) {
        _tile_loadd(0, c, c_bytes);
        _tile_loadd(1, c + COLUMNS, c_bytes);
        if constexpr (TWO) {
            _tile_loadd(2, c_second, c_bytes);
            _tile_loadd(3, c_second + COLUMNS, c_bytes);
        }
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t segment = 0; segment < panels.num_segments; segment++) {
        const bfloat16 *first = panels.segments[segment] + offset, *second = first + panels.stride;
        for (int64_t k = 0; k < panels.depth; k += tile_depth, a += tile_depth) {
            if constexpr (FAR) {
                // What follows is prefetched two steps ahead.
                const bfloat16 *next = panels.next ? panels.next[segment] + offset : first + 2 * tile_depth * COLUMNS;
                prefetch_rows(next + k * COLUMNS, 2 * COLUMNS, tile_depth / 2);
                prefetch_rows(next + k * COLUMNS + panels.stride, 2 * COLUMNS, tile_depth / 2);
            }
            _tile_loadd(4, a, a_bytes);
            _tile_loadd(6, first + k * COLUMNS, 64);
            _tile_loadd(7, second + k * COLUMNS, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            if constexpr (TWO) {
                _tile_loadd(5, a + TILE_ROWS * a_stride, a_bytes);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
        }
    }
    _tile_stored(0, c, c_bytes);
    _tile_stored(1, c + COLUMNS, c_bytes);
    if constexpr (TWO) {
        _tile_stored(2, c_second, c_bytes);
        _tile_stored(3, c_second + COLUMNS, c_bytes);
    }
}

// c[rows][num_panels * 16] (+)= a * panels, for an even number of panels and a depth that is a multiple of 16.
template <bool ADD, bool FAR>
static inline void multiply_amx(int64_t rows, const bfloat16 *a, int64_t a_stride, const Panels<bfloat16> &panels,
                                int64_t num_panels, float *c, int64_t c_stride) {
    const int64_t tile_depth = panels.depth % 32 ? 16 : 32;
    for (int64_t row = 0; row < rows; row += 2 * TILE_ROWS) {
        const int64_t count = std::min(rows - row, 2 * TILE_ROWS);
        shape_tiles(std::min(count, TILE_ROWS), std::max<int64_t>(count - TILE_ROWS, 1), tile_depth);
        for (int64_t p = 0; p < num_panels; p += 2)
            (count > TILE_ROWS ? multiply_tiles<true, ADD, FAR> : multiply_tiles<false, ADD, FAR>)(
                a + row * a_stride, a_stride, panels, p, tile_depth, c + row * c_stride + p * COLUMNS, c_stride);
    }
}
#endif

// Releases the tiles: otherwise every context switch would save them.
static inline void release_tiles() {
#if defined(__AMX_BF16__)
    if (tile_shape.first_rows) {
        _tile_release();
        tile_shape = {};
    }
#endif
}

// c[rows][num_panels * 16] = a[rows][num_segments * depth] * panels, added to c where ADD; FAR as above. `a` is
// as in `factors_of`.
template <bool ADD, bool FAR, typename T, typename A>
static inline void multiply(int64_t rows, const A *a, int64_t a_stride, const Panels<T> &panels, int64_t num_panels,
                            float *c, int64_t c_stride) {
    int64_t p = 0;
#if defined(__AMX_BF16__)
    if constexpr (sizeof(T) == 2)
        if (may_use_tiles && panels.depth % 16 == 0 && num_panels > 1) {
            p = num_panels / 2 * 2;
            multiply_amx<ADD, FAR>(rows, a, a_stride, panels, p, c, c_stride);
        }
#endif
    if (p == num_panels)
        return;
    const Factor<T> *factors = factors_of<T>(rows, a, a_stride, panels.num_segments * panels.depth);
    for_tiles<MAX_TILE_ROWS<T>, TILE_PANELS, FAR>(
        rows, num_panels - p, panels.next != nullptr,
        [&]<int64_t ROWS, int64_t PANELS, int64_t FETCHED>(int64_t row, int64_t panel, int64_t fetched) {
            const Factor<T> *some = factors + row * a_stride;
            float *to = c + row * c_stride + (p + panel) * COLUMNS;
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
            if constexpr (sizeof(T) == 2 && ROWS > 1)
                return multiply_squares<ROWS, FETCHED>(some, a_stride, panels, p + panel, p + fetched, ADD, to, c_stride);
#endif
            multiply_tile<T, ROWS, PANELS, FETCHED>(some, a_stride, panels, p + panel, p + fetched, ADD, to, c_stride);
        });
}
