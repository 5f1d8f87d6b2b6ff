// What handlers of layers have in common: scratch of a call, and work that goes row by row.

#ifndef LLMJAX_SUBLAYERS_H_
#define LLMJAX_SUBLAYERS_H_

#include "buffers.h"
#include "kernels.h"
#include "products.h"

namespace llmjax {
namespace {

namespace ffi = xla::ffi;
using Floats = ffi::Buffer<ffi::F32>;

constexpr int kRowsOfTask = 4;  // so that a decode step has some for each thread

// Hands out columns of a call's scratch [rows, columns], as matrices of their own.
class Scratch {
 public:
  Scratch(ffi::Result<Floats>& buffer, int64_t rows) : at_(buffer->typed_data()), left_(buffer->element_count()), rows_(rows) {}
  float* take(int64_t columns) {
    float* taken = at_;
    at_ += rows_ * columns;
    left_ -= rows_ * columns;
    return taken;
  }
  bool fits() const { return left_ >= 0; }
  // What is left, as columns of other rows.
  Scratch with_rows(int64_t rows) const {
    Scratch rest = *this;
    rest.rows_ = rows;
    return rest;
  }

 private:
  float* at_;
  int64_t left_, rows_;
};

Fill fill_normed(const RowKernels& kernels, const Norm& norm, const float* x, int size) {
  if (norm.weight == nullptr) return nullptr;
  return [&kernels, norm, x, size](int begin, int end, float* to) {
    kernels.norm_rows(norm, x + static_cast<size_t>(begin) * size, nullptr, to, size, 0, end - begin);
  };
}

// Calls rows(begin, end) for all rows.
template <class Rows>
Phase each_row(int rows, const Rows& body) {
  return {static_cast<size_t>((rows + kRowsOfTask - 1) / kRowsOfTask), [rows, body](size_t i) {
            const int begin = static_cast<int>(i) * kRowsOfTask, end = begin + kRowsOfTask;
            body(begin, end < rows ? end : rows);
          }, Work::kNorms};
}

}  // namespace
}  // namespace llmjax

#endif  // LLMJAX_SUBLAYERS_H_
