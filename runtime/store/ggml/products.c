/* Products of matrices as GGUF files store them, by ggml's kernels and some of ours (`dots.h`).
 *
 * The shared library comes with the package `libggml-python` and is opened at run time
 * (`library.py`). It multiplies a row of any GGUF type with a row of activations, which are
 * quantised once to the type that its kernel takes. Here are the loops around that: one call
 * computes all experts of a layer that are ready, for all of their tokens, with threads of its own
 * and without the interpreter's lock.
 *
 * Each number of a result is one product of one row of weights and one row of activations, computed
 * whole by one thread: a token's bits depend on its own row alone, whatever the number of threads
 * and the other tokens are.
 *
 * Addresses and sizes are those of tensors and slots that `matrix.py` keeps alive and has checked.
 *
 * Shape suffixes: T tokens, K experts of a token, P pairs of a token and an expert (T times K), N
 * rows of weights, D hidden size.
 */
#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <dlfcn.h>
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "../../../predictors/networks/exponential.h"
#include "dots.h"
#include "single_row.h"
#include "attention.h"
#include "small_steps.h"

#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define MULTIVERSIONED __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define MULTIVERSIONED
#endif

#define MAX_TYPES 64
#define FLOAT32 0          /* ggml's number of the type */
#define GROUPS -1          /* no type of ggml's: activations for our kernels of Q4_0 */
#define MAX_PARTS 8        /* of a matrix: gate and up, say */
#define MAX_THREADS 256
#define LEAST_ROWS 32      /* of weights, that a thread takes at once */
#define CHUNKS 8           /* for each thread; with more, threads fetch ahead rows that others take */
#define ROW_AHEAD 4096     /* bytes that are fetched ahead for ggml's kernels: with AVX2, Q4_K and Q6_K
                              take .7 to .8 of the time, Q8_0 .9 */
#define FEW_WEIGHTS 65536  /* products of fewer are not worth waking a thread */
#define SPINS 12000        /* looks for more work before a thread sleeps: some 150 microseconds */

/* ---- ggml's tables (ggml.h and ggml-cpu.h of 0.20; `library.py` tries them when it opens one) */

typedef struct {
    void (*from_float)(const float *from, void *to, int64_t count);
    void (*dot)(int count, float *result, size_t, const void *weights, size_t, const void *row,
                size_t, int num_rows);
    int row_type; /* that `dot` takes */
    int64_t rows_at_once;
} CpuTraits;

typedef struct {
    const char *name;
    int64_t block; /* weights */
    int64_t block_interleaved;
    size_t bytes; /* of a block */
    _Bool is_quantised;
    void (*to_float)(const void *from, float *to, int64_t count);
    void (*from_float)(const float *from, void *to, int64_t count);
} Traits;

static struct {
    void *handle;
    int num_types;
    const Traits *types[MAX_TYPES];        /* NULL: no such type */
    const CpuTraits *cpu_types[MAX_TYPES]; /* NULL: no such type */
    size_t (*encode)(int type, const float *from, void *to, int64_t first, int64_t num_rows,
                     int64_t row_size, const float *importance);
    _Bool (*needs_importance)(int type);
    /* Products of at most FEW_ROWS rows of weights and one of activations; NULL: ggml's. */
    OwnDot own_dots[MAX_TYPES];
} ggml;

/* Whether rows of a type are multiplied. */
static int has_dot(int type) {
    if (type < 0 || type >= ggml.num_types || !ggml.types[type] || !ggml.cpu_types[type]) return 0;
    int row_type = ggml.cpu_types[type]->row_type;
    return ggml.cpu_types[type]->dot && row_type >= 0 && row_type < ggml.num_types &&
           ggml.types[row_type] && ggml.cpu_types[row_type] &&
           (ggml.cpu_types[row_type]->from_float || row_type == FLOAT32);
}

static size_t row_bytes(int type, Py_ssize_t columns) {
    return (size_t)(columns / ggml.types[type]->block) * ggml.types[type]->bytes;
}

/* The type of the activations that a type of weights is multiplied with. */
static int row_type(int type) {
#if HAS_OWN_DOTS
    if (type == Q4_0 && ggml.own_dots[type]) return GROUPS;
#endif
    return ggml.cpu_types[type]->row_type;
}

#if HAS_OWN_DOTS
/* Whether the library has a type with such blocks. */
static int has_blocks(int type, int64_t weights, size_t bytes) {
    return ggml.types[type] && ggml.cpu_types[type] && ggml.types[type]->bytes == bytes &&
           ggml.types[type]->block == weights;
}

/* Whether the library multiplies a type with activations of another. */
static int takes(int type, int row_type) { return ggml.cpu_types[type]->row_type == row_type; }

static void choose_own_dots(void) {
    if (has_avx2() && has_blocks(Q8_0, BLOCK_WEIGHTS, BLOCK_Q8_0) &&
        has_blocks(Q4_0, BLOCK_WEIGHTS, BLOCK_Q4_0) && takes(Q4_0, Q8_0))
        ggml.own_dots[Q4_0] = has_vnni() ? dot_q4_0 : dot_q4_0_avx2;
    if (!has_vnni() || !has_blocks(Q8_K, BLOCK_K, sizeof(BlockQ8K))) return;
    if (has_blocks(Q4_K, BLOCK_K, sizeof(BlockQ4K)) && takes(Q4_K, Q8_K))
        ggml.own_dots[Q4_K] = dot_q4_K;
    if (has_blocks(Q6_K, BLOCK_K, sizeof(BlockQ6K)) && takes(Q6_K, Q8_K))
        ggml.own_dots[Q6_K] = dot_q6_K;
}
#endif

