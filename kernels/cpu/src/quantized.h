// Products with quantized matrices: what the handler and the objects of each instruction set share.

#ifndef LLMJAX_QUANTIZED_H_
#define LLMJAX_QUANTIZED_H_

#include <cstddef>
#include <cstdint>

#include "kernels.h"

namespace llmjax {

// Units; kernels/cpu/README.md has all of them beside ggml's names. A group is columns of a row that share a scale (ggml's
// block, or sub-block of K-quants), a super group those that share a super scale (super-block), a record all words of a row.
constexpr int kChunk = 32;         // columns whose codes fill whole words
constexpr int kTileRows = 16;      // rows of a matrix whose words lie side by side: a tile
constexpr int kStepColumns = 64;   // columns of 16 rows whose bytes fill a tile register
constexpr int kSpanColumns = 256;  // columns of x that share a scale of int8 for tile registers
constexpr int kOutlier = 4;        // numbers above this many times the root mean square of their row are not rounded to int8,
constexpr int kActivatedOutlier = 6;  // of rows that an activation function made, where many are large and few matter

enum class Number : int { kF32, kF16, kBf16, kI16, kU8, kI8, kE4M3, kE8M0 };
enum class CodeKind : int { kUint, kInt, kE4M3, kE5M2, kBf16, kBf16Panels };

inline int bits_of(Number number) {
  return number == Number::kF32 ? 32 : number <= Number::kI16 ? 16 : 8;
}

// A run of numbers in a record, the first in the low bits of its word; count 0: there are none.
struct NumberField {
  Number number;
  int start, count;
};

// A matrix [size_out, size_in] as kernels/qtensor.py lays it out: weight = scale * (number(code) - zero) - minimum. Or one of
// kBf16, whose rows lie one after the other as they are, with a group for each; or of kBf16Panels, the same as `kernels/panels.py` lays
// it out: [panels, chunks, 2 tiles, pairs of columns, 16 rows].
struct QuantizedMatrix {
  int size_in, size_out, num_words;  // of a record
  int bits;
  CodeKind kind;
  int num_levels;     // 0: codes stand for themselves
  float levels[16];   // what they stand for else, filled up with zeros
  float level_factor;  // makes integers of at most 8 bits of the levels; 0: nothing does
  int group_size, super_size;
  float zero;  // where no group has its own
  NumberField scales, zeros, minima, super_scales, super_minima;
  const uint32_t* words;  // [tiles, num_words, 16]
  const float* bias;      // [size_out] or null
  const float* residual;  // [rows, size_out], added to y; or null
  float* y;               // [rows, size_out]
  uint16_t* rounded;      // the same in bf16, in place of y, by the methods of matrices of bf16 alone; or null

  int chunks() const { return (size_in + kChunk - 1) / kChunk; }
  int groups() const { return (size_in + group_size - 1) / group_size; }
  int tiles() const { return (size_out + kTileRows - 1) / kTileRows; }
  const uint32_t* in_panel(int tile) const {
    return words + (static_cast<size_t>(tile / 2) * chunks() * 2 + tile % 2) * (kTileRows * kChunk / 2);
  }
  const uint32_t* tile(int i) const { return words + static_cast<size_t>(i) * num_words * kTileRows; }
  // The same for x from a row on.
  QuantizedMatrix from_row(int row) const {
    QuantizedMatrix part = *this;
    part.y += static_cast<size_t>(row) * size_out;
    if (rounded != nullptr) part.rounded += static_cast<size_t>(row) * size_out;
    if (residual != nullptr) part.residual += static_cast<size_t>(row) * size_out;
    return part;
  }
};

// How to multiply. Float vectors and panels are exact f32; the others round x to int8 or int16 by spans of columns, or x and
// the dequantized weights to bf16. The last two are of matrices of kBf16Panels alone, by vectors.
enum class Method : int { kFloatVectors, kFloatPanels, kInt8Vectors, kBf16Panels, kBf16Tiles, kInt16Panels, kInt8Tiles, kKeptFloats, kKeptPairs };
constexpr int kMethods = 9;

// Whether a method takes kBf16Panels by vectors.
constexpr bool is_kept(Method method) { return method == Method::kKeptFloats || method == Method::kKeptPairs; }

// What x may be rounded to: int8, or 16 bits, which are bf16, together with weights, or int16.
struct Rounding {
  bool int8, half;
};

// A number of x that is not rounded to int8, and which of its block's `outlier_columns` it is in.
struct Outlier {
  int32_t column;
  float x;
};

// The rows of x, in blocks of at most 16 that are filled up with zeros to `block` rows, chunk by chunk of 32 columns:
// element (m, i) of any form lies at ((m / block * chunks + i / 32) * block + m % block) * 32 + i % 32, and what
// belongs to a chunk at the 32nd part of that. Forms that no method needs are null.
struct QuantizedInput {
  int rows, size_in, block;
  const float* x;     // [rows, size_in] as it came, or null
  int round_columns;  // of a span that shares a scale of int8 or int16: 32 or 64
  bool halves;        // sums of halves of chunks are needed, since groups begin there
  float* floats;
  float* float_sums;  // of halves of chunks: [..., 2, block]
  int8_t* bytes;
  float* byte_scales;    // x ~ byte * scale
  float* byte_sums;      // of x rounded so, over the halves of a chunk and all of it: [..., 3, block]
  int32_t* byte_totals;  // of the bytes themselves, the same way, with the other sign
  int outlier;              // kOutlier or kActivatedOutlier
  uint32_t* outlier_columns;                         // [blocks, block * most_outliers]: columns of a block that hold some
  int32_t *outlier_column_counts, *outlier_counts;  // of blocks and rows
  Outlier* outliers;        // [rows, most_outliers], in the order of their columns; what they are in bytes is 0
  uint16_t* bf16;
  int16_t* int16;       // of four columns 0, 2, 1 and 3
  float *int16_scales, *int16_sums;  // as those of bytes
  int8_t* byte_tiles;   // [blocks of 16 rows, steps, 16, kStepColumns]
  float *span_scales, *span_sums;  // [blocks of 16 rows, spans, 16]

