// Recurrent mixers (contracts: kernels/recurrent/): which states a step's tokens are read from and written to, and their
// division among the threads.

#include "recurrent.h"

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
using Floats = ffi::Buffer<ffi::F32>;
using Integers = ffi::Buffer<ffi::S32>;
using Integer = ffi::BufferR0<ffi::S32>;
using FloatsOut = ffi::Result<Floats>;

constexpr int kColumns = 32;    // of a state that a task rewrites: as many as the nearest cache keeps
constexpr int kChannels = 512;  // of a convolution that a task computes
constexpr int kSelected = 128;  // channels with states of their own that a task rewrites
constexpr int kWidest = 256;    // convolution, in tokens

// Tokens whose states follow each other in one entry; see kernels/recurrent/places.py.
struct Piece {
  int token, count;
  int64_t from, to;  // entries; from -1: there is none yet
};

// Pieces of a row, in order.
struct Run {
  size_t first, end;
  int tokens;
};

class Rows {
 public:
  // Checks everything that comes from the engine as data.
  ffi::Error init(const Integers& query_start, const Integers& kv_len, const Integers& page_table, const Integer& first_page,
                  int64_t tokens, int64_t entries, int32_t page_size, bool decode) {
    const auto table = page_table.dimensions();
    if (table.size() != 2 || page_size < 1 || !has_shape(query_start, {table[0] + 1}) || !has_shape(kv_len, {table[0]}) ||
        (decode && table[0] != tokens)) {
      return invalid("states: shapes do not fit each other");
    }
    const int32_t *starts = query_start.typed_data(), *lengths = kv_len.typed_data();
    const int64_t base = *first_page.typed_data();
    int previous = 0;
    for (int64_t r = 0; r < table[0]; ++r) {
      const std::string row = "row " + std::to_string(r);
      const int first = decode ? static_cast<int>(r) : starts[r];
      const int count = decode ? (lengths[r] > 0) : starts[r + 1] - first;
      if (count < 0 || first < previous || first + static_cast<int64_t>(count) > tokens) {
        return invalid(row + ": query_start out of range");
      }
      if (count == 0) continue;
      if (lengths[r] < count || lengths[r] > table[1] * page_size) {
        return invalid(row + ": kv_len " + std::to_string(lengths[r]) + " out of range");
      }
      clear_.push_back({previous, first});
      previous = first + count;
      const int32_t* pages = page_table.typed_data() + r * table[1];
      const int begin = lengths[r] - count;
      const size_t first_piece = pieces_.size();
      int64_t entry = -1;
      for (int page = (begin > 0 ? begin - 1 : 0) / page_size; page <= (lengths[r] - 1) / page_size; ++page) {
        const int64_t next = base + pages[page];
        if (next < 0 || next >= entries) return invalid(row + ": entry " + std::to_string(next) + " does not exist");
        const int64_t from = std::max<int64_t>(begin, static_cast<int64_t>(page) * page_size);
        const int64_t end = std::min<int64_t>(lengths[r], (static_cast<int64_t>(page) + 1) * page_size);
        if (begin > 0 && entry < 0) entry = next;
        if (from >= end) continue;  // the page of the token before, which is full
        const int size = static_cast<int>(end - from);
        if (pieces_.size() > first_piece && entry == next) {
          pieces_.back().count += size;
        } else {
          pieces_.push_back({first + static_cast<int>(from - begin), size, entry, next});
        }
        entry = next;
      }
      runs_.push_back({first_piece, pieces_.size(), count});
    }
    clear_.push_back({previous, static_cast<int>(tokens)});
    // Long rows first, so that none is begun last.
    std::stable_sort(runs_.begin(), runs_.end(), [](const Run& a, const Run& b) { return a.tokens > b.tokens; });
    return ffi::Error::Success();
  }

  const std::vector<Run>& runs() const { return runs_; }

  // The pieces of a run, where states of `size` floats are.
  template <class Body>
  void each(const Run& run, float* states, size_t size, const Body& body) const {
    for (size_t i = run.first; i < run.end; ++i) {
      const Piece& piece = pieces_[i];
      const float* from = piece.from < 0 ? nullptr : states + static_cast<size_t>(piece.from) * size;
      body(Stretch{piece.token, piece.count, from, states + static_cast<size_t>(piece.to) * size});
    }
  }

  // Zeros for tokens of no row, `size` floats each.
  void clear(float* out, size_t size) const {
    for (const auto& [begin, end] : clear_) {
      std::memset(out + static_cast<size_t>(begin) * size, 0, static_cast<size_t>(end - begin) * size * sizeof(float));
    }
  }

