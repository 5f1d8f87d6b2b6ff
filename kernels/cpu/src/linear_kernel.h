// Products of rows with a large matrix of floats, which is read once from memory. The rows stay f32: each weight is
// widened and multiplied exactly. With tiles a row is split into two bf16 addends, which keeps 16 bits of it. Where vectors
// multiply bf16, many rows are rounded to it, as XLA's dot does.

#ifndef LLMJAX_LINEAR_KERNEL_H_
#define LLMJAX_LINEAR_KERNEL_H_

#include "float_panels.h"
#include "kernels.h"
#include "pairs.h"
#include "read_ahead.h"

#if defined(__AMX_BF16__)
#include "amx.h"
#endif

namespace {

using llmjax::Linear;

constexpr bool kFewRegisters = kRegisters < 32;

// Rows of the weight read side by side: two where sums of four rows of x leave no registers to widen more of them.
constexpr int kMostStreams = 4;
template <int kRows, class T>
constexpr int kStreams = kFewRegisters && kRows == 4 && sizeof(T) < sizeof(float) ? 2 : kMostStreams;

// With more rows panels are faster, where a weight is widened once for all of them.
template <class T>
constexpr int kMaxVectorRows = sizeof(T) == sizeof(float) ? 48 : 16;

// From this many rows on, x comes in the order of pairs: with fewer, bringing it there costs more than it saves.
constexpr int kMinPairRows = 3;

// Dot products of kRows rows of x with kStreams rows of the weight. kInPairs: x is in the order of pairs of T; `ahead`, with
// kAhead: of the weight, in size / kPair steps.
template <int kRows, bool kInPairs, bool kAhead, class T>
inline void dot_rows(const float* x, int size, const T* const* weight, ReadAhead<1>* ahead, Vec (*sums)[kLanes]) {
  Vec partial[kRows][kStreams<kRows, T>] = {};
  const auto add = [&](int i, const auto& load_weight) {
    Vec row[kRows];
#pragma GCC unroll 4
    for (int m = 0; m < kRows; ++m) row[m] = load(x + static_cast<size_t>(m) * size + i);
#pragma GCC unroll 4
    for (int j = 0; j < kStreams<kRows, T>; ++j) {
      Vec w = load_weight(weight[j]);
#pragma GCC unroll 4
      for (int m = 0; m < kRows; ++m) partial[m][j] += row[m] * w;
    }
  };
  int i = 0;
  for (; i + kPair <= size; i += kPair) {
    if (kAhead) ahead->next();
    if constexpr (kInPairs) {
      add(i, [i](const T* from) { return load_half<0>(from + i); });
      add(i + kLanes, [i](const T* from) { return load_half<1>(from + i); });
    } else {
      add(i, [i](const T* from) { return load(from + i); });
      add(i + kLanes, [i](const T* from) { return load(from + i + kLanes); });
    }
  }
  if (i < size) add(i, [i](const T* from) { return load(from + i); });
#pragma GCC unroll 4
  for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 4
    for (int j = 0; j < kStreams<kRows, T>; ++j) sums[m][j] = partial[m][j];
  }
}

