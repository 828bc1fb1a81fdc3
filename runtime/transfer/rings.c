/* Threads that read experts' bytes into slots, without the interpreter's lock.
 *
 * One thread of Python submits transfers and takes what has arrived. Threads here read, and touch no
 * Python object: a read neither waits for the interpreter nor makes it wait. A transfer is a list of
 * parts, byte ranges of files or of memory, each with the address that it goes to. `file_ring.py`
 * makes the lists and answers for the memory.
 */
#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "checksums are computed on little-endian machines only; rings of Python threads do without"
#endif

#define BLOCK 4096             /* of direct reads, as in `files.py` */
#define BUFFER_BYTES (2 << 20) /* of each thread: a large page; more at once is not faster */
#define LINE 64                /* of the processor's caches */
#define FETCHED_AHEAD 1024     /* bytes of a copy's source */
#define SLICE_SECONDS 0.05     /* between two looks at signals (Ctrl-C) during a wait */
#define MOST_SECONDS 1e9       /* of a wait: thirty years; more would be no time of the system's */

enum { END_OF_FILE = -1, DAMAGED = -2 }; /* statuses; those above 0 are errno's */
enum { INTERRUPTED = -4 };               /* status of a transfer that goes on later */
enum { CHECKED = 1, DROPPED = 2, ALL_FLAGS = 3 }; /* flags of a part */

/* Forks of this process since it loaded the module. Threads and locks do not survive one. */
static unsigned num_forks;

static void count_fork(void) { num_forks++; }

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

/* ---- checksums: XXH3, 64 bits, of more than 240 bytes, with seed 0
 *
 * After the specification by Yann Collet (github.com/Cyan4973/xxHash, doc/xxhash_spec.md). */

#define LEAST_CHECKED 241
#define STRIPE 64
#define STRIPES_OF_BLOCK 16
#define SECRET_BYTES 192

static const uint64_t PRIME32_1 = 0x9E3779B1, PRIME32_2 = 0x85EBCA77, PRIME32_3 = 0xC2B2AE3D;
static const uint64_t PRIME64_1 = 0x9E3779B185EBCA87, PRIME64_2 = 0xC2B2AE3D27D4EB4F,
                      PRIME64_3 = 0x165667B19E3779F9, PRIME64_4 = 0x85EBCA77C2B2AE63,
                      PRIME64_5 = 0x27D4EB2F165667C5;

static const uint8_t SECRET[SECRET_BYTES] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

typedef uint64_t Pair __attribute__((vector_size(16)));

static inline uint64_t load(const uint8_t *from) {
    uint64_t value;
    memcpy(&value, from, sizeof value);
    return value;
}

static inline Pair load_pair(const uint8_t *from) { return (Pair){load(from), load(from + 8)}; }

/* The product of each number's lower and upper 32 bits. */
static inline Pair multiply_halves(Pair pair) {
#ifdef __SSE2__
    return (Pair)_mm_mul_epu32((__m128i)pair, (__m128i)(pair >> 32));
#else
    return (pair & 0xFFFFFFFF) * (pair >> 32);
#endif
}

static inline void add_stripe(Pair sums[4], const uint8_t *input, const uint8_t *secret) {
    for (int i = 0; i < 4; i++) {
        Pair values = load_pair(input + 16 * i), swapped = {values[1], values[0]};
        sums[i] += swapped + multiply_halves(values ^ load_pair(secret + 16 * i));
    }
}

static inline void scramble(Pair sums[4]) {
    const uint8_t *secret = SECRET + SECRET_BYTES - STRIPE;
    for (int i = 0; i < 4; i++)
        sums[i] = (sums[i] ^ (sums[i] >> 47) ^ load_pair(secret + 16 * i)) * PRIME32_1;
}

static uint64_t checksum(const uint8_t *input, size_t size) {
    Pair sums[4] = {{PRIME32_3, PRIME64_1},
                    {PRIME64_2, PRIME64_3},
                    {PRIME64_4, PRIME32_2},
                    {PRIME64_5, PRIME32_1}};
    size_t num_stripes = (size - 1) / STRIPE, n = 0;
    for (; n + STRIPES_OF_BLOCK <= num_stripes; n += STRIPES_OF_BLOCK) {
        for (size_t i = 0; i < STRIPES_OF_BLOCK; i++)
            add_stripe(sums, input + (n + i) * STRIPE, SECRET + 8 * i);
        scramble(sums);
    }
    for (size_t i = 0; n + i < num_stripes; i++)
        add_stripe(sums, input + (n + i) * STRIPE, SECRET + 8 * i);
    add_stripe(sums, input + size - STRIPE, SECRET + SECRET_BYTES - STRIPE - 7);
    uint64_t result = size * PRIME64_1;
    for (int i = 0; i < 4; i++) {
        Pair mixed = sums[i] ^ load_pair(SECRET + 11 + 16 * i);
        unsigned __int128 product = (unsigned __int128)mixed[0] * mixed[1];
        result += (uint64_t)product ^ (uint64_t)(product >> 64);
    }
    result = (result ^ (result >> 37)) * 0x165667919E3779F9;
    return result ^ (result >> 32);
}

