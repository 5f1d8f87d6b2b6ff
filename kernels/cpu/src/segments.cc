// Attention of tokens to those of their segment (contract: kernels/attention/segments.py): first each head's keys and
// values in one piece, so that queries of a segment read them as pages, then the queries in blocks.

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "buffers.h"
#include "kernels.h"
#include "parallel.h"

namespace llmjax {
namespace {

namespace ffi = xla::ffi;

constexpr int kQueriesOfTask = 256;  // at most; a multiple of 16. Each task brings its keys into the form of a product
constexpr int kTokensOfTask = 64;    // to store
constexpr int kWidest = 32;          // to a multiple of which heads are filled up at most

constexpr int kUnseen = -2;          // `kUnseen - s`: a token that sees the segment s, and is seen by none

// What a segment's tokens share. Among its queries may be tokens of no segment, which are computed and mean nothing.
struct Segment {
  int first_query, end_of_queries;
  int first_key, end_of_keys;  // in the order in which keys are stored
};

class SegmentAttention {
 public:
  ffi::Error init(const ffi::AnyBuffer& q, const ffi::AnyBuffer& k, const ffi::AnyBuffer& v,
                  const ffi::Buffer<ffi::S32>& segments, ffi::AnyBuffer& out, ffi::AnyBuffer& room, float scale) {
    const auto dims = q.dimensions();
    if (dims.size() != 3) return invalid("segments: wrong number of dimensions");
    const auto type = float_type(q.element_type()), cache = float_type(room.element_type());
    if (!type || *type == Type::kF16 || k.element_type() != q.element_type() || v.element_type() != q.element_type() ||
        out.element_type() != q.element_type() || !cache || *cache == Type::kF16) {
      return invalid("segments: unsupported types");
    }
    tokens_ = static_cast<int>(dims[0]), heads_ = static_cast<int>(dims[1]), size_ = static_cast<int>(dims[2]);
    const int widest = (size_ + kWidest - 1) / kWidest * kWidest;
    if (size_ < 1 || !has_shape(k, {dims[0], dims[1], dims[2]}) || !has_shape(v, {dims[0], dims[1], dims[2]}) ||
        !has_shape(out, {dims[0], dims[1], dims[2]}) || !has_shape(segments, {dims[0]}) ||
        !has_shape(room, {dims[1], 2, dims[0], widest})) {
      return invalid("segments: shapes do not fit each other");
    }
    kernels_ = find_attention_kernels(widest);
    if (kernels_ == nullptr) return invalid("segments: no vectors divide the head size");
    const int multiple = *cache == Type::kBf16 ? kernels_->lanes_of_bf16 : kernels_->lanes;
    q_ = static_cast<const char*>(q.untyped_data()), k_ = static_cast<const char*>(k.untyped_data());
    v_ = static_cast<const char*>(v.untyped_data()), out_ = static_cast<char*>(out.untyped_data());
    room_ = static_cast<char*>(room.untyped_data());
    call_.heads = call_.kv_heads = 1;
    call_.head_dim = call_.value_dim = (size_ + multiple - 1) / multiple * multiple;
    call_.page_size = std::max(tokens_, 1);
    call_.activations = *type, call_.cache = *cache;
    call_.scale = scale;
    call_.causal = false;
    call_.records = 2;
    call_.record_bytes = size_of(*cache) * static_cast<size_t>(tokens_) * call_.head_dim;
    find_segments(segments.typed_data());
    return ffi::Error::Success();
  }

  void append(std::vector<Phase>& phases) {
    const size_t heads = static_cast<size_t>(heads_), pieces = (static_cast<size_t>(tokens_) + kTokensOfTask - 1) / kTokensOfTask;
    phases.push_back({pieces, [this](size_t i) { store(static_cast<int>(i) * kTokensOfTask); }, Work::kStores});
    int most = 0;
    for (size_t s = 0; s < segments_.size(); ++s) {
      const int first = segments_[s].first_query, count = segments_[s].end_of_queries - first;
      const int blocks = (count + kQueriesOfTask - 1) / kQueriesOfTask, size = ((count + blocks - 1) / blocks + 15) / 16 * 16;
      for (int begin = 0; begin < count; begin += size) {
        tasks_.push_back({static_cast<int>(s), first + begin, std::min(size, count - begin)});
        most = std::max(most, tasks_.back().queries);
      }
    }
    workspace_ = (kernels_->workspace(call_, most) + 63) / 64 * 64;
    // Head after head: its keys stay in caches.
    phases.push_back({heads * tasks_.size(),
                      [this](size_t i) { run(static_cast<int>(i / tasks_.size()), tasks_[i % tasks_.size()]); }, Work::kAttention});
  }

 private:
  struct Task {
    int segment, first_query, queries;
  };

