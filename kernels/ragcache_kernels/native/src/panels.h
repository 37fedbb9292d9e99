/* Keys and values of a few slots, in panels as wide as two vectors, and products with them.
 *
 * A panel's rows are words of 32 bits: `kept` is F32, or BF16 for two elements of a column that
 * follow each other. Those have an instruction where DOT_PRODUCTS is set, and hold quantised rows
 * as exactly.
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
    GROUPS = KEYS / LANES,
    HEIGHT = 6, /* rows of a product at once: with two vectors each, 12 sums fill 16 registers */
    WIDTH = LANES == 16 ? 2 : 1, /* panels at once: there are 32 of them */
};

INLINE int in_panels(int count) { return (count + PANEL - 1) / PANEL * PANEL; }

/* Rows that elements of a column take. */
INLINE int in_words(int count, enum dtype kept) { return kept == F32 ? count : (count + 1) / 2; }

/* Where rows `first` to `last` − 1 of a KV head lie, in bytes from its first, for KEYS slots from a
 * multiple of KEYS on: a key's lane, and so the order of every sum, depends on its position alone. */
typedef struct {
    const char *rows;
    int64_t at[KEYS];
    float scales[KEYS]; /* where the pool has any */
    int first, last, bytes;
    const char *from[GROUPS];    /* of a paired pool: where each group begins */
    const char *pairs[KEYS / 2]; /* and each pair of values, */
    char edges[2][4 * MAX_DIM];  /* of which those at both ends may be cut */
} rows;

/* The next rows are fetched while these are used. */
INLINE void fetch(const rows *next, int row) {
    if (row < next->first || row >= next->last) return;
    const char *from = next->rows + next->at[row], *end = from + next->bytes;
    for (from -= (uintptr_t)from % 64; from < end; from += 64) __builtin_prefetch(from, 0, 2);
}

/* Four quantised elements of each key, to float32. */
INLINE void widen_word(bits word, enum dtype dtype, floats value[4]) {
    for (int i = 0; i < 4; i++) {
        ints byte = (ints)(word << (24 - 8 * i)) >> 24;
        value[i] = dtype == I8 ? __builtin_convertvector(byte, floats) : widen_float8((bits)byte);
    }
}

/* The elements of a word of each key, to rows of a panel that follow one another. */
INLINE void unpack(bits word, enum dtype dtype, enum dtype kept, float *to) {
    if (dtype == kept) {
        store(to, 0, F32, as_floats(word));
    } else if (dtype == BF16) {
        store(to, 0, F32, as_floats(low_half(word)));
        store(to, PANEL, F32, as_floats(high_half(word)));
    } else {
        floats value[4];
        widen_word(word, dtype, value);
        if (kept == BF16) {
            store(to, 0, F32, as_floats(pair_of(value[0], value[1])));
            store(to, PANEL, F32, as_floats(pair_of(value[2], value[3])));
        } else {
            for (int i = 0; i < 4; i++) store(to, i * PANEL, F32, value[i]);
        }
    }
}

/* Rows that `load_keys` writes to a panel at most: whole vectors of words. */
INLINE int depth_of(int dim) {
    int words = (dim + 3) / 4 * 4;
    return words > 4 * LANES ? words : 4 * LANES;
}

/* Rows that are too short for a vector of words, or end within one, in a place with room. */
INLINE void copy_rows(const char *from[LANES], int bytes, char (*copies)[4 * MAX_DIM + 4]) {
    for (int lane = 0; lane < LANES; lane++) {
        memcpy(copies[lane], from[lane], bytes);
        memset(copies[lane] + bytes, 0, 4); /* what is left of a word */
        from[lane] = copies[lane];
    }
}

/* To panels of `depth` rows. Lanes without a key repeat another one. */
INLINE void load_keys(
    const rows *now, const rows *next, enum dtype dtype, enum dtype kept, int depth, float *to
) {
    int words = (now->bytes + 3) / 4, each = size_of(kept) / size_of(dtype);
    int last = words > LANES ? words - LANES : 0;
    for (int key = now->first / LANES * LANES; key < now->last; key += LANES) {
        float *panel = to + key / PANEL * PANEL * depth + key % PANEL;
        const char *from[LANES];
        char copies[LANES][4 * MAX_DIM + 4];
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
                unpack(rows[lane], dtype, kept, panel + (word + lane) * each * PANEL);
        }
    }
}

/* PANEL elements of a row, the last of which may be 0. */
INLINE void load_part(const char *from, int index, enum dtype dtype, int dim, floats part[2]) {
    for (int i = 0; i < 2; i++, index += LANES) {
        int some = dim - index;
        part[i] = some >= LANES ? load(from, index, dtype)
                  : some > 0    ? load_some(from, index, dtype, some)
                                : fill(0);
    }
}

/* To panels of LONG rows at most; columns behind the last are 0. */
INLINE void load_values(
    const rows *now, const rows *next, enum dtype dtype, int dim, float *to
) {
    for (int row = now->first; row < now->last; row++) {
        const char *from = now->rows + now->at[row];
        float *panel = to + row * PANEL;
        fetch(next, row);
        for (int i = 0; i < dim; i += PANEL, panel += LONG * PANEL) {
            floats part[2];
            load_part(from, i, dtype, dim, part);
            store(panel, 0, F32, part[0]);
            store(panel, LANES, F32, part[1]);
        }
    }
}

