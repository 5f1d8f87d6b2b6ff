// A layer of an encoder (contract: kernels/encoder_layer.py) as phases of one call: all rows on all threads.

#include <deque>

#include "huge_pages.h"
#include "segments.h"
#include "sublayers.h"

namespace llmjax {
namespace {

namespace ffi = xla::ffi;

constexpr size_t kNorms = 4, kNormNumbers = 3;  // before attention, before the MLP, of queries and of keys
enum class Pairs : int { kHalf, kQuarter, kAdjacent, kNumber };  // which entries of a head are turned together

// Norm i of a call, whose rows have `size` entries; weight and bias are two of the arguments after `weights`, and `settings` has eps,
// plus_one and centered of each.
ffi::ErrorOr<Norm> encoder_norm(const ffi::RemainingArgs& arguments, size_t matrices, ffi::Span<const float> settings, size_t i, int64_t size) {
  const auto weight = arguments.get<Floats>(2 * matrices + 2 * i), bias = arguments.get<Floats>(2 * matrices + 2 * i + 1);
  if (!weight.has_value()) return ffi::Unexpected(weight.error());
  if (!bias.has_value()) return ffi::Unexpected(bias.error());
  for (const auto* one : {&weight, &bias}) {
    if ((*one)->element_count() != 0 && !has_shape(**one, {size})) return ffi::Unexpected(invalid("encoder layer: a norm does not fit"));
  }
  const float* numbers = settings.begin() + kNormNumbers * i;
  const auto data = [](const Floats& of) { return of.element_count() == 0 ? nullptr : of.typed_data(); };
  return Norm{data(*weight), numbers[0], numbers[1] != 0, numbers[2] != 0, data(*bias)};
}

// What is done to queries, or keys, before they meet.
struct Turning {
  int heads, head_dim;
  Pairs pairs;
  const float *cos, *sin;  // [rows, head_dim / 2], or null
  Norm norm;
  bool whole;  // the norm is of all heads as one vector

