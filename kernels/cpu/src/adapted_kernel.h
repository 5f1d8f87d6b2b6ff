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
constexpr int kTogether = kRegisters < 32 ? 2 : 4;  // rows of x that share what is widened of a matrix

inline float widened(float x) { return x; }
inline float widened(Bf16 x) { return bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }
inline float widened(F16 x) {
  F16 copies[kLanes];
  for (F16& one : copies) one = x;
  return load(copies)[0];
}

template <int kNumber>
struct Together {
  static constexpr int kRows = kNumber;
};

// Calls rows(Together<kRows>, the first one) for all rows of a group, as many at a time as may be.
template <int kRows = kTogether, class Rows>
inline void each_rows(int count, const Rows& rows, int i = 0) {
  for (; i + kRows <= count; i += kRows) rows(Together<kRows>{}, i);
  if constexpr (kRows > 1) each_rows<kRows / 2>(count, rows, i);
}

// Products of kRows rows of x with rows first..first + count of their adapter's `a`.
template <int kRows, class T>
void shrink_some(const Adapted& call, const AdaptedRows& of, const int32_t* tokens, int first, int count, const T* ahead) {
  constexpr int kProducts = kRows * kDots, kVectors = (kProducts + kLanes - 1) / kLanes;
  const int size = call.size_in, whole = size / kLanes * kLanes;
  const float* x[kRows];
  for (int m = 0; m < kRows; ++m) x[m] = call.x + static_cast<size_t>(tokens[m]) * size;
  for (int j = first; j < first + count; j += kDots) {
    const T* a[kDots];
    for (int k = 0; k < kDots; ++k) {  // past the end the last one is multiplied again
      const int row = of.place * call.rank + imin(j + k, first + count - 1);
      a[k] = static_cast<const T*>(call.a) + static_cast<size_t>(row) * size;
    }
    alignas(64) float products[kVectors * kLanes];
    Vec sums[kVectors * kLanes] = {};
    for (int c = 0; c < whole; c += kLanes) {
      Vec v[kRows];
#pragma GCC unroll 4
      for (int k = 0; k < kDots; ++k) __builtin_prefetch(ahead + static_cast<size_t>(k) * size + c);
#pragma GCC unroll 4
      for (int m = 0; m < kRows; ++m) v[m] = load(x[m] + c);
#pragma GCC unroll 4
      for (int k = 0; k < kDots; ++k) {
        const Vec w = load(a[k] + c);
#pragma GCC unroll 4
        for (int m = 0; m < kRows; ++m) sums[m * kDots + k] += v[m] * w;
      }
    }
    for (int i = 0; i < kVectors; ++i) store(&products[i * kLanes], sum_rows(sums + i * kLanes));
    for (int m = 0; m < kRows; ++m) {
      float* to = call.shrunk + static_cast<size_t>(tokens[m]) * call.rank;
      for (int k = 0; k < kDots && j + k < first + count; ++k) {
        float sum = products[m * kDots + k];
        for (int c = whole; c < size; ++c) sum += x[m][c] * widened(a[k][c]);
        to[j + k] = sum;
      }
    }
  }
}

// Outputs begin..end of kRows rows: y = gain * (y - call.bias) + call.bias + sum_j shrunk[j] * b[j] + bias.
template <int kRows, class T>
void expand_some(const Adapted& call, const AdaptedRows& of, const int32_t* tokens, int begin, int end, const T* ahead) {
  const size_t width = static_cast<size_t>(call.size_out);
  const T* const b = static_cast<const T*>(call.b) + static_cast<size_t>(of.place) * call.rank * width;
  const float* const bias = of.special ? call.vectors + static_cast<size_t>(of.place) * width : nullptr;
  const float* const gain = of.special ? call.vectors + static_cast<size_t>(call.places + of.place) * width : nullptr;
  const float* h[kRows];
  float* y[kRows];
  bool changes = of.special;
  for (int m = 0; m < kRows; ++m) {
    h[m] = call.shrunk + static_cast<size_t>(tokens[m]) * call.rank;
    y[m] = call.y + static_cast<size_t>(tokens[m]) * width;
    for (int j = 0; j < call.rank; ++j) changes |= h[m][j] != 0;  // not a number is not 0
  }
  if (!changes) return;  // the adapter has no part here, and `b` need not be read
  int o = begin;
  for (; o + kSums * kLanes <= end; o += kSums * kLanes) {
    Vec sums[kRows][kSums];
    for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 4
      for (int s = 0; s < kSums; ++s) {
        const int at = o + s * kLanes;
        sums[m][s] = load(y[m] + at);
        if (of.special) {
          const Vec without = call.bias == nullptr ? sums[m][s] : sums[m][s] - load(call.bias + at);
          sums[m][s] += without * load(gain + at) + load(bias + at);
        }
      }
    }
    for (int j = 0; j < call.rank; ++j) {
      Vec factor[kRows];
#pragma GCC unroll 4
      for (int m = 0; m < kRows; ++m) factor[m] = splat(h[m][j]);
      // Each row of `b` goes on somewhere else, in more places than processors fetch ahead from by themselves.
      const char* next = reinterpret_cast<const char*>(ahead + j * width + (o - begin));
#pragma GCC unroll 4
      for (int line = 0; line < static_cast<int>(kSums * kLanes * sizeof(T)); line += 64) __builtin_prefetch(next + line);
#pragma GCC unroll 4
      for (int s = 0; s < kSums; ++s) {
        const Vec w = load(b + j * width + o + s * kLanes);
#pragma GCC unroll 4
        for (int m = 0; m < kRows; ++m) sums[m][s] += factor[m] * w;
      }
    }
    for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 4
      for (int s = 0; s < kSums; ++s) store(y[m] + o + s * kLanes, sums[m][s]);
    }
  }
  for (; o < end; ++o) {
    for (int m = 0; m < kRows; ++m) {
      float sum = y[m][o];
      if (of.special) sum += (call.bias == nullptr ? sum : sum - call.bias[o]) * gain[o] + bias[o];
      for (int j = 0; j < call.rank; ++j) sum += h[m][j] * widened(b[j * width + o]);
      y[m][o] = sum;
    }
  }
}

// Calls body(T{}) with the type of the matrices.
template <class Body>
void with_type(const Adapted& call, const Body& body) {
  switch (call.type) {
    case llmjax::Type::kBf16: return body(Bf16{});
    case llmjax::Type::kF16: return body(F16{});
    default: return body(float{});
  }
}

void shrink(const Adapted& call, const AdaptedRows& of, int first, int count, const void* ahead) {
  with_type(call, [&](auto number) {
    using T = decltype(number);
    each_rows(of.count, [&](auto rows, int i) {
      shrink_some<decltype(rows)::kRows, T>(call, of, of.tokens + i, first, count, static_cast<const T*>(ahead));
    });
  });
}

void expand(const Adapted& call, const AdaptedRows& of, int begin, int end, const void* ahead) {
  with_type(call, [&](auto number) {
    using T = decltype(number);
    each_rows(of.count, [&](auto rows, int i) {
      expand_some<decltype(rows)::kRows, T>(call, of, of.tokens + i, begin, end, static_cast<const T*>(ahead));
    });
  });
}

}  // namespace

#endif  // LLMJAX_ADAPTED_KERNEL_H_
