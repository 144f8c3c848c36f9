/* One decode step of the plain Llama form in float32: a token per row, keys and values in a paged cache.

   A small model's step is a hundred products of a few microseconds each; here they follow one another without a call into a
   framework between them. Rows are independent, so threads share a step by calling with their own rows. Weights are used as
   they lie in the trainer's tensors, [outputs, inputs] row by row: nothing is packed, copied or kept. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#ifdef __AVX2__
#define LANES 8
#define OUTS 2
#else
#define LANES 4
#define OUTS 4
#endif
#define ROWS 4
typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t bits __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
#define INLINE static inline __attribute__((always_inline))

typedef struct { /* the order is that of _layer_tensors in native_decode.py; a bias or head norm may be missing */
    const float *norm, *q, *q_bias, *k, *k_bias, *v, *v_bias, *o, *o_bias, *q_norm, *k_norm;
    const float *mlp_norm, *gate, *gate_bias, *up, *up_bias, *down, *down_bias;
    float *keys, *values; /* [blocks, block_size, kv_heads, dim] */
} Layer;

typedef struct {
    const float *embedding, *frequencies, *norm, *head;
} Ends;

typedef struct {
    int64_t layers, hidden, heads, kv_heads, dim, inner, vocab, block_size, table_width;
    double eps, scale, rotary_scaling;
} Shape;

INLINE float total(vec x) {
    float low = (x[0] + x[1]) + (x[2] + x[3]);
    return LANES == 4 ? low : low + ((x[LANES - 4] + x[LANES - 3]) + (x[LANES - 2] + x[LANES - 1]));
}

INLINE float dot(const float *a, const float *b, int64_t n) {
    vec first = {0}, second = {0};
    int64_t i = 0;
    for (; i + 2 * LANES <= n; i += 2 * LANES) {
        first += *(const vec *)(a + i) * *(const vec *)(b + i);
        second += *(const vec *)(a + i + LANES) * *(const vec *)(b + i + LANES);
    }
    float sum = total(first + second);
    for (; i < n; i++) sum += a[i] * b[i];
    return sum;
}

INLINE vec choose(bits where, vec yes, vec no) { return (vec)(((bits)yes & where) | ((bits)no & ~where)); }

/* e^x within two units of the last place, 0 below -87: 2^n times a polynomial in the rest. */
INLINE vec exponential(vec x) {
    bits vanishing = x < -87.0f;
    x = choose(vanishing | (x > 88.0f), choose(vanishing, (vec){0}, (vec){0} + 88.0f), x);
    vec shifted = x * 1.44269504f + 12582912.0f; /* adding 1.5 * 2^23 rounds to a whole number in the low bits */
    vec whole = shifted - 12582912.0f;
    vec rest = x - whole * 0.693359375f + whole * 2.12194440e-4f;
    vec result = 1.9875691500e-4f * rest + 1.3981999507e-3f;
    result = result * rest + 8.3334519073e-3f;
    result = result * rest + 4.1665795894e-2f;
    result = result * rest + 1.6666665459e-1f;
    result = result * rest + 5.0000001201e-1f;
    result = result * rest * rest + rest + 1.0f;
    bits power = ((bits)shifted << 23) + 0x3f800000; /* 1.5 * 2^23 leaves the low bits when shifted out */
    return choose(vanishing, (vec){0}, result * (vec)power);
}

static void exponentials(float *x, int64_t count) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) *(vec *)(x + i) = exponential(*(vec *)(x + i));
    for (; i < count; i++) x[i] = expf(x[i]);
}

/* gate becomes silu(gate) * up */
static void gated(float *gate, const float *up, int64_t count) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        vec x = *(vec *)(gate + i);
        *(vec *)(gate + i) = x / (1.0f + exponential(-x)) * *(const vec *)(up + i);
    }
    for (; i < count; i++) gate[i] = gate[i] / (1.0f + expf(-gate[i])) * up[i];
}

static void softmax(float *x, int64_t count) {
    float peak = -INFINITY, sum = 0.0f;
    for (int64_t i = 0; i < count; i++) peak = fmaxf(peak, x[i]);
    for (int64_t i = 0; i < count; i++) x[i] -= peak;
    exponentials(x, count);
    for (int64_t i = 0; i < count; i++) sum += x[i];
    for (int64_t i = 0; i < count; i++) x[i] /= sum;
}