static const void *find(const char *name) {
    const void *found = dlsym(ggml.handle, name);
    if (!found) PyErr_Format(PyExc_OSError, "the library has no %s", name);
    return found;
}

/* open(path, num_types): opens the library; its types are those below `num_types`. */
static PyObject *open_library(PyObject *module, PyObject *arguments) {
    const char *path;
    int num_types;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "si:open", &path, &num_types)) return NULL;
    if (ggml.num_types) Py_RETURN_NONE;
    /* Its names stay its own: another library of a process may have another ggml. */
    ggml.handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!ggml.handle) return PyErr_Format(PyExc_OSError, "%s", dlerror());
    const Traits *(*traits)(int);
    const CpuTraits *(*cpu_traits)(int);
    void (*initialise)(void);
    *(const void **)&traits = find("ggml_get_type_traits");
    *(const void **)&cpu_traits = traits ? find("ggml_get_type_traits_cpu") : NULL;
    *(const void **)&initialise = cpu_traits ? find("ggml_cpu_init") : NULL;
    *(const void **)&ggml.encode = initialise ? find("ggml_quantize_chunk") : NULL;
    *(const void **)&ggml.needs_importance =
        ggml.encode ? find("ggml_quantize_requires_imatrix") : NULL;
    if (!ggml.needs_importance) return NULL;
    initialise();
    for (int t = 0; t < num_types && t < MAX_TYPES; t++) {
        const Traits *type = traits(t);
        if (!type || !type->name || type->block < 1 || !type->bytes) continue;
        ggml.types[t] = type;
        ggml.cpu_types[t] = cpu_traits(t);
    }
#if HAS_OWN_DOTS
    choose_own_dots();
#endif
    ggml.num_types = num_types < MAX_TYPES ? num_types : MAX_TYPES;
    Py_RETURN_NONE;
}

/* describe(type): (name, weights of a block, bytes of a block, multiplies, decodes, encodes) */
static PyObject *describe(PyObject *module, PyObject *arguments) {
    int t;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "i:describe", &t)) return NULL;
    if (t < 0 || t >= ggml.num_types || !ggml.types[t]) Py_RETURN_NONE;
    const Traits *type = ggml.types[t];
    return Py_BuildValue("sLnNNN", type->name, (long long)type->block, (Py_ssize_t)type->bytes,
                         PyBool_FromLong(has_dot(t)),
                         PyBool_FromLong(type->to_float != NULL),
                         PyBool_FromLong(type->from_float && !ggml.needs_importance(t)));
}

/* ---- threads
 *
 * A call is a few loops. The caller takes chunks of a loop as the threads do, so that one that wakes
 * late only finds less to do. */

typedef void (*Chunk)(void *call, Py_ssize_t index);

static struct {
    pthread_mutex_t call; /* held while a caller has the threads */
    pthread_mutex_t lock;
    pthread_cond_t wake;
    int num_threads; /* that were started */
    int num_wanted;  /* of the loop: threads of higher numbers leave it alone */
    Chunk chunk;
    void *context;
    /* The number of the loop in the high half; in the low half the next chunk and the number of
     * chunks. So a thread that is late takes nothing of the loop after. */
    _Atomic uint64_t next, end;
    _Atomic Py_ssize_t done;
    _Atomic uint32_t loop;
    _Atomic int sleeping;
} pool = {.call = PTHREAD_MUTEX_INITIALIZER,
          .lock = PTHREAD_MUTEX_INITIALIZER,
          .wake = PTHREAD_COND_INITIALIZER};

