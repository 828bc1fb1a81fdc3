/* The products of rows in Q4_0, Q4_K and Q6_K and a row of activations, on processors with AVX-512
 * VNNI, for which ggml's package has no kernels: its own are for AVX2. Weights come at 22, 27 and
 * 31 GB/s a thread (with ggml's kernels and nothing fetched ahead at 13, 20 and 27), where memory
 * gives 38. With AVX2 alone there is a kernel for Q4_0: ggml's takes 1.3 times as long with rows
 * fetched ahead, and twice as long for many tokens. For other types, ggml's are used.
 *
 * Four rows share what is loaded of the activations. Each row's operations are the same whatever
 * their number is.
 */
#define FEW_ROWS 4 /* of weights, that share what is loaded of the activations */

/* Products of at most FEW_ROWS rows of so many bytes. `is_first`: the rows come from memory, and
 * what comes next is fetched ahead; for other activations they are in a cache. */
typedef void (*OwnDot)(Py_ssize_t num_rows, Py_ssize_t columns, size_t bytes,
                       const uint8_t *weights, const void *x, int is_first, float *results);

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

#define HAS_OWN_DOTS 1
#define AVX2 __attribute__((target("avx2,f16c,fma")))
#define VNNI __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c,fma")))
#define INLINE static inline __attribute__((always_inline))
#define Q4_0 2 /* ggml's numbers of the types */
#define Q8_0 8
#define Q4_K 12
#define Q6_K 14
#define Q8_K 15
#define BLOCK_WEIGHTS 32
#define BLOCK_Q4_0 18 /* bytes */
#define BLOCK_Q8_0 34
#define GROUP 8     /* blocks */
#define AHEAD 16384 /* bytes: memory gives rows in their order twice as fast as four at a time */

/* Fetches what comes next in memory into the second cache: the first one is too small for AHEAD. */
static inline void fetch(uintptr_t *coming, int bytes) {
    for (int line = 0; line < bytes; line += 64)
        _mm_prefetch((const char *)(*coming + (uintptr_t)line), _MM_HINT_T1);
    *coming += (uintptr_t)bytes;
}

/* ---- Q4_0
 *
 * A block has a scale in half precision and 32 numbers of four bits, less 8: the low halves of 16
 * bytes are the first 16. Activations are those of ggml's Q8_0, a scale and 32 bytes, in groups of
 * eight blocks, with what does not depend on the weights: scales in single precision, and what the
 * eights take away. The last group of a row may have fewer blocks; zeros fill it. */

typedef struct {
    float scales[GROUP];
    float eights[GROUP]; /* minus eight times the sum of a block's values */
    int8_t values[GROUP][BLOCK_WEIGHTS];
} Group;

/* Processors with AVX2 have F16C. */
static int has_avx2(void) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

static int has_vnni(void) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vnni") && has_avx2();
}

static size_t group_bytes(Py_ssize_t columns) {
    return (size_t)(columns + GROUP * BLOCK_WEIGHTS - 1) / (GROUP * BLOCK_WEIGHTS) * sizeof(Group);
}

/* The scales of a group's blocks, of so many bytes each. */
AVX2 static inline __m256 read_scales(const uint8_t *blocks, size_t bytes) {
    int16_t halves[GROUP];
    for (int b = 0; b < GROUP; b++) memcpy(&halves[b], blocks + (size_t)b * bytes, 2);
    return _mm256_cvtph_ps(_mm_set_epi16(halves[7], halves[6], halves[5], halves[4], halves[3],
                                         halves[2], halves[1], halves[0]));
}

/* `quantise` writes blocks of Q8_0. */
AVX2 static void encode_groups(void (*quantise)(const float *, void *, int64_t), const float *row,
                               Group *group, Py_ssize_t columns) {
    for (Py_ssize_t c = 0; c < columns; c += GROUP * BLOCK_WEIGHTS, group++) {
        uint8_t blocks[GROUP * BLOCK_Q8_0] = {0};
        Py_ssize_t left = columns - c;
        quantise(row + c, blocks, left < GROUP * BLOCK_WEIGHTS ? left : GROUP * BLOCK_WEIGHTS);
        _mm256_storeu_ps(group->scales, read_scales(blocks, BLOCK_Q8_0));
        for (int b = 0; b < GROUP; b++) {
            int sum = 0;
            memcpy(group->values[b], blocks + b * BLOCK_Q8_0 + 2, BLOCK_WEIGHTS);
            for (int i = 0; i < BLOCK_WEIGHTS; i++) sum += group->values[b][i];
            group->eights[b] = (float)(-8 * sum);
        }
    }
}

