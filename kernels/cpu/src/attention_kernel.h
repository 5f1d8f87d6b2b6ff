// Attention of some queries over some keys, for the instruction set of the including object. Online softmax over blocks
// of keys (Dao et al. 2022, arXiv:2205.14135).
//
// The `queries * group` rows that share the keys of one key/value head are processed together, 16 at a time. Three ways
// to multiply, by how much there is to share: rows of few queries take dot products with the pages where they lie;
// many queries first bring the block into a form that a matrix product likes; bf16 pages go through tiles if there are.

#ifndef LLMJAX_ATTENTION_KERNEL_H_
#define LLMJAX_ATTENTION_KERNEL_H_

#include "gemm.h"
#include "kernels.h"

#if defined(__AMX_BF16__)
#include "amx.h"
#endif

namespace {

using llmjax::Attention;
using llmjax::AttentionTask;
using llmjax::Type;

constexpr int kBlock = 128;  // keys
constexpr int kRowTile = 16;
constexpr int kFewRows = 8;
constexpr int kPad = 32;  // key ranges inside a block are widened to multiples of this, so that no product has a tail
constexpr float kMasked = -3e38f, kNothingSeen = -1e30f;  // apart, so that a masked key weighs 0 even when none is seen

inline int round_up(int x, int multiple) { return (x + multiple - 1) / multiple * multiple; }

struct Workspace {
  float *q, *sums, *peak, *total;  // [rows, h] scaled queries and weighted values, [rows], [rows]
  float* scores;                   // [16, kBlock]
  float *keys, *values;            // a block in the form the product takes: at most [h, kBlock] and [kBlock, h]
  uint16_t *narrow_q, *weights;    // bf16 [rows, h], [16, kBlock]
  size_t bytes;
};

inline Workspace divide(char* memory, int rows, int head_dim) {
  const size_t padded = static_cast<size_t>(round_up(rows, kRowTile));
  size_t used = 0;
  auto take = [&](size_t count, size_t size) {
    char* at = memory + used;
    used += (count * size + 63) / 64 * 64;
    return at;
  };
  Workspace w;
  w.q = reinterpret_cast<float*>(take(padded * head_dim, 4));
  w.sums = reinterpret_cast<float*>(take(padded * head_dim, 4));
  w.peak = reinterpret_cast<float*>(take(padded, 4));
  w.total = reinterpret_cast<float*>(take(padded, 4));
  w.scores = reinterpret_cast<float*>(take(kRowTile * kBlock, 4));
  w.keys = reinterpret_cast<float*>(take(static_cast<size_t>(kBlock) * head_dim, 4));
  w.values = reinterpret_cast<float*>(take(static_cast<size_t>(kBlock) * head_dim, 4));
  w.narrow_q = reinterpret_cast<uint16_t*>(take(padded * head_dim, 2));
  w.weights = reinterpret_cast<uint16_t*>(take(kRowTile * kBlock, 2));
  w.bytes = used;
  return w;
}

// Asks for rows of a page ahead of their use: pages are too short for the hardware to foresee them.
template <class T>
inline void fetch(const T* const* rows, int begin, int end, int head_dim) {
  for (int c = begin; c < end; ++c) {
    for (int d = 0; d < head_dim; d += 64 / static_cast<int>(sizeof(T))) __builtin_prefetch(rows[c] + d);
  }
}

// scores[m, c] = q[m] . key[c] for kRows queries.
template <int kRows, class T>
inline void score_few(const float* q, int head_dim, const T* const* keys, int begin, int end, float* scores) {
  constexpr int kKeys = kRegisters == 32 ? 4 : 2;
  for (int c = begin; c < end; c += kLanes) {
    Vec dots[kRows][kLanes];
    for (int i = 0; i < kLanes; i += kKeys) {
      Vec partial[kRows][kKeys] = {};
      for (int d = 0; d < head_dim; d += kLanes) {
        Vec key[kKeys];
#pragma GCC unroll 4
        for (int j = 0; j < kKeys; ++j) key[j] = load(keys[c + i + j] + d);
#pragma GCC unroll 4
        for (int m = 0; m < kRows; ++m) {
          const Vec query = load(q + static_cast<size_t>(m) * head_dim + d);
#pragma GCC unroll 4
          for (int j = 0; j < kKeys; ++j) partial[m][j] += query * key[j];
        }
      }
#pragma GCC unroll 4
      for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 4
        for (int j = 0; j < kKeys; ++j) dots[m][i + j] = partial[m][j];
      }
    }
    for (int m = 0; m < kRows; ++m) store(scores + m * kBlock + c, sum_rows(dots[m]));
  }
}

