// Attention of tokens to those of their segment (contract: kernels/attention/segments.py), as phases of a call.

#ifndef LLMJAX_SEGMENTS_H_
#define LLMJAX_SEGMENTS_H_

#include <vector>

#include "buffers.h"
#include "kernels.h"
#include "parallel.h"

namespace llmjax {

// Where queries, keys and values are, and where what they give goes: [tokens, heads, size] of one type.
struct SegmentTokens {
  int tokens, heads, size;
  Type type;
  const void *q, *k, *v;
  void* out;
};

class SegmentAttention {
 public:
  // `room`: [heads, 2, tokens, size filled up to a multiple of 32], for keys and values in the type in which they are multiplied.
  xla::ffi::Error init(const SegmentTokens& of, const xla::ffi::Buffer<xla::ffi::DataType::S32>& segments, xla::ffi::AnyBuffer& room, float scale);
  // The tokens after it are of no segment, and what comes out for them is zeros.
  int used() const { return used_; }
  // Whether keys and values are multiplied as bf16; then queries, keys, values and what they give may be that type, too.
  bool narrow() const { return call_.cache == Type::kBf16; }
  void take(Type type) { of_.type = call_.activations = type; }
  void append(std::vector<Phase>& phases);

 private:
  // What a segment's tokens share. Among its queries may be tokens of no segment, which are computed and mean nothing.
  struct Segment {
    int first_query, end_of_queries;
    int first_key, end_of_keys;  // in the order in which keys are stored
  };
  struct Task {
    int segment, first_query, queries;
  };

  void find_segments(const int32_t* ids);
  void store(int begin);
  void run(int head, const Task& of);
  char* of_head(int head) const { return room_ + 2 * static_cast<size_t>(head) * call_.record_bytes; }

  const AttentionKernels* kernels_ = nullptr;
  SegmentTokens of_{};
  char* room_ = nullptr;
  Attention call_{};        // with one head
  std::vector<int> slots_;  // where each token's key is stored, -1: nowhere
  std::vector<Segment> segments_;
  std::vector<Task> tasks_;
  size_t workspace_ = 0;
  int used_ = 0;
};

}  // namespace llmjax

#endif  // LLMJAX_SEGMENTS_H_
