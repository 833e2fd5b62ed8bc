// y = x · wᵀ for few rows x (M, K) and a weight w (N, K), fp32, as generation multiplies: the weight
// is read once, from memory, and that is what the matmul takes. A weight whose numbers all are bf16
// ones is read as such, half the bytes, and widened: the same numbers, so the same sums.
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

typedef uint16_t Bf16;
constexpr int64_t MOST_BLOCK = 384;
constexpr int64_t LEAST_WORK = 1 << 17;  // products of which a second thread takes its share
constexpr int64_t AT_ONCE = 8;  // rows of w: as many sums hide the latency of an addition

// Keeps the compiler from fusing a product with the addition that follows.
template <class T>
inline void finish(T& product) {
#ifdef __aarch64__
    asm("" : "+w"(product));
#else
    asm("" : "+x"(product));
#endif
}

// Some inputs' weights for R outputs as fp32, rows `apart` from each other: where they are, or
// widened into a buffer.
template <int R>
struct Inputs {
    const float* weights;
    int64_t apart;

    Inputs(float*, const float* w, int64_t K, int64_t) : weights(w), apart(K) {}

    Inputs(float* buffer, const Bf16* w, int64_t K, int64_t n) : weights(buffer), apart(MOST_BLOCK) {
        for (int r = 0; r < R; ++r)
            for (int64_t k = 0; k < n; ++k) {
                const uint32_t bits = uint32_t(w[r * K + k]) << 16;
                std::memcpy(buffer + r * MOST_BLOCK + k, &bits, sizeof bits);
            }
    }
};

template <class Weight, int R>
constexpr int64_t BUFFER = sizeof(Weight) < sizeof(float) ? R * MOST_BLOCK : 1;

inline Quad quad(const float* x) { return *reinterpret_cast<const Quad*>(x); }

// Outputs n … n + R - 1 for one row x. The first four inputs are summed alone, into lane 0.
template <int R, class Weight>
inline void by_lanes(float* y, const float* x, const Weight* w, int64_t K) {
    float buffer[BUFFER<Weight, R>];
    Quad sums[R] = {};
    for (int64_t start = 0; start < K; start += MOST_BLOCK) {
        const int64_t n = std::min(MOST_BLOCK, K - start);
        const Inputs<R> of(buffer, w + start, K, n);
        for (int r = 0; start == 0 && r < R; ++r) {
            float first = 0;
            for (int k = 0; k < 4; ++k) {
                float product = x[k] * of.weights[r * of.apart + k];
                finish(product);
                first = k == 0 ? product : first + product;
            }
            sums[r] = Quad{first, 0, 0, 0};
        }
        for (int64_t k = start == 0 ? 4 : 0; k < n; k += 4) {
            const Quad inputs = quad(x + start + k);
            for (int r = 0; r < R; ++r) {
                Quad product = inputs * quad(of.weights + r * of.apart + k);
                finish(product);
                sums[r] += product;
            }
        }
    }
    for (int r = 0; r < R; ++r) y[r] = (sums[r][0] + sums[r][2]) + (sums[r][1] + sums[r][3]);
}

// Outputs (n_rows, R) for rows xt (K, W), transposed and padded to W lanes; y's rows are N apart.
template <int W, int R, class Weight>
inline void by_blocks(float* y, int64_t n_rows, int64_t N, const float* xt, const Weight* w,
                      int64_t K, int64_t block) {
    typedef typename Lanes<W>::Type Vector;
    float buffer[BUFFER<Weight, R>];
    Vector totals[R];
    for (int64_t start = 0; start < K; start += block) {
        const int64_t n = std::min(block, K - start);
        const Inputs<R> of(buffer, w + start, K, n);
        Vector sums[R] = {};
        for (int64_t k = 0; k < n; ++k) {
            const Vector inputs = *reinterpret_cast<const Vector*>(xt + (start + k) * W);
            for (int r = 0; r < R; ++r) sums[r] += inputs * of.weights[r * of.apart + k];
        }
        for (int r = 0; r < R; ++r) totals[r] = start ? totals[r] + sums[r] : sums[r];
    }
    for (int64_t m = 0; m < n_rows; ++m)
        for (int r = 0; r < R; ++r) y[m * N + r] = totals[r][m];
}

template <int W, class Weight>
void multiply(float* y, const float* x, float* xt, const Weight* w, int64_t M, int64_t N, int64_t K,
              int64_t block) {
    const int64_t groups = (M + W - 1) / W;
#pragma omp parallel if (M * N * K >= LEAST_WORK)
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
                const float* rows = xt + g * K * W;
                const Weight* of_w = w + first * K;
                if (N - first >= AT_ONCE)
                    by_blocks<W, AT_ONCE>(out, n_rows, N, rows, of_w, K, block);
                else
                    for (int64_t n = 0; n < N - first; ++n)
                        by_blocks<W, 1>(out + n, n_rows, N, rows, of_w + n * K, K, block);
            }
    }
}

template <class Weight>
void one_row(float* y, const float* x, const Weight* w, int64_t N, int64_t K) {
#pragma omp parallel for schedule(static) if (N * K >= LEAST_WORK)
    for (int64_t first = 0; first < N; first += AT_ONCE)
        if (N - first >= AT_ONCE)
            by_lanes<AT_ONCE>(y + first, x, w + first * K, K);
        else
            for (int64_t n = first; n < N; ++n) by_lanes<1>(y + n, x, w + n * K, K);
}

template <class Weight>
void few_rows(float* y, const float* x, float* xt, const Weight* w, int64_t M, int64_t N, int64_t K,
              int64_t block) {
    if (M <= 4)
        multiply<4>(y, x, xt, w, M, N, K, block);
    else if (M <= 8)
        multiply<8>(y, x, xt, w, M, N, K, block);
    else
        multiply<16>(y, x, xt, w, M, N, K, block);
}

}  // namespace

// `w` is fp32, or bf16 if `narrow`. `xt` has room for x with its rows padded to a multiple of 16;
// `block` is at most MOST_BLOCK.
extern "C" void pentameter_one_row(float* y, const float* x, const void* w, int64_t N, int64_t K,
                                   int64_t narrow) {
    if (narrow)
        one_row(y, x, static_cast<const Bf16*>(w), N, K);
    else
        one_row(y, x, static_cast<const float*>(w), N, K);
}

extern "C" void pentameter_few_rows(float* y, const float* x, float* xt, const void* w, int64_t M,
                                    int64_t N, int64_t K, int64_t block, int64_t narrow) {
    if (narrow)
        few_rows(y, x, xt, static_cast<const Bf16*>(w), M, N, K, block);
    else
        few_rows(y, x, xt, static_cast<const float*>(w), M, N, K, block);
}

// Writes n fp32 numbers as bf16; returns whether all are bf16 ones, else some are not written.
extern "C" int pentameter_narrowed(Bf16* out, const uint32_t* x, int64_t n) {
    constexpr int64_t PIECE = 1 << 16;
    bool whole = true;
#pragma omp parallel for schedule(static) reduction(&& : whole) if (n >= 16 * PIECE)
    for (int64_t start = 0; start < n; start += PIECE) {
        if (!whole) continue;  // this thread's
        const int64_t end = std::min(start + PIECE, n);
        uint32_t lost = 0;
        for (int64_t i = start; i < end; ++i) {
            lost |= x[i] & 0xffff;
            out[i] = Bf16(x[i] >> 16);
        }
        whole = lost == 0;
    }
    return whole;
}
