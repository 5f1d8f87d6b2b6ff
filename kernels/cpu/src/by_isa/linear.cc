// Products with plain matrices.

#include "by_isa/table.h"
#include "linear_kernel.h"

namespace llmjax {

LLMJAX_TABLE(LinearKernels, linear) = {kLanes, linear_workspace, linear_prepare, ::linear};

}  // namespace llmjax