/* ---- reads */

/* Descriptors of an open file. */
typedef struct {
    int32_t buffered; /* for reads through the page cache */
    int32_t direct;   /* for reads past it; -1: none */
} File;

typedef struct {
    int32_t file;   /* number of the file; -1: none, the part is copied from memory */
    int32_t flags;
    int64_t offset; /* in the file; of a copy: the source's address */
    int64_t size;
    uint64_t address; /* of the target */
    uint64_t checksum;
} Part;

/* Parts that lie one after another in the file and in memory. */
typedef struct {
    File file;
    int is_copy, is_dropped;
    int64_t offset, size;
    uint8_t *target;
} Range;

static inline int64_t round_down(int64_t offset) { return offset / BLOCK * BLOCK; }
static inline int64_t round_up(int64_t offset) { return (offset + BLOCK - 1) / BLOCK * BLOCK; }

static int have_one_file(const Range *left, const Range *right) {
    return left->file.buffered == right->file.buffered && !left->is_copy && !right->is_copy;
}

/* Fills the target, whole blocks, from `offset` with `needed` bytes at least: the last block of a file
 * may be a part of one. */
static int read_blocks(int descriptor, int64_t offset, uint8_t *target, int64_t needed) {
    for (int64_t done = 0; done < needed;) {
        size_t missing = (size_t)(round_up(needed) - done);
        ssize_t size = pread(descriptor, target + done, missing, offset + done);
        if (size < 0 && errno == EINTR) continue;
        if (size < 0) return errno;
        if (size == 0) return END_OF_FILE;
        done += size;
        /* The file's end, or a network file system that returned less than requested: the next
         * direct read could not start here. Reads through the page cache can. */
        if (size % BLOCK && done < needed) return EINVAL;
    }
    return 0;
}

static int is_aligned(const Range *range) {
    return !(range->offset % BLOCK || range->size % BLOCK || (uintptr_t)range->target % BLOCK);
}

/* Memory of a thread, which exists once something is read into it. In one large page, as a slot of an
 * arena is: a virtual disk takes twice as long to fill small ones, each of which is a request's part
 * of its own. */
static uint8_t *make_buffer(void) {
    uint8_t *buffer = aligned_alloc(BUFFER_BYTES, BUFFER_BYTES);
#ifdef MADV_HUGEPAGE
    if (buffer) madvise(buffer, BUFFER_BYTES, MADV_HUGEPAGE); /* advice: without it, it is slower */
#endif
    return buffer;
}

/* Copies past the processor's caches. A plain copy would first read the lines that it overwrites: the
 * computation needs the memory's speed meanwhile. */
static void copy_past_caches(uint8_t *target, const uint8_t *source, size_t size) {
    size_t done = 0;
#ifdef __SSE2__
    done = (size_t)(-(uintptr_t)target % LINE);
    if (done > size) done = size;
    memcpy(target, source, done);
    for (; done + LINE <= size; done += LINE) {
        _mm_prefetch((const char *)source + done + FETCHED_AHEAD, _MM_HINT_T0);
        __m128i parts[LINE / sizeof(__m128i)];
        memcpy(parts, source + done, LINE);
        for (int i = 0; i < LINE / (int)sizeof *parts; i++)
            _mm_stream_si128((__m128i *)(target + done) + i, parts[i]);
    }
    _mm_sfence(); /* before another thread learns that the bytes are there */
#endif
    memcpy(target + done, source + done, size - done);
}

/* Reads the blocks that ranges lie in, and copies to each target what belongs there. */
static int read_through(const Range *ranges, int count, uint8_t *buffer) {
    int64_t end = ranges[count - 1].offset + ranges[count - 1].size;
    for (int64_t start = round_down(ranges->offset); start < end; start += BUFFER_BYTES) {
        int64_t stop = end < start + BUFFER_BYTES ? end : start + BUFFER_BYTES;
        int status = read_blocks(ranges->file.direct, start, buffer, stop - start);
        if (status) return status;
        for (int r = 0; r < count; r++) {
            const Range *range = &ranges[r];
            int64_t first = range->offset > start ? range->offset : start,
                    last = range->offset + range->size < stop ? range->offset + range->size : stop;
            if (first < last)
                copy_past_caches(range->target + (first - range->offset), buffer + (first - start),
                                 (size_t)(last - first));
        }
    }
    return 0;
}

