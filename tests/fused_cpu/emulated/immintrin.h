// The instructions of AMX and AVX-512 that the kernels on tiles use, in plain C++ for any processor.
//
// With this folder first in the compiler's search path, and vectors of 64 bytes asked for, the
// kernels' sources are compiled as they are, and compute what they would on a processor with tiles:
// the tests of these kernels run everywhere. After Intel's manual, "Instruction Set Reference", to the
// bit but for the payload of what is not a number: `test_instructions.py`.

#pragma once

#include <sys/syscall.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <initializer_list>

#define EMULATED 1

// What a process asks its system and processor before it uses tiles: here the answer is yes.
#define __builtin_cpu_init() ((void)0)
#define __builtin_cpu_supports(name) true
#undef SYS_arch_prctl
#define SYS_arch_prctl SYS_sched_yield

typedef float __m512 __attribute__((vector_size(64), aligned(64)));
typedef float __m128 __attribute__((vector_size(16), aligned(16)));
typedef int64_t __m512i __attribute__((vector_size(64), aligned(64)));
typedef int64_t __m256i __attribute__((vector_size(32), aligned(32)));
typedef int16_t __m512bh __attribute__((vector_size(64), aligned(64)));
typedef int16_t __m256bh __attribute__((vector_size(32), aligned(32)));
typedef uint16_t __mmask16;

namespace emulated {

typedef double Doubles __attribute__((vector_size(128)));
typedef int64_t Choice __attribute__((vector_size(128)));  // of each double: all bits, or none
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));

template <class To, class From>
To copy(const From& from) {
    static_assert(sizeof(To) == sizeof(From), "the same bits");
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

template <class T>
T load(const void* from) {
    T x;
    std::memcpy(&x, from, sizeof x);
    return x;
}

// To the nearest, halves to even; a denormal becomes 0 with its sign.
inline uint16_t rounded(float x) {
    const uint32_t word = copy<uint32_t>(x);
    if (x != x) return uint16_t(word >> 16 | 0x40);
    if ((word & 0x7f800000) == 0) return uint16_t(word >> 16 & 0x8000);
    return uint16_t((word + 0x7fff + (word >> 16 & 1)) >> 16);
}

template <class Each>
__m512 each_lane(Each each) {
    __m512 x;
    for (int i = 0; i < 16; i++) x[i] = each(i);
    return x;
}

}  // namespace emulated

// Loads, stores and constants.

#define _mm512_loadu_ps(from) emulated::load<__m512>(from)
#define _mm512_load_ps(from) emulated::load<__m512>(from)
#define _mm512_loadu_si512(from) emulated::load<__m512i>(from)
#define _mm256_loadu_si256(from) emulated::load<__m256i>(from)
inline void _mm512_storeu_ps(void* to, __m512 x) { std::memcpy(to, &x, sizeof x); }
inline void _mm512_store_ps(void* to, __m512 x) { std::memcpy(to, &x, sizeof x); }
inline void _mm_storeu_ps(void* to, __m128 x) { std::memcpy(to, &x, sizeof x); }
inline void _mm512_storeu_si512(void* to, __m512i x) { std::memcpy(to, &x, sizeof x); }
inline void _mm512_store_si512(void* to, __m512i x) { std::memcpy(to, &x, sizeof x); }
inline void _mm256_storeu_si256(void* to, __m256i x) { std::memcpy(to, &x, sizeof x); }
inline __m512 _mm512_setzero_ps() { return __m512{}; }
inline __m256i _mm256_setzero_si256() { return __m256i{}; }
inline __m512 _mm512_set1_ps(float x) { return x - __m512{}; }
inline __m512i _mm512_set1_epi32(int32_t x) { return (__m512i)(x + emulated::Ints{}); }
template <class... Lanes>
__m512i _mm512_set_epi32(Lanes... lanes) {  // the last lane first
    const int32_t given[16] = {lanes...};
    emulated::Ints x;
    for (int i = 0; i < 16; i++) x[i] = given[15 - i];
    return (__m512i)x;
}
enum { _MM_HINT_T0, _MM_HINT_T1, _MM_FROUND_TO_NEAREST_INT = 0, _MM_FROUND_NO_EXC = 8 };
#define _mm_prefetch(address, hint) ((void)(address))

// Masked lanes. What is masked out is not read.

