// Phases of tasks, and how threads divide the tasks of one.

#ifndef LLMJAX_PHASES_H_
#define LLMJAX_PHASES_H_

#include <atomic>
#include <cstddef>
#include <functional>
#include <memory>
#include <thread>
#include <utility>

#include "recording.h"

namespace llmjax {

// Tasks that may run at the same time: task(i) for i in 0..count. A phase begins when all tasks of the one before it
// are done.
struct Phase {
  size_t count;
  std::function<void(size_t)> task;
  Work work = Work::kOther;
};

// The tasks of both in turn, each spread evenly, so that each thread gets its share of either, in order.
inline Phase in_turn(Phase first, Phase second) {
  const size_t part = first.count, count = part + second.count;
  const Work work = first.work;
  return {count, [first = std::move(first), second = std::move(second), part, count](size_t i) {
            const size_t before = i * part / count;
            if ((i + 1) * part / count > before) return first.task(before);
            second.task(i - before);
          },
          work};
}

inline void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("isb");  // `yield` does nothing on most of them
#endif
}

// A phase and what its threads share. Each thread has a range of the tasks, so that it reads memory in order; one that is
// done takes from the others' ranges.
template <template <class> class Atomic>
class RunningPhase {
 public:
  void start(Phase phase, size_t threads) {
    phase_ = std::move(phase);
    count_ = threads < phase_.count ? threads : phase_.count;
    if (room_ < count_) ranges_.reset(new Range[room_ = count_]);
    for (size_t t = 0; t < count_; ++t) ranges_[t].next.store(begin(t), std::memory_order_relaxed);
    done_.store(0, std::memory_order_relaxed);
  }
  void work(size_t thread) {
    for (size_t other = 0; other < count_; ++other) {
      const size_t t = (thread + other) % count_, end = begin(t + 1);
      // Looks before it takes: a range that is done stays in all caches, instead of moving to each thread that asks.
      auto& next = ranges_[t].next;
      size_t taken = 0;
      for (size_t i; next.load(std::memory_order_relaxed) < end && (i = next.fetch_add(1, std::memory_order_relaxed)) < end; ++taken) {
        phase_.task(i);
      }
      if (taken != 0) done_.fetch_add(taken, std::memory_order_release);  // the one line that all threads write to
    }
  }
  Work kind() const { return phase_.work; }
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
    Atomic<size_t> next{0};
  };
  size_t begin(size_t range) const { return phase_.count * range / count_; }

  Phase phase_;
  size_t count_ = 0, room_ = 0;  // ranges
  std::unique_ptr<Range[]> ranges_;
  alignas(64) Atomic<size_t> done_{0};
};

}  // namespace llmjax

#endif  // LLMJAX_PHASES_H_
