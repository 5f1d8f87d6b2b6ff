// What adapters change of one product (contract: kernels/adapted_linear.py).

#include <cstring>
#include <vector>

#include "adapters.h"
#include "products.h"

namespace llmjax {
namespace {

namespace ffi = xla::ffi;

ffi::Error adapted_handler(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> product, ffi::Buffer<ffi::F32> x,
                           ffi::Buffer<ffi::S32> places, ffi::Buffer<ffi::S32> special, ffi::Buffer<ffi::S32> used,
                           ffi::AnyBuffer a, ffi::AnyBuffer b, ffi::Buffer<ffi::F32> vectors,
                           ffi::Result<ffi::Buffer<ffi::F32>> out) {
  const auto dims = product.dimensions(), inputs = x.dimensions();
  if (dims.size() != 2 || inputs.size() != 2 || inputs[0] != dims[0] || !has_shape(places, {dims[0]}) ||
      !has_shape(*out, {dims[0], dims[1]})) {
    return invalid("adapters: shapes do not fit each other");
  }
  const auto rows = rows_in_use(used, false, static_cast<int>(dims[0]));
  if (!rows.has_value()) return rows.error();
  float* const y = out->typed_data();
  if (y != product.typed_data()) std::memcpy(y, product.typed_data(), product.size_bytes());
  Adapters adapters;
  const auto count = static_cast<int64_t>(special.element_count()) - 1;
  if (ffi::Error error = adapters.init(places.typed_data(), rows->count, count, special.typed_data()); error.failure()) return error;
  ffi::Error error = adapters.add(a, b, vectors, x.typed_data(), inputs[1], y, dims[1], nullptr);
  if (error.failure()) return error;
  adapters.place(thread_memory<3>(adapters.bytes()));
  std::vector<Phase> phases;
  adapters.append(0, 1, phases);
  if (!phases.empty()) run_phases(pool, std::move(phases));
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
