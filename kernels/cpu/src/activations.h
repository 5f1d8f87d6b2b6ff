// Activations, and what they gate, in vectors.

#ifndef LLMJAX_ACTIVATIONS_H_
#define LLMJAX_ACTIVATIONS_H_

#include "kernels.h"
#include "simd.h"

namespace {

using llmjax::Activation;

inline Vec sigmoid(Vec x) { return splat(1.0f) / (splat(1.0f) + vexp(-x)); }

#if defined(__AVX512F__)
// To 13 bits, for what is then rounded to bf16.
inline Vec coarse_sigmoid(Vec x) {
  return (Vec)_mm512_rcp14_ps((__m512)(splat(1.0f) + coarse_exp2(x * splat(-1.44269504f))));
}
#endif

// (1 + erf(x / sqrt(2))) / 2, to 4e-7. The quotient of polynomials is the least squares fit, with weights until the largest
// relative error is the least, to erf(z) / z for z below 3.92, from where on erf is 1 in f32.
inline Vec normal_cdf(Vec x) {
  constexpr float kAbove[] = {2.0500888e-06f, 2.8488330e-04f, 3.7656303e-03f, 5.2748765e-02f, 1.9040674e-01f, 1.1283791e+00f};
  constexpr float kBelow[] = {3.8091761e-05f, 1.1625393e-03f, 1.4969243e-02f, 1.1410923e-01f, 5.0207632e-01f, 1.0f};
  const Vec z = vmax(splat(-3.92f), vmin(splat(3.92f), x * splat(0.70710678f))), square = z * z;
  Vec above = splat(kAbove[0]), below = splat(kBelow[0]);
  for (int i = 1; i < 6; ++i) above = above * square + splat(kAbove[i]), below = below * square + splat(kBelow[i]);
  const Vec found = splat(0.5f) + splat(0.5f) * z * above / below;
  return select((Int)(x < splat(-5.54f)), Vec{}, found);  // or rounding would be multiplied by a large x
}

// activation(x) * up
template <class Sigmoid>
inline Vec gated(Activation activation, Vec x, Vec up, const Sigmoid& sigmoid) {
  switch (activation) {
    case Activation::kSilu: return x * sigmoid(x) * up;
    case Activation::kQuickGelu: return x * sigmoid(splat(1.702f) * x) * up;
    case Activation::kClampedSwiGLU: {  // gpt-oss; the second argument is what comes out where one is not a number
      const Vec low = vmin(splat(7.0f), x);
      return low * sigmoid(splat(1.702f) * low) * (vmax(splat(-7.0f), vmin(splat(7.0f), up)) + splat(1.0f));
    }
    case Activation::kGelu: return x * normal_cdf(x) * up;
    case Activation::kNormalCdf: return normal_cdf(x) * up;
    case Activation::kRelu: return vmax(splat(0.0f), x) * up;
    case Activation::kSquaredRelu: {
      const Vec positive = vmax(splat(0.0f), x);
      return positive * positive * up;
    }
    case Activation::kTanhGelu:
    case Activation::kNumber: break;
  }
  // (1 + tanh(z)) / 2 is sigmoid(2z); Hendrycks and Gimpel 2016, arXiv:1606.08415.
  return x * sigmoid(x * (splat(1.5957691216057308f) + splat(1.5957691216057308f * 0.044715f) * x * x)) * up;
}

}  // namespace

#endif  // LLMJAX_ACTIVATIONS_H_
