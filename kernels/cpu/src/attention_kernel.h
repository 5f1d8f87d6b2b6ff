// Attention of some queries over some keys, for the instruction set of the including object. Online softmax over blocks
// of keys (Dao et al. 2022, arXiv:2205.14135).
//
// The rows (queries times heads of a group) that share the keys of one key/value head are processed together, 16 at a
// time. Ways to multiply, by how many rows one request has: few take dot products with the pages where they lie; many
// first bring the block into a form that a matrix product likes. Where rows are many and the instruction set multiplies bf16,
// queries and weights are rounded to it beside pages of bf16 and of one byte. Where rows are few and there are tiles, they
// pass through these in two parts. Requests that share a task change no way and no order of a sum: keys are read, and
// brought into another type, once for all of them, and each row's result is to the bit what it is alone.
//
// Scales never touch an element: those of keys multiply scores, those of values multiply weights.

#ifndef LLMJAX_ATTENTION_KERNEL_H_
#define LLMJAX_ATTENTION_KERNEL_H_

#include <optional>

#include "attention_few.h"
#include "gemm.h"
#include "kernels.h"
#include "kv_types.h"

#if defined(__AVX512BF16__)
#include "bf16_gemm.h"
#endif
#if defined(__AMX_BF16__)
#include "attention_parts.h"
#endif

namespace {

using llmjax::Attention;
using llmjax::AttentionTask;
using llmjax::Type;

constexpr int kBlock = 128;  // keys
constexpr int kPlaces = 4;   // of a block, which are fetched in turns: as in read_ahead.h
constexpr int kRowTile = 16;
constexpr int kFewRows = 8;
constexpr int kPad = 32;  // key ranges inside a block are widened to multiples of this, so that no product has a tail
// Apart, so that a masked key weighs 0 even when none is seen; times log2(e) both are finite.
constexpr float kMasked = -2e38f, kNothingSeen = -1e30f;

inline int round_up(int x, int multiple) { return (x + multiple - 1) / multiple * multiple; }

struct Workspace {
  float *q, *sums, *peak, *total;  // [rows, h] scaled queries and weighted values, [rows], [rows]
  float* scores;                   // [16, kBlock]
  float *keys, *values;            // a block in the form the product takes: at most [h, kBlock] and [kBlock, h]
  float *key_scales, *value_scales;  // [kBlock], where the pages have them
  float* offsets;                    // [rows], what the zero point of keys adds to every score
  uint16_t *narrow_q, *weights;      // bf16 [rows, h], [16, kBlock]
  uint16_t* wide;  // bf16 [kBlock, h], keys of a narrower type
  // Of kParts, see attention_parts.h.
  uint32_t* query_parts;                // [rows / 8, h / 2 or, of bytes, h / 4, 16]
  char* weight_parts;                   // two tiles' rows of kBlock keys
  float *query_scales, *weight_scales;  // [rows], [16], of bytes
  float* products;                      // of a tile's rows: [16, h], or [64, 16]
  size_t bytes;
};

inline Workspace divide(char* memory, int rows, int head_dim, int value_dim) {
  const size_t padded = static_cast<size_t>(round_up(rows, kRowTile));
  size_t used = 0;
  auto take = [&](size_t count, size_t size) {
    char* at = memory + used;
    used += (count * size + 63) / 64 * 64;
    return at;
  };
  Workspace w;
  w.q = reinterpret_cast<float*>(take(padded * head_dim, 4));
  w.sums = reinterpret_cast<float*>(take(padded * value_dim, 4));
  w.peak = reinterpret_cast<float*>(take(padded, 4));
  w.total = reinterpret_cast<float*>(take(padded, 4));
  w.scores = reinterpret_cast<float*>(take(kRowTile * kBlock, 4));
  w.keys = reinterpret_cast<float*>(take(static_cast<size_t>(kBlock) * head_dim, 4));
  w.values = reinterpret_cast<float*>(take(static_cast<size_t>(kBlock) * value_dim, 4));
  w.key_scales = reinterpret_cast<float*>(take(kBlock, 4));
  w.value_scales = reinterpret_cast<float*>(take(kBlock, 4));
  w.offsets = reinterpret_cast<float*>(take(padded, 4));
  w.narrow_q = reinterpret_cast<uint16_t*>(take(padded * head_dim, 2));
  w.weights = reinterpret_cast<uint16_t*>(take(kRowTile * kBlock, 2));
#if defined(__AVX512BF16__)
  w.wide = reinterpret_cast<uint16_t*>(take(static_cast<size_t>(kBlock) * head_dim, 2));
#endif
#if defined(__AMX_BF16__)
  w.query_parts = reinterpret_cast<uint32_t*>(take(padded * head_dim, 4));
  w.weight_parts = take(2 * kTile * kBlock, 2);
  w.query_scales = reinterpret_cast<float*>(take(padded, 4));
  w.weight_scales = reinterpret_cast<float*>(take(kRowTile, 4));
  w.products = reinterpret_cast<float*>(take(static_cast<size_t>(kTile) * (value_dim > 64 ? value_dim : 64), 4));
#endif
  w.bytes = used;
  return w;
}

// How the products are computed.
enum class Way {
  kScattered,  // few rows, from where the pages lie
  kDense,      // many rows, from a copy of the block in f32
  kBf16,       // many rows in bf16
  kParts,      // few rows in tiles, see attention_parts.h
};

#if defined(__AVX512BF16__)
constexpr int kLanesOfBf16 = kPair;
#else
constexpr int kLanesOfBf16 = kLanes;
#endif

constexpr bool fits_bf16(const void*) { return true; }
constexpr bool fits_bf16(const float*) { return false; }
constexpr bool fits_bf16(const F16*) { return false; }

template <class T>
class AttentionKernel {
 public:
  AttentionKernel(const Attention& call, const AttentionTask& task, char* memory)
      : call_(call),
        task_(task),
        group_(call.group()),
        own_rows_(task.queries * group_),
        rows_(task.num_members * own_rows_),
        head_dim_(call.head_dim),
        value_dim_(call.value_dim),
        w_(divide(memory, rows_, head_dim_, value_dim_)),
        way_(choose(call, own_rows_, task.single)),
        rounded_(way_ == Way::kScattered && rounds_few(call)),
        widened_(way_ == Way::kScattered && sizeof(T) < sizeof(float) && rows_ > kFewRows) {}

