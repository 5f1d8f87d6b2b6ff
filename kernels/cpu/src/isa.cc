// Which instruction sets this machine has, and the kernels compiled for each. build.py says which those are:
// LLMJAX_COMPILED(f) is f(source, instruction set) for each object, LLMJAX_SETS(f) f(instruction set) for all that nothing
// is missing of.

#include <atomic>
#include <cstring>

#include "kernels.h"
#include "processor.h"
#include "quantized.h"
#include "quantizers.h"
#include "searches.h"

// What the library was made from: build.py looks for it.
extern "C" {
extern const char llmjax_digest[] __attribute__((visibility("default")));
const char llmjax_digest[] = LLMJAX_DIGEST;
}

namespace llmjax {

// What a source offers (by_isa/table.h).
using TableOf_attention = AttentionKernels;
using TableOf_linear = LinearKernels;
using TableOf_rows = RowKernels;
using TableOf_float_vectors = QuantizedMethod;
using TableOf_float_panels = QuantizedMethod;
using TableOf_int8_vectors = QuantizedMethod;
using TableOf_int16_panels = QuantizedMethod;
using TableOf_bf16_panels = QuantizedMethod;
using TableOf_bf16_tiles = QuantizedMethod;
using TableOf_int8_tiles = QuantizedMethod;
using TableOf_kept_floats = QuantizedMethod;
using TableOf_kept_pairs = QuantizedMethod;
using TableOf_searches = Searches;
using TableOf_quantizers = Quantizers;

#define LLMJAX_DECLARE(source, isa) extern const TableOf_##source source##_##isa;
LLMJAX_COMPILED(LLMJAX_DECLARE)

namespace {

// What was compiled of one source, by instruction set. Null: it would gain nothing from it.
template <class Table>
using ByIsa = const Table*[kIsas];

struct Compiled {
  bool usable[kIsas] = {};
  int best = kGeneric;
  ByIsa<AttentionKernels> attention = {};
  ByIsa<LinearKernels> linear = {};
  ByIsa<RowKernels> rows = {};
  ByIsa<QuantizedMethod> float_vectors = {}, float_panels = {}, int8_vectors = {}, int16_panels = {}, bf16_panels = {};
  ByIsa<QuantizedMethod> bf16_tiles = {}, int8_tiles = {}, kept_floats = {}, kept_pairs = {};
  ByIsa<Searches> searches = {};
  ByIsa<Quantizers> quantizers = {};

  static int index(const char* name) {
    int isa = kIsas - 1;
    while (isa > 0 && std::strcmp(kIsaNames[isa], name) != 0) --isa;
    return isa;
  }

