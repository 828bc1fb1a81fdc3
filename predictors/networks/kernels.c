/* Small feed-forward networks of predictors, computed in one call.
 *
 * Between two layers of a model, gigabytes pass through the processor's caches, so that a prediction
 * finds nothing of its own there. A network here is a few loops over weights that lie one after
 * another, which the processor fetches ahead, and no objects in between. Results are those of the
 * ONNX operators that `program.py` reads, up to the order of float additions.
 *
 * Shape suffixes: T rows (tokens), K inputs of a product, N outputs of a product.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "exponential.h"

#if defined(__x86_64__) && defined(__GNUC__)
#define HAS_X86 1
#include <immintrin.h>
#else
#define HAS_X86 0
#endif

/* Compiled once for each kind of processor; which one runs is decided when the module is loaded. */
#if HAS_X86 && defined(__GLIBC__) && !defined(__clang__)
#define MULTIVERSIONED __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define MULTIVERSIONED
#endif

#define ALIGNMENT 64
#define OUTPUTS_AT_ONCE 4 /* of a product; weights are padded to a multiple */
#define MANY_ROWS 4 /* from here on the interpreter's lock is released during a run */

/* ---- elementwise loops */

/* The number within the limits; NaN becomes the lower one, as no integer stands for it. */
static inline float clip(float x, float least, float most) {
    return x > least ? (x < most ? x : most) : least;
}

MULTIVERSIONED
static void add_vector(float *to, const float *from, const float *vector, Py_ssize_t width) {
    for (Py_ssize_t i = 0; i < width; i++) to[i] = from[i] + vector[i];
}

MULTIVERSIONED
static void multiply_vector(float *to, const float *from, const float *vector, Py_ssize_t width) {
    for (Py_ssize_t i = 0; i < width; i++) to[i] = from[i] * vector[i];
}

MULTIVERSIONED
static void rectify(float *to, const float *from, Py_ssize_t width) {
    for (Py_ssize_t i = 0; i < width; i++) to[i] = from[i] > 0.0f ? from[i] : 0.0f;
}

MULTIVERSIONED
static void squash(float *to, const float *from, Py_ssize_t width) {
    for (Py_ssize_t i = 0; i < width; i++) to[i] = 1.0f / (1.0f + exponential(-from[i]));
}

MULTIVERSIONED
static void exponentials(float *to, const float *from, float shift, Py_ssize_t width) {
    for (Py_ssize_t i = 0; i < width; i++) to[i] = exponential(from[i] - shift);
}

static float largest(const float *from, Py_ssize_t width) {
    float most = -INFINITY;
    for (Py_ssize_t i = 0; i < width; i++) most = from[i] > most ? from[i] : most;
    return most;
}

static float total(const float *from, Py_ssize_t width) {
    float sum = 0.0f;
    for (Py_ssize_t i = 0; i < width; i++) sum += from[i];
    return sum;
}

static void log_softmax(float *to, const float *from, Py_ssize_t width) {
    float most = largest(from, width);
    exponentials(to, from, most, width);
    float shift = most + logf(total(to, width));
    for (Py_ssize_t i = 0; i < width; i++) to[i] = from[i] - shift;
}

/* ---- products */

typedef struct {
    Py_ssize_t inputs;  /* K */
    Py_ssize_t outputs; /* N */
    Py_ssize_t stride;  /* from one output's weights to the next: K, of eight-bit ones rounded up */
    float *weights;     /* [N, stride]; NULL: eight-bit ones */
    int8_t *integers;   /* [N, stride] */
    float *scales;      /* [N], of eight-bit weights */
    int32_t *sums;      /* [N]: sum of an output's eight-bit weights */
} Product;

typedef float Lanes __attribute__((vector_size(64)));

static inline float add_lanes(const Lanes *lanes) {
    float sum = 0.0f;
    for (int lane = 0; lane < 16; lane++) sum += (*lanes)[lane];
    return sum;
}

/* Products of a row with the weights of four outputs, `stride` numbers apart: four independent sums,
 * as one would wait for each addition. */
MULTIVERSIONED
static void dot_four_floats(float *to, const float *row, const float *weights, Py_ssize_t stride,
                            Py_ssize_t size) {
    const float *second = weights + stride, *third = second + stride, *fourth = third + stride;
    Lanes a = {0}, b = {0}, c = {0}, d = {0}, left, right;
    Py_ssize_t k = 0;
    for (; k + 16 <= size; k += 16) {
        memcpy(&left, row + k, sizeof left);
        memcpy(&right, weights + k, sizeof right);
        a += left * right;
        memcpy(&right, second + k, sizeof right);
        b += left * right;
        memcpy(&right, third + k, sizeof right);
        c += left * right;
        memcpy(&right, fourth + k, sizeof right);
        d += left * right;
    }
    float sums[4] = {add_lanes(&a), add_lanes(&b), add_lanes(&c), add_lanes(&d)};
    for (; k < size; k++) {
        sums[0] += row[k] * weights[k];
        sums[1] += row[k] * second[k];
        sums[2] += row[k] * third[k];
        sums[3] += row[k] * fourth[k];
    }
    memcpy(to, sums, sizeof sums);
}

/* Products of a row with the weights of four outputs, `stride` bytes apart; sizes are multiples of 64
 * bytes. The weights are read in the order in which they lie, one output after another: as four
 * streams they came from memory at a third of the speed. Lanes are added up for all four. */
static void dot_four_portable(int32_t *to, const uint8_t *row, const int8_t *weights,
                              Py_ssize_t stride) {
    for (int n = 0; n < 4; n++, weights += stride) {
        int32_t sum = 0;
        for (Py_ssize_t k = 0; k < stride; k++) sum += (int32_t)row[k] * weights[k];
        to[n] = sum;
    }
}

