// Tokens from rows of logits, and whether they are numbers (contracts: kernels/argmax.py, kernels/finite.py,
// llmjax/sampling/draw.py).

#include "buffers.h"
#include "kernels.h"
#include "parallel.h"

namespace llmjax {
namespace {

namespace ffi = xla::ffi;
using Floats = ffi::Buffer<ffi::F32>;
using Tokens = ffi::Result<ffi::Buffer<ffi::S32>>;

constexpr int kPadding = 48;  // floats

bool are_rows(const Floats& x, Tokens& out) {
  const auto dims = x.dimensions();
  return dims.size() == 2 && dims[1] >= 1 && dims[1] < INT32_MAX - kPadding && has_shape(*out, {dims[0]});
}

ffi::Error argmax_handler(ffi::ThreadPool pool, Floats x, Tokens out, int32_t isa) {
  if (!are_rows(x, out)) return invalid("argmax: shapes do not fit each other");
  const Kernels* kernels = find_kernels(isa, 0);
  if (kernels == nullptr) return invalid("argmax: this machine lacks the instruction set");
  const size_t rows = x.dimensions()[0];
  const int size = static_cast<int>(x.dimensions()[1]);
  const float* from = x.typed_data();
  int32_t* found = out->typed_data();
  parallel_for(pool, rows, [=](size_t i) { found[i] = kernels->argmax(from + i * size, size); });
  return ffi::Error::Success();
}

ffi::Error finite_handler(ffi::ThreadPool pool, Floats x, ffi::Result<ffi::Buffer<ffi::PRED>> out, int32_t isa) {
  const auto dims = x.dimensions();
  if (dims.size() != 2 || dims[1] >= INT32_MAX || !has_shape(*out, {dims[0]})) {
    return invalid("finite: shapes do not fit each other");
  }
  const Kernels* kernels = find_kernels(isa, 0);
  if (kernels == nullptr) return invalid("finite: this machine lacks the instruction set");
  const int size = static_cast<int>(dims[1]);
  const float* from = x.typed_data();
  bool* found = out->typed_data();
  parallel_for(pool, static_cast<size_t>(dims[0]),
               [=](size_t i) { found[i] = kernels->finite(from + i * size, size); });
  return ffi::Error::Success();
}

ffi::Error sample_handler(ffi::ThreadPool pool, Floats x, ffi::Buffer<ffi::U32> keys, Floats temperature, Floats min_p,
                          ffi::Buffer<ffi::S32> top_k, Floats top_p, Tokens out, int32_t isa) {
  if (!are_rows(x, out)) return invalid("sample: shapes do not fit each other");
  const int64_t rows = x.dimensions()[0];
  const int size = static_cast<int>(x.dimensions()[1]);
  if (!has_shape(keys, {rows, 2}) || !has_shape(temperature, {rows}) || !has_shape(min_p, {rows}) ||
      !has_shape(top_k, {rows}) || !has_shape(top_p, {rows})) {
    return invalid("sample: shapes do not fit each other");
  }
  const Kernels* kernels = find_kernels(isa, 0);
  if (kernels == nullptr) return invalid("sample: this machine lacks the instruction set");
  parallel_for(pool, static_cast<size_t>(rows), [&](size_t i) {
    const uint32_t* key = keys.typed_data() + 2 * i;
    const SampleRow row{x.typed_data() + i * size, size, {key[0], key[1]}, temperature.typed_data()[i],
                        top_p.typed_data()[i], min_p.typed_data()[i], top_k.typed_data()[i]};
    const size_t floats = 3 * static_cast<size_t>(size) + kPadding;
    out->typed_data()[i] = kernels->sample(row, reinterpret_cast<float*>(thread_memory<5>(floats * sizeof(float))));
  });
  return ffi::Error::Success();
}

}  // namespace

#pragma GCC visibility push(default)

XLA_FFI_DEFINE_HANDLER_SYMBOL(llmjax_argmax, argmax_handler,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Floats>()                 // x [R, V]
                                  .Ret<ffi::Buffer<ffi::S32>>()  // [R]
                                  .Attr<int32_t>("isa"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(llmjax_finite, finite_handler,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Floats>()                  // x [R, V]
                                  .Ret<ffi::Buffer<ffi::PRED>>()  // [R]
                                  .Attr<int32_t>("isa"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(llmjax_sample, sample_handler,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Floats>()                 // x [R, V]
                                  .Arg<ffi::Buffer<ffi::U32>>()  // keys [R, 2]
                                  .Arg<Floats>()                 // temperature [R]
                                  .Arg<Floats>()                 // min_p [R]
                                  .Arg<ffi::Buffer<ffi::S32>>()  // top_k [R]
                                  .Arg<Floats>()                 // top_p [R]
                                  .Ret<ffi::Buffer<ffi::S32>>()  // [R]
                                  .Attr<int32_t>("isa"));

#pragma GCC visibility pop

}  // namespace llmjax
