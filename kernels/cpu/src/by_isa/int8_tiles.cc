// Many rows that are rounded to int8, by spans of columns, on Intel's tile registers.

#include "by_isa/table.h"
#include "int8_tiles.h"

namespace {

size_t workspace_of_int8_tiles(const QuantizedMatrix& w, int rows) { return Int8Workspace::bytes(w, rows); }

void multiply_int8_tiles(const QuantizedMatrix& w, const QuantizedInput& in, int begin, int end, char* workspace) {
  for_integer_codes(w, [&](auto codes) { int8_tiles<decltype(codes)>(w, in, begin, end, workspace); });
}

void gate_int8_tiles(const QuantizedMatrix& gate, const QuantizedMatrix& up, Activation activation, const QuantizedInput& in,
                     const QuantizedInput& out, int begin, int end, char* workspace) {
  for_integer_codes(gate, [&](auto codes) {
    gated_int8_tiles<decltype(codes)>(gate, up, activation, in, out, begin, end, workspace);
  });
}

}  // namespace

namespace llmjax {

LLMJAX_TABLE(QuantizedMethod, int8_tiles) = {kLanes, prepare_spans, workspace_of_int8_tiles, multiply_int8_tiles, gate_int8_tiles};

}  // namespace llmjax