#if HAS_X86
__attribute__((target("avx2")))
static inline __m256i multiply_16(const uint8_t *row, const int8_t *weights) {
    __m256i left = _mm256_cvtepu8_epi16(_mm_load_si128((const __m128i *)row));
    __m256i right = _mm256_cvtepi8_epi16(_mm_load_si128((const __m128i *)weights));
    return _mm256_madd_epi16(left, right);
}

__attribute__((target("avx2")))
static void dot_four_avx2(int32_t *to, const uint8_t *row, const int8_t *weights,
                          Py_ssize_t stride) {
    __m256i sums[4];
    for (int n = 0; n < 4; n++, weights += stride) {
        __m256i even = _mm256_setzero_si256(), odd = even;
        for (Py_ssize_t k = 0; k < stride; k += 32) {
            even = _mm256_add_epi32(even, multiply_16(row + k, weights + k));
            odd = _mm256_add_epi32(odd, multiply_16(row + k + 16, weights + k + 16));
        }
        sums[n] = _mm256_add_epi32(even, odd);
    }
    __m256i first = _mm256_hadd_epi32(sums[0], sums[1]);
    __m256i both = _mm256_hadd_epi32(first, _mm256_hadd_epi32(sums[2], sums[3]));
    _mm_storeu_si128((__m128i *)to, _mm_add_epi32(_mm256_castsi256_si128(both),
                                                  _mm256_extracti128_si256(both, 1)));
}

__attribute__((target("avx512f,avx512bw,avx512vnni")))
static void dot_four_vnni(int32_t *to, const uint8_t *row, const int8_t *weights,
                          Py_ssize_t stride) {
    __m512i sums[4];
    for (int n = 0; n < 4; n++, weights += stride) {
        /* Four sums again, as one would wait for each addition. */
        __m512i part[4] = {_mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512(),
                           _mm512_setzero_si512()};
        for (Py_ssize_t k = 0; k < stride; k += 256) {
            for (int p = 0; p < 4 && k + 64 * p < stride; p++) {
                part[p] = _mm512_dpbusd_epi32(part[p], _mm512_load_si512(row + k + 64 * p),
                                              _mm512_load_si512(weights + k + 64 * p));
            }
        }
        sums[n] = _mm512_add_epi32(_mm512_add_epi32(part[0], part[1]),
                                   _mm512_add_epi32(part[2], part[3]));
    }
    __m512i a = sums[0], b = sums[1], c = sums[2], d = sums[3];
    __m512i ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    __m512i cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
    __m512i all = _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
    __m256i half = _mm256_add_epi32(_mm512_castsi512_si256(all), _mm512_extracti64x4_epi64(all, 1));
    _mm_storeu_si128((__m128i *)to, _mm_add_epi32(_mm256_castsi256_si128(half),
                                                  _mm256_extracti128_si256(half, 1)));
}
#endif

typedef void DotFour(int32_t *, const uint8_t *, const int8_t *, Py_ssize_t);

static DotFour *dot_four = dot_four_portable;

/* Instructions for products of integers that this processor has, the fastest first. */
static struct {
    const char *name;
    DotFour *function;
} choices[4];
static int num_choices;

static void add_choice(const char *name, DotFour *function) {
    choices[num_choices].name = name;
    choices[num_choices++].function = function;
}

static void find_choices(void) {
    num_choices = 0;
#if HAS_X86
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw"))
        add_choice("avx512vnni", dot_four_vnni);
    if (__builtin_cpu_supports("avx2")) add_choice("avx2", dot_four_avx2);
#endif
    add_choice("portable", dot_four_portable);
    dot_four = choices[0].function;
}

/* ONNX's DynamicQuantizeLinear of all rows together: numbers in 0..255, one scale, one zero. */
MULTIVERSIONED
static void quantise(uint8_t *to, const float *from, float scale, float zero, Py_ssize_t width) {
    for (Py_ssize_t i = 0; i < width; i++) {
        to[i] = (uint8_t)clip(rintf(from[i] / scale) + zero, 0.0f, 255.0f);
    }
}

MULTIVERSIONED
static void find_range(const float *from, Py_ssize_t width, float *least, float *most) {
    float low = *least, high = *most;
    for (Py_ssize_t i = 0; i < width; i++) {
        low = from[i] < low ? from[i] : low;
        high = from[i] > high ? from[i] : high;
    }
    *least = low;
    *most = high;
}

/* ---- programs */

enum { ADD_VECTOR, MULTIPLY_VECTOR, ADD, RELU, LOG_SOFTMAX, SIGMOID, PRODUCT, CHOSEN, NUM_CODES };

typedef struct {
    int parent; /* the buffer of which this one is some columns; -1: none */
    Py_ssize_t first; /* its first column in the parent, or where it begins in a row's memory */
    Py_ssize_t width;
    Py_ssize_t stride; /* floats from one row to the next: the parent's width */
} Buffer;

typedef struct {
    int code;
    int to, from;
    int added;        /* ADD, PRODUCT: a buffer that is added; CHOSEN: shares [E]; -1: none */
    Py_ssize_t group; /* LOG_SOFTMAX: numbers that belong together; CHOSEN: bytes of a number */
    float *vector;    /* [width]; PRODUCT: added to each row; NULL: nothing */
    Product product;
    void *choices;    /* CHOSEN: [E, K, N] float32 numbers, or int8 ones */
    int is_int8;      /* its numbers */
} Operation;

typedef struct {
    PyObject_HEAD
    int num_buffers, num_operations, num_inputs, num_outputs;
    Buffer *buffers;
    Operation *operations;
    int *inputs, *outputs;
    Py_ssize_t row_floats; /* memory of all buffers for a row */
    Py_ssize_t row_bytes;  /* the same of the widest quantised row */
    float *scratch;        /* of one row, kept between runs */
    int is_scratch_used;
} Program;

