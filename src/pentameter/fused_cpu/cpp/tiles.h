// Products on AMX tiles, and the layouts they take.
//
// A tile product adds a left factor of 16 rows × 32 bf16 times a right factor of 32 rows × 16
// columns to 16 × 16 fp32. The right factor comes in pairs of rows: word (p, n) of a right tile
// holds rows 2p and 2p + 1 of column n. "Paired" below means laid out so, tile after tile.
//
// T is the time, padded with zeros to TP, a multiple of 32; K the head size, a multiple of 32.

#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstdlib>
#include <new>

using bf16 = uint16_t;

constexpr int BLOCK = 32;
constexpr int TILE = 256;  // words of 32 bits

// 2^x for x ≤ 0 or a little above; the error is below 3e-6 of the result, bf16 rounds by 4e-3.
inline __m512 power_of_two(__m512 x) {
    const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 part = _mm512_sub_ps(x, whole);
    __m512 y = _mm512_set1_ps(1.3333558e-3f);  // Taylor: ln(2)^n / n!
    for (float c : {9.6181291e-3f, 5.5504109e-2f, 2.4022651e-1f, 6.9314718e-1f, 1.0f})
        y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(c));
    return _mm512_scalef_ps(y, whole);
}

inline __m256i to_bf16(__m512 x) { return (__m256i)_mm512_cvtneps_pbh(x); }

inline __m512 to_float(__m256i x) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}

inline __m512i pair(__m256i even, __m256i odd) {
    return _mm512_or_si512(_mm512_cvtepu16_epi32(even),
                           _mm512_slli_epi32(_mm512_cvtepu16_epi32(odd), 16));
}

inline __m256i load16(const bf16* x) { return _mm256_loadu_si256((const __m256i*)x); }

inline void store16(bf16* x, __m256i values) { _mm256_storeu_si256((__m256i*)x, values); }

// A 16 × 16 matrix of 32-bit words, transposed. STREAM writes past the caches, for large results.
template <bool STREAM = false>
void transpose_words(int32_t* out, const void* in, int64_t stride_bytes, int64_t out_stride = 16) {
    const auto store = [&](int row, __m512i x) {
        if (STREAM)
            _mm512_stream_si512((__m512i*)(out + out_stride * row), x);
        else
            _mm512_storeu_si512(out + out_stride * row, x);
    };
    __m512i r[16], t[16];
    for (int i = 0; i < 16; i++) r[i] = _mm512_loadu_si512((const char*)in + i * stride_bytes);
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            r[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + j + 2]);
            r[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + j + 2]);
        }
    // r[4g + c] now holds, in lane l, rows 4g … 4g + 3 of column 4l + c.
    for (int c = 0; c < 4; c++) {
        const __m512i a = _mm512_shuffle_i32x4(r[c], r[4 + c], 0x44);
        const __m512i b = _mm512_shuffle_i32x4(r[c], r[4 + c], 0xee);
        const __m512i d = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0x44);
        const __m512i e = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0xee);
        store(c, _mm512_shuffle_i32x4(a, d, 0x88));
        store(4 + c, _mm512_shuffle_i32x4(a, d, 0xdd));
        store(8 + c, _mm512_shuffle_i32x4(b, e, 0x88));
        store(12 + c, _mm512_shuffle_i32x4(b, e, 0xdd));
    }
}

// 32 rows of 16 elements, `stride` apart → 16 rows of 32, `out_stride` words apart: x transposed.
template <bool STREAM = false>
void transpose_rows(int32_t* out, int64_t out_stride, const bf16* x, int64_t stride) {
    alignas(64) int32_t pairs[TILE];
    for (int p = 0; p < 16; p++, x += 2 * stride)
        _mm512_store_si512(pairs + 16 * p, pair(load16(x), load16(x + stride)));
    transpose_words<STREAM>(out, pairs, 64, out_stride);
}

// x (TP, K) in rows → xᵀ paired: what a product x' · xᵀ over the K channels takes on its right.
// Tile (t / 16, k / 32).
inline void pair_transposed(int32_t* out, const bf16* x, int TP, int K) {
    for (int t = 0; t < TP; t += 16)
        for (int k = 0; k < K; k += 32, out += TILE)
            transpose_words(out, x + int64_t(t) * K + k, 2 * K);
}

// x (TP, K) in rows → x paired: what a product over time takes on its right. Tile (k / 16, t / 32).
inline void pair_rows(int32_t* out, const bf16* x, int TP, int K) {
    for (int k = 0; k < K; k += 16)
        for (int t = 0; t < TP; t += 2, out += 16)
            _mm512_storeu_si512(
                out, pair(load16(x + int64_t(t) * K + k), load16(x + int64_t(t + 1) * K + k)));
}

// C (32, 32) fp32 = A · B over 32 · steps; B0 and B1 are its two columns of paired tiles.
// With `add`, C += A · B.
inline void product(float* C, int64_t c_stride, const bf16* A, int64_t a_stride, const int32_t* B0,
                    const int32_t* B1, int steps, bool add = false) {
    float* C1 = C + 16 * c_stride;
    const bf16* A1 = A + 16 * a_stride;
    if (add) {
        _tile_loadd(0, C, 4 * c_stride);
        _tile_loadd(1, C + 16, 4 * c_stride);
        _tile_loadd(2, C1, 4 * c_stride);
        _tile_loadd(3, C1 + 16, 4 * c_stride);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int s = 0; s < steps; s++) {
        _tile_loadd(4, A + 32 * s, 2 * a_stride);
        _tile_loadd(6, B0 + TILE * s, 64);
        _tile_loadd(7, B1 + TILE * s, 64);
        _tile_loadd(5, A1 + 32 * s, 2 * a_stride);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, C, 4 * c_stride);
    _tile_stored(1, C + 16, 4 * c_stride);
    _tile_stored(2, C1, 4 * c_stride);
    _tile_stored(3, C1 + 16, 4 * c_stride);
}

struct alignas(64) TileConfig {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// One thread's tiles, and memory that is its own until the object ends.
class Workspace {
  public:
    Workspace() { _tile_loadconfig(&config_); }
    ~Workspace() {
        for (int i = 0; i < count_; i++) std::free(pieces_[i]);
        _tile_release();
    }
    Workspace(const Workspace&) = delete;
    template <class T>
    T* take(int64_t n) {
        void* piece = std::aligned_alloc(64, (n * sizeof(T) + 63) / 64 * 64);
        if (!piece) throw std::bad_alloc();
        pieces_[count_++] = piece;
        return static_cast<T*>(piece);
    }

  private:
    TileConfig config_;
    void* pieces_[32];
    int count_ = 0;
};
