/* Attention of one token over keys and values in bfloat16, computed in float32, rounded once.
 *
 * They are read where they lie: a copy of all of them in float32 takes several times as long.
 * Tokens are divided into blocks, of whose results each has a largest score, a sum and weighted
 * values. How they are divided depends on the number of tokens alone, so that threads change no bit.
 *
 * Shape suffixes: H heads of the query, G of them that share keys and values, T tokens, D width.
 */
#if HAS_OWN_DOTS
#define BLOCK_TOKENS 256
#define TILE 16          /* tokens that are widened at once */
#define GROUP_HEADS 8    /* heads of the query that are computed at once */
#define MOST_WIDTH 512

typedef struct {
    Py_ssize_t heads, groups, tokens, width, value_width; /* groups: heads of keys and values */
    Py_ssize_t key_head, key_token, value_head, value_token; /* numbers from one to the next */
    Py_ssize_t blocks;
    const uint16_t *keys, *values;
    const float *query; /* (H, D), scaled */
    float *parts;       /* (H, blocks, 2 + D): largest score, sum, weighted values */
} Attention;

static float *find_part(const Attention *call, Py_ssize_t head, Py_ssize_t block) {
    return call->parts + (head * call->blocks + block) * (2 + call->value_width);
}

/* Widens a tile of rows; those beyond the last are zeros. */
AVX2 INLINE void widen_tile(float *tile, const uint16_t *rows, Py_ssize_t stride, Py_ssize_t count,
                            Py_ssize_t width) {
    for (Py_ssize_t t = 0; t < TILE; t++)
        for (Py_ssize_t i = 0; i < width; i += 8)
            _mm256_store_ps(tile + t * width + i,
                            t < count ? widen_8(rows + t * stride + i) : _mm256_setzero_ps());
}

/* Products of rows of the query with four others, to `scores`. */
AVX2 INLINE void dot_four(const float *query, int heads, const float *rows, Py_ssize_t width,
                          float *scores) {
    __m256 sums[2][4];
    for (int g = 0; g < heads; g++)
        for (int t = 0; t < 4; t++) sums[g][t] = _mm256_setzero_ps();
    for (Py_ssize_t i = 0; i < width; i += 8)
        for (int t = 0; t < 4; t++) {
            __m256 row = _mm256_load_ps(rows + t * width + i);
            for (int g = 0; g < heads; g++)
                sums[g][t] = _mm256_fmadd_ps(_mm256_loadu_ps(query + g * width + i), row, sums[g][t]);
        }
    for (int g = 0; g < heads; g++) {
        __m256 pairs = _mm256_hadd_ps(_mm256_hadd_ps(sums[g][0], sums[g][1]),
                                      _mm256_hadd_ps(sums[g][2], sums[g][3]));
        _mm_storeu_ps(scores + g * BLOCK_TOKENS, _mm_add_ps(_mm256_castps256_ps128(pairs),
                                                            _mm256_extractf128_ps(pairs, 1)));
    }
}

/* Adds a tile's rows times their weights to the sums of heads that lie `apart`. */
AVX2 INLINE void add_weighted(float *sums, Py_ssize_t apart, int heads, const float *weights,
                              const float *rows, Py_ssize_t width) {
    __m256 own[4][2];
    for (Py_ssize_t i = 0; i < width; i += 16) {
        for (int g = 0; g < heads; g++)
            for (int j = 0; j < 2; j++) own[g][j] = _mm256_loadu_ps(sums + g * apart + i + 8 * j);
        for (Py_ssize_t t = 0; t < TILE; t++) {
            __m256 left = _mm256_load_ps(rows + t * width + i);
            __m256 right = _mm256_load_ps(rows + t * width + i + 8);
            for (int g = 0; g < heads; g++) {
                __m256 weight = _mm256_set1_ps(weights[g * BLOCK_TOKENS + t]);
                own[g][0] = _mm256_fmadd_ps(weight, left, own[g][0]);
                own[g][1] = _mm256_fmadd_ps(weight, right, own[g][1]);
            }
        }
        for (int g = 0; g < heads; g++)
            for (int j = 0; j < 2; j++) _mm256_storeu_ps(sums + g * apart + i + 8 * j, own[g][j]);
    }
}

