// Causal attention in bf16, forward and backward, and a transposing copy.
//
// One thread computes one head of one row of the batch from beginning to end, so that everything
// between the read of q, k, v and the write of the result stays in its cache: PyTorch's batched
// products write and read each matrix of scores several times. Scores are computed in blocks of
// 32 × 32, those after the diagonal not at all. The result does not depend on the number of
// threads.

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "tiles.h"

namespace {

// The keyed hash of keyed.py; a test compares the masks.
struct Dropout {
    float scale;  // 1 / (1 - p), or 0 for no dropout
    int32_t bound, key0, key1;
    int stride;

    // The number of (head, query, key) in its row of the batch; see AttentionDropout.
    int32_t index(int head, int query, int key) const {
        return int32_t((uint32_t(head) * stride + query) * stride + key);
    }

    __m512i bits(__m512i index) const {
        const auto mix = [](__m512i x, int shift) {
            return _mm512_xor_si512(x, _mm512_srl_epi32(x, _mm_cvtsi32_si128(shift)));
        };
        __m512i x = _mm512_xor_si512(index, _mm512_set1_epi32(key0));
        x = _mm512_mullo_epi32(x, _mm512_set1_epi32(int32_t(0xED5AD4BBu)));
        x = _mm512_xor_si512(mix(x, 11), _mm512_set1_epi32(key1));
        x = mix(_mm512_mullo_epi32(x, _mm512_set1_epi32(int32_t(0xAC4C1B51u))), 15);
        return mix(_mm512_mullo_epi32(x, _mm512_set1_epi32(0x31848BAB)), 14);
    }

    __mmask16 keep(__m512i index) const {
        return _mm512_cmpge_epi32_mask(bits(index), _mm512_set1_epi32(bound));
    }
};

struct Shape {
    int B, T, H, K, TP;
    Shape(int B, int T, int H, int K) : B(B), T(T), H(H), K(K), TP((T + 31) / 32 * 32) {}
    int64_t parts() const { return int64_t(H) * 3 * K; }  // width of a row of q, k, v
};

// K channels copied, and those that the next head will read fetched into the cache.
void copy_row(bf16* out, const bf16* in, int K, int64_t next_head) {
    for (int k = 0; k < K; k += 32) {
        _mm_prefetch((const char*)(in + next_head + k), _MM_HINT_T1);
        _mm512_storeu_si512(out + k, _mm512_loadu_si512(in + k));
    }
}

// Part `which` (q, k, v) of head h of batch row b, plus its bias, in rows (TP, K).
void read_part(bf16* out, const bf16* qkv, const float* bias, const Shape& s, int b, int h,
               int which) {
    const int64_t first = (int64_t(h) * 3 + which) * s.K;
    const bf16* in = qkv + int64_t(b) * s.T * s.parts() + first;
    for (int t = 0; t < s.T; t++, in += s.parts(), out += s.K) {
        copy_row(out, in, s.K, 3 * s.K);
        for (int k = 0; bias && k < s.K; k += 16) {
            const __m512 x = _mm512_loadu_ps(bias + first + k);
            store16(out + k, to_bf16(_mm512_add_ps(to_float(load16(out + k)), x)));
        }
    }
    std::memset(out, 0, 2 * int64_t(s.TP - s.T) * s.K);
}

// Rows (T, K) of head h of x (B, T, H · K).
void read_head(bf16* out, const bf16* x, const Shape& s, int b, int h) {
    const bf16* in = x + (int64_t(b) * s.T * s.H + h) * s.K;
    for (int t = 0; t < s.T; t++, in += int64_t(s.H) * s.K, out += s.K) copy_row(out, in, s.K, s.K);
    std::memset(out, 0, 2 * int64_t(s.TP - s.T) * s.K);
}

// The lanes of 16 keys from `key` on that query may see.
__mmask16 seen(int query, int key) {
    const int n = query - key + 1;
    return n >= 16 ? 0xffff : n <= 0 ? 0 : __mmask16((1u << n) - 1);
}

const __m512i LANES = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);

