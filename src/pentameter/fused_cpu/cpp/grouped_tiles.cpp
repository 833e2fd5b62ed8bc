// The kernels of grouped_matmul.cpp on AMX tiles: matmuls of rows that are sorted by group with a
// matrix of their group's own, and the gradients.
//
// All matrices are paired at first, one after another, and then each thread takes blocks of rows,
// whatever their group: 32 rows stay in the first cache while their group's matrix passes by.

#include "grouped_matmul.h"
#include "tiles.h"

extern "C" void pentameter_weight_gradient(float* out, const bf16* left, const bf16* right,
                                           int64_t M, int64_t a, int64_t b, int64_t rows,
                                           int64_t paired, int64_t transposed);

namespace {

// Writes y (R, n_columns), each group's rows of x (R, n_summed) times its matrix, and 0 behind the
// last group. `pair(to, e)` writes the matrix of group e, paired; all have room in `words`.
template <class Pair>
void multiply_groups(const GroupedMatmul& job, bf16* y, const bf16* x, int32_t* words,
                     int64_t n_summed, int64_t n_columns, Pair pair) {
    const int64_t last = job.last(), steps = n_summed / 32, matrix = n_columns * n_summed / 2;
#pragma omp parallel
    {
        Workspace space;
        float* sums = space.take<float>(4 * TILE);
#pragma omp for schedule(static)
        for (int64_t e = 0; e < job.E; e++) pair(words + e * matrix, e);
#pragma omp for schedule(static)
        for (int64_t row = 0; row < last; row += BLOCK) {
            const int32_t* panel = words + job.group_of(row) * matrix;
            for (int64_t column = 0; column < n_columns; column += 32) {
                product(sums, 32, x + row * n_summed, n_summed, panel, panel + steps * TILE,
                        int(steps));
                panel += 2 * steps * TILE;
                for (int i = 0; i < BLOCK; i++)
                    store32(y + (row + i) * n_columns + column, _mm512_load_ps(sums + 32 * i),
                            _mm512_load_ps(sums + 32 * i + 16));
            }
        }
    }
    std::fill(y + last * n_columns, y + job.R * n_columns, 0);
}

}  // namespace

extern "C" {

// Computes y (R, n_out), rows x (R, n_in) times their group's weightᵀ. `words` is for as many numbers
// as the weight has.
void pentameter_grouped_linear(const GroupedMatmul* job, bf16* y, int32_t* words, const bf16* x,
                               const bf16* weight) {
    const int64_t n_in = job->n_in, n_out = job->n_out;
    multiply_groups(*job, y, x, words, n_in, n_out, [&](int32_t* to, int64_t e) {
        pair_transposed(to, weight + e * n_out * n_in, int(n_out), int(n_in));
    });
}

// Computes g_x (R, n_in), y's gradient g (R, n_out) times each row's group's weight.
void pentameter_grouped_input_gradient(const GroupedMatmul* job, bf16* g_x, int32_t* words,
                                       const bf16* g, const bf16* weight) {
    const int64_t n_in = job->n_in, n_out = job->n_out;
    multiply_groups(*job, g_x, g, words, n_out, n_in, [&](int32_t* to, int64_t e) {
        pair_rows(to, weight + e * n_out * n_in, int(n_out), int(n_in));
    });
}

// Computes g_weight (E, n_out, n_in) in fp32, the sums of g (R, n_out)ᵀ · x (R, n_in) over each
// group's rows.
void pentameter_grouped_weight_gradient(const GroupedMatmul* job, float* g_weight, const bf16* g,
                                        const bf16* x) {
    constexpr int64_t SUMMED = 256;  // rows at once, as for dense layers
    const int64_t n_in = job->n_in, n_out = job->n_out;
    for (int64_t e = 0; e < job->E; e++) {
        const int64_t begin = job->begin(e), n_rows = job->ends[e] - begin;
        const bf16 *g_rows = g + begin * n_out, *x_rows = x + begin * n_in;
        float* to = g_weight + e * n_out * n_in;
        if (n_rows == 0)
            std::fill(to, to + n_out * n_in, 0.0f);
        else if (n_out > n_in)  // the wider side is the right one, whose columns threads share
            pentameter_weight_gradient(to, x_rows, g_rows, n_rows, n_in, n_out, SUMMED, 0, 1);
        else
            pentameter_weight_gradient(to, g_rows, x_rows, n_rows, n_out, n_in, SUMMED, 0, 0);
    }
}
}
