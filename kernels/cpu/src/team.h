// A team of threads that lives on between calls.

#ifndef LLMJAX_TEAM_H_
#define LLMJAX_TEAM_H_

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "phases.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__linux__)
#include <pthread.h>
#endif

namespace llmjax {

// How a thread rounds and whether subnormals are zeros to it: members of a team take both from the calling thread.
#if defined(__x86_64__)
using FloatMode = unsigned;
inline FloatMode float_mode() { return _mm_getcsr(); }
inline void set_float_mode(FloatMode mode) { _mm_setcsr(mode); }
#elif defined(__aarch64__)
using FloatMode = uint64_t;
inline FloatMode float_mode() {
  FloatMode mode;
  __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
  return mode;
}
inline void set_float_mode(FloatMode mode) { __asm__ volatile("msr fpcr, %0" : : "r"(mode)); }
#else
using FloatMode = int;
inline FloatMode float_mode() { return 0; }
inline void set_float_mode(FloatMode) {}
#endif

// What a team is made of; tests have other parts, which count.
struct TeamParts {
  template <class T>
  using Atomic = std::atomic<T>;
  static constexpr std::chrono::microseconds kLinger{2000};  // that a member without work stays awake
  static void rings() {}                                     // one that sleeps is woken
};

// Members look for calls, help with one, and look again; with none for a while they sleep. A call is put where those awake
// see it; those asleep are woken as a tree, two by each. Nobody waits for a member that has not begun: members may all be at
// another caller's, and then a call is the calling thread's alone. Several callers' calls divide the members among them.
template <class Parts = TeamParts>
class Team {
 public:
  static constexpr size_t kMost = 1024;  // threads

  Team() = default;
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;
  ~Team() {
    ending_.store(true);
    posted_.fetch_add(1);
    const size_t count = members();
    for (size_t t = 1; t <= count; ++t) ring(*members_[t]);
    for (size_t t = 1; t <= count; ++t) members_[t]->thread.join();
  }

  // Runs phases one after the other and returns when all are done. `threads`: that may work, the calling one included.
  void run(size_t threads, std::vector<Phase> phases) {
    size_t most = 0;
    for (const Phase& phase : phases) most = phase.count > most ? phase.count : most;
    threads = threads < most ? threads : most;
    Recording& record = recording();
    const int64_t begin = record.on.load(std::memory_order_relaxed) ? nanoseconds() : 0;
    if (begin != 0) ++record.calls, record.phases += phases.size();
    Call* call = threads <= 1 ? nullptr : take_call();
    if (call == nullptr) {
      for (const Phase& phase : phases) {
        const int64_t start = begin == 0 ? 0 : nanoseconds();
        for (size_t i = 0; i < phase.count; ++i) phase.task(i);
        if (begin != 0) record.busy[static_cast<int>(phase.work)] += nanoseconds() - start;
      }
      if (begin != 0) record.calling += nanoseconds() - begin;
      return;
    }
    threads = hire(threads - 1) + 1;
    call->fill(std::move(phases), threads);
    const uint64_t number = next_number(*call, threads);
    call->open.store(number);
    posted_.fetch_add(1);
    wake_children(0, number);
    call->walk(0);
    call->open.store(kClosed);
    if (begin != 0) record.calling += nanoseconds() - begin;
  }

  // Members there are, and how many of them sleep; one that is about to has its mutex.
  size_t members() const { return hired_.load(); }
  size_t asleep() const {
    size_t count = 0;
    for (size_t t = 1; t <= members(); ++t) {
      std::lock_guard<std::mutex> lock(members_[t]->mutex);
      count += members_[t]->state.load() == kAsleep;
    }
    return count;
  }

 private:
  template <class T>
  using Atomic = typename Parts::template Atomic<T>;
  static constexpr size_t kCalls = 16;                  // at the same time; further ones are their callers' alone
  static constexpr uint64_t kClosed = 0, kFilling = 1;  // of a call, else its number
  static constexpr uint64_t kLooks = 0, kAsleep = 1;    // of a member, else the number of the call it works for

  // The memory of a call, used again and again: a member that comes late may still look at it.
  struct alignas(64) Call {
    Atomic<uint64_t> open{kClosed};
    uint64_t uses = 0;
    size_t count = 0, room = 0;  // phases
    std::unique_ptr<RunningPhase<Parts::template Atomic>[]> phases;
    FloatMode mode{};
    alignas(64) Atomic<size_t> inside{0};  // members

    void fill(std::vector<Phase> all, size_t threads) {
      count = all.size();
      if (room < count) phases.reset(new RunningPhase<Parts::template Atomic>[room = count]);
      for (size_t i = 0; i < count; ++i) phases[i].start(std::move(all[i]), threads);
      mode = float_mode();
    }
    void walk(size_t thread) {
      Recording& record = recording();
      const bool recorded = record.on.load(std::memory_order_relaxed);
      for (size_t i = 0; i < count; ++i) {
        const int64_t begin = recorded ? nanoseconds() : 0;
        phases[i].work(thread);
        const int64_t done = recorded ? nanoseconds() : 0;
        phases[i].wait();
        if (!recorded) continue;
        record.busy[static_cast<int>(phases[i].kind())] += done - begin;
        record.waiting[static_cast<int>(phases[i].kind())] += nanoseconds() - done;
      }
    }
  };
  struct alignas(64) Member {
    Atomic<uint64_t> state{kLooks};
    std::mutex mutex;
    std::condition_variable bell;
    std::thread thread;
  };

