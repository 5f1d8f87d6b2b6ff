// Products of many rows of x with quantized rows, in bf16 on Intel's tile registers. Two tiles of 16 rows of the matrix
// are dequantized into a panel that stays in the first-level cache while all rows of x stream past it; sums over the
// columns of a panel grow inside the registers.
//
// The tile unit works by itself for 64 cycles a step, so vectors do their share meanwhile: they fill the panel while the
// first rows are multiplied, and finish the outputs of the rows before while later ones are. It takes the multipliers of one port
// as long, so that vectors may shift and permute on both, but multiply on the other one alone.

#ifndef LLMJAX_BF16_TILES_H_
#define LLMJAX_BF16_TILES_H_

#include <type_traits>

#include "activations.h"
#include "bf16_pairs.h"

#if defined(__AMX_BF16__)

#include "amx.h"

namespace {

// Chunks of a panel at most: two tiles of 18 take 36 of 48 KB. Where few rows pass, what is filled should stay besides x; where they
// pass once, what is filled ahead is all that need be there.
constexpr int kPanelChunks = 18, kPanelChunksOfFew = 12, kPanelChunksOnce = 4;
constexpr int kFewPairs = 4;
constexpr int kPanelStep = kChunk * llmjax::kTileRows / 2;  // words of a chunk of one tile: pairs of columns
constexpr int kPairRows = 2 * llmjax::kTileRows;          // rows of x that are multiplied together
constexpr int kFilledAhead = 2;                           // steps from a store until it is in the cache, at least

// Dequantizes a tile, chunk by chunk, and reads ahead.
template <class Codes>
class PanelFiller {
 public:
  static constexpr bool kFills = true;
  PanelFiller(const QuantizedMatrix& w, int tile, const GroupScales& scales, int)
      : values_(w), group_(w, scales, 0), words_(w.tile(tile)), ahead_(w, words_) {
    read_scales(w, words_, scales, 1, 0);
  }
  void fill(uint32_t* panel) {
    ahead_.next();
    fill_pairs<Codes, llmjax::kTileRows>(words_, values_, group_, panel);
    words_ += Codes::kBits * llmjax::kTileRows;
  }

 private:
  const FloatValues<Codes> values_;
  GroupCursor group_;
  const uint32_t* words_;
  TileAhead<Codes> ahead_;
};

// In place of codes: the matrix is bf16 as it is.
struct Bf16Rows {};

// Columns 2i and 2i + 1 are turned as one.
template <>
class PanelFiller<Bf16Rows> {
 public:
  static constexpr bool kFills = true;
  PanelFiller(const QuantizedMatrix& w, int tile, const GroupScales&, int)
      : row_(w.tile(tile)),
        stride_(static_cast<size_t>(w.num_words)),
        left_(w.num_words),
        last_(imin(kTile, w.size_out - tile * kTile) - 1),
        ahead_(imin(kTile, w.size_out - (tile + 2) * kTile)) {}
  void fill(uint32_t* panel) {
    const __mmask16 there = left_ >= kTile ? 0xffff : (1u << left_) - 1;
    Vec rows[kTile];
#pragma GCC unroll 16
    for (int i = 0; i < kTile; ++i) {  // past the end the last one again
      rows[i] = (Vec)_mm512_maskz_loadu_epi32(there, row_ + imin(i, last_) * stride_);
    }
    // The next panel's, which come from afar.
    for (int i = 0; i < ahead_; ++i) __builtin_prefetch(row_ + (2 * kTile + i) * stride_, 0, 2);
    transpose(rows);
#pragma GCC unroll 16
    for (int i = 0; i < kTile; ++i) _mm512_store_si512(panel + i * kTile, (__m512i)rows[i]);
    row_ += kTile, left_ -= kTile;
  }

