// Feed-forward activation after PyTorch's matmuls: f(h + bias); in a gated layer f(first half of
// h's channels) times the second half. Forward, and backward with forward's output again, one pass
// over memory each.

#include <algorithm>

#include "activation.h"

// Arguments from the host, with the same fields as `_Activation` in vector_kernels.py. h is (M, N)
// and the output (M, n), with N = n or, gated, 2 · n; bf16 if `low`, else fp32; n is a multiple of
// 16. `bias` (N) may be null; its gradient is summed over `rows` rows at a time. `pieces` and
// `per_unit` as in `Smooth`.
struct Activation {
    const float *bias, *pieces;
    int64_t M, N, n, rows, low, kind;
    float per_unit;
};

namespace {

enum Kind { TABLE, RELU2, RELU, SILU, GELU, GELU_TANH };  // as vector_kernels.py counts them

template <class T>
Floats biased(const Activation& job, const T* h, int64_t channel) {
    const Floats x = load(h + channel);
    return job.bias ? x + load(job.bias + channel) : x;
}

// Rows copy the job, so that writes to memory cannot change it.
template <class F, class T>
void forward_row(const Activation job, const F& f, T* y, const T* h) {
    for (int64_t c = 0; c < job.n; c += LANES) {
        const Floats value = f(biased(job, h, c)).y;
        store(y + c, job.N == job.n ? value : value * biased(job, h, job.n + c));
    }
}

template <class F, class T>
void forward(const Activation& job, T* y, const T* h) {
    const F f(job.pieces, job.per_unit);
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < job.M; row++)
        forward_row(job, f, y + row * job.n, h + row * job.N);
}

// Writes h's gradients from channel `c` on, and adds them to the bias's.
template <class T>
void keep(T* g_h, float* g_bias, int64_t c, Floats g) {
    store(g_h + c, g);
    store(g_bias + c, load(g_bias + c) + g);
}

template <class F, class T>
void backward_row(const Activation job, const F& f, T* g_h, T* y, float* g_bias, const T* g,
                  const T* h) {
    const int64_t n = job.n;
    for (int64_t c = 0; c < n; c += LANES) {
        const Value value = f(biased(job, h, c));
        const Floats incoming = load(g + c);
        if (job.N == n) {
            store(y + c, value.y);
            keep(g_h, g_bias, c, incoming * value.slope);
        } else {
            const Floats factor = biased(job, h, n + c);
            store(y + c, value.y * factor);
            keep(g_h, g_bias, c, incoming * value.slope * factor);
            keep(g_h, g_bias, n + c, incoming * value.y);
        }
    }
}

template <class F, class T>
void backward(const Activation& job, T* g_h, T* y, float* g_bias, const T* g, const T* h) {
    const F f(job.pieces, job.per_unit);
#pragma omp parallel for schedule(static)
    for (int64_t first = 0; first < job.M; first += job.rows) {
        float* sums = g_bias + first / job.rows * job.N;
        std::fill(sums, sums + job.N, 0.0f);
        for (int64_t row = first; row < std::min(first + job.rows, job.M); row++)
            backward_row(job, f, g_h + row * job.N, y + row * job.n, sums, g + row * job.n,
                         h + row * job.N);
    }
}

// Calls `act` with a function of the job's kind and a number of its type.
template <class Act>
void with_kind(const Activation& job, Act act) {
    const float *pieces = job.pieces, per_unit = job.per_unit;
    switch (job.kind) {
        case TABLE: return act(Smooth(pieces, per_unit), bf16());
        case RELU2:
            return job.low ? act(SquaredRelu(pieces, per_unit), bf16())
                           : act(SquaredRelu(pieces, per_unit), float());
        case RELU: return act(Relu(pieces, per_unit), float());
        case SILU: return act(Silu(pieces, per_unit), float());
        case GELU: return act(Gelu(pieces, per_unit), float());
        case GELU_TANH: return act(GeluTanh(pieces, per_unit), float());
    }
}

}  // namespace

extern "C" {

// Computes y (M, n) from h (M, N).
void pentameter_activate(const Activation* job, void* y, const void* h) {
    with_kind(*job, [&](const auto& f, auto number) {
        using T = decltype(number);
        forward<std::decay_t<decltype(f)>>(*job, (T*)y, (const T*)h);
    });
}

// Computes h's gradient, the bias's per `rows` rows, `g_bias` (⌈M / rows⌉, N), and y again, from
// y's gradient `g` (M, n).
void pentameter_activation_gradients(const Activation* job, void* g_h, void* y, float* g_bias,
                                     const void* g, const void* h) {
    with_kind(*job, [&](const auto& f, auto number) {
        using T = decltype(number);
        backward<std::decay_t<decltype(f)>>(*job, (T*)g_h, (T*)y, g_bias, (const T*)g, (const T*)h);
    });
}
}
