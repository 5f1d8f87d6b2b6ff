// Products of many rows of x with matrices of bf16 that are kept in panels (`kernels/panels.py`), by vectors: in f32, or in bf16 where
// vectors multiply that. Some columns of four tiles stay in the first-level cache while rows of x pass by; sums of the columns before lie
// where they are read in order.

#ifndef LLMJAX_KEPT_PANELS_H_
#define LLMJAX_KEPT_PANELS_H_

#include "activations.h"
#include "gemm.h"
#include "quantized_input.h"

namespace {

using llmjax::kTileRows;
using llmjax::QuantizedMatrix;

constexpr int kKeptTiles = 4;  // that a task multiplies together: those of a gate, and those of what it gates
constexpr int kKeptOutputs = kKeptTiles * kTileRows;
constexpr int kVectorsOfTile = kTileRows / kLanes;
constexpr int kTilesOfBlock = kBlockVectors / kVectorsOfTile;  // whose sums stay in registers
constexpr int kBlockOutputs = kTilesOfBlock * kTileRows;
constexpr int kKeptStep = kChunk * kTileRows / 2;  // words of a chunk of a tile
constexpr int kKeptBytes = 24 << 10;               // of a block that rows pass by: most of a small first-level cache
static_assert(kTilesOfBlock >= 1 && kKeptTiles % kTilesOfBlock == 0, "registers hold whole tiles");

// x in f32, and a block widened to it: [columns][kBlockOutputs].
struct KeptFloats {
  using Number = float;
  static constexpr int kChunks = kKeptBytes / (kChunk * kBlockOutputs * 4);
  static constexpr int kPanelFloats = kChunks * kChunk * kBlockOutputs;
  static float* rows(const QuantizedInput& in) { return in.floats; }
  static Vec sigmoid_of(Vec x) { return sigmoid(x); }
  static void put(float* to, Vec v) { store(to, v); }

  // `tiles`: where they begin; their chunks are two tiles apart.
  KeptFloats(const uint32_t* const* tiles, int chunks, float* panel) : panel_(panel) {
    for (int t = 0; t < kTilesOfBlock; ++t) {
      const uint32_t* words = tiles[t];
      float* to = panel + t * kTileRows;
      for (int c = 0; c < chunks; ++c, words += kKeptStep) {
        for (int pair = 0; pair < kChunk / 2; ++pair, words += kTileRows, to += 2 * kBlockOutputs) {
          for (int i = 0; i < kTileRows; i += kLanes) {
            const Bits both = load_as<Bits>(words + i);
            store(to + i, bit_cast<Vec>(both << 16));
            store(to + kBlockOutputs + i, bit_cast<Vec>(both & 0xffff0000u));
          }
        }
      }
    }
  }
  // Adds the next two columns of kRows rows of x, kChunk apart.
  template <int kRows>
  inline void add(const float* x, Vec (*sums)[kBlockVectors]) {
#pragma GCC unroll 1
    for (int column = 0; column < 2; ++column, panel_ += kBlockOutputs) {
      Vec w[kBlockVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kBlockVectors; ++v) w[v] = load(panel_ + v * kLanes);
#pragma GCC unroll 8
      for (int m = 0; m < kRows; ++m) {
        const Vec factor = splat(x[m * kChunk + column]);
#pragma GCC unroll 4
        for (int v = 0; v < kBlockVectors; ++v) sums[m][v] += factor * w[v];
      }
    }
  }
  void next_chunk() {}

 private:
  const float* panel_;
};

inline void prepare_kept_floats(const QuantizedInput& in, const float* x, int begin, int end) {
  for (int row = begin; row < imin(end, in.rows); ++row, x += in.size_in) {
    float* to = in.floats + (static_cast<size_t>(row / in.block) * in.chunks() * in.block + row % in.block) * kChunk;
    for (int column = 0; column < in.size_in; column += kChunk, to += static_cast<size_t>(in.block) * kChunk) {
      const int count = imin(kChunk, in.size_in - column);
      if (count < kChunk) std::memset(to, 0, kChunk * sizeof(float));
      std::memcpy(to, x + column, count * sizeof(float));
    }
  }
}

#if defined(LLMJAX_BF16_VECTORS)

// x in bf16, and blocks where they are.
struct KeptPairs {
  using Number = uint16_t;
  static constexpr int kChunks = kKeptBytes / (kChunk * kBlockOutputs * 2), kPanelFloats = 0;
  static uint16_t* rows(const QuantizedInput& in) { return in.bf16; }
  static Vec sigmoid_of(Vec x) { return coarse_sigmoid(x); }
  static void put(uint16_t* to, Vec v) { store(reinterpret_cast<Bf16*>(to), v); }

