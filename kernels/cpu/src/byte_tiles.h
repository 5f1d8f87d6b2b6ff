// Products of 5 to 16 rows of x with tiles of quantized rows, in bytes on Intel's tile registers. Codes of 16 rows of the
// matrix become a panel of bytes, whose products are scaled group by group in vectors.

#ifndef LLMJAX_BYTE_TILES_H_
#define LLMJAX_BYTE_TILES_H_

#include "quantized_vectors.h"

#if defined(__AMX_INT8__)

#include "amx.h"

namespace {

constexpr int kPanelOfChunk = kChunk * llmjax::kTileRows;  // elements

// Tile registers for kRows rows of x and kColumns columns; 0 to 3 hold products, 4 and 5 x, 6 and 7 codes.
template <int kRows, int kColumns>
class ByteTiles {
 public:
  ByteTiles() {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, kColumns, kColumns, 64, 64};
      uint8_t rows[16] = {kRows, kRows, kRows, kRows, kRows, kRows, kColumns / 4, kColumns / 4};
    } config;
    __asm__ volatile("" ::: "memory");
    _tile_loadconfig(&config);
  }
  ~ByteTiles() { _tile_release(); }
  ByteTiles(const ByteTiles&) = delete;
  ByteTiles& operator=(const ByteTiles&) = delete;
};

// How unsigned codes become signed bytes without an offset: by the matrix's zero point.
inline int byte_bias(const QuantizedMatrix& w) {
  const int zero = static_cast<int>(w.zero);
  return w.num_levels == 0 && w.kind == CodeKind::kUint && zero >= 0 && zero <= 128 && zero == w.zero ? zero : 0;
}
inline bool has_offsets(const QuantizedMatrix& w) {
  return w.zeros.count != 0 || w.minima.count != 0 || byte_bias(w) != w.zero;
}

template <class Codes>
inline void fill_byte_panel(const QuantizedMatrix& w, const uint32_t* words, char* panel) {
  const ByteTable table(w, false);
  const __m512i bias = _mm512_set1_epi8(static_cast<char>(byte_bias(w)));
  for (int c = 0; c < w.chunks(); ++c, words += Codes::kBits * llmjax::kTileRows) {
    Bits codes[kQuads];
    unpack_bytes<Codes>(words, table, false, codes);
#pragma GCC unroll 8
    for (int q = 0; q < kQuads; ++q, panel += 64) {
      _mm512_store_si512(panel, _mm512_sub_epi8((__m512i)codes[q], bias));
    }
  }
}

// Products under way while those before are scaled. Both together are 4 KB, so that no load seems to hit a store.
constexpr int kBatch = 2;

// Register kWhich = x * codes; `next_x` not 0: and the same of the chunk after it. `store_bytes` brings it to memory.
// Registers are part of the names of instructions.
template <int kWhich>
void multiply_bytes(const int8_t* x, const char* codes, int next_x);
template <int kWhich>
void store_products(int32_t* to);

#define LLMJAX_MULTIPLY_BYTES(which, tile, x_tile, codes_tile)                            \
  template <>                                                                             \
  inline void multiply_bytes<which>(const int8_t* x, const char* codes, int next_x) {     \
    _tile_zero(tile);                                                                     \
    _tile_loadd(x_tile, x, kChunk);                                                       \
    _tile_loadd(codes_tile, codes, 64);                                                   \
    _tile_dpbssd(tile, x_tile, codes_tile);                                               \
    if (next_x != 0) {                                                                    \
      _tile_loadd(x_tile, x + next_x, kChunk);                                            \
      _tile_loadd(codes_tile, codes + kPanelOfChunk, 64);                                 \
      _tile_dpbssd(tile, x_tile, codes_tile);                                             \
    }                                                                                     \
  }                                                                                       \
  template <>                                                                             \
  inline void store_products<which>(int32_t* to) {                                        \
    _tile_stored(tile, to, 64);                                                           \
  }
LLMJAX_MULTIPLY_BYTES(0, 0, 4, 6)
LLMJAX_MULTIPLY_BYTES(1, 1, 5, 7)
#undef LLMJAX_MULTIPLY_BYTES