INLINE void add_scaled(float *x, const float *more, float scale, int64_t count) {
    for (int64_t i = 0; i < count; i++) x[i] += scale * more[i];
}

/* A tile of rows x outs products; both counts are constants where this is used, so the sums stay in registers. */
INLINE void tile(const float *x, const float *w, const float *bias, float *y, int64_t in, int64_t out, int rows, int outs) {
    vec sums[ROWS][OUTS] = {{{0}}};
    int64_t i = 0;
    for (; i + LANES <= in; i += LANES)
        for (int o = 0; o < outs; o++) {
            vec weights = *(const vec *)(w + o * in + i);
            for (int r = 0; r < rows; r++) sums[r][o] += weights * *(const vec *)(x + r * in + i);
        }
    for (; i < in; i++)
#pragma GCC unroll 4
        for (int o = 0; o < outs; o++)
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++) sums[r][o][0] += x[r * in + i] * w[o * in + i];
#pragma GCC unroll 4
    for (int o = 0; o < outs; o++) {
        float shift = bias ? bias[o] : 0.0f;
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) y[r * out + o] = total(sums[r][o]) + shift;
    }
}

INLINE void rows_of(const float *x, const float *w, const float *bias, float *y, int64_t rows, int64_t in, int64_t out, int outs) {
    int64_t r = 0;
    for (; r + ROWS <= rows; r += ROWS) tile(x + r * in, w, bias, y + r * out, in, out, ROWS, outs);
    for (; r < rows; r++) tile(x + r * in, w, bias, y + r * out, in, out, 1, outs);
}

/* y [rows, out] = x [rows, in] w' + bias */
static void linear(const float *x, const float *w, const float *bias, float *y, int64_t rows, int64_t in, int64_t out) {
    int64_t o = 0;
    for (; o + OUTS <= out; o += OUTS) rows_of(x, w + o * in, bias ? bias + o : 0, y + o, rows, in, out, OUTS);
    for (; o < out; o++) rows_of(x, w + o * in, bias ? bias + o : 0, y + o, rows, in, out, 1);
}

static void rms_norm(const float *x, const float *weight, float *y, int64_t rows, int64_t width, float eps) {
    for (int64_t r = 0; r < rows; r++, x += width, y += width) {
        float scale = 1.0f / sqrtf(dot(x, x, width) / width + eps);
        for (int64_t i = 0; i < width; i++) y[i] = x[i] * scale * weight[i];
    }
}

/* cos and sin [dim / 2] of the angles at a position. */
static void angles(const float *frequencies, float scaling, int64_t position, int64_t half, float *cosines, float *sines) {
    for (int64_t i = 0; i < half; i++) {
        cosines[i] = cosf((float)position * frequencies[i]) * scaling;
        sines[i] = sinf((float)position * frequencies[i]) * scaling;
    }
}

/* Turn the pairs (i, i + dim / 2) of every head of one row. */
static void rotate(float *x, const float *cosines, const float *sines, int64_t heads, int64_t half) {
    for (int64_t h = 0; h < heads; h++, x += 2 * half)
        for (int64_t i = 0; i < half; i++) {
            float a = x[i], b = x[i + half];
            x[i] = a * cosines[i] - b * sines[i];
            x[i + half] = b * cosines[i] + a * sines[i];
        }
}

/* Keys or values [kv_heads, dim] of every head at a position; blocks follow one another as `table` says. */
INLINE float *cached(float *cache, const Shape *s, const int32_t *table, int64_t position) {
    int64_t place = table[position / s->block_size] * s->block_size + position % s->block_size;
    return cache + place * s->kv_heads * s->dim;
}

/* The queries of one row, [heads, dim], over its first `length` positions: the cache is read from front to back, all heads of a
   position together. `scores` has room for heads * length. */
static void attend(const float *query, const Layer *layer, const Shape *s, const int32_t *table, int64_t length, float *scores,
                   float *out) {
    int64_t heads = s->heads, dim = s->dim, group = heads / s->kv_heads;
    for (int64_t t = 0; t < length; t++) {
        const float *keys = cached(layer->keys, s, table, t);
        for (int64_t h = 0; h < heads; h++) scores[h * length + t] = dot(query + h * dim, keys + h / group * dim, dim) * s->scale;
    }
    for (int64_t h = 0; h < heads; h++) softmax(scores + h * length, length);
    for (int64_t i = 0; i < heads * dim; i++) out[i] = 0.0f;
    for (int64_t t = 0; t < length; t++) {
        const float *values = cached(layer->values, s, table, t);
        for (int64_t h = 0; h < heads; h++) add_scaled(out + h * dim, values + h / group * dim, scores[h * length + t], dim);
    }
}