  // Numbers are never used again; the low bits say how many threads may work.
  uint64_t next_number(Call& call, size_t threads) {
    return (++call.uses * kCalls + static_cast<uint64_t>(&call - calls_)) * (2 * kMost) + threads;
  }
  static size_t threads_of(uint64_t number) { return number % (2 * kMost); }

  Call* take_call() {
    for (Call& call : calls_) {
      uint64_t closed = kClosed;
      if (call.open.load(std::memory_order_relaxed) != kClosed || !call.open.compare_exchange_strong(closed, kFilling)) continue;
      if (call.inside.load() == 0) return &call;
      call.open.store(kClosed);  // somebody has yet to leave
    }
    return nullptr;
  }

  // Makes `count` members exist, as far as the system has threads. Returns how many there are, `count` at most.
  size_t hire(size_t count) {
    count = count < kMost - 1 ? count : kMost - 1;
    if (members() < count) {
      std::lock_guard<std::mutex> lock(hiring_);
      for (size_t t = members() + 1; t <= count; ++t) {
        members_[t].reset(new Member);
        try {
          members_[t]->thread = std::thread([this, t] { serve(t); });
        } catch (const std::system_error&) {
          break;
        }
        hired_.store(t);
      }
    }
    return members() < count ? members() : count;
  }

  // Wakes a thread's children in the tree of a call's threads; where a child works for another call, its children.
  void wake_children(size_t thread, uint64_t number) {
    for (size_t t = 2 * thread + 1; t <= 2 * thread + 2 && t < threads_of(number); ++t) {
      const uint64_t state = members_[t]->state.load();
      if (state == kAsleep) {
        ring(*members_[t]);
      } else if (state != kLooks && state != number) {
        wake_children(t, number);
      }
    }
  }
  void ring(Member& member) {
    {
      std::lock_guard<std::mutex> lock(member.mutex);
      if (member.state.load() != kAsleep) return;
      member.state.store(kLooks);
    }
    Parts::rings();
    member.bell.notify_one();
  }

  void serve(size_t thread) {
#if defined(__linux__)
    pthread_setname_np(pthread_self(), "llmjax_team");
#endif
    Member& self = *members_[thread];
    uint64_t last = 0;
    while (true) {
      const uint64_t seen = posted_.load();  // first: what is posted from here on ends the wait
      if (ending_.load()) return;
      if (Call* call = join(thread, last)) {
        self.state.store(last);
        wake_children(thread, last);
        set_float_mode(call->mode);
        call->walk(thread);
        call->inside.fetch_sub(1, std::memory_order_release);
        self.state.store(kLooks);
      } else {
        await(thread, last, seen);
      }
    }
  }

  // Whether a call with this number wants a thread that was last in another one.
  static bool wants(uint64_t number, size_t thread, uint64_t last) {
    return number > kFilling && number != last && thread < threads_of(number);
  }

  // A call that wants this thread, other than the last one it was in; with several, threads take different ones.
  Call* join(size_t thread, uint64_t& last) {
    Call* found[kCalls];
    uint64_t numbers[kCalls];
    size_t count = 0;
    for (Call& call : calls_) {
      const uint64_t number = call.open.load(std::memory_order_acquire);
      if (wants(number, thread, last)) found[count] = &call, numbers[count++] = number;
    }
    for (size_t i = 0; i < count; ++i) {
      Call& call = *found[(thread + i) % count];
      const uint64_t number = numbers[(thread + i) % count];
      call.inside.fetch_add(1);
      if (call.open.load() == number) {
        last = number;
        return &call;
      }
      call.inside.fetch_sub(1, std::memory_order_release);
    }
    return nullptr;
  }

  // Until something has been posted since `seen`: spins, then leaves the core to others, then sleeps.
  void await(size_t thread, uint64_t last, uint64_t seen) {
    for (int spins = 0; spins < 2048; ++spins) {
      if (posted_.load(std::memory_order_relaxed) != seen) return;
      pause_briefly();
    }
    for (const auto begin = std::chrono::steady_clock::now(); std::chrono::steady_clock::now() - begin < Parts::kLinger;) {
      if (posted_.load(std::memory_order_relaxed) != seen) return;
      std::this_thread::yield();
    }
    Member& self = *members_[thread];
    std::unique_lock<std::mutex> lock(self.mutex);
    self.state.store(kAsleep);
    // After the store, since a waking thread looks at states after it has seen the call open. Not at posted_: a member that finds a
    // call before it is posted wakes others already.
    bool wanted = ending_.load();
    for (const Call& call : calls_) wanted = wanted || wants(call.open.load(), thread, last);
    if (wanted) {
      self.state.store(kLooks);
      return;
    }
    self.bell.wait(lock, [&] { return self.state.load() != kAsleep; });
  }

  Call calls_[kCalls];
  std::unique_ptr<Member> members_[kMost];  // from 1 on: thread 0 is the caller
  std::mutex hiring_;
  Atomic<size_t> hired_{0};
  Atomic<bool> ending_{false};
  alignas(64) Atomic<uint64_t> posted_{0};  // calls
};

}  // namespace llmjax

#endif  // LLMJAX_TEAM_H_
