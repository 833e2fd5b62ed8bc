// The router of a layer of experts: its logits, a linear layer with few outputs in fp32, and the
// choice of k among E experts by them. Both go forward and backward in one parallel region each:
// as operations on some thousand short rows they take far longer to start than to compute.

#include <algorithm>
#include <cmath>
#include <vector>

#include "vectors.h"

// Arguments from the host, with the same fields as `_Logits` in router.py: `weight` (E, D) is
// multiplied by the preceding norm's `scale` (D). There are N tokens x (N, D), bf16 if `low`, else
// fp32; D is a multiple of 16. The weight's gradient is summed over `rows` tokens at a time.
struct Logits {
    const float *scale, *weight;
    int64_t N, D, E, rows, low;
};

// Arguments from the host, with the same fields as `_Choice` in router.py. Experts' scores are the
// logits' softmax, or their `sigmoid`; `balance` (E), null for none, is added to scores to rank
// them. Weights are the chosen scores, divided by their sum if they are to `renormalize`; or, if
// `top_k_first`, a softmax over the chosen logits. They are multiplied by `factor`.
struct Choice {
    const float* balance;
    int64_t N, E, k, sigmoid, top_k_first, renormalize;
    float factor;
};

namespace {

// So many sums are added up side by side, as each addition waits for the one before.
constexpr int64_t SUMS = 4;

template <class X>
void multiply(const Logits job, float* out, const X* x) {
    const int64_t D = job.D, width = (job.E + LANES - 1) / LANES * LANES;
    std::vector<float> weight(D * width);  // times scale, transposed: experts in the lanes
    for (int64_t e = 0; e < job.E; e++)
        for (int64_t c = 0; c < D; c++) weight[c * width + e] = job.weight[e * D + c] * job.scale[c];
#pragma omp parallel
    {
        std::vector<float> rows(SUMS * D);
#pragma omp for schedule(static)
        for (int64_t first = 0; first < job.N; first += SUMS) {
            const int64_t n = std::min(SUMS, job.N - first);
            for (int64_t i = 0; i < n * D; i += LANES) store(&rows[i], load(x + first * D + i));
            for (int64_t e = 0; e < job.E; e += LANES) {
                Floats totals[SUMS] = {};
                for (int64_t c = 0; c < D; c++)
                    for (int64_t i = 0; i < SUMS; i++)
                        totals[i] += load(&weight[c * width + e]) * rows[i * D + c];
                const int64_t n_experts = std::min<int64_t>(LANES, job.E - e);
                for (int64_t i = 0; i < n; i++)
                    std::memcpy(out + (first + i) * job.E + e, totals + i, 4 * n_experts);
            }
        }
    }
}

// Writes x's gradient for n ≤ `rows` tokens, and their gᵀ · x to `products` (E, D).
template <class X>
void differentiate(const Logits job, int64_t n, X* g_x, float* products, const float* g, const X* x) {
    const int64_t D = job.D, E = job.E;
    for (int64_t first = 0; first < n; first += SUMS)
        for (int64_t c = 0; c < D; c += LANES) {
            const auto token = [&](int64_t i) { return std::min(first + i, n - 1); };
            Floats totals[SUMS] = {};
            for (int64_t e = 0; e < E; e++)
                for (int64_t i = 0; i < SUMS; i++)
                    totals[i] += load(job.weight + e * D + c) * g[token(i) * E + e];
            for (int64_t i = 0; i < SUMS; i++)
                store(g_x + token(i) * D + c, totals[i] * load(job.scale + c));
        }
    for (int64_t first = 0; first < E; first += SUMS)
        for (int64_t c = 0; c < D; c += LANES) {
            const auto expert = [&](int64_t i) { return std::min(first + i, E - 1); };
            Floats totals[SUMS] = {};
            for (int64_t token = 0; token < n; token++)
                for (int64_t i = 0; i < SUMS; i++)
                    totals[i] += load(x + token * D + c) * g[token * E + expert(i)];
            for (int64_t i = 0; i < SUMS; i++) store(products + expert(i) * D + c, totals[i]);
        }
}

template <class X>
void multiply_backward(const Logits job, X* g_x, float* g_weight, float* g_scale, float* products,
                       const float* g, const X* x) {
    const int64_t D = job.D, size = job.E * D, n_parts = (job.N + job.rows - 1) / job.rows;
#pragma omp parallel
    {
#pragma omp for schedule(static)
        for (int64_t part = 0; part < n_parts; part++) {
            const int64_t first = part * job.rows, n = std::min(job.rows, job.N - first);
            differentiate(job, n, g_x + first * D, products + part * size, g + first * job.E,
                          x + first * D);
        }
#pragma omp for schedule(static)
        for (int64_t c = 0; c < D; c += LANES) {
            Floats of_scale{};
            for (int64_t place = c; place < size; place += D) {
                Floats total{};
                for (int64_t part = 0; part < n_parts; part++)
                    total += load(products + part * size + place);
                store(g_weight + place, total * load(job.scale + c));
                of_scale += total * load(job.weight + place);
            }
            store(g_scale + c, of_scale);
        }
    }
}

// e^(x - the largest) ÷ their sum, for n vectors; returns the logarithms of the sums of e^x.
Floats softmax(Floats* out, const Floats* x, int64_t n) {
    Floats highest = x[0], sum{};
    for (int64_t i = 1; i < n; i++) highest = x[i] > highest ? x[i] : highest;
    for (int64_t i = 0; i < n; i++) sum += out[i] = exponential(x[i] - highest);
    for (int64_t i = 0; i < n; i++) out[i] /= sum;
    for (int l = 0; l < LANES; l++) sum[l] = std::log(sum[l]);
    return highest + sum;
}

// LANES tokens side by side, a vector for each expert or choice: no step depends on another token.
struct Tokens {
    const Choice job;
    std::vector<Floats> logits, scores, ranked;  // of all experts
    std::vector<Floats> weights, g;              // of the chosen ones
    std::vector<Ints> experts;
    Floats log_sums;

