// Rows of x in the forms that the methods take.

#ifndef LLMJAX_QUANTIZED_INPUT_H_
#define LLMJAX_QUANTIZED_INPUT_H_

#include "kv_types.h"
#include "quantized_codes.h"

namespace {

using llmjax::kChunk;
using llmjax::Outlier;
using llmjax::QuantizedInput;

constexpr int kVectorsOfHalf = kChunk / 2 / kLanes;

// A small whole number; 0 for NaN.
inline int32_t to_integer(float x) { return x == x ? static_cast<int32_t>(x) : 0; }

// Lane by lane the sums of a vector's halves, each in its first lane.
template <int kStep = kLanes / 4>
inline Vec sum_halves(Vec v) {
  v += swap_lanes<kStep>(v);
  if constexpr (kStep > 1) return sum_halves<kStep / 2>(v);
  return v;
}

// How columns become integers; for those with NaN or infinity `scale` is NaN, which reaches every sum.
struct IntegerScale {
  float peak, scale, inverse;
};

inline IntegerScale integer_scale(const float* x, int columns, float largest) {
  Int most{};  // magnitudes have the same order as integers, with NaN above all
  for (int i = 0; i < columns; i += kLanes) {
    const Int magnitude = bit_cast<Int>(load(x + i)) & 0x7fffffff;
    most = most > magnitude ? most : magnitude;
  }
  const float peak = bit_cast<float>(horizontal_max(most));
  if (peak - peak != 0) return {0, peak - peak, 0};  // NaN
  return {peak, peak * (1.0f / largest), peak > 1e-30f ? largest / peak : 0};
}

// A chunk of f32 as integers, to nearest: put(column, the lowest bits of a vector's lanes), put_sum(2, sum of all) and, where groups
// begin in the middle of a chunk, put_sum(0, sum of the first half) and put_sum(1, sum of the second).
template <class Put, class PutSum>
inline void round_chunk(const float* x, IntegerScale by, bool halves, const Put& put, const PutSum& put_sum) {
  Vec of_half[2] = {};
  for (int half = 0; half < 2; ++half) {
    for (int i = 0; i < kVectorsOfHalf; ++i) {
      const int at = (half * kVectorsOfHalf + i) * kLanes;
      const Vec shifted = load(x + at) * splat(by.inverse) + splat(12582912.0f);  // 1.5 * 2^23: rounds to an integer
      of_half[half] += shifted - splat(12582912.0f);
      put(at, bit_cast<Bits>(shifted));
    }
  }
  if (!halves) return put_sum(2, horizontal_sum(of_half[0] + of_half[1]));
  exchange<kLanes / 2>(of_half[0], of_half[1]);
  const Vec both = sum_halves(of_half[0] + of_half[1]);
  const float first = both[0], second = both[kLanes / 2];
  put_sum(0, first), put_sum(1, second), put_sum(2, first + second);
}

inline void round_to_bytes(const float* x, IntegerScale by, bool halves, int8_t* bytes, float* sums, int32_t* totals, int stride) {
  round_chunk(
      x, by, halves, [&](int column, Bits bits) { store_bytes(bytes + column, bits & 0xff); },
      [&](int i, float sum) {
        sums[i * stride] = sum * by.scale;
        totals[i * stride] = -to_integer(sum);
      });
}

#if defined(LLMJAX_INT16_PANELS)
// In each four columns 1 and 2 change places.
inline void round_to_int16(const float* x, IntegerScale by, bool halves, int16_t* to, float* sums, int stride) {
#if defined(__AVX512F__)
  const __m256i order = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15));
  const auto narrowed = [&](Bits bits) { return _mm256_shuffle_epi8(_mm512_cvtepi32_epi16((__m512i)bits), order); };
#else
  const __m256i order = _mm256_setr_epi8(0, 1, 8, 9, 4, 5, 12, 13, -1, -1, -1, -1, -1, -1, -1, -1, 0, 1, 8, 9, 4, 5, 12, 13, -1, -1, -1, -1,
                                         -1, -1, -1, -1);
  const auto narrowed = [&](Bits bits) {
    return _mm256_castsi256_si128(_mm256_permute4x64_epi64(_mm256_shuffle_epi8((__m256i)bits, order), 0b1000));
  };
#endif
  round_chunk(
      x, by, halves,
      [&](int column, Bits bits) {
        const auto integers = narrowed(bits);
        std::memcpy(to + column, &integers, sizeof(integers));
      },
      [&](int i, float sum) { sums[i * stride] = sum * by.scale; });
}
#endif

#if defined(__AVX512BF16__)
inline void round_row(const QuantizedInput& in, const float* x, int row) {
  const int chunks = in.chunks(), whole = row < in.rows ? in.size_in / kChunk : 0;
  uint16_t* to = in.bf16 + (static_cast<size_t>(row / in.block) * chunks * in.block + row % in.block) * kChunk;
  for (int c = 0; c < chunks; ++c, x += kChunk, to += static_cast<size_t>(in.block) * kChunk) {
    Vec pairs{};
    if (c < whole) {
      pairs = round_pairs(load(x), load(x + kLanes));
    } else if (row < in.rows) {
      const int count = in.size_in - c * kChunk;
      pairs = round_pairs(load_part(x, imin(count, kLanes)), load_part(x + kLanes, imax(count - kLanes, 0)));
    }
    std::memcpy(to, &pairs, sizeof(pairs));
  }
}
#endif

