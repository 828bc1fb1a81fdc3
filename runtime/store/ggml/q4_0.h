/* The products of rows in Q4_0 and a row of activations, on processors with AVX-512 VNNI, for which
 * ggml's package has no kernel: its own is for AVX2. Weights come at 20 to 22 GB/s a thread, where
 * memory gives 30. For the K-quants and Q8_0, ggml's kernels are used.
 *
 * A block of Q4_0 has a scale in half precision and 32 numbers of four bits, less 8: the low halves
 * of 16 bytes are the first 16. Activations are those of ggml's Q8_0, a scale and 32 bytes, in
 * groups of eight blocks, with what does not depend on the weights: scales in single precision, and
 * what the eights take away. The last group of a row may have fewer blocks; zeros fill it.
 */
#define FEW_ROWS 4 /* of weights, that share what is loaded of the activations */

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

#define HAS_VNNI_KERNEL 1
#define VNNI __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c,fma")))
#define Q4_0 2 /* ggml's numbers of the types */
#define Q8_0 8
#define BLOCK_WEIGHTS 32
#define BLOCK_Q4_0 18 /* bytes */
#define BLOCK_Q8_0 34
#define GROUP 8    /* blocks */
#define AHEAD 6144 /* bytes: memory gives rows in their order twice as fast as four at a time */

typedef struct {
    float scales[GROUP];
    float eights[GROUP]; /* minus eight times the sum of a block's values */
    int8_t values[GROUP][BLOCK_WEIGHTS];
} Group;

static int has_vnni(void) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("fma");
}

static size_t group_bytes(Py_ssize_t columns) {
    return (size_t)(columns + GROUP * BLOCK_WEIGHTS - 1) / (GROUP * BLOCK_WEIGHTS) * sizeof(Group);
}

/* The scales of a group's blocks, of so many bytes each. */
VNNI static inline __m256 read_scales(const uint8_t *blocks, size_t bytes) {
    int16_t halves[GROUP];
    for (int b = 0; b < GROUP; b++) memcpy(&halves[b], blocks + (size_t)b * bytes, 2);
    return _mm256_cvtph_ps(_mm_set_epi16(halves[7], halves[6], halves[5], halves[4], halves[3],
                                         halves[2], halves[1], halves[0]));
}

/* `quantise` writes blocks of Q8_0. */
VNNI static void encode_groups(void (*quantise)(const float *, void *, int64_t), const float *row,
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

/* Each row's operations are the same whatever their number is. */
VNNI static inline __attribute__((always_inline)) void dot_rows(
    int num_rows, Py_ssize_t columns, const uint8_t *weights, const Group *group, float *results) {
    const __m256i low = _mm256_set1_epi8(15), halves = _mm256_set_epi64x(4, 4, 0, 0);
    const __m256i zero = _mm256_setzero_si256();
    const size_t row_bytes = (size_t)(columns / BLOCK_WEIGHTS) * BLOCK_Q4_0;
    const int bytes = num_rows * GROUP * BLOCK_Q4_0;
    uintptr_t coming = (uintptr_t)weights + AHEAD;
    __m256 sums[FEW_ROWS];
    for (int r = 0; r < num_rows; r++) sums[r] = _mm256_setzero_ps();
    for (Py_ssize_t left = columns / BLOCK_WEIGHTS; left > 0; left -= GROUP, group++) {
        for (int line = 0; line < bytes; line += 64)
            _mm_prefetch((const char *)(coming + (uintptr_t)line), _MM_HINT_T0);
        coming += (uintptr_t)bytes;
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
                __m256 products = _mm256_cvtepi32_ps(_mm256_dpbusd_epi32(zero, numbers, values));
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

/* Of at most FEW_ROWS rows. */
VNNI static void dot_q4_0(Py_ssize_t num_rows, Py_ssize_t columns, const uint8_t *weights,
                          const Group *groups, float *results) {
    if (num_rows == FEW_ROWS) {
        dot_rows(FEW_ROWS, columns, weights, groups, results);
        return;
    }
    const size_t row_bytes = (size_t)(columns / BLOCK_WEIGHTS) * BLOCK_Q4_0;
    for (Py_ssize_t r = 0; r < num_rows; r++)
        dot_rows(1, columns, weights + (size_t)r * row_bytes, groups, results + r);
}
#else
#define HAS_VNNI_KERNEL 0
#endif