  bool any() const { return cos != nullptr || norm.weight != nullptr; }
  void operator()(const RowKernels& kernels, int row, uint16_t* x) const {
    float* const wide = reinterpret_cast<float*>(thread_memory<5>(sizeof(float) * heads * head_dim));
    kernels.widen(x, wide, heads * head_dim);
    (*this)(kernels, row, wide);
    kernels.round(wide, x, heads * head_dim);
  }
  void operator()(const RowKernels& kernels, int row, float* x) const {
    const int size = heads * head_dim, half = cos == nullptr ? 0 : head_dim / 2;
    if (whole) kernels.norm_rows(norm, x, nullptr, x, size, 0, 1);
    const Norm of_head = whole ? Norm{} : norm;
    const float *by_cos = cos + static_cast<size_t>(row) * half, *by_sin = sin + static_cast<size_t>(row) * half;
    if (pairs != Pairs::kQuarter || half == 0) return kernels.rotate({heads, head_dim, half, pairs == Pairs::kAdjacent, by_cos, by_sin, of_head}, x);
    if (of_head.weight != nullptr) kernels.rotate({heads, head_dim, 0, false, nullptr, nullptr, of_head}, x);
    for (int part = 0; part < 2 * heads; ++part) {  // halves of heads, each with angles of its own
      const int first = part % 2 * (half / 2);
      kernels.rotate({1, half, half / 2, false, by_cos + first, by_sin + first, Norm{}}, x + static_cast<size_t>(part) * half);
    }
  }
};

// y = x + o(attention(turn(q(n)), turn(k(n)), v(n))), n = before(x); out = y + down(activation(gate(m)) * up(m)), m = second(y), or
// without gate activation(up(m)). The MLP takes some rows after the others, so that what lies between its products stays in caches.
ffi::Error encoder_layer_handler(ffi::ThreadPool pool, Floats x, Floats cos, Floats sin, ffi::Buffer<ffi::S32> segments,
                                 ffi::RemainingArgs weights, ffi::Result<Floats> out, ffi::Result<Floats> scratch,
                                 ffi::Result<ffi::AnyBuffer> room, ffi::Span<const float> norms, ffi::Span<const int32_t> matrices,
                                 ffi::Span<const float> levels, int32_t heads, int32_t head_dim, int32_t inner, int32_t rows_of_block,
                                 int32_t activation, int32_t pairs, bool whole, float scale) {
  const auto dims = x.dimensions();
  const bool gated = weights.size() == 2 * (7 + kNorms), turns = cos.element_count() != 0;
  const size_t count = gated ? 7 : 6;
  if (dims.size() != 2 || weights.size() != 2 * (count + kNorms) || norms.size() != kNorms * kNormNumbers || heads < 1 || head_dim < 1 ||
      inner < 1 || rows_of_block < 1 || activation < 0 || activation >= static_cast<int>(Activation::kNumber) || pairs < 0 ||
      pairs >= static_cast<int>(Pairs::kNumber) || !has_shape(*out, {dims[0], dims[1]}) ||
      (turns && (head_dim % 4 != 0 || !has_shape(cos, {dims[0], head_dim / 2}) || !has_shape(sin, {dims[0], head_dim / 2})))) {
    return invalid("encoder layer: arguments do not fit each other");
  }
  const int tokens = static_cast<int>(dims[0]), size = static_cast<int>(dims[1]), wide = heads * head_dim;
  const int64_t of_norm = whole ? wide : head_dim;
  const auto first = encoder_norm(weights, count, norms, 0, size), second = encoder_norm(weights, count, norms, 1, size);
  const auto of_q = encoder_norm(weights, count, norms, 2, of_norm), of_k = encoder_norm(weights, count, norms, 3, of_norm);
  for (const auto* norm : {&first, &second, &of_q, &of_k}) {
    if (!norm->has_value()) return norm->error();
  }
  const RowKernels& kernels = find_row_kernels();
  const int block = rows_of_block < tokens ? rows_of_block : tokens;
  Scratch memory(scratch, tokens);
  float *normed = memory.take(size), *q = memory.take(wide), *k = memory.take(wide), *v = memory.take(wide), *attended = memory.take(wide);
  Scratch rest = memory.with_rows(block);
  float *y = rest.take(size), *mixed = rest.take(wide), *gate = rest.take(inner), *up = gated ? rest.take(inner) : nullptr;
  if (!rest.fits()) return invalid("encoder layer: too little scratch");
  prefer_huge_pages(scratch->untyped_data(), scratch->size_bytes());
  prefer_huge_pages(out->untyped_data(), out->size_bytes());

  ffi::Error error = ffi::Error::Success();
  const auto add = [&](Products& products, size_t i, int size_out, float* to, const float* residual = nullptr) {
    const auto matrix = matrix_arguments(weights, i, matrices, levels);
    if (error.success()) error = matrix.has_value() ? products.add(*matrix, size_out, to, residual) : matrix.error();
  };
  SegmentAttention attention{};
  error = attention.init({tokens, heads, head_dim, Type::kF32, q, k, v, attended}, segments, *room, scale);
  if (error.failure()) return error;
  const int rows = attention.used();
  clear_padding(out->typed_data(), Rows(rows), tokens, size);
  if (rows == 0) return ffi::Error::Success();

  std::deque<Products> all;  // stay where they are
  Products& project = all.emplace_back(Rows(rows, tokens), size, normed);
  add(project, 0, wide, q), add(project, 1, wide, k), add(project, 2, wide, v);
  if (error.failure()) return error;
  // As bf16 they take half the way through caches.
  const auto narrow = [](float* x) { return reinterpret_cast<uint16_t*>(x); };
  const bool rounds = attention.narrow() && project.round_into({narrow(q), narrow(k), narrow(v)});
  if (rounds) attention.take(Type::kBf16);
  struct Block {
    int first;
    Products *output, *raise, *lower;
    size_t of_output, of_raise;  // bytes
  };
  std::vector<Block> blocks;
  const int parts = (rows + block - 1) / block;
  for (int part = 0; part < parts && error.success(); ++part) {
    const int begin = static_cast<int>(static_cast<int64_t>(rows) * part / parts), end = static_cast<int>(static_cast<int64_t>(rows) * (part + 1) / parts);
    const size_t at = static_cast<size_t>(begin) * size;
    const Rows of_block(end - begin, tokens);
    Products& output = all.emplace_back(of_block, wide, rounds ? mixed : attended + static_cast<size_t>(begin) * wide);
    Products &raise = all.emplace_back(of_block, size, normed), &lower = all.emplace_back(of_block, inner, gate);
    add(output, 3, size, y, x.typed_data() + at);
    add(raise, 4, inner, gate);
    if (gated) add(raise, 5, inner, up);
    add(lower, count - 1, size, out->typed_data() + at, y);
    if (error.success()) raise.gate_into(lower, static_cast<Activation>(activation), pool);
    blocks.push_back({begin, &output, &raise, &lower, 0, 0});
  }
  if (error.failure()) return error;
  size_t most = project.bytes(pool);
  for (Block& each : blocks) {
    each.of_output = each.output->bytes(pool), each.of_raise = each.raise->bytes(pool);
    const size_t needed = each.of_output + each.of_raise + each.lower->bytes(pool);
    most = needed > most ? needed : most;
  }
  char* const shared = thread_memory<3>(most);

  std::vector<Phase> phases;
  project.append(shared, fill_normed(kernels, *first, x.typed_data(), size), phases);
  const float *of_cos = turns ? cos.typed_data() : nullptr, *of_sin = turns ? sin.typed_data() : nullptr;
  const Turning turn_q{heads, head_dim, static_cast<Pairs>(pairs), of_cos, of_sin, *of_q, whole};
  const Turning turn_k{heads, head_dim, static_cast<Pairs>(pairs), of_cos, of_sin, *of_k, whole};
  if (turn_q.any() || turn_k.any()) {
    phases.push_back(each_row(rows, [&kernels, turn_q, turn_k, q, k, wide, rounds, narrow](int begin, int end) {
      for (int row = begin; row < end; ++row) {
        const size_t at = static_cast<size_t>(row) * wide;
        if (rounds) {
          turn_q(kernels, row, narrow(q) + at), turn_k(kernels, row, narrow(k) + at);
        } else {
          turn_q(kernels, row, q + at), turn_k(kernels, row, k + at);
        }
      }
    }));
  }
  attention.append(phases);
  const auto fill_gated = [&kernels, gate, up, inner, activation](int begin, int end, float* to) {
    const size_t at = static_cast<size_t>(begin) * inner;
    kernels.gate_rows(static_cast<Activation>(activation), gate + at, up == nullptr ? nullptr : up + at, to, inner, 0, end - begin);
  };
  for (const Block& each : blocks) {
    Fill widened = nullptr;
    if (rounds) {
      const uint16_t* const from = narrow(attended) + static_cast<size_t>(each.first) * wide;
      widened = [&kernels, from, wide](int begin, int end, float* to) {
        kernels.widen(from + static_cast<size_t>(begin) * wide, to, (end - begin) * wide);
      };
    }
    each.output->append(shared, std::move(widened), phases);
    each.raise->append(shared + each.of_output, fill_normed(kernels, *second, y, size), phases);
    each.lower->append(shared + each.of_output + each.of_raise, fill_gated, phases);
  }
  run_phases(pool, std::move(phases));
  return ffi::Error::Success();
}

}  // namespace

#pragma GCC visibility push(default)

XLA_FFI_DEFINE_HANDLER_SYMBOL(llmjax_encoder_layer, encoder_layer_handler,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Floats>()                 // x
                                  .Arg<Floats>()                 // cos, empty for none
                                  .Arg<Floats>()                 // sin
                                  .Arg<ffi::Buffer<ffi::S32>>()  // segments
                                  .RemainingArgs()               // see MatrixArguments: q, k, v, o, gate, up, down, or without gate; norms
                                  .Ret<Floats>()                 // out
                                  .Ret<Floats>()                 // scratch
                                  .Ret<ffi::AnyBuffer>()         // room for keys and values
                                  .Attr<ffi::Span<const float>>("norms")
                                  .Attr<ffi::Span<const int32_t>>("matrices")
                                  .Attr<ffi::Span<const float>>("levels")
                                  .Attr<int32_t>("heads")
                                  .Attr<int32_t>("head_dim")
                                  .Attr<int32_t>("inner")
                                  .Attr<int32_t>("rows_of_block")
                                  .Attr<int32_t>("activation")
                                  .Attr<int32_t>("pairs")
                                  .Attr<bool>("whole")
                                  .Attr<float>("scale"));

#pragma GCC visibility pop

}  // namespace llmjax
