// What adapters change of products, as phases of a call (contract: kernels/adapted_linear.py): the rows of each adapter are
// multiplied with its matrices, which are read once; those of other adapters, and of rows without one, are not read. With
// experts, an expert's part of an adapter is an adapter of its own.

#ifndef LLMJAX_ADAPTERS_H_
#define LLMJAX_ADAPTERS_H_

#include <algorithm>
#include <vector>

#include "buffers.h"
#include "kernels.h"
#include "parallel.h"

namespace llmjax {

class Adapters {
 public:
  // `places` [rows]: the place of each row, 1 to `count`, or 0 for none. `special` [count + 1]: whether the adapter of a place
  // has a bias or gains; null: none has.
  xla::ffi::Error init(const int32_t* places, int rows, int64_t count, const int32_t* special) {
    count_ = count, rows_ = rows;
    if (count_ < 1) return invalid("adapters: there are no places");
    by_place_.resize(static_cast<size_t>(count_));
    for (int t = 0; t < rows; ++t) {
      const int32_t place = places[t];
      if (place < 0 || place > count_) return invalid("adapters: there is no such place");
      if (place > 0) by_place_[static_cast<size_t>(place - 1)].push_back(t);
    }
    for (int64_t place = 0; place < count_; ++place) {
      const auto& own = by_place_[static_cast<size_t>(place)];
      const bool changes = special != nullptr && special[place + 1] != 0;
      for (size_t at = 0; at < own.size(); at += kRowsOfGroup) {
        const size_t rows_of_group = std::min(kRowsOfGroup, own.size() - at);
        groups_.push_back({static_cast<int>(place), own.data() + at, static_cast<int>(rows_of_group), changes});
      }
    }
    return xla::ffi::Error::Success();
  }

  // The product y [rows, size_out] of x [rows, size_in], to which `bias` (null: none) has been added. `vectors` may be empty
  // where no place is special.
  xla::ffi::Error add(const xla::ffi::AnyBuffer& a, const xla::ffi::AnyBuffer& b, const xla::ffi::Buffer<xla::ffi::F32>& vectors,
                      const float* x, int64_t size_in, float* y, int64_t size_out, const float* bias) {
    const auto dims = a.dimensions();
    const auto type = float_type(a.element_type());
    if (dims.size() != 2 || !type || b.element_type() != a.element_type() || dims[0] % count_ != 0 || dims[1] != size_in ||
        !has_shape(b, {dims[0], size_out}) || (vectors.element_count() != 0 && !has_shape(vectors, {2 * count_, size_out}))) {
      return invalid("adapters: types or shapes do not fit each other");
    }
    Adapted call{};
    call.places = static_cast<int>(count_), call.rank = static_cast<int>(dims[0] / count_);
    call.size_in = static_cast<int>(size_in), call.size_out = static_cast<int>(size_out);
    call.type = *type;
    call.x = x, call.y = y, call.bias = bias, call.vectors = vectors.typed_data();
    call.a = a.untyped_data(), call.b = b.untyped_data();
    calls_.push_back(call);
    return xla::ffi::Error::Success();
  }

  // Memory that the phases share. After the last `add`.
  size_t bytes() const {
    size_t floats = 0;
    for (const Adapted& call : calls_) floats += static_cast<size_t>(rows_) * call.rank;
    return floats * sizeof(float);
  }

  void place(char* memory) {
    float* at = reinterpret_cast<float*>(memory);
    for (Adapted& call : calls_) call.shrunk = at, at += static_cast<size_t>(rows_) * call.rank;
  }

  // Phases that follow those of products begin..end, in the order of `add`. Rows of x are there when the last one of `phases`,
  // that of the products, begins: what reads only them goes beside it.
  void append(size_t begin, size_t end, std::vector<Phase>& phases) const {
    if (groups_.empty()) return;
    const RowKernels* kernels = &find_row_kernels();
    std::vector<Task> shrinking, expanding;
    for (size_t c = begin; c < end; ++c) {
      for (size_t g = 0; g < groups_.size(); ++g) {
        for (int at = 0; at < calls_[c].rank; at += kRanksOfTask) shrinking.push_back({c, g, at});
        for (int at = 0; at < calls_[c].size_out; at += kExpandedOfTask) expanding.push_back({c, g, at});
      }
    }
    const size_t shrinks = shrinking.size(), expands = expanding.size();
    Phase shrink{shrinks, [this, kernels, tasks = std::move(shrinking)](size_t i) {
                        const Task &task = tasks[i], &next = tasks[std::min(i + 1, tasks.size() - 1)];
                        const Adapted& call = calls_[task.call];
                        kernels->shrink(call, groups_[task.group], task.at, std::min(kRanksOfTask, call.rank - task.at), shrunk_by(next));
                      },
                      Work::kProducts};
    if (phases.empty()) {
      phases.push_back(std::move(shrink));
    } else {
      phases.back() = in_turn(std::move(phases.back()), std::move(shrink));
    }
    phases.push_back({expands, [this, kernels, tasks = std::move(expanding)](size_t i) {
                        const Task &task = tasks[i], &next = tasks[std::min(i + 1, tasks.size() - 1)];
                        const Adapted& call = calls_[task.call];
                        kernels->expand(call, groups_[task.group], task.at, std::min(task.at + kExpandedOfTask, call.size_out), expanded_by(next));
                      },
                      Work::kProducts});
  }

