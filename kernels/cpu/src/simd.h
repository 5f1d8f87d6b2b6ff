// Vectors of f32 at the width of the instruction set this file is compiled for, written with compiler vector types so
// that one source serves all of them.
//
// Everything sits in an anonymous namespace and nothing comes from the standard library: a template instantiated by
// several objects would be merged by the linker, and a CPU without AVX-512 might then run the AVX-512 copy.

#ifndef LLMJAX_SIMD_H_
#define LLMJAX_SIMD_H_

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__F16C__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
#define LLMJAX_BF16_VECTORS  // multiply bf16, and nothing else does that faster
#endif

namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
constexpr int kRegisters = 32;
#define LLMJAX_EACH_LANE(f) \
  f(0), f(1), f(2), f(3), f(4), f(5), f(6), f(7), f(8), f(9), f(10), f(11), f(12), f(13), f(14), f(15)
#elif defined(__AVX2__)
constexpr int kLanes = 8;
constexpr int kRegisters = 16;
#define LLMJAX_EACH_LANE(f) f(0), f(1), f(2), f(3), f(4), f(5), f(6), f(7)
#else
constexpr int kLanes = 4;
#if defined(__aarch64__)
constexpr int kRegisters = 32;
#else
constexpr int kRegisters = 16;
#endif
#define LLMJAX_EACH_LANE(f) f(0), f(1), f(2), f(3)
#endif

typedef float Vec __attribute__((vector_size(kLanes * 4)));
typedef int32_t Int __attribute__((vector_size(kLanes * 4)));
typedef uint32_t Bits __attribute__((vector_size(kLanes * 4)));
typedef uint16_t Half __attribute__((vector_size(kLanes * 2)));

// How an element is stored. Bf16 and F16 are tags for the 16 bits, not arithmetic types.
struct Bf16 { uint16_t bits; };
struct F16 { uint16_t bits; };

template <class To, class From>
inline To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

