// Which instruction sets this machine has, and the kernels compiled for each.

#include "kernels.h"
#include "quantized.h"
#include "quantizers.h"
#include "searches.h"

#if defined(__linux__) && defined(__x86_64__)
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__linux__) && defined(__aarch64__)
#include <sys/auxv.h>
#endif

// What the library was made from: build.py looks for it.
extern "C" {
extern const char llmjax_digest[] __attribute__((visibility("default")));
const char llmjax_digest[] = LLMJAX_DIGEST;
}

namespace llmjax {

extern const Kernels kernels_generic;
extern const QuantizedKernels quantized_generic;
extern const Searches searches_generic;
extern const Quantizers quantizers_generic;
#if defined(LLMJAX_HAVE_AVX2)
extern const Searches searches_avx2;
extern const Quantizers quantizers_avx2;
extern const Kernels kernels_avx2;
extern const QuantizedKernels quantized_avx2;
#endif
#if defined(LLMJAX_HAVE_AVXVNNI)
extern const QuantizedKernels quantized_avxvnni;
#endif
#if defined(LLMJAX_HAVE_AVX512)
extern const Kernels kernels_avx512;
extern const QuantizedKernels quantized_avx512;
#endif
#if defined(LLMJAX_HAVE_AVX512VNNI)
extern const QuantizedKernels quantized_avx512vnni;
#endif
#if defined(LLMJAX_HAVE_AVX512BF16)
extern const QuantizedKernels quantized_avx512bf16;
#endif
#if defined(LLMJAX_HAVE_AMX)
extern const Kernels kernels_amx;
extern const QuantizedKernels quantized_amx;
#endif
#if defined(LLMJAX_HAVE_DOTPROD)
extern const QuantizedKernels quantized_dotprod;
#endif
#if defined(LLMJAX_HAVE_I8MM)
extern const QuantizedKernels quantized_i8mm;
#endif

namespace {

constexpr int kCount = 9;  // from narrow to wide; the last two are of Arm, whose NEON is the generic one
const char* const kNames[kCount] = {"generic", "avx2", "avxvnni", "avx512", "avx512vnni", "avx512bf16", "amx", "dotprod", "i8mm"};

#if defined(__x86_64__)
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}

bool has_avxvnni() {
  unsigned eax = 7, ebx = 0, ecx = 1, edx = 0;
  __asm__("cpuid" : "+a"(eax), "=b"(ebx), "+c"(ecx), "=d"(edx));
  return has_avx2() && (eax & (1u << 4)) != 0;
}

bool has_avx512vnni() { return has_avx512() && __builtin_cpu_supports("avx512vnni"); }

bool has_avx512bf16() {
  unsigned eax = 7, ebx = 0, ecx = 1, edx = 0;
  __asm__("cpuid" : "+a"(eax), "=b"(ebx), "+c"(ecx), "=d"(edx));
  return has_avx512vnni() && (eax & (1u << 5)) != 0;
}

// Linux hands out the tile registers on request, once a process.
bool has_amx() {
#if defined(__linux__)
  if (!has_avx512bf16()) return false;
  unsigned eax = 7, ebx = 0, ecx = 0, edx = 0;
  __asm__("cpuid" : "+a"(eax), "=b"(ebx), "+c"(ecx), "=d"(edx));
  constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24, kInt8 = 1u << 25;
  if ((edx & kBf16) == 0 || (edx & kTile) == 0 || (edx & kInt8) == 0) return false;
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}
#endif

#if defined(__aarch64__)
bool has_dotprod() {
#if defined(__linux__)
  constexpr unsigned long kDotProducts = 1ul << 20;  // HWCAP_ASIMDDP
  return (getauxval(AT_HWCAP) & kDotProducts) != 0;
#else
  return true;  // every Apple M has them
#endif
}

bool has_i8mm() {
#if defined(__linux__)
  constexpr unsigned long kInt8Products = 1ul << 13, kBf16 = 1ul << 14;  // HWCAP2_I8MM, HWCAP2_BF16
  return has_dotprod() && (~getauxval(AT_HWCAP2) & (kInt8Products | kBf16)) == 0;
#else
  return false;  // Apple's first M lacks them
#endif
}
#endif

// Kernels that would gain nothing from an instruction set are not compiled for it: null.
struct Table {
  bool usable[kCount] = {true};
  const Kernels* kernels[kCount] = {&kernels_generic};
  const QuantizedKernels* quantized[kCount] = {&quantized_generic};
  const Searches* searches[kCount] = {&searches_generic};
  const Quantizers* quantizers[kCount] = {&quantizers_generic};

  void add(int isa, bool here, const Kernels* plain, const QuantizedKernels* of_quantized) {
    if (!here) return;
    usable[isa] = true;
    kernels[isa] = plain;
    quantized[isa] = of_quantized;
  }