  void run() {
    begin();
#if defined(__AMX_BF16__)
    if constexpr (kFitsBf16) {
      if (way_ == Way::kParts) return run_in_parts();
    }
    const std::optional<Tiles> tiles = way_ == Way::kBf16 ? std::optional<Tiles>(std::in_place) : std::nullopt;
#endif
    for (int key = task_.key_begin; key < task_.key_end; key += kBlock) block(key);
    finish();
  }

 private:
  // rows: of one member.
  static Way choose(const Attention& call, int rows, bool single) {
    (void)call;
#if defined(__AVX512BF16__)
    const int sizes = call.head_dim | call.value_dim;
    if (kFitsBf16 && (rows > kFewRows || !single) && sizes % kPair == 0) return Way::kBf16;
#endif
#if defined(__AMX_BF16__)
    if (kFitsBf16 && fits_parts(call, rows)) return Way::kParts;
#endif
    return rows > kFewRows || !single ? Way::kDense : Way::kScattered;
  }
  // Few rows round as many do, so that a token is nearly the same in a prompt and in a decode. (Tiles have parts for them.)
  static bool rounds_few(const Attention& call) {
#if defined(LLMJAX_BF16_VECTORS)
    return kFitsBf16 && (call.head_dim | call.value_dim) % kPair == 0;
#else
    (void)call;
    return false;
#endif
  }
  static constexpr bool kFitsBf16 = fits_bf16(static_cast<const T*>(nullptr));

  struct Rows {
    const T *keys[kBlock], *values[kBlock];
  };

#if defined(__AMX_BF16__)
  static bool fits_parts(const Attention& call, int rows) {
    if (call.latent() || call.page_size % kTile != 0 || call.head_dim % kTileColumns<T> != 0) return false;
    if (kBytewise<T> && call.head_dim > 256) return false;  // sums of bytes would be too large for 32 bits
    // To bring a block into tiles takes as long as one or two rows do without them, and to widen its keys too as four.
    return rows > (kBytewise<T> || sizeof(T) == sizeof(Bf16) ? 2 : 4);
  }
#endif

  bool reads_pages() const { return way_ == Way::kScattered && !widened_; }
  size_t row_bytes() const { return static_cast<size_t>(head_dim_) * sizeof(T); }

  int head_of(int row) const { return task_.kv_head * group_ + row % group_; }
  // Of a row among [T, H].
  size_t place(int row) const {
    const int token = task_.members[row / own_rows_].first_token + row % own_rows_ / group_;
    return static_cast<size_t>(token) * call_.heads + head_of(row);
  }
  // Keys first..end of the block at `begin` are visible to a row.
  int first_visible(int row, int begin) const {
    if (call_.window == 0 || task_.num_members > 1) return 0;
    return imax(0, task_.members->first_position + row / group_ - call_.window + 1 - begin);
  }
  int end_visible(int row, int begin, int count) const {
    if (task_.num_members > 1) return count;
    const int position = task_.members->first_position + row / group_;
    if (call_.causal) return imin(count, position + 1 - begin);
    return call_.window == 0 ? count : imin(count, position + call_.window - begin);
  }