template <class V>
inline V load_as(const void* p) {
  V v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

inline Vec splat(float x) { return x - Vec{}; }  // x - 0 is x, which compilers know; x + 0 is not for -0
inline Vec select(Int mask, Vec yes, Vec no) {
  return bit_cast<Vec>((bit_cast<Int>(yes) & mask) | (bit_cast<Int>(no) & ~mask));
}
// b where either is NaN.
#if defined(__AVX512F__)
inline Vec vmax(Vec a, Vec b) { return (Vec)_mm512_max_ps((__m512)a, (__m512)b); }
inline Vec vmin(Vec a, Vec b) { return (Vec)_mm512_min_ps((__m512)a, (__m512)b); }
#elif defined(__AVX2__)
inline Vec vmax(Vec a, Vec b) { return (Vec)_mm256_max_ps((__m256)a, (__m256)b); }
inline Vec vmin(Vec a, Vec b) { return (Vec)_mm256_min_ps((__m256)a, (__m256)b); }
#else
inline Vec vmax(Vec a, Vec b) { return select(a > b, a, b); }
inline Vec vmin(Vec a, Vec b) { return select(a < b, a, b); }
#endif
inline int imin(int a, int b) { return a < b ? a : b; }
inline int imax(int a, int b) { return a > b ? a : b; }
inline float fmax2(float a, float b) { return a > b ? a : b; }

inline Vec load(const float* p) { return load_as<Vec>(p); }
inline void store(float* p, Vec v) { std::memcpy(p, &v, sizeof(v)); }

// The first `count` lanes, zeros after them.
inline Vec load_part(const float* p, int count) {
  Vec v{};
  std::memcpy(&v, p, count * sizeof(float));
  return v;
}
inline void store_part(float* p, Vec v, int count) { std::memcpy(p, &v, count * sizeof(float)); }

#if defined(__AVX512F__)
inline Vec from_half(Half bits) { return (Vec)_mm512_cvtph_ps((__m256i)bits); }
inline void store(F16* p, Vec v) {
  __m256i bits = _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT);
  std::memcpy(p, &bits, sizeof(bits));
}
#elif defined(__F16C__)
inline Vec from_half(Half bits) { return (Vec)_mm256_cvtph_ps((__m128i)bits); }
inline void store(F16* p, Vec v) {
  __m128i bits = _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT);
  std::memcpy(p, &bits, sizeof(bits));
}
#elif defined(__aarch64__)
inline Vec from_half(Half bits) { return (Vec)vcvt_f32_f16(bit_cast<float16x4_t>(bits)); }
inline void store(F16* p, Vec v) {
  const float16x4_t bits = vcvt_f16_f32((float32x4_t)v);
  std::memcpy(p, &bits, sizeof(bits));
}
#else
// No step may rely on subnormal f32: XLA's threads treat them as zero.
inline Vec from_half(Half bits) {
  Bits half = __builtin_convertvector(bits, Bits);
  Vec normal = bit_cast<Vec>(((half & 0x7fff) << 13) + (112u << 23));
  Vec subnormal = __builtin_convertvector(bit_cast<Int>(half & 0x3ff), Vec) * splat(0x1p-24f);
  Vec magnitude = select((Int)((half & 0x7c00) == 0), subnormal, normal);
  Int special = (Int)((half & 0x7c00) == 0x7c00);
  return bit_cast<Vec>(bit_cast<Bits>(magnitude) | (bit_cast<Bits>(special) & 0x7f800000u) | ((half & 0x8000) << 16));
}
inline uint16_t half_bits(float x) {
  uint32_t bits = bit_cast<uint32_t>(x), sign = (bits >> 16) & 0x8000, magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return sign | 0x7e00 | ((magnitude >> 13) & 0x3ff);  // NaN
  if (magnitude >= 0x477ff000) return sign | 0x7c00;                               // rounds to infinity
  if (magnitude < 0x38800000) {  // subnormal: the addition leaves the rounded mantissa in the low bits
    float aligned = bit_cast<float>(magnitude) + 0.5f;
    return sign | (bit_cast<uint32_t>(aligned) - 0x3f000000);
  }
  return sign | ((magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13);
}
inline void store(F16* p, Vec v) {
  for (int i = 0; i < kLanes; ++i) p[i].bits = half_bits(v[i]);
}
#endif

inline Vec load(const F16* p) { return from_half(load_as<Half>(p)); }

// f32 to bf16 bits in the low half of each lane, to nearest even; NaN stays NaN.
inline Bits bf16_bits(Vec v) {
  Bits bits = bit_cast<Bits>(v);
  Bits rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  Bits nan = bit_cast<Bits>((Int)(v != v));
  return (rounded & ~nan) | (((bits >> 16) | 0x40) & nan);
}
inline Half round_bf16(Vec v) {
#if defined(__AVX512BF16__)
  return (Half)_mm512_cvtneps_pbh((__m512)v);
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  return bit_cast<Half>(vcvt_bf16_f32((float32x4_t)v));
#else
  return __builtin_convertvector(bf16_bits(v), Half);
#endif
}
#if defined(__AVX512BF16__)
// 32 consecutive f32 as bf16, to nearest even.
inline Vec round_pairs(Vec low, Vec high) { return (Vec)(__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low); }
#endif
inline Vec widen_bf16(Half bits) { return bit_cast<Vec>(__builtin_convertvector(bits, Bits) << 16); }
inline Vec load(const Bf16* p) { return widen_bf16(load_as<Half>(p)); }
inline void store(Bf16* p, Vec v) {
  const Half half = round_bf16(v);
  std::memcpy(p, &half, sizeof(half));
}

// Lanes that are kStep apart in each other's place.
template <int kStep, class V>
inline V swap_lanes(V v) {
#define LLMJAX_OTHER(lane) ((lane) ^ kStep)
#if defined(__clang__)
  return __builtin_shufflevector(v, v, LLMJAX_EACH_LANE(LLMJAX_OTHER));
#else
  return __builtin_shuffle(v, Int{LLMJAX_EACH_LANE(LLMJAX_OTHER)});
#endif
#undef LLMJAX_OTHER
}

template <int kStep = kLanes / 2>
inline float horizontal_max(Vec v) {
  v = vmax(v, swap_lanes<kStep>(v));
  if constexpr (kStep > 1) return horizontal_max<kStep / 2>(v);
  return v[0];
}
template <int kStep = kLanes / 2>
inline int32_t horizontal_max(Int v) {
  const Int other = swap_lanes<kStep>(v);
  v = v > other ? v : other;
  if constexpr (kStep > 1) return horizontal_max<kStep / 2>(v);
  return v[0];
}
template <int kStep = kLanes / 2>
inline float horizontal_sum(Vec v) {
  v += swap_lanes<kStep>(v);
  if constexpr (kStep > 1) return horizontal_sum<kStep / 2>(v);
  return v[0];
}

// e^x to about 1 ulp of f32; 0 where that would be subnormal. Range reduction by multiples of ln 2 and a degree 6
// polynomial (Cephes expf, Moshier).
inline Vec vexp(Vec x) {
  const Vec given = x;
  x = vmin(splat(88.0f), vmax(splat(-87.0f), x));
  Vec shifted = x * splat(1.44269504f) + splat(12582912.0f);  // 1.5 * 2^23: the integer part lands in the low bits
  Vec n = shifted - splat(12582912.0f);
  Vec r = x - n * splat(0.693359375f) - n * splat(-2.12194440e-4f);
  Vec p = splat(1.9875691500e-4f);
  p = p * r + splat(1.3981999507e-3f);
  p = p * r + splat(8.3334519073e-3f);
  p = p * r + splat(4.1665795894e-2f);
  p = p * r + splat(1.6666665459e-1f);
  p = p * r + splat(5.0000001201e-1f);
  p = p * r * r + r + splat(1.0f);
#if defined(__AVX512F__)
  const __mmask16 normal = _mm512_cmp_ps_mask((__m512)given, _mm512_set1_ps(-87.0f), _CMP_NLT_UQ);
  return (Vec)_mm512_maskz_scalef_ps(normal, (__m512)p, (__m512)n);
#else
  const Bits power = (bit_cast<Bits>(shifted) + 127u) << 23;
  return bit_cast<Vec>(bit_cast<Int>(p * bit_cast<Vec>(power)) & ~(Int)(given < splat(-87.0f)));
#endif
}

#if defined(__AVX512F__)
// 2^x to 13 bits, for what is then rounded to the 8 bits of bf16, and 2^0 = 1. A degree 3 polynomial for the fraction, of
// least relative error (1.01e-4) among those that are 1 at 0.
inline Vec coarse_exp2(Vec x) {
  const Vec n = (Vec)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), f = x - n;
  Vec p = splat(0.0550090578f);
  p = p * f + splat(0.2422109750f);
  p = p * f + splat(0.6932828980f);
  p = p * f + splat(1.0f);
  return (Vec)_mm512_scalef_ps((__m512)p, (__m512)n);
}
#endif

