// Products of rows with a large matrix of 16-bit floats, which is read once from memory. The rows stay f32: each weight is
// widened and multiplied exactly. With tiles a row is split into two bf16 addends, which keeps 16 bits of it.

#ifndef LLMJAX_LINEAR_KERNEL_H_
#define LLMJAX_LINEAR_KERNEL_H_

#include "float_panels.h"
#include "kernels.h"

#if defined(__AMX_BF16__)
#include "amx.h"
#endif

namespace {

using llmjax::Linear;

constexpr int kStreams = 4;  // rows of the weight read side by side
constexpr int kMaxVectorRows = 4;  // with more rows panels are faster

// Dot products of kRows rows of x with kStreams rows of the weight.
template <int kRows, class T>
inline void dot_rows(const float* x, int size, const T* const* weight, Vec (*sums)[kLanes]) {
  Vec partial[kRows][kStreams] = {};
  const size_t ahead = static_cast<size_t>(size) * kStreams;  // hardware loses track at the end of each short row
  for (int i = 0; i < size; i += kLanes) {
    Vec w[kStreams];
#pragma GCC unroll 4
    for (int j = 0; j < kStreams; ++j) {
      w[j] = load(weight[j] + i);
      __builtin_prefetch(weight[j] + ahead + i, 0, 2);
    }
#pragma GCC unroll 4
    for (int m = 0; m < kRows; ++m) {
      const Vec row = load(x + static_cast<size_t>(m) * size + i);
#pragma GCC unroll 4
      for (int j = 0; j < kStreams; ++j) partial[m][j] += row * w[j];
    }
  }
#pragma GCC unroll 4
  for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 4
    for (int j = 0; j < kStreams; ++j) sums[m][j] = partial[m][j];
  }
}

template <int kRows, class T>
void linear_rows(const Linear& call, int first_row, int output, int count) {
  const float* x = call.x + static_cast<size_t>(first_row) * call.size_in;
  Vec sums[kRows][kLanes];
  for (int j = 0; j < kLanes; j += kStreams) {
    const T* weight[kStreams];
    for (int s = 0; s < kStreams; ++s) {  // past the end the last output is computed again
      weight[s] = static_cast<const T*>(call.weight) + static_cast<size_t>(output + imin(j + s, count - 1)) * call.size_in;
    }
    Vec part[kRows][kLanes];
    dot_rows<kRows>(x, call.size_in, weight, part);
    for (int m = 0; m < kRows; ++m) {
      for (int s = 0; s < kStreams; ++s) sums[m][j + s] = part[m][s];
    }
  }
  for (int m = 0; m < kRows; ++m) {
    const Vec result = sum_rows(sums[m]);
    const size_t at = static_cast<size_t>(first_row + m) * call.size_out + output;
    for (int j = 0; j < count; ++j) {
      const float bias = call.bias == nullptr ? 0 : call.bias[output + j];
      call.y[at + j] = result[j] + bias + (call.residual == nullptr ? 0 : call.residual[at + j]);
    }
  }
}

// Columns begin..begin + count, a multiple of kLanes, of rows output.. of the weight; past its end the last row again.
template <class T>
inline void widen_panel(const Linear& call, int output, float* panel, int begin, int count) {
  for (int part = 0; part < kPanelOutputs; part += kLanes) {
    const T* rows[kLanes];
    for (int i = 0; i < kLanes; ++i) {
      const int row = imin(output + part + i, call.size_out - 1);
      rows[i] = static_cast<const T*>(call.weight) + static_cast<size_t>(row) * call.size_in + begin;
    }
    for (int column = 0; column < count; column += kLanes) {
      Vec block[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) block[i] = load(rows[i] + column);
      transpose(block);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) store(panel + static_cast<size_t>(column + i) * kPanelOutputs + part, block[i]);
    }
  }
}

template <class T>
void linear_panels(const Linear& call, int begin, int end) {
  for (int output = begin; output < end; output += kPanelOutputs) {
    const PanelOutputs outputs{call.bias, call.residual, call.y, call.size_out, output, imin(kPanelOutputs, end - output)};
    multiply_panels(call.x, call.rows, call.size_in, outputs, [&](float* panel, int column, int count) {
      widen_panel<T>(call, output, panel, column, count);
    });
  }
}

template <class T>
void linear_vectors(const Linear& call, int begin, int end) {
  for (int output = begin; output < end; output += kLanes) {
    const int count = imin(kLanes, end - output);
    int m = 0;
    for (; m + 4 <= call.rows; m += 4) linear_rows<4, T>(call, m, output, count);
    for (; m + 2 <= call.rows; m += 2) linear_rows<2, T>(call, m, output, count);
    if (m < call.rows) linear_rows<1, T>(call, m, output, count);
  }
}

#if defined(__AMX_BF16__)

// From this many rows on tiles are faster than vectors.
constexpr int kTileRows = 3;

