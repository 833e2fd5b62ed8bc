// What the kernels for rows that are sorted by group are given, with and without matrix tiles.

#pragma once

#include <algorithm>
#include <cstdint>

// Arguments from the host, with the same fields as `_GroupedMatmul` in grouped_matmul.py. There are R
// rows; those of group e, of E, end before row ends[e], a multiple of `block`, which is a multiple of
// 32. Matrices are (E, n_out, n_in), both multiples of 32, too.
struct GroupedMatmul {
    const int64_t* ends;
    int64_t R, E, n_in, n_out, block;

    int64_t begin(int64_t e) const { return e ? ends[e - 1] : 0; }
    int64_t last() const { return ends[E - 1]; }
    int64_t group_of(int64_t row) const { return std::upper_bound(ends, ends + E, row) - ends; }
};