  Compiled() {
#define LLMJAX_ADD(source, isa) source[index(#isa)] = &source##_##isa;
    LLMJAX_COMPILED(LLMJAX_ADD)
#define LLMJAX_USE(isa) usable[index(#isa)] = has(index(#isa)) == Has::kYes;
    LLMJAX_SETS(LLMJAX_USE)
    for (int isa = 0; isa < kIsas; ++isa) best = usable[isa] ? isa : best;
  }
};

const Compiled& compiled() {
  static const Compiled instance;
  return instance;
}

std::atomic<int> forced{-1};

int current_isa() {
  const int isa = forced.load(std::memory_order_relaxed);
  return isa < 0 ? compiled().best : isa;
}

// What was compiled for an instruction set, or for the next narrower one for which `fits`; null: for none.
template <class Table, class Fits>
const Table* widest(const ByIsa<Table>& all, int isa, const Fits& fits) {
  while (isa >= 0 && (all[isa] == nullptr || !fits(*all[isa]))) isa = kNarrower[isa];
  return isa < 0 ? nullptr : all[isa];
}
template <class Table>
const Table* widest(const ByIsa<Table>& all, int isa) {
  return widest<Table>(all, isa, [](const Table&) { return true; });
}
template <class Table>
const Table* widest_dividing(const ByIsa<Table>& all, int divisible) {
  return widest<Table>(all, current_isa(), [divisible](const Table& table) { return divisible % table.lanes == 0; });
}

}  // namespace

int isa_count() { return kIsas; }
const char* isa_name(int isa) { return kIsaNames[isa]; }
bool isa_usable(int isa) { return isa >= 0 && isa < kIsas && compiled().usable[isa]; }
int forced_isa() { return forced.load(std::memory_order_relaxed); }

bool force_isa(int isa) {
  if (isa != -1 && !isa_usable(isa)) return false;
  forced.store(isa, std::memory_order_relaxed);
  return true;
}

const AttentionKernels* find_attention_kernels(int divisible) { return widest_dividing(compiled().attention, divisible); }
const LinearKernels* find_linear_kernels(int divisible) { return widest_dividing(compiled().linear, divisible); }
const RowKernels& find_row_kernels() { return *widest(compiled().rows, current_isa()); }

const QuantizedMethod* find_method(Method method) {
  switch (method) {
    case Method::kFloatVectors: return widest(compiled().float_vectors, current_isa());
    case Method::kFloatPanels: return widest(compiled().float_panels, current_isa());
    case Method::kInt8Vectors: return widest(compiled().int8_vectors, current_isa());
    case Method::kBf16Panels: return widest(compiled().bf16_panels, current_isa());
    case Method::kBf16Tiles: return widest(compiled().bf16_tiles, current_isa());
    case Method::kInt16Panels: return widest(compiled().int16_panels, current_isa());
    case Method::kInt8Tiles: return widest(compiled().int8_tiles, current_isa());
    case Method::kKeptFloats: return widest(compiled().kept_floats, current_isa());
    case Method::kKeptPairs: return widest(compiled().kept_pairs, current_isa());
  }
  return nullptr;
}

namespace {

const Searches* find_searches(const SubBlocks& blocks) {
  return blocks.numbers > kMostNumbers ? nullptr : widest(compiled().searches, current_isa());
}

const Quantizer* find_quantizer(int type) {
  const Quantizers* known = widest(compiled().quantizers, current_isa());
  for (size_t i = 0; known != nullptr && i < known->count; ++i) {
    if (known->first[i].type == type) return &known->first[i];
  }
  return nullptr;
}

}  // namespace
}  // namespace llmjax

// For the Python side, which asks through ctypes.
#pragma GCC visibility push(default)
extern "C" {
int llmjax_isa_count() { return llmjax::isa_count(); }
const char* llmjax_isa_name(int isa) { return llmjax::isa_name(isa); }
int llmjax_isa_usable(int isa) { return llmjax::isa_usable(isa) ? 1 : 0; }
// Whether the processor has it: 0 no, 1 yes, 2: the system lets no program use it.
int llmjax_isa_here(int isa) { return static_cast<int>(llmjax::has(isa)); }
// Makes all calls from now on take an instruction set, in the whole process; -1: the best again. 1 if it was done; 0: it is
// not usable. For tests and bug reports.
int llmjax_force_isa(int isa) { return llmjax::force_isa(isa) ? 1 : 0; }
int llmjax_forced_isa() { return llmjax::forced_isa(); }

// Both: 1 if it was done; 0: sub-blocks have too many numbers.
// fit: [4, count], scale, minimum, origin and multiplier.
int llmjax_fit_affine(const float* x, const float* weights, size_t numbers, size_t count, float top, float first,
                      int steps, int absolute, float* fit) {
  const llmjax::SubBlocks blocks{x, numbers, count};
  const llmjax::Searches* searches = llmjax::find_searches(blocks);
  if (searches == nullptr) return 0;
  searches->affine(blocks, weights, {top, first, steps, absolute != 0}, {fit, fit + count, fit + 2 * count, fit + 3 * count});
  return 1;
}

// out: `blocks` blocks of a type. 1 if it was done; 0: the type is not known here; -1: a
// weight is infinite or not a number; -2: a scale would exceed float16.
int llmjax_quantize(int type, const float* weights, size_t blocks, uint8_t* out) {
  const llmjax::Quantizer* quantizer = llmjax::find_quantizer(type);
  if (quantizer == nullptr) return 0;
  const llmjax::Quantized done = quantizer->quantize(weights, blocks, out);
  return done == llmjax::Quantized::kDone ? 1 : done == llmjax::Quantized::kNotFinite ? -1 : -2;
}

// fit: [2, count], scale and multiplier.
int llmjax_fit_symmetric(const float* x, const float* peaks, size_t numbers, size_t count, float middle, float* fit) {
  const llmjax::SubBlocks blocks{x, numbers, count};
  const llmjax::Searches* searches = llmjax::find_searches(blocks);
  if (searches == nullptr) return 0;
  searches->symmetric(blocks, peaks, middle, fit, fit + count);
  return 1;
}
}
#pragma GCC visibility pop