static int read_buffered(const Range *range) {
    for (int64_t done = 0; done < range->size;) {
        ssize_t size = pread(range->file.buffered, range->target + done, (size_t)(range->size - done),
                             range->offset + done);
        if (size < 0 && errno == EINTR) continue;
        if (size < 0) return errno;
        if (size == 0) return END_OF_FILE;
        done += size;
    }
    if (range->is_dropped) {
        /* Whole pages: those at the edges are read again by their neighbours, seldom. */
        int64_t start = round_down(range->offset), end = round_up(range->offset + range->size);
        posix_fadvise(range->file.buffered, start, end - start, POSIX_FADV_DONTNEED);
    }
    return 0;
}

/* Fills ranges of one file that are read at once. */
static int read_ranges(const Range *ranges, int count, uint8_t *buffer) {
    if (ranges->is_copy) {
        copy_past_caches(ranges->target, (const uint8_t *)(uintptr_t)ranges->offset,
                         (size_t)ranges->size);
        return 0;
    }
    int status = EINVAL;
    if (ranges->file.direct >= 0 && count == 1 && is_aligned(ranges))
        status = read_blocks(ranges->file.direct, ranges->offset, ranges->target, ranges->size);
    else if (ranges->file.direct >= 0)
        status = read_through(ranges, count, buffer);
    /* Some file systems open for direct reads and refuse the reads themselves. */
    if (status != EINVAL) return status;
    status = 0;
    for (int r = 0; !status && r < count; r++) status = read_buffered(&ranges[r]);
    return status;
}

/* The number of ranges, from the first on, that are read at once: less than a block lies between. */
static int count_joined(const Range *ranges, int count) {
    int joined = 1;
    int64_t end = ranges->offset + ranges->size;
    for (; joined < count; joined++) {
        const Range *next = &ranges[joined];
        int64_t gap = next->offset - end;
        if (!have_one_file(ranges, next) || gap < 0 || gap >= BLOCK) break;
        end = next->offset + next->size;
    }
    return joined;
}

/* ---- what is shared with threads */

/* A lock and a condition, of a Python object and of threads that may outlive it. */
typedef struct {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int num_owners;
    unsigned num_forks; /* when it was made */
} Shared;

static void make_shared(Shared *shared) {
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&shared->changed, &attributes);
    pthread_condattr_destroy(&attributes);
    pthread_mutex_init(&shared->lock, NULL);
    shared->num_owners = 1;
    shared->num_forks = num_forks;
}

static void lock(Shared *shared) { pthread_mutex_lock(&shared->lock); }
static void unlock(Shared *shared) { pthread_mutex_unlock(&shared->lock); }

static void own(Shared *shared) { __atomic_add_fetch(&shared->num_owners, 1, __ATOMIC_RELAXED); }

/* Returns whether that was the last owner. */
static int disown(Shared *shared) {
    if (__atomic_sub_fetch(&shared->num_owners, 1, __ATOMIC_ACQ_REL)) return 0;
    pthread_cond_destroy(&shared->changed);
    pthread_mutex_destroy(&shared->lock);
    return 1;
}

/* In a child of this process, its threads are missing and its lock may be held for ever. */
static int is_foreign(const Shared *shared) { return shared->num_forks != num_forks; }

static int refuse_foreign(const Shared *shared) {
    if (!is_foreign(shared)) return 0;
    PyErr_SetString(PyExc_RuntimeError, "it belongs to the process that this one was forked from");
    return -1;
}

/* Waits without the interpreter's lock until the count is zero, or until it is not. Returns 1; 0 if
 * that took too long; -1 with an exception of a signal's handler. */
static int wait_for(Shared *shared, const int *count, int is_zero, double seconds) {
    double deadline = now() + (seconds < MOST_SECONDS ? seconds : MOST_SECONDS);
    for (;;) {
        double moment = now() + SLICE_SECONDS;
        if (moment > deadline) moment = deadline;
        struct timespec time = {(time_t)moment, (long)(1e9 * (moment - (double)(time_t)moment))};
        int is_met, failed = 0;
        Py_BEGIN_ALLOW_THREADS
        lock(shared);
        while (!(is_met = is_zero ? !*count : !!*count) && !failed)
            failed = pthread_cond_timedwait(&shared->changed, &shared->lock, &time);
        unlock(shared);
        Py_END_ALLOW_THREADS
        if (PyErr_CheckSignals()) return -1;
        if (is_met || moment == deadline) return is_met;
    }
}