 private:
  const uint32_t* row_;  // the first one's next columns
  const size_t stride_;  // in words, of two columns
  int left_;
  const int last_, ahead_;
};

// ... and lies in panels already.
struct Bf16Panels {};

template <>
class PanelFiller<Bf16Panels> {
 public:
  static constexpr bool kFills = false;
  PanelFiller(const QuantizedMatrix& w, int tile, const GroupScales&, int step)
      : words_(w.in_panel(tile)), next_(tile + step < w.tiles() ? w.in_panel(tile + step) : nullptr) {}
  const uint32_t* chunk(int c) const { return words_ + static_cast<size_t>(c) * 2 * kPanelStep; }
  const uint32_t* next() const { return next_; }  // tile; null: this is the last one

 private:
  const uint32_t *words_, *next_;
};

// The next part of a panel, or of the next panel, fetched while rows pass by this one. Both come from afar.
class PanelAhead {
 public:
  static constexpr int kLine = 16;  // words
  // `chunks` of both tiles, in `steps` steps.
  PanelAhead(const uint32_t* first, const uint32_t* second, int chunks, int steps)
      : first_(first), second_(second), left_(chunks * kLines), lines_((left_ + steps - 1) / steps) {}
  void next() {
    for (int i = 0; i < lines_ && left_ > 0; ++i, --left_) {
      __builtin_prefetch(first_ + line_ * kLine, 0, 2);
      __builtin_prefetch(second_ + line_ * kLine, 0, 2);
      if (++line_ == kLines) line_ = 0, first_ += 2 * kPanelStep, second_ += 2 * kPanelStep;
    }
  }

