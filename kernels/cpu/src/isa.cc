// Which instruction sets this machine has, and the kernels compiled for each.

#include "kernels.h"

#if defined(__linux__) && defined(__x86_64__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace llmjax {

extern const Kernels kernels_generic;
#if defined(LLMJAX_HAVE_AVX2)
extern const Kernels kernels_avx2;
#endif
#if defined(LLMJAX_HAVE_AVX512)
extern const Kernels kernels_avx512;
#endif
#if defined(LLMJAX_HAVE_AMX)
extern const Kernels kernels_amx;
#endif

namespace {

constexpr int kCount = 4;  // from narrow to wide
const char* const kNames[kCount] = {"generic", "avx2", "avx512", "amx"};

#if defined(__x86_64__)
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}

// Linux hands out the tile registers on request, once a process.
bool has_amx() {
#if defined(__linux__)
  if (!has_avx512()) return false;
  unsigned eax = 7, ebx = 0, ecx = 0, edx = 0;
  __asm__("cpuid" : "+a"(eax), "=b"(ebx), "+c"(ecx), "=d"(edx));
  constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24;
  if ((edx & kBf16) == 0 || (edx & kTile) == 0) return false;
  eax = 7, ecx = 1;
  __asm__("cpuid" : "+a"(eax), "=b"(ebx), "+c"(ecx), "=d"(edx));
  if ((eax & (1u << 5)) == 0) return false;  // AVX-512 BF16
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}
#endif

struct Table {
  const Kernels* usable[kCount] = {&kernels_generic, nullptr, nullptr, nullptr};

  Table() {
#if defined(LLMJAX_HAVE_AVX2)
    if (has_avx2()) usable[1] = &kernels_avx2;
#endif
#if defined(LLMJAX_HAVE_AVX512)
    if (has_avx512()) usable[2] = &kernels_avx512;
#endif
#if defined(LLMJAX_HAVE_AMX)
    if (has_amx()) usable[3] = &kernels_amx;
#endif
  }
};

const Table& table() {
  static const Table instance;
  return instance;
}

}  // namespace

int isa_count() { return kCount; }
const char* isa_name(int isa) { return kNames[isa]; }
bool isa_usable(int isa) { return isa >= 0 && isa < kCount && table().usable[isa] != nullptr; }

const Kernels* find_kernels(int isa, int divisible) {
  if (isa < -1 || isa >= kCount || (isa >= 0 && !isa_usable(isa))) return nullptr;
  for (int i = isa < 0 ? kCount - 1 : isa; i >= 0; --i) {
    const Kernels* kernels = table().usable[i];
    if (kernels != nullptr && divisible % kernels->lanes == 0) return kernels;
  }
  return nullptr;
}

}  // namespace llmjax

// For the Python side, which asks through ctypes.
#pragma GCC visibility push(default)
extern "C" {
int llmjax_isa_count() { return llmjax::isa_count(); }
const char* llmjax_isa_name(int isa) { return llmjax::isa_name(isa); }
int llmjax_isa_usable(int isa) { return llmjax::isa_usable(isa) ? 1 : 0; }
}
#pragma GCC visibility pop
