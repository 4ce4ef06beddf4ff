/* One token for each of a few rows through a Llama, Qwen2 or Qwen3, on a CPU, in one call.
 *
 * A new token reads every weight once, so its time is that of memory reads and of the work
 * between the matrix products. Weights are read as they are stored, 4, 6 or 8 bits each, or as the
 * model's own float32 parameters; keys and values are float32. All sums are float32.
 *
 *   hidden ─▶ [ norm, q k v │ rotate, write │ attend │ merge │ o │ norm, gate up │ down ] x L ─▶ logits
 *                           └────────────────── a barrier at each bar ──────────────────┘
 *
 * The order of a row's sums does not depend on the number of rows. `native.py` compiles this
 * file and describes its structures to Python; the two must be changed together.
 *
 * Axes: R rows (one token each), T tiles of 16 outputs, G groups of 32 inputs, D head dimension.
 */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define TILE 16  /* outputs in a vector */
#define GROUP 32 /* inputs that share a scale */
#define SIX_ROWS (GROUP / 2 + GROUP / 4) /* vectors of bytes in a group of 6 bits */
#define KEYS 64  /* keys scored before their values are read: both stay in L1 */
#define INLINE static inline __attribute__((always_inline))

#if defined(__AVX512F__)
#define MAX_ROWS 8 /* rows per pass over a tile: as many as fit in registers */
#else
#define MAX_ROWS 2
#endif

typedef float vec __attribute__((vector_size(64), aligned(4), may_alias));
typedef float vec8 __attribute__((vector_size(32)));
typedef float vec4 __attribute__((vector_size(16)));
typedef int32_t ivec __attribute__((vector_size(64), aligned(4)));

enum { FLOAT32 = 0, FOUR_BITS = 1, EIGHT_BITS = 2, SIX_BITS = 3 };

typedef struct {
    int64_t kind;
    int64_t num_outputs;
    int64_t num_inputs;
    const void *weights; /* FLOAT32: outputs x inputs. Packed: see packing.py */
    const float *scales; /* x 16: T x G x (scale, zero) for 4 bits, x 2 halves for 6, x 1 for 8 */
    const float *bias;   /* or NULL */
    const float *lora_a; /* rank x inputs, or NULL */
    const float *lora_b; /* outputs x rank */
    int64_t rank;
    float lora_scale;
} Matrix;

typedef struct {
    const float *input_norm;
    const float *post_norm;
    const float *query_norm; /* Qwen3, else NULL */
    const float *key_norm;
    Matrix query, key, value, output, gate, up, down;
} Layer;

typedef struct {
    int64_t num_layers;
    int64_t width;
    int64_t inner;
    int64_t num_heads;
    int64_t num_kv_heads;
    int64_t head_dim;
    int64_t num_slots;
    float epsilon;
    float scaling;
    const Layer *layers;
    const float *norm;
    Matrix head;
    float *cache; /* layers x (keys, values) x kv heads x slots x head dim */
} Model;

typedef struct {
    int64_t num_threads;
    int64_t num_rows;
    float *hidden;       /* R x width: embeddings; overwritten */
    const float *cosine; /* R x head dim */
    const float *sine;
    const int64_t *slots; /* R: slot of a row's own key and value */
    int64_t num_parts;    /* spans of slots that are read */
    const int64_t *part_starts;
    const int64_t *part_lengths;
    const int64_t *first_readers; /* parts + 1: readers of part p are first_readers[p] and on */
    const int64_t *readers;       /* rows */
    float *logits;                /* R x outputs of the head */
} Step;

/* --- vectors ------------------------------------------------------------------------------------ */

INLINE vec load(const float *from) { return *(const vec *)from; }

INLINE void store(float *to, vec values) { *(vec *)to = values; }

INLINE vec splat(float value) { return (vec){} + value; }

INLINE vec either(ivec is_first, vec first, vec second) {
    return (vec)((is_first & (ivec)first) | (~is_first & (ivec)second));
}

INLINE float sum_of(vec values) {
    vec8 halves[2];
    memcpy(halves, &values, sizeof values);
    vec8 half = halves[0] + halves[1];
    vec4 quarters[2];
    memcpy(quarters, &half, sizeof half);
    vec4 quarter = quarters[0] + quarters[1];
    return (quarter[0] + quarter[2]) + (quarter[1] + quarter[3]);
}

/* e to the x: 2 to the whole part by the exponent's bits, the rest, at most ln 2 / 2, by Taylor's
 * polynomial. Below -87 it stays at e to the -87, negligible in any sum. */