/* ---- what has arrived */

typedef struct Arrival {
    struct Arrival *next;
    long long ticket;
    int status;
    double seconds; /* that the transfer took */
    double end;     /* on Python's `perf_counter` */
} Arrival;

typedef struct {
    Shared shared;
    int count;
    Arrival *first, **end;
} Inbox;

/* Puts the arrivals before those that are there. */
static void put_back(Inbox *inbox, Arrival *first, Arrival **end, int count) {
    lock(&inbox->shared);
    *end = inbox->first;
    if (!inbox->first) inbox->end = end;
    inbox->first = first;
    inbox->count += count;
    unlock(&inbox->shared);
}

/* Takes over the arrival. */
static void deliver(Inbox *inbox, Arrival *arrival) {
    arrival->next = NULL;
    arrival->end = now();
    lock(&inbox->shared);
    *inbox->end = arrival;
    inbox->end = &arrival->next;
    inbox->count++;
    unlock(&inbox->shared);
    pthread_cond_signal(&inbox->shared.changed);
}

static void disown_inbox(Inbox *inbox) {
    if (!disown(&inbox->shared)) return;
    for (Arrival *arrival = inbox->first, *next; arrival; arrival = next) {
        next = arrival->next;
        free(arrival);
    }
    free(inbox);
}

/* ---- readers */

typedef struct Job {
    Arrival arrival; /* first: a job that has been done is delivered as it */
    struct Job *next;
    double since;
    int high;
    int num_parts, num_ranges;
    int num_done;  /* ranges that have been read */
    Range *ranges; /* after the parts */
    Part parts[];
} Job;

typedef struct Reader {
    struct Ring *ring;
    struct Reader *next;
    Job *job;    /* that it reads for; NULL: none */
    int is_lost; /* it hangs, and another has taken its place */
} Reader;

typedef struct Ring {
    Shared shared;
    Inbox *inbox;
    Job *waiting[2]; /* requested ones, then the others */
    Job **ends[2];
    Reader *readers;
    int num_readers;
    int num_threads; /* readers that are not lost, once there are any */
    int is_closing;
    int has_cpus;
    cpu_set_t cpus;
} Ring;

/* Whether a requested transfer waits, for which one that nobody has requested is interrupted. */
static int is_urgent(Ring *ring) {
    lock(&ring->shared);
    int waits = ring->waiting[0] != NULL;
    unlock(&ring->shared);
    return waits;
}

static int run_job(Ring *ring, Job *job, uint8_t *buffer) {
    while (job->num_done < job->num_ranges) {
        if (!job->high && job->num_done && is_urgent(ring)) return INTERRUPTED;
        const Range *next = &job->ranges[job->num_done];
        int joined = count_joined(next, job->num_ranges - job->num_done);
        int status = read_ranges(next, joined, buffer);
        if (status) return status;
        job->num_done += joined;
    }
    for (int p = 0; p < job->num_parts; p++) {
        const Part *part = &job->parts[p];
        if (part->flags & CHECKED &&
            checksum((const uint8_t *)(uintptr_t)part->address, (size_t)part->size) !=
                part->checksum)
            return DAMAGED;
    }
    return 0;
}

static Job *next_job(Ring *ring) {
    for (int low = 0; low < 2; low++) {
        Job *job = ring->waiting[low];
        if (!job) continue;
        ring->waiting[low] = job->next;
        if (!job->next) ring->ends[low] = &ring->waiting[low];
        return job;
    }
    return NULL;
}

/* Lets a transfer that was interrupted go on after those that are requested. */
static void put_first(Ring *ring, Job *job) {
    if (ring->is_closing) {
        free(job);
        return;
    }
    job->next = ring->waiting[1];
    if (!job->next) ring->ends[1] = &job->next;
    ring->waiting[1] = job;
}

static void disown_ring(Ring *ring) {
    if (!disown(&ring->shared)) return;
    disown_inbox(ring->inbox);
    free(ring);
}

