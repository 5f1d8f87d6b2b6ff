// Products of more rows of x with tiles of quantised rows, in Intel's tile registers. Codes of 16 rows of the matrix
// become a panel first, once for all rows of x: bytes, whose products are scaled group by group; or dequantised bf16,
// whose products add up over all columns inside the registers.

#ifndef LLMJAX_QUANTIZED_TILES_H_
#define LLMJAX_QUANTIZED_TILES_H_

#include "quantized_vectors.h"

#if defined(__AMX_INT8__)

namespace {

constexpr int kPanelOfChunk = kChunk * llmjax::kTileRows;  // elements

// Lines of the next tile of words are fetched while this one is multiplied.
class NextTile {
 public:
  NextTile(const QuantizedMatrix& w, const uint32_t* words, int steps)
      : at_(reinterpret_cast<const char*>(words + static_cast<size_t>(w.num_words) * llmjax::kTileRows)),
        lines_((w.num_words + steps - 1) / steps) {}
  void fetch() {
    for (int i = 0; i < lines_; ++i, at_ += 64) __builtin_prefetch(at_, 0, 2);
  }

 private:
  const char* at_;
  int lines_;
};

// ---- int8 ----

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
  NextTile next(w, w.tile(tile), steps);
  Vec sums[kRows] = {};
  const auto multiply = [&](auto which, int step) {  // past the last step the last product is made again
    const int piece = imin(step, steps - 1) * kChunks;
    multiply_bytes<decltype(which)::value>(
        x + static_cast<size_t>(piece / kPerChunk) * block * kChunk + piece % kPerChunk * kColumns,
        panel + static_cast<size_t>(piece) * kColumns * llmjax::kTileRows,
        kChunks == 2 && piece + 1 < pieces ? block * kChunk : 0);
  };
  const auto multiply_all = [&](int step) {
    multiply(RowCount<0>(), step);
    multiply(RowCount<1>(), step + 1);
    int32_t(*to)[kRows * llmjax::kTileRows] = products + step % (2 * kBatch);
    store_products<0>(to[0]);
    store_products<1>(to[1]);
    finish_stores();
  };
  multiply_all(0);
  for (int step = 0; step < steps; ++step) {
    if (step % kBatch == 0 && step + kBatch < steps) multiply_all(step + kBatch);
    next.fetch();
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

// ---- bf16 ----

// Pairs of f32 as the bf16 halves of a lane, to nearest.
inline void store_pairs(uint32_t* to, Vec low, Vec high) {
  const Bits first = (bit_cast<Bits>(low) + 0x8000) >> 16, second = bit_cast<Bits>(high) + 0x8000;
  _mm512_store_si512(to, _mm512_mask_mov_epi16((__m512i)first, 0xaaaaaaaau, (__m512i)second));
}

template <class Codes>
inline void fill_bf16_panel(const QuantizedMatrix& w, const uint32_t* words, const GroupScales& scales, uint32_t* panel) {
  const FloatValues<Codes> values(w);
  GroupCursor group(w, scales, 0);
  for (int c = 0; c < w.chunks(); ++c, words += Codes::kBits * llmjax::kTileRows) {
    Bits codes[kQuads];
    unpack<Codes::kBits>(words, codes);
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const Vec scale = load(group.scale), offset = load(group.offset);
#pragma GCC unroll 4
      for (int q = half * kQuads / 2; q < (half + 1) * kQuads / 2; ++q, panel += 2 * llmjax::kTileRows) {
        const Bits four = codes[q];
        store_pairs(panel, values.template get<0>(four) * scale - offset, values.template get<1>(four) * scale - offset);
        store_pairs(panel + llmjax::kTileRows, values.template get<2>(four) * scale - offset,
                    values.template get<3>(four) * scale - offset);
      }
      group.advance(kChunk / 2);
    }
  }
}

inline void put_tile(const QuantizedMatrix& w, const QuantizedInput& in, const float* sums, int tile, int row) {
  for (int m = 0; m < imin(llmjax::kTileRows, in.rows - row); ++m) {
    put_outputs(w, tile, 0, row + m, load(sums + m * llmjax::kTileRows));
  }
}

// Whether tiles of sums may lie in y where they belong.
inline bool stores_tiles(const QuantizedMatrix& w, const QuantizedInput& in, int tiles_end, int rows_end) {
  return w.bias == nullptr && tiles_end * llmjax::kTileRows <= w.size_out && rows_end <= in.rows;
}

// Products take about four tile operations until they can be added to, so four sums grow side by side: two blocks of 16
// rows of x with two tiles of the matrix, or one with four.
inline void multiply_bf16_2x2(const QuantizedMatrix& w, const QuantizedInput& in, const uint32_t* panel, int tile, int row) {
  const int chunks = in.chunks();
  const size_t of_rows = static_cast<size_t>(chunks) * kPanelOfChunk;      // bf16
  const size_t of_tile = static_cast<size_t>(chunks) * kPanelOfChunk / 2;  // words
  const uint16_t* x = in.bf16 + row / llmjax::kTileRows * of_rows;
  const bool direct = stores_tiles(w, in, tile + 2, row + 2 * llmjax::kTileRows);
  const size_t at = static_cast<size_t>(row) * w.size_out + tile * llmjax::kTileRows;
  const size_t below = static_cast<size_t>(llmjax::kTileRows) * w.size_out;
  const long stride = 4L * w.size_out;
  if (direct && w.residual != nullptr) {
    const float* from = w.residual + at;
    _tile_loadd(0, from, stride);
    _tile_loadd(1, from + llmjax::kTileRows, stride);
    _tile_loadd(2, from + below, stride);
    _tile_loadd(3, from + below + llmjax::kTileRows, stride);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int c = 0; c < chunks; ++c, x += kPanelOfChunk, panel += kPanelOfChunk / 2) {
    _tile_loadd(4, x, 64);
    _tile_loadd(6, panel, 64);
    _tile_loadd(5, x + of_rows, 64);
    _tile_loadd(7, panel + of_tile, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  if (direct) {
    float* y = w.y + at;
    _tile_stored(0, y, stride);
    _tile_stored(1, y + llmjax::kTileRows, stride);
    _tile_stored(2, y + below, stride);
    _tile_stored(3, y + below + llmjax::kTileRows, stride);
    return;
  }
  alignas(64) float sums[4][kTile * kTile];
  _tile_stored(0, sums[0], 64);
  _tile_stored(1, sums[1], 64);
  _tile_stored(2, sums[2], 64);
  _tile_stored(3, sums[3], 64);
  finish_stores();
  for (int i = 0; i < 4; ++i) put_tile(w, in, sums[i], tile + i % 2, row + i / 2 * llmjax::kTileRows);
}

template <int kTiles>
inline void multiply_bf16_1x4(const QuantizedMatrix& w, const QuantizedInput& in, const uint32_t* panel, int tile, int row) {
  const int chunks = in.chunks();
  const size_t of_tile = static_cast<size_t>(chunks) * kPanelOfChunk / 2;
  const uint16_t* x = in.bf16 + row / llmjax::kTileRows * static_cast<size_t>(chunks) * kPanelOfChunk;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int c = 0; c < chunks; ++c, x += kPanelOfChunk, panel += kPanelOfChunk / 2) {
    _tile_loadd(4, x, 64);
    _tile_loadd(5, panel, 64);
    _tile_dpbf16ps(0, 4, 5);
    if constexpr (kTiles > 1) {
      _tile_loadd(6, panel + of_tile, 64);
      _tile_dpbf16ps(1, 4, 6);
    }
    if constexpr (kTiles > 2) {
      _tile_loadd(7, panel + 2 * of_tile, 64);
      _tile_dpbf16ps(2, 4, 7);
    }
    if constexpr (kTiles > 3) {
      _tile_loadd(5, panel + 3 * of_tile, 64);
      _tile_dpbf16ps(3, 4, 5);
    }
  }
  alignas(64) float sums[4][kTile * kTile];
  _tile_stored(0, sums[0], 64);
  _tile_stored(1, sums[1], 64);
  _tile_stored(2, sums[2], 64);
  _tile_stored(3, sums[3], 64);
  finish_stores();
  for (int i = 0; i < kTiles; ++i) put_tile(w, in, sums[i], tile + i, row);
}

inline void bf16_two_blocks(const QuantizedMatrix& w, const QuantizedInput& in, const uint32_t* panel, int begin, int end,
                            int row) {
  const size_t of_tile = static_cast<size_t>(w.chunks()) * kPanelOfChunk / 2;
  int tile = begin;
  for (; tile + 2 <= end; tile += 2, panel += 2 * of_tile) multiply_bf16_2x2(w, in, panel, tile, row);
  if (tile == end) return;
  multiply_bf16_1x4<1>(w, in, panel, tile, row);
  multiply_bf16_1x4<1>(w, in, panel, tile, row + llmjax::kTileRows);
}

inline void bf16_one_block(const QuantizedMatrix& w, const QuantizedInput& in, const uint32_t* panel, int begin, int end,
                           int row) {
  const size_t of_tile = static_cast<size_t>(w.chunks()) * kPanelOfChunk / 2;
  for (int tile = begin; tile < end; tile += 4, panel += 4 * of_tile) {
    switch (end - tile) {
      case 1: multiply_bf16_1x4<1>(w, in, panel, tile, row); break;
      case 2: multiply_bf16_1x4<2>(w, in, panel, tile, row); break;
      case 3: multiply_bf16_1x4<3>(w, in, panel, tile, row); break;
      default: multiply_bf16_1x4<4>(w, in, panel, tile, row); break;
    }
  }
}

inline size_t bf16_panel_bytes(const QuantizedMatrix& w, int tiles) {
  return static_cast<size_t>(tiles) * w.chunks() * kPanelOfChunk * 2;
}

template <class Codes>
inline void bf16_tiles(const QuantizedMatrix& w, const QuantizedInput& in, int begin, int end, char* workspace) {
  uint32_t* panel = reinterpret_cast<uint32_t*>(workspace);
  const GroupScales scales(w, workspace + bf16_panel_bytes(w, end - begin));
  for (int tile = begin; tile < end; ++tile) {
    const uint32_t* words = w.tile(tile);
    read_scales(w, words, scales, 1, 0);
    fill_bf16_panel<Codes>(w, words, scales, panel + (tile - begin) * bf16_panel_bytes(w, 1) / 4);
  }
  finish_stores();
  const Tiles tiles;
  int row = 0;
  for (; row + llmjax::kTileRows < in.rows; row += 2 * llmjax::kTileRows) {
    bf16_two_blocks(w, in, panel, begin, end, row);
  }
  if (row < in.rows) bf16_one_block(w, in, panel, begin, end, row);
}

}  // namespace

#endif  // __AMX_INT8__

#endif  // LLMJAX_QUANTIZED_TILES_H_