/* Sums of four products each, of 32 numbers below 16 and values. */
typedef __m256i (*AddFours)(__m256i numbers, __m256i values);

VNNI INLINE __m256i add_fours_vnni(__m256i numbers, __m256i values) {
    return _mm256_dpbusd_epi32(_mm256_setzero_si256(), numbers, values);
}

/* Sums of two fit 16 bits: 2 * 15 * 128. */
AVX2 INLINE __m256i add_fours_avx2(__m256i numbers, __m256i values) {
    return _mm256_madd_epi16(_mm256_maddubs_epi16(numbers, values), _mm256_set1_epi16(1));
}

AVX2 INLINE void dot_rows_of_groups(AddFours add_fours, int num_rows, Py_ssize_t columns,
                                    const uint8_t *weights, const void *x, int is_first,
                                    float *results) {
    const Group *group = x;
    const __m256i low = _mm256_set1_epi8(15), halves = _mm256_set_epi64x(4, 4, 0, 0);
    const size_t row_bytes = (size_t)(columns / BLOCK_WEIGHTS) * BLOCK_Q4_0;
    const int bytes = num_rows * GROUP * BLOCK_Q4_0;
    uintptr_t coming = (uintptr_t)weights + AHEAD;
    __m256 sums[FEW_ROWS];
    for (int r = 0; r < num_rows; r++) sums[r] = _mm256_setzero_ps();
    for (Py_ssize_t left = columns / BLOCK_WEIGHTS; left > 0; left -= GROUP, group++) {
        if (is_first) fetch(&coming, bytes);
        uint8_t filled[FEW_ROWS][GROUP * BLOCK_Q4_0];
        float scales[FEW_ROWS][GROUP];
        const uint8_t *rows[FEW_ROWS];
        for (int r = 0; r < num_rows; r++) {
            rows[r] = weights + (size_t)r * row_bytes;
            if (left < GROUP) {
                memset(filled[r], 0, sizeof filled[r]);
                rows[r] = memcpy(filled[r], rows[r], (size_t)left * BLOCK_Q4_0);
            }
            __m256 both = _mm256_mul_ps(read_scales(rows[r], BLOCK_Q4_0),
                                        _mm256_loadu_ps(group->scales));
            _mm256_storeu_ps(scales[r], both);
            sums[r] = _mm256_fmadd_ps(both, _mm256_loadu_ps(group->eights), sums[r]);
        }
        for (int b = 0; b < GROUP; b++) {
            __m256i values = _mm256_loadu_si256((const __m256i *)group->values[b]);
            for (int r = 0; r < num_rows; r++) {
                __m256i stored = _mm256_broadcastsi128_si256(
                    _mm_loadu_si128((const __m128i *)(rows[r] + b * BLOCK_Q4_0 + 2)));
                __m256i numbers = _mm256_and_si256(low, _mm256_srlv_epi64(stored, halves));
                __m256 products = _mm256_cvtepi32_ps(add_fours(numbers, values));
                sums[r] = _mm256_fmadd_ps(_mm256_set1_ps(scales[r][b]), products, sums[r]);
            }
        }
        weights += GROUP * BLOCK_Q4_0;
    }
    for (int r = 0; r < num_rows; r++) {
        __m128 sum = _mm_add_ps(_mm256_castps256_ps128(sums[r]), _mm256_extractf128_ps(sums[r], 1));
        sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
        results[r] = _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
    }
}

VNNI INLINE void dot_rows_q4_0(int num_rows, Py_ssize_t columns, const uint8_t *weights,
                               const void *x, int is_first, float *results) {
    dot_rows_of_groups(add_fours_vnni, num_rows, columns, weights, x, is_first, results);
}

AVX2 INLINE void dot_rows_q4_0_avx2(int num_rows, Py_ssize_t columns, const uint8_t *weights,
                                    const void *x, int is_first, float *results) {
    dot_rows_of_groups(add_fours_avx2, num_rows, columns, weights, x, is_first, results);
}

/* ---- Q4_K and Q6_K
 *
 * Blocks of 256 weights, and activations in ggml's Q8_K: a scale, bytes, and their sums by 16.
 * Sums of four products of bytes fit 16 bits (4 * 63 * 127): two vectors of them become one, which
 * is multiplied by the scales of its weights and added up, all in integers. */

#define BLOCK_K 256

typedef struct {
    uint16_t scale, minimum; /* of the scales and minima: half precision */
    uint8_t scales[12];      /* eight scales and eight minima of six bits, of 32 weights each */
    uint8_t numbers[BLOCK_K / 2]; /* of 64: the low halves of 32 bytes, then the high ones */
} __attribute__((packed)) BlockQ4K;

