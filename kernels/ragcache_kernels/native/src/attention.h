/* Attention of tiles of queries over paged keys, as partial results that are merged. */
#pragma once

#include "pool.h"
#include "team.h"

/* Queries `tokens[first : first + queries]` see the keys at positions [start, stop) of row
 * `sequence` of the block table, up to their own; query i gives partial result base + i. */
typedef struct {
    int32_t first, queries, sequence, start, stop, all_see, base;
} tile;

/* A partial result is a sum of weighted values, which are 2^(logit − top), and the sum of the
 * weights; those of all cuts of a sequence are merged in the order of its positions. Where keys are
 * cut, and so the order of every sum, depends on positions alone, not on tiles, tokens or threads. */
struct attention {
    const void *query;              /* [tokens, heads, key.dim] */
    void *out;                      /* [tokens, heads, value.dim] */
    pool key, value;
    const int32_t *table;           /* block table; a row has `table_row` entries */
    const tile *tiles;              /* tile t is `num_tiles` of them */
    const int32_t *tile_tokens;     /* what `first` of a tile counts */
    const int32_t *positions;       /* [tokens] */
    const int32_t *ends, *order;    /* token t merges order[ends[t] : ends[t + 1]] */
    const float *sinks;             /* [heads], in base 2; NULL: none */
    float *sums;                    /* [partials, heads, value.dim] */
    float *tops, *totals;           /* [partials, heads] */
    float *scratch;                 /* `attention_scratch` floats for each member */
    int64_t query_token, query_head, table_row; /* strides */
    int32_t tokens, num_tiles, heads, kv_heads, block_size;
    int32_t most_queries;           /* of a tile */
    int32_t split;                  /* keys are cut at multiples of it, itself a multiple of 64 */
    int32_t window;                 /* 0: none */
    int32_t dtype;                  /* of query and out: F32 or BF16 */
    float scale, softcap;           /* in base 2; softcap 0: none */
};

/* Floats of scratch memory that each member needs. */
EXPORT int64_t attention_scratch(const struct attention *call);

/* The share of a member; `merge_partials` must wait for all of them. */
void attend_tiles(const struct attention *call, const member *self);
void merge_partials(const struct attention *call, const member *self);

/* Both of them, with a barrier in between. */
void attend(const struct attention *call, const member *self);
EXPORT void run_attention(struct team *team, const struct attention *call);
