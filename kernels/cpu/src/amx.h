// Products of bf16 matrices in Intel's tile registers, f32 sums. A tile is 16 rows of 64 bytes; the right-hand side
// holds pairs of consecutive k in each 32-bit element (bf16_gemm.h).

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
inline void multiply_by_tiles(const uint16_t* a, int stride_a, const uint32_t* b, int stride_b, int n_begin, int n_end,
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

}  // namespace

#endif  // LLMJAX_AMX_H_