static Py_ssize_t round_up(Py_ssize_t size) { return (size + 63) / 64 * 64; }

static void *allocate(Py_ssize_t bytes) {
    void *memory = NULL;
    if (posix_memalign(&memory, ALIGNMENT, bytes > 0 ? (size_t)bytes : 1)) {
        PyErr_NoMemory();
        return NULL;
    }
    memset(memory, 0, (size_t)bytes);
    return memory;
}

static float *locate(const Program *program, int number, float *scratch, Py_ssize_t rows) {
    const Buffer *buffer = &program->buffers[number];
    if (buffer->parent < 0) return scratch + buffer->first * rows;
    return locate(program, buffer->parent, scratch, rows) + buffer->first;
}

static void multiply(const Product *product, const Operation *operation, const float *from_TK,
                     Py_ssize_t from_stride, float *to_TN, const float *added_TN,
                     Py_ssize_t added_stride, Py_ssize_t rows, uint8_t *bytes_TK) {
    float scale = 1.0f;
    int32_t zero = 0;
    if (product->integers) {
        float least = 0.0f, most = 0.0f;
        for (Py_ssize_t t = 0; t < rows; t++)
            find_range(from_TK + t * from_stride, product->inputs, &least, &most);
        scale = most > least ? (most - least) / 255.0f : 1.0f;
        zero = (int32_t)clip(rintf(-least / scale), 0.0f, 255.0f);
        for (Py_ssize_t t = 0; t < rows; t++)
            quantise(bytes_TK + t * product->stride, from_TK + t * from_stride, scale,
                     (float)zero, product->inputs);
    }
    for (Py_ssize_t first = 0; first < product->outputs; first += OUTPUTS_AT_ONCE) {
        Py_ssize_t left = product->outputs - first;
        int count = left < OUTPUTS_AT_ONCE ? (int)left : OUTPUTS_AT_ONCE;
        for (Py_ssize_t t = 0; t < rows; t++) {
            float sums[OUTPUTS_AT_ONCE];
            if (product->integers) {
                int32_t whole[OUTPUTS_AT_ONCE];
                dot_four(whole, bytes_TK + t * product->stride,
                         product->integers + first * product->stride, product->stride);
                for (int n = 0; n < count; n++)
                    sums[n] = (float)(whole[n] - zero * product->sums[first + n]) *
                              (scale * product->scales[first + n]);
            } else {
                dot_four_floats(sums, from_TK + t * from_stride,
                                product->weights + first * product->stride, product->stride,
                                product->inputs);
            }
            for (int n = 0; n < count; n++) {
                float sum = sums[n];
                if (added_TN) sum += added_TN[t * added_stride + first + n];
                if (operation->vector) sum += operation->vector[first + n];
                to_TN[t * product->outputs + first + n] = sum;
            }
        }
    }
}

MULTIVERSIONED
static void add_scaled_floats(float *to, const float *from, float factor, Py_ssize_t width) {
    for (Py_ssize_t i = 0; i < width; i++) to[i] += factor * from[i];
}

MULTIVERSIONED
static void add_scaled_integers(float *to, const int8_t *from, float factor, Py_ssize_t width) {
    for (Py_ssize_t i = 0; i < width; i++) to[i] += factor * (float)from[i];
}

/* sum over e and k of shares[e] from[k] choices[e, k, n]. Of the experts' matrices only those with a
 * share are read, a token's few. */
static void add_chosen(const Operation *operation, float *to, const float *from,
                       Py_ssize_t num_inputs, const float *shares, Py_ssize_t num_experts,
                       Py_ssize_t width) {
    memset(to, 0, (size_t)width * sizeof(float));
    for (Py_ssize_t e = 0; e < num_experts; e++) {
        if (shares[e] == 0.0f) continue;
        for (Py_ssize_t k = 0; k < num_inputs; k++) {
            float factor = shares[e] * from[k];
            Py_ssize_t first = (e * num_inputs + k) * width;
            if (operation->is_int8)
                add_scaled_integers(to, (int8_t *)operation->choices + first, factor, width);
            else
                add_scaled_floats(to, (float *)operation->choices + first, factor, width);
        }
    }
}

static void run_operations(const Program *program, float *scratch, uint8_t *bytes,
                           Py_ssize_t rows) {
    for (int o = 0; o < program->num_operations; o++) {
        const Operation *operation = &program->operations[o];
        const Buffer *from_buffer = &program->buffers[operation->from];
        const float *from = locate(program, operation->from, scratch, rows);
        float *to = locate(program, operation->to, scratch, rows);
        const float *added = NULL;
        Py_ssize_t width = program->buffers[operation->to].width, added_stride = 0;
        if (operation->added >= 0) {
            added = locate(program, operation->added, scratch, rows);
            added_stride = program->buffers[operation->added].stride;
        }
        if (operation->code == PRODUCT) {
            multiply(&operation->product, operation, from, from_buffer->stride, to, added,
                     added_stride, rows, bytes);
            continue;
        }
        for (Py_ssize_t t = 0; t < rows; t++, to += width, from += from_buffer->stride) {
            switch (operation->code) {
                case ADD_VECTOR: add_vector(to, from, operation->vector, width); break;
                case MULTIPLY_VECTOR: multiply_vector(to, from, operation->vector, width); break;
                case ADD: add_vector(to, from, added + t * added_stride, width); break;
                case RELU: rectify(to, from, width); break;
                case SIGMOID: squash(to, from, width); break;
                case CHOSEN:
                    add_chosen(operation, to, from, from_buffer->width, added + t * added_stride,
                               program->buffers[operation->added].width, width);
                    break;
                default:
                    for (Py_ssize_t first = 0; first < width; first += operation->group)
                        log_softmax(to + first, from + first, operation->group);
            }
        }
    }
}

