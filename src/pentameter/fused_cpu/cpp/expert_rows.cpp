// Rows of tokens, copied to their places among rows that are sorted by expert, and added up again.
// Each token has k places, which no other token has: threads share nothing.

#include "vectors.h"

// Arguments from the host, with the same fields as `_ExpertRows` in expert_rows.py. `places` and
// `weights` are (N, k), for N tokens; null weights are 1. Rows have D numbers, a multiple of 16: bf16
// if `low`, else fp32.
struct ExpertRows {
    const int64_t* places;
    const float* weights;
    int64_t N, k, D, low;

    float weight(int64_t number) const { return weights ? weights[number] : 1.0f; }
};

namespace {

template <class T>
void sum(const ExpertRows job, T* out, const T* rows) {
#pragma omp parallel for schedule(static)
    for (int64_t token = 0; token < job.N; token++) {
        const int64_t first = token * job.k;
        for (int64_t c = 0; c < job.D; c += LANES) {
            Floats total = load(rows + job.places[first] * job.D + c) * job.weight(first);
            for (int64_t j = first + 1; j < first + job.k; j++)
                total += load(rows + job.places[j] * job.D + c) * job.weight(j);
            store(out + token * job.D + c, total);
        }
    }
}

template <class T>
void spread(const ExpertRows job, T* out, float* products, const T* x, const T* rows) {
#pragma omp parallel for schedule(static)
    for (int64_t token = 0; token < job.N; token++)
        for (int64_t j = token * job.k; j < (token + 1) * job.k; j++) {
            const int64_t place = job.places[j] * job.D;
            const float weight = job.weight(j);
            Floats total{};
            for (int64_t c = 0; c < job.D; c += LANES) {
                const Floats value = load(x + token * job.D + c);
                store(out + place + c, value * weight);
                if (rows) total += value * load(rows + place + c);
            }
            if (rows) products[j] = sum_of(total);
        }
}

}  // namespace

extern "C" {

// Computes out (N, D), each token's rows times their weights, added in the order of its places.
void pentameter_sum_expert_rows(const ExpertRows* job, void* out, const void* rows) {
    if (job->low)
        sum(*job, (bf16*)out, (const bf16*)rows);
    else
        sum(*job, (float*)out, (const float*)rows);
}

// Writes each token's x (N, D), times its weights, to its places in `out`. Unless `rows` is null, also
// computes `products` (N, k), x times the row of `rows` in each of its places.
void pentameter_spread_expert_rows(const ExpertRows* job, void* out, float* products, const void* x,
                                   const void* rows) {
    if (job->low)
        spread(*job, (bf16*)out, products, (const bf16*)x, (const bf16*)rows);
    else
        spread(*job, (float*)out, products, (const float*)x, (const float*)rows);
}
}
