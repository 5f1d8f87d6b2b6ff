// Products of rows with matrices (contract: kernels/linear.py), plain ones of 16-bit floats and quantized ones.

#include "huge_pages.h"
#include "products.h"

namespace llmjax {
namespace {

namespace ffi = xla::ffi;

ffi::Error linears_handler(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::S32> used,
                           ffi::RemainingArgs arguments, ffi::RemainingRets results, ffi::Span<const int32_t> matrices,
                           ffi::Span<const float> levels) {
  const auto dims = x.dimensions();
  if (dims.size() != 2 || arguments.size() != 2 * results.size()) return invalid("products: wrong number of arguments");
  const int all_rows = static_cast<int>(dims[0]);
  const auto rows = rows_in_use(used, false, all_rows);
  if (!rows.has_value()) return rows.error();
  Products products(*rows, static_cast<int>(dims[1]), x.typed_data());
  for (size_t i = 0; i < results.size(); ++i) {
    const auto matrix = matrix_arguments(arguments, i, matrices, levels);
    auto y = results.get<ffi::Buffer<ffi::F32>>(i);
    if (!matrix.has_value()) return matrix.error();
    if (!y.has_value()) return y.error();
    const auto outer = (*y)->dimensions();
    if (outer.size() != 2 || outer[0] != all_rows) return invalid("products: shapes do not fit each other");
    prefer_huge_pages((*y)->untyped_data(), (*y)->size_bytes());
    clear_padding((*y)->typed_data(), *rows, all_rows, static_cast<int>(outer[1]));
    if (ffi::Error error = products.add(*matrix, static_cast<int>(outer[1]), (*y)->typed_data()); error.failure()) {
      return error;
    }
  }
  if (rows->count == 0) return ffi::Error::Success();
  std::vector<Phase> phases;
  products.append(thread_memory<3>(products.bytes(pool)), nullptr, phases);
  run_phases(pool, std::move(phases));
  return ffi::Error::Success();
}

}  // namespace

#pragma GCC visibility push(default)

XLA_FFI_DEFINE_HANDLER_SYMBOL(llmjax_linears, linears_handler,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()  // x
                                  .Arg<ffi::Buffer<ffi::S32>>()  // rows in use, empty for all
                                  .RemainingArgs()               // see MatrixArguments: weight and bias of each matrix
                                  .RemainingRets()               // y f32 of each matrix
                                  .Attr<ffi::Span<const int32_t>>("matrices")
                                  .Attr<ffi::Span<const float>>("levels"));

#pragma GCC visibility pop

}  // namespace llmjax
