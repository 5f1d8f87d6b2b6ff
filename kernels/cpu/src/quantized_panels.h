// Panels of dequantized rows (`pass_by_panels`), in f32 or bf16.

#ifndef LLMJAX_QUANTIZED_PANELS_H_
#define LLMJAX_QUANTIZED_PANELS_H_

#include "float_panels.h"
#include "quantized_vectors.h"

namespace {

constexpr int kPanelTiles = kPanelOutputs / llmjax::kTileRows;
static_assert(kPanelColumns % kChunk == 0, "panels hold whole chunks");

inline size_t panel_scale_bytes(const QuantizedMatrix& w) { return kPanelTiles * GroupScales::bytes(w); }

// Goes over columns begin..begin + count of some rows of a tile, from `part` on: put(scale, offset, codes) for four columns
// at a time, of which `get` of FloatValues takes the numbers. `begin` is a multiple of kChunk.
template <class Codes, class Put>
inline void each_quad(const QuantizedMatrix& w, int tile, int part, const GroupScales& scales, int begin, int count, const Put& put) {
  const uint32_t* words = w.tile(tile) + static_cast<size_t>(begin / kChunk) * Codes::kBits * llmjax::kTileRows + part;
  GroupCursor group(w, scales, part, begin);
  for (int column = 0; column < count; column += kChunk, words += Codes::kBits * llmjax::kTileRows) {
    Bits codes[kQuads];
    unpack<Codes::kBits, FloatValues<Codes>::kMasked>(words, codes);
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const Vec scale = load(group.scale), offset = load(group.offset);
#pragma GCC unroll 4
      for (int q = half * kQuads / 2; q < (half + 1) * kQuads / 2; ++q) put(scale, offset, codes[q]);
      group.advance(kChunk / 2);
    }
  }
}

// Outputs of tiles begin..end, a panel of them after the other: multiply(outputs, for_parts), where for_parts(body) calls
// body(tile, part, scales, its outputs' place in the panel).
template <class Multiply>
inline void each_panel(const QuantizedMatrix& w, int begin, int end, char* workspace, const Multiply& multiply) {
  for (int first = begin; first < end; first += kPanelTiles) {
    const int tiles = imin(kPanelTiles, end - first), output = first * llmjax::kTileRows;
    const auto scales = [&](int tile) { return GroupScales(w, workspace + tile * GroupScales::bytes(w)); };
    for (int i = 0; i < tiles; ++i) read_scales(w, w.tile(first + i), scales(i), 1, 0);
    const PanelOutputs outputs{w.bias, w.residual, w.y, w.size_out, output, imin(tiles * llmjax::kTileRows, w.size_out - output)};
    multiply(outputs, [&](const auto& body) {
      for (int i = 0; i < tiles; ++i) {
        for (int part = 0; part < llmjax::kTileRows; part += kLanes) body(first + i, part, scales(i), i * llmjax::kTileRows + part);
      }
    });
  }
}

// Panels have room for whole chunks; columns behind the last one are not multiplied.
template <class Codes>
inline void float_panels(const QuantizedMatrix& w, const QuantizedInput& in, int begin, int end, char* workspace) {
  const FloatValues<Codes> values(w);
  each_panel(w, begin, end, workspace, [&](const PanelOutputs& outputs, const auto& for_parts) {
    multiply_panels(in.x, in.rows, in.size_in, outputs, [&](float* panel, int column, int count) {
      for_parts([&](int tile, int part, const GroupScales& scales, int place) {
        float* to = panel + place;
        each_quad<Codes>(w, tile, part, scales, column, count, [&](Vec scale, Vec offset, Bits four) {
          store(to, values.template get<0>(four) * scale - offset);
          store(to + kPanelOutputs, values.template get<1>(four) * scale - offset);
          store(to + 2 * kPanelOutputs, values.template get<2>(four) * scale - offset);
          store(to + 3 * kPanelOutputs, values.template get<3>(four) * scale - offset);
          to += 4 * kPanelOutputs;
        });
      });
    });
  });
}

#if defined(__AVX512BF16__)