INLINE vec exponential(vec x) {
    x = either(x < -87.0f, splat(-87.0f), x);
    x = either(x > 88.0f, splat(88.0f), x);
    vec scaled = x * 1.44269504088896341f;
    scaled += either(scaled < 0.0f, splat(-0.5f), splat(0.5f));
    ivec whole = __builtin_convertvector(scaled, ivec);
    vec n = __builtin_convertvector(whole, vec);
    vec r = x - n * 0.693359375f; /* ln 2 in two parts, the first exact for any n */
    r = r - n * -2.12194440e-4f;
    vec p = r * (1.0f / 5040) + (1.0f / 720);
    p = p * r + (1.0f / 120);
    p = p * r + (1.0f / 24);
    p = p * r + (1.0f / 6);
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    return p * (vec)((whole + 127) << 23);
}

/* --- products with a matrix ------------------------------------------------------------------------ */

/* 16 bytes hold two nibbles each: input j of a group in the low one, input j + 16 in the high one. */
INLINE void nibbles(const uint8_t *bytes, vec *low, vec *high) {
#if defined(__AVX512F__)
    const __m512 values = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
    __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)bytes));
    *low = (vec)_mm512_permutexvar_ps(wide, values); /* looks at four bits only */
    *high = (vec)_mm512_permutexvar_ps(_mm512_srli_epi32(wide, 4), values);
#elif defined(__AVX2__)
    __m256i eight = _mm256_set1_epi32(8), mask = _mm256_set1_epi32(15);
    __m256 halves[4];
    for (int half = 0; half < 2; half++) {
        __m256i wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(bytes + 8 * half)));
        __m256i first = _mm256_sub_epi32(_mm256_and_si256(wide, mask), eight);
        __m256i second = _mm256_sub_epi32(_mm256_srli_epi32(wide, 4), eight);
        halves[half] = _mm256_cvtepi32_ps(first);
        halves[2 + half] = _mm256_cvtepi32_ps(second);
    }
    memcpy(low, halves, sizeof *low);
    memcpy(high, halves + 2, sizeof *high);
#else
    for (int lane = 0; lane < TILE; lane++) {
        (*low)[lane] = (float)((bytes[lane] & 15) - 8);
        (*high)[lane] = (float)((bytes[lane] >> 4) - 8);
    }
#endif
}

INLINE vec whole_bytes(const int8_t *bytes) {
#if defined(__AVX512F__)
    return (vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)bytes)));
#elif defined(__AVX2__)
    __m256 halves[2];
    for (int half = 0; half < 2; half++)
        halves[half] = _mm256_cvtepi32_ps(
            _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(bytes + 8 * half))));
    vec values;
    memcpy(&values, halves, sizeof values);
    return values;
#else
    vec values;
    for (int lane = 0; lane < TILE; lane++) values[lane] = bytes[lane];
    return values;
#endif
}

/* 16 bytes of nibbles as above, and 16 bytes of which two bits from `shift` on belong to the low ones,
 * and two bits from `shift + 4` on to the high ones. */
INLINE void sixes(const uint8_t *bytes, const uint8_t *tops, const int shift, vec *low, vec *high) {
#if defined(__AVX512F__)
    const __m512 ones = _mm512_setr_ps(-32, -31, -30, -29, -28, -27, -26, -25, -24, -23, -22, -21, -20,
                                       -19, -18, -17);
    const __m512 sixteens = _mm512_setr_ps(0, 16, 32, 48, 0, 16, 32, 48, 0, 16, 32, 48, 0, 16, 32, 48);
    __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)bytes));
    __m512i top = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)tops));
    *low = (vec)_mm512_permutexvar_ps(wide, ones) +
           (vec)_mm512_permutexvar_ps(_mm512_srli_epi32(top, shift), sixteens);
    *high = (vec)_mm512_permutexvar_ps(_mm512_srli_epi32(wide, 4), ones) +
            (vec)_mm512_permutexvar_ps(_mm512_srli_epi32(top, shift + 4), sixteens);
#elif defined(__AVX2__)
    __m256i offset = _mm256_set1_epi32(32), mask = _mm256_set1_epi32(15), three = _mm256_set1_epi32(3);
    __m256 halves[4];
    for (int half = 0; half < 2; half++) {
        __m256i wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(bytes + 8 * half)));
        __m256i top = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(tops + 8 * half)));
        __m256i more1 = _mm256_slli_epi32(_mm256_and_si256(_mm256_srli_epi32(top, shift), three), 4);
        __m256i more2 = _mm256_slli_epi32(_mm256_and_si256(_mm256_srli_epi32(top, shift + 4), three), 4);
        __m256i first = _mm256_or_si256(_mm256_and_si256(wide, mask), more1);
        __m256i second = _mm256_or_si256(_mm256_srli_epi32(wide, 4), more2);
        halves[half] = _mm256_cvtepi32_ps(_mm256_sub_epi32(first, offset));
        halves[2 + half] = _mm256_cvtepi32_ps(_mm256_sub_epi32(second, offset));
    }
    memcpy(low, halves, sizeof *low);
    memcpy(high, halves + 2, sizeof *high);
