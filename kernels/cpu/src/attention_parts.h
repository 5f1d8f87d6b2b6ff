// Products of few queries with keys and of few weights with values in tile registers, which multiply bf16 or int8. So that
// nothing is lost, a query's or a weight's number is two parts of that type: with pages of bf16 (or what is widened to it)
// its upper half and what that leaves, rounded, together exact to 2^-16 of the number; with pages of int8 the two bytes of
// a 16-bit integer, exact to 2^-16 of the largest number of its row. A tile has eight rows: the upper parts of all, then
// the lower ones.

#ifndef LLMJAX_ATTENTION_PARTS_H_
#define LLMJAX_ATTENTION_PARTS_H_

#include "bf16_gemm.h"
#include "kv_types.h"

namespace {

constexpr int kRowsOfTile = kTile / 2;  // each in two parts
constexpr int kTileBytes = 64;          // of a row of a tile

// What is multiplied with pages of T.
template <class T>
constexpr bool kBytewise = false;
template <>
inline constexpr bool kBytewise<Int8> = true;
template <class T>
constexpr int kTileColumns = kBytewise<T> ? 64 : 32;  // elements of a tile's row

// Asks for lines that are used next, some at a time, while what is here is multiplied: memory gives most to a core that has
// always asked for something, in several pages, and in order, so that hardware asks for more.
class LinesAhead {
 public:
  LinesAhead() = default;
  // `pieces` of memory, a multiple of kPlaces, of `lines` lines each.
  LinesAhead(const void* const* pieces, int count, int lines)
      : pieces_(pieces), apart_(count / kPlaces), lines_(lines), left_(count / kPlaces * lines) {}
  // A line at each place, kTimes times.
  template <int kTimes>
  void next() {
#pragma GCC unroll 4
    for (int i = 0; i < kTimes && left_ > 0; ++i, --left_) {
      for (int place = 0; place < kPlaces; ++place) {
        __builtin_prefetch(static_cast<const char*>(pieces_[place * apart_]) + line_ * 64, 0, 2);
      }
      if (++line_ == lines_) line_ = 0, ++pieces_;
    }
  }

