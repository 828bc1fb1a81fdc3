/* Norms and rotations of a few rows, to the last bit those of PyTorch 2.13, in float32 or bfloat16.
 *
 * A step of one token has some twenty such operations in each layer, on a few thousand numbers:
 * nearly all of their time is that of calling PyTorch.
 *
 * PyTorch sums a row in vectors of 8 lanes, four of them next to each other. Each of the four sums
 * goes into another one after 16 additions, and that again (in longer rows than here, otherwise).
 *
 * Rows are whole vectors. What is not a number has other bits elsewhere: it is noted.
 */
#if HAS_OWN_DOTS
#define LANES 8
#define SIDES 4
#define LEVELS 3
#define ADDITIONS 16 /* after which a sum goes up a level */
#define MOST_COLUMNS (1 << 15)
/* Compiled without fused multiply-add, which does not round the products. */
#define UNFUSED __attribute__((target("avx2")))

UNFUSED INLINE __m256 load_8(const void *row, Py_ssize_t i, int is_float32) {
    if (is_float32) return _mm256_loadu_ps((const float *)row + i);
    __m128i values = _mm_loadu_si128((const __m128i *)((const uint16_t *)row + i));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(values), 16));
}

/* To the nearest number of the type, ties to even. */
UNFUSED INLINE __m256 round_8(__m256 values, __m256 *not_numbers, int is_float32) {
    *not_numbers = _mm256_or_ps(*not_numbers, _mm256_cmp_ps(values, values, _CMP_UNORD_Q));
    if (is_float32) return values;
    __m256i bits = _mm256_castps_si256(values);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    bits = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF)));
    return _mm256_castsi256_ps(_mm256_and_si256(bits, _mm256_set1_epi32((int)0xFFFF0000)));
}

/* Stores rounded numbers. */
UNFUSED INLINE void store_8(void *row, Py_ssize_t i, __m256 values, int is_float32) {
    if (is_float32) {
        _mm256_storeu_ps((float *)row + i, values);
        return;
    }
    __m256i bits = _mm256_srli_epi32(_mm256_castps_si256(values), 16);
    bits = _mm256_permute4x64_epi64(_mm256_packus_epi32(bits, bits), 0x08);
    _mm_storeu_si128((__m128i *)((uint16_t *)row + i), _mm256_castsi256_si128(bits));
}

UNFUSED INLINE void add_squares(__m256 *sum, const void *row, Py_ssize_t vector, int is_float32) {
    __m256 values = load_8(row, vector * LANES, is_float32);
    *sum = _mm256_add_ps(*sum, _mm256_mul_ps(values, values));
}

UNFUSED INLINE float sum_squares(const void *row, Py_ssize_t columns, int is_float32) {
    __m256 sums[LEVELS][SIDES];
    Py_ssize_t vectors = columns / LANES, turns = vectors / SIDES, turn = 0;
    for (int level = 0; level < LEVELS; level++)
        for (int side = 0; side < SIDES; side++) sums[level][side] = _mm256_setzero_ps();
    while (turn < turns) {
        for (int side = 0; side < SIDES; side++)
            add_squares(&sums[0][side], row, turn * SIDES + side, is_float32);
        turn++;
        Py_ssize_t filled = turn; /* in units of the level below */
        for (int level = 1; level < LEVELS && filled % ADDITIONS == 0; level++) {
            filled /= ADDITIONS;
            for (int side = 0; side < SIDES; side++) {
                sums[level][side] = _mm256_add_ps(sums[level][side], sums[level - 1][side]);
                sums[level - 1][side] = _mm256_setzero_ps();
            }
        }
    }
    for (int level = 1; level < LEVELS; level++)
        for (int side = 0; side < SIDES; side++)
            sums[0][side] = _mm256_add_ps(sums[0][side], sums[level][side]);
    for (Py_ssize_t vector = turns * SIDES; vector < vectors; vector++)
        add_squares(&sums[0][0], row, vector, is_float32);
    for (int side = 1; side < SIDES; side++) sums[0][0] = _mm256_add_ps(sums[0][0], sums[0][side]);
    float sum = 0, lanes[LANES];
    _mm256_storeu_ps(lanes, sums[0][0]);
    for (int lane = 0; lane < LANES; lane++) sum += lanes[lane];
    return sum;
}

