// A feed-forward layer, forward and backward: down · f(up · x + bias), with or without a gate.
//
// A thread takes a block of rows through both matmuls, so that the intermediate, several times as
// wide as x, stays in its cache; only those wide matrices are written that backward or a weight's
// gradient reads, in the layout it needs. A block's activation is computed while the next block's
// tiles multiply.
//
// The layer's inner channels come in panels, 32 wide. In a gated layer each panel's first 16
// channels are the gate's and the last 16 `up`'s; together they give 16 inputs to `down`.

#include <algorithm>

#include "activation.h"
#include "tiles.h"

// Arguments from the host, with the same fields as `_FeedForward` in amx_feed_forward.py. x is (M,
// D); `up` (N, D) and `down` (D, n), with n = N or, gated, N / 2; `bias` (N) may be null. `pieces`
// and `per_unit` as in `Smooth`; null `pieces` mean ReLU². A thread takes `rows` rows at a time; a
// weight's gradient reads `chunk`, a multiple of these. All sizes are multiples of 32.
struct FeedForward {
    const bf16 *up, *down;
    const float *bias, *pieces;
    int64_t M, D, N, n, gated, rows, chunk;
    float per_unit;
};

namespace {

// A matrix (n_rows, K) in blocks (32, 32), row blocks outermost: a left factor in a core's cache,
// or h.
struct LeftBlocks {
    bf16* data;
    int64_t n_rows, K;

    // Returns the start of row `row` in the block with column `column`.
    bf16* at(int64_t row, int64_t column) const {
        return data + row / 32 * 32 * K + column / 32 * 1024 + row % 32 * 32 + column % 32;
    }

    void fill(const bf16* x) const {
        for (int64_t row = 0; row < n_rows; row++, x += K)
            for (int64_t k = 0; k < K; k += 32)
                _mm512_storeu_si512(at(row, k), _mm512_loadu_si512(x + k));
    }
};

// left times a packed right factor (K, n), block (32, 32) by block, panel by panel. `finish(sums,
// row, column)` takes the sums' rows `row` and `row` + 1, from that column on.
template <class Finish>
void multiply(const LeftBlocks& left, const int32_t* right, int64_t n, Finish finish) {
    alignas(64) float blocks[2][BLOCK * BLOCK];
    const int steps = int(left.K / 32);
    const Tiling in_rows{BLOCK, 16, 16 * BLOCK}, in_blocks{32, 1024, 512};
    const float* sums = nullptr;  // of the block before
    int64_t row = 0, column = 0;
    int i = BLOCK;
    const auto finish_rows = [&](int n_more) {
        for (const int end = std::min(BLOCK, i + n_more); i < end; i += 2)
            finish(sums + i * BLOCK, row + i, column);
    };
    int current = 0;
    for (int64_t next_column = 0; next_column < n; next_column += 32)
        for (int64_t next_row = 0; next_row < left.n_rows; next_row += 32) {
            const int32_t* panel = right + next_column * left.K / 2;
            product(blocks[current], in_rows, left.at(next_row, 0), in_blocks, panel,
                    panel + steps * TILE, steps, false, [&] { finish_rows(4); });
            finish_rows(BLOCK);
            sums = blocks[current], row = next_row, column = next_column, i = 0;
            current = 1 - current;
        }
    finish_rows(BLOCK);
}

// Packs w (n, K) as the right factor in x · wᵀ.
void pack_transposed(int32_t* out, const bf16* w, int64_t n, int64_t K) {
#pragma omp for schedule(static)
    for (int64_t column = 0; column < n; column += 16)
        pair_transposed(out + column * K / 2, w + column * K, 16, int(K));
}

// Packs w (K, n) as the right factor in x · w.
void pack(int32_t* out, const bf16* w, int64_t K, int64_t n) {
#pragma omp for schedule(static)
    for (int64_t column = 0; column < n; column += 16)
        for (int64_t k = 0; k < K; k += 2)
            _mm512_storeu_si512(out + (column * K + 16 * k) / 2,
                                pair(load16(w + k * n + column), load16(w + (k + 1) * n + column)));
}

// Calls `act(first, n_rows)` in each thread for its row blocks.
template <class Act>
void for_each_block(const FeedForward& job, Act act) {
#pragma omp for schedule(static)
    for (int64_t m = 0; m < job.M; m += job.rows) act(m, std::min(job.rows, job.M - m));
}

struct Vectors {
    __m512 first, second;
};

// 32 channels from h, in the precision they are kept in, with their bias.
Vectors biased(const FeedForward& job, __m512i h, int64_t channel) {
    Vectors x{to_float(_mm512_castsi512_si256(h)), to_float(_mm512_extracti64x4_epi64(h, 1))};
    if (job.bias) {
        x.first = _mm512_add_ps(x.first, _mm512_loadu_ps(job.bias + channel));
        x.second = _mm512_add_ps(x.second, _mm512_loadu_ps(job.bias + channel + 16));
    }
    return x;
}

void write_row(bf16* out, const float* sums) {
    store32(out, _mm512_loadu_ps(sums), _mm512_loadu_ps(sums + 16));
}

// One thread's share of the forward work.
template <class F>
void forward(const FeedForward& job, const int32_t* up, const int32_t* down, bf16* out, bf16* h,
             const bf16* x) {
    const F f(job.pieces, job.per_unit);
    Workspace space;
    bf16 *narrow = space.take<bf16>(job.rows * job.D), *wide = space.take<bf16>(job.rows * job.n);
    for_each_block(job, [&](int64_t m, int64_t n_rows) {
        const LeftBlocks left{narrow, n_rows, job.D}, inner{wide, n_rows, job.n}, kept{h, job.M, job.N};
        left.fill(x + m * job.D);
        const auto activate = [&](const float* sums, int64_t row, int64_t column) {
            for (int64_t r = row; r < row + 2; r++, sums += BLOCK) {
                const __m512i rounded = round32(_mm512_loadu_ps(sums), _mm512_loadu_ps(sums + 16));
                _mm512_storeu_si512(kept.at(m + r, column), rounded);
                const Vectors a = biased(job, rounded, column);
                const __m512 y = f(a.first).y;
                if (job.gated)
                    store16(inner.at(r, column / 2), to_bf16(_mm512_mul_ps(y, a.second)));
                else
                    store32(inner.at(r, column), y, f(a.second).y);
            }
        };
        multiply(left, up, job.N, activate);
        multiply(inner, down, job.D, [&](const float* sums, int64_t row, int64_t column) {
            bf16* to = out + (m + row) * job.D + column;
            write_row(to, sums);
            write_row(to + job.D, sums + BLOCK);
        });
    });
}

}  // namespace