    explicit Tokens(const Choice& job)
        : job(job), logits(job.E), scores(job.E), ranked(job.E), weights(job.k), g(job.k),
          experts(job.k) {}

    // `n` rows of `width` numbers become as many lanes of `width` vectors, and back.
    template <class Vector, class Number>
    static void read(std::vector<Vector>& to, const Number* rows, int64_t n) {
        const int64_t width = to.size();
        for (int64_t l = 0; l < n; l++)
            for (int64_t i = 0; i < width; i++) to[i][l] = rows[l * width + i];
    }
    template <class Vector, class Number>
    static void write(Number* rows, const std::vector<Vector>& from, int64_t n) {
        const int64_t width = from.size();
        for (int64_t l = 0; l < n; l++)
            for (int64_t i = 0; i < width; i++) rows[l * width + i] = from[i][l];
    }

    void score() {
        log_sums = softmax(scores.data(), logits.data(), job.E);
        if (job.sigmoid)
            for (int64_t e = 0; e < job.E; e++) scores[e] = 1.0f / (1.0f + exponential(-logits[e]));
    }

    // The k best experts, of equal ones the first; a number that is none counts as the largest.
    void choose() {
        for (int64_t e = 0; e < job.E; e++)
            ranked[e] = job.balance   ? scores[e] + job.balance[e]
                        : job.sigmoid ? scores[e]
                                      : logits[e];
        for (int64_t j = 0; j < job.k; j++) {
            Floats best = ranked[0];
            Ints number{};
            for (int32_t e = 1; e < job.E; e++) {
                const Ints better = ~(ranked[e] <= best) & (best == best);
                best = better ? ranked[e] : best;
                number = better ? Ints{} + e : number;
            }
            experts[j] = number;
            for (int32_t e = 0; e < job.E; e++)
                ranked[e] = number == e ? all(-__builtin_inff()) : ranked[e];
        }
    }

    // The chosen experts' scores, or the softmax over their logits.
    void weigh() {
        const std::vector<Floats>& from = job.top_k_first ? logits : scores;
        for (int64_t j = 0; j < job.k; j++) {
            weights[j] = from[0];
            for (int32_t e = 1; e < job.E; e++)
                weights[j] = experts[j] == e ? from[e] : weights[j];
        }
        if (job.top_k_first) softmax(weights.data(), weights.data(), job.k);
    }

    Floats sum_of_weights() const {
        Floats sum{};
        for (const Floats& weight : weights) sum += weight;
        return sum;
    }

    void normalize() {
        const Floats divisor = job.renormalize ? sum_of_weights() : all(1.0f);
        for (Floats& weight : weights) weight = weight / divisor * job.factor;
    }

    std::vector<Floats> squares() const {
        Floats of_logits{};
        for (const Floats& each : logits) of_logits += each * each;
        return {log_sums * log_sums, of_logits};
    }

    Floats mean_gradient() const {
        Floats total{};
        for (int64_t j = 0; j < job.k; j++) total += g[j] * weights[j];
        return total;
    }

