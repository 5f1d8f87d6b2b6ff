// Small matrix products: c[m, n] (+)= sum over k of a[m, k] * b[k, n], all rows short enough for the nearest caches.

#ifndef LLMJAX_GEMM_H_
#define LLMJAX_GEMM_H_

#include "simd.h"

namespace {

// Rows of b in one piece of memory.
struct Dense {
  using Factor = float;
  const float* data;
  int stride;
  Vec at(int k, int n) const { return load(data + static_cast<size_t>(k) * stride + n); }
  static Vec factor(const float* a) { return splat(*a); }
  static Vec add(Vec sum, Vec factor, Vec row) { return sum + factor * row; }
};

struct Matrix {
  float* data;
  int stride;
};

template <int kValue>
struct Count {
  static constexpr int value = kValue;
};

constexpr int kBlockRows = 6;
constexpr int kBlockVectors = kRegisters == 32 ? 4 : 2;

template <int kRows, int kVectors, class B>
inline void multiply_block(const typename B::Factor* a, int stride_a, const B& b, int n, int k_begin, int k_end, Matrix c, bool add) {
  Vec sums[kRows][kVectors];
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) {
      sums[i][j] = add ? load(c.data + static_cast<size_t>(i) * c.stride + n + j * kLanes) : Vec{};
    }
  }
  for (int k = k_begin; k < k_end; ++k) {
    Vec row[kVectors];
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) row[j] = b.at(k, n + j * kLanes);
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
      const Vec factor = B::factor(a + static_cast<size_t>(i) * stride_a + k);
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) sums[i][j] = B::add(sums[i][j], factor, row[j]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) store(c.data + static_cast<size_t>(i) * c.stride + n + j * kLanes, sums[i][j]);
  }
}

template <int kRows, class B>
inline void multiply_rows(const typename B::Factor* a, int stride_a, const B& b, int n_begin, int n_end, int k_begin, int k_end,
                          Matrix c, bool add) {
  int n = n_begin;
  for (; n + kBlockVectors * kLanes <= n_end; n += kBlockVectors * kLanes) {
    multiply_block<kRows, kBlockVectors>(a, stride_a, b, n, k_begin, k_end, c, add);
  }
  for (; n < n_end; n += kLanes) multiply_block<kRows, 1>(a, stride_a, b, n, k_begin, k_end, c, add);
}

// Columns n_begin..n_end of c, multiples of kLanes, for `rows` rows.
template <class B>
void multiply(const typename B::Factor* a, int stride_a, const B& b, int rows, int n_begin, int n_end, int k_begin, int k_end,
              Matrix c, bool add) {
  int m = 0;
  auto next = [&](auto count) {
    multiply_rows<count.value>(a + static_cast<size_t>(m) * stride_a, stride_a, b, n_begin, n_end, k_begin, k_end,
                               Matrix{c.data + static_cast<size_t>(m) * c.stride, c.stride}, add);
    m += count.value;
  };
  while (m + kBlockRows <= rows) next(Count<kBlockRows>{});
  if (m + 4 <= rows) next(Count<4>{});
  if (m + 3 <= rows) next(Count<3>{});
  if (m + 2 <= rows) next(Count<2>{});
  if (m < rows) next(Count<1>{});
}

}  // namespace

#endif  // LLMJAX_GEMM_H_
