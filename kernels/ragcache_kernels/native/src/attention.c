/* Tiles are worked on KEYS keys at a time: scores, weights by a running softmax (FlashAttention-2,
 * arXiv 2307.08691; in base 2), and weighted values. */
#include "attention.h"

#include <math.h>

#include "pairs.h"

#define SLACK 8.0f /* in base 2: weights up to 2^8 are as precise as those up to 1 */

/* One member's scratch memory, and the tile that it works on. */
typedef struct {
    const struct attention *call;
    enum dtype kept; /* in panels, queries and weights */
    int keys_paired, values_paired;
    float *query;    /* [rows, depth]; a tile's queries times the query heads of a KV head */
    float *keys;     /* panels */
    float *values;   /* panels */
    float *weights;  /* [rows, KEYS] */
    float *sums;     /* [rows, width] */
    floats *totals;  /* [rows], in lanes */
    float *tops, *shrinks;   /* [rows]; what `reference` gives, and made of the sums before */
    float scale;             /* of what `mask` leaves */
    int group, depth, width; /* query heads of a KV head; dims of keys and values, padded */
    tile tile;
    int head, rows; /* KV head; queries · group */
} work;

/* Where there are instructions for products of bfloat16, nothing is lost by them but a part of the
 * weights' precision. */
static enum dtype kept_by(const struct attention *call) {
    int any_float = call->dtype == F32 || call->key.dtype == F32 || call->value.dtype == F32;
    return DOT_PRODUCTS && !any_float ? BF16 : F32;
}

static work work_of(const struct attention *call) {
    return (work){
        .call = call,
        .kept = kept_by(call),
        .keys_paired = is_paired(&call->key, call->kv_heads, call->block_size, call->dtype),
        .values_paired = is_paired(&call->value, call->kv_heads, call->block_size, call->dtype),
        .group = call->heads / call->kv_heads,
        .depth = depth_of(call->key.dim),
        .width = in_panels(call->value.dim),
        .scale = call->softcap > 0 ? 1 : call->scale,
    };
}

/* Rows that there is room for, so that every part of the memory begins with a whole vector. */
static int64_t room_for(const work *work) {
    return ((int64_t)work->call->most_queries * work->group + 15) / 16 * 16;
}

int64_t attention_scratch(const struct attention *call) {
    work work = work_of(call);
    int64_t each_row = work.depth + KEYS + work.width + LANES + 2;
    return room_for(&work) * each_row + KEYS * (int64_t)work.depth +
           LONG * (int64_t)work.width;
}

static float *take(float **memory, int64_t count) {
    float *taken = *memory;
    *memory += count;
    return taken;
}

static void lay_out(work *work, float *memory) {
    int64_t rows = room_for(work);
    work->query = take(&memory, rows * work->depth);
    work->keys = take(&memory, KEYS * (int64_t)work->depth);
    work->values = take(&memory, LONG * (int64_t)work->width);
    work->weights = take(&memory, rows * KEYS);
    work->sums = take(&memory, rows * work->width);
    work->totals = (floats *)take(&memory, rows * LANES);
    work->tops = take(&memory, rows);
    work->shrinks = take(&memory, rows);
}

static void load_query(work *work) {
    const struct attention *call = work->call;
    int dim = call->key.dim;
    int64_t size = size_of(call->dtype);
    for (int row = 0; row < work->rows; row++) {
        int64_t token = call->tile_tokens[work->tile.first + row / work->group];
        int64_t head = work->head * work->group + row % work->group;
        int64_t at = token * call->query_token + head * call->query_head;
        const char *from = (const char *)call->query + at * size;
        float *to = work->query + row * work->depth;
        if (work->kept == (enum dtype)call->dtype) {
            to[in_words(dim, work->kept) - 1] = 0; /* half of which may be none */
            memcpy(to, from, dim * size);
        } else {
            for (int i = 0; i < dim; i += LANES) {
                int some = dim - i < LANES ? dim - i : LANES;
                store_some(to, i, F32, load_some(from, i, BF16, some), some);
            }
        }
    }
}