static void attention(const Layer *layer, const Shape *s, int64_t rows, float *q, float *k, float *v, const float *turns,
                      const int32_t *tables, const int64_t *positions, float *scores, float *out) {
    int64_t dim = s->dim, half = dim / 2, width = s->heads * dim, kv_width = s->kv_heads * dim;
    if (layer->q_norm) rms_norm(q, layer->q_norm, q, rows * s->heads, dim, s->eps);
    if (layer->k_norm) rms_norm(k, layer->k_norm, k, rows * s->kv_heads, dim, s->eps);
    for (int64_t r = 0; r < rows; r++) {
        const int32_t *table = tables + r * s->table_width;
        const float *cosines = turns + r * dim, *sines = cosines + half;
        rotate(q + r * width, cosines, sines, s->heads, half);
        rotate(k + r * kv_width, cosines, sines, s->kv_heads, half);
        memcpy(cached(layer->keys, s, table, positions[r]), k + r * kv_width, kv_width * sizeof(float));
        memcpy(cached(layer->values, s, table, positions[r]), v + r * kv_width, kv_width * sizeof(float));
        attend(q + r * width, layer, s, table, positions[r] + 1, scores, out + r * width);
    }
}

/* The logits [rows, vocab] after one token per row: token ids and positions [rows], blocks of each row [rows, table_width].
   Scratch: rows * (2 hidden + dim + 2 * the widest of a layer's products) + heads * the longest context. */
void atropos_decode(const Shape *s, const Layer *layers, const Ends *ends, int64_t rows, const int64_t *ids,
                    const int64_t *positions, const int32_t *tables, float *scratch, float *logits) {
    int64_t hidden = s->hidden, width = s->heads * s->dim, kv_width = s->kv_heads * s->dim, inner = s->inner;
    int64_t wide = width + 2 * kv_width > inner ? width + 2 * kv_width : inner;
    float eps = s->eps, *x = scratch, *h = x + rows * hidden, *turns = h + rows * hidden, *a = turns + rows * s->dim;
    float *b = a + rows * wide, *scores = b + rows * wide;
    for (int64_t r = 0; r < rows; r++) {
        float *cosines = turns + r * s->dim;
        memcpy(x + r * hidden, ends->embedding + ids[r] * hidden, hidden * sizeof(float));
        angles(ends->frequencies, s->rotary_scaling, positions[r], s->dim / 2, cosines, cosines + s->dim / 2);
    }
    for (const Layer *layer = layers; layer < layers + s->layers; layer++) {
        float *q = a, *k = q + rows * width, *v = k + rows * kv_width;
        rms_norm(x, layer->norm, h, rows, hidden, eps);
        linear(h, layer->q, layer->q_bias, q, rows, hidden, width);
        linear(h, layer->k, layer->k_bias, k, rows, hidden, kv_width);
        linear(h, layer->v, layer->v_bias, v, rows, hidden, kv_width);
        attention(layer, s, rows, q, k, v, turns, tables, positions, scores, b);
        linear(b, layer->o, layer->o_bias, h, rows, width, hidden);
        add_scaled(x, h, 1.0f, rows * hidden);
        rms_norm(x, layer->mlp_norm, h, rows, hidden, eps);
        linear(h, layer->gate, layer->gate_bias, a, rows, hidden, inner);
        linear(h, layer->up, layer->up_bias, b, rows, hidden, inner);
        gated(a, b, rows * inner);
        linear(a, layer->down, layer->down_bias, h, rows, inner, hidden);
        add_scaled(x, h, 1.0f, rows * hidden);
    }
    rms_norm(x, ends->norm, h, rows, hidden, eps);
    linear(h, ends->head, 0, logits, rows, hidden, s->vocab);
}

/* A number in [0, 1) from (seed, counter): the same splitmix64 as `uniforms` in sampling.py. */
static double uniform(uint64_t seed, uint64_t counter) {
    uint64_t x = seed + (counter + 1) * 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    x ^= x >> 31;
    return (double)(x >> 11) * 0x1p-53;
}

