/* Input rows as the products take them: widened, or quantised to bytes. */
#pragma once

#include "multiply.h"

enum {
    BLOCK_ROWS = 96,  /* a multiple of TILE_ROWS */
    BLOCK_STEPS = 256, /* of a panel, which tiles of rows find in the first cache */
    INPUT_BYTES = 120 << 10 /* a part of the second cache */
};

/* Up to BLOCK_ROWS rows of a call, from `first` on. */
struct input {
    const struct linear *call;
    int64_t first;
    int count;
};

/* How many elements of each row are best taken at a time, a multiple of SPAN. */
int64_t input_depth(const struct input *input);

/* `depth` elements of each row from `k` on, with zeros up to a whole step. What need not be
 * converted stays where it is, all else goes to the buffer. */
struct rows take_rows(const struct input *input, int64_t k, int64_t depth, char *buffer);
