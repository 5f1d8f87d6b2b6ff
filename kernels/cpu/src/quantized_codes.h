// The codes of a chunk of 32 columns: from words to bytes (four consecutive columns of a row in each 32-bit lane), to
// f32, and their dot products with int8.

#ifndef LLMJAX_QUANTIZED_CODES_H_
#define LLMJAX_QUANTIZED_CODES_H_

#include "quantized_scales.h"

namespace {

constexpr int kQuads = llmjax::kChunk / 4;  // vectors of a chunk

enum class Meaning : int { kUint, kInt, kTable, kE4M3, kE5M2 };

// Codes of one format, and the tables of what they stand for.
template <int kBitsOfCode, Meaning kMeaningOfCode>
struct CodesOf {
  static constexpr int kBits = kBitsOfCode;
  static constexpr Meaning kMeaning = kMeaningOfCode;
  static constexpr bool kFloat8 = kMeaning == Meaning::kE4M3 || kMeaning == Meaning::kE5M2;
  static constexpr bool kSigned = kMeaning == Meaning::kInt || kMeaning == Meaning::kTable;
};

// Calls body(CodesOf<...>()) for the codes of a matrix.
template <class Body>
inline void for_tables(const QuantizedMatrix& w, const Body& body) {
  switch (w.bits) {
    case 1: return body(CodesOf<1, Meaning::kTable>());
    case 2: return body(CodesOf<2, Meaning::kTable>());
    case 3: return body(CodesOf<3, Meaning::kTable>());
    default: return body(CodesOf<4, Meaning::kTable>());
  }
}
template <class Body>
inline void for_integer_codes(const QuantizedMatrix& w, const Body& body) {
  if (w.num_levels != 0) return for_tables(w, body);
  switch (w.bits) {
    case 1: return body(CodesOf<1, Meaning::kUint>());
    case 2: return body(CodesOf<2, Meaning::kUint>());
    case 3: return body(CodesOf<3, Meaning::kUint>());
    case 4: return body(CodesOf<4, Meaning::kUint>());
    case 5: return body(CodesOf<5, Meaning::kUint>());
    case 6: return body(CodesOf<6, Meaning::kUint>());
    default: return body(CodesOf<8, Meaning::kInt>());
  }
}
// The same for codes that stand for other numbers than integers.
template <class Body>
inline void for_float_codes(const QuantizedMatrix& w, const Body& body) {
  if (w.kind == CodeKind::kE4M3) return body(CodesOf<8, Meaning::kE4M3>());
  if (w.kind == CodeKind::kE5M2) return body(CodesOf<8, Meaning::kE5M2>());
  for_tables(w, body);
}
template <class Body>
inline void for_codes(const QuantizedMatrix& w, const Body& body) {
  if (w.kind == CodeKind::kE4M3) return body(CodesOf<8, Meaning::kE4M3>());
  if (w.kind == CodeKind::kE5M2) return body(CodesOf<8, Meaning::kE5M2>());
  for_integer_codes(w, body);
}

template <int kWidth, int kLow, bool kMasked>
inline void add_plane(const uint32_t* words, Bits* codes) {
  constexpr uint32_t kMask = ((1u << kWidth) - 1) * 0x01010101u << kLow;
#pragma GCC unroll 8
  for (int q = 0; q < kWidth; ++q) {
    const Bits word = load_as<Bits>(words + (kLow + q) * llmjax::kTileRows);
#pragma GCC unroll 8
    for (int s = 0; s < 8 / kWidth; ++s) {
      const int right = kWidth * s - kLow;
      const Bits piece = right >= 0 ? word >> (right & 31) : word << (-right & 31);
      Bits& code = codes[s * kWidth + q];
      code = kLow == 0 ? (kMasked ? piece & kMask : piece) : ((kMasked ? code : code & ~kMask) | (piece & kMask));
    }
  }
}

// Bytes of the codes of 32 columns; `words` at the chunk's first and at the rows wanted. Not masked: codes may have bits of
// others above them.
template <int kBits, bool kMasked = true>
inline void unpack(const uint32_t* words, Bits* codes) {
  if constexpr (kBits == 8) {
#pragma GCC unroll 8
    for (int q = 0; q < kQuads; ++q) codes[q] = load_as<Bits>(words + q * llmjax::kTileRows);
  }
  if constexpr (kBits == 1) add_plane<1, 0, kMasked>(words, codes);
  if constexpr (kBits == 2 || kBits == 3) add_plane<2, 0, kMasked>(words, codes);
  if constexpr (kBits == 3) add_plane<1, 2, kMasked>(words, codes);
  if constexpr (kBits >= 4 && kBits <= 6) add_plane<4, 0, kMasked>(words, codes);
  if constexpr (kBits == 5) add_plane<1, 4, kMasked>(words, codes);
  if constexpr (kBits == 6) add_plane<2, 4, kMasked>(words, codes);
}

// Vector `i` of those that `unpack` makes, alone.
template <int kBits>
inline Bits unpack_one(const uint32_t* words, int i) {
  Bits code{};
  const auto add = [&](int width, int low) {  // as `add_plane`
    const Bits word = load_as<Bits>(words + (low + i % width) * llmjax::kTileRows);
    const int right = width * (i / width) - low;
    const Bits piece = right >= 0 ? word >> (right & 31) : word << (-right & 31);
    code |= piece & (((1u << width) - 1) * 0x01010101u << low);
  };
  if constexpr (kBits == 8) return load_as<Bits>(words + i * llmjax::kTileRows);
  if constexpr (kBits == 1) add(1, 0);
  if constexpr (kBits == 2 || kBits == 3) add(2, 0);
  if constexpr (kBits == 3) add(1, 2);
  if constexpr (kBits >= 4 && kBits <= 6) add(4, 0);
  if constexpr (kBits == 5) add(1, 4);
  if constexpr (kBits == 6) add(2, 4);
  return code;
}

// The codes of one column; `words` at the first chunk's.
template <int kBits>
inline Bits unpack_column(const uint32_t* words, uint32_t column) {
  const uint32_t quad = column / 4 % kQuads, byte = column % 4 * 8;
  words += column / llmjax::kChunk * (kBits * llmjax::kTileRows);
  const auto plane = [&](uint32_t width, uint32_t low) {  // as `add_plane`
    const Bits word = load_as<Bits>(words + (low + quad % width) * llmjax::kTileRows);
    return ((word >> (quad / width * width + byte)) & ((1u << width) - 1)) << low;
  };
  if constexpr (kBits == 8) return plane(8, 0);
  if constexpr (kBits == 1) return plane(1, 0);
  if constexpr (kBits == 2) return plane(2, 0);
  if constexpr (kBits == 3) return plane(2, 0) | plane(1, 2);
  if constexpr (kBits == 4) return plane(4, 0);
  if constexpr (kBits == 5) return plane(4, 0) | plane(1, 4);
  return plane(4, 0) | plane(2, 4);
}

// ---- bytes and integer dot products ----

#if (defined(__AVX2__) && !defined(__AVX512F__)) || defined(__AVX512VNNI__)
#define LLMJAX_INT16_PANELS  // int16_panels.h
#endif

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
constexpr bool kUnsignedBytes = true;  // of codes: signed ones are moved by 128
#else
constexpr bool kUnsignedBytes = false;
#endif

// The table of levels as bytes, for `byte_levels`.
struct ByteTable {
#if defined(__AVX2__)
  Bits entries;
#else
  int8_t entries[16];
#endif

