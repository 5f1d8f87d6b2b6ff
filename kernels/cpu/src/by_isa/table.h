// What the sources of this folder offer: each is compiled once for each instruction set that build.py names it for, with
// LLMJAX_ISA as its name, and defines one table, `<source>_<instruction set>`, which isa.cc finds.

#ifndef LLMJAX_BY_ISA_TABLE_H_
#define LLMJAX_BY_ISA_TABLE_H_

#define LLMJAX_JOIN_NAMES(source, isa) source##_##isa
#define LLMJAX_NAME(source, isa) LLMJAX_JOIN_NAMES(source, isa)

// Follow it with `= {...};` within the namespace llmjax.
#define LLMJAX_TABLE(Type, source)                \
  extern const Type LLMJAX_NAME(source, LLMJAX_ISA); \
  const Type LLMJAX_NAME(source, LLMJAX_ISA)

#endif  // LLMJAX_BY_ISA_TABLE_H_
