// Many rows of f32 with quantized matrices, which are dequantized into panels of f32.

#include "by_isa/table.h"
#include "quantized_panels.h"

namespace {

void multiply_float_panels(const QuantizedMatrix& w, const QuantizedInput& in, int begin, int end, char* workspace) {
  for_codes(w, [&](auto codes) { float_panels<decltype(codes)>(w, in, begin, end, workspace); });
}

}  // namespace

namespace llmjax {

LLMJAX_TABLE(QuantizedMethod, float_panels) = {kLanes, nullptr, panel_workspace, multiply_float_panels, nullptr};

}  // namespace llmjax
