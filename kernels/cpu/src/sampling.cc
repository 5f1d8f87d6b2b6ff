// Tokens from rows of logits, and whether they are numbers (contracts: kernels/argmax.py, kernels/finite.py,
// llmjax/sampling/draw.py, llmjax/sampling/sampler.py).

#include "buffers.h"
#include "kernels.h"
#include "parallel.h"
#include "row_edits.h"

namespace llmjax {
namespace {

namespace ffi = xla::ffi;
using Floats = ffi::Buffer<ffi::F32>;
using Tokens = ffi::Result<ffi::Buffer<ffi::S32>>;

constexpr int kPadding = 48;  // floats
constexpr int kMostUncounted = 64;

bool are_rows(const Floats& x, Tokens& out) {
  const auto dims = x.dimensions();
  return dims.size() == 2 && dims[1] >= 1 && dims[1] < INT32_MAX - kPadding && has_shape(*out, {dims[0]});
}

ffi::Error argmax_handler(ffi::ThreadPool pool, Floats x, Tokens out) {
  if (!are_rows(x, out)) return invalid("argmax: shapes do not fit each other");
  const RowKernels& kernels = find_row_kernels();
  const size_t rows = x.dimensions()[0];
  const int size = static_cast<int>(x.dimensions()[1]);
  const float* from = x.typed_data();
  int32_t* found = out->typed_data();
  parallel_for(pool, rows, Work::kSampling, [=, &kernels](size_t i) { found[i] = kernels.argmax(from + i * size, size); });
  return ffi::Error::Success();
}

ffi::Error finite_handler(ffi::ThreadPool pool, Floats x, ffi::Result<ffi::Buffer<ffi::PRED>> out) {
  const auto dims = x.dimensions();
  if (dims.size() != 2 || dims[1] >= INT32_MAX || !has_shape(*out, {dims[0]})) {
    return invalid("finite: shapes do not fit each other");
  }
  const RowKernels& kernels = find_row_kernels();
  const int size = static_cast<int>(dims[1]);
  const float* from = x.typed_data();
  bool* found = out->typed_data();
  parallel_for(pool, static_cast<size_t>(dims[0]), Work::kSampling,
               [=, &kernels](size_t i) { found[i] = kernels.finite(from + i * size, size); });
  return ffi::Error::Success();
}

// What a call edits. Rows without an entry in `which` are left alone; R rows, S slots, V tokens, M bans.
struct Edits {
  ffi::Buffer<ffi::PRED> which;   // [R, 3]: bias, bans, penalties
  ffi::Buffer<ffi::S32> slot;     // [R]: where the rest is to be found
  ffi::Buffer<ffi::S32> last;     // [R]: the token before
  Floats penalties;               // [R, 3]: repetition, frequency, presence
  ffi::Buffer<ffi::S32> mask;     // [R, ceil(V / 32)], or [R, 0] for none
  ffi::Buffer<ffi::S32> uncounted;  // [R, K]
  Floats bias;                    // [S, V]
  ffi::Buffer<ffi::S32> ban_previous, ban_token;  // [S, M]
  ffi::Buffer<ffi::U16> output_count;  // [S, V]
  ffi::Buffer<ffi::PRED> prompt_seen;  // [S, V]

  bool fit(int64_t rows, int64_t size) const {
    const auto slots = bias.dimensions(), bans = ban_token.dimensions(), more = uncounted.dimensions();
    if (slots.size() != 2 || bans.size() != 2 || more.size() != 2 || mask.dimensions().size() != 2) return false;
    const int64_t words = mask.dimensions()[1];
    return has_shape(which, {rows, 3}) && has_shape(slot, {rows}) && has_shape(last, {rows}) &&
           has_shape(penalties, {rows, 3}) && has_shape(mask, {rows, words}) && (words == 0 || words == (size + 31) / 32) &&
           more[0] == rows && more[1] <= kMostUncounted && slots[1] == size && bans[0] == slots[0] &&
           has_shape(ban_previous, {bans[0], bans[1]}) && has_shape(output_count, {slots[0], size}) &&
           has_shape(prompt_seen, {slots[0], size});
  }