#else
    for (int lane = 0; lane < TILE; lane++) {
        (*low)[lane] = (float)(((bytes[lane] & 15) | (tops[lane] >> shift & 3) << 4) - 32);
        (*high)[lane] = (float)((bytes[lane] >> 4 | (tops[lane] >> (shift + 4) & 3) << 4) - 32);
    }
#endif
}

/* Weights are (q - 8) * scale + zero, so a group's sum is scale * sum(q' x) + zero * sum(x). */
INLINE void four_bits(const Matrix *matrix, int64_t tile, const float *x, const float *sums,
                      const int num_rows, vec *y) {
    int64_t num_inputs = matrix->num_inputs, num_groups = num_inputs / GROUP;
    const uint8_t *bytes = (const uint8_t *)matrix->weights + tile * num_groups * GROUP / 2 * TILE;
    const float *scales = matrix->scales + tile * num_groups * 2 * TILE;
    vec total[MAX_ROWS] = {};
    for (int64_t group = 0; group < num_groups; group++) {
        vec first[MAX_ROWS] = {}, second[MAX_ROWS] = {};
        for (int j = 0; j < GROUP / 2; j++) {
            vec low, high;
            nibbles(bytes + j * TILE, &low, &high);
            for (int row = 0; row < num_rows; row++) {
                first[row] += low * x[row * num_inputs + j];
                second[row] += high * x[row * num_inputs + GROUP / 2 + j];
            }
        }
        vec scale = load(scales), zero = load(scales + TILE);
        for (int row = 0; row < num_rows; row++) {
            total[row] += scale * (first[row] + second[row]);
            total[row] += zero * sums[row * num_groups + group];
        }
        bytes += GROUP / 2 * TILE;
        scales += 2 * TILE;
        x += GROUP;
    }
    for (int row = 0; row < num_rows; row++) y[row] = total[row];
}

/* A group has 16 x 16 bytes of nibbles, then 8 x 16 bytes of the two upper bits of inputs j, j + 8, j + 16
 * and j + 24. Its two halves have a scale each. */
INLINE void six_bits(const Matrix *matrix, int64_t tile, const float *x, const int num_rows, vec *y) {
    int64_t num_inputs = matrix->num_inputs, num_groups = num_inputs / GROUP;
    const uint8_t *bytes = (const uint8_t *)matrix->weights + tile * num_groups * SIX_ROWS * TILE;
    const float *scales = matrix->scales + tile * num_groups * 2 * TILE;
    vec total[MAX_ROWS] = {};
    for (int64_t group = 0; group < num_groups; group++) {
        vec first[MAX_ROWS] = {}, second[MAX_ROWS] = {};
        const uint8_t *tops = bytes + GROUP / 2 * TILE;
        for (int j = 0; j < GROUP / 4; j++) {
            vec low, high, next_low, next_high;
            sixes(bytes + j * TILE, tops + j * TILE, 0, &low, &high);
            sixes(bytes + (GROUP / 4 + j) * TILE, tops + j * TILE, 2, &next_low, &next_high);
            for (int row = 0; row < num_rows; row++) {
                const float *at = x + row * num_inputs + j;
                first[row] += low * at[0];
                second[row] += high * at[GROUP / 2];
                first[row] += next_low * at[GROUP / 4];
                second[row] += next_high * at[GROUP / 2 + GROUP / 4];
            }
        }
        vec scale = load(scales), other = load(scales + TILE);
        for (int row = 0; row < num_rows; row++) {
            total[row] += scale * first[row];
            total[row] += other * second[row];
        }
        bytes += SIX_ROWS * TILE;
        scales += 2 * TILE;
        x += GROUP;
    }
    for (int row = 0; row < num_rows; row++) y[row] = total[row];
}

