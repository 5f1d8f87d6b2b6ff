// What the objects compiled for each instruction set offer to the code that is compiled once.

#ifndef LLMJAX_KERNELS_H_
#define LLMJAX_KERNELS_H_

#include <cstddef>
#include <cstdint>

namespace llmjax {

struct Recurrence;
struct SelectiveScan;
struct Convolution;
struct Stretch;

enum class Type : int { kF32, kBf16, kF16, kInt8, kE4M3, kE5M2 };

inline size_t size_of(Type type) { return type == Type::kF32 ? 4 : type <= Type::kF16 ? 2 : 1; }

// value = stored * scale + zero.
struct Affine {
  float scale = 1, zero = 0;
};

// One call of attention: everything its tasks share. Letters as in kernels/attention/types.py.
struct Attention {
  int heads, kv_heads, head_dim, value_dim, page_size;
  Type activations, cache;
  float scale, softcap;  // softcap 0: none
  int window;            // 0: none
  bool causal;           // false: keys after a query are visible too
  const void* q;         // [T, H, h]
  const float* sinks;    // [H] or null
  void* out;             // [T, H, size of a value]
  char* pages;           // [N, records, K] records: page_size rows of h elements and their scales
  // Of a page and a head: key and value; or the key alone, whose first elements are the value. Then all heads read the
  // same one, and kv_heads says in how many parts they are computed.
  int records;
  size_t record_bytes;
  bool token_scales;  // page_size f32 at the end of each record
  Affine keys, values;  // of all tokens, where there are no token_scales
  int filled = 0;       // the number of zeros at the end of each query, key and value; products may leave them out

  int group() const { return heads / kv_heads; }
  bool latent() const { return records == 1; }
  // `part` 0: keys, 1: values.
  char* record(int page, int part, int kv_head) const {
    if (latent()) return pages + static_cast<size_t>(page) * record_bytes;
    return pages + ((static_cast<size_t>(page) * 2 + part) * kv_heads + kv_head) * record_bytes;
  }
};

// Consecutive queries of one request.
struct Queries {
  int first_token;     // of q and out
  int first_position;  // of first_token in its request
  float* partial;      // null: the task writes out; else where their online-softmax state goes, for `attention_merge`
};

// The query heads of one key/value head over some keys: for queries of one request, or of several whose pages are the
// same there and which all see all of these keys. What comes out for a request does not depend on the others.
struct AttentionTask {
  const Queries* members;
  int num_members;
  int queries;  // tokens of each member
  bool single;  // each is its request's only one; others are computed in one way, however few they are
  int kv_head;
  int key_begin, key_end;
  bool first_keys;            // takes the sinks in
  const int32_t* pages;       // a row of the page table
  const AttentionTask* next;  // what to fetch ahead; or null
};

// Floats of a member's partial state: peak and total of each query, then the weighted sums.
inline size_t partial_size(const Attention& call, int queries) {
  return static_cast<size_t>(queries) * call.group() * (2 + call.value_dim);
}

// y[t, o] = sum_i x[t, i] * weight[o, i] + bias[o] + residual[t, o].
struct Linear {
  int rows, size_in, size_out;
  int program_rows;       // see Rows
  Type type;              // of the weight: kF32, kBf16 or kF16
  const float* x;         // [rows, size_in]
  const void* weight;     // [size_out, size_in]
  const float* bias;      // [size_out] or null
  const float* residual;  // [rows, size_out] or null
  float* y;               // [rows, size_out]
};

// What the adapters of `places` places, each of rank `rank`, change of rows of a product.
struct Adapted {
  int places, rank, size_in, size_out;
  Type type;             // of a and b
  const float* x;        // [rows, size_in]
  const void *a, *b;     // [places * rank, size_in], [places * rank, size_out]
  const float* bias;     // [size_out], that y has in it, and gains do not multiply; or null
  const float* vectors;  // [2 * places, size_out]: a bias of each place, then its gains less one; read where they are special
  float* shrunk;         // [rows, rank]
  float* y;              // [rows, size_out]
};

// The rows with the adapter of a place.
struct AdaptedRows {
  int place;  // from 0
  const int32_t* tokens;
  int count;
  bool special;  // it has a bias or gains
};

// RMS norm, or layer norm (contract: kernels/norm.py).
struct Norm {
  const float* weight;  // null: no norm
  float eps;
  bool plus_one;
  bool centered = false;  // the mean is subtracted first: a layer norm
  const float* bias = nullptr;
};

enum class Activation : int { kSilu, kTanhGelu, kQuickGelu, kClampedSwiGLU, kGelu, kNormalCdf, kRelu, kSquaredRelu, kNumber };

// Rotary position embedding of `heads` heads of a token (contract: kernels/rope.py), each normed before.
struct Rotation {
  int heads, head_dim, half;  // rotary entries / 2
  bool interleaved;
  const float *cos, *sin;  // [half]
  Norm norm;
};

// A row to sample from (contract: llmjax/sampling/draw.py).
struct SampleRow {
  const float* x;  // [size]
  int size;
  uint32_t key[2];
  float temperature, top_p, min_p;
  int top_k;
};

// Attention over pages.
struct AttentionKernels {
  int lanes;          // head sizes are multiples of this
  int lanes_of_bf16;  // and of this, where bf16 is to be multiplied as such if the instruction set can

