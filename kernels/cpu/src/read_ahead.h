// Fetching what a walk over memory comes to later.

#ifndef LLMJAX_READ_AHEAD_H_
#define LLMJAX_READ_AHEAD_H_

#include <cstddef>

namespace {

// Hardware prefetches the lines after those read, but loses track at the end of each page, and memory gives less to a core that
// reads it in one place than in some. So an array is blocks of kPlaces runs, and while a block is read the next one is fetched,
// kLines lines of every run in turn.
template <int kLines>
class ReadAhead {
 public:
  // For a walk over the `bytes` of `array` that begin at `at`, in `steps` steps.
  ReadAhead(const void* array, const void* at, size_t bytes, int steps) : step_(static_cast<int>(bytes)), turn_(kTurn * steps) {
    const size_t before = static_cast<size_t>(static_cast<const char*>(at) - static_cast<const char*>(array));
    const size_t turn = before / kTurn, of_block = turn % kTurns;
    line_ = static_cast<const char*>(array) + (turn / kTurns + 1) * kBlock + of_block * kLines * kLine;
    left_ = kTurns - static_cast<int>(of_block);
    due_ = turn_ - static_cast<int>(before % kTurn) * steps;
  }
  // Once a step, in which a turn may be due, or none. Without a branch, which would be mispredicted, for turns and steps have no
  // common rhythm: when none is due, the same lines are asked for again.
  void next() {
#pragma GCC unroll 12
    for (int i = 0; i < kPlaces * kLines; ++i) __builtin_prefetch(line_ + i / kLines * kRun + i % kLines * kLine, 0, 2);
    due_ -= step_;
    const bool due = due_ <= 0;
    due_ += due ? turn_ : 0;
    line_ += due ? kLines * kLine : 0;
    left_ -= due;
    if (left_ == 0) line_ += kBlock - kRun, left_ = kTurns;
  }

 private:
  // In bytes, but for kTurns. Two blocks are a quarter of a small second cache.
  static constexpr int kPlaces = 4, kLine = 64, kTurn = kPlaces * kLines * kLine;
  static constexpr int kRun = 240 * kLine, kBlock = kPlaces * kRun, kTurns = kBlock / kTurn;
  static_assert(kTurns * kTurn == kBlock, "all lines of a run have their turn");
  const char* line_;  // the next one of the first run
  int left_;          // turns of this block
  int due_;           // bytes until the next turn, times the steps
  int step_, turn_;   // bytes of a step and of a turn, times the steps
};

}  // namespace

#endif  // LLMJAX_READ_AHEAD_H_
