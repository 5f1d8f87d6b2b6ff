// Ragged paged attention (contract: kernels/attention/__init__.py): stores the step's keys and values, then divides the
// queries among the threads.

#include "attention.h"

#include <cstring>
#include <string>
#include <utility>

namespace llmjax {
namespace {

namespace ffi = xla::ffi;

constexpr int kRowsOfBlock = 192;  // queries times heads that share a pass over the keys; multiple of 16
constexpr int kMaxQueries = 64;
constexpr int kFewRows = 8;
constexpr int kMaxParts = 16;
constexpr size_t kElementsOfTask = 1 << 11;  // of keys to store, at least

int first_key(const Attention& call, int position) {
  return call.window == 0 || position < call.window ? 0 : position - call.window + 1;
}

// Where the keys end that a query at `position` of a row of `length` tokens sees.
int end_of_keys(const Attention& call, int position, int length) {
  if (call.causal) return position + 1;
  return call.window == 0 || length - position < call.window ? length : position + call.window;
}

// Everything that comes from the engine as data is checked before memory is touched by it.
ffi::Error check(const Attention& call, const Batch& batch) {
  if (batch.rows == 0) return invalid("attention: no rows");
  int previous = 0;
  for (int r = 0; r < batch.rows; ++r) {
    const std::string row = "row " + std::to_string(r);
    const int first = batch.first_token(r), count = batch.queries(r), length = batch.kv_len[r];
    if (count < 0 || first < previous || first + count > batch.tokens) return invalid(row + ": query_start out of range");
    previous = batch.decode ? 0 : first;
    if (count == 0) continue;
    if (length < count || length > static_cast<int64_t>(batch.pages_per_row) * call.page_size) {
      return invalid(row + ": kv_len " + std::to_string(length) + " out of range");
    }
    const int32_t* pages = batch.pages(r);
    for (int p = first_key(call, length - count) / call.page_size; p <= (length - 1) / call.page_size; ++p) {
      if (pages[p] < 0 || pages[p] >= batch.num_pages) {
        return invalid(row + ": page " + std::to_string(pages[p]) + " does not exist");
      }
    }
    const int64_t end = static_cast<int64_t>(batch.num_pages) * call.page_size;
    for (int t = first; t < first + count; ++t) {
      if (batch.slots[t] < 0 || batch.slots[t] >= end) {
        return invalid("token " + std::to_string(t) + ": slot " + std::to_string(batch.slots[t]) + " does not exist");
      }
    }
  }
  return ffi::Error::Success();
}

// How the keys of some queries are divided. It depends on this request alone, so that its result does not change with
// what else is in the batch or with the number of threads.
int parts_of(int keys, int rows, bool only_block) {
  if (!only_block) return 1;
  const int least = rows <= kFewRows ? 256 : 1024;
  const int parts = (keys + least - 1) / least;
  return parts < kMaxParts ? parts : kMaxParts;
}

}  // namespace

ffi::Error PagedAttention::init(const AttentionArguments& arguments, const AttentionRows& rows) {
  const auto cache = arguments.pages.dimensions(), table = arguments.page_table.dimensions();
  if (cache.size() != 5 || table.size() != 2 || arguments.kv_len.dimensions().size() != 1) {
    return invalid("attention: wrong number of dimensions");
  }
  const int page_size = arguments.page_size;
  if (page_size < 1 || rows.head_dim < 1) return invalid("attention: empty pages");
  const int64_t requests = table[0], num_scales = arguments.token_scales ? 4 * static_cast<int64_t>(page_size) : 0;
  const int64_t scale_rows = (num_scales + rows.head_dim - 1) / rows.head_dim;
  const auto &calibration = arguments.calibration, &sinks = arguments.sinks;
  if (rows.kv_heads < 1 || rows.heads % rows.kv_heads != 0 || cache[1] != 2 || cache[2] != rows.kv_heads ||
      cache[3] != page_size + scale_rows || cache[4] != rows.head_dim ||
      (calibration.element_count() != 0 && !has_shape(calibration, {2, 2})) ||
      !has_shape(arguments.query_start, {requests + 1}) || !has_shape(arguments.kv_len, {requests}) ||
      !has_shape(arguments.slots, {rows.tokens}) || (arguments.decode && requests != rows.tokens) ||
      (sinks.element_count() != 0 && !has_shape(sinks, {rows.heads}))) {
    return invalid("attention: shapes do not fit each other");
  }
  if (arguments.pages_in.untyped_data() != arguments.pages.untyped_data()) {
    return invalid("attention: pages are not aliased");
  }
  const int cache_type = arguments.cache_type;
  const size_t width = ffi::ByteWidth(arguments.pages.element_type());
  if (cache_type < 0 || cache_type > static_cast<int>(Type::kE5M2) || width != size_of(static_cast<Type>(cache_type)) ||
      ((arguments.token_scales || calibration.element_count() != 0) && width != 1)) {
    return invalid("attention: unsupported types");
  }
  const int64_t first_page = *arguments.first_page.typed_data();
  if (first_page < 0 || first_page >= cache[0]) {
    return invalid("attention: page " + std::to_string(first_page) + " does not exist");
  }
  const size_t record_bytes = static_cast<size_t>(cache[3] * rows.head_dim) * width;
  kernels_ = find_kernels(arguments.isa, static_cast<int>(rows.head_dim));
  if (kernels_ == nullptr) return invalid("attention: this machine lacks the instruction set or the head size is odd");
  const float* fixed = calibration.typed_data();
  const bool calibrated = calibration.element_count() != 0 && !arguments.token_scales;
  call_ = {static_cast<int>(rows.heads),
           static_cast<int>(rows.kv_heads),
           static_cast<int>(rows.head_dim),
           page_size,
           rows.type,
           static_cast<Type>(cache_type),
           arguments.scale,
           arguments.softcap,
           arguments.window,
           arguments.causal,
           rows.q,
           sinks.element_count() == 0 ? nullptr : sinks.typed_data(),
           rows.out,
           static_cast<char*>(arguments.pages.untyped_data()) + first_page * cache[1] * cache[2] * record_bytes,
           record_bytes,
           arguments.token_scales,
           calibrated ? Affine{fixed[0], fixed[1]} : Affine{},
           calibrated ? Affine{fixed[2], fixed[3]} : Affine{}};
  batch_ = {static_cast<int>(rows.tokens),
            static_cast<int>(requests),
            static_cast<int>(cache[0] - first_page),
            static_cast<int>(table[1]),
            arguments.decode,
            arguments.query_start.typed_data(),
            arguments.kv_len.typed_data(),
            arguments.page_table.typed_data(),
            arguments.slots.typed_data()};
  k_ = static_cast<const char*>(rows.k), v_ = static_cast<const char*>(rows.v);
  return check(call_, batch_);
}

// Keys and values of one token into its slot. The dummy page is left alone: padding tokens would race for it.
void PagedAttention::store_token(int token) const {
  const int page = batch_.slots[token] / call_.page_size, offset = batch_.slots[token] % call_.page_size;
  if (page == 0) return;
  const size_t size = size_of(call_.activations) * call_.head_dim;
  for (int head = 0; head < call_.kv_heads; ++head) {
    const size_t from = (static_cast<size_t>(token) * call_.kv_heads + head) * size;
    kernels_->attention_store(call_, k_ + from, call_.record(page, 0, head), offset, call_.keys);
    kernels_->attention_store(call_, v_ + from, call_.record(page, 1, head), offset, call_.values);
  }
}

void PagedAttention::make_plan() {
  const Attention& call = call_;
  const Batch& batch = batch_;
  int max_queries = 0;
  const int group = call.group();
  int block = kRowsOfBlock / group < kMaxQueries ? kRowsOfBlock / group : kMaxQueries;
  if (block < 1) block = 1;
  for (int r = batch.rows - 1; r >= 0; --r) {  // long tasks first: prefills follow decodes, late queries see more keys
    const int count = batch.queries(r);
    if (count == 0) continue;
    for (int first = (count - 1) / block * block; first >= 0; first -= block) {
      const int queries = count - first < block ? count - first : block;
      const int position = batch.kv_len[r] - count + first;
      const int begin = first_key(call, position);
      const int keys = end_of_keys(call, position + queries - 1, batch.kv_len[r]) - begin;
      const int parts = parts_of(keys, queries * group, count <= block);
      const int step = ((keys + parts - 1) / parts + 31) / 32 * 32;
      if (queries > max_queries) max_queries = queries;
      for (int head = 0; head < call.kv_heads; ++head) {
        AttentionTask task{batch.first_token(r) + first, queries, position, head, begin, 0, true, batch.pages(r), nullptr,
                           nullptr};
        int made = 0;
        for (int key = begin; key < begin + keys; key += step, ++made) {
          task.key_begin = key;
          task.key_end = key + step < begin + keys ? key + step : begin + keys;
          task.first_keys = made == 0;
          tasks_.push_back(task);
        }
        split_of_.insert(split_of_.end(), made, made > 1 ? static_cast<int>(parts_.size()) : -1);
        if (made > 1) {
          parts_.push_back(made);
          partial_floats_ += made * partial_size(call, queries);
        }
      }
    }
  }
  for (size_t i = 0; i + 1 < tasks_.size(); ++i) tasks_[i].next = &tasks_[i + 1];
  workspace_ = kernels_->attention_workspace(call, max_queries);
}

void PagedAttention::run(size_t task) {
  kernels_->attention(call_, tasks_[task], thread_memory<1>(workspace_));
  if (split_of_[task] < 0) return;
  Split& split = splits_[split_of_[task]];
  if (split.left.fetch_sub(1, std::memory_order_acq_rel) == 1) {
    kernels_->attention_merge(call_, tasks_[task], split.partials, split.parts);
  }
}

void PagedAttention::clear_padding() const {
  const size_t bytes = size_of(call_.activations) * call_.heads * call_.head_dim;
  char* out = static_cast<char*>(call_.out);
  if (batch_.decode) {
    for (int t = 0; t < batch_.tokens; ++t) {
      if (batch_.kv_len[t] == 0) std::memset(out + t * bytes, 0, bytes);
    }
    return;
  }
  const int first = batch_.query_start[0], used = batch_.query_start[batch_.rows];
  std::memset(out, 0, first * bytes);
  std::memset(out + used * bytes, 0, (batch_.tokens - used) * bytes);
}

void PagedAttention::append(std::function<void(int)> prepare, std::vector<Phase>& phases) {
  make_plan();
  float* partials = reinterpret_cast<float*>(thread_memory<0>(partial_floats_ * sizeof(float)));
  splits_.reset(new Split[parts_.size()]);
  for (size_t i = 0; i < tasks_.size();) {
    const int split = split_of_[i];
    if (split < 0) {
      ++i;
      continue;
    }
    splits_[split].partials = partials;
    splits_[split].parts = parts_[split];
    splits_[split].left.store(parts_[split], std::memory_order_relaxed);
    for (int part = 0; part < parts_[split]; ++part, ++i) {
      tasks_[i].partial = partials;
      partials += partial_size(call_, tasks_[i].queries);
    }
  }
  clear_padding();
  const int tokens = batch_.decode ? batch_.rows : batch_.query_start[batch_.rows];
  const int chunk = static_cast<int>(kElementsOfTask / (static_cast<size_t>(call_.kv_heads) * call_.head_dim)) + 1;
  phases.push_back({static_cast<size_t>((tokens + chunk - 1) / chunk),
                    [this, tokens, chunk, prepare = std::move(prepare)](size_t i) {
                      const int begin = static_cast<int>(i) * chunk, end = begin + chunk < tokens ? begin + chunk : tokens;
                      for (int t = begin; t < end; ++t) {
                        if (batch_.decode && batch_.kv_len[t] == 0) continue;
                        if (prepare != nullptr) prepare(t);
                        store_token(t);
                      }
                    }});
  phases.push_back({tasks_.size(), [this](size_t i) { run(i); }});
}

namespace {

ffi::Error attention_handler(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                             ffi::AnyBuffer pages_in, ffi::Buffer<ffi::F32> calibration,
                             ffi::Buffer<ffi::S32> query_start, ffi::Buffer<ffi::S32> kv_len,
                             ffi::Buffer<ffi::S32> page_table, ffi::Buffer<ffi::S32> slots,
                             ffi::BufferR0<ffi::S32> first_page, ffi::Buffer<ffi::F32> sinks,
                             ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> pages, float scale,
                             float softcap, int32_t window, bool causal, int32_t cache_type, int32_t page_size,
                             bool token_scales, bool decode, int32_t isa) {
  const auto dims = q.dimensions(), cache = pages->dimensions();
  const auto type = float_type(q.element_type());
  if (dims.size() != 3 || cache.size() != 5) return invalid("attention: wrong number of dimensions");
  if (!type || *type == Type::kF16 || k.element_type() != q.element_type() || v.element_type() != q.element_type() ||
      out->element_type() != q.element_type()) {
    return invalid("attention: unsupported types");
  }
  if (!has_shape(k, {dims[0], cache[2], dims[2]}) || !has_shape(v, {dims[0], cache[2], dims[2]})) {
    return invalid("attention: shapes do not fit each other");
  }
  const AttentionArguments arguments{pages_in, calibration, query_start, kv_len,     page_table, slots,
                                     first_page, sinks,    *pages,      scale,      softcap,    window,
                                     causal,   cache_type,  page_size,   token_scales, decode,  isa};
  const AttentionRows rows{dims[0], dims[1], cache[2], dims[2], *type, q.untyped_data(), k.untyped_data(),
                           v.untyped_data(), out->untyped_data()};
  PagedAttention attention{};
  if (ffi::Error error = attention.init(arguments, rows); error.failure()) return error;
  std::vector<Phase> phases;
  attention.append(nullptr, phases);
  run_phases(pool, std::move(phases));
  return ffi::Error::Success();
}

}  // namespace

#pragma GCC visibility push(default)

XLA_FFI_DEFINE_HANDLER_SYMBOL(llmjax_attention, attention_handler,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()           // q
                                  .Arg<ffi::AnyBuffer>()           // k
                                  .Arg<ffi::AnyBuffer>()           // v
                                  .Arg<ffi::AnyBuffer>()           // pages
                                  .Arg<ffi::Buffer<ffi::F32>>()    // calibration, empty for none
                                  .Arg<ffi::Buffer<ffi::S32>>()    // query_start
                                  .Arg<ffi::Buffer<ffi::S32>>()    // kv_len
                                  .Arg<ffi::Buffer<ffi::S32>>()    // page_table
                                  .Arg<ffi::Buffer<ffi::S32>>()    // slots
                                  .Arg<ffi::BufferR0<ffi::S32>>()  // first page
                                  .Arg<ffi::Buffer<ffi::F32>>()    // sinks, empty for none
                                  .Ret<ffi::AnyBuffer>()           // out
                                  .Ret<ffi::AnyBuffer>()           // pages
                                  .Attr<float>("scale")
                                  .Attr<float>("softcap")
                                  .Attr<int32_t>("window")
                                  .Attr<bool>("causal")
                                  .Attr<int32_t>("cache_type")
                                  .Attr<int32_t>("page_size")
                                  .Attr<bool>("token_scales")
                                  .Attr<bool>("decode")
                                  .Attr<int32_t>("isa"));

#pragma GCC visibility pop

}  // namespace llmjax