// Rounding costs as much as all else of a weight, so weights grow by three quarters of half a bf16 step, on average over
// mantissas, and lose what bf16 lacks: numbers that bf16 has stay what they are, errors have mean 0 and are 5 % larger
// than to nearest (root mean square).
constexpr float kGrowth = 1 + 0.7213f / 256;

// The upper halves of f32 as the bf16 halves of a lane.
inline void store_pairs(uint32_t* to, Vec low, Vec high) {
  const __m512i upper = _mm512_set4_epi32(0x0f0e0f0e, 0x0b0a0b0a, 0x07060706, 0x03020302);
  _mm512_store_si512(to, _mm512_mask_shuffle_epi8((__m512i)high, 0x3333333333333333u, (__m512i)low, upper));
}

// The code that begins with bit kAt of a word as a weight. It becomes f32 where it is, in the mantissa of the power of two
// whose lowest bits count what its own do.
template <class Codes, int kAt>
inline Vec weight_at(Bits word, Vec scale, Vec offset) {
  constexpr uint32_t kMask = ((1u << Codes::kBits) - 1) << kAt, kSign = Codes::kSigned ? 1u << (Codes::kBits - 1) : 0;
  constexpr float kAbove = static_cast<float>((1u << (23 - kAt)) + kSign);
  const __m512i mask = _mm512_set1_epi32(kMask), power = _mm512_set1_epi32((127 + 23 - kAt) << 23 | kSign << kAt);
  const Vec number = (Vec)_mm512_ternarylogic_epi32((__m512i)word, mask, power, 0x6a);  // (word & mask) ^ power
  return number * scale - (offset + scale * splat(kAbove));
}

// A chunk of 16 rows as pairs of columns, kStep words from each to the next.
template <class Codes, int kStep>
inline void fill_pairs(const uint32_t* words, const FloatValues<Codes>& values, GroupCursor& group, uint32_t* to) {
  constexpr int kHalf = kQuads / 2;
  constexpr bool kWhole = Codes::kMeaning == Meaning::kUint || Codes::kMeaning == Meaning::kInt;
  const auto put = [&](int q, Vec first, Vec second, Vec third, Vec fourth) {
    store_pairs(to + 2 * q * kStep, first, second);
    store_pairs(to + (2 * q + 1) * kStep, third, fourth);
  };
  Vec scales[2], offsets[2];
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
    scales[half] = load(group.scale) * splat(kGrowth), offsets[half] = load(group.offset) * splat(kGrowth);
    group.advance(kChunk / 2);
  }
  if constexpr (kWhole && Codes::kBits == 4) {
#pragma GCC unroll 4
    for (int q = 0; q < kHalf; ++q) {
      const Bits word = load_as<Bits>(words + q * llmjax::kTileRows), lower = word << 12, upper = word >> 12;
      put(q, weight_at<Codes, 12>(lower, scales[0], offsets[0]), weight_at<Codes, 8>(word, scales[0], offsets[0]),
          weight_at<Codes, 16>(word, scales[0], offsets[0]), weight_at<Codes, 12>(upper, scales[0], offsets[0]));
      put(q + kHalf, weight_at<Codes, 16>(lower, scales[1], offsets[1]), weight_at<Codes, 12>(word, scales[1], offsets[1]),
          weight_at<Codes, 8>(upper, scales[1], offsets[1]), weight_at<Codes, 16>(upper, scales[1], offsets[1]));
    }
  } else {
    Bits codes[kQuads];
    unpack<Codes::kBits, !kWhole && FloatValues<Codes>::kMasked>(words, codes);
#pragma GCC unroll 8
    for (int q = 0; q < kQuads; ++q) {
      const Bits four = codes[q];
      const Vec scale = scales[q / kHalf], offset = offsets[q / kHalf];
      if constexpr (!kWhole) {
        put(q, values.template get<0>(four) * scale - offset, values.template get<1>(four) * scale - offset,
            values.template get<2>(four) * scale - offset, values.template get<3>(four) * scale - offset);
      } else if constexpr (Codes::kBits == 8) {
        put(q, weight_at<Codes, 8>(four << 8, scale, offset), weight_at<Codes, 8>(four, scale, offset),
            weight_at<Codes, 8>(four >> 8, scale, offset), weight_at<Codes, 8>(four >> 16, scale, offset));
      } else {
        put(q, weight_at<Codes, 16>(four << 16, scale, offset), weight_at<Codes, 8>(four, scale, offset),
            weight_at<Codes, 16>(four, scale, offset), weight_at<Codes, 16>(four >> 8, scale, offset));
      }
    }
  }
}