  // Of a row; false: there are none.
  bool of(size_t row, size_t size, RowEdits& found) const {
    found = RowEdits{};
    const size_t words = mask.dimensions()[1];
    if (words > 0) found.mask = reinterpret_cast<const uint32_t*>(mask.typed_data()) + row * words;
    const int64_t at = slot.typed_data()[row];
    if (at < 0 || at >= bias.dimensions()[0]) return found.mask != nullptr;  // a row of padding has no slot
    const bool* wanted = which.typed_data() + 3 * row;
    if (wanted[0]) found.bias = bias.typed_data() + at * size;
    if (wanted[1]) {
      found.num_bans = static_cast<int>(ban_token.dimensions()[1]);
      found.ban_previous = ban_previous.typed_data() + at * found.num_bans;
      found.ban_token = ban_token.typed_data() + at * found.num_bans;
      found.last_token = last.typed_data()[row];
    }
    if (wanted[2]) {
      const float* own = penalties.typed_data() + 3 * row;
      found.repetition = own[0], found.frequency = own[1], found.presence = own[2];
      found.output_count = output_count.typed_data() + at * size;
      found.prompt_seen = prompt_seen.typed_data() + at * size;
      found.num_uncounted = static_cast<int>(uncounted.dimensions()[1]);
      found.uncounted = uncounted.typed_data() + row * found.num_uncounted;
    }
    return found.mask != nullptr || wanted[0] || wanted[1] || wanted[2];
  }
};

ffi::Error sample_handler(ffi::ThreadPool pool, Floats x, ffi::Buffer<ffi::PRED> samples, ffi::Buffer<ffi::U32> keys,
                          Floats temperature, Floats min_p, ffi::Buffer<ffi::S32> top_k, Floats top_p,
                          ffi::Buffer<ffi::PRED> which, ffi::Buffer<ffi::S32> slot, ffi::Buffer<ffi::S32> last,
                          Floats penalties, ffi::Buffer<ffi::S32> mask, ffi::Buffer<ffi::S32> uncounted, Floats bias,
                          ffi::Buffer<ffi::S32> ban_previous, ffi::Buffer<ffi::S32> ban_token,
                          ffi::Buffer<ffi::U16> output_count, ffi::Buffer<ffi::PRED> prompt_seen, Tokens out) {
  if (!are_rows(x, out)) return invalid("sample: shapes do not fit each other");
  const int64_t rows = x.dimensions()[0];
  const int size = static_cast<int>(x.dimensions()[1]);
  const Edits edits{which, slot, last, penalties, mask, uncounted, bias, ban_previous, ban_token, output_count, prompt_seen};
  if (!has_shape(samples, {rows}) || !has_shape(keys, {rows, 2}) || !has_shape(temperature, {rows}) ||
      !has_shape(min_p, {rows}) || !has_shape(top_k, {rows}) || !has_shape(top_p, {rows}) || !edits.fit(rows, size)) {
    return invalid("sample: shapes do not fit each other");
  }
  const RowKernels& kernels = find_row_kernels();
  // A row is edited where it then is sampled, in memory of a thread: a copy of all logits would be written and read back.
  const size_t padded = static_cast<size_t>(size) + kPadding;
  parallel_for(pool, static_cast<size_t>(rows), Work::kSampling, [&](size_t i) {
    int32_t& token = out->typed_data()[i] = 0;
    if (!samples.typed_data()[i]) return;
    float* workspace = reinterpret_cast<float*>(thread_memory<5>((4 * padded) * sizeof(float)));
    const float* own = x.typed_data() + i * size;
    RowEdits wanted;
    if (edits.of(i, static_cast<size_t>(size), wanted)) {
      float* edited = workspace + (3 * padded + 15) / 16 * 16;
      edit(wanted, own, edited, size);
      own = edited;
    }
    const uint32_t* key = keys.typed_data() + 2 * i;
    token = kernels.sample({own, size, {key[0], key[1]}, temperature.typed_data()[i], top_p.typed_data()[i],
                             min_p.typed_data()[i], top_k.typed_data()[i]},
                            workspace);
  });
  return ffi::Error::Success();
}

}  // namespace

#pragma GCC visibility push(default)

XLA_FFI_DEFINE_HANDLER_SYMBOL(llmjax_argmax, argmax_handler,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Floats>()                 // x [R, V]
                                  .Ret<ffi::Buffer<ffi::S32>>());  // [R]

XLA_FFI_DEFINE_HANDLER_SYMBOL(llmjax_finite, finite_handler,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Floats>()                  // x [R, V]
                                  .Ret<ffi::Buffer<ffi::PRED>>());  // [R]

XLA_FFI_DEFINE_HANDLER_SYMBOL(llmjax_sample, sample_handler,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Floats>()                  // x [R, V]
                                  .Arg<ffi::Buffer<ffi::PRED>>()  // samples [R]
                                  .Arg<ffi::Buffer<ffi::U32>>()   // keys [R, 2]
                                  .Arg<Floats>()                  // temperature [R]
                                  .Arg<Floats>()                  // min_p [R]
                                  .Arg<ffi::Buffer<ffi::S32>>()   // top_k [R]
                                  .Arg<Floats>()                  // top_p [R]
                                  .Arg<ffi::Buffer<ffi::PRED>>()  // see Edits from here on
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<Floats>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<Floats>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::U16>>()
                                  .Arg<ffi::Buffer<ffi::PRED>>()
                                  .Ret<ffi::Buffer<ffi::S32>>());  // [R]

#pragma GCC visibility pop

}  // namespace llmjax
