// Compiled once for each instruction set; LLMJAX_ISA names it.

#include "kernels.h"

#include "attention_kernel.h"
#include "kv_types.h"
#include "linear_kernel.h"
#include "recurrent_kernel.h"
#include "rows_kernel.h"
#include "sample_kernel.h"

#define LLMJAX_JOIN(a, b) a##b
#define LLMJAX_TABLE(isa) LLMJAX_JOIN(kernels_, isa)
#define LLMJAX_QUOTE(x) #x
#define LLMJAX_STRING(x) LLMJAX_QUOTE(x)

namespace llmjax {

extern const Kernels LLMJAX_TABLE(LLMJAX_ISA);
const Kernels LLMJAX_TABLE(LLMJAX_ISA) = {
    LLMJAX_STRING(LLMJAX_ISA), kLanes, attention_store, attention_workspace, attention, attention_merge, linear_workspace,
    linear_prepare, linear, norm_rows, gate_rows, rotate, argmax, finite, sample,
    recur, selective_scan, convolve};

}  // namespace llmjax
