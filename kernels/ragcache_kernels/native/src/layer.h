/* Whole decoder layers in one call: the members meet between their operations. */
#pragma once

#include "attention.h"
#include "linear.h"
#include "ops.h"

/* What stays the same from step to step. What a step decides is left open in the calls: rows and
 * tokens, what they read and write, slots and tiles. */
struct layer {
    struct norm input_norm, mlp_norm;
    struct norm attention_norm, update_norm; /* Gemma 2: of what is added; weight NULL: none */
    struct linear qkv, out, gated, down;
    struct rotation rotation; /* rotary 0: positions are not told apart */
    struct attention attention;
};

/* What is the same for all layers with one kind of attention. */
struct step {
    void *normed, *qkv, *query, *attended, *gated, *update; /* between the operations */
    const void *cos, *sin; /* [tokens, rotary] */
    int64_t angles_token;  /* stride */
    const int64_t *slots;  /* [tokens] */
    struct attention work; /* table, tiles and memory for partial results */
};

/* Layers that follow each other, each with the step for its kind. */
struct stack {
    const struct layer *const *layers;
    const struct step *const *steps;
    const void *input; /* [tokens, size], of the first; that of the others is the output */
    void *output;
    int64_t count;
    /* Of the last layer only some rows are wanted, in ascending order: the first ones of the output.
     * `last` is the step for them. NULL: all. */
    const struct step *last;
    const int64_t *kept;
    int64_t num_kept;
};

EXPORT void run_layers(struct team *team, const struct stack *stack);