INLINE void eight_bits(const Matrix *matrix, int64_t tile, const float *x, const int num_rows, vec *y) {
    int64_t num_inputs = matrix->num_inputs, num_groups = num_inputs / GROUP;
    const int8_t *bytes = (const int8_t *)matrix->weights + tile * num_inputs * TILE;
    const float *scales = matrix->scales + tile * num_groups * TILE;
    vec total[MAX_ROWS] = {};
    for (int64_t group = 0; group < num_groups; group++) {
        vec first[MAX_ROWS] = {}, second[MAX_ROWS] = {};
        for (int j = 0; j < GROUP / 2; j++) {
            vec even = whole_bytes(bytes + 2 * j * TILE), odd = whole_bytes(bytes + (2 * j + 1) * TILE);
            for (int row = 0; row < num_rows; row++) {
                first[row] += even * x[row * num_inputs + 2 * j];
                second[row] += odd * x[row * num_inputs + 2 * j + 1];
            }
        }
        vec scale = load(scales);
        for (int row = 0; row < num_rows; row++) total[row] += scale * (first[row] + second[row]);
        bytes += GROUP * TILE;
        scales += TILE;
        x += GROUP;
    }
    for (int row = 0; row < num_rows; row++) y[row] = total[row];
}

INLINE float dot(const float *a, const float *b, int64_t size) {
    vec total = {};
    int64_t i = 0;
    for (; i + TILE <= size; i += TILE) total += load(a + i) * load(b + i);
    float sum = sum_of(total);
    for (; i < size; i++) sum += a[i] * b[i];
    return sum;
}

/* Parameters lie output by output, so here a vector runs along the inputs. */
INLINE void float32s(const Matrix *matrix, int64_t tile, const float *x, const int num_rows, vec *y) {
    int64_t num_inputs = matrix->num_inputs;
    const float *weights = (const float *)matrix->weights + tile * TILE * num_inputs;
    int64_t left = matrix->num_outputs - tile * TILE;
    int num_outputs = left < TILE ? (int)left : TILE;
    float out[MAX_ROWS][TILE] = {};
    int n = 0;
    for (; n + 2 <= num_outputs; n += 2) {
        const float *one = weights + n * num_inputs, *two = one + num_inputs;
        vec first[MAX_ROWS] = {}, second[MAX_ROWS] = {};
        int64_t i = 0;
        for (; i + TILE <= num_inputs; i += TILE) {
            vec w1 = load(one + i), w2 = load(two + i);
            for (int row = 0; row < num_rows; row++) {
                vec input = load(x + row * num_inputs + i);
                first[row] += w1 * input;
                second[row] += w2 * input;
            }
        }
        for (int row = 0; row < num_rows; row++) {
            float sum1 = sum_of(first[row]), sum2 = sum_of(second[row]);
            for (int64_t rest = i; rest < num_inputs; rest++) {
                sum1 += one[rest] * x[row * num_inputs + rest];
                sum2 += two[rest] * x[row * num_inputs + rest];
            }
            out[row][n] = sum1;
            out[row][n + 1] = sum2;
        }
    }
    for (; n < num_outputs; n++)
        for (int row = 0; row < num_rows; row++)
            out[row][n] = dot(weights + n * num_inputs, x + row * num_inputs, num_inputs);
    for (int row = 0; row < num_rows; row++) y[row] = load(out[row]);
}

INLINE void some_rows(const Matrix *matrix, int64_t tile, const float *x, const float *sums,
                      const int num_rows, vec *y) {
    if (matrix->kind == FOUR_BITS)
        four_bits(matrix, tile, x, sums, num_rows, y);
    else if (matrix->kind == EIGHT_BITS)
        eight_bits(matrix, tile, x, num_rows, y);
    else if (matrix->kind == SIX_BITS)
        six_bits(matrix, tile, x, num_rows, y);
    else
        float32s(matrix, tile, x, num_rows, y);
}

static void eight_rows(const Matrix *m, int64_t t, const float *x, const float *s, vec *y) {
    some_rows(m, t, x, s, MAX_ROWS < 8 ? MAX_ROWS : 8, y);
}

static void four_rows(const Matrix *m, int64_t t, const float *x, const float *s, vec *y) {
    some_rows(m, t, x, s, MAX_ROWS < 4 ? MAX_ROWS : 4, y);
}

static void two_rows(const Matrix *m, int64_t t, const float *x, const float *s, vec *y) {
    some_rows(m, t, x, s, 2, y);
}

static void one_row(const Matrix *m, int64_t t, const float *x, const float *s, vec *y) {
    some_rows(m, t, x, s, 1, y);
}

/* Inputs of a matrix product: rows, and the sums of their groups of 32. */
typedef struct {
    const float *x;
    const float *sums;
    int64_t num_rows;
} Input;

