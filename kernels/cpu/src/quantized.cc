// Products with quantised matrices (contract: kernels/quantized_linear.py; layout: kernels/qtensor.py). Several matrices
// may share their rows of x, which are then brought into the form that products take once.

#include "quantized.h"

#include <cstring>
#include <vector>

#include "buffers.h"
#include "parallel.h"

namespace llmjax {
namespace {

namespace ffi = xla::ffi;

constexpr int kNumbersOfFormat = 21;        // of each matrix in the attribute `formats`, see read_format
constexpr int64_t kBytesOfTask = 1 << 14;   // of words, at least
constexpr int64_t kBytesOfPanel = 1 << 20;  // of dequantised weights that stay in a core's cache

bool read_field(const int32_t* numbers, int64_t expected, bool optional, int num_words, NumberField& field) {
  if (numbers[0] < 0 || numbers[0] > static_cast<int>(Number::kE8M0)) return false;
  field = {static_cast<Number>(numbers[0]), numbers[1], numbers[2]};
  if (field.count == 0 && optional) return true;
  const int64_t words = (static_cast<int64_t>(field.count) * bits_of(field.number) + 31) / 32;
  return field.count == expected && field.start >= 0 && field.start + words <= num_words;
}

// The largest power of two below 128 by which levels become integers of 8 bits, or else 0.
float level_factor(const float* levels) {
  for (float factor = 1; factor < 128; factor *= 2) {
    bool whole = true;
    for (int i = 0; i < 16 && whole; ++i) {
      const float level = levels[i] * factor;
      whole = level >= -128 && level <= 127 && level == static_cast<float>(static_cast<int>(level));
    }
    if (whole) return factor;
  }
  return 0;
}

// Numbers: size_in, num_words, bits, kind, levels, group_size, super_size, then of scales, zeros, minima and super
// scales: type, first word, count; of super minima (as super scales) the first word and count.
bool read_format(const int32_t* numbers, const float* levels, QuantizedMatrix& w) {
  w.size_in = numbers[0], w.num_words = numbers[1], w.bits = numbers[2];
  w.kind = static_cast<CodeKind>(numbers[3]);
  w.num_levels = numbers[4], w.group_size = numbers[5], w.super_size = numbers[6];
  if (w.size_in < 1 || w.bits < 1 || w.bits > 8 || w.bits == 7 || numbers[3] < 0 || numbers[3] > 3 ||
      (w.bits == 8) == (w.kind == CodeKind::kUint) || w.num_levels < 0 || w.num_levels > 16 ||
      (w.num_levels != 0 && w.bits > 4) || w.group_size < 16 || w.group_size % 16 != 0 || w.super_size < 0 ||
      w.super_size % w.group_size != 0) {
    return false;
  }
  std::memcpy(w.levels, levels, sizeof(w.levels));
  w.level_factor = w.num_levels == 0 ? 1 : level_factor(levels);
  const int64_t groups = w.groups(), supers = w.super_size == 0 ? 0 : (w.size_in + w.super_size - 1) / w.super_size;
  const int32_t super_minima[] = {numbers[16], numbers[19], numbers[20]};
  return static_cast<int64_t>(w.chunks()) * w.bits <= w.num_words &&
         read_field(numbers + 7, groups, false, w.num_words, w.scales) &&
         read_field(numbers + 10, groups, true, w.num_words, w.zeros) &&
         read_field(numbers + 13, groups, true, w.num_words, w.minima) &&
         read_field(numbers + 16, supers, true, w.num_words, w.super_scales) &&
         read_field(super_minima, supers, true, w.num_words, w.super_minima);
}

struct Product {
  QuantizedMatrix matrix;
  Method method;
  int tiles_of_task;
  int64_t first_task;
};

int tiles_of_task(const QuantizedMatrix& w, Method method, int64_t threads) {
  const int64_t words = static_cast<int64_t>(w.num_words) * kTileRows * 4;
  int64_t tiles = 1 + kBytesOfTask / words;
  if (method == Method::kBf16Tiles) {  // a panel serves all rows, and rows of x serve all of a panel
    const int64_t of_panel = kBytesOfPanel / (static_cast<int64_t>(w.chunks()) * kChunk * kTileRows * 2);
    const int64_t of_thread = w.tiles() / (4 * threads);
    tiles = of_panel < of_thread ? of_panel : of_thread;
    tiles = tiles < 2 ? 2 : tiles > 8 ? 8 : tiles / 2 * 2;
  }
  return static_cast<int>(tiles);
}

// Gives out pieces of one allocation; a first pass with no memory only counts.
class Arena {
 public:
  explicit Arena(char* memory) : memory_(memory) {}
  template <class T>
  T* take(bool wanted, size_t count) {
    if (!wanted) return nullptr;
    T* piece = memory_ == nullptr ? nullptr : reinterpret_cast<T*>(memory_ + used_);
    used_ += (count * sizeof(T) + 63) / 64 * 64;
    return piece;
  }
  size_t used() const { return used_; }

