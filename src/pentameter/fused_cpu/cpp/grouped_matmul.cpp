// Matmuls of rows that are sorted by group with a matrix of their group's own, in bf16, and the
// gradients: all groups in one parallel region, whatever their numbers of rows.
//
// The CPU's instruction multiplies pairs: it adds to each of its lanes the two products of two words'
// lower and upper halves. So a factor is read as words that hold two numbers next to each other along
// the dimension that is summed over; where these are not neighbours in memory, `Pairs` brings them
// together first.

#include <algorithm>
#include <vector>

#include "grouped_matmul.h"
#include "vectors.h"

namespace {

constexpr int64_t ROWS = 4, VECTORS = 4;  // of a tile, whose sums are in registers
constexpr int64_t COLUMNS = VECTORS * LANES;

inline Words repeated_word(const uint32_t* from) {
    uint32_t word;
    std::memcpy(&word, from, sizeof word);  // which may hold numbers of another type
    return Words{} + word;
}

inline Floats add_products(Floats total, Words a, Words b) {
#if VECTOR_BYTES == 64 && defined(__AVX512BF16__)
    return (Floats)_mm512_dpbf16_ps((__m512)total, (__m512bh)a, (__m512bh)b);
#else
    constexpr uint32_t upper = 0xffff0000;
    return total + (Floats)(a << 16) * (Floats)(b << 16) + (Floats)(a & upper) * (Floats)(b & upper);
#endif
}

// The left factor as words of two numbers along the summed dimension: word (i, p), of row i and pair
// p, is words[i * step + p * pair_step].
struct Pairs {
    const uint32_t* words;
    int64_t step, pair_step;
};

// The right factor is in panels of COLUMNS columns, one after another, the last of what remains: each
// has the words (n_pairs, columns) of its own. So what a tile reads lies side by side.
inline int64_t panel_width(int64_t n_columns, int64_t column) {
    return std::min(COLUMNS, n_columns - column);
}

// Writes ROWS × (n · LANES) sums over `n_pairs` to `out`, or adds them to it.
template <int n, class T>
void tile(T* out, int64_t stride, Pairs a, const uint32_t* panel, int64_t n_pairs, bool adds) {
    Floats totals[ROWS][n];
    for (int i = 0; i < ROWS; i++)
        for (int v = 0; v < n; v++)
            totals[i][v] = adds ? load(out + i * stride + v * LANES) : Floats{};
    for (int64_t p = 0; p < n_pairs; p++) {
        Words columns[n];
        for (int v = 0; v < n; v++) columns[v] = load(panel + (p * n + v) * LANES);
        for (int i = 0; i < ROWS; i++) {
            const Words row = repeated_word(a.words + i * a.step + p * a.pair_step);
            for (int v = 0; v < n; v++) totals[i][v] = add_products(totals[i][v], row, columns[v]);
        }
    }
    for (int i = 0; i < ROWS; i++)
        for (int v = 0; v < n; v++) store(out + i * stride + v * LANES, totals[i][v]);
}

// The same for n_rows × n_columns sums, multiples of ROWS and of LANES.
template <class T>
void multiply(T* out, int64_t n_rows, int64_t n_columns, Pairs a, const uint32_t* panels,
              int64_t n_pairs, bool adds) {
    for (int64_t column = 0; column < n_columns; column += COLUMNS)
        for (int64_t row = 0; row < n_rows; row += ROWS) {
            T* to = out + row * n_columns + column;
            const Pairs rows = {a.words + row * a.step, a.step, a.pair_step};
            const uint32_t* panel = panels + column * n_pairs;
            switch (panel_width(n_columns, column) / LANES) {
                case 1: tile<1>(to, n_columns, rows, panel, n_pairs, adds); break;
                case 2: tile<2>(to, n_columns, rows, panel, n_pairs, adds); break;
                case 3: tile<3>(to, n_columns, rows, panel, n_pairs, adds); break;
                default: tile<VECTORS>(to, n_columns, rows, panel, n_pairs, adds);
            }
        }
}

// Pairs of rows 2p and 2p + 1 of x (n_rows, `stride`): words (n_rows / 2, n) of its first n columns.
void pair_rows(uint32_t* words, const bf16* x, int64_t stride, int64_t n_rows, int64_t n) {
    for (int64_t p = 0; p < n_rows / 2; p++)
        for (int64_t c = 0; c < n; c += LANES) {
            const auto upper_half = [&](int64_t row) { return (Words)load(x + row * stride + c); };
            const Words pairs = upper_half(2 * p) >> 16 | upper_half(2 * p + 1);
            std::memcpy(words + p * n + c, &pairs, sizeof pairs);
        }
}

// Pairs within the rows of x (n_rows, n): words (n / 2, n_rows).
void transpose_pairs(uint32_t* words, const bf16* x, int64_t n_rows, int64_t n) {
    for (int64_t row = 0; row < n_rows; row += LANES)
        for (int64_t p = 0; p < n / 2; p++) {
            Words pairs;  // in a register, and stored at once
            for (int l = 0; l < LANES; l++) {
                uint32_t word;
                std::memcpy(&word, x + (row + l) * n + 2 * p, sizeof word);
                pairs[l] = word;
            }
            std::memcpy(words + p * n_rows + row, &pairs, sizeof pairs);
        }
}

// Writes y (R, n_columns), each group's rows of x (R, n_summed) times its matrix, and 0 behind the
// last group. `pair(to, e, column, n)` writes the panel of n columns of group e; all have room in
// `words` (E, n_columns, n_summed / 2).
template <class Pair>
void multiply_groups(const GroupedMatmul job, bf16* y, const bf16* x, uint32_t* words,
                     int64_t n_summed, int64_t n_columns, Pair pair) {
    const int64_t n_pairs = n_summed / 2, last = job.last();
#pragma omp parallel
    {
#pragma omp for schedule(static) collapse(2)
        for (int64_t e = 0; e < job.E; e++)
            for (int64_t column = 0; column < n_columns; column += COLUMNS)
                pair(words + (e * n_columns + column) * n_pairs, e, column,
                     panel_width(n_columns, column));
#pragma omp for schedule(static)
        for (int64_t row = 0; row < last; row += job.block) {
            const int64_t e = job.group_of(row);
            const Pairs a = {(const uint32_t*)(x + row * n_summed), n_pairs, 1};
            multiply(y + row * n_columns, job.block, n_columns, a, words + e * n_columns * n_pairs,
                     n_pairs, false);
        }
    }
    std::fill(y + last * n_columns, y + job.R * n_columns, 0);
}

}  // namespace

