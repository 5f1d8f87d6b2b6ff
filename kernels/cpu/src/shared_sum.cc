// Sums over devices of several processes of one machine, in memory that all of them map (contract:
// kernels/cpu/shared_sum.py).
//
// Every device has two buffers there. It writes its array into one of them, counts, waits until all others have counted
// as far, and adds up all arrays in the order of the devices, so that the sum is the same on each. The buffers take
// turns: a device that has seen the others' next count knows that they have read what came before, and may write there again.
// Sums that do not need each other may come in any order, so they have places of their own: each has counts and buffers.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>

#ifdef __linux__
#include <linux/futex.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#endif

#include "buffers.h"

namespace llmjax {
namespace {

namespace ffi = xla::ffi;
using Clock = std::chrono::steady_clock;

constexpr size_t kHeader = 4096;  // bytes
constexpr int kSpins = 64, kYields = 200;
constexpr long kNap = 20'000'000;  // ns after which a sleeping thread looks again
constexpr auto kPatience = std::chrono::seconds(300);

struct Header {
  std::atomic<uint32_t> stopped;  // a process has gone: nobody waits any more
};

struct alignas(64) Count {
  std::atomic<uint32_t> sums;  // that the device has written
  std::atomic<uint32_t> sleepers;
};

static_assert(std::atomic<uint32_t>::is_always_lock_free && sizeof(std::atomic<uint32_t>) == sizeof(uint32_t));

constexpr size_t before_buffers(size_t counts) {
  return kHeader + (counts * sizeof(Count) + kHeader - 1) / kHeader * kHeader;
}

struct Shared {
  char* base = nullptr;
  size_t bytes = 0;
  uint32_t devices = 0, places = 0;
  size_t room = 0;  // floats of a buffer

  Header* header() const { return reinterpret_cast<Header*>(base); }
  Count* count(uint32_t place, uint32_t device) const {
    return reinterpret_cast<Count*>(base + kHeader) + place * devices + device;
  }
  float* buffer(uint32_t place, uint32_t device, uint32_t sum) const {
    const size_t number = 2 * (static_cast<size_t>(place) * devices + device) + (sum & 1);
    return reinterpret_cast<float*>(base + before_buffers(places * devices)) + number * room;
  }
};

Shared shared;  // of this process: it is a rank of one group

void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

#ifdef __linux__
void sleep_while(std::atomic<uint32_t>* word, uint32_t value) {
  const timespec nap{0, kNap};
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAIT, value, &nap, nullptr, 0);
}

void wake_all(std::atomic<uint32_t>* word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
}

// Why there is no use in waiting for a device; nullptr: it has counted as far.
const char* wait_for(Count* count, uint32_t sum) {
  const std::atomic<uint32_t>& stopped = shared.header()->stopped;
  auto there = [&] { return static_cast<int32_t>(count->sums.load(std::memory_order_acquire) - sum) >= 0; };
  for (int yield = 0; yield < kYields; ++yield) {
    for (int spin = 0; spin < kSpins; ++spin) {
      if (there()) return nullptr;
      relax();
    }
    if (stopped.load(std::memory_order_relaxed)) return "another rank has gone";
    sched_yield();  // it may want this very core
  }
  const auto deadline = Clock::now() + kPatience;
  while (true) {
    const uint32_t seen = count->sums.load(std::memory_order_acquire);
    if (static_cast<int32_t>(seen - sum) >= 0) return nullptr;
    if (stopped.load(std::memory_order_relaxed)) return "another rank has gone";
    if (Clock::now() > deadline) return "another rank does not come";
    count->sleepers.fetch_add(1);
    sleep_while(&count->sums, seen);
    count->sleepers.fetch_sub(1);
  }
}

const char* add_up(const float* x, float* out, size_t size, uint32_t place, uint32_t device) {
  Count* own = shared.count(place, device);
  for (size_t begin = 0; begin < size; begin += shared.room) {
    const size_t n = std::min(shared.room, size - begin);
    const uint32_t sum = own->sums.load(std::memory_order_relaxed) + 1;
    std::memcpy(shared.buffer(place, device, sum), x + begin, n * sizeof(float));
    own->sums.store(sum);
    if (own->sleepers.load()) wake_all(&own->sums);
    float* to = out + begin;
    for (uint32_t other = 0; other < shared.devices; ++other) {
      if (const char* error = wait_for(shared.count(place, other), sum)) return error;
      const float* from = shared.buffer(place, other, sum);
      if (other == 0) {
        std::memcpy(to, from, n * sizeof(float));
      } else {
        for (size_t i = 0; i < n; ++i) to[i] += from[i];
      }
    }
  }
  return nullptr;
}
#endif

ffi::Error sum_handler(ffi::Buffer<ffi::F32> x, ffi::BufferR0<ffi::S32> number, ffi::Result<ffi::Buffer<ffi::F32>> out,
                       int32_t place) {
#ifdef __linux__
  const uint32_t device = static_cast<uint32_t>(*number.typed_data());
  if (shared.base == nullptr || device >= shared.devices || static_cast<uint32_t>(place) >= shared.places) {
    return ffi::Error(ffi::ErrorCode::kFailedPrecondition, "there is no memory that ranks share");
  }
  if (const char* error = add_up(x.typed_data(), out->typed_data(), x.element_count(), place, device)) {
    return ffi::Error(ffi::ErrorCode::kAborted, error);
  }
  return ffi::Error::Success();
#else
  return ffi::Error(ffi::ErrorCode::kUnimplemented, "ranks share memory on Linux alone");
#endif
}

}  // namespace

#pragma GCC visibility push(default)

extern "C" {

// Bytes of the file in which this many devices meet.
size_t llmjax_shared_bytes(uint32_t devices, uint32_t places, size_t room) {
  const size_t counts = static_cast<size_t>(devices) * places;
  return before_buffers(counts) + counts * 2 * room * sizeof(float);
}

// Maps the open file, which has that size and was zeros; false: the system refuses. No sum may be under way.
bool llmjax_shared_open(int file, uint32_t devices, uint32_t places, size_t room) {
#ifdef __linux__
  const size_t bytes = llmjax_shared_bytes(devices, places, room);
  void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (base == MAP_FAILED) return false;
  if (shared.base != nullptr) munmap(shared.base, shared.bytes);
  shared = Shared{static_cast<char*>(base), bytes, devices, places, room};
  return true;
#else
  return false;
#endif
}

// Ends all waiting, in all processes, with an error.
void llmjax_shared_stop() {
#ifdef __linux__
  if (shared.base == nullptr) return;
  shared.header()->stopped.store(1);
  for (uint32_t i = 0; i < shared.places * shared.devices; ++i) wake_all(&shared.count(0, i)->sums);
#endif
}
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(llmjax_shared_sum, sum_handler,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::BufferR0<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<int32_t>("place"));

#pragma GCC visibility pop

}  // namespace llmjax
