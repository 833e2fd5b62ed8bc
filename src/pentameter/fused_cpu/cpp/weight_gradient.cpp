// A linear layer's weight gradient: a matmul that sums over all rows in a batch.
//
// Both factors have the summed index outermost, so both must be transposed on the way: row chunks
// are brought into tiles in a core's cache, while PyTorch's matmuls need a transposed copy of one
// factor in memory. A chunk's result is added to fp32 sums that stay in the cache, too. Threads
// split the wider factor's columns, so the result does not depend on their number.

#include <omp.h>

#include <algorithm>

#include "tiles.h"

namespace {

// Packs columns `column` … `column` + 31 from x (M, n), n_rows rows from the first, paired for the
// right.
void pair_panel(int32_t* out, const bf16* x, int64_t n, int n_rows) {
    int32_t* next = out + n_rows / 32 * TILE;
    for (int row = 0; row < n_rows; row += 2, x += 2 * n, out += 16, next += 16) {
        const __m512i even = _mm512_loadu_si512(x), odd = _mm512_loadu_si512(x + n);
        _mm512_store_si512(out, pair(_mm512_castsi512_si256(even), _mm512_castsi512_si256(odd)));
        _mm512_store_si512(next, pair(_mm512_extracti64x4_epi64(even, 1),
                                      _mm512_extracti64x4_epi64(odd, 1)));
    }
}

// Writes sums (a, 32), in blocks (32, 32) and tiles, one below the other, to columns in `out` (…,
// b), or transposed to its rows (…, a).
void write_sums(float* out, const float* sums, int64_t a, int64_t b, bool transposed) {
    for (int64_t i = 0; i < a; i += 16)
        for (int64_t j = 0; j < 32; j += 16, sums += TILE)
            if (transposed)
                transpose_words((int32_t*)out + j * a + i, sums, 64, a);
            else
                for (int64_t row = 0; row < 16; row++)
                    _mm512_storeu_ps(out + (i + row) * b + j, _mm512_loadu_ps(sums + row * 16));
}

}  // namespace

extern "C" {

// Computes out (a, b) fp32, or if `transposed` (b, a), = leftᵀ · right, for left (M, a) and right
// (M, b), in chunks with `rows` rows. Right is in rows or, chunk after chunk, in panels 32 columns
// wide, `paired`. All sizes are multiples of 32.
void pentameter_weight_gradient(float* out, const bf16* left, const bf16* right, int64_t M,
                                int64_t a, int64_t b, int64_t rows, int64_t paired,
                                int64_t transposed) {
#pragma omp parallel
    {
        const int64_t n_threads = omp_get_num_threads(), thread = omp_get_thread_num();
        const int64_t first = b / 32 * thread / n_threads * 32;
        const int64_t end = b / 32 * (thread + 1) / n_threads * 32;
        Workspace space;
        // All in tiles, which rows far apart would make slower to read.
        float* sums = space.take<float>((end - first) * a);  // blocks (32, 32), column after column
        bf16* turned = space.take<bf16>(a * rows);           // leftᵀ
        int32_t* pairs = space.take<int32_t>(16 * rows);
        for (int64_t m = 0; m < M; m += rows) {
            const int n_rows = int(std::min(rows, M - m)), steps = n_rows / 32;
            for (int row = 0; row < n_rows; row += 32)
                for (int64_t i = 0; i < a; i += 16) {
                    const bf16* x = left + (m + row) * a + i;
                    transpose_rows((int32_t*)(turned + i * n_rows + row * 16), 16, x, a);
                    for (int r = 0; r < 16; r++)  // half of the lines that the next rows share
                        _mm_prefetch((const char*)(x - i % 32 + (32 + i % 32 + r) * a), _MM_HINT_T0);
                }
            for (int64_t j = first; j < end; j += 32) {
                const int32_t* panel = pairs;
                if (paired)
                    panel = (const int32_t*)(right + m * b + j * n_rows);
                else
                    pair_panel(pairs, right + m * b + j, b, n_rows);
                const bf16* next = right + m * b + (paired ? (j + 32) * n_rows : j + 32);
                int row = 0;
                for (int64_t i = 0; i < a; i += 32) {
                    product(sums + (j - first) * a + i * 32, {16, TILE, 2 * TILE},
                            turned + i * n_rows, {32, 512, 16 * n_rows}, panel,
                            panel + steps * TILE, steps, m > 0, [] {});
                    for (int n = 0; n < 24 && row < n_rows; n++, row++)
                        _mm_prefetch((const char*)(next + row * (paired ? 32 : b)), _MM_HINT_T1);
                }
            }
        }
        for (int64_t j = first; j < end; j += 32)
            write_sums(out + j * (transposed ? a : 1), sums + (j - first) * a, a, b, transposed);
    }
}
}