/* Which of the KEYS slots from `origin` on the tile sees. */
static void bound(const work *work, int origin, rows *rows) {
    const tile *tile = &work->tile;
    rows->first = tile->start > origin ? tile->start - origin : 0;
    rows->last = tile->stop < origin + KEYS ? tile->stop - origin : KEYS;
}

/* Where each row lies, and its scale. */
static void locate_rows(const work *work, const pool *pool, int origin, rows *rows) {
    const struct attention *call = work->call;
    int64_t size = size_of(pool->dtype);
    rows->rows = (const char *)pool->rows + work->head * pool->head * size;
    rows->bytes = pool->dim * size;
    const int32_t *blocks = call->table + work->tile.sequence * call->table_row;
    int block = (origin + rows->first) / call->block_size;
    int slot = (origin + rows->first) % call->block_size;
    for (int i = rows->first; i < rows->last; block++, slot = 0) {
        int64_t at = (blocks[block] * pool->block + slot * pool->slot) * size;
        int end = i + call->block_size - slot < rows->last ? i + call->block_size - slot : rows->last;
        for (int j = i; j < end; j++) rows->at[j] = at + (j - i) * pool->slot * size;
        if (pool->scales != NULL) {
            const float *scales = pool->scales + work->head;
            scales += ((int64_t)blocks[block] * call->block_size + slot) * call->kv_heads;
            for (int j = i; j < end; j++) rows->scales[j] = scales[(int64_t)(j - i) * call->kv_heads];
        }
        i = end;
    }
    /* Weights of what is only half of a pair are products, too. */
    if (rows->first > 0) rows->scales[rows->first - 1] = 0;
    if (rows->last > rows->first && rows->last < KEYS) rows->scales[rows->last] = 0;
}

/* Where each group begins; those that have no key repeat another one. */
static void locate_groups(const work *work, const pool *pool, int origin, rows *rows) {
    const struct attention *call = work->call;
    const int32_t *blocks = call->table + work->tile.sequence * call->table_row;
    int low = rows->first / LANES, high = (rows->last - 1) / LANES;
    for (int i = 0; i < GROUPS; i++) {
        int group = i < low ? low : i > high ? high : i;
        int position = rows->last > 0 ? origin + group * LANES : 0;
        int64_t block = blocks[position / call->block_size];
        rows->from[i] =
            group_of(pool, work->head, block, position % call->block_size, call->block_size);
    }
}

static void locate_keys(const work *work, int origin, rows *rows) {
    bound(work, origin, rows);
    (work->keys_paired ? locate_groups : locate_rows)(work, &work->call->key, origin, rows);
}

static void locate_values(const work *work, int origin, rows *rows) {
    const pool *pool = &work->call->value;
    bound(work, origin, rows);
    (work->values_paired ? locate_groups : locate_rows)(work, pool, origin, rows);
#if DOT_PRODUCTS
    if (work->values_paired) locate_pairs(rows, pool->dim);
#endif
}

/* c·tanh(x / c) */
INLINE floats cap(floats x, float c) {
    const float two_log2e = 2.885390082f;
    floats doubled = x * (two_log2e / c);
    doubled = choose(doubled < 64.0f, doubled, fill(64.0f)); /* where tanh is 1 */
    return c - 2.0f * c / (exp2_of(doubled) + 1.0f);
}

/* Scores become logits; those of keys before `first` and from `last` on, which the row does not
 * see, −infinity. Plain ones are yet to be scaled. Returns the largest, scaled, in some lane. */
