// Products of few rows of x with tiles of quantized rows, in vectors: lane by lane a row of the matrix.

#ifndef LLMJAX_QUANTIZED_VECTORS_H_
#define LLMJAX_QUANTIZED_VECTORS_H_

#include "gemm.h"
#include "quantized_input.h"
#include "read_ahead.h"

namespace {

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

// For `walks` over a tile, a chunk a step or, one part of its rows after another, kStepParts steps a chunk.
template <class Codes, int kStepParts = 1>
struct TileAhead : ReadAhead<Codes::kBits / kStepParts / 4 + 1> {  // which is more than a step has, with its scales
  TileAhead(const QuantizedMatrix& w, const uint32_t* tile, int walks = 1)
      : ReadAhead<Codes::kBits / kStepParts / 4 + 1>(w.words, tile, sizeof(uint32_t) * w.num_words * llmjax::kTileRows,
                                                    walks * kStepParts * w.chunks()) {}
};

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

// Rows of x that share the bytes of a chunk at most. With 32 registers they take turns, since a product waits for the one before it
// in its row, but for sums in 16 bits, which hardly wait and take more registers.
#if defined(__AVX512VNNI__) || defined(__ARM_FEATURE_MATMUL_INT8)
constexpr int kRowsOfCodes = 8;
#else
constexpr int kRowsOfCodes = 4;
#endif

// x86 without AVX2 has hardly a user: there all rows take the way of many, which costs the least code.
#if defined(__AVX2__) || defined(__aarch64__)
constexpr bool kOnlyBlocks = false;
#else
constexpr bool kOnlyBlocks = true;
#endif

// What the bytes of codes are above numbers whose zero point is in their middle, as a power of two; -1: nothing.
template <class Codes>
constexpr int byte_bias_log() {
  return !Codes::kSigned ? Codes::kBits - 1 : kUnsignedBytes ? 7 : -1;
}

// A number times 2^kLog, or 0 for kLog below 0, in all lanes.
template <int kLog>
inline Int shifted(int32_t number) {
  if constexpr (kLog < 0) return Int{};
#if defined(__AVX512F__)
  return (Int)_mm512_slli_epi32(_mm512_set1_epi32(number), kLog);  // a load repeats it for nothing, GCC would shift first
#else
  return (Int{} + number) << (kLog & 31);
#endif
}

// Whether weights have no other offset.
template <class Codes>
inline bool has_only_byte_bias(const QuantizedMatrix& w) {
  const int zero = Codes::kSigned ? 0 : 1 << (Codes::kBits - 1);
  return w.zeros.count == 0 && w.minima.count == 0 && w.zero == static_cast<float>(zero);
}

// What outliers of x add to the outputs of a tile.
template <class Codes>
class OutlierProducts {
 public:
  OutlierProducts(const QuantizedMatrix& w, const QuantizedInput& in, const uint32_t* words, const GroupScales& scales,
                  const ByteTable& table, char* memory)
      : in_(in), words_(words), scales_(scales), table_(table), weights_(reinterpret_cast<float*>(memory)),
        most_(in.most_outliers()), per_group_((uint64_t{1} << 40) / w.group_size + 1) {}

  // For `rows` rows of a block with a part of the tile, to sums[row * stride]. Apart, since the loops after it need all registers.
  __attribute__((noinline)) void write(int row, int rows, int part, float* sums, int stride) const {
    if (row % in_.block == 0) read(row, part);
    const Outlier* first = in_.outliers + static_cast<size_t>(row) * most_;
    const float* const weights = weights_ + part;
    for (int m = 0; m < rows; ++m, first += most_, sums += stride) {
      Vec even{}, odd{};
      const Outlier* const end = first + in_.outlier_counts[row + m];
      for (const Outlier* next = first; next < end; next += 2) {
        even += splat(next[0].x) * load(weights + next[0].column * llmjax::kTileRows);
        odd += splat(next[1].x) * load(weights + next[1].column * llmjax::kTileRows);
      }
      store(sums, even + odd);
    }
  }

