// The gated activations, in vectors.

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
    case Activation::kTanhGelu: break;
  }
  // (1 + tanh(z)) / 2 is sigmoid(2z); Hendrycks and Gimpel 2016, arXiv:1606.08415.
  return x * sigmoid(x * (splat(1.5957691216057308f) + splat(1.5957691216057308f * 0.044715f) * x * x)) * up;
}

}  // namespace

#endif  // LLMJAX_ACTIVATIONS_H_
