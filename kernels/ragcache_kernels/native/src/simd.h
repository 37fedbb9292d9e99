/* Vectors of floats, as wide as the tier that this file is compiled for.
 *
 * GCC's and Clang's vector types: one source for SSE2, AVX2, AVX-512 and NEON. Half-precision and
 * quantised rows are widened as they are loaded, so all arithmetic is in float32.
 */
#pragma once

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else
#define LANES 4
#endif

#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)
#define DOT_PRODUCTS 1 /* instructions that sum two products of bfloat16, or four of int8 */
#else
#define DOT_PRODUCTS 0
#endif

#define INLINE static inline __attribute__((always_inline))
#define LANE_LOOP for (int lane = 0; lane < LANES; lane++)

typedef float floats __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t bits __attribute__((vector_size(4 * LANES)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));
typedef int8_t bytes __attribute__((vector_size(LANES)));

/* What a tensor's elements are; the numbers are part of the ABI. */
enum dtype { F32 = 0, BF16 = 1, I8 = 2, F8 = 3 };

INLINE int64_t size_of(enum dtype dtype) { return dtype == F32 ? 4 : dtype == BF16 ? 2 : 1; }

INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

INLINE floats fill(float value) {
    return value - (floats){0}; /* which compilers leave out, unlike + 0: that turns −0 to 0 */
}

/* The numbers of the lanes. */
INLINE ints lanes(void) {
    ints number;
    LANE_LOOP number[lane] = lane;
    return number;
}

INLINE floats as_floats(bits raw) {
    floats value;
    memcpy(&value, &raw, sizeof value);
    return value;
}

INLINE bits as_bits(floats value) {
    bits raw;
    memcpy(&raw, &value, sizeof raw);
    return raw;
}

INLINE floats choose(ints mask, floats yes, floats no) {
    return as_floats((as_bits(yes) & (bits)mask) | (as_bits(no) & ~(bits)mask));
}

/* What compilers make of the choice takes four instructions instead of one. */
INLINE floats larger(floats a, floats b) {
#if defined(__AVX512F__)
    return (floats)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (floats)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return choose(a > b, a, b);
#endif
}

/* What compilers make of `__builtin_convertvector` takes five instructions instead of one. */
INLINE bits widen_halves(halves half) {
#if defined(__AVX512F__)
    return (bits)_mm512_cvtepu16_epi32((__m256i)half);
#elif defined(__AVX2__)
    return (bits)_mm256_cvtepu16_epi32((__m128i)half);
#else
    return __builtin_convertvector(half, bits);
#endif
}

INLINE ints widen_bytes(bytes byte) {
#if defined(__AVX512F__)
    return (ints)_mm512_cvtepi8_epi32((__m128i)byte);
#elif defined(__AVX2__)
    int64_t raw;
    memcpy(&raw, &byte, sizeof raw);
    return (ints)_mm256_cvtepi8_epi32(_mm_cvtsi64_si128(raw));
#else
    return __builtin_convertvector(byte, ints);
#endif
}

/* bfloat16 is the upper half of float32 (rounded to nearest, ties to even). */
INLINE floats widen(halves half) { return as_floats(widen_halves(half) << 16); }

INLINE halves narrow(floats value) {
#if DOT_PRODUCTS
    return (halves)_mm512_cvtneps_pbh((__m512)value); /* subnormals become 0 */
#else
    bits raw = as_bits(value);
    bits rounded = (raw + 0x7fff + ((raw >> 16) & 1)) >> 16;
    bits nan = (raw >> 16) | 0x40;
    ints is_nan = value != value;
    return __builtin_convertvector((nan & (bits)is_nan) | (rounded & ~(bits)is_nan), halves);
#endif
}

/* Of two bfloat16 in each lane, the first and the second, as float32. */
INLINE bits low_half(bits pair) { return pair << 16; }
INLINE bits high_half(bits pair) { return pair & 0xffff0000; }

/* Two bfloat16 of what bfloat16 can hold. */
INLINE bits pair_of(floats first, floats second) {
    return (as_bits(first) >> 16) | high_half(as_bits(second));
}

/* float8 e4m3 in the lowest byte of each lane. Its exponent counts from 7, float32's from 127; the
 * product is exact, for subnormals too. NaN, which no quantised row holds, becomes 480. */
INLINE floats widen_float8(bits byte) {
    bits raw = ((byte & 0x80) << 24) | ((byte & 0x7f) << 20);
    return as_floats(raw) * 0x1p120f;
}

/* Rounded to nearest, ties to even, of values up to 448. */
INLINE bytes narrow_float8(floats value) {
    bits raw = as_bits(value * 0x1p-120f);
    bits rounded = ((raw & 0x7fffffff) + 0x7ffff + ((raw >> 20) & 1)) >> 20;
    return __builtin_convertvector(rounded | ((raw >> 24) & 0x80), bytes);
}

/* Rounded to nearest, ties to even, of values up to 127. */
INLINE bytes narrow_integer(floats value) {
    const float shift = 0x1.8p23f; /* there a float's last bit is worth 1 */
    return __builtin_convertvector(__builtin_convertvector(value + shift - shift, ints), bytes);
}

/* The `count` elements from `index` on, at most LANES; the other lanes are 0. */
INLINE floats load_some(const void *base, int64_t index, enum dtype dtype, int count) {
    const char *from = (const char *)base + index * size_of(dtype);
    if (dtype == F32) {
        floats value = {0};
        memcpy(&value, from, 4 * count);
        return value;
    }
    if (dtype == BF16) {
        halves half = {0};
        memcpy(&half, from, 2 * count);
        return widen(half);
    }
    bytes byte = {0};
    memcpy(&byte, from, count);
    ints whole = widen_bytes(byte);
    return dtype == I8 ? __builtin_convertvector(whole, floats) : widen_float8((bits)whole);
}

