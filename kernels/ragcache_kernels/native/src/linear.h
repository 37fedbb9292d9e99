/* Linear layers over packed weights: output = input · weightᵀ + bias, and what often follows.
 *
 * A panel holds the weights of PANEL output columns, step by step along k: 32 bits of each column,
 * which are one float32, two bfloat16 or four int8. Panels follow each other; columns and steps
 * that the weight does not fill are zeros. A gated weight's panel has LANES columns of the gate,
 * then the same ones of the other factor.
 *
 * For int8 weights the input is quantised as it comes, each SPAN elements of a row by a scale of
 * their own, so that a large element costs only its neighbours precision. Products of a span are
 * summed in int32, spans in float32.
 *
 * Each element is a chain of sums over rising k, however many rows and members there are: a row's
 * results are the same bits in every batch.
 */
#pragma once

#include "simd.h"
#include "team.h"

#define PANEL (2 * LANES)

enum { SPAN = 64 }; /* elements, a multiple of LANES */

/* What becomes of a product; the numbers are part of the ABI. */
enum epilogue {
    STORE = 0,
    ADD = 1,      /* to what is in the output */
    SILU = 2,     /* silu(gate) · up, of a gated weight */
    GELU_TANH = 3 /* gelu(gate) · up, likewise; by tanh */
};

struct packed {
    const void *panels;
    const float *scales; /* int8: each packed column's; a weight is integer · scale */
    const float *bias;   /* each packed column's, or NULL */
    int64_t in, out;     /* elements of an input row and of an output row */
    enum dtype dtype;
};

struct linear {
    const struct packed *weight;
    const void *input; /* rows of `in` elements, `input_stride` elements apart */
    void *output;      /* rows of `out` elements; no part of the input */
    int64_t rows, input_stride, output_stride;
    enum dtype dtype; /* of input and output: that of the weight; of int8, F32 or BF16 */
    enum epilogue epilogue;
};

/* This member's share of the output. Nothing is waited for. */
void linear(const struct linear *call, const member *self);

EXPORT void run_linear(struct team *team, const struct linear *call);

/* PANEL of this build, for whoever packs. */
EXPORT int panel_columns(void);
