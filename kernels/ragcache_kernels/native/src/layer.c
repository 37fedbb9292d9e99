/* Every function here ends with a meeting of the members, so that the next may use its results. */
#include "layer.h"

typedef struct {
    const struct layer *layer;
    const struct step *step;
    const void *input;
    void *output;
} work;

static void normalise(struct norm norm, const void *hidden, void *out, const work *w, const member *self) {
    norm.hidden = hidden;
    norm.hidden_row = norm.size;
    norm.out = out;
    norm.rows = w->step->work.tokens;
    rms_norm(&norm, self);
    team_wait(self);
}

/* output = input + update, and that normalised. */
static void add_and_normalise(struct norm norm, const work *w, const member *self) {
    norm.update = w->step->update;
    norm.update_row = norm.size;
    norm.total = w->output;
    normalise(norm, w->input, w->step->normed, w, self);
}

static void multiply(struct linear product, const void *in, void *out, const work *w, const member *self) {
    product.input = in;
    product.output = out;
    product.rows = w->step->work.tokens;
    linear(&product, self);
    team_wait(self);
}

static void rotate(const work *w, const member *self) {
    const struct step *step = w->step;
    struct rotation rotation = w->layer->rotation;
    rotation.qkv = step->qkv;
    rotation.query = step->query;
    rotation.cos = step->cos;
    rotation.sin = step->sin;
    rotation.angles_token = step->angles_token;
    rotation.slots = step->slots;
    rotation.tokens = step->work.tokens;
    rotate_and_write(&rotation, self);
    team_wait(self);
}

static void attend_to_pool(const work *w, const member *self) {
    const struct attention *layers = &w->layer->attention;
    struct attention attention = w->step->work;
    attention.query = w->step->query;
    attention.out = w->step->attended;
    attention.key = layers->key;
    attention.value = layers->value;
    attention.sinks = layers->sinks;
    attention.scale = layers->scale;
    attention.softcap = layers->softcap;
    attend(&attention, self);
    team_wait(self);
}

static void add(const work *w, const member *self) {
    const struct linear *down = &w->layer->down;
    int64_t count = w->step->work.tokens * down->weight->out;
    range mine = share(count, LANES, self);
    for (int64_t i = mine.begin; i < mine.end; i += LANES) {
        int some = mine.end - i < LANES ? (int)(mine.end - i) : LANES;
        floats total = load_some(w->output, i, down->dtype, some);
        total += load_some(w->step->update, i, down->dtype, some);
        store_some(w->output, i, down->dtype, total, some);
    }
    team_wait(self);
}

/* Keys and values go to the pool; queries are left. */
static void project(const work *w, const member *self) {
    normalise(w->layer->input_norm, w->input, w->step->normed, w, self);
    multiply(w->layer->qkv, w->step->normed, w->step->qkv, w, self);
    rotate(w, self);
}

/* From now on there are only the rows that are wanted. */
static void keep_rows(const struct stack *stack, work *w, const member *self) {
    const struct step *all = w->step, *last = stack->last;
    int64_t element = size_of(w->layer->down.dtype);
    int64_t hidden = w->layer->input_norm.size * element, query = last->work.query_token * element;
    for (int64_t i = 0; i < stack->num_kept && self->rank == 0; i++) {
        int64_t row = stack->kept[i]; /* ≥ i: both may be the same memory */
        memmove((char *)w->output + i * hidden, (const char *)w->input + row * hidden, hidden);
        memmove((char *)last->query + i * query, (const char *)all->query + row * query, query);
    }
    w->input = w->output;
    w->step = last;
    team_wait(self);
}

/* The layer behind its projections. */
static void finish(const work *w, const member *self) {
    const struct layer *layer = w->layer;
    const struct step *step = w->step;
    int norms_updates = layer->update_norm.weight != NULL;
    attend_to_pool(w, self);
    multiply(layer->out, step->attended, step->update, w, self);
    if (norms_updates) normalise(layer->attention_norm, step->update, step->update, w, self);
    add_and_normalise(layer->mlp_norm, w, self);
    multiply(layer->gated, step->normed, step->gated, w, self);
    if (norms_updates) {
        multiply(layer->down, step->gated, step->update, w, self);
        normalise(layer->update_norm, step->update, step->update, w, self);
        add(w, self);
    } else {
        multiply(layer->down, step->gated, w->output, w, self); /* its epilogue adds */
    }
}

static void run(void *argument, const member *self) {
    const struct stack *stack = argument;
    for (int64_t i = 0; i < stack->count; i++) {
        const void *input = i == 0 ? stack->input : stack->output;
        work w = {stack->layers[i], stack->steps[i], input, stack->output};
        project(&w, self);
        if (i == stack->count - 1 && stack->last != NULL) {
            if (stack->num_kept == 0) return;
            keep_rows(stack, &w, self);
        }
        finish(&w, self);
    }
}

void run_layers(struct team *team, const struct stack *stack) {
    team_run(team, run, (void *)stack);
}
