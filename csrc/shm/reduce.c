#include "shm/reduce.h"

#include <math.h>
#include <stdalign.h>
#include <string.h>

/* Each block of the sources is reduced before the next: 16 KiB of accumulator stay in L1. */
#define BLOCK 4096u

/* One binary for all processors: the loader picks the version with the widest vectors. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__) && \
    !defined(__SANITIZE_THREAD__)
#define WIDE __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define WIDE
#endif

#define ADD(a, b) ((a) + (b))
#define MULTIPLY(a, b) ((a) * (b))
#define LESS(a, b) ((b) < (a) ? (b) : (a))
#define MORE(a, b) ((b) > (a) ? (b) : (a))
/* A NaN in either operand is a NaN in the result. */
#define LESS_F(a, b) ((b) < (a) || (b) != (b) ? (b) : (a))
#define MORE_F(a, b) ((b) > (a) || (b) != (b) ? (b) : (a))
#define AND(a, b) ((a) & (b))
#define OR(a, b) ((a) | (b))
#define XOR(a, b) ((a) ^ (b))

/* out[i] = a[i] op b[i]; out may be a or b, which makes no dependence between iterations. */
#define PAIR(name, type, wide, op)                                                \
    WIDE static void name(void *out, const void *a, const void *b, size_t n)      \
    {                                                                             \
        type *to = out;                                                           \
        const type *left = a, *right = b;                                         \
        _Pragma("GCC ivdep") for (size_t i = 0; i < n; i++)                       \
            to[i] = (type)op((wide)left[i], (wide)right[i]);                      \
    }

