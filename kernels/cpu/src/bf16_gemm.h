// Products of bf16 matrices with f32 sums. The right-hand side holds pairs of consecutive k in each 32-bit element ("paired"
// below).

#ifndef LLMJAX_BF16_GEMM_H_
#define LLMJAX_BF16_GEMM_H_

#include <immintrin.h>

#include "gemm.h"
#include "pairs.h"

#if defined(__AMX_BF16__)
#include "amx.h"
#endif

namespace {

// Rows of pairs, in one piece of memory.
struct DensePairs {
  using Factor = uint32_t;
  const uint32_t* data;
  int stride;
  Vec at(int k, int n) const { return load_as<Vec>(data + static_cast<size_t>(k) * stride + n); }
  static Vec factor(const uint32_t* pair) {
    int32_t both;
    std::memcpy(&both, pair, sizeof(both));
    return (Vec)_mm512_set1_epi32(both);
  }
  static Vec add(Vec sum, Vec factor, Vec row) {
    return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)(__m512i)factor, (__m512bh)(__m512i)row);
  }
};

// What k is a multiple of.
#if defined(__AMX_BF16__)
constexpr int kMultipleOfBf16 = 32;
#else
constexpr int kMultipleOfBf16 = 2;
#endif

// c[rows, n_begin..n_end] (+)= a[rows, k] * b[k, n], b paired; `rows` 16 at most, of which tiles compute all; n in multiples
// of 16, k of kMultipleOfBf16.
inline void multiply_bf16(const uint16_t* a, int stride_a, const uint32_t* b, int stride_b, int rows, int n_begin, int n_end,
                          int k_begin, int k_end, float* c, int stride_c, bool add) {
#if defined(__AMX_BF16__)
  (void)rows;
  multiply_by_tiles(a, stride_a, b, stride_b, n_begin, n_end, k_begin, k_end, c, stride_c, add);
#else
  multiply(reinterpret_cast<const uint32_t*>(a), stride_a / 2, DensePairs{b, stride_b}, rows, n_begin, n_end, k_begin / 2,
           k_end / 2, Matrix{c, stride_c}, add);
#endif
}

// Rows of any type as bf16, exact for one-byte types.
template <class T>
inline void widen(const T* const* rows, int count, int size, Bf16* out) {
  for (int c = 0; c < count; ++c, out += size) {
    for (int d = 0; d < size; d += kPair) {
      const Vec pairs = round_pairs(load(rows[c] + d), load(rows[c] + d + kLanes));
      std::memcpy(out + d, &pairs, sizeof(pairs));
    }
  }
}

// Keys' rows [count][size] as the right-hand side of q * k^T: out[size / 2][stride].
inline void pair_transposed(const Bf16* const* rows, int count, int size, uint32_t* out, int stride) {
  for (int c = 0; c < count; c += kLanes) {
    for (int d = 0; d < size; d += kPair) {
      Vec block[kLanes];
      for (int i = 0; i < kLanes; ++i) block[i] = load_as<Vec>(rows[c + i] + d);
      transpose(block);
      for (int i = 0; i < kLanes; ++i) std::memcpy(out + static_cast<size_t>(d / 2 + i) * stride + c, &block[i], 64);
    }
  }
}

// Where pairs of elements come from, of two vectors one after the other.
struct PairPlaces {
  alignas(64) uint16_t low[32], high[32];
};
constexpr PairPlaces pair_places() {
  PairPlaces places{};
  for (int i = 0; i < 32; ++i) {
    places.low[i] = static_cast<uint16_t>(i % 2 * 32 + i / 2);
    places.high[i] = static_cast<uint16_t>(places.low[i] + 16);
  }
  return places;
}
constexpr PairPlaces kPairPlaces = pair_places();

// 32 columns of two rows of values as pairs, 16 to `low` and 16 to `high`.
inline void pair(const Bf16* even, const Bf16* odd, uint32_t* low, uint32_t* high) {
  const __m512i a = _mm512_loadu_si512(even), b = _mm512_loadu_si512(odd);
  _mm512_storeu_si512(low, _mm512_permutex2var_epi16(a, _mm512_load_si512(kPairPlaces.low), b));
  _mm512_storeu_si512(high, _mm512_permutex2var_epi16(a, _mm512_load_si512(kPairPlaces.high), b));
}

// The same for types that bf16 holds exactly, so that the upper half of an f32 is the value.
template <class T>
inline void pair(const T* even, const T* odd, uint32_t* low, uint32_t* high) {
  for (int i = 0; i < 2; ++i) {
    const Bits a = bit_cast<Bits>(load(even + i * kLanes)), b = bit_cast<Bits>(load(odd + i * kLanes));
    const Bits pairs = (a >> 16) | (b & 0xffff0000u);
    std::memcpy(i == 0 ? low : high, &pairs, sizeof(pairs));
  }
}

// Values' rows begin..end of [.][size] as the right-hand side of weights * v: out[. / 2][size].
template <class T>
inline void pair_rows(const T* const* rows, int begin, int end, int size, uint32_t* out) {
  for (int c = begin; c < end; c += 2) {
    uint32_t* const to = out + static_cast<size_t>(c / 2) * size;
    for (int d = 0; d < size; d += kPair) pair(rows[c] + d, rows[c + 1] + d, to + d, to + d + kLanes);
  }
}

}  // namespace

#endif  // LLMJAX_BF16_GEMM_H_