  void begin() {
    const int padded = way_ == Way::kScattered ? rows_ : round_up(rows_, kRowTile);
    const Vec scale = splat(call_.scale * call_.keys.scale);
    for (int m = 0; m < padded; ++m) {
      float* q = w_.q + static_cast<size_t>(m) * head_dim_;
      Vec sum{};
      for (int d = 0; d < head_dim_; d += kLanes) {
        Vec x{};
        if (m < rows_) {
          const size_t at = place(m) * head_dim_ + d;
          x = call_.activations == Type::kF32 ? load(static_cast<const float*>(call_.q) + at)
                                              : load(static_cast<const Bf16*>(call_.q) + at);
        }
        x = x * scale;
        sum += x;
        if (way_ == Way::kBf16) {
          store(reinterpret_cast<Bf16*>(w_.narrow_q + static_cast<size_t>(m) * head_dim_ + d), x);
        } else {
          store(q + d, rounded_ ? widen_bf16(round_bf16(x)) : x);
        }
      }
      if (way_ == Way::kScattered) to_pairs<T>(q, head_dim_);
      std::memset(w_.sums + static_cast<size_t>(m) * value_dim_, 0, static_cast<size_t>(value_dim_) * sizeof(float));
      if (call_.keys.zero != 0) w_.offsets[m] = horizontal_sum(sum) * (call_.keys.zero / call_.keys.scale);
      const bool sink = call_.sinks != nullptr && task_.first_keys && m < rows_;
      w_.peak[m] = sink ? call_.sinks[head_of(m)] : kNothingSeen;
      w_.total[m] = sink ? 1.0f : 0.0f;
    }
  }

  // Where the rows of keys begin..begin + count lie; further ones up to a multiple of kPad repeat the last.
  void locate(const AttentionTask& task, int begin, int count, Rows& rows) const {
    int page = begin / call_.page_size, offset = begin % call_.page_size;
    for (int c = 0; c < count; ++page, offset = 0) {
      const char* key = call_.record(task.pages[page], 0, task.kv_head) + offset * row_bytes();
      const char* value = call_.record(task.pages[page], 1, task.kv_head) + offset * row_bytes();
      const int end = c + imin(call_.page_size - offset, count - c);
      for (; c < end; ++c, key += row_bytes(), value += row_bytes()) {
        rows.keys[c] = reinterpret_cast<const T*>(key);
        rows.values[c] = reinterpret_cast<const T*>(value);
      }
    }
    for (int c = count; c < round_up(count, kPad); ++c) {
      rows.keys[c] = rows.keys[count - 1];
      rows.values[c] = rows.values[count - 1];
    }
  }

  void load_scales(int begin, int count) {
    const size_t scales = static_cast<size_t>(call_.page_size) * row_bytes();
    int page = begin / call_.page_size, offset = begin % call_.page_size;
    for (int c = 0; c < count; ++page, offset = 0) {
      const int rows = imin(call_.page_size - offset, count - c);
      const size_t at = scales + 4 * static_cast<size_t>(offset), bytes = 4 * static_cast<size_t>(rows);
      std::memcpy(w_.key_scales + c, call_.record(task_.pages[page], 0, task_.kv_head) + at, bytes);
      std::memcpy(w_.value_scales + c, call_.record(task_.pages[page], 1, task_.kv_head) + at, bytes);
      c += rows;
    }
    for (int c = count; c < round_up(count, kPad); ++c) {
      w_.key_scales[c] = w_.key_scales[count - 1];
      w_.value_scales[c] = w_.value_scales[count - 1];
    }
  }

  // The rows that come after those of the block at `begin`: each is asked for while one of ours is multiplied, for all at
  // once would wait for each other and we for them. Ours themselves where none come.
  void foresee(int begin) {
    const bool last = begin + kBlock >= task_.key_end;
    if (last && task_.next == nullptr) {
      *next_ = *block_;
    } else {
      const AttentionTask& task = last ? *task_.next : task_;
      const int first = last ? task.key_begin : begin + kBlock, count = imin(kBlock, task.key_end - first);
      locate(task, first, count, *next_);
      for (int c = round_up(count, kPad); c < kBlock; ++c) {
        next_->keys[c] = next_->keys[0];
        next_->values[c] = next_->values[0];
      }
    }
    for (int c = 0; c < kBlock; ++c) {
      const int from = c % kPlaces * (kBlock / kPlaces) + c / kPlaces;
      coming_.keys[c] = next_->keys[from];
      coming_.values[c] = next_->values[from];
    }
  }

  void block(int begin) {
    const int count = imin(kBlock, task_.key_end - begin);
    if (reads_pages() && begin != task_.key_begin) {
      block_ = next_;
    } else {
      locate(task_, begin, count, *block_);
    }
    if (call_.token_scales) load_scales(begin, count);
    next_ = block_ == located_ ? located_ + 1 : located_;
    if (reads_pages()) foresee(begin);
    if (way_ == Way::kDense || way_ == Way::kBf16) stage(round_up(count, kPad));
    if (widened_) widen_rows(round_up(count, kPad));
    for_row_tiles(begin, count, [&](int m, int rows, int first, int end) {
      score(m, rows, first, end);
      soften_rows(m, rows, first, end, begin, count);
      if (!reads_pages()) fetch_next_block(begin, m / kRowTile);
      add_values(m, rows, first, end);
    });
  }

