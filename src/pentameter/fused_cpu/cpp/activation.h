// Activations of a feed-forward layer and their slopes, 16 numbers at once.
//
// All but ReLU² are f(x) = x · s(x) with s(-x) = 1 - s(x): s is Φ for GELU, the logistic function for
// SiLU, a step for ReLU. So f(x) = x / 2 + |x| · u(|x|) with u = s - 1/2, which the host gives as a
// table of cubic polynomials; a register of lanes looks its coefficients up without memory.

#pragma once

#include "vectors.h"

constexpr int PIECES = 32;  // as many as activations.py makes

struct Value {
    __m512 y, slope;
};

// From a table `pieces` (4, PIECES) of u's coefficients, the constant ones first, for pieces that are
// 1 / `per_unit` wide.
class Smooth {
  public:
    Smooth(const float* pieces, float per_unit) : per_unit_(_mm512_set1_ps(per_unit)) {
        for (int i = 0; i < 4; i++) {
            low_[i] = _mm512_loadu_ps(pieces + PIECES * i);
            high_[i] = _mm512_loadu_ps(pieces + PIECES * i + 16);
        }
    }

    Value operator()(__m512 x) const {
        const __m512 size = _mm512_abs_ps(x);
        // Beyond the table its last point; a number that is none stays one, as the second argument.
        const __m512 at =
            _mm512_min_ps(_mm512_set1_ps(31.999998f), _mm512_mul_ps(size, per_unit_));
        const __m512i piece = _mm512_cvttps_epi32(at);
        const __m512 t = _mm512_sub_ps(at, _mm512_cvtepi32_ps(piece));
        __m512 c[4];
        for (int i = 0; i < 4; i++) c[i] = _mm512_permutex2var_ps(low_[i], piece, high_[i]);
        const __m512 u = _mm512_fmadd_ps(
            _mm512_fmadd_ps(_mm512_fmadd_ps(c[3], t, c[2]), t, c[1]), t, c[0]);
        // f'(x) = s(x) + x · s'(x), whose part beyond 1/2 has the sign of x; at 0 ReLU's is 0.
        const __m512 twice = _mm512_add_ps(c[2], c[2]);
        const __m512 thrice = _mm512_add_ps(_mm512_add_ps(c[3], c[3]), c[3]);
        const __m512 du = _mm512_fmadd_ps(_mm512_fmadd_ps(thrice, t, twice), t, c[1]);
        const __m512 beyond = _mm512_fmadd_ps(at, du, u), half = _mm512_set1_ps(0.5f);
        const __mmask16 below = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_LE_OQ);
        const __m512 slope = _mm512_mask_sub_ps(_mm512_add_ps(half, beyond), below, half, beyond);
        return {_mm512_fmadd_ps(size, u, _mm512_mul_ps(x, half)), slope};
    }

  private:
    const __m512 per_unit_;
    __m512 low_[4], high_[4];
};

struct SquaredRelu {
    SquaredRelu(const float*, float) {}

    Value operator()(__m512 x) const {
        // A number that is none stays one: the second of two arguments is returned.
        const __m512 positive = _mm512_max_ps(_mm512_setzero_ps(), x);
        return {_mm512_mul_ps(positive, positive), _mm512_add_ps(positive, positive)};
    }
};