static inline void pause_briefly(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Threads and held locks do not survive a fork. */
static void forget_threads(void) {
    pool.num_threads = 0;
    pthread_mutex_init(&pool.call, NULL);
    pthread_mutex_init(&pool.lock, NULL);
    pthread_cond_init(&pool.wake, NULL);
    pool.sleeping = 0;
}

static void take_chunks(void) {
    for (;;) {
        uint64_t taken = atomic_fetch_add(&pool.next, 1);
        uint64_t end = atomic_load(&pool.end);
        if (taken >> 32 != end >> 32 || (uint32_t)taken >= (uint32_t)end) return;
        pool.chunk(pool.context, (Py_ssize_t)(uint32_t)taken);
        atomic_fetch_add(&pool.done, 1);
    }
}

static void *run_thread(void *number) {
    uint32_t seen = 0;
    for (;;) {
        for (int spin = 0; atomic_load(&pool.loop) == seen && spin < SPINS; spin++) pause_briefly();
        if (atomic_load(&pool.loop) == seen) {
            pthread_mutex_lock(&pool.lock);
            pool.sleeping++;
            while (atomic_load(&pool.loop) == seen) pthread_cond_wait(&pool.wake, &pool.lock);
            pool.sleeping--;
            pthread_mutex_unlock(&pool.lock);
        }
        seen = atomic_load(&pool.loop);
        if ((intptr_t)number < pool.num_wanted) take_chunks();
    }
    return NULL;
}

/* Starts threads until there are enough; fewer if the system has no more. */
static void start_threads(int num_wanted) {
    while (pool.num_threads < num_wanted) {
        pthread_t thread;
        pthread_attr_t attributes;
        pthread_attr_init(&attributes);
        pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
        int failed = pthread_create(&thread, &attributes, run_thread,
                                    (void *)(intptr_t)pool.num_threads);
        pthread_attr_destroy(&attributes);
        if (failed) return;
        pool.num_threads++;
    }
}

/* Runs a loop with the threads, which the caller holds; `num_threads` counts the caller. */
static void run_chunks(Chunk chunk, void *context, Py_ssize_t count, int num_threads) {
    if (num_threads < 2 || count < 2) {
        for (Py_ssize_t i = 0; i < count; i++) chunk(context, i);
        return;
    }
    uint64_t number = (uint64_t)(uint32_t)(atomic_load(&pool.loop) + 1) << 32;
    pool.chunk = chunk;
    pool.context = context;
    pool.num_wanted = num_threads - 1;
    atomic_store(&pool.done, 0);
    atomic_store(&pool.end, number | (uint32_t)count);
    atomic_store(&pool.next, number);
    atomic_store(&pool.loop, (uint32_t)(number >> 32));
    if (atomic_load(&pool.sleeping)) {
        pthread_mutex_lock(&pool.lock);
        pthread_cond_broadcast(&pool.wake);
        pthread_mutex_unlock(&pool.lock);
    }
    take_chunks();
    for (int spin = 0; atomic_load(&pool.done) < count; spin++)
        spin < SPINS ? pause_briefly() : (void)sched_yield();
}

/* Returns the threads of a call; 1 where it is too small, or another one has the threads. */
static int take_threads(int num_threads, double num_products) {
    if (num_threads < 2 || num_products < FEW_WEIGHTS || pthread_mutex_trylock(&pool.call)) return 1;
    start_threads((num_threads < MAX_THREADS ? num_threads : MAX_THREADS) - 1);
    if (pool.num_threads + 1 < num_threads) num_threads = pool.num_threads + 1;
    if (num_threads == 1) pthread_mutex_unlock(&pool.call); /* `return_threads` will not */
    return num_threads;
}

static void return_threads(int num_threads) {
    if (num_threads > 1) pthread_mutex_unlock(&pool.call);
}

/* ---- matrices of one layout at the addresses of several slots */

typedef struct {
    int type;
    Py_ssize_t offset; /* in the slot */
    Py_ssize_t rows;
} Part;

typedef struct {
    Part parts[MAX_PARTS];
    int num_parts;
    Py_ssize_t rows, columns; /* N, and inputs */
} Matrix;

static int read_matrix(PyObject *parts, Py_ssize_t columns, Matrix *matrix) {
    *matrix = (Matrix){.columns = columns};
    Py_ssize_t count = PyTuple_Check(parts) ? PyTuple_Size(parts) : 0;
    if (count < 1 || count > MAX_PARTS || columns < 1) goto refused;
    for (Py_ssize_t p = 0; p < count; p++) {
        Part *part = &matrix->parts[p];
        if (!PyArg_ParseTuple(PyTuple_GetItem(parts, p), "inn", &part->type, &part->offset,
                              &part->rows))
            return -1;
        if (!has_dot(part->type) || columns % ggml.types[part->type]->block || part->rows < 1 ||
            part->offset < 0)
            goto refused;
        matrix->rows += part->rows;
    }
    matrix->num_parts = (int)count;
    return 0;
refused:
    PyErr_SetString(PyExc_ValueError, "a matrix of parts that are not multiplied");
    return -1;
}

/* Rows of activations as the kernels of a matrix take them: once for each of their types. */
typedef struct {
    const Matrix *matrix;
    const float *rows;
    uint8_t *encoded[MAX_PARTS]; /* by part; parts of one type share them */
    size_t bytes[MAX_PARTS];     /* of a row */
} Rows;

static void encode_row(const Rows *rows, Py_ssize_t index, const float *row) {
    const Matrix *matrix = rows->matrix;
    for (int p = 0; p < matrix->num_parts; p++) {
        int is_done = 0;
        for (int q = 0; q < p; q++) is_done |= rows->encoded[q] == rows->encoded[p];
        if (is_done) continue;
        uint8_t *to = rows->encoded[p] + (size_t)index * rows->bytes[p];
        int type = row_type(matrix->parts[p].type);
        if (type == FLOAT32)
            memcpy(to, row, rows->bytes[p]);
#if HAS_OWN_DOTS
        else if (type == GROUPS)
            encode_groups(ggml.cpu_types[Q8_0]->from_float, row, (Group *)to, matrix->columns);
#endif
        else
            ggml.cpu_types[type]->from_float(row, to, matrix->columns);
    }
}

static void encode_given(void *context, Py_ssize_t index) {
    const Rows *rows = context;
    encode_row(rows, index, rows->rows + index * rows->matrix->columns);
}

/* Returns -1 without memory. */
static int allocate_rows(Rows *rows, const Matrix *matrix, const float *from, Py_ssize_t count) {
    *rows = (Rows){.matrix = matrix, .rows = from};
    for (int p = 0; p < matrix->num_parts; p++) {
        int type = row_type(matrix->parts[p].type);
#if HAS_OWN_DOTS
        rows->bytes[p] = type == GROUPS ? group_bytes(matrix->columns)
                                        : row_bytes(type, matrix->columns);
#else
        rows->bytes[p] = row_bytes(type, matrix->columns);
#endif
        for (int q = 0; q < p && !rows->encoded[p]; q++)
            if (row_type(matrix->parts[q].type) == type) rows->encoded[p] = rows->encoded[q];
        if (!rows->encoded[p] && !(rows->encoded[p] = malloc((size_t)count * rows->bytes[p] + 64)))
            return -1;
    }
    return 0;
}

static void free_rows(Rows *rows) {
    for (int p = MAX_PARTS - 1; p >= 0; p--) {
        int is_shared = 0;
        for (int q = 0; q < p; q++) is_shared |= rows->encoded[q] == rows->encoded[p];
        if (!is_shared) free(rows->encoded[p]);
    }
}

typedef struct {
    Matrix matrix;
    Rows rows;
    Py_ssize_t num_experts, chunks_of_expert, rows_of_chunk;
    const uint64_t *slots;     /* address of each expert */
    const Py_ssize_t *firsts;  /* first pair of each expert, and the end of the last */
    const Py_ssize_t *pairs_P; /* pairs by expert: t K + k, by which results are put in place */
    Py_ssize_t top_k;          /* a pair's row of activations is that of its token: pair / top_k */
    float *results;            /* (pairs, N) */
} Products;

/* The products of at most FEW_ROWS rows of weights, one after another, and `num_x` rows of
 * activations, 1 or FEW_X. `is_first`: they are the first ones, so that the weights come from
 * memory. */
static inline void multiply_rows(int type, Py_ssize_t num_rows, int num_x, Py_ssize_t columns,
                                 const uint8_t *weights, const void *const *x, int is_first,
                                 float *const *results) {
    size_t bytes = row_bytes(type, columns);
    if (ggml.own_dots[type]) {
        ggml.own_dots[type](num_rows, num_x, columns, bytes, weights, x, is_first, results);
        return;
    }
    for (int t = 0; t < num_x; t++, is_first = 0)
        for (Py_ssize_t r = 0; r < num_rows; r++) {
            const uint8_t *row = weights + (size_t)r * bytes;
            for (size_t line = 0; is_first && line < bytes; line += 64)
                __builtin_prefetch((const void *)((uintptr_t)row + ROW_AHEAD + line), 0, 2);
            ggml.cpu_types[type]->dot((int)columns, results[t] + r, 0, row, 0, x[t], 0, 1);
        }
}

static void multiply_chunk(void *context, Py_ssize_t index) {
    const Products *call = context;
    const Matrix *matrix = &call->matrix;
    Py_ssize_t expert = index / call->chunks_of_expert;
    Py_ssize_t row = index % call->chunks_of_expert * call->rows_of_chunk, before = 0;
    Py_ssize_t end = row + call->rows_of_chunk;
    if (end > matrix->rows) end = matrix->rows;
    for (int p = 0; p < matrix->num_parts && row < end; p++) {
        const Part *part = &matrix->parts[p];
        Py_ssize_t last = before + part->rows < end ? before + part->rows : end;
        size_t bytes = row_bytes(part->type, matrix->columns);
        const uint8_t *weights = (const uint8_t *)(uintptr_t)call->slots[expert] + part->offset;
        for (Py_ssize_t count; row < last; row += count) {
            count = last - row < FEW_ROWS ? last - row : FEW_ROWS;
            Py_ssize_t first = call->firsts[expert], stop = call->firsts[expert + 1];
            for (Py_ssize_t i = first, num_x; i < stop; i += num_x) {
                /* Of three, the last one is computed twice, which takes less time. */
                num_x = stop - i < FEW_X - 1 ? 1 : FEW_X;
                const void *x[FEW_X];
                float *results[FEW_X];
                for (Py_ssize_t t = 0; t < num_x; t++) {
                    Py_ssize_t pair = call->pairs_P[i + t < stop ? i + t : stop - 1];
                    x[t] = call->rows.encoded[p] +
                           (size_t)(pair / call->top_k) * call->rows.bytes[p];
                    results[t] = call->results + pair * matrix->rows + row;
                }
                multiply_rows(part->type, count, (int)num_x, matrix->columns,
                              weights + (size_t)(row - before) * bytes, x, i == first, results);
            }
        }
        before += part->rows;
    }
}

static void multiply_all(Products *call, int num_threads) {
    Py_ssize_t rows = call->num_experts * call->matrix.rows / (CHUNKS * num_threads);
    /* One expert of a prompt may have most of its tokens. */
    if (rows > call->matrix.rows / 4) rows = call->matrix.rows / 4;
    rows = (rows + FEW_ROWS - 1) / FEW_ROWS * FEW_ROWS;
    call->rows_of_chunk = rows < LEAST_ROWS ? LEAST_ROWS : rows;
    call->chunks_of_expert = (call->matrix.rows + call->rows_of_chunk - 1) / call->rows_of_chunk;
    run_chunks(multiply_chunk, call, call->num_experts * call->chunks_of_expert, num_threads);
}

/* ---- activations */

/* silu(gate) * up, of a row of gates and ups behind them; in place of the gates. */
MULTIVERSIONED
static void gate_row(float *gate, const float *up, Py_ssize_t width) {
    for (Py_ssize_t i = 0; i < width; i++) gate[i] = gate[i] / (1.0f + exponential(-gate[i])) * up[i];
}

typedef struct {
    const Products *up;
    Rows *inner;
} Gates;

static void gate_pair(void *context, Py_ssize_t index) {
    const Gates *call = context;
    Py_ssize_t pair = call->up->pairs_P[index], width = call->up->matrix.rows / 2;
    float *row = call->up->results + pair * call->up->matrix.rows;
    gate_row(row, row + width, width);
    encode_row(call->inner, pair, row);
}

/* ---- calls from Python */

/* Lists of numbers, and the addresses of a call's tensors. */
typedef struct {
    uint64_t *slots;
    Py_ssize_t *firsts, *pairs, num_experts, num_pairs;
} Work;

static void free_work(Work *work) {
    free(work->slots);
    free(work->firsts);
    free(work->pairs);
}

/* Reads `slots`, a list of addresses, and `pairs`, a list of lists of pairs below `most`. */
static int read_work(PyObject *slots, PyObject *pairs, Py_ssize_t most, Work *work) {
    *work = (Work){.num_experts = PyList_Size(slots)};
    if (work->num_experts < 0 || PyList_Size(pairs) != work->num_experts) goto refused;
    work->slots = malloc(sizeof(uint64_t) * (size_t)(work->num_experts + 1));
    work->firsts = malloc(sizeof(Py_ssize_t) * (size_t)(work->num_experts + 1));
    if (!work->slots || !work->firsts) goto no_memory;
    work->firsts[0] = 0;
    for (Py_ssize_t e = 0; e < work->num_experts; e++) {
        Py_ssize_t count = PyList_Size(PyList_GetItem(pairs, e));
        work->slots[e] = PyLong_AsUnsignedLongLong(PyList_GetItem(slots, e));
        if (count < 0 || PyErr_Occurred()) goto refused;
        work->firsts[e + 1] = work->firsts[e] + count;
    }
    work->num_pairs = work->firsts[work->num_experts];
    work->pairs = malloc(sizeof(Py_ssize_t) * (size_t)(work->num_pairs + 1));
    if (!work->pairs) goto no_memory;
    for (Py_ssize_t e = 0, i = 0; e < work->num_experts; e++)
        for (Py_ssize_t n = 0; i < work->firsts[e + 1]; i++, n++) {
            work->pairs[i] = PyLong_AsSsize_t(PyList_GetItem(PyList_GetItem(pairs, e), n));
            if (work->pairs[i] < 0 || work->pairs[i] >= most) goto refused;
        }
    return 0;
refused:
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "no experts and pairs of a layer");
    free_work(work);
    return -1;
no_memory:
    PyErr_NoMemory();
    free_work(work);
    return -1;
}