// The first rows of a block (32, 32) to bf16 rows `stride` apart, each times its factor, if any.
void write_block(bf16* to, int64_t stride, const float* block, int n_rows,
                 const float* factors = nullptr) {
    for (int i = 0; i < n_rows; i++, to += stride)
        for (int j = 0; j < BLOCK; j += 16) {
            const __m512 x = _mm512_loadu_ps(block + i * BLOCK + j);
            store16(to + j, to_bf16(factors ? _mm512_mul_ps(x, _mm512_set1_ps(factors[i])) : x));
        }
}

// Weights of one query over keys 0 … query from its raw scores: unnormalised, dropped, in bf16.
// Returns log2 of the sum of 2^(score · scale2), and the sum's inverse in `inverse`.
float softmax_row(bf16* weights, const float* scores, int query, int n_keys, float scale2,
                  const Dropout& dropout, int32_t index, float* inverse) {
    __m512 largest = _mm512_set1_ps(-INFINITY);
    for (int k = 0; k <= query; k += 16)
        largest = _mm512_mask_max_ps(largest, seen(query, k), largest, _mm512_loadu_ps(scores + k));
    const float top = _mm512_reduce_max_ps(largest) * scale2;
    __m512 total = _mm512_setzero_ps();
    for (int k = 0; k < n_keys; k += 16) {
        const __m512 x = _mm512_fmsub_ps(_mm512_loadu_ps(scores + k), _mm512_set1_ps(scale2),
                                         _mm512_set1_ps(top));
        __m512 e = _mm512_maskz_mov_ps(seen(query, k), power_of_two(x));
        total = _mm512_add_ps(total, e);
        if (dropout.scale != 0) {
            const __mmask16 mask =
                dropout.keep(_mm512_add_epi32(LANES, _mm512_set1_epi32(index + k)));
            e = _mm512_maskz_mul_ps(mask, e, _mm512_set1_ps(dropout.scale));
        }
        store16(weights + k, to_bf16(e));
    }
    const float sum = _mm512_reduce_add_ps(total);
    *inverse = 1 / sum;
    return top + std::log2(sum);
}

// For a block of 32 keys (rows) and 32 queries (lanes), raw scores `p` and the gradients `gp` of
// their dropped weights → the dropped weights and the gradients of the scores, in bf16 rows of
// `width`; the gradients also paired. `logs` and `delta` are the queries'; see Dao et al. 2022,
// section 3. `index` numbers the block's first element for dropout.
void score_gradients(bf16* weights, bf16* g_scores, int32_t* g_paired, int width, const float* p,
                     const float* gp, const float* logs, const float* delta, float scale,
                     bool diagonal, const Dropout& dropout, int32_t index) {
    const __m512 scale2 = _mm512_set1_ps(float(M_LOG2E) * scale);
    const __m512i lanes = _mm512_mullo_epi32(LANES, _mm512_set1_epi32(dropout.stride));
    for (int j = 0; j < BLOCK; j += 16) {
        const __m512 log = _mm512_loadu_ps(logs + j), mean = _mm512_loadu_ps(delta + j);
        const __m512i elements =
            _mm512_add_epi32(lanes, _mm512_set1_epi32(index + j * dropout.stride));
        __m256i even = _mm256_setzero_si256();
        for (int i = 0; i < BLOCK; i++) {
            const __m512 score = _mm512_loadu_ps(p + i * BLOCK + j);
            __m512 w = power_of_two(_mm512_fmsub_ps(score, scale2, log));
            __m512 g = _mm512_loadu_ps(gp + i * BLOCK + j);
            if (diagonal) w = _mm512_maskz_mov_ps(_cvtu32_mask16(0xffffu << std::max(0, i - j)), w);
            __m512 dropped = w;
            if (dropout.scale != 0) {
                const __m512i element = _mm512_add_epi32(elements, _mm512_set1_epi32(i));
                const __m512 factor =
                    _mm512_maskz_mov_ps(dropout.keep(element), _mm512_set1_ps(dropout.scale));
                dropped = _mm512_mul_ps(w, factor);
                g = _mm512_mul_ps(g, factor);
            }
            g = _mm512_mul_ps(_mm512_mul_ps(w, _mm512_set1_ps(scale)), _mm512_sub_ps(g, mean));
            const __m256i low = to_bf16(g);
            store16(weights + i * width + j, to_bf16(dropped));
            store16(g_scores + i * width + j, low);
            if (i % 2) {
                _mm512_storeu_si512(g_paired + j / 16 * TILE + i / 2 * 16, pair(even, low));
            }
            even = low;
        }
    }
}

