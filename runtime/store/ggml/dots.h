/* The products of rows in Q4_0, Q4_K and Q6_K and a row of activations, on processors with AVX-512
 * VNNI, for which ggml's package has no kernels: its own are for AVX2. Weights come at 22, 27 and
 * 31 GB/s a thread (with ggml's kernels and nothing fetched ahead at 13, 20 and 27), where memory
 * gives 38. With AVX2 alone there is a kernel for Q4_0: ggml's takes 1.3 times as long with rows
 * fetched ahead, and twice as long for many tokens. For other types, ggml's are used.
 *
 * Four rows share what is loaded of the activations, and the activations of four tokens what is
 * unpacked of the weights. The operations of a row and a token are the same whatever their numbers
 * are.
 */
#define FEW_ROWS 4 /* of weights, that share what is loaded of the activations */
#define FEW_X 4    /* rows of activations, that share what is unpacked of the weights */

/* Products of at most FEW_ROWS rows of so many bytes and of `num_x` rows of activations, 1 or FEW_X;
 * those with activations `t` begin at `results[t]`. `is_first`: the rows come from memory, and what
 * comes next is fetched ahead; for other activations they are in a cache. */
typedef void (*OwnDot)(Py_ssize_t num_rows, int num_x, Py_ssize_t columns, size_t bytes,
                       const uint8_t *weights, const void *const *x, int is_first,
                       float *const *results);

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

AVX2 INLINE float add_eight(__m256 sums) {
    __m128 sum = _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1));
    sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
    return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
}

/* Eight numbers, and eight others. */
VNNI INLINE __m512 read_both(const float *first, const float *second) {
    return _mm512_insertf32x8(_mm512_castps256_ps512(_mm256_loadu_ps(first)),
                              _mm256_loadu_ps(second), 1);
}

AVX2 INLINE void dot_rows_of_groups(AddFours add_fours, int num_rows, int num_x,
                                    Py_ssize_t columns, const uint8_t *weights,
                                    const void *const *x, int is_first, float *const *results) {
    const __m256i low = _mm256_set1_epi8(15), halves = _mm256_set_epi64x(4, 4, 0, 0);
    const size_t row_bytes = (size_t)(columns / BLOCK_WEIGHTS) * BLOCK_Q4_0;
    const int bytes = num_rows * GROUP * BLOCK_Q4_0;
    uintptr_t coming = (uintptr_t)weights + AHEAD;
    __m256 sums[FEW_ROWS][FEW_X];
    for (int r = 0; r < num_rows; r++)
        for (int t = 0; t < num_x; t++) sums[r][t] = _mm256_setzero_ps();
    for (Py_ssize_t g = 0, left = columns / BLOCK_WEIGHTS; left > 0; left -= GROUP, g++) {
        if (is_first) fetch(&coming, bytes);
        uint8_t filled[FEW_ROWS][GROUP * BLOCK_Q4_0];
        float scales[FEW_ROWS][FEW_X][GROUP];
        const uint8_t *rows[FEW_ROWS];
        for (int r = 0; r < num_rows; r++) {
            rows[r] = weights + (size_t)r * row_bytes;
            if (left < GROUP) {
                memset(filled[r], 0, sizeof filled[r]);
                rows[r] = memcpy(filled[r], rows[r], (size_t)left * BLOCK_Q4_0);
            }
            __m256 own = read_scales(rows[r], BLOCK_Q4_0);
            for (int t = 0; t < num_x; t++) {
                const Group *group = (const Group *)x[t] + g;
                __m256 both = _mm256_mul_ps(own, _mm256_loadu_ps(group->scales));
                _mm256_storeu_ps(scales[r][t], both);
                sums[r][t] = _mm256_fmadd_ps(both, _mm256_loadu_ps(group->eights), sums[r][t]);
            }
        }
        for (int b = 0; b < GROUP; b++) {
            __m256i values[FEW_X];
            for (int t = 0; t < num_x; t++)
                values[t] = _mm256_loadu_si256(
                    (const __m256i *)((const Group *)x[t] + g)->values[b]);
            for (int r = 0; r < num_rows; r++) {
                __m256i stored = _mm256_broadcastsi128_si256(
                    _mm_loadu_si128((const __m128i *)(rows[r] + b * BLOCK_Q4_0 + 2)));
                __m256i numbers = _mm256_and_si256(low, _mm256_srlv_epi64(stored, halves));
                for (int t = 0; t < num_x; t++) {
                    __m256 products = _mm256_cvtepi32_ps(add_fours(numbers, values[t]));
                    sums[r][t] = _mm256_fmadd_ps(_mm256_set1_ps(scales[r][t][b]), products,
                                                 sums[r][t]);
                }
            }
        }
        weights += GROUP * BLOCK_Q4_0;
    }
    for (int r = 0; r < num_rows; r++)
        for (int t = 0; t < num_x; t++) results[t][r] = add_eight(sums[r][t]);
}