/* multiply(parts, columns, slots, pairs, top_k, num_tokens, x, results, num_threads)
 *
 * Fills the rows of `results`, float32 `(T K, N)`, that are pairs of these experts, with products
 * of their tokens' rows of `x`, float32 `(T, columns)`. */
static PyObject *multiply(PyObject *module, PyObject *arguments) {
    PyObject *parts, *slots, *pairs;
    Py_ssize_t columns, num_tokens;
    unsigned long long x, results;
    int num_threads;
    Products call = {0};
    Work work;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "OnOOnnKKi:multiply", &parts, &columns, &slots, &pairs,
                          &call.top_k, &num_tokens, &x, &results, &num_threads) ||
        read_matrix(parts, columns, &call.matrix) ||
        read_work(slots, pairs, num_tokens * call.top_k, &work))
        return NULL;
    call.num_experts = work.num_experts;
    call.slots = work.slots;
    call.firsts = work.firsts;
    call.pairs_P = work.pairs;
    call.results = (float *)(uintptr_t)results;
    int failed = allocate_rows(&call.rows, &call.matrix, (const float *)(uintptr_t)x, num_tokens);
    if (!failed) {
        Py_BEGIN_ALLOW_THREADS
        double products = (double)work.num_pairs * (double)call.matrix.rows * (double)columns;
        num_threads = take_threads(num_threads, products);
        run_chunks(encode_given, &call.rows, num_tokens, num_threads);
        multiply_all(&call, num_threads);
        return_threads(num_threads);
        Py_END_ALLOW_THREADS
    }
    free_rows(&call.rows);
    free_work(&work);
    if (failed) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

