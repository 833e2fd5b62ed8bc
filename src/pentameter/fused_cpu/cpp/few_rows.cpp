// y = x · wᵀ for few rows x (M, K) and a weight w (N, K), fp32, as generation multiplies: the weight
// is read once, from memory, and that is what the matmul takes.
//
// Sums are in the orders in which Intel's MKL makes them, so that its bits stay (`few_rows.py` tries
// whether they do): a matrix product is one chain of fused multiply-adds per output and block of
// inputs, a product with one row has the lanes of an SSE register, multiplied and then added.

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace {

template <int W>
struct Lanes {
    typedef float Type __attribute__((vector_size(4 * W), aligned(4), may_alias));
};

typedef Lanes<4>::Type Quad;

constexpr int64_t AT_ONCE = 8;  // rows of w: as many sums hide the latency of an addition

// Outputs n … n + R - 1 for one row x. The first four inputs are summed alone, into lane 0.
template <int R>
inline void by_lanes(float* y, const float* x, const float* w, int64_t K) {
    Quad sums[R];
    for (int r = 0; r < R; ++r) {
        float first = 0;
        for (int k = 0; k < 4; ++k) {
            float product = x[k] * w[r * K + k];
            asm("" : "+x"(product));  // else the compiler fuses it with the addition
            first = k == 0 ? product : first + product;
        }
        sums[r] = Quad{first, 0, 0, 0};
    }
    for (int64_t k = 4; k < K; k += 4) {
        const Quad inputs = *reinterpret_cast<const Quad*>(x + k);
        for (int r = 0; r < R; ++r) {
            Quad product = inputs * *reinterpret_cast<const Quad*>(w + r * K + k);
            asm("" : "+x"(product));
            sums[r] += product;
        }
    }
    for (int r = 0; r < R; ++r) y[r] = (sums[r][0] + sums[r][2]) + (sums[r][1] + sums[r][3]);
}

// Outputs (n_rows, R) for rows xt (K, W), transposed and padded to W lanes; y's rows are N apart.
template <int W, int R>
inline void by_blocks(float* y, int64_t n_rows, int64_t N, const float* xt, const float* w,
                      int64_t K, int64_t block) {
    typedef typename Lanes<W>::Type Vector;
    Vector totals[R];
    for (int64_t start = 0; start < K; start += block) {
        const int64_t end = std::min(start + block, K);
        Vector sums[R] = {};
        for (int64_t k = start; k < end; ++k) {
            const Vector inputs = *reinterpret_cast<const Vector*>(xt + k * W);
            for (int r = 0; r < R; ++r) sums[r] += inputs * w[r * K + k];
        }
        for (int r = 0; r < R; ++r) totals[r] = start ? totals[r] + sums[r] : sums[r];
    }
    for (int64_t m = 0; m < n_rows; ++m)
        for (int r = 0; r < R; ++r) y[m * N + r] = totals[r][m];
}

template <int W>
void multiply(float* y, const float* x, float* xt, const float* w, int64_t M, int64_t N, int64_t K,
              int64_t block) {
    const int64_t groups = (M + W - 1) / W;
#pragma omp parallel
    {
#pragma omp for collapse(2)
        for (int64_t g = 0; g < groups; ++g)
            for (int64_t k = 0; k < K; ++k)
                for (int64_t m = 0; m < W; ++m) {
                    const int64_t row = g * W + m;
                    xt[(g * K + k) * W + m] = row < M ? x[row * K + k] : 0.0f;
                }
#pragma omp for schedule(static)
        for (int64_t first = 0; first < N; first += AT_ONCE)
            for (int64_t g = 0; g < groups; ++g) {
                float* out = y + g * W * N + first;
                const int64_t n_rows = std::min<int64_t>(W, M - g * W);
                const float *rows = xt + g * K * W, *of_w = w + first * K;
                if (N - first >= AT_ONCE)
                    by_blocks<W, AT_ONCE>(out, n_rows, N, rows, of_w, K, block);
                else
                    for (int64_t n = 0; n < N - first; ++n)
                        by_blocks<W, 1>(out + n, n_rows, N, rows, of_w + n * K, K, block);
            }
    }
}

}  // namespace

extern "C" void pentameter_one_row(float* y, const float* x, const float* w, int64_t N, int64_t K) {
#pragma omp parallel for schedule(static)
    for (int64_t first = 0; first < N; first += AT_ONCE)
        if (N - first >= AT_ONCE)
            by_lanes<AT_ONCE>(y + first, x, w + first * K, K);
        else
            for (int64_t n = first; n < N; ++n) by_lanes<1>(y + n, x, w + n * K, K);
}

// `xt` has room for x with its rows padded to a multiple of 16.
extern "C" void pentameter_few_rows(float* y, const float* x, float* xt, const float* w, int64_t M,
                                    int64_t N, int64_t K, int64_t block) {
    if (M <= 4)
        multiply<4>(y, x, xt, w, M, N, K, block);
    else if (M <= 8)
        multiply<8>(y, x, xt, w, M, N, K, block);
    else
        multiply<16>(y, x, xt, w, M, N, K, block);
}