 private:
  struct Gap {
    int begin, end;
  };
  std::vector<Piece> pieces_;
  std::vector<Run> runs_;
  std::vector<Gap> clear_;
};

// What a task works with.
float* floats(size_t count) { return reinterpret_cast<float*>(thread_memory<3>(count * sizeof(float))); }

ffi::Error recurrence_handler(ffi::ThreadPool pool, Floats q, Floats k, Floats v, Floats decay, Floats beta, Floats states_in,
                              Integers query_start, Integers kv_len, Integers page_table, Integer first_page, FloatsOut out,
                              FloatsOut states, int32_t page_size, bool decode) {
  const auto keys = q.dimensions(), values = v.dimensions(), all = states->dimensions();
  if (keys.size() != 3 || values.size() != 3 || all.size() != 4) return invalid("recurrence: wrong number of dimensions");
  const int64_t tokens = values[0], heads = values[1];
  const bool delta = beta.dimensions().size() == 2, by_channel = decay.dimensions().size() == 3;
  if (keys[1] < 1 || heads % keys[1] != 0 || !has_shape(q, {tokens, keys[1], all[2]}) ||
      !has_shape(k, {tokens, keys[1], all[2]}) || !has_shape(v, {tokens, heads, all[3]}) ||
      !(by_channel ? delta && has_shape(decay, {tokens, heads, all[2]}) : has_shape(decay, {tokens, heads})) || all[1] != heads || !has_shape(*out, {tokens, heads, all[3]}) ||
      (delta && !has_shape(beta, {tokens, heads}))) {
    return invalid("recurrence: shapes do not fit each other");
  }
  if (states_in.untyped_data() != states->untyped_data()) return invalid("recurrence: states are not aliased");
  const RowKernels& kernels = find_row_kernels();
  Rows rows;
  ffi::Error error = rows.init(query_start, kv_len, page_table, first_page, tokens, all[0], page_size, decode);
  if (error.failure()) return error;
  const Recurrence call{static_cast<int>(heads),
                        static_cast<int>(keys[1]),
                        static_cast<int>(all[2]),
                        static_cast<int>(all[3]),
                        q.typed_data(),
                        k.typed_data(),
                        v.typed_data(),
                        decay.typed_data(),
                        delta ? beta.typed_data() : nullptr,
                        by_channel,
                        out->typed_data()};
  rows.clear(call.out, static_cast<size_t>(heads) * call.value_dim);
  const size_t state = static_cast<size_t>(call.key_dim) * call.value_dim;
  const size_t slices = (call.value_dim + kColumns - 1) / kColumns, of_row = heads * slices;
  parallel_for(pool, rows.runs().size() * of_row, Work::kRecurrence, [&](size_t i) {
    const int head = static_cast<int>(i % of_row / slices), begin = static_cast<int>(i % slices) * kColumns;
    const int end = std::min(begin + kColumns, call.value_dim);
    float* workspace = by_channel ? floats((3 * kTokenBlock + 1) * static_cast<size_t>(call.key_dim)) : nullptr;
    rows.each(rows.runs()[i / of_row], states->typed_data() + head * state, heads * state,
              [&](const Stretch& tokens) { kernels.recur(call, tokens, head, begin, end, workspace); });
  });
  return ffi::Error::Success();
}

ffi::Error selective_scan_handler(ffi::ThreadPool pool, Floats c, Floats b, Floats x, Floats steps, Floats rates,
                                  Floats states_in, Integers query_start, Integers kv_len, Integers page_table,
                                  Integer first_page, FloatsOut out, FloatsOut states, int32_t page_size, bool decode) {
  const auto dims = x.dimensions(), all = states->dimensions();
  if (dims.size() != 2 || all.size() != 4) return invalid("selective scan: wrong number of dimensions");
  const int64_t tokens = dims[0], channels = dims[1], count = all[2];
  if (all[1] != 1 || all[3] != channels || !has_shape(c, {tokens, count}) || !has_shape(b, {tokens, count}) ||
      !has_shape(steps, {tokens, channels}) || !has_shape(rates, {count, channels}) || !has_shape(*out, {tokens, channels})) {
    return invalid("selective scan: shapes do not fit each other");
  }
  if (states_in.untyped_data() != states->untyped_data()) return invalid("selective scan: states are not aliased");
  const RowKernels& kernels = find_row_kernels();
  Rows rows;
  ffi::Error error = rows.init(query_start, kv_len, page_table, first_page, tokens, all[0], page_size, decode);
  if (error.failure()) return error;
  const SelectiveScan call{static_cast<int>(channels), static_cast<int>(count), c.typed_data(),     b.typed_data(),
                           x.typed_data(),             steps.typed_data(),      rates.typed_data(), out->typed_data()};
  rows.clear(call.out, call.channels);
  const size_t slices = (call.channels + kSelected - 1) / kSelected;
  parallel_for(pool, rows.runs().size() * slices, Work::kRecurrence, [&](size_t i) {
    const int begin = static_cast<int>(i % slices) * kSelected, end = std::min(begin + kSelected, call.channels);
    float* workspace = floats(2 * static_cast<size_t>(count) * kSelected);
    rows.each(rows.runs()[i / slices], states->typed_data(), static_cast<size_t>(count) * channels,
              [&](const Stretch& tokens) { kernels.selective_scan(call, tokens, begin, end, workspace); });
  });
  return ffi::Error::Success();
}