  // Stores a token's elements of one head, [h] in the activations' type, in a record. `fixed`: as it is for all tokens.
  void (*store)(const Attention&, const void* from, char* record, int offset, Affine fixed);
  size_t (*workspace)(const Attention&, int queries);  // bytes; queries: of all members
  void (*run)(const Attention&, const AttentionTask&, char* workspace);  // workspace: 64-byte aligned
  // Combines the partial states that `parts` tasks with different keys have left of one member, the task's only one;
  // `partials`: one after the other.
  void (*merge)(const Attention&, const AttentionTask&, float* partials, int parts);
};

// Products with plain matrices.
struct LinearKernels {
  int lanes;  // size_in is a multiple of this

  size_t (*workspace)(const Linear&);                                      // bytes, 64-byte aligned
  void (*prepare)(const Linear&, char* workspace);                         // once a call
  void (*run)(const Linear&, const char* workspace, int begin, int end);  // outputs begin..end
};

struct RowKernels {
  // Rows begin..end of [., size]: out = residual + norm(x), residual null: none; out may be x.
  void (*norm_rows)(const Norm&, const float* x, const float* residual, float* out, int size, int begin, int end);
  // out = activation(gate) * up, `up` null: the activation alone; out may be gate.
  void (*gate_rows)(Activation, const float* gate, const float* up, float* out, int size, int begin, int end);
  void (*rotate)(const Rotation&, float* heads);  // in place
  void (*widen)(const uint16_t* from, float* to, int size);  // of bf16
  void (*round)(const float* from, uint16_t* to, int size);
  // The first of the largest entries; 0 where there is a NaN.
  int (*argmax)(const float* x, int size);
  bool (*finite)(const float* x, int size);  // neither NaN nor infinity in the row
  // shrunk = a x, by rows of a, and y = gain * y + b shrunk + bias, by outputs. `ahead`: what a task of the same shape will read
  // of its matrix.
  void (*shrink)(const Adapted&, const AdaptedRows&, int first, int count, const void* ahead);
  void (*expand)(const Adapted&, const AdaptedRows&, int begin, int end, const void* ahead);
  int (*sample)(const SampleRow&, float* workspace);  // workspace: 3 * size + 48 floats, 64-byte aligned

  // Of recurrent mixers (recurrent.h): columns begin..end of a head's state, and channels begin..end of states of channels
  // and of a convolution.
  void (*recur)(const Recurrence&, const Stretch&, int head, int begin, int end,
                float* workspace);  // by_channel: (3 * kTokenBlock + 1) * key_dim floats
  void (*selective_scan)(const SelectiveScan&, const Stretch&, int begin, int end, float* workspace);  // 2 * state_dim floats a channel
  void (*convolve)(const Convolution&, const Stretch&, int begin, int end, float* workspace);  // 2 * width floats a channel
};

// Of the best instruction set of this machine, or the one that is forced. Sizes that the widest vectors do not divide get
// narrower ones; null: no vectors divide them.
const AttentionKernels* find_attention_kernels(int divisible);
const LinearKernels* find_linear_kernels(int divisible);
const RowKernels& find_row_kernels();

// From narrow to wide.
int isa_count();
const char* isa_name(int isa);
bool isa_usable(int isa);    // this machine has it, and the library is compiled for it
bool force_isa(int isa);     // from now on, for all calls; -1: the best again. False: it is not usable
int forced_isa();            // -1: none

}  // namespace llmjax

#endif  // LLMJAX_KERNELS_H_
