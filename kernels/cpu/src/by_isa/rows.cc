// What goes row by row: norms, gates, rotation, recurrent mixers and sampling.

#include "by_isa/table.h"
#include "recurrent_kernel.h"
#include "rows_kernel.h"
#include "sample_kernel.h"

namespace llmjax {

LLMJAX_TABLE(RowKernels, rows) = {norm_rows, gate_rows, rotate, argmax, finite, sample, recur, selective_scan, convolve};

}  // namespace llmjax
