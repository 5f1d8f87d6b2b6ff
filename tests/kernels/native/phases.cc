// Phases on a pool of plain threads, for ThreadSanitizer: what one phase writes the next one reads, helpers come late or
// not at all, and nothing is touched after the call.

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <thread>
#include <utility>
#include <vector>

#include "phases.h"

namespace {

// Runs what it is given in threads of its own; some begin long after the call has returned.
class Pool {
 public:
  Pool(int threads, bool late) : threads_(threads), late_(late) {}
  ~Pool() { join(); }
  long num_threads() const { return threads_; }
  template <class Task>
  void Schedule(Task&& task) {
    running_.emplace_back([task = std::forward<Task>(task), late = late_]() mutable {
      if (late) std::this_thread::sleep_for(std::chrono::milliseconds(2));
      task();
    });
  }
  void join() {
    for (std::thread& thread : running_) thread.join();
    running_.clear();
  }

 private:
  int threads_;
  bool late_;
  std::vector<std::thread> running_;
};

void check(bool right, const char* what) {
  if (right) return;
  std::fprintf(stderr, "wrong: %s\n", what);
  std::exit(1);
}

// Phase 0 fills, phase 1 sums neighbors, phase 2 (a single task) adds everything up.
long run(Pool& pool, size_t count) {
  std::vector<long> first(count), second(count);
  long total = 0;
  llmjax::run_phases(pool, {{count, [&](size_t i) { first[i] = static_cast<long>(i); }},
                            {count, [&](size_t i) { second[i] = first[i] + first[(i + 1) % count]; }},
                            {0, [&](size_t) { std::abort(); }},
                            {1, [&](size_t) {
                               for (long x : second) total += x;
                             }}});
  return total;
}

}  // namespace

int main() {
  for (bool late : {false, true}) {
    for (int threads : {1, 2, 4, 7}) {
      for (size_t count : {1, 2, 3, 64, 1000}) {
        Pool pool(threads, late);
        for (int repeat = 0; repeat < (late ? 2 : 20); ++repeat) {
          check(run(pool, count) == static_cast<long>(count * (count - 1)), "the sum");
          if (repeat % 5 == 4) pool.join();
        }
      }
    }
  }
  std::puts("right");
  return 0;
}
