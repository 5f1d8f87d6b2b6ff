// What adapters add to a product (contract: kernels/adapted_linear.py): the rows of each adapter are multiplied with its
// matrices, which are read once; those of other adapters, and of rows without one, are not read.

#include <algorithm>
#include <cstring>
#include <vector>

#include "buffers.h"
#include "kernels.h"
#include "parallel.h"
#include "products.h"

namespace llmjax {
namespace {

namespace ffi = xla::ffi;

constexpr int kRanksOfTask = 4;       // rows of `a`
constexpr int kExpandedOfTask = 512;  // outputs

ffi::Error adapted_handler(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> product, ffi::Buffer<ffi::F32> x,
                           ffi::Buffer<ffi::S32> places, ffi::Buffer<ffi::S32> special, ffi::Buffer<ffi::S32> used,
                           ffi::AnyBuffer a, ffi::AnyBuffer b, ffi::Buffer<ffi::F32> vectors,
                           ffi::Result<ffi::Buffer<ffi::F32>> out) {
  const auto dims = product.dimensions(), inputs = x.dimensions(), matrices = a.dimensions(), both = vectors.dimensions();
  const auto type = float_type(a.element_type());
  if (dims.size() != 2 || inputs.size() != 2 || matrices.size() != 2 || both.size() != 2 || !type ||
      b.element_type() != a.element_type()) {
    return invalid("adapters: wrong types or numbers of dimensions");
  }
  const int64_t tokens = dims[0], count = both[0] / 2;
  if (count < 1 || both[0] % 2 != 0 || matrices[0] % count != 0 || both[1] != dims[1] || !has_shape(special, {count + 1}) ||
      !has_shape(x, {tokens, matrices[1]}) || !has_shape(places, {tokens}) || !has_shape(b, {matrices[0], dims[1]}) ||
      !has_shape(*out, {tokens, dims[1]})) {
    return invalid("adapters: shapes do not fit each other");
  }
  const auto rows = rows_in_use(used, false, static_cast<int>(tokens));
  if (!rows.has_value()) return rows.error();
  float* const y = out->typed_data();
  if (y != product.typed_data()) std::memcpy(y, product.typed_data(), sizeof(float) * static_cast<size_t>(tokens * dims[1]));
  Adapted call{};
  call.places = static_cast<int>(count), call.rank = static_cast<int>(matrices[0] / count);
  call.size_in = static_cast<int>(matrices[1]), call.size_out = static_cast<int>(dims[1]);
  call.type = *type;
  call.x = x.typed_data(), call.y = y, call.vectors = vectors.typed_data();
  call.a = a.untyped_data(), call.b = b.untyped_data();
  call.shrunk = reinterpret_cast<float*>(thread_memory<3>(sizeof(float) * static_cast<size_t>(tokens) * call.rank));

  std::vector<std::vector<int32_t>> by_place(static_cast<size_t>(count));
  for (int t = 0; t < rows->count; ++t) {
    const int32_t place = places.typed_data()[t];
    if (place < 0 || place > count) return invalid("adapters: there is no such place");
    if (place > 0) by_place[static_cast<size_t>(place - 1)].push_back(t);
  }
  std::vector<AdaptedRows> groups;
  for (int place = 0; place < count; ++place) {
    const auto& own = by_place[static_cast<size_t>(place)];
    if (own.empty()) continue;
    groups.push_back({place, own.data(), static_cast<int>(own.size()), special.typed_data()[place + 1] != 0});
  }
  if (groups.empty()) return ffi::Error::Success();
  const RowKernels& kernels = find_row_kernels();
  const size_t parts = static_cast<size_t>((call.rank + kRanksOfTask - 1) / kRanksOfTask);
  const size_t pieces = static_cast<size_t>((call.size_out + kExpandedOfTask - 1) / kExpandedOfTask);
  std::vector<Phase> phases;
  phases.push_back({groups.size() * parts,
                    [&](size_t i) {
                      const int first = static_cast<int>(i % parts) * kRanksOfTask;
                      kernels.shrink(call, groups[i / parts], first, std::min(kRanksOfTask, call.rank - first));
                    },
                    Work::kProducts});
  phases.push_back({groups.size() * pieces,
                    [&](size_t i) {
                      const int begin = static_cast<int>(i % pieces) * kExpandedOfTask;
                      kernels.expand(call, groups[i / pieces], begin, std::min(begin + kExpandedOfTask, call.size_out));
                    },
                    Work::kProducts});
  run_phases(pool, std::move(phases));
  return ffi::Error::Success();
}

}  // namespace

#pragma GCC visibility push(default)

XLA_FFI_DEFINE_HANDLER_SYMBOL(llmjax_adapted, adapted_handler,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()   // product [T, out]
                                  .Arg<ffi::Buffer<ffi::F32>>()   // x [T, in]
                                  .Arg<ffi::Buffer<ffi::S32>>()   // place of each row, 0: none
                                  .Arg<ffi::Buffer<ffi::S32>>()   // [S + 1], whether a place has a bias or gains
                                  .Arg<ffi::Buffer<ffi::S32>>()   // rows in use, empty for all
                                  .Arg<ffi::AnyBuffer>()          // a [S * r, in]
                                  .Arg<ffi::AnyBuffer>()          // b [S * r, out]
                                  .Arg<ffi::Buffer<ffi::F32>>()   // [2 * S, out]: biases, then gains less one
                                  .Ret<ffi::Buffer<ffi::F32>>());  // y [T, out], which may be the product

#pragma GCC visibility pop

}  // namespace llmjax
