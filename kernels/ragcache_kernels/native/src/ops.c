/* Norms, rotation, and writing keys and values: rows pass through float32 buffers on the stack. */
#include "ops.h"

#include <math.h>

enum { PADDED_DIM = MAX_DIM + LANES }; /* whole vectors can be stored at any element of a head */

/* As many of the elements from `index` on as a vector holds. */
INLINE int up_to(int size, int index) { return size - index < LANES ? size - index : LANES; }

INLINE floats load_at(const void *row, int index, int size, enum dtype dtype) {
    int count = up_to(size, index);
    return count == LANES ? load(row, index, dtype) : load_some(row, index, dtype, count);
}

INLINE void store_at(void *row, int index, int size, enum dtype dtype, floats value) {
    int count = up_to(size, index);
    if (count == LANES) {
        store(row, index, dtype, value);
    } else {
        store_some(row, index, dtype, value, count);
    }
}

INLINE const void *element(const void *base, int64_t index, enum dtype dtype) {
    return (const char *)base + index * size_of(dtype);
}

INLINE floats rounded(floats value, enum dtype dtype) {
    return dtype == F32 ? value : widen(narrow(value));
}

INLINE float scale_of(floats squares, int size, float eps) {
    return 1.0f / sqrtf(sum(squares) / size + eps);
}

INLINE floats weighted(floats value, float scale, floats weight, enum dtype weight_dtype) {
    return rounded(rounded(value * scale, weight_dtype) * weight, weight_dtype);
}

INLINE void norm_row(const struct norm *call, int64_t row, enum dtype dtype, enum dtype weights) {
    const void *from = element(call->hidden, row * call->hidden_row, dtype);
    int size = call->size;
    floats squares = {0};
    if (call->update != NULL) {
        const void *update = element(call->update, row * call->update_row, dtype);
        void *total = (void *)element(call->total, row * size, dtype);
        for (int i = 0; i < size; i += LANES) {
            floats value = load_at(from, i, size, dtype) + load_at(update, i, size, dtype);
            value = rounded(value, dtype);
            squares += value * value;
            store_at(total, i, size, dtype, value);
        }
        from = total;
    } else {
        for (int i = 0; i < size; i += LANES) {
            floats value = load_at(from, i, size, dtype);
            squares += value * value;
        }
    }
    float scale = scale_of(squares, size, call->eps);
    void *out = (void *)element(call->out, row * size, dtype);
    for (int i = 0; i < size; i += LANES) {
        floats weight = load_at(call->weight, i, size, weights);
        floats value = load_at(from, i, size, dtype);
        store_at(out, i, size, dtype, weighted(value, scale, weight, weights));
    }
}

void rms_norm(const struct norm *call, const member *self) {
    range rows = share(call->rows, 1, self);
    for (int64_t row = rows.begin; row < rows.end; row++) {
        if (call->dtype == F32) {
            norm_row(call, row, F32, F32);
        } else if (call->weight_dtype == F32) {
            norm_row(call, row, BF16, F32);
        } else {
            norm_row(call, row, BF16, BF16);
        }
    }
}

INLINE void widen_row(const void *from, int size, enum dtype dtype, float *to) {
    for (int i = 0; i < size; i += LANES) store(to, i, F32, load_at(from, i, size, dtype));
}

INLINE void narrow_row(const float *from, int size, enum dtype dtype, void *to) {
    for (int i = 0; i < size; i += LANES) {
        store_at(to, i, size, dtype, load(from, i, F32));
    }
}

/* Behind the row lie zeros up to a whole vector. */
INLINE void norm_head(float *head, int dim, const void *weight, enum dtype dtype, float eps) {
    floats squares = {0};
    for (int i = 0; i < dim; i += LANES) {
        floats value = load(head, i, F32);
        squares += value * value;
    }
    float scale = scale_of(squares, dim, eps);
    for (int i = 0; i < dim; i += LANES) {
        floats factor = load_at(weight, i, dim, dtype);
        store(head, i, F32, weighted(load(head, i, F32), scale, factor, dtype));
    }
}

/* Both halves of the angles are alike, but that is not ours to rely on. */
INLINE void turn_head(float *head, int half, const float *cos, const float *sin) {
    for (int i = 0; i < half; i++) {
        float a = head[i], b = head[half + i];
        head[i] = a * cos[i] - b * sin[i];
        head[half + i] = b * cos[half + i] + a * sin[half + i];
    }
}

INLINE float largest_of(const float *row, int dim) {
    floats most = {0};
    for (int i = 0; i < dim; i += LANES) {
        floats value = load(row, i, F32);
        most = larger(most, larger(value, -value));
    }
    return largest(most);
}

/* As `quantise.py` defines it. */
INLINE float quantise_row(float *row, int dim, enum dtype dtype) {
    float most = largest_of(row, dim), limit = dtype == I8 ? 127.0f : 448.0f;
    float scale = (most > 1e-30f ? most : 1e-30f) / limit;
    for (int i = 0; i < dim; i += LANES) store(row, i, F32, load(row, i, F32) / scale);
    return scale;
}

/* Where a call's keys or its values go. */
typedef struct {
    const pool *pool;
    int heads, block_size, is_key, is_paired;
} target;

static target target_of(const pool *pool, int heads, int block_size, enum dtype dtype, int is_key) {
    return (target){pool, heads, block_size, is_key, is_paired(pool, heads, block_size, dtype)};
}

