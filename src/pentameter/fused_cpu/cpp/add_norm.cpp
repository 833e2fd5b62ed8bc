// A sub-layer's output joins the residual stream and is normalised for the next one, forward and
// backward, in one pass over memory: x' = x + dropout(y + bias), and x' normalised, without a norm's
// weight and bias, which the linear layer that reads it has folded in.

#include <algorithm>
#include <cmath>

#include "dropout.h"

// What the host passes; `_AddNorm` of amx.py has the same fields. There are M rows of D channels, a
// multiple of 16, T of them for each row of the batch; `keys` (M / T, 2) are those of dropout. `bias`
// (D) may be null, and its gradient is summed over `rows` rows at a time. A norm that is not `centred`
// subtracts no mean.
struct AddNorm {
    const float* bias;
    const int32_t* keys;
    int64_t M, T, D, centred, rows;
    int32_t bound;
    float dropout_scale, eps;

    Dropout dropout(int64_t row) const {
        const int32_t* key = keys + row / T * 2;
        return {dropout_scale, bound, key[0], key[1]};
    }
};

namespace {

// Elements `channel` … `channel` + 15 of a row after dropout.
inline __m512 dropped(__m512 x, const AddNorm& job, const Dropout& dropout, int64_t row,
                      int64_t channel) {
    if (dropout.scale == 0) return x;
    const int32_t first = int32_t(row % job.T * job.D + channel);
    const __mmask16 keep = dropout.keep(_mm512_add_epi32(LANES, _mm512_set1_epi32(first)));
    return _mm512_maskz_mul_ps(keep, x, _mm512_set1_ps(dropout.scale));
}

float mean_of(__m512 sum, int64_t D) { return _mm512_reduce_add_ps(sum) / float(D); }

void forward_row(const AddNorm& job, int64_t row, float* out, bf16* normed, float* mean_out,
                 float* scale_out, const float* x, const bf16* y) {
    const Dropout dropout = job.dropout(row);
    __m512 sum = _mm512_setzero_ps(), squares = _mm512_setzero_ps();
    for (int64_t c = 0; c < job.D; c += 16) {
        __m512 added = to_float(load16(y + c));
        if (job.bias) added = _mm512_add_ps(added, _mm512_loadu_ps(job.bias + c));
        added = dropped(added, job, dropout, row, c);
        const __m512 total = _mm512_add_ps(_mm512_loadu_ps(x + c), added);
        _mm512_storeu_ps(out + c, total);
        sum = _mm512_add_ps(sum, total);
    }
    const float mean = job.centred ? mean_of(sum, job.D) : 0.0f;
    const __m512 means = _mm512_set1_ps(mean);
    for (int64_t c = 0; c < job.D; c += 16) {
        const __m512 centred = _mm512_sub_ps(_mm512_loadu_ps(out + c), means);
        squares = _mm512_fmadd_ps(centred, centred, squares);
    }
    const float scale = 1 / std::sqrt(mean_of(squares, job.D) + job.eps);
    for (int64_t c = 0; c < job.D; c += 16) {
        const __m512 centred = _mm512_sub_ps(_mm512_loadu_ps(out + c), means);
        store16(normed + c, to_bf16(_mm512_mul_ps(centred, _mm512_set1_ps(scale))));
    }
    mean_out[row] = mean;
    scale_out[row] = scale;
}

// Adds y's gradient to `g_bias`.
void backward_row(const AddNorm& job, int64_t row, float* g_x, bf16* g_y, float* g_bias,
                  const float* g, const bf16* g_norm, const float* x, float row_mean,
                  float row_scale) {
    const Dropout dropout = job.dropout(row);
    const __m512 means = _mm512_set1_ps(row_mean), scale = _mm512_set1_ps(row_scale);
    const auto normalised = [&](int64_t c) {
        return _mm512_mul_ps(_mm512_sub_ps(_mm512_loadu_ps(x + c), means), scale);
    };
    __m512 sum = _mm512_setzero_ps(), products = _mm512_setzero_ps();
    for (int64_t c = 0; c < job.D; c += 16) {
        const __m512 incoming = to_float(load16(g_norm + c));
        sum = _mm512_add_ps(sum, incoming);
        products = _mm512_fmadd_ps(incoming, normalised(c), products);
    }
    const __m512 mean = _mm512_set1_ps(job.centred ? mean_of(sum, job.D) : 0.0f);
    const __m512 along = _mm512_set1_ps(mean_of(products, job.D));
    for (int64_t c = 0; c < job.D; c += 16) {
        const __m512 rest = _mm512_sub_ps(to_float(load16(g_norm + c)), mean);
        __m512 total = _mm512_mul_ps(scale, _mm512_fnmadd_ps(normalised(c), along, rest));
        if (g) total = _mm512_add_ps(total, _mm512_loadu_ps(g + c));
        _mm512_storeu_ps(g_x + c, total);
        const __m512 added = dropped(total, job, dropout, row, c);
        store16(g_y + c, to_bf16(added));
        _mm512_storeu_ps(g_bias + c, _mm512_add_ps(_mm512_loadu_ps(g_bias + c), added));
    }
}

}  // namespace

extern "C" {

// out (M, D) in fp32, its norm, and what each row's is computed with, from x in fp32 and y.
void pentameter_add_norm(const AddNorm* job, float* out, bf16* normed, float* mean, float* scale,
                         const float* x, const bf16* y) {
    const int64_t D = job->D;
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < job->M; row++)
        forward_row(*job, row, out + row * D, normed + row * D, mean, scale, x + row * D,
                    y + row * D);
}

// The gradients of x and y and, of every `rows` rows, of the bias: `g_bias` (⌈M / rows⌉, D); from that
// of out, which may be null, that of its norm, and out.
void pentameter_add_norm_backward(const AddNorm* job, float* g_x, bf16* g_y, float* g_bias,
                                  const float* g, const bf16* g_norm, const float* out,
                                  const float* mean, const float* scale) {
    const int64_t D = job->D;
#pragma omp parallel for schedule(static)
    for (int64_t first = 0; first < job->M; first += job->rows) {
        float* sums = g_bias + first / job->rows * D;
        std::fill(sums, sums + D, 0.0f);
        for (int64_t row = first; row < std::min(first + job->rows, job->M); row++)
            backward_row(*job, row, g_x + row * D, g_y + row * D, sums, g ? g + row * D : nullptr,
                         g_norm + row * D, out + row * D, mean[row], scale[row]);
    }
}
}
