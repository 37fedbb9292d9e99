#include "input.h"

enum { LARGEST = 127 }; /* integer that a row has */

typedef int16_t some_shorts __attribute__((vector_size(2 * LANES)));
typedef uint8_t some_bytes __attribute__((vector_size(LANES)));
typedef uint64_t fours __attribute__((vector_size(2 * LANES))); /* of int16 */

INLINE int at_most(int64_t count, int most) { return count < most ? (int)count : most; }

static float largest_element(const struct linear *call, int64_t row) {
    int64_t from = row * call->input_stride, count = call->weight->in;
    floats most = fill(0);
    for (int64_t i = 0; i < count; i += LANES) {
        floats part = load_some(call->input, from + i, call->dtype, at_most(count - i, LANES));
        most = larger(larger(part, -part), most);
    }
    return largest(most);
}

void open_input(struct input *input, const struct linear *call, int64_t first, int count) {
    input->call = call;
    input->first = first;
    input->count = count;
    if (call->weight->dtype != I8) return;
    for (int row = 0; row < count; row++)
        input->scales[row] = largest_element(call, first + row) / LARGEST;
}

int64_t input_depth(const struct input *input) {
    int64_t fits = INPUT_BYTES / 4 / (input->count > TILE_ROWS ? BLOCK_ROWS : TILE_ROWS) - LANES;
    return fits / LANES * LANES;
}

/* To the nearest integer, up to 2^22: there, the steps of float32 from 1.5 · 2^23 on are 1. */
INLINE ints rounded(floats value) { return (ints)(as_bits(value + 0x1.8p23f) - 0x4b400000); }

/* LANES elements quantised; for dot products unsigned bytes, else int16 as `add_i8` wants them. */
INLINE void put_i8(char *to, floats value, float inverse) {
    ints whole = rounded(value * inverse);
    if (DOT_PRODUCTS) {
        some_bytes bytes = __builtin_convertvector(whole + ZERO_POINT, some_bytes);
        memcpy(to, &bytes, sizeof bytes);
        return;
    }
    fours four = (fours)__builtin_convertvector(whole, some_shorts);
    four = (four & 0xffff00000000ffff) | (four & 0xffff0000) << 16 | (four >> 16 & 0xffff0000);
    memcpy(to, &four, sizeof four);
}

INLINE void put(char *to, floats value, enum dtype weights, float inverse) {
    if (weights == I8) return put_i8(to, value, inverse);
    store(to, 0, DOT_PRODUCTS ? BF16 : F32, value);
}

static void take_row(const struct linear *call, int64_t from, int64_t depth, float scale,
                     char *to) {
    enum dtype weights = call->weight->dtype;
    int64_t width = input_step(weights) * LANES / weights_per_step(weights);
    float inverse = scale > 0 ? 1 / scale : 0;
    for (int64_t i = 0; i < depth; i += LANES, to += width) {
        int count = at_most(depth - i, LANES);
        put(to, load_some(call->input, from + i, call->dtype, count), weights, inverse);
    }
}

struct rows take_rows(const struct input *input, int64_t k, int64_t depth, char *buffer) {
    const struct linear *call = input->call;
    int64_t from = input->first * call->input_stride + k, stride = call->input_stride;
    if (call->weight->dtype == F32)
        return (struct rows){(const char *)call->input + 4 * from, 4 * stride, input->count};
    int64_t bytes = (depth + LANES - 1) / LANES * LANES * 4;
    for (int row = 0; row < input->count; row++)
        take_row(call, from + row * stride, depth, input->scales[row], buffer + row * bytes);
    return (struct rows){buffer, bytes, input->count};
}