  KeptPairs(const uint32_t* const* tiles, int, float*) {
    for (int t = 0; t < kTilesOfBlock; ++t) words_[t] = tiles[t];
  }
  template <int kRows>
  inline void add(const uint16_t* x, Vec (*sums)[kBlockVectors]) {
    __m512bh w[kBlockVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kBlockVectors; ++v, words_[v - 1] += kTileRows) w[v] = (__m512bh)_mm512_loadu_si512(words_[v]);
#pragma GCC unroll 8
    for (int m = 0; m < kRows; ++m) {
      int32_t both;
      std::memcpy(&both, x + m * kChunk, sizeof(both));
      const __m512bh factors = (__m512bh)_mm512_set1_epi32(both);
#pragma GCC unroll 4
      for (int v = 0; v < kBlockVectors; ++v) sums[m][v] = (Vec)_mm512_dpbf16_ps((__m512)sums[m][v], factors, w[v]);
    }
  }
  void next_chunk() {
#pragma GCC unroll 4
    for (int t = 0; t < kTilesOfBlock; ++t) words_[t] += kKeptStep;
  }

 private:
  const uint32_t* words_[kTilesOfBlock];
};

#endif

// sums (+)= x * block for kRows rows of x [chunks][16 rows][kChunk].
template <class Way, int kRows>
inline void multiply_kept(const typename Way::Number* x, Way block, int chunks, float* to, bool begins) {
  Vec sums[kRows][kBlockVectors];
#pragma GCC unroll 8
  for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 4
    for (int v = 0; v < kBlockVectors; ++v) sums[m][v] = begins ? Vec{} : load(to + m * kKeptOutputs + v * kLanes);
  }
  for (int c = 0; c < chunks; ++c, x += kChunk * kTileRows) {
    for (int column = 0; column < kChunk; column += 2) block.template add<kRows>(x + column, sums);
    block.next_chunk();
  }
#pragma GCC unroll 8
  for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 4
    for (int v = 0; v < kBlockVectors; ++v) store(to + m * kKeptOutputs + v * kLanes, sums[m][v]);
  }
}

// The words of tiles that come next, fetched while rows pass by those before.
class KeptAhead {
 public:
  // `chunks` of kTilesOfBlock tiles in `steps` steps.
  KeptAhead(const uint32_t* const* tiles, int chunks, int steps) : lines_((chunks * kLines + steps - 1) / steps), left_(chunks * kLines) {
    for (int t = 0; t < kTilesOfBlock; ++t) from_[t] = tiles[t];
  }
  void next() {
    for (int i = 0; i < lines_ && left_ > 0; ++i, --left_) {
      for (int t = 0; t < kTilesOfBlock; ++t) __builtin_prefetch(from_[t] + line_ * kTileRows, 0, 2);
      if (++line_ < kLines) continue;
      line_ = 0;
      for (int t = 0; t < kTilesOfBlock; ++t) from_[t] += 2 * kKeptStep;
    }
  }

 private:
  static constexpr int kLines = kKeptStep / kTileRows;  // of a chunk of a tile
  const uint32_t* from_[kTilesOfBlock];
  const int lines_;
  int left_, line_ = 0;
};

struct KeptWorkspace {
  float *panel, *sums;  // [kPanelFloats], [rows][kKeptOutputs]

  template <class Way>
  static size_t bytes(const QuantizedMatrix&, int rows) {
    return sizeof(float) * (Way::kPanelFloats + static_cast<size_t>((rows + kTileRows - 1) / kTileRows * kTileRows) * kKeptOutputs);
  }
  template <class Way>
  static KeptWorkspace of(char* memory) {
    float* const floats = reinterpret_cast<float*>(memory);
    return {floats, floats + Way::kPanelFloats};
  }
};

// Four tiles with all rows of x. put(row, sums): sums of a row over all columns [kKeptOutputs].
template <class Way, class Put>
inline void pass_by_kept(const uint32_t* const* tiles, const QuantizedInput& in, char* workspace, const Put& put) {
  const KeptWorkspace memory = KeptWorkspace::of<Way>(workspace);
  const int chunks = in.chunks(), parts = (chunks + Way::kChunks - 1) / Way::kChunks;
  const size_t of_block = static_cast<size_t>(chunks) * kChunk * kTileRows;
  const auto begin_of = [&](int part) { return chunks * part / parts; };
  const auto from = [&](int part, int t, const uint32_t** to) {
    for (int i = 0; i < kTilesOfBlock; ++i) to[i] = tiles[t + i] + static_cast<size_t>(begin_of(part)) * 2 * kKeptStep;
  };
  for (int part = 0; part < parts; ++part) {
    const int begin = begin_of(part), count = begin_of(part + 1) - begin;
    for (int t = 0; t < kKeptTiles; t += kTilesOfBlock) {
      const bool last_tiles = t + kTilesOfBlock == kKeptTiles, last = last_tiles && part + 1 == parts;
      const uint32_t *here[kTilesOfBlock], *later[kTilesOfBlock];
      from(part, t, here);
      const int next_part = last_tiles && !last ? part + 1 : part;
      from(next_part, last_tiles ? 0 : t + kTilesOfBlock, later);
      KeptAhead ahead(later, last ? 0 : begin_of(next_part + 1) - begin_of(next_part), (in.rows + kTileRows - 1) / kTileRows);
      const Way block(here, count, memory.panel);
      for (int first = 0; first < in.rows; first += kTileRows) {
        const typename Way::Number* const x = Way::rows(in) + first / kTileRows * of_block + static_cast<size_t>(begin) * kChunk * kTileRows;
        float* const to = memory.sums + static_cast<size_t>(first) * kKeptOutputs;
        const int rows = imin(kTileRows, in.rows - first);
        ahead.next();
        int row = 0;
        const auto next = [&](auto count_of) {
          constexpr int kRows = decltype(count_of)::value;
          multiply_kept<Way, kRows>(x + row * kChunk, block, count, to + row * kKeptOutputs + t * kTileRows, part == 0);
          row += kRows;
        };
        while (row + kBlockRows <= rows) next(Count<kBlockRows>());
        if (row + 4 <= rows) next(Count<4>());
        if (row + 2 <= rows) next(Count<2>());
        if (row < rows) next(Count<1>());
        for (int m = 0; last && m < rows; ++m) put(first + m, to + m * kKeptOutputs);
      }
    }
  }
}