/* compute(up_parts, D, down_parts, slots, pairs, top_k, num_tokens, x, results, num_threads)
 *
 * Whole experts: the first half of the rows of `up` is the gate, through SiLU. Fills the rows of
 * `results`, float32 `(T K, D)`, that are pairs of these experts; `x` is float32 `(T, D)`. */
static PyObject *compute(PyObject *module, PyObject *arguments) {
    PyObject *up_parts, *down_parts, *slots, *pairs;
    Py_ssize_t columns, num_tokens, top_k;
    unsigned long long x, results;
    int num_threads;
    Products up = {0}, down = {0};
    Work work;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "OnOOOnnKKi:compute", &up_parts, &columns, &down_parts, &slots,
                          &pairs, &top_k, &num_tokens, &x, &results, &num_threads) ||
        read_matrix(up_parts, columns, &up.matrix) ||
        read_matrix(down_parts, up.matrix.rows / 2, &down.matrix) ||
        read_work(slots, pairs, num_tokens * top_k, &work))
        return NULL;
    Py_ssize_t num_pairs = num_tokens * top_k;
    up.num_experts = work.num_experts;
    up.slots = work.slots;
    up.firsts = work.firsts;
    up.pairs_P = work.pairs;
    up.top_k = top_k;
    up.results = malloc((size_t)num_pairs * (size_t)up.matrix.rows * sizeof(float));
    int failed = !up.results ||
                 allocate_rows(&up.rows, &up.matrix, (const float *)(uintptr_t)x, num_tokens) ||
                 allocate_rows(&down.rows, &down.matrix, NULL, num_pairs);
    if (!failed) {
        Matrix matrix = down.matrix;
        Rows inner = down.rows;
        down = up;
        down.matrix = matrix;
        down.rows = inner;
        down.rows.matrix = &down.matrix;
        down.top_k = 1; /* each pair has a row of its own */
        down.results = (float *)(uintptr_t)results;
        Gates gates = {&up, &down.rows};
        Py_BEGIN_ALLOW_THREADS
        double products = (double)work.num_pairs * (double)up.matrix.rows * (double)columns;
        num_threads = take_threads(num_threads, products);
        run_chunks(encode_given, &up.rows, num_tokens, num_threads);
        multiply_all(&up, num_threads);
        run_chunks(gate_pair, &gates, work.num_pairs, num_threads);
        multiply_all(&down, num_threads);
        return_threads(num_threads);
        Py_END_ALLOW_THREADS
    }
    free(up.results);
    free_rows(&up.rows);
    free_rows(&down.rows);
    free_work(&work);
    if (failed) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