template <int kRows, bool kInPairs, class T>
void linear_rows(const Linear& call, const float* x, int first_row, int output, int count) {
  x += static_cast<size_t>(first_row) * call.size_in;
  Vec sums[kRows][kLanes];
  for (int j = 0; j < kLanes; j += kStreams<kRows, T>) {
    const T* weight[kStreams<kRows, T>];
    for (int s = 0; s < kStreams<kRows, T>; ++s) {  // past the end the last output is computed again
      weight[s] = static_cast<const T*>(call.weight) + static_cast<size_t>(output + imin(j + s, count - 1)) * call.size_in;
    }
    Vec part[kRows][kLanes];
    if (first_row == 0 && call.size_in >= kPair) {
      const size_t bytes = static_cast<size_t>(kStreams<kRows, T>) * call.size_in * sizeof(T);
      ReadAhead<1> ahead(call.weight, weight[0], bytes, call.size_in / kPair);
      dot_rows<kRows, kInPairs, true>(x, call.size_in, weight, &ahead, part);
    } else {
      dot_rows<kRows, kInPairs, false>(x, call.size_in, weight, nullptr, part);
    }
    for (int m = 0; m < kRows; ++m) {
      for (int s = 0; s < kStreams<kRows, T>; ++s) sums[m][j + s] = part[m][s];
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
    float* to = panel + part;
    int column = 0;
    if constexpr (!kInOrder<T>) {  // columns 2i and 2i + 1 are transposed as one, and then parted
      for (; column + kPair <= count; column += kPair) {
        Vec block[kLanes];
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) block[i] = load(reinterpret_cast<const float*>(rows[i] + column));
        transpose(block);
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) {
          const Bits both = bit_cast<Bits>(block[i]);
          store(to + static_cast<size_t>(column + 2 * i) * kPanelOutputs, bit_cast<Vec>(both << 16));
          store(to + static_cast<size_t>(column + 2 * i + 1) * kPanelOutputs, bit_cast<Vec>(both & 0xffff0000u));
        }
      }
    }
    for (; column < count; column += kLanes) {
      Vec block[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) block[i] = load(rows[i] + column);
      transpose(block);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) store(to + static_cast<size_t>(column + i) * kPanelOutputs, block[i]);
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

template <bool kInPairs, class T>
void linear_vectors(const Linear& call, const float* x, int begin, int end) {
  for (int output = begin; output < end; output += kLanes) {
    const int count = imin(kLanes, end - output);
    for (int m = 0; m < call.rows;) {
      const int left = call.rows - m;
      if (left == 4 || (left > 4 && !kFewRegisters)) {
        linear_rows<4, kInPairs, T>(call, x, m, output, count), m += 4;
      } else if (left > 2) {  // sums of three rows stay in few registers
        linear_rows<3, kInPairs, T>(call, x, m, output, count), m += 3;
      } else if (left == 2) {
        linear_rows<2, kInPairs, T>(call, x, m, output, count), m += 2;
      } else {
        linear_rows<1, kInPairs, T>(call, x, m, output, count), m += 1;
      }
    }
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

#endif

#if defined(LLMJAX_BF16_VECTORS)

// From more rows than these on x is rounded to bf16 too, which doubles the rate; fewer wait for memory.
constexpr int kMaxExactRows = 8;
constexpr int kBlockSide = 4;           // rows and outputs of a block, whose sums one vector holds
constexpr int kBytesOfGroup = 1 << 18;  // of outputs that stay in the second-level cache while rows pass by
static_assert(kBlockSide * kBlockSide == kLanes);

inline bool linear_in_bf16(const Linear& call) {
  return call.type == llmjax::Type::kBf16 && call.program_rows > kMaxExactRows && call.size_in % kPair == 0;
}

// The group of outputs that comes next, fetched in four places in turn while rows pass by this one.
class GroupAhead {
 public:
  GroupAhead(const Linear& call, int output, int outputs) {
    const size_t row = static_cast<size_t>(call.size_in) * sizeof(uint16_t);
    from_ = static_cast<const char*>(call.weight) + static_cast<size_t>(output) * row;
    run_ = imax(imin(outputs, call.size_out - output), 0) * row / kPlaces;
    // A step reads a line of each of four outputs, and there are as many passes as blocks of rows.
    seldom_ = call.rows <= kBlockSide ? 0 : call.rows <= 3 * kBlockSide ? 1 : 3;
  }
  void next(int step) {
    if ((step & seldom_) != 0 || at_ >= run_) return;
    for (int i = 0; i < kPlaces; ++i) __builtin_prefetch(from_ + i * run_ + at_, 0, 2);
    at_ += kLine;
  }

 private:
  static constexpr int kPlaces = 4, kLine = 64;
  const char* from_;
  size_t run_, at_ = 0;
  int seldom_;
};

// Sums of rows first.. of x with outputs output.. of the weight; past the ends the last ones again.
inline void multiply_bf16_block(const Linear& call, const uint16_t* x, int first, int output, int end, GroupAhead& ahead) {
  const uint16_t *rows[kBlockSide], *weights[kBlockSide];
  for (int i = 0; i < kBlockSide; ++i) {
    rows[i] = x + static_cast<size_t>(imin(first + i, call.rows - 1)) * call.size_in;
    weights[i] = static_cast<const uint16_t*>(call.weight) + static_cast<size_t>(imin(output + i, end - 1)) * call.size_in;
  }
  __m512 sums[kLanes] = {};
  for (int i = 0; i < call.size_in; i += kPair) {
    ahead.next(i / kPair);
    __m512bh w[kBlockSide];
#pragma GCC unroll 4
    for (int j = 0; j < kBlockSide; ++j) w[j] = (__m512bh)_mm512_loadu_si512(weights[j] + i);
#pragma GCC unroll 4
    for (int m = 0; m < kBlockSide; ++m) {
      const __m512bh row = (__m512bh)_mm512_loadu_si512(rows[m] + i);
#pragma GCC unroll 4
      for (int j = 0; j < kBlockSide; ++j) sums[m * kBlockSide + j] = _mm512_dpbf16_ps(sums[m * kBlockSide + j], row, w[j]);
    }
  }
  Vec all[kLanes];
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) all[i] = (Vec)sums[i];
  const Vec result = sum_rows(all);
  for (int m = 0; m < imin(kBlockSide, call.rows - first); ++m) {
    const size_t at = static_cast<size_t>(first + m) * call.size_out + output;
    for (int j = 0; j < imin(kBlockSide, end - output); ++j) {
      const float bias = call.bias == nullptr ? 0 : call.bias[output + j];
      call.y[at + j] = result[m * kBlockSide + j] + bias + (call.residual == nullptr ? 0 : call.residual[at + j]);
    }
  }
}

inline void linear_bf16(const Linear& call, const uint16_t* x, int begin, int end) {
  const int group = imax(kBytesOfGroup / (2 * call.size_in) / kBlockSide, 1) * kBlockSide;
  for (int first_output = begin; first_output < end; first_output += group) {
    const int last = imin(first_output + group, end);
    GroupAhead ahead(call, last, imin(group, end - begin));
    for (int m = 0; m < call.rows; m += kBlockSide) {
      for (int output = first_output; output < last; output += kBlockSide) multiply_bf16_block(call, x, m, output, last, ahead);
    }
  }
}

#endif

inline bool linear_in_pairs(const Linear& call) {
  return call.type == llmjax::Type::kBf16 && call.program_rows >= kMinPairRows && call.program_rows <= kMaxVectorRows<Bf16>;
}

size_t linear_workspace(const Linear& call) {
#if defined(__AMX_BF16__)
  if (linear_uses_tiles(call)) return (call.rows + kTile - 1) / kTile * bytes_of_rows(call);
#endif
#if defined(LLMJAX_BF16_VECTORS)
  if (linear_in_bf16(call)) return static_cast<size_t>(call.rows) * call.size_in * sizeof(uint16_t);
#endif
  return linear_in_pairs(call) ? static_cast<size_t>(call.rows) * call.size_in * sizeof(float) : 0;
}

void linear_prepare(const Linear& call, char* workspace) {
#if defined(__AMX_BF16__)
  if (linear_uses_tiles(call)) {
    for (int m = 0; m < call.rows; m += kTile) prepare_rows(call, m, workspace + m / kTile * bytes_of_rows(call));
    return;
  }
#endif
#if defined(LLMJAX_BF16_VECTORS)
  if (linear_in_bf16(call)) {
    const size_t count = static_cast<size_t>(call.rows) * call.size_in;
    for (size_t i = 0; i < count; i += kLanes) store(reinterpret_cast<Bf16*>(workspace) + i, load(call.x + i));
    return;
  }
#endif
  if (!linear_in_pairs(call)) return;
  float* to = reinterpret_cast<float*>(workspace);
  std::memcpy(to, call.x, static_cast<size_t>(call.rows) * call.size_in * sizeof(float));
  for (int m = 0; m < call.rows; ++m) to_pairs<Bf16>(to + static_cast<size_t>(m) * call.size_in, call.size_in);
}

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
#if defined(LLMJAX_BF16_VECTORS)
  if (linear_in_bf16(call)) return linear_bf16(call, reinterpret_cast<const uint16_t*>(workspace), begin, end);
#endif
  if (linear_in_pairs(call)) return linear_vectors<true, Bf16>(call, reinterpret_cast<const float*>(workspace), begin, end);
  const auto multiply = [&](auto weight) {
    using T = decltype(weight);
    if (call.program_rows > kMaxVectorRows<T>) return linear_panels<T>(call, begin, end);
    linear_vectors<false, T>(call, call.x, begin, end);
  };
  switch (call.type) {
    case llmjax::Type::kF32: return multiply(float{});
    case llmjax::Type::kBf16: return multiply(Bf16{});
    default: return multiply(F16{});
  }
}

}  // namespace

#endif  // LLMJAX_LINEAR_KERNEL_H_