// Tile i of a matrix; past its last panel that one again, whose sums nobody takes.
inline const uint32_t* kept_tile(const QuantizedMatrix& w, int i) { return w.in_panel(imin(i, (w.tiles() + 1) / 2 * 2 - 2 + i % 2)); }

// As `load_part` and `store_part`, which are slow where a vector is whole.
inline Vec load_some(const float* p, int count) { return count == kLanes ? load(p) : load_part(p, count); }
inline void store_some(float* p, Vec v, int count) { count == kLanes ? store(p, v) : store_part(p, v, count); }

// y = sums + bias + residual of outputs from `first` on, or the same in bf16.
inline void put_kept(const QuantizedMatrix& w, int first, int row, const float* sums) {
  const size_t at = static_cast<size_t>(row) * w.size_out + first;
  const int all = imin(kKeptOutputs, w.size_out - first);
  for (int i = 0; i < all; i += kLanes) {
    const int count = imin(kLanes, all - i);
    Vec sum = load(sums + i);
    if (w.bias != nullptr) sum += load_some(w.bias + first + i, count);
    if (w.residual != nullptr) sum += load_some(w.residual + at + i, count);
    if (w.rounded == nullptr) {
      store_some(w.y + at + i, sum, count);
    } else {
      const Half rounded = round_bf16(sum);
      if (count == kLanes) {
        std::memcpy(w.rounded + at + i, &rounded, sizeof(rounded));
      } else {
        std::memcpy(w.rounded + at + i, &rounded, count * sizeof(uint16_t));
      }
    }
  }
}

template <class Way>
inline void kept_panels(const QuantizedMatrix& w, const QuantizedInput& in, int begin, int end, char* workspace) {
  for (int tile = begin; tile < end; tile += kKeptTiles) {
    const uint32_t* tiles[kKeptTiles];
    for (int t = 0; t < kKeptTiles; ++t) tiles[t] = kept_tile(w, tile + t);
    pass_by_kept<Way>(tiles, in, workspace, [&](int row, const float* of_row) { put_kept(w, tile * kTileRows, row, of_row); });
  }
}

// activation(gate) * up, or activation(gate) where they are the same, as rows of x for the next product; `begin` is even.
template <class Way>
inline void gated_kept_panels(const QuantizedMatrix& gate, const QuantizedMatrix& up, Activation activation, const QuantizedInput& in,
                              const QuantizedInput& out, int begin, int end, char* workspace) {
  const bool both = &gate != &up;
  const int step = both ? kKeptTiles / 2 : kKeptTiles;
  typename Way::Number* const next = Way::rows(out);
  for (int tile = begin; tile < end; tile += step) {
    const uint32_t* tiles[kKeptTiles];
    for (int t = 0; t < kKeptTiles; ++t) tiles[t] = kept_tile(t < step ? gate : up, tile + t % step);
    const int first = tile * kTileRows, all = imin(step * kTileRows, gate.size_out - first);
    pass_by_kept<Way>(tiles, in, workspace, [&](int row, const float* of_row) {
      for (int i = 0; i < (all + kChunk - 1) / kChunk * kChunk; i += kLanes) {
        const int count = imax(0, imin(kLanes, all - i)), column = first + i;
        Vec x = load(of_row + i), factor = splat(1.0f);
        if (gate.bias != nullptr) x += load_some(gate.bias + column, count);
        if (both) {
          factor = load(of_row + step * kTileRows + i);
          if (up.bias != nullptr) factor += load_some(up.bias + column, count);
        }
        Vec made = gated(activation, x, factor, Way::sigmoid_of);
        if (count < kLanes) {  // what fills a chunk up is zeros
          Vec there{};
          std::memcpy(&there, &made, count * sizeof(float));
          made = there;
        }
        const size_t block = static_cast<size_t>(row / kTileRows) * out.chunks() + column / kChunk;
        Way::put(next + (block * kTileRows + row % kTileRows) * kChunk + column % kChunk, made);
      }
    });
  }
}

}  // namespace

#endif  // LLMJAX_KEPT_PANELS_H_