/* ---- arguments from Python */

/* Opens a contiguous array of numbers of a format of `struct`: "f", "b". */
static int open_view(PyObject *object, Py_buffer *view, const char *format, int flags) {
    if (PyObject_GetBuffer(object, view, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | flags)) return -1;
    if (view->format && strcmp(view->format, format) == 0) return 0;
    PyErr_Format(PyExc_ValueError, "got an array of format %s; expected %s",
                 view->format ? view->format : "B", format);
    PyBuffer_Release(view);
    return -1;
}

/* Copies a contiguous array of `size` numbers; NULL with an exception. */
static void *copy_array(PyObject *object, Py_ssize_t size, const char *format) {
    Py_buffer view;
    if (open_view(object, &view, format, 0)) return NULL;
    void *copy = NULL;
    if (view.len != size * view.itemsize)
        PyErr_Format(PyExc_ValueError, "got %zd numbers; expected %zd", view.len / view.itemsize,
                     size);
    else if ((copy = allocate(view.len)))
        memcpy(copy, view.buf, (size_t)view.len);
    PyBuffer_Release(&view);
    return copy;
}

static int read_ints(PyObject *tuple, const char *what, long *values, Py_ssize_t count) {
    if (!PyTuple_Check(tuple) || PyTuple_Size(tuple) < count) {
        PyErr_Format(PyExc_TypeError, "%s: expected a tuple of %zd numbers", what, count);
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        values[i] = PyLong_AsLong(PyTuple_GetItem(tuple, i));
        if (values[i] == -1 && PyErr_Occurred()) return -1;
    }
    return 0;
}

static int read_buffers(Program *program, PyObject *list) {
    program->num_buffers = (int)PyTuple_Size(list);
    program->buffers = allocate(program->num_buffers * (Py_ssize_t)sizeof(Buffer));
    if (!program->buffers) return -1;
    for (int b = 0; b < program->num_buffers; b++) {
        long values[3]; /* parent, first, width */
        if (read_ints(PyTuple_GetItem(list, b), "a buffer", values, 3)) return -1;
        Buffer *buffer = &program->buffers[b];
        int is_valid = values[0] >= -1 && values[0] < b && values[1] >= 0 && values[2] > 0;
        if (is_valid && values[0] >= 0)
            is_valid = values[1] + values[2] <= program->buffers[values[0]].width;
        if (!is_valid) {
            PyErr_Format(PyExc_ValueError, "buffer %d has invalid columns", b);
            return -1;
        }
        buffer->parent = (int)values[0];
        buffer->width = values[2];
        if (buffer->parent < 0) {
            buffer->first = program->row_floats;
            buffer->stride = buffer->width;
            program->row_floats += round_up(buffer->width);
        } else {
            buffer->first = values[1];
            buffer->stride = program->buffers[buffer->parent].stride;
        }
    }
    return 0;
}

/* Reads `[N, K]` weights, of int8 if there are scales `[N]`. */
static int read_product(Product *product, PyObject *weights, PyObject *scales) {
    Py_ssize_t inputs = product->inputs, outputs = product->outputs;
    int is_integer = scales != Py_None;
    Py_ssize_t bytes = is_integer ? 1 : (Py_ssize_t)sizeof(float);
    char *given = copy_array(weights, inputs * outputs, is_integer ? "b" : "f");
    if (!given) return -1;
    product->stride = is_integer ? round_up(inputs) : inputs;
    Py_ssize_t padded = (outputs + OUTPUTS_AT_ONCE - 1) / OUTPUTS_AT_ONCE * OUTPUTS_AT_ONCE;
    char *rows = allocate(padded * product->stride * bytes);
    if (rows)
        for (Py_ssize_t n = 0; n < outputs; n++)
            memcpy(rows + n * product->stride * bytes, given + n * inputs * bytes,
                   (size_t)(inputs * bytes));
    free(given);
    if (!rows) return -1;
    if (!is_integer) {
        product->weights = (float *)rows;
        return 0;
    }
    product->integers = (int8_t *)rows;
    product->scales = copy_array(scales, outputs, "f");
    product->sums = allocate(outputs * (Py_ssize_t)sizeof(int32_t));
    if (!product->scales || !product->sums) return -1;
    for (Py_ssize_t n = 0; n < outputs; n++)
        for (Py_ssize_t k = 0; k < inputs; k++)
            product->sums[n] += product->integers[n * product->stride + k];
    return 0;
}