 private:
  char* memory_;
  size_t used_ = 0;
};

size_t place(QuantizedInput& in, const bool* methods, char* memory) {
  const size_t count = in.chunk_rows();
  const bool floats = methods[static_cast<int>(Method::kFloatVectors)];
  const bool bytes = methods[static_cast<int>(Method::kInt8Vectors)] || methods[static_cast<int>(Method::kInt8Tiles)];
  Arena arena(memory);
  in.floats = arena.take<float>(floats, count * kChunk);
  in.float_sums = arena.take<float>(floats, count * 2);
  in.bytes = arena.take<int8_t>(bytes, count * kChunk);
  in.byte_scales = arena.take<float>(bytes, count);
  in.byte_sums = arena.take<float>(bytes, count * 3);
  in.bf16 = arena.take<uint16_t>(methods[static_cast<int>(Method::kBf16Tiles)], count * kChunk);
  return arena.used();
}

void multiply(ffi::ThreadPool& pool, const QuantizedKernels& kernels, QuantizedInput in, std::vector<Product>& products) {
  const int64_t threads = pool.num_threads() > 0 ? pool.num_threads() : 1;
  bool methods[kMethods] = {};
  int64_t tasks = 0;
  size_t workspace = 0;
  in.round_columns = 2 * kChunk;
  for (Product& product : products) {
    const QuantizedMatrix& w = product.matrix;
    methods[static_cast<int>(product.method)] = true;
    if (w.group_size % (2 * kChunk) != 0) in.round_columns = kChunk;
    product.tiles_of_task = tiles_of_task(w, product.method, threads);
    product.first_task = tasks;
    tasks += (w.tiles() + product.tiles_of_task - 1) / product.tiles_of_task;
    const size_t needed = kernels.workspace(w, product.method, product.tiles_of_task);
    workspace = needed > workspace ? needed : workspace;
  }
  place(in, methods, thread_memory<3>(place(in, methods, nullptr)));
  parallel_for(pool, in.blocks(), [&](size_t i) { kernels.prepare(in, static_cast<int>(i)); });
  parallel_for(pool, tasks, [&](size_t i) {
    size_t which = products.size() - 1;
    while (products[which].first_task > static_cast<int64_t>(i)) --which;
    const Product& product = products[which];
    const int begin = static_cast<int>(i - product.first_task) * product.tiles_of_task;
    const int end = begin + product.tiles_of_task, tiles = product.matrix.tiles();
    kernels.multiply(product.matrix, in, product.method, begin, end < tiles ? end : tiles, thread_memory<4>(workspace));
  });
}

ffi::Error quantized_handler(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::RemainingArgs arguments,
                             ffi::RemainingRets results, ffi::Span<const int32_t> formats,
                             ffi::Span<const float> levels, bool int8, bool bf16, int32_t method, int32_t isa) {
  const size_t count = results.size();
  const auto dims = x.dimensions();
  if (dims.size() != 2 || arguments.size() != 2 * count || formats.size() != kNumbersOfFormat * count ||
      levels.size() != 17 * count || method < -1 || method >= kMethods) {
    return invalid("quantised linear: numbers of arguments do not fit each other");
  }
  const QuantizedKernels* kernels = find_quantized_kernels(isa);
  if (kernels == nullptr) return invalid("quantised linear: this machine lacks the instruction set");
  const int rows = static_cast<int>(dims[0]);
  std::vector<Product> products(count);
  for (size_t i = 0; i < count; ++i) {
    QuantizedMatrix& w = products[i].matrix;
    const auto words = arguments.get<ffi::Buffer<ffi::U32>>(2 * i);
    const auto bias = arguments.get<ffi::Buffer<ffi::F32>>(2 * i + 1);
    auto y = results.get<ffi::Buffer<ffi::F32>>(i);
    if (!words.has_value()) return words.error();
    if (!bias.has_value()) return bias.error();
    if (!y.has_value()) return y.error();
    if (!read_format(formats.begin() + kNumbersOfFormat * i, levels.begin() + 17 * i, w)) {
      return invalid("quantised linear: impossible format of a row");
    }
    const auto outer = (*y)->dimensions();
    w.size_out = outer.size() == 2 ? static_cast<int>(outer[1]) : 0;
    if (w.size_in != dims[1] || outer.size() != 2 || outer[0] != rows || w.size_out < 1 ||
        !has_shape(*words, {w.tiles(), w.num_words, kTileRows}) ||
        (bias->element_count() != 0 && !has_shape(*bias, {w.size_out}))) {
      return invalid("quantised linear: shapes do not fit each other");
    }
    w.zero = levels.begin()[17 * i + 16];
    w.words = words->typed_data();
    w.bias = bias->element_count() == 0 ? nullptr : bias->typed_data();
    w.y = (*y)->typed_data();
    products[i].method = method < 0 ? kernels->choose(w, rows, int8, bf16) : static_cast<Method>(method);
    if (!kernels->takes(w, products[i].method)) {
      return invalid("quantised linear: the method does not take these codes or this instruction set");
    }
  }
  if (rows == 0) return ffi::Error::Success();
  QuantizedInput in{};
  in.rows = rows, in.size_in = static_cast<int>(dims[1]), in.x = x.typed_data();
  in.block = kernels->input_block(rows, products[0].method);
  for (const Product& product : products) {
    const int block = kernels->input_block(rows, product.method);
    in.block = block > in.block ? block : in.block;
  }
  multiply(pool, *kernels, in, products);
  return ffi::Error::Success();
}

}  // namespace

#pragma GCC visibility push(default)

XLA_FFI_DEFINE_HANDLER_SYMBOL(llmjax_quantized_linear, quantized_handler,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()  // x
                                  .RemainingArgs()               // of each matrix: words u32, bias f32 (empty for none)
                                  .RemainingRets()               // of each matrix: y f32
                                  .Attr<ffi::Span<const int32_t>>("formats")
                                  .Attr<ffi::Span<const float>>("levels")  // of each matrix: 16, and the zero point
                                  .Attr<bool>("int8")
                                  .Attr<bool>("bf16")
                                  .Attr<int32_t>("method")  // -1: the fastest
                                  .Attr<int32_t>("isa"));

#pragma GCC visibility pop

}  // namespace llmjax
