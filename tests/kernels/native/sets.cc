// Kernels of each instruction set that this machine has, without XLA, against sums in double precision: for machines that
// are only emulated. Prints the sets' names.

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "kernels.h"
#include "quantized.h"

namespace {

using namespace llmjax;

std::mt19937 random_bits(0);

float normal() {
  static std::normal_distribution<float> distribution;
  return distribution(random_bits);
}

char* aligned(size_t bytes) {
  static std::vector<std::vector<char>> kept;
  kept.emplace_back(bytes + 128);
  const size_t at = reinterpret_cast<size_t>(kept.back().data());
  return kept.back().data() + (64 - at % 64) % 64;
}

bool failed = false;

void check(bool right, const std::string& what) {
  if (right) return;
  std::fprintf(stderr, "wrong: %s\n", what.c_str());
  failed = true;
}

float from_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}
uint32_t bits_of_float(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}
double half(uint16_t bits) {
  const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
  const double magnitude = exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
  return bits & 0x8000 ? -magnitude : magnitude;
}

// ---- quantized matrices ----

struct Format {
  const char* name;
  int size_in, bits, group_size;
  CodeKind kind;
  Number scales;
  float zero;
  bool minima, table;
  int super_size;
};

constexpr Format kFormats[] = {
    {"q4_0", 288, 4, 32, CodeKind::kUint, Number::kF16, 8, false, false, 0},
    {"q4_1", 100, 4, 32, CodeKind::kUint, Number::kF16, 0, true, false, 0},
    {"q8_0", 160, 8, 32, CodeKind::kInt, Number::kF16, 0, false, false, 0},
    {"q4_k", 512, 4, 32, CodeKind::kUint, Number::kU8, 0, true, false, 256},
    {"q6_k", 512, 6, 16, CodeKind::kUint, Number::kI8, 32, false, false, 256},
    {"bits5", 90, 5, 48, CodeKind::kUint, Number::kF32, 0, true, false, 0},
    {"bits3", 90, 3, 16, CodeKind::kUint, Number::kBf16, 4, false, false, 0},
    {"nf4", 256, 4, 64, CodeKind::kUint, Number::kF32, 0, false, true, 0},
    {"fp8", 256, 8, 128, CodeKind::kE4M3, Number::kF32, 0, false, false, 0},
};

// Random records, whose numbers are read here bit by bit.
struct Stored {
  QuantizedMatrix w{};
  std::vector<uint32_t> words;

  explicit Stored(const Format& form, int size_out) {
    w.size_in = form.size_in, w.size_out = size_out, w.bits = form.bits, w.kind = form.kind, w.zero = form.zero;
    w.group_size = form.group_size, w.super_size = form.super_size, w.level_factor = 1;
    if (form.table) {
      w.num_levels = 16;
      for (int i = 0; i < 16; ++i) w.levels[i] = static_cast<float>(i * i - 100);
    }
    int start = w.chunks() * w.bits;
    const auto field = [&](Number number, int count) {
      const NumberField found{number, start, count};
      start += (count * bits_of(number) + 31) / 32;
      return found;
    };
    const int supers = form.super_size == 0 ? 0 : (form.size_in + form.super_size - 1) / form.super_size;
    w.scales = field(form.scales, w.groups());
    if (form.minima) w.minima = field(form.scales, w.groups());
    if (supers != 0) w.super_scales = field(Number::kF16, supers);
    if (supers != 0 && form.minima) w.super_minima = field(Number::kF16, supers);
    w.num_words = start;
    words.resize(static_cast<size_t>(w.tiles()) * w.num_words * kTileRows);
    for (uint32_t& word : words) word = static_cast<uint32_t>(random_bits());
    if (form.kind == CodeKind::kE4M3) {
      for (uint32_t& word : words) word &= 0xbfbfbfbf;  // no NaN
    }
    for (int row = 0; row < w.tiles() * kTileRows; ++row) {
      for (const NumberField* numbers : {&w.scales, &w.minima, &w.super_scales, &w.super_minima}) {
        for (int i = 0; i < numbers->count; ++i) set_plain(row, *numbers, i);
      }
    }
    w.words = words.data();
  }

  uint32_t& word(int row, int i) { return words[(static_cast<size_t>(row / kTileRows) * w.num_words + i) * kTileRows + row % kTileRows]; }