inline __mmask16 _cvtu32_mask16(uint32_t mask) { return __mmask16(mask); }
inline __m512 _mm512_maskz_loadu_ps(__mmask16 mask, const float* from) {
    return emulated::each_lane([=](int i) { return mask >> i & 1 ? from[i] : 0.0f; });
}
inline void _mm512_mask_storeu_ps(float* to, __mmask16 mask, __m512 x) {
    for (int i = 0; i < 16; i++)
        if (mask >> i & 1) to[i] = x[i];
}
inline __m512 _mm512_maskz_mov_ps(__mmask16 mask, __m512 x) {
    return emulated::each_lane([=](int i) { return mask >> i & 1 ? x[i] : 0.0f; });
}
inline __m512 _mm512_maskz_compress_ps(__mmask16 mask, __m512 x) {
    __m512 y{};
    for (int i = 0, n = 0; i < 16; i++)
        if (mask >> i & 1) y[n++] = x[i];
    return y;
}
inline __m512 _mm512_mask_max_ps(__m512 other, __mmask16 mask, __m512 x, __m512 y) {
    return emulated::each_lane(
        [=](int i) { return mask >> i & 1 ? x[i] > y[i] ? x[i] : y[i] : other[i]; });
}

// Arithmetic. Sums of products round once.

inline __m512 _mm512_add_ps(__m512 x, __m512 y) { return x + y; }
inline __m512 _mm512_sub_ps(__m512 x, __m512 y) { return x - y; }
inline __m512 _mm512_mul_ps(__m512 x, __m512 y) { return x * y; }
inline __m512 _mm512_fmadd_ps(__m512 x, __m512 y, __m512 z) {
    return emulated::each_lane([=](int i) { return std::fma(x[i], y[i], z[i]); });
}
inline __m512 _mm512_fmsub_ps(__m512 x, __m512 y, __m512 z) { return _mm512_fmadd_ps(x, y, -z); }
inline __m512 _mm512_roundscale_ps(__m512 x, int) {
    return emulated::each_lane([=](int i) { return std::nearbyint(x[i]); });
}
inline __m512 _mm512_scalef_ps(__m512 x, __m512 y) {
    return emulated::each_lane([=](int i) {
        const double n = std::floor(y[i]);
        if (std::isinf(n)) return x[i] != x[i] ? std::fmax(y[i], 0.0f) : x[i] * std::exp2(y[i]);
        return float(x[i] * std::exp2(n < -1000 ? -1000 : n > 1000 ? 1000 : n));
    });
}
inline float _mm512_reduce_add_ps(__m512 x) {
    for (int n = 8; n > 0; n /= 2)
        for (int i = 0; i < n; i++) x[i] += x[i + n];
    return x[0];
}
inline float _mm512_reduce_max_ps(__m512 x) {
    float most = x[0];
    for (int i = 1; i < 16; i++) most = x[i] > most ? x[i] : most;
    return most;
}
inline __m512i _mm512_add_epi32(__m512i x, __m512i y) {
    return (__m512i)((emulated::Words)x + (emulated::Words)y);
}
inline __m512i _mm512_mullo_epi32(__m512i x, __m512i y) {
    return (__m512i)((emulated::Words)x * (emulated::Words)y);
}
inline __m512i _mm512_or_si512(__m512i x, __m512i y) { return x | y; }
inline __m512i _mm512_slli_epi32(__m512i x, int n) { return (__m512i)((emulated::Words)x << n); }

// Casts, halves and bf16.

inline __m512 _mm512_castsi512_ps(__m512i x) { return (__m512)x; }
inline __m128 _mm512_castps512_ps128(__m512 x) { return emulated::load<__m128>(&x); }
inline __m512i _mm512_castsi256_si512(__m256i x) {
    __m512i y{};
    std::memcpy(&y, &x, sizeof x);
    return y;
}
inline __m256i _mm512_extracti64x4_epi64(__m512i x, int half) {
    return emulated::load<__m256i>((const char*)&x + 32 * half);
}
inline __m256i _mm512_castsi512_si256(__m512i x) { return _mm512_extracti64x4_epi64(x, 0); }
inline __m512i _mm512_inserti64x4(__m512i x, __m256i y, int half) {
    std::memcpy((char*)&x + 32 * half, &y, sizeof y);
    return x;
}
inline __m512i _mm512_cvtepu16_epi32(__m256i x) {
    const auto halves = (emulated::Halves)x;
    emulated::Words y;
    for (int i = 0; i < 16; i++) y[i] = halves[i];
    return (__m512i)y;
}
inline __m256bh _mm512_cvtneps_pbh(__m512 x) {
    emulated::Halves y;
    for (int i = 0; i < 16; i++) y[i] = emulated::rounded(x[i]);
    return (__m256bh)y;
}
inline __m512bh _mm512_cvtne2ps_pbh(__m512 high, __m512 low) {
    const __m256bh halves[2] = {_mm512_cvtneps_pbh(low), _mm512_cvtneps_pbh(high)};
    return emulated::load<__m512bh>(halves);
}

