// How ggml's reference quantizers look for the scales of K-quants, bit for bit: what llmjax/weights/ggml/search.py does,
// with its names. Compiled without fused multiply-add.

#ifndef LLMJAX_SEARCHES_H_
#define LLMJAX_SEARCHES_H_

#include <cstddef>

namespace llmjax {

constexpr size_t kMostNumbers = 32;  // of a sub-block

// f32 [numbers, count]: `count` sub-blocks side by side, the numbers of each below one another.
struct SubBlocks {
  const float* x;
  size_t numbers, count;
};

struct AffineSearch {
  float top, first;
  int steps;
  bool absolute;
};

// Each [count].
struct AffineFit {
  float *scale, *minimum, *origin, *multiplier;
};

struct Searches {
  void (*affine)(const SubBlocks& blocks, const float* weights, const AffineSearch& search, const AffineFit& fit);
  // The scale of least error and the multiplier of its codes, each [count]; `peaks`: the numbers of largest magnitude.
  void (*symmetric)(const SubBlocks& blocks, const float* peaks, float middle, float* scale, float* multiplier);
};

}  // namespace llmjax

#endif  // LLMJAX_SEARCHES_H_
