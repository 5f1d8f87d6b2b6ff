// Rows that are rounded to int8, by blocks of columns, with codes that are integers.

#include "by_isa/table.h"
#include "quantized_vectors.h"

namespace {

void multiply_int8_vectors(const QuantizedMatrix& w, const QuantizedInput& in, int begin, int end, char* workspace) {
  for_integer_codes(w, [&](auto codes) {
    const ByteTable table(w, kUnsignedBytes);
    const GroupScales scales(w, workspace);
    for (int i = begin; i < end; ++i) int8_tile<decltype(codes)>(w, in, scales, table, workspace + GroupScales::bytes(w), i);
  });
}

}  // namespace

namespace llmjax {

LLMJAX_TABLE(QuantizedMethod, int8_vectors) = {kLanes, prepare_bytes, int8_workspace, multiply_int8_vectors, nullptr};

}  // namespace llmjax
