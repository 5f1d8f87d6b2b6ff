// Many rows that are rounded to int16, by blocks of columns, with panels of codes that are integers.

#include "by_isa/table.h"
#include "int16_panels.h"

namespace {

void multiply_int16_panels(const QuantizedMatrix& w, const QuantizedInput& in, int begin, int end, char* workspace) {
  for_integer_codes(w, [&](auto codes) { int16_panels<decltype(codes)>(w, in, begin, end, workspace); });
}

}  // namespace

namespace llmjax {

LLMJAX_TABLE(QuantizedMethod, int16_panels) = {kLanes, prepare_int16, scales_workspace, multiply_int16_panels, nullptr};

}  // namespace llmjax