typedef struct {
    Py_ssize_t rows, columns;
    const void *x, *weight;
    void *y;
    float epsilon;
    int rounds_twice, adds_one;
} Norm;

/* Each row over the root of the mean of its squares, rounded in some models, times `weight`, plus
 * one in some. Returns whether all are numbers. */
UNFUSED INLINE int normalise_rows(const Norm *call, int is_float32) {
    __m256 not_numbers = _mm256_setzero_ps();
    for (Py_ssize_t r = 0; r < call->rows; r++) {
        Py_ssize_t start = r * call->columns * (is_float32 ? 4 : 2);
        const void *row = (const char *)call->x + start;
        float mean = sum_squares(row, call->columns, is_float32) / (float)call->columns;
        __m256 scale = _mm256_set1_ps(1.0f / sqrtf(mean + call->epsilon));
        for (Py_ssize_t i = 0; i < call->columns; i += LANES) {
            __m256 values = _mm256_mul_ps(load_8(row, i, is_float32), scale);
            __m256 weight = load_8(call->weight, i, is_float32);
            if (call->rounds_twice) values = round_8(values, &not_numbers, is_float32);
            if (call->adds_one) weight = _mm256_add_ps(weight, _mm256_set1_ps(1));
            values = round_8(_mm256_mul_ps(values, weight), &not_numbers, is_float32);
            store_8((char *)call->y + start, i, values, is_float32);
        }
    }
    return !_mm256_movemask_ps(not_numbers);
}

UNFUSED static int normalise_float32(const Norm *call) { return normalise_rows(call, 1); }
UNFUSED static int normalise_bfloat16(const Norm *call) { return normalise_rows(call, 0); }

typedef struct {
    Py_ssize_t rows, columns, rotated; /* columns of each row, and those of them that turn */
    const void *x, *cos, *sin;
    void *y;
} Rotation;

/* Turns each pair of columns, one of the first half and one of the second, as Transformers' models
 * do: `x * cos + rotate_half(x) * sin`, each operation rounded. Returns whether all are numbers. */
UNFUSED INLINE int rotate_rows(const Rotation *call, int is_float32) {
    __m256 not_numbers = _mm256_setzero_ps(), sign = _mm256_set1_ps(-0.0f);
    Py_ssize_t half = call->rotated / 2, bytes = is_float32 ? 4 : 2;
    for (Py_ssize_t r = 0; r < call->rows; r++) {
        const char *row = (const char *)call->x + r * call->columns * bytes;
        char *to = (char *)call->y + r * call->columns * bytes;
        for (Py_ssize_t i = 0; i < call->rotated; i += LANES) {
            __m256 other = i < half ? _mm256_xor_ps(load_8(row, i + half, is_float32), sign)
                                    : load_8(row, i - half, is_float32);
            __m256 own = _mm256_mul_ps(load_8(row, i, is_float32), load_8(call->cos, i, is_float32));
            other = _mm256_mul_ps(other, load_8(call->sin, i, is_float32));
            own = _mm256_add_ps(round_8(own, &not_numbers, is_float32),
                                round_8(other, &not_numbers, is_float32));
            store_8(to, i, round_8(own, &not_numbers, is_float32), is_float32);
        }
        memcpy(to + call->rotated * bytes, row + call->rotated * bytes,
               (size_t)((call->columns - call->rotated) * bytes));
    }
    return !_mm256_movemask_ps(not_numbers);
}

UNFUSED static int rotate_float32(const Rotation *call) { return rotate_rows(call, 1); }
UNFUSED static int rotate_bfloat16(const Rotation *call) { return rotate_rows(call, 0); }
#endif
