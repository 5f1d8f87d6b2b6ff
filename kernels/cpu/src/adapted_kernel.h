// What adapters add to rows of a product (contract: kernels/adapted_linear.py), for the rows of one adapter.

#ifndef LLMJAX_ADAPTED_KERNEL_H_
#define LLMJAX_ADAPTED_KERNEL_H_

#include "kernels.h"
#include "simd.h"

namespace {

using llmjax::Adapted;
using llmjax::AdaptedRows;

constexpr int kDots = 4;  // rows of `a` that are multiplied side by side
constexpr int kSums = 4;  // vectors of outputs that stay in registers

inline float widened(float x) { return x; }
inline float widened(Bf16 x) { return bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }
inline float widened(F16 x) {
  F16 copies[kLanes];
  for (F16& one : copies) one = x;
  return load(copies)[0];
}

// Products of the rows with rows first..first + count of their adapter's `a`.
template <class T>
void shrink_rows(const Adapted& call, const AdaptedRows& of, int first, int count) {
  const int size = call.size_in, whole = size / kLanes * kLanes;
  for (int j = first; j < first + count; j += kDots) {
    const T* a[kDots];
    for (int k = 0; k < kDots; ++k) {  // past the end the last one is multiplied again
      const int row = of.place * call.rank + imin(j + k, first + count - 1);
      a[k] = static_cast<const T*>(call.a) + static_cast<size_t>(row) * size;
    }
    for (int i = 0; i < of.count; ++i) {
      const float* x = call.x + static_cast<size_t>(of.tokens[i]) * size;
      Vec sums[kDots] = {};
      for (int c = 0; c < whole; c += kLanes) {
        const Vec v = load(x + c);
#pragma GCC unroll 4
        for (int k = 0; k < kDots; ++k) sums[k] += v * load(a[k] + c);
      }
      float* to = call.shrunk + static_cast<size_t>(of.tokens[i]) * call.rank;
      for (int k = 0; k < kDots && j + k < first + count; ++k) {
        float sum = horizontal_sum(sums[k]);
        for (int c = whole; c < size; ++c) sum += x[c] * widened(a[k][c]);
        to[j + k] = sum;
      }
    }
  }
}

// Outputs begin..end of the rows: y = gain * y + sum_j shrunk[j] * b[j] + bias.
template <class T>
void expand_rows(const Adapted& call, const AdaptedRows& of, int begin, int end) {
  const size_t width = static_cast<size_t>(call.size_out);
  const T* const b = static_cast<const T*>(call.b) + static_cast<size_t>(of.place) * call.rank * width;
  const float* const bias = call.vectors + static_cast<size_t>(of.place) * width;
  const float* const gain = call.vectors + static_cast<size_t>(call.places + of.place) * width;
  for (int i = 0; i < of.count; ++i) {
    const float* h = call.shrunk + static_cast<size_t>(of.tokens[i]) * call.rank;
    float* y = call.y + static_cast<size_t>(of.tokens[i]) * width;
    bool changes = of.special;
    for (int j = 0; j < call.rank; ++j) changes |= h[j] != 0;  // not a number is not 0
    if (!changes) continue;  // the adapter has no part here, and `b` need not be read
    int o = begin;
    for (; o + kSums * kLanes <= end; o += kSums * kLanes) {
      Vec sums[kSums];
#pragma GCC unroll 4
      for (int s = 0; s < kSums; ++s) {
        const int at = o + s * kLanes;
        sums[s] = load(y + at);
        if (of.special) sums[s] += sums[s] * load(gain + at) + load(bias + at);
      }
      for (int j = 0; j < call.rank; ++j) {
        const Vec factor = splat(h[j]);
#pragma GCC unroll 4
        for (int s = 0; s < kSums; ++s) sums[s] += factor * load(b + j * width + o + s * kLanes);
      }
#pragma GCC unroll 4
      for (int s = 0; s < kSums; ++s) store(y + o + s * kLanes, sums[s]);
    }
    for (; o < end; ++o) {
      float sum = of.special ? y[o] + y[o] * gain[o] + bias[o] : y[o];
      for (int j = 0; j < call.rank; ++j) sum += h[j] * widened(b[j * width + o]);
      y[o] = sum;
    }
  }
}

void shrink(const Adapted& call, const AdaptedRows& of, int first, int count) {
  switch (call.type) {
    case llmjax::Type::kBf16: return shrink_rows<Bf16>(call, of, first, count);
    case llmjax::Type::kF16: return shrink_rows<F16>(call, of, first, count);
    default: return shrink_rows<float>(call, of, first, count);
  }
}

void expand(const Adapted& call, const AdaptedRows& of, int begin, int end) {
  switch (call.type) {
    case llmjax::Type::kBf16: return expand_rows<Bf16>(call, of, begin, end);
    case llmjax::Type::kF16: return expand_rows<F16>(call, of, begin, end);
    default: return expand_rows<float>(call, of, begin, end);
  }
}

}  // namespace

#endif  // LLMJAX_ADAPTED_KERNEL_H_
