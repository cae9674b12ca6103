/* Puts one layer of a chunk's stored KV into a request's slots on the CPU: dequantise, turn K to its positions, scatter,
 * in one pass over memory. What the parts of a block mean is said in cache_store/codec.py, the turn in
 * engine/model.py. Products and sums are rounded one by one (-ffp-contract=off), so that the numbers are those of torch.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

enum { F32, F16, BF16, INT8, FP8, INT4 };
enum { GROUP = 32, MAX_DIM = 1024 };

#define INLINE static inline __attribute__((always_inline))
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define FOR_EACH_CPU __attribute__((target_clones("arch=x86-64-v3", "default")))
#else
#define FOR_EACH_CPU
#endif

static float fp8_values[256];

INLINE float from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

INLINE uint32_t to_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

INLINE uint16_t to_bf16(float value) {
    const uint32_t bits = to_bits(value), rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const uint32_t nan = (bits & 0x7fffffff) > 0x7f800000 ? 0xffffffff : 0;
    return (uint16_t)((rounded & ~nan) | (0x7fc0 & nan));
}

/* Element `at`, with the scale and the minimum that belong to it where the kind has them. */
INLINE float element(int kind, const uint8_t *restrict data, int64_t at, float scale, float least) {
    switch (kind) {
    case F32: return ((const float *)data)[at];
    case F16: return (float)((const _Float16 *)data)[at];
    case BF16: return from_bits((uint32_t)((const uint16_t *)data)[at] << 16);
    case INT8: return (float)((const int8_t *)data)[at] * scale;
    case FP8: return fp8_values[data[at]] * scale;
    default: return (float)(at & 1 ? data[at / 2] >> 4 : data[at / 2] & 15) * scale + least;
    }
}

INLINE void put(int kind, uint8_t *restrict slots, int64_t at, float value) {
    switch (kind) {
    case F32: ((float *)slots)[at] = value; break;
    case F16: ((_Float16 *)slots)[at] = (_Float16)value; break;
    default: ((uint16_t *)slots)[at] = to_bf16(value);
    }
}

typedef struct {
    const uint8_t *k, *v;
    const void *k_scales, *v_scales, *k_mins, *v_mins;
    const float *cos, *sin;
    uint8_t *keys, *values;
    int64_t head_stride; /* elements between two heads of the slots */
    int kv_heads, tokens, head_dim, half;
} Job;

INLINE void spread(float *restrict out, const _Float16 *restrict values, int count, int repeat) {
    for (int i = 0; i < count; i++) out[i] = (float)values[i / repeat];
}

INLINE void turn_row(int kind, int slot_kind, const uint8_t *restrict k, int64_t at, uint8_t *restrict keys, int64_t to,
                     const float *restrict cosine, const float *restrict sine, const float *restrict scales,
                     const float *restrict mins, int half) {
    for (int i = 0; i < half; i++) {
        const float low = element(kind, k, at + i, scales[i], mins[i]);
        const float high = element(kind, k, at + half + i, scales[half + i], mins[half + i]);
        put(slot_kind, keys, to + i, low * cosine[i] - high * sine[i]);
        put(slot_kind, keys, to + half + i, high * cosine[i] + low * sine[i]);
    }
}

INLINE void place_keys(const Job *job, int kind, int slot_kind, int head, int half) {
    const int dim = job->head_dim, groups = (job->tokens + GROUP - 1) / GROUP;
    float scales[MAX_DIM], mins[MAX_DIM];
    if (kind == INT8 || kind == FP8) memcpy(scales, (const float *)job->k_scales + (int64_t)head * dim, 4 * (size_t)dim);
    for (int token = 0; token < job->tokens; token++) {
        if (kind == INT4 && token % GROUP == 0) {
            const int64_t group = ((int64_t)head * groups + token / GROUP) * dim;
            spread(scales, (const _Float16 *)job->k_scales + group, dim, 1);
            spread(mins, (const _Float16 *)job->k_mins + group, dim, 1);
        }
        const int64_t at = ((int64_t)head * job->tokens + token) * dim;
        const int64_t to = head * job->head_stride + (int64_t)token * dim;
        const int64_t angle = (int64_t)token * half;
        turn_row(kind, slot_kind, job->k, at, job->keys, to, job->cos + angle, job->sin + angle, scales, mins, half);
        for (int i = 2 * half; i < dim; i++)
            put(slot_kind, job->keys, to + i, element(kind, job->k, at + i, scales[i], mins[i]));
    }
}