/* (code, to, from, added, group, vector, weights, scales) */
static int read_operation(Program *program, Operation *operation, PyObject *tuple) {
    long values[5];
    if (read_ints(tuple, "an operation", values, 5)) return -1;
    if (PyTuple_Size(tuple) != 8) {
        PyErr_SetString(PyExc_TypeError, "an operation has 8 parts");
        return -1;
    }
    long buffers = program->num_buffers;
    int is_valid = values[0] >= 0 && values[0] < NUM_CODES && values[1] >= 0 &&
                   values[1] < buffers && values[2] >= 0 && values[2] < buffers &&
                   values[3] >= -1 && values[3] < buffers;
    if (is_valid) {
        operation->code = (int)values[0];
        operation->to = (int)values[1];
        operation->from = (int)values[2];
        operation->added = (int)values[3];
        operation->group = values[4];
        const Buffer *to = &program->buffers[operation->to];
        const Buffer *from = &program->buffers[operation->from];
        int is_product = operation->code == PRODUCT || operation->code == CHOSEN;
        is_valid = to->parent < 0 && (is_product || to->width == from->width);
        if (operation->code == LOG_SOFTMAX)
            is_valid = is_valid && operation->group > 0 && to->width % operation->group == 0;
        if (operation->code == ADD || operation->code == CHOSEN)
            is_valid = is_valid && operation->added >= 0;
        if (operation->added >= 0 && operation->code != CHOSEN)
            is_valid = is_valid && program->buffers[operation->added].width == to->width;
    }
    PyObject *vector = PyTuple_GetItem(tuple, 5);
    int needs_vector = values[0] == ADD_VECTOR || values[0] == MULTIPLY_VECTOR;
    if (!is_valid || (needs_vector && vector == Py_None)) {
        PyErr_SetString(PyExc_ValueError, "an operation does not fit its buffers");
        return -1;
    }
    Py_ssize_t width = program->buffers[operation->to].width;
    if (vector != Py_None && !(operation->vector = copy_array(vector, width, "f")))
        return -1;
    if (operation->code == CHOSEN) {
        PyObject *array = PyTuple_GetItem(tuple, 6);
        Py_ssize_t size = program->buffers[operation->added].width *
                          program->buffers[operation->from].width * width;
        operation->is_int8 = operation->group == 1;
        operation->choices = copy_array(array, size, operation->is_int8 ? "b" : "f");
        return operation->choices ? 0 : -1;
    }
    if (operation->code != PRODUCT) return 0;
    operation->product.inputs = program->buffers[operation->from].width;
    operation->product.outputs = width;
    if (read_product(&operation->product, PyTuple_GetItem(tuple, 6), PyTuple_GetItem(tuple, 7)))
        return -1;
    if (operation->product.integers && operation->product.stride > program->row_bytes)
        program->row_bytes = operation->product.stride;
    return 0;
}

static int *read_numbers(PyObject *tuple, int *count, int num_buffers) {
    *count = (int)PyTuple_Size(tuple);
    int *numbers = allocate(*count * (Py_ssize_t)sizeof(int));
    for (int i = 0; numbers && i < *count; i++) {
        long number = PyLong_AsLong(PyTuple_GetItem(tuple, i));
        if (number < 0 || number >= num_buffers) {
            if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "there is no such buffer");
            free(numbers);
            return NULL;
        }
        numbers[i] = (int)number;
    }
    return numbers;
}

static void Program_dealloc(PyObject *object) {
    Program *program = (Program *)object;
    for (int o = 0; program->operations && o < program->num_operations; o++) {
        Operation *operation = &program->operations[o];
        free(operation->vector);
        free(operation->choices);
        free(operation->product.weights);
        free(operation->product.integers);
        free(operation->product.scales);
        free(operation->product.sums);
    }
    free(program->operations);
    free(program->buffers);
    free(program->inputs);
    free(program->outputs);
    free(program->scratch);
    PyTypeObject *type = Py_TYPE(object);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(object);
    Py_DECREF(type);
}

static PyObject *Program_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
    PyObject *buffers, *operations, *inputs, *outputs;
    (void)keywords;
    if (!PyArg_ParseTuple(arguments, "O!O!O!O!:Program", &PyTuple_Type, &buffers, &PyTuple_Type,
                          &operations, &PyTuple_Type, &inputs, &PyTuple_Type, &outputs))
        return NULL;
    allocfunc make = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Program *program = (Program *)make(type, 0); /* all zeros */
    if (!program) return NULL;
    if (read_buffers(program, buffers)) goto failed;
    program->num_operations = (int)PyTuple_Size(operations);
    program->operations = allocate(program->num_operations * (Py_ssize_t)sizeof(Operation));
    if (!program->operations) goto failed;
    for (int o = 0; o < program->num_operations; o++)
        if (read_operation(program, &program->operations[o], PyTuple_GetItem(operations, o)))
            goto failed;
    program->inputs = read_numbers(inputs, &program->num_inputs, program->num_buffers);
    if (!program->inputs) goto failed;
    program->outputs = read_numbers(outputs, &program->num_outputs, program->num_buffers);
    if (!program->outputs) goto failed;
    program->scratch = allocate(program->row_floats * (Py_ssize_t)sizeof(float) +
                                program->row_bytes);
    if (!program->scratch) goto failed;
    return (PyObject *)program;
failed:
    Py_DECREF((PyObject *)program);
    return NULL;
}

/* Copies the columns of an input, which may come as several arrays, into its buffer. */
static int take_input(const Program *program, int number, PyObject *parts, float *scratch,
                      Py_ssize_t rows) {
    Py_ssize_t width = program->buffers[number].width, first = 0;
    float *to = locate(program, number, scratch, rows);
    Py_ssize_t num_parts = PyTuple_Check(parts) ? PyTuple_Size(parts) : 1;
    for (Py_ssize_t p = 0; p < num_parts; p++) {
        PyObject *part = PyTuple_Check(parts) ? PyTuple_GetItem(parts, p) : parts;
        Py_buffer view;
        if (open_view(part, &view, "f", 0)) return -1;
        Py_ssize_t columns = view.len / (Py_ssize_t)sizeof(float) / rows;
        int fits = columns * rows * (Py_ssize_t)sizeof(float) == view.len &&
                   first + columns <= width;
        for (Py_ssize_t t = 0; fits && t < rows; t++)
            memcpy(to + t * width + first, (const float *)view.buf + t * columns,
                   (size_t)columns * sizeof(float));
        PyBuffer_Release(&view);
        if (!fits) break;
        first += columns;
    }
    if (first == width) return 0;
    PyErr_Format(PyExc_ValueError, "an input does not have %zd rows of %zd numbers", rows, width);
    return -1;
}

static int give_output(const Program *program, int number, PyObject *array, float *scratch,
                       Py_ssize_t rows) {
    const Buffer *buffer = &program->buffers[number];
    const float *from = locate(program, number, scratch, rows);
    Py_buffer view;
    if (open_view(array, &view, "f", PyBUF_WRITABLE)) return -1;
    int fits = view.len == rows * buffer->width * (Py_ssize_t)sizeof(float);
    for (Py_ssize_t t = 0; fits && t < rows; t++)
        memcpy((float *)view.buf + t * buffer->width, from + t * buffer->stride,
               (size_t)buffer->width * sizeof(float));
    PyBuffer_Release(&view);
    if (fits) return 0;
    PyErr_Format(PyExc_ValueError, "an output does not have %zd rows of %zd numbers", rows,
                 buffer->width);
    return -1;
}