inline Vec vtanh(Vec x) { return splat(1.0f) - splat(2.0f) / (vexp(x + x) + splat(1.0f)); }

// One stage of a transposition between rows that are `kStep` apart: exchanges the upper half of every 2 * kStep lanes
// of `a` with the lower half of those of `b`.
template <int kStep>
inline void exchange(Vec& a, Vec& b) {
#define LLMJAX_LOW(lane) ((lane) & kStep ? kLanes + (lane) - kStep : (lane))
#define LLMJAX_HIGH(lane) ((lane) & kStep ? kLanes + (lane) : (lane) + kStep)
#if defined(__clang__)
  Vec low = __builtin_shufflevector(a, b, LLMJAX_EACH_LANE(LLMJAX_LOW));
  Vec high = __builtin_shufflevector(a, b, LLMJAX_EACH_LANE(LLMJAX_HIGH));
#else
  Vec low = __builtin_shuffle(a, b, Int{LLMJAX_EACH_LANE(LLMJAX_LOW)});
  Vec high = __builtin_shuffle(a, b, Int{LLMJAX_EACH_LANE(LLMJAX_HIGH)});
#endif
#undef LLMJAX_LOW
#undef LLMJAX_HIGH
  a = low;
  b = high;
}

// Transposes kCount vectors in place, kCount lanes at a time.
template <int kCount, int kStep>
inline void transpose_stages(Vec* rows) {
#pragma GCC unroll 16
  for (int i = 0; i < kCount; ++i) {
    if (!(i & kStep)) exchange<kStep>(rows[i], rows[i + kStep]);
  }
  if constexpr (kStep > 1) transpose_stages<kCount, kStep / 2>(rows);
}

inline void transpose(Vec* rows) { transpose_stages<kLanes, kLanes / 2>(rows); }

template <int kStep, class Combine>
inline Vec reduce_stages(Vec* rows, const Combine& combine) {
#pragma GCC unroll 16
  for (int i = 0; i < kStep; ++i) {
    exchange<kStep>(rows[i], rows[i + kStep]);
    rows[i] = combine(rows[i], rows[i + kStep]);
  }
  if constexpr (kStep > 1) return reduce_stages<kStep / 2>(rows, combine);
  return rows[0];
}

// Lane i of the result is the sum, or the maximum, of the lanes of rows[i]; both overwrite rows.
inline Vec sum_rows(Vec* rows) {
  return reduce_stages<kLanes / 2>(rows, [](Vec a, Vec b) { return a + b; });
}
inline Vec max_rows(Vec* rows) {
  return reduce_stages<kLanes / 2>(rows, [](Vec a, Vec b) { return vmax(a, b); });
}

}  // namespace

#endif  // LLMJAX_SIMD_H_