  // body(first row, rows, first key, end) with the keys of a block that some of these rows see.
  template <class Body>
  void for_row_tiles(int begin, int count, const Body& body) const {
    for (int m = 0; m < rows_; m += kRowTile) {
      const int rows = imin(kRowTile, rows_ - m);
      const int first = first_visible(m, begin) / kPad * kPad;
      const int end = round_up(end_visible(m + rows - 1, begin, count), kPad);
      if (end > first) body(m, rows, first, end);
    }
  }

  void soften_rows(int m, int rows, int first, int end, int begin, int count) {
    for (int i = 0; i < rows; i += kLanes) soften(m, i, imin(kLanes, rows - i), first, end, begin, count);
  }

#if defined(__AMX_BF16__)
  static constexpr int kWeightRow = kTileBytes * kBlock / kTileColumns<T>;  // bytes of a part of a row's weights

  // Where 16 keys and their values begin, for all of a block.
  struct Groups {
    const void *keys[kBlock / kTile], *values[kBlock / kTile];
  };

  void run_in_parts() {
    Tiles tiles;
    for (int m = 0; m < rows_; m += kRowsOfTile) {
      split_queries<T>(w_.q + static_cast<size_t>(m) * head_dim_, head_dim_, queries_of(m), w_.query_scales + m);
    }
    std::memset(w_.weight_parts, 0, 4 * kTile * kBlock);  // for rows that fill up a tile
    for (int key = first_key_in_parts(task_); key < task_.key_end; key += kBlock) block_in_parts(key);
    for (int m = 0; m < rows_; ++m) in_order<T>(w_.sums + static_cast<size_t>(m) * value_dim_, value_dim_);
    finish();
  }

  // Where 16 keys begin that lie one after the other; those that nobody sees are masked.
  static int first_key_in_parts(const AttentionTask& task) { return task.key_begin / kTile * kTile; }

  void locate_groups(const AttentionTask& task, int begin, Groups& groups) const {
    const int count = imin(kBlock, task.key_end - begin);
    for (int g = 0, c = 0; g < kBlock / kTile; ++g, c += c + kTile < count ? kTile : 0) {  // the last ones fill up the block
      const int page = task.pages[(begin + c) / call_.page_size];
      const size_t offset = static_cast<size_t>((begin + c) % call_.page_size) * row_bytes();
      groups.keys[g] = call_.record(page, 0, task.kv_head) + offset;
      groups.values[g] = call_.record(page, 1, task.kv_head) + offset;
    }
  }

  void block_in_parts(int begin) {
    const int count = imin(kBlock, task_.key_end - begin);
    Groups here, next;
    locate_groups(task_, begin, here);
    const bool last = begin + kBlock >= task_.key_end;
    if (!last || task_.next != nullptr) {
      const AttentionTask& task = last ? *task_.next : task_;
      locate_groups(task, last ? first_key_in_parts(task) : begin + kBlock, next);
      ahead_ = LinesAhead(next.keys, 2 * kBlock / kTile, static_cast<int>(kTile * row_bytes() / 64));
    }
    const int unseen = imax(0, task_.key_begin - begin);
    if (call_.token_scales) {
      load_scales(begin, count);
      for (int c = 0; c < unseen; ++c) w_.value_scales[c] = 0;
    }
    for (int c = 0; c < round_up(count, kPad); c += kTile) stage_group(here, c, unseen, count);
    for_row_tiles(begin, count, [&](int m, int rows, int first, int end) {
      for (int i = 0; i < rows; i += kRowsOfTile) score_in_parts(m, i, imin(rows - i, kRowsOfTile), here.keys, first, end);
      soften_rows(m, rows, first, end, begin, count);
      for (int i = 0; i < rows; i += kRowsOfTile) add_in_parts(m, i, imin(rows - i, kRowsOfTile), first, end);
    });
    ahead_ = LinesAhead();  // `next` ends here
  }

  // Brings 16 values into the form that tiles take, and keys of a type that tiles do not have; keys first .. end of the block
  // are seen.
  void stage_group(Groups& groups, int c, int first, int end) {
    const T* rows[kTile];
    const int begin = imin(c, (end - 1) / kTile * kTile);
    for (int i = 0; i < kTile; ++i) {  // what nobody sees may be anything, and times 0 still be NaN
      const size_t row = static_cast<size_t>(imin(imax(c + i, first), end - 1) - begin);
      rows[i] = static_cast<const T*>(groups.values[c / kTile]) + row * value_dim_;
    }
    stage_values(rows, value_dim_, kBlock, c, reinterpret_cast<uint32_t*>(w_.values));
    if constexpr (!kBytewise<T> && sizeof(T) == 1) {
      Bf16* const wide = reinterpret_cast<Bf16*>(w_.wide) + static_cast<size_t>(c) * head_dim_;
      const T* const keys = static_cast<const T*>(groups.keys[c / kTile]);
      for (int i = 0; i < kTile; ++i) rows[i] = keys + static_cast<size_t>(i) * head_dim_;
      widen(rows, kTile, head_dim_, wide);
      groups.keys[c / kTile] = wide;
    }
    for (int d = 0; d < value_dim_; d += 64) ahead_.next<2 * sizeof(T)>();
  }

