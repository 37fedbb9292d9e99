/* Input rows as the products take them: widened, or quantised to bytes. */
#pragma once

#include "multiply.h"

enum {
    BLOCK_ROWS = 96, /* a multiple of TILE_ROWS */
    BLOCK_DEPTH = 256,
    INPUT_BYTES = BLOCK_ROWS * (BLOCK_DEPTH + LANES) * 4 /* a good part of an L2 cache */
};

/* Rows of a call's input from `first` on, and what their int8 forms are to be multiplied by. */
struct input {
    const struct linear *call;
    int64_t first;
    int count;
    float scales[BLOCK_ROWS];
};

/* Up to BLOCK_ROWS rows, with the scales that int8 weights take: largest element / 127. */
void open_input(struct input *input, const struct linear *call, int64_t first, int count);

/* Elements of a row that fit the buffer at a time, a multiple of LANES; few rows have many. */
int64_t input_depth(const struct input *input);

/* `depth` elements of each row from `k` on, with zeros up to a whole step. Float32 stays where it
 * is, all else goes to the buffer. */
struct rows take_rows(const struct input *input, int64_t k, int64_t depth, char *buffer);
