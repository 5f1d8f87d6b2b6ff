// Panels of codes, as integers of 16 bits, for rows of x that are rounded to int16: where vectors multiply these at twice the rate of
// f32. Sums within a group of columns are exact; scales follow.

#ifndef LLMJAX_INT16_PANELS_H_
#define LLMJAX_INT16_PANELS_H_

#include "quantized_panels.h"

#if defined(LLMJAX_INT16_PANELS)

namespace {

constexpr int kPairsOfColumns = kChunk / 2;  // of a chunk
constexpr int kInt16Chunks = 20;             // of a panel at most: 20 KB, beside x and sums
constexpr int kRowsOfInt16 = kRegisters == 32 ? 8 : 4;  // whose sums are in registers

typedef int16_t Shorts __attribute__((vector_size(4 * kLanes)));
typedef uint16_t UnsignedShorts __attribute__((vector_size(4 * kLanes)));

// sum + the products of both pairs of each lane.
inline Int add_pairs(Int sum, Shorts codes, Shorts x) {
#if defined(__AVX512F__)
  return (Int)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)codes, (__m512i)x);
#elif defined(__AVXVNNI__)
  return (Int)_mm256_dpwssd_avx_epi32((__m256i)sum, (__m256i)codes, (__m256i)x);
#else
  return sum + (Int)_mm256_madd_epi16((__m256i)codes, (__m256i)x);
#endif
}

// Whether codes have no other offset than one whole number, which then is taken off them.
inline bool has_whole_zero(const QuantizedMatrix& w) {
  const float zero = w.zero * w.level_factor;
  return w.zeros.count == 0 && w.minima.count == 0 && zero >= -128 && zero <= 128 && zero == static_cast<float>(static_cast<int>(zero));
}

// Four codes of each lane as two pairs: columns 0 and 2, then 1 and 3, the order in which `round_to_int16` writes x.
template <class Codes>
inline void pair_codes(Bits codes, Shorts zero, Shorts* pairs) {
  const Shorts all = (Shorts)codes;
  pairs[0] = (Codes::kSigned ? (all << 8) >> 8 : all & 0xff) - zero;
  pairs[1] = (Codes::kSigned ? all >> 8 : (Shorts)((UnsignedShorts)all >> 8)) - zero;
}