inline bool linear_uses_tiles(const Linear& call) {
  return call.type == llmjax::Type::kBf16 && call.program_rows >= kTileRows && call.size_in % kTileK == 0 &&
         call.size_out % kTile == 0;
}

// 16 rows of x as right-hand sides of the weight's tiles: per 32 inputs a tile of the rounded rows and one of what
// rounding left.
constexpr int kPairOfTiles = 2 * kTile * kTile * 4;  // bytes

inline size_t bytes_of_rows(const Linear& call) { return static_cast<size_t>(call.size_in / kTileK) * kPairOfTiles; }

size_t linear_workspace(const Linear& call) {
  return linear_uses_tiles(call) ? (call.rows + kTile - 1) / kTile * bytes_of_rows(call) : 0;
}

inline void prepare_rows(const Linear& call, int first, char* to) {
  for (int i = 0; i < call.size_in; i += kTileK, to += kPairOfTiles) {
    Vec rounded[kLanes] = {}, rest[kLanes] = {};
    for (int m = 0; m < imin(kTile, call.rows - first); ++m) {
      const float* x = call.x + static_cast<size_t>(first + m) * call.size_in + i;
      const Vec low = load(x), high = load(x + kLanes);
      rounded[m] = round_pairs(low, high);
      const Bf16* back = reinterpret_cast<const Bf16*>(&rounded[m]);
      rest[m] = round_pairs(low - load(back), high - load(back + kLanes));
    }
    transpose(rounded);
    transpose(rest);
    std::memcpy(to, rounded, sizeof(rounded));
    std::memcpy(to + sizeof(rounded), rest, sizeof(rest));
  }
}

void linear_prepare(const Linear& call, char* workspace) {
  if (!linear_uses_tiles(call)) return;
  for (int m = 0; m < call.rows; m += kTile) prepare_rows(call, m, workspace + m / kTile * bytes_of_rows(call));
}

// Outputs output .. output + 16 * kTiles of up to 16 rows.
template <int kTiles>
inline void multiply_weight(const Linear& call, const char* x, int first, int output) {
  const long stride = static_cast<long>(call.size_in) * 2;
  const char* weight = static_cast<const char*>(call.weight) + output * stride;
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (kTiles > 1) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (long i = 0; i < stride; i += kTileK * 2, x += kPairOfTiles) {
    _tile_loadd(6, x, 64);
    _tile_loadd(7, x + kTile * 64, 64);
    _tile_loadd(4, weight + i, stride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (kTiles > 1) {
      _tile_loadd(5, weight + kTile * stride + i, stride);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  alignas(64) float sums[4][kTile * kTile];
  _tile_stored(0, sums[0], 64);
  _tile_stored(1, sums[1], 64);
  if constexpr (kTiles > 1) {
    _tile_stored(2, sums[2], 64);
    _tile_stored(3, sums[3], 64);
  }
  for (int t = 0; t < kTiles; ++t) {
    Vec rows[kTile];
    for (int i = 0; i < kTile; ++i) rows[i] = load(sums[2 * t] + i * kTile) + load(sums[2 * t + 1] + i * kTile);
    transpose(rows);
    const int at = output + t * kTile;
    const Vec bias = call.bias == nullptr ? Vec{} : load(call.bias + at);
    for (int m = 0; m < imin(kTile, call.rows - first); ++m) {
      const size_t y = static_cast<size_t>(first + m) * call.size_out + at;
      const Vec sum = rows[m] + bias;
      store(call.y + y, call.residual == nullptr ? sum : sum + load(call.residual + y));
    }
  }
}

template <int kTiles>
inline void linear_tiles(const Linear& call, const char* x, int output) {
  for (int m = 0; m < call.rows; m += kTile) {
    multiply_weight<kTiles>(call, x + m / kTile * bytes_of_rows(call), m, output);
  }
}

#else

size_t linear_workspace(const Linear&) { return 0; }
void linear_prepare(const Linear&, char*) {}

#endif

void linear(const Linear& call, const char* workspace, int begin, int end) {
#if defined(__AMX_BF16__)
  if (linear_uses_tiles(call)) {
    Tiles tiles;
    finish_stores();
    int output = begin;
    for (; output + 2 * kTile <= end; output += 2 * kTile) linear_tiles<2>(call, workspace, output);
    for (; output < end; output += kTile) linear_tiles<1>(call, workspace, output);
    return;
  }
#endif
  (void)workspace;
  const bool bf16 = call.type == llmjax::Type::kBf16;
  if (call.program_rows > kMaxVectorRows) {
    bf16 ? linear_panels<Bf16>(call, begin, end) : linear_panels<F16>(call, begin, end);
  } else {
    bf16 ? linear_vectors<Bf16>(call, begin, end) : linear_vectors<F16>(call, begin, end);
  }
}

}  // namespace

#endif  // LLMJAX_LINEAR_KERNEL_H_