  int chunks() const { return (size_in + kChunk - 1) / kChunk; }
  int steps() const { return (size_in + kStepColumns - 1) / kStepColumns; }
  int spans() const { return (size_in + kSpanColumns - 1) / kSpanColumns; }
  int blocks() const { return (rows + block - 1) / block; }
  // Of a row: n of them have n * outlier^2 of its mean squares; and one that makes the number even.
  int most_outliers() const { return size_in / (outlier * outlier) + 1; }
  size_t chunk_rows() const { return static_cast<size_t>(blocks()) * chunks() * block; }
  // `count` rows from `begin` on, a multiple of the block.
  QuantizedInput slice(int begin, int count) const {
    QuantizedInput part = *this;
    const size_t at = static_cast<size_t>(begin) * chunks();
    part.rows = count;
    if (x != nullptr) part.x += static_cast<size_t>(begin) * size_in;
    if (floats != nullptr) part.floats += at * kChunk, part.float_sums += at * 2;
    if (bytes != nullptr) {
      part.bytes += at * kChunk, part.byte_scales += at, part.byte_sums += at * 3, part.byte_totals += at * 3;
      const size_t first = static_cast<size_t>(begin) * most_outliers();
      part.outlier_column_counts += begin / block, part.outlier_columns += first;
      part.outlier_counts += begin, part.outliers += first;
    }
    if (bf16 != nullptr) part.bf16 += at * kChunk;
    if (int16 != nullptr) part.int16 += at * kChunk, part.int16_scales += at, part.int16_sums += at * 3;
    if (byte_tiles != nullptr) {
      const size_t scales = static_cast<size_t>(begin) * spans();
      part.byte_tiles += static_cast<size_t>(begin) * steps() * kStepColumns, part.span_scales += scales, part.span_sums += scales;
    }
    return part;
  }
};

// One way to multiply, for one instruction set.
struct QuantizedMethod {
  int lanes;
  // Rows begin..end in the method's form, from x [end - begin, size_in], of which there is nothing beyond the last row of
  // all; null: it takes x as it is.
  void (*prepare)(const QuantizedInput&, const float* x, int begin, int end);
  size_t (*workspace)(const QuantizedMatrix&, int rows);  // bytes, 64-byte aligned
  // Outputs of tiles begin..end; of kBf16Tiles, kInt8Tiles and kept panels `begin` is even.
  void (*multiply)(const QuantizedMatrix&, const QuantizedInput&, int begin, int end, char* workspace);
  // activation(gate) * up as rows of x for the same method, for tiles begin..end of both, whose codes are alike; by
  // kInt8Tiles all of a span's. Null: it does not. By kBf16Tiles and kept panels `up` may be `gate`: activation(gate), and `begin` is even.
  void (*multiply_gated)(const QuantizedMatrix& gate, const QuantizedMatrix& up, Activation, const QuantizedInput&,
                         const QuantizedInput& out, int begin, int end, char* workspace);
};

// As `find_row_kernels`; null: neither the instruction set nor a narrower one has it.
const QuantizedMethod* find_method(Method method);

// The same, where it takes such codes as well.
const QuantizedMethod* find_method(const QuantizedMatrix& w, Method method);
// The fastest.
Method choose_method(const QuantizedMatrix& w, int rows, Rounding may);
// Rows of x that lie together, see QuantizedInput.
int input_block(int rows, Method method, int lanes);

}  // namespace llmjax

#endif  // LLMJAX_QUANTIZED_H_
