/* A whole decoder layer in one call: the members meet between its operations. */
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
    const void *input; /* [tokens, size] */
    void *output;
    void *normed, *qkv, *query, *attended, *gated, *update; /* between the operations */
    const void *cos, *sin; /* [tokens, rotary] */
    int64_t angles_token;  /* stride */
    const int64_t *slots;  /* [tokens] */
    struct attention work; /* table, tiles and memory for partial results */
};

EXPORT void run_layer(struct team *team, const struct layer *layer, const struct step *step);