static void *run_reader(void *argument) {
    Reader *reader = argument;
    Ring *ring = reader->ring;
    uint8_t *buffer = make_buffer();
    lock(&ring->shared);
    while (!ring->is_closing && !reader->is_lost) {
        Job *job = reader->job = next_job(ring);
        if (!job) {
            pthread_cond_wait(&ring->shared.changed, &ring->shared.lock);
            continue;
        }
        job->since = now();
        unlock(&ring->shared);
        job->arrival.status = buffer ? run_job(ring, job, buffer) : ENOMEM;
        job->arrival.seconds += now() - job->since;
        lock(&ring->shared);
        reader->job = NULL;
        if (job->arrival.status == INTERRUPTED) {
            put_first(ring, job);
            continue;
        }
        unlock(&ring->shared);
        deliver(ring->inbox, &job->arrival);
        lock(&ring->shared);
    }
    Reader **place = &ring->readers;
    while (*place != reader) place = &(*place)->next;
    *place = reader->next;
    ring->num_readers--;
    pthread_cond_broadcast(&ring->shared.changed);
    unlock(&ring->shared);
    free(reader);
    free(buffer);
    disown_ring(ring);
    return NULL;
}

/* Returns an errno; called with the lock. */
static int start_reader(Ring *ring) {
    Reader *reader = calloc(1, sizeof *reader);
    pthread_attr_t attributes;
    if (!reader || pthread_attr_init(&attributes)) {
        free(reader);
        return ENOMEM;
    }
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    int status = 0;
    if (ring->has_cpus)
        status = pthread_attr_setaffinity_np(&attributes, sizeof ring->cpus, &ring->cpus);
    reader->ring = ring;
    own(&ring->shared);
    /* Signals are for Python's threads. A new thread inherits the mask. */
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_t thread;
    if (!status) status = pthread_create(&thread, &attributes, run_reader, reader);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    if (status) {
        disown(&ring->shared);
        free(reader);
        return status;
    }
    pthread_setname_np(thread, "moecast reads");
    reader->next = ring->readers;
    ring->readers = reader;
    ring->num_readers++;
    return 0;
}

/* Returns an errno if there is no reader in the end; called with the lock. */
static int start_readers(Ring *ring) {
    int num_working = 0, status = 0;
    for (Reader *reader = ring->readers; reader; reader = reader->next)
        num_working += !reader->is_lost;
    for (; num_working < ring->num_threads && !status; num_working += !status)
        status = start_reader(ring);
    return num_working ? 0 : status;
}

/* ---- `Arrivals` */

typedef struct {
    PyObject_HEAD
    Inbox *inbox;
} Arrivals;

static PyTypeObject *arrivals_type;

static void free_object(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(object);
    Py_DECREF(type);
}

static PyObject *Arrivals_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
    (void)keywords;
    if (!PyArg_ParseTuple(arguments, ":Arrivals")) return NULL;
    allocfunc make = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Arrivals *arrivals = (Arrivals *)make(type, 0); /* all zeros */
    if (!arrivals) return NULL;
    arrivals->inbox = calloc(1, sizeof *arrivals->inbox);
    if (!arrivals->inbox) {
        Py_DECREF((PyObject *)arrivals);
        return PyErr_NoMemory();
    }
    make_shared(&arrivals->inbox->shared);
    arrivals->inbox->end = &arrivals->inbox->first;
    return (PyObject *)arrivals;
}

static void Arrivals_dealloc(PyObject *object) {
    Inbox *inbox = ((Arrivals *)object)->inbox;
    if (inbox && !is_foreign(&inbox->shared)) disown_inbox(inbox);
    free_object(object);
}

static PyObject *Arrivals_post(PyObject *self, PyObject *arguments) {
    Inbox *inbox = ((Arrivals *)self)->inbox;
    Arrival one;
    if (!PyArg_ParseTuple(arguments, "Lid:post", &one.ticket, &one.status, &one.seconds) ||
        refuse_foreign(&inbox->shared))
        return NULL;
    Arrival *arrival = malloc(sizeof *arrival);
    if (!arrival) return PyErr_NoMemory();
    *arrival = one;
    deliver(inbox, arrival);
    Py_RETURN_NONE;
}

static PyObject *Arrivals_take(PyObject *self, PyObject *unused) {
    Inbox *inbox = ((Arrivals *)self)->inbox;
    (void)unused;
    if (refuse_foreign(&inbox->shared)) return NULL;
    lock(&inbox->shared);
    Arrival *first = inbox->first, **end = inbox->end;
    int count = inbox->count;
    inbox->first = NULL;
    inbox->end = &inbox->first;
    inbox->count = 0;
    unlock(&inbox->shared);
    /* Made without the lock: making objects may run any code. */
    PyObject *list = PyList_New(count);
    Arrival *arrival = first;
    for (int i = 0; list && i < count; i++, arrival = arrival->next) {
        PyObject *entry = Py_BuildValue("Lidd", arrival->ticket, arrival->status,
                                        arrival->seconds, arrival->end);
        if (!entry || PyList_SetItem(list, i, entry)) Py_CLEAR(list);
    }
    if (!list) {
        if (first) put_back(inbox, first, end, count);
        return NULL;
    }
    for (Arrival *next; first; first = next) {
        next = first->next;
        free(first);
    }
    return list;
}

