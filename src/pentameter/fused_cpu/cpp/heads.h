// Query, key and value heads: their layout, and the row operations between the linear layer and
// attention, both ways.

#pragma once

#include <cmath>
#include <cstring>

#include "dropout.h"
#include "tiles.h"

// Dropout on a row's weights.
struct WeightsDropout : Dropout {
    int stride;

    // Number of (head, query, key) in its batch row; see AttentionDropout.
    int32_t index(int head, int query, int key) const {
        return int32_t((uint32_t(head) * stride + query) * stride + key);
    }
};

// Queries, keys or values from a linear layer, in rows (batch, time): head 0's start, the distances
// between rows and between heads, the layer's bias and a norm's weight (K) for each head, if any.
// Their gradients have the same layout.
struct Part {
    const bf16* data;
    const float *bias, *norm;
    int64_t row, head, turns;  // turns: whether its channels do, or a norm acts on them

    int64_t at(int64_t row_number, int h) const { return row_number * row + h * head; }
};

// Arguments from the host, with the same fields as `_Job` in amx_attention.py. There are B batch
// rows, H query heads and G KV heads, each for H / G adjacent query heads. A head's channels i and
// i + half rotate by angles with these cosines and sines (T, half). `keys` (B, 2) are dropout's.
struct Job {
    Part q, k, v;
    const float *cosine, *sine;
    const int32_t* keys;
    int64_t B, T, H, G, K, half, stride;
    int32_t bound;
    float dropout_scale, norm_eps;

    int64_t padded() const { return (T + BLOCK - 1) / BLOCK * BLOCK; }
    int64_t sharing() const { return H / G; }
    WeightsDropout dropout(int64_t b) const {
        return {{dropout_scale, bound, keys[2 * b], keys[2 * b + 1]}, int(stride)};
    }
};

constexpr int MAX_HEAD = 256;

// One row in a head, in fp32, between the linear layer's output and attention's matmul.
class Row {
  public:
    Row(const Job& job, const Part& part) : job_(job), part_(part) {}

    void read(int64_t row_number, int h) {
        const bf16* in = part_.data + part_.at(row_number, h);
        const float* bias = part_.bias ? part_.bias + h * part_.head : nullptr;
        for (int k = 0; k < job_.K; k += 16) {
            const __m512 x = to_float(load16(in + k));
            _mm512_store_ps(x_ + k, bias ? _mm512_add_ps(x, _mm512_loadu_ps(bias + k)) : x);
        }
    }

    // Applies norm and rotation, at position t.
    void turn(int64_t t) {
        if (part_.norm) {
            const __m512 factor = scale();
            for (int k = 0; k < job_.K; k += 16) {
                const __m512 weight = _mm512_mul_ps(factor, _mm512_loadu_ps(part_.norm + k));
                _mm512_store_ps(x_ + k, _mm512_mul_ps(_mm512_load_ps(x_ + k), weight));
            }
        }
        rotate(x_, t, 1);
    }

    // Replaces the rotated row's gradient by that for the row as read; adds to the norm weight's
    // gradient.
    void turn_gradient(float* g, float* g_norm, int64_t t) {
        rotate(g, t, -1);
        if (!part_.norm) return;
        const __m512 factor = scale();
        __m512 sum = _mm512_setzero_ps();
        for (int k = 0; k < job_.K; k += 16) {
            const __m512 x = _mm512_mul_ps(factor, _mm512_load_ps(x_ + k));
            const __m512 gx = _mm512_mul_ps(_mm512_loadu_ps(g + k), x);
            _mm512_store_ps(x_ + k, x);
            _mm512_storeu_ps(g_norm + k, _mm512_add_ps(_mm512_loadu_ps(g_norm + k), gx));
            sum = _mm512_fmadd_ps(gx, _mm512_loadu_ps(part_.norm + k), sum);
        }
        const __m512 mean = _mm512_set1_ps(_mm512_reduce_add_ps(sum) / job_.K);
        for (int k = 0; k < job_.K; k += 16) {
            const __m512 weighted =
                _mm512_mul_ps(_mm512_loadu_ps(g + k), _mm512_loadu_ps(part_.norm + k));
            const __m512 along = _mm512_mul_ps(_mm512_load_ps(x_ + k), mean);
            _mm512_storeu_ps(g + k, _mm512_mul_ps(factor, _mm512_sub_ps(weighted, along)));
        }
    }

