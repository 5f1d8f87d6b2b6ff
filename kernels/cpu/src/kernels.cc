// Compiled once for each instruction set; LLMJAX_ISA names it.

#include "kernels.h"

#include "attention_kernel.h"
#include "linear_kernel.h"

namespace {

template <class From, class To>
void convert_elements(const void* from, void* to, int count) {
  for (int i = 0; i < count; i += kLanes) store(static_cast<To*>(to) + i, load(static_cast<const From*>(from) + i));
}

template <class From>
void convert_from(const void* from, void* to, Type to_type, int count) {
  switch (to_type) {
    case Type::kF32: convert_elements<From, float>(from, to, count); break;
    case Type::kBf16: convert_elements<From, Bf16>(from, to, count); break;
    case Type::kF16: convert_elements<From, F16>(from, to, count); break;
  }
}

void convert(const void* from, Type from_type, void* to, Type to_type, int count) {
  if (from_type == Type::kF32) {
    convert_from<float>(from, to, to_type, count);
  } else {
    convert_from<Bf16>(from, to, to_type, count);
  }
}

}  // namespace

#define LLMJAX_JOIN(a, b) a##b
#define LLMJAX_TABLE(isa) LLMJAX_JOIN(kernels_, isa)
#define LLMJAX_QUOTE(x) #x
#define LLMJAX_STRING(x) LLMJAX_QUOTE(x)

namespace llmjax {

extern const Kernels LLMJAX_TABLE(LLMJAX_ISA);
const Kernels LLMJAX_TABLE(LLMJAX_ISA) = {
    LLMJAX_STRING(LLMJAX_ISA), kLanes, convert, attention_workspace, attention, attention_merge, linear_workspace,
    linear_prepare, linear};

}  // namespace llmjax
