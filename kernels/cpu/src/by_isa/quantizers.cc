// Compiled for the generic instruction set and AVX2 (LLMJAX_ISA), without fused multiply-add: every bit counts.

#include "quantizers.h"

#include <cmath>

#include "by_isa/table.h"
#include "searches_kernel.h"

namespace llmjax {
namespace {

constexpr float kLargest = 536870912.0f;  // 2^29, beyond what any block with float16 scales holds
constexpr float kAllZero = 1e-15f;        // ggml's GROUP_MAX_EPS

uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

float of_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// The nearest, halves to even.
uint16_t half_of(float value) {
  const uint32_t bits = bits_of(value) & 0x7fffffff, sign = bits_of(value) >> 16 & 0x8000;
  if (bits >= 0x47800000) return static_cast<uint16_t>(sign | (bits > 0x7f800000 ? 0x7e00 : 0x7c00));
  if (bits >= 0x38800000) return static_cast<uint16_t>(sign | (bits + 0xfff + (bits >> 13 & 1) - 0x38000000) >> 13);
  return static_cast<uint16_t>(sign | (bits_of(of_bits(bits) + 0.5f) - 0x3f000000));  // subnormal
}

float float_of(uint16_t half) {
  const uint32_t sign = (half & 0x8000u) << 16, rest = half & 0x7fffu;
  if (rest >= 0x7c00) return of_bits(sign | 0x7f800000 | (rest & 0x3ff) << 13);
  const float size = rest < 0x400 ? static_cast<float>(rest) * 0x1p-24f : of_bits((rest << 13) + 0x38000000);
  return of_bits(bits_of(size) | sign);
}

bool finite(uint16_t half) { return (half & 0x7c00) != 0x7c00; }

// Writes a scale, and gives it as it is read again.
float store_half(float value, uint8_t* to, bool& fits) {
  const uint16_t half = half_of(value);
  fits = fits && finite(half);
  std::memcpy(to, &half, 2);
  return float_of(half);
}

// `numbers` weights of each of 8 sub-blocks below one another; the last of `count` again for those that are missing.
Columns columns(const float* weights, size_t numbers, size_t count) {
  float turned[kMostNumbers][kLanes];
  for (size_t lane = 0; lane < kLanes; ++lane) {
    const float* const from = weights + numbers * (lane < count ? lane : count - 1);
    for (size_t i = 0; i < numbers; ++i) turned[i][lane] = from[i];
  }
  Columns found;
  std::memcpy(found.rows, turned, numbers * sizeof(Floats));
  return found;
}

// Of all weights: whether they are numbers, and whether they are too large.
struct Peak {
  Ints odd{};  // which lanes have seen infinity or nan
  Floats size{};

  void look(const Columns& x, size_t numbers) {
    for (size_t i = 0; i < numbers; ++i) {
      const Floats each = magnitude(x.rows[i]);
      odd |= ~(each < __builtin_inff());
      size = larger(each, size);
    }
  }

