// Causal attention around its matmuls, which are PyTorch's: the linear layers' output split into
// heads and blocks of queries, with bias, norm and rotation; each row's softmax, with dropout; and
// both ways back. A row's sums and numbers depend on no other row.

#include <algorithm>
#include <cmath>
#include <cstring>

#include "dropout.h"

// Queries, keys or values among a linear layer's outputs, in rows (batch, time): where head 0 starts,
// and its gradient, of the same layout; the layer's bias and the weight (K) of a norm of each head, if
// any; where the norm's gradient goes, (batch rows · heads, K); and the distances between rows and
// between heads.
struct Projected {
    const void* data;
    void* gradient;
    const float *bias, *norm;
    float* g_norm;
    int64_t row, head;
};

// Arguments from the host, with the same fields as `_Split` in vector/attention.py. There are B batch
// rows of T times, H query heads and G heads of keys and values with K channels, a multiple of 16 and
// at most MOST_CHANNELS. Channels i and i + half rotate by angles with these cosines and sines
// (T, half). There are `blocks` blocks of queries, each as long; block i sees the keys up to its end.
// Numbers are bf16 if `low`, else fp32.
struct Split {
    Projected q, k, v;
    const float *cosine, *sine;
    int64_t B, T, H, G, K, half, blocks, low;
    float norm_eps;

    int64_t length() const { return T / blocks; }
};

// Arguments from the host, with the same fields as `_Softmax` in vector/attention.py: N heads of all
// batch rows, H of each, Q queries from time `first` on, S keys, a multiple of 16. Dropout's `keys`
// (N / H, 2); a weight's number is (head · stride + query) · stride + key. `scale` is on the scores.
struct Softmax {
    const int32_t* keys;
    int64_t N, H, Q, S, first, stride, low;
    int32_t bound;
    float dropout_scale, scale;

    int64_t seen(int64_t query) const { return std::min(first + query + 1, S); }
    Dropout dropout(int64_t head) const {
        const int32_t* key = keys + head / H * 2;
        return {dropout_scale, bound, key[0], key[1]};
    }
    Ints numbers(int64_t head, int64_t query, int64_t key) const {
        const uint32_t row = uint32_t(head % H) * uint32_t(stride) + uint32_t(first + query);
        return lane_numbers() + int32_t(row * uint32_t(stride) + uint32_t(key));
    }
};

constexpr int MOST_CHANNELS = 256;

