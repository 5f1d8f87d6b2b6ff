// Products of many rows of x, rounded to int8, with codes of at most 8 bits on Intel's tile registers: twice as many products at once
// as with bf16, and codes only have to become bytes. Sums of a span of columns, which share a scale of x and one of each row of the
// matrix, are exact; then they become floats in vectors, some rows at a time, while the tile unit multiplies the next span.

#ifndef LLMJAX_INT8_TILES_H_
#define LLMJAX_INT8_TILES_H_

#include "bf16_tiles.h"

#if defined(__AMX_INT8__)

namespace {

using llmjax::kSpanColumns;
using llmjax::kStepColumns;

constexpr int kStepBytes = kStepColumns * kTile;     // of 16 rows, of x or of a matrix
constexpr int kPanelSteps = 8;                      // of two tiles: 16 of 48 KB, beside sums and x
constexpr int kChunksOfStep = kStepColumns / kChunk, kStepsOfSpan = kSpanColumns / kStepColumns;

// What codes are moved by to be signed.
template <class Codes>
constexpr int middle_of_codes() {
  return Codes::kSigned ? 0 : 1 << (Codes::kBits - 1);
}

// A tile of a matrix as signed bytes, chunk by chunk.
template <class Codes>
class ByteFiller {
 public:
  ByteFiller(const QuantizedMatrix& w, int tile, const GroupScales& scales) : table_(w, false), words_(w.tile(tile)), ahead_(w, words_) {
    read_scales(w, words_, scales, Codes::kMeaning == Meaning::kTable ? w.level_factor : 1, -middle_of_codes<Codes>());
  }
  void fill(int8_t* panel) {
    ahead_.next();
    Bits codes[kQuads];
    unpack_bytes<Codes>(words_, table_, false, codes);
    const __m512i middle = _mm512_set1_epi8(middle_of_codes<Codes>());
#pragma GCC unroll 8
    for (int q = 0; q < kQuads; ++q) _mm512_store_si512(panel + q * 64, _mm512_sub_epi8((__m512i)codes[q], middle));
    words_ += Codes::kBits * kTile;
  }

 private:
  const ByteTable table_;
  const uint32_t* words_;
  TileAhead<Codes> ahead_;
};

// Integer sums of up to 32 rows of x with both tiles, over a span.
struct alignas(64) SpanSums {
  int32_t tiles[2][2][kTile][kTile];  // of the first and the last 16 rows, with either tile
};

// Sums of a span that are still to become floats: to = from + scaled sums.
template <bool kOffsets, class Outputs>
struct PendingSpan {
  const SpanSums* sums = nullptr;
  int row = 0, rows = 0;
  SumsAt<const float> from;
  SumsAt<float> to;
  const float *x_scales[2], *x_sums[2];  // of the first and the last 16 rows
  Vec scales[2], offsets[2];             // of either tile
  const Outputs* outputs = nullptr;      // that take rows then
  int output_row;

  // The next `count` rows, of the same 16.
  void finish(int count) {
    const int begin = row, end = imin(row + count, rows), half = begin / kTile;
    if (begin >= end) return;
    row = end;
    // By value: stores could be to any of these.
    const int32_t* const whole = sums->tiles[half][0][0];
    const float *const x_scale = x_scales[half] - half * kTile, *const x_sum = x_sums[half] - half * kTile;
    const SumsAt<const float> old = from;
    const SumsAt<float> made = to;
    const Vec scale[2] = {scales[0], scales[1]}, offset[2] = {offsets[0], offsets[1]};
    for (int m = begin; m < end; ++m) {
#pragma GCC unroll 2
      for (int tile = 0; tile < 2; ++tile) {
        Vec sum = old.first == nullptr ? Vec{} : load(old.first + m * old.stride + tile * kTile);
        const Int exact = load_as<Int>(whole + tile * kTile * kTile + m % kTile * kTile);
        sum += __builtin_convertvector(exact, Vec) * (scale[tile] * splat(x_scale[m]));
        if constexpr (kOffsets) sum -= offset[tile] * splat(x_sum[m]);
        store(made.first + m * made.stride + tile * kTile, sum);
      }
    }
    if (outputs == nullptr) return;
    for (int m = begin; m < end; ++m) outputs->put(output_row + m, made.first + m * made.stride);
  }
  void finish() {
    while (row < rows) finish(kTile - row % kTile);
  }
};

// activation(gate) * up in f32, for the columns of a span of the next product's x; to the bit what comes of `PlainOutputs` of both and
// `gate_rows`, since the number of threads decides between these.
class GatedColumns {
 public:
  GatedColumns(const QuantizedMatrix& gate, const QuantizedMatrix& up, Activation activation, int tile, float* columns)
      : biased_(gate.bias != nullptr || up.bias != nullptr), activation_(activation), columns_(columns) {
    store(biases_, tile_bias(gate, tile)), store(biases_ + kTile, tile_bias(up, tile));
  }
  bool in_place() const { return false; }
  SumsAt<float> place(int) const { return {}; }
  SumsAt<const float> start(int) const { return {biased_ ? biases_ : nullptr, 0}; }
  SumsAt<const float> start(int row, int, Sums&) const { return start(row); }
  void put(int row, const float* sums) const {
    const Vec product = gated(activation_, load(sums), load(sums + kTile), [](Vec x) { return sigmoid(x); });
    store(columns_ + static_cast<size_t>(row) * kSpanColumns, product);
  }