 private:
  // Looks up the weights that the block of rows from `row` on needs.
  void read(int row, int part) const {
    const uint32_t* next = in_.outlier_columns + static_cast<size_t>(row) * most_;
    const uint32_t* const end = next + in_.outlier_column_counts[row / in_.block];
    const uint32_t* const words = words_ + part;
    const float *const scale = scales_.scale + part, *const offset = scales_.offset + part;
    const uint64_t per_group = per_group_;  // quicker than to divide
    const ByteTable table = table_;
    for (float* weights = weights_ + part; next < end; ++next, weights += llmjax::kTileRows) {
      const uint32_t column = *next, group = static_cast<uint32_t>(column * per_group >> 40);
      const Bits code = to_bytes<Codes>(unpack_column<Codes::kBits>(words, column), table, kUnsignedBytes) & 0xff;
      const bool is_signed = Codes::kSigned && !kUnsignedBytes;
      const Vec number = to_float(is_signed ? bit_cast<Bits>(bit_cast<Int>(code << 24) >> 24) : code);
      store(weights, number * load(scale + group * llmjax::kTileRows) - load(offset + group * llmjax::kTileRows));
    }
  }

  const QuantizedInput& in_;
  const uint32_t* words_;
  const GroupScales& scales_;
  const ByteTable& table_;
  float* weights_;  // [columns with outliers, kTileRows]
  int most_;
  uint64_t per_group_;
};

#if defined(__AVX512F__)

// Rows m .. m + kRows of x with the rows of a tile from `part` on. Groups are multiples of kSegment columns, which share a
// scale of x; without kOffsets `has_only_byte_bias`, and the integer sums begin with it.
template <class Codes, int kSegment, bool kOffsets, int kRows>
inline void multiply_int8(const QuantizedMatrix& w, const QuantizedInput& in, const uint32_t* words, const GroupScales& scales,
                          const OutlierProducts<Codes>& outliers, TileAhead<Codes, kParts>& ahead, int tile, int part, int row) {
  constexpr int kSegments = kSegment < kChunk ? kChunk / kSegment : 1, kQuadsOfSegment = kQuads / kSegments;
  constexpr int kChunks = kSegment > kChunk ? kSegment / kChunk : 1;  // of a step
  constexpr int kBias = byte_bias_log<Codes>(), kTurns = kRows;
  const ByteTable table(w, kUnsignedBytes);
  const int chunks = in.chunks(), block = in.block;
  const size_t at = static_cast<size_t>(row / block) * chunks * block + row % block;
  const int8_t* x = in.bytes + at * kChunk;
  const float* x_scale = in.byte_scales + at;
  const size_t sums_at = static_cast<size_t>(row / block) * chunks * 3 * block + row % block;
  const float* x_sum = in.byte_sums + sums_at;
  const int32_t* x_total = in.byte_totals + sums_at;
  GroupCursor group(w, scales, part);
  alignas(64) float begun[kRows * kLanes];
  outliers.write(row, kRows, part, begun, kLanes);
  Vec sums[kRows];
#pragma GCC unroll 8
  for (int m = 0; m < kRows; ++m) sums[m] = load(begun + m * kLanes);
  words += part;
  for (int c = 0; c < chunks; c += kChunks) {
    const bool second = kChunks == 2 && c + 1 < chunks;
    const float *scale[kSegments], *offset[kSegments];
#pragma GCC unroll 2
    for (int segment = 0; segment < kSegments; ++segment) {
      scale[segment] = group.scale, offset[segment] = group.offset;
      group.advance(kSegment);
    }
    Bits codes[kQuads];
#pragma GCC unroll 4
    for (int first = 0; first < kRows; first += kTurns) {
      Int products[kTurns][kSegments];
#pragma GCC unroll 8
      for (int m = 0; m < kTurns; ++m) {
#pragma GCC unroll 2
        for (int segment = 0; segment < kSegments; ++segment) {
          const int32_t* const total = x_total + (kSegments == 2 ? segment : 2) * block + first + m;
          products[m][segment] = kOffsets ? Int{} : shifted<kBias>(second ? total[0] + total[3 * block] : total[0]);
        }
      }
#pragma GCC unroll 2
      for (int i = 0; i < kChunks; ++i) {
        if (i != 0 && !second) break;
        if (first == 0) {
          unpack_bytes<Codes>(words, table, kUnsignedBytes, codes);
          ahead.next();
          words += Codes::kBits * llmjax::kTileRows;
        }
        const int8_t* const bytes = x + (static_cast<size_t>(i) * block + first) * kChunk;
#pragma GCC unroll 2
        for (int segment = 0; segment < kSegments; ++segment) {
          add_dots<Codes, kQuadsOfSegment, kTurns, kSegments>(codes + segment * kQuadsOfSegment, bytes + segment * kSegment,
                                                              &products[0][segment]);
        }
      }
      Vec parts[kTurns];
#pragma GCC unroll 2
      for (int segment = 0; segment < kSegments; ++segment) {
        const Vec of_group = load(scale[segment]), of_codes = load(offset[segment]);
        const float* const sum = x_sum + (kSegments == 2 ? segment : 2) * block + first;
#pragma GCC unroll 8
        for (int m = 0; m < kTurns; ++m) {
          const Vec scaled = __builtin_convertvector(products[m][segment], Vec) * of_group;
          parts[m] = segment == 0 ? scaled : parts[m] + scaled;
          if constexpr (kOffsets) sums[first + m] -= of_codes * splat(second ? sum[m] + sum[3 * block + m] : sum[m]);
        }
      }
#pragma GCC unroll 8
      for (int m = 0; m < kTurns; ++m) sums[first + m] += parts[m] * splat(x_scale[first + m]);
    }
    x += static_cast<size_t>(kChunks) * block * kChunk;
    x_scale += kChunks * block;
    x_sum += kChunks * 3 * block;
    x_total += kChunks * 3 * block;
  }
#pragma GCC unroll 8
  for (int m = 0; m < kRows; ++m) {
    if (kRows < 8 || row + m < in.rows) put_outputs(w, tile, part, row + m, sums[m]);
  }
}

#else

// The same with fewer registers: the codes of a segment stay in them while all rows pass by, or one vector of them, where rows
// share its magnitudes and sums in pairs hold a single product.
template <class Codes, int kSegment, bool kOffsets, int kRows>
inline void multiply_int8(const QuantizedMatrix& w, const QuantizedInput& in, const uint32_t* words, const GroupScales& scales,
                          const OutlierProducts<Codes>& outliers, TileAhead<Codes, kParts>& ahead, int tile, int part, int row) {
  constexpr int kSegments = kChunk / kSegment, kQuadsOfSegment = kQuads / kSegments;
  constexpr int kTurns = kSumsInPairs && Codes::kBits == 8 ? kRows : 1;
  const ByteTable table(w, kUnsignedBytes);
  const int chunks = in.chunks(), block = in.block;
  const size_t at = static_cast<size_t>(row / block) * chunks * block + row % block;
  const int8_t* x = in.bytes + at * kChunk;
  const float* x_scale = in.byte_scales + at;
  const size_t sums_at = static_cast<size_t>(row / block) * chunks * 3 * block + row % block;
  const float* x_sum = in.byte_sums + sums_at;
  const int32_t* x_total = in.byte_totals + sums_at;
  GroupCursor group(w, scales, part);
  alignas(64) float begun[kRows * kLanes];
  outliers.write(row, kRows, part, begun, kLanes);
  Vec sums[kRows];
#pragma GCC unroll 8
  for (int m = 0; m < kRows; ++m) sums[m] = load(begun + m * kLanes);
  words += part;
  for (int c = 0; c < chunks; ++c) {
    Bits codes[kQuads];
    unpack_bytes<Codes>(words, table, kUnsignedBytes, codes);
    ahead.next();
#pragma GCC unroll 2
    for (int segment = 0; segment < kSegments; ++segment) {
      const int which = (kSegments == 2 ? segment : 2) * block;
      const Vec scale = load(group.scale), offset = load(group.offset);
#if defined(__ARM_FEATURE_MATMUL_INT8)
      if constexpr (kRows % 2 == 0) {
#pragma GCC unroll 4
        for (int m = 0; m < kRows; m += 2) {
          Int products[2] = {};
          if constexpr (!kOffsets) {
            for (int i = 0; i < 2; ++i) products[i] = shifted<byte_bias_log<Codes>()>(x_total[which + m + i]);
          }
          add_dots_of_two<kQuadsOfSegment>(codes + segment * kQuadsOfSegment, x + m * kChunk + segment * kSegment, products);
          for (int i = 0; i < 2; ++i) {
            sums[m + i] += __builtin_convertvector(products[i], Vec) * splat(x_scale[m + i]) * scale;
            if constexpr (kOffsets) sums[m + i] -= offset * splat(x_sum[which + m + i]);
          }
        }
        group.advance(kSegment);
        continue;
      }
#endif
#pragma GCC unroll 4
      for (int first = 0; first < kRows; first += kTurns) {
        Int products[kTurns];
#pragma GCC unroll 4
        for (int m = 0; m < kTurns; ++m) {
          products[m] = kOffsets ? Int{} : shifted<byte_bias_log<Codes>()>(x_total[which + first + m]);
        }
        add_dots<Codes, kQuadsOfSegment, kTurns, 1>(codes + segment * kQuadsOfSegment, x + first * kChunk + segment * kSegment, products);
#pragma GCC unroll 4
        for (int m = first; m < first + kTurns; ++m) {
          sums[m] += __builtin_convertvector(products[m - first], Vec) * splat(x_scale[m]) * scale;
          if constexpr (kOffsets) sums[m] -= offset * splat(x_sum[which + m]);
        }
      }
      group.advance(kSegment);
    }
    words += Codes::kBits * llmjax::kTileRows;
    x += static_cast<size_t>(block) * kChunk;
    x_scale += block;
    x_sum += 3 * block;
    x_total += 3 * block;
  }
#pragma GCC unroll 4
  for (int m = 0; m < kRows; ++m) {
    if (kRows < 8 || row + m < in.rows) put_outputs(w, tile, part, row + m, sums[m]);
  }
}

#if defined(__AVX2__)
// One row with all of a tile, whose parts share each number of x.
template <class Codes, int kSegment, bool kOffsets>
inline void multiply_int8_row(const QuantizedMatrix& w, const QuantizedInput& in, const uint32_t* words, const GroupScales& scales,
                              const OutlierProducts<Codes>& outliers, int tile, int row) {
  constexpr int kSegments = kChunk / kSegment, kQuadsOfSegment = kQuads / kSegments;
  constexpr int kTerms = ByteSums<Codes>::kTerms < kQuadsOfSegment ? ByteSums<Codes>::kTerms : kQuadsOfSegment;
  const ByteTable table(w, kUnsignedBytes);
  const int block = in.block;
  const ChunkPlace place(in, row, 0);
  const int8_t* x = in.bytes + place.at * kChunk;
  const float *x_scale = in.byte_scales + place.at, *x_sum = in.byte_sums + place.sums;
  const int32_t* x_total = in.byte_totals + place.sums;
  GroupCursor group(w, scales, 0);
  TileAhead<Codes> ahead(w, words);
  Vec sums[kParts];
  for (int v = 0; v < kParts; ++v) outliers.write(row, 1, v * kLanes, reinterpret_cast<float*>(sums + v), kLanes);
  for (int c = 0; c < w.chunks(); ++c) {
    ahead.next();
#pragma GCC unroll 2
    for (int segment = 0; segment < kSegments; ++segment) {
      const int which = (kSegments == 2 ? segment : 2) * block;
      Int totals[kParts];
#pragma GCC unroll 2
      for (int v = 0; v < kParts; ++v) totals[v] = kOffsets ? Int{} : shifted<byte_bias_log<Codes>()>(x_total[which]);
#pragma GCC unroll 8
      for (int begin = 0; begin < kQuadsOfSegment; begin += kTerms) {
        ByteSums<Codes> products[kParts];
#pragma GCC unroll 2
        for (int v = 0; v < kParts; ++v) products[v].start(totals[v]);
#pragma GCC unroll 8
        for (int i = segment * kQuadsOfSegment + begin; i < segment * kQuadsOfSegment + begin + kTerms; ++i) {
#pragma GCC unroll 2
          for (int v = 0; v < kParts; ++v) {
            const Bits codes = unpack_one<Codes::kBits>(words + v * kLanes, i);
            products[v].add(to_bytes<Codes>(codes, table, kUnsignedBytes), x + 4 * i);
          }
        }
#pragma GCC unroll 2
        for (int v = 0; v < kParts; ++v) totals[v] = products[v].total();
      }
#pragma GCC unroll 2
      for (int v = 0; v < kParts; ++v) {
        sums[v] += __builtin_convertvector(totals[v], Vec) * splat(*x_scale) * load(group.scale + v * kLanes);
        if constexpr (kOffsets) sums[v] -= load(group.offset + v * kLanes) * splat(x_sum[which]);
      }
      group.advance(kSegment);
    }
    words += Codes::kBits * llmjax::kTileRows;
    x += static_cast<size_t>(block) * kChunk, x_scale += block, x_sum += 3 * block, x_total += 3 * block;
  }
#pragma GCC unroll 2
  for (int v = 0; v < kParts; ++v) put_outputs(w, tile, v * kLanes, row, sums[v]);
}
#endif

// With 16 registers: both parts of a tile meet each number of x, and the sums of rows stay in memory from chunk to chunk.
constexpr int kRowsOfBytes = 4;

// kRows rows of x [kRows][kChunk] with some columns of the codes of a chunk [quads][kParts]: sums [kRows][kTileRows].
template <class Codes, int kSegment, int kRows>
inline void multiply_segment(const Bits* codes, const int8_t* x, const float* x_scale, const float* x_sum, const GroupCursor& group,
                             float* sums) {
  constexpr int kCount = kSegment / 4, kTerms = ByteSums<Codes>::kTerms < kCount ? ByteSums<Codes>::kTerms : kCount;
  Int totals[kRows][kParts] = {};
#pragma GCC unroll 1
  for (int begin = 0; begin < kCount; begin += kTerms) {
    ByteSums<Codes> products[kRows][kParts];
#pragma GCC unroll 4
    for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 4
      for (int v = 0; v < kParts; ++v) products[m][v].start(totals[m][v]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < kTerms; ++i, codes += kParts, x += 4) {
#pragma GCC unroll 4
      for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 4
        for (int v = 0; v < kParts; ++v) products[m][v].add(codes[v], x + m * kChunk);
      }
    }
#pragma GCC unroll 4
    for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 4
      for (int v = 0; v < kParts; ++v) totals[m][v] = products[m][v].total();
    }
  }