/* run(rows, inputs, outputs): outputs are float32 arrays to fill; None: not needed. */
static PyObject *Program_run(PyObject *self, PyObject *arguments) {
    Program *program = (Program *)self;
    Py_ssize_t rows;
    PyObject *inputs, *outputs;
    if (!PyArg_ParseTuple(arguments, "nO!O!:run", &rows, &PyTuple_Type, &inputs, &PyTuple_Type,
                          &outputs))
        return NULL;
    if (PyTuple_Size(inputs) != program->num_inputs ||
        PyTuple_Size(outputs) != program->num_outputs || rows < 1) {
        PyErr_Format(PyExc_ValueError, "a run needs %d inputs, %d outputs and a row at least",
                     program->num_inputs, program->num_outputs);
        return NULL;
    }
    int is_kept = rows == 1 && !program->is_scratch_used;
    float *scratch = program->scratch;
    if (is_kept)
        program->is_scratch_used = 1;
    else if (!(scratch = allocate(rows * (program->row_floats * (Py_ssize_t)sizeof(float) +
                                          program->row_bytes))))
        return NULL;
    uint8_t *bytes = (uint8_t *)(scratch + rows * program->row_floats);
    int failed = 0;
    for (int i = 0; !failed && i < program->num_inputs; i++)
        failed = take_input(program, program->inputs[i], PyTuple_GetItem(inputs, i), scratch, rows);
    if (!failed && rows < MANY_ROWS) {
        run_operations(program, scratch, bytes, rows);
    } else if (!failed) {
        Py_BEGIN_ALLOW_THREADS
        run_operations(program, scratch, bytes, rows);
        Py_END_ALLOW_THREADS
    }
    for (int o = 0; !failed && o < program->num_outputs; o++) {
        PyObject *array = PyTuple_GetItem(outputs, o);
        if (array != Py_None)
            failed = give_output(program, program->outputs[o], array, scratch, rows);
    }
    if (is_kept)
        program->is_scratch_used = 0;
    else
        free(scratch);
    if (failed) return NULL;
    Py_RETURN_NONE;
}

/* ---- chosen experts, and their fading sums, of one token */

typedef struct {
    Py_buffer views[7];
    int count;
} Views;

static float *open_floats(Views *views, PyObject *object, Py_ssize_t size, int is_written) {
    Py_buffer *view = &views->views[views->count];
    if (open_view(object, view, "f", is_written ? PyBUF_WRITABLE : 0)) return NULL;
    views->count++;
    if (view->len == size * (Py_ssize_t)sizeof(float)) return view->buf;
    PyErr_Format(PyExc_ValueError, "got %zd bytes; expected %zd numbers", view->len, size);
    return NULL;
}

MULTIVERSIONED
static void fade_row(float *sums, float decay, const float *added, Py_ssize_t width) {
    for (Py_ssize_t i = 0; i < width; i++) sums[i] = sums[i] * decay + (added ? added[i] : 0.0f);
}

/* A router's probabilities of one token; NULL with an exception. */
static float *chances_of(const float *logits_E, Py_ssize_t num_experts) {
    float *chance_E = allocate(num_experts * (Py_ssize_t)sizeof(float));
    if (!chance_E) return NULL;
    exponentials(chance_E, logits_E, largest(logits_E, num_experts), num_experts);
    float sum = total(chance_E, num_experts);
    for (Py_ssize_t e = 0; e < num_experts; e++) chance_E[e] /= sum;
    return chance_E;
}

/* The expert at a place of a sequence of chosen ones; -1: no choice, a repeated one, or an
 * exception. */
static Py_ssize_t read_choice(PyObject *used, Py_ssize_t place, Py_ssize_t num_experts) {
    long chosen = -1;
    for (Py_ssize_t u = place; u >= 0; u--) {
        PyObject *item = PySequence_GetItem(used, u);
        long e = item ? PyLong_AsLong(item) : -1;
        Py_XDECREF(item);
        if (PyErr_Occurred() || (u < place && e == chosen)) return -1;
        if (u == place) chosen = e;
    }
    return chosen >= 0 && chosen < num_experts ? chosen : -1;
}

/* fade_token(fading_FE, decays_F, num_counts, used, logits_E, means_FE)
 *
 * Adds a token to a layer's fading sums: the first `num_counts` rows count the experts `used`, the
 * others add the router's probabilities. Writes the sums as means in [0, 1] to `means_FE`. A token
 * without finite probabilities is left out: it would stay in the sums for ever. */