// Results from backward: x's gradient (M, D); paired, in chunks with `chunk` rows, h's gradient (M,
// N) and `down`'s input (M, n); and h's gradient summed over every 32 rows, (M / 32, N).
struct FeedForwardGradients {
    bf16* x;
    int32_t *h, *y;
    float* bias;
};

namespace {

// Panels, 32 columns wide, from a chunk with n_rows rows, paired, as a weight's gradient reads
// them.
struct PairedPanels {
    int32_t* data;
    int64_t n_rows, first;

    // Writes 32 columns in rows `row` and `row` + 1, counted from the chunk's row `first`.
    void write(int64_t row, int64_t column, __m512i even, __m512i odd) const {
        row += first;
        int32_t* tile = data + column / 2 * n_rows + row / 32 * TILE + row % 32 * 8;
        _mm512_storeu_si512(tile, pair(_mm512_castsi512_si256(even), _mm512_castsi512_si256(odd)));
        _mm512_storeu_si512(tile + n_rows * 8, pair(_mm512_extracti64x4_epi64(even, 1),
                                                    _mm512_extracti64x4_epi64(odd, 1)));
    }
};

// One thread's share of the backward work.
template <class F>
class Backward {
  public:
    Backward(const FeedForward& job, bf16* h, const FeedForwardGradients& to)
        : job_(job),
          f_(job.pieces, job.per_unit),
          h_{h, job.M, job.N},
          to_(to),
          narrow_(space_.take<bf16>(job.rows * job.D)),
          wide_(space_.take<bf16>(job.rows * job.N)) {}

    void rows(int64_t m, int64_t n_rows, const bf16* g, const int32_t* down, const int32_t* up) {
        const LeftBlocks left{narrow_, n_rows, job_.D};
        left.fill(g + m * job_.D);
        inner_ = {wide_, n_rows, job_.N};
        const int64_t chunk = m / job_.chunk * job_.chunk, rest = std::min(job_.chunk, job_.M - chunk);
        g_h_ = {to_.h + chunk * job_.N / 2, rest, m - chunk};
        y_ = {to_.y + chunk * job_.n / 2, rest, m - chunk};
        first_ = m;
        sums_ = to_.bias + m / 32 * job_.N;
        std::fill(sums_, sums_ + n_rows / 32 * job_.N, 0.0f);
        const auto take = [&](const float* sums, int64_t row, int64_t column) {
            job_.gated ? take_gated(sums, row, column) : take_plain(sums, row, column);
        };
        multiply(left, down, job_.n, take);
        multiply(inner_, up, job_.D, [&](const float* sums, int64_t row, int64_t column) {
            bf16* out = to_.x + (m + row) * job_.D + column;
            write_row(out, sums);
            write_row(out + job_.D, sums + BLOCK);
        });
    }

  private:
    Vectors kept(int64_t row, int64_t channel) const {
        return biased(job_, _mm512_loadu_si512(h_.at(first_ + row, channel)), channel);
    }

