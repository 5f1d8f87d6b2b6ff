// The searches of searches.h for some sub-blocks side by side, one in each lane. Included where every bit counts, without
// fused multiply-add.

#ifndef LLMJAX_SEARCHES_KERNEL_H_
#define LLMJAX_SEARCHES_KERNEL_H_

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "searches.h"

namespace llmjax {
namespace {

constexpr size_t kLanes = 8;  // sub-blocks at a time

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));

Floats select(Ints where, Floats yes, Floats no) { return where ? yes : no; }
Floats larger(Floats a, Floats b) { return a > b ? a : b; }
Floats smaller(Floats a, Floats b) { return a < b ? a : b; }
Floats magnitude(Floats a) { return reinterpret_cast<Floats>(reinterpret_cast<Ints>(a) & 0x7fffffff); }

// ggml's nearest_int: halves to even, and whatever it does to numbers beyond 2^22 and to nan (0).
Floats nearest(Floats value, int32_t least, int32_t most) {
  Ints bits = reinterpret_cast<Ints>(value + 12582912.0f);  // 1.5 * 2^23
  bits = (bits & 0x7fffff) - 0x400000;
  const Ints low = Ints{} + least, high = Ints{} + most;
  bits = bits > low ? bits : low;
  bits = bits < high ? bits : high;
  return __builtin_convertvector(bits, Floats);
}

// Some columns of an array, copied: those that are missing at the end are the last one again.
struct Columns {
  Floats rows[kMostNumbers]{};

  void read(const float* from, size_t numbers, size_t stride, size_t first) {
    for (size_t i = 0; i < numbers; ++i) {
      float lanes[kLanes];
      for (size_t lane = 0; lane < kLanes; ++lane) {
        const size_t column = first + lane;
        lanes[lane] = from[i * stride + (column < stride ? column : stride - 1)];
      }
      std::memcpy(&rows[i], lanes, sizeof lanes);
    }
  }
};

template <bool kAbsolute>
struct AffineError {
  const Columns& x;
  const Columns& weights;
  size_t numbers;

  Floats operator()(const Floats* codes, Floats scale, Floats minimum) const {
    Floats total{};
    for (size_t i = 0; i < numbers; ++i) {
      const Floats off = codes[i] * scale + minimum - x.rows[i];
      const Floats each = (kAbsolute ? magnitude(off) : off * off) * weights.rows[i];
      total = i == 0 ? each : total + each;
    }
    return total;
  }
};

// Of some sub-blocks side by side.
struct AffineColumns {
  Floats scale, minimum, origin, multiplier;
};

template <bool kAbsolute>
AffineColumns affine_columns(const Columns& x, const Columns& weights, size_t m, const AffineSearch& search) {
  const int32_t top = static_cast<int32_t>(search.top);
  Floats low = x.rows[0], high = x.rows[0];
  Floats total = weights.rows[0], total_x = weights.rows[0] * x.rows[0];
  for (size_t i = 1; i < m; ++i) {
    low = smaller(low, x.rows[i]), high = larger(high, x.rows[i]);
    total = total + weights.rows[i], total_x = total_x + weights.rows[i] * x.rows[i];
  }
  const Floats zero{}, least = smaller(low, zero);
  const Ints flat = high == least;
  Floats codes[kMostNumbers];
  const auto find_codes = [&](Floats origin, Floats multiplier) {
    for (size_t i = 0; i < m; ++i) codes[i] = nearest((x.rows[i] - origin) * multiplier, 0, top);
  };
  const AffineError<kAbsolute> error{x, weights, m};

  Floats multiplier = select(flat, zero, search.top / (high - least));
  Floats scale = 1.0f / multiplier, minimum = least, origin = least;
  find_codes(origin, multiplier);
  Floats best = error(codes, scale, minimum);
  for (int step = 0; step <= search.steps; ++step) {
    const float reach = search.first + 0.1f * static_cast<float>(step) + search.top;
    const Floats tried = select(flat, zero, reach / (high - minimum));
    find_codes(minimum, tried);
    Floats sum_l{}, sum_l2{}, sum_xl{};
    for (size_t i = 0; i < m; ++i) {
      const Floats weighted = weights.rows[i] * codes[i], squared = weighted * codes[i], product = weighted * x.rows[i];
      sum_l = i == 0 ? weighted : sum_l + weighted;
      sum_l2 = i == 0 ? squared : sum_l2 + squared;
      sum_xl = i == 0 ? product : sum_xl + product;
    }
    const Floats determinant = total * sum_l2 - sum_l * sum_l;
    Floats new_scale = (total * sum_xl - total_x * sum_l) / determinant;
    Floats new_minimum = (sum_l2 * total_x - sum_l * sum_xl) / determinant;
    const Ints above_zero = new_minimum > zero;
    new_scale = select(above_zero, sum_xl / sum_l2, new_scale);
    new_minimum = select(above_zero, zero, new_minimum);
    const Floats new_error = error(codes, new_scale, new_minimum);
    const Ints better = (determinant > zero) & (new_error < best);
    best = select(better, new_error, best);
    multiplier = select(better, tried, multiplier);
    origin = select(better, minimum, origin);
    scale = select(better, new_scale, scale);
    minimum = select(better, new_minimum, minimum);
  }
  return {select(flat, zero, scale), select(flat, least, minimum), origin, multiplier};
}

struct SymmetricColumns {
  Floats scale, multiplier;
};

// `peak`: the numbers of largest magnitude.
SymmetricColumns symmetric_columns(const Columns& x, Floats peak, size_t m, float middle) {
  const int32_t half = static_cast<int32_t>(middle);
  const Floats zero{};
  Floats scale{}, best{}, multiplier = -middle / peak;
  for (int number = 0; number < 19; ++number) {
    const int step = number == 0 ? 0 : number <= 9 ? number - 10 : number - 9;  // 0, -9 to -1, 1 to 9
    const Floats tried = -(middle + 0.1f * static_cast<float>(step)) / peak;
    Floats sum_xl{}, sum_l2{};
    for (size_t i = 0; i < m; ++i) {
      const Floats code = nearest(x.rows[i] * tried, -half, half - 1), weight = x.rows[i] * x.rows[i];
      const Floats product = weight * x.rows[i] * code, squared = weight * code * code;
      sum_xl = i == 0 ? product : sum_xl + product;
      sum_l2 = i == 0 ? squared : sum_l2 + squared;
    }
    const Floats found = sum_xl / sum_l2;
    // The first codes are kept whatever they are worth, even if sums overflow to nan.
    const Ints better = step == 0 ? sum_l2 != zero : (sum_l2 > zero) & (sum_xl * sum_xl > best * sum_l2);
    scale = select(better, found, scale);
    best = select(better, found * sum_xl, best);
    multiplier = select(better, tried, multiplier);
  }
  return {scale, multiplier};
}

}  // namespace
}  // namespace llmjax

#endif  // LLMJAX_SEARCHES_KERNEL_H_
