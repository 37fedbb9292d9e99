/* Keys and values of a few slots in float32, in panels as wide as two vectors, and products with
 * them.
 *
 * Keys lie transposed, so that the lanes of a vector are keys: scores need no sums across lanes.
 */
#pragma once

#include <stddef.h>

#include "pool.h"

enum {
    KEYS = 64, /* of a block of work: its keys and values fit the first and second cache */
    PANEL = 2 * LANES,
    LONG = KEYS + 1, /* rows that a panel of values takes: no multiple of a page, which caches dislike */
    HEIGHT = 6, /* rows of a product at once: with two vectors each, 12 sums fill the registers */
};

INLINE int in_panels(int count) { return (count + PANEL - 1) / PANEL * PANEL; }

/* Where rows `first` to `last` − 1 of a KV head lie, in bytes from its first, for KEYS slots from a
 * multiple of KEYS on: a key's lane, and so the order of every sum, depends on its position alone. */
typedef struct {
    const char *rows;
    int64_t at[KEYS];
    float scales[KEYS]; /* where the pool has any */
    int first, last, bytes;
} rows;

/* The next rows are fetched while these are used. */
INLINE void fetch(const rows *next, int row) {
    if (row < next->first || row >= next->last) return;
    const char *from = next->rows + next->at[row], *end = from + next->bytes;
    for (from -= (uintptr_t)from % 64; from < end; from += 64) __builtin_prefetch(from, 0, 2);
}

/* The elements of a word of each key, to rows of a panel that follow one another. */
INLINE void unpack(bits words, enum dtype dtype, float *to) {
    if (dtype == F32) {
        store(to, 0, F32, as_floats(words));
    } else if (dtype == BF16) {
        store(to, 0, F32, as_floats(words << 16));
        store(to, PANEL, F32, as_floats(words & 0xffff0000));
    } else {
        for (int i = 0; i < 4; i++) {
            ints byte = (ints)(words << (24 - 8 * i)) >> 24;
            floats value = __builtin_convertvector(byte, floats);
            store(to, i * PANEL, F32, dtype == I8 ? value : widen_float8((bits)byte));
        }
    }
}

/* Rows that `load_keys` writes to a panel: whole vectors of words. */
INLINE int depth_of(int dim) {
    int words = (dim + 3) / 4 * 4;
    return words > 4 * LANES ? words : 4 * LANES;
}

/* Rows that are too short for a vector of words, or end within one, in a place with room. */
INLINE void copy_rows(const char *from[LANES], int bytes, char (*copies)[4 * MAX_DIM]) {
    for (int lane = 0; lane < LANES; lane++) {
        memcpy(copies[lane], from[lane], bytes);
        from[lane] = copies[lane];
    }
}

/* To panels of `depth` rows. Lanes without a key repeat another one. */
INLINE void load_keys(const rows *now, const rows *next, enum dtype dtype, int depth, float *to) {
    int words = (now->bytes + 3) / 4, each = 4 / size_of(dtype);
    int last = words > LANES ? words - LANES : 0;
    for (int key = now->first / LANES * LANES; key < now->last; key += LANES) {
        float *panel = to + key / PANEL * PANEL * depth + key % PANEL;
        const char *from[LANES];
        char copies[LANES][4 * MAX_DIM];
        for (int lane = 0; lane < LANES; lane++) {
            int row = key + lane;
            row = row < now->first ? now->first : row < now->last ? row : now->last - 1;
            from[lane] = now->rows + now->at[row];
            fetch(next, key + lane);
        }
        if (now->bytes % 4 || words < LANES) copy_rows(from, now->bytes, copies);
        for (int i = 0; i < words; i += LANES) {
            int word = i < last ? i : last; /* the last vector may overlap the one before */
            bits rows[LANES];
            for (int lane = 0; lane < LANES; lane++)
                memcpy(rows + lane, from[lane] + 4 * word, sizeof *rows);
            transpose(rows);
            for (int lane = 0; lane < LANES; lane++)
                unpack(rows[lane], dtype, panel + (word + lane) * each * PANEL);
        }
    }
}

/* To panels of KEYS rows; columns behind the last are 0. */
INLINE void load_values(const rows *now, const rows *next, enum dtype dtype, int dim, float *to) {
    for (int row = now->first; row < now->last; row++) {
        const char *from = now->rows + now->at[row];
        float *panel = to + row * PANEL;
        int i = 0;
        fetch(next, row);
        for (; i + PANEL <= dim; i += PANEL, panel += LONG * PANEL) {
            store(panel, 0, F32, load(from, i, dtype));
            store(panel, LANES, F32, load(from, i + LANES, dtype));
        }
        if (i == dim) continue;
        int left = dim - i < LANES ? dim - i : LANES, right = dim - i - left;
        store(panel, 0, F32, load_some(from, i, dtype, left));
        store(panel, LANES, F32, right ? load_some(from, i + LANES, dtype, right) : fill(0));
    }
}

/* c = shrink · c + a b for `height` rows of a and c and `panels` of b, which have `depth` rows and
 * are `stride` apart. Without `shrink`, c is not read. Every element is summed in the order of
 * depth, however many there are. */
INLINE void multiply_rows(
    int height, int panels, const float *a, int64_t a_row, const float *b, int depth,
    int64_t stride, float *c, int64_t c_row, const float *shrink
) {
    floats sums[HEIGHT][4];
    for (int i = 0; i < height; i++)
        for (int v = 0; v < 2 * panels; v++)
            sums[i][v] = shrink ? load(c + i * c_row, v * LANES, F32) * shrink[i] : fill(0);
    for (int k = 0; k < depth; k++, b += PANEL) {
        floats columns[4];
        for (int v = 0; v < 2 * panels; v++)
            columns[v] = load(b + v / 2 * stride, v % 2 * LANES, F32);
        for (int i = 0; i < height; i++) {
            floats factor = fill(a[i * a_row + k]);
            for (int v = 0; v < 2 * panels; v++) sums[i][v] += factor * columns[v];
        }
    }
    for (int i = 0; i < height; i++)
        for (int v = 0; v < 2 * panels; v++) store(c + i * c_row, v * LANES, F32, sums[i][v]);
}

/* The same for any number of rows: as many at once as keep both multipliers busy. */
INLINE void multiply(
    int rows, int panels, const float *a, int64_t a_row, const float *b, int depth, int64_t stride,
    float *c, int64_t c_row, const float *shrink
) {
    for (int width = 0; panels > 0; panels -= width, b += width * stride, c += width * PANEL) {
        width = rows <= HEIGHT / 2 && panels > 1 ? 2 : 1;
        for (int row = 0; row < rows; row += HEIGHT) {
            const float *from = a + row * a_row, *less = shrink ? shrink + row : NULL;
            float *to = c + row * c_row;
#define CASE(height, width) \
    multiply_rows(height, width, from, a_row, b, depth, stride, to, c_row, less)
            switch (10 * width + (rows - row < HEIGHT ? rows - row : HEIGHT)) {
            case 11: CASE(1, 1); break;
            case 12: CASE(2, 1); break;
            case 13: CASE(3, 1); break;
            case 14: CASE(4, 1); break;
            case 15: CASE(5, 1); break;
            case 16: CASE(6, 1); break;
            case 21: CASE(1, 2); break;
            case 22: CASE(2, 2); break;
            case 23: CASE(3, 2); break;
            }
#undef CASE
        }
    }
}