  void find_segments(const int32_t* ids) {
    slots_.assign(static_cast<size_t>(tokens_), -1);
    int stored = 0;
    for (int t = 0, id = -1; t < tokens_; ++t) {
      if (ids[t] == -1) continue;
      const bool seen = ids[t] >= 0;
      const int own = seen ? ids[t] : kUnseen - ids[t];
      if (own != id) segments_.push_back({t, t, stored, stored});
      id = own;
      if (seen) slots_[static_cast<size_t>(t)] = stored++;
      segments_.back().end_of_queries = t + 1, segments_.back().end_of_keys = stored;
    }
    // What sees nothing is zero.
    segments_.erase(std::remove_if(segments_.begin(), segments_.end(),
                                   [](const Segment& one) { return one.first_key == one.end_of_keys; }),
                    segments_.end());
  }

  // Keys and values of tokens from `begin` on, filled up with zeros; and zeros for what no segment's queries come to.
  void store(int begin) {
    const size_t width = size_of(call_.activations), row = width * size_, filled = width * call_.head_dim;
    char* const wide = thread_memory<1>(filled);
    std::memset(wide, 0, filled);
    for (int t = begin; t < std::min(begin + kTokensOfTask, tokens_); ++t) {
      const int slot = slots_[static_cast<size_t>(t)];
      if (slot < 0) std::memset(out_ + static_cast<size_t>(t) * heads_ * row, 0, heads_ * row);
      for (int head = 0; slot >= 0 && head < heads_; ++head) {
        const size_t from = (static_cast<size_t>(t) * heads_ + head) * row;
        for (int part = 0; part < 2; ++part) {
          const char* source = (part == 0 ? k_ : v_) + from;
          if (size_ != call_.head_dim) source = static_cast<const char*>(std::memcpy(wide, source, row));
          kernels_->store(call_, source, of_head(head) + part * call_.record_bytes, slot, {});
        }
      }
    }
  }

  // Queries of one head: they lie together for the kernel, and so does what it makes of them.
  void run(int head, const Task& of) {
    const size_t width = size_of(call_.activations), row = width * size_, filled = width * call_.head_dim;
    char* const memory = thread_memory<1>(workspace_ + of.queries * filled);
    char* const rows = memory + workspace_;
    const auto place = [&](int i) { return (static_cast<size_t>(of.first_query + i) * heads_ + head) * row; };
    for (int i = 0; i < of.queries; ++i) {
      std::memcpy(rows + i * filled, q_ + place(i), row);
      std::memset(rows + i * filled + row, 0, filled - row);
    }
    Attention call = call_;
    call.q = call.out = rows;
    call.pages = of_head(head);
    const Segment& segment = segments_[static_cast<size_t>(of.segment)];
    const Queries queries{0, segment.first_key, nullptr};
    const int32_t page = 0;
    AttentionTask task{};
    task.members = &queries, task.num_members = 1, task.queries = of.queries;
    task.key_begin = segment.first_key, task.key_end = segment.end_of_keys;
    task.first_keys = true, task.pages = &page;
    kernels_->run(call, task, memory);
    for (int i = 0; i < of.queries; ++i) std::memcpy(out_ + place(i), rows + i * filled, row);
  }

  char* of_head(int head) const { return room_ + 2 * static_cast<size_t>(head) * call_.record_bytes; }

  const AttentionKernels* kernels_;
  int tokens_, heads_, size_;
  const char *q_, *k_, *v_;
  char *out_, *room_;
  Attention call_{};  // with one head
  std::vector<int> slots_;  // where each token's key is stored, -1: nowhere
  std::vector<Segment> segments_;
  std::vector<Task> tasks_;
  size_t workspace_ = 0;
};

ffi::Error segments_handler(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                            ffi::Buffer<ffi::S32> segments, ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> room,
                            float scale) {
  SegmentAttention attention{};
  if (ffi::Error error = attention.init(q, k, v, segments, *out, *room, scale); error.failure()) return error;
  std::vector<Phase> phases;
  attention.append(phases);
  run_phases(pool, std::move(phases));
  return ffi::Error::Success();
}

}  // namespace

#pragma GCC visibility push(default)

XLA_FFI_DEFINE_HANDLER_SYMBOL(llmjax_segments, segments_handler,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()         // q
                                  .Arg<ffi::AnyBuffer>()         // k
                                  .Arg<ffi::AnyBuffer>()         // v
                                  .Arg<ffi::Buffer<ffi::S32>>()  // segments
                                  .Ret<ffi::AnyBuffer>()         // out
                                  .Ret<ffi::AnyBuffer>()         // room for keys and values
                                  .Attr<float>("scale"));

#pragma GCC visibility pop

}  // namespace llmjax