  // Scales of about 1/100 where they are floats; other numbers stay random.
  void set_plain(int row, const NumberField& field, int i) {
    const float value = 0.005f + 0.01f * static_cast<float>(random_bits() % 1000) / 1000;
    uint32_t bits;
    if (field.number == Number::kF32) {
      bits = bits_of_float(value);
    } else if (field.number == Number::kF16) {
      bits = 0x1c00 + random_bits() % 0x800;
    } else if (field.number == Number::kBf16) {
      bits = bits_of_float(value) >> 16;
    } else {
      return;
    }
    const int size = bits_of(field.number), at = i * size;
    uint32_t& found = word(row, field.start + at / 32);
    const uint32_t mask = size == 32 ? ~0u : ((1u << size) - 1) << at % 32;
    found = (found & ~mask) | bits << at % 32;
  }
  double number(int row, const NumberField& field, int i) {
    const int size = bits_of(field.number), at = i * size;
    const uint32_t bits = word(row, field.start + at / 32) >> at % 32;
    switch (field.number) {
      case Number::kF32: return from_bits(bits);
      case Number::kF16: return half(static_cast<uint16_t>(bits));
      case Number::kBf16: return from_bits(bits << 16);
      case Number::kU8: return bits & 255;
      default: return static_cast<int8_t>(bits & 255);
    }
  }
  double code(int row, int column) {
    const int chunk = column / 32, quad = column % 32 / 4, shift = column % 4 * 8;
    uint32_t value = 0;
    int low = 0;
    for (int width : {8, 4, 2, 1}) {  // planes of the bits of a code, as kernels/qtensor.py says
      if (!(w.bits & width)) continue;
      const uint32_t plane = word(row, chunk * w.bits + low + quad % width) >> shift >> (width * (quad / width));
      value |= (plane & ((1u << width) - 1)) << low;
      low += width;
    }
    if (w.num_levels != 0) return w.levels[value];
    if (w.kind == CodeKind::kInt) return static_cast<int8_t>(value);
    if (w.kind != CodeKind::kE4M3) return value;
    const int exponent = value >> 3 & 15, mantissa = value & 7;
    const double magnitude = exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
    return value & 128 ? -magnitude : magnitude;
  }
  double weight(int row, int column) {
    const int group = column / w.group_size, super = w.super_size == 0 ? 0 : column / w.super_size;
    double scale = number(row, w.scales, group), minimum = w.minima.count == 0 ? 0 : number(row, w.minima, group);
    if (w.super_scales.count != 0) scale *= number(row, w.super_scales, super);
    if (w.super_minima.count != 0) minimum *= number(row, w.super_minima, super);
    return scale * (code(row, column) - w.zero) - minimum;
  }
};

// Largest error of a sum, of |x| |w|.
double limit_of(Method method) {
  if (method == Method::kFloatVectors || method == Method::kFloatPanels) return 1e-6;
  return method == Method::kInt8Vectors ? 8e-3 : 4e-3;
}

void multiply(const QuantizedMethod& kernels, const QuantizedMatrix& w, Method method, const std::vector<float>& x, int rows) {
  QuantizedInput in{};
  in.rows = rows, in.size_in = w.size_in, in.x = x.data();
  in.round_columns = w.group_size % (2 * kChunk) == 0 ? 2 * kChunk : kChunk;
  in.block = input_block(rows, method);
  const size_t count = in.chunk_rows();
  in.floats = reinterpret_cast<float*>(aligned(count * kChunk * 4));
  in.float_sums = reinterpret_cast<float*>(aligned(count * 8));
  in.bytes = reinterpret_cast<int8_t*>(aligned(count * kChunk));
  in.byte_scales = reinterpret_cast<float*>(aligned(count * 4));
  in.byte_sums = reinterpret_cast<float*>(aligned(count * 12));
  in.byte_totals = reinterpret_cast<int32_t*>(aligned(count * 12));
  if (kernels.prepare != nullptr) kernels.prepare(in, x.data(), 0, in.blocks() * in.block);
  kernels.multiply(w, in, 0, w.tiles(), aligned(kernels.workspace(w, rows)));
}