ffi::Error convolution_handler(ffi::ThreadPool pool, Floats x, Floats weight, Floats states_in, Integers query_start,
                               Integers kv_len, Integers page_table, Integer first_page, FloatsOut out, FloatsOut states,
                               int32_t page_size, bool decode) {
  const auto dims = x.dimensions(), taps = weight.dimensions(), all = states->dimensions();
  if (dims.size() != 2 || taps.size() != 2 || all.size() != 3) return invalid("convolution: wrong number of dimensions");
  if (taps[1] < 1 || taps[1] > kWidest || taps[0] != dims[1] || all[1] != taps[1] - 1 || all[2] != dims[1] ||
      !has_shape(*out, {dims[0], dims[1]})) {
    return invalid("convolution: shapes do not fit each other");
  }
  if (states_in.untyped_data() != states->untyped_data()) return invalid("convolution: states are not aliased");
  const RowKernels& kernels = find_row_kernels();
  Rows rows;
  ffi::Error error = rows.init(query_start, kv_len, page_table, first_page, dims[0], all[0], page_size, decode);
  if (error.failure()) return error;
  const Convolution call{static_cast<int>(dims[1]), static_cast<int>(taps[1]), x.typed_data(), weight.typed_data(),
                         out->typed_data()};
  rows.clear(call.out, call.channels);
  const size_t slices = (call.channels + kChannels - 1) / kChannels;
  parallel_for(pool, rows.runs().size() * slices, Work::kRecurrence, [&](size_t i) {
    const int begin = static_cast<int>(i % slices) * kChannels, end = std::min(begin + kChannels, call.channels);
    float* workspace = floats(2 * static_cast<size_t>(call.width) * kChannels);
    rows.each(rows.runs()[i / slices], states->typed_data(), static_cast<size_t>(all[1]) * all[2], [&](const Stretch& tokens) {
      kernels.convolve(call, tokens, begin, end, workspace);
    });
  });
  return ffi::Error::Success();
}

// What all handlers take after inputs of their own.
template <class Binding>
auto with_states(Binding inputs) {
  return std::move(inputs)
      .template Arg<Floats>()    // states
      .template Arg<Integers>()  // query_start
      .template Arg<Integers>()  // kv_len
      .template Arg<Integers>()  // page_table
      .template Arg<Integer>()   // first page
      .template Ret<Floats>()    // out
      .template Ret<Floats>()    // states
      .template Attr<int32_t>("page_size")
      .template Attr<bool>("decode");
}

}  // namespace

#pragma GCC visibility push(default)

XLA_FFI_DEFINE_HANDLER_SYMBOL(llmjax_recurrence, recurrence_handler,
                              with_states(ffi::Ffi::Bind()
                                              .Ctx<ffi::ThreadPool>()
                                              .Arg<Floats>()     // q
                                              .Arg<Floats>()     // k
                                              .Arg<Floats>()     // v
                                              .Arg<Floats>()     // decay, of heads or of channels
                                              .Arg<Floats>()));  // beta, [0]: no delta rule

XLA_FFI_DEFINE_HANDLER_SYMBOL(llmjax_selective_scan, selective_scan_handler,
                              with_states(ffi::Ffi::Bind()
                                              .Ctx<ffi::ThreadPool>()
                                              .Arg<Floats>()     // c
                                              .Arg<Floats>()     // b
                                              .Arg<Floats>()     // x
                                              .Arg<Floats>()     // steps
                                              .Arg<Floats>()));  // rates

XLA_FFI_DEFINE_HANDLER_SYMBOL(llmjax_convolution, convolution_handler,
                              with_states(ffi::Ffi::Bind()
                                              .Ctx<ffi::ThreadPool>()
                                              .Arg<Floats>()     // x
                                              .Arg<Floats>()));  // weight

#pragma GCC visibility pop

}  // namespace llmjax