#if defined(__AMX_INT8__)
// A span of a row from its first column on, of which `count` are left.
inline void round_span(const QuantizedInput& in, const float* x, int count, int row, int span) {
  using llmjax::kStepColumns;
  using llmjax::kTileRows;
  const int begin = span * llmjax::kSpanColumns, columns = imin(llmjax::kSpanColumns, in.steps() * kStepColumns - begin);
  const size_t block = row / kTileRows, m = row % kTileRows;
  int8_t* const to = in.byte_tiles + (block * in.steps() * kTileRows + m) * kStepColumns + static_cast<size_t>(begin) * kTileRows;
  alignas(64) float part[llmjax::kSpanColumns];
  if (count < columns) {
    for (int i = 0; i < columns; ++i) part[i] = i < count ? x[i] : 0;
    x = part;
  }
  const IntegerScale by = integer_scale(x, columns, 127);
  float total = 0;
  for (int column = 0; column < columns; column += kChunk) {
    int8_t* const bytes = to + column / kStepColumns * kStepColumns * kTileRows + column % kStepColumns;
    round_chunk(
        x + column, by, false, [&](int i, Bits bits) { store_bytes(bytes + i, bits & 0xff); },
        [&](int, float sum) { total += sum; });
  }
  const size_t at = (block * in.spans() + span) * kTileRows + m;
  in.span_scales[at] = by.scale, in.span_sums[at] = total * by.scale;
}
#endif

// Columns of a row from chunk `c` on as f32, zeros after the last one: in x, or in `part`.
inline const float* columns_from(const QuantizedInput& in, const float* x, int row, int c, int columns, float* part) {
  const int count = row < in.rows ? in.size_in - c * kChunk : 0;
  if (count >= columns) return x + c * kChunk;
  for (int i = 0; i < columns; ++i) part[i] = i < count ? x[c * kChunk + i] : 0;
  return part;
}

// Calls round(columns, c) for the columns of a row that share a scale; `c` is the first of `chunks_of_scale` chunks.
template <class Round>
inline void each_scale(const QuantizedInput& in, const float* x, int row, int chunks_of_scale, const Round& round) {
  alignas(64) float part[2 * kChunk];
  for (int c = 0; c < in.chunks(); c += chunks_of_scale) round(columns_from(in, x, row, c, chunks_of_scale * kChunk, part), c);
}

// Where what belongs to chunk `c` of a row lies, and the first of the three sums of it.
struct ChunkPlace {
  size_t at, sums;
  ChunkPlace(const QuantizedInput& in, int row, int c) {
    const size_t chunk = static_cast<size_t>(row / in.block) * in.chunks() + c;
    at = chunk * in.block + row % in.block, sums = chunk * 3 * in.block + row % in.block;
  }
};

// Columns of a row that share a scale become integers up to `largest`: put(columns, scale, place) for each chunk.
template <class Put>
inline void round_columns(const QuantizedInput& in, const float* x, int row, float largest, const Put& put) {
  const int of_scale = in.round_columns / kChunk;
  each_scale(in, x, row, of_scale, [&](const float* columns, int c) {
    const IntegerScale by = integer_scale(columns, of_scale * kChunk, largest);
    for (int i = 0; i < of_scale && c + i < in.chunks(); ++i) put(columns + i * kChunk, by, ChunkPlace(in, row, c + i));
  });
}

// Rows begin..end in the form of each method: `QuantizedMethod::prepare`.

inline void prepare_floats(const QuantizedInput& in, const float* x, int begin, int end) {
  for (int row = begin; row < end; ++row, x += in.size_in) {
    each_scale(in, x, row, 1, [&](const float* columns, int c) {
      const size_t at = ChunkPlace(in, row, c).at;
      std::memcpy(in.floats + at * kChunk, columns, kChunk * sizeof(float));
      for (int half = 0; half < 2; ++half) {
        Vec sum{};
        for (int j = 0; j < kChunk / 2; j += kLanes) sum += load(columns + half * kChunk / 2 + j);
        in.float_sums[(at - row % in.block) * 2 + half * in.block + row % in.block] = horizontal_sum(sum);
      }
    });
  }
}

inline float mean_square(const float* x, int size) {
  Vec sums[4] = {};
  int i = 0;
  for (; i + 4 * kLanes <= size; i += 4 * kLanes) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) sums[j] += load(x + i + j * kLanes) * load(x + i + j * kLanes);
  }
  float sum = horizontal_sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
  for (; i < size; ++i) sum += x[i] * x[i];
  return sum / size;
}

// A bit for each lane of `a` that is above that of `b`.
inline uint32_t lanes_above(Vec a, Vec b) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GT_OQ);
#elif defined(__AVX2__)
  return static_cast<uint32_t>(_mm256_movemask_ps((__m256)(a > b)));
