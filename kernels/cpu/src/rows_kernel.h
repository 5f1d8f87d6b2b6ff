// What stands between the products of a decoder layer, row by row: norms, gated activations, rotation.

#ifndef LLMJAX_ROWS_KERNEL_H_
#define LLMJAX_ROWS_KERNEL_H_

#include "activations.h"

namespace {

using llmjax::Norm;

// Calls body(i, load, store) for the vectors of a row; the last may be a part of one.
template <class Body>
inline void each_vector(int size, const Body& body) {
  int i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    body(i, [](const float* p) { return load(p); }, [](float* p, Vec v) { store(p, v); });
  }
  if (const int rest = size - i; rest > 0) {
    body(i, [rest](const float* p) { return load_part(p, rest); }, [rest](float* p, Vec v) { store_part(p, v, rest); });
  }
}

inline void layer_norm_row(const Norm& norm, const float* x, const float* residual, float* out, int size) {
  const float of_all = 1.0f / static_cast<float>(size);
  Vec sum{};
  each_vector(size, [&](int i, auto get, auto) { sum += get(x + i); });
  const Vec mean = splat(horizontal_sum(sum) * of_all);
  Vec squares{};
  int whole = 0;
  for (; whole + kLanes <= size; whole += kLanes) {
    const Vec v = load(x + whole) - mean;
    squares += v * v;
  }
  float total = horizontal_sum(squares);
  for (; whole < size; ++whole) total += (x[whole] - mean[0]) * (x[whole] - mean[0]);
  const float scale = 1.0f / __builtin_sqrtf(total * of_all + norm.eps);
  const Vec added = splat(norm.plus_one ? 1.0f : 0.0f);
  each_vector(size, [&](int i, auto get, auto put) {
    Vec v = (get(x + i) - mean) * splat(scale) * (get(norm.weight + i) + added);
    if (norm.bias != nullptr) v += get(norm.bias + i);
    put(out + i, residual == nullptr ? v : get(residual + i) + v);
  });
}

inline void norm_row(const Norm& norm, const float* x, const float* residual, float* out, int size) {
  if (norm.centered) return layer_norm_row(norm, x, residual, out, size);
  Vec squares{};
  each_vector(size, [&](int i, auto get, auto) {
    const Vec v = get(x + i);
    squares += v * v;
  });
  const float scale = 1.0f / __builtin_sqrtf(horizontal_sum(squares) / static_cast<float>(size) + norm.eps);
  const Vec added = splat(norm.plus_one ? 1.0f : 0.0f);
  each_vector(size, [&](int i, auto get, auto put) {
    const Vec v = get(x + i) * splat(scale) * (get(norm.weight + i) + added);
    put(out + i, residual == nullptr ? v : get(residual + i) + v);
  });
}

void norm_rows(const Norm& norm, const float* x, const float* residual, float* out, int size, int begin, int end) {
  for (int m = begin; m < end; ++m) {
    const size_t at = static_cast<size_t>(m) * size;
    norm_row(norm, x + at, residual == nullptr ? nullptr : residual + at, out + at, size);
  }
}

void gate_rows(Activation activation, const float* gate, const float* up, float* out, int size, int begin, int end) {
  for (int m = begin; m < end; ++m) {
    const size_t at = static_cast<size_t>(m) * size;
    each_vector(size, [&](int i, auto get, auto put) {
      put(out + at + i, gated(activation, get(gate + at + i), up == nullptr ? splat(1.0f) : get(up + at + i), sigmoid));
    });
  }
}

void rotate(const llmjax::Rotation& by, float* heads) {
  for (int head = 0; head < by.heads; ++head, heads += by.head_dim) {
    if (by.norm.weight != nullptr) norm_row(by.norm, heads, nullptr, heads, by.head_dim);
    if (by.interleaved) {
      for (int i = 0; i < by.half; ++i) {
        const float a = heads[2 * i], b = heads[2 * i + 1];
        heads[2 * i] = a * by.cos[i] - b * by.sin[i];
        heads[2 * i + 1] = a * by.sin[i] + b * by.cos[i];
      }
      continue;
    }
    each_vector(by.half, [&](int i, auto get, auto put) {
      const Vec a = get(heads + i), b = get(heads + by.half + i), cos = get(by.cos + i), sin = get(by.sin + i);
      put(heads + i, a * cos - b * sin);
      put(heads + by.half + i, a * sin + b * cos);
    });
  }
}

void widen(const uint16_t* from, float* to, int size) {
  int i = 0;
  for (; i + kLanes <= size; i += kLanes) store(to + i, load(reinterpret_cast<const Bf16*>(from) + i));
  for (; i < size; ++i) to[i] = bit_cast<float>(static_cast<uint32_t>(from[i]) << 16);
}

void round(const float* from, uint16_t* to, int size) {
  int i = 0;
  for (; i + kLanes <= size; i += kLanes) store(reinterpret_cast<Bf16*>(to) + i, load(from + i));
  for (; i < size; ++i) to[i] = static_cast<uint16_t>(bf16_bits(splat(from[i]))[0]);
}

// The first of the largest entries; -1 where there is a NaN. Four runs side by side, since each comparison waits for the
// one before it in its run.
inline int first_largest(const float* x, int size) {
  constexpr int kRuns = 4, kStep = kRuns * kLanes;
  Vec best[kRuns];
  Int at[kRuns], wrong{};
  for (int j = 0; j < kRuns; ++j) best[j] = splat(-__builtin_inff()), at[j] = Int{};
  int i = 0;
  for (; i + kStep <= size; i += kStep) {
#pragma GCC unroll 4
    for (int j = 0; j < kRuns; ++j) {
      const Vec v = load(x + i + j * kLanes);
      const Int larger = (Int)(v > best[j]);
      best[j] = select(larger, v, best[j]);
      at[j] = (larger & (Int{} + i)) | (~larger & at[j]);
      wrong |= (Int)(v != v);
    }
  }
  float peak = -__builtin_inff();
  int first = 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int j = 0; j < kRuns; ++j) {
      const int index = at[j][lane] + j * kLanes + lane;
      if (wrong[lane] != 0) return -1;
      if (best[j][lane] > peak || (best[j][lane] == peak && index < first)) peak = best[j][lane], first = index;
    }
  }
  for (; i < size; ++i) {
    if (x[i] != x[i]) return -1;
    if (x[i] > peak) peak = x[i], first = i;
  }
  return peak == -__builtin_inff() ? 0 : first;
}

int argmax(const float* x, int size) { return imax(0, first_largest(x, size)); }

bool finite(const float* x, int size) {
  Int wrong{};
  each_vector(size, [&](int i, auto get, auto) {
    const Vec v = get(x + i), difference = v - v;  // NaN for infinities too
    wrong |= (Int)(difference != difference);
  });
  int any = 0;
  for (int lane = 0; lane < kLanes; ++lane) any |= wrong[lane];
  return any == 0;
}

}  // namespace

#endif  // LLMJAX_ROWS_KERNEL_H_
