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

/* Whether a block's rows lie as products of bfloat16 want them, for activations in `dtype`. Then a KV
 * head's rows are next to each other, in groups of LANES slots, each of which takes as much memory
 * as its rows do. A word has two elements, of keys two that follow each other in a row:
 * [dim / 2, LANES]; of values two rows' that follow each other: [LANES / 2, dim]. */
INLINE int is_paired(const pool *pool, int heads, int block_size, enum dtype dtype) {
    int is_dense = pool->head == pool->dim && pool->slot == heads * pool->head &&
                   pool->block == block_size * pool->slot;
    int fits = block_size % LANES == 0 && pool->dim % LANES == 0;
    return DOT_PRODUCTS && pool->dtype == BF16 && dtype == BF16 && is_dense && fits;
}

/* Where a slot's group of a paired pool begins. */
INLINE char *group_of(const pool *pool, int head, int64_t block, int slot, int block_size) {
    int64_t at = block * pool->block + (int64_t)head * block_size * pool->dim;
    return (char *)pool->rows + 2 * (at + (int64_t)slot / LANES * LANES * pool->dim);
}
