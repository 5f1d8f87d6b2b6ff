// What adapters change of products, as phases of a call (contract: kernels/adapted_linear.py): the rows of each adapter are
// multiplied with its matrices, which are read once; those of other adapters, and of rows without one, are not read.

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
  // `places` [T], of which the first `rows` count: the place of each row, 0 for none. `special` [S + 1]: whether the adapter
  // of a place has a bias or gains.
  xla::ffi::Error init(const xla::ffi::Buffer<xla::ffi::S32>& places, const xla::ffi::Buffer<xla::ffi::S32>& special, int rows) {
    count_ = special.element_count() - 1, rows_ = rows;
    if (count_ < 1 || static_cast<int64_t>(places.element_count()) < rows) return invalid("adapters: there are no places");
    by_place_.resize(static_cast<size_t>(count_));
    for (int t = 0; t < rows; ++t) {
      const int32_t place = places.typed_data()[t];
      if (place < 0 || place > count_) return invalid("adapters: there is no such place");
      if (place > 0) by_place_[static_cast<size_t>(place - 1)].push_back(t);
    }
    for (int64_t place = 0; place < count_; ++place) {
      const auto& own = by_place_[static_cast<size_t>(place)];
      if (own.empty()) continue;
      groups_.push_back({static_cast<int>(place), own.data(), static_cast<int>(own.size()), special.typed_data()[place + 1] != 0});
    }
    return xla::ffi::Error::Success();
  }

  // The product y [rows, size_out] of x [rows, size_in], to which `bias` (null: none) has been added.
  xla::ffi::Error add(const xla::ffi::AnyBuffer& a, const xla::ffi::AnyBuffer& b, const xla::ffi::Buffer<xla::ffi::F32>& vectors,
                      const float* x, int64_t size_in, float* y, int64_t size_out, const float* bias) {
    const auto dims = a.dimensions();
    const auto type = float_type(a.element_type());
    if (dims.size() != 2 || !type || b.element_type() != a.element_type() || dims[0] % count_ != 0 || dims[1] != size_in ||
        !has_shape(b, {dims[0], size_out}) || !has_shape(vectors, {2 * count_, size_out})) {
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

  // The phases of products begin..end, in the order of `add`; x and y are there when they begin.
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
    phases.push_back({shrinks, [this, kernels, tasks = std::move(shrinking)](size_t i) {
                        const Task& task = tasks[i];
                        const Adapted& call = calls_[task.call];
                        kernels->shrink(call, groups_[task.group], task.at, std::min(kRanksOfTask, call.rank - task.at));
                      },
                      Work::kProducts});
    phases.push_back({expands, [this, kernels, tasks = std::move(expanding)](size_t i) {
                        const Task& task = tasks[i];
                        const Adapted& call = calls_[task.call];
                        kernels->expand(call, groups_[task.group], task.at, std::min(task.at + kExpandedOfTask, call.size_out));
                      },
                      Work::kProducts});
  }

 private:
  static constexpr int kRanksOfTask = 4;       // rows of `a`
  static constexpr int kExpandedOfTask = 512;  // outputs

  struct Task {
    size_t call, group;
    int at;
  };

  int64_t count_ = 0;
  int rows_ = 0;
  std::vector<std::vector<int32_t>> by_place_;
  std::vector<AdaptedRows> groups_;
  std::vector<Adapted> calls_;
};

}  // namespace llmjax

#endif  // LLMJAX_ADAPTERS_H_
