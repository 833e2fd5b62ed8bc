// Keyed dropout: an element's number and the keys of its row of the batch say whether it stays.

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

    // What elements are multiplied by: `scale` where they stay, else 0. So what is not finite stays so
    // where it is dropped, as in the plain model.
    Floats factor(Ints index) const {
        return (Floats)((bits(index) >= bound) & (Ints)all(scale));
    }
};
