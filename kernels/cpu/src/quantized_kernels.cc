// Products with quantized matrices, compiled once for each instruction set; LLMJAX_ISA names it.

#include "quantized.h"

#include "int16_panels.h"
#include "int8_tiles.h"

namespace {

using llmjax::Method;

bool quantized_takes(const QuantizedMatrix& w, Method method) {
  const bool integers = w.level_factor != 0 && w.kind != CodeKind::kE4M3 && w.kind != CodeKind::kE5M2;
  switch (method) {
    case Method::kFloatVectors:
    case Method::kFloatPanels: return true;
    case Method::kInt8Vectors: return integers;
#if defined(LLMJAX_INT16_PANELS)
    case Method::kInt16Panels: return integers;
#endif
#if defined(__AVX512BF16__)
    case Method::kBf16Panels: return true;
#endif
#if defined(__AMX_INT8__)
    case Method::kBf16Tiles: return true;
    case Method::kInt8Tiles: return integers && (w.groups() == 1 || w.group_size % llmjax::kSpanColumns == 0);
#endif
    default: return false;
  }
}

// Up to how many rows which method is the fastest: benchmarks/kernels.py prints all of them.
constexpr int kMaxVectorRows = 4, kMaxByteRowsBesideTiles = 8;
// Bf16 tiles, which round far less, are about as fast until filling panels hardly counts.
constexpr int kMinRowsOfByteTiles = 65;

Method quantized_choose(const QuantizedMatrix& w, int rows, llmjax::Rounding may) {
  const bool tiles = may.half && quantized_takes(w, Method::kBf16Tiles);
  if (may.int8 && quantized_takes(w, Method::kInt8Vectors)) {
    if (rows <= kMaxByteRowsBesideTiles || !tiles) return Method::kInt8Vectors;
    if (rows >= kMinRowsOfByteTiles && quantized_takes(w, Method::kInt8Tiles)) return Method::kInt8Tiles;
  }
  if (rows <= kMaxVectorRows) return Method::kFloatVectors;
  if (tiles) return Method::kBf16Tiles;
  if (may.half && quantized_takes(w, Method::kInt16Panels)) return Method::kInt16Panels;
  return may.half && quantized_takes(w, Method::kBf16Panels) ? Method::kBf16Panels : Method::kFloatPanels;
}

int quantized_input_block(int rows, Method method) {
  const bool vectors = method == Method::kFloatVectors || method == Method::kInt8Vectors;
  if (!vectors || rows > 8) return llmjax::kTileRows;
  return rows <= kMaxVectorRows ? rows : 8;
}

size_t quantized_workspace(const QuantizedMatrix& w, Method method, int rows) {
  if (method == Method::kFloatPanels || method == Method::kBf16Panels) return panel_scale_bytes(w);
#if defined(__AMX_INT8__)
  if (method == Method::kBf16Tiles) return Bf16Workspace::bytes(w, rows);
  if (method == Method::kInt8Tiles) return Int8Workspace::bytes(w, rows);
#else
  (void)method, (void)rows;
#endif
  return GroupScales::bytes(w);
}

bool quantized_gates(const QuantizedMatrix& gate, const QuantizedMatrix& up) {
#if defined(__AMX_INT8__)
  return gate.bits == up.bits && gate.kind == up.kind && gate.num_levels == up.num_levels &&
         gate.group_size == up.group_size && gate.size_in == up.size_in && gate.size_out == up.size_out;
#else
  (void)gate, (void)up;
  return false;
#endif
}

void quantized_multiply_gated(const QuantizedMatrix& gate, const QuantizedMatrix& up, llmjax::Activation activation,
                              const QuantizedInput& in, const QuantizedInput& out, int begin, int end, char* workspace) {
#if defined(__AMX_INT8__)
  if (out.byte_tiles != nullptr) {
    return for_integer_codes(gate, [&](auto codes) {
      gated_int8_tiles<decltype(codes)>(gate, up, activation, in, out, begin, end, workspace);
    });
  }
  for_codes(gate, [&](auto codes) {
    gated_bf16_tiles<decltype(codes)>(gate, up, activation, in, out, begin, end, workspace);
  });
#else
  (void)gate, (void)up, (void)activation, (void)in, (void)out, (void)begin, (void)end, (void)workspace;
#endif
}

void quantized_multiply(const QuantizedMatrix& w, const QuantizedInput& in, Method method, int begin, int end,
                        char* workspace) {
  switch (method) {
    case Method::kInt8Vectors:
      return for_integer_codes(w, [&](auto codes) {
        for (int i = begin; i < end; ++i) int8_tile<decltype(codes)>(w, in, GroupScales(w, workspace), i);
      });
    case Method::kFloatVectors:
      return for_codes(w, [&](auto codes) {
        for (int i = begin; i < end; ++i) float_tile<decltype(codes)>(w, in, GroupScales(w, workspace), i);
      });
    case Method::kFloatPanels:
      return for_codes(w, [&](auto codes) { float_panels<decltype(codes)>(w, in, begin, end, workspace); });
#if defined(__AVX512BF16__)
    case Method::kBf16Panels:
      return for_codes(w, [&](auto codes) { bf16_panels<decltype(codes)>(w, in, begin, end, workspace); });
#endif
#if defined(LLMJAX_INT16_PANELS)
    case Method::kInt16Panels:
      return for_integer_codes(w, [&](auto codes) { int16_panels<decltype(codes)>(w, in, begin, end, workspace); });
#endif
#if defined(__AMX_INT8__)
    case Method::kBf16Tiles:
      return for_codes(w, [&](auto codes) { bf16_tiles<decltype(codes)>(w, in, begin, end, workspace); });
    case Method::kInt8Tiles:
      return for_integer_codes(w, [&](auto codes) { int8_tiles<decltype(codes)>(w, in, begin, end, workspace); });
#endif
    default: return;
  }
}

}  // namespace

#define LLMJAX_JOIN(a, b) a##b
#define LLMJAX_TABLE(isa) LLMJAX_JOIN(quantized_, isa)

namespace llmjax {

extern const QuantizedKernels LLMJAX_TABLE(LLMJAX_ISA);
const QuantizedKernels LLMJAX_TABLE(LLMJAX_ISA) = {quantized_takes,   quantized_choose,    quantized_input_block,
                                                   quantized_prepare, quantized_workspace, quantized_multiply,
                                                   quantized_gates,   quantized_multiply_gated};

}  // namespace llmjax
