// Many rows of bf16 with matrices of bf16 that are kept in panels.

#include "by_isa/table.h"
#include "kept_panels.h"

namespace llmjax {

LLMJAX_TABLE(QuantizedMethod, kept_pairs) = {kLanes, prepare_bf16, KeptWorkspace::bytes<KeptPairs>, kept_panels<KeptPairs>, gated_kept_panels<KeptPairs>};

}  // namespace llmjax
