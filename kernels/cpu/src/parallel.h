// Phases on this process's team, and memory of its threads.

#ifndef LLMJAX_PARALLEL_H_
#define LLMJAX_PARALLEL_H_

#include <cstddef>
#include <cstdlib>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "huge_pages.h"
#include "team.h"
#include "xla/ffi/api/ffi.h"

namespace llmjax {

// How many threads may work for a call, the calling one included: as many as XLA has.
inline size_t threads_of(const xla::ffi::ThreadPool& pool) {
  return static_cast<size_t>(pool.num_threads() > 0 ? pool.num_threads() : 1);
}

// All engines of a process share one team. It never ends, for its threads may be at work when the process does.
inline Team<>& team() {
  static Team<>* const of_process = new Team<>;
  return *of_process;
}

// Runs phases one after the other, and returns when all are done.
inline void run_phases(const xla::ffi::ThreadPool& pool, std::vector<Phase> phases) {
  team().run(threads_of(pool), std::move(phases));
}

// A single phase.
template <class Body>
void parallel_for(const xla::ffi::ThreadPool& pool, size_t count, Work work, const Body& body) {
  run_phases(pool, {Phase{count, std::cref(body), work}});
}

// Memory that grows, 64-byte aligned; in huge pages where it is large.
class Memory {
 public:
  char* of(size_t bytes) {
    if (bytes > size_) {
      const size_t alignment = bytes < kHuge ? kLine : kHuge;
      size_ = 0;
      memory_.reset();  // before there is more
      size_ = (bytes + alignment - 1) / alignment * alignment;
      memory_.reset(static_cast<char*>(std::aligned_alloc(alignment, size_)));
      if (memory_ == nullptr) std::abort();
      prefer_huge_pages(memory_.get(), size_);
    }
    return memory_.get();
  }

 private:
  struct Free {
    void operator()(char* memory) const { std::free(memory); }
  };
  static constexpr size_t kLine = 64, kHuge = size_t{2} << 20;
  std::unique_ptr<char, Free> memory_;
  size_t size_ = 0;
};

// Memory of the calling thread for as long as a function runs in it; 64-byte aligned, kept for the next call. Functions
// that may be active at once in a thread use different tags.
template <int kTag>
char* thread_memory(size_t bytes) {
  thread_local Memory memory;
  return memory.of(bytes);
}

}  // namespace llmjax

#endif  // LLMJAX_PARALLEL_H_