  explicit ByteTable(const QuantizedMatrix& w, bool unsigned_bytes) {
    int8_t bytes[16];
    for (int i = 0; i < 16; ++i) {
      bytes[i] = static_cast<int8_t>(static_cast<int>(w.levels[i] * w.level_factor) + (unsigned_bytes ? 128 : 0));
    }
#if defined(__AVX2__)
    for (int i = 0; i < kLanes / 4; ++i) std::memcpy(reinterpret_cast<char*>(&entries) + 16 * i, bytes, 16);
#else
    std::memcpy(entries, bytes, 16);
#endif
  }

  Bits operator()(Bits codes) const {
#if defined(__AVX512F__)
    return (Bits)_mm512_shuffle_epi8((__m512i)entries, (__m512i)codes);
#elif defined(__AVX2__)
    return (Bits)_mm256_shuffle_epi8((__m256i)entries, (__m256i)codes);
#else
    uint8_t at[sizeof(Bits)];
    std::memcpy(at, &codes, sizeof(at));
    for (uint8_t& byte : at) byte = static_cast<uint8_t>(entries[byte]);
    return load_as<Bits>(at);
#endif
  }
};

// A code as the byte that `ByteSums` takes.
template <class Codes>
inline Bits to_bytes(Bits codes, const ByteTable& table, bool unsigned_bytes) {
  if constexpr (Codes::kMeaning == Meaning::kTable) return table(codes);
  return Codes::kMeaning == Meaning::kInt && unsigned_bytes ? codes ^ 0x80808080u : codes;
}
template <class Codes>
inline void unpack_bytes(const uint32_t* words, const ByteTable& table, bool unsigned_bytes, Bits* codes) {
  unpack<Codes::kBits>(words, codes);
#pragma GCC unroll 8
  for (int q = 0; q < kQuads; ++q) codes[q] = to_bytes<Codes>(codes[q], table, unsigned_bytes);
}

inline int32_t four_bytes(const int8_t* x) {
  int32_t four;
  std::memcpy(&four, x, sizeof(four));
  return four;
}

// Sums of products of bytes while they are added up, to what they `start` with: `add` a vector of codes times four int8 of x from
// -127 to 127, the same for all lanes. kTerms of them fit, then `total` brings them into 32 bits.
#if defined(__AVX2__) && !defined(__AVX512F__) && !defined(__AVXVNNI__)
constexpr bool kSumsInPairs = true;  // short chains, but to start with something costs an addition
// In 16 bits, two products a time: kTerms * 2 * 127 * (the largest magnitude of a code) < 2^15.
template <class Codes>
struct ByteSums {
  static constexpr int kLargest = Codes::kSigned ? 128 : (1 << Codes::kBits) - 1;
  static constexpr int kFit = 32767 / (2 * 127 * kLargest), kTerms = kFit < kQuads ? kFit : kQuads;
  static_assert(kTerms >= 1, "two products fit");
  __m256i pairs;
  Int begun;

