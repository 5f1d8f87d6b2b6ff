// What goes row by row: norms, gates, rotation, adapters, recurrent mixers and sampling.

#include "adapted_kernel.h"
#include "by_isa/table.h"
#include "recurrent_kernel.h"
#include "rows_kernel.h"
#include "sample_kernel.h"

namespace llmjax {

LLMJAX_TABLE(RowKernels, rows) = {norm_rows, gate_rows, rotate, widen, round, argmax, finite, shrink, expand, sample, recur, selective_scan, convolve};

}  // namespace llmjax
