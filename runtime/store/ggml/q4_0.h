/* The product of a row in Q4_0 and a row of activations, on processors with AVX-512 VNNI, in half the
 * time of ggml's own kernel, which its package has for AVX2 only: the weights then come almost as
 * fast as memory gives them. For the K-quants and Q8_0, ggml's kernels do that.
 *
 * A block of Q4_0 has a scale in half precision and 32 numbers of four bits, less 8: the low halves
 * of 16 bytes are the first 16. Activations are in ggml's Q8_0: a scale and 32 bytes.
 */
#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

#define HAS_VNNI_KERNEL 1
#define VNNI __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c,fma")))
#define Q4_0 2 /* ggml's numbers of the types */
#define Q8_0 8
#define BLOCK_WEIGHTS 32
#define BLOCK_Q4_0 18 /* bytes */
#define BLOCK_Q8_0 34

static int has_vnni(void) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("fma");
}

/* The scales of two blocks: four of the first, four of the second, and so once more. */
VNNI static inline __m512 read_scales(const uint8_t *first, const uint8_t *second) {
    const __m512i places = _mm512_set_epi32(1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0);
    uint16_t halves[2];
    memcpy(&halves[0], first, 2);
    memcpy(&halves[1], second, 2);
    __m128i both = _mm_cvtsi32_si128((int)(halves[0] | (uint32_t)halves[1] << 16));
    return _mm512_permutexvar_ps(places, _mm512_castps128_ps512(_mm_cvtph_ps(both)));
}

/* Two blocks at a time: the low halves of both, then the high halves, fill a register. */
VNNI static float dot_q4_0(Py_ssize_t columns, const uint8_t *weights, const uint8_t *x) {
    const __m512i low = _mm512_set1_epi8(15), eights = _mm512_set1_epi8(8);
    const __m512i zero = _mm512_setzero_si512();
    const size_t row_bytes = (size_t)(columns / BLOCK_WEIGHTS) * BLOCK_Q4_0;
    __m512 sum = _mm512_setzero_ps();
    for (Py_ssize_t left = columns / BLOCK_WEIGHTS; left > 0; left -= 2) {
        /* An odd last block has itself for a neighbour, whose activations count as zeros. */
        const uint8_t *next = left > 1 ? weights + BLOCK_Q4_0 : weights;
        const uint8_t *next_x = left > 1 ? x + BLOCK_Q8_0 : x;
        __m256i first = _mm256_loadu_si256((const __m256i *)(x + 2));
        __m256i second = left > 1 ? _mm256_loadu_si256((const __m256i *)(next_x + 2))
                                  : _mm256_setzero_si256();
        __m512i values = _mm512_inserti64x4(
            _mm512_castsi256_si512(_mm256_permute2x128_si256(first, second, 0x20)),
            _mm256_permute2x128_si256(first, second, 0x31), 1);
        __m256i both = _mm256_inserti128_si256(
            _mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)(weights + 2))),
            _mm_loadu_si128((const __m128i *)(next + 2)), 1);
        __m512i numbers = _mm512_and_si512(
            low, _mm512_inserti64x4(_mm512_castsi256_si512(both), _mm256_srli_epi16(both, 4), 1));
        __m512i products = _mm512_sub_epi32(_mm512_dpbusd_epi32(zero, numbers, values),
                                            _mm512_dpbusd_epi32(zero, eights, values));
        __m512 scales = _mm512_mul_ps(read_scales(weights, next), read_scales(x, next_x));
        sum = _mm512_fmadd_ps(scales, _mm512_cvtepi32_ps(products), sum);
        /* Of the next row, which most often is the next to be multiplied. */
        _mm_prefetch((const char *)((uintptr_t)weights + row_bytes), _MM_HINT_T0);
        weights += 2 * BLOCK_Q4_0;
        x += 2 * BLOCK_Q8_0;
    }
    return _mm512_reduce_add_ps(sum);
}
#else
#define HAS_VNNI_KERNEL 0
#endif
