// Scales and offsets of a tile of 16 rows as f32, whatever a format stores: weight = scale * code - offset.

#ifndef LLMJAX_QUANTIZED_SCALES_H_
#define LLMJAX_QUANTIZED_SCALES_H_

#include "quantized.h"
#include "simd.h"

namespace {

using llmjax::CodeKind;
using llmjax::Number;
using llmjax::NumberField;
using llmjax::QuantizedMatrix;

constexpr int kParts = llmjax::kTileRows / kLanes;  // vectors of a tile

inline Vec to_float(Bits integers) { return __builtin_convertvector(bit_cast<Int>(integers), Vec); }

// By way of f16, whose subnormals stay exact where f32 ones count as zero.
inline Vec from_e4m3(Bits code) {
  const Bits magnitude = code & 0x7f;
  const Vec value = from_half(__builtin_convertvector(magnitude << 7, Half)) * splat(256.0f);
  const Int nan = (Int)(magnitude == 0x7f);
  return bit_cast<Vec>(bit_cast<Bits>(value) | (code & 0x80) << 24 | (bit_cast<Bits>(nan) & 0x7fc00000));
}
inline Vec from_e5m2(Bits code) { return from_half(__builtin_convertvector(code << 8, Half)); }

// The number in the low bits of each word.
template <Number kNumber>
inline Vec number(Bits word) {
  if constexpr (kNumber == Number::kF32) return bit_cast<Vec>(word);
  if constexpr (kNumber == Number::kF16) return from_half(__builtin_convertvector(word, Half));
  if constexpr (kNumber == Number::kBf16) return bit_cast<Vec>(word << 16);
  if constexpr (kNumber == Number::kI16) return to_float(bit_cast<Bits>(bit_cast<Int>(word << 16) >> 16));
  if constexpr (kNumber == Number::kU8) return to_float(word & 0xff);
  if constexpr (kNumber == Number::kI8) return to_float(bit_cast<Bits>(bit_cast<Int>(word << 24) >> 24));
  if constexpr (kNumber == Number::kE4M3) return from_e4m3(word & 0xff);
  if constexpr (kNumber == Number::kE8M0) {  // exponent 0 stands for 2^-127
    const Bits exponent = word & 0xff;
    return bit_cast<Vec>(exponent << 23 | (bit_cast<Bits>((Int)(exponent == 0)) & 1u << 22));
  }
}

// The f16 in either half of each word, in fewer shuffles than one after the other.
inline void both_halves(Bits words, Vec& low, Vec& high) {
#if defined(__AVX512F__)
  alignas(64) static constexpr uint16_t kApart[32] = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30,
                                                      1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31};
  const __m512i apart = _mm512_permutexvar_epi16(_mm512_load_si512(kApart), (__m512i)words);
  low = (Vec)_mm512_cvtph_ps(_mm512_castsi512_si256(apart));
  high = (Vec)_mm512_cvtph_ps(_mm512_extracti64x4_epi64(apart, 1));
#elif defined(__F16C__)
  const __m256i order = _mm256_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15, 0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10,
                                         11, 14, 15);
  const __m256i apart = _mm256_permute4x64_epi64(_mm256_shuffle_epi8((__m256i)words, order), 0b11011000);
  low = (Vec)_mm256_cvtph_ps(_mm256_castsi256_si128(apart));
  high = (Vec)_mm256_cvtph_ps(_mm256_extracti128_si256(apart, 1));
#else
  low = number<Number::kF16>(words), high = number<Number::kF16>(words >> 16);
#endif
}

template <Number kNumber, class Put>
inline void each_number(const uint32_t* record, int count, const Put& put) {
  constexpr int kBits = kNumber == Number::kF32 ? 32 : kNumber <= Number::kI16 ? 16 : 8, kPerWord = 32 / kBits;
  int i = 0;
  for (; i + kPerWord <= count; i += kPerWord, record += llmjax::kTileRows) {
    const Bits word = load_as<Bits>(record);
    if constexpr (kNumber == Number::kF16) {
      Vec low, high;
      both_halves(word, low, high);
      put(i, low), put(i + 1, high);
      continue;
    }
#pragma GCC unroll 4
    for (int j = 0; j < kPerWord; ++j) put(i + j, number<kNumber>(word >> (j * kBits)));
  }
  if (i < count) {
    Bits word = load_as<Bits>(record);
    for (; i < count; ++i, word = word >> (kBits % 32)) put(i, number<kNumber>(word));
  }
}