void check_quantized(int isa) {
  for (const Format& form : kFormats) {
    constexpr int kOut = 40, kRows = 19;
    Stored stored(form, kOut);
    std::vector<float> x(kRows * form.size_in), bias(kOut), residual(kRows * kOut);
    for (std::vector<float>* numbers : {&x, &bias, &residual}) {
      for (float& number : *numbers) number = normal();
    }
    std::vector<double> right(kRows * kOut), scale(kRows * kOut);
    for (int o = 0; o < kOut; ++o) {
      std::vector<double> weights(form.size_in);
      for (int i = 0; i < form.size_in; ++i) weights[i] = stored.weight(o, i);
      for (int m = 0; m < kRows; ++m) {
        double sum = bias[o] + residual[m * kOut + o], of_x = 0, of_w = 0;
        for (int i = 0; i < form.size_in; ++i) {
          const double a = x[m * form.size_in + i];
          sum += a * weights[i], of_x += a * a, of_w += weights[i] * weights[i];
        }
        right[m * kOut + o] = sum, scale[m * kOut + o] = std::sqrt(of_x * of_w);
      }
    }
    for (int method = 0; method < kMethods; ++method) {
      const Method chosen = static_cast<Method>(method);
      const QuantizedMethod* const kernels = find_method(stored.w, chosen);
      if (kernels == nullptr) continue;
      for (int rows : {1, 2, 3, 4, 7, 8, 16, 19}) {
        std::vector<float> y(kRows * kOut, -1);
        QuantizedMatrix w = stored.w;
        w.bias = bias.data(), w.residual = residual.data(), w.y = y.data();
        multiply(*kernels, w, chosen, x, rows);
        for (int i = 0; i < rows * kOut; ++i) {
          const bool near = std::fabs(y[i] - right[i]) <= limit_of(chosen) * scale[i] + 1e-5;
          check(near, std::string(isa_name(isa)) + " " + form.name + ", method " + std::to_string(method) + ", rows " +
                          std::to_string(rows) + ": " + std::to_string(y[i]) + " for " + std::to_string(right[i]));
          if (failed) return;
        }
      }
    }
  }
}

// ---- Plain matrices, and what stands between products ----

void check_linear(int isa, int size_in) {  // whole pairs of vectors, and half a pair after them
  constexpr int kOut = 80, kRows = 49;
  const LinearKernels& kernels = *find_linear_kernels(size_in);
  for (Type type : {Type::kF32, Type::kBf16, Type::kF16}) {
    std::vector<float> wide(size_in * kOut);
    std::vector<uint16_t> narrow(size_in * kOut);
    std::vector<double> values(size_in * kOut);
    for (int i = 0; i < size_in * kOut; ++i) {
      // Halves from the smallest subnormal on.
      wide[i] = normal();
      narrow[i] = type == Type::kBf16 ? static_cast<uint16_t>(bits_of_float(wide[i]) >> 16)
                                      : static_cast<uint16_t>(random_bits() % 0x3c00 + (random_bits() % 2 << 15));
      values[i] = type == Type::kF32    ? wide[i]
                  : type == Type::kBf16 ? from_bits(static_cast<uint32_t>(narrow[i]) << 16)
                                        : half(narrow[i]);
    }
    const void* weight = type == Type::kF32 ? static_cast<const void*>(wide.data()) : narrow.data();
    std::vector<float> x(size_in * kRows), bias(kOut);
    for (float& number : x) number = normal();
    for (float& number : bias) number = normal();
    for (int rows : {1, 2, 3, 4, 5, 7, 17, 49}) {
      std::vector<float> y(kRows * kOut);
      const Linear call{rows, size_in, kOut, rows, type, x.data(), weight, bias.data(), nullptr, y.data()};
      char* workspace = aligned(kernels.workspace(call));
      kernels.prepare(call, workspace);
      kernels.run(call, workspace, 0, kOut);
      for (int m = 0; m < rows; ++m) {
        for (int o = 0; o < kOut; ++o) {
          double sum = bias[o];
          for (int i = 0; i < size_in; ++i) sum += x[m * size_in + i] * values[o * size_in + i];
          check(std::fabs(y[m * kOut + o] - sum) < 2e-3 + 1e-5 * std::fabs(sum), std::string(isa_name(isa)) + " linear");
        }
      }
    }
  }
}

