// What linear layers need beside their matmuls: weights with a norm's weight folded in, the way back
// for their gradients, sums over rows, and transposed copies.

#include <algorithm>
#include <cstring>

#include "vectors.h"

// Arguments from the host, with the same fields as `_Fold` in vector/linear.py. A layer has `experts`
// matrices (n, k), of which row i is row `first` + i among the N that several layers have together;
// k is a multiple of 16. `scale` (k) may be null; its gradient is summed over `rows` rows at a time.
// The folded weights and their gradients are bf16 if `low`, else fp32.
struct Fold {
    const float* scale;
    int64_t experts, n, N, first, k, rows, low;

    // Where a row of the layer's lies among those of all.
    int64_t at(int64_t row) const { return (row / n * N + first + row % n) * k; }
};

// Arguments from the host, with the same fields as `_Rows` in vector/linear.py: M rows (D), bf16 if
// `low`, else fp32, summed over `rows` rows at a time; D is a multiple of 16.
struct Rows {
    int64_t M, D, rows, low;
};

namespace {

constexpr int64_t EDGE = 16;  // of a block that is transposed: one line of a cache

template <class T>
void fold_row(const Fold job, T* out, const float* weight) {
    for (int64_t c = 0; c < job.k; c += LANES) {
        const Floats x = load(weight + c);
        store(out + c, job.scale ? x * load(job.scale + c) : x);
    }
}

template <class T>
void unfold_row(const Fold job, float* g_weight, float* g_scale, const T* g, const float* weight) {
    for (int64_t c = 0; c < job.k; c += LANES) {
        const Floats incoming = load(g + c);
        store(g_weight + c, job.scale ? incoming * load(job.scale + c) : incoming);
        if (job.scale) store(g_scale + c, load(g_scale + c) + incoming * load(weight + c));
    }
}

template <class T>
void fold(const Fold& job, T* out, const float* weight) {
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < job.experts * job.n; row++)
        fold_row(job, out + job.at(row), weight + row * job.k);
}

template <class T>
void unfold(const Fold& job, float* g_weight, float* g_scale, const T* g, const float* weight) {
    const int64_t n_rows = job.experts * job.n;
#pragma omp parallel for schedule(static)
    for (int64_t first = 0; first < n_rows; first += job.rows) {
        float* sums = job.scale ? g_scale + first / job.rows * job.k : nullptr;
        if (sums) std::fill(sums, sums + job.k, 0.0f);
        for (int64_t row = first; row < std::min(first + job.rows, n_rows); row++)
            unfold_row(job, g_weight + row * job.k, sums, g + job.at(row), weight + row * job.k);
    }
}

template <class T>
void sum_rows(const Rows& job, float* sums, const T* x) {
#pragma omp parallel for schedule(static)
    for (int64_t first = 0; first < job.M; first += job.rows) {
        float* sum = sums + first / job.rows * job.D;
        std::fill(sum, sum + job.D, 0.0f);
        for (int64_t row = first; row < std::min(first + job.rows, job.M); row++)
            for (int64_t c = 0; c < job.D; c += LANES)
                store(sum + c, load(sum + c) + load(x + row * job.D + c));
    }
}

// Writes `n_columns` of x, from column c on, as rows `stride` numbers apart.
void transpose_columns(float* out, const float* x, int64_t M, int64_t n, int64_t stride, int64_t c,
                       int64_t n_columns) {
    float block[EDGE][EDGE];
    for (int64_t r = 0; r < M; r += EDGE) {
        const int64_t n_rows = std::min(EDGE, M - r);
        for (int64_t i = 0; i < n_rows; i++)
            for (int64_t j = 0; j < n_columns; j++) block[j][i] = x[(r + i) * n + c + j];
        for (int64_t j = 0; j < n_columns; j++)
            std::memcpy(out + (c + j) * stride + r, block[j], n_rows * sizeof(float));
    }
}

}  // namespace

extern "C" {

// Writes x (M, n), transposed, into rows that are `stride` numbers apart.
void pentameter_transpose(float* out, const float* x, int64_t M, int64_t n, int64_t stride) {
#pragma omp parallel for schedule(static)
    for (int64_t c = 0; c < n; c += EDGE)
        transpose_columns(out, x, M, n, stride, c, std::min(EDGE, n - c));
}

// Writes a layer's rows of `out` (experts, N, k): its weight times the scale.
void pentameter_fold(const Fold* job, void* out, const float* weight) {
    if (job->low)
        fold(*job, (bf16*)out, weight);
    else
        fold(*job, (float*)out, weight);
}

// Computes the gradients of a layer's weight and, per `rows` rows, of the scale: `g_scale`
// (⌈experts · n / rows⌉, k); from g, that of `out`.
void pentameter_unfold(const Fold* job, float* g_weight, float* g_scale, const void* g,
                       const float* weight) {
    if (job->low)
        unfold(*job, g_weight, g_scale, (const bf16*)g, weight);
    else
        unfold(*job, g_weight, g_scale, (const float*)g, weight);
}

// Sums x (M, D) over `rows` rows at a time, (⌈M / rows⌉, D).
void pentameter_sum_rows(const Rows* job, float* sums, const void* x) {
    if (job->low)
        sum_rows(*job, sums, (const bf16*)x);
    else
        sum_rows(*job, sums, (const float*)x);
}
}
