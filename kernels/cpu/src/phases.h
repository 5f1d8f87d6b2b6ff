// Phases of tasks on the threads of a pool.

#ifndef LLMJAX_PHASES_H_
#define LLMJAX_PHASES_H_

#include <atomic>
#include <cstddef>
#include <functional>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

namespace llmjax {

// Tasks that may run at the same time: task(i) for i in 0..count. A phase begins when all tasks of the one before it
// are done.
struct Phase {
  size_t count;
  std::function<void(size_t)> task;
};

inline void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// A phase and what its threads share. Each thread has a range of the tasks, so that it reads memory in order; one that is
// done takes from the others' ranges.
class RunningPhase {
 public:
  void start(Phase phase, size_t threads) {
    phase_ = std::move(phase);
    threads_ = threads;
    ranges_.reset(new Range[threads]);
    for (size_t t = 0; t < threads; ++t) ranges_[t].next.store(begin(t), std::memory_order_relaxed);
  }
  void work(size_t thread) {
    for (size_t other = 0; other < threads_; ++other) {
      const size_t t = (thread + other) % threads_, end = begin(t + 1);
      // Looks before it takes: a range that is done stays in all caches, instead of moving to each thread that asks.
      std::atomic<size_t>& next = ranges_[t].next;
      for (size_t i; next.load(std::memory_order_relaxed) < end && (i = next.fetch_add(1, std::memory_order_relaxed)) < end;) {
        phase_.task(i);
        done_.fetch_add(1, std::memory_order_release);
      }
    }
  }
  void wait() const {
    for (int spins = 0; done_.load(std::memory_order_acquire) != phase_.count; ++spins) {
      if (spins < 4096) {
        pause_briefly();
      } else {
        std::this_thread::yield();  // a thread lost its core in the middle of a task
      }
    }
  }

 private:
  struct alignas(64) Range {
    std::atomic<size_t> next;
  };
  size_t begin(size_t thread) const { return phase_.count * thread / threads_; }

  Phase phase_;
  size_t threads_;
  std::unique_ptr<Range[]> ranges_;
  alignas(64) std::atomic<size_t> done_{0};
};

// How many threads may work for a call, the calling one included.
template <class Pool>
size_t threads_of(const Pool& pool) {
  return static_cast<size_t>(pool.num_threads() > 0 ? pool.num_threads() : 1);
}

// Runs phases one after the other on the pool's threads and the calling one, and returns when all are done. Helpers are
// called once and walk through the phases with us. We never wait for one that has not begun (the pool may be busy with
// whoever waits for us): a late one finds nothing to do, and what they share lives until the last has gone. Pool: as
// xla::ffi::ThreadPool.
template <class Pool>
void run_phases(Pool& pool, std::vector<Phase> phases) {
  size_t most = 0;
  for (const Phase& phase : phases) most = phase.count > most ? phase.count : most;
  const size_t available = threads_of(pool);
  const size_t threads = available < most ? available : most;
  if (threads <= 1) {
    for (const Phase& phase : phases) {
      for (size_t i = 0; i < phase.count; ++i) phase.task(i);
    }
    return;
  }
  const size_t count = phases.size();
  std::shared_ptr<RunningPhase[]> running(new RunningPhase[count]);
  for (size_t i = 0; i < count; ++i) running[i].start(std::move(phases[i]), threads);
  const auto walk = [running, count](size_t thread) {
    for (size_t i = 0; i < count; ++i) {
      running[i].work(thread);
      running[i].wait();
    }
  };
  for (size_t thread = 1; thread < threads; ++thread) pool.Schedule([walk, thread] { walk(thread); });
  walk(0);
}

}  // namespace llmjax

#endif  // LLMJAX_PHASES_H_