typedef struct {
    uint8_t low[BLOCK_K / 2];  /* four bits, of 128: low halves of 64 bytes, then high ones */
    uint8_t high[BLOCK_K / 4]; /* two bits, of 128: four times 32 */
    int8_t scales[BLOCK_K / 16];
    uint16_t scale; /* of the scales: half precision */
} __attribute__((packed)) BlockQ6K;

typedef struct {
    float scale;
    int8_t values[BLOCK_K];
    int16_t sums[BLOCK_K / 16];
} BlockQ8K;

VNNI INLINE void dot_rows_q4_K(int num_rows, Py_ssize_t columns, const uint8_t *weights,
                               const void *x, int is_first, float *results) {
    const Py_ssize_t num_blocks = columns / BLOCK_K;
    const __m512i zero = _mm512_setzero_si512(), low = _mm512_set1_epi8(15);
    /* Of eight bytes, those that scale 16 bits in each place, after `packs`. */
    const __m512i places = _mm512_add_epi16(
        _mm512_set1_epi16((int16_t)0x8000),
        _mm512_set_epi16(3, 3, 3, 3, 2, 2, 2, 2, 3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0, 1,
                         1, 1, 1, 0, 0, 0, 0));
    const int bytes = num_rows * (int)sizeof(BlockQ4K);
    uintptr_t coming = (uintptr_t)weights + AHEAD;
    __m512 sums[FEW_ROWS];
    __m256 minima[FEW_ROWS];
    for (int r = 0; r < num_rows; r++) {
        sums[r] = _mm512_setzero_ps();
        minima[r] = _mm256_setzero_ps();
    }
    for (Py_ssize_t b = 0; b < num_blocks; b++) {
        const BlockQ8K *block = (const BlockQ8K *)x + b;
        __m512i values[4]; /* of the low halves of 64 bytes, and of the high ones; twice */
        for (int i = 0; i < 4; i += 2) {
            __m512i first = _mm512_loadu_si512(block->values + 64 * i);
            __m512i second = _mm512_loadu_si512(block->values + 64 * i + 64);
            values[i] = _mm512_shuffle_i64x2(first, second, 0x44);
            values[i + 1] = _mm512_shuffle_i64x2(first, second, 0xee);
        }
        __m256i sums_of_values = _mm256_loadu_si256((const __m256i *)block->sums);
        if (is_first) fetch(&coming, bytes);
        for (int r = 0; r < num_rows; r++) {
            const BlockQ4K *row = (const BlockQ4K *)weights + r * num_blocks + b;
            uint32_t bits[3];
            memcpy(bits, row->scales, sizeof bits);
            __m128i scales = _mm_set_epi32(
                0, 0, (int)((bits[2] & 0x0f0f0f0f) | (bits[0] >> 2 & 0x30303030)),
                (int)(bits[0] & 0x3f3f3f3f));
            __m128i least = _mm_set_epi32(
                0, 0, (int)((bits[2] >> 4 & 0x0f0f0f0f) | (bits[1] >> 2 & 0x30303030)),
                (int)(bits[1] & 0x3f3f3f3f));
            __m512i total = zero;
            for (int i = 0; i < 2; i++) {
                __m512i stored = _mm512_loadu_si512(row->numbers + 64 * i);
                __m512i lows = _mm512_and_si512(stored, low);
                __m512i highs = _mm512_and_si512(_mm512_srli_epi16(stored, 4), low);
                __m512i products = _mm512_packs_epi32(
                    _mm512_dpbusd_epi32(zero, lows, values[2 * i]),
                    _mm512_dpbusd_epi32(zero, highs, values[2 * i + 1]));
                __m512i own = _mm512_shuffle_epi8(
                    _mm512_broadcast_i32x4(scales),
                    _mm512_add_epi16(places, _mm512_set1_epi16((int16_t)(4 * i))));
                total = _mm512_dpwssd_epi32(total, products, own);
            }
            least = _mm_unpacklo_epi8(least, least);
            __m256i below = _mm256_madd_epi16(_mm256_cvtepu8_epi16(least), sums_of_values);
            int halves;
            memcpy(&halves, row, sizeof halves);
            __m128 factors = _mm_mul_ps(_mm_cvtph_ps(_mm_cvtsi32_si128(halves)),
                                        _mm_set1_ps(block->scale));
            sums[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(total), _mm512_broadcastss_ps(factors),
                                      sums[r]);
            minima[r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(below),
                                        _mm256_broadcastss_ps(_mm_movehdup_ps(factors)), minima[r]);
        }
    }
    for (int r = 0; r < num_rows; r++)
        results[r] = _mm512_reduce_add_ps(
            _mm512_sub_ps(sums[r], _mm512_zextps256_ps512(minima[r])));
}