    // Turns g, the gradients of normalized weights, into those of the weights before.
    void normalize_backward() {
        for (Floats& each : g) each *= job.factor;
        if (!job.renormalize) return;
        const Floats sum = sum_of_weights(), mean = mean_gradient() / sum;
        for (Floats& each : g) each = (each - mean) / sum;
    }

    // Writes the logits' gradients over `ranked`. A softmax over the chosen logits is one over all, in
    // which the scores of the others are 0.
    void logits_backward() {
        const Floats mean = job.sigmoid ? Floats{} : mean_gradient();
        for (int32_t e = 0; e < job.E; e++) {
            Floats g_score{}, weight{};
            for (int64_t j = 0; j < job.k; j++) {
                g_score = experts[j] == e ? g[j] : g_score;
                weight = experts[j] == e ? weights[j] : weight;
            }
            const Floats score = job.top_k_first ? weight : scores[e];
            ranked[e] = (g_score - mean) * (job.sigmoid ? score * (1.0f - score) : score);
        }
    }
};

// Reads the logits (N, E) of LANES tokens at a time, the last of what remains, and has
// `compute(tokens, first, n)` do the rest for n tokens from `first` on.
template <class Compute>
void for_tokens(const Choice& job, const float* logits, Compute compute) {
#pragma omp parallel
    {
        Tokens tokens(job);
#pragma omp for schedule(static)
        for (int64_t first = 0; first < job.N; first += LANES) {
            const int64_t n = std::min<int64_t>(LANES, job.N - first);
            Tokens::read(tokens.logits, logits + first * job.E, n);
            compute(tokens, first, n);
        }
    }
}

}  // namespace

extern "C" {

// Computes out (N, E) in fp32, x · (weight times scale)ᵀ.
void pentameter_router_logits(const Logits* job, float* out, const void* x) {
    if (job->low)
        multiply(*job, out, (const bf16*)x);
    else
        multiply(*job, out, (const float*)x);
}

// Computes the gradients of x, in its dtype, of the weight (E, D) and of its scale (D), for the
// logits' gradient g (N, E). `products` (⌈N / rows⌉, E, D) is for intermediate results.
void pentameter_router_logits_backward(const Logits* job, void* g_x, float* g_weight, float* g_scale,
                                       float* products, const float* g, const void* x) {
    if (job->low)
        multiply_backward(*job, (bf16*)g_x, g_weight, g_scale, products, g, (const bf16*)x);
    else
        multiply_backward(*job, (float*)g_x, g_weight, g_scale, products, g, (const float*)x);
}

// Chooses experts (N, k) by logits (N, E), the best first, and computes their weights (N, k), and
// `sums` (2) over tokens: of their squared log-sum-exp of logits, and of their squared logits.
void pentameter_choose_experts(const Choice* job, int64_t* experts, float* weights, float* sums,
                               const float* logits) {
    std::vector<float> squares(2 * job->N);
    for_tokens(*job, logits, [&](Tokens& tokens, int64_t first, int64_t n) {
        tokens.score();
        tokens.choose();
        tokens.weigh();
        tokens.normalize();
        Tokens::write(experts + first * job->k, tokens.experts, n);
        Tokens::write(weights + first * job->k, tokens.weights, n);
        Tokens::write(&squares[first * 2], tokens.squares(), n);
    });
    double log_sums = 0, of_logits = 0;  // in one order, whatever the number of threads
    for (int64_t token = 0; token < job->N; token++) {
        log_sums += squares[token * 2];
        of_logits += squares[token * 2 + 1];
    }
    sums[0] = float(log_sums);
    sums[1] = float(of_logits);
}

// Computes the logits' gradient (N, E) for the weights' g (N, k), and adds to `counts` (E), unless it
// is null, how many tokens chose each expert.
void pentameter_choose_experts_backward(const Choice* job, float* g_logits, float* counts,
                                        const float* g, const float* logits,
                                        const int64_t* experts) {
    for_tokens(*job, logits, [&](Tokens& tokens, int64_t first, int64_t n) {
        Tokens::read(tokens.experts, experts + first * job->k, n);
        Tokens::read(tokens.g, g + first * job->k, n);
        tokens.score();
        tokens.weigh();
        tokens.normalize_backward();
        tokens.logits_backward();
        Tokens::write(g_logits + first * job->E, tokens.ranked, n);
    });
    if (!counts) return;
    std::vector<int64_t> chosen(job->E, 0);
    for (int64_t row = 0; row < job->N * job->k; row++) chosen[experts[row]]++;
    for (int64_t e = 0; e < job->E; e++) counts[e] += float(chosen[e]);
}
}
