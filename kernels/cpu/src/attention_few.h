// Products of few queries with keys and of few weights with values, read from where they lie. Here every element of a
// page meets only some rows, so that widening it costs as much as multiplying: pages of bf16 are widened two vectors at
// a time, by a shift and a mask, which leaves the elements of even places before those of odd ones.

#ifndef LLMJAX_ATTENTION_FEW_H_
#define LLMJAX_ATTENTION_FEW_H_

#include "gemm.h"
#include "kv_types.h"
#include "pairs.h"

namespace {

template <class T>
inline void widen_row(const T* from, int size, float* to) {
  int d = 0;
  for (; d + kPair <= size; d += kPair) {
    Vec a, b;
    load_pair(from + d, a, b);
    store(to + d, a), store(to + d + kLanes, b);
  }
  if (d < size) store(to + d, load(from + d));
}

// Calls `run` for each group of `rows` rows, with its first one and how many it has (1 to 4, as a Count).
template <class Run>
inline void in_groups(int rows, const Run& run) {
  for (int i = 0; i < rows;) {
    const int left = rows - i, count = left == 5 || left == 6 ? 3 : imin(left, 4);
    if (count == 4) run(i, Count<4>{});
    if (count == 3) run(i, Count<3>{});
    if (count == 2) run(i, Count<2>{});
    if (count == 1) run(i, Count<1>{});
    i += count;
  }
}

// Rows that are used later, to be fetched while ours are multiplied: a line of them for each line of ours, since a core drops what it
// is asked for in too short a time. `more`: twice as many, where ours are few. Null: none.
template <class T>
struct Coming {
  const T *const *rows = nullptr, *const *more = nullptr;

  Coming from(int c) const { return {rows == nullptr ? nullptr : rows + c, more == nullptr ? nullptr : more + c}; }
  // In the loops that use it and always inlined: compilers take a function that only fetches for one that does nothing.
  __attribute__((always_inline)) void fetch(int c, int d) const {
    if (rows != nullptr) __builtin_prefetch(rows[c] + d, 0, 2);
    if (more != nullptr) __builtin_prefetch(more[c] + d, 0, 2);
  }
};

// scores[m, c] = q[m] . key[c] for kRows queries and kLanes keys. The order of a sum is the same for any kRows.
template <int kRows, class T>
inline void score_few(const float* q, int head_dim, const T* const* keys, Coming<T> coming, float* scores, int stride) {
  constexpr int kLine = 64 / static_cast<int>(sizeof(T));
  constexpr int kKeys = kRegisters == 32 || kRows <= 3 ? 4 : 2;
  Vec dots[kRows][kLanes];
  for (int i = 0; i < kLanes; i += kKeys) {
    Vec partial[kRows][kKeys] = {};
    int d = 0;
    for (; d + kPair <= head_dim; d += kPair) {
#pragma GCC unroll 4
      for (int j = 0; j < kKeys; ++j) {
        Vec a, b;
        if (d % kLine == 0) coming.fetch(i + j, d);
        load_pair(keys[i + j] + d, a, b);
#pragma GCC unroll 4
        for (int m = 0; m < kRows; ++m) {
          const float* query = q + static_cast<size_t>(m) * head_dim + d;
          partial[m][j] += load(query) * a;
          partial[m][j] += load(query + kLanes) * b;
        }
      }
    }
    if (d < head_dim) {
#pragma GCC unroll 4
      for (int j = 0; j < kKeys; ++j) {
        const Vec key = load(keys[i + j] + d);
#pragma GCC unroll 4
        for (int m = 0; m < kRows; ++m) partial[m][j] += load(q + static_cast<size_t>(m) * head_dim + d) * key;
      }
    }
#pragma GCC unroll 4
    for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 4
      for (int j = 0; j < kKeys; ++j) dots[m][i + j] = partial[m][j];
    }
  }
  for (int m = 0; m < kRows; ++m) store(scores + m * stride, sum_rows(dots[m]));
}

// sums[m, n] += sum over c of weights[m, c] * value[c][n], for kRows rows and kPairs pairs of columns from n on.
template <int kRows, int kPairs, class T>
inline void add_pairs(const float* weights, int stride, const T* const* values, Coming<T> coming, int n, int first, int end, float* sums,
                      int value_dim) {
  constexpr int kLine = 64 / static_cast<int>(sizeof(T));
  Vec total[kRows][kPairs][2];
#pragma GCC unroll 4
  for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 4
    for (int p = 0; p < kPairs; ++p) {
      const float* from = sums + static_cast<size_t>(m) * value_dim + n + p * kPair;
      total[m][p][0] = load(from), total[m][p][1] = load(from + kLanes);
    }
  }
  for (int c = first; c < end; ++c) {
#pragma GCC unroll 8
    for (int d = 0; d < kPairs * kPair; d += kLine) coming.fetch(c, n + d);
#pragma GCC unroll 4
    for (int p = 0; p < kPairs; ++p) {
      Vec a, b;
      load_pair(values[c] + n + p * kPair, a, b);
#pragma GCC unroll 4
      for (int m = 0; m < kRows; ++m) {
        const Vec weight = splat(weights[m * stride + c]);
        total[m][p][0] += weight * a;
        total[m][p][1] += weight * b;
      }
    }
  }
#pragma GCC unroll 4
  for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 4
    for (int p = 0; p < kPairs; ++p) {
      float* to = sums + static_cast<size_t>(m) * value_dim + n + p * kPair;
      store(to, total[m][p][0]), store(to + kLanes, total[m][p][1]);
    }
  }
}

template <int kRows, class T>
inline void add_few(const float* weights, int stride, const T* const* values, Coming<T> coming, int first, int end, float* sums,
                    int value_dim) {
  // As many sums as registers hold beside what they come from.
  constexpr int kPairs = (kRegisters == 32 ? 8 : 4) / kRows;
  int n = 0;
  for (; n + kPairs * kPair <= value_dim; n += kPairs * kPair) {
    add_pairs<kRows, kPairs>(weights, stride, values, coming, n, first, end, sums, value_dim);
  }
  for (; n + kPair <= value_dim; n += kPair) add_pairs<kRows, 1>(weights, stride, values, coming, n, first, end, sums, value_dim);
  if (n == value_dim) return;
  Vec total[kRows];
  for (int m = 0; m < kRows; ++m) total[m] = load(sums + static_cast<size_t>(m) * value_dim + n);
  for (int c = first; c < end; ++c) {
    const Vec value = load(values[c] + n);
    for (int m = 0; m < kRows; ++m) total[m] += splat(weights[m * stride + c]) * value;
  }
  for (int m = 0; m < kRows; ++m) store(sums + static_cast<size_t>(m) * value_dim + n, total[m]);
}

}  // namespace

#endif  // LLMJAX_ATTENTION_FEW_H_
