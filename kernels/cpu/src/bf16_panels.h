// Panels of dequantized rows (`pass_by_panels`), in bf16.

#ifndef LLMJAX_BF16_PANELS_H_
#define LLMJAX_BF16_PANELS_H_

#include "bf16_pairs.h"
#include "quantized_panels.h"

namespace {

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

// x and weights in bf16. Where columns end within a chunk, x is zero after them.
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

}  // namespace

#endif  // LLMJAX_BF16_PANELS_H_