INLINE floats mask(const work *work, float *scores, int first, int last, const rows *keys) {
    int is_quantised = work->call->key.scales != NULL;
    float scale = work->call->scale, softcap = work->call->softcap;
    floats most = fill(-INFINITY);
    for (int i = 0; i < in_panels(keys->last); i += LANES) {
        floats logit = load(scores, i, F32);
        if (is_quantised) logit *= load(keys->scales, i, F32);
        if (softcap > 0) logit = cap(logit * scale, softcap);
        ints key = lanes() + i;
        logit = choose((key >= first) & (key < last), logit, fill(-INFINITY));
        most = larger(most, logit);
        store(scores, i, F32, logit);
    }
    return most * work->scale;
}

/* What a row's logits are taken relative to: its largest so far, or up to SLACK less, so that what
 * has been summed up seldom needs to shrink (as in FlashAttention-4). It stays −infinity while the
 * row has seen no key. */
INLINE float reference(work *work, int row, floats most) {
    float before = work->tops[row];
    work->shrinks[row] = 1;
    if (!exceeds(most, before + SLACK)) return before == -INFINITY ? 0 : before;
    float top = largest(most), shrink = exp2_of(fill(before - top))[0];
    work->tops[row] = top;
    work->totals[row] *= shrink;
    work->shrinks[row] = shrink;
    return top;
}

INLINE floats weight_of(const enum dtype kept, floats logit) {
#if DOT_PRODUCTS
    if (kept == BF16) return coarse_exp2_of(logit);
#endif
    return exp2_of(logit);
}

/* Logits become weights, where some of the row's keys may be masked or quantised. */
INLINE void weigh(work *work, const enum dtype kept, int row, floats most, const rows *values) {
    float *weights = work->weights + row * KEYS, less = reference(work, row, most);
    int is_quantised = work->call->value.scales != NULL;
    floats total = {0};
    for (int i = 0; i < in_panels(values->last); i += LANES) {
        floats logit = load(weights, i, F32) * work->scale - less;
        floats weight = weight_of(kept, larger(fill(-200.0f), logit)); /* of −infinity there is none */
        total += weight;
        if (is_quantised) weight *= load(values->scales, i, F32);
        store(weights, i, kept, weight); /* bfloat16 to the place of what was read */
    }
    work->totals[row] += total;
}

/* The same with the same bits where every row sees all KEYS, and scores are as good as logits. */
INLINE void weigh_plain(work *work, const enum dtype kept, int row) {
    float *weights = work->weights + row * KEYS, scale = work->scale;
    floats logits[KEYS / LANES], most = load(weights, 0, F32), total = {0};
    for (int i = 0; i < KEYS / LANES; i++) {
        logits[i] = load(weights, i * LANES, F32);
        most = larger(most, logits[i]);
    }
    float less = reference(work, row, most * scale);
    for (int i = 0; i < KEYS / LANES; i++) {
        floats weight = weight_of(kept, logits[i] * scale - less);
        total += weight;
        store(weights, i * LANES, kept, weight);
    }
    work->totals[row] += total;
}

/* Fold the keys from `origin` on into the rows' softmax. */
INLINE void fold_keys_kept(
    work *work, const enum dtype kept, int origin, const rows *keys, const rows *values
) {
    const struct attention *call = work->call;
    int is_whole = keys->first == 0 && keys->last == KEYS && origin + KEYS <= work->tile.all_see;
    int is_quantised = call->key.scales != NULL || call->value.scales != NULL;
    if (is_whole && !is_quantised && call->softcap <= 0) {
        for (int row = 0; row < work->rows; row++) weigh_plain(work, kept, row);
        return;
    }
    for (int row = 0; row < work->rows; row++) {
        int token = call->tile_tokens[work->tile.first + row / work->group];
        int last = call->positions[token] + 1 - origin;
        int first = call->window > 0 ? last - call->window : 0;
        if (first < keys->first) first = keys->first;
        if (last > keys->last) last = keys->last;
        floats most = mask(work, work->weights + row * KEYS, first, last, keys);
        weigh(work, kept, row, most, values);
    }
}

