/* The keys or the values of a layer, in blocks. */
#pragma once

#include "simd.h"

enum { MAX_DIM = 256 }; /* elements of a head */

/* Row of a slot and a KV head: at block · slot / B + slot % B · row + head · KV head, in elements. */
typedef struct {
    void *rows;
    float *scales; /* [N, B, KV heads]; NULL where rows are not quantised */
    int64_t block, slot, head;
    int32_t dim, dtype;
} pool;
