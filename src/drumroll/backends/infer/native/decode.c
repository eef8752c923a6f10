/* What a decode step of the Llama family does between its products of matrices, and the draw of its tokens, for the CPU, in float32.
 *
 * Every row is computed by itself, from its own position and no further, in an order that depends on nothing else: its bits are the same
 * whatever the other rows are, and however many.
 */

#include <math.h>
#include <stdint.h>

#define INLINE static inline __attribute__((always_inline))

/* e^x for x <= 0, within a few units of the last place; 0 for what is smaller than a float32 can tell. */
INLINE float exp_of(float x)
{
    x = x < -87.0f ? -87.0f : x;
    float n = rintf(x * 1.44269504f);
    float rest = fmaf(n, -0.693145751953125f, x);
    rest = fmaf(n, -1.42860677e-6f, rest);
    float sum = 1.9875691e-4f;
    sum = fmaf(sum, rest, 1.3981999e-3f);
    sum = fmaf(sum, rest, 8.3334519e-3f);
    sum = fmaf(sum, rest, 4.1665795e-2f);
    sum = fmaf(sum, rest, 1.6666665e-1f);
    sum = fmaf(sum, rest, 0.5f);
    sum = fmaf(sum, rest * rest, rest + 1.0f);
    union { int32_t bits; float value; } power = {((int32_t)n + 127) << 23};
    return x == -87.0f ? 0.0f : sum * power.value;
}

INLINE float dot(const float *a, const float *b, int64_t size)
{
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < size; i++)
        sum += a[i] * b[i];
    return sum;
}

/* One head by the angles of its position, after its norm where it has one. */
INLINE void turn(const float *head, const float *cos, const float *sin, const float *norm, float eps, float *out, int64_t dim)
{
    int64_t half = dim / 2;
    float rate = norm ? 1.0f / sqrtf(dot(head, head, dim) / (float)dim + eps) : 1.0f;
#pragma omp simd
    for (int64_t i = 0; i < half; i++) {
        float first = head[i], second = head[half + i];
        if (norm) {
            first *= rate * norm[i];
            second *= rate * norm[half + i];
        }
        out[i] = first * cos[i] - second * sin[i];
        out[half + i] = second * cos[i] + first * sin[i];
    }
}

/* One query over `length` keys and values that lie end to end; `shares` has room for as many numbers. */
INLINE void attend_head(const float *query, const float *keys, const float *values, int64_t length, float scale, float *shares, float *out,
                        int64_t dim)
{
    float highest = -INFINITY, total = 0.0f;
    for (int64_t t = 0; t < length; t++)
        shares[t] = scale * dot(query, keys + t * dim, dim);
#pragma omp simd reduction(max : highest)
    for (int64_t t = 0; t < length; t++)
        highest = shares[t] > highest ? shares[t] : highest;
#pragma omp simd reduction(+ : total)
    for (int64_t t = 0; t < length; t++) {
        shares[t] = exp_of(shares[t] - highest);
        total += shares[t];
    }
    float sum[dim];
    for (int64_t i = 0; i < dim; i++)
        sum[i] = 0.0f;
    for (int64_t t = 0; t < length; t++)
#pragma omp simd
        for (int64_t i = 0; i < dim; i++)
            sum[i] += shares[t] * values[t * dim + i];
    for (int64_t i = 0; i < dim; i++)
        out[i] = sum[i] / total;
}

struct shape {
    int64_t heads, kv_heads, dim, columns;
    float scale, eps;
};

INLINE void attend_rows(const struct shape *shape, int64_t rows, const float *qkv, const float *cos, const float *sin,
                        const float *query_norm, const float *key_norm, const int64_t *positions, const int64_t *places, float *keys,
                        float *values, float *shares, float *out, int64_t dim)
{
    int64_t groups = shape->heads / shape->kv_heads, slot = shape->columns * dim;
    float turned[dim];
    for (int64_t row = 0; row < rows; row++) {
        const float *own = qkv + row * (shape->heads + 2 * shape->kv_heads) * dim;
        const float *own_cos = cos + positions[row] * (dim / 2), *own_sin = sin + positions[row] * (dim / 2);
        for (int64_t kv = 0; kv < shape->kv_heads; kv++) {
            float *own_keys = keys + (row * shape->kv_heads + kv) * slot, *own_values = values + (row * shape->kv_heads + kv) * slot;
            const float *value = own + (shape->heads + shape->kv_heads + kv) * dim;
            turn(own + (shape->heads + kv) * dim, own_cos, own_sin, key_norm, shape->eps, own_keys + places[row] * dim, dim);
            for (int64_t i = 0; i < dim; i++)
                own_values[places[row] * dim + i] = value[i];
            for (int64_t head = kv * groups; head < (kv + 1) * groups; head++) {
                turn(own + head * dim, own_cos, own_sin, query_norm, shape->eps, turned, dim);
                attend_head(turned, own_keys, own_values, positions[row] + 1, shape->scale, shares, out + (row * shape->heads + head) * dim,
                            dim);
            }
        }
    }
}