  Table() {
#if defined(LLMJAX_HAVE_AVX2)
    add(1, has_avx2(), &kernels_avx2, &quantized_avx2);
    if (usable[1]) searches[1] = &searches_avx2, quantizers[1] = &quantizers_avx2;
#endif
#if defined(LLMJAX_HAVE_AVXVNNI)
    add(2, has_avxvnni(), nullptr, &quantized_avxvnni);
#endif
#if defined(LLMJAX_HAVE_AVX512)
    add(3, has_avx512(), &kernels_avx512, &quantized_avx512);
#endif
#if defined(LLMJAX_HAVE_AVX512VNNI)
    add(4, has_avx512vnni(), nullptr, &quantized_avx512vnni);
#endif
#if defined(LLMJAX_HAVE_AVX512BF16)
    add(5, has_avx512bf16(), nullptr, &quantized_avx512bf16);
#endif
#if defined(LLMJAX_HAVE_AMX)
    add(6, has_amx(), &kernels_amx, &quantized_amx);
#endif
#if defined(LLMJAX_HAVE_DOTPROD)
    add(7, has_dotprod(), nullptr, &quantized_dotprod);
#endif
#if defined(LLMJAX_HAVE_I8MM)
    add(8, has_i8mm(), nullptr, &quantized_i8mm);
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
bool isa_usable(int isa) { return isa >= 0 && isa < kCount && table().usable[isa]; }

const Kernels* find_kernels(int isa, int divisible) {
  if (isa < -1 || isa >= kCount || (isa >= 0 && !isa_usable(isa))) return nullptr;
  for (int i = isa < 0 ? kCount - 1 : isa; i >= 0; --i) {
    const Kernels* kernels = table().kernels[i];
    if (kernels != nullptr && divisible % kernels->lanes == 0) return kernels;
  }
  return nullptr;
}

namespace {

// What was compiled for an instruction set (-1: the best), or for the next narrower one; null: this machine lacks it.
template <typename Compiled>
const Compiled* widest(const Compiled* const (&all)[kCount], int isa) {
  if (isa < -1 || isa >= kCount || (isa >= 0 && !isa_usable(isa))) return nullptr;
  int i = isa < 0 ? kCount - 1 : isa;
  while (all[i] == nullptr) --i;
  return all[i];
}

}  // namespace

const QuantizedKernels* find_quantized_kernels(int isa) { return widest(table().quantized, isa); }

namespace {

const Searches* find_searches(int isa, const SubBlocks& blocks) {
  return blocks.numbers > kMostNumbers ? nullptr : widest(table().searches, isa);
}

const Quantizer* find_quantizer(int isa, int type) {
  const Quantizers* known = widest(table().quantizers, isa);
  for (size_t i = 0; known != nullptr && i < known->count; ++i) {
    if (known->first[i].type == type) return &known->first[i];
  }
  return nullptr;
}

}  // namespace
}  // namespace llmjax

// For the Python side, which asks through ctypes.
#pragma GCC visibility push(default)
extern "C" {
int llmjax_isa_count() { return llmjax::isa_count(); }
const char* llmjax_isa_name(int isa) { return llmjax::isa_name(isa); }
int llmjax_isa_usable(int isa) { return llmjax::isa_usable(isa) ? 1 : 0; }

// Both: 1 if it was done; 0: there is no such instruction set, or sub-blocks have too many numbers.
// fit: [4, count], scale, minimum, origin and multiplier.
int llmjax_fit_affine(int isa, const float* x, const float* weights, size_t numbers, size_t count, float top, float first,
                      int steps, int absolute, float* fit) {
  const llmjax::SubBlocks blocks{x, numbers, count};
  const llmjax::Searches* searches = llmjax::find_searches(isa, blocks);
  if (searches == nullptr) return 0;
  searches->affine(blocks, weights, {top, first, steps, absolute != 0}, {fit, fit + count, fit + 2 * count, fit + 3 * count});
  return 1;
}

// out: so many blocks of a type. 1 if it was done; 0: there is no such instruction set, or the type is not known here; -1: a
// weight is infinite or not a number; -2: a scale would exceed float16.
int llmjax_quantize(int isa, int type, const float* weights, size_t blocks, uint8_t* out) {
  const llmjax::Quantizer* quantizer = llmjax::find_quantizer(isa, type);
  if (quantizer == nullptr) return 0;
  const llmjax::Quantized done = quantizer->quantize(weights, blocks, out);
  return done == llmjax::Quantized::kDone ? 1 : done == llmjax::Quantized::kNotFinite ? -1 : -2;
}

// fit: [2, count], scale and multiplier.
int llmjax_fit_symmetric(int isa, const float* x, const float* peaks, size_t numbers, size_t count, float middle, float* fit) {
  const llmjax::SubBlocks blocks{x, numbers, count};
  const llmjax::Searches* searches = llmjax::find_searches(isa, blocks);
  if (searches == nullptr) return 0;
  searches->symmetric(blocks, peaks, middle, fit, fit + count);
  return 1;
}
}
#pragma GCC visibility pop