/* Pairs of tokens: eight sums of each, in the order of `dot_rows_of_groups`. */
VNNI INLINE void dot_pairs_q4_0(Py_ssize_t columns, const uint8_t *weights, const void *const *x,
                                int is_first, float *const *results) {
    const __m512i low = _mm512_set1_epi8(15), zero = _mm512_setzero_si512();
    const __m512i halves = _mm512_set_epi64(4, 4, 0, 0, 4, 4, 0, 0);
    const __m512i second = _mm512_set_epi32(8, 8, 8, 8, 8, 8, 8, 8, 0, 0, 0, 0, 0, 0, 0, 0);
    const size_t row_bytes = (size_t)(columns / BLOCK_WEIGHTS) * BLOCK_Q4_0;
    uintptr_t coming = (uintptr_t)weights + AHEAD;
    __m512 sums[FEW_ROWS][FEW_X / 2];
    for (int r = 0; r < FEW_ROWS; r++)
        for (int t = 0; t < FEW_X / 2; t++) sums[r][t] = _mm512_setzero_ps();
    for (Py_ssize_t g = 0, left = columns / BLOCK_WEIGHTS; left > 0; left -= GROUP, g++) {
        if (is_first) fetch(&coming, FEW_ROWS * GROUP * BLOCK_Q4_0);
        uint8_t filled[FEW_ROWS][GROUP * BLOCK_Q4_0];
        __m512 scales[FEW_ROWS][FEW_X / 2];
        const uint8_t *rows[FEW_ROWS];
        for (int r = 0; r < FEW_ROWS; r++) {
            rows[r] = weights + (size_t)r * row_bytes;
            if (left < GROUP) {
                memset(filled[r], 0, sizeof filled[r]);
                rows[r] = memcpy(filled[r], rows[r], (size_t)left * BLOCK_Q4_0);
            }
            __m256 own = read_scales(rows[r], BLOCK_Q4_0);
            __m512 twice = _mm512_insertf32x8(_mm512_castps256_ps512(own), own, 1);
            for (int t = 0; t < FEW_X / 2; t++) {
                const Group *one = (const Group *)x[2 * t] + g, *two = (const Group *)x[2 * t + 1] + g;
                scales[r][t] = _mm512_mul_ps(twice, read_both(one->scales, two->scales));
                sums[r][t] = _mm512_fmadd_ps(scales[r][t], read_both(one->eights, two->eights),
                                             sums[r][t]);
            }
        }
        for (int b = 0; b < GROUP; b++) {
            __m512i numbers[FEW_ROWS], place = _mm512_add_epi32(second, _mm512_set1_epi32(b));
            for (int r = 0; r < FEW_ROWS; r++) {
                __m512i stored = _mm512_broadcast_i32x4(
                    _mm_loadu_si128((const __m128i *)(rows[r] + b * BLOCK_Q4_0 + 2)));
                numbers[r] = _mm512_and_si512(low, _mm512_srlv_epi64(stored, halves));
            }
            for (int t = 0; t < FEW_X / 2; t++) {
                const Group *one = (const Group *)x[2 * t] + g, *two = (const Group *)x[2 * t + 1] + g;
                __m512i values = _mm512_castps_si512(
                    read_both((const float *)one->values[b], (const float *)two->values[b]));
                for (int r = 0; r < FEW_ROWS; r++)
                    sums[r][t] = _mm512_fmadd_ps(
                        _mm512_permutexvar_ps(place, scales[r][t]),
                        _mm512_cvtepi32_ps(_mm512_dpbusd_epi32(zero, numbers[r], values)),
                        sums[r][t]);
            }
        }
        weights += GROUP * BLOCK_Q4_0;
    }
    for (int r = 0; r < FEW_ROWS; r++)
        for (int t = 0; t < FEW_X / 2; t++) {
            results[2 * t][r] = add_eight(_mm512_castps512_ps256(sums[r][t]));
            results[2 * t + 1][r] = add_eight(_mm512_extractf32x8_ps(sums[r][t], 1));
        }
}

VNNI INLINE void dot_rows_q4_0(int num_rows, int num_x, Py_ssize_t columns, const uint8_t *weights,
                               const void *const *x, int is_first, float *const *results) {
    if (num_x == FEW_X)
        dot_pairs_q4_0(columns, weights, x, is_first, results);
    else
        dot_rows_of_groups(add_fours_vnni, num_rows, num_x, columns, weights, x, is_first, results);
}

