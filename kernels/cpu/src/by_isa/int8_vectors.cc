// Rows that are rounded to int8, by blocks of columns, with codes that are integers.

#include "by_isa/table.h"
#include "quantized_vectors.h"

namespace {

size_t workspace_of_int8_vectors(const QuantizedMatrix& w, int) {
  size_t bytes = 0;
  for_integer_codes(w, [&](auto codes) { bytes = int8_workspace<decltype(codes)>(w); });
  return bytes;
}

void multiply_int8_vectors(const QuantizedMatrix& w, const QuantizedInput& in, int begin, int end, char* workspace) {
  for_integer_codes(w, [&](auto codes) {
    const ByteTable table(w, kUnsignedBytes);
    const GroupScales scales(w, workspace);
    OutlierWeights<decltype(codes)> outliers(w, in, table, workspace + GroupScales::bytes(w));
    for (int i = begin; i < end; ++i) int8_tile(w, in, scales, outliers, i);
  });
}

}  // namespace

namespace llmjax {

LLMJAX_TABLE(QuantizedMethod, int8_vectors) = {kLanes, prepare_bytes, workspace_of_int8_vectors, multiply_int8_vectors, nullptr};

}  // namespace llmjax