  void start(Int total) { begun = total, pairs = __m256i{}; }
  void add(Bits codes, const int8_t* x) {
    __m256i bytes = _mm256_set1_epi32(four_bytes(x)), magnitude = (__m256i)codes;
    if constexpr (Codes::kSigned) {  // the sign moves over to x
      bytes = _mm256_sign_epi8(bytes, magnitude);
      magnitude = _mm256_abs_epi8(magnitude);
    }
    pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(magnitude, bytes));
  }
  Int total() const { return begun + (Int)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)); }
};

// The codes that stand for all whose sums are made in the same way.
template <class Codes>
using WithSumsLike = CodesOf<Codes::kSigned ? 8 : Codes::kBits < 4 ? 4 : Codes::kBits, Codes::kSigned ? Meaning::kInt : Meaning::kUint>;
#else
constexpr bool kSumsInPairs = false;
template <class Codes>
struct ByteSums {
  static constexpr int kTerms = kQuads;
  Int sum;

  void start(Int total) { sum = total; }
  void add(Bits codes, const int8_t* x) { sum = add_products(sum, codes, x); }
  Int total() const { return sum; }

 private:
  static Int add_products(Int sum, Bits codes, const int8_t* x) {
#if defined(__AVX512VNNI__)
    return (Int)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, _mm512_set1_epi32(four_bytes(x)));
#elif defined(__AVXVNNI__)
    return (Int)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)codes, _mm256_set1_epi32(four_bytes(x)));
#elif defined(__ARM_FEATURE_DOTPROD)
    return (Int)vdotq_s32((int32x4_t)sum, (int8x16_t)codes, vreinterpretq_s8_s32(vdupq_n_s32(four_bytes(x))));
#else
    // Two 16-bit lanes at a time: even and odd bytes; products of codes and x fit.
    typedef int16_t Short __attribute__((vector_size(kLanes * 4)));
    const Short both = bit_cast<Short>(codes);
    const Short even = Codes::kSigned ? (Short)(both << 8) >> 8 : both & 0xff;
    const Short odd = Codes::kSigned ? both >> 8 : (both >> 8) & 0xff;
    const Short xs_even = bit_cast<Short>(Int{} + ((x[0] & 0xffff) | static_cast<int32_t>(static_cast<uint32_t>(x[2]) << 16)));
    const Short xs_odd = bit_cast<Short>(Int{} + ((x[1] & 0xffff) | static_cast<int32_t>(static_cast<uint32_t>(x[3]) << 16)));
    const Int first = bit_cast<Int>(even * xs_even), second = bit_cast<Int>(odd * xs_odd);
    return sum + ((first << 16) >> 16) + (first >> 16) + ((second << 16) >> 16) + (second >> 16);
#endif
  }
};

template <class Codes>
using WithSumsLike = CodesOf<Codes::kSigned && !kUnsignedBytes ? 8 : 4, Codes::kSigned && !kUnsignedBytes ? Meaning::kInt : Meaning::kUint>;
#endif