template <class T>
class AttentionKernel {
 public:
  AttentionKernel(const Attention& call, const AttentionTask& task, char* memory)
      : call_(call),
        task_(task),
        group_(call.group()),
        rows_(task.queries * call.group()),
        head_dim_(call.head_dim),
        w_(divide(memory, rows_, head_dim_)),
        tiled_(uses_tiles(rows_, head_dim_)) {}

  void run() {
    begin();
#if defined(__AMX_BF16__)
    if (tiled_) {
      Tiles tiles;
      for (int key = task_.key_begin; key < task_.key_end; key += kBlock) block(key);
      return finish();
    }
#endif
    for (int key = task_.key_begin; key < task_.key_end; key += kBlock) block(key);
    finish();
  }

 private:
  static bool uses_tiles(int rows, int head_dim) {
#if defined(__AMX_BF16__)
    return sizeof(T) == 2 && is_bf16(static_cast<const T*>(nullptr)) && rows > kFewRows && head_dim % kTileK == 0;
#else
    (void)rows, (void)head_dim;
    return false;
#endif
  }
  static constexpr bool is_bf16(const Bf16*) { return true; }
  static constexpr bool is_bf16(const void*) { return false; }

  int head_of(int row) const { return task_.kv_head * group_ + row % group_; }
  size_t token_offset(int row) const {
    return (static_cast<size_t>(task_.first_token + row / group_) * call_.heads + head_of(row)) * head_dim_;
  }
  // Keys first..end of the block at `begin` are visible to a row.
  int first_visible(int row, int begin) const {
    const int position = task_.first_position + row / group_;
    return call_.window == 0 ? 0 : imax(0, position - call_.window + 1 - begin);
  }
  int end_visible(int row, int begin, int count) const {
    return imin(count, task_.first_position + row / group_ + 1 - begin);
  }

  void begin() {
    const int padded = round_up(rows_, kRowTile);
    const Vec scale = splat(call_.scale);
    for (int m = 0; m < padded; ++m) {
      float* q = w_.q + static_cast<size_t>(m) * head_dim_;
      for (int d = 0; d < head_dim_; d += kLanes) {
        Vec x{};
        if (m < rows_) {
          const size_t at = token_offset(m) + d;
          x = call_.activations == Type::kF32 ? load(static_cast<const float*>(call_.q) + at)
                                              : load(static_cast<const Bf16*>(call_.q) + at);
        }
        x = x * scale;
        if (tiled_) {
          store(reinterpret_cast<Bf16*>(w_.narrow_q + static_cast<size_t>(m) * head_dim_ + d), x);
        } else {
          store(q + d, x);
        }
        store(w_.sums + static_cast<size_t>(m) * head_dim_ + d, Vec{});
      }
      const bool sink = call_.sinks != nullptr && task_.first_keys && m < rows_;
      w_.peak[m] = sink ? call_.sinks[head_of(m)] : kNothingSeen;
      w_.total[m] = sink ? 1.0f : 0.0f;
    }
  }

  // Where the rows of keys begin..begin + count lie; further ones up to a multiple of kPad repeat the last.
  void locate(int begin, int count) {
    const size_t page_stride = static_cast<size_t>(call_.kv_heads) * call_.page_size * head_dim_;
    const size_t head_stride = static_cast<size_t>(task_.kv_head) * call_.page_size * head_dim_;
    int page = begin / call_.page_size, offset = begin % call_.page_size;
    for (int c = 0; c < count;) {
      const size_t at = task_.pages[page] * page_stride + head_stride + static_cast<size_t>(offset) * head_dim_;
      const T* key = static_cast<const T*>(call_.k_pages) + at;
      const T* value = static_cast<const T*>(call_.v_pages) + at;
      for (; offset < call_.page_size && c < count; ++offset, ++c, key += head_dim_, value += head_dim_) {
        keys_[c] = key;
        values_[c] = value;
      }
      ++page;
      offset = 0;
    }
    for (int c = count; c < round_up(count, kPad); ++c) {
      keys_[c] = keys_[count - 1];
      values_[c] = values_[count - 1];
    }
  }

