// A sub-layer's output joins the residual stream and is normalised for the next one, forward and
// backward, in one pass over memory: x' = x + dropout(y + bias), and x' normalised, without the
// norm's weight and bias, which are folded into the linear layer that follows. Where no output joins,
// y is null, and x' is x.

#include <algorithm>
#include <cmath>

#include "dropout.h"

// Arguments from the host, with the same fields as `_AddNorm` in vector_kernels.py. There are M
// rows with D channels, a multiple of 16, T rows per batch row; `keys` (M / T, 2) are dropout's, or
// null. Each block of dropout's numbers has `in_block` rows. `bias` (D) may be null; its gradient is
// summed over `rows` rows at a time. A norm that is not `centred` subtracts no mean. y and the
// normed rows are bf16 if `low`, else fp32.
struct AddNorm {
    const float* bias;
    const int32_t* keys;
    int64_t M, T, D, in_block, centred, rows, low;
    int32_t bound;
    float dropout_scale, eps;

    Dropout dropout(int64_t row) const {
        if (!keys) return {};
        const int32_t* key = keys + row / T * 2;
        const Dropout of_first{dropout_scale, bound, key[0], key[1]};
        return of_first.folded(row % T / in_block);
    }

    // Number of a row's first element in its block; see `stream_index` in dropout.py.
    int64_t first(int64_t row) const { return row % T % in_block * D; }
};

namespace {

// Elements from number `element` in a batch row on, after dropout.
inline Floats dropped(Floats x, const Dropout& dropout, int64_t element) {
    return dropout.scale == 0 ? x : x * dropout.factor(lane_numbers() + int32_t(element));
}

// Below, the job is a copy: writes to memory cannot change it, and nothing in it is recomputed for
// each vector.

template <class Y>
void forward_row(const AddNorm job, int64_t row, float* out, Y* normed, float* mean_out,
                 float* scale_out, const float* x, const Y* y) {
    const Dropout dropout = job.dropout(row);
    const int64_t first = job.first(row);
    const float* total = y ? out : x;
    Floats sum{}, squares{};
    for (int64_t c = 0; c < job.D; c += LANES) {
        if (y) {
            Floats added = load(y + c);
            if (job.bias) added += load(job.bias + c);
            store(out + c, load(x + c) + dropped(added, dropout, first + c));
        }
        sum += load(total + c);
    }
    const float mean = job.centred ? sum_of(sum) / float(job.D) : 0.0f;
    for (int64_t c = 0; c < job.D; c += LANES) {
        const Floats centred = load(total + c) - mean;
        squares += centred * centred;
    }
    const float scale = 1 / std::sqrt(sum_of(squares) / float(job.D) + job.eps);
    for (int64_t c = 0; c < job.D; c += LANES) store(normed + c, (load(total + c) - mean) * scale);
    mean_out[row] = mean;
    scale_out[row] = scale;
}

// Adds y's gradient to `g_bias`, unless there is no y.
template <class Y>
void backward_row(const AddNorm job, int64_t row, float* g_x, Y* g_y, float* g_bias, const float* g,
                  const Y* g_norm, const float* x, float row_mean, float row_scale) {
    const Dropout dropout = job.dropout(row);
    const int64_t first = job.first(row);
    const auto normalised = [&](int64_t c) { return (load(x + c) - row_mean) * row_scale; };
    Floats sum{}, products{};
    for (int64_t c = 0; c < job.D; c += LANES) {
        const Floats incoming = load(g_norm + c);
        sum += incoming;
        products += incoming * normalised(c);
    }
    const float mean = job.centred ? sum_of(sum) / float(job.D) : 0.0f;
    const float along = sum_of(products) / float(job.D);
    for (int64_t c = 0; c < job.D; c += LANES) {
        Floats total = (load(g_norm + c) - mean - normalised(c) * along) * row_scale;
        if (g) total += load(g + c);
        store(g_x + c, total);
        if (!g_y) continue;
        const Floats added = dropped(total, dropout, first + c);
        store(g_y + c, added);
        store(g_bias + c, load(g_bias + c) + added);
    }
}

template <class Y>
void forward(const AddNorm& job, float* out, Y* normed, float* mean, float* scale, const float* x,
             const Y* y) {
    const int64_t D = job.D;
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < job.M; row++)
        forward_row(job, row, y ? out + row * D : nullptr, normed + row * D, mean, scale, x + row * D,
                    y ? y + row * D : nullptr);
}

template <class Y>
void backward(const AddNorm& job, float* g_x, Y* g_y, float* g_bias, const float* g, const Y* g_norm,
              const float* out, const float* mean, const float* scale) {
    const int64_t D = job.D;
#pragma omp parallel for schedule(static)
    for (int64_t first = 0; first < job.M; first += job.rows) {
        float* sums = g_y ? g_bias + first / job.rows * D : nullptr;
        if (sums) std::fill(sums, sums + D, 0.0f);
        for (int64_t row = first; row < std::min(first + job.rows, job.M); row++)
            backward_row(job, row, g_x + row * D, g_y ? g_y + row * D : nullptr, sums,
                         g ? g + row * D : nullptr,
                         g_norm + row * D, out + row * D, mean[row], scale[row]);
    }
}

}  // namespace

extern "C" {

// Computes out (M, D) from x, both in fp32: x after dropout.
void pentameter_dropout(const AddNorm* job, float* out, const float* x) {
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < job->M; row++) {
        const AddNorm copy = *job;
        const Dropout dropout = copy.dropout(row);
        for (int64_t c = row * copy.D; c < (row + 1) * copy.D; c += LANES)
            store(out + c, dropped(load(x + c), dropout, copy.first(row) + c - row * copy.D));
    }
}

// Computes out (M, D) in fp32, its norm, and each row's mean and scale, from x in fp32 and y. Without
// y, which is null, there is no out.
void pentameter_add_norm(const AddNorm* job, float* out, void* normed, float* mean, float* scale,
                         const float* x, const void* y) {
    if (job->low)
        forward(*job, out, (bf16*)normed, mean, scale, x, (const bf16*)y);
    else
        forward(*job, out, (float*)normed, mean, scale, x, (const float*)y);
}

// Computes gradients for x, y and, per `rows` rows, the bias: `g_bias` (⌈M / rows⌉, D); from out's,
// which may be null, its norm's, and out. Without y, g_y is null, and the bias's is not written.
void pentameter_add_norm_backward(const AddNorm* job, float* g_x, void* g_y, float* g_bias,
                                  const float* g, const void* g_norm, const float* out,
                                  const float* mean, const float* scale) {
    if (job->low)
        backward(*job, g_x, (bf16*)g_y, g_bias, g, (const bf16*)g_norm, out, mean, scale);
    else
        backward(*job, g_x, (float*)g_y, g_bias, g, (const float*)g_norm, out, mean, scale);
}
}
