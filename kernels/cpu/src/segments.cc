// Attention of segments: first each head's keys and values in one piece, so that queries of a segment read them as pages,
// then the queries in blocks.

#include "segments.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace llmjax {
namespace {

namespace ffi = xla::ffi;

constexpr int kQueriesOfTask = 256;  // at most; a multiple of 16. Each task brings its keys into the form of a product
constexpr int kTokensOfTask = 64;    // to store
constexpr int kWidest = 32;          // to a multiple of which heads are filled up at most
constexpr int kUnseen = -2;          // `kUnseen - s`: a token that sees the segment s, and is seen by none

}  // namespace

ffi::Error SegmentAttention::init(const SegmentTokens& of, const ffi::Buffer<ffi::DataType::S32>& segments, ffi::AnyBuffer& room, float scale) {
  const auto cache = float_type(room.element_type());
  if (of.type == Type::kF16 || !cache || *cache == Type::kF16) return invalid("segments: unsupported types");
  const int64_t widest = (of.size + kWidest - 1) / kWidest * kWidest;
  if (of.size < 1 || !has_shape(segments, {of.tokens}) || !has_shape(room, {of.heads, 2, of.tokens, widest})) {
    return invalid("segments: shapes do not fit each other");
  }
  kernels_ = find_attention_kernels(static_cast<int>(widest));
  if (kernels_ == nullptr) return invalid("segments: no vectors divide the head size");
  const int multiple = *cache == Type::kBf16 ? kernels_->lanes_of_bf16 : kernels_->lanes;
  of_ = of;
  room_ = static_cast<char*>(room.untyped_data());
  call_.heads = call_.kv_heads = 1;
  call_.head_dim = call_.value_dim = (of.size + multiple - 1) / multiple * multiple;
  call_.filled = call_.head_dim - of.size;
  call_.page_size = std::max(of.tokens, 1);
  call_.activations = of.type, call_.cache = *cache;
  call_.scale = scale;
  call_.causal = false;
  call_.records = 2;
  call_.record_bytes = size_of(*cache) * static_cast<size_t>(of.tokens) * call_.head_dim;
  find_segments(segments.typed_data());
  return ffi::Error::Success();
}

void SegmentAttention::append(std::vector<Phase>& phases) {
  const size_t heads = static_cast<size_t>(of_.heads), pieces = (static_cast<size_t>(of_.tokens) + kTokensOfTask - 1) / kTokensOfTask;
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

void SegmentAttention::find_segments(const int32_t* ids) {
  slots_.assign(static_cast<size_t>(of_.tokens), -1);
  int stored = 0;
  for (int t = 0, id = -1; t < of_.tokens; ++t) {
    if (ids[t] == -1) continue;
    const bool seen = ids[t] >= 0;
    const int own = seen ? ids[t] : kUnseen - ids[t];
    if (own != id) segments_.push_back({t, t, stored, stored});
    id = own;
    if (seen) slots_[static_cast<size_t>(t)] = stored++;
    segments_.back().end_of_queries = used_ = t + 1, segments_.back().end_of_keys = stored;
  }
  // What sees nothing is zero.
  segments_.erase(std::remove_if(segments_.begin(), segments_.end(),
                                 [](const Segment& one) { return one.first_key == one.end_of_keys; }),
                  segments_.end());
}

// Keys and values of tokens from `begin` on, filled up with zeros; and zeros for what no segment's queries come to.
void SegmentAttention::store(int begin) {
  const size_t width = size_of(call_.activations), row = width * of_.size, filled = width * call_.head_dim;
  char* const wide = thread_memory<1>(filled);
  std::memset(wide, 0, filled);
  for (int t = begin; t < std::min(begin + kTokensOfTask, of_.tokens); ++t) {
    const int slot = slots_[static_cast<size_t>(t)];
    if (slot < 0) std::memset(static_cast<char*>(of_.out) + static_cast<size_t>(t) * of_.heads * row, 0, of_.heads * row);
    for (int head = 0; slot >= 0 && head < of_.heads; ++head) {
      const size_t from = (static_cast<size_t>(t) * of_.heads + head) * row;
      for (int part = 0; part < 2; ++part) {
        const char* source = static_cast<const char*>(part == 0 ? of_.k : of_.v) + from;
        if (of_.size != call_.head_dim) source = static_cast<const char*>(std::memcpy(wide, source, row));
        kernels_->store(call_, source, of_head(head) + part * call_.record_bytes, slot, {});
      }
    }
  }
}

// Queries of one head: they lie together for the kernel, and so does what it makes of them.
void SegmentAttention::run(int head, const Task& task) {
  const size_t width = size_of(call_.activations), row = width * of_.size, filled = width * call_.head_dim;
  char* const memory = thread_memory<1>(workspace_ + task.queries * filled);
  char* const rows = memory + workspace_;
  const auto place = [&](int i) { return (static_cast<size_t>(task.first_query + i) * of_.heads + head) * row; };
  for (int i = 0; i < task.queries; ++i) {
    std::memcpy(rows + i * filled, static_cast<const char*>(of_.q) + place(i), row);
    std::memset(rows + i * filled + row, 0, filled - row);
  }
  Attention call = call_;
  call.q = call.out = rows;
  call.pages = of_head(head);
  const Segment& segment = segments_[static_cast<size_t>(task.segment)];
  const Queries queries{0, segment.first_key, nullptr};
  const int32_t page = 0;
  AttentionTask part{};
  part.members = &queries, part.num_members = 1, part.queries = task.queries;
  part.key_begin = segment.first_key, part.key_end = segment.end_of_keys;
  part.first_keys = true, part.pages = &page;
  kernels_->run(call, part, memory);
  for (int i = 0; i < task.queries; ++i) std::memcpy(static_cast<char*>(of_.out) + place(i), rows + i * filled, row);
}

namespace {

ffi::Error segments_handler(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                            ffi::Buffer<ffi::S32> segments, ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> room,
                            float scale) {
  const auto dims = q.dimensions();
  if (dims.size() != 3) return invalid("segments: wrong number of dimensions");
  const auto type = float_type(q.element_type());
  if (!type || k.element_type() != q.element_type() || v.element_type() != q.element_type() || out->element_type() != q.element_type()) {
    return invalid("segments: unsupported types");
  }
  for (const ffi::AnyBuffer& other : {k, v, *out}) {
    if (!has_shape(other, {dims[0], dims[1], dims[2]})) return invalid("segments: shapes do not fit each other");
  }
  const SegmentTokens of{static_cast<int>(dims[0]), static_cast<int>(dims[1]), static_cast<int>(dims[2]), *type,
                         q.untyped_data(), k.untyped_data(), v.untyped_data(), out->untyped_data()};
  SegmentAttention attention{};
  if (ffi::Error error = attention.init(of, segments, *room, scale); error.failure()) return error;
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