static PyObject *Arrivals_wait(PyObject *self, PyObject *argument) {
    Inbox *inbox = ((Arrivals *)self)->inbox;
    double seconds = PyFloat_AsDouble(argument);
    if ((seconds == -1.0 && PyErr_Occurred()) || refuse_foreign(&inbox->shared)) return NULL;
    int has_some = wait_for(&inbox->shared, &inbox->count, 0, seconds);
    return has_some < 0 ? NULL : PyBool_FromLong(has_some);
}

static PyMethodDef arrivals_methods[] = {
    {"post", Arrivals_post, METH_VARARGS, "post(ticket, status, seconds)"},
    {"take", Arrivals_take, METH_NOARGS, "take()"},
    {"wait", Arrivals_wait, METH_O, "wait(seconds)"},
    {NULL, NULL, 0, NULL}};

static PyType_Slot arrivals_slots[] = {{Py_tp_new, Arrivals_new},
                                       {Py_tp_dealloc, Arrivals_dealloc},
                                       {Py_tp_methods, arrivals_methods},
                                       {0, NULL}};

static PyType_Spec arrivals_spec = {"runtime.transfer.rings.Arrivals", sizeof(Arrivals), 0,
                                    Py_TPFLAGS_DEFAULT, arrivals_slots};

/* ---- `FileRing` */

typedef struct {
    PyObject_HEAD
    Ring *ring;
    PyObject *memory; /* that targets lie in */
} FileRing;

static int read_cpus(Ring *ring, PyObject *cpus) {
    if (cpus == Py_None) return 0;
    PyObject *iterator = PyObject_GetIter(cpus), *item;
    CPU_ZERO(&ring->cpus);
    ring->has_cpus = 1;
    while (iterator && (item = PyIter_Next(iterator))) {
        long cpu = PyLong_AsLong(item);
        Py_DECREF(item);
        if (cpu < 0 || cpu >= CPU_SETSIZE) {
            if (!PyErr_Occurred()) PyErr_Format(PyExc_ValueError, "there is no processor %ld", cpu);
            break;
        }
        CPU_SET((int)cpu, &ring->cpus);
    }
    Py_XDECREF(iterator);
    return PyErr_Occurred() ? -1 : 0;
}

static PyObject *FileRing_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
    static char *names[] = {"arrivals", "num_threads", "cpus", "memory", NULL};
    PyObject *arrivals, *cpus = Py_None, *memory = Py_None;
    int num_threads;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "O!i|OO:FileRing", names, arrivals_type,
                                     &arrivals, &num_threads, &cpus, &memory))
        return NULL;
    if (num_threads < 1) {
        PyErr_SetString(PyExc_ValueError, "a ring needs a thread");
        return NULL;
    }
    Inbox *inbox = ((Arrivals *)arrivals)->inbox;
    allocfunc make = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    FileRing *file_ring = (FileRing *)make(type, 0); /* all zeros */
    if (!file_ring) return NULL;
    Ring *ring = file_ring->ring = calloc(1, sizeof *ring);
    if (!ring) {
        Py_DECREF((PyObject *)file_ring);
        return PyErr_NoMemory();
    }
    make_shared(&ring->shared);
    own(&inbox->shared);
    ring->inbox = inbox;
    ring->num_threads = num_threads;
    for (int low = 0; low < 2; low++) ring->ends[low] = &ring->waiting[low];
    Py_INCREF(memory);
    file_ring->memory = memory;
    if (refuse_foreign(&inbox->shared) || read_cpus(ring, cpus)) {
        Py_DECREF((PyObject *)file_ring);
        return NULL;
    }
    return (PyObject *)file_ring;
}

/* Drops what waits and lets the readers end; called with the lock. */
static void close_ring(Ring *ring) {
    ring->is_closing = 1;
    for (Job *job; (job = next_job(ring));) free(job);
    pthread_cond_broadcast(&ring->shared.changed);
}

static void FileRing_dealloc(PyObject *object) {
    FileRing *file_ring = (FileRing *)object;
    Ring *ring = file_ring->ring;
    int is_reading = 0;
    if (ring && !is_foreign(&ring->shared)) {
        lock(&ring->shared);
        close_ring(ring);
        for (Reader *reader = ring->readers; reader; reader = reader->next)
            is_reading |= reader->job != NULL;
        unlock(&ring->shared);
        disown_ring(ring);
    }
    /* What a read may still write to is never freed. */
    if (!is_reading) Py_XDECREF(file_ring->memory);
    free_object(object);
}

