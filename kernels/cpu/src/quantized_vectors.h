// Products of few rows of x with tiles of quantized rows, in vectors: lane by lane a row of the matrix.

#ifndef LLMJAX_QUANTIZED_VECTORS_H_
#define LLMJAX_QUANTIZED_VECTORS_H_

#include "quantized_input.h"

namespace {

constexpr int kAhead = 16384;  // bytes that are fetched before they are needed, at least

// The group that a walk over the columns is in.
struct GroupCursor {
  const float *scale, *offset;
  int columns, left;

  GroupCursor(const QuantizedMatrix& w, const GroupScales& scales, int part, int column = 0)
      : columns(w.group_size), left(w.group_size - column % w.group_size) {
    const int at = column / w.group_size * llmjax::kTileRows + part;
    scale = scales.scale + at;
    offset = scales.offset + at;
  }
  void advance(int by) {
    left -= by;
    if (left != 0) return;
    left = columns;
    scale += llmjax::kTileRows;
    offset += llmjax::kTileRows;
  }
};

// Fetches the words of a tile further on while this one is multiplied: hardware loses track at the end of each page, and
// where the scales are read before the codes.
class TileFetch {
 public:
  TileFetch(const QuantizedMatrix& w, const uint32_t* words, int tiles, int steps)
      : at_(reinterpret_cast<const char*>(words + static_cast<size_t>(tiles) * w.num_words * llmjax::kTileRows)),
        lines_((w.num_words + steps - 1) / steps),
        left_(steps) {}
  // In a step, of which those after the last do nothing; kLines: what surely is to be fetched.
  template <int kLines>
  void next() {
    if (left_ == 0) return;
    --left_;
#pragma GCC unroll 8
    for (int i = 0; i < kLines; ++i) __builtin_prefetch(at_ + i * kLine, 0, 2);
    for (int i = kLines; i < lines_; ++i) __builtin_prefetch(at_ + i * kLine, 0, 2);
    at_ += lines_ * kLine;
  }

