// Mixture-of-experts products (contracts: kernels/experts.py, kernels/adapted_experts.py): each phase is that of all experts in
// use side by side. With adapters, choices are sorted by expert and place, and what an adapter changes follows each product.

#include <algorithm>
#include <cstring>
#include <deque>
#include <memory>

#include "adapters.h"
#include "products.h"
#include "sublayers.h"

namespace llmjax {
namespace {

using Integers = ffi::Buffer<ffi::S32>;

constexpr int kRowsOfPart = 16;

// Choices sorted by expert; those of expert e lie at places starts[e] to starts[e + 1]. Choices without share have none.
struct Places {
  std::vector<int> starts, tokens;  // [experts + 1], [places]
  std::vector<int> of_choice;       // [T * K]; -1: none
};

bool sort_choices(const int32_t* chosen, const float* shares, int rows, int choices, int experts, Places& places) {
  const size_t count = static_cast<size_t>(rows) * choices;
  places.starts.assign(experts + 1, 0);
  for (size_t i = 0; i < count; ++i) {
    if (chosen[i] < 0 || chosen[i] >= experts) return false;
    places.starts[chosen[i] + 1] += shares[i] != 0;
  }
  for (int e = 0; e < experts; ++e) places.starts[e + 1] += places.starts[e];
  std::vector<int> next(places.starts.begin(), places.starts.end() - 1);
  places.tokens.resize(places.starts[experts]);
  places.of_choice.assign(count, -1);
  for (size_t i = 0; i < count; ++i) {
    if (shares[i] == 0) continue;
    const int place = next[chosen[i]]++;
    places.tokens[place] = static_cast<int>(i / choices);
    places.of_choice[i] = place;
  }
  return true;
}

// A buffer [experts, ...] whose entries are buffers of their own.
class Stack {
 public:
  template <class Buffer>
  Stack(const Buffer& whole, int experts) : dims_(whole.dimensions().begin(), whole.dimensions().end()) {
    one_ = XLA_FFI_Buffer{};
    one_.struct_size = XLA_FFI_Buffer_STRUCT_SIZE;
    one_.dtype = static_cast<XLA_FFI_DataType>(whole.element_type());
    one_.data = const_cast<void*>(static_cast<const void*>(whole.untyped_data()));
    one_.rank = static_cast<int64_t>(dims_.size());
    one_.dims = dims_.data();
    if (whole.element_count() == 0) return;  // no bias
    fits_ = !dims_.empty() && dims_[0] == experts;
    bytes_ = whole.size_bytes() / experts;
    one_.rank -= 1;
    one_.dims += 1;
  }
  Stack(const Stack&) = delete;
  bool fits() const { return fits_; }
  XLA_FFI_Buffer at(int expert) const {
    XLA_FFI_Buffer one = one_;
    one.data = static_cast<char*>(one.data) + bytes_ * expert;
    return one;
  }

