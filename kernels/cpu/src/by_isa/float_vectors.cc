// Few rows of f32 with quantized matrices, whose codes become f32 and are multiplied at once.

#include "by_isa/table.h"
#include "quantized_vectors.h"

namespace {

void multiply_float_vectors(const QuantizedMatrix& w, const QuantizedInput& in, int begin, int end, char* workspace) {
  for_codes(w, [&](auto codes) {
    for (int i = begin; i < end; ++i) float_tile<decltype(codes)>(w, in, GroupScales(w, workspace), i);
  });
}

}  // namespace

namespace llmjax {

LLMJAX_TABLE(QuantizedMethod, float_vectors) = {kLanes, prepare_floats, scales_workspace, multiply_float_vectors, nullptr};

}  // namespace llmjax
