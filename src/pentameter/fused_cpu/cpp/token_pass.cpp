// One more token for each of several texts through a GPT, in one call: the operations of
// `token_pass.py`, one after another, by one team of threads.
//
// A text's numbers depend on that text alone, to the last bit: each sum is made by one thread, in an
// order that neither the number of texts nor that of threads changes. Sums run over the lanes of a
// register, then over its halves, so the bits differ between widths of registers.
//
// Of a model in bf16, matrices, embeddings, keys and values are bf16, a matmul's inputs are rounded to
// it, and all else is fp32. Products of two such numbers are added in pairs.

#include <algorithm>
#include <cstdint>
#include <vector>

#ifdef _OPENMP
#include <omp.h>
#endif

#include "activation.h"

namespace {

constexpr int64_t MOST_CHANNELS = 256;  // of a head
constexpr int64_t KEYS = 64;            // that are read at once: their sum is added to the others'

// The numbers below n that are one thread's: in an operation of n pieces always the same.
struct Range {
    int64_t first = 0, last;

    explicit Range(int64_t n) : last(n) {
#ifdef _OPENMP
        const int64_t thread = omp_get_thread_num(), n_threads = omp_get_num_threads();
        first = n * thread / n_threads, last = n * (thread + 1) / n_threads;
#endif
    }
};

// A thread's own copy of normed inputs, or of rounded ones: all threads making one is sooner done than
// waiting for one that makes it.
template <class Number>
inline Number* own_inputs(int64_t n) {
    static thread_local std::vector<Number> numbers;
    if (int64_t(numbers.size()) < n) numbers.resize(n);
    return numbers.data();
}

struct Rows {  // texts: the newest token of each, its position, and the slot of the cache
    const int64_t *tokens, *positions, *slots;
    int64_t n;
};

struct Embedding {
    const void *tokens, *positions;
    float* y;
    int64_t width, narrow;
    float factor;
};

struct Norm {
    const float *x, *weight, *bias;
    float* y;  // null: each thread's own inputs
    int64_t width, centres, adds;
    float eps;
};

struct Linear {
    const float* x;  // null: the thread's own inputs
    const void* weight;
    const float* bias;
    float* y;
    int64_t n_in, n_out, narrow, rounds, adds, block;  // outputs that a thread takes at once
};

// Of row m, head h, queries begin at q + m · q_row + h · q_head, keys and values likewise. The cache
// is (slots, KV heads, positions, channels).
struct Attention {
    const float *q, *k, *v;
    void *keys, *values;
    float* y;
    const float *q_norm, *k_norm, *sinks, *cosine, *sine;
    int64_t n_heads, n_kv_heads, channels, q_row, q_head, kv_row, kv_head, of_slot, of_head, window,
        turning, narrow;
    float eps, factor;
};

struct Activation {
    const float *x, *factor;
    float* y;
    int64_t width, kind, block;  // as its inputs' Linear has it
};

template <class Weight>
void embed(const Embedding& of, const Rows& rows) {
    const Range range(rows.n);
    for (int64_t m = range.first; m < range.last; ++m) {
        const Weight* token = static_cast<const Weight*>(of.tokens) + rows.tokens[m] * of.width;
        const Weight* position = static_cast<const Weight*>(of.positions);
        if (position) position += rows.positions[m] * of.width;
        for (int64_t i = 0; i < of.width; i += LANES) {
            const Floats x = load(token + i) * of.factor;
            store(of.y + m * of.width + i, position ? x + load(position + i) : x);
        }
    }
}

// LayerNorm, or without `centres` RMSNorm, of one row.
inline void norm_row(float* y, const float* x, const Norm& of) {
    const int64_t n = of.width;
    float mean = 0;
    if (of.centres) {
        Floats sums = {};
        for (int64_t i = 0; i < n; i += LANES) sums += load(x + i);
        mean = sum_of(sums) / float(n);
    }
    Floats squares = {};
    for (int64_t i = 0; i < n; i += LANES) {
        const Floats centred = load(x + i) - mean;
        squares += centred * centred;
    }
    const float scale = 1.0f / __builtin_sqrtf(sum_of(squares) / float(n) + of.eps);
    for (int64_t i = 0; i < n; i += LANES) {
        Floats normed = (load(x + i) - mean) * scale * load(of.weight + i);
        if (of.bias) normed += load(of.bias + i);
        store(y + i, of.adds ? load(y + i) + normed : normed);
    }
}

void norm(const Norm& of, const Rows& rows) {
    const Range range(rows.n);
    float* y = of.y ? of.y : own_inputs<float>(rows.n * of.width);
    for (int64_t m = of.y ? range.first : 0; m < (of.y ? range.last : rows.n); ++m)
        norm_row(y + m * of.width, of.x + m * of.width, of);
}

// A register of inputs, or of weights that meet them: fp32, or pairs in bf16, of which the last may
// be half a register's.
template <bool WHOLE, class Number>
inline Floats numbers_at(const Number* x, const float*) {
    return load(x);
}
template <bool WHOLE>
inline Words numbers_at(const bf16* x, const bf16*) {
    return load_pairs<WHOLE>(x);
}

// Adds the products of as many inputs as a register holds, of all outputs (M, R).
template <int M, int R, bool WHOLE, class Weight, class Input>
inline void add_inputs(Floats* sums, const Input* x, const Weight* w, int64_t K) {
    decltype(numbers_at<WHOLE>(x, x)) weights[R];
    for (int r = 0; r < R; ++r) weights[r] = numbers_at<WHOLE>(w + r * K, x);
    for (int i = 0; i < M; ++i) {
        const auto inputs = numbers_at<WHOLE>(x + i * K, x);
        for (int r = 0; r < R; ++r)
            sums[i * R + r] = add_products(sums[i * R + r], inputs, weights[r]);
    }
}

// Memory that is asked for during a tile: at each step `n_lines` more, one after another, as it gives
// them fastest; into the second cache, as the first is full of what the tile reads.
struct Ahead {
    const char* next;
    int64_t n_lines;

