/* Products of a few rows with one panel, in registers; see linear.h for the panels. */
#pragma once

#include "linear.h"

/* As many rows as have their sums in registers: two vectors each. */
#if defined(__AVX512F__) || defined(__aarch64__)
#define TILE_ROWS 8
#else
#define TILE_ROWS 6
#endif

INLINE int weights_per_step(enum dtype dtype) { return dtype == F32 ? 1 : dtype == BF16 ? 2 : 4; }

/* Bytes of an input row for a step with such weights, as `take_rows` makes them: as in the weights
 * for dot products, else twice as wide. */
INLINE int input_step(enum dtype dtype) { return dtype == F32 || DOT_PRODUCTS ? 4 : 8; }

/* Rows as the products take them. */
struct rows {
    const char *base;
    int64_t stride; /* in bytes */
    int64_t scales; /* int8 weights: bytes from a row to the scales of its spans */
    int count;
};

/* tile[row] += rows · panel over so many steps, up to the scales of int8 weights. */
void multiply(struct rows rows, const char *panel, int64_t steps, enum dtype weights,
              floats (*tile)[2]);

/* A panel's steps in bfloat16 as twice as many in float32. */
void widen_panel(const char *panel, int64_t steps, floats (*wide)[2]);
