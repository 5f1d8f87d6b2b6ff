// Ragged paged attention (contract: kernels/attention/__init__.py): stores the step's keys and values, then divides the
// queries among the threads.

#include <atomic>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "buffers.h"
#include "kernels.h"
#include "parallel.h"

namespace llmjax {
namespace {

namespace ffi = xla::ffi;

constexpr int kRowsOfBlock = 192;  // queries times heads that share a pass over the keys; multiple of 16
constexpr int kMaxQueries = 64;
constexpr int kFewRows = 8;
constexpr int kMaxParts = 16;

struct Batch {
  int tokens, rows, num_pages, pages_per_row;
  bool decode;
  const int32_t *query_start, *kv_len, *page_table, *slots;

  int first_token(int row) const { return decode ? row : query_start[row]; }
  int queries(int row) const { return decode ? (kv_len[row] > 0) : query_start[row + 1] - query_start[row]; }
  const int32_t* pages(int row) const { return page_table + static_cast<size_t>(row) * pages_per_row; }
};

int first_key(const Attention& call, int position) {
  return call.window == 0 || position < call.window ? 0 : position - call.window + 1;
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

// Keys and values of one token into its slot. The dummy page is left alone: padding tokens would race for it.
void store_token(const Kernels& kernels, const Attention& call, const Batch& batch, int token, const char* k,
                 const char* v) {
  const int page = batch.slots[token] / call.page_size, offset = batch.slots[token] % call.page_size;
  if (page == 0) return;
  const size_t size = size_of(call.activations) * call.head_dim;
  for (int head = 0; head < call.kv_heads; ++head) {
    const size_t from = (static_cast<size_t>(token) * call.kv_heads + head) * size;
    kernels.attention_store(call, k + from, call.record(page, 0, head), offset, call.keys);
    kernels.attention_store(call, v + from, call.record(page, 1, head), offset, call.values);
  }
}

void store_all(ffi::ThreadPool& pool, const Kernels& kernels, const Attention& call, const Batch& batch, const char* k,
               const char* v) {
  constexpr size_t kElements = 1 << 15;  // less is done before a thread wakes up
  const size_t per_token = static_cast<size_t>(call.kv_heads) * call.head_dim;
  const int tokens = batch.decode ? batch.rows : batch.query_start[batch.rows];
  const int chunk = static_cast<int>(kElements / per_token) + 1;
  parallel_for(pool, (tokens + chunk - 1) / chunk, [&](size_t i) {
    const int begin = static_cast<int>(i) * chunk, end = begin + chunk < tokens ? begin + chunk : tokens;
    for (int t = begin; t < end; ++t) {
      if (!batch.decode || batch.kv_len[t] > 0) store_token(kernels, call, batch, t, k, v);
    }
  });
}

// Tasks that differ in their keys only, and how many of them are not done.
struct Split {
  float* partials;
  int parts;
  std::atomic<int> left;
};

struct Plan {
  std::vector<AttentionTask> tasks;
  std::vector<int> split_of;  // of each task, -1: none
  std::vector<int> parts;     // of each split
  size_t partial_floats = 0;
  int max_queries = 0;
};

// How the keys of some queries are divided. It depends on this request alone, so that its result does not change with
// what else is in the batch or with the number of threads.
int parts_of(int keys, int rows, bool only_block) {
  if (!only_block) return 1;
  const int least = rows <= kFewRows ? 256 : 1024;
  const int parts = (keys + least - 1) / least;
  return parts < kMaxParts ? parts : kMaxParts;
}

Plan make_plan(const Attention& call, const Batch& batch) {
  Plan plan;
  const int group = call.group();
  int block = kRowsOfBlock / group < kMaxQueries ? kRowsOfBlock / group : kMaxQueries;
  if (block < 1) block = 1;
  for (int r = batch.rows - 1; r >= 0; --r) {  // long tasks first: prefills follow decodes, late queries see more keys
    const int count = batch.queries(r);
    if (count == 0) continue;
    for (int first = (count - 1) / block * block; first >= 0; first -= block) {
      const int queries = count - first < block ? count - first : block;
      const int position = batch.kv_len[r] - count + first;
      const int begin = first_key(call, position), keys = position + queries - begin;
      const int parts = parts_of(keys, queries * group, count <= block);
      const int step = ((keys + parts - 1) / parts + 31) / 32 * 32;
      if (queries > plan.max_queries) plan.max_queries = queries;
      for (int head = 0; head < call.kv_heads; ++head) {
        AttentionTask task{batch.first_token(r) + first, queries, position, head, begin, 0, true, batch.pages(r),
                           nullptr};
        int made = 0;
        for (int key = begin; key < begin + keys; key += step, ++made) {
          task.key_begin = key;
          task.key_end = key + step < begin + keys ? key + step : begin + keys;
          task.first_keys = made == 0;
          plan.tasks.push_back(task);
        }
        plan.split_of.insert(plan.split_of.end(), made, made > 1 ? static_cast<int>(plan.parts.size()) : -1);
        if (made > 1) {
          plan.parts.push_back(made);
          plan.partial_floats += made * partial_size(call, queries);
        }
      }
    }
  }
  return plan;
}

void attend(ffi::ThreadPool& pool, const Kernels& kernels, const Attention& call, const Batch& batch) {
  Plan plan = make_plan(call, batch);
  float* partials = reinterpret_cast<float*>(thread_memory<0>(plan.partial_floats * sizeof(float)));
  std::unique_ptr<Split[]> splits(new Split[plan.parts.size()]);
  for (size_t i = 0; i < plan.tasks.size();) {
    const int split = plan.split_of[i];
    if (split < 0) {
      ++i;
      continue;
    }
    splits[split].partials = partials;
    splits[split].parts = plan.parts[split];
    splits[split].left.store(plan.parts[split], std::memory_order_relaxed);
    for (int part = 0; part < plan.parts[split]; ++part, ++i) {
      plan.tasks[i].partial = partials;
      partials += partial_size(call, plan.tasks[i].queries);
    }
  }
  const size_t workspace = kernels.attention_workspace(call, plan.max_queries);
  parallel_for(pool, plan.tasks.size(), [&](size_t i) {
    const AttentionTask& task = plan.tasks[i];
    kernels.attention(call, task, thread_memory<1>(workspace));
    if (plan.split_of[i] < 0) return;
    Split& split = splits[plan.split_of[i]];
    if (split.left.fetch_sub(1, std::memory_order_acq_rel) == 1) {
      kernels.attention_merge(call, task, split.partials, split.parts);
    }
  });
}

void clear_padding(const Attention& call, const Batch& batch) {
  const size_t bytes = size_of(call.activations) * call.heads * call.head_dim;
  char* out = static_cast<char*>(call.out);
  if (batch.decode) {
    for (int t = 0; t < batch.tokens; ++t) {
      if (batch.kv_len[t] == 0) std::memset(out + t * bytes, 0, bytes);
    }
    return;
  }
  const int first = batch.query_start[0], used = batch.query_start[batch.rows];
  std::memset(out, 0, first * bytes);
  std::memset(out + used * bytes, 0, (batch.tokens - used) * bytes);
}

ffi::Error attention_handler(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                             ffi::AnyBuffer pages_in, ffi::Buffer<ffi::F32> calibration,
                             ffi::Buffer<ffi::S32> query_start, ffi::Buffer<ffi::S32> kv_len,
                             ffi::Buffer<ffi::S32> page_table, ffi::Buffer<ffi::S32> slots, ffi::Buffer<ffi::F32> sinks,
                             ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> pages, float scale,
                             float softcap, int32_t window, int32_t cache_type, int32_t page_size, bool token_scales,
                             bool decode, int32_t isa) {
  const auto dims = q.dimensions(), cache = pages->dimensions(), table = page_table.dimensions();
  if (dims.size() != 3 || cache.size() != 5 || table.size() != 2 || kv_len.dimensions().size() != 1) {
    return invalid("attention: wrong number of dimensions");
  }
  const int64_t tokens = dims[0], heads = dims[1], head_dim = dims[2], kv_heads = cache[2], rows = table[0];
  if (page_size < 1 || head_dim == 0) return invalid("attention: empty pages");
  const int64_t scale_rows = token_scales ? (4 * static_cast<int64_t>(page_size) + head_dim - 1) / head_dim : 0;
  if (kv_heads == 0 || heads % kv_heads != 0 || cache[1] != 2 || cache[3] != page_size + scale_rows ||
      cache[4] != head_dim || !has_shape(k, {tokens, kv_heads, head_dim}) ||
      !has_shape(v, {tokens, kv_heads, head_dim}) || (calibration.element_count() != 0 && !has_shape(calibration, {2, 2})) ||
      !has_shape(query_start, {rows + 1}) || !has_shape(kv_len, {rows}) || !has_shape(slots, {tokens}) ||
      (decode && rows != tokens) || (sinks.element_count() != 0 && !has_shape(sinks, {heads}))) {
    return invalid("attention: shapes do not fit each other");
  }
  if (pages_in.untyped_data() != pages->untyped_data()) {
    return invalid("attention: pages are not aliased");
  }
  const auto activations = float_type(q.element_type());
  const size_t width = ffi::ByteWidth(pages->element_type());
  if (!activations || *activations == Type::kF16 || k.element_type() != q.element_type() ||
      v.element_type() != q.element_type() || out->element_type() != q.element_type() || cache_type < 0 ||
      cache_type > static_cast<int>(Type::kE5M2) || width != size_of(static_cast<Type>(cache_type)) ||
      ((token_scales || calibration.element_count() != 0) && width != 1)) {
    return invalid("attention: unsupported types");
  }
  const Kernels* kernels = find_kernels(isa, static_cast<int>(head_dim));
  if (kernels == nullptr) return invalid("attention: this machine lacks the instruction set or the head size is odd");
  const float* fixed = calibration.typed_data();
  const bool calibrated = calibration.element_count() != 0 && !token_scales;
  const Attention call{static_cast<int>(heads),
                       static_cast<int>(kv_heads),
                       static_cast<int>(head_dim),
                       page_size,
                       *activations,
                       static_cast<Type>(cache_type),
                       scale,
                       softcap,
                       window,
                       q.untyped_data(),
                       sinks.element_count() == 0 ? nullptr : sinks.typed_data(),
                       out->untyped_data(),
                       static_cast<char*>(pages->untyped_data()),
                       static_cast<size_t>(cache[3] * head_dim) * width,
                       token_scales,
                       calibrated ? Affine{fixed[0], fixed[1]} : Affine{},
                       calibrated ? Affine{fixed[2], fixed[3]} : Affine{}};
  const Batch batch{static_cast<int>(tokens),
                    static_cast<int>(rows),
                    static_cast<int>(cache[0]),
                    static_cast<int>(table[1]),
                    decode,
                    query_start.typed_data(),
                    kv_len.typed_data(),
                    page_table.typed_data(),
                    slots.typed_data()};
  if (ffi::Error error = check(call, batch); error.failure()) return error;
  store_all(pool, *kernels, call, batch, static_cast<const char*>(k.untyped_data()),
            static_cast<const char*>(v.untyped_data()));
  attend(pool, *kernels, call, batch);
  clear_padding(call, batch);
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
                                  .Arg<ffi::Buffer<ffi::F32>>()    // sinks, empty for none
                                  .Ret<ffi::AnyBuffer>()           // out
                                  .Ret<ffi::AnyBuffer>()           // pages
                                  .Attr<float>("scale")
                                  .Attr<float>("softcap")
                                  .Attr<int32_t>("window")
                                  .Attr<int32_t>("cache_type")
                                  .Attr<int32_t>("page_size")
                                  .Attr<bool>("token_scales")
                                  .Attr<bool>("decode")
                                  .Attr<int32_t>("isa"));

#pragma GCC visibility pop

}  // namespace llmjax
