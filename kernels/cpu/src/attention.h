// Attention of a step's tokens over pages, as phases of a call.

#ifndef LLMJAX_ATTENTION_H_
#define LLMJAX_ATTENTION_H_

#include <atomic>
#include <functional>
#include <memory>
#include <vector>

#include "buffers.h"
#include "kernels.h"
#include "parallel.h"

namespace llmjax {

// A step's tokens, see RaggedBatch in kernels/attention/types.py.
struct Batch {
  int tokens, rows, num_pages, pages_per_row;  // num_pages: from the layer's first one on
  bool decode;
  const int32_t *query_start, *kv_len, *page_table, *slots;

  int first_token(int row) const { return decode ? row : query_start[row]; }
  int queries(int row) const { return decode ? (kv_len[row] > 0) : query_start[row + 1] - query_start[row]; }
  const int32_t* pages(int row) const { return page_table + static_cast<size_t>(row) * pages_per_row; }
};

// What a call gets besides q, k and v.
struct AttentionArguments {
  xla::ffi::AnyBuffer pages_in;
  xla::ffi::Buffer<xla::ffi::DataType::F32> calibration;  // [2, 2], or empty for none
  xla::ffi::Buffer<xla::ffi::DataType::S32> query_start, kv_len, page_table, slots;
  xla::ffi::BufferR0<xla::ffi::DataType::S32> first_page;
  xla::ffi::Buffer<xla::ffi::DataType::F32> sinks;  // [H], or empty for none
  xla::ffi::AnyBuffer pages;
  float scale, softcap;  // softcap 0: none
  int32_t window;        // 0: none
  bool causal;           // false: keys behind a query are visible too
  int32_t cache_type, page_size;
  bool token_scales, decode;
  int32_t isa;
};

// q, k, v and out of T tokens, of one type.
struct AttentionRows {
  int64_t tokens, heads, kv_heads, head_dim;
  Type type;  // kF32 or kBf16
  const void *q, *k, *v;
  void* out;
};

class PagedAttention {
 public:
  // Checks everything that comes from the engine as data.
  xla::ffi::Error init(const AttentionArguments& arguments, const AttentionRows& rows);
  // `prepare(token)` finishes q, k and v of a token first; null: they are.
  void append(std::function<void(int)> prepare, std::vector<Phase>& phases);

 private:
  // Tasks that differ in their keys only, and how many of them are not done.
  struct Split {
    float* partials;
    int parts;
    std::atomic<int> left;
  };

  void make_plan();
  void store_token(int token) const;
  void run(size_t task);
  void clear_padding() const;

  const Kernels* kernels_;
  Attention call_;
  Batch batch_;
  const char *k_, *v_;
  std::vector<AttentionTask> tasks_;
  std::vector<int> split_of_;  // of each task, -1: none
  std::vector<int> parts_;     // of each split
  std::unique_ptr<Split[]> splits_;
  size_t partial_floats_ = 0, workspace_ = 0;
};

}  // namespace llmjax

#endif  // LLMJAX_ATTENTION_H_