INLINE floats load(const void *base, int64_t index, enum dtype dtype) {
    return load_some(base, index, dtype, LANES);
}

INLINE bits load_bits(const void *from) {
    bits raw;
    memcpy(&raw, from, sizeof raw);
    return raw;
}

/* The 32 bits at `from` in every lane. */
INLINE bits spread(const void *from) {
    uint32_t value;
    memcpy(&value, from, sizeof value);
    return (bits){0} + value;
}

INLINE void store_some(void *base, int64_t index, enum dtype dtype, floats value, int count) {
    char *to = (char *)base + index * size_of(dtype);
    if (dtype == F32) {
        memcpy(to, &value, 4 * count);
    } else if (dtype == BF16) {
        halves half = narrow(value);
        memcpy(to, &half, 2 * count);
    } else {
        bytes byte = dtype == I8 ? narrow_integer(value) : narrow_float8(value);
        memcpy(to, &byte, count);
    }
}

INLINE void store(void *base, int64_t index, enum dtype dtype, floats value) {
    store_some(base, index, dtype, value, LANES);
}

/* Lanes of two vectors, exchanged at a distance: `LOW` keeps a lane of `a` where bit `distance` of
 * its number is clear and has one of `b` there else; `HIGH` has what is left. */
#define LOW(distance, lane) ((lane) & (distance) ? LANES + (lane) - (distance) : (lane))
#define HIGH(distance, lane) ((lane) & (distance) ? LANES + (lane) : (lane) + (distance)) % (2 * LANES)
#define FOUR(pick, distance, lane) \
    pick(distance, lane), pick(distance, lane + 1), pick(distance, lane + 2), pick(distance, lane + 3)
#if LANES == 16
#define EVERY(pick, distance) \
    FOUR(pick, distance, 0), FOUR(pick, distance, 4), FOUR(pick, distance, 8), FOUR(pick, distance, 12)
#elif LANES == 8
#define EVERY(pick, distance) FOUR(pick, distance, 0), FOUR(pick, distance, 4)
#else
#define EVERY(pick, distance) FOUR(pick, distance, 0)
#endif
#define EXCHANGE(distance)                                                                  \
    for (int row = 0; row < LANES; row++) {                                                 \
        if ((row & (distance)) || (distance) >= LANES) continue;                            \
        bits a = rows[row], b = rows[row + (distance) % LANES];                             \
        rows[row] = __builtin_shufflevector(a, b, EVERY(LOW, distance));                    \
        rows[row + (distance) % LANES] = __builtin_shufflevector(a, b, EVERY(HIGH, distance)); \
    }

/* Lane i of row j becomes lane j of row i. */
INLINE void transpose(bits rows[LANES]) {
    EXCHANGE(8)
    EXCHANGE(4)
    EXCHANGE(2)
    EXCHANGE(1)
}

/* Distances halve: in the end lane 0 has all. */
#define GATHER(distance, combine)                                                    \
    if ((distance) < LANES) {                                                        \
        floats other = __builtin_shufflevector(value, value, EVERY(HIGH, distance)); \
        value = combine;                                                             \
    }
#define GATHER_ALL(combine) \
    GATHER(8, combine) GATHER(4, combine) GATHER(2, combine) GATHER(1, combine)

INLINE float sum(floats value) {
    GATHER_ALL(value + other)
    return value[0];
}

INLINE float largest(floats value) {
    GATHER_ALL(larger(value, other))
    return value[0];
}

/* 2^x for x ≤ 127, within 2 units in the last place; 0 where that is not a normal number, or nearly so. The whole part,
 * to nearest, goes to the exponent; minimax polynomial for what is left, up to ½. */
INLINE floats exp2_of(floats x) {
    x = larger(x, fill(-200.0f));
#if defined(__AVX512F__)
    floats whole = (floats)_mm512_roundscale_ps((__m512)x, 0);
#else
    const float shift = 0x1.8p23f; /* there a float's last bits are its whole part */
    floats shifted = x + shift, whole = shifted - shift;
#endif
    floats part = x - whole;
    floats value = fill(1.32647273e-3f);
    value = value * part + 9.67151299e-3f;
    value = value * part + 5.55073358e-2f;
    value = value * part + 2.40222424e-1f;
    value = value * part + 6.93147004e-1f;
    value = value * part + 1.0f;
#if defined(__AVX512F__)
    return (floats)_mm512_scalef_ps((__m512)value, (__m512)whole);
#else
    bits power = as_bits(value) + (as_bits(shifted) << 23);
    return as_floats(power & (bits)(x >= -125.0f));
#endif
}

#if DOT_PRODUCTS
/* 2^x, within 2^-13 of it, for what becomes bfloat16. `vscalefps` takes x's whole part by itself. */
INLINE floats coarse_exp2_of(floats x) {
    floats part = (floats)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF);
    floats value = fill(7.70672e-2f);
    value = value * part + 2.2764482e-1f;
    value = value * part + 6.9511682e-1f;
    value = value * part + 1.0f;
    return (floats)_mm512_scalef_ps((__m512)value, (__m512)x);
}

/* sum + the products of the two bfloat16 of every lane. */
INLINE floats add_pairs(floats sum, bits a, bits b) {
    return (floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
}
#endif

/* Whether a lane of `a` is larger than `b`. */
INLINE int exceeds(floats a, float b) {
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask((__m512)a, (__m512)fill(b), _CMP_GT_OQ) != 0;
#elif defined(__AVX2__)
    return _mm256_movemask_ps(_mm256_cmp_ps((__m256)a, (__m256)fill(b), _CMP_GT_OQ)) != 0;
#else
    return largest(a) > b;
#endif
}