// Adds to totals[m * kStride] the dot products of kCount vectors of codes with 4 * kCount int8 of x, of rows x + m * kChunk.
template <class Codes, int kCount, int kRows, int kStride>
inline void add_dots(const Bits* codes, const int8_t* x, Int* totals) {
  constexpr int kTerms = ByteSums<Codes>::kTerms < kCount ? ByteSums<Codes>::kTerms : kCount;
  static_assert(kCount % kTerms == 0, "no rest");
#pragma GCC unroll 8
  for (int begin = 0; begin < kCount; begin += kTerms) {
    ByteSums<Codes> sums[kRows];
#pragma GCC unroll 8
    for (int m = 0; m < kRows; ++m) sums[m].start(totals[m * kStride]);
#pragma GCC unroll 8
    for (int i = begin; i < begin + kTerms; ++i) {
#pragma GCC unroll 8
      for (int m = 0; m < kRows; ++m) sums[m].add(codes[i], x + m * llmjax::kChunk + 4 * i);
    }
#pragma GCC unroll 8
    for (int m = 0; m < kRows; ++m) totals[m * kStride] = sums[m].total();
  }
}

#if defined(__ARM_FEATURE_MATMUL_INT8)
// The same for two rows of x, kChunk apart: products of two by eight and eight by two bytes.
template <int kCount>
inline void add_dots_of_two(const Bits* codes, const int8_t* x, Int* totals) {
  int32x4_t first{}, second{};  // rows 0 and 1 of codes, rows 2 and 3: each with either row of x
#pragma GCC unroll 4
  for (int i = 0; i < kCount; i += 2) {
    const int8x16_t eight = vcombine_s8(vld1_s8(x + 4 * i), vld1_s8(x + llmjax::kChunk + 4 * i));
    const int32x4_t low = (int32x4_t)codes[i], high = (int32x4_t)codes[i + 1];
    first = vmmlaq_s32(first, vreinterpretq_s8_s32(vzip1q_s32(low, high)), eight);
    second = vmmlaq_s32(second, vreinterpretq_s8_s32(vzip2q_s32(low, high)), eight);
  }
  totals[0] += (Int)vuzp1q_s32(first, second);
  totals[1] += (Int)vuzp2q_s32(first, second);
}
#endif

// ---- f32 ----

// What codes stand for, as f32.
template <class Codes>
struct FloatValues {
#if defined(__AVX512F__)
  Vec table;
#else
  const float* levels;
#endif

  explicit FloatValues(const QuantizedMatrix& w) {
#if defined(__AVX512F__)
    alignas(64) float entries[16];
    for (int i = 0; i < 16; ++i) {
      entries[i] = w.num_levels != 0 ? w.levels[i] : static_cast<float>(i & ((1 << imin(Codes::kBits, 4)) - 1));
    }
    table = load(entries);
#else
    levels = w.levels;
#endif
  }

  static constexpr bool kByTable =  // which looks at the low four bits of a byte
#if defined(__AVX512F__)
      Codes::kBits <= 4;
#else
      false;
#endif
  static constexpr bool kMasked = !kByTable || Codes::kBits != 4;  // as `unpack` means it

  // Of byte kByte of each lane.
  template <int kByte>
  Vec get(Bits codes) const {
    const Bits moved = codes >> (8 * kByte);
#if defined(__AVX512F__)
    if constexpr (kByTable) return (Vec)_mm512_permutexvar_ps((__m512i)moved, (__m512)table);
#endif
    const Bits code = kByte == 3 ? moved : moved & 0xff;
    if constexpr (Codes::kMeaning == Meaning::kE4M3) return from_e4m3(code);
    if constexpr (Codes::kMeaning == Meaning::kE5M2) return from_e5m2(code);
    if constexpr (Codes::kMeaning == Meaning::kInt) {
      return to_float(bit_cast<Bits>(bit_cast<Int>(codes << (24 - 8 * kByte)) >> 24));
    }
#if !defined(__AVX512F__)
    if constexpr (Codes::kMeaning == Meaning::kTable) {
#if defined(__AVX2__)
      const Vec low = (Vec)_mm256_permutevar8x32_ps((__m256)load(levels), (__m256i)code);
      const Vec high = (Vec)_mm256_permutevar8x32_ps((__m256)load(levels + 8), (__m256i)code);
      return (Vec)_mm256_blendv_ps((__m256)low, (__m256)high, (__m256)(code << 28));
#else
      Vec values{};
      for (int i = 0; i < kLanes; ++i) values[i] = levels[code[i]];
      return values;
#endif
    }
#endif
    return to_float(code);
  }
};

}  // namespace

#endif  // LLMJAX_QUANTIZED_CODES_H_