  void score_in_parts(int m, int i, int rows, const void* const* keys, int first, int end) {
    const int row = head_dim_ * (kTileBytes / kTileColumns<T>);
    const float* const scales = w_.query_scales + m + i;
    for (int c = first; c < end;) {
      const int groups = end - c >= 4 * kTile ? 4 : 2;
      const auto multiply = groups == 4 ? multiply_keys<T, 4> : multiply_keys<T, 2>;
      multiply(keys + c / kTile, row, queries_of(m + i), w_.products, ahead_);
      for (int g = 0; g < groups; ++g, c += kTile) {
        const auto add = rows <= kRowsOfTile / 2 ? add_parts<T, kRowsOfTile / 2> : add_parts<T, kRowsOfTile>;
        add(w_.products + g * kTile * kTile, scales, scores_of(i) + c, kBlock);
        ahead_.next<sizeof(T)>();
      }
    }
  }

  void add_in_parts(int m, int i, int rows, int first, int end) {
    uint32_t* const values = reinterpret_cast<uint32_t*>(w_.values);
    finish_stores();
    for (int n = 0; n < value_dim_;) {
      const int columns = value_dim_ - n >= 4 * kTile ? 4 : 2;
      const auto multiply = columns == 4 ? multiply_weights<T, 4> : multiply_weights<T, 2>;
      multiply(weights_of(i), kWeightRow, staged<T>(values, kBlock, 0, n), value_dim_, kBlock, first, end, w_.products + n,
               ahead_);
      n += columns * kTile;
    }
    finish_stores();
    for (int j = 0; j < rows; ++j) {
      float* const sums = w_.sums + static_cast<size_t>(m + i + j) * value_dim_;
      const float* const upper = w_.products + static_cast<size_t>(j) * value_dim_;
      const float* const lower = upper + static_cast<size_t>(kRowsOfTile) * value_dim_;
      const Vec scale = splat(kBytewise<T> ? w_.weight_scales[i + j] : 1.0f);
      for (int d = 0; d < value_dim_; d += kLanes) {
        store(sums + d, load(sums + d) + whole<T>(load(upper + d), load(lower + d)) * scale);
      }
    }
  }

  // Scores of a row as weights in parts; their sums, lane by lane.
  Vec weigh_in_parts(int i, float peak, int first, int end) {
    float* const scores = scores_of(i);
    char *const upper = weights_of(i), *const lower = upper + kRowsOfTile * kWeightRow;
    Vec total{}, largest{}, bad{};
    for (int c = first; c < end; c += kLanes) {
      Vec weight = vexp(load(scores + c) - splat(peak));
      total += weight;
      if (call_.token_scales) weight *= load(w_.value_scales + c);
      if (kBytewise<T>) largest = vmax(weight, largest), bad += weight * splat(0.0f);
      store(scores + c, weight);
    }
    ahead_.next<4>();
    if constexpr (kBytewise<T>) {
      const float scale = scale_of(largest, bad, 65535);
      w_.weight_scales[i] = scale;
      for (int c = first / kTileBytes * kTileBytes; c < round_up(end, kTileBytes); c += kLanes) {
        const Int all = c < first || c >= end ? Int{} : round_to_int(load(scores + c) * splat(1 / scale));
        store_low_bytes(upper + c, all >> 8), store_low_bytes(lower + c, all);
      }
    } else {
      for (int c = first; c < end; c += 2 * kLanes) {
        split(load(scores + c), load(scores + c + kLanes), upper + 2 * c, lower + 2 * c);
      }
    }
    return total;
  }

  uint32_t* queries_of(int row) const { return w_.query_parts + static_cast<size_t>(row) * head_dim_; }
  char* weights_of(int i) const { return w_.weight_parts + (i / kRowsOfTile * kTile + i % kRowsOfTile) * kWeightRow; }
#endif

  // Keys and values of the next block, or of the next task's first one, on their way to the second-level cache while we
  // go on: for each 16 of our rows a part of them.
  void fetch_next_block(int begin, int part) const {
    const bool last = begin + kBlock >= task_.key_end;
    if (last && task_.next == nullptr) return;
    const AttentionTask& task = last ? *task_.next : task_;
    const int first = last ? task.key_begin : begin + kBlock, parts = (rows_ + kRowTile - 1) / kRowTile;
    const int end = imin(first + kBlock * (part + 1) / parts, task.key_end);
    for (int key = first + kBlock * part / parts; key < end;) {
      const int page = task.pages[key / call_.page_size], offset = key % call_.page_size;
      const int keys = imin(call_.page_size - offset, end - key), row = head_dim_ * static_cast<int>(sizeof(T));
      for (int kind = 0; kind < call_.records; ++kind) {
        const char* from = call_.record(page, kind, task.kv_head) + static_cast<size_t>(offset) * row;
        for (int i = 0; i < keys * row; i += 64) __builtin_prefetch(from + i, 0, 2);
      }
      key += keys;
    }
  }