#else
  uint32_t lanes = 0;
  for (int i = 0; i < kLanes; ++i) lanes |= (a[i] > b[i] ? 1u : 0u) << i;
  return lanes;
#endif
}

// The outliers of a block while they are found, row by row of the same columns.
class OutlierList {
 public:
  OutlierList(const QuantizedInput& in, int begin)
      : most_(in.most_outliers()), columns_(in.outlier_columns + static_cast<size_t>(begin) * most_), counts_(in.outlier_counts + begin),
        outliers_(in.outliers + static_cast<size_t>(begin) * most_) {
    for (int row = 0; row < in.block; ++row) counts_[row] = 0;
  }

  // Takes numbers whose square is above `limit` out of `count` columns of a row of the block, from column `first` on; `rest`: the others,
  // and zeros in their places.
  void take(const float* columns, int count, float limit, int first, int row, float* rest) {
    for (int i = 0; i < count; i += kLanes) {
      const Vec v = load(columns + i);
      store(rest + i, bit_cast<Vec>(bit_cast<Int>(v) & ~(Int)(v * v > splat(limit))));
      for (uint32_t above = lanes_above(v * v, splat(limit)); above != 0 && counts_[row] < most_; above &= above - 1) {
        const int at = i + __builtin_ctz(above);
        const uint32_t column = first + at;
        if (size_ == 0 || columns_[size_ - 1] != column) columns_[size_++] = column;
        put(row, columns[at]);
      }
    }
  }
  // Returns the number of columns.
  int finish(int rows) {
    for (int row = 0; row < rows; ++row) {
      if (counts_[row] % 2 != 0) put(row, 0);
    }
    return size_;
  }

 private:
  void put(int row, float x) { outliers_[static_cast<size_t>(row) * most_ + counts_[row]++] = {size_ - 1, x}; }

  const int most_;
  int size_ = 0;
  uint32_t* const columns_;
  int32_t* const counts_;
  Outlier* const outliers_;
};

// A block. Outliers stay as they are, as in LLM.int8() (Dettmers et al. 2022, arXiv:2208.07339), which looks for them in the same place
// of all rows; here a row is looked at alone, so that what it becomes does not depend on others.
inline void prepare_bytes(const QuantizedInput& in, const float* x, int begin, int end) {
  const int of_scale = in.round_columns / kChunk;
  float limits[llmjax::kTileRows];
  for (int row = begin; row < end; ++row) {
    const float* of_row = x + static_cast<size_t>(row - begin) * in.size_in;
    limits[row - begin] = row < in.rows ? in.outlier * in.outlier * mean_square(of_row, in.size_in) : 0;
  }
  OutlierList outliers(in, begin);
  for (int c = 0; c < in.chunks(); c += of_scale) {
    for (int row = begin; row < end; ++row) {
      alignas(64) float part[2 * kChunk], others[2 * kChunk];
      const float* columns = columns_from(in, x + static_cast<size_t>(row - begin) * in.size_in, row, c, in.round_columns, part);
      IntegerScale by = integer_scale(columns, in.round_columns, 127);
      if (by.peak * by.peak > limits[row - begin]) {
        outliers.take(columns, in.round_columns, limits[row - begin], c * kChunk, row - begin, others);
        columns = others, by = integer_scale(columns, in.round_columns, 127);
      }
      for (int i = 0; i < of_scale && c + i < in.chunks(); ++i) {
        const ChunkPlace place(in, row, c + i);
        in.byte_scales[place.at] = by.scale;
        round_to_bytes(columns + i * kChunk, by, in.halves, in.bytes + place.at * kChunk, in.byte_sums + place.sums,
                       in.byte_totals + place.sums, in.block);
      }
    }
  }
  in.outlier_column_counts[begin / in.block] = outliers.finish(end - begin);
}

#if defined(LLMJAX_INT16_PANELS)
inline void prepare_int16(const QuantizedInput& in, const float* x, int begin, int end) {
  for (int row = begin; row < end; ++row, x += in.size_in) {
    round_columns(in, x, row, 32767, [&](const float* columns, IntegerScale by, ChunkPlace place) {
      in.int16_scales[place.at] = by.scale;
      round_to_int16(columns, by, in.halves, in.int16 + place.at * kChunk, in.int16_sums + place.sums, in.block);
    });
  }
}
#endif

#if defined(__AVX512BF16__)
inline void prepare_bf16(const QuantizedInput& in, const float* x, int begin, int end) {
  for (int row = begin; row < end; ++row, x += in.size_in) round_row(in, x, row);
}
#endif

#if defined(__AMX_INT8__)
inline void prepare_spans(const QuantizedInput& in, const float* x, int begin, int end) {
  for (int row = begin; row < end; ++row, x += in.size_in) {
    for (int span = 0; span < in.spans(); ++span) {
      const int at = span * llmjax::kSpanColumns;
      round_span(in, x + at, row < in.rows ? in.size_in - at : 0, row, span);
    }
  }
}
#endif

}  // namespace

#endif  // LLMJAX_QUANTIZED_INPUT_H_