static int compare_parts(const void *left, const void *right) {
    const Part *a = left, *b = right;
    if (a->file != b->file) return a->file < b->file ? -1 : 1;
    return (a->offset > b->offset) - (a->offset < b->offset);
}

/* Makes ranges of the parts, in the order of the files. */
static void find_ranges(Job *job, const File *files) {
    qsort(job->parts, (size_t)job->num_parts, sizeof *job->parts, compare_parts);
    Range *last = NULL;
    for (int p = 0; p < job->num_parts; p++) {
        const Part *part = &job->parts[p];
        Range range = {{-1, -1},     part->file < 0, part->flags & DROPPED,
                       part->offset, part->size,     (uint8_t *)(uintptr_t)part->address};
        if (!range.is_copy) range.file = files[part->file];
        if (last && have_one_file(last, &range) && last->offset + last->size == range.offset &&
            last->target + last->size == range.target) {
            last->size += range.size;
        } else if (range.size) {
            last = &job->ranges[job->num_ranges++];
            *last = range;
        }
    }
}

static int is_valid(const Part *part, Py_ssize_t num_files) {
    return part->file >= -1 && part->file < num_files && part->offset >= 0 && part->size >= 0 &&
           !(part->flags & ~ALL_FLAGS) &&
           !(part->flags & CHECKED && part->size < LEAST_CHECKED);
}

/* Copies the parts; `base` is added to their addresses. */
static Job *make_job(long long ticket, const Py_buffer *parts, const Py_buffer *files,
                     uint64_t base) {
    Py_ssize_t count = parts->len / (Py_ssize_t)sizeof(Part),
               num_files = files->len / (Py_ssize_t)sizeof(File);
    if (parts->len % (Py_ssize_t)sizeof(Part) || files->len % (Py_ssize_t)sizeof(File) ||
        count > INT32_MAX) {
        PyErr_Format(PyExc_ValueError, "got %zd and %zd bytes; a part has %zu, a file has %zu",
                     parts->len, files->len, sizeof(Part), sizeof(File));
        return NULL;
    }
    Job *job = malloc(sizeof *job + (size_t)count * (sizeof(Part) + sizeof(Range)));
    if (!job) {
        PyErr_NoMemory();
        return NULL;
    }
    memset(job, 0, sizeof *job);
    job->arrival.ticket = ticket;
    job->num_parts = (int)count;
    job->ranges = (Range *)(job->parts + count);
    memcpy(job->parts, parts->buf, (size_t)parts->len);
    for (int p = 0; p < count; p++) {
        if (!is_valid(&job->parts[p], num_files)) {
            PyErr_Format(PyExc_ValueError, "part %d is invalid", p);
            free(job);
            return NULL;
        }
        job->parts[p].address += base;
    }
    find_ranges(job, files->buf);
    return job;
}

static int start_job(Ring *ring, Job *job, int high) {
    lock(&ring->shared);
    int is_closing = ring->is_closing, status = is_closing ? 0 : start_readers(ring);
    int is_started = !is_closing && !status;
    if (is_started) {
        job->high = high;
        *ring->ends[!high] = job;
        ring->ends[!high] = &job->next;
    }
    unlock(&ring->shared);
    if (is_started) {
        pthread_cond_signal(&ring->shared.changed);
        return 0;
    }
    free(job);
    errno = status;
    if (is_closing)
        PyErr_SetString(PyExc_RuntimeError, "the ring is closed");
    else
        PyErr_SetFromErrno(PyExc_OSError);
    return -1;
}

static PyObject *FileRing_submit(PyObject *self, PyObject *arguments) {
    Ring *ring = ((FileRing *)self)->ring;
    long long ticket;
    int high;
    Py_buffer parts, files;
    unsigned long long base = 0;
    if (!PyArg_ParseTuple(arguments, "Lpy*y*|K:submit", &ticket, &high, &parts, &files, &base))
        return NULL;
    Job *job = refuse_foreign(&ring->shared) ? NULL : make_job(ticket, &parts, &files, base);
    PyBuffer_Release(&parts);
    PyBuffer_Release(&files);
    if (!job || start_job(ring, job, high)) return NULL;
    Py_RETURN_NONE;
}

