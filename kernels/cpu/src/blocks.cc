// The two halves of a decoder layer (contract: kernels/blocks.py): everything between one residual stream and the next
// as phases of one call, since waking threads and starting operations would take longer than a decode step's products.

#include "adapters.h"
#include "attention.h"
#include "sublayers.h"

namespace llmjax {
namespace {

namespace ffi = xla::ffi;

// Norm i of a call; `settings`: eps and plus_one of each.
ffi::ErrorOr<Norm> read_norm(const Floats& weight, ffi::Span<const float> settings, size_t i, int64_t size) {
  if (settings.size() < 2 * i + 2 || (weight.element_count() != 0 && !has_shape(weight, {size}))) {
    return ffi::Unexpected(invalid("block: a norm does not fit"));
  }
  return Norm{weight.element_count() == 0 ? nullptr : weight.typed_data(), settings.begin()[2 * i],
              settings.begin()[2 * i + 1] != 0};
}

// out = x + after(y)
Phase add_normed(const RowKernels& kernels, const Norm& after, const float* x, const float* y, float* out, int rows, int size) {
  return {static_cast<size_t>((rows + kRowsOfTask - 1) / kRowsOfTask), [&kernels, after, x, y, out, rows, size](size_t i) {
            const int begin = static_cast<int>(i) * kRowsOfTask, end = begin + kRowsOfTask;
            kernels.norm_rows(after, y, x, out, size, begin, end < rows ? end : rows);
          }, Work::kNorms};
}

// out = x + y, or y where `adds` is not.
Phase add_rows(const float* x, const float* y, float* out, int rows, int size, bool adds) {
  return each_row(rows, [x, y, out, size, adds](int begin, int end) {
    const size_t first = static_cast<size_t>(begin) * size, last = static_cast<size_t>(end) * size;
    for (size_t i = first; i < last; ++i) out[i] = adds ? x[i] + y[i] : y[i];
  });
}

// out = x + after(down(activation(gate(n)) * up(n))), n = before(x), of three matrices; of two there is no `up`. Without
// `adds` the product of down alone.
ffi::Error mlp_handler(ffi::ThreadPool pool, Floats x, Floats before, Floats after, ffi::Buffer<ffi::S32> used,
                       ffi::RemainingArgs weights, ffi::Result<Floats> out, ffi::Result<Floats> scratch,
                       ffi::Span<const float> norms, ffi::Span<const int32_t> matrices, ffi::Span<const float> levels,
                       int32_t inner, int32_t activation, bool adds, bool decode) {
  const auto dims = x.dimensions();
  const bool gated = weights.size() == 6 || weights.size() == 17;
  AdaptersOfCall adapters(weights, gated ? 3 : 2);
  if (dims.size() != 2 || !adapters.fit() || !has_shape(*out, {dims[0], dims[1]}) || inner < 1 ||
      activation < 0 || activation >= static_cast<int>(Activation::kNumber)) {
    return invalid("mlp: arguments do not fit each other");
  }
  const int all_rows = static_cast<int>(dims[0]), size = static_cast<int>(dims[1]);
  const auto in_use = rows_in_use(used, decode, all_rows);
  if (!in_use.has_value()) return in_use.error();
  const int rows = in_use->count;
  const auto first = read_norm(before, norms, 0, size), last = read_norm(after, norms, 1, size);
  if (!first.has_value()) return first.error();
  if (!last.has_value()) return last.error();
  const RowKernels& kernels = find_row_kernels();
  const bool adds_normed = last->weight != nullptr;
  Scratch memory(scratch, rows);
  float* normed = first->weight == nullptr ? nullptr : memory.take(size);
  float *gate = memory.take(inner), *up = gated ? memory.take(inner) : nullptr;
  float* lowered = adds_normed || adapters.there() ? memory.take(size) : out->typed_data();
  if (!memory.fits()) return invalid("mlp: too little scratch");
  Products raise(*in_use, size, normed == nullptr ? x.typed_data() : normed), lower(*in_use, inner, gate);
  const float* residual = adds_normed || !adds || adapters.there() ? nullptr : x.typed_data();
  const size_t last_matrix = gated ? 2 : 1;
  for (size_t i = 0; i <= last_matrix; ++i) {
    const auto matrix = matrix_arguments(weights, i, matrices, levels);
    if (!matrix.has_value()) return matrix.error();
    ffi::Error error = i == last_matrix ? lower.add(*matrix, size, lowered, residual)
                                        : raise.add(*matrix, inner, i == 0 ? gate : up);
    if (error.failure()) return error;
  }
  clear_padding(out->typed_data(), *in_use, all_rows, size);
  if (rows == 0) return ffi::Error::Success();
  if (adapters.there()) {
    if (ffi::Error error = adapters.init(rows); error.failure()) return error;
    for (size_t i = 0; i <= last_matrix; ++i) {
      const float* input = normed == nullptr ? x.typed_data() : normed;
      ffi::Error error = i == last_matrix ? adapters.add(gate, inner, lowered, size)
                                          : adapters.add(input, size, i == 0 ? gate : up, inner);
      if (error.failure()) return error;
    }
    lower.follows_activation();
    const size_t bytes = raise.bytes(pool), both = bytes + lower.bytes(pool);
    char* shared = thread_memory<3>(both + adapters.phases().bytes());
    adapters.phases().place(shared + both);
    std::vector<Phase> phases;
    if (const Fill fill = fill_normed(kernels, *first, x.typed_data(), size); fill != nullptr) {
      phases.push_back(each_row(rows, [fill, normed, size](int begin, int end) { fill(begin, end, normed + static_cast<size_t>(begin) * size); }));
    }
    raise.append(shared, nullptr, phases);
    adapters.phases().append(0, last_matrix, phases);
    phases.push_back(each_row(rows, [&kernels, gate, up, inner, activation](int begin, int end) {
      kernels.gate_rows(static_cast<Activation>(activation), gate, up, gate, inner, begin, end);
    }));
    lower.append(shared + bytes, nullptr, phases);
    adapters.phases().append(last_matrix, last_matrix + 1, phases);
    phases.push_back(adds_normed ? add_normed(kernels, *last, x.typed_data(), lowered, out->typed_data(), rows, size)
                                 : add_rows(x.typed_data(), lowered, out->typed_data(), rows, size, adds));
    run_phases(pool, std::move(phases));
    return ffi::Error::Success();
  }
  raise.gate_into(lower, static_cast<Activation>(activation), pool);
  const size_t bytes = raise.bytes(pool);
  char* shared = thread_memory<3>(bytes + lower.bytes(pool));
  std::vector<Phase> phases;
  raise.append(shared, fill_normed(kernels, *first, x.typed_data(), size), phases);
  const auto fill = [&kernels, gate, up, inner, activation](int begin, int end, float* to) {
    const size_t at = static_cast<size_t>(begin) * inner;
    const float* gates = up == nullptr ? nullptr : up + at;
    kernels.gate_rows(static_cast<Activation>(activation), gate + at, gates, to, inner, 0, end - begin);
  };
  lower.append(shared + bytes, fill, phases);
  if (adds_normed) phases.push_back(add_normed(kernels, *last, x.typed_data(), lowered, out->typed_data(), rows, size));
  run_phases(pool, std::move(phases));
  return ffi::Error::Success();
}

// out = x + after(o(attention(rotate(q_norm(q(n))), rotate(k_norm(k(n))), v(n)))), n = before(x); without `adds` the
// product of o alone
ffi::Error attention_block_handler(ffi::ThreadPool pool, Floats x, Floats before, Floats q_norm, Floats k_norm, Floats after,
                                   Floats cos, Floats sin, ffi::AnyBuffer pages_in, Floats calibration,
                                   ffi::Buffer<ffi::S32> query_start, ffi::Buffer<ffi::S32> kv_len,
                                   ffi::Buffer<ffi::S32> page_table, ffi::Buffer<ffi::S32> slots,
                                   ffi::BufferR0<ffi::S32> first_page, Floats sinks, ffi::RemainingArgs weights,
                                   ffi::Result<Floats> out, ffi::Result<ffi::AnyBuffer> pages,
                                   ffi::Result<Floats> scratch, ffi::Span<const float> norms,
                                   ffi::Span<const int32_t> matrices, ffi::Span<const float> levels, int32_t heads,
                                   bool interleaved, bool adds, float scale, float softcap, int32_t window, bool causal,
                                   int32_t cache_type, int32_t page_size, bool token_scales, bool decode,
                                   bool verify) {
  const auto dims = x.dimensions(), cache = pages->dimensions(), angles = cos.dimensions();
  AdaptersOfCall adapters(weights, 4);
  if (dims.size() != 2 || cache.size() != 5 || angles.size() != 2 || !adapters.fit() || heads < 1 ||
      !has_shape(*out, {dims[0], dims[1]}) || angles[0] != dims[0] || 2 * angles[1] > cache[4] ||
      !has_shape(sin, {angles[0], angles[1]})) {
    return invalid("attention block: arguments do not fit each other");
  }
  const int all_rows = static_cast<int>(dims[0]), size = static_cast<int>(dims[1]), half = static_cast<int>(angles[1]);
  const int kv_heads = static_cast<int>(cache[2]), head_dim = static_cast<int>(cache[4]);
  const auto first = read_norm(before, norms, 0, size), of_q = read_norm(q_norm, norms, 1, head_dim);
  const auto of_k = read_norm(k_norm, norms, 2, head_dim), last = read_norm(after, norms, 3, size);
  for (const auto* norm : {&first, &of_q, &of_k, &last}) {
    if (!norm->has_value()) return norm->error();
  }
  const RowKernels& kernels = find_row_kernels();
  const bool adds_normed = last->weight != nullptr;
  const int q_size = heads * head_dim, kv_size = kv_heads * head_dim;
  Scratch memory(scratch, all_rows);
  float* normed = first->weight == nullptr ? nullptr : memory.take(size);
  float *q = memory.take(q_size), *k = memory.take(kv_size), *v = memory.take(kv_size), *attended = memory.take(q_size);
  float* projected = adds_normed || adapters.there() ? memory.take(size) : out->typed_data();
  if (!memory.fits()) return invalid("attention block: too little scratch");
  const AttentionArguments arguments{pages_in, calibration, query_start, kv_len,     page_table, slots,
                                     first_page, sinks,    *pages,      scale,      softcap,    window,
                                     causal,   cache_type,  page_size,   token_scales, decode, verify};
  PagedAttention attention{};
  if (ffi::Error error = attention.init(arguments, {all_rows, heads, kv_heads, head_dim, Type::kF32, q, k, v, attended});
      error.failure()) {
    return error;
  }
  const int rows = attention.used();
  const Rows in_use(rows, decode ? rows : all_rows);
  Products project(in_use, size, normed == nullptr ? x.typed_data() : normed), output(in_use, q_size, attended);
  const float* residual = adds_normed || !adds || adapters.there() ? nullptr : x.typed_data();
  float* const to[] = {q, k, v, projected};
  const int sizes[] = {q_size, kv_size, kv_size, size};
  for (size_t i = 0; i < 4; ++i) {
    const auto matrix = matrix_arguments(weights, i, matrices, levels);
    if (!matrix.has_value()) return matrix.error();
    ffi::Error error = i < 3 ? project.add(*matrix, sizes[i], to[i]) : output.add(*matrix, sizes[i], to[i], residual);
    if (error.failure()) return error;
  }
  clear_padding(out->typed_data(), in_use, all_rows, size);
  if (rows == 0) return ffi::Error::Success();
  const size_t bytes = project.bytes(pool), both = bytes + output.bytes(pool);
  if (adapters.there()) {
    if (ffi::Error error = adapters.init(rows); error.failure()) return error;
    const float* input = normed == nullptr ? x.typed_data() : normed;
    for (size_t i = 0; i < 4; ++i) {
      ffi::Error error = i < 3 ? adapters.add(input, size, to[i], sizes[i]) : adapters.add(attended, q_size, to[i], sizes[i]);
      if (error.failure()) return error;
    }
  }
  char* shared = thread_memory<3>(both + adapters.phases().bytes());
  adapters.phases().place(shared + both);
  const auto rotate = [&](int token) {
    const float *of_cos = cos.typed_data() + static_cast<size_t>(token) * half;
    const float *of_sin = sin.typed_data() + static_cast<size_t>(token) * half;
    kernels.rotate({heads, head_dim, half, interleaved, of_cos, of_sin, *of_q}, q + static_cast<size_t>(token) * q_size);
    kernels.rotate({kv_heads, head_dim, half, interleaved, of_cos, of_sin, *of_k}, k + static_cast<size_t>(token) * kv_size);
  };
  std::vector<Phase> phases;
  Fill fill = fill_normed(kernels, *first, x.typed_data(), size);
  if (adapters.there() && fill != nullptr) {  // adapters read the normed rows too
    phases.push_back(each_row(rows, [fill, normed, size](int begin, int end) { fill(begin, end, normed + static_cast<size_t>(begin) * size); }));
    fill = nullptr;
  }
  project.append(shared, fill, phases);
  if (adapters.there()) adapters.phases().append(0, 3, phases);
  attention.append(rotate, threads_of(pool), phases);
  output.append(shared + bytes, nullptr, phases);
  if (adapters.there()) adapters.phases().append(3, 4, phases);
  if (adapters.there() && !adds_normed) phases.push_back(add_rows(x.typed_data(), projected, out->typed_data(), rows, size, adds));
  if (adds_normed) phases.push_back(add_normed(kernels, *last, x.typed_data(), projected, out->typed_data(), rows, size));
  run_phases(pool, std::move(phases));
  return ffi::Error::Success();
}

}  // namespace

#pragma GCC visibility push(default)

XLA_FFI_DEFINE_HANDLER_SYMBOL(llmjax_mlp, mlp_handler,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Floats>()    // x
                                  .Arg<Floats>()    // before, as all norms empty for none
                                  .Arg<Floats>()    // after
                                  .Arg<ffi::Buffer<ffi::S32>>()  // rows in use, empty for all
                                  .RemainingArgs()  // see MatrixArguments: gate, up, down; or up, down; see AdaptersOfCall
                                  .Ret<Floats>()    // out
                                  .Ret<Floats>()    // scratch
                                  .Attr<ffi::Span<const float>>("norms")
                                  .Attr<ffi::Span<const int32_t>>("matrices")
                                  .Attr<ffi::Span<const float>>("levels")
                                  .Attr<int32_t>("inner")
                                  .Attr<int32_t>("activation")
                                  .Attr<bool>("residual")
                                  .Attr<bool>("decode"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(llmjax_attention_block, attention_block_handler,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Floats>()                 // x
                                  .Arg<Floats>()                 // before
                                  .Arg<Floats>()                 // q_norm
                                  .Arg<Floats>()                 // k_norm
                                  .Arg<Floats>()                 // after
                                  .Arg<Floats>()                 // cos
                                  .Arg<Floats>()                 // sin
                                  .Arg<ffi::AnyBuffer>()         // pages
                                  .Arg<Floats>()                 // calibration
                                  .Arg<ffi::Buffer<ffi::S32>>()  // query_start
                                  .Arg<ffi::Buffer<ffi::S32>>()  // kv_len
                                  .Arg<ffi::Buffer<ffi::S32>>()  // page_table
                                  .Arg<ffi::Buffer<ffi::S32>>()  // slots
                                  .Arg<ffi::BufferR0<ffi::S32>>()  // first page
                                  .Arg<Floats>()                 // sinks
                                  .RemainingArgs()               // see MatrixArguments: q, k, v, o; and AdaptersOfCall
                                  .Ret<Floats>()                 // out
                                  .Ret<ffi::AnyBuffer>()         // pages
                                  .Ret<Floats>()                 // scratch
                                  .Attr<ffi::Span<const float>>("norms")
                                  .Attr<ffi::Span<const int32_t>>("matrices")
                                  .Attr<ffi::Span<const float>>("levels")
                                  .Attr<int32_t>("heads")
                                  .Attr<bool>("interleaved")
                                  .Attr<bool>("residual")
                                  .Attr<float>("scale")
                                  .Attr<float>("softcap")
                                  .Attr<int32_t>("window")
                                  .Attr<bool>("causal")
                                  .Attr<int32_t>("cache_type")
                                  .Attr<int32_t>("page_size")
                                  .Attr<bool>("token_scales")
                                  .Attr<bool>("decode")
                                  .Attr<bool>("verify"));

#pragma GCC visibility pop

}  // namespace llmjax
