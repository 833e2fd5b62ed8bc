// Rows of tokens: their places among rows that are sorted by expert, copies there, and their sums.
// Each token has k places, which no other token has: threads share nothing.

#include <vector>

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

// Computes each of R rows' place when they are sorted by expert, in their own order for the same one,
// and each expert's number of places is rounded up to a multiple of `block`. `experts` holds numbers
// from 0 to E; rows of expert E, for which there is no capacity, come last. Writes the place after
// each expert's last to `ends` (E,), and the places below R + E · (block - 1) that no row has to
// `blank` (E · (block - 1),).
void pentameter_place_expert_rows(const int64_t* experts, int64_t R, int64_t E, int64_t block,
                                  int64_t* places, int64_t* ends, int64_t* blank) {
    std::vector<int64_t> next(E + 1, 0);
    for (int64_t row = 0; row < R; row++) next[experts[row]]++;
    int64_t end = 0;
    for (int64_t e = 0; e < E; e++) {
        const int64_t n = (next[e] + block - 1) / block * block;
        next[e] = end;
        ends[e] = end += n;
    }
    next[E] = end;
    for (int64_t row = 0; row < R; row++) places[row] = next[experts[row]]++;
    for (int64_t e = 0; e <= E; e++)
        for (int64_t place = next[e]; place < (e < E ? ends[e] : R + E * (block - 1)); place++)
            *blank++ = place;
}
}
