// Teams of threads and the phases that they run, under sanitizers and counted: what one phase writes the next one reads,
// members come late or not at all, and how many steps on shared memory and wakes a call costs.

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "team.h"

namespace {

void check(bool right, const char* what, long threads = 0) {
  if (right) return;
  std::fprintf(stderr, "wrong with %ld threads: %s\n", threads, what);
  std::exit(1);
}

std::atomic<long> changes{0}, looks{0}, all_rings{0};  // changes: read-modify-write operations
thread_local long own_rings = 0;

// Threads lose their cores now and then, before any step but those that merely wait.
std::atomic<bool> halting{false};
std::atomic<unsigned> seeds{0};

void step(std::memory_order order) {
  if (order != std::memory_order_seq_cst || !halting) return;
  thread_local std::minstd_rand random(++seeds);
  if (random() % 8 == 0) std::this_thread::sleep_for(std::chrono::microseconds(200));
}

template <class T>
class CountingAtomic {
 public:
  CountingAtomic(T value = T{}) : value_(value) {}
  T load(std::memory_order order = std::memory_order_seq_cst) const {
    step(order);
    return ++looks, value_.load(order);
  }
  void store(T value, std::memory_order order = std::memory_order_seq_cst) {
    step(order);
    value_.store(value, order);
  }
  T fetch_add(T by, std::memory_order order = std::memory_order_seq_cst) {
    step(order);
    return ++changes, value_.fetch_add(by, order);
  }
  T fetch_sub(T by, std::memory_order order = std::memory_order_seq_cst) {
    step(order);
    return ++changes, value_.fetch_sub(by, order);
  }
  bool compare_exchange_strong(T& old, T value) {
    step(std::memory_order_seq_cst);
    return ++changes, value_.compare_exchange_strong(old, value);
  }

