// Attention over pages.

#include "attention_kernel.h"
#include "by_isa/table.h"

namespace llmjax {

LLMJAX_TABLE(AttentionKernels, attention) = {kLanes,           kLanesOfBf16, attention_store, attention_workspace,
                                             ::attention, attention_merge};

}  // namespace llmjax