// Forward of one head after another.
class Forward {
  public:
    explicit Forward(const Shape& s)
        : s_(s),
          q_(space_.take<bf16>(s.TP * s.K)),
          rows_(space_.take<bf16>(s.TP * s.K)),
          k_(space_.take<int32_t>(s.TP * s.K / 2)),
          v_(space_.take<int32_t>(s.TP * s.K / 2)),
          scores_(space_.take<float>(BLOCK * s.TP)),
          weights_(space_.take<bf16>(BLOCK * s.TP)) {}

    // Writes y (B, T, H · K) for head h of row b, and `logs` (TP) of its sums of weights.
    void head(bf16* y, float* logs, const bf16* qkv, const float* bias, int b, int h,
              const Dropout& dropout) {
        read_part(q_, qkv, bias, s_, b, h, 0);
        read_part(rows_, qkv, bias, s_, b, h, 1);
        pair_transposed(k_, rows_, s_.TP, s_.K);
        read_part(rows_, qkv, bias, s_, b, h, 2);
        pair_rows(v_, rows_, s_.TP, s_.K);
        for (int query = 0; query < s_.TP; query += BLOCK) {
            weigh(query, logs + query, h, dropout);
            mix(y + ((int64_t(b) * s_.T + query) * s_.H + h) * s_.K, query);
        }
    }

  private:
    // Weights of 32 queries over the keys up to the last of them.
    void weigh(int query, float* logs, int h, const Dropout& dropout) {
        const int steps = s_.K / 32, n_keys = query + BLOCK;
        for (int key = 0; key < n_keys; key += BLOCK) {
            const int32_t* k = k_ + int64_t(key) / 16 * steps * TILE;
            product(scores_ + key, s_.TP, q_ + query * s_.K, s_.K, k, k + steps * TILE, steps);
        }
        const float scale2 = float(M_LOG2E / std::sqrt(double(s_.K)));
        for (int i = 0; i < BLOCK; i++)
            logs[i] = softmax_row(weights_ + i * s_.TP, scores_ + i * s_.TP, query + i, n_keys,
                                  scale2, dropout, dropout.index(h, query + i, 0), &inverse_[i]);
    }

    // Those weights times the values, to rows of y.
    void mix(bf16* y, int query) {
        const int n_rows = std::min(BLOCK, s_.T - query), steps = s_.TP / 32;
        for (int c = 0; c < s_.K; c += BLOCK) {
            const int32_t* v = v_ + int64_t(c) / 16 * steps * TILE;
            product(out_, BLOCK, weights_, s_.TP, v, v + steps * TILE, query / 32 + 1);
            write_block(y + c, int64_t(s_.H) * s_.K, out_, n_rows, inverse_);
        }
    }

    Workspace space_;
    Shape s_;
    bf16 *q_, *rows_;
    int32_t *k_, *v_;
    float* scores_;
    bf16* weights_;
    float out_[BLOCK * BLOCK], inverse_[BLOCK];
};

// Backward of one head after another. Scores are computed transposed, keys in rows, so that what
// belongs to a query lies in lanes and the products over queries take them on the left.
class Backward {
  public:
    explicit Backward(const Shape& s) : s_(s), n_(int64_t(s.TP) * s.K) {
        for (bf16** rows : {&q_, &k_, &v_, &g_}) *rows = space_.take<bf16>(n_);
        for (int32_t** words : {&q_right_, &g_right_, &q_pairs_, &g_pairs_, &k_left_})
            *words = space_.take<int32_t>(n_ / 2);
        g_q_ = space_.take<float>(n_);
        for (float** times : {&logs_, &delta_}) *times = space_.take<float>(s.TP);
        for (bf16** block : {&weights_, &g_scores_}) *block = space_.take<bf16>(BLOCK * s.TP);
    }