// Sums of pairs of products of bf16 numbers; denormals are 0.

namespace emulated {

// fp32 numbers of which denormals are made 0. Comparisons of lanes are slow where no register is as
// wide; a shift keeps the sign of what is only negative for an exponent of 0.
inline __m512 normal(Words x) {
    const Ints denormal = ((Ints)(x & 0x7f800000u) - 1) >> 31;
    return copy<__m512>(x & ~((Words)denormal & 0x7fffffffu));
}

// Of a vector of words, one half of each as a number.
inline __m512 halves(Words x, bool upper) { return normal(upper ? x & 0xffff0000u : x << 16); }

inline Doubles doubles(__m512 x) { return __builtin_convertvector(x, Doubles); }

// A sum of fp32, to the nearest, halves to even; what is below the normal numbers is 0.
inline __m512 to_fp32(__m512 x) { return normal((Words)x); }

// The same of a sum in double, of fp32 numbers and products of two bf16 numbers. The second rounding
// gives what one alone would: where 53 bits do not hold a sum, it is far from a half.
inline Doubles to_fp32(Doubles x) {
    const Choice tiny = (x < 0x1.ffffffp-127) & (x > -0x1.ffffffp-127);
    return doubles(__builtin_convertvector(tiny ? x * 0.0 : x, __m512));
}

}  // namespace emulated

inline __m512 _mm512_dpbf16_ps(__m512 sums, __m512bh x, __m512bh y) {
    using namespace emulated;
    const auto a = (Words)x, b = (Words)y;
    Doubles to = to_fp32(doubles(sums));
    for (bool upper : {true, false})
        to = to_fp32(to + doubles(halves(a, upper)) * doubles(halves(b, upper)));
    return __builtin_convertvector(to, __m512);
}

// Shuffles, within each 128 bits but for the last two.

template <class T, int first>
__m512i unpacked(__m512i x, __m512i y) {
    constexpr int n = 16 / sizeof(T);  // lanes in 128 bits
    T a[4 * n], b[4 * n], out[4 * n];
    std::memcpy(a, &x, sizeof a);
    std::memcpy(b, &y, sizeof b);
    for (int block = 0; block < 4 * n; block += n)
        for (int i = 0; i < n / 2; i++) {
            out[block + 2 * i] = a[block + first * n / 2 + i];
            out[block + 2 * i + 1] = b[block + first * n / 2 + i];
        }
    return emulated::load<__m512i>(out);
}
inline __m512i _mm512_unpacklo_epi32(__m512i x, __m512i y) { return unpacked<int32_t, 0>(x, y); }
inline __m512i _mm512_unpackhi_epi32(__m512i x, __m512i y) { return unpacked<int32_t, 1>(x, y); }
inline __m512i _mm512_unpacklo_epi64(__m512i x, __m512i y) { return unpacked<int64_t, 0>(x, y); }
inline __m512i _mm512_unpackhi_epi64(__m512i x, __m512i y) { return unpacked<int64_t, 1>(x, y); }
inline __m512 _mm512_permute_ps(__m512 x, int which) {
    return emulated::each_lane([=](int i) { return x[(i & ~3) + (which >> 2 * (i & 3) & 3)]; });
}
inline __m512i _mm512_shuffle_i32x4(__m512i x, __m512i y, int which) {
    char out[64];
    for (int i = 0; i < 4; i++)
        std::memcpy(out + 16 * i, (const char*)(i < 2 ? &x : &y) + 16 * (which >> 2 * i & 3), 16);
    return emulated::load<__m512i>(out);
}
inline __m512 _mm512_shuffle_f32x4(__m512 x, __m512 y, int which) {
    return (__m512)_mm512_shuffle_i32x4((__m512i)x, (__m512i)y, which);
}

