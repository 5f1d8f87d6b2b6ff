// Panels of dequantized rows (`pass_by_panels`), in f32.

#ifndef LLMJAX_QUANTIZED_PANELS_H_
#define LLMJAX_QUANTIZED_PANELS_H_

#include "float_panels.h"
#include "quantized_vectors.h"

namespace {

constexpr int kPanelTiles = kPanelOutputs / llmjax::kTileRows;
static_assert(kPanelColumns % kChunk == 0, "panels hold whole chunks");

inline size_t panel_workspace(const QuantizedMatrix& w, int) { return kPanelTiles * GroupScales::bytes(w); }

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

// Panels have room for whole chunks; columns after the last one are not multiplied.
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

}  // namespace

#endif  // LLMJAX_QUANTIZED_PANELS_H_
