#include "multiply.h"

/* Bytes ahead of the step at hand: what DRAM delivers while a request to it is under way. */
enum { AHEAD = 2048, CACHE_LINE = 64 };

typedef int16_t shorts __attribute__((vector_size(4 * LANES)));
typedef uint16_t raw_shorts __attribute__((vector_size(4 * LANES)));

INLINE floats spread_float(const char *from) {
    float value;
    memcpy(&value, from, sizeof value);
    return fill(value);
}

#if DOT_PRODUCTS

INLINE floats add_bf16(floats sum, const char *input, bits weight) {
    return add_pairs(sum, spread(input), weight);
}

/* The input's bytes are unsigned, 128 more than they stand for; `add_excess` sums that, times the
 * weights. */
INLINE ints add_i8(ints sum, const char *input, bits weight) {
    return (ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)spread(input), (__m512i)weight);
}

INLINE ints add_excess(ints sum, bits weight) {
    const bits excess = (bits){0} + 0x80808080;
    return (ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)excess, (__m512i)weight);
}

#else

/* Of int16 in pairs: the sum of each pair's products. */
INLINE ints pair_products(bits a, bits b) {
#if defined(__AVX512BW__)
    return (ints)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
    return (ints)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
    return (ints)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
    ints low_a = (ints)(a << 16) >> 16, low_b = (ints)(b << 16) >> 16;
    return low_a * low_b + ((ints)a >> 16) * ((ints)b >> 16);
#endif
}

INLINE floats add_bf16(floats sum, const char *input, bits weight) {
    sum += spread_float(input) * as_floats(low_half(weight));
    return sum + spread_float(input + 4) * as_floats(high_half(weight));
}

/* The input has elements 0 and 2, then 1 and 3, as int16: so shifts widen the weights. */
INLINE ints add_i8(ints sum, const char *input, bits weight) {
    bits even = (bits)((shorts)((raw_shorts)weight << 8) >> 8);
    bits odd = (bits)((shorts)weight >> 8);
    sum += pair_products(spread(input), even);
    return sum + pair_products(spread(input + 4), odd);
}

INLINE ints add_excess(ints sum, bits weight) { return sum; }

#endif

INLINE void prefetch(const char *step) {
    for (unsigned line = 0; line < 2 * sizeof(bits); line += CACHE_LINE)
        __builtin_prefetch(step + AHEAD + line);
}

INLINE floats add_floats(floats sum, const char *input, bits weight, const enum dtype weights) {
    if (weights == BF16) return add_bf16(sum, input, weight);
    return sum + spread_float(input) * as_floats(weight);
}

/* `count` and `weights` are constants where this is inlined, so that sums stay in registers. */
INLINE void sum_floats(const int count, struct rows rows, const char *panel, int64_t steps,
                       const enum dtype weights, floats (*tile)[2]) {
    const int width = input_step(weights);
    floats sum[TILE_ROWS][2];
    for (int i = 0; i < 2 * count; i++) sum[i / 2][i % 2] = tile[i / 2][i % 2];
    for (int64_t step = 0; step < steps; step++, panel += sizeof sum[0]) {
        prefetch(panel);
        bits left = load_bits(panel), right = load_bits(panel + sizeof left);
#pragma GCC unroll 8
        for (int row = 0; row < count; row++) {
            const char *input = rows.base + row * rows.stride + step * width;
            sum[row][0] = add_floats(sum[row][0], input, left, weights);
            sum[row][1] = add_floats(sum[row][1], input, right, weights);
        }
    }
    for (int i = 0; i < 2 * count; i++) tile[i / 2][i % 2] = sum[i / 2][i % 2];
}

/* One span, or what is left of it. */
INLINE void sum_span(const int count, struct rows rows, const char *panel, int64_t steps,
                     floats (*tile)[2]) {
    ints sum[TILE_ROWS][2] = {0}, excess[2] = {0};
    for (int64_t step = 0; step < steps; step++, panel += sizeof sum[0]) {
        prefetch(panel);
        bits left = load_bits(panel), right = load_bits(panel + sizeof left);
        excess[0] = add_excess(excess[0], left);
        excess[1] = add_excess(excess[1], right);
#pragma GCC unroll 8
        for (int row = 0; row < count; row++) {
            const char *input = rows.base + row * rows.stride + step * input_step(I8);
            sum[row][0] = add_i8(sum[row][0], input, left);
            sum[row][1] = add_i8(sum[row][1], input, right);
        }
    }
#pragma GCC unroll 8
    for (int row = 0; row < count; row++) {
        floats scale = spread_float(rows.base + row * rows.stride + rows.scales);
        tile[row][0] += __builtin_convertvector(sum[row][0] - excess[0], floats) * scale;
        tile[row][1] += __builtin_convertvector(sum[row][1] - excess[1], floats) * scale;
    }
}

INLINE void sum_ints(const int count, struct rows rows, const char *panel, int64_t steps,
                     floats (*tile)[2]) {
    const int whole = SPAN / 4;
    for (int64_t step = 0; step < steps; step += whole) {
        int64_t some = steps - step < whole ? steps - step : whole;
        sum_span(count, rows, panel + step * (int64_t)sizeof tile[0], some, tile);
        rows.base += whole * input_step(I8);
        rows.scales += 4 - whole * input_step(I8);
    }
}

INLINE void multiply_some(const int count, struct rows rows, const char *panel, int64_t steps,
                          enum dtype weights, floats (*tile)[2]) {
    if (weights == F32) return sum_floats(count, rows, panel, steps, F32, tile);
    if (weights == BF16) return sum_floats(count, rows, panel, steps, BF16, tile);
    sum_ints(count, rows, panel, steps, tile);
}

void multiply(struct rows rows, const char *panel, int64_t steps, enum dtype weights,
              floats (*tile)[2]) {
    switch (rows.count) {
    case 1: return multiply_some(1, rows, panel, steps, weights, tile);
    case 2: return multiply_some(2, rows, panel, steps, weights, tile);
    case 3: return multiply_some(3, rows, panel, steps, weights, tile);
    case 4: return multiply_some(4, rows, panel, steps, weights, tile);
    case 5: return multiply_some(5, rows, panel, steps, weights, tile);
    case 6: return multiply_some(6, rows, panel, steps, weights, tile);
#if TILE_ROWS == 8
    case 7: return multiply_some(7, rows, panel, steps, weights, tile);
    case 8: return multiply_some(8, rows, panel, steps, weights, tile);
#endif
    }
}

void widen_panel(const char *panel, int64_t steps, floats (*wide)[2]) {
    for (int64_t step = 0; step < steps; step++, panel += 2 * sizeof(bits), wide += 2) {
        bits left = load_bits(panel), right = load_bits(panel + sizeof left);
        wide[0][0] = as_floats(low_half(left));
        wide[0][1] = as_floats(low_half(right));
        wide[1][0] = as_floats(high_half(left));
        wide[1][1] = as_floats(high_half(right));
    }
}
