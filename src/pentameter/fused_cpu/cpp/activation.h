// Feed-forward activations and their slopes, one vector at a time.

#pragma once

#include "vectors.h"

struct Value {
    Floats y, slope;
};

constexpr int PIECES = 32;  // as many as activations.py makes

// For results rounded to bf16. All activations but ReLU² are f(x) = x · s(x) with s(-x) = 1 - s(x):
// s is Φ for GELU, the logistic function for SiLU, a step for ReLU. So f(x) = x / 2 + |x| · u(|x|)
// with u = s - 1/2, a table of cubic polynomials from the host: `pieces` (4, PIECES) are u's
// coefficients, the constant ones first, for segments 1 / `per_unit` wide. AVX-512 looks them up
// without memory, in two registers a coefficient.
class Smooth {
  public:
    Smooth(const float* pieces, float per_unit) : per_unit_(per_unit) {
        std::memcpy(pieces_, pieces, sizeof pieces_);
    }

    Value operator()(Floats x) const {
        const Floats size = size_of(x), place = size * per_unit_;
        // Beyond the table, its last point; NaN stays NaN.
        const Floats at = place > 31.999998f ? all(31.999998f) : place;
        const Ints piece = __builtin_convertvector(at, Ints);
        const Floats t = at - __builtin_convertvector(piece, Floats);
        Floats c[4];
        for (int i = 0; i < 4; i++) c[i] = look_up(pieces_[i], piece);
        const Floats u = ((c[3] * t + c[2]) * t + c[1]) * t + c[0];
        // f'(x) = s(x) + x · s'(x): the summand beyond 1/2 has x's sign; at 0 ReLU's is 0.
        const Floats du = (3.0f * c[3] * t + 2.0f * c[2]) * t + c[1], beyond = at * du + u;
        return {size * u + 0.5f * x, x <= 0.0f ? 0.5f - beyond : 0.5f + beyond};
    }

  private:
    static Floats look_up(const float* table, Ints piece) {
#if VECTOR_BYTES == 64 && defined(__GNUC__) && !defined(__clang__)
        return __builtin_shuffle(load(table), load(table + 16), piece);
#else
        Floats x;
        for (int i = 0; i < LANES; i++) x[i] = table[piece[i] & (PIECES - 1)];
        return x;
#endif
    }

    const float per_unit_;
    alignas(64) float pieces_[4][PIECES];
};

struct SquaredRelu {
    SquaredRelu(const float*, float) {}

    Value operator()(Floats x) const {
        const Floats positive = x <= 0.0f ? Floats{} : x;  // a number that is none stays one
        return {positive * positive, positive + positive};
    }
};

// For results kept in fp32, by formula.

struct Relu {
    Relu(const float*, float) {}

    Value operator()(Floats x) const {
        return {x <= 0.0f ? Floats{} : x, x > 0.0f ? all(1.0f) : Floats{}};
    }
};

inline Floats logistic(Floats x) { return 1.0f / (1.0f + exponential(-x)); }

struct Silu {
    Silu(const float*, float) {}

    Value operator()(Floats x) const {
        const Floats share = logistic(x), y = x * share;
        return {y, share + y * (1.0f - share)};
    }
};

// With Φ by the error function, a rational approximation to 3e-7 (Eigen's, of Maclaurin's form).
struct Gelu {
    Gelu(const float*, float) {}

    Value operator()(Floats x) const {
        const Floats z = x * 0.70710678f, square = z * z;
        Floats above = all(-2.72614225801306e-10f), below = all(-1.45660718464996e-05f);
        for (float c : {2.77068142495902e-08f, -2.10102402082508e-06f, -5.69250639462346e-05f,
                        -7.34990630326855e-04f, -2.95459980854025e-03f, -1.60960333262415e-02f})
            above = above * square + c;
        for (float c : {-2.13374055278905e-04f, -1.68282697438203e-03f, -7.37332916720468e-03f,
                        -1.42647390514189e-02f})
            below = below * square + c;
        Floats share = 0.5f + 0.5f * (z * above / below);
        share = x > 5.6f ? all(1.0f) : share;  // to 1e-8, where the approximation ends
        share = x < -5.6f ? Floats{} : share;
        const Floats density = 0.39894228f * exponential(-0.5f * x * x);
        return {x * share, share + x * density};
    }
};

// Hendrycks & Gimpel 2016, the form GPT-2 uses; (1 + tanh(v)) / 2 is the logistic function of 2 v.
struct GeluTanh {
    GeluTanh(const float*, float) {}

    Value operator()(Floats x) const {
        const Floats square = x * x;
        const Floats share = logistic(1.59576912f * x * (1.0f + 0.044715f * square));
        const Floats inner = 1.59576912f * (1.0f + 0.134145f * square), y = x * share;
        return {y, share + y * (1.0f - share) * inner};
    }
};
