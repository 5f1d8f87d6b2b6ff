// Attention of a step's tokens over pages, as phases of a call.

#ifndef LLMJAX_ATTENTION_H_
#define LLMJAX_ATTENTION_H_

#include <atomic>
#include <cstdint>
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
  bool decode, verify;
  const int32_t *query_start, *kv_len, *page_table, *slots;

  int first_token(int row) const { return decode ? row : query_start[row]; }
  int queries(int row) const { return decode ? (kv_len[row] > 0) : query_start[row + 1] - query_start[row]; }
  const int32_t* pages(int row) const { return page_table + static_cast<size_t>(row) * pages_per_row; }
  // Tokens of requests, the first ones: what follows them fills up a program's size, and nobody reads it.
  int used() const {
    if (!decode) return query_start[rows];
    int row = rows;
    while (row > 0 && kv_len[row - 1] == 0) --row;
    return row;
  }
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
  bool causal;           // false: keys after a query are visible too
  int32_t cache_type, page_size;
  bool token_scales, decode, verify;
  int32_t value_dim = 0;  // of latent pages, whose keys begin with their values; 0: others
};

// q, k, v and out of T tokens, of one type.
struct AttentionRows {
  int64_t tokens, heads, kv_heads, head_dim;
  Type type;  // kF32 or kBf16
  const void *q, *k, *v;  // v null: pages are latent
  void* out;
};

class PagedAttention {
 public:
  // Checks everything that comes from the engine as data.
  xla::ffi::Error init(const AttentionArguments& arguments, const AttentionRows& rows);
  // `prepare(token)` finishes q, k and v of a token first; null: they are. `threads`: that are to have something to do.
  void append(std::function<void(int)> prepare, size_t threads, std::vector<Phase>& phases);
  // Tokens of requests, see Batch.
  int used() const { return batch_.used(); }
  // Zeros for the tokens before and after those of requests.
  void clear_padding() const;

 private:
  // Some queries of a row and their keys, which are divided at the multiples of `part`.
  struct Run {
    int first_token, queries, first_position;
    int key_begin, key_end;    // that some query sees
    int seen_begin, seen_end;  // that all do
    bool single;               // a decode, or as one: see AttentionTask
    int part;
    const int32_t* pages;
    int first_split;  // of the first head, -1: it is not divided
    int first_entry;  // of its parts, which have numbers among those of all runs

    int first_part() const { return key_begin / part; }
    int parts() const { return (key_end - 1) / part - first_part() + 1; }
    int entry(int number) const { return first_entry + number - first_part(); }
  };
  // The parts of a run and a head, and how many of them are not done.
  struct Split {
    Queries queries;
    int count, kv_head;  // count: of queries
    float* partials;
    int parts;
    std::atomic<int> left;
  };

  void divide_heads(size_t threads);
  int queries_of_pass(int count, size_t threads) const;
  void find_runs(size_t threads);
  void find_sharers();
  bool same_keys(const Run& a, const Run& b, int part) const;
  void make_splits();
  void make_tasks(size_t threads);
  void add_member(const Run& run, int part, int head);
  void store_token(int token) const;
  void clear(int begin, int end) const;
  void run(size_t task);

  const AttentionKernels* kernels_;
  Attention call_;
  int readers_;  // heads that read the same keys
  Batch batch_;
  const char *k_, *v_;
  std::vector<Run> runs_;
  // By entry: whose part it is, the run that it is computed with, and the next one that is too.
  std::vector<int> run_of_, leader_, next_;
  std::vector<Queries> members_;
  std::vector<int> split_of_;  // of each member, -1: none
  std::vector<AttentionTask> tasks_;
  std::unique_ptr<Split[]> splits_;
  size_t workspace_ = 0;
};

}  // namespace llmjax

#endif  // LLMJAX_ATTENTION_H_