  // Keys and values of the block as f32, for many rows to read.
  void widen_rows(int count) {
    for (int c = 0; c < count; ++c) {
      float *keys = w_.keys + static_cast<size_t>(c) * head_dim_, *values = w_.values + static_cast<size_t>(c) * value_dim_;
      widen_row(block_->keys[c], head_dim_, keys);
      widen_row(block_->values[c], value_dim_, values);
      wide_keys_[c] = keys;
    }
  }

  void stage(int count) {
#if defined(__AVX512BF16__)
    if constexpr (kFitsBf16) {
      if (way_ == Way::kBf16) {
        const Bf16* keys[kBlock];
        for (int c = 0; c < count; c += kPad) bf16_rows(c, w_.wide + static_cast<size_t>(c) * head_dim_, keys + c);
        pair_transposed(keys, count, head_dim_, reinterpret_cast<uint32_t*>(w_.keys), kBlock);
        pair_rows(block_->values, 0, count, value_dim_, reinterpret_cast<uint32_t*>(w_.values));
        return;
      }
    }
#endif
    for (int c = 0; c < count; c += kLanes) {
      for (int d = 0; d < head_dim_; d += kLanes) {
        Vec rows[kLanes];
        for (int i = 0; i < kLanes; ++i) rows[i] = load(block_->keys[c + i] + d);
        transpose(rows);
        for (int i = 0; i < kLanes; ++i) store(w_.keys + static_cast<size_t>(d + i) * kBlock + c, rows[i]);
      }
    }
    for (int c = 0; c < count; ++c) {
      for (int d = 0; d < value_dim_; d += kLanes) {
        store(w_.values + static_cast<size_t>(c) * value_dim_ + d, load(block_->values[c] + d));
      }
    }
  }

#if defined(__AVX512BF16__)
  // Where kPad keys from c on lie as bf16: in the pages, or in `wide`.
  void bf16_rows(int c, uint16_t* wide, const Bf16** rows) {
    if constexpr (sizeof(T) == 2) {
      for (int i = 0; i < kPad; ++i) rows[i] = reinterpret_cast<const Bf16*>(block_->keys[c + i]);
    } else {
      widen(block_->keys + c, kPad, head_dim_, reinterpret_cast<Bf16*>(wide));
      for (int i = 0; i < kPad; ++i) rows[i] = reinterpret_cast<const Bf16*>(wide) + static_cast<size_t>(i) * head_dim_;
    }
  }

#endif

  void score(int m, int rows, int first, int end) {
#if defined(__AVX512BF16__)
    if (way_ == Way::kBf16) {
      multiply_bf16(w_.narrow_q + static_cast<size_t>(m) * head_dim_, head_dim_, reinterpret_cast<uint32_t*>(w_.keys),
                    kBlock, rows, first, end, 0, round_up(head_dim_ - call_.filled, kMultipleOfBf16), w_.scores, kBlock, false);
      return;
    }
#endif
    const float* q = w_.q + static_cast<size_t>(m) * head_dim_;
    if (way_ == Way::kDense) {
      multiply(q, head_dim_, Dense{w_.keys, kBlock}, rows, first, end, 0, head_dim_, Matrix{w_.scores, kBlock}, false);
      return;
    }
    if (widened_) return score_rows(q, rows, wide_keys_, Coming<float>{}, first, end);
    score_rows(q, rows, block_->keys, m == 0 ? coming(coming_.keys, first, end) : Coming<T>{}, first, end);
  }

  // In groups of keys, each of which all rows meet.
  template <class K>
  void score_rows(const float* q, int rows, const K* const* keys, Coming<K> coming, int first, int end) {
    for (int c = first; c < end; c += kLanes) {
      in_groups(rows, [&](int i, auto count) {
        score_few<count.value>(q + static_cast<size_t>(i) * head_dim_, head_dim_, keys + c, i == 0 ? coming.from(c) : Coming<K>{},
                               scores_of(i) + c, kBlock);
      });
    }
  }