#if DOT_PRODUCTS
/* Elements of two rows of bfloat16, side by side. */
INLINE void pair_halves(const char *even, const char *odd, bits pairs[2]) {
    __m512i a = (__m512i)load_bits(even), b = (__m512i)load_bits(odd);
    bits order = (bits)lanes() * 0x10001 + (PANEL << 16);
    pairs[0] = (bits)_mm512_permutex2var_epi16(a, (__m512i)order, b);
    pairs[1] = (bits)_mm512_permutex2var_epi16(a, (__m512i)(order + LANES * 0x10001), b);
}

/* The same in pairs of keys, the first of which is even. One that is not there is 0. */
INLINE void load_value_pairs(
    const rows *now, const rows *next, enum dtype dtype, int dim, float *to
) {
    static const char none[4 * MAX_DIM];
    for (int row = now->first / 2 * 2; row < now->last; row += 2) {
        const char *even = row < now->first ? none : now->rows + now->at[row];
        const char *odd = row + 1 >= now->last ? none : now->rows + now->at[row + 1];
        float *panel = to + row / 2 * PANEL;
        fetch(next, row);
        fetch(next, row + 1);
        for (int i = 0; i < dim; i += PANEL, panel += LONG * PANEL) {
            bits pairs[2];
            if (dtype == BF16 && i + PANEL <= dim) {
                pair_halves(even + 2 * i, odd + 2 * i, pairs);
            } else {
                floats a[2], b[2];
                load_part(even, i, dtype, dim, a);
                load_part(odd, i, dtype, dim, b);
                for (int half = 0; half < 2; half++) pairs[half] = pair_of(a[half], b[half]);
            }
            store(panel, 0, F32, as_floats(pairs[0]));
            store(panel, LANES, F32, as_floats(pairs[1]));
        }
    }
}
#endif

/* sum + the products of what two words hold. */
INLINE floats add_words(enum dtype kept, floats sum, bits a, bits b) {
#if DOT_PRODUCTS
    if (kept == BF16) return add_pairs(sum, a, b);
#endif
    return sum + as_floats(a) * as_floats(b);
}

/* c = shrink · c + a b for `height` rows of a and c and `panels` of b, which have `depth` rows and
 * are `stride` apart; a has words as b has. Without `shrink`, c is not read. Every element is
 * summed in the order of depth, however many there are. */
INLINE void multiply_rows(
    int height, int panels, enum dtype kept, const float *a, int64_t a_row, const float *b,
    int depth, int64_t stride, float *c, int64_t c_row, const float *shrink
) {
    floats sums[HEIGHT][4];
    for (int i = 0; i < height; i++)
        for (int v = 0; v < 2 * panels; v++)
            sums[i][v] = shrink ? load(c + i * c_row, v * LANES, F32) * shrink[i] : fill(0);
    for (int k = 0; k < depth; k++, b += PANEL) {
        bits columns[4];
        for (int v = 0; v < 2 * panels; v++)
            columns[v] = load_bits(b + v / 2 * stride + v % 2 * LANES);
        for (int i = 0; i < height; i++) {
            bits word = spread(a + i * a_row + k);
            for (int v = 0; v < 2 * panels; v++)
                sums[i][v] = add_words(kept, sums[i][v], word, columns[v]);
        }
    }
    for (int i = 0; i < height; i++)
        for (int v = 0; v < 2 * panels; v++) store(c + i * c_row, v * LANES, F32, sums[i][v]);
}

/* The same for any number of rows: as many at once as keep both multipliers busy. */
INLINE void multiply(
    int rows, int panels, enum dtype kept, const float *a, int64_t a_row, const float *b, int depth,
    int64_t stride, float *c, int64_t c_row, const float *shrink
) {
    for (int width = 0; panels > 0; panels -= width, b += width * stride, c += width * PANEL) {
        width = panels > 1 && rows <= HEIGHT / 2 ? 2 : panels > 1 ? WIDTH : 1;
        for (int row = 0; row < rows; row += HEIGHT) {
            const float *from = a + row * a_row, *less = shrink ? shrink + row : NULL;
            float *to = c + row * c_row;
#define CASE(height, width)                                                               \
    case 10 * width + height:                                                             \
        multiply_rows(height, width, kept, from, a_row, b, depth, stride, to, c_row, less); \
        break;
            switch (10 * width + (rows - row < HEIGHT ? rows - row : HEIGHT)) {
                CASE(1, 1)
                CASE(2, 1)
                CASE(3, 1)
                CASE(4, 1)
                CASE(5, 1)
                CASE(6, 1)
                CASE(1, 2)
                CASE(2, 2)
                CASE(3, 2)
#if LANES == 16
                CASE(4, 2)
                CASE(5, 2)
                CASE(6, 2)
#endif
            }
#undef CASE
        }
    }
}