// kRows rows of x, kChunk apart, with some columns of a panel's chunk [pairs][kParts]; adds to sums [kRows][kTileRows].
template <int kSegment, bool kOffsets, int kRows>
inline void multiply_int16(const Shorts* codes, const int16_t* x, const float* x_scale, const float* x_sum, const GroupCursor& group,
                           float* sums) {
  Int totals[kRows][kParts] = {};
#if defined(__AVX512F__)  // else GCC moves sums from register to register in each turn
#pragma GCC unroll 16
#else
#pragma GCC unroll 2
#endif
  for (int pair = 0; pair < kSegment / 2; ++pair) {
#pragma GCC unroll 8
    for (int m = 0; m < kRows; ++m) {
      int32_t two;
      std::memcpy(&two, x + m * kChunk + 2 * pair, sizeof(two));
      const Shorts factors = (Shorts)(Int{} + two);
#pragma GCC unroll 4
      for (int v = 0; v < kParts; ++v) totals[m][v] = add_pairs(totals[m][v], codes[pair * kParts + v], factors);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 4
    for (int v = 0; v < kParts; ++v) {
      float* const sum = sums + m * llmjax::kTileRows + v * kLanes;
      Vec all = load(sum);
      all += __builtin_convertvector(totals[m][v], Vec) * (splat(x_scale[m]) * load(group.scale + v * kLanes));
      if constexpr (kOffsets) all -= load(group.offset + v * kLanes) * splat(x_sum[m]);
      store(sum, all);
    }
  }
}

// Chunks of a tile's codes as pairs, [chunks][pairs][kParts]. Apart, so that it exists once for each kind of codes.
template <class Codes>
__attribute__((noinline)) void fill_int16(const uint32_t* words, const ByteTable& table, Shorts zero, int chunks, Shorts* to) {
  for (int c = 0; c < chunks; ++c, words += Codes::kBits * llmjax::kTileRows, to += kPairsOfColumns * kParts) {
    for (int v = 0; v < kParts; ++v) {
      Bits codes[kQuads];
      unpack_bytes<Codes>(words + v * kLanes, table, false, codes);
#pragma GCC unroll 8
      for (int q = 0; q < kQuads; ++q) {
        Shorts pairs[2];
        pair_codes<Codes>(codes[q], zero, pairs);
        to[2 * q * kParts + v] = pairs[0], to[(2 * q + 1) * kParts + v] = pairs[1];
      }
    }
  }
}

// Rows first .. first + passing of x with a panel of `count` columns from `begin` on: sums [passing][kTileRows]. Apart, so that it exists
// once for all codes.
template <int kSegment, bool kOffsets>
__attribute__((noinline)) void pass_int16(const QuantizedMatrix& w, const QuantizedInput& in, const GroupScales& scales, const Shorts* codes,
                                          int first, int passing, int begin, int count, float* to) {
  constexpr int kSegments = kChunk / kSegment;
  std::memset(to, 0, sizeof(float) * passing * llmjax::kTileRows);
  GroupCursor group(w, scales, 0, begin);
  for (int c = begin / kChunk; c < (begin + count + kChunk - 1) / kChunk; ++c) {
    const size_t at = (static_cast<size_t>(first / in.block) * in.chunks() + c) * in.block;
    for (int segment = 0; segment < kSegments; ++segment, codes += kSegment / 2 * kParts, group.advance(kSegment)) {
      const float* const sum = in.int16_sums + at * 3 + (kSegments == 2 ? segment : 2) * in.block;
      int m = 0;
      const auto next = [&](auto rows) {
        constexpr int kRows = decltype(rows)::value;
        multiply_int16<kSegment, kOffsets, kRows>(codes, in.int16 + (at + m) * kChunk + segment * kSegment, in.int16_scales + at + m,
                                                  sum + m, group, to + m * llmjax::kTileRows);
        m += kRows;
      };
      while (m + kRowsOfInt16 <= passing) next(Count<kRowsOfInt16>());
      while (m + 4 <= passing) next(Count<4>());
      if (m + 2 <= passing) next(Count<2>());
      if (m < passing) next(Count<1>());
    }
  }
}

// How `pass_int16` is called for the groups of a matrix.
using PassInt16 = decltype(&pass_int16<kChunk, true>);
inline PassInt16 pass_of(const QuantizedMatrix& w, bool offsets) {
  if (w.group_size % kChunk == 0) return offsets ? pass_int16<kChunk, true> : pass_int16<kChunk, false>;
  return offsets ? pass_int16<kChunk / 2, true> : pass_int16<kChunk / 2, false>;
}

template <class Codes>
inline void int16_panels(const QuantizedMatrix& w, const QuantizedInput& in, int begin, int end, char* workspace) {
  const GroupScales scales(w, workspace);
  const float factor = Codes::kMeaning == Meaning::kTable ? w.level_factor : 1;
  const ByteTable table(w, false);
  const bool offsets = !has_whole_zero(w);
  const int16_t whole_zero = offsets ? 0 : static_cast<int16_t>(w.zero * w.level_factor);
  const Shorts zero = Shorts{} + whole_zero;
  const PassInt16 pass = pass_of(w, offsets);
  const int chunks = in.chunks(), parts = (chunks + kInt16Chunks - 1) / kInt16Chunks;
  const int columns = (chunks + parts - 1) / parts * kChunk;
  alignas(64) Shorts panel[kInt16Chunks * kPairsOfColumns * kParts];
  alignas(64) float sums[llmjax::kTileRows * llmjax::kTileRows];
  for (int tile = begin; tile < end; ++tile) {
    read_scales(w, w.tile(tile), scales, factor, 0);
    const int output = tile * llmjax::kTileRows;
    const PanelOutputs outputs{w.bias, w.residual, w.y, w.size_out, output, imin(llmjax::kTileRows, w.size_out - output)};
    pass_by_panels(
        in.rows, llmjax::kTileRows, in.size_in, columns, llmjax::kTileRows, outputs, sums,
        [&](int column, int count) {
          const uint32_t* const words = w.tile(tile) + static_cast<size_t>(column / kChunk) * Codes::kBits * llmjax::kTileRows;
          fill_int16<Codes>(words, table, zero, (count + kChunk - 1) / kChunk, panel);
        },
        [&](int first, int passing, int column, int count, float* to) { pass(w, in, scales, panel, first, passing, column, count, to); });
  }
}

}  // namespace

#endif  // LLMJAX_INT16_PANELS

#endif  // LLMJAX_INT16_PANELS_H_