  // One step of the online softmax for `rows` rows from m + i on: turns scores into weights and shrinks what was summed
  // before. Rows together, since the steps from one row's scores to its peak and on wait for each other.
  void soften(int m, int i, int rows, int first, int end, int begin, int count) {
    const int row = m + i;
    Vec found[kLanes];
    for (int j = 0; j < kLanes; ++j) found[j] = j < rows ? edit(row + j, scores_of(i + j), first, end, begin, count) : Vec{};
    const Vec old = load(w_.peak + row), peak = vmax(max_rows(found), old), shrink = vexp(old - peak);
    store(w_.peak + row, peak);
    for (int j = 0; j < kLanes; ++j) found[j] = j < rows ? weigh(i + j, w_.peak[row + j], first, end) : Vec{};
    const Vec added = sum_rows(found), shift = added * splat(call_.values.zero / call_.values.scale);
    store(w_.total + row, load(w_.total + row) * shrink + added);
    for (int j = 0; j < rows; ++j) {
      if (shrink[j] == 1.0f && shift[j] == 0.0f) continue;
      float* sums = w_.sums + static_cast<size_t>(row + j) * value_dim_;
      for (int d = 0; d < value_dim_; d += kLanes) store(sums + d, load(sums + d) * splat(shrink[j]) + splat(shift[j]));
    }
  }

  // What keys first .. end of our block ask for.
  static Coming<T> coming(const T* const* rows, int first, int end) {
    constexpr int kHalf = kBlock / 2;
    return {rows, end <= kHalf ? rows + kHalf : first >= kHalf ? rows - kHalf : nullptr};
  }

  float* scores_of(int i) const { return w_.scores + i * kBlock; }

  // Everything between product and softmax; the largest scores, lane by lane.
  Vec edit(int row, float* scores, int first, int end, int begin, int count) const {
    if (call_.token_scales) {
      for (int c = first; c < end; c += kLanes) store(scores + c, load(scores + c) * load(w_.key_scales + c));
    } else if (call_.keys.zero != 0) {
      for (int c = first; c < end; c += kLanes) store(scores + c, load(scores + c) + splat(w_.offsets[row]));
    }
    if (call_.softcap != 0) {
      const Vec cap = splat(call_.softcap), inverse = splat(1 / call_.softcap);
      for (int c = first; c < end; c += kLanes) store(scores + c, cap * vtanh(load(scores + c) * inverse));
    }
    for (int c = first; c < imin(first_visible(row, begin), end); ++c) scores[c] = kMasked;
    for (int c = imax(end_visible(row, begin, count), first); c < end; ++c) scores[c] = kMasked;
    Vec highest = splat(kNothingSeen);
    for (int c = first; c < end; c += kLanes) highest = vmax(load(scores + c), highest);
    return highest;
  }

#if defined(__AVX512BF16__)
  // put(key, weights of 32 keys from there on) to 13 bits; their sums, lane by lane.
  template <class Put>
  Vec weigh_coarsely(const float* scores, float peak, int first, int end, const Put& put) const {
    const Vec per_exponent = splat(1.44269504f), shift = splat(peak * -1.44269504f);
    Vec low_total{}, high_total{};
    for (int c = first; c < end; c += 2 * kLanes) {
      Vec low = coarse_exp2(load(scores + c) * per_exponent + shift);
      Vec high = coarse_exp2(load(scores + c + kLanes) * per_exponent + shift);
      low_total += low;
      high_total += high;
      if (call_.token_scales) {
        low *= load(w_.value_scales + c);
        high *= load(w_.value_scales + c + kLanes);
      }
      put(c, low, high);
    }
    return low_total + high_total;
  }
#endif

  // Scores as weights; their sums, lane by lane.
  Vec weigh(int i, float peak, int first, int end) {
    float* scores = scores_of(i);
#if defined(__AVX512BF16__)
    if (way_ == Way::kBf16) {
      uint16_t* const weights = w_.weights + i * kBlock;
      return weigh_coarsely(scores, peak, first, end, [weights](int c, Vec low, Vec high) {
        const Vec pairs = round_pairs(low, high);
        std::memcpy(weights + c, &pairs, sizeof(pairs));
      });
    }
    if (rounded_) {
      return weigh_coarsely(scores, peak, first, end, [scores](int c, Vec low, Vec high) {
        store(scores + c, widen_bf16(round_bf16(low))), store(scores + c + kLanes, widen_bf16(round_bf16(high)));
      });
    }
#endif
#if defined(__AMX_BF16__)
    if constexpr (kFitsBf16) {
      if (way_ == Way::kParts) return weigh_in_parts(i, peak, first, end);
    }
#endif
    Vec total{};
    for (int c = first; c < end; c += kLanes) {
      Vec weight = vexp(load(scores + c) - splat(peak));
      total += weight;
      if (call_.token_scales) weight *= load(w_.value_scales + c);
      store(scores + c, weight);
    }
    return total;
  }

  void add_values(int m, int rows, int first, int end) {
    float* sums = w_.sums + static_cast<size_t>(m) * value_dim_;
#if defined(__AVX512BF16__)
    if (way_ == Way::kBf16) {
      multiply_bf16(w_.weights, kBlock, reinterpret_cast<uint32_t*>(w_.values), value_dim_, rows, 0, round_up(value_dim_ - call_.filled, kLanes), first,
                    end, sums, value_dim_, true);
      return;
    }
#endif
    const Matrix to{sums, value_dim_};
    if (way_ == Way::kDense || widened_) {
      multiply(w_.scores, kBlock, Dense{w_.values, value_dim_}, rows, 0, value_dim_, first, end, to, true);
    } else {
      add_from_pages(sums, rows, first, end);
    }
  }

