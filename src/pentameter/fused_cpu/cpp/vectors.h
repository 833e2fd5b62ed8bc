// fp32 vectors as wide as the CPU's registers, by extensions common to GCC and Clang: one source
// for AVX2, AVX-512 and other targets. Numbers in memory are fp32 or bf16.

#pragma once

#include <cstdint>
#include <cstring>
#include <initializer_list>

#ifndef VECTOR_BYTES  // a test names other widths than the CPU's own
#if defined(__AVX512F__)
#define VECTOR_BYTES 64
#elif defined(__AVX2__)
#define VECTOR_BYTES 32
#else
#define VECTOR_BYTES 16
#endif
#endif

#if VECTOR_BYTES == 64 && defined(__AVX512F__)
#include <immintrin.h>
#endif

using bf16 = uint16_t;
constexpr int LANES = VECTOR_BYTES / 4;
constexpr int64_t LINE = 64;  // bytes that memory gives at once
typedef float Floats __attribute__((vector_size(VECTOR_BYTES)));
typedef int32_t Ints __attribute__((vector_size(VECTOR_BYTES)));
typedef uint32_t Words __attribute__((vector_size(VECTOR_BYTES)));
typedef uint16_t Halves __attribute__((vector_size(VECTOR_BYTES / 2)));

inline Floats load(const float* from) {
    Floats x;
    std::memcpy(&x, from, sizeof x);
    return x;
}

inline Words load(const uint32_t* from) {
    Words x;
    std::memcpy(&x, from, sizeof x);
    return x;
}

inline Floats load(const bf16* from) {
    Halves x;
    std::memcpy(&x, from, sizeof x);
#if VECTOR_BYTES == 64 && defined(__AVX512F__)  // one instruction, which GCC 12 does not find
    return (Floats)((Words)_mm512_cvtepu16_epi32((__m256i)x) << 16);
#else
    return (Floats)(__builtin_convertvector(x, Words) << 16);
#endif
}

inline void store(float* to, Floats x) { std::memcpy(to, &x, sizeof x); }

// Rounded to the nearest, halves to even.
inline void store(bf16* to, Floats x) {
#if VECTOR_BYTES == 64 && defined(__AVX512BF16__)
    const auto rounded = _mm512_cvtneps_pbh((__m512)x);
#else
    const Words word = (Words)x, nan = (word >> 16) | 0x40;
    const Words near = (word + 0x7fff + ((word >> 16) & 1)) >> 16;
    const Halves rounded = __builtin_convertvector(x == x ? near : nan, Halves);
#endif
    std::memcpy(to, &rounded, sizeof rounded);
}

// Pairs of bf16 numbers, a pair in each lane: in all of them, or in the first half, zeros behind.
template <bool WHOLE>
inline Words load_pairs(const bf16* from) {
    Words x = {};
    std::memcpy(&x, from, WHOLE ? sizeof x : sizeof x / 2);
    return x;
}

// sum + x · y, in each lane; of pairs, the products of both.
inline Floats add_products(Floats sum, Floats x, Floats y) { return sum + x * y; }

inline Floats add_products(Floats sum, Words x, Words y) {
#if VECTOR_BYTES == 64 && defined(__AVX512BF16__)
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)y);
#else
    sum += (Floats)(x & 0xffff0000) * (Floats)(y & 0xffff0000);
    return sum + (Floats)(x << 16) * (Floats)(y << 16);
#endif
}

inline Floats all(float x) { return x - Floats{}; }

// 0, 1, 2, …
inline Ints lane_numbers() {
    Ints x;
    for (int i = 0; i < LANES; i++) x[i] = i;
    return x;
}

template <int N>
struct Numbers {
    typedef float Type __attribute__((vector_size(4 * N)));
};

// The sum of N numbers, by halves, which stay in registers.
template <int N>
inline float sum_by_halves(const typename Numbers<N>::Type& x) {
    if constexpr (N == 4) {
        return (x[0] + x[2]) + (x[1] + x[3]);
    } else {
        typename Numbers<N / 2>::Type halves[2];
        std::memcpy(halves, &x, sizeof x);
        return sum_by_halves<N / 2>(halves[0] + halves[1]);
    }
}

inline float sum_of(Floats x) { return sum_by_halves<LANES>(x); }

#if VECTOR_BYTES == 64 && defined(__AVX512F__)
// y[i] = sum_of(x[i]) for four registers, with the same bits.
inline void sums_of_four(float* y, const Floats* x) {
    // Quarters of registers, or sums of them: those of `a` and `b` that the numbers name.
#define QUARTERS(a, b, i, j) _mm512_shuffle_f32x4(a, b, i | j << 2 | i << 4 | j << 6)
    const __m512 a = (__m512)x[0], b = (__m512)x[1], c = (__m512)x[2], d = (__m512)x[3];
    const __m512 ab = QUARTERS(a, b, 0, 1) + QUARTERS(a, b, 2, 3);
    const __m512 cd = QUARTERS(c, d, 0, 1) + QUARTERS(c, d, 2, 3);
    __m512 sums = QUARTERS(ab, cd, 0, 2) + QUARTERS(ab, cd, 1, 3);
#undef QUARTERS
    sums += _mm512_permute_ps(sums, 0b01001110);
    sums += _mm512_permute_ps(sums, 0b10110001);
    // The first lane of each quarter.
    _mm_storeu_ps(y, _mm512_castps512_ps128(_mm512_maskz_compress_ps(0x1111, sums)));
}
#endif

// y[i] = sum_of(x[i]) for N registers.
template <int N>
inline void sums_of(float* y, const Floats* x) {
    int i = 0;
#if VECTOR_BYTES == 64 && defined(__AVX512F__)
#pragma GCC unroll 8
    for (; i + 4 <= N; i += 4) sums_of_four(y + i, x + i);
#endif
    for (; i < N; ++i) y[i] = sum_of(x[i]);
}

inline Floats size_of(Floats x) { return (Floats)((Ints)x & 0x7fffffff); }

// e^x, to 2e-7 relatively; 0 below -87 and infinite above 88. Cephes' expf.
inline Floats exponential(Floats x) {
    constexpr float lowest = -87.0f, highest = 88.0f;
    constexpr float rounding = 12582912.0f;  // 1.5 · 2^23: an integer is in the last bits of the sum
    const Floats shifted = x * 1.44269504f + rounding, whole = shifted - rounding;
    const Floats r = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
    Floats y = all(1.9875691500e-4f);
    for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f,
                    5.0000001201e-1f})
        y = y * r + c;
    y = y * (r * r) + (r + 1.0f);
    y *= (Floats)(((Words)shifted << 23) + 0x3f800000u);
    y = x < lowest ? Floats{} : y;  // a number that is none stays one
    return x > highest ? all(__builtin_inff()) : y;
}