    void step() {
        for (int64_t line = 0; line < n_lines; ++line, next += LINE) __builtin_prefetch(next, 0, 2);
    }
};

// Outputs (M, R) of a matmul, the first of them being of row `m`, output `first`.
template <int M, int R, class Weight, class Input>
inline void tile(const Linear& of, const Input* x, int64_t m, int64_t first, Ahead ahead) {
    constexpr int64_t STEP = VECTOR_BYTES / sizeof(Input);
    // For one row weights are read in the order in which they lie: memory gives twice as much.
    constexpr int AT_ONCE = M == 1 ? 1 : R;
    const int64_t K = of.n_in;
    const Weight* w = static_cast<const Weight*>(of.weight) + first * K;
    x += m * K;
    Floats sums[M * R];
    for (int r = 0; r < R; r += AT_ONCE, w += AT_ONCE * K) {
        Floats some[M * AT_ONCE] = {};
        int64_t k = 0;
#pragma GCC unroll 4
        for (; k + STEP <= K; k += STEP) {
            if (M > 1) ahead.step();
            add_inputs<M, AT_ONCE, true>(some, x + k, w + k, K);
        }
        if (k < K) add_inputs<M, AT_ONCE, false>(some, x + k, w + k, K);
        std::copy(some, some + M * AT_ONCE, sums + r);
    }
    float results[M * R];
    sums_of<M * R>(results, sums);
    for (int i = 0; i < M; ++i) {
        float* y = of.y + (m + i) * of.n_out + first;
        for (int r = 0; r < R; ++r) {
            float result = results[i * R + r];
            if (of.bias) result += of.bias[first + r];
            y[r] = of.adds ? y[r] + result : result;
        }
    }
}

// The same of M rows or, if there are fewer, of n.
template <int M, int R, class Weight, class Input>
inline void tile_of_most(const Linear& of, const Input* x, int64_t m, int64_t n, int64_t first,
                         Ahead ahead) {
    if constexpr (M > 1)
        if (n < M) return tile_of_most<M - 1, R, Weight>(of, x, m, n, first, ahead);
    tile<M, R, Weight>(of, x, m, first, ahead);
}

// R outputs of all rows; meanwhile the next ones' weights are asked for, in equal parts.
template <int R, class Weight, class Input>
inline void outputs(const Linear& of, const Input* x, const Rows& rows, int64_t first) {
    constexpr int64_t ROWS = 4, STEP_BYTES = R * VECTOR_BYTES * sizeof(Weight) / sizeof(Input);
    const int64_t n_tiles = (rows.n + ROWS - 1) / ROWS;
    const int64_t n_lines = (STEP_BYTES / LINE + n_tiles - 1) / n_tiles;
    const Weight* next = static_cast<const Weight*>(of.weight) + (first + R) * of.n_in;
    Ahead ahead{reinterpret_cast<const char*>(next), n_lines};
    for (int64_t m = 0; m < rows.n; m += ROWS) {
        tile_of_most<ROWS, R, Weight>(of, x, m, rows.n - m, first, ahead);
        ahead.next += of.n_in * sizeof(Input) / VECTOR_BYTES * n_lines * LINE;
    }
}

template <class Weight, class Input>
void multiply(const Linear& of, const Input* x, const Rows& rows) {
    constexpr int WIDTH = LANES == 16 ? 6 : 2;  // sums of four rows, and weights, in registers
    const Range range((of.n_out + of.block - 1) / of.block);
    const int64_t last = std::min(of.n_out, range.last * of.block);
    int64_t first = range.first * of.block;
    for (; first + WIDTH <= last; first += WIDTH) outputs<WIDTH, Weight>(of, x, rows, first);
    for (; first < last; ++first) outputs<1, Weight>(of, x, rows, first);
}

void multiply(const Linear& of, const Rows& rows) {
    const float* x = of.x ? of.x : own_inputs<float>(0);
    if (of.rounds) {
        const int64_t n = rows.n * of.n_in;
        bf16* rounded = own_inputs<bf16>(n);
        for (int64_t i = 0; i < n; i += LANES) store(rounded + i, load(x + i));
        multiply<bf16>(of, rounded, rows);
    } else {
        of.narrow ? multiply<bf16>(of, x, rows) : multiply<float>(of, x, rows);
    }
}

// A query or key (channels,) as attention reads it: normed if there is a weight, the first channels
// turned in pairs, then multiplied.
inline void prepare(float* y, const float* x, const float* weight, const Attention& of,
                    int64_t position, float factor) {
    const int64_t K = of.channels, half = of.turning / 2;
    if (weight)
        norm_row(y, x, Norm{x, weight, nullptr, y, K, 0, 0, of.eps});
    else
        std::copy(x, x + K, y);
    const float *cosine = of.cosine + position * half, *sine = of.sine + position * half;
    for (int64_t i = 0; i < half; ++i) {
        const float a = y[i], b = y[half + i];
        y[i] = a * cosine[i] - b * sine[i];
        y[half + i] = b * cosine[i] + a * sine[i];
    }
    for (int64_t i = 0; i < K; ++i) y[i] *= factor;
}

// Scores of R keys.
template <int R, class Number>
inline void score(float* scores, const float* q, const Number* keys, int64_t K) {
    Floats sums[R] = {};
    for (int64_t c = 0; c < K; c += LANES) {
        const Floats query = load(q + c);
        for (int r = 0; r < R; ++r) sums[r] += query * load(keys + r * K + c);
    }
    sums_of<R>(scores, sums);
}

// means = means · kept + Σ weights · values, for C registers of channels.
template <int C, class Number>
inline void add_values(float* means, float kept, const float* weights, const Number* values,
                       int64_t n, int64_t K) {
    Floats sums[C] = {};
    for (int64_t s = 0; s < n; ++s)
        for (int c = 0; c < C; ++c) sums[c] += weights[s] * load(values + s * K + c * LANES);
    for (int c = 0; c < C; ++c)
        store(means + c * LANES, load(means + c * LANES) * kept + sums[c]);
}

// Some of a text's keys and values, (n, K) each.
template <class Number>
struct Span {
    Number *keys, *values;
    int64_t n;
};

// Asks memory for numbers from `from` on: (4, K), from row s of n on.
template <class Number>
inline void ask(const Number* from, int64_t s, int64_t n, int64_t K) {
    const char* line = reinterpret_cast<const char*>(from + s * K);
    const char* end = reinterpret_cast<const char*>(from + std::min(s + 4, n) * K);
    for (; line < end; line += LINE) __builtin_prefetch(line, 0, 2);
}

// One head's softmax over keys that are read a few at a time: the highest score so far, the sum of
// exponentials below it, and the sum of values that they weigh.
struct Head {
    float q[MOST_CHANNELS], means[MOST_CHANNELS];
    float top, total;

