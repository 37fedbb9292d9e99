#include "input.h"

enum { LARGEST = 127 }; /* integer that a row has */

typedef int16_t some_shorts __attribute__((vector_size(2 * LANES)));
typedef uint8_t some_bytes __attribute__((vector_size(LANES)));
typedef uint64_t fours __attribute__((vector_size(2 * LANES))); /* of int16 */

/* LANES elements, or the `left` ones and zeros. */
INLINE floats load_up_to(const void *base, int64_t index, enum dtype dtype, int64_t left) {
    return left < LANES ? load_some(base, index, dtype, (int)left) : load(base, index, dtype);
}

/* Bytes of an element in the buffer. */
INLINE int64_t element_size(enum dtype weights) {
    return input_step(weights) / weights_per_step(weights);
}

/* Of SPAN elements, with the scale that quantised ones have. */
INLINE int64_t span_size(enum dtype weights) {
    return SPAN * element_size(weights) + (weights == I8 ? sizeof(float) : 0);
}

/* Where the products can read rows as they are. */
static int is_taken_in_place(const struct linear *call) {
    const struct packed *weight = call->weight;
    if (weight->dtype == F32) return 1;
    return DOT_PRODUCTS && weight->dtype == BF16 && weight->in % weights_per_step(BF16) == 0;
}

int64_t input_depth(const struct input *input) {
    enum dtype weights = input->call->weight->dtype;
    int64_t fits = INPUT_BYTES / (input->count * span_size(weights)) * SPAN;
    int64_t reused = BLOCK_STEPS * weights_per_step(weights);
    if (input->count <= TILE_ROWS && is_taken_in_place(input->call)) return input->call->weight->in;
    return input->count > TILE_ROWS && fits > reused ? reused : fits;
}

/* To the nearest integer, up to 2^22: there, the steps of float32 from 1.5 · 2^23 on are 1. */
INLINE ints rounded(floats value) { return (ints)(as_bits(value + 0x1.8p23f) - 0x4b400000); }

/* LANES elements quantised; for dot products unsigned bytes, else int16 as `add_i8` wants them. */
INLINE void put_i8(char *to, floats value, float inverse) {
    ints whole = rounded(value * inverse);
    if (DOT_PRODUCTS) {
        some_bytes bytes = __builtin_convertvector(whole + 128, some_bytes);
        memcpy(to, &bytes, sizeof bytes);
        return;
    }
    fours four = (fours)__builtin_convertvector(whole, some_shorts);
    four = (four & 0xffff00000000ffff) | (four & 0xffff0000) << 16 | (four >> 16 & 0xffff0000);
    memcpy(to, &four, sizeof four);
}

/* Up to SPAN elements; gives their scale. */
static float quantise_span(const struct linear *call, int64_t from, int64_t left, char *to) {
    floats parts[SPAN / LANES], most = fill(0);
    int count = 0;
    for (; count < SPAN / LANES && left > 0; count++, from += LANES, left -= LANES) {
        parts[count] = load_up_to(call->input, from, call->dtype, left);
        most = larger(larger(parts[count], -parts[count]), most);
    }
    float scale = largest(most) / LARGEST, inverse = scale > 0 ? 1 / scale : 0;
    for (int i = 0; i < count; i++)
        put_i8(to + i * LANES * element_size(I8), parts[i], inverse);
    return scale;
}

static void quantise_row(const struct linear *call, int64_t from, int64_t depth, char *to) {
    char *scales = to + ceil_div(depth, SPAN) * SPAN * element_size(I8);
    for (int64_t i = 0; i < depth; i += SPAN, to += SPAN * element_size(I8), scales += 4) {
        float scale = quantise_span(call, from + i, depth - i, to);
        memcpy(scales, &scale, sizeof scale);
    }
}

static void copy_row(const struct linear *call, int64_t from, int64_t depth, char *to) {
    enum dtype kept = DOT_PRODUCTS ? BF16 : F32;
    for (int64_t i = 0; i < depth; i += LANES)
        store(to, i, kept, load_up_to(call->input, from + i, call->dtype, depth - i));
}

struct rows take_rows(const struct input *input, int64_t k, int64_t depth, char *buffer) {
    const struct linear *call = input->call;
    enum dtype weights = call->weight->dtype;
    int64_t from = input->first * call->input_stride + k, stride = call->input_stride;
    int64_t size = size_of(call->dtype);
    if (is_taken_in_place(call))
        return (struct rows){(const char *)call->input + size * from, size * stride, 0, input->count};
    int64_t spans = ceil_div(depth, SPAN), bytes = spans * span_size(weights);
    for (int row = 0; row < input->count; row++)
        (weights == I8 ? quantise_row : copy_row)(call, from + row * stride, depth,
                                                  buffer + row * bytes);
    return (struct rows){buffer, bytes, spans * SPAN * element_size(weights), input->count};
}