 private:
  static constexpr int kPlaces = 4;
  const void* const* pieces_ = nullptr;
  int apart_ = 0, lines_ = 0, line_ = 0, left_ = 0;
};

// 32 numbers as upper and lower parts.
inline void split(Vec a, Vec b, char* upper, char* lower) {
  const Vec of_a = bit_cast<Vec>(bit_cast<Bits>(a) & 0xffff0000u), of_b = bit_cast<Vec>(bit_cast<Bits>(b) & 0xffff0000u);
  const Vec parts = round_pairs(of_a, of_b), rests = round_pairs(a - of_a, b - of_b);
  std::memcpy(upper, &parts, sizeof(parts));
  std::memcpy(lower, &rests, sizeof(rests));
}

// The lower byte of each integer.
inline void store_low_bytes(void* to, Int v) { _mm_storeu_si128(static_cast<__m128i*>(to), _mm512_cvtepi32_epi8((__m512i)v)); }
inline Int round_to_int(Vec v) { return (Int)_mm512_cvtps_epi32((__m512)v); }

// What makes numbers integers of `most` at most, from the largest of them; NaN if one is not finite, as `bad` then is.
inline float scale_of(Vec largest, Vec bad, float most) {
  return fmax2(horizontal_max(largest), 1e-30f) * (1 / most) + horizontal_sum(bad);
}

// Eight queries [8, size] as the right-hand side of keys * q^T: out[size * sizeof / 4, 16] of four bytes of a query.
template <class T>
inline void split_queries(const float* q, int size, uint32_t* out, float* scales) {
  for (int d = 0; d < size; d += kTileColumns<T>, out += kTile * kTile) {
    Vec parts[kTile];
    for (int i = 0; i < kRowsOfTile; ++i) {
      const float* const from = q + static_cast<size_t>(i) * size;
      char* const upper = reinterpret_cast<char*>(&parts[i]);
      char* const lower = reinterpret_cast<char*>(&parts[i + kRowsOfTile]);
      if constexpr (kBytewise<T>) {
        if (d == 0) {
          Vec largest{}, bad{};
          for (int j = 0; j < size; j += kLanes) {
            largest = vmax(vabs(load(from + j)), largest);
            bad += load(from + j) * splat(0.0f);
          }
          scales[i] = scale_of(largest, bad, 127 * 256 + 127);
        }
        for (int j = 0; j < kTileColumns<T>; j += kLanes) {
          const Int all = round_to_int(load(from + d + j) * splat(1 / scales[i])), high = (all + 128) >> 8;
          store_low_bytes(upper + j, high), store_low_bytes(lower + j, all - (high << 8));
        }
      } else {
        split(load(from + d), load(from + d + kLanes), upper, lower);
      }
    }
    transpose(parts);
    for (int i = 0; i < kTile; ++i) std::memcpy(out + i * kTile, &parts[i], sizeof(Vec));
  }
}

// Macros, since compilers want registers as literals. Parts of queries have signs, parts of weights have none.
#define LLMJAX_KEYS(group, tile)                   \
  _tile_loadd(tile, key(group, at), row_bytes);    \
  if constexpr (kBytewise<T>) {                    \
    _tile_dpbssd(group, tile, 6);                  \
  } else {                                         \
    _tile_dpbf16ps(group, tile, 6);                \
  }                                                \
  ahead.next<sizeof(T) + 1>();
#define LLMJAX_VALUES(column, tile)                           \
  _tile_loadd(tile, from + column * tiles, kTileBytes);       \
  if constexpr (kBytewise<T>) {                               \
    _tile_dpbusd(column, 4, tile);                            \
  } else {                                                    \
    _tile_dpbf16ps(column, 4, tile);                          \
  }                                                           \
  ahead.next<2>();

// products[16 * kGroups, 16]: 16 keys after each of keys[0 .. kGroups], which lie one after the other, times `queries`.
template <class T, int kGroups>
inline void multiply_keys(const void* const* keys, int row_bytes, const uint32_t* queries, float* products, LinesAhead& ahead) {
  static_assert(kGroups == 2 || kGroups == 4);
  const auto key = [&](int group, int at) { return static_cast<const char*>(keys[group]) + at; };
  finish_stores();
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (kGroups == 4) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int at = 0; at < row_bytes; at += kTileBytes, queries += kTile * kTile) {
    _tile_loadd(6, queries, kTileBytes);
    LLMJAX_KEYS(0, 4)
    LLMJAX_KEYS(1, 5)
    if constexpr (kGroups == 4) {
      LLMJAX_KEYS(2, 4)
      LLMJAX_KEYS(3, 5)
    }
  }
  _tile_stored(0, products, kTileBytes);
  _tile_stored(1, products + kTile * kTile, kTileBytes);
  if constexpr (kGroups == 4) {
    _tile_stored(2, products + 2 * kTile * kTile, kTileBytes);
    _tile_stored(3, products + 3 * kTile * kTile, kTileBytes);
  }
  finish_stores();
}

// Both parts of a sum as one number, before its scale.
template <class T>
inline Vec whole(Vec upper, Vec lower) {
  if constexpr (kBytewise<T>) return __builtin_convertvector((bit_cast<Int>(upper) << 8) + bit_cast<Int>(lower), Vec);
  return upper + lower;
}

// scores[m, c] of products [16 keys, 16], whose columns are both parts of kRows queries.
template <class T, int kRows>
inline void add_parts(const float* products, const float* scales, float* scores, int stride) {
  Vec rows[kTile];
  for (int i = 0; i < kTile; ++i) rows[i] = load(products + i * kTile);
#pragma GCC unroll 8
  for (int i = 0; i < kRowsOfTile; ++i) {
    exchange<kRowsOfTile>(rows[i], rows[i + kRowsOfTile]);
    rows[i] = whole<T>(rows[i], rows[i + kRowsOfTile]);
  }
  transpose_stages<kRowsOfTile, kRowsOfTile / 2>(rows);
  for (int m = 0; m < kRows; ++m) store(scores + m * stride, kBytewise<T> ? rows[m] * splat(scales[m]) : rows[m]);
}

