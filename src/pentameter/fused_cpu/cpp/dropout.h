// Keyed dropout: an element's number and its batch row's keys decide whether it stays.

#pragma once

#include "vectors.h"

// The keyed hash of keyed.py; a test compares the masks.
struct Dropout {
    float scale;  // 1 / (1 - p), or 0 for no dropout
    int32_t bound, key0, key1;

    Ints bits(Ints index) const {
        Words x = ((Words)index ^ uint32_t(key0)) * 0xED5AD4BBu;
        x = (x ^ (x >> 11) ^ uint32_t(key1)) * 0xAC4C1B51u;
        x = (x ^ (x >> 15)) * 0x31848BABu;
        return (Ints)(x ^ (x >> 14));
    }

    // Dropout of the elements in a later block of numbers, as `folded` in keyed.py says.
    Dropout folded(int64_t block) const {
        if (block == 0) return *this;
        const Ints first = Ints{} + int32_t(2 * block);
        return {scale, bound, bits(first)[0], bits(first + 1)[0]};
    }

    // Factor on elements: `scale` if kept, else 0. So NaN and infinity stay non-finite if dropped,
    // like in the plain model.
    Floats factor(Ints index) const {
        return (Floats)((bits(index) >= bound) & (Ints)all(scale));
    }
};
