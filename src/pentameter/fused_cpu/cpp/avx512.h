// Vectors with 16 fp32 or 32 bf16 by AVX-512 instructions, for the kernels on AMX tiles.

#pragma once

#include <immintrin.h>

#include <initializer_list>

#include "vectors.h"

static_assert(VECTOR_BYTES == 64, "AMX comes with AVX-512");

const __m512i LANE_NUMBERS = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);

// 2^x for x ≤ 0 or a little above; the relative error is below 3e-6, bf16 rounds by 4e-3.
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

// Two vectors rounded to 32 elements, the first 16 from `low`.
inline __m512i round32(__m512 low, __m512 high) { return (__m512i)_mm512_cvtne2ps_pbh(high, low); }

inline void store32(bf16* x, __m512 low, __m512 high) { _mm512_storeu_si512(x, round32(low, high)); }
