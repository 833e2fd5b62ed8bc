// Causal attention in bf16, forward and backward.
//
// One thread computes all heads with common keys and values in a batch row from beginning to end,
// so that everything between reading q, k, v and writing the result stays in its cache: PyTorch's
// batched matmuls write and read each score matrix several times. Scores are computed in blocks, 32
// × 32, those after the diagonal not at all. The result does not depend on the number of threads.

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "heads.h"
#include "tiles.h"

namespace {

// Lanes, among 16 keys from `key` on, visible to the query.
__mmask16 seen(int query, int key) {
    const int n = query - key + 1;
    return n >= 16 ? 0xffff : n <= 0 ? 0 : __mmask16((1u << n) - 1);
}

// Writes a block's (32, 32) first rows to bf16 rows `stride` apart, each times its factor.
void write_block(bf16* to, int64_t stride, const float* block, int n_rows,
                 const float* factors) {
    for (int i = 0; i < n_rows; i++, to += stride)
        for (int j = 0; j < BLOCK; j += 16)
            store16(to + j, to_bf16(_mm512_mul_ps(_mm512_loadu_ps(block + i * BLOCK + j),
                                                  _mm512_set1_ps(factors[i]))));
}

// Turns one query's raw scores over keys 0 … query into weights: unnormalised, dropped, in bf16.
// Returns log2 Σ 2^(score · scale2), and the sum's inverse in `inverse`.
float softmax_row(bf16* weights, const float* scores, int query, int n_keys, float scale2,
                  const WeightsDropout& dropout, int32_t index, float* inverse) {
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
            const __m512i element = _mm512_add_epi32(LANE_NUMBERS, _mm512_set1_epi32(index + k));
            e = _mm512_mul_ps(e, dropout.factor((Ints)element));
        }
        store16(weights + k, to_bf16(e));
    }
    const float sum = _mm512_reduce_add_ps(total);
    *inverse = 1 / sum;
    return top + std::log2(sum);
}

