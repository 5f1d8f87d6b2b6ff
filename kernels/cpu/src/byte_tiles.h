// Products of 5 to 16 rows of x with tiles of quantized rows, in bytes on Intel's tile registers. Codes of 16 rows of the
// matrix become bytes some chunks ahead of the tile unit, and its products are scaled group by group in vectors while it makes the
// next ones.

#ifndef LLMJAX_BYTE_TILES_H_
#define LLMJAX_BYTE_TILES_H_

#include "quantized_vectors.h"

#if defined(__AMX_INT8__)

#include "amx.h"

namespace {

constexpr int kBytesOfChunk = kChunk * llmjax::kTileRows;  // of 16 rows of the matrix, or of x

// Tile registers for kRows rows of x and kColumns columns; 0 and 1 hold products, 4 and 5 x, 6 and 7 codes.
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

// Unsigned codes whose zero point is in their middle become signed bytes without it.
inline bool is_centered(const QuantizedMatrix& w) {
  return w.num_levels == 0 && w.kind == CodeKind::kUint && w.zero == static_cast<float>(1 << (w.bits - 1));
}
inline bool has_offsets(const QuantizedMatrix& w) {
  return w.zeros.count != 0 || w.minima.count != 0 || (w.zero != 0 && !is_centered(w));
}

// How many times a code its byte is.
template <class Codes, bool kCentered>
constexpr int byte_factor() {
  return kCentered && Codes::kBits == 4 ? 16 : 1;
}

// A chunk of codes as signed bytes, those of 4 bits in the upper half of theirs, where the sign is.
template <class Codes, bool kCentered>
inline void fill_bytes(const uint32_t* words, const ByteTable& table, char* to) {
  if constexpr (kCentered && Codes::kBits == 4) {
#pragma GCC unroll 4
    for (int q = 0; q < kQuads / 2; ++q) {
      const Bits word = load_as<Bits>(words + q * llmjax::kTileRows);
      _mm512_store_si512(to + q * 64, (__m512i)(((word << 4) & 0xf0f0f0f0u) ^ 0x80808080u));
      _mm512_store_si512(to + (q + kQuads / 2) * 64, (__m512i)((word & 0xf0f0f0f0u) ^ 0x80808080u));
    }
  } else {
    const __m512i middle = _mm512_set1_epi8(static_cast<char>(1 << (Codes::kBits - 1)));
    Bits codes[kQuads];
    unpack_bytes<Codes>(words, table, false, codes);
#pragma GCC unroll 8
    for (int q = 0; q < kQuads; ++q) {
      _mm512_store_si512(to + q * 64, kCentered ? _mm512_sub_epi8((__m512i)codes[q], middle) : (__m512i)codes[q]);
    }
  }
}

// One tile with kRows rows of x. A step makes a product of kSegment columns, or two of halves of a chunk, a batch two
// products. While those of a batch are scaled, the tile unit multiplies the next one and the codes of the one after it become bytes:
// products and bytes lie in halves of 4 KB by turns, so that no load seems to hit a store.
template <class Codes, int kSegment, int kRows, bool kOffsets, bool kCentered>
inline void byte_tile(const QuantizedMatrix& w, const QuantizedInput& in, const ByteTable& table, char* memory,
                      const GroupScales& scales, int tile, int row) {
  constexpr int kHalves = kSegment < kChunk ? 2 : 1, kChunks = kSegment > kChunk ? 2 : 1;  // of a step
  constexpr int kSteps = 2 / kHalves;                                                     // of a batch
  constexpr int kTurn = 2048, kProduct = kTurn / 2;
  constexpr int kBlock = llmjax::kTileRows;
  const int chunks = in.chunks(), steps = (chunks + kChunks - 1) / kChunks;
  const size_t at = static_cast<size_t>(row) * chunks;
  const int8_t* const x = in.bytes + at * kChunk;
  const float *x_scale = in.byte_scales + at, *x_sum = in.byte_sums + at * 3;
  char *const products = memory, *const codes = memory + 2 * kTurn;
  const uint32_t* words = w.tile(tile);
  const size_t next_tile = static_cast<size_t>(w.num_words) * llmjax::kTileRows;
  int filled = 0, multiplied = 0;  // chunks

  const auto fill = [&](int turn) {
#pragma GCC unroll 4
    for (int i = 0; i < kSteps * kChunks; ++i, ++filled) {
      char* const to = codes + turn + i * kBytesOfChunk;
      if (filled < chunks) {
#pragma GCC unroll 8
        for (int q = 0; q < Codes::kBits; ++q) __builtin_prefetch(words + next_tile + q * llmjax::kTileRows, 0, 2);
        fill_bytes<Codes, kCentered>(words, table, to);
        words += Codes::kBits * llmjax::kTileRows;
      } else if (kChunks == 2) {  // the other half of a step
        std::memset(to, 0, kBytesOfChunk);
      }
    }
  };
  const auto multiply = [&](int turn, int to) {  // what lies behind the last chunk is multiplied for nothing
    const auto x_of = [&](int i) { return x + static_cast<size_t>(imin(multiplied + i, chunks - 1)) * kBytesOfChunk; };
    const char* const from = codes + turn;
    finish_stores();
    _tile_zero(0);
    _tile_loadd(4, x_of(0), kChunk);
    _tile_loadd(6, from, 64);
    _tile_dpbssd(0, 4, 6);
    if constexpr (kChunks == 2) {
      _tile_loadd(4, x_of(1), kChunk);
      _tile_loadd(6, from + kBytesOfChunk, 64);
      _tile_dpbssd(0, 4, 6);
    }
    _tile_zero(1);
    _tile_loadd(5, kHalves == 2 ? x_of(0) + kSegment : x_of(kChunks), kChunk);
    _tile_loadd(7, from + (kHalves == 2 ? kBytesOfChunk / 2 : kChunks * kBytesOfChunk), 64);
    _tile_dpbssd(1, 5, 7);
    if constexpr (kChunks == 2) {
      _tile_loadd(5, x_of(3), kChunk);
      _tile_loadd(7, from + 3 * kBytesOfChunk, 64);
      _tile_dpbssd(1, 5, 7);
    }
    _tile_stored(0, products + to, 64);
    _tile_stored(1, products + to + kProduct, 64);
    finish_stores();
    multiplied += kSteps * kChunks;
  };

  GroupCursor group(w, scales, 0);
  Vec sums[kRows] = {};
  const auto scale_step = [&](const char* from, bool second) {
    const Vec scale = load(group.scale), offset = load(group.offset);
    group.advance(kSegment);
    const auto number = [&](int m) { return __builtin_convertvector(load_as<Int>(from + m * 64), Vec); };
    if constexpr (kHalves == 1) {
      const float* const sum = x_sum + 2 * kBlock;
#pragma GCC unroll 16
      for (int m = 0; m < kRows; ++m) {
        sums[m] += number(m) * splat(x_scale[m]) * scale;
        if constexpr (kOffsets) sums[m] -= offset * splat(kChunks == 2 && second ? sum[m] + sum[3 * kBlock + m] : sum[m]);
      }
    } else {
      const Vec scale_of_rest = load(group.scale), offset_of_rest = load(group.offset);
      group.advance(kSegment);
#pragma GCC unroll 16
      for (int m = 0; m < kRows; ++m) {
        const Vec rest = __builtin_convertvector(load_as<Int>(from + kProduct + m * 64), Vec);
        sums[m] += (number(m) * scale + rest * scale_of_rest) * splat(x_scale[m]);
        if constexpr (kOffsets) sums[m] -= offset * splat(x_sum[m]) + offset_of_rest * splat(x_sum[kBlock + m]);
      }
    }
    x_scale += kChunks * kBlock;
    x_sum += kChunks * 3 * kBlock;
  };

  fill(kTurn);
  multiply(kTurn, 0);
  fill(0);
  for (int step = 0, turn = 0; step < steps; step += kSteps, turn = kTurn - turn) {
    multiply(turn, kTurn - turn);
    fill(kTurn - turn);
#pragma GCC unroll 1
    for (int i = 0; i < kSteps && step + i < steps; ++i) {
      scale_step(products + turn + i * kProduct, (step + i) * kChunks + 1 < chunks);
    }
  }

  const int output = tile * llmjax::kTileRows, rows = in.rows - row;
  if (output + llmjax::kTileRows > w.size_out) {
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) {  // unrolled, or the sums could not live in registers
      if (m < rows) put_last_outputs(w, output, static_cast<size_t>(row + m) * w.size_out + output, sums[m]);
    }
    return;
  }
  const Vec bias = w.bias == nullptr ? Vec{} : load(w.bias + output);
#pragma GCC unroll 16
  for (int m = 0; m < kRows; ++m) {
    if (m >= rows) break;
    const size_t to = static_cast<size_t>(row + m) * w.size_out + output;
    const Vec sum = sums[m] + bias;
    store(w.y + to, w.residual == nullptr ? sum : sum + load(w.residual + to));
  }
}