  void block(int begin) {
    const int count = imin(kBlock, task_.key_end - begin);
    locate(begin, count);
    if (rows_ > kFewRows) stage(round_up(count, kPad));
    for (int m = 0; m < rows_; m += kRowTile) {
      const int rows = imin(kRowTile, rows_ - m);
      const int first = first_visible(m, begin) / kPad * kPad;
      const int end = round_up(end_visible(m + rows - 1, begin, count), kPad);
      if (end <= first) continue;
      score(m, rows, first, end);
      for (int i = 0; i < rows; ++i) {
        soften(m + i, w_.scores + i * kBlock, w_.weights + i * kBlock, first, end,
               Range{first_visible(m + i, begin), end_visible(m + i, begin, count)});
      }
      add_values(m, rows, first, end);
    }
  }

  void stage(int count) {
#if defined(__AMX_BF16__)
    if constexpr (is_bf16(static_cast<const T*>(nullptr))) {
      if (tiled_) {
        pair_transposed(keys_, count, head_dim_, reinterpret_cast<uint32_t*>(w_.keys), kBlock);
        pair_rows(values_, count, head_dim_, reinterpret_cast<uint32_t*>(w_.values));
        return;
      }
    }
#endif
    for (int c = 0; c < count; c += kLanes) {
      for (int d = 0; d < head_dim_; d += kLanes) {
        Vec rows[kLanes];
        for (int i = 0; i < kLanes; ++i) rows[i] = load(keys_[c + i] + d);
        transpose(rows);
        for (int i = 0; i < kLanes; ++i) store(w_.keys + static_cast<size_t>(d + i) * kBlock + c, rows[i]);
      }
    }
    for (int c = 0; c < count; ++c) {
      for (int d = 0; d < head_dim_; d += kLanes) {
        store(w_.values + static_cast<size_t>(c) * head_dim_ + d, load(values_[c] + d));
      }
    }
  }

  void score(int m, int rows, int first, int end) {
#if defined(__AMX_BF16__)
    if (tiled_) {
      multiply_bf16(w_.narrow_q + static_cast<size_t>(m) * head_dim_, head_dim_, reinterpret_cast<uint32_t*>(w_.keys),
                    kBlock, first, end, 0, head_dim_, w_.scores, kBlock, false);
      return;
    }
#endif
    const float* q = w_.q + static_cast<size_t>(m) * head_dim_;
    if (rows_ > kFewRows) {
      multiply(q, head_dim_, Dense{w_.keys, kBlock}, rows, first, end, 0, head_dim_, Matrix{w_.scores, kBlock}, false);
      return;
    }
    fetch(keys_, first, imin(first + kPad, end), head_dim_);
    for (int c = first; c < end; c += kPad) {
      fetch(keys_, c + kPad, imin(c + 2 * kPad, end), head_dim_);
      fetch(values_, c, c + kPad, head_dim_);
      score_rows(q, rows, c, c + kPad);
    }
  }

  void score_rows(const float* q, int rows, int first, int end) {
    for (int i = 0; i < rows;) {
      const int left = rows - i;
      const float* from = q + static_cast<size_t>(i) * head_dim_;
      float* to = w_.scores + i * kBlock;
      if (left >= 4) {
        score_few<4>(from, head_dim_, keys_, first, end, to);
      } else if (left == 3) {
        score_few<3>(from, head_dim_, keys_, first, end, to);
      } else if (left == 2) {
        score_few<2>(from, head_dim_, keys_, first, end, to);
      } else {
        score_few<1>(from, head_dim_, keys_, first, end, to);
      }
      i += imin(left, 4);
    }
  }

  struct Range {
    int begin, end;
  };

  // One step of the online softmax for one row: turns scores into weights and shrinks what was summed before.
  void soften(int row, float* scores, uint16_t* weights, int first, int end, Range visible) {
    if (call_.softcap != 0) {
      const Vec cap = splat(call_.softcap), inverse = splat(1 / call_.softcap);
      for (int c = first; c < end; c += kLanes) store(scores + c, cap * vtanh(load(scores + c) * inverse));
    }
    for (int c = first; c < imin(visible.begin, end); ++c) scores[c] = kMasked;
    for (int c = imax(visible.end, first); c < end; ++c) scores[c] = kMasked;
    Vec highest = splat(kNothingSeen);
    for (int c = first; c < end; c += kLanes) highest = vmax(load(scores + c), highest);
    const float old = w_.peak[row], peak = fmax2(old, horizontal_max(highest));
    Vec total{};
    for (int c = first; c < end; c += kLanes) {
      const Vec weight = vexp(load(scores + c) - splat(peak));
      total += weight;
      if (tiled_) {
        store(reinterpret_cast<Bf16*>(weights + c), weight);
      } else {
        store(scores + c, weight);
      }
    }
    const float shrink = vexp(splat(old - peak))[0];
    w_.peak[row] = peak;
    w_.total[row] = w_.total[row] * shrink + horizontal_sum(total);
    if (shrink == 1.0f) return;
    float* sums = w_.sums + static_cast<size_t>(row) * head_dim_;
    for (int d = 0; d < head_dim_; d += kLanes) store(sums + d, load(sums + d) * splat(shrink));
  }