 private:
  std::atomic<T> value_;
};

template <long kMicroseconds>
struct CountingParts {
  template <class T>
  using Atomic = CountingAtomic<T>;
  static constexpr std::chrono::microseconds kLinger{kMicroseconds};
  static void rings() { ++all_rings, ++own_rings; }
};
using Sleepy = llmjax::Team<CountingParts<0>>;
using Awake = llmjax::Team<CountingParts<3600000000>>;

constexpr size_t kSizes[] = {1, 2, 16, 64};

void reset() { changes = 0, looks = 0, all_rings = 0, own_rings = 0; }

template <class Condition>
void wait_until(const Condition& condition) {
  while (!condition()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

template <class Team>
void wait_until_asleep(const Team& team) {
  wait_until([&] { return team.asleep() == team.members(); });
}

// A task for each of `threads` threads, none of which ends before all have begun.
template <class Team, class Body>
void run_together(Team& team, size_t threads, const Body& body) {
  std::atomic<size_t> here{0};
  team.run(threads, {{threads, [&](size_t i) {
                        ++here;
                        while (here != threads) std::this_thread::yield();
                        body(i);
                      }}});
}

// Phase 0 fills, phase 1 sums neighbors, phase 2 (a single task) adds everything up.
template <class Team>
long sum(Team& team, size_t threads, size_t count) {
  std::vector<long> first(count), second(count);
  long total = 0;
  team.run(threads, {{count, [&](size_t i) { first[i] = static_cast<long>(i); }},
                     {count, [&](size_t i) { second[i] = first[i] + first[(i + 1) % count]; }},
                     {0, [&](size_t) { std::abort(); }},
                     {1, [&](size_t) {
                        for (long x : second) total += x;
                      }}});
  return total;
}

template <class Team>
void phases_are_ordered() {
  Team team;
  for (int repeat = 0; repeat < 20; ++repeat) {
    for (size_t threads : {1, 2, 4, 7, 3}) {
      for (size_t count : {1, 2, 3, 64, 1000}) {
        check(sum(team, threads, count) == static_cast<long>(count * (count - 1)), "the sum", threads);
      }
    }
  }
  check(team.members() == 6, "as many members as the largest call wants");
}

// A thread that finds nothing left changes nothing that others see.
void what_is_done_is_only_looked_at() {
  for (size_t threads : kSizes) {
    llmjax::RunningPhase<CountingAtomic> phase;
    size_t done = 0;
    phase.start({256, [&](size_t) { ++done; }}, threads);
    reset();
    phase.work(threads - 1);
    check(done == 256 && changes == static_cast<long>(256 + threads), "changes by one that does it all", threads);
    reset();
    for (size_t t = 0; t < threads; ++t) phase.work(t);
    phase.wait();
    check(done == 256 && changes == 0, "changes by one that is late", threads);
  }
}

void members_are_woken_as_a_tree_and_then_sleep() {
  for (size_t threads : kSizes) {
    Sleepy team;
    run_together(team, threads, [](size_t) {});
    check(team.members() == threads - 1, "members", threads);
    for (int repeat = 0; repeat < 3; ++repeat) {
      wait_until_asleep(team);
      reset();
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      check(looks == 0 && changes == 0, "sleepers do nothing", threads);
      run_together(team, threads, [](size_t) {});
      const long members = static_cast<long>(threads) - 1;
      check(own_rings == (members < 2 ? members : 2), "the caller wakes two", threads);
      check(all_rings == members, "each is woken once", threads);
      wait_until_asleep(team);
      // The call is taken and posted, members come and go, each thread takes a task and says that it is done.
      check(changes == (threads == 1 ? 0 : 2 + 2 * members + 2 * (members + 1)), "changes of a call", threads);
    }
  }
}

void who_is_awake_need_not_be_woken() {
  for (size_t threads : kSizes) {
    Awake team;
    for (int repeat = 0; repeat < 5; ++repeat) {
      reset();
      run_together(team, threads, [](size_t) {});
      check(all_rings == 0, "no one is woken", threads);
    }
  }
}

// A call while all members are held by another one is its caller's alone, and makes no threads.
void two_callers_do_not_wait_for_each_other() {
  Sleepy team;
  std::atomic<bool> second_done{false};
  std::atomic<int> held{0};
  std::thread first([&] {
    team.run(5, {{5, [&](size_t) {
                    ++held;
                    while (!second_done) std::this_thread::yield();
                  }}});
  });
  wait_until([&] { return held == 5; });
  check(sum(team, 5, 100) == 9900, "the second caller's sum");
  second_done = true;
  first.join();
  check(team.members() == 4, "members of two callers");
}

// Children of a member that works for another call are woken all the same.
void the_tree_goes_past_busy_members() {
  Sleepy team;
  run_together(team, 7, [](size_t) {});
  std::atomic<bool> second_done{false};
  std::atomic<int> held{0};
  std::thread first([&] {
    team.run(2, {{2, [&](size_t) {
                    ++held;
                    while (!second_done) std::this_thread::yield();
                  }}});
  });
  wait_until([&] { return held == 2 && team.asleep() == 5; });
  std::atomic<int> here{0};
  team.run(7, {{7, [&](size_t) {  // six threads of seven
                  ++here;
                  while (here < 6) std::this_thread::yield();
                }}});
  second_done = true;
  first.join();
}

void many_callers_get_what_is_theirs() {
  Sleepy team;
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 20; ++caller) {  // more than calls have room
    callers.emplace_back([&] {
      for (size_t count = 1; count < 40; ++count) {
        check(sum(team, 4, count) == static_cast<long>(count * (count - 1)), "the sum of one of many callers");
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  check(team.members() == 3, "members of many callers");
}

// Every member hears of every call and of the end, wherever threads have lost their cores.
void threads_may_halt_anywhere() {
  halting = true;
  for (int repeat = 0; repeat < 20; ++repeat) {
    Sleepy team;
    for (int call = 0; call < 10; ++call) run_together(team, 7, [](size_t) {});
  }
  halting = false;
}

void members_round_as_their_caller() {
#if defined(__x86_64__)
  Sleepy team;
  for (llmjax::FloatMode mode : {0x9fc0u, 0x1f80u, 0x9fc0u}) {  // subnormals are zeros; the default
    std::vector<llmjax::FloatMode> found(4);
    llmjax::set_float_mode(mode);
    run_together(team, 4, [&](size_t i) { found[i] = llmjax::float_mode(); });
    for (llmjax::FloatMode other : found) check((other & 0xffc0) == (mode & 0xffc0), "the floating-point mode");
  }
#endif
}

void tasks_in_turn_are_all_run_in_order_and_spread() {
  for (size_t firsts : {1, 3, 5, 48}) {
    for (size_t seconds : {0, 1, 4, 5, 64}) {
      std::vector<long> run;  // of the first phase from 0 on, of the second from -1 down
      const llmjax::Phase both = llmjax::in_turn({firsts, [&](size_t i) { run.push_back(static_cast<long>(i)); }},
                                                 {seconds, [&](size_t i) { run.push_back(-1 - static_cast<long>(i)); }});
      check(both.count == firsts + seconds, "the number of tasks in turn");
      for (size_t i = 0; i < both.count; ++i) both.task(i);
      size_t first = 0, second = 0;
      for (size_t i = 0; i < both.count; ++i) {
        run[i] >= 0 ? check(run[i] == static_cast<long>(first++), "the order of the first phase's tasks")
                    : check(run[i] == -1 - static_cast<long>(second++), "the order of the second phase's tasks");
        check(first * both.count <= (i + 1) * firsts && (first + 1) * both.count > (i + 1) * firsts, "an even spread");
      }
      check(first == firsts && second == seconds, "that each task is run once");
    }
  }
}

static_assert(llmjax::TeamParts::kLinger <= std::chrono::milliseconds(50), "idle members soon sleep");

}  // namespace

int main() {
  phases_are_ordered<llmjax::Team<>>();
  phases_are_ordered<Sleepy>();
  phases_are_ordered<Awake>();
  what_is_done_is_only_looked_at();
  members_are_woken_as_a_tree_and_then_sleep();
  who_is_awake_need_not_be_woken();
  two_callers_do_not_wait_for_each_other();
  the_tree_goes_past_busy_members();
  many_callers_get_what_is_theirs();
  threads_may_halt_anywhere();
  members_round_as_their_caller();
  tasks_in_turn_are_all_run_in_order_and_spread();
  std::puts("right");
  return 0;
}
