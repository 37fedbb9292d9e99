/* What a layer does beside its products of matrices and its attention. */
#pragma once

#include "pool.h"
#include "team.h"

/* RMSNorm of `hidden`, or of the rounded sum `total` of it and `update`. Normalised rows are
 * rounded to the weight's dtype before they are multiplied by it. */
struct norm {
    const void *hidden;
    const void *update; /* NULL: nothing is added, and there is no total */
    const void *weight; /* [size] */
    void *total, *out;  /* [rows, size] */
    int64_t hidden_row, update_row;
    int32_t rows, size;
    int32_t dtype, weight_dtype; /* F32 or BF16 */
    float eps;
};

void rms_norm(const struct norm *call, const member *self);
EXPORT void run_rms_norm(struct team *team, const struct norm *call);

/* Queries and keys of `qkv` [tokens, heads + 2 · KV heads, dim] go through a norm of each head
 * (where there is a weight) and RoPE; then queries to `query` [tokens, heads, dim], keys and values
 * to the slots. A slot below 0 is none. */
struct rotation {
    const void *qkv;
    void *query;
    const void *cos, *sin;                     /* [tokens, rotary], in `dtype` */
    const void *query_weight, *key_weight;     /* [dim]; NULL: no norm */
    const int64_t *slots;                      /* [tokens] */
    pool key, value;
    int64_t qkv_token, qkv_head, angles_token; /* strides */
    int32_t tokens, heads, kv_heads, rotary, block_size;
    int32_t dtype, weight_dtype;               /* F32 or BF16 */
    float query_eps, key_eps;
};

void rotate_and_write(const struct rotation *call, const member *self);
EXPORT void run_rotate_and_write(struct team *team, const struct rotation *call);

/* Keys [tokens, KV heads, key.dim] and values [tokens, KV heads, value.dim] go to their slots. */
struct writing {
    const void *keys, *values;
    const int64_t *slots;
    pool key, value;
    int64_t key_token, key_head, value_token, value_head; /* strides */
    int32_t tokens, kv_heads, block_size;
    int32_t dtype; /* F32 or BF16 */
};

void write_kv(const struct writing *call, const member *self);
EXPORT void run_write_kv(struct team *team, const struct writing *call);

/* For whoever reads a pool: see `is_paired`; `dtype` is the activations'. */
EXPORT int pool_is_paired(const pool *pool, int heads, int block_size, int dtype);