  Quantized verdict(bool fits) const {
    bool large = false;
    for (size_t lane = 0; lane < kLanes; ++lane) {
      if (odd[lane]) return Quantized::kNotFinite;
      large = large || size[lane] > kLargest;
    }
    return large || !fits ? Quantized::kTooLarge : Quantized::kDone;
  }
};

// The number of largest magnitude with its sign, the first of several; 0 and not -0.
Floats largest(const Columns& x, size_t numbers) {
  Floats found = x.rows[0];
  for (size_t i = 1; i < numbers; ++i) found = select(magnitude(x.rows[i]) > magnitude(found), x.rows[i], found);
  return found + 0.0f;
}

Floats reciprocal(Floats scale) { return select(scale == Floats{}, Floats{}, 1.0f / scale); }

// By truncation; 0 for infinity and nan, which come of scales whose reciprocal overflows.
Ints integers(Floats values) {
  const Ints odd = ~(magnitude(values) < __builtin_inff());
  return __builtin_convertvector(select(odd, Floats{}, values), Ints);
}

Ints nearest_bits(Floats value) { return (reinterpret_cast<Ints>(value + 12582912.0f) & 0x7fffff) - 0x400000; }

Floats truncated(Floats values) {  // |values| < 2^31, or infinite or nan
  return select(magnitude(values) < 8388608.0f, __builtin_convertvector(integers(values), Floats), values);
}

Floats round_half_away(Floats values) {
  const Floats whole = truncated(values);
  return whole + truncated(2.0f * (values - whole));
}

void store_nibbles(const Ints* codes, size_t lane, uint8_t* to) {
  for (int i = 0; i < 16; ++i) to[i] = static_cast<uint8_t>((codes[i][lane] & 15) | codes[16 + i][lane] << 4);
}

void store_fifth_bits(const Ints* codes, size_t lane, uint8_t* to) {
  uint32_t bits = 0;
  for (int i = 0; i < 32; ++i) bits |= static_cast<uint32_t>(codes[i][lane] >> 4 & 1) << i;
  std::memcpy(to, &bits, 4);
}

// Blocks of 32 weights, eight at a time. `quantize(x)` gives codes with what is stored beside them, whose `store(lane, out,
// fits)` writes a block of `kBytes`.
template <size_t kBytes, typename Quantize>
Quantized small_blocks(const float* weights, size_t blocks, uint8_t* out, Quantize quantize) {
  Peak peak;
  bool fits = true;
  for (size_t first = 0; first < blocks; first += kLanes, weights += 32 * kLanes) {
    const size_t count = blocks - first < kLanes ? blocks - first : kLanes;
    const Columns x = columns(weights, 32, count);
    peak.look(x, 32);
    const auto found = quantize(x);
    for (size_t lane = 0; lane < count; ++lane, out += kBytes) found.store(lane, out, fits);
  }
  return peak.verdict(fits);
}

// Codes of four or five bits, their scale, and perhaps a minimum.
template <bool kMinimum, bool kFifth>
struct SmallCodes {
  static constexpr size_t kFifths = kMinimum ? 4 : 2, kNibbles = kFifths + (kFifth ? 4 : 0), kBytes = kNibbles + 16;
  static constexpr int kTop = kFifth ? 31 : 15;
  Floats scale, least;
  Ints codes[32];

  void set(int i, Floats value) {
    const Ints code = integers(value) & 255;
    codes[i] = code < kTop ? code : Ints{} + kTop;
  }

  void store(size_t lane, uint8_t* out, bool& fits) const {
    store_half(scale[lane], out, fits);
    if (kMinimum) store_half(least[lane], out + 2, fits);
    if (kFifth) store_fifth_bits(codes, lane, out + kFifths);
    store_nibbles(codes, lane, out + kNibbles);
  }
};

// Q4_0 and Q5_0: codes around a middle; the number of largest magnitude becomes code 0, whatever its sign.
template <bool kFifth>
Quantized around_middle(const float* weights, size_t blocks, uint8_t* out) {
  using Codes = SmallCodes<false, kFifth>;
  constexpr float kMiddle = kFifth ? 16 : 8;
  return small_blocks<Codes::kBytes>(weights, blocks, out, [](const Columns& x) {
    Codes found;
    found.scale = largest(x, 32) / -kMiddle;
    const Floats inverse = reciprocal(found.scale);
    for (int i = 0; i < 32; ++i) found.set(i, x.rows[i] * inverse + (kMiddle + 0.5f));
    return found;
  });
}

// Q4_1 and Q5_1: codes from 0 for the minimum to the top for the maximum.
template <bool kFifth>
Quantized from_minimum(const float* weights, size_t blocks, uint8_t* out) {
  using Codes = SmallCodes<true, kFifth>;
  return small_blocks<Codes::kBytes>(weights, blocks, out, [](const Columns& x) {
    Codes found;
    Floats least = x.rows[0], most = x.rows[0];  // of 0 and -0 the first is the minimum
    for (int i = 1; i < 32; ++i) {
      least = select(x.rows[i] < least, x.rows[i], least);
      most = larger(most, x.rows[i]);
    }
    found.least = least;
    found.scale = (most - least) / static_cast<float>(Codes::kTop) + 0.0f;
    const Floats inverse = reciprocal(found.scale);
    for (int i = 0; i < 32; ++i) found.set(i, (x.rows[i] - least) * inverse + 0.5f);
    return found;
  });
}

struct ByteCodes {
  static constexpr size_t kBytes = 34;
  Floats scale;
  Ints codes[32];