/* 16 outputs for all rows: y is R x 16. `low` is R x rank, A x of the adapter. */
static void multiply(const Matrix *matrix, int64_t tile, Input in, const float *low, vec *y) {
    int64_t num_inputs = matrix->num_inputs, num_groups = num_inputs / GROUP, row = 0;
    while (row < in.num_rows) {
        const float *x = in.x + row * num_inputs, *sums = in.sums + row * num_groups;
        int64_t left = in.num_rows - row;
        if (MAX_ROWS >= 8 && left >= 8) {
            eight_rows(matrix, tile, x, sums, y + row);
            row += 8;
        } else if (MAX_ROWS >= 4 && left >= 4) {
            four_rows(matrix, tile, x, sums, y + row);
            row += 4;
        } else if (left >= 2) {
            two_rows(matrix, tile, x, sums, y + row);
            row += 2;
        } else {
            one_row(matrix, tile, x, sums, y + row);
            row += 1;
        }
    }
    if (!matrix->bias && !matrix->lora_a) return;
    int64_t left = matrix->num_outputs - tile * TILE;
    int num_outputs = left < TILE ? (int)left : TILE;
    for (row = 0; row < in.num_rows; row++) {
        for (int n = 0; n < num_outputs; n++) {
            int64_t output = tile * TILE + n;
            float more = matrix->bias ? matrix->bias[output] : 0.0f;
            if (matrix->lora_a)
                more += matrix->lora_scale *
                        dot(matrix->lora_b + output * matrix->rank, low + row * matrix->rank, matrix->rank);
            y[row][n] += more;
        }
    }
}

static void lower(const Matrix *matrix, Input in, float *low) {
    if (!matrix->lora_a) return;
    for (int64_t row = 0; row < in.num_rows; row++)
        for (int64_t i = 0; i < matrix->rank; i++)
            low[row * matrix->rank + i] = dot(matrix->lora_a + i * matrix->num_inputs,
                                              in.x + row * matrix->num_inputs, matrix->num_inputs);
}

static int64_t tiles_of(const Matrix *matrix) { return (matrix->num_outputs + TILE - 1) / TILE; }

static void sum_groups(const float *x, int64_t num_rows, int64_t num_inputs, float *sums) {
    int64_t num_groups = num_inputs / GROUP;
    for (int64_t row = 0; row < num_rows; row++)
        for (int64_t group = 0; group < num_groups; group++) {
            const float *at = x + row * num_inputs + group * GROUP;
            sums[row * num_groups + group] = sum_of(load(at) + load(at + TILE));
        }
}

static void normalise(const float *x, const float *weight, float epsilon, int64_t size, float *out) {
    float factor = 1.0f / sqrtf(dot(x, x, size) / (float)size + epsilon);
    for (int64_t i = 0; i < size; i++) out[i] = weight[i] * (x[i] * factor);
}

/* Write a tile's outputs; the last tile may be partial. */
INLINE void put(float *to, vec values, int64_t room) {
    if (room >= TILE)
        store(to, values);
    else
        memcpy(to, &values, (size_t)room * sizeof(float));
}

/* --- attention ---------------------------------------------------------------------------------- */

/* A part's share of the softmax: its maximum, its sum, and the weighted values. */
static void attend(const float *queries, int64_t num_queries, const float *keys, const float *values,
                   int64_t num_keys, int64_t dim, float *peaks, float *totals, float *mixed) {
    for (int64_t q = 0; q < num_queries; q++) {
        peaks[q] = -INFINITY;
        totals[q] = 0.0f;
        memset(mixed + q * dim, 0, (size_t)dim * sizeof(float));
    }
    for (int64_t begin = 0; begin < num_keys; begin += KEYS) {
        int count = num_keys - begin < KEYS ? (int)(num_keys - begin) : KEYS;
        const float *k = keys + begin * dim, *v = values + begin * dim;
        for (int64_t q = 0; q < num_queries; q++) {
            const float *query = queries + q * dim;
            float *out = mixed + q * dim;
            float weights[KEYS];
            float peak = peaks[q];
            for (int j = 0; j < KEYS; j++) weights[j] = -INFINITY;
            if (dim == 64) {
                vec q0 = load(query), q1 = load(query + 16), q2 = load(query + 32), q3 = load(query + 48);
                for (int j = 0; j < count; j++) {
                    const float *key = k + j * 64;
                    weights[j] = sum_of((q0 * load(key) + q1 * load(key + 16)) +
                                        (q2 * load(key + 32) + q3 * load(key + 48)));
                }
            } else {
                for (int j = 0; j < count; j++) weights[j] = dot(query, k + j * dim, dim);
            }
            for (int j = 0; j < count; j++) peak = weights[j] > peak ? weights[j] : peak;
            vec sum = {};
            for (int j = 0; j < KEYS; j += TILE) {
                vec weight = exponential(load(weights + j) - peak);
                store(weights + j, weight);
                sum += weight;
            }
            float fade = expf(peaks[q] - peak);
            peaks[q] = peak;
            totals[q] = totals[q] * fade + sum_of(sum);
            if (dim == 64) {
                vec o0 = load(out) * fade, o1 = load(out + 16) * fade;
                vec o2 = load(out + 32) * fade, o3 = load(out + 48) * fade;
                for (int j = 0; j < count; j++) {
                    const float *value = v + j * 64;
                    o0 += load(value) * weights[j];
                    o1 += load(value + 16) * weights[j];
                    o2 += load(value + 32) * weights[j];
                    o3 += load(value + 48) * weights[j];
                }
                store(out, o0);
                store(out + 16, o1);
                store(out + 32, o2);
                store(out + 48, o3);
            } else {
                int64_t d = 0;
                for (; d + TILE <= dim; d += TILE) {
                    vec o = load(out + d) * fade;
                    for (int j = 0; j < count; j++) o += load(v + j * dim + d) * weights[j];
                    store(out + d, o);
                }
                for (; d < dim; d++) {
                    float o = out[d] * fade;
                    for (int j = 0; j < count; j++) o += v[j * dim + d] * weights[j];
                    out[d] = o;
                }
            }
        }
    }
}

