// Products of many rows of x in f32. Some columns of a few rows of the matrix are dequantized, or widened, into a panel
// that stays in the first-level cache while all rows of x pass by.

#ifndef LLMJAX_FLOAT_PANELS_H_
#define LLMJAX_FLOAT_PANELS_H_

#include "gemm.h"

namespace {

constexpr int kPanelOutputs = kBlockVectors * kLanes > 16 ? kBlockVectors * kLanes : 16;  // rows of the matrix
constexpr int kPanelVectors = kPanelOutputs / kLanes;
constexpr int kPanelFloats = 4096;  // half of a small first-level cache
constexpr int kPanelColumns = kPanelFloats / kPanelOutputs;
constexpr int kPassRows = 2 * kBlockRows;  // rows of x whose sums are taken together

// Where the outputs of a panel go: y = sums + bias + residual.
struct PanelOutputs {
  const float *bias, *residual;  // or null
  float* y;
  int size_out, first, count;

  // `sums` over some columns, which are the first ones, the last ones, both, or neither.
  void put(int row, const float* sums, bool begins, bool ends) const {
    const size_t at = static_cast<size_t>(row) * size_out + first;
    int i = 0;
    for (; i + kLanes <= count; i += kLanes) {
      Vec sum = load(sums + i);
      if (!begins) sum += load(y + at + i);
      if (ends && bias != nullptr) sum += load(bias + first + i);
      if (ends && residual != nullptr) sum += load(residual + at + i);
      store(y + at + i, sum);
    }
    for (; i < count; ++i) {
      float sum = sums[i];
      if (!begins) sum += y[at + i];
      if (ends && bias != nullptr) sum += bias[first + i];
      if (ends && residual != nullptr) sum += residual[at + i];
      y[at + i] = sum;
    }
  }
};

// All rows of x with `width` rows of a matrix, panels of `columns` columns. fill(begin, count) writes columns `begin` to
// `begin + count` of them to the panel; pass(m, passing, begin, count, sums) multiplies rows m to m + passing of x with it:
// sums [passing][width], one after the other.
template <class Fill, class Pass>
inline void pass_by_panels(int rows, int rows_of_pass, int size_in, int columns, int width, const PanelOutputs& outputs,
                           float* sums, const Fill& fill, const Pass& pass) {
  for (int begin = 0; begin < size_in; begin += columns) {
    const int count = imin(columns, size_in - begin);
    fill(begin, count);
    for (int m = 0; m < rows; m += rows_of_pass) {
      const int passing = imin(rows_of_pass, rows - m);
      pass(m, passing, begin, count, sums);
      for (int i = 0; i < passing; ++i) {
        outputs.put(m + i, sums + i * width, begin == 0, begin + count == size_in);
      }
    }
  }
}

// In f32, x [rows, size_in]; fill(panel, begin, count): panel [count][kPanelOutputs].
template <class Fill>
inline void multiply_panels(const float* x, int rows, int size_in, const PanelOutputs& outputs, const Fill& fill) {
  alignas(64) float panel[kPanelFloats], sums[kPassRows * kPanelOutputs];
  const int width = (outputs.count + kLanes - 1) / kLanes * kLanes;
  pass_by_panels(
      rows, kPassRows, size_in, kPanelColumns, kPanelOutputs, outputs, sums, [&](int begin, int count) { fill(panel, begin, count); },
      [&](int m, int passing, int begin, int count, float* to) {
        multiply(x + static_cast<size_t>(m) * size_in + begin, size_in, Dense{panel, kPanelOutputs}, passing, 0, width, 0, count,
                 Matrix{to, kPanelOutputs}, false);
      });
}

}  // namespace

#endif  // LLMJAX_FLOAT_PANELS_H_