    void write(bf16* to) const {
        for (int k = 0; k < job_.K; k += 16) store16(to + k, to_bf16(_mm512_load_ps(x_ + k)));
    }

  private:
    // 1 / the root mean square.
    __m512 scale() const {
        __m512 sum = _mm512_setzero_ps();
        for (int k = 0; k < job_.K; k += 16) {
            const __m512 x = _mm512_load_ps(x_ + k);
            sum = _mm512_fmadd_ps(x, x, sum);
        }
        return _mm512_set1_ps(1 / std::sqrt(_mm512_reduce_add_ps(sum) / job_.K + job_.norm_eps));
    }

    void rotate(float* x, int64_t t, float direction) const {
        const float *cosine = job_.cosine + t * job_.half, *sine = job_.sine + t * job_.half;
        for (int k = 0; k < job_.half; k += 16) {
            const int n = int(job_.half) - k;
            const __mmask16 lanes = n >= 16 ? 0xffff : __mmask16((1u << n) - 1);
            const __m512 a = _mm512_maskz_loadu_ps(lanes, x + k);
            const __m512 b = _mm512_maskz_loadu_ps(lanes, x + k + job_.half);
            const __m512 c = _mm512_maskz_loadu_ps(lanes, cosine + k);
            const __m512 s = _mm512_mul_ps(_mm512_maskz_loadu_ps(lanes, sine + k),
                                           _mm512_set1_ps(direction));
            _mm512_mask_storeu_ps(x + k, lanes, _mm512_fmsub_ps(a, c, _mm512_mul_ps(b, s)));
            _mm512_mask_storeu_ps(x + k + job_.half, lanes,
                                  _mm512_fmadd_ps(b, c, _mm512_mul_ps(a, s)));
        }
    }

    const Job& job_;
    const Part& part_;
    alignas(64) float x_[MAX_HEAD];
};

// Prepares head h in batch row b for attention's matmuls, in rows (TP, K).
inline void read_part(bf16* out, const Job& job, const Part& part, int64_t b, int h) {
    Row row(job, part);
    for (int64_t t = 0; t < job.T; t++, out += job.K) {
        const bf16* in = part.data + part.at(b * job.T + t, h);
        for (int k = 0; k < job.K; k += 32)  // the next head's, into the cache
            _mm_prefetch((const char*)(in + part.head + k), _MM_HINT_T1);
        if (!part.turns && !part.bias) {
            std::memcpy(out, in, 2 * job.K);
            continue;
        }
        row.read(b * job.T + t, h);
        if (part.turns) row.turn(t);
        row.write(out);
    }
    std::memset(out, 0, 2 * (job.padded() - job.T) * job.K);
}

// Computes the gradient for head h in batch row b from the prepared head's, in rows
// (TP, K), which it overwrites. `g_norm` (K) begins as zeros.
inline void write_part(bf16* to, float* g, float* g_norm, const Job& job, const Part& part, int64_t b,
                int h) {
    Row row(job, part);
    for (int64_t t = 0; t < job.T; t++, g += job.K) {
        if (part.turns) {
            if (part.norm) row.read(b * job.T + t, h);
            row.turn_gradient(g, g_norm, t);
        }
        bf16* out = to + part.at(b * job.T + t, h);
        for (int k = 0; k < job.K; k += 16) store16(out + k, to_bf16(_mm512_loadu_ps(g + k)));
    }
}

// Copies head h's rows (T, K) from x (B, T, H · K).
inline void read_head(bf16* out, const bf16* x, const Job& job, int64_t b, int h) {
    const Part part{x, nullptr, nullptr, job.H * job.K, job.K, 0};
    for (int64_t t = 0; t < job.T; t++, out += job.K) {
        const bf16* in = x + part.at(b * job.T + t, h);
        for (int k = 0; k < job.K; k += 32)
            _mm_prefetch((const char*)(in + job.K + k), _MM_HINT_T1);
        std::memcpy(out, in, 2 * job.K);
    }
    std::memset(out, 0, 2 * (job.padded() - job.T) * job.K);
}
