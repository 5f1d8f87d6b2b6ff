// Many rows in bf16 with panels of bf16, of codes that stand for other numbers than integers.

#include "bf16_panels.h"
#include "by_isa/table.h"

namespace {

void multiply_bf16_panels(const QuantizedMatrix& w, const QuantizedInput& in, int begin, int end, char* workspace) {
  for_float_codes(w, [&](auto codes) { bf16_panels<decltype(codes)>(w, in, begin, end, workspace); });
}

}  // namespace

namespace llmjax {

LLMJAX_TABLE(QuantizedMethod, bf16_panels) = {kLanes, prepare_bf16, panel_workspace, multiply_bf16_panels, nullptr};

}  // namespace llmjax