    // Memory is meanwhile asked for the `next` ones.
    template <class Number>
    void read(const Span<Number>& of, const Span<Number>& next, int64_t K) {
        float weights[KEYS];
        int64_t s = 0;
        for (; s + 4 <= of.n; s += 4) {
            ask(next.keys, s, next.n, K);
            score<4>(weights + s, q, of.keys + s * K, K);
        }
        for (; s < of.n; ++s) score<1>(weights + s, q, of.keys + s * K, K);
        std::fill(weights + of.n, weights + KEYS, -__builtin_inff());
        float highest = top;
        for (int64_t i = 0; i < of.n; ++i) highest = weights[i] > highest ? weights[i] : highest;
        const float kept = exponential(all(top - highest))[0];
        Floats sums = {};
        for (int64_t i = 0; i < KEYS; i += LANES) {
            const Floats weight = exponential(load(weights + i) - highest);
            store(weights + i, weight);
            sums += weight;
        }
        total = total * kept + sum_of(sums), top = highest;
        for (s = 0; s < next.n; s += 4) ask(next.values, s, next.n, K);
        int64_t c = 0;
        for (; c + 8 * LANES <= K; c += 8 * LANES)
            add_values<8>(means + c, kept, weights, of.values + c, of.n, K);
        for (; c + 4 * LANES <= K; c += 4 * LANES)
            add_values<4>(means + c, kept, weights, of.values + c, of.n, K);
        for (; c < K; c += LANES) add_values<1>(means + c, kept, weights, of.values + c, of.n, K);
    }
};

template <class Number>
void attend(const Attention& of, const Rows& rows) {
    static thread_local std::vector<Head> heads;  // those that read the same keys
    const int64_t K = of.channels, G = of.n_kv_heads, n_sharing = of.n_heads / G;
    if (int64_t(heads.size()) < n_sharing) heads.resize(n_sharing);
    // Of text and KV head i, the keys from position s on that are read at once.
    const auto span = [&](int64_t i, int64_t s) {
        const int64_t begin = rows.slots[i / G] * of.of_slot + i % G * of.of_head + s * K;
        return Span<Number>{static_cast<Number*>(of.keys) + begin,
                            static_cast<Number*>(of.values) + begin,
                            std::min(KEYS, rows.positions[i / G] + 1 - s)};
    };
    const auto first = [&](int64_t i) {
        return of.window ? std::max<int64_t>(0, rows.positions[i / G] + 1 - of.window) : 0;
    };
    const Range range(rows.n * G);
    for (int64_t i = range.first; i < range.last; ++i) {
        const int64_t m = i / G, g = i % G, at = rows.positions[m];
        const int64_t in_row = m * of.kv_row + g * of.kv_head;
        const Span<Number> newest = span(i, at);
        float key[MOST_CHANNELS];
        prepare(key, of.k + in_row, of.k_norm, of, at, 1.0f);
        for (int64_t c = 0; c < K; c += LANES) {
            store(newest.keys + c, load(key + c));
            store(newest.values + c, load(of.v + in_row + c));
        }
        for (int64_t j = 0; j < n_sharing; ++j) {
            const int64_t h = g * n_sharing + j;
            Head& head = heads[j];
            prepare(head.q, of.q + m * of.q_row + h * of.q_head, of.q_norm, of, at, of.factor);
            std::fill(head.means, head.means + K, 0.0f);
            head.top = of.sinks ? of.sinks[h] : -__builtin_inff();
            head.total = of.sinks ? 1.0f : 0.0f;
        }
        for (int64_t s = first(i); s <= at; s += KEYS) {
            Span<Number> next{};
            if (s + KEYS <= at)
                next = span(i, s + KEYS);
            else if (i + 1 < range.last)
                next = span(i + 1, first(i + 1));
            heads[0].read(span(i, s), next, K);
            for (int64_t j = 1; j < n_sharing; ++j) heads[j].read(span(i, s), Span<Number>{}, K);
        }
        for (int64_t j = 0; j < n_sharing; ++j) {
            float* y = of.y + (m * of.n_heads + g * n_sharing + j) * K;
            for (int64_t c = 0; c < K; ++c) y[c] = heads[j].means[c] / heads[j].total;
        }
    }
}

template <class Function>
void activate_by(const Activation& of, const Rows& rows) {
    const Function function(nullptr, 0);
    const Range range((of.width + of.block - 1) / of.block);
    const int64_t first = range.first * of.block, last = std::min(of.width, range.last * of.block);
    for (int64_t m = 0; m < rows.n; ++m)
        for (int64_t i = m * of.width + first; i < m * of.width + last; i += LANES) {
            const Floats y = function(load(of.x + i)).y;
            store(of.y + i, of.factor ? y * load(of.factor + i) : y);
        }
}

void activate(const Activation& of, const Rows& rows) {
    switch (of.kind) {
        case 0: return activate_by<Relu>(of, rows);
        case 1: return activate_by<SquaredRelu>(of, rows);
        case 2: return activate_by<Gelu>(of, rows);
        case 3: return activate_by<GeluTanh>(of, rows);
        default: return activate_by<Silu>(of, rows);
    }
}

}  // namespace