// One tile with kRows rows of x. A step is kSegment columns: half a chunk, a chunk or two.
template <int kSegment, int kRows, bool kOffsets>
inline void multiply_byte_panel(const QuantizedMatrix& w, const QuantizedInput& in, const char* panel,
                                const GroupScales& scales, int tile, int row) {
  constexpr int kColumns = kSegment < kChunk ? kSegment : kChunk, kPerChunk = kChunk / kColumns;
  constexpr int kChunks = kSegment > kChunk ? kSegment / kChunk : 1;  // of a step
  const int chunks = in.chunks(), block = in.block, pieces = chunks * kPerChunk;
  const int steps = (pieces + kChunks - 1) / kChunks;
  const size_t at = static_cast<size_t>(row / block) * chunks * block + row % block;
  const int8_t* x = in.bytes + at * kChunk;
  const float* x_scale = in.byte_scales + at;
  const float* x_sum = in.byte_sums + static_cast<size_t>(row / block) * chunks * 3 * block + row % block;
  alignas(64) int32_t products[2 * kBatch][kRows * llmjax::kTileRows];
  GroupCursor group(w, scales, 0);
  TileFetch fetch(w, w.tile(tile), 1, steps);
  Vec sums[kRows] = {};
  const auto multiply = [&](auto which, int step) {  // past the last step the last product is made again
    const int piece = imin(step, steps - 1) * kChunks;
    multiply_bytes<decltype(which)::value>(
        x + static_cast<size_t>(piece / kPerChunk) * block * kChunk + piece % kPerChunk * kColumns,
        panel + static_cast<size_t>(piece) * kColumns * llmjax::kTileRows,
        kChunks == 2 && piece + 1 < pieces ? block * kChunk : 0);
  };
  const auto multiply_all = [&](int step) {
    multiply(Count<0>(), step);
    multiply(Count<1>(), step + 1);
    int32_t(*to)[kRows * llmjax::kTileRows] = products + step % (2 * kBatch);
    store_products<0>(to[0]);
    store_products<1>(to[1]);
    finish_stores();
  };
  multiply_all(0);
  for (int step = 0; step < steps; ++step) {
    if (step % kBatch == 0 && step + kBatch < steps) multiply_all(step + kBatch);
    fetch.next<1>();
    const int piece = step * kChunks, chunk = piece / kPerChunk;
    const int32_t* from = products[step % (2 * kBatch)];
    const float* scale_of = x_scale + static_cast<size_t>(chunk) * block;
    const float* sum_of = x_sum + (static_cast<size_t>(chunk) * 3 + (kPerChunk == 2 ? piece % 2 : 2)) * block;
    const bool second = kChunks == 2 && piece + 1 < pieces;
    const Vec scale = load(group.scale), offset = load(group.offset);
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) {
      const Vec product = __builtin_convertvector(load_as<Int>(from + m * llmjax::kTileRows), Vec);
      sums[m] += product * splat(scale_of[m]) * scale;
      if constexpr (kOffsets) sums[m] -= offset * splat(second ? sum_of[m] + sum_of[3 * block + m] : sum_of[m]);
    }
    group.advance(kSegment);
  }
#pragma GCC unroll 16
  for (int m = 0; m < kRows; ++m) {  // unrolled, or the sums could not live in registers
    if (row + m < in.rows) put_outputs(w, tile, 0, row + m, sums[m]);
  }
}

template <int kSegment, int kRows>
inline void byte_tile_rows(const QuantizedMatrix& w, const QuantizedInput& in, const char* panel,
                           const GroupScales& scales, int tile, int row) {
  const ByteTiles<kRows, (kSegment < kChunk ? kSegment : kChunk)> tiles;
  if (has_offsets(w)) {
    multiply_byte_panel<kSegment, kRows, true>(w, in, panel, scales, tile, row);
  } else {
    multiply_byte_panel<kSegment, kRows, false>(w, in, panel, scales, tile, row);
  }
}

template <int kSegment>
inline void byte_tile(const QuantizedMatrix& w, const QuantizedInput& in, const char* panel, const GroupScales& scales,
                      int tile) {
  for (int row = 0; row < in.rows;) {
    if (in.rows - row > 8) {
      byte_tile_rows<kSegment, 16>(w, in, panel, scales, tile, row);
      row += 16;
    } else {
      byte_tile_rows<kSegment, 8>(w, in, panel, scales, tile, row);
      row += 8;
    }
  }
}

inline size_t byte_panel_bytes(const QuantizedMatrix& w) { return static_cast<size_t>(w.chunks()) * kPanelOfChunk; }

template <class Codes>
inline void byte_tiles(const QuantizedMatrix& w, const QuantizedInput& in, int begin, int end, char* workspace) {
  char* panel = workspace;
  const GroupScales scales(w, workspace + byte_panel_bytes(w));
  for (int tile = begin; tile < end; ++tile) {
    const uint32_t* words = w.tile(tile);
    read_scales(w, words, scales, Codes::kMeaning == Meaning::kTable ? w.level_factor : 1, -byte_bias(w));
    fill_byte_panel<Codes>(w, words, panel);
    finish_stores();
    if (w.group_size % (2 * kChunk) == 0 && in.round_columns == 2 * kChunk) {
      byte_tile<2 * kChunk>(w, in, panel, scales, tile);
    } else if (w.group_size % kChunk == 0) {
      byte_tile<kChunk>(w, in, panel, scales, tile);
    } else {
      byte_tile<kChunk / 2>(w, in, panel, scales, tile);
    }
  }
}

}  // namespace

#endif  // __AMX_INT8__

#endif  // LLMJAX_BYTE_TILES_H_
