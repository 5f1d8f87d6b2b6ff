// Many rows in bf16 with quantized matrices on Intel's tile registers.

#include "bf16_tiles.h"
#include "by_isa/table.h"

namespace {

// Calls body(codes) for the codes of a matrix, or for one of bf16.
template <class Body>
void for_matrix(const QuantizedMatrix& w, const Body& body) {
  if (w.kind == CodeKind::kBf16) return body(Bf16Rows());
  if (w.kind == CodeKind::kBf16Panels) return body(Bf16Panels());
  for_codes(w, body);
}

size_t workspace_of_bf16_tiles(const QuantizedMatrix& w, int rows) { return Bf16Workspace::bytes(w, rows); }

void multiply_bf16_tiles(const QuantizedMatrix& w, const QuantizedInput& in, int begin, int end, char* workspace) {
  for_matrix(w, [&](auto codes) { bf16_tiles<decltype(codes)>(w, in, begin, end, workspace); });
}

void gate_bf16_tiles(const QuantizedMatrix& gate, const QuantizedMatrix& up, Activation activation, const QuantizedInput& in,
                     const QuantizedInput& out, int begin, int end, char* workspace) {
  for_matrix(gate, [&](auto codes) {
    if (&gate == &up) return activated_bf16_tiles<decltype(codes)>(gate, activation, in, out, begin, end, workspace);
    gated_bf16_tiles<decltype(codes)>(gate, up, activation, in, out, begin, end, workspace);
  });
}

}  // namespace

namespace llmjax {

LLMJAX_TABLE(QuantizedMethod, bf16_tiles) = {kLanes, prepare_bf16, workspace_of_bf16_tiles, multiply_bf16_tiles, gate_bf16_tiles};

}  // namespace llmjax
