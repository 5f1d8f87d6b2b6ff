// Zeros that take memory only when they are written to (contract: kernels/zeros.py).

#include <cstring>

#ifdef __linux__
#include <sys/mman.h>
#include <unistd.h>
#endif

#include "buffers.h"
#include "huge_pages.h"

namespace llmjax {
namespace {

namespace ffi = xla::ffi;

constexpr size_t kLarge = 1 << 20;  // bytes; for fewer a call of the system is not worth it

// Pages of private memory that the system is told to forget are zeros when they are touched again, as malloc's are.
bool forget(char* begin, char* end) {
#ifdef __linux__
  return madvise(begin, static_cast<size_t>(end - begin), MADV_DONTNEED) == 0;
#else
  return false;
#endif
}

void zero(char* data, size_t size) {
  if (size < kLarge) {
    std::memset(data, 0, size);
    return;
  }
#ifdef __linux__
  const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
#else
  const uintptr_t page = 4096;
#endif
  const uintptr_t first = reinterpret_cast<uintptr_t>(data), past = first + size;
  char* begin = reinterpret_cast<char*>((first + page - 1) / page * page);
  char* end = reinterpret_cast<char*>(past / page * page);
  prefer_huge_pages(data, size);  // attention reads them in runs of some KB, each of which would look for its page anew
  std::memset(data, 0, static_cast<size_t>(begin - data));
  std::memset(end, 0, static_cast<size_t>(data + size - end));
  if (!forget(begin, end)) std::memset(begin, 0, static_cast<size_t>(end - begin));  // locked in memory, for example
}

ffi::Error zeros_handler(ffi::Result<ffi::AnyBuffer> out) {
  zero(static_cast<char*>(out->untyped_data()), out->size_bytes());
  return ffi::Error::Success();
}

}  // namespace

#pragma GCC visibility push(default)

XLA_FFI_DEFINE_HANDLER_SYMBOL(llmjax_zeros, zeros_handler, ffi::Ffi::Bind().Ret<ffi::AnyBuffer>());

#pragma GCC visibility pop

}  // namespace llmjax