namespace {

void rotate(float* __restrict x, const float* __restrict cosine, const float* __restrict sine,
            int64_t half, float direction) {
    float* __restrict y = x + half;
    for (int64_t i = 0; i < half; i++) {
        const float a = x[i], b = y[i], s = sine[i] * direction;
        x[i] = a * cosine[i] - b * s;
        y[i] = b * cosine[i] + a * s;
    }
}

template <class T>
void write_row(T* out, const float* x, int64_t K) {
    for (int64_t k = 0; k < K; k += LANES) store(out + k, load(x + k));
}

// One head's row with its bias, and, where there is a norm, divided by its root mean square. Returns
// what it was multiplied by.
template <class T>
float scaled_row(float* x, const Split& job, const Projected& part, const T* in, int64_t head) {
    Floats squares{};
    for (int64_t k = 0; k < job.K; k += LANES) {
        Floats value = load(in + k);
        if (part.bias) value += load(part.bias + head * part.head + k);
        store(x + k, value);
        squares += value * value;
    }
    if (!part.norm) return 1;
    const float scale = 1 / std::sqrt(sum_of(squares) / float(job.K) + job.norm_eps);
    for (int64_t k = 0; k < job.K; k += LANES) store(x + k, load(x + k) * scale);
    return scale;
}

// One head's row at time t, as the matmuls read it.
template <class T>
void read_row(T* out, const Split& job, const Projected& part, bool turns, int64_t b, int64_t t,
              int64_t head) {
    const T* in = (const T*)part.data + (b * job.T + t) * part.row + head * part.head;
    if (!part.bias && !part.norm && !turns) {
        std::memcpy(out, in, job.K * sizeof(T));
        return;
    }
    float x[MOST_CHANNELS];
    scaled_row(x, job, part, in, head);
    for (int64_t k = 0; part.norm && k < job.K; k += LANES)
        store(x + k, load(x + k) * load(part.norm + k));
    if (turns) rotate(x, job.cosine + t * job.half, job.sine + t * job.half, job.half, 1);
    write_row(out, x, job.K);
}

// Replaces the gradient g of a head's row, after the norm, by that before it; adds to the norm's.
template <class T>
void norm_gradient(float* g, float* g_norm, const Split& job, const Projected& part, const T* in,
                   int64_t head) {
    float x[MOST_CHANNELS];
    const float scale = scaled_row(x, job, part, in, head);
    Floats sum{};
    for (int64_t k = 0; k < job.K; k += LANES) {
        const Floats along = load(g + k) * load(x + k);
        store(g_norm + k, load(g_norm + k) + along);
        sum += along * load(part.norm + k);
    }
    const float mean = sum_of(sum) / float(job.K);
    for (int64_t k = 0; k < job.K; k += LANES)
        store(g + k, (load(g + k) * load(part.norm + k) - load(x + k) * mean) * scale);
}

template <class T>
void split(const Split& job, void** queries, void** keys, void** values) {
    const int64_t K = job.K, length = job.length(), n = job.H + 2 * job.G;
    const bool turns = job.cosine;
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < job.B * n; i++) {
        const int64_t b = i / n, part = i % n;
        if (part < job.H) {
            for (int64_t t = 0; t < job.T; t++) {
                T* block = (T*)queries[t / length];
                read_row(block + ((b * job.H + part) * length + t % length) * K, job, job.q, turns,
                         b, t, part);
            }
            continue;
        }
        const bool is_key = part < job.H + job.G;
        const int64_t head = part - job.H - (is_key ? 0 : job.G);
        void** blocks = is_key ? keys : values;
        const auto start = [&](int64_t block) {  // of this head's rows
            return (T*)blocks[block] + (b * job.G + head) * (block + 1) * length * K;
        };
        T* whole = start(job.blocks - 1);
        for (int64_t t = 0; t < job.T; t++)
            read_row(whole + t * K, job, is_key ? job.k : job.v, is_key && turns, b, t, head);
        for (int64_t block = 0; block < job.blocks - 1; block++)
            std::memcpy(start(block), whole, (block + 1) * length * K * sizeof(T));
    }
}

// The gradient of one head's row at time t. Those of keys and values are summed over the blocks that
// see them, from the last one's on, and rounded, before they are turned back.
template <class T>
void join_row(const Split& job, const Projected& part, void** blocks, int64_t first_block,
              bool turns, bool are_queries, int64_t b, int64_t t, int64_t head) {
    const int64_t K = job.K, length = job.length();
    const int64_t place = (b * job.T + t) * part.row + head * part.head;
    T* out = (T*)part.gradient + place;
    float x[MOST_CHANNELS];
    const auto row = [&](int64_t block) {
        if (are_queries) return (T*)blocks[block] + ((b * job.H + head) * length + t % length) * K;
        return (T*)blocks[block] + ((b * job.G + head) * (block + 1) * length + t) * K;
    };
    const int64_t last = are_queries ? first_block : job.blocks - 1;
    for (int64_t k = 0; k < K; k += LANES) {
        Floats sum = load(row(last) + k);
        for (int64_t block = first_block; block < last; block++) sum += load(row(block) + k);
        store(out + k, sum);
        store(x + k, load(out + k));
    }
    if (!turns && !part.norm) return;
    if (turns) rotate(x, job.cosine + t * job.half, job.sine + t * job.half, job.half, -1);
    if (part.norm) {
        float* g_norm = part.g_norm + (b * (are_queries ? job.H : job.G) + head) * K;
        norm_gradient(x, g_norm, job, part, (const T*)part.data + place, head);
    }
    write_row(out, x, K);
}