    // Handles two rows, given gradients for 32 channels that `down` reads.
    void take_plain(const float* sums, int64_t row, int64_t column) const {
        __m512i y[2], g_h[2];
        Vectors total{_mm512_setzero_ps(), _mm512_setzero_ps()};
        for (int r = 0; r < 2; r++, sums += BLOCK) {
            const Vectors x = kept(row + r, column);
            const Value first = f_(x.first), second = f_(x.second);
            const Vectors g{_mm512_mul_ps(_mm512_loadu_ps(sums), first.slope),
                            _mm512_mul_ps(_mm512_loadu_ps(sums + 16), second.slope)};
            y[r] = round32(first.y, second.y);
            g_h[r] = keep(g, total, row + r, column);
        }
        finish(g_h, total, row, column);
        y_.write(row, column, y[0], y[1]);
    }

    // The same in a gated layer, with channels from two panels.
    void take_gated(const float* sums, int64_t row, int64_t column) const {
        __m256i y[2][2];  // of a row and a panel
        for (int p = 0; p < 2; p++, sums += 16) {
            const int64_t channel = 2 * column + 32 * p;
            __m512i g_h[2];
            Vectors total{_mm512_setzero_ps(), _mm512_setzero_ps()};
            for (int r = 0; r < 2; r++) {
                const Vectors x = kept(row + r, channel);
                const Value gate = f_(x.first);
                const __m512 g = _mm512_loadu_ps(sums + r * BLOCK);
                const Vectors both{_mm512_mul_ps(_mm512_mul_ps(g, gate.slope), x.second),
                                   _mm512_mul_ps(g, gate.y)};
                y[r][p] = to_bf16(_mm512_mul_ps(gate.y, x.second));
                g_h[r] = keep(both, total, row + r, channel);
            }
            finish(g_h, total, row, channel);
        }
        const auto joined = [](const __m256i* halves) {
            return _mm512_inserti64x4(_mm512_castsi256_si512(halves[0]), halves[1], 1);
        };
        y_.write(row, column, joined(y[0]), joined(y[1]));
    }

    // Writes a row's h gradient, 32 channels: for the matmul with `up`, and into the bias's.
    __m512i keep(const Vectors& g, Vectors& total, int64_t row, int64_t channel) const {
        total = {_mm512_add_ps(total.first, g.first), _mm512_add_ps(total.second, g.second)};
        const __m512i rounded = round32(g.first, g.second);
        _mm512_storeu_si512(inner_.at(row, channel), rounded);
        return rounded;
    }

    void finish(const __m512i* g_h, const Vectors& total, int64_t row, int64_t channel) const {
        g_h_.write(row, channel, g_h[0], g_h[1]);
        float* sums = sums_ + row / 32 * job_.N + channel;
        _mm512_storeu_ps(sums, _mm512_add_ps(_mm512_loadu_ps(sums), total.first));
        _mm512_storeu_ps(sums + 16, _mm512_add_ps(_mm512_loadu_ps(sums + 16), total.second));
    }

    Workspace space_;
    const FeedForward& job_;
    const F f_;
    const LeftBlocks h_;
    const FeedForwardGradients& to_;
    bf16 *narrow_, *wide_;
    LeftBlocks inner_{};
    PairedPanels g_h_{}, y_{};
    int64_t first_ = 0;
    float* sums_ = nullptr;
};

// Calls `act(packed up, packed down)` in each thread once both are there.
template <class Pack, class Act>
void with_weights(const FeedForward& job, Pack pack_both, Act act) {
    Workspace space;
    int32_t* up = space.take<int32_t>(job.N * job.D / 2);
    int32_t* down = space.take<int32_t>(job.n * job.D / 2);
#pragma omp parallel
    {
        pack_both(up, down);
        act(up, down);
    }
}

template <class F>
void backward(const FeedForward& job, const FeedForwardGradients& to, const bf16* g, bf16* h) {
    with_weights(
        job,
        [&](int32_t* up, int32_t* down) {
            pack(up, job.up, job.N, job.D);
            pack(down, job.down, job.D, job.n);
        },
        [&](const int32_t* up, const int32_t* down) {
            Backward<F> worker(job, h, to);
            for_each_block(job, [&](int64_t m, int64_t n_rows) {
                worker.rows(m, n_rows, g, down, up);
            });
        });
}

template <class F>
void forward(const FeedForward& job, bf16* out, bf16* h, const bf16* x) {
    with_weights(
        job,
        [&](int32_t* up, int32_t* down) {
            pack_transposed(up, job.up, job.N, job.D);
            pack_transposed(down, job.down, job.D, job.n);
        },
        [&](const int32_t* up, const int32_t* down) { forward<F>(job, up, down, out, h, x); });
}

}  // namespace

extern "C" {

// Computes out (M, D), without a bias, and h = x · upᵀ (M, N) for backward, in blocks (32, 32).
void pentameter_feed_forward(const FeedForward* job, bf16* out, bf16* h, const bf16* x) {
    job->pieces ? forward<Smooth>(*job, out, h, x) : forward<SquaredRelu>(*job, out, h, x);
}

// Computes gradients from `g` (M, D), out's.
void pentameter_feed_forward_backward(const FeedForward* job, const FeedForwardGradients* to,
                                      const bf16* g, bf16* h) {
    job->pieces ? backward<Smooth>(*job, *to, g, h) : backward<SquaredRelu>(*job, *to, g, h);
}
}