#pragma GCC unroll 4
  for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 4
    for (int v = 0; v < kParts; ++v) {
      float* const sum = sums + m * llmjax::kTileRows + v * kLanes;
      Vec all = load(sum);
      all += __builtin_convertvector(totals[m][v], Vec) * splat(x_scale[m]) * load(group.scale + v * kLanes);
      all -= load(group.offset + v * kLanes) * splat(x_sum[m]);
      store(sum, all);
    }
  }
}

// Rows of x with the codes of a chunk. Apart, so that it exists once for all codes whose sums are made alike.
template <class Codes, int kSegment>
__attribute__((noinline)) void multiply_chunk(const Bits* codes, const int8_t* x, const float* x_scale, const float* x_sum, int block,
                                              int rows, GroupCursor& group, float* sums) {
  constexpr int kSegments = kChunk / kSegment;
  for (int segment = 0; segment < kSegments; ++segment, group.advance(kSegment)) {
    const float* const sum = x_sum + (kSegments == 2 ? segment : 2) * block;
    int m = 0;
    const auto next = [&](auto count) {
      multiply_segment<Codes, kSegment, decltype(count)::value>(codes + segment * (kSegment / 4) * kParts,
                                                                x + m * kChunk + segment * kSegment, x_scale + m, sum + m, group,
                                                                sums + m * llmjax::kTileRows);
      m += decltype(count)::value;
    };
    while (m + kRowsOfBytes <= rows) next(Count<kRowsOfBytes>());
    if (m + 2 <= rows) next(Count<2>());
    if (m < rows) next(Count<1>());
  }
}