/* Turns scores into weights, the largest of which is 1; those of a tile beyond the last become 0. */
AVX2 static void weigh(float *scores, Py_ssize_t count, float *part) {
    Py_ssize_t end = (count + TILE - 1) / TILE * TILE;
    float lanes[8], largest = scores[0], sum = 0;
    __m256 most = _mm256_set1_ps(scores[0]), total = _mm256_setzero_ps();
    for (Py_ssize_t t = count; t < end; t++) scores[t] = scores[0];
    for (Py_ssize_t t = 0; t < end; t += 8) most = _mm256_max_ps(_mm256_loadu_ps(scores + t), most);
    _mm256_storeu_ps(lanes, most);
    for (int i = 0; i < 8; i++) largest = lanes[i] > largest ? lanes[i] : largest;
    for (Py_ssize_t t = 0; t < end; t++) scores[t] = exponential(scores[t] - largest);
    for (Py_ssize_t t = count; t < end; t++) scores[t] = 0;
    for (Py_ssize_t t = 0; t < end; t += 8)
        total = _mm256_add_ps(total, _mm256_loadu_ps(scores + t));
    _mm256_storeu_ps(lanes, total);
    for (int i = 0; i < 8; i++) sum += lanes[i];
    part[0] = largest;
    part[1] = sum;
}

/* Computes one block of tokens for all heads that share its keys and values. */
AVX2 static void attend_block(void *context, Py_ssize_t index) {
    const Attention *call = context;
    Py_ssize_t group = index / call->blocks, block = index % call->blocks;
    Py_ssize_t first = block * BLOCK_TOKENS, shared = call->heads / call->groups;
    Py_ssize_t count = call->tokens - first < BLOCK_TOKENS ? call->tokens - first : BLOCK_TOKENS;
    Py_ssize_t apart = call->blocks * (2 + call->value_width);
    const uint16_t *keys = call->keys + group * call->key_head + first * call->key_token;
    const uint16_t *values = call->values + group * call->value_head + first * call->value_token;
    _Alignas(32) float tile[TILE * MOST_WIDTH], scores[GROUP_HEADS][BLOCK_TOKENS];
    for (Py_ssize_t begin = 0; begin < shared; begin += GROUP_HEADS) {
        Py_ssize_t head = group * shared + begin;
        int heads = (int)(shared - begin < GROUP_HEADS ? shared - begin : GROUP_HEADS);
        for (Py_ssize_t t = 0; t < count; t += TILE) {
            widen_tile(tile, keys + t * call->key_token, call->key_token, count - t, call->width);
            for (int g = 0, n; g < heads; g += n) {
                const float *query = call->query + (head + g) * call->width;
                n = heads - g < 2 ? 1 : 2;
                for (int i = 0; i < TILE; i += 4) {
                    const float *rows = tile + i * call->width;
                    if (n == 2)
                        dot_four(query, 2, rows, call->width, scores[g] + t + i);
                    else
                        dot_four(query, 1, rows, call->width, scores[g] + t + i);
                }
            }
        }
        for (int g = 0; g < heads; g++) {
            float *part = find_part(call, head + g, block);
            weigh(scores[g], count, part);
            memset(part + 2, 0, (size_t)call->value_width * sizeof(float));
        }
        for (Py_ssize_t t = 0; t < count; t += TILE) {
            widen_tile(tile, values + t * call->value_token, call->value_token, count - t,
                       call->value_width);
            for (int g = 0, n; g < heads; g += n) {
                float *sums = find_part(call, head + g, block) + 2;
                n = heads - g < 4 ? 1 : 4;
                if (n == 4)
                    add_weighted(sums, apart, 4, scores[g] + t, tile, call->value_width);
                else
                    add_weighted(sums, apart, 1, scores[g] + t, tile, call->value_width);
            }
        }
    }
}

/* Joins the blocks of a head in the first one, and rounds the result. */
AVX2 static void join_blocks(const Attention *call, Py_ssize_t head, uint16_t *result) {
    float largest = find_part(call, head, 0)[0], sum = 0, *joined = find_part(call, head, 0) + 2;
    for (Py_ssize_t b = 1; b < call->blocks; b++) {
        float score = find_part(call, head, b)[0];
        largest = score > largest ? score : largest;
    }
    for (Py_ssize_t b = 0; b < call->blocks; b++) {
        const float *part = find_part(call, head, b);
        float weight = exponential(part[0] - largest);
        sum += weight * part[1];
        for (Py_ssize_t i = 0; i < call->value_width; i++)
            joined[i] = b ? joined[i] + weight * part[2 + i] : weight * part[2 + i];
    }
    for (Py_ssize_t i = 0; i < call->value_width; i++) result[i] = round_bfloat16(joined[i] / sum);
}
#endif
