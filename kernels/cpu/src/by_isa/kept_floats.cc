// Many rows of f32 with matrices of bf16 that are kept in panels.

#include "by_isa/table.h"
#include "kept_panels.h"

namespace llmjax {

LLMJAX_TABLE(QuantizedMethod, kept_floats) = {kLanes, prepare_kept_floats, KeptWorkspace::bytes<KeptFloats>, kept_panels<KeptFloats>, gated_kept_panels<KeptFloats>};

}  // namespace llmjax
