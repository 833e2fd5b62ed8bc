// Keyed dropout: an element's number and the keys of its row of the batch say whether it stays.

#pragma once

#include "vectors.h"

// The keyed hash of keyed.py; a test compares the masks.
struct Dropout {
    float scale;  // 1 / (1 - p), or 0 for no dropout
    int32_t bound, key0, key1;

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