constexpr int kPanelPairs = 96;  // of columns: 24 KB, beside 6 KB of x
constexpr int kPairsOfChunk = kChunk / 2;

// Rows of x [chunks][16 rows][kChunk] with a panel [pairs][kPanelOutputs]: sums [kRows][kPanelOutputs].
template <int kRows>
inline void multiply_pairs(const uint16_t* x, const uint32_t* panel, int chunks, float* sums) {
  __m512 partial[kRows][kPanelVectors] = {};
  for (int c = 0; c < chunks; ++c, x += kChunk * llmjax::kTileRows) {
    for (int pair = 0; pair < kPairsOfChunk; ++pair, panel += kPanelOutputs) {
      __m512bh w[kPanelVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kPanelVectors; ++v) w[v] = (__m512bh)_mm512_load_si512(panel + v * kLanes);
#pragma GCC unroll 8
      for (int m = 0; m < kRows; ++m) {
        int32_t both;
        std::memcpy(&both, x + m * kChunk + 2 * pair, sizeof(both));
        const __m512bh factors = (__m512bh)_mm512_set1_epi32(both);
#pragma GCC unroll 4
        for (int v = 0; v < kPanelVectors; ++v) partial[m][v] = _mm512_dpbf16_ps(partial[m][v], factors, w[v]);
      }
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 4
    for (int v = 0; v < kPanelVectors; ++v) store(sums + m * kPanelOutputs + v * kLanes, (Vec)partial[m][v]);
  }
}

// x and weights in bf16. Where columns end within a chunk, x is zero behind them.
template <class Codes>
inline void bf16_panels(const QuantizedMatrix& w, const QuantizedInput& in, int begin, int end, char* workspace) {
  const FloatValues<Codes> values(w);
  alignas(64) uint32_t panel[kPanelPairs * kPanelOutputs];
  alignas(64) float sums[llmjax::kTileRows * kPanelOutputs];
  const size_t of_block = static_cast<size_t>(in.chunks()) * kChunk * llmjax::kTileRows;
  const auto pass = [&](int m, int passing, int column, int count, float* to) {
    const uint16_t* x = in.bf16 + m / llmjax::kTileRows * of_block + static_cast<size_t>(column) * llmjax::kTileRows;
    const int chunks = (count + kChunk - 1) / kChunk;
    int row = 0;
    const auto next = [&](auto rows) {
      multiply_pairs<decltype(rows)::value>(x + row * kChunk, panel, chunks, to + row * kPanelOutputs);
      row += decltype(rows)::value;
    };
    while (row + 6 <= passing) next(Count<6>());
    if (row + 4 <= passing) next(Count<4>());
    if (row + 2 <= passing) next(Count<2>());
    if (row < passing) next(Count<1>());
  };
  each_panel(w, begin, end, workspace, [&](const PanelOutputs& outputs, const auto& for_parts) {
    const auto fill = [&](int column, int count) {
      for_parts([&](int tile, int part, const GroupScales& scales, int place) {
        uint32_t* to = panel + place;
        const uint32_t* words = w.tile(tile) + static_cast<size_t>(column / kChunk) * Codes::kBits * llmjax::kTileRows;
        GroupCursor group(w, scales, part, column);
        for (int c = 0; c < count; c += kChunk, words += Codes::kBits * llmjax::kTileRows, to += kPairsOfChunk * kPanelOutputs) {
          fill_pairs<Codes, kPanelOutputs>(words, values, group, to);
        }
      });
    };
    pass_by_panels(in.rows, llmjax::kTileRows, in.size_in, 2 * kPanelPairs, kPanelOutputs, outputs, sums, fill, pass);
  });
}

#endif  // __AVX512BF16__

}  // namespace

#endif  // LLMJAX_QUANTIZED_PANELS_H_