static PyObject *fade_token(PyObject *module, PyObject *arguments) {
    PyObject *fading, *decays, *used, *logits, *means;
    Py_ssize_t num_counts;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "OOnOOO:fade_token", &fading, &decays, &num_counts, &used,
                          &logits, &means))
        return NULL;
    Py_ssize_t num_rows = PyObject_Length(decays), num_experts = PyObject_Length(logits),
               num_used = PyObject_Length(used);
    if (num_rows < 0 || num_experts < 0 || num_used < 0) return NULL;
    Views views = {.count = 0};
    PyObject *result = NULL;
    float *chance_E = NULL;
    float *sums_FE = open_floats(&views, fading, num_rows * num_experts, 1);
    float *decay_F = sums_FE ? open_floats(&views, decays, num_rows, 0) : NULL;
    float *logits_E = decay_F ? open_floats(&views, logits, num_experts, 0) : NULL;
    float *means_FE = logits_E ? open_floats(&views, means, num_rows * num_experts, 1) : NULL;
    if (!means_FE || !(chance_E = chances_of(logits_E, num_experts))) goto done;
    /* Each was divided by the sum of all: one that is not finite makes the first NaN. */
    int is_finite = !num_experts || isfinite(chance_E[0]);
    for (Py_ssize_t f = 0; f < num_rows && is_finite; f++)
        fade_row(sums_FE + f * num_experts, decay_F[f], f < num_counts ? NULL : chance_E,
                 num_experts);
    for (Py_ssize_t u = 0; u < num_used && is_finite; u++) {
        Py_ssize_t e = read_choice(used, u, num_experts);
        if (PyErr_Occurred()) goto done;
        for (Py_ssize_t f = 0; f < num_counts && e >= 0; f++)
            sums_FE[f * num_experts + e] += 1.0f;
    }
    for (Py_ssize_t f = 0; f < num_rows; f++)
        for (Py_ssize_t e = 0; e < num_experts; e++)
            means_FE[f * num_experts + e] = sums_FE[f * num_experts + e] * (1.0f - decay_F[f]);
    result = Py_None;
    Py_INCREF(result);
done:
    free(chance_E);
    while (views.count) PyBuffer_Release(&views.views[--views.count]);
    return result;
}

/* share_chosen(used, logits_E, shares_E): of the experts `used`, their number times the router's
 * probabilities; 0 for the others. */
static PyObject *share_chosen(PyObject *module, PyObject *arguments) {
    PyObject *used, *logits, *shares, *result = NULL;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "OOO:share_chosen", &used, &logits, &shares)) return NULL;
    Py_ssize_t num_used = PyObject_Length(used), num_experts = PyObject_Length(logits);
    if (num_used < 0 || num_experts < 0) return NULL;
    Views views = {.count = 0};
    float *chance_E = NULL;
    float *logits_E = open_floats(&views, logits, num_experts, 0);
    float *shares_E = logits_E ? open_floats(&views, shares, num_experts, 1) : NULL;
    if (!shares_E || !(chance_E = chances_of(logits_E, num_experts))) goto done;
    memset(shares_E, 0, (size_t)num_experts * sizeof(float));
    for (Py_ssize_t u = 0; u < num_used; u++) {
        Py_ssize_t e = read_choice(used, u, num_experts);
        if (PyErr_Occurred()) goto done;
        if (e >= 0) shares_E[e] = (float)num_used * chance_E[e];
    }
    result = Py_None;
    Py_INCREF(result);
done:
    free(chance_E);
    while (views.count) PyBuffer_Release(&views.views[--views.count]);
    return result;
}

/* ---- forecasts of one token */

/* The experts with the highest scores above 0, best first, ties to the lower id: a pair of lists,
 * of their ids and of their probabilities. */
static PyObject *rank_row(const float *score_E, const float *probability_E, Py_ssize_t num_experts,
                          Py_ssize_t top_k) {
    PyObject *ids = PyList_New(0), *values = PyList_New(0), *pair = NULL;
    float limit = INFINITY; /* the score of the last chosen one: what is not chosen comes after it */
    Py_ssize_t last = -1;
    int failed = !ids || !values;
    while (!failed && top_k-- > 0) {
        Py_ssize_t next = -1;
        float most = 0.0f;
        for (Py_ssize_t e = 0; e < num_experts; e++)
            if (score_E[e] > most && (score_E[e] < limit || (score_E[e] == limit && e > last))) {
                next = e;
                most = score_E[e];
            }
        if (next < 0) break;
        PyObject *id = PyLong_FromSsize_t(next), *value = PyFloat_FromDouble(probability_E[next]);
        failed = !id || !value || PyList_Append(ids, id) || PyList_Append(values, value);
        Py_XDECREF(id);
        Py_XDECREF(value);
        last = next;
        limit = most;
    }
    if (!failed) pair = PyTuple_Pack(2, ids, values);
    Py_XDECREF(ids);
    Py_XDECREF(values);
    return pair;
}

/* rank(scores_HE, top_k, probability_HE): fills 1 - (1 - score), as the product over one token
 * rounds, and returns `rank_row` of each row. */
static PyObject *rank(PyObject *module, PyObject *arguments) {
    PyObject *scores, *answer, *pairs = NULL;
    Py_ssize_t top_k;
    Views views = {.count = 0};
    (void)module;
    if (!PyArg_ParseTuple(arguments, "OnO:rank", &scores, &top_k, &answer) ||
        open_view(answer, &views.views[0], "f", PyBUF_WRITABLE))
        return NULL;
    views.count = 1;
    const Py_buffer *view = &views.views[0];
    Py_ssize_t size = view->len / (Py_ssize_t)sizeof(float);
    Py_ssize_t num_experts = view->ndim == 2 ? view->shape[1] : size;
    float *probability_HE = view->buf;
    const float *score_HE = open_floats(&views, scores, size, 0);
    if (score_HE && num_experts > 0) {
        for (Py_ssize_t i = 0; i < size; i++) probability_HE[i] = 1.0f - (1.0f - score_HE[i]);
        pairs = PyList_New(0);
        for (Py_ssize_t i = 0; pairs && i < size; i += num_experts) {
            PyObject *pair = rank_row(score_HE + i, probability_HE + i, num_experts, top_k);
            if (!pair || PyList_Append(pairs, pair)) Py_CLEAR(pairs);
            Py_XDECREF(pair);
        }
    } else if (score_HE) {
        PyErr_SetString(PyExc_ValueError, "there are no experts to rank");
    }
    while (views.count) PyBuffer_Release(&views.views[--views.count]);
    return pairs;
}