static void put_paired(const target *target, int64_t slot, int head, const float *row) {
    const pool *pool = target->pool;
    int size = target->block_size, lane = slot % LANES;
    char *group = group_of(pool, head, slot / size, slot % size, size);
    uint16_t halves[PADDED_DIM], *to = (uint16_t *)group;
    narrow_row(row, pool->dim, BF16, halves);
    if (target->is_key) {
        for (int i = 0; i < pool->dim; i += 2) memcpy(to + LANES * i + 2 * lane, halves + i, 4);
    } else {
        for (int i = 0; i < pool->dim; i++) to[lane / 2 * 2 * pool->dim + 2 * i + lane % 2] = halves[i];
    }
}

/* Behind the row lie zeros up to a whole vector. */
static void put_row(const target *target, int64_t slot, int head, float *row) {
    const pool *pool = target->pool;
    if (target->is_paired) return put_paired(target, slot, head, row);
    int64_t at = slot / target->block_size * pool->block + slot % target->block_size * pool->slot;
    void *to = (void *)element(pool->rows, at + head * pool->head, pool->dtype);
    switch (pool->dtype) {
    case F32:
        narrow_row(row, pool->dim, F32, to);
        break;
    case BF16:
        narrow_row(row, pool->dim, BF16, to);
        break;
    case I8:
        pool->scales[slot * target->heads + head] = quantise_row(row, pool->dim, I8);
        narrow_row(row, pool->dim, I8, to);
        break;
    default:
        pool->scales[slot * target->heads + head] = quantise_row(row, pool->dim, F8);
        narrow_row(row, pool->dim, F8, to);
    }
}

INLINE void get_row(const void *base, int64_t index, int dim, enum dtype dtype, float *to) {
    if (dtype == F32) {
        widen_row(element(base, index, F32), dim, F32, to);
    } else {
        widen_row(element(base, index, BF16), dim, BF16, to);
    }
}

static void rotate_token(const struct rotation *call, int64_t token) {
    int heads = call->heads, kv_heads = call->kv_heads, dim = call->key.dim;
    enum dtype dtype = call->dtype;
    target keys = target_of(&call->key, kv_heads, call->block_size, dtype, 1);
    target values = target_of(&call->value, kv_heads, call->block_size, dtype, 0);
    int64_t slot = call->slots[token];
    float row[PADDED_DIM], cos[PADDED_DIM], sin[PADDED_DIM];
    get_row(call->cos, token * call->angles_token, call->rotary, dtype, cos);
    get_row(call->sin, token * call->angles_token, call->rotary, dtype, sin);
    for (int head = 0; head < heads + kv_heads; head++) {
        int is_query = head < heads;
        get_row(call->qkv, token * call->qkv_token + head * call->qkv_head, dim, dtype, row);
        const void *weight = is_query ? call->query_weight : call->key_weight;
        if (weight != NULL) {
            float eps = is_query ? call->query_eps : call->key_eps;
            norm_head(row, dim, weight, call->weight_dtype, eps);
        }
        turn_head(row, call->rotary / 2, cos, sin);
        if (is_query) {
            void *to = (void *)element(call->query, (token * heads + head) * dim, dtype);
            narrow_row(row, dim, dtype, to);
        } else if (slot >= 0) {
            put_row(&keys, slot, head - heads, row);
        }
    }
    for (int head = 0; head < kv_heads && slot >= 0; head++) {
        int64_t at = token * call->qkv_token + (heads + kv_heads + head) * call->qkv_head;
        get_row(call->qkv, at, dim, dtype, row);
        put_row(&values, slot, head, row);
    }
}

void rotate_and_write(const struct rotation *call, const member *self) {
    range tokens = share(call->tokens, 1, self);
    for (int64_t token = tokens.begin; token < tokens.end; token++) rotate_token(call, token);
}

void write_kv(const struct writing *call, const member *self) {
    range tokens = share(call->tokens, 1, self);
    enum dtype dtype = call->dtype;
    int heads = call->kv_heads;
    target keys = target_of(&call->key, heads, call->block_size, dtype, 1);
    target values = target_of(&call->value, heads, call->block_size, dtype, 0);
    float row[PADDED_DIM];
    for (int64_t token = tokens.begin; token < tokens.end; token++) {
        int64_t slot = call->slots[token];
        for (int head = 0; head < heads && slot >= 0; head++) {
            int64_t key = token * call->key_token + head * call->key_head;
            int64_t value = token * call->value_token + head * call->value_head;
            get_row(call->keys, key, call->key.dim, dtype, row);
            put_row(&keys, slot, head, row);
            get_row(call->values, value, call->value.dim, dtype, row);
            put_row(&values, slot, head, row);
        }
    }
}

static void norm_body(void *call, const member *self) { rms_norm(call, self); }

static void rotation_body(void *call, const member *self) { rotate_and_write(call, self); }

static void writing_body(void *call, const member *self) { write_kv(call, self); }

void run_rms_norm(struct team *team, const struct norm *call) {
    team_run(team, norm_body, (void *)call);
}

void run_rotate_and_write(struct team *team, const struct rotation *call) {
    team_run(team, rotation_body, (void *)call);
}

void run_write_kv(struct team *team, const struct writing *call) {
    team_run(team, writing_body, (void *)call);
}

int pool_is_paired(const pool *pool, int heads, int block_size, int dtype) {
    return is_paired(pool, heads, block_size, dtype);
}