static PyObject *FileRing_cancel(PyObject *self, PyObject *argument) {
    Ring *ring = ((FileRing *)self)->ring;
    long long ticket = PyLong_AsLongLong(argument);
    if ((ticket == -1 && PyErr_Occurred()) || refuse_foreign(&ring->shared)) return NULL;
    Job *found = NULL;
    lock(&ring->shared);
    for (int low = 0; low < 2 && !found; low++)
        for (Job **place = &ring->waiting[low]; *place && !found; place = &(*place)->next) {
            if ((*place)->arrival.ticket != ticket) continue;
            found = *place;
            *place = found->next;
            if (!*place) ring->ends[low] = place;
            break;
        }
    unlock(&ring->shared);
    free(found);
    return PyBool_FromLong(found != NULL);
}

static PyObject *FileRing_running(PyObject *self, PyObject *unused) {
    Ring *ring = ((FileRing *)self)->ring;
    (void)unused;
    if (refuse_foreign(&ring->shared)) return NULL;
    lock(&ring->shared);
    struct {
        long long ticket;
        double since;
    } *running = malloc((size_t)(ring->num_readers + 1) * sizeof *running);
    int count = 0;
    for (Reader *reader = ring->readers; running && reader; reader = reader->next) {
        if (!reader->job) continue;
        running[count].ticket = reader->job->arrival.ticket;
        running[count++].since = reader->job->since;
    }
    unlock(&ring->shared);
    PyObject *list = running ? PyList_New(count) : PyErr_NoMemory();
    double moment = now();
    for (int i = 0; list && i < count; i++) {
        PyObject *entry = Py_BuildValue("Ld", running[i].ticket, moment - running[i].since);
        if (!entry || PyList_SetItem(list, i, entry)) Py_CLEAR(list);
    }
    free(running);
    return list;
}

static PyObject *FileRing_replace_thread(PyObject *self, PyObject *argument) {
    Ring *ring = ((FileRing *)self)->ring;
    long long ticket = PyLong_AsLongLong(argument);
    if ((ticket == -1 && PyErr_Occurred()) || refuse_foreign(&ring->shared)) return NULL;
    lock(&ring->shared);
    for (Reader *reader = ring->readers; reader; reader = reader->next)
        if (reader->job && reader->job->arrival.ticket == ticket) reader->is_lost = 1;
    int status = ring->is_closing ? 0 : start_readers(ring);
    unlock(&ring->shared);
    if (!status) Py_RETURN_NONE;
    errno = status;
    return PyErr_SetFromErrno(PyExc_OSError);
}

static PyObject *FileRing_close(PyObject *self, PyObject *argument) {
    Ring *ring = ((FileRing *)self)->ring;
    double seconds = PyFloat_AsDouble(argument);
    if ((seconds == -1.0 && PyErr_Occurred()) || refuse_foreign(&ring->shared)) return NULL;
    lock(&ring->shared);
    close_ring(ring);
    unlock(&ring->shared);
    int has_ended = wait_for(&ring->shared, &ring->num_readers, 1, seconds);
    return has_ended < 0 ? NULL : PyBool_FromLong(has_ended);
}

static PyMethodDef ring_methods[] = {
    {"submit", FileRing_submit, METH_VARARGS, "submit(ticket, high, parts, files, base=0)"},
    {"cancel", FileRing_cancel, METH_O, "cancel(ticket)"},
    {"running", FileRing_running, METH_NOARGS, "running()"},
    {"replace_thread", FileRing_replace_thread, METH_O, "replace_thread(ticket)"},
    {"close", FileRing_close, METH_O, "close(seconds)"},
    {NULL, NULL, 0, NULL}};

static PyType_Slot ring_slots[] = {{Py_tp_new, FileRing_new},
                                   {Py_tp_dealloc, FileRing_dealloc},
                                   {Py_tp_methods, ring_methods},
                                   {0, NULL}};

static PyType_Spec ring_spec = {"runtime.transfer.rings.FileRing", sizeof(FileRing), 0,
                                Py_TPFLAGS_DEFAULT, ring_slots};

/* ---- the module */

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "rings", NULL, -1, NULL, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_rings(void) {
    if (pthread_atfork(NULL, NULL, count_fork)) return PyErr_NoMemory();
    PyObject *module = PyModule_Create(&definition);
    if (!module) return NULL;
    arrivals_type = (PyTypeObject *)PyType_FromSpec(&arrivals_spec);
    PyObject *ring_type = PyType_FromSpec(&ring_spec);
    if (!arrivals_type || !ring_type ||
        PyModule_AddObjectRef(module, "Arrivals", (PyObject *)arrivals_type) ||
        PyModule_AddObjectRef(module, "FileRing", ring_type))
        Py_CLEAR(module);
    Py_XDECREF(ring_type);
    return module;
}
