// What the threads of a team spend their time on, while somebody records it (llmjax_record in recording.cc).

#ifndef LLMJAX_RECORDING_H_
#define LLMJAX_RECORDING_H_

#include <atomic>
#include <chrono>
#include <cstdint>

namespace llmjax {

// What a phase is for. In the order of WORK in kernels/cpu/recording.py.
enum class Work : int { kOther, kRounding, kProducts, kStores, kAttention, kNorms, kRecurrence, kSampling, kNumber };
constexpr int kWorks = static_cast<int>(Work::kNumber);

inline int64_t nanoseconds() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Nanoseconds of all threads together.
struct Recording {
  std::atomic<bool> on{false};
  std::atomic<int64_t> busy[kWorks]{};     // with tasks of phases
  std::atomic<int64_t> waiting[kWorks]{};  // for other threads at the end of them
  std::atomic<int64_t> calling{0};         // of callers, from the beginning of a call to its end
  std::atomic<int64_t> calls{0}, phases{0};
};

// One for the process, as the team is.
inline Recording& recording() {
  static Recording of_process;
  return of_process;
}

}  // namespace llmjax

#endif  // LLMJAX_RECORDING_H_
