// Products of few rows with a large matrix (contract: kernels/linear.py).

#include "buffers.h"
#include "kernels.h"
#include "parallel.h"

namespace llmjax {
namespace {

namespace ffi = xla::ffi;

constexpr int kUnit = 32;                 // outputs: what the kernels divide no further
constexpr int64_t kBytesOfTask = 1 << 16;  // of the weight, at least: a thread wakes up in about the time it takes

ffi::Error linear_handler(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::AnyBuffer weight,
                          ffi::Buffer<ffi::F32> bias, ffi::Result<ffi::Buffer<ffi::F32>> y, int32_t isa) {
  const auto dims = x.dimensions(), outer = weight.dimensions();
  const auto type = float_type(weight.element_type());
  if (!type || *type == Type::kF32) return invalid("linear: unsupported type of the weight");
  if (dims.size() != 2 || outer.size() != 2 || outer[1] != dims[1] || !has_shape(*y, {dims[0], outer[0]}) ||
      (bias.element_count() != 0 && !has_shape(bias, {outer[0]}))) {
    return invalid("linear: shapes do not fit each other");
  }
  const Linear call{static_cast<int>(dims[0]),
                    static_cast<int>(dims[1]),
                    static_cast<int>(outer[0]),
                    *type,
                    x.typed_data(),
                    weight.untyped_data(),
                    bias.element_count() == 0 ? nullptr : bias.typed_data(),
                    y->typed_data()};
  const Kernels* kernels = find_kernels(isa, call.size_in);
  if (kernels == nullptr) return invalid("linear: this machine lacks the instruction set or the input size is odd");
  char* workspace = thread_memory<2>(kernels->linear_workspace(call));
  kernels->linear_prepare(call, workspace);
  const int64_t units = (call.size_out + kUnit - 1) / kUnit;
  const int64_t per_task = 1 + kBytesOfTask / (static_cast<int64_t>(kUnit) * call.size_in * 2);
  parallel_for(pool, (units + per_task - 1) / per_task, [&](size_t i) {
    const int64_t begin = static_cast<int64_t>(i) * per_task * kUnit, end = begin + per_task * kUnit;
    kernels->linear(call, workspace, static_cast<int>(begin), static_cast<int>(end < call.size_out ? end : call.size_out));
  });
  return ffi::Error::Success();
}

}  // namespace

#pragma GCC visibility push(default)

XLA_FFI_DEFINE_HANDLER_SYMBOL(llmjax_linear, linear_handler,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()  // x
                                  .Arg<ffi::AnyBuffer>()         // weight
                                  .Arg<ffi::Buffer<ffi::F32>>()  // bias, empty for none
                                  .Ret<ffi::Buffer<ffi::F32>>()  // y
                                  .Attr<int32_t>("isa"));

#pragma GCC visibility pop

}  // namespace llmjax