  void add_from_pages(float* sums, int rows, int first, int end) {
    in_groups(rows, [&](int i, auto count) {
      const Coming<T> next = i == 0 && !call_.latent() ? coming(coming_.values, first, end) : Coming<T>{};
      add_few<count.value>(scores_of(i), kBlock, block_->values, next, first, end,
                           sums + static_cast<size_t>(i) * value_dim_, value_dim_);
    });
  }

  void finish() {
    if (way_ == Way::kScattered) {
      for (int m = 0; m < rows_; ++m) from_pairs<T>(w_.sums + static_cast<size_t>(m) * value_dim_, value_dim_);
    }
    if (task_.members->partial != nullptr) {
      const size_t rows = static_cast<size_t>(own_rows_);
      for (int i = 0; i < task_.num_members; ++i) {
        float* to = task_.members[i].partial;
        std::memcpy(to, w_.peak + i * rows, rows * sizeof(float));
        std::memcpy(to + rows, w_.total + i * rows, rows * sizeof(float));
        std::memcpy(to + 2 * rows, w_.sums + i * rows * value_dim_, rows * value_dim_ * sizeof(float));
      }
      return;
    }
    for (int m = 0; m < rows_; ++m) write_out(m, w_.sums + static_cast<size_t>(m) * value_dim_, w_.total[m]);
  }

 public:
  void write_out(int row, const float* sums, float total) const {
    const Vec factor = splat(call_.values.scale / fmax2(total, 1e-30f));
    for (int d = 0; d < value_dim_; d += kLanes) {
      const Vec x = load(sums + d) * factor;
      const size_t at = place(row) * value_dim_ + d;
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
  const int group_, own_rows_, rows_, head_dim_, value_dim_;  // own: of each member
  const Workspace w_;
  const Way way_;
  const bool rounded_;  // queries and weights are what they are in bf16, although they are multiplied as f32
  const bool widened_;  // keys and values are read from copies in f32
  Rows located_[2];
  Rows *block_ = located_, *next_ = located_ + 1;  // of the block at hand, and of what comes after it
  Rows coming_;  // the latter in the order in which it is fetched
  const float* wide_keys_[kBlock];
#if defined(__AMX_BF16__)
  LinesAhead ahead_;
#endif
};

void attention_store(const llmjax::Attention& call, const void* from, char* record, int offset, llmjax::Affine fixed) {
  if (call.activations == llmjax::Type::kF32) {
    store_row_of<float>(call, from, record, offset, fixed);
  } else {
    store_row_of<Bf16>(call, from, record, offset, fixed);
  }
}

size_t attention_workspace(const Attention& call, int queries) {
  return divide(nullptr, queries * call.group(), call.head_dim, call.value_dim).bytes;
}

void attention(const Attention& call, const AttentionTask& task, char* workspace) {
  switch (call.cache) {
    case Type::kF32: AttentionKernel<float>(call, task, workspace).run(); break;
    case Type::kBf16: AttentionKernel<Bf16>(call, task, workspace).run(); break;
    case Type::kF16: AttentionKernel<F16>(call, task, workspace).run(); break;
    case Type::kInt8: AttentionKernel<Int8>(call, task, workspace).run(); break;
    case Type::kE4M3: AttentionKernel<E4M3>(call, task, workspace).run(); break;
    case Type::kE5M2: AttentionKernel<E5M2>(call, task, workspace).run(); break;
  }
}

void attention_merge(const Attention& call, const AttentionTask& task, float* partials, int parts) {
  const AttentionKernel<float> writer(call, task, nullptr);
  const int rows = task.queries * call.group(), value_dim = call.value_dim;
  const size_t size = llmjax::partial_size(call, task.queries);
  for (int m = 0; m < rows; ++m) {
    float peak = kNothingSeen, total = 0;
    for (int p = 0; p < parts; ++p) peak = fmax2(peak, partials[p * size + m]);
    float* sums = partials + 2 * rows + static_cast<size_t>(m) * value_dim;  // of the first part
    for (int p = 0; p < parts; ++p) {
      const float shrink = vexp(splat(partials[p * size + m] - peak))[0];
      total += partials[p * size + rows + m] * shrink;
      const float* from = sums + p * size;
      for (int d = 0; d < value_dim; d += kLanes) {
        store(sums + d, p == 0 ? load(from + d) * splat(shrink) : load(sums + d) + load(from + d) * splat(shrink));
      }
    }
    writer.write_out(m, sums, total);
  }
}

}  // namespace

#endif  // LLMJAX_ATTENTION_KERNEL_H_