// Rows `row` .. `row` + `rows` of x, all of a block, with a tile.
template <class Codes, int kSegment>
inline void multiply_int8_rows(const QuantizedMatrix& w, const QuantizedInput& in, const uint32_t* words, const GroupScales& scales,
                               const OutlierProducts<Codes>& outliers, int tile, int row, int rows) {
  const ByteTable table(w, kUnsignedBytes);
  const int chunks = in.chunks(), block = in.block;
  const size_t at = static_cast<size_t>(row / block) * chunks * block;
  alignas(64) float sums[llmjax::kTileRows * llmjax::kTileRows];
  for (int part = 0; part < llmjax::kTileRows; part += kLanes) outliers.write(row, rows, part, sums + part, llmjax::kTileRows);
  GroupCursor group(w, scales, 0);
  for (int c = 0; c < chunks; ++c, words += Codes::kBits * llmjax::kTileRows) {
    Bits codes[kQuads * kParts];
    for (int v = 0; v < kParts; ++v) {
      Bits part[kQuads];
      unpack_bytes<Codes>(words + v * kLanes, table, kUnsignedBytes, part);
#pragma GCC unroll 8
      for (int q = 0; q < kQuads; ++q) codes[q * kParts + v] = part[q];
    }
    if (row == 0) {  // the same of the next tile: memory has time while so much is computed
#pragma GCC unroll 8
      for (int i = 0; i < Codes::kBits; ++i) __builtin_prefetch(words + (w.num_words + i) * llmjax::kTileRows, 0, 2);
    }
    const size_t chunk = at + static_cast<size_t>(c) * block;
    multiply_chunk<WithSumsLike<Codes>, kSegment>(codes, in.bytes + chunk * kChunk, in.byte_scales + chunk, in.byte_sums + chunk * 3, block,
                                                  rows, group, sums);
  }
  for (int m = 0; m < rows; ++m) {
    for (int part = 0; part < llmjax::kTileRows; part += kLanes) {
      put_outputs(w, tile, part, row + m, load(sums + m * llmjax::kTileRows + part));
    }
  }
}

