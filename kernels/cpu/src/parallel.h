// A loop over tasks on XLA's own thread pool.

#ifndef LLMJAX_PARALLEL_H_
#define LLMJAX_PARALLEL_H_

#include <atomic>
#include <cstddef>
#include <memory>
#include <thread>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace llmjax {

inline void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Calls body(i) for i in 0..count, in no order, on the pool's threads and the calling one. Returns when all are done.
// It never waits for a helper that has not begun (the pool may be busy with whoever waits for us): one that comes late
// finds nothing to do, and the shared counters live until the last has gone.
template <class Body>
void parallel_for(xla::ffi::ThreadPool& pool, size_t count, const Body& body) {
  const size_t threads = static_cast<size_t>(pool.num_threads() > 0 ? pool.num_threads() : 1);
  if (count <= 1 || threads == 1) {
    for (size_t i = 0; i < count; ++i) body(i);
    return;
  }
  struct Shared {
    std::atomic<size_t> next{0}, done{0};
  };
  auto shared = std::make_shared<Shared>();
  auto work = [shared, count, &body] {
    for (size_t i; (i = shared->next.fetch_add(1, std::memory_order_relaxed)) < count;) {
      body(i);
      shared->done.fetch_add(1, std::memory_order_release);
    }
  };
  const size_t helpers = (threads < count ? threads : count) - 1;
  for (size_t i = 0; i < helpers; ++i) pool.Schedule(decltype(work)(work));
  work();
  for (int spins = 0; shared->done.load(std::memory_order_acquire) != count; ++spins) {
    if (spins < 4096) {
      pause_briefly();
    } else {
      std::this_thread::yield();  // a helper lost its core in the middle of a task
    }
  }
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