/* Norm (Qwen3) and rotation of one head, in the half-and-half order; `scale` goes onto the result. */
static void rotate(float *head, const float *norm, float epsilon, const float *cosine, const float *sine,
                   int64_t dim, float scale, float *out) {
    if (norm) normalise(head, norm, epsilon, dim, head);
    int64_t half = dim / 2;
    for (int64_t i = 0; i < half; i++) {
        float low = head[i], high = head[half + i];
        out[i] = (low * cosine[i] - high * sine[i]) * scale;
        out[half + i] = (high * cosine[half + i] + low * sine[half + i]) * scale;
    }
}

/* --- the step --------------------------------------------------------------------------------------- */

static void *floats(int64_t count) {
    size_t size = ((size_t)count * sizeof(float) + 63) / 64 * 64;
    return aligned_alloc(64, size ? size : 64);
}

/* 0, or 1 if out of memory. */
int decode_step(const Model *model, const Step *step) {
    const int64_t R = step->num_rows, width = model->width, inner = model->inner;
    const int64_t H = model->num_heads, KV = model->num_kv_heads, D = model->head_dim, per_kv = H / KV;
    const int64_t num_readers = step->first_readers[step->num_parts];
    int64_t max_inputs = width > inner ? width : inner, max_rank = 1;
    max_inputs = H * D > max_inputs ? H * D : max_inputs;
    for (int64_t l = 0; l < model->num_layers; l++) {
        const Layer *layer = model->layers + l;
        const Matrix *all = &layer->query;
        for (int i = 0; i < 7; i++) max_rank = all[i].rank > max_rank ? all[i].rank : max_rank;
    }
    max_rank = model->head.rank > max_rank ? model->head.rank : max_rank;

    float *queries = floats(R * H * D), *keys = floats(R * KV * D), *values = floats(R * KV * D);
    float *rotated = floats(R * H * D), *mixed = floats(R * H * D), *active = floats(R * inner);
    float *part_mixed = floats(num_readers * H * D), *part_peaks = floats(num_readers * H);
    float *part_totals = floats(num_readers * H);
    int64_t *next = malloc((size_t)num_readers * sizeof *next), *first = malloc((size_t)R * sizeof *first);
    int failed = !queries || !keys || !values || !rotated || !mixed || !active || !part_mixed ||
                 !part_peaks || !part_totals || !next || !first;
    if (!failed) {
        for (int64_t row = 0; row < R; row++) first[row] = -1;
        for (int64_t i = num_readers - 1; i >= 0; i--) { /* the parts of a row, as a list in order */
            next[i] = first[step->readers[i]];
            first[step->readers[i]] = i;
        }
    }

#pragma omp parallel num_threads((int)step->num_threads) if (!failed)
    {
        /* each thread normalises all rows: cheaper than a barrier */
        float *x = floats(R * max_inputs), *sums = floats(R * (max_inputs / GROUP + 1));
        float *low = floats(3 * R * max_rank);
        vec *y = floats(R * TILE), *z = floats(R * TILE);
        if (!x || !sums || !low || !y || !z) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp barrier
        if (!failed) {
            for (int64_t l = 0; l < model->num_layers; l++) {
                const Layer *layer = model->layers + l;
                float *cache_k = model->cache + l * 2 * KV * model->num_slots * D;
                float *cache_v = cache_k + KV * model->num_slots * D;

                for (int64_t row = 0; row < R; row++)
                    normalise(step->hidden + row * width, layer->input_norm, model->epsilon, width,
                              x + row * width);
                sum_groups(x, R, width, sums);
                Input in = {x, sums, R};
                lower(&layer->query, in, low);
                lower(&layer->key, in, low + R * max_rank);
                lower(&layer->value, in, low + 2 * R * max_rank);
                int64_t tiles_q = tiles_of(&layer->query), tiles_k = tiles_of(&layer->key);
                int64_t tiles_v = tiles_of(&layer->value);
#pragma omp for schedule(static)
                for (int64_t t = 0; t < tiles_q + tiles_k + tiles_v; t++) {
                    const Matrix *matrix = &layer->query;
                    int64_t tile = t, which = 0;
                    float *to = queries;
                    if (t >= tiles_q + tiles_k)
                        matrix = &layer->value, tile = t - tiles_q - tiles_k, to = values, which = 2;
                    else if (t >= tiles_q)
                        matrix = &layer->key, tile = t - tiles_q, to = keys, which = 1;
                    multiply(matrix, tile, in, low + which * R * max_rank, y);
                    for (int64_t row = 0; row < R; row++)
                        put(to + row * matrix->num_outputs + tile * TILE, y[row],
                            matrix->num_outputs - tile * TILE);
                }

#pragma omp for schedule(static)
                for (int64_t i = 0; i < R * KV; i++) {
                    int64_t row = i / KV, kv = i % KV, slot = step->slots[row];
                    const float *cosine = step->cosine + row * D, *sine = step->sine + row * D;
                    for (int64_t h = kv * per_kv; h < (kv + 1) * per_kv; h++)
                        rotate(queries + (row * H + h) * D, layer->query_norm, model->epsilon, cosine,
                               sine, D, model->scaling, rotated + (row * H + h) * D);
                    rotate(keys + (row * KV + kv) * D, layer->key_norm, model->epsilon, cosine, sine, D,
                           1.0f, cache_k + (kv * model->num_slots + slot) * D);
                    memcpy(cache_v + (kv * model->num_slots + slot) * D, values + (row * KV + kv) * D,
                           (size_t)D * sizeof(float));
                }

#pragma omp for schedule(dynamic)
                for (int64_t i = 0; i < step->num_parts * KV; i++) {
                    int64_t part = i / KV, kv = i % KV;
                    const float *k = cache_k + (kv * model->num_slots + step->part_starts[part]) * D;
                    const float *v = cache_v + (kv * model->num_slots + step->part_starts[part]) * D;
                    for (int64_t n = step->first_readers[part]; n < step->first_readers[part + 1]; n++) {
                        int64_t at = n * H + kv * per_kv;
                        attend(rotated + (step->readers[n] * H + kv * per_kv) * D, per_kv, k, v,
                               step->part_lengths[part], D, part_peaks + at, part_totals + at,
                               part_mixed + at * D);
                    }
                }

#pragma omp for schedule(static)
                for (int64_t i = 0; i < R * H; i++) {
                    int64_t row = i / H, h = i % H;
                    float peak = -INFINITY, total = 0.0f, *out = mixed + i * D;
                    for (int64_t n = first[row]; n >= 0; n = next[n])
                        peak = part_peaks[n * H + h] > peak ? part_peaks[n * H + h] : peak;
                    memset(out, 0, (size_t)D * sizeof(float));
                    for (int64_t n = first[row]; n >= 0; n = next[n]) {
                        float share = expf(part_peaks[n * H + h] - peak);
                        total += part_totals[n * H + h] * share;
                        for (int64_t d = 0; d < D; d++) out[d] += part_mixed[(n * H + h) * D + d] * share;
                    }
                    for (int64_t d = 0; d < D; d++) out[d] /= total;
                }

                sum_groups(mixed, R, H * D, sums);
                in = (Input){mixed, sums, R};
                lower(&layer->output, in, low);
#pragma omp for schedule(static)
                for (int64_t t = 0; t < tiles_of(&layer->output); t++) {
                    multiply(&layer->output, t, in, low, y);
                    for (int64_t row = 0; row < R; row++) {
                        float *to = step->hidden + row * width + t * TILE;
                        for (int64_t n = 0; n < TILE && t * TILE + n < width; n++) to[n] += y[row][n];
                    }
                }

                for (int64_t row = 0; row < R; row++)
                    normalise(step->hidden + row * width, layer->post_norm, model->epsilon, width,
                              x + row * width);
                sum_groups(x, R, width, sums);
                in = (Input){x, sums, R};
                lower(&layer->gate, in, low);
                lower(&layer->up, in, low + R * max_rank);
#pragma omp for schedule(static)
                for (int64_t t = 0; t < tiles_of(&layer->gate); t++) {
                    multiply(&layer->gate, t, in, low, y);
                    multiply(&layer->up, t, in, low + R * max_rank, z);
                    for (int64_t row = 0; row < R; row++) {
                        vec silu = y[row] / (exponential(-y[row]) + 1.0f);
                        put(active + row * inner + t * TILE, silu * z[row], inner - t * TILE);
                    }
                }

                sum_groups(active, R, inner, sums);
                in = (Input){active, sums, R};
                lower(&layer->down, in, low);
#pragma omp for schedule(static)
                for (int64_t t = 0; t < tiles_of(&layer->down); t++) {
                    multiply(&layer->down, t, in, low, y);
                    for (int64_t row = 0; row < R; row++) {
                        float *to = step->hidden + row * width + t * TILE;
                        for (int64_t n = 0; n < TILE && t * TILE + n < width; n++) to[n] += y[row][n];
                    }
                }
            }

            for (int64_t row = 0; row < R; row++)
                normalise(step->hidden + row * width, model->norm, model->epsilon, width, x + row * width);
            sum_groups(x, R, width, sums);
            Input in = {x, sums, R};
            lower(&model->head, in, low);
            int64_t num_outputs = model->head.num_outputs;
#pragma omp for schedule(static)
            for (int64_t t = 0; t < tiles_of(&model->head); t++) {
                multiply(&model->head, t, in, low, y);
                for (int64_t row = 0; row < R; row++)
                    put(step->logits + row * num_outputs + t * TILE, y[row], num_outputs - t * TILE);
            }
        }
        free(x), free(sums), free(low), free(y), free(z);
    }
    free(queries), free(keys), free(values), free(rotated), free(mixed), free(active);
    free(part_mixed), free(part_peaks), free(part_totals), free(next), free(first);
    return failed;
}