#endif

// The same in f32.
template <class Codes, int kRows>
inline void multiply_floats(const QuantizedMatrix& w, const QuantizedInput& in, const uint32_t* words,
                            const GroupScales& scales, TileAhead<Codes, kParts>& ahead, int tile, int part, int row) {
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
    unpack<Codes::kBits, FloatValues<Codes>::kMasked>(words, codes);
    ahead.next();
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

// Calls body(rows, first row) for all rows of x, `rows` (1, 2, 4 or, if kMost is 8, 8) as a type. For 7 it is 8 too, the last one
// of zeros, which blocks are filled up with.
template <int kMost, class Body>
inline void for_rows(const QuantizedInput& in, const Body& body) {
  int m = 0;
  if constexpr (kMost == 8) {
    for (; m + 7 <= in.rows; m += 8) body(Count<8>(), m);
  }
  for (; m + 4 <= in.rows; m += 4) body(Count<4>(), m);
  if (in.rows - m >= 2) body(Count<2>(), m), m += 2;
  if (in.rows > m) body(Count<1>(), m);
}
template <int kMost>
inline int passes(const QuantizedInput& in) {
  int count = 0;
  for_rows<kMost>(in, [&](auto, int) { ++count; });
  return count;
}

inline size_t int8_workspace(const QuantizedMatrix& w, int) {
  return GroupScales::bytes(w) + static_cast<size_t>(w.size_in) * llmjax::kTileRows * sizeof(float);  // of OutlierProducts at most
}

template <class Codes>
inline void int8_tile(const QuantizedMatrix& w, const QuantizedInput& in, const GroupScales& scales,
                      const ByteTable& table, char* memory, int tile) {
  const uint32_t* words = w.tile(tile);
  read_scales(w, words, scales, Codes::kMeaning == Meaning::kTable ? w.level_factor : 1,
              Codes::kSigned && kUnsignedBytes ? 128 : 0);
  const OutlierProducts<Codes> outliers(w, in, words, scales, table, memory);
  const auto multiply = [&](auto segment, auto offsets) {
    constexpr int kSegment = decltype(segment)::value;
    constexpr bool kOffsets = decltype(offsets)::value != 0;
#if !defined(__AVX512F__) && !defined(__ARM_FEATURE_MATMUL_INT8)
    if (kOnlyBlocks || in.rows > kRowsOfBytes) {
      for (int m = 0; m < in.rows; m += in.block) {
        multiply_int8_rows<Codes, kSegment>(w, in, words, scales, outliers, tile, m, imin(in.block, in.rows - m));
      }
      return;
    }
#endif
#if defined(__AVX2__) && !defined(__AVX512F__)
    if (in.rows > 1) {
      TileAhead<Codes, kParts> ahead(w, words, 1);
      for (int part = 0; part < llmjax::kTileRows; part += kLanes) {
        in.rows == 4 ? multiply_int8<Codes, kSegment, kOffsets, 4>(w, in, words, scales, outliers, ahead, tile, part, 0)
                     : multiply_int8<Codes, kSegment, kOffsets, 2>(w, in, words, scales, outliers, ahead, tile, part, 0);
      }
    }
    if (in.rows % 2 != 0) multiply_int8_row<Codes, kSegment, kOffsets>(w, in, words, scales, outliers, tile, in.rows - 1);
#else
    if constexpr (!kOnlyBlocks) {
      TileAhead<Codes, kParts> ahead(w, words, passes<kRowsOfCodes>(in));
      for (int part = 0; part < llmjax::kTileRows; part += kLanes) {
        for_rows<kRowsOfCodes>(in, [&](auto rows, int m) {
          multiply_int8<Codes, kSegment, kOffsets, decltype(rows)::value>(w, in, words, scales, outliers, ahead, tile, part, m);
        });
      }
    }
#endif
  };
  const auto with_offsets = [&](auto segment) {
    // To begin with the bias is free only where products are added to something anyway.
    if constexpr (kSumsInPairs && byte_bias_log<Codes>() >= 0) return multiply(segment, Count<1>());
    if constexpr (kOnlyBlocks || (Codes::kMeaning == Meaning::kTable && Codes::kBits < 4)) return multiply(segment, Count<1>());  // rare
    has_only_byte_bias<Codes>(w) ? multiply(segment, Count<0>()) : multiply(segment, Count<1>());
  };
  const auto with_segments = [&] {
#if defined(__AVX512VNNI__)  // else rows that take turns would need the codes of both chunks again
    if (w.group_size % (2 * kChunk) == 0 && in.round_columns == 2 * kChunk) return with_offsets(Count<2 * kChunk>());
#endif
    w.group_size % kChunk == 0 ? with_offsets(Count<kChunk>()) : with_offsets(Count<kChunk / 2>());
  };
  with_segments();
}

template <class Codes>
inline void float_tile(const QuantizedMatrix& w, const QuantizedInput& in, const GroupScales& scales, int tile) {
  const uint32_t* words = w.tile(tile);
  TileAhead<Codes, kParts> ahead(w, words, passes<4>(in));
  read_scales(w, words, scales, 1, 0);
  for (int part = 0; part < llmjax::kTileRows; part += kLanes) {
    for_rows<4>(in, [&](auto rows, int m) {
      multiply_floats<Codes, decltype(rows)::value>(w, in, words, scales, ahead, tile, part, m);
    });
  }
}

}  // namespace

#endif  // LLMJAX_QUANTIZED_VECTORS_H_