MULTIVERSIONED
static void add_scaled(float *to, const float *from, float weight, Py_ssize_t width) {
    for (Py_ssize_t i = 0; i < width; i++) to[i] += weight * from[i];
}

/* The place of the lowest expert that comes after another one; -1: there is none. An expert that was
 * chosen twice comes twice. */
static Py_ssize_t next_expert(const int64_t *ids, Py_ssize_t top_k, Py_ssize_t after) {
    Py_ssize_t found = -1;
    for (Py_ssize_t k = 0; k < top_k; k++) {
        int comes = after < 0 ? ids[k] >= 0
                              : ids[k] > ids[after] || (ids[k] == ids[after] && k > after);
        if (comes && (found < 0 || ids[k] < ids[found])) found = k;
    }
    return found;
}

/* add_up(results, weights, ids, num_experts, T, K, D, sums): weighted sums, float32 `(T, D)`, of
 * each token's rows of `results` `(T K, D)`, by ascending expert; ids at or above `num_experts` add
 * nothing. */
static PyObject *add_up(PyObject *module, PyObject *arguments) {
    unsigned long long results, weights, ids, sums;
    Py_ssize_t num_experts, num_tokens, top_k, width;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "KKKnnnnK:add_up", &results, &weights, &ids, &num_experts,
                          &num_tokens, &top_k, &width, &sums))
        return NULL;
    const float *rows = (const float *)(uintptr_t)results, *factors = (const float *)(uintptr_t)weights;
    const int64_t *chosen = (const int64_t *)(uintptr_t)ids;
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t t = 0; t < num_tokens; t++) {
        float *sum = (float *)(uintptr_t)sums + t * width;
        memset(sum, 0, (size_t)width * sizeof(float));
        Py_ssize_t k = next_expert(chosen, top_k, -1);
        for (; k >= 0 && chosen[k] < num_experts; k = next_expert(chosen, top_k, k))
            add_scaled(sum, rows + (t * top_k + k) * width, factors[t * top_k + k], width);
        chosen += top_k;
    }
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

/* ---- coding */

typedef struct {
    int type;
    Py_ssize_t columns;
    const void *from;
    void *to;
    int decodes;
} Coding;

static void code_row(void *context, Py_ssize_t index) {
    const Coding *call = context;
    size_t bytes = row_bytes(call->type, call->columns);
    if (call->decodes)
        ggml.types[call->type]->to_float((const uint8_t *)call->from + (size_t)index * bytes,
                                         (float *)call->to + index * call->columns, call->columns);
    else
        ggml.encode(call->type, (const float *)call->from + index * call->columns,
                    (uint8_t *)call->to + (size_t)index * bytes, 0, 1, call->columns, NULL);
}