template <class T>
void join(const Split& job, void** queries, void** keys, void** values) {
    const int64_t n = job.H + 2 * job.G;
    const bool turns = job.cosine;
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < job.B * n; i++) {
        const int64_t b = i / n, part = i % n;
        for (int64_t t = 0; t < job.T; t++) {
            const int64_t block = t / job.length();
            if (part < job.H)
                join_row<T>(job, job.q, queries, block, turns, true, b, t, part);
            else if (part < job.H + job.G)
                join_row<T>(job, job.k, keys, block, turns, false, b, t, part - job.H);
            else
                join_row<T>(job, job.v, values, block, false, false, b, t, part - job.H - job.G);
        }
    }
}

// Outputs (N, Q, K) of each block, times 1 / row sums (N, Q), into y (B, T, H · K).
template <class T>
void merge(const Split& job, T* y, void** blocks, void** inverses) {
    const int64_t K = job.K, length = job.length();
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < job.B * job.T; i++) {
        const int64_t b = i / job.T, t = i % job.T;
        for (int64_t h = 0; h < job.H; h++) {
            const int64_t row = (b * job.H + h) * length + t % length;
            const T* in = (const T*)blocks[t / length] + row * K;
            const float inverse = ((const float*)inverses[t / length])[row];
            T* out = y + (i * job.H + h) * K;
            for (int64_t k = 0; k < K; k += LANES) store(out + k, load(in + k) * inverse);
        }
    }
}

// The output's gradient g (B, T, H · K) in blocks: as it is, divided by the row sums, and its sum
// over a head's channels times y.
template <class T>
void split_gradient(const Split& job, void** blocks, void** scaled, void** deltas, const T* g,
                    const T* y, void** inverses) {
    const int64_t K = job.K, length = job.length();
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < job.B * job.T; i++) {
        const int64_t b = i / job.T, t = i % job.T, block = t / length;
        for (int64_t h = 0; h < job.H; h++) {
            const int64_t row = (b * job.H + h) * length + t % length, from = (i * job.H + h) * K;
            const float inverse = ((const float*)inverses[block])[row];
            T *out = (T*)blocks[block] + row * K, *divided = (T*)scaled[block] + row * K;
            Floats sum{};
            for (int64_t k = 0; k < K; k += LANES) {
                const Floats x = load(g + from + k);
                store(out + k, x);
                store(divided + k, x * inverse);
                sum += x * load(y + from + k);
            }
            ((float*)deltas[block])[row] = sum_of(sum);
        }
    }
}

// Weights e^(s - max s) of one query, the same after dropout, and 1 / their sum. The sum is that of
// the weights as they are stored. Keys after the query have none.
template <class T>
void forward_row(const Softmax job, int64_t head, int64_t query, T* e, T* dropped, float* inverse,
                 const T* scores) {
    const int64_t seen = job.seen(query);
    const Ints last = Ints{} + int32_t(seen);
    const auto score = [&](int64_t c) {
        const Floats x = load(scores + c) * job.scale;
        return lane_numbers() + int32_t(c) < last ? x : all(-__builtin_inff());
    };
    Floats tops = all(-__builtin_inff()), sum{};
    for (int64_t c = 0; c < seen; c += LANES) {
        const Floats x = score(c);
        tops = x > tops ? x : tops;
    }
    float top = tops[0];
    for (int i = 1; i < LANES; i++) top = std::max(top, tops[i]);
    const Dropout dropout = job.dropout(head);
    for (int64_t c = 0; c < job.S; c += LANES) {
        store(e + c, c < seen ? exponential(score(c) - top) : Floats{});
        const Floats weight = load(e + c);
        sum += weight;
        if (dropped) store(dropped + c, weight * dropout.factor(job.numbers(head, query, c)));
    }
    *inverse = 1 / sum_of(sum);
}