extern "C" {

// Whether the CPU's own instruction multiplies pairs. Without it this takes longer than PyTorch.
int pentameter_multiplies_pairs() {
#if VECTOR_BYTES == 64 && defined(__AVX512BF16__)
    return 1;
#else
    return 0;
#endif
}

// Computes y (R, n_out), rows x (R, n_in) times their group's weightᵀ. `words` is for as many numbers
// as the weight has.
void pentameter_grouped_linear(const GroupedMatmul* job, bf16* y, uint32_t* words, const bf16* x,
                               const bf16* weight) {
    const int64_t n_in = job->n_in, n_out = job->n_out;
    const auto pair = [&](uint32_t* to, int64_t e, int64_t column, int64_t n) {
        transpose_pairs(to, weight + (e * n_out + column) * n_in, n, n_in);
    };
    multiply_groups(*job, y, x, words, n_in, n_out, pair);
}

// Computes g_x (R, n_in), y's gradient g (R, n_out) times each row's group's weight.
void pentameter_grouped_input_gradient(const GroupedMatmul* job, bf16* g_x, uint32_t* words,
                                       const bf16* g, const bf16* weight) {
    const int64_t n_in = job->n_in, n_out = job->n_out;
    const auto pair = [&](uint32_t* to, int64_t e, int64_t column, int64_t n) {
        pair_rows(to, weight + e * n_out * n_in + column, n_in, n_out, n);
    };
    multiply_groups(*job, g_x, g, words, n_out, n_in, pair);
}

// Computes g_weight (E, n_out, n_in) in fp32, the sums of g (R, n_out)ᵀ · x (R, n_in) over each
// group's rows.
void pentameter_grouped_weight_gradient(const GroupedMatmul* given, float* g_weight, const bf16* g,
                                        const bf16* x) {
    constexpr int64_t SUMMED = 128, OUTPUTS = 64;  // rows and outputs whose words stay in a cache
    const GroupedMatmul job = *given;
    const int64_t n_in = job.n_in, n_out = job.n_out;
#pragma omp parallel
    {
        std::vector<uint32_t> g_words(SUMMED / 2 * OUTPUTS), x_words(SUMMED / 2 * n_in);
#pragma omp for schedule(dynamic) collapse(2)
        for (int64_t e = 0; e < job.E; e++)
            for (int64_t first = 0; first < n_out; first += OUTPUTS) {
                const int64_t n = std::min(OUTPUTS, n_out - first);
                float* to = g_weight + (e * n_out + first) * n_in;
                if (job.begin(e) == job.ends[e]) std::fill(to, to + n * n_in, 0.0f);
                for (int64_t row = job.begin(e); row < job.ends[e]; row += SUMMED) {
                    const int64_t n_rows = std::min(SUMMED, job.ends[e] - row);
                    pair_rows(g_words.data(), g + row * n_out + first, n_out, n_rows, n);
                    for (int64_t column = 0; column < n_in; column += COLUMNS)
                        pair_rows(&x_words[column * n_rows / 2], x + row * n_in + column, n_in,
                                  n_rows, panel_width(n_in, column));
                    multiply(to, n, n_in, {g_words.data(), 1, n}, x_words.data(), n_rows / 2,
                             row > job.begin(e));
                }
            }
    }
}
}