/* Two tokens at a time: there are half as many registers. */
AVX2 INLINE void dot_rows_q4_0_avx2(int num_rows, int num_x, Py_ssize_t columns,
                                    const uint8_t *weights, const void *const *x, int is_first,
                                    float *const *results) {
    if (num_x == FEW_X)
        for (int t = 0; t < FEW_X; t += 2, is_first = 0)
            dot_rows_of_groups(add_fours_avx2, num_rows, 2, columns, weights, x + t, is_first,
                               results + t);
    else
        dot_rows_of_groups(add_fours_avx2, num_rows, num_x, columns, weights, x, is_first, results);
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

VNNI INLINE void dot_rows_q4_K(int num_rows, int num_x, Py_ssize_t columns, const uint8_t *weights,
                               const void *const *x, int is_first, float *const *results) {
    const Py_ssize_t num_blocks = columns / BLOCK_K;
    const __m512i zero = _mm512_setzero_si512(), low = _mm512_set1_epi8(15);
    /* Of eight bytes, those that scale 16 bits in each place, after `packs`. */
    const __m512i places = _mm512_add_epi16(
        _mm512_set1_epi16((int16_t)0x8000),
        _mm512_set_epi16(3, 3, 3, 3, 2, 2, 2, 2, 3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0, 1,
                         1, 1, 1, 0, 0, 0, 0));
    const int bytes = num_rows * (int)sizeof(BlockQ4K);
    uintptr_t coming = (uintptr_t)weights + AHEAD;
    __m512 sums[FEW_ROWS][FEW_X];
    __m256 minima[FEW_ROWS][FEW_X];
    for (int r = 0; r < num_rows; r++)
        for (int t = 0; t < num_x; t++) {
            sums[r][t] = _mm512_setzero_ps();
            minima[r][t] = _mm256_setzero_ps();
        }
    for (Py_ssize_t b = 0; b < num_blocks; b++) {
        __m512i values[FEW_X][4]; /* of the low halves of 64 bytes, and of the high ones; twice */
        for (int t = 0; t < num_x; t++)
            for (int i = 0; i < 4; i += 2) {
                const int8_t *own = ((const BlockQ8K *)x[t] + b)->values + 64 * i;
                __m512i first = _mm512_loadu_si512(own), second = _mm512_loadu_si512(own + 64);
                values[t][i] = _mm512_shuffle_i64x2(first, second, 0x44);
                values[t][i + 1] = _mm512_shuffle_i64x2(first, second, 0xee);
            }
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
            __m256i minimum = _mm256_cvtepu8_epi16(_mm_unpacklo_epi8(least, least));
            __m512i numbers[4], own[2];
            for (int i = 0; i < 2; i++) {
                __m512i stored = _mm512_loadu_si512(row->numbers + 64 * i);
                numbers[2 * i] = _mm512_and_si512(stored, low);
                numbers[2 * i + 1] = _mm512_and_si512(_mm512_srli_epi16(stored, 4), low);
                own[i] = _mm512_shuffle_epi8(
                    _mm512_broadcast_i32x4(scales),
                    _mm512_add_epi16(places, _mm512_set1_epi16((int16_t)(4 * i))));
            }
            int halves;
            memcpy(&halves, row, sizeof halves);
            __m128 both = _mm_cvtph_ps(_mm_cvtsi32_si128(halves));
            for (int t = 0; t < num_x; t++) {
                const BlockQ8K *block = (const BlockQ8K *)x[t] + b;
                __m512i total = zero;
                for (int i = 0; i < 4; i += 2) {
                    __m512i products =
                        _mm512_packs_epi32(_mm512_dpbusd_epi32(zero, numbers[i], values[t][i]),
                                           _mm512_dpbusd_epi32(zero, numbers[i + 1], values[t][i + 1]));
                    total = _mm512_dpwssd_epi32(total, products, own[i / 2]);
                }
                __m256i below = _mm256_madd_epi16(
                    minimum, _mm256_loadu_si256((const __m256i *)block->sums));
                __m128 factors = _mm_mul_ps(both, _mm_set1_ps(block->scale));
                sums[r][t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(total),
                                             _mm512_broadcastss_ps(factors), sums[r][t]);
                minima[r][t] =
                    _mm256_fmadd_ps(_mm256_cvtepi32_ps(below),
                                    _mm256_broadcastss_ps(_mm_movehdup_ps(factors)), minima[r][t]);
            }
        }
    }
    for (int r = 0; r < num_rows; r++)
        for (int t = 0; t < num_x; t++)
            results[t][r] = _mm512_reduce_add_ps(
                _mm512_sub_ps(sums[r][t], _mm512_zextps256_ps512(minima[r][t])));
}