 private:
  std::vector<int64_t> dims_;
  XLA_FFI_Buffer one_;
  size_t bytes_ = 0;
  bool fits_ = true;
};

// A projection of all experts.
struct Projections {
  MatrixArguments all;
  Stack weights, biases;
  Projections(const MatrixArguments& stack, int experts) : all(stack), weights(stack.weight, experts), biases(stack.bias, experts) {}
  bool fit() const { return weights.fits() && biases.fits(); }
  ffi::Error add_to(Products& products, int expert, int size_out, float* y) const {
    const XLA_FFI_Buffer weight = weights.at(expert), bias = biases.at(expert);
    return products.add({ffi::AnyBuffer(&weight), Floats(&bias), all.numbers, all.levels}, size_out, y);
  }
};

// Phases of several calls, the last of each together, and so on to the front.
void append_side_by_side(std::vector<std::vector<Phase>> calls, std::vector<Phase>& phases) {
  size_t most = 0;
  for (const auto& call : calls) most = std::max(most, call.size());
  for (size_t from_end = most; from_end > 0; --from_end) {
    std::vector<Phase> parts;
    std::vector<size_t> ends;
    size_t count = 0;
    Work work = Work::kOther;
    for (auto& call : calls) {
      if (call.size() < from_end) continue;
      parts.push_back(std::move(call[call.size() - from_end]));
      work = parts.back().work;
      ends.push_back(count += parts.back().count);
    }
    phases.push_back({count, [parts = std::move(parts), ends = std::move(ends)](size_t task) {
                        const size_t part = std::upper_bound(ends.begin(), ends.end(), task) - ends.begin();
                        parts[part].task(task - (part == 0 ? 0 : ends[part - 1]));
                      },
                      work});
  }
}

ffi::Error experts_handler(ffi::ThreadPool pool, Floats x, Integers chosen, Floats shares, ffi::RemainingArgs weights,
                           ffi::Result<Floats> out, ffi::Result<Floats> scratch, ffi::Span<const int32_t> matrices,
                           ffi::Span<const float> levels, int32_t experts, int32_t inner, int32_t activation) {
  const auto dims = x.dimensions(), outer = chosen.dimensions();
  AdaptersOfCall adapters(weights, 3);
  if (dims.size() != 2 || outer.size() != 2 || outer[0] != dims[0] || !has_shape(shares, {outer[0], outer[1]}) ||
      !has_shape(*out, {dims[0], dims[1]}) || !adapters.fit() || experts < 1 || inner < 1 || activation < 0 ||
      activation >= static_cast<int>(Activation::kNumber)) {
    return invalid("experts: arguments do not fit each other");
  }
  const int rows = static_cast<int>(dims[0]), size = static_cast<int>(dims[1]), choices = static_cast<int>(outer[1]);
  if (rows == 0) return ffi::Error::Success();
  const RowKernels& kernels = find_row_kernels();
  std::deque<Projections> projections;
  for (size_t i = 0; i < 3; ++i) {
    const auto matrix = matrix_arguments(weights, i, matrices, levels);
    if (!matrix.has_value()) return matrix.error();
    projections.emplace_back(*matrix, experts);
    if (!projections.back().fit()) return invalid("experts: a stack has another number of experts");
  }
  Places places;
  if (!sort_choices(chosen.typed_data(), shares.typed_data(), rows, choices, experts, places)) {
    return invalid("experts: an expert that was chosen does not exist");
  }
  const size_t most = static_cast<size_t>(rows) * choices;
  if (scratch->element_count() < most * (size + 2 * static_cast<size_t>(inner))) return invalid("experts: too little scratch");
  float *gathered = scratch->typed_data(), *gate = gathered + most * size, *up = gate + most * inner;
  float* lowered = gathered;  // which nobody needs by then
  const bool gathers = rows > 1 || adapters.there();
  if (adapters.there()) {
    if (ffi::Error error = adapters.init(places.starts, places.tokens, rows); error.failure()) return error;
    for (ffi::Error error : {adapters.add(gathered, size, gate, inner), adapters.add(gathered, size, up, inner),
                             adapters.add(gate, inner, lowered, size)}) {
      if (error.failure()) return error;
    }
  }

  struct Expert {
    Products raise, lower;
    int first, count;  // places
  };
  std::deque<Expert> used;
  size_t bytes = 0;
  std::vector<size_t> raise_at, lower_at;
  for (int e = 0; e < experts; ++e) {
    const int first = places.starts[e], count = places.starts[e + 1] - first;
    if (count == 0) continue;
    float* to_gate = gate + static_cast<size_t>(first) * inner;
    float* from = gathers ? gathered + static_cast<size_t>(first) * size : x.typed_data();
    used.push_back({Products(count, size, from), Products(count, inner, to_gate), first, count});
    Expert& expert = used.back();
    for (ffi::Error error : {projections[0].add_to(expert.raise, e, inner, to_gate),
                             projections[1].add_to(expert.raise, e, inner, up + static_cast<size_t>(first) * inner),
                             projections[2].add_to(expert.lower, e, size, lowered + static_cast<size_t>(first) * size)}) {
      if (error.failure()) return error;
    }
    if (adapters.there()) {
      expert.lower.follows_activation();
    } else {
      expert.raise.gate_into(expert.lower, static_cast<Activation>(activation), pool);
    }
    raise_at.push_back(bytes);
    lower_at.push_back(bytes + (expert.raise.bytes(pool) + 63) / 64 * 64);
    bytes = lower_at.back() + (expert.lower.bytes(pool) + 63) / 64 * 64;
  }
  char* shared = thread_memory<3>(bytes + adapters.phases().bytes());
  adapters.phases().place(shared + bytes);
  std::vector<std::vector<Phase>> raising(used.size()), lowering(used.size());
  for (size_t i = 0; i < used.size(); ++i) {
    const size_t first = used[i].first;
    Fill gather, gated;
    if (gathers) {
      gather = [&places, &x, first, size](int begin, int end, float* to) {
        for (size_t place = first + begin; place < first + end; ++place, to += size) {
          std::memcpy(to, x.typed_data() + static_cast<size_t>(places.tokens[place]) * size, sizeof(float) * size);
        }
      };
    }
    gated = [&kernels, activation, inner, of_gate = gate + first * inner, of_up = up + first * inner](int begin, int end, float* to) {
      const size_t at = static_cast<size_t>(begin) * inner;
      kernels.gate_rows(static_cast<Activation>(activation), of_gate + at, of_up + at, to, inner, 0, end - begin);
    };
    if (adapters.there()) {  // which read these rows too
      const int count = used[i].count;
      raising[i].push_back(each_row(count, [gather, from = gathered + first * size, size](int begin, int end) {
        gather(begin, end, from + static_cast<size_t>(begin) * size);
      }));
      lowering[i].push_back(each_row(count, [gated, to = gate + first * inner, inner](int begin, int end) {
        gated(begin, end, to + static_cast<size_t>(begin) * inner);
      }));
      gather = gated = nullptr;
    }
    used[i].raise.append(shared + raise_at[i], std::move(gather), raising[i]);
    used[i].lower.append(shared + lower_at[i], std::move(gated), lowering[i]);
  }
  std::vector<Phase> phases;
  append_side_by_side(std::move(raising), phases);
  adapters.phases().append(0, 2, phases);
  append_side_by_side(std::move(lowering), phases);
  adapters.phases().append(2, 3, phases);
  phases.push_back({static_cast<size_t>((rows + kRowsOfPart - 1) / kRowsOfPart), [&](size_t task) {
                      const int begin = static_cast<int>(task) * kRowsOfPart, end = std::min(rows, begin + kRowsOfPart);
                      for (int row = begin; row < end; ++row) {
                        float* sum = out->typed_data() + static_cast<size_t>(row) * size;
                        std::fill(sum, sum + size, 0.0f);
                        for (size_t i = static_cast<size_t>(row) * choices; i < static_cast<size_t>(row + 1) * choices; ++i) {
                          if (places.of_choice[i] < 0) continue;
                          const float share = shares.typed_data()[i];
                          const float* made = lowered + static_cast<size_t>(places.of_choice[i]) * size;
                          for (int column = 0; column < size; ++column) sum[column] += share * made[column];
                        }
                      }
                    }});
  run_phases(pool, std::move(phases));
  return ffi::Error::Success();
}

}  // namespace

#pragma GCC visibility push(default)

XLA_FFI_DEFINE_HANDLER_SYMBOL(llmjax_experts, experts_handler,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Floats>()    // x
                                  .Arg<Integers>()  // chosen
                                  .Arg<Floats>()    // shares
                                  .RemainingArgs()  // see MatrixArguments, each [experts, ...]: gate, up, down; AdaptersOfCall
                                  .Ret<Floats>()    // out
                                  .Ret<Floats>()    // scratch
                                  .Attr<ffi::Span<const int32_t>>("matrices")
                                  .Attr<ffi::Span<const float>>("levels")
                                  .Attr<int32_t>("experts")
                                  .Attr<int32_t>("inner")
                                  .Attr<int32_t>("activation"));

#pragma GCC visibility pop

}  // namespace llmjax