/* --- checking ------------------------------------------------------------------------------------------ */

typedef struct {
    float value;
    float room; /* what rounding may change */
} Stored;

/* Input j of a group, for output n of its tile. */
INLINE Stored stored_weight(const Matrix *matrix, int64_t block, int j, int n) {
    const uint8_t *bytes = (const uint8_t *)matrix->weights + n;
    const float *scales = matrix->scales + n;
    if (matrix->kind == EIGHT_BITS) {
        float scale = scales[block * TILE];
        int value = (int8_t)bytes[(block * GROUP + j) * TILE];
        return (Stored){scale * (float)value, fabsf(scale) * 127 * 0x1p-21f};
    }
    float scale = scales[block * 2 * TILE], other = scales[(block * 2 + 1) * TILE];
    int num_rows = matrix->kind == SIX_BITS ? SIX_ROWS : GROUP / 2;
    uint8_t byte = bytes[(block * num_rows + j % 16) * TILE];
    int value = j < 16 ? byte & 15 : byte >> 4;
    if (matrix->kind == FOUR_BITS)
        return (Stored){scale * (float)(value - 8) + other, (fabsf(scale) * 8 + fabsf(other)) * 0x1p-21f};
    int top = bytes[(block * num_rows + GROUP / 2 + j % 8) * TILE] >> (j / 8 * 2) & 3;
    scale = j < 16 ? scale : other;
    return (Stored){scale * (float)(value + 16 * top - 32), fabsf(scale) * 32 * 0x1p-21f};
}

/* 1 if packed weights equal the float32 ones, up to the rounding of `scale * q + zero`. */
int same_weights(const Matrix *matrix, const float *weights, int64_t num_threads) {
    int64_t num_inputs = matrix->num_inputs, num_groups = num_inputs / GROUP;
    int is_same = 1;
    (void)num_threads;
#pragma omp parallel for schedule(static) num_threads((int)num_threads)
    for (int64_t tile = 0; tile < tiles_of(matrix); tile++) {
        int so_far;
#pragma omp atomic read
        so_far = is_same;
        if (!so_far) continue;
        for (int64_t group = 0; group < num_groups; group++) {
            int64_t block = tile * num_groups + group;
            for (int n = 0; n < TILE && tile * TILE + n < matrix->num_outputs; n++) {
                const float *given = weights + (tile * TILE + n) * num_inputs + group * GROUP;
                for (int j = 0; j < GROUP; j++) {
                    Stored stored = stored_weight(matrix, block, j, n);
                    if (!(fabsf(stored.value - given[j]) <= stored.room)) so_far = 0;
                }
            }
        }
        if (!so_far) {
#pragma omp atomic write
            is_same = 0;
        }
    }
    return is_same;
}
