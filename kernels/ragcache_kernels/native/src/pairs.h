/* Products with the keys and values of paired pools (see pool.h), which are read where they lie. */
#pragma once

#include "panels.h"

#if DOT_PRODUCTS

/* The next keys and values are fetched while these are used, evenly. */
INLINE void fetch_line(const char *from, int lines) {
    for (int i = 0; i < lines; i++) __builtin_prefetch(from + i * sizeof(bits), 0, 2);
}

/* c = a b for `height` rows of a, of `words`, and all groups of keys. */
INLINE void score_rows(
    const int height, const float *a, int64_t a_row, const rows *keys, const rows *next, int words,
    float *c
) {
    floats sums[HEIGHT][GROUPS];
    for (int i = 0; i < height; i++)
        for (int g = 0; g < GROUPS; g++) sums[i][g] = fill(0);
    for (int k = 0; k < words; k++) {
        bits columns[GROUPS];
        for (int g = 0; g < GROUPS; g++) {
            columns[g] = load_bits(keys->from[g] + k * sizeof(bits));
            if (next != NULL) fetch_line(next->from[g] + k * sizeof(bits), 1);
        }
        for (int i = 0; i < height; i++) {
            bits word = spread(a + i * a_row + k);
            for (int g = 0; g < GROUPS; g++) sums[i][g] = add_pairs(sums[i][g], word, columns[g]);
        }
    }
    for (int i = 0; i < height; i++)
        for (int g = 0; g < GROUPS; g++) store(c + i * KEYS + g * LANES, 0, F32, sums[i][g]);
}

/* c = shrink · c + a b for `height` rows of weights a, and `width` vectors of the values' columns. */
INLINE void weigh_rows(
    const int height, const int width, const float *a, const rows *values, const rows *next,
    int column, float *c, int64_t c_row, const float *shrink
) {
    floats sums[HEIGHT][4];
    int64_t offset = column * 4;
    for (int i = 0; i < height; i++)
        for (int v = 0; v < width; v++)
            sums[i][v] = shrink ? load(c + i * c_row, v * LANES, F32) * shrink[i] : fill(0);
    for (int k = values->first / 2; 2 * k < values->last; k++) {
        const char *from = values->pairs[k] + offset;
        bits columns[4];
        for (int v = 0; v < width; v++) columns[v] = load_bits(from + v * sizeof(bits));
        if (next != NULL) fetch_line(next->pairs[k] + offset, width);
        for (int i = 0; i < height; i++) {
            bits word = spread(a + i * KEYS + k);
            for (int v = 0; v < width; v++) sums[i][v] = add_pairs(sums[i][v], word, columns[v]);
        }
    }
    for (int i = 0; i < height; i++)
        for (int v = 0; v < width; v++) store(c + i * c_row, v * LANES, F32, sums[i][v]);
}

#define EACH_HEIGHT(call, height) \
    switch (height) {             \
    case 1: call(1); break;       \
    case 2: call(2); break;       \
    case 3: call(3); break;       \
    case 4: call(4); break;       \
    case 5: call(5); break;       \
    default: call(6);             \
    }

/* Scores [rows, KEYS] of queries [rows, depth] in words. */
INLINE void score_pairs(
    int count, const float *queries, int64_t depth, const rows *keys, const rows *next, int words,
    float *scores
) {
    for (int row = 0; row < count; row += HEIGHT, next = NULL) {
        const float *from = queries + row * depth;
#define CALL(height) score_rows(height, from, depth, keys, next, words, scores + row * KEYS)
        EACH_HEIGHT(CALL, count - row)
#undef CALL
    }
}

/* sums [rows, width] = shrinks · sums + weights [rows, KEYS] · values; without shrinks, sums are not
 * read. */
INLINE void add_value_pairs(
    int count, const float *weights, const rows *values, const rows *next, int dim, float *sums,
    int64_t width, const float *shrinks
) {
    for (int column = 0; column < dim; column += 4 * LANES) {
        int vectors = (dim - column) / LANES;
        const rows *fetched = next;
        for (int row = 0; row < count; row += HEIGHT, fetched = NULL) {
            const float *from = weights + row * KEYS, *less = shrinks ? shrinks + row : NULL;
            float *to = sums + row * width + column;
#define WEIGH(height, vectors) \
    weigh_rows(height, vectors, from, values, fetched, column, to, width, less)
#define CALL_1(height) WEIGH(height, 1)
#define CALL_2(height) WEIGH(height, 2)
#define CALL_3(height) WEIGH(height, 3)
#define CALL_4(height) WEIGH(height, 4)
            switch (vectors) {
            case 1: EACH_HEIGHT(CALL_1, count - row) break;
            case 2: EACH_HEIGHT(CALL_2, count - row) break;
            case 3: EACH_HEIGHT(CALL_3, count - row) break;
            default: EACH_HEIGHT(CALL_4, count - row)
            }
        }
    }
}

/* Where each pair of values lies; those at the ends of which only one row counts are copied, with
 * zeros for the other. */
INLINE void locate_pairs(rows *values, int dim) {
    for (int i = 0; i < KEYS / 2; i++)
        values->pairs[i] = values->from[2 * i / LANES] + i % (LANES / 2) * 4 * dim;
    int ends[2] = {values->first, values->last};
    for (int end = 0; end < 2; end++) {
        if (ends[end] % 2 == 0 || values->last <= values->first) continue;
        const char **from = values->pairs + ends[end] / 2;
        for (int i = 0; i < dim; i += LANES) {
            bits pair = load_bits(*from + 4 * i);
            pair = end == 0 ? high_half(pair) : pair & 0xffff;
            memcpy(values->edges[end] + 4 * i, &pair, sizeof pair);
        }
        *from = values->edges[end];
    }
}

#endif
