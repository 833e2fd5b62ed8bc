// The instructions of immintrin.h as functions that a test calls: with the emulated header, or with
// the compiler's own for this processor.

#include <immintrin.h>

#include <cstdint>

// All pointers are to 64 bytes, aligned.
#define FLOATS(name, result)                                                                 \
    extern "C" void name(float* out, const float* a, const float* b, const float* c) {       \
        const __m512 x = _mm512_loadu_ps(a), y = _mm512_loadu_ps(b), z = _mm512_load_ps(c);  \
        _mm512_store_ps(out, result);                                                        \
        (void)x, (void)y, (void)z;                                                           \
    }
#define WORDS(name, result)                                                                  \
    extern "C" void name(void* out, const void* a, const void* b, const void*) {             \
        const __m512i x = _mm512_loadu_si512(a), y = _mm512_loadu_si512(b);                  \
        _mm512_store_si512(out, result);                                                     \
        (void)x, (void)y;                                                                    \
    }

constexpr int MASK = 0b1010'0110'0000'1011;

FLOATS(add, _mm512_add_ps(x, y))
FLOATS(sub, _mm512_sub_ps(x, y))
FLOATS(mul, _mm512_mul_ps(x, y))
FLOATS(fmadd, _mm512_fmadd_ps(x, y, z))
FLOATS(fmsub, _mm512_fmsub_ps(x, y, z))
FLOATS(whole, _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC))
FLOATS(scalef, _mm512_scalef_ps(x, y))
FLOATS(zero, _mm512_setzero_ps())
FLOATS(repeated, _mm512_set1_ps(a[3]))
FLOATS(reduce_add, _mm512_set1_ps(_mm512_reduce_add_ps(x)))
FLOATS(reduce_max, _mm512_set1_ps(_mm512_reduce_max_ps(x)))
FLOATS(masked_max, _mm512_mask_max_ps(z, _cvtu32_mask16(MASK), x, y))
FLOATS(masked_move, _mm512_maskz_mov_ps(_cvtu32_mask16(MASK), x))
FLOATS(compressed, _mm512_maskz_compress_ps(_cvtu32_mask16(MASK), x))
FLOATS(permuted_4e, _mm512_permute_ps(x, 0x4e))
FLOATS(permuted_b1, _mm512_permute_ps(x, 0xb1))
FLOATS(quarters_44, _mm512_shuffle_f32x4(x, y, 0x44))
FLOATS(quarters_ee, _mm512_shuffle_f32x4(x, y, 0xee))
FLOATS(quarters_88, _mm512_shuffle_f32x4(x, y, 0x88))
FLOATS(quarters_dd, _mm512_shuffle_f32x4(x, y, 0xdd))
FLOATS(masked_load, _mm512_maskz_loadu_ps(_cvtu32_mask16(MASK), a))

extern "C" void masked_store(float* out, const float* a, const float*, const float* c) {
    _mm512_storeu_ps(out, _mm512_loadu_ps(c));
    _mm512_mask_storeu_ps(out, _cvtu32_mask16(MASK), _mm512_loadu_ps(a));
}

extern "C" void quarter_stored(float* out, const float* a, const float* b, const float*) {
    _mm512_storeu_ps(out, _mm512_loadu_ps(b));
    _mm_storeu_ps(out, _mm512_castps512_ps128(_mm512_loadu_ps(a)));
}

WORDS(add_words, _mm512_add_epi32(x, y))
WORDS(multiply_words, _mm512_mullo_epi32(x, y))
WORDS(or_words, _mm512_or_si512(x, y))
WORDS(shift_words, _mm512_slli_epi32(x, 16))
WORDS(repeated_word, _mm512_set1_epi32(*(const int32_t*)a))
WORDS(lane_numbers, _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0))
WORDS(unpack_low_words, _mm512_unpacklo_epi32(x, y))
WORDS(unpack_high_words, _mm512_unpackhi_epi32(x, y))
WORDS(unpack_low_pairs, _mm512_unpacklo_epi64(x, y))
WORDS(unpack_high_pairs, _mm512_unpackhi_epi64(x, y))
WORDS(shuffle_44, _mm512_shuffle_i32x4(x, y, 0x44))
WORDS(shuffle_ee, _mm512_shuffle_i32x4(x, y, 0xee))
WORDS(shuffle_88, _mm512_shuffle_i32x4(x, y, 0x88))
WORDS(shuffle_dd, _mm512_shuffle_i32x4(x, y, 0xdd))
WORDS(low_halves_widened, _mm512_cvtepu16_epi32(_mm512_castsi512_si256(x)))
WORDS(high_halves_widened, _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(x, 1)))
WORDS(inserted, _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_castsi512_si256(x)),
                                   _mm256_loadu_si256((const __m256i*)b), 1))
WORDS(half_of_zeros, _mm512_inserti64x4(x, _mm256_setzero_si256(), 0))
WORDS(rounded, (__m512i)_mm512_cvtne2ps_pbh(_mm512_castsi512_ps(y), _mm512_castsi512_ps(x)))
WORDS(rounded_half,
      _mm512_inserti64x4(x, (__m256i)_mm512_cvtneps_pbh(_mm512_castsi512_ps(y)), 1))

extern "C" void half_stored(void* out, const void* a, const void* b, const void*) {
    _mm_prefetch((const char*)a, _MM_HINT_T0);
    _mm_prefetch((const char*)a, _MM_HINT_T1);
    _mm512_storeu_si512(out, _mm512_loadu_si512(b));
    _mm256_storeu_si256((__m256i*)out, _mm512_castsi512_si256(_mm512_loadu_si512(a)));
}

extern "C" void pair_products(float* out, const void* a, const void* b, const float* c) {
    const __m512i x = _mm512_loadu_si512(a), y = _mm512_loadu_si512(b);
    _mm512_storeu_ps(out, _mm512_dpbf16_ps(_mm512_loadu_ps(c), (__m512bh)x, (__m512bh)y));
}

#if defined(EMULATED) || defined(__AMX_BF16__)
// c += a · b on tiles configured by the 64 bytes at `config`, whose rows are 64 bytes apart in memory.
// What a tile made 0 holds goes to `zeros`.
extern "C" void tile_matmul(const void* config, float* c, const void* a, const void* b,
                            void* zeros) {
    _tile_loadconfig(config);
    _tile_loadd(0, c, 64);
    _tile_loadd(1, a, 64);
    _tile_loadd(2, a, 64);
    _tile_zero(2);
    _tile_stored(2, zeros, 64);
    _tile_loadd(2, b, 64);
    _tile_dpbf16ps(0, 1, 2);
    _tile_stored(0, c, 64);
    _tile_release();
}
#endif
#if defined(EMULATED)
extern "C" void load_unconfigured(const void* from) { _tile_loadd(0, from, 64); }
extern "C" void square(const void* config) {
    _tile_loadconfig(config);
    _tile_dpbf16ps(0, 1, 1);
}
#endif
