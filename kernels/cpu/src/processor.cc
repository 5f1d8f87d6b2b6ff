// A program of its own, which build.py runs: prints the best instruction set of this machine and those that it takes from what
// is not compiled for it.

#include "processor.h"

#include <cstdio>

int main() {
  int isa = llmjax::kIsas - 1;
  while (llmjax::has(isa) != llmjax::Has::kYes) --isa;
  for (; isa >= 0; isa = llmjax::kNarrower[isa]) std::puts(llmjax::kIsaNames[isa]);
  return 0;
}