// For 32 keys (rows) and 32 queries (lanes), turns raw scores `p` and the dropped weights'
// gradients `gp` into dropped weights and score gradients, in bf16 rows `width` wide; the gradients
// also paired. `logs` and `delta` are the queries'; see Dao et al. 2022, section 3. `index` numbers
// the block's first element for dropout.
void score_gradients(bf16* weights, bf16* g_scores, int32_t* g_paired, int width, const float* p,
                     const float* gp, const float* logs, const float* delta, float scale,
                     bool diagonal, const WeightsDropout& dropout, int32_t index) {
    const __m512 scale2 = _mm512_set1_ps(float(M_LOG2E) * scale);
    const __m512i lanes = _mm512_mullo_epi32(LANE_NUMBERS, _mm512_set1_epi32(dropout.stride));
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
                const __m512 factor = dropout.factor((Ints)element);
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

// Forward for heads with common keys and values, one after another.
class Forward {
  public:
    explicit Forward(const Job& job)
        : job_(job),
          T_(int(job.T)),
          TP_(int(job.padded())),
          K_(int(job.K)),
          q_(space_.take<bf16>(TP_ * K_)),
          rows_(space_.take<bf16>(TP_ * K_)),
          k_(space_.take<int32_t>(TP_ * K_ / 2)),
          v_(space_.take<int32_t>(TP_ * K_ / 2)),
          scores_(space_.take<float>(BLOCK * TP_)),
          weights_(space_.take<bf16>(BLOCK * TP_)) {}

    // Writes y (B, T, H · K) for KV head g's query heads in batch row b, and `logs` (B, H, TP),
    // their log-sum-exps.
    void heads(bf16* y, float* logs, int64_t b, int g) {
        read_part(rows_, job_, job_.k, b, g);
        pair_transposed(k_, rows_, TP_, K_);
        read_part(rows_, job_, job_.v, b, g);
        pair_rows(v_, rows_, TP_, K_);
        const WeightsDropout dropout = job_.dropout(b);
        for (int h = int(g * job_.sharing()); h < (g + 1) * job_.sharing(); h++) {
            read_part(q_, job_, job_.q, b, h);
            for (int query = 0; query < TP_; query += BLOCK) {
                weigh(query, logs + (b * job_.H + h) * TP_ + query, h, dropout);
                mix(y + ((b * T_ + query) * job_.H + h) * K_, query);
            }
        }
    }

  private:
    // Computes weights for 32 queries over all keys up to the last query.
    void weigh(int query, float* logs, int h, const WeightsDropout& dropout) {
        const int steps = K_ / 32, n_keys = query + BLOCK;
        for (int key = 0; key < n_keys; key += BLOCK) {
            const int32_t* k = k_ + int64_t(key) / 16 * steps * TILE;
            product(scores_ + key, TP_, q_ + query * K_, K_, k, k + steps * TILE, steps);
        }
        const float scale2 = float(M_LOG2E / std::sqrt(double(K_)));
        for (int i = 0; i < BLOCK; i++)
            logs[i] = softmax_row(weights_ + i * TP_, scores_ + i * TP_, query + i, n_keys, scale2,
                                  dropout, dropout.index(h, query + i, 0), &inverse_[i]);
    }

    // Multiplies those weights by the values, into y's rows.
    void mix(bf16* y, int query) {
        const int n_rows = std::min(BLOCK, T_ - query), steps = TP_ / 32;
        for (int c = 0; c < K_; c += BLOCK) {
            const int32_t* v = v_ + int64_t(c) / 16 * steps * TILE;
            product(out_, BLOCK, weights_, TP_, v, v + steps * TILE, query / 32 + 1);
            write_block(y + c, job_.H * K_, out_, n_rows, inverse_);
        }
    }

    Workspace space_;
    const Job& job_;
    const int T_, TP_, K_;
    bf16 *q_, *rows_;
    int32_t *k_, *v_;
    float* scores_;
    bf16* weights_;
    float out_[BLOCK * BLOCK], inverse_[BLOCK];
};

// Gradients written by backward: for queries, keys and values, laid out like their data, and for
// the query norm's (B · H, K) and key norm's (B · G, K) weights, to be summed; these begin as
// zeros.
struct Gradients {
    bf16 *q, *k, *v;
    float *q_norm, *k_norm;
};

// Backward for heads with common keys and values, one after another. Scores are computed
// transposed, keys in rows, so that each query's numbers are in lanes and matmuls over queries take
// them on the left.
class Backward {
  public:
    explicit Backward(const Job& job)
        : job_(job), T_(int(job.T)), TP_(int(job.padded())), K_(int(job.K)) {
        const int64_t n = int64_t(TP_) * K_;
        for (bf16** rows : {&q_, &k_, &v_, &g_}) *rows = space_.take<bf16>(n);
        for (int32_t** words : {&q_right_, &g_right_, &q_pairs_, &g_pairs_, &k_left_})
            *words = space_.take<int32_t>(n / 2);
        for (float** sums : {&g_q_, &g_rows_, &g_k_, &g_v_}) *sums = space_.take<float>(n);
        for (float** times : {&logs_, &delta_}) *times = space_.take<float>(TP_);
        for (bf16** block : {&weights_, &g_scores_}) *block = space_.take<bf16>(BLOCK * TP_);
    }

    // Writes gradients for KV head g in batch row b and its queries, given y's, `g_y`.
    void heads(const Gradients& to, const bf16* g_y, const bf16* y, const float* logs, int64_t b,
               int g) {
        read_part(k_, job_, job_.k, b, g);
        read_part(v_, job_, job_.v, b, g);
        for (int t = 0; t < TP_; t += 32)
            for (int c = 0; c < K_; c += 16)
                transpose_rows(k_left_ + (int64_t(c) * TP_ + t) / 2, TP_ / 2, k_ + t * K_ + c, K_);
        const int first = int(g * job_.sharing());
        for (int h = first; h < first + job_.sharing(); h++) {
            read_queries(g_y, b, h);
            sum_rows(y + (b * T_ * job_.H + h) * K_, logs + (b * job_.H + h) * TP_);
            add_head(b, h, h > first);
            write_part(to.q, g_rows_, to.q_norm + (b * job_.H + h) * K_, job_, job_.q, b, h);
        }
        write_part(to.k, g_k_, to.k_norm + (b * job_.G + g) * K_, job_, job_.k, b, g);
        write_part(to.v, g_v_, nullptr, job_, job_.v, b, g);
    }

  private:
    // Lays out a head's q and g as the matmuls need.
    void read_queries(const bf16* g_y, int64_t b, int h) {
        read_part(q_, job_, job_.q, b, h);
        read_head(g_, g_y, job_, b, h);
        pair_transposed(q_right_, q_, TP_, K_);
        pair_transposed(g_right_, g_, TP_, K_);
        pair_rows(q_pairs_, q_, TP_, K_);
        pair_rows(g_pairs_, g_, TP_, K_);
    }

    // Computes delta = Σ g · y for each query, and its log-sum-exp; a padded one has no weight.
    void sum_rows(const bf16* y, const float* logs) {
        for (int t = 0; t < TP_; t++, y += job_.H * K_) {
            __m512 sum = _mm512_setzero_ps();
            for (int c = 0; t < T_ && c < K_; c += 16)
                sum = _mm512_fmadd_ps(to_float(load16(g_ + t * K_ + c)), to_float(load16(y + c)),
                                      sum);
            delta_[t] = _mm512_reduce_add_ps(sum);
            logs_[t] = t < T_ ? logs[t] : 1e30f;
        }
    }

    // Computes gradients for head h's queries, in rows, and for keys and values, `added` to those
    // from earlier heads.
    void add_head(int64_t b, int h, bool added) {
        const WeightsDropout dropout = job_.dropout(b);
        std::memset(g_q_, 0, sizeof(float) * TP_ * K_);
        for (int key = 0; key < TP_; key += BLOCK) {
            for (int query = key; query < TP_; query += BLOCK) add_block(key, query, h, dropout);
            add_keys(g_k_, key, g_scores_, q_pairs_, added);
            add_keys(g_v_, key, weights_, g_pairs_, added);
        }
        for (int t = 0; t < TP_; t += 16)
            for (int c = 0; c < K_; c += 16)
                transpose_words((int32_t*)g_rows_ + t * K_ + c, g_q_ + int64_t(c) * TP_ + t,
                                4 * TP_, K_);
    }

    // Computes scores for 32 keys and 32 queries, their gradients, and these gradients'
    // contribution to q's.
    void add_block(int key, int query, int h, const WeightsDropout& dropout) {
        const int TP = TP_, K = K_, steps = K / 32;
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

    // Computes the gradient for 32 keys (or values): a sum over the queries that see them.
    void add_keys(float* to, int key, const bf16* left, const int32_t* pairs, bool added) {
        const int width = TP_ / 32;
        for (int c = 0; c < K_; c += BLOCK) {
            const int32_t* right = pairs + (int64_t(c) / 16 * width + key / 32) * TILE;
            product(to + key * K_ + c, K_, left + key, TP_, right, right + width * TILE,
                    width - key / 32, added);
        }
    }

    Workspace space_;
    const Job& job_;
    const int T_, TP_, K_;
    bf16 *q_, *k_, *v_, *g_;
    int32_t *q_right_, *g_right_, *q_pairs_, *g_pairs_;
    int32_t* k_left_;             // kᵀ (K, TP) in rows
    float* g_q_;                  // transposed, (K, TP)
    float *g_rows_, *g_k_, *g_v_;  // (TP, K)
    float *logs_, *delta_;        // of each query
    bf16 *weights_, *g_scores_;   // of 32 keys, (32, TP)
    int32_t paired_[2 * TILE];
    float p_[BLOCK * BLOCK], gp_[BLOCK * BLOCK];
};

// Calls a worker's `act` in each thread with every (batch row, KV head).
template <class Worker, class Act>
void for_each_kv_head(const Job& job, Act act) {
#pragma omp parallel
    {
        Worker worker(job);
#pragma omp for schedule(static)
        for (int64_t i = 0; i < job.B * job.G; i++) act(worker, i / job.G, int(i % job.G));
    }
}

}  // namespace

extern "C" {

// Whether this machine has AMX and lets this process use it.
int pentameter_amx_works() {
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx512bf16")) return 0;
    constexpr int request_permission = 0x1023, tile_data = 18;
    return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
}

// Computes y (B, T, H · K) and its rows' log-sum-exps (B, H, TP).
void pentameter_attention_forward(const Job* job, bf16* y, float* logs) {
    for_each_kv_head<Forward>(
        *job, [&](Forward& forward, int64_t b, int g) { forward.heads(y, logs, b, g); });
}

// Computes gradients for queries, keys and values from y's.
void pentameter_attention_backward(const Job* job, const Gradients* to, const bf16* g_y,
                                   const bf16* y, const float* logs) {
    for_each_kv_head<Backward>(*job, [&](Backward& backward, int64_t b, int g) {
        backward.heads(*to, g_y, y, logs, b, g);
    });
}
}