static void fold_keys(work *work, int origin, const rows *keys, const rows *values) {
    if (DOT_PRODUCTS && work->kept == BF16)
        return fold_keys_kept(work, BF16, origin, keys, values);
    fold_keys_kept(work, F32, origin, keys, values);
}

/* Fold a result over other keys into one; a total of 0 is no result. */
static void fold(
    float *into, float *top, float *total,
    const float *sums, float other_top, float other_total, int dim
) {
    if (other_total == 0) return;
    if (*total == 0) {
        memcpy(into, sums, dim * sizeof *into);
        *top = other_top;
        *total = other_total;
        return;
    }
    float most = *top > other_top ? *top : other_top;
    float shrink = exp2_of(fill(*top - most))[0], weight = exp2_of(fill(other_top - most))[0];
    for (int i = 0; i < dim; i++) into[i] = into[i] * shrink + sums[i] * weight;
    *total = *total * shrink + other_total * weight;
    *top = most;
}

/* The partial results of a tile begin with none, and take up one cut of its keys after another. */
static void fold_cut(const work *work, int is_first) {
    const struct attention *call = work->call;
    int dim = call->value.dim;
    for (int row = 0; row < work->rows; row++) {
        int64_t partial = work->tile.base + row / work->group;
        int64_t at = partial * call->heads + work->head * work->group + row % work->group;
        if (is_first) call->totals[at] = 0;
        fold(
            call->sums + at * dim, call->tops + at, call->totals + at,
            work->sums + row * work->width, work->tops[row], sum(work->totals[row]), dim
        );
    }
}

#define LOAD_KEYS(dtype, kept) \
    return load_keys(now, next, dtype, kept, work->depth, work->keys)

static void load_key_rows(const work *work, const rows *now, const rows *next) {
    int pairs = DOT_PRODUCTS && work->kept == BF16;
    switch (work->call->key.dtype) {
    case F32: LOAD_KEYS(F32, F32);
    case BF16: if (pairs) LOAD_KEYS(BF16, BF16); else LOAD_KEYS(BF16, F32);
    case I8: if (pairs) LOAD_KEYS(I8, BF16); else LOAD_KEYS(I8, F32);
    default: if (pairs) LOAD_KEYS(F8, BF16); else LOAD_KEYS(F8, F32);
    }
}

static void load_value_rows(const work *work, const rows *now, const rows *next) {
    int dim = work->call->value.dim;
#if DOT_PRODUCTS
    if (work->kept == BF16) {
        switch (work->call->value.dtype) {
        case BF16: return load_value_pairs(now, next, BF16, dim, work->values);
        case I8: return load_value_pairs(now, next, I8, dim, work->values);
        default: return load_value_pairs(now, next, F8, dim, work->values);
        }
    }
#endif
    switch (work->call->value.dtype) {
    case F32: return load_values(now, next, F32, dim, work->values);
    case BF16: return load_values(now, next, BF16, dim, work->values);
    case I8: return load_values(now, next, I8, dim, work->values);
    default: return load_values(now, next, F8, dim, work->values);
    }
}

static void multiply_kept(
    const work *work, int panels, const float *a, int64_t a_row, const float *b, int depth,
    int64_t stride, float *c, int64_t c_row, const float *shrink
) {
    int rows = work->rows;
    if (DOT_PRODUCTS && work->kept == BF16)
        return multiply(rows, panels, BF16, a, a_row, b, depth, stride, c, c_row, shrink);
    multiply(rows, panels, F32, a, a_row, b, depth, stride, c, c_row, shrink);
}

static void score(const work *work, const rows *now, const rows *next) {
    int depth = work->depth, words = in_words(work->call->key.dim, work->kept);
#if DOT_PRODUCTS
    if (work->keys_paired)
        return score_pairs(work->rows, work->query, depth, now, next, words, work->weights);
#endif
    load_key_rows(work, now, next);
    multiply_kept(
        work, in_panels(now->last) / PANEL, work->query, depth, work->keys, words, PANEL * depth,
        work->weights, KEYS, NULL
    );
}