 private:
  static constexpr long kLine = sizeof(uint32_t) * llmjax::kTileRows;
  const char* at_;
  int lines_;  // of a step
  int left_;   // steps
};

// For a walk over all parts of a tile; codes of kBits make kBits / kParts lines of a step.
inline TileFetch fetch_ahead(const QuantizedMatrix& w, const uint32_t* words) {
  const int bytes = w.num_words * llmjax::kTileRows * static_cast<int>(sizeof(uint32_t));
  return TileFetch(w, words, 1 + kAhead / bytes, kParts * w.chunks());
}

// Outputs of a tile that not all lanes have. Apart, so that it exists once.
__attribute__((noinline)) void put_last_outputs(const QuantizedMatrix& w, int output, size_t at, Vec sum) {
  for (int i = 0; i < w.size_out - output; ++i) {
    w.y[at + i] = sum[i] + (w.bias == nullptr ? 0 : w.bias[output + i]) + (w.residual == nullptr ? 0 : w.residual[at + i]);
  }
}

inline void put_outputs(const QuantizedMatrix& w, int tile, int part, int row, Vec sum) {
  const int output = tile * llmjax::kTileRows + part;
  const size_t at = static_cast<size_t>(row) * w.size_out + output;
  if (output + kLanes > w.size_out) return put_last_outputs(w, output, at, sum);
  if (w.bias != nullptr) sum += load(w.bias + output);
  if (w.residual != nullptr) sum += load(w.residual + at);
  store(w.y + at, sum);
}

// Rows m .. m + kRows of x with the rows of a tile from `part` on; groups are multiples of kSegment columns.
template <class Codes, int kSegment, int kRows>
inline void multiply_int8(const QuantizedMatrix& w, const QuantizedInput& in, const uint32_t* words,
                          const GroupScales& scales, TileFetch& fetch, int tile, int part, int row) {
  constexpr int kSegments = kChunk / kSegment, kQuadsOfSegment = kQuads / kSegments;
  const ByteTable table(w, kUnsignedBytes);
  const int chunks = in.chunks(), block = in.block;
  const size_t at = static_cast<size_t>(row / block) * chunks * block + row % block;
  const int8_t* x = in.bytes + at * kChunk;
  const float* x_scale = in.byte_scales + at;
  const float* x_sum = in.byte_sums + static_cast<size_t>(row / block) * chunks * 3 * block + row % block;
  GroupCursor group(w, scales, part);
  Vec sums[kRows] = {};
  words += part;
  for (int c = 0; c < chunks; ++c) {
    Bits codes[kQuads];
    unpack_bytes<Codes>(words, table, kUnsignedBytes, codes);
    fetch.next<Codes::kBits / kParts>();
#pragma GCC unroll 2
    for (int segment = 0; segment < kSegments; ++segment) {
      const Vec scale = load(group.scale), offset = load(group.offset);
#pragma GCC unroll 4
      for (int m = 0; m < kRows; ++m) {
        Int products{};
#pragma GCC unroll 8
        for (int q = 0; q < kQuadsOfSegment; ++q) {
          const int quad = segment * kQuadsOfSegment + q;
          products = dot<Codes::kSigned>(products, codes[quad], x + m * kChunk + quad * 4);
        }
        const float sum = x_sum[(kSegments == 2 ? segment : 2) * block + m];
        sums[m] += __builtin_convertvector(products, Vec) * splat(x_scale[m]) * scale;
        sums[m] -= offset * splat(sum);
      }
      group.advance(kSegment);
    }
    words += Codes::kBits * llmjax::kTileRows;
    x += static_cast<size_t>(block) * kChunk;
    x_scale += block;
    x_sum += 3 * block;
  }
#pragma GCC unroll 4
  for (int m = 0; m < kRows; ++m) put_outputs(w, tile, part, row + m, sums[m]);
}

// The same in f32.
template <class Codes, int kRows>
inline void multiply_floats(const QuantizedMatrix& w, const QuantizedInput& in, const uint32_t* words,
                            const GroupScales& scales, TileFetch& fetch, int tile, int part, int row) {
  const FloatValues<Codes> values(w);
  const int chunks = in.chunks(), block = in.block;
  const size_t at = static_cast<size_t>(row / block) * chunks * block + row % block;
  const float* x = in.floats + at * kChunk;
  const float* x_sum = in.float_sums + static_cast<size_t>(row / block) * chunks * 2 * block + row % block;
  GroupCursor group(w, scales, part);
  Vec sums[kRows] = {};
  words += part;
  for (int c = 0; c < chunks; ++c) {
    Bits codes[kQuads];
    unpack<Codes::kBits, !FloatValues<Codes>::kLowBitsAlone>(words, codes);
    fetch.next<Codes::kBits / kParts>();
    for (int half = 0; half < 2; ++half) {
      Vec products[kRows][2] = {};
#pragma GCC unroll 4
      for (int q = 0; q < kQuads / 2; ++q) {
        const Bits four = half == 0 ? codes[q] : codes[kQuads / 2 + q];
        const Vec v0 = values.template get<0>(four), v1 = values.template get<1>(four);
        const Vec v2 = values.template get<2>(four), v3 = values.template get<3>(four);
#pragma GCC unroll 4
        for (int m = 0; m < kRows; ++m) {
          const float* from = x + m * kChunk + (half * kQuads / 2 + q) * 4;
          products[m][0] += v0 * splat(from[0]);
          products[m][1] += v1 * splat(from[1]);
          products[m][0] += v2 * splat(from[2]);
          products[m][1] += v3 * splat(from[3]);
        }
      }
#pragma GCC unroll 4
      for (int m = 0; m < kRows; ++m) {
        sums[m] += (products[m][0] + products[m][1]) * load(group.scale);
        sums[m] -= load(group.offset) * splat(x_sum[half * block + m]);
      }
      group.advance(kChunk / 2);
    }
    words += Codes::kBits * llmjax::kTileRows;
    x += static_cast<size_t>(block) * kChunk;
    x_sum += 2 * block;
  }
#pragma GCC unroll 4
  for (int m = 0; m < kRows; ++m) put_outputs(w, tile, part, row + m, sums[m]);
}

// Calls body(rows, first row) for all rows of x, `rows` (1, 2 or 4) as a type.
template <int kRows>
struct RowCount {
  static constexpr int value = kRows;
};
template <class Body>
inline void for_rows(const QuantizedInput& in, const Body& body) {
  int m = 0;
  for (; m + 4 <= in.rows; m += 4) body(RowCount<4>(), m);
  if (in.rows - m >= 2) body(RowCount<2>(), m), m += 2;
  if (in.rows > m) body(RowCount<1>(), m);
}

template <class Codes>
inline void int8_tile(const QuantizedMatrix& w, const QuantizedInput& in, const GroupScales& scales, int tile) {
  const uint32_t* words = w.tile(tile);
  TileFetch fetch = fetch_ahead(w, words);
  read_scales(w, words, scales, Codes::kMeaning == Meaning::kTable ? w.level_factor : 1,
              Codes::kSigned && kUnsignedBytes ? 128 : 0);
  for (int part = 0; part < llmjax::kTileRows; part += kLanes) {
    for_rows(in, [&](auto rows, int m) {
      if (w.group_size % kChunk == 0) {
        multiply_int8<Codes, kChunk, decltype(rows)::value>(w, in, words, scales, fetch, tile, part, m);
      } else {
        multiply_int8<Codes, kChunk / 2, decltype(rows)::value>(w, in, words, scales, fetch, tile, part, m);
      }
    });
  }
}

template <class Codes>
inline void float_tile(const QuantizedMatrix& w, const QuantizedInput& in, const GroupScales& scales, int tile) {
  const uint32_t* words = w.tile(tile);
  TileFetch fetch = fetch_ahead(w, words);
  read_scales(w, words, scales, 1, 0);
  for (int part = 0; part < llmjax::kTileRows; part += kLanes) {
    for_rows(in, [&](auto rows, int m) {
      multiply_floats<Codes, decltype(rows)::value>(w, in, words, scales, fetch, tile, part, m);
    });
  }
}

}  // namespace

#endif  // LLMJAX_QUANTIZED_VECTORS_H_