void check_rows(int isa) {
  constexpr int kSize = 72;
  const RowKernels& kernels = find_row_kernels();
  std::vector<float> x(kSize), up(kSize), weight(kSize), out(kSize);
  for (int i = 0; i < kSize; ++i) x[i] = normal(), up[i] = normal(), weight[i] = normal();
  kernels.norm_rows({weight.data(), 1e-6f, true}, x.data(), up.data(), out.data(), kSize, 0, 1);
  double squares = 0;
  for (float v : x) squares += static_cast<double>(v) * v;
  for (int i = 0; i < kSize; ++i) {
    const double normed = x[i] / std::sqrt(squares / kSize + 1e-6) * (weight[i] + 1) + up[i];
    check(std::fabs(out[i] - normed) < 1e-5, std::string(isa_name(isa)) + " norm");
  }
  kernels.gate_rows(Activation::kSilu, x.data(), up.data(), out.data(), kSize, 0, 1);
  for (int i = 0; i < kSize; ++i) {
    check(std::fabs(out[i] - x[i] / (1 + std::exp(-x[i])) * up[i]) < 1e-5, std::string(isa_name(isa)) + " gate");
  }
  x[50] = 9, x[60] = 9;
  check(kernels.argmax(x.data(), kSize) == 50 && kernels.finite(x.data(), kSize), std::string(isa_name(isa)) + " argmax");
  x[3] = NAN;
  check(kernels.argmax(x.data(), kSize) == 0 && !kernels.finite(x.data(), kSize), std::string(isa_name(isa)) + " NaN");
}

// Keys and values of one request in pages of each type: softmax(q k^T scale) v.
void check_attention(int isa) {
  constexpr int kHeads = 4, kKvHeads = 2, kDim = 32, kPage = 16, kKeys = 41, kNew = 3;
  const AttentionKernels& kernels = *find_attention_kernels(kDim);
  for (Type cache : {Type::kF32, Type::kBf16, Type::kF16}) {
    std::vector<float> q(kNew * kHeads * kDim), out(q.size()), k(kKeys * kKvHeads * kDim), v(k.size());
    for (std::vector<float>* numbers : {&q, &k, &v}) {
      for (float& number : *numbers) number = from_bits(bits_of_float(normal()) & 0xffff0000);
    }
    Attention call{};
    call.heads = kHeads, call.kv_heads = kKvHeads, call.head_dim = kDim, call.value_dim = kDim, call.page_size = kPage, call.records = 2;
    call.activations = Type::kF32, call.cache = cache, call.scale = 0.2f, call.causal = true;
    call.q = q.data(), call.out = out.data();
    call.record_bytes = kPage * kDim * size_of(cache);
    constexpr int kPages[] = {2, 0, 1};
    std::vector<char> pages(3 * 2 * kKvHeads * call.record_bytes);
    call.pages = pages.data();
    for (int key = 0; key < kKeys; ++key) {
      for (int head = 0; head < kKvHeads; ++head) {
        for (int part = 0; part < 2; ++part) {
          const float* from = (part == 0 ? k : v).data() + (key * kKvHeads + head) * kDim;
          kernels.store(call, from, call.record(kPages[key / kPage], part, head), key % kPage, {});
        }
      }
    }
    const Queries queries{0, kKeys - kNew, nullptr};
    for (int head = 0; head < kKvHeads; ++head) {
      const AttentionTask task{&queries, 1, kNew, head, 0, kKeys, true, kPages, nullptr};
      kernels.run(call, task, aligned(kernels.workspace(call, kNew)));
    }
    for (int t = 0; t < kNew; ++t) {
      for (int head = 0; head < kHeads; ++head) {
        double total = 0, sums[kDim] = {};
        for (int key = 0; key <= kKeys - kNew + t; ++key) {
          const size_t at = (key * kKvHeads + head / 2) * kDim;
          double score = 0;
          for (int d = 0; d < kDim; ++d) score += static_cast<double>(q[(t * kHeads + head) * kDim + d]) * k[at + d];
          const double share = std::exp(score * 0.2);
          total += share;
          for (int d = 0; d < kDim; ++d) sums[d] += share * v[at + d];
        }
        for (int d = 0; d < kDim; ++d) {
          const double right = sums[d] / total;
          check(std::fabs(out[(t * kHeads + head) * kDim + d] - right) < (cache == Type::kF32 ? 1e-4 : 2e-2),
                std::string(isa_name(isa)) + " attention");
        }
      }
    }
  }
}

}  // namespace

int main() {
  for (int isa = 0; isa < isa_count(); ++isa) {
    if (!force_isa(isa)) continue;
    check_quantized(isa);
    for (int size_in : {96, 104, 112}) check_linear(isa, size_in);
    check_rows(isa);
    check_attention(isa);
    if (failed) return 1;
    std::puts(isa_name(isa));
  }
  return 0;
}
