// The cross-entropy of a row of logits, and its gradient.

#include <algorithm>
#include <cmath>

#include "vectors.h"

// Arguments from the host, with the same fields as `_Loss` in vector/loss.py. The logits (M, V) are
// bf16 if `low`, else fp32; columns from `vocabulary` on have no probability. `bias` (V) may be null; its gradient is summed over `rows` rows at a time. A target
// below 0 does not count.
struct Loss {
    const float* bias;
    const int64_t* targets;
    int64_t M, V, vocabulary, rows, low;
};

namespace {

// The first `n` numbers of a vector, or all if there are more; the others are 0.
template <class T>
Floats load_first(const T* from, int64_t n) {
    if (n >= LANES) return load(from);
    T numbers[LANES] = {};
    std::memcpy(numbers, from, n * sizeof(T));
    return load(numbers);
}

template <class T>
void store_first(T* to, Floats x, int64_t n) {
    if (n >= LANES) return store(to, x);
    T numbers[LANES];
    store(numbers, x);
    std::memcpy(to, numbers, n * sizeof(T));
}

// Logits from column c on, -∞ where there is no token.
template <class T>
Floats biased(const Loss& job, const T* logits, int64_t c) {
    Floats x = load_first(logits + c, job.V - c);
    if (job.bias) x += load_first(job.bias + c, job.V - c);
    const Ints left = Ints{} + int32_t(job.vocabulary - c);
    return c + LANES <= job.vocabulary ? x : lane_numbers() < left ? x : all(-__builtin_inff());
}

template <class T>
float logit(const Loss& job, const T* logits, int64_t column) {
    return biased(job, logits, column / LANES * LANES)[column % LANES];
}

// Returns the row's loss; writes its largest logit, and 1 / Σ e^(logit - that one).
template <class T>
float forward_row(const Loss job, int64_t row, float* kept, const T* logits) {
    Floats tops = all(-__builtin_inff()), sum{};
    for (int64_t c = 0; c < job.vocabulary; c += LANES) {
        const Floats x = biased(job, logits, c);
        tops = x > tops ? x : tops;
    }
    float top = tops[0];
    for (int i = 1; i < LANES; i++) top = std::max(top, tops[i]);
    for (int64_t c = 0; c < job.vocabulary; c += LANES)
        sum += exponential(biased(job, logits, c) - top);
    const float total = sum_of(sum), counted = job.targets[row] < 0 ? 0.0f : 1.0f;
    kept[0] = top;
    kept[1] = 1 / total;
    return (std::log(total) + top - logit(job, logits, std::max<int64_t>(job.targets[row], 0))) *
           counted;
}

template <class T>
void backward_row(const Loss job, int64_t row, T* g_logits, float* g_bias, float g,
                  const float* kept, const T* logits) {
    const int64_t target = job.targets[row];
    const float factor = target < 0 ? 0.0f : g;
    for (int64_t c = 0; c < job.V; c += LANES) {
        Floats p = exponential(biased(job, logits, c) - kept[0]) * kept[1];
        if (target >= c && target < c + LANES) p[target - c] -= 1.0f;
        p *= factor;
        if (job.bias) store_first(g_bias + c, load_first(g_bias + c, job.V - c) + p, job.V - c);
        store_first(g_logits + c, p, job.V - c);
    }
}

template <class T>
void forward(const Loss& job, float* losses, float* kept, const T* logits) {
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < job.M; row++)
        losses[row] = forward_row(job, row, kept + 2 * row, logits + row * job.V);
}

template <class T>
void backward(const Loss& job, T* g_logits, float* g_bias, float g, const float* kept,
              const T* logits) {
#pragma omp parallel for schedule(static)
    for (int64_t first = 0; first < job.M; first += job.rows) {
        float* sums = job.bias ? g_bias + first / job.rows * job.V : nullptr;
        if (sums) std::fill(sums, sums + job.V, 0.0f);
        for (int64_t row = first; row < std::min(first + job.rows, job.M); row++)
            backward_row(job, row, g_logits + row * job.V, sums, g, kept + 2 * row,
                         logits + row * job.V);
    }
}

}  // namespace

extern "C" {

// Computes each row's loss (M), and what backward needs of it, `kept` (M, 2).
void pentameter_loss(const Loss* job, float* losses, float* kept, const void* logits) {
    if (job->low)
        forward(*job, losses, kept, (const bf16*)logits);
    else
        forward(*job, losses, kept, (const float*)logits);
}

// Computes the logits' gradient, which may take their place, and the bias's per `rows` rows,
// `g_bias` (⌈M / rows⌉, V), from the number g, the gradient of the summed losses.
void pentameter_loss_gradient(const Loss* job, void* g_logits, float* g_bias, const float* g,
                              const float* kept, const void* logits) {
    if (job->low)
        backward(*job, (bf16*)g_logits, g_bias, *g, kept, (const bf16*)logits);
    else
        backward(*job, (float*)g_logits, g_bias, *g, kept, (const float*)logits);
}
}
