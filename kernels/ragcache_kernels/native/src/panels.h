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
    const char *from = next->rows + next->at[row];
    for (int i = 0; i < next->bytes; i += 64) __builtin_prefetch(from + i, 0, 2);
    __builtin_prefetch(from + next->bytes - 1, 0, 2);
}

/* LANES words of a row; at its end fewer. */
INLINE bits words_at(const char *row, int word, int bytes) {
    bits words = {0};
    if (4 * (word + LANES) <= bytes) {
        memcpy(&words, row + 4 * word, sizeof words);
    } else {
        memcpy(&words, row + 4 * word, bytes - 4 * word);
    }
    return words;
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

/* To panels of `depth` rows, which is `dim` rounded up to whole words. Lanes without a key repeat
 * another one. */
INLINE void load_keys(const rows *now, const rows *next, enum dtype dtype, int depth, float *to) {
    int words = (now->bytes + 3) / 4, each = 4 / size_of(dtype);
    for (int key = now->first / LANES * LANES; key < now->last; key += LANES) {
        float *panel = to + key / PANEL * PANEL * depth + key % PANEL;
        for (int lane = 0; lane < LANES; lane++) fetch(next, key + lane);
        for (int i = 0; i < words; i += LANES) {
            bits rows[LANES];
            for (int lane = 0; lane < LANES; lane++) {
                int row = key + lane < now->first  ? now->first
                          : key + lane < now->last ? key + lane
                                                   : now->last - 1;
                rows[lane] = words_at(now->rows + now->at[row], i, now->bytes);
            }
            transpose(rows);
            int count = words - i < LANES ? words - i : LANES;
            for (int word = 0; word < count; word++)
                unpack(rows[word], dtype, panel + (i + word) * each * PANEL);
        }
    }
}

/* To panels of KEYS rows; columns behind the last are 0. */
INLINE void load_values(const rows *now, const rows *next, enum dtype dtype, int dim, float *to) {
    for (int row = now->first; row < now->last; row++) {
        const char *from = now->rows + now->at[row];
        fetch(next, row);
        for (int i = 0; i < in_panels(dim); i += LANES) {
            int count = dim - i < LANES ? dim - i : LANES;
            floats value = count == LANES ? load(from, i, dtype)
                           : count > 0    ? load_some(from, i, dtype, count)
                                          : fill(0);
            store(to + (i / PANEL * KEYS + row) * PANEL + i % PANEL, 0, F32, value);
        }
    }
}

/* c = shrink · c + a b for `height` rows of a and c and one panel b of `depth` rows. Without
 * `shrink`, c is not read. Every element is summed in the order of depth. */
INLINE void multiply_rows(
    int height, const float *a, int64_t a_row, const float *b, int depth, float *c, int64_t c_row,
    const float *shrink
) {
    floats left[HEIGHT], right[HEIGHT];
    for (int i = 0; i < height; i++) {
        left[i] = shrink ? load(c + i * c_row, 0, F32) * shrink[i] : fill(0);
        right[i] = shrink ? load(c + i * c_row, LANES, F32) * shrink[i] : fill(0);
    }
    for (int k = 0; k < depth; k++) {
        floats low = load(b + k * PANEL, 0, F32), high = load(b + k * PANEL, LANES, F32);
        for (int i = 0; i < height; i++) {
            floats factor = fill(a[i * a_row + k]);
            left[i] += factor * low;
            right[i] += factor * high;
        }
    }
    for (int i = 0; i < height; i++) {
        store(c + i * c_row, 0, F32, left[i]);
        store(c + i * c_row, LANES, F32, right[i]);
    }
}

/* c = shrink · c + a b for any number of rows and `panels` of b, which are `stride` apart. */
INLINE void multiply(
    int rows, const float *a, int64_t a_row, const float *b, int depth, int64_t stride, int panels,
    float *c, int64_t c_row, const float *shrink
) {
    for (int panel = 0; panel < panels; panel++, b += stride, c += PANEL) {
        for (int row = 0; row < rows; row += HEIGHT) {
            const float *from = a + row * a_row, *less = shrink ? shrink + row : NULL;
            float *to = c + row * c_row;
            switch (rows - row) {
            case 1: multiply_rows(1, from, a_row, b, depth, to, c_row, less); break;
            case 2: multiply_rows(2, from, a_row, b, depth, to, c_row, less); break;
            case 3: multiply_rows(3, from, a_row, b, depth, to, c_row, less); break;
            case 4: multiply_rows(4, from, a_row, b, depth, to, c_row, less); break;
            case 5: multiply_rows(5, from, a_row, b, depth, to, c_row, less); break;
            default: multiply_rows(HEIGHT, from, a_row, b, depth, to, c_row, less);
            }
        }
    }
}