INLINE void place_values(const Job *job, int kind, int slot_kind, int head) {
    const int dim = job->head_dim, groups = (dim + GROUP - 1) / GROUP;
    const int64_t first = (int64_t)head * job->tokens * dim, target = head * job->head_stride;
    if (kind == slot_kind) { /* as they are */
        const int64_t size = kind == F32 ? 4 : 2;
        memcpy(job->values + size * target, job->v + size * first, (size_t)(size * job->tokens * dim));
        return;
    }
    float scales[MAX_DIM], mins[MAX_DIM];
    for (int token = 0; token < job->tokens; token++) {
        const int64_t row = (int64_t)head * job->tokens + token, at = row * dim, to = target + (int64_t)token * dim;
        if (kind == INT4) {
            spread(scales, (const _Float16 *)job->v_scales + row * groups, dim, GROUP);
            spread(mins, (const _Float16 *)job->v_mins + row * groups, dim, GROUP);
            for (int i = 0; i < dim; i++)
                put(slot_kind, job->values, to + i, element(kind, job->v, at + i, scales[i], mins[i]));
        } else {
            const float scale = kind == INT8 || kind == FP8 ? ((const float *)job->v_scales)[row] : 1.0f;
            for (int i = 0; i < dim; i++)
                put(slot_kind, job->values, to + i, element(kind, job->v, at + i, scale, 0.0f));
        }
    }
}

INLINE void place_as(const Job *job, int kind, int slot_kind) {
    for (int head = 0; head < job->kv_heads; head++) {
        place_keys(job, kind, slot_kind, head, job->half);
        place_values(job, kind, slot_kind, head);
    }
}

#define CASES(kind)                                                    \
    case kind:                                                         \
        if (slot_kind == F32) place_as(job, kind, F32);                \
        else if (slot_kind == F16) place_as(job, kind, F16);           \
        else place_as(job, kind, BF16);                                \
        break;

FOR_EACH_CPU static void run(const Job *job, int kind, int slot_kind) {
    switch (kind) {
        CASES(F32)
        CASES(F16)
        CASES(BF16)
        CASES(INT8)
        CASES(FP8)
        CASES(INT4)
    }
}

static PyObject *place(PyObject *self, PyObject *arguments) {
    Job job;
    int kind, slot_kind;
    unsigned long long k, v, k_scales, v_scales, k_mins, v_mins, cosine, sine, keys, values;
    long long head_stride;
    if (!PyArg_ParseTuple(arguments, "iiKKKKKKKKKKLiiii", &kind, &slot_kind, &k, &v, &k_scales, &v_scales, &k_mins, &v_mins,
                          &cosine, &sine, &keys, &values, &head_stride, &job.kv_heads, &job.tokens, &job.head_dim,
                          &job.half))
        return NULL;
    if (kind < F32 || kind > INT4 || slot_kind < F32 || slot_kind > BF16 || job.head_dim > MAX_DIM ||
        2 * job.half > job.head_dim) {
        PyErr_SetString(PyExc_ValueError, "no such kind of elements, or heads that are too wide");
        return NULL;
    }
    job.k = (const uint8_t *)(uintptr_t)k;
    job.v = (const uint8_t *)(uintptr_t)v;
    job.k_scales = (const void *)(uintptr_t)k_scales;
    job.v_scales = (const void *)(uintptr_t)v_scales;
    job.k_mins = (const void *)(uintptr_t)k_mins;
    job.v_mins = (const void *)(uintptr_t)v_mins;
    job.cos = (const float *)(uintptr_t)cosine;
    job.sin = (const float *)(uintptr_t)sine;
    job.keys = (uint8_t *)(uintptr_t)keys;
    job.values = (uint8_t *)(uintptr_t)values;
    job.head_stride = head_stride;
    Py_BEGIN_ALLOW_THREADS
    run(&job, kind, slot_kind);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"place", place, METH_VARARGS, "See engine/placing.py, the only caller."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_place", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__place(void) {
    for (int code = 0; code < 256; code++) {
        const int exponent = (code >> 3) & 15, mantissa = code & 7;
        float value = exponent ? ldexpf(1.0f + (float)mantissa / 8, exponent - 7) : ldexpf((float)mantissa / 8, -6);
        if (exponent == 15 && mantissa == 7) value = NAN;
        fp8_values[code] = code & 128 ? -value : value;
    }
    return PyModule_Create(&module);
}