  void store(size_t lane, uint8_t* out, bool& fits) const {
    store_half(scale[lane], out, fits);
    for (int i = 0; i < 32; ++i) out[2 + i] = static_cast<uint8_t>(codes[i][lane]);
  }
};

Quantized q8_0(const float* weights, size_t blocks, uint8_t* out) {
  return small_blocks<ByteCodes::kBytes>(weights, blocks, out, [](const Columns& x) {
    ByteCodes found;
    found.scale = magnitude(largest(x, 32)) / 127.0f;
    const Floats inverse = reciprocal(found.scale);
    for (int i = 0; i < 32; ++i) found.codes[i] = integers(round_half_away(x.rows[i] * inverse));
    return found;
  });
}

// The largest of some scales, at least 0 and never -0; nan does not count.
float most_of(Floats values) {
  float most = 0.0f;
  for (size_t lane = 0; lane < kLanes; ++lane) most = values[lane] > most ? values[lane] : most;
  return most;
}

// Scales as parts of the largest, in six bits.
Ints six_bits(Floats scales, float top) {
  const Ints whole = nearest_bits((top > 0 ? 63.0f / top : 0.0f) * scales) & 255;
  return whole < 63 ? whole : Ints{} + 63;
}

// Q4_K and Q5_K: eight sub-blocks with scales and minima of six bits.
template <int kTop, size_t kBytes>
Quantized eight_sub_blocks(const float* weights, size_t blocks, uint8_t* out) {
  constexpr AffineSearch kSearch = kTop == 15 ? AffineSearch{15, -1.0f, 20, false} : AffineSearch{31, -0.5f, 15, false};
  Peak peak;
  bool fits = true;
  for (size_t block = 0; block < blocks; ++block, weights += 256, out += kBytes) {
    const Columns x = columns(weights, 32, kLanes);
    peak.look(x, 32);
    Floats squares = x.rows[0] * x.rows[0];
    for (int i = 1; i < 32; ++i) squares = squares + x.rows[i] * x.rows[i];
    Floats typical = squares / 32.0f;
    for (size_t lane = 0; lane < kLanes; ++lane) typical[lane] = std::sqrt(typical[lane]);
    Columns importance;
    for (int i = 0; i < 32; ++i) importance.rows[i] = magnitude(x.rows[i]) + typical;
    const AffineColumns fit = affine_columns<false>(x, importance, 32, kSearch);

    const Floats minima = -fit.minimum;
    const float top_scale = most_of(fit.scale), top_minimum = most_of(minima);
    const float scale = store_half(top_scale / 63.0f, out, fits), least = store_half(top_minimum / 63.0f, out + 2, fits);
    const Ints low = six_bits(fit.scale, top_scale), high = six_bits(minima, top_minimum);
    uint8_t* const packed = out + 4;
    for (int i = 0; i < 4; ++i) {
      packed[i] = static_cast<uint8_t>(low[i] | low[4 + i] >> 4 << 6);
      packed[4 + i] = static_cast<uint8_t>(high[i] | high[4 + i] >> 4 << 6);
      packed[8 + i] = static_cast<uint8_t>((low[4 + i] & 15) | high[4 + i] << 4);
    }

    // Codes for the rounded scales and minima; the search's where scales are 0.
    const Floats factors = scale * __builtin_convertvector(low, Floats), offsets = least * __builtin_convertvector(high, Floats);
    const Ints lost = factors == Floats{};
    uint8_t codes[256];
    for (int i = 0; i < 32; ++i) {
      const Floats anew = nearest((x.rows[i] + offsets) / factors, 0, kTop);
      const Floats searched = nearest((x.rows[i] - fit.origin) * fit.multiplier, 0, kTop);
      const Ints code = __builtin_convertvector(select(lost, searched, anew), Ints);
      for (size_t lane = 0; lane < kLanes; ++lane) codes[32 * lane + i] = static_cast<uint8_t>(code[lane]);
    }
    uint8_t* const low_bits = out + kBytes - 128;
    for (int pair = 0; pair < 4; ++pair) {
      const uint8_t* const of = codes + 64 * pair;
      for (int i = 0; i < 32; ++i) low_bits[32 * pair + i] = static_cast<uint8_t>((of[i] & 15) | of[32 + i] << 4);
    }
    if (kTop == 31) {
      for (int i = 0; i < 32; ++i) {
        int bits = 0;
        for (int run = 0; run < 8; ++run) bits |= (codes[32 * run + i] >> 4) << run;
        out[16 + i] = static_cast<uint8_t>(bits);
      }
    }
  }
  return peak.verdict(fits);
}

Quantized q6_k(const float* weights, size_t blocks, uint8_t* out) {
  Peak peak;
  bool fits = true;
  for (size_t block = 0; block < blocks; ++block, weights += 256, out += 210) {
    const Columns x[2] = {columns(weights, 16, kLanes), columns(weights + 128, 16, kLanes)};
    SymmetricColumns fit[2];
    Ints zero[2];
    for (int half = 0; half < 2; ++half) {
      peak.look(x[half], 16);
      const Floats top = largest(x[half], 16);
      zero[half] = magnitude(top) < kAllZero;
      fit[half] = symmetric_columns(x[half], select(zero[half], Floats{} + 1.0f, top), 16, 32.0f);
      fit[half].scale = select(zero[half], Floats{}, fit[half].scale);
    }
    float most = 0.0f, size = 0.0f;  // the first of largest magnitude; nan does not count
    for (int i = 0; i < 16; ++i) {
      const float each = fit[i / 8].scale[i % 8];
      if (std::fabs(each) > size) most = each, size = std::fabs(each);
    }
    if (size < kAllZero) {
      std::memset(out, 0, 210);
      continue;
    }
    const float inverse = -128.0f / most, scale = store_half(1.0f / inverse, out + 208, fits);
    uint8_t codes[256];
    for (int half = 0; half < 2; ++half) {
      Ints whole = nearest_bits(inverse * fit[half].scale);
      whole = whole < 127 ? whole : Ints{} + 127;
      for (size_t lane = 0; lane < kLanes; ++lane) {
        const int8_t stored = static_cast<int8_t>(whole[lane]);
        whole[lane] = stored;
        out[192 + 8 * half + lane] = static_cast<uint8_t>(stored);
      }
      const Floats factors = scale * __builtin_convertvector(whole, Floats);
      const Ints lost = factors == Floats{};
      for (int i = 0; i < 16; ++i) {
        const Floats anew = nearest(x[half].rows[i] / factors, -32, 31) + 32.0f;
        const Floats searched = select(zero[half], Floats{}, nearest(x[half].rows[i] * fit[half].multiplier, -32, 31) + 32.0f);
        const Ints code = __builtin_convertvector(select(lost, searched, anew), Ints);
        for (size_t lane = 0; lane < kLanes; ++lane) codes[128 * half + 16 * lane + i] = static_cast<uint8_t>(code[lane]);
      }
    }
    for (int half = 0; half < 2; ++half) {
      const uint8_t* const of = codes + 128 * half;
      for (int i = 0; i < 64; ++i) out[64 * half + i] = static_cast<uint8_t>((of[i] & 15) | of[64 + i] << 4);
      for (int i = 0; i < 32; ++i) {
        out[128 + 32 * half + i] = static_cast<uint8_t>(of[i] >> 4 | of[32 + i] >> 4 << 2 | of[64 + i] >> 4 << 4 | of[96 + i] >> 4 << 6);
      }
    }
  }
  return peak.verdict(fits);
}

constexpr Quantizer kQuantizers[] = {
    {2, around_middle<false>}, {3, from_minimum<false>}, {6, around_middle<true>}, {7, from_minimum<true>},
    {8, q8_0}, {12, eight_sub_blocks<15, 144>}, {13, eight_sub_blocks<31, 176>}, {14, q6_k},
};

}  // namespace

LLMJAX_TABLE(Quantizers, quantizers) = {kQuantizers, sizeof kQuantizers / sizeof kQuantizers[0]};

}  // namespace llmjax
