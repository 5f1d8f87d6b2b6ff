#include "products.h"

#include <cstring>
#include <utility>

namespace llmjax {
namespace {

namespace ffi = xla::ffi;

constexpr int64_t kBytesOfTask = 1 << 15;       // of words, at least
constexpr int64_t kBytesOfPlainTask = 1 << 16;  // of a plain matrix, at least
constexpr int64_t kBytesOfRows = 1 << 20;       // of x, of a task at most
constexpr int kRowsOfThread = 192;              // with less, threads rather share rows and divide the matrices
constexpr int kMaxExactRows = 16;               // of x that are not rounded to bf16 beside matrices of it
constexpr int kUnit = 32;                       // outputs of plain matrices, rows of tasks: divided no further
constexpr int kPanelUnit = 64;                  // outputs of plain matrices where rows are many: as the widest panels

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

// `numbers` from size_in on, see MatrixArguments.
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

int tiles_of_task(const QuantizedMatrix& w, Method method) {
  if (method == Method::kBf16Tiles || method == Method::kInt8Tiles) return 2;  // which all rows of a task pass by
  if (method == Method::kFloatPanels || method == Method::kBf16Panels || method == Method::kInt16Panels || is_kept(method)) return 4;
  return static_cast<int>(1 + kBytesOfTask / (static_cast<int64_t>(w.num_words) * kTileRows * 4));
}

// Rows that stay in a core's cache while matrices pass by, in parts alike. With many rows each thread keeps to its own,
// from product to product, and dequantizes all of the matrix.
int rows_of_task(const QuantizedInput& in, int64_t bytes_of_number, int64_t threads) {
  const int64_t bytes = in.rows * bytes_of_number * in.size_in;
  const int64_t of_cache = (bytes + kBytesOfRows - 1) / kBytesOfRows;
  const int64_t of_threads = in.rows / kRowsOfThread < threads ? in.rows / kRowsOfThread : threads;
  int64_t parts = of_cache > of_threads ? of_cache : of_threads;
  if (parts < 1) parts = 1;
  return static_cast<int>(((in.rows + parts - 1) / parts + kUnit - 1) / kUnit * kUnit);
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

// Divides memory among the forms of x that methods need; null: only counts.
size_t place(QuantizedInput& in, const QuantizedMethod* const* methods, char* memory) {
  const size_t count = in.chunk_rows();
  const auto used = [&](Method method) { return methods[static_cast<int>(method)] != nullptr; };
  const bool vectors = used(Method::kFloatVectors), bytes = used(Method::kInt8Vectors);
  Arena arena(memory);
  in.floats = arena.take<float>(vectors || used(Method::kKeptFloats), count * kChunk);
  in.float_sums = arena.take<float>(vectors, count * 2);
  in.bytes = arena.take<int8_t>(bytes, count * kChunk);
  in.byte_scales = arena.take<float>(bytes, count);
  in.byte_sums = arena.take<float>(bytes, count * 3);
  in.byte_totals = arena.take<int32_t>(bytes, count * 3);
  const size_t rows = static_cast<size_t>(in.blocks()) * in.block;
  in.outlier_column_counts = arena.take<int32_t>(bytes, in.blocks());
  in.outlier_columns = arena.take<uint32_t>(bytes, rows * in.most_outliers());
  in.outlier_counts = arena.take<int32_t>(bytes, rows);
  in.outliers = arena.take<Outlier>(bytes, rows * in.most_outliers());
  const bool bf16 = used(Method::kBf16Panels) || used(Method::kBf16Tiles) || used(Method::kKeptPairs);
  in.bf16 = arena.take<uint16_t>(bf16, count * kChunk);
  const bool int16 = used(Method::kInt16Panels);
  in.int16 = arena.take<int16_t>(int16, count * kChunk);
  in.int16_scales = arena.take<float>(int16, count);
  in.int16_sums = arena.take<float>(int16, count * 3);
  const bool tiles = used(Method::kInt8Tiles);
  const size_t scales = tiles ? rows * in.spans() : 0;
  in.byte_tiles = arena.take<int8_t>(tiles, rows * in.steps() * kStepColumns);
  in.span_scales = arena.take<float>(tiles, scales);
  in.span_sums = arena.take<float>(tiles, scales);
  return arena.used();
}

// The method that was measured for a number of rows, from the pairs of `MatrixArguments`; -1: none, or one that this
// instruction set or these codes lack.
int measured_method(const QuantizedMatrix& w, const int32_t* choices, int rows) {
  int method = -1;
  for (int i = 0; i < kChoices && choices[2 * i] > 0; ++i) {
    method = choices[2 * i + 1];
    if (rows <= choices[2 * i]) break;
  }
  return method >= 0 && method < kMethods && find_method(w, static_cast<Method>(method)) != nullptr ? method : -1;
}

// A matrix of bf16, as it is or in panels.
QuantizedMatrix plain_matrix(const void* weight, int size_in, int size_out, CodeKind kind) {
  QuantizedMatrix w{};
  w.size_in = w.group_size = size_in, w.size_out = size_out, w.num_words = (size_in + 1) / 2;
  w.bits = 16, w.kind = kind;
  w.words = static_cast<const uint32_t*>(weight);
  return w;
}

bool codes_are_alike(const QuantizedMatrix& a, const QuantizedMatrix& b) {
  return a.bits == b.bits && a.kind == b.kind && a.num_levels == b.num_levels && a.group_size == b.group_size &&
         a.size_in == b.size_in && a.size_out == b.size_out;
}

}  // namespace

ffi::ErrorOr<MatrixArguments> matrix_arguments(const ffi::RemainingArgs& arguments, size_t i,
                                               ffi::Span<const int32_t> matrices, ffi::Span<const float> levels) {
  if (matrices.size() < kMatrixNumbers * (i + 1) || levels.size() < kMatrixLevels * (i + 1)) {
    return ffi::Unexpected(invalid("products: attributes do not fit the matrices"));
  }
  const auto weight = arguments.get<ffi::AnyBuffer>(2 * i);
  const auto bias = arguments.get<ffi::Buffer<ffi::F32>>(2 * i + 1);
  if (!weight.has_value()) return ffi::Unexpected(weight.error());
  if (!bias.has_value()) return ffi::Unexpected(bias.error());
  return MatrixArguments{*weight, *bias, matrices.begin() + kMatrixNumbers * i, levels.begin() + kMatrixLevels * i};
}

ffi::ErrorOr<Rows> rows_in_use(const ffi::Buffer<ffi::DataType::S32>& used, bool decode, int tokens) {
  if (used.element_count() == 0) return Rows(tokens);
  const int count = used.typed_data()[0];
  if (count < 0 || count > tokens) return ffi::Unexpected(invalid("products: more rows in use than there are"));
  return Rows(count, decode ? count : tokens);
}

void clear_padding(float* out, const Rows& rows, int tokens, int size) {
  std::memset(out + static_cast<size_t>(rows.count) * size, 0, static_cast<size_t>(tokens - rows.count) * size * sizeof(float));
}

Products::Products(Rows rows, int size_in, float* x) : program_rows_(rows.program), x_(x) {
  in_.rows = rows.count, in_.size_in = size_in;
  in_.round_columns = 2 * kChunk, in_.outlier = kOutlier;
}

ffi::Error Products::add(const MatrixArguments& matrix, int size_out, float* y, const float* residual) {
  const bool quantized = matrix.weight.element_type() == ffi::DataType::U32;
  if (size_out < 1 || (matrix.bias.element_count() != 0 && !has_shape(matrix.bias, {size_out}))) {
    return invalid("products: shapes do not fit each other");
  }
  return quantized ? add_quantized(matrix, size_out, y, residual) : add_plain(matrix, size_out, y, residual);
}

ffi::Error Products::add_quantized(const MatrixArguments& matrix, int size_out, float* y, const float* residual) {
  Quantized product{};
  QuantizedMatrix& w = product.matrix;
  if (!read_format(matrix.numbers + 3, matrix.levels, w)) return invalid("products: impossible format of a row");
  w.size_out = size_out;
  if (w.size_in != in_.size_in || !has_shape(matrix.weight, {w.tiles(), w.num_words, kTileRows})) {
    return invalid("products: shapes do not fit each other");
  }
  w.zero = matrix.levels[16];
  w.words = static_cast<const uint32_t*>(matrix.weight.untyped_data());
  w.bias = matrix.bias.element_count() == 0 ? nullptr : matrix.bias.typed_data();
  w.residual = residual, w.y = y;
  int method = matrix.numbers[0];
  if (method < -1 || method >= kMethods) return invalid("products: no such method");
  if (method < 0) method = measured_method(w, matrix.numbers + kMatrixNumbers - 2 * kChoices, program_rows_);
  product.method = method < 0 ? choose_method(w, program_rows_, {matrix.numbers[1] != 0, matrix.numbers[2] != 0})
                              : static_cast<Method>(method);
  product.kernels = find_method(w, product.method);
  if (product.kernels == nullptr) return invalid("products: the method does not take these codes or this instruction set");
  if (w.group_size % (2 * kChunk) != 0) in_.round_columns = kChunk;
  if (w.group_size % kChunk != 0) in_.halves = true;
  push(product);
  return ffi::Error::Success();
}

void Products::push(const Quantized& product) {
  methods_[static_cast<int>(product.method)] = product.kernels;
  if (product.kernels->prepare == nullptr) in_.x = x_;
  const int block = input_block(in_.rows, product.method, product.kernels->lanes);
  in_.block = block > in_.block ? block : in_.block;
  quantized_.push_back(product);
}

ffi::Error Products::add_plain(const MatrixArguments& matrix, int size_out, float* y, const float* residual) {
  const auto type = float_type(matrix.weight.element_type());
  if (!type) return invalid("products: unsupported type of a matrix");
  const bool panels = matrix.weight.dimensions().size() != 2;
  const int64_t pairs = 2 * kTileRows;
  if (panels ? *type != Type::kBf16 || !has_shape(matrix.weight, {(size_out + pairs - 1) / pairs, (in_.size_in + kChunk - 1) / kChunk, 2, kTileRows, pairs})
             : !has_shape(matrix.weight, {size_out, in_.size_in})) {
    return invalid("products: shapes do not fit each other");
  }
  const float* bias = matrix.bias.element_count() == 0 ? nullptr : matrix.bias.typed_data();
  if (panels || (*type == Type::kBf16 && program_rows_ > kMaxExactRows && in_.size_in % 2 == 0)) {
    Quantized product{};
    product.matrix = plain_matrix(matrix.weight.untyped_data(), in_.size_in, size_out, panels ? CodeKind::kBf16Panels : CodeKind::kBf16);
    product.matrix.bias = bias, product.matrix.residual = residual, product.matrix.y = y;
    for (Method method : {Method::kBf16Tiles, Method::kKeptPairs, Method::kKeptFloats}) {  // the faster ones first
      product.method = method, product.kernels = find_method(product.matrix, method);
      if (product.kernels == nullptr) continue;
      push(product);
      return ffi::Error::Success();
    }
    if (panels) return invalid("products: this instruction set does not take a matrix in panels");
  }
  Plain product{{in_.rows, in_.size_in, size_out, program_rows_, *type, x_, matrix.weight.untyped_data(), bias, residual, y},
                find_linear_kernels(in_.size_in), plain_bytes_, 0, 0};
  if (product.kernels == nullptr) return invalid("products: the input size is odd");
  plain_bytes_ += (product.kernels->workspace(product.call) + 63) / 64 * 64;
  plain_.push_back(product);
  return ffi::Error::Success();
}

bool Products::round_into(std::initializer_list<uint16_t*> to) {
  if (!plain_.empty() || quantized_.size() != to.size()) return false;
  for (const Quantized& product : quantized_) {
    if (product.method != Method::kBf16Tiles && !is_kept(product.method)) return false;
  }
  for (size_t i = 0; i < to.size(); ++i) quantized_[i].matrix.rounded = to.begin()[i];
  return true;
}

void Products::gate_into(Products& next, Activation activation, const ffi::ThreadPool& pool) {
  next.follows_activation();
  const Method first = quantized_.empty() ? Method::kFloatVectors : quantized_[0].method;
  if (quantized_.size() == 1 && plain_.empty() && (first == Method::kBf16Tiles || is_kept(first)) && next.uses(first) && next.plain_.empty()) {
    activation_ = activation;
    gated_ = &next, next.filled_ = next.prepared_ = true;
    return;
  }
  if (quantized_.size() != 2 || !plain_.empty()) return;
  activation_ = activation;
  gates_ = next.filled_ = true;
  if (next.quantized_.empty() || next.quantized_[0].kernels->multiply_gated == nullptr) return;
  const Method method = next.quantized_[0].method;
  const auto only_such = [method](const Products& products) {
    for (const Quantized& product : products.quantized_) {
      if (product.method != method) return false;
    }
    return products.plain_.empty();
  };
  if (!only_such(*this) || !only_such(next) || !codes_are_alike(quantized_[0].matrix, quantized_[1].matrix)) return;
  if (method == Method::kInt8Tiles && next.in_.spans() < 2 * pool.num_threads()) return;  // a task is a span of it
  gated_ = &next, next.prepared_ = true;
}

size_t Products::bytes(const ffi::ThreadPool& pool) {
  if (pool.num_threads() > 0) threads_ = static_cast<int>(pool.num_threads());
  const bool only_bytes = uses(Method::kInt8Tiles) && !uses(Method::kBf16Tiles);
  rows_of_task_ = rows_of_task(in_, in_.x != nullptr || uses(Method::kKeptFloats) ? sizeof(float) : only_bytes ? 1 : 2, threads_);
  column_tasks_ = 0;
  for (Quantized& product : quantized_) {
    const QuantizedMatrix& w = product.matrix;
    product.tiles_of_task = tiles_of_task(w, product.method);
    if (gates_) product.tiles_of_task += product.tiles_of_task % 2;  // which the other method may need
    if (gated_ != nullptr && gates_) product.tiles_of_task = gated_->uses(Method::kInt8Tiles) ? kSpanColumns / kTileRows : is_kept(product.method) ? 2 : 1;
    const size_t needed = product.kernels->workspace(w, rows_of_task_);
    task_workspace_ = needed > task_workspace_ ? needed : task_workspace_;
    if (gates_ && &product != &quantized_.front()) break;  // it comes with the first
    product.first_task = column_tasks_;
    column_tasks_ += (w.tiles() + product.tiles_of_task - 1) / product.tiles_of_task;
  }
  tasks_ = quantized_tasks_ = column_tasks_ * ((in_.rows + rows_of_task_ - 1) / rows_of_task_);
  for (Plain& product : plain_) {
    const int unit = in_.rows > kTileRows ? kPanelUnit : kUnit;
    const int64_t units = (product.call.size_out + unit - 1) / unit;
    const int64_t bytes_of_output = in_.size_in * static_cast<int64_t>(size_of(product.call.type));
    const int64_t per_task = 1 + kBytesOfPlainTask / (unit * bytes_of_output);
    product.outputs_of_task = per_task * unit;
    product.first_task = tasks_;
    tasks_ += (units + per_task - 1) / per_task;
  }
  if (in_.block == 0) in_.block = kTileRows;
  return plain_bytes_ + place(in_, methods_, nullptr);
}

// Fills rows of x and brings them into the forms that methods take. Where none reads x itself, rows are filled where they
// stay in the cache.
Phase Products::prepare(Fill fill) const {
  const int rows = quantized_.empty() ? in_.rows : in_.blocks() * in_.block, size = in_.size_in;
  int of_task = (rows + 4 * threads_ - 1) / (4 * threads_);
  const bool lines_of_one_row = in_.bytes == nullptr && in_.floats == nullptr && in_.int16 == nullptr && in_.byte_tiles == nullptr;  // else threads would share cache lines
  if (of_task > kTileRows || !lines_of_one_row) of_task = in_.block;
  return {static_cast<size_t>((rows + of_task - 1) / of_task), [this, fill = std::move(fill), rows, size, of_task](size_t i) {
            const int begin = static_cast<int>(i) * of_task, end = begin + of_task < rows ? begin + of_task : rows;
            const int real_end = end < in_.rows ? end : in_.rows;
            float* x = x_ + static_cast<size_t>(begin) * size;
            if (fill != nullptr && begin < real_end) {
              if (plain_.empty() && in_.x == nullptr) x = reinterpret_cast<float*>(thread_memory<5>(sizeof(float) * of_task * size));
              fill(begin, real_end, x);
            }
            for (const QuantizedMethod* method : methods_) {
              if (method != nullptr && method->prepare != nullptr) method->prepare(in_, x, begin, end);
            }
          },
          Work::kRounding};
}

void Products::append(char* memory, Fill fill, std::vector<Phase>& phases) {
  place(in_, methods_, memory + plain_bytes_);
  const bool forms = in_.floats != nullptr || in_.bytes != nullptr || in_.bf16 != nullptr || in_.int16 != nullptr || in_.byte_tiles != nullptr;
  if (filled_) fill = nullptr;
  if (!prepared_ && (fill != nullptr || forms)) phases.push_back(prepare(std::move(fill)));
  if (plain_bytes_ != 0) {
    phases.push_back({plain_.size(), [this, memory](size_t i) {
                        plain_[i].kernels->prepare(plain_[i].call, memory + plain_[i].workspace);
                      },
                      Work::kRounding});
  }
  phases.push_back({static_cast<size_t>(tasks_), [this, memory](size_t i) { run(static_cast<int64_t>(i), memory); }, Work::kProducts});
}

void Products::run(int64_t task, const char* memory) const {
  if (task < quantized_tasks_) return run_quantized(task);
  const Plain* product = &plain_.back();
  while (product->first_task > task) --product;
  const int64_t begin = (task - product->first_task) * product->outputs_of_task, end = begin + product->outputs_of_task;
  const int size = product->call.size_out;
  product->kernels->run(product->call, memory + product->workspace, static_cast<int>(begin),
                           end < size ? static_cast<int>(end) : size);
}

void Products::run_quantized(int64_t task) const {
  int row = 0;
  if (column_tasks_ != quantized_tasks_) row = static_cast<int>(task / column_tasks_) * rows_of_task_, task %= column_tasks_;
  const Quantized* product = gates_ ? &quantized_.front() : &quantized_.back();
  while (product->first_task > task) --product;
  const QuantizedMatrix& w = product->matrix;
  const int begin = static_cast<int>(task - product->first_task) * product->tiles_of_task;
  const int end = begin + product->tiles_of_task < w.tiles() ? begin + product->tiles_of_task : w.tiles();
  char* workspace = thread_memory<4>(task_workspace_);
  if (!gates_ && gated_ == nullptr && column_tasks_ == quantized_tasks_) {  // a copy would take some percent of the time
    return product->kernels->multiply(w, in_, begin, end, workspace);
  }
  const int rows = row + rows_of_task_ < in_.rows ? rows_of_task_ : in_.rows - row;
  const QuantizedInput in = in_.slice(row, rows);
  if (gated_ != nullptr) {
    return product->kernels->multiply_gated(w, quantized_.back().matrix, activation_, in, gated_->in_.slice(row, rows), begin, end, workspace);
  }
  product->kernels->multiply(w.from_row(row), in, begin, end, workspace);
  if (!gates_) return;
  const QuantizedMatrix& factor = quantized_.back().matrix;
  quantized_.back().kernels->multiply(factor.from_row(row), in, begin, end, workspace);
  const int first = begin * kTileRows, last = end * kTileRows < w.size_out ? end * kTileRows : w.size_out;
  const RowKernels& kernels = find_row_kernels();
  for (int i = row; i < row + rows; ++i) {
    const size_t at = static_cast<size_t>(i) * w.size_out + first;
    kernels.gate_rows(activation_, w.y + at, factor.y + at, w.y + at, last - first, 0, 1);
  }
}

}  // namespace llmjax