  void add_values(int m, int rows, int first, int end) {
    float* sums = w_.sums + static_cast<size_t>(m) * head_dim_;
#if defined(__AMX_BF16__)
    if (tiled_) {
      multiply_bf16(w_.weights, kBlock, reinterpret_cast<uint32_t*>(w_.values), head_dim_, 0, head_dim_, first, end,
                    sums, head_dim_, true);
      return;
    }
#endif
    const Matrix to{sums, head_dim_};
    if (rows_ > kFewRows) {
      multiply(w_.scores, kBlock, Dense{w_.values, head_dim_}, rows, 0, head_dim_, first, end, to, true);
    } else {
      multiply(w_.scores, kBlock, Scattered<T>{values_}, rows, 0, head_dim_, first, end, to, true);
    }
  }

  void finish() {
    if (task_.partial != nullptr) {
      std::memcpy(task_.partial, w_.peak, rows_ * sizeof(float));
      std::memcpy(task_.partial + rows_, w_.total, rows_ * sizeof(float));
      std::memcpy(task_.partial + 2 * rows_, w_.sums, static_cast<size_t>(rows_) * head_dim_ * sizeof(float));
      return;
    }
    for (int m = 0; m < rows_; ++m) write_out(m, w_.sums + static_cast<size_t>(m) * head_dim_, w_.total[m]);
  }

 public:
  void write_out(int row, const float* sums, float total) const {
    const Vec factor = splat(1.0f / fmax2(total, 1e-30f));
    for (int d = 0; d < head_dim_; d += kLanes) {
      const Vec x = load(sums + d) * factor;
      const size_t at = token_offset(row) + d;
      if (call_.activations == Type::kF32) {
        store(static_cast<float*>(call_.out) + at, x);
      } else {
        store(static_cast<Bf16*>(call_.out) + at, x);
      }
    }
  }

 private:
  const Attention& call_;
  const AttentionTask& task_;
  const int group_, rows_, head_dim_;
  const Workspace w_;
  const bool tiled_;
  const T* keys_[kBlock];
  const T* values_[kBlock];
};

size_t attention_workspace(const Attention& call, int queries) {
  return divide(nullptr, queries * call.group(), call.head_dim).bytes;
}

void attention(const Attention& call, const AttentionTask& task, char* workspace) {
  switch (call.cache) {
    case Type::kF32: AttentionKernel<float>(call, task, workspace).run(); break;
    case Type::kBf16: AttentionKernel<Bf16>(call, task, workspace).run(); break;
    case Type::kF16: AttentionKernel<F16>(call, task, workspace).run(); break;
  }
}

void attention_merge(const Attention& call, const AttentionTask& task, float* partials, int parts) {
  const AttentionKernel<float> writer(call, task, nullptr);
  const int rows = task.queries * call.group(), head_dim = call.head_dim;
  const size_t size = llmjax::partial_size(call, task.queries);
  for (int m = 0; m < rows; ++m) {
    float peak = kNothingSeen, total = 0;
    for (int p = 0; p < parts; ++p) peak = fmax2(peak, partials[p * size + m]);
    float* sums = partials + 2 * rows + static_cast<size_t>(m) * head_dim;  // of the first part
    for (int p = 0; p < parts; ++p) {
      const float shrink = vexp(splat(partials[p * size + m] - peak))[0];
      total += partials[p * size + rows + m] * shrink;
      const float* from = sums + p * size;
      for (int d = 0; d < head_dim; d += kLanes) {
        store(sums + d, p == 0 ? load(from + d) * splat(shrink) : load(sums + d) + load(from + d) * splat(shrink));
      }
    }
    writer.write_out(m, sums, total);
  }
}

}  // namespace

#endif  // LLMJAX_ATTENTION_KERNEL_H_