// Calls put(i, values of the rows in this part of the tile) for the numbers of a field.
template <class Put>
inline void read_field(const uint32_t* tile, const NumberField& field, const Put& put) {
  const uint32_t* from = tile + field.start * llmjax::kTileRows;
  switch (field.number) {
    case Number::kF32: return each_number<Number::kF32>(from, field.count, put);
    case Number::kF16: return each_number<Number::kF16>(from, field.count, put);
    case Number::kBf16: return each_number<Number::kBf16>(from, field.count, put);
    case Number::kI16: return each_number<Number::kI16>(from, field.count, put);
    case Number::kU8: return each_number<Number::kU8>(from, field.count, put);
    case Number::kI8: return each_number<Number::kI8>(from, field.count, put);
    case Number::kE4M3: return each_number<Number::kE4M3>(from, field.count, put);
    case Number::kE8M0: return each_number<Number::kE8M0>(from, field.count, put);
  }
}

// Of one tile: [groups + 2][16] each, two groups of zeros for columns that pad the last chunk.
struct GroupScales {
  float *scale, *offset, *super;

  static size_t floats(const QuantizedMatrix& w) { return (static_cast<size_t>(w.groups()) + 2) * llmjax::kTileRows; }
  static size_t bytes(const QuantizedMatrix& w) { return 3 * floats(w) * sizeof(float); }
  GroupScales(const QuantizedMatrix& w, char* memory)
      : scale(reinterpret_cast<float*>(memory)), offset(scale + floats(w)), super(offset + floats(w)) {}
};

inline size_t scales_workspace(const QuantizedMatrix& w, int) { return GroupScales::bytes(w); }

// The numbers of groups, times those of their super groups.
__attribute__((noinline)) void read_numbers(const QuantizedMatrix& w, const uint32_t* tile, const NumberField& field,
                                            const NumberField& super_field, float* values, float* super) {
  if (super_field.count == 0) {
    return read_field(tile, field, [values](int i, Vec v) { store(values + i * llmjax::kTileRows, v); });
  }
  read_field(tile, super_field, [super](int i, Vec v) { store(super + i * llmjax::kTileRows, v); });
  const int per_super = w.super_size / w.group_size;
  int left = per_super;
  Vec above = load(super);
  read_field(tile, field, [&](int i, Vec v) __attribute__((always_inline)) {
    if (left == 0) super += llmjax::kTileRows, above = load(super), left = per_super;
    --left;
    store(values + i * llmjax::kTileRows, v * above);
  });
}

// `factor` is what codes were multiplied by, `bias` what was then added to them.
__attribute__((noinline)) void read_scales(const QuantizedMatrix& w, const uint32_t* tile, const GroupScales& to, float factor, float bias) {
  const int groups = w.groups();
  const float per_code = 1.0f / factor, shift = w.zero + bias * per_code;
  const bool minima = w.minima.count != 0;
  for (int part = 0; part < llmjax::kTileRows; part += kLanes) {
    const uint32_t* from = tile + part;
    float *scale = to.scale + part, *offset = to.offset + part;
    read_numbers(w, from, w.scales, w.super_scales, scale, to.super + part);
    if (minima) read_numbers(w, from, w.minima, w.super_minima, offset, to.super + part);
    if (!minima || factor != 1.0f || shift != 0.0f) {
      for (int g = 0; g < groups; ++g) {
        float *s = scale + g * llmjax::kTileRows, *o = offset + g * llmjax::kTileRows;
        const Vec of_codes = load(s), shifted = of_codes * splat(shift);
        store(o, minima ? load(o) + shifted : shifted);
        if (factor != 1.0f) store(s, of_codes * splat(per_code));
      }
    }
    if (w.zeros.count != 0) {
      read_field(from, w.zeros, [&](int i, Vec v) {
        float* at = offset + i * llmjax::kTileRows;
        store(at, load(at) + load(scale + i * llmjax::kTileRows) * splat(factor) * v);
      });
    }
    for (int g = groups; g < groups + 2; ++g) {
      store(scale + g * llmjax::kTileRows, Vec{});
      store(offset + g * llmjax::kTileRows, Vec{});
    }
  }
}

}  // namespace

#endif  // LLMJAX_QUANTIZED_SCALES_H_