    // Writes to g_qkv the gradients of head h of row b, from that of y, `g_y`.
    void head(bf16* g_qkv, const bf16* g_y, const bf16* y, const float* logs, const bf16* qkv,
              const float* bias, int b, int h, const Dropout& dropout) {
        read(g_y, qkv, bias, b, h);
        sum_rows(y + (int64_t(b) * s_.T * s_.H + h) * s_.K, logs);
        std::memset(g_q_, 0, sizeof(float) * n_);
        bf16* to = g_qkv + int64_t(b) * s_.T * s_.parts() + int64_t(h) * 3 * s_.K;
        for (int key = 0; key < s_.TP; key += BLOCK) {
            for (int query = key; query < s_.TP; query += BLOCK) add_block(key, query, h, dropout);
            write_keys(to + key * s_.parts() + s_.K, key, g_scores_, q_pairs_);
            write_keys(to + key * s_.parts() + 2 * s_.K, key, weights_, g_pairs_);
        }
        write_queries(to);
    }

  private:
    // The head's q, k, v and g in every layout that the products need.
    void read(const bf16* g_y, const bf16* qkv, const float* bias, int b, int h) {
        const int TP = s_.TP, K = s_.K;
        read_part(q_, qkv, bias, s_, b, h, 0);
        read_part(k_, qkv, bias, s_, b, h, 1);
        read_part(v_, qkv, bias, s_, b, h, 2);
        read_head(g_, g_y, s_, b, h);
        pair_transposed(q_right_, q_, TP, K);
        pair_transposed(g_right_, g_, TP, K);
        pair_rows(q_pairs_, q_, TP, K);
        pair_rows(g_pairs_, g_, TP, K);
        for (int t = 0; t < TP; t += 32)
            for (int c = 0; c < K; c += 16)
                transpose_rows(k_left_ + (int64_t(c) * TP + t) / 2, TP / 2, k_ + t * K + c, K);
    }

    // For each query, delta = Σ g · y, and the logarithm of its sum; a padded one weighs nothing.
    void sum_rows(const bf16* y, const float* logs) {
        for (int t = 0; t < s_.TP; t++, y += int64_t(s_.H) * s_.K) {
            __m512 sum = _mm512_setzero_ps();
            for (int c = 0; t < s_.T && c < s_.K; c += 16)
                sum = _mm512_fmadd_ps(to_float(load16(g_ + t * s_.K + c)), to_float(load16(y + c)),
                                      sum);
            delta_[t] = _mm512_reduce_add_ps(sum);
            logs_[t] = t < s_.T ? logs[t] : 1e30f;
        }
    }

    // The scores of 32 keys and 32 queries, their gradients, and what they add to those of q.
    void add_block(int key, int query, int h, const Dropout& dropout) {
        const int TP = s_.TP, K = s_.K, steps = K / 32;
        const int64_t right = int64_t(query) / 16 * steps * TILE, next = right + steps * TILE;
        product(p_, BLOCK, k_ + key * K, K, q_right_ + right, q_right_ + next, steps);
        product(gp_, BLOCK, v_ + key * K, K, g_right_ + right, g_right_ + next, steps);
        score_gradients(weights_ + query, g_scores_ + query, paired_, TP, p_, gp_, logs_ + query,
                        delta_ + query, float(1 / std::sqrt(double(K))), query == key, dropout,
                        dropout.index(h, query, key));
        for (int c = 0; c < K; c += BLOCK)
            product(g_q_ + int64_t(c) * TP + query, TP, (bf16*)k_left_ + int64_t(c) * TP + key, TP,
                    paired_, paired_ + TILE, 1, true);
    }

    // The gradient of 32 keys (or values): a sum over the queries that see them.
    void write_keys(bf16* to, int key, const bf16* left, const int32_t* pairs) {
        const int n_rows = std::min(BLOCK, s_.T - key), width = s_.TP / 32;
        for (int c = 0; c < s_.K; c += BLOCK) {
            const int32_t* right = pairs + (int64_t(c) / 16 * width + key / 32) * TILE;
            product(out_, BLOCK, left + key, s_.TP, right, right + width * TILE, width - key / 32);
            write_block(to + c, s_.parts(), out_, n_rows);
        }
    }