/* Unsigned arithmetic wraps, as torch's does; overflow of signed integers is undefined in C. */
#define INTEGERS(suffix, type, unsigned_type)                \
    PAIR(sum_##suffix, type, unsigned_type, ADD)             \
    PAIR(product_##suffix, type, unsigned_type, MULTIPLY)    \
    PAIR(min_##suffix, type, type, LESS)                     \
    PAIR(max_##suffix, type, type, MORE)                     \
    PAIR(and_##suffix, type, type, AND)                      \
    PAIR(or_##suffix, type, type, OR)                        \
    PAIR(xor_##suffix, type, type, XOR)

#define FLOATS(suffix, type)                   \
    PAIR(sum_##suffix, type, type, ADD)        \
    PAIR(product_##suffix, type, type, MULTIPLY) \
    PAIR(min_##suffix, type, type, LESS_F)     \
    PAIR(max_##suffix, type, type, MORE_F)

/* uint32_t, not the narrow type: narrow unsigned types are promoted to signed int, whose product may overflow. */
INTEGERS(u8, uint8_t, uint32_t)
INTEGERS(i8, int8_t, uint32_t)
INTEGERS(u16, uint16_t, uint32_t)
INTEGERS(i16, int16_t, uint32_t)
INTEGERS(u32, uint32_t, uint32_t)
INTEGERS(i32, int32_t, uint32_t)
INTEGERS(u64, uint64_t, uint64_t)
INTEGERS(i64, int64_t, uint64_t)
FLOATS(f32, float)
FLOATS(f64, double)

typedef void (*pair)(void *, const void *, const void *, size_t);

#define ROW_I(type) {0, sum_##type, 0, product_##type, min_##type, max_##type, and_##type, or_##type, xor_##type}
#define ROW_F(type) {0, sum_##type, sum_##type, product_##type, min_##type, max_##type, 0, 0, 0, sum_##type}

/* By dtype and reduction; 16-bit floats are widened and reduced in 32 bits. A bool is 0 or 1, so "and" is its product
 * and minimum, "or" its sum and maximum. */
static const pair PAIRS[AH_RAW + 1][AH_PREMUL_SUM + 1] = {
    [AH_U8] = ROW_I(u8),
    [AH_I8] = ROW_I(i8),
    [AH_U16] = ROW_I(u16),
    [AH_I16] = ROW_I(i16),
    [AH_U32] = ROW_I(u32),
    [AH_I32] = ROW_I(i32),
    [AH_U64] = ROW_I(u64),
    [AH_I64] = ROW_I(i64),
    [AH_BOOL] = {0, or_u8, 0, and_u8, and_u8, or_u8, and_u8, or_u8, xor_u8},
    [AH_F16] = ROW_F(f32),
    [AH_BF16] = ROW_F(f32),
    [AH_F32] = ROW_F(f32),
    [AH_F64] = ROW_F(f64),
};

size_t ah_dtype_bytes(uint32_t dtype)
{
    static const unsigned char BYTES[AH_RAW + 1] = {0, 1, 1, 2, 2, 4, 4, 8, 8, 1, 2, 2, 4, 8, 1};

    return dtype <= AH_RAW ? BYTES[dtype] : 0;
}

int ah_reducible(uint32_t dtype, uint32_t reduction)
{
    return dtype <= AH_RAW && reduction <= AH_PREMUL_SUM && PAIRS[dtype][reduction] != 0;
}

/* 16-bit floats ------------------------------------------------------------------------------------------- */

WIDE static void widen_bf16(float *out, const void *source, size_t n)
{
    const uint16_t *from = source;

    for (size_t i = 0; i < n; i++) {
        uint32_t bits = (uint32_t)from[i] << 16;

        memcpy(&out[i], &bits, sizeof bits);
    }
}

/* Rounds to nearest, ties to even; a NaN stays a NaN. */
WIDE static void narrow_bf16(void *out, const float *source, size_t n)
{
    uint16_t *to = out;

    for (size_t i = 0; i < n; i++) {
        uint32_t bits, rounded;

        memcpy(&bits, &source[i], sizeof bits);
        rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
        to[i] = (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
    }
}

static float widen_one_f16(uint16_t half)
{
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, exponent = half >> 10 & 31, fraction = half & 1023, bits;
    float value;

    if (exponent == 0) {
        value = (float)fraction * 0x1p-24f;
        return sign ? -value : value;
    }
    bits = sign | (exponent == 31 ? 0x7f800000 : (exponent + 112) << 23) | fraction << 13;
    memcpy(&value, &bits, sizeof bits);
    return value;
}

static uint16_t narrow_one_f16(float value)
{
    uint32_t bits, sign, magnitude, rounded;

    memcpy(&bits, &value, sizeof bits);
    sign = bits >> 16 & 0x8000;
    magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000)
        return (uint16_t)(sign | 0x7e00);
    if (magnitude >= 0x477ff000) /* rounds to more than the largest half */
        return (uint16_t)(sign | 0x7c00);
    if (magnitude < 0x38800000) /* a subnormal half: its unit is 2^-24 */
        return (uint16_t)(sign | (uint32_t)lrintf(fabsf(value) * 0x1p24f));
    rounded = magnitude - (112u << 23);
    rounded += 0xfff + (rounded >> 13 & 1);
    return (uint16_t)(sign | rounded >> 13);
}

static void widen_f16_plain(float *out, const void *source, size_t n)
{
    const uint16_t *from = source;

    for (size_t i = 0; i < n; i++)
        out[i] = widen_one_f16(from[i]);
}

static void narrow_f16_plain(void *out, const float *source, size_t n)
{
    uint16_t *to = out;

    for (size_t i = 0; i < n; i++)
        to[i] = narrow_one_f16(source[i]);
}

#if defined(__x86_64__)
#include <immintrin.h>

/* The compiler does not vectorise the conversion by itself. */
__attribute__((target("avx,f16c"))) static void widen_f16_fast(float *out, const void *source, size_t n)
{
    const uint16_t *from = source;
    size_t i = 0;

    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + i))));
    widen_f16_plain(out + i, from + i, n - i);
}

__attribute__((target("avx,f16c"))) static void narrow_f16_fast(void *out, const float *source, size_t n)
{
    uint16_t *to = out;
    size_t i = 0;

    for (; i + 8 <= n; i += 8)
        _mm_storeu_si128((__m128i *)(to + i), _mm256_cvtps_ph(_mm256_loadu_ps(source + i), _MM_FROUND_TO_NEAREST_INT));
    narrow_f16_plain(to + i, source + i, n - i);
}
#endif

static void widen(uint32_t dtype, float *out, const void *source, size_t n)
{
    if (dtype == AH_BF16) {
        widen_bf16(out, source, n);
        return;
    }
#if defined(__x86_64__)
    if (__builtin_cpu_supports("f16c")) {
        widen_f16_fast(out, source, n);
        return;
    }
#endif
    widen_f16_plain(out, source, n);
}

static void narrow(uint32_t dtype, void *out, const float *source, size_t n)
{
    if (dtype == AH_BF16) {
        narrow_bf16(out, source, n);
        return;
    }
#if defined(__x86_64__)
    if (__builtin_cpu_supports("f16c")) {
        narrow_f16_fast(out, source, n);
        return;
    }
#endif
    narrow_f16_plain(out, source, n);
}

WIDE static void divide_f32(float *values, size_t n, float by)
{
    for (size_t i = 0; i < n; i++)
        values[i] /= by;
}

/* Store a value for each element, to one array or two. */
#define STORE(type, value)                                                  \
    do {                                                                    \
        if (also) {                                                         \
            _Pragma("GCC ivdep") for (size_t i = 0; i < n; i++) {           \
                type result = (value);                                      \
                to[i] = result;                                             \
                second[i] = result;                                         \
            }                                                               \
        } else {                                                            \
            _Pragma("GCC ivdep") for (size_t i = 0; i < n; i++) to[i] = (value); \
        }                                                                   \
    } while (0)

/* Add one or three arrays to a sum, and divide by `number`, which may be 1. Reading four ranks at once uses more of the
 * memory bandwidth than one after the other (4 ranks on 2 cores, 256 MiB: 70 ms against 76); the order of the additions
 * is the same. If the number is a power of two, multiplying by its inverse gives the same bits in less time. */
#define MORE_OF(name, type)                                                                              \
    WIDE static void name(void *out, void *also, const void *sum, const void *const *more, uint32_t some, \
                          size_t at, size_t n, uint32_t number)                                          \
    {                                                                                                    \
        type *to = out, *second = also, by = (type)number, inverse = 1 / by;                             \
        const type *a = sum, *b = (const type *)more[0] + at;                                            \
        const type *c = (const type *)more[some / 2] + at, *d = (const type *)more[some - 1] + at;       \
        int exact = (number & (number - 1)) == 0;                                                        \
        if (some == 1 && exact)                                                                          \
            STORE(type, (a[i] + b[i]) * inverse);                                                        \
        else if (some == 1)                                                                              \
            STORE(type, (a[i] + b[i]) / by);                                                             \
        else if (exact)                                                                                  \
            STORE(type, (((a[i] + b[i]) + c[i]) + d[i]) * inverse);                                      \
        else                                                                                             \
            STORE(type, (((a[i] + b[i]) + c[i]) + d[i]) / by);                                           \
    }

MORE_OF(more_of_f32, float)
MORE_OF(more_of_f64, double)

/* ---------------------------------------------------------------------------------------------------------- */

static void reduce_halves(uint32_t dtype, uint32_t reduction, void *out, const void *const *sources, uint32_t number,
                          size_t elements)
{
    alignas(64) float total[BLOCK], next[BLOCK];
    pair step = PAIRS[dtype][reduction];

    for (size_t at = 0; at < elements; at += BLOCK) {
        size_t n = elements - at < BLOCK ? elements - at : BLOCK;

        widen(dtype, total, (const uint16_t *)sources[0] + at, n);
        for (uint32_t source = 1; source < number; source++) {
            widen(dtype, next, (const uint16_t *)sources[source] + at, n);
            step(total, total, next, n);
        }
        if (reduction == AH_AVG)
            divide_f32(total, n, (float)number);
        narrow(dtype, (uint16_t *)out + at, total, n);
    }
}

/* The address of element `at` of a source. */
static const unsigned char *block_of(const void *source, size_t at, size_t size)
{
    return (const unsigned char *)source + at * size;
}

/* The sum of floats of 32 or 64 bits, divided by `by`. */
static void add_up(uint32_t dtype, void *out, void *also, const void *const *sources, uint32_t number, size_t elements,
                   uint32_t by)
{
    alignas(64) unsigned char total[BLOCK * 4];
    size_t size = ah_dtype_bytes(dtype), block = sizeof total / size;

    for (size_t at = 0; at < elements; at += block) {
        size_t n = elements - at < block ? elements - at : block;

        for (uint32_t source = 1, some; source < number; source += some) {
            const void *sum = source == 1 ? block_of(sources[0], at, size) : total;
            int last;

            some = number - source >= 3 ? 3 : 1;
            last = source + some == number;
            /* `out` may be a source that comes later, so it is written last. */
            (dtype == AH_F32 ? more_of_f32 : more_of_f64)(
                last ? (unsigned char *)out + at * size : total,
                last && also ? (unsigned char *)also + at * size : NULL, sum, sources + source, some, at, n,
                last ? by : 1);
        }
    }
}

static void combine(uint32_t dtype, pair step, void *out, const void *const *sources, uint32_t number, size_t elements)
{
    alignas(64) unsigned char total[BLOCK * 4];
    size_t size = ah_dtype_bytes(dtype), block = sizeof total / size;

    for (size_t at = 0; at < elements; at += block) {
        size_t n = elements - at < block ? elements - at : block;

        for (uint32_t source = 1; source < number; source++) {
            const void *before = source == 1 ? block_of(sources[0], at, size) : total;

            /* `out` is written last, as in `add_up`. */
            step(source + 1 == number ? (unsigned char *)out + at * size : total, before,
                 block_of(sources[source], at, size), n);
        }
    }
}

void ah_reduce_twice(uint32_t dtype, uint32_t reduction, void *out, void *also, const void *const *sources,
                     uint32_t number, size_t elements)
{
    int sum = reduction == AH_SUM || reduction == AH_AVG || reduction == AH_PREMUL_SUM;
    size_t bytes = elements * ah_dtype_bytes(dtype);

    if (!ah_reducible(dtype, reduction))
        return;
    if (number > 1 && sum && (dtype == AH_F32 || dtype == AH_F64)) {
        add_up(dtype, out, also, sources, number, elements, reduction == AH_AVG ? number : 1);
        return;
    }
    if (dtype == AH_F16 || dtype == AH_BF16)
        reduce_halves(dtype, reduction, out, sources, number, elements);
    else if (number > 1)
        combine(dtype, PAIRS[dtype][reduction], out, sources, number, elements);
    else if (out != sources[0])
        memcpy(out, sources[0], bytes);
    if (also)
        memcpy(also, out, bytes);
}

void ah_reduce(uint32_t dtype, uint32_t reduction, void *out, const void *const *sources, uint32_t number,
               size_t elements)
{
    ah_reduce_twice(dtype, reduction, out, NULL, sources, number, elements);
}