/* A new token of each row. Its queries, keys and values are in `qkv`, [rows, heads + 2 kv_heads, dim]; key and value are stored at its
 * `place` in the row's slot of `keys` and `values`, [slots, kv_heads, columns, dim], and its queries, turned by the angles of its
 * `position`, attend to all positions up to that. → `out`, [rows, heads, dim]. */
void attend(const struct shape *shape, int64_t rows, const float *qkv, const float *cos, const float *sin, const float *query_norm,
            const float *key_norm, const int64_t *positions, const int64_t *places, float *keys, float *values, float *shares, float *out)
{
#define ATTEND(DIM) \
    attend_rows(shape, rows, qkv, cos, sin, query_norm, key_norm, positions, places, keys, values, shares, out, DIM)
    switch (shape->dim) { /* with a size that the compiler knows, sums stay in registers */
    case 16: ATTEND(16); break;
    case 32: ATTEND(32); break;
    case 64: ATTEND(64); break;
    case 128: ATTEND(128); break;
    default: ATTEND(shape->dim);
    }
}

/* residual += delta, where there is one; → out, its root mean square norm. */
void add_and_norm(int64_t rows, int64_t width, float *residual, const float *delta, const float *weight, float eps, float *out)
{
    for (int64_t row = 0; row < rows; row++, residual += width, out += width) {
        if (delta) {
            for (int64_t i = 0; i < width; i++)
                residual[i] += delta[i];
            delta += width;
        }
        float rate = 1.0f / sqrtf(dot(residual, residual, width) / (float)width + eps);
        for (int64_t i = 0; i < width; i++)
            out[i] = residual[i] * rate * weight[i];
    }
}

/* [rows, 2 inner], gates before what they let through → out, [rows, inner]: gate / (1 + e^-gate) * through. */
void gate(int64_t rows, int64_t inner, const float *joint, float *out)
{
    for (int64_t row = 0; row < rows; row++, joint += 2 * inner, out += inner) {
#pragma omp simd
        for (int64_t i = 0; i < inner; i++) {
            float own = joint[i], power = exp_of(own < 0.0f ? own : -own);
            out[i] = own * (own < 0.0f ? power : 1.0f) / (1.0f + power) * joint[inner + i];
        }
    }
}

/* The hash of `uniform` in sampling.py. */
INLINE uint64_t mixed(uint64_t bits)
{
    bits += UINT64_C(0x9E3779B97F4A7C15);
    bits = (bits ^ bits >> 30) * UINT64_C(0xBF58476D1CE4E5B9);
    bits = (bits ^ bits >> 27) * UINT64_C(0x94D049BB133111EB);
    return bits ^ bits >> 31;
}

#define BLOCK 64

/* The token of a row whose cumulated `powers` first exceed `target`; of a block's sums, `blocks`, the same. */
INLINE int64_t first_beyond(double target, const float *powers, const double *blocks, int64_t size)
{
    double below = 0.0;
    int64_t block = 0, last = (size - 1) / BLOCK, likeliest = 0;
    while (block < last && below + blocks[block] <= target)
        below += blocks[block++];
    for (int64_t i = block * BLOCK; i < size; i++) {
        below += powers[i];
        if (below > target && powers[i] > 0.0f)
            return i;
    }
    for (int64_t i = 1; i < size; i++) /* rounding has left nothing beyond the target */
        likeliest = powers[i] > powers[likeliest] ? i : likeliest;
    return likeliest;
}

/* `processed_logp` and `sample` of sampling.py for rows without top-k and top-p. [rows, size] logits → the token drawn of each row, and its
 * log-probability. A temperature of 0 takes the likeliest. `powers` has room for a row, `blocks` for one number of every block of it. */
void draw(int64_t rows, int64_t size, const float *logits, const float *temperature, const int64_t *seeds, const int64_t *index, float *powers,
          double *blocks, int64_t *ids, float *logp)
{
    for (int64_t row = 0; row < rows; row++, logits += size) {
        int is_greedy = temperature[row] == 0.0f;
        float heat = is_greedy ? 1.0f : temperature[row], highest = -INFINITY;
        int64_t chosen = 0;
#pragma omp simd reduction(max : highest)
        for (int64_t i = 0; i < size; i++)
            highest = logits[i] > highest ? logits[i] : highest;
        highest /= heat;
        double total = 0.0;
        for (int64_t start = 0; start < size; start += BLOCK) {
            int64_t end = start + BLOCK < size ? start + BLOCK : size;
            double sum = 0.0;
#pragma omp simd reduction(+ : sum)
            for (int64_t i = start; i < end; i++) {
                powers[i] = exp_of(logits[i] / heat - highest);
                sum += powers[i];
            }
            blocks[start / BLOCK] = sum;
            total += sum;
        }
        if (is_greedy) {
            while (chosen < size - 1 && logits[chosen] < highest)
                chosen++;
        } else {
            uint64_t bits = mixed(mixed((uint64_t)seeds[row]) + (uint64_t)index[row] * UINT64_C(0x9E3779B97F4A7C15));
            chosen = first_beyond((double)(bits >> 11) * 0x1p-53 * total, powers, blocks, size);
        }
        ids[row] = chosen;
        logp[row] = logits[chosen] / heat - highest - (float)log(total);
    }
}