// Tiles: rows of up to 64 bytes. What the processor would raise an exception for ends the process.

namespace emulated {

struct Tile {
    int rows = 0, bytes = 0;
    char data[16][64] = {};  // 0 behind a row's bytes
};
inline thread_local Tile tiles[8];

inline void require(bool right) {
    if (!right) std::abort();
}

inline Tile& tile(int number) {
    require(tiles[number].rows != 0 && tiles[number].bytes % 4 == 0);
    return tiles[number];
}

}  // namespace emulated

inline void _tile_loadconfig(const void* config) {
    const auto* bytes = (const uint8_t*)config;
    emulated::require(bytes[0] == 1);  // the one palette there is
    for (int i = 2; i < 16; i++) emulated::require(bytes[i] == 0);
    for (int i = 0; i < 16; i++) {
        const int in_row = bytes[16 + 2 * i] + 256 * bytes[17 + 2 * i], rows = bytes[48 + i];
        emulated::require(in_row <= 64 && rows <= 16 && (in_row == 0) == (rows == 0));
        emulated::require(i < 8 || rows == 0);
        if (i >= 8) continue;
        emulated::tiles[i] = {};
        emulated::tiles[i].bytes = in_row;
        emulated::tiles[i].rows = rows;
    }
}
inline void _tile_release() {
    for (auto& each : emulated::tiles) each = {};
}
inline void _tile_zero(int number) {
    auto& to = emulated::tile(number);
    std::memset(to.data, 0, sizeof to.data);
}
inline void _tile_loadd(int number, const void* from, int64_t stride) {
    auto& to = emulated::tile(number);
    for (int row = 0; row < to.rows; row++)
        std::memcpy(to.data[row], (const char*)from + row * stride, to.bytes);
}
inline void _tile_stored(int number, void* to, int64_t stride) {
    auto& from = emulated::tile(number);
    for (int row = 0; row < from.rows; row++)
        std::memcpy((char*)to + row * stride, from.data[row], from.bytes);
}

namespace emulated {

// The exponents of a tile's bf16 numbers, those of 0 left out.
struct Exponents {
    int least = 255, most = 0;
    explicit Exponents(const Tile& tile) {
        for (int row = 0; row < tile.rows; row++)
            for (int i = 0; i < tile.bytes; i += 2) {
                const int exponent = load<uint16_t>(tile.data[row] + i) >> 7 & 0xff;
                if (exponent && exponent < least) least = exponent;
                if (exponent > most) most = exponent;
            }
    }
};

// The products of lower and of upper halves are summed apart, in order, each sum rounded; at the end
// the two sums are added, and the result to the tile. `as` makes fp32 a number to compute in.
template <class As>
void multiply(Tile& c, const Tile& a, const Tile& b, As as) {
    for (int m = 0; m < c.rows; m++) {
        auto lower = as(__m512{}), upper = lower;
        for (int k = 0; k < b.rows; k++) {
            const Words x = load<uint32_t>(a.data[m] + 4 * k) + Words{}, y = load<Words>(b.data[k]);
            lower = to_fp32(lower + as(halves(x, false)) * as(halves(y, false)));
            upper = to_fp32(upper + as(halves(x, true)) * as(halves(y, true)));
        }
        const auto before = to_fp32(as(load<__m512>(c.data[m])));
        const auto after = to_fp32(before + to_fp32(lower + upper));
        const __m512 sums = __builtin_convertvector(after, __m512);
        std::memcpy(c.data[m], &sums, c.bytes);
    }
}

}  // namespace emulated

inline void _tile_dpbf16ps(int to, int left, int right) {
    using namespace emulated;
    auto &c = tile(to), &a = tile(left), &b = tile(right);
    require(to != left && to != right && left != right);
    require(c.rows == a.rows && c.bytes == b.bytes && a.bytes == 4 * b.rows);
    const Exponents of_a(a), of_b(b);
    if (of_a.least + of_b.least > 128 && of_a.most + of_b.most < 380)  // fp32 holds each product
        multiply(c, a, b, [](__m512 x) { return x; });
    else  // ten times as slow
        multiply(c, a, b, doubles);
}