static PyObject *code(PyObject *arguments, int decodes) {
    Coding call = {.decodes = decodes};
    unsigned long long from, to;
    Py_ssize_t num_rows;
    int num_threads;
    if (!PyArg_ParseTuple(arguments, "innKKi", &call.type, &num_rows, &call.columns, &from, &to,
                          &num_threads))
        return NULL;
    const Traits *type = call.type < 0 || call.type >= ggml.num_types ? NULL : ggml.types[call.type];
    if (!type || call.columns < 1 || call.columns % type->block || num_rows < 0 ||
        (decodes ? !type->to_float : ggml.needs_importance(call.type)))
        return PyErr_Format(PyExc_ValueError, "no rows of type %d", call.type);
    call.from = (const void *)(uintptr_t)from;
    call.to = (void *)(uintptr_t)to;
    Py_BEGIN_ALLOW_THREADS
    num_threads = take_threads(num_threads, (double)num_rows * (double)call.columns);
    run_chunks(code_row, &call, num_rows, num_threads);
    return_threads(num_threads);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

/* decode(type, num_rows, columns, from, to, num_threads): rows as float32 */
static PyObject *decode(PyObject *module, PyObject *arguments) {
    (void)module;
    return code(arguments, 1);
}

/* encode(type, num_rows, columns, from, to, num_threads): float32 rows as the type */
static PyObject *encode(PyObject *module, PyObject *arguments) {
    (void)module;
    return code(arguments, 0);
}

/* ---- one row of activations, with PyTorch's bits */

#if HAS_OWN_DOTS
typedef struct {
    uint64_t *matrices; /* address of each */
    Py_ssize_t num_matrices, rows, columns, chunks_of_matrix, rows_of_chunk;
    const float *x;       /* one row for all matrices, or one for each */
    Py_ssize_t x_columns; /* from the row of one matrix to that of the next */
    const void *bias;     /* (rows) of all matrices; NULL: none */
    void *results;        /* (matrices, rows) */
} SingleRow;

/* Finds the rows that a chunk multiplies: from `row` until `end` of a matrix. */
static void find_rows(const SingleRow *call, Py_ssize_t index, Py_ssize_t *number, Py_ssize_t *row,
                      Py_ssize_t *end) {
    *number = index / call->chunks_of_matrix;
    *row = index % call->chunks_of_matrix * call->rows_of_chunk;
    *end = *row + call->rows_of_chunk < call->rows ? *row + call->rows_of_chunk : call->rows;
}

static void multiply_bfloat16_chunk(void *context, Py_ssize_t index) {
    const SingleRow *call = context;
    const uint16_t *bias = call->bias;
    Py_ssize_t number, row, end;
    find_rows(call, index, &number, &row, &end);
    const uint16_t *weights =
        (const uint16_t *)(uintptr_t)call->matrices[number] + row * call->columns;
    int is_near = has_vnni();
    for (; row < end; row++, weights += call->columns) {
        fetch_row(weights, call->columns, is_near);
        float sum = dot_bfloat16(call->columns, weights, call->x + number * call->x_columns);
        if (bias) sum = widen_bfloat16(bias[row]) + sum;
        ((uint16_t *)call->results)[number * call->rows + row] = round_bfloat16(sum);
    }
}

static void multiply_float32_chunk(void *context, Py_ssize_t index) {
    const SingleRow *call = context;
    const float *bias = call->bias;
    Py_ssize_t number, row, end;
    find_rows(call, index, &number, &row, &end);
    const float *weights = (const float *)(uintptr_t)call->matrices[number] + row * call->columns;
    float *results = (float *)call->results + number * call->rows;
    int is_near = has_vnni();
    for (; row < end; row += ROWS_AT_ONCE, weights += ROWS_AT_ONCE * call->columns) {
        dot_float32(call->columns, weights, call->x + number * call->x_columns, is_near,
                    results + row);
        for (int r = 0; bias && r < ROWS_AT_ONCE; r++) results[row + r] += bias[row + r];
    }
}

/* Whether there is a kernel for the matrices. */
static int has_kernel(const SingleRow *call, int is_float32) {
    int is_aligned = 1;
    for (Py_ssize_t m = 0; m < call->num_matrices; m++) is_aligned &= call->matrices[m] % 16 == 0;
    return is_float32 ? is_aligned && call->columns % 4 == 0 && call->rows % ROWS_AT_ONCE == 0
                      : has_avx2() && call->columns % (2 * BFLOAT16_LANES) == 0;
}

/* multiply_row(matrices, rows, columns, x, num_x, bias, results, is_float32, num_threads): results
 * `(matrices, rows)` of matrices `(rows, columns)` at these addresses and `num_x` rows of `x`, one
 * for all matrices or one for each, and a bias `(rows)` or 0; all in float32 or in bfloat16.
 * Returns whether there is a kernel. */
static PyObject *multiply_row(PyObject *module, PyObject *arguments) {
    SingleRow call = {0};
    PyObject *matrices;
    unsigned long long x, bias, results;
    Py_ssize_t num_x;
    int is_float32, num_threads, is_done = 0;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "OnnKnKKpi:multiply_row", &matrices, &call.rows,
                          &call.columns, &x, &num_x, &bias, &results, &is_float32, &num_threads))
        return NULL;
    call.num_matrices = PyList_Size(matrices);
    if (call.num_matrices < 1 || call.rows < 1 || call.columns < 1 ||
        (num_x != 1 && num_x != call.num_matrices)) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "no matrices and rows for them");
        return NULL;
    }
    call.x_columns = num_x == 1 ? 0 : call.columns;
    call.bias = (const void *)(uintptr_t)bias;
    call.results = (void *)(uintptr_t)results;
    call.matrices = malloc(sizeof(uint64_t) * (size_t)call.num_matrices);
    float *widened = is_float32 ? NULL : malloc(sizeof(float) * (size_t)(num_x * call.columns));
    int failed = !call.matrices || (!is_float32 && !widened);
    for (Py_ssize_t m = 0; !failed && m < call.num_matrices; m++)
        call.matrices[m] = PyLong_AsUnsignedLongLong(PyList_GetItem(matrices, m));
    if (!failed && !PyErr_Occurred() && has_kernel(&call, is_float32)) {
        const uint16_t *from = (const uint16_t *)(uintptr_t)x;
        for (Py_ssize_t i = 0; widened && i < num_x * call.columns; i++)
            widened[i] = widen_bfloat16(from[i]);
        call.x = widened ? widened : (const float *)(uintptr_t)x;
        Py_BEGIN_ALLOW_THREADS
        Py_ssize_t all = call.num_matrices * call.rows;
        num_threads = take_threads(num_threads, (double)all * (double)call.columns);
        call.rows_of_chunk = all / (CHUNKS * num_threads) / ROWS_AT_ONCE * ROWS_AT_ONCE;
        if (call.rows_of_chunk < LEAST_ROWS) call.rows_of_chunk = LEAST_ROWS;
        call.chunks_of_matrix = (call.rows + call.rows_of_chunk - 1) / call.rows_of_chunk;
        run_chunks(is_float32 ? multiply_float32_chunk : multiply_bfloat16_chunk, &call,
                   call.num_matrices * call.chunks_of_matrix, num_threads);
        return_threads(num_threads);
        Py_END_ALLOW_THREADS
        is_done = 1;
    }
    free(call.matrices);
    free(widened);
    if (failed) return PyErr_NoMemory();
    return PyErr_Occurred() ? NULL : PyBool_FromLong(is_done);
}

/* normalise(x, rows, columns, weight, epsilon, rounds_twice, adds_one, y, is_float32): rows over the
 * roots of their mean squares, times `weight` `(columns)`. Returns whether it could: all results are
 * numbers. */
