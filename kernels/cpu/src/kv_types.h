// One-byte elements of pages, and how a token's keys and values are stored in each type (contract:
// kernels/attention/types.py, KVPages.encode).

#ifndef LLMJAX_KV_TYPES_H_
#define LLMJAX_KV_TYPES_H_

#include "kernels.h"
#include "simd.h"

namespace {

typedef uint8_t Bytes __attribute__((vector_size(kLanes)));
typedef int8_t SignedBytes __attribute__((vector_size(kLanes)));

// Tags for how a byte is read, not arithmetic types. kMax as in KVLayout.max_value.
struct Int8 {
  uint8_t bits;
  static constexpr float kMax = 127;
};
struct E4M3 {  // OCP FP8: no infinity; all ones is NaN, which is never stored and reads as 480
  uint8_t bits;
  static constexpr float kMax = 448;
};
struct E5M2 {
  uint8_t bits;
  static constexpr float kMax = 57344;
};

// GCC widens by a factor of four only element by element, so that is left to the instruction or done in two steps.
#if defined(__AVX512F__)
inline Vec load(const Int8* p) { return (Vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_as<__m128i>(p))); }
#elif defined(__AVX2__)
inline Vec load(const Int8* p) {
  return (Vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
#else
inline Vec load(const Int8* p) {
  typedef int16_t Short __attribute__((vector_size(kLanes * 2)));
  const Short narrow = __builtin_convertvector(load_as<SignedBytes>(p), Short);
  return __builtin_convertvector(__builtin_convertvector(narrow, Int), Vec);
}
#endif
// Both are a float16 with bits missing, E4M3 one whose exponents are 8 too low; so subnormals need no care.
inline Vec load(const E4M3* p) {
  const Half x = __builtin_convertvector(load_as<Bytes>(p), Half);
  return from_half(((x & 0x80) << 8) | ((x & 0x7f) << 7)) * splat(256.0f);
}
inline Vec load(const E5M2* p) { return from_half(__builtin_convertvector(load_as<Bytes>(p), Half) << 8); }

inline void store_bytes(void* p, Bits bits) {
  const Bytes bytes = __builtin_convertvector(__builtin_convertvector(bits, Half), Bytes);
  std::memcpy(p, &bytes, sizeof(bytes));
}

// To nearest even, like every store below; |v| <= kMax.
inline void store(Int8* p, Vec v) {
  const Vec shifted = v + splat(12582912.0f);  // 1.5 * 2^23: the integer lands in the low bits
  store_bytes(p, bit_cast<Bits>(shifted) & 0xff);
}

template <int kMantissa, int kBias>
inline Bits float8_bits(Vec v) {
  const Bits bits = bit_cast<Bits>(v), magnitude = bits & 0x7fffffff;
  const Bits rounded = magnitude + ((1u << (22 - kMantissa)) - 1) + ((magnitude >> (23 - kMantissa)) & 1);
  const Bits normal = (rounded >> (23 - kMantissa)) - ((127u - kBias) << kMantissa);
  // Below 2^(1 - bias) all are multiples of one step; the addition leaves their number in the low bits.
  constexpr uint32_t kAligned = (127u + 24 - kMantissa - kBias) << 23;
  const Bits subnormal = bit_cast<Bits>(bit_cast<Vec>(magnitude) + splat(bit_cast<float>(kAligned))) - kAligned;
  const Bits small = (Bits)(magnitude < ((128u - kBias) << 23));
  return (subnormal & small) | (normal & ~small) | ((bits >> 24) & 0x80);
}
inline void store(E4M3* p, Vec v) { store_bytes(p, float8_bits<3, 7>(v)); }
inline void store(E5M2* p, Vec v) { store_bytes(p, float8_bits<2, 15>(v)); }

inline Vec vabs(Vec v) { return bit_cast<Vec>(bit_cast<Bits>(v) & 0x7fffffff); }

template <class From, class To>
void store_row(const llmjax::Attention&, const From* from, char* record, int offset, int count, llmjax::Affine) {
  To* to = reinterpret_cast<To*>(record) + static_cast<size_t>(offset) * count;
  for (int i = 0; i < count; i += kLanes) store(to + i, load(from + i));
}

template <class From, class To>
void store_row_scaled(const llmjax::Attention& call, const From* from, char* record, int offset, int count,
                      llmjax::Affine fixed) {
  if (call.token_scales) {
    Vec highest{}, bad{};
    for (int i = 0; i < count; i += kLanes) {
      const Vec x = load(from + i);
      highest = vmax(vabs(x), highest);
      bad += x * splat(0.0f);  // NaN where x is NaN or infinite, and then so is the scale
    }
    const float amax = fmax2(horizontal_max(highest), 1e-30f) + horizontal_sum(bad);
    fixed = {amax * (1.0f / To::kMax), 0.0f};
    std::memcpy(record + static_cast<size_t>(call.page_size) * count + 4 * static_cast<size_t>(offset), &fixed.scale, 4);
  }
  const Vec inverse = splat(1.0f / fixed.scale);
  To* to = reinterpret_cast<To*>(record) + static_cast<size_t>(offset) * count;
  for (int i = 0; i < count; i += kLanes) {
    const Vec x = (load(from + i) - splat(fixed.zero)) * inverse;
    store(to + i, vmin(vmax(x, splat(-To::kMax)), splat(To::kMax)));
  }
}

template <class From>
void store_row_of(const llmjax::Attention& call, const void* from, char* record, int offset, llmjax::Affine fixed) {
  const From* x = static_cast<const From*>(from);
  const int count = call.head_dim;
  switch (call.cache) {
    case llmjax::Type::kF32: return store_row<From, float>(call, x, record, offset, count, fixed);
    case llmjax::Type::kBf16: return store_row<From, Bf16>(call, x, record, offset, count, fixed);
    case llmjax::Type::kF16: return store_row<From, F16>(call, x, record, offset, count, fixed);
    case llmjax::Type::kInt8: return store_row_scaled<From, Int8>(call, x, record, offset, count, fixed);
    case llmjax::Type::kE4M3: return store_row_scaled<From, E4M3>(call, x, record, offset, count, fixed);
    case llmjax::Type::kE5M2: return store_row_scaled<From, E5M2>(call, x, record, offset, count, fixed);
  }
}

}  // namespace

#endif  // LLMJAX_KV_TYPES_H_
