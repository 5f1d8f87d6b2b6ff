// Compiled for the generic instruction set and AVX2 (LLMJAX_ISA), without fused multiply-add: every bit counts.

#include "by_isa/table.h"
#include "searches_kernel.h"

namespace llmjax {
namespace {

Floats read(const float* from, size_t count, size_t first) {
  Columns found;
  found.read(from, 1, count, first);
  return found.rows[0];
}

void write(float* to, Floats values, size_t count, size_t first) {
  for (size_t lane = 0; lane < kLanes && first + lane < count; ++lane) to[first + lane] = values[lane];
}

void affine(const SubBlocks& blocks, const float* weights_of, const AffineSearch& search, const AffineFit& fit) {
  for (size_t first = 0; first < blocks.count; first += kLanes) {
    Columns x, weights;
    x.read(blocks.x, blocks.numbers, blocks.count, first);
    weights.read(weights_of, blocks.numbers, blocks.count, first);
    const AffineColumns found = (search.absolute ? affine_columns<true> : affine_columns<false>)(x, weights, blocks.numbers, search);
    write(fit.scale, found.scale, blocks.count, first);
    write(fit.minimum, found.minimum, blocks.count, first);
    write(fit.origin, found.origin, blocks.count, first);
    write(fit.multiplier, found.multiplier, blocks.count, first);
  }
}

void symmetric(const SubBlocks& blocks, const float* peaks, float middle, float* scales, float* multipliers) {
  for (size_t first = 0; first < blocks.count; first += kLanes) {
    Columns x;
    x.read(blocks.x, blocks.numbers, blocks.count, first);
    const SymmetricColumns found = symmetric_columns(x, read(peaks, blocks.count, first), blocks.numbers, middle);
    write(scales, found.scale, blocks.count, first);
    write(multipliers, found.multiplier, blocks.count, first);
  }
}

}  // namespace

LLMJAX_TABLE(Searches, searches) = {affine, symmetric};

}  // namespace llmjax