 private:
  alignas(64) float biases_[2 * kTile];
  const bool biased_;
  const Activation activation_;
  float* const columns_;  // [rows][kSpanColumns], the tile's
};

struct Int8Workspace {
  int8_t* panels[2];  // of either tile, [steps][16 quads of columns][16 rows][4 columns]
  SpanSums* spans;    // the pending one and the next
  Sums* sums;         // of each pair of blocks of rows
  GroupScales scales[2];
  float* columns;  // of GatedColumns

  static constexpr size_t kPanelBytes = size_t{kPanelSteps} * kStepBytes, kFixedBytes = 2 * kPanelBytes + 2 * sizeof(SpanSums);
  static size_t sum_bytes(int rows) { return imax(2, Bf16Workspace::pairs(rows)) * sizeof(Sums); }
  static size_t bytes(const QuantizedMatrix& w, int rows) {
    return kFixedBytes + sum_bytes(rows) + 2 * GroupScales::bytes(w) + sizeof(float) * kSpanColumns * rows;
  }
  Int8Workspace(const QuantizedMatrix& w, int rows, char* memory)
      : panels{reinterpret_cast<int8_t*>(memory), reinterpret_cast<int8_t*>(memory + kPanelBytes)},
        spans(reinterpret_cast<SpanSums*>(memory + 2 * kPanelBytes)),
        sums(reinterpret_cast<Sums*>(memory + kFixedBytes)),
        scales{GroupScales(w, memory + kFixedBytes + sum_bytes(rows)),
               GroupScales(w, memory + kFixedBytes + sum_bytes(rows) + GroupScales::bytes(w))},
        columns(reinterpret_cast<float*>(memory + kFixedBytes + sum_bytes(rows) + 2 * GroupScales::bytes(w))) {}
};

// Two tiles, of matrices whose groups are alike, with all rows of x.
template <bool kOffsets, class Codes, class Outputs>
inline void multiply_bytes(ByteFiller<Codes> first, ByteFiller<Codes> second, int group_size, const QuantizedInput& in,
                           const Int8Workspace& memory, const Outputs& outputs) {
  const int chunks = in.chunks(), steps = in.steps(), spans = in.spans(), pairs = Bf16Workspace::pairs(in.rows);
  constexpr int kRowsMeanwhile = kPairRows / (2 * kStepsOfSpan);
  const size_t of_block = static_cast<size_t>(steps) * kStepBytes;
  const auto panel = [&](int step, int i) { return memory.panels[i] + step % kPanelSteps * kStepBytes; };
  PendingSpan<kOffsets, Outputs> pending;
  int next_span = 0;
  for (int begin = 0; begin < steps; begin += kPanelSteps) {
    const int end = imin(begin + kPanelSteps, steps);
    const auto fill = [&](int step, int i) {
      for (int c = step * kChunksOfStep; step < end && c < imin((step + 1) * kChunksOfStep, chunks); ++c) {
        (i == 0 ? first : second).fill(panel(step, i) + c % kChunksOfStep * kChunk * kTile);
      }
    };
    for (int step = begin; step < begin + kFilledAhead; ++step) fill(step, 0), fill(step, 1);
    for (int pair = 0; pair < pairs; ++pair) {
      const int row = pair * kPairRows, rows = imin(kPairRows, in.rows - row);
      const bool both = rows > kTile;
      const int8_t* const x = in.byte_tiles + 2 * pair * of_block;
      Sums& sums = memory.sums[begin == 0 && end == steps ? pair % 2 : pair];
      const auto meanwhile = [&](int step, int i) {
        if (pair == 0) fill(step + kFilledAhead, i);
        pending.finish(kRowsMeanwhile);
      };
      finish_stores();
      _tile_stream_loadd(4, x + begin * kStepBytes, 64);
      _tile_loadd(6, panel(begin, 0), 64);
      if (both) _tile_stream_loadd(5, x + begin * kStepBytes + of_block, 64);
      _tile_loadd(7, panel(begin, 1), 64);
      for (int step = begin; step < end; ++step) {
        const int next = imin(step + 1, end - 1);
        const int8_t* const next_x = x + next * kStepBytes;
        if (step % kStepsOfSpan == 0) {
          _tile_zero(0);
          _tile_zero(1);
          _tile_zero(2);
          _tile_zero(3);
        }
        finish_stores();
        _tile_dpbssd(0, 4, 6);
        if (both) {
          _tile_dpbssd(1, 4, 7);
          _tile_stream_loadd(4, next_x, 64);
        }
        finish_stores();
        meanwhile(step, 0);
        finish_stores();
        if (both) {
          _tile_dpbssd(2, 5, 6);
          _tile_loadd(6, panel(next, 0), 64);
          _tile_dpbssd(3, 5, 7);
          _tile_stream_loadd(5, next_x + of_block, 64);
        } else {
          _tile_loadd(6, panel(next, 0), 64);
          _tile_dpbssd(1, 4, 7);
          _tile_stream_loadd(4, next_x, 64);
        }
        _tile_loadd(7, panel(next, 1), 64);
        finish_stores();
        meanwhile(step, 1);
        if ((step + 1) % kStepsOfSpan != 0 && step + 1 != steps) continue;
        pending.finish();
        SpanSums& made = memory.spans[next_span++ % 2];
        _tile_stored(0, made.tiles[0][0], kTile * 4);
        _tile_stored(1, made.tiles[0][1], kTile * 4);
        if (both) {
          _tile_stored(2, made.tiles[1][0], kTile * 4);
          _tile_stored(3, made.tiles[1][1], kTile * 4);
        }
        finish_stores();
        const int span = step / kStepsOfSpan, group = span * kSpanColumns / group_size * kTile;
        const bool last = step + 1 == steps, in_place = last && outputs.in_place();
        pending.sums = &made, pending.row = 0, pending.rows = rows;
        if (span != 0) {
          pending.from = {sums.rows[0], 2 * kTile};
        } else {
          pending.from = outputs.in_place() ? outputs.start(row) : outputs.start(row, rows, sums);
        }
        pending.to = in_place ? outputs.place(row) : SumsAt<float>{sums.rows[0], 2 * kTile};
        for (int i = 0; i < 2; ++i) {
          const size_t at = ((static_cast<size_t>(2 * pair + i * both) * spans) + span) * kTile;
          pending.x_scales[i] = in.span_scales + at, pending.x_sums[i] = in.span_sums + at;
          pending.scales[i] = load(memory.scales[i].scale + group);
          if constexpr (kOffsets) pending.offsets[i] = load(memory.scales[i].offset + group);
        }
        pending.outputs = last && !in_place ? &outputs : nullptr;
        pending.output_row = row;
      }
    }
  }
  pending.finish();
}

template <class Codes>
inline void int8_tiles(const QuantizedMatrix& w, const QuantizedInput& in, int begin, int end, char* workspace) {
  const Tiles tiles;
  const Int8Workspace memory(w, in.rows, workspace);
  const auto multiply = [&](auto offsets) {
    for (int tile = begin; tile < end; tile += 2) {
      const int next = imin(tile + 1, w.tiles() - 1);
      multiply_bytes<decltype(offsets)::value != 0>(ByteFiller<Codes>(w, tile, memory.scales[0]), ByteFiller<Codes>(w, next, memory.scales[1]),
                                                    w.group_size, in, memory, PlainOutputs(w, tile));
    }
  };
  has_only_byte_bias<Codes>(w) ? multiply(Count<0>()) : multiply(Count<1>());
}

// The same tile of two matrices; all tiles of a span of the next product's x, since their columns share a scale.
template <class Codes>
inline void gated_int8_tiles(const QuantizedMatrix& gate, const QuantizedMatrix& up, Activation activation, const QuantizedInput& in,
                             const QuantizedInput& out, int begin, int end, char* workspace) {
  const Tiles tiles;
  const Int8Workspace memory(gate, in.rows, workspace);
  const auto multiply = [&](auto offsets) {
    for (int tile = begin; tile < end; ++tile) {
      multiply_bytes<decltype(offsets)::value != 0>(ByteFiller<Codes>(gate, tile, memory.scales[0]), ByteFiller<Codes>(up, tile, memory.scales[1]),
                                                    gate.group_size, in, memory,
                                                    GatedColumns(gate, up, activation, tile, memory.columns + (tile - begin) * kTile));
    }
  };
  has_only_byte_bias<Codes>(gate) && has_only_byte_bias<Codes>(up) ? multiply(Count<0>()) : multiply(Count<1>());
  const int first = begin * kTile;
  for (int row = 0; row < in.rows; ++row) {
    round_span(out, memory.columns + static_cast<size_t>(row) * kSpanColumns, out.size_in - first, row, first / kSpanColumns);
  }
}

}  // namespace

#endif  // __AMX_INT8__

#endif  // LLMJAX_INT8_TILES_H_
