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
    uint32_t bits = to_bits(value);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return (uint16_t)(value != value ? 0x7fc0 : rounded);
}

/* `count` elements from element `at` on, each with its scale and minimum where the kind has them. */
INLINE void decode(float *restrict row, int kind, const uint8_t *restrict data, int64_t at, int count,
                   const float *restrict scales, const float *restrict mins) {
    switch (kind) {
    case F32:
        memcpy(row, data + 4 * at, 4 * (size_t)count);
        break;
    case F16: {
        const _Float16 *source = (const _Float16 *)data + at;
        for (int i = 0; i < count; i++) row[i] = (float)source[i];
        break;
    }
    case BF16: {
        const uint16_t *source = (const uint16_t *)data + at;
        for (int i = 0; i < count; i++) row[i] = from_bits((uint32_t)source[i] << 16);
        break;
    }
    case INT8: {
        const int8_t *source = (const int8_t *)data + at;
        for (int i = 0; i < count; i++) row[i] = (float)source[i] * scales[i];
        break;
    }
    case FP8:
        for (int i = 0; i < count; i++) row[i] = fp8_values[data[at + i]] * scales[i];
        break;
    default:
        for (int i = 0; i < count; i++) {
            uint8_t pair = data[(at + i) / 2];
            row[i] = (float)(i & 1 ? pair >> 4 : pair & 15) * scales[i] + mins[i];
        }
    }
}

INLINE void store(uint8_t *restrict slots, int kind, int64_t at, const float *restrict row, int count) {
    if (kind == F32) {
        memcpy(slots + 4 * at, row, 4 * (size_t)count);
    } else if (kind == F16) {
        _Float16 *target = (_Float16 *)slots + at;
        for (int i = 0; i < count; i++) target[i] = (_Float16)row[i];
    } else {
        uint16_t *target = (uint16_t *)slots + at;
        for (int i = 0; i < count; i++) target[i] = to_bf16(row[i]);
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

INLINE void place_as(const Job *job, int kind, int slot_kind) {
    const int dim = job->head_dim, half = job->half, tokens = job->tokens;
    const int k_groups = (tokens + GROUP - 1) / GROUP, v_groups = (dim + GROUP - 1) / GROUP;
    float k_scales[MAX_DIM], k_mins[MAX_DIM], v_scales[MAX_DIM], v_mins[MAX_DIM], row[MAX_DIM], turned[MAX_DIM];
    for (int head = 0; head < job->kv_heads; head++) {
        for (int token = 0; token < tokens; token++) {
            const int64_t at = ((int64_t)head * tokens + token) * dim;
            const int64_t to = head * job->head_stride + (int64_t)token * dim;
            if (kind == INT8 || kind == FP8) {
                if (token == 0) memcpy(k_scales, (const float *)job->k_scales + (int64_t)head * dim, 4 * (size_t)dim);
                const float scale = ((const float *)job->v_scales)[(int64_t)head * tokens + token];
                for (int i = 0; i < dim; i++) v_scales[i] = scale;
            } else if (kind == INT4) {
                if (token % GROUP == 0) {
                    const int64_t group = ((int64_t)head * k_groups + token / GROUP) * dim;
                    spread(k_scales, (const _Float16 *)job->k_scales + group, dim, 1);
                    spread(k_mins, (const _Float16 *)job->k_mins + group, dim, 1);
                }
                const int64_t group = ((int64_t)head * tokens + token) * v_groups;
                spread(v_scales, (const _Float16 *)job->v_scales + group, dim, GROUP);
                spread(v_mins, (const _Float16 *)job->v_mins + group, dim, GROUP);
            }
            decode(row, kind, job->k, at, dim, k_scales, k_mins);
            const float *cosine = job->cos + (int64_t)token * half, *sine = job->sin + (int64_t)token * half;
            for (int i = 0; i < half; i++) {
                const float low = row[i], high = row[half + i];
                turned[i] = low * cosine[i] - high * sine[i];
                turned[half + i] = high * cosine[i] + low * sine[i];
            }
            for (int i = 2 * half; i < dim; i++) turned[i] = row[i];
            store(job->keys, slot_kind, to, turned, dim);
            if (kind == slot_kind) { /* V as it is */
                const int size = kind == F32 ? 4 : 2;
                memcpy(job->values + size * to, job->v + size * at, (size_t)size * dim);
                continue;
            }
            decode(row, kind, job->v, at, dim, v_scales, v_mins);
            store(job->values, slot_kind, to, row, dim);
        }
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
