// Ragged paged attention (contract: kernels/attention/__init__.py): stores the step's keys and values, then divides
// queries and keys among the threads. Keys are divided at fixed places, and rows that have the same pages between two of
// these, such as those of a common prompt, read them together: a cascade (Juravsky et al. 2024, arXiv:2402.05099) that
// needs nothing but the page tables.

#include "attention.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

namespace llmjax {
namespace {

namespace ffi = xla::ffi;

constexpr int kRowsOfBlock = 192;  // queries times heads that share a pass over the keys; multiple of 16
constexpr int kRowsOfLargeBlock = 448;  // where that leaves enough passes for the threads
constexpr int kMaxQueries = 64;
constexpr int kFewRows = 8;
constexpr int kPart = 256, kLargePart = 1024;  // keys of a task of few rows and of many, where they are divided
constexpr size_t kTasksOfThread = 4;  // at least, before requests share one
constexpr int kFewestHeads = 16;  // that read latent pages together
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
  const bool latent = arguments.value_dim != 0;
  const int64_t records = latent ? 1 : 2, value_dim = latent ? arguments.value_dim : rows.head_dim;
  if (rows.kv_heads < 1 || rows.heads % rows.kv_heads != 0 || cache[1] != records || cache[2] != rows.kv_heads ||
      cache[3] != page_size + scale_rows || cache[4] != rows.head_dim || value_dim < 1 || value_dim > rows.head_dim ||
      (latent && rows.kv_heads != 1) || (calibration.element_count() != 0 && !has_shape(calibration, {records, 2})) ||
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
  kernels_ = find_attention_kernels(static_cast<int>(rows.head_dim | value_dim));
  if (kernels_ == nullptr) return invalid("attention: the head size is odd");
  const float* fixed = calibration.typed_data();
  const bool calibrated = calibration.element_count() != 0 && !arguments.token_scales;
  call_ = {static_cast<int>(rows.heads),
           static_cast<int>(rows.kv_heads),
           static_cast<int>(rows.head_dim),
           static_cast<int>(value_dim),
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
           static_cast<int>(records),
           record_bytes,
           arguments.token_scales,
           calibrated ? Affine{fixed[0], fixed[1]} : Affine{},
           !calibrated ? Affine{} : latent ? Affine{fixed[0], fixed[1]} : Affine{fixed[2], fixed[3]}};
  readers_ = call_.group();
  batch_ = {static_cast<int>(rows.tokens),
            static_cast<int>(requests),
            static_cast<int>(cache[0] - first_page),
            static_cast<int>(table[1]),
            arguments.decode,
            arguments.verify,
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
  if (call_.latent()) {
    kernels_->store(call_, k_ + token * size, call_.record(page, 0, 0), offset, call_.keys);
    return;
  }
  for (int head = 0; head < call_.kv_heads; ++head) {
    const size_t from = (static_cast<size_t>(token) * call_.kv_heads + head) * size;
    kernels_->store(call_, k_ + from, call_.record(page, 0, head), offset, call_.keys);
    kernels_->store(call_, v_ + from, call_.record(page, 1, head), offset, call_.values);
  }
}

// Latent pages have one key for all heads. Where there are few queries, some heads here and some there read it; that
// changes how rows come together, and nothing of what comes out.
void PagedAttention::divide_heads(size_t threads) {
  if (!call_.latent()) return;
  size_t tasks = 0;
  for (int r = 0; r < batch_.rows; ++r) {
    const size_t parts = batch_.queries(r) > 1 ? 1 : (batch_.kv_len[r] + kPart - 1) / kPart;
    tasks += parts * ((static_cast<size_t>(batch_.queries(r)) * call_.heads + kRowsOfBlock - 1) / kRowsOfBlock);
  }
  for (int pieces = 1; tasks * call_.kv_heads < kTasksOfThread * threads && call_.heads / (pieces + 1) >= kFewestHeads;) {
    if (call_.heads % ++pieces == 0) call_.kv_heads = pieces;
  }
}

// How many of a row's queries share a pass over its keys. Each pass brings the keys in order anew, so the fewer the better.
// A query's sums are the same in any company, but for windows, whose blocks of keys begin with the first query's.
int PagedAttention::queries_of_pass(int count, size_t threads) const {
  const auto queries = [&](int rows) { return std::max(1, std::min(rows / call_.group(), kMaxQueries)); };
  const int usual = queries(kRowsOfBlock), most = queries(kRowsOfLargeBlock), passes = (count + most - 1) / most;
  if (call_.window != 0 || count <= usual || static_cast<size_t>(passes) * call_.kv_heads < threads) return usual;
  return (count + passes - 1) / passes;
}

// What one pass over keys takes of each row. How the keys are divided depends on a request alone, so that its result does
// not change with what else is in the batch or with the number of threads.
void PagedAttention::find_runs(size_t threads) {
  const Attention& call = call_;
  const int undivided = std::max(1, std::min(kRowsOfBlock / readers_, kMaxQueries));
  const int part = call.latent() ? kPart : kLargePart;
  for (int r = batch_.rows - 1; r >= 0; --r) {  // long tasks first: prefills follow decodes, late queries see more keys
    const int count = batch_.queries(r), length = batch_.kv_len[r];
    if (count == 0) continue;
    // A token and its drafts, each as a decode would compute it; what all of them see is read once all the same.
    const int together = batch_.verify ? 1 : queries_of_pass(count, threads);
    for (int first = (count - 1) / together * together; first >= 0; first -= together) {
      const int queries = std::min(count - first, together), position = length - count + first;
      Run run{};
      run.first_token = batch_.first_token(r) + first;
      run.queries = queries;
      run.first_position = position;
      run.key_begin = first_key(call, position);
      run.key_end = end_of_keys(call, position + queries - 1, length);
      run.seen_begin = first_key(call, position + queries - 1);
      run.seen_end = end_of_keys(call, position, length);
      run.single = count == 1 || batch_.verify;
      // Undivided, many queries need no memory for partial states; with few, one task for each head would leave threads idle.
      run.part = count > undivided ? run.key_end : run.single && readers_ <= kFewRows ? kPart : part;
      run.pages = batch_.pages(r);
      run.first_split = -1;
      runs_.push_back(run);
    }
  }
}

// Whether one task may compute a part of both runs: all queries see all of its keys, on the same pages.
bool PagedAttention::same_keys(const Run& a, const Run& b, int part) const {
  if (a.queries != b.queries || a.single != b.single || a.part != b.part) return false;
  const int begin = part * a.part, end = begin + a.part, size = call_.page_size;
  for (const Run* run : {&a, &b}) {
    if (begin < run->seen_begin || end > run->seen_end) return false;
  }
  if ((part == a.first_part()) != (part == b.first_part())) return false;  // the first one takes the sinks in
  const size_t first = begin / size, last = (end - 1) / size;
  return std::memcmp(a.pages + first, b.pages + first, (last - first + 1) * sizeof(int32_t)) == 0;
}

// For each part of each run: which of the runs that can share it is the first.
void PagedAttention::find_sharers() {
  int last_part = 0;
  for (size_t i = 0; i < runs_.size(); ++i) {
    Run& run = runs_[i];
    run.first_entry = static_cast<int>(run_of_.size());
    run_of_.insert(run_of_.end(), run.parts(), static_cast<int>(i));
    if (run.parts() > 1) last_part = std::max(last_part, run.first_part() + run.parts() - 1);
  }
  leader_ = run_of_;
  next_.assign(leader_.size(), -1);
  std::vector<std::pair<int32_t, int>> starts;  // page in which the part begins, run: equal pages come together
  for (int part = 0; part < last_part; ++part) {
    starts.clear();
    for (size_t i = 0; i < runs_.size(); ++i) {
      const Run& run = runs_[i];
      const int begin = part * run.part;
      if (run.parts() == 1 || begin < run.key_begin || begin + run.part > run.key_end) continue;
      starts.emplace_back(run.pages[begin / call_.page_size], static_cast<int>(i));
    }
    std::sort(starts.begin(), starts.end());
    const auto entry = [&](int run) { return runs_[run].entry(part); };
    for (size_t first = 0, end; first < starts.size(); first = end) {
      for (end = first + 1; end < starts.size() && starts[end].first == starts[first].first; ++end) {
      }
      for (size_t i = first + 1; i < end; ++i) {
        const int run = starts[i].second;
        for (size_t j = first; j < i; ++j) {
          const int other = starts[j].second;
          if (leader_[entry(other)] != other || !same_keys(runs_[other], runs_[run], part)) continue;
          leader_[entry(run)] = other;
          next_[entry(run)] = next_[entry(other)];
          next_[entry(other)] = run;
          break;
        }
      }
    }
  }
}

void PagedAttention::make_splits() {
  const size_t heads = static_cast<size_t>(call_.kv_heads);
  size_t floats = 0, count = 0;
  for (Run& run : runs_) {
    if (run.parts() == 1) continue;
    run.first_split = static_cast<int>(count);
    count += heads;
    floats += heads * run.parts() * partial_size(call_, run.queries);
  }
  float* partials = reinterpret_cast<float*>(thread_memory<0>(floats * sizeof(float)));
  splits_.reset(new Split[count]);
  for (const Run& run : runs_) {
    for (int head = 0; run.first_split >= 0 && head < call_.kv_heads; ++head) {
      Split& split = splits_[run.first_split + head];
      split.queries = {run.first_token, run.first_position, nullptr};
      split.count = run.queries, split.kv_head = head;
      split.partials = partials, split.parts = run.parts();
      split.left.store(split.parts, std::memory_order_relaxed);
      partials += split.parts * partial_size(call_, run.queries);
    }
  }
}

void PagedAttention::make_tasks(size_t threads) {
  const size_t heads = static_cast<size_t>(call_.kv_heads);
  size_t fewest = 0;  // tasks, if all runs share that can
  for (size_t i = 0; i < leader_.size(); ++i) fewest += heads * (leader_[i] == run_of_[i]);
  const int pieces = static_cast<int>(kTasksOfThread * threads / std::max<size_t>(fewest, 1)) + 1;
  members_.reserve(leader_.size() * heads);  // tasks point to them
  int most = 0;
  std::vector<int> sharers;
  for (size_t i = 0; i < runs_.size(); ++i) {
    const Run& run = runs_[i];
    for (int head = 0; head < call_.kv_heads; ++head) {
      for (int part = run.first_part(); part < run.first_part() + run.parts(); ++part) {
        if (leader_[run.entry(part)] != static_cast<int>(i)) continue;
        sharers.clear();
        for (int other = static_cast<int>(i); other >= 0; other = next_[runs_[other].entry(part)]) sharers.push_back(other);
        const int all = static_cast<int>(sharers.size());
        const int room = std::max(1, kRowsOfBlock / (run.queries * call_.group()));
        const int tasks = std::min(all, std::max(pieces, (all + room - 1) / room)), size = (all + tasks - 1) / tasks;
        for (int first = 0; first < all; first += size) {
          const int count = std::min(size, all - first);
          tasks_.push_back({members_.data() + members_.size(), count, run.queries, run.single, head,
                            std::max(run.key_begin, part * run.part), std::min(run.key_end, (part + 1) * run.part),
                            part == run.first_part(), run.pages, nullptr});
          most = std::max(most, count * run.queries);
          for (int k = first; k < first + count; ++k) add_member(runs_[sharers[k]], part, head);
        }
      }
    }
  }
  for (size_t i = 0; i + 1 < tasks_.size(); ++i) tasks_[i].next = &tasks_[i + 1];
  workspace_ = kernels_->workspace(call_, most);
}

void PagedAttention::add_member(const Run& run, int part, int head) {
  Queries queries{run.first_token, run.first_position, nullptr};
  const int split = run.first_split < 0 ? -1 : run.first_split + head;
  if (split >= 0) {
    queries.partial = splits_[split].partials + (part - run.first_part()) * partial_size(call_, run.queries);
  }
  members_.push_back(queries);
  split_of_.push_back(split);
}

void PagedAttention::run(size_t i) {
  const AttentionTask& task = tasks_[i];
  kernels_->run(call_, task, thread_memory<1>(workspace_));
  if (task.members->partial == nullptr) return;
  for (int m = 0; m < task.num_members; ++m) {
    Split& split = splits_[split_of_[task.members - members_.data() + m]];
    if (split.left.fetch_sub(1, std::memory_order_acq_rel) != 1) continue;
    AttentionTask whole{};
    whole.members = &split.queries, whole.num_members = 1;
    whole.queries = split.count, whole.kv_head = split.kv_head;
    kernels_->merge(call_, whole, split.partials, split.parts);
  }
}

void PagedAttention::clear(int begin, int end) const {
  const size_t bytes = size_of(call_.activations) * call_.heads * call_.value_dim;
  std::memset(static_cast<char*>(call_.out) + begin * bytes, 0, (end - begin) * bytes);
}

void PagedAttention::clear_padding() const {
  if (!batch_.decode) clear(0, batch_.query_start[0]);
  clear(batch_.used(), batch_.tokens);
}

void PagedAttention::append(std::function<void(int)> prepare, size_t threads, std::vector<Phase>& phases) {
  divide_heads(threads);
  find_runs(threads);
  find_sharers();
  make_splits();
  make_tasks(threads);
  const int tokens = batch_.used();
  const int chunk = static_cast<int>(kElementsOfTask / (static_cast<size_t>(call_.latent() ? 1 : call_.kv_heads) * call_.head_dim)) + 1;
  phases.push_back({static_cast<size_t>((tokens + chunk - 1) / chunk),
                    [this, tokens, chunk, prepare = std::move(prepare)](size_t i) {
                      const int begin = static_cast<int>(i) * chunk, end = begin + chunk < tokens ? begin + chunk : tokens;
                      for (int t = begin; t < end; ++t) {
                        if (batch_.decode && batch_.kv_len[t] == 0) {
                          clear(t, t + 1);
                          continue;
                        }
                        if (prepare != nullptr) prepare(t);
                        store_token(t);
                      }
                    },
                    Work::kStores});
  phases.push_back({tasks_.size(), [this](size_t i) { run(i); }, Work::kAttention});
}

namespace {

ffi::Error attention_handler(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                             ffi::AnyBuffer pages_in, ffi::Buffer<ffi::F32> calibration,
                             ffi::Buffer<ffi::S32> query_start, ffi::Buffer<ffi::S32> kv_len,
                             ffi::Buffer<ffi::S32> page_table, ffi::Buffer<ffi::S32> slots,
                             ffi::BufferR0<ffi::S32> first_page, ffi::Buffer<ffi::F32> sinks,
                             ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> pages, float scale,
                             float softcap, int32_t window, bool causal, int32_t cache_type, int32_t page_size,
                             bool token_scales, int32_t value_dim, bool decode, bool verify) {
  const auto dims = q.dimensions(), cache = pages->dimensions();
  const auto type = float_type(q.element_type());
  if (dims.size() != 3 || cache.size() != 5) return invalid("attention: wrong number of dimensions");
  if (!type || *type == Type::kF16 || k.element_type() != q.element_type() || v.element_type() != q.element_type() ||
      out->element_type() != q.element_type()) {
    return invalid("attention: unsupported types");
  }
  const bool latent = value_dim != 0;
  if (!has_shape(k, {dims[0], cache[2], dims[2]}) || (!latent && !has_shape(v, {dims[0], cache[2], dims[2]})) ||
      !has_shape(*out, {dims[0], dims[1], latent ? value_dim : dims[2]})) {
    return invalid("attention: shapes do not fit each other");
  }
  const AttentionArguments arguments{pages_in, calibration, query_start, kv_len,     page_table, slots,
                                     first_page, sinks,    *pages,      scale,      softcap,    window,
                                     causal,   cache_type,  page_size,   token_scales, decode, verify, value_dim};
  const AttentionRows rows{dims[0], dims[1], cache[2], dims[2], *type, q.untyped_data(), k.untyped_data(),
                           latent ? nullptr : v.untyped_data(), out->untyped_data()};
  PagedAttention attention{};
  if (ffi::Error error = attention.init(arguments, rows); error.failure()) return error;
  attention.clear_padding();
  std::vector<Phase> phases;
  attention.append(nullptr, threads_of(pool), phases);
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
                                  .Attr<int32_t>("value_dim")
                                  .Attr<bool>("decode")
                                  .Attr<bool>("verify"));

#pragma GCC visibility pop

}  // namespace llmjax
