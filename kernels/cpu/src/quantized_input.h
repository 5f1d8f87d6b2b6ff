// Rows of x in the forms that the methods take.

#ifndef LLMJAX_QUANTIZED_INPUT_H_
#define LLMJAX_QUANTIZED_INPUT_H_

#include "kv_types.h"
#include "quantized_codes.h"

namespace {

using llmjax::kChunk;
using llmjax::QuantizedInput;

constexpr int kVectorsOfHalf = kChunk / 2 / kLanes;

// A small whole number; 0 for NaN.
inline int32_t to_integer(float x) { return x == x ? static_cast<int32_t>(x) : 0; }

// A chunk of f32 as int8, to nearest; `scale` NaN (as it is for rows with NaN or infinity) reaches every sum.
inline void round_chunk(const float* x, float scale, float inverse, int8_t* bytes, float* sums, int32_t* totals, int stride) {
  float both = 0;
  for (int half = 0; half < 2; ++half) {
    Vec sum{};
    for (int i = 0; i < kVectorsOfHalf; ++i) {
      const int at = (half * kVectorsOfHalf + i) * kLanes;
      const Vec shifted = load(x + at) * splat(inverse) + splat(12582912.0f);  // 1.5 * 2^23: rounds to an integer
      sum += shifted - splat(12582912.0f);
      store_bytes(bytes + at, bit_cast<Bits>(shifted) & 0xff);
    }
    const float total = horizontal_sum(sum);
    sums[half * stride] = total * scale;
    totals[half * stride] = -to_integer(total);
    both += total;
  }
  sums[2 * stride] = both * scale;
  totals[2 * stride] = -to_integer(both);
}

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

inline void prepare_row(const QuantizedInput& in, const float* x, int row) {
  const int block_of_rows = row / in.block, chunks = in.chunks(), per_scale = in.round_columns / kChunk;
  const bool real = row < in.rows;
  for (int c = 0; c < chunks; c += per_scale) {
    alignas(64) float part[2 * kChunk] = {};
    const int count = real ? imin(per_scale * kChunk, in.size_in - c * kChunk) : 0;
    if (real) std::memcpy(part, x + c * kChunk, count * sizeof(float));
    float scale = 0, inverse = 0;
    if (in.bytes != nullptr) {
      Vec most{}, poison{};
      for (int i = 0; i < per_scale * kChunk; i += kLanes) {
        const Vec v = load(part + i);
        most = vmax(most, vmax(v, -v));
        poison += v * splat(0.0f);
      }
      const float peak = horizontal_max(most), wrong = horizontal_sum(poison);
      scale = peak * (1.0f / 127.0f) + wrong;
      inverse = wrong == 0 && peak > 1e-30f ? 127.0f / peak : 0;
    }
    for (int i = 0; i < per_scale && c + i < chunks; ++i) {
      const float* from = part + i * kChunk;
      const size_t at = (static_cast<size_t>(block_of_rows) * chunks + c + i) * in.block + row % in.block;
      const size_t sums = (static_cast<size_t>(block_of_rows) * chunks + c + i) * 3 * in.block + row % in.block;
      if (in.bytes != nullptr) {
        in.byte_scales[at] = scale;
        round_chunk(from, scale, inverse, in.bytes + at * kChunk, in.byte_sums + sums, in.byte_totals + sums,
                    in.block);
      }
      if (in.floats != nullptr) {
        std::memcpy(in.floats + at * kChunk, from, kChunk * sizeof(float));
        for (int half = 0; half < 2; ++half) {
          Vec sum{};
          for (int j = 0; j < kChunk / 2; j += kLanes) sum += load(from + half * kChunk / 2 + j);
          in.float_sums[(at - row % in.block) * 2 + half * in.block + row % in.block] = horizontal_sum(sum);
        }
      }
    }
  }
}

void quantized_prepare(const QuantizedInput& in, const float* x, int begin, int end) {
  for (int row = begin; row < end; ++row, x += in.size_in) {
#if defined(__AVX512BF16__)
    if (in.bf16 != nullptr) round_row(in, x, row);
#endif
    if (in.bytes != nullptr || in.floats != nullptr) prepare_row(in, x, row);
  }
}

}  // namespace

#endif  // LLMJAX_QUANTIZED_INPUT_H_
