// Phases on XLA's own thread pool, and memory of its threads.

#ifndef LLMJAX_PARALLEL_H_
#define LLMJAX_PARALLEL_H_

#include <cstddef>
#include <functional>
#include <vector>

#include "phases.h"
#include "xla/ffi/api/ffi.h"

namespace llmjax {

// A single phase.
template <class Body>
void parallel_for(xla::ffi::ThreadPool& pool, size_t count, const Body& body) {
  run_phases(pool, {Phase{count, std::cref(body)}});
}

// Memory of the calling thread for as long as a function runs in it; 64-byte aligned, kept for the next call. Functions
// that may be active at once in a thread use different tags.
template <int kTag>
char* thread_memory(size_t bytes) {
  thread_local std::vector<char> memory;
  if (memory.size() < bytes + 64) memory = std::vector<char>(bytes + 64);
  const size_t past = reinterpret_cast<size_t>(memory.data()) % 64;
  return memory.data() + (64 - past) % 64;
}

}  // namespace llmjax

#endif  // LLMJAX_PARALLEL_H_