/* Numbers of six bits, less 32. */
VNNI INLINE void dot_rows_q6_K(int num_rows, Py_ssize_t columns, const uint8_t *weights,
                               const void *x, int is_first, float *results) {
    const Py_ssize_t num_blocks = columns / BLOCK_K;
    const __m512i zero = _mm512_setzero_si512();
    const __m512i low = _mm512_set1_epi8(15), six = _mm512_set1_epi8(63);
    const __m512i left = _mm512_set_epi64(2, 2, 2, 2, 4, 4, 4, 4);
    const __m512i right = _mm512_set_epi64(2, 2, 2, 2, 0, 0, 0, 0);
    const __m512i places =
        _mm512_set_epi16(7, 7, 7, 7, 3, 3, 3, 3, 6, 6, 6, 6, 2, 2, 2, 2, 5, 5, 5, 5, 1, 1, 1, 1, 4,
                         4, 4, 4, 0, 0, 0, 0);
    const int bytes = num_rows * (int)sizeof(BlockQ6K);
    uintptr_t coming = (uintptr_t)weights + AHEAD;
    __m512 sums[FEW_ROWS];
    for (int r = 0; r < num_rows; r++) sums[r] = _mm512_setzero_ps();
    for (Py_ssize_t b = 0; b < num_blocks; b++) {
        const BlockQ8K *block = (const BlockQ8K *)x + b;
        __m256i sums_of_values = _mm256_loadu_si256((const __m256i *)block->sums);
        if (is_first) fetch(&coming, bytes);
        for (int r = 0; r < num_rows; r++) {
            const BlockQ6K *row = (const BlockQ6K *)weights + r * num_blocks + b;
            __m256i scales =
                _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)row->scales));
            __m256i below = _mm256_slli_epi32(_mm256_madd_epi16(scales, sums_of_values), 5);
            __m512i total = _mm512_sub_epi32(zero, _mm512_zextsi256_si512(below));
            for (int i = 0; i < 2; i++) {
                __m512i stored = _mm512_loadu_si512(row->low + 64 * i);
                __m512i upper = _mm512_broadcast_i64x4(
                    _mm256_loadu_si256((const __m256i *)(row->high + 32 * i)));
                /* Bits of `low` from the one, others from the other. */
                __m512i first = _mm512_ternarylogic_epi64(
                    low, stored, _mm512_sllv_epi64(upper, left), 0xca);
                __m512i second = _mm512_ternarylogic_epi64(
                    low, _mm512_srli_epi64(stored, 4), _mm512_srlv_epi64(upper, right), 0xca);
                const int8_t *values = block->values + 128 * i;
                __m512i products = _mm512_packs_epi32(
                    _mm512_dpbusd_epi32(zero, _mm512_and_si512(first, six),
                                        _mm512_loadu_si512(values)),
                    _mm512_dpbusd_epi32(zero, _mm512_and_si512(second, six),
                                        _mm512_loadu_si512(values + 64)));
                __m512i own = _mm512_permutexvar_epi16(
                    _mm512_add_epi16(places, _mm512_set1_epi16((int16_t)(8 * i))),
                    _mm512_castsi256_si512(scales));
                total = _mm512_dpwssd_epi32(total, products, own);
            }
            __m128 scale = _mm_cvtph_ps(_mm_cvtsi32_si128(row->scale));
            sums[r] = _mm512_fmadd_ps(
                _mm512_cvtepi32_ps(total),
                _mm512_broadcastss_ps(_mm_mul_ps(scale, _mm_set1_ps(block->scale))), sums[r]);
        }
    }
    for (int r = 0; r < num_rows; r++) results[r] = _mm512_reduce_add_ps(sums[r]);
}

/* ---- of at most FEW_ROWS rows */

#define DOT(target, name)                                                                         \
    target static void dot_##name(Py_ssize_t num_rows, Py_ssize_t columns, size_t bytes,          \
                                  const uint8_t *weights, const void *x, int is_first,            \
                                  float *results) {                                               \
        if (num_rows == FEW_ROWS) {                                                               \
            dot_rows_##name(FEW_ROWS, columns, weights, x, is_first, results);                    \
            return;                                                                               \
        }                                                                                         \
        for (Py_ssize_t r = 0; r < num_rows; r++, weights += bytes)                               \
            dot_rows_##name(1, columns, weights, x, is_first, results + r);                       \
    }
DOT(AVX2, q4_0_avx2)
DOT(VNNI, q4_0)
DOT(VNNI, q4_K)
DOT(VNNI, q6_K)
#else
#define HAS_OWN_DOTS 0
#endif
