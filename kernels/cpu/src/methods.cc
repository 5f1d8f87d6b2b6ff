// Which way to multiply rows with a quantized matrix.

#include "quantized.h"

namespace llmjax {
namespace {

// Up to how many rows which method is the fastest: benchmarks/kernels.py prints all of them.
constexpr int kMaxVectorRows = 4, kMaxByteRowsBesideTiles = 8;
// Bf16 tiles, which round far less, are about as fast until filling panels hardly counts.
constexpr int kMinRowsOfByteTiles = 65;

bool takes(const QuantizedMatrix& w, Method method) {
  if (w.kind == CodeKind::kBf16Panels) return is_kept(method) || method == Method::kBf16Tiles;
  if (is_kept(method) || w.kind == CodeKind::kBf16) return method == Method::kBf16Tiles;
  const bool integers = w.level_factor != 0 && w.kind != CodeKind::kE4M3 && w.kind != CodeKind::kE5M2;
  switch (method) {
    case Method::kInt8Vectors:
    case Method::kInt16Panels: return integers;
    case Method::kInt8Tiles: return integers && (w.groups() == 1 || w.group_size % kSpanColumns == 0);
    case Method::kBf16Panels: return !integers;  // which round more than int16 panels, and are slower
    default: return true;
  }
}

}  // namespace

const QuantizedMethod* find_method(const QuantizedMatrix& w, Method method) { return takes(w, method) ? find_method(method) : nullptr; }

Method choose_method(const QuantizedMatrix& w, int rows, Rounding may) {
  const bool tiles = may.half && find_method(w, Method::kBf16Tiles) != nullptr;
  if (may.int8 && find_method(w, Method::kInt8Vectors) != nullptr) {
    if (rows <= kMaxByteRowsBesideTiles || !tiles) return Method::kInt8Vectors;
    if (may.half && rows >= kMinRowsOfByteTiles && find_method(w, Method::kInt8Tiles) != nullptr) return Method::kInt8Tiles;
  }
  if (rows <= kMaxVectorRows) return Method::kFloatVectors;
  if (tiles) return Method::kBf16Tiles;
  const QuantizedMethod* const integers = find_method(w, Method::kInt16Panels);
  // Floats in vectors twice as wide are as fast as integers, and exact: AVX-512 without VNNI has those of AVX2.
  if (may.half && integers != nullptr && integers->lanes == find_method(Method::kFloatPanels)->lanes) return Method::kInt16Panels;
  return may.half && find_method(w, Method::kBf16Panels) != nullptr ? Method::kBf16Panels : Method::kFloatPanels;
}

int input_block(int rows, Method method, int lanes) {
  const bool int8 = method == Method::kInt8Vectors;
  if (!int8 && method != Method::kFloatVectors) return kTileRows;
  if (rows <= kMaxVectorRows) return rows;
  return rows <= 8 || (int8 && lanes == kTileRows) ? 8 : kTileRows;  // as many as one pass over the codes multiplies
}

}  // namespace llmjax