template <class T>
void backward_row(const Softmax job, int64_t head, int64_t query, T* g_scores, T* dropped,
                  const T* g, const T* e, float delta, float inverse) {
    const int64_t seen = job.seen(query);
    const Dropout dropout = job.dropout(head);
    for (int64_t c = 0; c < job.S; c += LANES) {
        if (c >= seen) {
            store(g_scores + c, Floats{});
            if (dropped) store(dropped + c, Floats{});
            continue;
        }
        const Floats weight = load(e + c);
        Floats incoming = load(g + c);
        if (dropped) {
            const Floats factor = dropout.factor(job.numbers(head, query, c));
            incoming *= factor;
            store(dropped + c, weight * factor);
        }
        store(g_scores + c, weight * (incoming - delta) * (inverse * job.scale));
    }
}

template <class T>
void forward(const Softmax& job, T* e, T* dropped, float* inverse, const T* scores) {
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < job.N * job.Q; row++)
        forward_row(job, row / job.Q, row % job.Q, e + row * job.S,
                    dropped ? dropped + row * job.S : nullptr, inverse + row,
                    scores + row * job.S);
}

template <class T>
void backward(const Softmax& job, T* g_scores, T* dropped, const T* g, const T* e,
              const float* delta, const float* inverse) {
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < job.N * job.Q; row++)
        backward_row(job, row / job.Q, row % job.Q, g_scores + row * job.S,
                     dropped ? dropped + row * job.S : nullptr, g + row * job.S, e + row * job.S,
                     delta[row], inverse[row]);
}

}  // namespace

extern "C" {

// Writes each block's queries (B · H, T / blocks, K), and the keys and values (B · G, end, K) that it
// sees.
void pentameter_split_heads(const Split* job, void** queries, void** keys, void** values) {
    (job->low ? split<bf16> : split<float>)(*job, queries, keys, values);
}

// Writes the gradients of the linear layers' output, from those of `pentameter_split_heads`', and
// adds to those of norms.
void pentameter_join_heads(const Split* job, void** queries, void** keys, void** values) {
    (job->low ? join<bf16> : join<float>)(*job, queries, keys, values);
}

void pentameter_merge_heads(const Split* job, void* y, void** blocks, void** inverses) {
    if (job->low)
        merge(*job, (bf16*)y, blocks, inverses);
    else
        merge(*job, (float*)y, blocks, inverses);
}

void pentameter_split_gradient(const Split* job, void** blocks, void** scaled, void** deltas,
                               const void* g, const void* y, void** inverses) {
    if (job->low)
        split_gradient(*job, blocks, scaled, deltas, (const bf16*)g, (const bf16*)y, inverses);
    else
        split_gradient(*job, blocks, scaled, deltas, (const float*)g, (const float*)y, inverses);
}

// Computes e and `dropped` (N, Q, S), which may be null, and `inverse` (N, Q), from scores (N, Q, S).
void pentameter_softmax(const Softmax* job, void* e, void* dropped, float* inverse,
                        const void* scores) {
    if (job->low)
        forward(*job, (bf16*)e, (bf16*)dropped, inverse, (const bf16*)scores);
    else
        forward(*job, (float*)e, (float*)dropped, inverse, (const float*)scores);
}

// Computes the scores' gradient, and `dropped` again, unless it is null, from g, that of `dropped`.
void pentameter_softmax_gradient(const Softmax* job, void* g_scores, void* dropped, const void* g,
                                 const void* e, const float* delta, const float* inverse) {
    if (job->low)
        backward(*job, (bf16*)g_scores, (bf16*)dropped, (const bf16*)g, (const bf16*)e, delta,
                 inverse);
    else
        backward(*job, (float*)g_scores, (float*)dropped, (const float*)g, (const float*)e, delta,
                 inverse);
}
}
