// Many rows in bf16 with quantized matrices on Intel's tile registers.

#include "bf16_tiles.h"
#include "by_isa/table.h"

namespace {

size_t workspace_of_bf16_tiles(const QuantizedMatrix& w, int rows) { return Bf16Workspace::bytes(w, rows); }

void multiply_bf16_tiles(const QuantizedMatrix& w, const QuantizedInput& in, int begin, int end, char* workspace) {
  for_codes(w, [&](auto codes) { bf16_tiles<decltype(codes)>(w, in, begin, end, workspace); });
}

void gate_bf16_tiles(const QuantizedMatrix& gate, const QuantizedMatrix& up, Activation activation, const QuantizedInput& in,
                     const QuantizedInput& out, int begin, int end, char* workspace) {
  for_codes(gate, [&](auto codes) {
    gated_bf16_tiles<decltype(codes)>(gate, up, activation, in, out, begin, end, workspace);
  });
}

}  // namespace

namespace llmjax {

LLMJAX_TABLE(QuantizedMethod, bf16_tiles) = {kLanes, prepare_bf16, workspace_of_bf16_tiles, multiply_bf16_tiles, gate_bf16_tiles};

}  // namespace llmjax
