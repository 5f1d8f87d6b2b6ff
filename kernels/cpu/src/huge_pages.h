// Large results in huge pages.

#ifndef LLMJAX_HUGE_PAGES_H_
#define LLMJAX_HUGE_PAGES_H_

#include <cstddef>
#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace llmjax {

// XLA allocates a step's temporaries anew, and beyond what an arena of glibc holds the system maps and zeroes them page
// by page: at 32 rows of 262,144 logits a quarter of a step. Asked for before they are touched, they are huge pages, a
// five-hundredth as many. Nothing happens where the system does not have them.
inline void prefer_huge_pages(void* result, size_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t kHuge = uintptr_t{2} << 20;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(result) + kHuge - 1) / kHuge * kHuge;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(result) + bytes) / kHuge * kHuge;
  if (end > begin + kHuge) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
  (void)result, (void)bytes;
#endif
}

}  // namespace llmjax

#endif  // LLMJAX_HUGE_PAGES_H_
