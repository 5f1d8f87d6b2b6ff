// The largest entry of each row (contract: kernels/argmax.py).

#include "buffers.h"
#include "kernels.h"
#include "parallel.h"

namespace llmjax {
namespace {

namespace ffi = xla::ffi;

ffi::Error argmax_handler(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Result<ffi::Buffer<ffi::S32>> out, int32_t isa) {
  const auto dims = x.dimensions();
  if (dims.size() != 2 || dims[1] < 1 || dims[1] > INT32_MAX || !has_shape(*out, {dims[0]})) {
    return invalid("argmax: shapes do not fit each other");
  }
  const Kernels* kernels = find_kernels(isa, 0);
  if (kernels == nullptr) return invalid("argmax: this machine lacks the instruction set");
  const int size = static_cast<int>(dims[1]);
  const float* rows = x.typed_data();
  int32_t* found = out->typed_data();
  parallel_for(pool, static_cast<size_t>(dims[0]), [=](size_t i) { found[i] = kernels->argmax(rows + i * size, size); });
  return ffi::Error::Success();
}

}  // namespace

#pragma GCC visibility push(default)

XLA_FFI_DEFINE_HANDLER_SYMBOL(llmjax_argmax, argmax_handler,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()  // x [R, V]
                                  .Ret<ffi::Buffer<ffi::S32>>()  // [R]
                                  .Attr<int32_t>("isa"));

#pragma GCC visibility pop

}  // namespace llmjax
