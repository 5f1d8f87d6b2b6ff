// Products of bf16 matrices in Intel's tile registers, f32 sums. A tile is 16 rows of 64 bytes; the right-hand side
// holds pairs of consecutive k in each 32-bit element ("paired" below).

#ifndef LLMJAX_AMX_H_
#define LLMJAX_AMX_H_

#include <immintrin.h>

#include "simd.h"

namespace {

constexpr int kTile = 16;   // rows, and columns of f32
constexpr int kTileK = 32;  // bf16 elements of a row

// Tiles are configured for as long as an object lives, then given back: XLA's own products use them too.
class Tiles {
 public:
  Tiles() {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } config;
    __asm__ volatile("" ::: "memory");
    _tile_loadconfig(&config);
  }
  ~Tiles() { _tile_release(); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
};

// The tile intrinsics do not tell the compiler which memory they read.
inline void finish_stores() { __asm__ volatile("" ::: "memory"); }

// c[16, 16 * kColumns] += a[16, k] * b[k, ...]; strides in elements of each.
template <int kColumns>
inline void multiply_tiles(const uint16_t* a, int stride_a, const uint32_t* b, int stride_b, int k_begin, int k_end,
                           float* c, int stride_c, bool add) {
  if (add) {
    _tile_loadd(0, c, stride_c * 4);
    if constexpr (kColumns > 1) _tile_loadd(1, c + 16, stride_c * 4);
    if constexpr (kColumns > 2) _tile_loadd(2, c + 32, stride_c * 4);
    if constexpr (kColumns > 3) _tile_loadd(3, c + 48, stride_c * 4);
  } else {
    _tile_zero(0);
    if constexpr (kColumns > 1) _tile_zero(1);
    if constexpr (kColumns > 2) _tile_zero(2);
    if constexpr (kColumns > 3) _tile_zero(3);
  }
  for (int k = k_begin; k < k_end; k += kTileK) {
    const uint32_t* row = b + static_cast<size_t>(k / 2) * stride_b;
    _tile_loadd(4, a + k, stride_a * 2);
    _tile_loadd(5, row, stride_b * 4);
    _tile_dpbf16ps(0, 4, 5);
    if constexpr (kColumns > 1) {
      _tile_loadd(6, row + 16, stride_b * 4);
      _tile_dpbf16ps(1, 4, 6);
    }
    if constexpr (kColumns > 2) {
      _tile_loadd(7, row + 32, stride_b * 4);
      _tile_dpbf16ps(2, 4, 7);
    }
    if constexpr (kColumns > 3) {
      _tile_loadd(5, row + 48, stride_b * 4);
      _tile_dpbf16ps(3, 4, 5);
    }
  }
  _tile_stored(0, c, stride_c * 4);
  if constexpr (kColumns > 1) _tile_stored(1, c + 16, stride_c * 4);
  if constexpr (kColumns > 2) _tile_stored(2, c + 32, stride_c * 4);
  if constexpr (kColumns > 3) _tile_stored(3, c + 48, stride_c * 4);
}

// c[16, n_begin..n_end] (+)= a[16, k] * b[k, n]; n in multiples of 16, k of 32.
inline void multiply_bf16(const uint16_t* a, int stride_a, const uint32_t* b, int stride_b, int n_begin, int n_end,
                          int k_begin, int k_end, float* c, int stride_c, bool add) {
  finish_stores();
  for (int n = n_begin; n < n_end;) {
    const int columns = imin(4, (n_end - n) / kTile);
    switch (columns) {
      case 4: multiply_tiles<4>(a, stride_a, b + n, stride_b, k_begin, k_end, c + n, stride_c, add); break;
      case 3: multiply_tiles<3>(a, stride_a, b + n, stride_b, k_begin, k_end, c + n, stride_c, add); break;
      case 2: multiply_tiles<2>(a, stride_a, b + n, stride_b, k_begin, k_end, c + n, stride_c, add); break;
      default: multiply_tiles<1>(a, stride_a, b + n, stride_b, k_begin, k_end, c + n, stride_c, add); break;
    }
    n += columns * kTile;
  }
}

// Rows of any type as bf16, exact for one-byte types.
template <class T>
inline void widen(const T* const* rows, int count, int size, Bf16* out) {
  for (int c = 0; c < count; ++c, out += size) {
    for (int d = 0; d < size; d += kTileK) {
      const Vec pairs = round_pairs(load(rows[c] + d), load(rows[c] + d + kLanes));
      std::memcpy(out + d, &pairs, sizeof(pairs));
    }
  }
}

// Keys' rows [count][size] as the right-hand side of q * k^T: out[size / 2][stride].
inline void pair_transposed(const Bf16* const* rows, int count, int size, uint32_t* out, int stride) {
  for (int c = 0; c < count; c += kLanes) {
    for (int d = 0; d < size; d += kTileK) {
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
    for (int d = 0; d < size; d += kTileK) pair(rows[c] + d, rows[c + 1] + d, to + d, to + d + kTile);
  }
}

}  // namespace

#endif  // LLMJAX_AMX_H_
