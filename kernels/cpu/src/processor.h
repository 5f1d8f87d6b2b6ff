// Which instruction sets this processor has, and whether the system lets programs use them.

#ifndef LLMJAX_PROCESSOR_H_
#define LLMJAX_PROCESSOR_H_

#if defined(__linux__) && defined(__x86_64__)
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__linux__) && defined(__aarch64__)
#include <sys/auxv.h>
#elif defined(__APPLE__)
#include <cstddef>
#include <sys/sysctl.h>
#endif

namespace llmjax {

// From narrow to wide; the last two are of Arm, whose NEON is the generic one.
enum Isa : int { kGeneric, kAvx2, kAvxVnni, kAvx512, kAvx512Vnni, kAvx512Bf16, kAmx, kDotProd, kI8mm, kIsas };

constexpr const char* kIsaNames[kIsas] = {"generic", "avx2", "avxvnni", "avx512", "avx512vnni", "avx512bf16", "amx", "dotprod", "i8mm"};

// What a processor that has an instruction set has as well, and takes what is not compiled for it from.
constexpr int kNarrower[kIsas] = {-1, kGeneric, kAvx2, kAvx2, kAvx512, kAvx512Vnni, kAvx512Bf16, kGeneric, kDotProd};

enum class Has : int { kNo, kYes, kRefused };  // kRefused: the processor has it, and the system lets no program use it

#if defined(__x86_64__)

struct CpuId {
  unsigned eax, ebx, ecx, edx;
};

inline CpuId cpuid(unsigned leaf, unsigned sub_leaf) {
  CpuId found{leaf, 0, sub_leaf, 0};
  __asm__ volatile("cpuid" : "+a"(found.eax), "=b"(found.ebx), "+c"(found.ecx), "=d"(found.edx));
  return found;
}

inline bool has_bit(unsigned bits, int bit) { return (bits >> bit & 1) != 0; }

// Not by __builtin_cpu_supports: Zig's clang links what answers it without what finds the answer, so it is always no.
struct Processor {
  CpuId first, seventh, more;  // leaves 1, 7 and 7.1
  unsigned saved = 0;          // registers that the system keeps for each thread

  Processor() : first(cpuid(1, 0)), seventh{}, more{} {
    if (cpuid(0, 0).eax >= 7) seventh = cpuid(7, 0);
    if (seventh.eax >= 1) more = cpuid(7, 1);
    constexpr int kOsXsave = 27;
    if (has_bit(first.ecx, kOsXsave)) {
      unsigned high;
      __asm__ volatile("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
    }
  }

  bool avx2() const {
    constexpr int kFma = 12, kAvx = 28, kF16c = 29, kAvx2 = 5;
    constexpr unsigned kVectors = 0x6;
    return (saved & kVectors) == kVectors && has_bit(first.ecx, kAvx) && has_bit(first.ecx, kFma) &&
           has_bit(first.ecx, kF16c) && has_bit(seventh.ebx, kAvx2);
  }
  bool avx512() const {
    constexpr int kF = 16, kDq = 17, kBw = 30, kVl = 31;
    constexpr unsigned kMasksAndWideVectors = 0xe0;
    return avx2() && (saved & kMasksAndWideVectors) == kMasksAndWideVectors && has_bit(seventh.ebx, kF) &&
           has_bit(seventh.ebx, kDq) && has_bit(seventh.ebx, kBw) && has_bit(seventh.ebx, kVl);
  }
  bool avx_vnni() const { return avx2() && has_bit(more.eax, 4); }
  bool avx512_vnni() const { return avx512() && has_bit(seventh.ecx, 11); }
  bool avx512_bf16() const { return avx512_vnni() && has_bit(more.eax, 5); }
  bool amx() const {
    constexpr int kBf16 = 22, kTile = 24, kInt8 = 25;
    return avx512_bf16() && has_bit(seventh.edx, kBf16) && has_bit(seventh.edx, kTile) && has_bit(seventh.edx, kInt8);
  }
};

// Linux hands out the tile registers on request, once a process.
inline Has ask_for_tiles() {
#if defined(__linux__)
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0 ? Has::kYes : Has::kRefused;
#else
  return Has::kRefused;
#endif
}

inline Has has(int isa) {
  static const Processor processor;
  const auto whether = [](bool there) { return there ? Has::kYes : Has::kNo; };
  switch (isa) {
    case kGeneric: return Has::kYes;
    case kAvx2: return whether(processor.avx2());
    case kAvxVnni: return whether(processor.avx_vnni());
    case kAvx512: return whether(processor.avx512());
    case kAvx512Vnni: return whether(processor.avx512_vnni());
    case kAvx512Bf16: return whether(processor.avx512_bf16());
    case kAmx: return processor.amx() ? ask_for_tiles() : Has::kNo;
    default: return Has::kNo;
  }
}

#elif defined(__aarch64__)

#if defined(__APPLE__)
inline bool system_says(const char* feature) {
  int value = 0;
  size_t size = sizeof(value);
  return sysctlbyname(feature, &value, &size, nullptr, 0) == 0 && value != 0;
}
#endif

inline Has has(int isa) {
#if defined(__linux__)
  constexpr unsigned long kDotProducts = 1ul << 20;                    // HWCAP_ASIMDDP
  constexpr unsigned long kInt8Products = 1ul << 13, kBf16 = 1ul << 14;  // HWCAP2_I8MM, HWCAP2_BF16
  const bool dots = (getauxval(AT_HWCAP) & kDotProducts) != 0;
  const bool products = dots && (~getauxval(AT_HWCAP2) & (kInt8Products | kBf16)) == 0;
#elif defined(__APPLE__)
  const bool dots = system_says("hw.optional.arm.FEAT_DotProd");
  const bool products = dots && system_says("hw.optional.arm.FEAT_I8MM") && system_says("hw.optional.arm.FEAT_BF16");
#else
  const bool dots = false, products = false;
#endif
  return isa == kGeneric || (isa == kDotProd && dots) || (isa == kI8mm && products) ? Has::kYes : Has::kNo;
}

#else

inline Has has(int isa) { return isa == kGeneric ? Has::kYes : Has::kNo; }

#endif

}  // namespace llmjax

#endif  // LLMJAX_PROCESSOR_H_