/* Numbers of six bits, less 32. */
VNNI INLINE void dot_rows_q6_K(int num_rows, int num_x, Py_ssize_t columns, const uint8_t *weights,
                               const void *const *x, int is_first, float *const *results) {
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
    __m512 sums[FEW_ROWS][FEW_X];
    for (int r = 0; r < num_rows; r++)
        for (int t = 0; t < num_x; t++) sums[r][t] = _mm512_setzero_ps();
    for (Py_ssize_t b = 0; b < num_blocks; b++) {
        if (is_first) fetch(&coming, bytes);
        for (int r = 0; r < num_rows; r++) {
            const BlockQ6K *row = (const BlockQ6K *)weights + r * num_blocks + b;
            __m256i scales =
                _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)row->scales));
            __m512i numbers[4], own[2];
            for (int i = 0; i < 2; i++) {
                __m512i stored = _mm512_loadu_si512(row->low + 64 * i);
                __m512i upper = _mm512_broadcast_i64x4(
                    _mm256_loadu_si256((const __m256i *)(row->high + 32 * i)));
                /* Bits of `low` from the one, others from the other. */
                numbers[2 * i] = _mm512_and_si512(
                    six, _mm512_ternarylogic_epi64(low, stored, _mm512_sllv_epi64(upper, left),
                                                   0xca));
                numbers[2 * i + 1] = _mm512_and_si512(
                    six, _mm512_ternarylogic_epi64(low, _mm512_srli_epi64(stored, 4),
                                                   _mm512_srlv_epi64(upper, right), 0xca));
                own[i] = _mm512_permutexvar_epi16(
                    _mm512_add_epi16(places, _mm512_set1_epi16((int16_t)(8 * i))),
                    _mm512_castsi256_si512(scales));
            }
            __m128 scale = _mm_cvtph_ps(_mm_cvtsi32_si128(row->scale));
            for (int t = 0; t < num_x; t++) {
                const BlockQ8K *block = (const BlockQ8K *)x[t] + b;
                __m256i below = _mm256_madd_epi16(
                    scales, _mm256_loadu_si256((const __m256i *)block->sums));
                __m512i total = _mm512_sub_epi32(
                    zero, _mm512_zextsi256_si512(_mm256_slli_epi32(below, 5)));
                for (int i = 0; i < 4; i += 2) {
                    const int8_t *values = block->values + 64 * i;
                    __m512i products = _mm512_packs_epi32(
                        _mm512_dpbusd_epi32(zero, numbers[i], _mm512_loadu_si512(values)),
                        _mm512_dpbusd_epi32(zero, numbers[i + 1], _mm512_loadu_si512(values + 64)));
                    total = _mm512_dpwssd_epi32(total, products, own[i / 2]);
                }
                sums[r][t] = _mm512_fmadd_ps(
                    _mm512_cvtepi32_ps(total),
                    _mm512_broadcastss_ps(_mm_mul_ps(scale, _mm_set1_ps(block->scale))),
                    sums[r][t]);
            }
        }
    }
    for (int r = 0; r < num_rows; r++)
        for (int t = 0; t < num_x; t++) results[t][r] = _mm512_reduce_add_ps(sums[r][t]);
}

/* ---- of at most FEW_ROWS rows */

#define DOT(target, name)                                                                         \
    target static void dot_##name(Py_ssize_t num_rows, int num_x, Py_ssize_t columns,             \
                                  size_t bytes, const uint8_t *weights, const void *const *x,     \
                                  int is_first, float *const *results) {                          \
        if (num_rows == FEW_ROWS && num_x == FEW_X) {                                             \
            dot_rows_##name(FEW_ROWS, FEW_X, columns, weights, x, is_first, results);             \
            return;                                                                               \
        }                                                                                         \
        for (int t = 0; t < num_x; t++) {                                                         \
            if (num_rows == FEW_ROWS) {                                                           \
                dot_rows_##name(FEW_ROWS, 1, columns, weights, x + t, is_first, results + t);     \
                continue;                                                                         \
            }                                                                                     \
            const uint8_t *row = weights;                                                         \
            for (Py_ssize_t r = 0; r < num_rows; r++, row += bytes) {                             \
                float *result = results[t] + r;                                                   \
                dot_rows_##name(1, 1, columns, row, x + t, is_first, &result);                    \
            }                                                                                     \
        }                                                                                         \
    }
DOT(AVX2, q4_0_avx2)
DOT(VNNI, q4_0)
DOT(VNNI, q4_K)
DOT(VNNI, q6_K)
#else
#define HAS_OWN_DOTS 0
#endif
