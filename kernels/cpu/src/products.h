// Products of several matrices with the same rows of x, as phases of a call.

#ifndef LLMJAX_PRODUCTS_H_
#define LLMJAX_PRODUCTS_H_

#include <functional>
#include <initializer_list>
#include <vector>

#include "buffers.h"
#include "kernels.h"
#include "parallel.h"
#include "quantized.h"

namespace llmjax {

constexpr int kChoices = 8;  // methods for numbers of rows, at most
constexpr int kMatrixNumbers = 24 + 2 * kChoices, kMatrixLevels = 17;

// A weight as kernels/cpu/matrices.py passes it.
struct MatrixArguments {
  xla::ffi::AnyBuffer weight;                      // u32 words of records, or f32, bf16 or f16 [size_out, size_in]
  xla::ffi::Buffer<xla::ffi::DataType::F32> bias;  // [size_out], or empty for none
  // The method (-1: by rows) and whether x may be rounded to int8, and x and the weight to bf16. Then, zeros for a
  // plain matrix: size_in, num_words, bits, kind, levels, group_size, super_size; of scales, zeros, minima and super
  // scales the type, first word and count; of super minima (typed as super scales) the first word and count. Then
  // kChoices pairs of rows and the method that was measured for up to that many (-1: `choose_method`'s), ascending, the
  // last for more rows as well; rows 0: none.
  const int32_t* numbers;
  const float* levels;  // 16, and the zero point
};

// Matrix i of a call: two of the remaining arguments, and its part of the attributes `matrices` and `levels`.
xla::ffi::ErrorOr<MatrixArguments> matrix_arguments(const xla::ffi::RemainingArgs& arguments, size_t i,
                                                    xla::ffi::Span<const int32_t> matrices,
                                                    xla::ffi::Span<const float> levels);

// Writes rows begin..end of x, the first at `to`.
using Fill = std::function<void(int begin, int end, float* to)>;

// How many rows there are, and how many choose the method: a prompt's keys and values must not depend on how much of a
// program its tokens fill, since another request may find them in the cache.
struct Rows {
  Rows(int count) : count(count), program(count) {}
  Rows(int count, int program) : count(count), program(program) {}
  int count, program;
};

// How many of a step's tokens are requests', the first ones, as in RaggedBatch.used; what follows them fills up a
// program's size, and nobody reads it. `used` empty: all. `decode`: these choose the method, of which there are programs for
// every few rows.
xla::ffi::ErrorOr<Rows> rows_in_use(const xla::ffi::Buffer<xla::ffi::DataType::S32>& used, bool decode, int tokens);

// Zeros for the rows after them.
void clear_padding(float* out, const Rows& rows, int tokens, int size);

class Products {
 public:
  // x: [rows, size_in]; with a `Fill`, memory for them.
  Products(Rows rows, int size_in, float* x);

  // y = x * weight^T + bias + residual; residual [rows, size_out] or null.
  xla::ffi::Error add(const MatrixArguments& matrix, int size_out, float* y, const float* residual = nullptr);

  // Outputs are rounded to bf16 [rows, size_out] in memory of their own for each product, in place of what `add` was told. False: a
  // method does not do that, and nothing changes. After the last `add`.
  bool round_into(std::initializer_list<uint16_t*> to);

  // x is what an activation function made. Before `bytes`; `gate_into` says it of `next`.
  void follows_activation() { in_.outlier = kActivatedOutlier; }

  // The x of `next` is activation(first) * second of the two products added so far, in the first one's y, or activation(first) of one.
  // Tasks that compute them do that as well where they can; where not, `next` needs a `Fill`. After the last `add` of both.
  void gate_into(Products& next, Activation activation, const xla::ffi::ThreadPool& pool);

  // Memory that the phases share, 64-byte aligned. After the last `add`.
  size_t bytes(const xla::ffi::ThreadPool& pool);
  // `fill` null: x is there.
  void append(char* memory, Fill fill, std::vector<Phase>& phases);

 private:
  struct Quantized {
    QuantizedMatrix matrix;
    Method method;
    const QuantizedMethod* kernels;
    int tiles_of_task;
    int64_t first_task;
  };
  struct Plain {
    Linear call;
    const LinearKernels* kernels;
    size_t workspace;  // offset
    int64_t outputs_of_task;
    int64_t first_task;
  };

  bool uses(Method method) const { return methods_[static_cast<int>(method)] != nullptr; }
  xla::ffi::Error add_quantized(const MatrixArguments& matrix, int size_out, float* y, const float* residual);
  xla::ffi::Error add_plain(const MatrixArguments& matrix, int size_out, float* y, const float* residual);
  void push(const Quantized& product);
  Phase prepare(Fill fill) const;
  void run(int64_t task, const char* memory) const;
  void run_quantized(int64_t task) const;

  int program_rows_;
  float* x_;
  QuantizedInput in_{};
  std::vector<Quantized> quantized_;
  std::vector<Plain> plain_;
  const QuantizedMethod* methods_[kMethods] = {};  // that are used
  size_t task_workspace_ = 0, plain_bytes_ = 0;
  int threads_ = 1, rows_of_task_ = 0;
  int64_t column_tasks_ = 0, quantized_tasks_ = 0, tasks_ = 0;  // quantized: column tasks for each part of the rows
  Activation activation_ = Activation::kSilu;
  bool gates_ = false;         // the second product comes with the first
  Products* gated_ = nullptr;  // whose x we write in the form of its method
  bool filled_ = false, prepared_ = false;  // our x is written by others; in the form of our method
};

}  // namespace llmjax

#endif  // LLMJAX_PRODUCTS_H_
