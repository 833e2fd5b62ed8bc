// Matmuls on AMX tiles, and their operand layouts.
//
// A tile matmul adds a left factor, 16 rows × 32 bf16, times a right factor, 32 rows × 16 columns,
// to 16 × 16 fp32. The right factor interleaves two rows: word (p, n) in a right tile holds rows 2p
// and 2p + 1 in column n. "Paired" below means this layout, tile after tile.
//
// T is the sequence, padded with zeros to TP, a multiple of 32; K the head size, a multiple of 32.

#pragma once

#include <cstdlib>
#include <new>

#include "avx512.h"

constexpr int BLOCK = 32;
constexpr int TILE = 256;  // words of 32 bits

// Transposes a 16 × 16 matrix with 32-bit words.
inline void transpose_words(int32_t* out, const void* in, int64_t stride_bytes,
                            int64_t out_stride = 16) {
    const auto store = [&](int row, __m512i x) {
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
    // r[4g + c] now holds, in lane l, rows 4g … 4g + 3 in column 4l + c.
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

// 32 rows with 16 elements, `stride` apart → 16 rows with 32, `out_stride` words apart: x
// transposed.
inline void transpose_rows(int32_t* out, int64_t out_stride, const bf16* x, int64_t stride) {
    alignas(64) int32_t pairs[TILE];
    for (int p = 0; p < 16; p++, x += 2 * stride)
        _mm512_store_si512(pairs + 16 * p, pair(load16(x), load16(x + stride)));
    transpose_words(out, pairs, 64, out_stride);
}

// x (TP, K) in rows → xᵀ paired: right operand for a matmul x' · xᵀ over the K channels. Tile (t /
// 16, k / 32).
inline void pair_transposed(int32_t* out, const bf16* x, int TP, int K) {
    for (int t = 0; t < TP; t += 16)
        for (int k = 0; k < K; k += 32, out += TILE)
            transpose_words(out, x + int64_t(t) * K + k, 2 * K);
}

// x (TP, K) in rows → x paired: right operand for a matmul over the sequence. Tile (k / 16, t /
// 32).
inline void pair_rows(int32_t* out, const bf16* x, int TP, int K) {
    for (int k = 0; k < K; k += 16)
        for (int t = 0; t < TP; t += 2, out += 16)
            _mm512_storeu_si512(
                out, pair(load16(x + int64_t(t) * K + k), load16(x + int64_t(t + 1) * K + k)));
}

// Layout for the four tiles in a matrix with 32 rows: the distance between a tile's rows, and from
// the first tile to its right and its lower neighbour, in elements.
struct Tiling {
    int64_t stride, right, below;
};

// C (32, 32) fp32 = A · B over 32 · steps; B0 and B1 are its two columns of paired tiles. With
// `add`, C += A · B. `beside` is called once a step: the core does it while tiles multiply.
template <class Beside>
void product(float* C, const Tiling& c, const bf16* A, const Tiling& a, const int32_t* B0,
             const int32_t* B1, int steps, bool add, Beside beside) {
    float *right = C + c.right, *below = C + c.below, *last = below + c.right;
    if (add) {
        _tile_loadd(0, C, 4 * c.stride);
        _tile_loadd(1, right, 4 * c.stride);
        _tile_loadd(2, below, 4 * c.stride);
        _tile_loadd(3, last, 4 * c.stride);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int s = 0; s < steps; s++) {
        _tile_loadd(4, A + a.right * s, 2 * a.stride);
        _tile_loadd(6, B0 + TILE * s, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, B1 + TILE * s, 64);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, A + a.below + a.right * s, 2 * a.stride);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
        beside();
    }
    _tile_stored(0, C, 4 * c.stride);
    _tile_stored(1, right, 4 * c.stride);
    _tile_stored(2, below, 4 * c.stride);
    _tile_stored(3, last, 4 * c.stride);
}

// The same for matrices laid out in rows.
inline void product(float* C, int64_t c_stride, const bf16* A, int64_t a_stride, const int32_t* B0,
                    const int32_t* B1, int steps, bool add = false) {
    product(C, {c_stride, 16, 16 * c_stride}, A, {a_stride, 32, 16 * a_stride}, B0, B1, steps, add,
            [] {});
}

struct alignas(64) TileConfig {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// One thread's tile configuration and scratch memory.
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