// `operations` are n structs, whose kinds stand beside them: Embedding, Norm, Linear, Attention,
// Activation. After those that `wait`, each thread waits for the others. Widths, channels and
// an Activation's blocks are multiples of 16. One thread computes unless `by_all`.
extern "C" void pentameter_token_pass(const int64_t* kinds, const int64_t* waits,
                                      const void* const* operations, const int64_t* tokens,
                                      const int64_t* positions, const int64_t* slots,
                                      int64_t n_operations, int64_t n_rows, int64_t by_all) {
    const Rows rows{tokens, positions, slots, n_rows};
#pragma omp parallel if (by_all)
    for (int64_t i = 0; i < n_operations; ++i) {
        const void* of = operations[i];
        switch (kinds[i]) {
            case 0: {
                const Embedding& embedding = *static_cast<const Embedding*>(of);
                embedding.narrow ? embed<bf16>(embedding, rows) : embed<float>(embedding, rows);
                break;
            }
            case 1: norm(*static_cast<const Norm*>(of), rows); break;
            case 2: multiply(*static_cast<const Linear*>(of), rows); break;
            case 3: {
                const Attention& attention = *static_cast<const Attention*>(of);
                attention.narrow ? attend<bf16>(attention, rows) : attend<float>(attention, rows);
                break;
            }
            default: activate(*static_cast<const Activation*>(of), rows);
        }
        if (waits[i]) {
#pragma omp barrier
        }
    }
}