static PyObject *normalise(PyObject *module, PyObject *arguments) {
    Norm call;
    unsigned long long x, weight, y;
    int is_float32;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "KnnKfppKp:normalise", &x, &call.rows, &call.columns, &weight,
                          &call.epsilon, &call.rounds_twice, &call.adds_one, &y, &is_float32))
        return NULL;
    call.x = (const void *)(uintptr_t)x;
    call.weight = (const void *)(uintptr_t)weight;
    call.y = (void *)(uintptr_t)y;
    if (!has_avx2() || call.columns < 1 || call.columns > MOST_COLUMNS || call.columns % LANES)
        Py_RETURN_FALSE;
    return PyBool_FromLong(is_float32 ? normalise_float32(&call) : normalise_bfloat16(&call));
}

/* rotate(x, rows, columns, cos, sin, rotated, y, is_float32): rows with their first `rotated`
 * columns turned by `cos` and `sin` `(rotated)`. Returns whether it could, as above. */
static PyObject *rotate(PyObject *module, PyObject *arguments) {
    Rotation call;
    unsigned long long x, cos, sin, y;
    int is_float32;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "KnnKKnKp:rotate", &x, &call.rows, &call.columns, &cos, &sin,
                          &call.rotated, &y, &is_float32))
        return NULL;
    call.x = (const void *)(uintptr_t)x;
    call.cos = (const void *)(uintptr_t)cos;
    call.sin = (const void *)(uintptr_t)sin;
    call.y = (void *)(uintptr_t)y;
    if (!has_avx2() || call.rotated < 0 || call.rotated > call.columns ||
        call.rotated % (2 * LANES))
        Py_RETURN_FALSE;
    return PyBool_FromLong(is_float32 ? rotate_float32(&call) : rotate_bfloat16(&call));
}

/* attend(query, heads, width, keys, groups, tokens, key_head, key_token, values, value_width,
 *        value_head, value_token, scale, results, num_threads): attention of a token, `(H, D)`, over
 * keys and values of `groups` heads, all in bfloat16. Returns whether there is a kernel. */
static PyObject *attend(PyObject *module, PyObject *arguments) {
    Attention call = {0};
    unsigned long long query, keys, values, results;
    float scale;
    int num_threads;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "KnnKnnnnKnnnfKi:attend", &query, &call.heads, &call.width,
                          &keys, &call.groups, &call.tokens, &call.key_head, &call.key_token,
                          &values, &call.value_width, &call.value_head, &call.value_token, &scale,
                          &results, &num_threads))
        return NULL;
    if (!has_avx2() || call.tokens < 1 || call.groups < 1 || call.heads % call.groups ||
        call.width < 1 || call.width % 16 || call.width > MOST_WIDTH || call.value_width < 1 ||
        call.value_width % 16 || call.value_width > MOST_WIDTH)
        Py_RETURN_FALSE;
    call.keys = (const uint16_t *)(uintptr_t)keys;
    call.values = (const uint16_t *)(uintptr_t)values;
    call.blocks = (call.tokens + BLOCK_TOKENS - 1) / BLOCK_TOKENS;
    Py_ssize_t in_query = call.heads * call.width;
    size_t in_parts = (size_t)(call.heads * call.blocks * (2 + call.value_width));
    float *memory = malloc(sizeof(float) * ((size_t)in_query + in_parts));
    if (!memory) return PyErr_NoMemory();
    const uint16_t *from = (const uint16_t *)(uintptr_t)query;
    for (Py_ssize_t i = 0; i < in_query; i++) memory[i] = widen_bfloat16(from[i]) * scale;
    call.query = memory;
    call.parts = memory + in_query;
    Py_BEGIN_ALLOW_THREADS
    num_threads = take_threads(num_threads, (double)in_query * (double)call.tokens);
    run_chunks(attend_block, &call, call.groups * call.blocks, num_threads);
    return_threads(num_threads);
    for (Py_ssize_t head = 0; head < call.heads; head++)
        join_blocks(&call, head, (uint16_t *)(uintptr_t)results + head * call.value_width);
    Py_END_ALLOW_THREADS
    free(memory);
    Py_RETURN_TRUE;
}
#else
static PyObject *find_no_kernel(PyObject *module, PyObject *arguments) {
    (void)module;
    (void)arguments;
    Py_RETURN_FALSE;
}
#define multiply_row find_no_kernel
#define normalise find_no_kernel
#define rotate find_no_kernel
#define attend find_no_kernel
#endif

/* ---- the module */

static PyMethodDef functions[] = {
    {"open", open_library, METH_VARARGS, NULL}, {"describe", describe, METH_VARARGS, NULL},
    {"multiply", multiply, METH_VARARGS, NULL}, {"compute", compute, METH_VARARGS, NULL},
    {"add_up", add_up, METH_VARARGS, NULL},     {"decode", decode, METH_VARARGS, NULL},
    {"encode", encode, METH_VARARGS, NULL},
    {"multiply_row", multiply_row, METH_VARARGS, NULL},
    {"attend", attend, METH_VARARGS, NULL},
    {"normalise", normalise, METH_VARARGS, NULL}, {"rotate", rotate, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {{0, NULL}};

static PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "products", NULL, 0, functions, slots, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit_products(void) {
    static int is_registered;
    if (!is_registered) {
        pthread_atfork(NULL, NULL, forget_threads);
        is_registered = 1;
    }
    return PyModuleDef_Init(&definition);
}