    void write_queries(bf16* to) {
        alignas(64) float tile[TILE];
        for (int t = 0; t < s_.T; t += 16)
            for (int c = 0; c < s_.K; c += 16) {
                transpose_words((int32_t*)tile, g_q_ + int64_t(c) * s_.TP + t, 4 * s_.TP);
                for (int i = 0; i < std::min(16, s_.T - t); i++)
                    store16(to + (t + i) * s_.parts() + c, to_bf16(_mm512_load_ps(tile + 16 * i)));
            }
    }

    Workspace space_;
    Shape s_;
    int64_t n_;
    bf16 *q_, *k_, *v_, *g_;
    int32_t *q_right_, *g_right_, *q_pairs_, *g_pairs_;
    int32_t* k_left_;            // kᵀ (K, TP) in rows
    float* g_q_;                 // transposed, (K, TP)
    float *logs_, *delta_;       // of each query
    bf16 *weights_, *g_scores_;  // of 32 keys, (32, TP)
    int32_t paired_[2 * TILE];
    float p_[BLOCK * BLOCK], gp_[BLOCK * BLOCK], out_[BLOCK * BLOCK];
};

}  // namespace

extern "C" {

// Whether this machine has AMX and lets this process use it.
int pentameter_amx_works() {
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx512bf16")) return 0;
    constexpr int request_permission = 0x1023, tile_data = 18;
    return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
}

// y (B, T, H · K) and logs (B, H, TP) of qkv (B, T, H · 3 · K) and its bias (H · 3 · K) or null.
// `keys` (B, 2) are those of dropout; `stride` numbers its elements (see AttentionDropout).
void pentameter_attention_forward(bf16* y, float* logs, const bf16* qkv, const float* bias,
                                  const int32_t* keys, int B, int T, int H, int K, int stride,
                                  int32_t bound, float dropout_scale) {
    const Shape s(B, T, H, K);
#pragma omp parallel
    {
        Forward forward(s);
#pragma omp for schedule(static)
        for (int i = 0; i < B * H; i++) {
            const int b = i / H;
            const Dropout dropout{dropout_scale, bound, keys[2 * b], keys[2 * b + 1], stride};
            forward.head(y, logs + int64_t(i) * s.TP, qkv, bias, b, i % H, dropout);
        }
    }
}

// The gradient (B, T, H · 3 · K) of qkv, from that of y.
void pentameter_attention_backward(bf16* g_qkv, const bf16* g_y, const bf16* y, const float* logs,
                                   const bf16* qkv, const float* bias, const int32_t* keys, int B,
                                   int T, int H, int K, int stride, int32_t bound,
                                   float dropout_scale) {
    const Shape s(B, T, H, K);
#pragma omp parallel
    {
        Backward backward(s);
#pragma omp for schedule(static)
        for (int i = 0; i < B * H; i++) {
            const int b = i / H;
            const Dropout dropout{dropout_scale, bound, keys[2 * b], keys[2 * b + 1], stride};
            backward.head(g_qkv, g_y, y, logs + int64_t(i) * s.TP, qkv, bias, b, i % H, dropout);
        }
    }
}

// out (n, M) = xᵀ for x (M, n) of 16-bit elements; both sizes are multiples of 32, and the rows of
// out, `stride` apart, begin at multiples of 64 bytes.
void pentameter_transpose(bf16* out, const bf16* x, int64_t M, int64_t n, int64_t stride) {
#pragma omp parallel
    {
#pragma omp for schedule(static)
        for (int64_t m = 0; m < M; m += 32)
            for (int64_t c = 0; c < n; c += 16)
                transpose_rows<true>((int32_t*)(out + c * stride + m), stride / 2, x + m * n + c,
                                     n);
        _mm_sfence();  // streamed writes are in no order with what follows
    }
}
}