/* are_finite(array): whether no number is NaN or infinite, of a float32 array that may be strided. */
static PyObject *are_finite(PyObject *module, PyObject *array) {
    Py_buffer view;
    (void)module;
    if (PyObject_GetBuffer(array, &view, PyBUF_STRIDED_RO | PyBUF_FORMAT)) return NULL;
    if (!view.format || strcmp(view.format, "f") || view.ndim < 1 || view.ndim > 3) {
        PyErr_SetString(PyExc_ValueError, "expected one to three dimensions of float32 numbers");
        PyBuffer_Release(&view);
        return NULL;
    }
    Py_ssize_t sizes[3] = {1, 1, 1}, steps[3] = {0, 0, 0};
    for (int d = 0; d < view.ndim; d++) {
        sizes[3 - view.ndim + d] = view.shape[d];
        steps[3 - view.ndim + d] = view.strides[d];
    }
    int found = 0;
    for (Py_ssize_t i = 0; i < sizes[0]; i++)
        for (Py_ssize_t j = 0; j < sizes[1]; j++) {
            const char *row = (const char *)view.buf + i * steps[0] + j * steps[1];
            for (Py_ssize_t k = 0; k < sizes[2]; k++) {
                uint32_t bits;
                memcpy(&bits, row + k * steps[2], sizeof bits);
                found |= (bits & 0x7f800000u) == 0x7f800000u;
            }
        }
    PyBuffer_Release(&view);
    return PyBool_FromLong(!found);
}

/* ---- numbers of the model */

/* decay(sums, decays, added): sums = sums * decays + added, each operation rounded, in place. */
static PyObject *decay(PyObject *module, PyObject *arguments) {
    PyObject *sums, *decays, *added, *result = NULL;
    Views views = {.count = 0};
    (void)module;
    if (!PyArg_ParseTuple(arguments, "OOO:decay", &sums, &decays, &added)) return NULL;
    Py_ssize_t size = PyObject_Length(decays);
    float *sum = size < 0 ? NULL : open_floats(&views, sums, size, 1);
    const float *factor = sum ? open_floats(&views, decays, size, 0) : NULL;
    const float *term = factor ? open_floats(&views, added, size, 0) : NULL;
    if (term) {
        multiply_vector(sum, sum, factor, size);
        add_vector(sum, sum, term, size);
        result = Py_None;
        Py_INCREF(result);
    }
    while (views.count) PyBuffer_Release(&views.views[--views.count]);
    return result;
}

/* widen(address, array): fills a float32 array from as many bfloat16 numbers in memory. */
static PyObject *widen(PyObject *module, PyObject *arguments) {
    unsigned long long address;
    PyObject *array;
    Py_buffer view;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "KO:widen", &address, &array) ||
        open_view(array, &view, "f", PyBUF_WRITABLE))
        return NULL;
    const uint16_t *from = (const uint16_t *)(uintptr_t)address;
    uint32_t *to = view.buf;
    for (Py_ssize_t i = 0; i < view.len / (Py_ssize_t)sizeof(float); i++)
        to[i] = (uint32_t)from[i] << 16;
    PyBuffer_Release(&view);
    Py_RETURN_NONE;
}

/* ---- the module */

static PyObject *use_instructions(PyObject *module, PyObject *name) {
    (void)module;
    PyObject *bytes = PyUnicode_AsUTF8String(name);
    if (!bytes) return NULL;
    int found = 0;
    for (int i = 0; i < num_choices && !found; i++)
        if ((found = !strcmp(choices[i].name, PyBytes_AsString(bytes))))
            dot_four = choices[i].function;
    Py_DECREF(bytes);
    if (found) Py_RETURN_NONE;
    PyErr_Format(PyExc_ValueError, "this processor does not have the instructions %R", name);
    return NULL;
}

static PyObject *list_instructions(void) {
    PyObject *names = PyTuple_New(num_choices);
    for (int i = 0; names && i < num_choices; i++) {
        PyObject *name = PyUnicode_FromString(choices[i].name);
        if (!name || PyTuple_SetItem(names, i, name)) Py_CLEAR(names);
    }
    return names;
}

static PyMethodDef program_methods[] = {
    {"run", Program_run, METH_VARARGS, "run(rows, inputs, outputs)"}, {NULL, NULL, 0, NULL}};

static PyType_Slot program_slots[] = {{Py_tp_new, Program_new},
                                      {Py_tp_dealloc, Program_dealloc},
                                      {Py_tp_methods, program_methods},
                                      {0, NULL}};

static PyType_Spec program_spec = {"predictors.networks.kernels.Program", sizeof(Program), 0,
                                   Py_TPFLAGS_DEFAULT, program_slots};

static PyMethodDef functions[] = {
    {"fade_token", fade_token, METH_VARARGS,
     "fade_token(fading_FE, decays_F, num_counts, used, logits_E, means_FE)"},
    {"share_chosen", share_chosen, METH_VARARGS, "share_chosen(used, logits_E, shares_E)"},
    {"rank", rank, METH_VARARGS, "rank(scores_HE, top_k, probability_HE)"},
    {"are_finite", are_finite, METH_O, "are_finite(array)"},
    {"decay", decay, METH_VARARGS, "decay(sums, decays, added)"},
    {"widen", widen, METH_VARARGS, "widen(address, array)"},
    {"use_instructions", use_instructions, METH_O, "use_instructions(name)"},
    {NULL, NULL, 0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "kernels", NULL, -1, functions, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_kernels(void) {
    find_choices();
    PyObject *module = PyModule_Create(&definition);
    if (!module) return NULL;
    PyObject *type = PyType_FromSpec(&program_spec);
    PyObject *names = list_instructions();
    if (!type || !names || PyModule_AddObjectRef(module, "Program", type) ||
        PyModule_AddObjectRef(module, "INSTRUCTIONS", names))
        Py_CLEAR(module);
    Py_XDECREF(type);
    Py_XDECREF(names);
    return module;
}
