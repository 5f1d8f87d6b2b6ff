// Dequantized rows as pairs of bf16.

#ifndef LLMJAX_BF16_PAIRS_H_
#define LLMJAX_BF16_PAIRS_H_

#include "quantized_vectors.h"

namespace {

// Rounding costs as much as all else of a weight, so weights grow by three quarters of half a bf16 step, on average over
// mantissas, and lose what bf16 lacks: numbers that bf16 has stay what they are, errors have mean 0 and are 5 % larger
// than to nearest (root mean square).
constexpr float kGrowth = 1 + 0.7213f / 256;

// The upper halves of f32 as the bf16 halves of a lane.
inline void store_pairs(uint32_t* to, Vec low, Vec high) {
  const __m512i upper = _mm512_set4_epi32(0x0f0e0f0e, 0x0b0a0b0a, 0x07060706, 0x03020302);
  _mm512_store_si512(to, _mm512_mask_shuffle_epi8((__m512i)high, 0x3333333333333333u, (__m512i)low, upper));
}

// The code that begins with bit kAt of a word as a weight. It becomes f32 where it is, in the mantissa of the power of two
// whose lowest bits count what its own do.
template <class Codes, int kAt>
inline Vec weight_at(Bits word, Vec scale, Vec offset) {
  constexpr uint32_t kMask = ((1u << Codes::kBits) - 1) << kAt, kSign = Codes::kSigned ? 1u << (Codes::kBits - 1) : 0;
  constexpr float kAbove = static_cast<float>((1u << (23 - kAt)) + kSign);
  const __m512i mask = _mm512_set1_epi32(kMask), power = _mm512_set1_epi32((127 + 23 - kAt) << 23 | kSign << kAt);
  const Vec number = (Vec)_mm512_ternarylogic_epi32((__m512i)word, mask, power, 0x6a);  // (word & mask) ^ power
  return number * scale - (offset + scale * splat(kAbove));
}

// A chunk of 16 rows as pairs of columns, kStep words from each to the next.
template <class Codes, int kStep>
inline void fill_pairs(const uint32_t* words, const FloatValues<Codes>& values, GroupCursor& group, uint32_t* to) {
  constexpr int kHalf = kQuads / 2;
  constexpr bool kWhole = Codes::kMeaning == Meaning::kUint || Codes::kMeaning == Meaning::kInt;
  const auto put = [&](int q, Vec first, Vec second, Vec third, Vec fourth) {
    store_pairs(to + 2 * q * kStep, first, second);
    store_pairs(to + (2 * q + 1) * kStep, third, fourth);
  };
  Vec scales[2], offsets[2];
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
    scales[half] = load(group.scale) * splat(kGrowth), offsets[half] = load(group.offset) * splat(kGrowth);
    group.advance(kChunk / 2);
  }
  if constexpr (kWhole && Codes::kBits == 4) {
#pragma GCC unroll 4
    for (int q = 0; q < kHalf; ++q) {
      const Bits word = load_as<Bits>(words + q * llmjax::kTileRows), lower = word << 12, upper = word >> 12;
      put(q, weight_at<Codes, 12>(lower, scales[0], offsets[0]), weight_at<Codes, 8>(word, scales[0], offsets[0]),
          weight_at<Codes, 16>(word, scales[0], offsets[0]), weight_at<Codes, 12>(upper, scales[0], offsets[0]));
      put(q + kHalf, weight_at<Codes, 16>(lower, scales[1], offsets[1]), weight_at<Codes, 12>(word, scales[1], offsets[1]),
          weight_at<Codes, 8>(upper, scales[1], offsets[1]), weight_at<Codes, 16>(upper, scales[1], offsets[1]));
    }
  } else {
    Bits codes[kQuads];
    unpack<Codes::kBits, !kWhole && FloatValues<Codes>::kMasked>(words, codes);
#pragma GCC unroll 8
    for (int q = 0; q < kQuads; ++q) {
      const Bits four = codes[q];
      const Vec scale = scales[q / kHalf], offset = offsets[q / kHalf];
      if constexpr (!kWhole) {
        put(q, values.template get<0>(four) * scale - offset, values.template get<1>(four) * scale - offset,
            values.template get<2>(four) * scale - offset, values.template get<3>(four) * scale - offset);
      } else if constexpr (Codes::kBits == 8) {
        put(q, weight_at<Codes, 8>(four << 8, scale, offset), weight_at<Codes, 8>(four, scale, offset),
            weight_at<Codes, 8>(four >> 8, scale, offset), weight_at<Codes, 8>(four >> 16, scale, offset));
      } else {
        put(q, weight_at<Codes, 16>(four << 16, scale, offset), weight_at<Codes, 8>(four, scale, offset),
            weight_at<Codes, 16>(four, scale, offset), weight_at<Codes, 16>(four >> 8, scale, offset));
      }
    }
  }
}

}  // namespace

#endif  // LLMJAX_BF16_PAIRS_H_
