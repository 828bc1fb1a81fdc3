/* Products of rows in bfloat16 with one row of activations, to the last bit those of PyTorch's own
 * kernel for a single row (`at::native`'s dot products with float32 arithmetic, of 2.13).
 *
 * Each weight and activation is widened to float32. Eight registers take one vector of products
 * each in turn, by fused multiply-add; they are added in pairs, then the lanes of what is left,
 * halves first. Vectors beyond the last whole turn go into one further register. PyTorch's vectors
 * have 8 lanes, on processors with AVX-512 too. Columns are a multiple of two vectors.
 *
 * PyTorch's kernel waits for memory: one thread gets half of what memory gives. Here what comes
 * next is fetched ahead, and the activations are widened once for all rows.
 */
#if HAS_OWN_DOTS
#define REGISTERS 8
#define BFLOAT16_LANES 8

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