static float largest(const float *x, int64_t count, int64_t *where) {
    int64_t best = 0;
    for (int64_t i = 1; i < count; i++)
        if (x[i] > x[best]) best = i;
    *where = best;
    return x[best];
}

#define CHUNK 256

/* weights = e^((x - peak) / temperature) and their sum, which is kept by chunks of 256. */
static double weigh(const float *x, float peak, float temperature, int64_t count, float *weights, double *chunks) {
    double sum = 0.0;
    for (int64_t i = 0; i < count; i++) weights[i] = (x[i] - peak) / temperature;
    exponentials(weights, count);
    for (int64_t start = 0; start < count; start += CHUNK) {
        int64_t end = start + CHUNK < count ? start + CHUNK : count;
        float lanes[8] = {0}; /* independent partial sums */
        for (int64_t i = start; i < end; i++) lanes[i % 8] += weights[i];
        double part = 0.0;
        for (int lane = 0; lane < 8; lane++) part += lanes[lane];
        chunks[start / CHUNK] = part;
        sum += part;
    }
    return sum;
}

/* The first entry at which the running sum passes `target`; always one with a positive weight. */
static int64_t pick(const float *weights, const double *chunks, int64_t count, double target) {
    int64_t last = (count - 1) / CHUNK, chunk = 0, chosen = 0;
    double sum = 0.0;
    while (chunk < last && sum + chunks[chunk] <= target) sum += chunks[chunk++];
    int64_t end = (chunk + 1) * CHUNK < count ? (chunk + 1) * CHUNK : count;
    for (int64_t i = chunk * CHUNK; i < end; i++) {
        if (weights[i] <= 0.0f) continue;
        chosen = i;
        if ((sum += weights[i]) > target) break;
    }
    return chosen;
}

/* A token per row of logits [rows, vocab]: drawn at the row's temperature, or the likeliest one at temperature 0. `logprobs` is
   at that temperature (0 counts as 1), `raw` at temperature 1. Scratch: vocab floats, and a double for every 256 of them. */
void atropos_sample(int64_t rows, int64_t vocab, const float *logits, const float *temperatures, const int64_t *seeds,
                    const int64_t *counters, int64_t *tokens, float *logprobs, float *raw, float *weights, double *chunks) {
    for (int64_t r = 0; r < rows; r++, logits += vocab) {
        int64_t token;
        float peak = largest(logits, vocab, &token), temperature = temperatures[r] > 0.0f ? temperatures[r] : 1.0f;
        double sum = weigh(logits, peak, temperature, vocab, weights, chunks);
        if (temperatures[r] > 0.0f) token = pick(weights, chunks, vocab, uniform(seeds[r], counters[r]) * sum);
        tokens[r] = token;
        logprobs[r] = (float)((logits[token] - peak) / temperature - log(sum));
        raw[r] = temperature == 1.0f ? logprobs[r] : (float)(logits[token] - peak - log(weigh(logits, peak, 1.0f, vocab, weights, chunks)));
    }
}

/* Each of [count, rows] queries over the keys ranges[0] to ranges[1] of its sequence, [count, keys]. No row depends on another,
   so exact mode uses this for decode steps, prompts and the trainer's pass alike. Scratch: a float for every key. */
void atropos_attend(int64_t count, int64_t rows, int64_t keys, int64_t dim, int64_t value_dim, float scale, float softcap,
                    const float *query, const float *key, const float *value, const int64_t *ranges, float *scores, float *out) {
    for (int64_t n = 0; n < count; n++, key += keys * dim, value += keys * value_dim) {
        for (int64_t r = 0; r < rows; r++, ranges += 2, query += dim, out += value_dim) {
            int64_t length = ranges[1] - ranges[0];
            const float *seen = key + ranges[0] * dim, *values = value + ranges[0] * value_dim;
            for (int64_t t = 0; t < length; t++) scores[t] = dot(query, seen + t * dim, dim) * scale;
            for (int64_t t = 0; t < length && softcap > 0.0f; t++) scores[t] = softcap * tanhf(scores[t] / softcap);
            softmax(scores, length);
            for (int64_t i = 0; i < value_dim; i++) out[i] = 0.0f;
            for (int64_t t = 0; t < length; t++) add_scaled(out, values + t * value_dim, scores[t], value_dim);
        }
    }
}