// Where the first keys of a row of a tile, from c on, lie among staged values, for columns n .. n + 16: four bytes a column.
// Tiles of the same columns of a block of `keys` come one after the other.
template <class T>
inline uint32_t* staged(uint32_t* values, int keys, int c, int n) {
  constexpr int kKeys = kTileColumns<T>, kOfRow = kKeys / kTile;  // of a tile, of a row
  return values + ((static_cast<size_t>(n / kTile) * (keys / kKeys) + c / kKeys) * kTile + c % kKeys / kOfRow) * kTile;
}

// Sixteen rows of values, which are keys c .. c + 16 of a block of `keys`, as the right-hand side of weights * v. Those of
// int8 leave columns in the order that `in_order` mends.
template <class T>
inline void stage_values(const T* const* rows, int size, int keys, int c, uint32_t* values) {
  if constexpr (kBytewise<T>) {
    for (int i = 0; i < kTile; i += 4) {
      for (int d = 0; d < size; d += 64) {
        __m512i from[4];
        for (int j = 0; j < 4; ++j) from[j] = _mm512_loadu_si512(rows[i + j] + d);
        const __m512i pairs[2][2] = {{_mm512_unpacklo_epi8(from[0], from[1]), _mm512_unpacklo_epi8(from[2], from[3])},
                                     {_mm512_unpackhi_epi8(from[0], from[1]), _mm512_unpackhi_epi8(from[2], from[3])}};
        for (int j = 0; j < 2; ++j) {
          const int n = d + 2 * kTile * j;
          _mm512_storeu_si512(staged<T>(values, keys, c + i, n), _mm512_unpacklo_epi16(pairs[j][0], pairs[j][1]));
          _mm512_storeu_si512(staged<T>(values, keys, c + i, n + kTile), _mm512_unpackhi_epi16(pairs[j][0], pairs[j][1]));
        }
      }
    }
  } else {
    for (int i = 0; i < kTile; i += 2) {
      for (int d = 0; d < size; d += 2 * kTile) {
        pair(rows[i] + d, rows[i + 1] + d, staged<T>(values, keys, c + i, d), staged<T>(values, keys, c + i, d + kTile));
      }
    }
  }
}

// A row whose columns are as `stage_values` left them, in order.
template <class T>
inline void in_order(float* row, int size) {
  if constexpr (!kBytewise<T>) return;
  for (int d = 0; d < size; d += kTileBytes) {
    float given[kTileBytes];
    std::memcpy(given, row + d, sizeof(given));
    for (int i = 0; i < kTileBytes; i += 4) {
      std::memcpy(row + d + i, given + i / 4 % 4 * kTile + i / kTile * 4, 4 * sizeof(float));
    }
  }
}

// products[16, size]: both parts of `weights`, rows of `stride` bytes, times staged values, begin .. end of a block of `keys`.
template <class T, int kColumns>
inline void multiply_weights(const char* weights, int stride, const uint32_t* values, int size, int keys, int begin, int end,
                             float* products, LinesAhead& ahead) {
  static_assert(kColumns == 2 || kColumns == 4);
  const int tiles = keys / kTileColumns<T> * kTile * kTile;  // of the same columns
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (kColumns == 4) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int k = begin / kTileColumns<T> * kTileColumns<T>; k < end; k += kTileColumns<T>) {
    const uint32_t* const from = values + k / kTileColumns<T> * kTile * kTile;
    _tile_loadd(4, weights + k * (kTileBytes / kTileColumns<T>), stride);
    LLMJAX_VALUES(0, 5)
    LLMJAX_VALUES(1, 6)
    if constexpr (kColumns == 4) {
      LLMJAX_VALUES(2, 7)
      LLMJAX_VALUES(3, 5)
    }
  }
  _tile_stored(0, products, size * 4);
  _tile_stored(1, products + kTile, size * 4);
  if constexpr (kColumns == 4) {
    _tile_stored(2, products + 2 * kTile, size * 4);
    _tile_stored(3, products + 3 * kTile, size * 4);
  }
}

#undef LLMJAX_KEYS
#undef LLMJAX_VALUES

}  // namespace

#endif  // LLMJAX_ATTENTION_PARTS_H_