static void add_values(const work *work, const rows *now, const rows *next, int is_first) {
    const float *shrinks = is_first ? NULL : work->shrinks;
#if DOT_PRODUCTS
    if (work->values_paired)
        return add_value_pairs(
            work->rows, work->weights, now, next, work->call->value.dim, work->sums, work->width,
            shrinks
        );
#endif
    load_value_rows(work, now, next);
    int first = work->kept == F32 ? now->first : now->first / 2;
    int count = in_words(now->last, work->kept) - first;
    multiply_kept(
        work, work->width / PANEL, work->weights + first, KEYS, work->values + first * PANEL,
        count, LONG * PANEL, work->sums, work->width, shrinks
    );
}

static void begin_cut(work *work) {
    for (int row = 0; row < work->rows; row++) {
        work->tops[row] = -INFINITY;
        work->totals[row] = fill(0);
    }
}

static void attend_tile(work *work) {
    const struct attention *call = work->call;
    int origin = work->tile.start / KEYS * KEYS, stop = work->tile.stop, cuts = 0;
    rows keys[2], values[2];
    load_query(work);
    locate_keys(work, origin, keys);
    locate_values(work, origin, values);
    for (int now = 0, is_first = 1; origin < stop; origin += KEYS, now = !now) {
        locate_keys(work, origin + KEYS, keys + !now);
        locate_values(work, origin + KEYS, values + !now);
        if (is_first) begin_cut(work);
        score(work, keys + now, keys + !now);
        fold_keys(work, origin, keys + now, values + now);
        add_values(work, values + now, values + !now, is_first);
        is_first = (origin + KEYS) % call->split == 0;
        if (is_first || origin + KEYS >= stop) fold_cut(work, cuts++ == 0);
    }
}

/* The last tiles, with the latest queries, see the most keys: they come first. */
void attend_tiles(const struct attention *call, const member *self) {
    work work = work_of(call);
    lay_out(&work, call->scratch + self->rank * attention_scratch(call));
    int64_t pieces = (int64_t)call->num_tiles * call->kv_heads, piece;
    while ((piece = team_take(self)) < pieces) {
        work.tile = call->tiles[(pieces - 1 - piece) / call->kv_heads];
        work.head = piece % call->kv_heads;
        work.rows = work.tile.queries * work.group;
        attend_tile(&work);
    }
}

static void merge_head(const struct attention *call, int token, int head) {
    float sums[MAX_DIM + LANES] = {0}, top = -INFINITY, total = 0;
    int dim = call->value.dim;
    for (int i = call->ends[token]; i < call->ends[token + 1]; i++) {
        int64_t at = (int64_t)call->order[i] * call->heads + head;
        fold(
            sums, &top, &total, call->sums + at * dim, call->tops[at], call->totals[at], dim
        );
    }
    if (call->sinks != NULL && total > 0) {
        float none[MAX_DIM] = {0};
        fold(sums, &top, &total, none, call->sinks[head], 1, dim);
    }
    float factor = total > 0 ? 1 / total : 0;
    int64_t out = ((int64_t)token * call->heads + head) * dim;
    for (int i = 0; i < dim; i += LANES) {
        int count = dim - i < LANES ? dim - i : LANES;
        store_some(call->out, out + i, call->dtype, load(sums, i, F32) * factor, count);
    }
}

void merge_partials(const struct attention *call, const member *self) {
    range tokens = share(call->tokens, 1, self);
    for (int64_t token = tokens.begin; token < tokens.end; token++)
        for (int head = 0; head < call->heads; head++) merge_head(call, token, head);
}

void attend(const struct attention *call, const member *self) {
    attend_tiles(call, self);
    team_wait(self);
    merge_partials(call, self);
}

static void body_of(void *call, const member *self) { attend(call, self); }

void run_attention(struct team *team, const struct attention *call) {
    team_run(team, body_of, (void *)call);
}