 private:
  static constexpr int kLines = kPanelStep / kLine;  // of a chunk of a tile
  const uint32_t *first_, *second_;
  int left_, lines_, line_ = 0;
};

// Sums of 32 rows of x with both tiles of a panel.
struct alignas(64) Sums {
  float rows[kPairRows][2 * kTile];
};

// Where such sums are, `stride` floats from each row to the next; null: zeros.
template <class T>
struct SumsAt {
  T* first = nullptr;
  ptrdiff_t stride = 0;
  T* tile(int row, int tile) const { return first + row * kTile * stride + tile * kTile; }
  ptrdiff_t bytes() const { return stride * 4; }
};

// to = from + x * panel over some chunks, panel(c, tile) of each; `next_rows` from the first 16 rows of x to the others, 0: there
// are none. Calls meanwhile(c, tile) for tiles 0 and 1 while the products of a chunk are made: in two parts, or the scheduler is full
// of them when the next products come.
template <class Panel, class Meanwhile>
inline void multiply_pair(const uint16_t* x, size_t next_rows, const Panel& panel, int chunks, SumsAt<const float> from,
                          SumsAt<float> to, const Meanwhile& meanwhile) {
  const bool both = next_rows != 0;
  finish_stores();
  if (from.first != nullptr) {
    _tile_loadd(0, from.tile(0, 0), from.bytes());
    _tile_loadd(1, from.tile(0, 1), from.bytes());
    if (both) _tile_loadd(2, from.tile(1, 0), from.bytes());
    if (both) _tile_loadd(3, from.tile(1, 1), from.bytes());
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  _tile_stream_loadd(4, x, 64);  // x passes by: it must not push the panel out of the cache
  _tile_loadd(6, panel(0, 0), 64);
  if (both) _tile_stream_loadd(5, x + next_rows, 64);
  _tile_loadd(7, panel(0, 1), 64);
  for (int c = 0; c < chunks; ++c) {
    const int next = imin(c + 1, chunks - 1);
    const uint16_t* const next_x = x + static_cast<size_t>(next) * kChunk * kTile;
    finish_stores();
    _tile_dpbf16ps(0, 4, 6);
    if (both) {
      _tile_dpbf16ps(1, 4, 7);
      _tile_stream_loadd(4, next_x, 64);
    }
    finish_stores();
    meanwhile(c, 0);
    finish_stores();
    if (both) {
      _tile_dpbf16ps(2, 5, 6);
      _tile_loadd(6, panel(next, 0), 64);
      _tile_dpbf16ps(3, 5, 7);
      _tile_stream_loadd(5, next_x + next_rows, 64);
    } else {
      _tile_loadd(6, panel(next, 0), 64);
      _tile_dpbf16ps(1, 4, 7);
      _tile_stream_loadd(4, next_x, 64);
    }
    _tile_loadd(7, panel(next, 1), 64);
    finish_stores();
    meanwhile(c, 1);
  }
  _tile_stored(0, to.tile(0, 0), to.bytes());
  _tile_stored(1, to.tile(0, 1), to.bytes());
  if (both) {
    _tile_stored(2, to.tile(1, 0), to.bytes());
    _tile_stored(3, to.tile(1, 1), to.bytes());
  }
  finish_stores();
}

// Columns of a tile that a matrix has; `tile` may be the one after its last.
inline __mmask16 tile_columns(const QuantizedMatrix& w, int tile) {
  const int left = w.size_out - tile * kTile;
  return left >= kTile ? 0xffff : left <= 0 ? 0 : (1u << left) - 1;
}

// What sums begin with and what becomes of them: outputs of a matrix, of one or two tiles of it ...
class PlainOutputs {
 public:
  PlainOutputs(const QuantizedMatrix& w, int tile) : w_(w), output_(tile * kTile) {}
  // Whether sums of whole pairs of tiles grow where outputs are. All begin with the same numbers, wherever they grow: a row's result
  // must not depend on how many others there are.
  bool in_place() const {
    return output_ + 2 * kTile <= w_.size_out && (w_.bias == nullptr || w_.residual == nullptr) && w_.rounded == nullptr;
  }
  SumsAt<float> place(int row) const { return {w_.y + at(row), w_.size_out}; }
  SumsAt<const float> start(int row) const {
    if (w_.residual != nullptr) return {w_.residual + at(row), w_.size_out};
    return {w_.bias == nullptr ? nullptr : w_.bias + output_, 0};
  }
  // The same for sums that grow elsewhere.
  SumsAt<const float> start(int row, int rows, Sums& sums) const {
    if (w_.bias == nullptr && w_.residual == nullptr) return {};
    for (int m = 0; m < rows; ++m) {
      for (int tile = 0; tile < 2; ++tile) {
        const int first = tile * kTile, count = imax(0, imin(kTile, w_.size_out - output_ - first));
        Vec begun{};
        if (w_.residual != nullptr) begun = load_part(w_.residual + at(row + m) + first, count);
        if (w_.bias != nullptr) begun += load_part(w_.bias + output_ + first, count);
        store(sums.rows[m] + first, begun);
      }
    }
    return {sums.rows[0], 2 * kTile};
  }
  void put(int row, const float* sums) const {
    if (w_.rounded != nullptr) {
      const __mmask32 columns = tile_columns(w_, output_ / kTile) | static_cast<uint32_t>(tile_columns(w_, output_ / kTile + 1)) << kTile;
      return _mm512_mask_storeu_epi16(w_.rounded + at(row), columns, (__m512i)round_pairs(load(sums), load(sums + kTile)));
    }
    std::memcpy(w_.y + at(row), sums, sizeof(float) * static_cast<size_t>(imin(2 * kTile, w_.size_out - output_)));
  }

 private:
  size_t at(int row) const { return static_cast<size_t>(row) * w_.size_out + output_; }

  const QuantizedMatrix& w_;
  const int output_;  // the first one
};

inline Vec tile_bias(const QuantizedMatrix& w, int tile) {
  return w.bias == nullptr ? Vec{} : load_part(w.bias + tile * kTile, imin(kTile, w.size_out - tile * kTile));
}

// The same, whose bias and residual are added while products of other rows are made.
class AddedOutputs {
 public:
  AddedOutputs(const QuantizedMatrix& w, int tile)
      : w_(w),
        at_(static_cast<size_t>(tile) * kTile),
        low_(tile_columns(w, tile)),
        high_(tile_columns(w, tile + 1)),
        low_bias_(tile_bias(w, tile)),
        high_bias_(tile + 1 < w.tiles() ? tile_bias(w, tile + 1) : Vec{}) {}
  bool in_place() const { return false; }
  SumsAt<float> place(int) const { return {}; }
  SumsAt<const float> start(int) const { return {}; }
  SumsAt<const float> start(int, int, Sums&) const { return {}; }
  void put(int row, const float* sums) const {
    const size_t at = static_cast<size_t>(row) * w_.size_out + at_;
    Vec low = load(sums) + low_bias_, high = load(sums + kTile) + high_bias_;
    if (w_.residual != nullptr) {
      const float* const later = w_.residual + at + static_cast<size_t>(kPairRows) * w_.size_out;  // of the next rows
      __builtin_prefetch(later, 0, 3);
      __builtin_prefetch(later + kTile, 0, 3);
      low += (Vec)_mm512_maskz_loadu_ps(low_, w_.residual + at);
      high += (Vec)_mm512_maskz_loadu_ps(high_, w_.residual + at + kTile);
    }
    if (w_.rounded != nullptr) {
      return _mm512_mask_storeu_epi16(w_.rounded + at, low_ | static_cast<uint32_t>(high_) << kTile, (__m512i)round_pairs(low, high));
    }
    _mm512_mask_storeu_ps(w_.y + at, low_, (__m512)low);
    _mm512_mask_storeu_ps(w_.y + at + kTile, high_, (__m512)high);
  }

 private:
  const QuantizedMatrix& w_;
  const size_t at_;             // the first one
  const __mmask16 low_, high_;  // that exist
  const Vec low_bias_, high_bias_;
};

// ... or activation(gate) * up, as rows of x for the next product.
class GatedOutputs {
 public:
  GatedOutputs(const QuantizedMatrix& gate, const QuantizedMatrix& up, Activation activation, const QuantizedInput& to, int tile)
      : gate_bias_(tile_bias(gate, tile)),
        up_bias_(tile_bias(up, tile)),
        activation_(activation),
        to_(to.bf16 + tile / 2 * kChunk * kTile + tile % 2 * kTile),
        of_block_(static_cast<size_t>(to.chunks()) * kChunk * kTile),
        columns_(tile_columns(gate, tile)),
        fills_up_(tile + 1 == gate.tiles() && gate.tiles() % 2 != 0) {}
  bool in_place() const { return false; }
  SumsAt<float> place(int) const { return {}; }
  SumsAt<const float> start(int) const { return {}; }
  SumsAt<const float> start(int, int, Sums&) const { return {}; }
  void put(int row, const float* sums) const {
    const Vec product = gated(activation_, load(sums) + gate_bias_, load(sums + kTile) + up_bias_, coarse_sigmoid);
    __m256i* const to = reinterpret_cast<__m256i*>(to_ + row / kTile * of_block_ + row % kTile * kChunk);
    _mm256_store_si256(to, (__m256i)_mm512_maskz_cvtneps_pbh(columns_, (__m512)product));
    if (fills_up_) _mm256_store_si256(to + 1, _mm256_setzero_si256());
  }

 private:
  const Vec gate_bias_, up_bias_;
  const Activation activation_;
  uint16_t* const to_;  // the first row's columns
  const size_t of_block_;
  const __mmask16 columns_;  // that exist; others are zeros
  const bool fills_up_;      // the last chunk
};

// ... or activation(w), the same way, for an even tile and the next one.
class ActivatedOutputs {
 public:
  ActivatedOutputs(const QuantizedMatrix& w, Activation activation, const QuantizedInput& to, int tile)
      : low_bias_(tile_bias(w, tile)),
        high_bias_(tile + 1 < w.tiles() ? tile_bias(w, tile + 1) : Vec{}),
        activation_(activation),
        to_(to.bf16 + tile / 2 * kChunk * kTile),
        of_block_(static_cast<size_t>(to.chunks()) * kChunk * kTile),
        columns_(tile_columns(w, tile) | static_cast<uint32_t>(tile_columns(w, tile + 1)) << kTile) {}
  bool in_place() const { return false; }
  SumsAt<float> place(int) const { return {}; }
  SumsAt<const float> start(int) const { return {}; }
  SumsAt<const float> start(int, int, Sums&) const { return {}; }
  void put(int row, const float* sums) const {
    const Vec low = gated(activation_, load(sums) + low_bias_, splat(1.0f), coarse_sigmoid);
    const Vec high = gated(activation_, load(sums + kTile) + high_bias_, splat(1.0f), coarse_sigmoid);
    uint16_t* const to = to_ + row / kTile * of_block_ + row % kTile * kChunk;
    _mm512_store_si512(to, (__m512i)_mm512_maskz_cvtne2ps_pbh(columns_, (__m512)high, (__m512)low));
  }

 private:
  const Vec low_bias_, high_bias_;
  const Activation activation_;
  uint16_t* const to_;
  const size_t of_block_;
  const __mmask32 columns_;
};

struct Bf16Workspace {
  uint32_t* panel;  // [chunks][2 tiles]
  Sums* sums;       // of each pair of blocks of rows
  GroupScales scales[2];

  static constexpr size_t kPanelBytes = size_t{kPanelChunks} * 2 * kPanelStep * 4;
  static int pairs(int rows) { return (rows + kPairRows - 1) / kPairRows; }
  static size_t bytes(const QuantizedMatrix& w, int rows) {
    return kPanelBytes + pairs(rows) * sizeof(Sums) + 2 * GroupScales::bytes(w);
  }
  Bf16Workspace(const QuantizedMatrix& first, const QuantizedMatrix& second, int rows, char* memory)
      : panel(reinterpret_cast<uint32_t*>(memory)),
        sums(reinterpret_cast<Sums*>(memory + kPanelBytes)),
        scales{GroupScales(first, memory + kPanelBytes + pairs(rows) * sizeof(Sums)),
               GroupScales(second, memory + kPanelBytes + pairs(rows) * sizeof(Sums) + GroupScales::bytes(first))} {}
};

// Two tiles with all rows of x.
template <class First, class Second, class Outputs>
inline void multiply_panel(PanelFiller<First> first, PanelFiller<Second> second, const QuantizedInput& in,
                           const Bf16Workspace& memory, const Outputs& outputs) {
  constexpr bool kFills = PanelFiller<First>::kFills;
  const int chunks = in.chunks(), pairs = Bf16Workspace::pairs(in.rows);
  const int chunks_of_part = pairs == 1 ? chunks : pairs <= kFewPairs ? kPanelChunksOfFew : kPanelChunks;
  const int parts = (chunks + chunks_of_part - 1) / chunks_of_part, wrap = pairs == 1 ? kPanelChunksOnce - 1 : -1;
  const size_t of_block = static_cast<size_t>(chunks) * kChunk * kTile;
  const auto begin_of = [&](int part) { return chunks * part / parts; };
  for (int part = 0; part < parts; ++part) {
    const int begin = begin_of(part), count = begin_of(part + 1) - begin;
    const bool last = part + 1 == parts;
    const int outputs_of_step = (kPairRows + 2 * count - 1) / (2 * count);
    const auto panel = [&](int c, int tile) -> const uint32_t* {
      if constexpr (kFills) {
        return memory.panel + static_cast<size_t>(c & wrap) * 2 * kPanelStep + tile * kPanelStep;
      } else {
        return tile == 0 ? first.chunk(begin + c) : second.chunk(begin + c);
      }
    };
    const auto fill = [&](int c, int tile) {
      if constexpr (kFills) {
        if (c >= count) return;
        uint32_t* const to = memory.panel + static_cast<size_t>(c & wrap) * 2 * kPanelStep + tile * kPanelStep;
        tile == 0 ? first.fill(to) : second.fill(to);
      }
    };
    const auto ahead = [&] {
      if constexpr (!kFills) {
        const int steps = 2 * pairs * count;
        if (!last) return PanelAhead(first.chunk(begin + count), second.chunk(begin + count), begin_of(part + 2) - begin - count, steps);
        return PanelAhead(first.next(), second.next(), first.next() == nullptr || second.next() == nullptr ? 0 : begin_of(1), steps);
      } else {
        return 0;
      }
    };
    auto reader = ahead();
    const auto read_ahead = [&] {
      if constexpr (!kFills) reader.next();
    };
    const auto sums_of = [&](int pair) -> Sums& { return memory.sums[parts == 1 ? pair % 2 : pair]; };
    const auto rows_of = [&](int pair) { return imin(kPairRows, in.rows - pair * kPairRows); };
    const auto in_place = [&](int pair) { return outputs.in_place() && rows_of(pair) % kTile == 0; };
    const auto put = [&](int pair, int row, int end) {
      if (in_place(pair)) return;
      for (end = imin(end, rows_of(pair)); row < end; ++row) outputs.put(pair * kPairRows + row, sums_of(pair).rows[row]);
    };
    for (int c = 0; c < kFilledAhead; ++c) fill(c, 0), fill(c, 1);
    for (int pair = 0; pair < pairs; ++pair) {
      const uint16_t* x = in.bf16 + 2 * pair * of_block + static_cast<size_t>(begin) * kChunk * kTile;
      const size_t next_rows = pair * kPairRows + kTile < in.rows ? of_block : 0;
      const int row = pair * kPairRows;
      const bool there = in_place(pair);
      const SumsAt<float> to = there ? outputs.place(row) : SumsAt<float>{sums_of(pair).rows[0], 2 * kTile};
      SumsAt<const float> from{to.first, to.stride};
      if (part == 0) from = there ? outputs.start(row) : outputs.start(row, rows_of(pair), sums_of(pair));
      if (pair == 0 && kFills) {
        multiply_pair(x, next_rows, panel, count, from, to, [&](int c, int tile) { fill(c + kFilledAhead, tile); });
      } else if (last && pair != 0) {
        multiply_pair(x, next_rows, panel, count, from, to, [&](int c, int tile) {
          const int first = (2 * c + tile) * outputs_of_step;
          read_ahead();
          put(pair - 1, first, imin(kPairRows, first + outputs_of_step));
        });
      } else {
        multiply_pair(x, next_rows, panel, count, from, to, [&](int, int) { read_ahead(); });
      }
    }
    if (last) put(pairs - 1, 0, kPairRows);
  }
}

template <class Codes>
using SingleOutputs = std::conditional_t<PanelFiller<Codes>::kFills, PlainOutputs, AddedOutputs>;

template <class Codes>
inline void bf16_tiles(const QuantizedMatrix& w, const QuantizedInput& in, int begin, int end, char* workspace) {
  const Tiles tiles;
  const Bf16Workspace memory(w, w, in.rows, workspace);
  for (int tile = begin; tile < end; tile += 2) {
    const int next = imin(tile + 1, w.tiles() - 1);
    multiply_panel(PanelFiller<Codes>(w, tile, memory.scales[0], 2), PanelFiller<Codes>(w, next, memory.scales[1], 2), in, memory,
                   SingleOutputs<Codes>(w, tile));
  }
}

// The same tile of two matrices.
template <class Codes>
inline void gated_bf16_tiles(const QuantizedMatrix& gate, const QuantizedMatrix& up, Activation activation,
                             const QuantizedInput& in, const QuantizedInput& out, int begin, int end, char* workspace) {
  const Tiles tiles;
  const Bf16Workspace memory(gate, up, in.rows, workspace);
  for (int tile = begin; tile < end; ++tile) {
    multiply_panel(PanelFiller<Codes>(gate, tile, memory.scales[0], 1), PanelFiller<Codes>(up, tile, memory.scales[1], 1), in,
                   memory, GatedOutputs(gate, up, activation, out, tile));
  }
}

// Two tiles of one matrix.
template <class Codes>
inline void activated_bf16_tiles(const QuantizedMatrix& w, Activation activation, const QuantizedInput& in, const QuantizedInput& out,
                                 int begin, int end, char* workspace) {
  const Tiles tiles;
  const Bf16Workspace memory(w, w, in.rows, workspace);
  for (int tile = begin; tile < end; tile += 2) {
    const int next = imin(tile + 1, w.tiles() - 1);
    multiply_panel(PanelFiller<Codes>(w, tile, memory.scales[0], 2), PanelFiller<Codes>(w, next, memory.scales[1], 2), in, memory,
                   ActivatedOutputs(w, activation, out, tile));
  }
}

}  // namespace

#endif  // __AMX_BF16__

#endif  // LLMJAX_BF16_TILES_H_
