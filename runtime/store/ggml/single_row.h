/* Products of rows of weights with one row of activations, to the last bit those of PyTorch 2.13.
 *
 * In bfloat16 they are those of its own kernel (`at::native`'s dot products with float32
 * arithmetic). Each weight and activation is widened to float32. Eight registers take one vector of products
 * each in turn, by fused multiply-add; they are added in pairs, then the lanes of what is left,
 * halves first. Vectors beyond the last whole turn go into one further register. PyTorch's vectors
 * have 8 lanes, on processors with AVX-512 too. Columns are a multiple of two vectors.
 *
 * In float32 they are those of MKL on processors of AMD, as seen from which numbers are lost from a
 * sum where two large ones cancel. The products of the first four columns
 * are added one after another; that sum is the first lane's, to which, as to three others, every
 * fourth product of what follows is added, rounded first. Then the first and the third lane are
 * added, the second and the fourth, and both sums. Columns and rows are multiples of four, and rows
 * begin at multiples of 16 bytes: there are other orders for what is left.
 *
 * Both kernels wait for memory: one thread gets half of what memory gives. Here what comes next is
 * fetched ahead, and activations in bfloat16 are widened once for all rows.
 */
#if HAS_OWN_DOTS
#define REGISTERS 8
#define BFLOAT16_LANES 8
#define ROWS_AT_ONCE 4 /* in float32 */

#define NEAR 2048 /* bytes */

/* Fetches what comes next in memory. Processors with AVX-512 VNNI, which fetch much of it unasked,
 * gain a third by what is near and into the first cache, and lose by what is far ahead. */
static inline void fetch_row(const uint16_t *weights, Py_ssize_t columns, int is_near) {
    uintptr_t coming = (uintptr_t)weights + (is_near ? NEAR : AHEAD);
    for (uintptr_t end = coming + (uintptr_t)columns * 2; coming < end; coming += 64) {
        if (is_near)
            _mm_prefetch((const char *)coming, _MM_HINT_T0);
        else
            _mm_prefetch((const char *)coming, _MM_HINT_T1);
    }
}

AVX2 INLINE __m256 widen_8(const uint16_t *from) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(
        _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from)), 16));
}

AVX2 INLINE float add_lanes_8(__m256 v) {
    v = _mm256_add_ps(v, _mm256_permute2f128_ps(v, v, 1));
    v = _mm256_add_ps(v, _mm256_shuffle_ps(v, v, 0x4E));
    v = _mm256_add_ps(v, _mm256_shuffle_ps(v, v, 0xB1));
    return _mm256_cvtss_f32(v);
}

AVX2 static float dot_bfloat16(Py_ssize_t columns, const uint16_t *weights, const float *x) {
    __m256 sums[REGISTERS], rest = _mm256_setzero_ps();
    Py_ssize_t i = 0;
    for (int r = 0; r < REGISTERS; r++) sums[r] = _mm256_setzero_ps();
    for (; i + 8 * REGISTERS <= columns; i += 8 * REGISTERS) {
#pragma GCC unroll 8
        for (int r = 0; r < REGISTERS; r++)
            sums[r] = _mm256_fmadd_ps(_mm256_loadu_ps(x + i + 8 * r), widen_8(weights + i + 8 * r),
                                      sums[r]);
    }
    for (int half = REGISTERS / 2; half; half /= 2)
        for (int r = 0; r < half; r++) sums[r] = _mm256_add_ps(sums[r], sums[r + half]);
    for (; i < columns; i += 8)
        rest = _mm256_fmadd_ps(_mm256_loadu_ps(x + i), widen_8(weights + i), rest);
    return add_lanes_8(sums[0]) + add_lanes_8(rest);
}

/* Each sum waits for its last addition: four rows at once take the time of one. What comes next, at
 * least four rows, is fetched in the order in which it lies in memory. Compiled without fused
 * multiply-add, which does not round the products. */
static void dot_float32(Py_ssize_t columns, const float *weights, const float *x, int is_near,
                        float *results) {
    __m128 sums[ROWS_AT_ONCE];
    Py_ssize_t ahead = ROWS_AT_ONCE * columns * 4;
    uintptr_t coming = (uintptr_t)weights + (uintptr_t)(ahead > AHEAD ? ahead : AHEAD);
    for (int r = 0; r < ROWS_AT_ONCE; r++) {
        const float *row = weights + r * columns;
        sums[r] = _mm_set_ss(((row[0] * x[0] + row[1] * x[1]) + row[2] * x[2]) + row[3] * x[3]);
    }
    for (Py_ssize_t i = 4; i < columns; i += 4) {
        for (int r = 0; i % 16 == 4 && r < ROWS_AT_ONCE; r++, coming += 64) {
            if (is_near)
                _mm_prefetch((const char *)coming, _MM_HINT_T0);
            else
                _mm_prefetch((const char *)coming, _MM_HINT_T1);
        }
        __m128 values = _mm_loadu_ps(x + i);
#pragma GCC unroll 4
        for (int r = 0; r < ROWS_AT_ONCE; r++)
            sums[r] = _mm_add_ps(sums[r], _mm_mul_ps(_mm_load_ps(weights + r * columns + i), values));
    }
    for (int r = 0; r < ROWS_AT_ONCE; r++) {
        __m128 halves = _mm_add_ps(sums[r], _mm_movehl_ps(sums[r], sums[r]));
        results[r] = _mm_cvtss_f32(_mm_add_ss(halves, _mm_shuffle_ps(halves, halves, 1)));
    }
}

/* To the nearest, ties to even; every NaN is the same. */
static inline uint16_t round_bfloat16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if (value != value) return 0x7FC0;
    return (uint16_t)((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

static inline float widen_bfloat16(uint16_t value) {
    uint32_t bits = (uint32_t)value << 16;
    float widened;
    memcpy(&widened, &bits, sizeof widened);
    return widened;
}
#endif