 private:
  static constexpr size_t kRowsOfGroup = 64;   // whose x stays in the cache
  static constexpr int kRanksOfTask = 4;       // rows of `a`
  static constexpr int kExpandedOfTask = 512;  // outputs

  struct Task {
    size_t call, group;
    int at;
  };

  // What a task reads first of its matrix.
  const char* shrunk_by(const Task& task) const {
    const Adapted& call = calls_[task.call];
    const size_t row = static_cast<size_t>(groups_[task.group].place) * call.rank + task.at;
    return static_cast<const char*>(call.a) + row * call.size_in * size_of(call.type);
  }
  const char* expanded_by(const Task& task) const {
    const Adapted& call = calls_[task.call];
    const size_t row = static_cast<size_t>(groups_[task.group].place) * call.rank;
    return static_cast<const char*>(call.b) + (row * call.size_out + task.at) * size_of(call.type);
  }

  int64_t count_ = 0;
  int rows_ = 0;
  std::vector<std::vector<int32_t>> by_place_;
  std::vector<AdaptedRows> groups_;
  std::vector<Adapted> calls_;
};

// The adapters of a call's matrices, which follow the `matrices` weights and biases (kernels/cpu/adapted.py): places, whether
// each is special, and for each matrix `a`, `b` and vectors. There may be none.
class AdaptersOfCall {
 public:
  AdaptersOfCall(const xla::ffi::RemainingArgs& arguments, size_t matrices) : arguments_(arguments), matrices_(matrices) {}

  bool fit() const { return arguments_.size() == 2 * matrices_ || there(); }
  bool there() const { return arguments_.size() == 5 * matrices_ + 2; }

  xla::ffi::Error init(int rows) {
    if (xla::ffi::Error error = read_places(rows); error.failure()) return error;
    return phases_.init(places_, rows, count_, special_);
  }

  // Rows are choices, sorted by expert: those of expert e are starts[e] to starts[e + 1], of the tokens `tokens`.
  xla::ffi::Error init(const std::vector<int>& starts, const std::vector<int>& tokens, int rows) {
    if (xla::ffi::Error error = read_places(rows); error.failure()) return error;
    const int experts = static_cast<int>(starts.size()) - 1;
    std::vector<int32_t> keys(tokens.size());
    for (int e = 0; e < experts; ++e) {
      for (int at = starts[e]; at < starts[e + 1]; ++at) {
        const int32_t place = places_[tokens[at]];
        if (place < 0 || place > count_) return invalid("adapters: there is no such place");
        keys[at] = place == 0 ? 0 : (place - 1) * experts + e + 1;
      }
    }
    return phases_.init(keys.data(), static_cast<int>(keys.size()), count_ * experts, nullptr);
  }

  // Those of the next matrix.
  xla::ffi::Error add(const float* x, int64_t size_in, float* y, int64_t size_out) {
    using Floats = xla::ffi::Buffer<xla::ffi::F32>;
    const size_t first = 2 * matrices_ + 2 + 3 * added_;
    const auto bias = arguments_.get<Floats>(2 * added_ + 1), vectors = arguments_.get<Floats>(first + 2);
    const auto a = arguments_.get<xla::ffi::AnyBuffer>(first), b = arguments_.get<xla::ffi::AnyBuffer>(first + 1);
    if (!bias.has_value()) return bias.error();
    if (!a.has_value()) return a.error();
    if (!b.has_value()) return b.error();
    if (!vectors.has_value()) return vectors.error();
    ++added_;
    const bool is_read = bias->element_count() != 0 && vectors->element_count() != 0;
    return phases_.add(*a, *b, *vectors, x, size_in, y, size_out, is_read ? bias->typed_data() : nullptr);
  }

  Adapters& phases() { return phases_; }

 private:
  xla::ffi::Error read_places(int rows) {
    using Integers = xla::ffi::Buffer<xla::ffi::S32>;
    const auto places = arguments_.get<Integers>(2 * matrices_), special = arguments_.get<Integers>(2 * matrices_ + 1);
    if (!places.has_value()) return places.error();
    if (!special.has_value()) return special.error();
    if (special->element_count() < 2 || static_cast<int64_t>(places->element_count()) < rows) {
      return invalid("adapters: there are no places");
    }
    places_ = places->typed_data(), special_ = special->typed_data();
    count_ = static_cast<int64_t>(special->element_count()) - 1;
    return xla::ffi::Error::Success();
  }

  const xla::ffi::RemainingArgs& arguments_;
  size_t matrices_, added_ = 0;
  const int32_t *places_ = nullptr, *special_ = nullptr;
  int64_t count_ = 0;
  Adapters phases_;
};

}  // namespace llmjax

#endif  // LLMJAX_ADAPTERS_H_