constexpr size_t kBytesOfTurns = 8192;  // products and bytes

// Blocks of x are of 16 rows.
template <class Codes>
inline void byte_tiles(const QuantizedMatrix& w, const QuantizedInput& in, int begin, int end, char* workspace) {
  const GroupScales scales(w, workspace + kBytesOfTurns);
  const ByteTable table(w, false);
  const auto multiply_rows = [&](auto segment, auto rows, auto offsets, auto centered) {
    constexpr int kSegment = decltype(segment)::value, kRows = decltype(rows)::value;
    constexpr bool kOffsets = decltype(offsets)::value != 0, kCentered = decltype(centered)::value != 0;
    constexpr float kFactor = byte_factor<Codes, kCentered>();
    const float bias = kCentered ? -kFactor * (1 << (Codes::kBits - 1)) : 0;
    const ByteTiles<kRows, (kSegment < kChunk ? kSegment : kChunk)> tiles;
    for (int tile = begin; tile < end; ++tile) {
      read_scales(w, w.tile(tile), scales, Codes::kMeaning == Meaning::kTable ? w.level_factor : kFactor, bias);
      for (int row = 0; row < in.rows; row += llmjax::kTileRows) {
        byte_tile<Codes, kSegment, kRows, kOffsets, kCentered>(w, in, table, workspace, scales, tile, row);
      }
    }
  };
  const auto multiply = [&](auto segment, auto offsets, auto centered) {
    in.rows <= 8 ? multiply_rows(segment, Count<8>(), offsets, centered) : multiply_rows(segment, Count<16>(), offsets, centered);
  };
  const auto in_segments = [&](auto segment) {
    if constexpr (!Codes::kSigned) {
      if (is_centered(w)) {
        return has_offsets(w) ? multiply(segment, Count<1>(), Count<1>()) : multiply(segment, Count<0>(), Count<1>());
      }
    }
    has_offsets(w) ? multiply(segment, Count<1>(), Count<0>()) : multiply(segment, Count<0>(), Count<0>());
  };
  if (w.group_size % (2 * kChunk) == 0 && in.round_columns == 2 * kChunk) return in_segments(Count<2 * kChunk>());
  w.group_size % kChunk == 0 ? in_segments(Count<kChunk>()) : in_segments(Count<kChunk / 2>());
}

}  // namespace

#endif  // __AMX_INT8__

#endif  // LLMJAX_BYTE_TILES_H_
